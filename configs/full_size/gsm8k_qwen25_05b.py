"""GRPO on GSM8K from Qwen2.5-0.5B-Instruct, all parameters: a starting point on one small chip.

The task is grade-school word problems (arXiv 2110.14168) as published: 7473 for training, 1319 held
out, graded by the last number. The sizes are chosen to fit chips of 16 GB: one chip of v5e, or the
eight chips of v5e:2x4. The other settings are ours and untuned; the KL term is off. See
--config=configs/full_size/base.py.

  python -m rlvr_jax.main --config=configs/full_size/gsm8k_qwen25_05b.py --workdir=runs/gsm8k_05b \\
    --config.model.checkpoint=Qwen2.5-0.5B-Instruct --config.task.kwargs.data_dir=GSM8K

The folder Qwen2.5-0.5B-Instruct holds the checkpoint, and GSM8K holds train.jsonl and test.jsonl.
Settings tuned for v5e:2x4: gsm8k_qwen25_05b.py:v5e:2x4.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = {  # found by --mode=tune; see docs/tuning.md
  "v5e:2x4": {
    "mesh.data": 2,
    "mesh.fsdp": 4,
    "model.overrides.remat": "dots",
    "generation_mesh.data": 4,
    "generation_mesh.fsdp": 1,
    "generation_mesh.tensor": 2,
    "generation_mesh.same_devices": True,
  },
}


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 400
  c.model.preset = "qwen2.5_0.5b"
  c.task = dict(
    name="published",
    kwargs=dict(
      dataset="gsm8k",
      data_dir="",  # required
      split="train",  # "": nothing to train on, for --mode=eval
    ),
  )
  c.max_prompt_length = 256
  c.max_response_length = 512
  c.batch.prompts, c.batch.group_size = 32, 8
  c.batch.tokens_per_micro_batch = 4096  # a row per chip: short responses leave few rows empty
  c.evaluation.every = 50
  c.evaluation.num_samples = 1
  c.evaluation.ks = (1,)
  c.grading.num_workers = 0
  return base.set_for_slice(c, SLICES, topology)
