"""GSPO on a mixture with gated DeltaNets: Qwen3.5-35B-A3B, four updates per refresh.

This is the recipe of gspo_qwen3_30b_a3b for the newer network. The network has 256 experts, of
which a token uses 8, and one expert that all tokens share. Three of four layers have recurrent
states instead of keys and values. **open**: the settings that gspo_qwen3_30b_a3b marks as open; no
paper states a recipe for this model.

  python -m rlvr_jax.main --distributed \\
    --config=configs/full_size/gspo_qwen35_35b_a3b.py:v5p:2x4x4 \\
    --workdir=/mnt/rlvr_jax/runs/qwen35_moe \\
    --config.model.checkpoint=gs://BUCKET/Qwen3.5-35B-A3B \\
    --config.task.kwargs.data_dir=gs://BUCKET/deepscaler \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/aime_2024

The network has two key/value heads, so `generation_mesh.tensor` is at most 2.
Card: docs/methods/gspo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import gspo_qwen3_30b_a3b

# The settings of gspo_qwen3_30b_a3b with another generation mesh; --mode=tune has not checked them.
SLICES = gspo_qwen3_30b_a3b.SLICES


def get_config(topology: str = "") -> ConfigDict:
  c = gspo_qwen3_30b_a3b.get_config(topology)
  c.model.preset = "qwen3.5_35b_a3b"
  if topology:
    c.generation_mesh.data, c.generation_mesh.tensor = 16, 2
  return c
