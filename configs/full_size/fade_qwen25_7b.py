"""FADE at its paper's size: Qwen2.5-7B writing programs, trained on MBPP, 16 rollouts per problem.

Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490),
whose 7B policy learns to program and is judged on LiveCodeBench. The paper gives α_max = 3,
δ_min = 0.3 and a target entropy of half the initial entropy. **open**, since the paper's
values could not be looked up: 32 problems per update with 16 rollouts each, responses up to 2048
tokens, AdamW at 1e-6. MBPP has 374 training problems, so that 1000 updates train on each of them 85
times.

  python -m rlvr_jax.main --config=configs/full_size/fade_qwen25_7b.py \\
    --workdir=/mnt/rlvr_jax/runs/fade \\
    --config.model.checkpoint=gs://BUCKET/Qwen2.5-7B \\
    --config.task.kwargs.data_dir=gs://BUCKET/mbpp

Generated programs run in a sandbox on the hosts (docs/graders.md). Settings tuned for a slice:
fade_qwen25_7b.py:v5p:2x2x4 and fade_qwen25_7b.py:v5e:8x8. On v5e:8x8 without them, add
--config.mesh.tensor=4. Card: docs/methods/fade.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = base.SLICES_OF_7B


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 1000
  c.task = dict(
    name="published",
    kwargs=dict(
      dataset="mbpp",
      data_dir="",  # required
      split="train",  # "": nothing to train on, for --mode=eval
    ),
  )
  c.max_prompt_length = 1024
  c.max_response_length = 2048
  c.advantage = "fade"
  return base.set_for_slice(c, SLICES, topology)
