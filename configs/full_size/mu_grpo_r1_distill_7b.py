"""μ-GRPO at its paper's size: DeepSeek-R1-Distill-Qwen-7B on DeepScaleR in four stages.

Source: "How Off-Policy Can GRPO Be? Mu-GRPO for Efficient LLM Reinforcement Learning"
(arXiv:2605.17570). As in the paper, there are 4096 updates in four stages of μ = 1024 updates,
ratios are clipped to [0, 5], and there is a veto on stale tokens. **open**, since the
paper's values could not be looked up: responses up to 8192 tokens, 8 rollouts per problem, and
AdamW at 1e-6. These three are from the first phase of the DeepScaleR recipe. We chose 16 problems
per update and the veto's threshold κ.

  python -m rlvr_jax.main --config=configs/full_size/mu_grpo_r1_distill_7b.py \\
    --workdir=/mnt/rlvr_jax/runs/mu_grpo \\
    --config.model.checkpoint=gs://BUCKET/DeepSeek-R1-Distill-Qwen-7B \\
    --config.task.kwargs.data_dir=gs://BUCKET/deepscaler \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/aime_2024

A stage's rollouts, 1024 batches, are in the workdir's store. Settings tuned for a slice:
mu_grpo_r1_distill_7b.py:v5p:2x2x4 and mu_grpo_r1_distill_7b.py:v5e:8x8. On v5e:8x8 without them,
add --config.mesh.tensor=4. Card: docs/methods/mu_grpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = base.SLICES_OF_7B


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 4096
  c.model.preset = "deepseek_r1_distill_qwen_7b"
  c.task = dict(
    name="published",
    kwargs=dict(
      dataset="deepscaler",
      data_dir="",  # required
      split="train",  # "": nothing to train on, for --mode=eval
      held_out_dataset="aime_2024",
      held_out_data_dir="",  # required
    ),
  )
  c.max_response_length = 8192
  c.batch.prompts, c.batch.group_size = 16, 8
  c.schedule = "stages"
  c.loss = "ppo_clip(epsilon_low=1.0, epsilon_high=4.0)"  # the interval [0, 5]
  c.veto.enabled = True
  c.evaluation.every = 256
  return base.set_for_slice(c, SLICES, topology)
