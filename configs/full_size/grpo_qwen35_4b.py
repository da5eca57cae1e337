"""GRPO on Qwen3.5-4B: three of four layers (gated DeltaNets) have a recurrent state, no KV cache.

The batch and the lengths are those of p3o_qwen3_4b, so that the two recipes can be compared; their
networks are about equally large. A refresh has 256 problems with 4 rollouts each; prompts have up
to 4096 tokens, responses up to 2048. **open**: learning rate, clip range and lengths; no paper
states a recipe for this model.

  python -m rlvr_jax.main --config=configs/full_size/grpo_qwen35_4b.py \\
    --workdir=/mnt/rlvr_jax/runs/qwen35 \\
    --config.model.checkpoint=gs://BUCKET/Qwen3.5-4B \\
    --config.task.kwargs.data_dir=gs://BUCKET/deepscaler \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/aime_2024

A slot holds one response during sampling. It takes 51.5 MB for its recurrent states, however many
tokens it holds, and 32 KB for the keys and values of each token. Settings for a slice:
grpo_qwen35_4b.py:v5p:2x2x4 and grpo_qwen35_4b.py:v5e:8x8. On v5e, remat="dots" would take 16.1 GiB
of a chip's 15.75.
Card: docs/methods/grpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = {  # those of p3o_qwen3_4b, for lognormal(mean=800, prompt=150); not searched for
  "v5p:2x2x4": {
    "mesh.data": 2,
    "mesh.fsdp": 4,
    "mesh.tensor": 2,
    "generation_mesh.data": 4,
    "generation_mesh.fsdp": 1,
    "generation_mesh.tensor": 4,
    "generation_mesh.same_devices": True,
    "sampling.slots": 1024,
    "model.overrides.remat": "dots",
    "compiler_options.training": base.FUSED_GATHERS,
  },
  "v5e:8x8": {
    "mesh.data": 4,
    "mesh.fsdp": 4,
    "mesh.tensor": 4,
    "sampling.slots": 512,
    "model.overrides.remat": "full",
    "compiler_options.training": base.FUSED_GATHERS,
  },
}


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 500
  c.model.preset = "qwen3.5_4b"
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
  c.max_prompt_length = 4096
  c.max_response_length = 2048
  c.batch.prompts, c.batch.group_size = 256, 4
  # Most prompts are far shorter than 4096: a row holds 150 tokens and their 4 rollouts of 2048.
  c.batch.tokens_per_micro_batch = c.batch.tokens_per_row = 9216
  c.loss = "ppo_clip(epsilon_low=0.2, epsilon_high=0.28)"
  c.learning_rate = "constant(peak=1e-6)"
  return base.set_for_slice(c, SLICES, topology)
