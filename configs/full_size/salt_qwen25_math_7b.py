"""SALT at its paper's size: Qwen2.5-Math-7B on MATH, 512 problems × 16 rollouts per refresh.

Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make Them
Matter" (arXiv:2606.05800). The authors' repository trains by the DAPO 7B recipe of verl with SALT
switched on (ρ_s = 1, 1 ≤ k ≤ 64, 0 ≤ α ≤ 1; see configs/salt_grpo.py). A refresh has 512 problems ×
16 rollouts and 16 updates of 32 problems each. The optimizer is AdamW at 1e-6 after 10 warm-up
updates, with decay 0.1; the clip is 0.2 and 0.28. Prompts have up to 2048 tokens and responses up
to 8192, with a linear penalty over their last 4096. Groups that are all right or all wrong are
replaced; to fill n prompts, at most 30·n are sampled. **open**: the number of updates, here 100
refreshes; and how the authors went beyond the 4096 tokens that Qwen2.5-Math-7B was made for (its
config.json). The run warns of this excess.

  python -m rlvr_jax.main --config=configs/full_size/salt_qwen25_math_7b.py \\
    --workdir=/mnt/rlvr_jax/runs/salt \\
    --config.model.checkpoint=gs://BUCKET/Qwen2.5-Math-7B \\
    --config.task.kwargs.data_dir=gs://BUCKET/MATH \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/MATH-500

Without SALT: --config.reweighting=none is DAPO's update. Settings tuned for a slice:
salt_qwen25_math_7b.py:v5p:2x2x4 and salt_qwen25_math_7b.py:v5e:8x8. On v5e:8x8 without them, add
--config.mesh.tensor=4. Card: docs/methods/salt.md; memory per chip: docs/costs.md.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = {
  "v5p:2x2x4": {
    "mesh.data": 1,
    "mesh.fsdp": 8,
    "mesh.tensor": 2,
    "generation_mesh.data": 4,
    "generation_mesh.fsdp": 1,
    "generation_mesh.tensor": 4,
    "generation_mesh.same_devices": True,
    "sampling.slots": 2048,
    "batch.tokens_per_row": 30_720,
    "batch.tokens_per_micro_batch": 30_720,
    "model.overrides.remat": "dots",
    "compiler_options.training": base.WHOLE_COLLECTIVES,
  },
  "v5e:8x8": {
    "mesh.fsdp": 16,
    "mesh.tensor": 4,
    "batch.tokens_per_row": 10_240,
    "batch.tokens_per_micro_batch": 10_240,
    "model.overrides.remat": "dots",
    "compiler_options.training": base.WHOLE_COLLECTIVES,
  },
}


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 1600
  c.model.preset = "qwen2.5_math_7b"
  c.task = dict(
    name="published",
    kwargs=dict(
      dataset="math",
      data_dir="",  # required
      split="train",  # "": nothing to train on, for --mode=eval
      held_out_dataset="math_500",
      held_out_data_dir="",  # required
    ),
  )
  c.mesh.tensor = 2
  c.max_prompt_length = 2048
  c.max_response_length = 8192
  c.schedule = "updates_per_refresh(batches=16)"
  # The authors fill 512 prompts from at most 10 batches of 3 × 512; here 32 are filled at a time.
  c.dynamic_sampling = dict(enabled=True, max_batches=30)
  c.overlong.buffer = 4096
  c.loss = "ppo_clip(epsilon_high=0.28)"
  c.reweighting = "salt"
  return base.set_for_slice(c, SLICES, topology)
