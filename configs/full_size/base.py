"""Settings that the full-size recipes share: a published checkpoint, chat prompts, all chips.

This is not a complete recipe. Four recipes that start from it have the settings of four papers at
full size: salt_qwen25_math_7b, p3o_qwen3_4b, fade_qwen25_7b, mu_grpo_r1_distill_7b. These four mark
as **open** the settings that neither a paper nor its authors' code states. Two more recipes fit on
one chip, and are the ones to begin with: gsm8k_qwen25_05b and gsm8k_qwen25_15b_lora.
gspo_qwen3_30b_a3b and gsm8k_olmoe_1b_7b train mixtures of experts, and grpo_qwen35_4b trains gated
DeltaNets. No recipe has been trained, since no accelerator was available. This command prints the
memory per chip, and needs no chip (v5p:2x2x4 has 16 chips, and is v5p-32 in Cloud's names):

  python -m rlvr_jax.main --mode=fits --config=configs/full_size/base.py --topology=v5p:2x2x4

The command computes with shapes alone, so `model.checkpoint` can stay empty. To train, give the
checkpoint, the data, and a workdir that all hosts can access:

  python -m rlvr_jax.main --distributed --config=configs/full_size/salt_qwen25_math_7b.py \\
    --config.model.checkpoint=gs://BUCKET/Qwen2.5-Math-7B --workdir=/mnt/rlvr_jax/runs/salt \\
    --config.task.kwargs.data_dir=gs://BUCKET/MATH \\
    --config.task.kwargs.held_out_data_dir=gs://BUCKET/MATH-500

Some recipes have settings for a slice, which --mode=tune found. Add the slice to the file's name:
--config=configs/full_size/fade_qwen25_7b.py:v5p:2x2x4.

A run uses all chips: `mesh.fsdp` takes the chips that the other axes leave. `mesh.tensor` must
divide the model's key/value heads, 4 in Qwen2.5 7B and 8 in Qwen3 4B. For v5e:8x8, 64 chips of 16
GB, each recipe says what to add. On 256 chips of v5p, add --config.mesh.tensor=4
--config.batch.prompts=64.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from rlvr_jax.configs import base

# Weights are gathered and gradients scattered at once, not in pieces between small products.
WHOLE_COLLECTIVES = (
  "xla_tpu_enable_windowed_einsum_for_all_gather=false"
  " xla_tpu_enable_windowed_einsum_for_reduce_scatter=false"
)
# Several gathers of weights run at a time, beside products.
FUSED_GATHERS = (
  "xla_tpu_enable_windowed_einsum_for_all_gather=false xla_enable_async_all_gather=true"
  " xla_tpu_enable_async_collective_fusion=true"
  " xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
  " xla_tpu_enable_async_collective_fusion_multiple_steps=true"
)

# Settings for Qwen2.5 7B with rows of 9216 tokens, for one response of 8192 or several of 2048.
SLICES_OF_7B = {  # found by --mode=tune; see docs/tuning.md
  "v5p:2x2x4": {
    "mesh.fsdp": 16,
    "batch.tokens_per_row": 9216,
    "batch.tokens_per_micro_batch": 9216,
    "model.overrides.remat": "dots",
    "compiler_options.training": WHOLE_COLLECTIVES,
    "generation_mesh.data": 4,
    "generation_mesh.fsdp": 1,
    "generation_mesh.tensor": 4,
    "generation_mesh.same_devices": True,
  },
  "v5e:8x8": {
    "mesh.fsdp": 16,
    "mesh.tensor": 4,
    "batch.tokens_per_row": 9216,
    "batch.tokens_per_micro_batch": 9216,
    "model.overrides.remat": "dots",
    "compiler_options.training": WHOLE_COLLECTIVES,
  },
}


def get_config() -> ConfigDict:
  c = base.get_config()
  c.model.preset = "qwen2.5_7b"
  c.model.checkpoint = ""  # required
  c.model.overrides = dict(
    compute_dtype="bfloat16",
    param_dtype="float32",
    remat="full",  # keeps the layers' inputs only
  )
  c.tokenizer = "checkpoint"
  c.prompts.format = "chat"
  c.prompts.too_long = "drop"
  c.max_prompt_length = 1024
  c.max_response_length = 8192
  c.warm_start.num_steps = 0

  c.mesh = dict(data=1, fsdp=-1, tensor=1)  # chips
  c.batch = dict(prompts=32, group_size=16, tokens_per_micro_batch=10_240, tokens_per_row=0)
  c.optimizer = "adamw(weight_decay=0.1)"
  c.learning_rate = "constant(peak=1e-6)"
  c.gram = "streaming(block_elements=1_000_000_000)"  # at most 4 GB

  c.grading.num_workers = 16
  c.grading.timeout_s = 10.0
  c.evaluation.every = 100
  c.evaluation.num_samples = 8
  c.evaluation.ks = (1, 8)
  c.evaluation.batch_prompts = 64
  c.evaluation.sampling.temperature = 0.6
  c.evaluation.sampling.top_p = 0.95
  c.checkpoint.every = 20
  c.store.keep_used = False
  return c


def set_for_slice(
  c: ConfigDict, slices: Mapping[str, Mapping[str, Any]], topology: str
) -> ConfigDict:
  """Sets fields to the values that --mode=tune has found for a TPU slice.

  Args:
    c: the configuration, which is changed in place and returned.
    slices: topology → dotted name of a field → its value.
    topology: a key of `slices`, such as "v5p:2x2x4"; "" leaves c unchanged, for any machine.
  Raises:
    ValueError: there are no settings for this slice.
  """
  if topology and topology not in slices:
    others = f", only for {sorted(slices)}" if slices else ""
    raise ValueError(
      f"there are no settings for the slice {topology!r}{others}: leave the slice out, or find"
      " settings with --mode=tune"
    )
  c.update_from_flattened_dict(slices.get(topology, {}))
  return c
