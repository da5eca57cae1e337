"""GRPO on Qwen3.5-4B: three layers of four have a gated DeltaNet, which keeps a state, not keys.

Sizes are those of p3o_qwen3_4b, whose network has as many parameters, so that the two compare: 256
problems per refresh with 4 rollouts each, prompts up to 4096 tokens, responses up to 2048.
**open**: rate, clip and lengths; no paper states a recipe for this model.

  python -m rlvr_jax.main --config=configs/full_size/grpo_qwen35_4b.py:v5p:2x2x4 \\
    --workdir=/mnt/rlvr_jax/runs/qwen35 \\
    --config.model.checkpoint=gs://BUCKET/Qwen3.5-4B \\
    --config.task.kwargs.data_dir=gs://BUCKET/deepscaler \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/aime_2024

A slot takes 51.5 MB for its states, whatever its length, and 32 KB for the keys and values of each
token. Card: docs/methods/grpo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base, p3o_qwen3_4b

SLICES: dict[str, dict] = {}


def get_config(topology: str = "") -> ConfigDict:
  c = p3o_qwen3_4b.get_config()
  c.model.preset = "qwen3.5_4b"
  c.model.overrides.rope_theta = 10_000_000.0
  c.loss = "ppo_clip(epsilon_low=0.2, epsilon_high=0.28)"
  c.learning_rate = "constant(peak=1e-6)"
  c.max_gradient_norm = 1.0
  return base.set_for_slice(c, SLICES, topology)
