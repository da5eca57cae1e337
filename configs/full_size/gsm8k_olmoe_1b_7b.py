"""GRPO on GSM8K from OLMoE-1B-7B-Instruct, all parameters: a mixture of experts on a small slice.

OLMoE (arXiv:2409.02060) has 64 experts in each of 16 layers; in each layer a token uses 8 of them.
It has 6.9 B parameters, of which a token uses 1.3 B. The router's weights are not normalized over
the chosen experts. Routes are replayed: updates use the experts that the sampler chose
(docs/experts.md). The task is grade-school word problems (arXiv:2110.14168) as published, graded by
the last number. The settings are ours and untuned.

  python -m rlvr_jax.main --distributed --config=configs/full_size/gsm8k_olmoe_1b_7b.py:v5e:4x8 \\
    --workdir=/mnt/rlvr_jax/runs/olmoe \\
    --config.model.checkpoint=gs://BUCKET/OLMoE-1B-7B-0924-Instruct \\
    --config.task.kwargs.data_dir=gs://BUCKET/GSM8K

Parameters, gradient and Adam's moments in float32 are 111 GB.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import base

SLICES = {
  "v5p:2x2x1": {
    "mesh.fsdp": 4,
    "batch.tokens_per_micro_batch": 16_384,
    "compiler_options.training": base.WHOLE_COLLECTIVES,
  },
  "v5e:4x8": {
    "mesh.fsdp": 32,
    "batch.tokens_per_micro_batch": 8192,
    "compiler_options.training": base.WHOLE_COLLECTIVES,
    "generation_mesh.data": 8,
    "generation_mesh.fsdp": 1,
    "generation_mesh.tensor": 4,
    "generation_mesh.same_devices": True,
  },
}


def get_config(topology: str = "") -> ConfigDict:
  c = base.get_config()
  c.num_updates = 400
  c.model.preset = "olmoe_1b_7b"
  c.model.routing = "replayed"
  c.task = dict(
    name="published",
    kwargs=dict(
      dataset="gsm8k",
      data_dir="",  # required
      split="train",  # "": nothing to train on, for --mode=eval
    ),
  )
  c.max_prompt_length = 256
  c.max_response_length = 1024
  c.batch.prompts, c.batch.group_size = 64, 16
  c.batch.tokens_per_micro_batch = 8192
  c.evaluation.every = 50
  c.evaluation.num_samples = 1
  c.evaluation.ks = (1,)
  return base.set_for_slice(c, SLICES, topology)
