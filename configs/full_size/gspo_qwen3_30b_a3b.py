"""GSPO on the mixture for which it was made: Qwen3-30B-A3B, four updates per refresh.

Source: "Group Sequence Policy Optimization" (arXiv:2507.18071). The paper trains a cold-start model
of Qwen3-30B-A3B-Base, and splits each batch of rollouts into four mini-batches. A response's ratio
is clipped to [1 − 3e-4, 1 + 4e-4], advantages are normalized by group, and the loss is the mean
over responses. The paper says that GRPO needs a replay of routes, and that GSPO does not. So
updates recompute the routes here. The sampler's routes are recorded, so that `routing/changed`
shows which share of the choices differs. To replay routes: --config.model.routing=replayed.
**open**: numbers of problems and rollouts, lengths, optimizer and learning rate, which are our
choices below.

  python -m rlvr_jax.main --distributed \\
    --config=configs/full_size/gspo_qwen3_30b_a3b.py:v5p:2x4x4 \\
    --workdir=/mnt/rlvr_jax/runs/gspo \\
    --config.model.checkpoint=gs://BUCKET/Qwen3-30B-A3B \\
    --config.task.kwargs.data_dir=gs://BUCKET/deepscaler \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/aime_2024

Parameters, gradient and Adam's moments in float32 are 488 GB, so that 32 chips of v5p are needed.
On 256 chips of v5e, `mesh.tensor` would have to be at least 8, since a batch of 32 problems allows
at most 32 for data · fsdp. But the network's 4 key/value heads allow at most 4 for `mesh.tensor`,
and 8 would also cut experts too narrow. No settings for v5e have been found.
Card: docs/methods/gspo.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = {
  "v5p:2x4x4": {
    "mesh.fsdp": 32,
    "batch.tokens_per_row": 9216,
    "batch.tokens_per_micro_batch": 18_432,
    "compiler_options.training": base.WHOLE_COLLECTIVES,
    "generation_mesh.data": 8,
    "generation_mesh.fsdp": 1,
    "generation_mesh.tensor": 4,
    "generation_mesh.same_devices": True,
  },
}


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 1000
  c.model.preset = "qwen3_30b_a3b"
  c.model.record_routes = True
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
  c.batch.prompts, c.batch.group_size = 32, 16
  c.loss = "gspo"
  c.aggregation = "sequence_mean"
  c.schedule = "updates_per_refresh(batches=4)"
  return base.set_for_slice(c, SLICES, topology)
