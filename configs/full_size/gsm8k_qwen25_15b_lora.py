"""GRPO on GSM8K from Qwen2.5-1.5B-Instruct with LoRA: a starting point on one small chip.

The recipe is gsm8k_qwen25_05b with a larger model, of which only adapters are trained. The adapters
have rank 32 and change all kernels of the layers. The frozen parameters are bfloat16, as published;
the adapters are float32.

  python -m rlvr_jax.main --config=configs/full_size/gsm8k_qwen25_15b_lora.py \\
    --workdir=runs/gsm8k_15b_lora --config.model.checkpoint=Qwen2.5-1.5B-Instruct \\
    --config.task.kwargs.data_dir=GSM8K

The folder Qwen2.5-1.5B-Instruct holds the checkpoint, and GSM8K holds train.jsonl and test.jsonl.
"""

from ml_collections import ConfigDict

from rlvr_jax.configs.full_size import gsm8k_qwen25_05b
from rlvr_jax.configs.full_size.base import set_for_slice


def get_config(topology: str = "") -> ConfigDict:
  c = gsm8k_qwen25_05b.get_config()
  c.model.preset = "qwen2.5_1.5b"
  c.model.overrides.param_dtype = "bfloat16"
  c.sampling.slots = 128  # that one chip has memory for
  c.lora.rank = 32
  c.lora.alpha = 64.0
  c.optimizer = "adamw"
  c.learning_rate = "constant(peak=2e-5)"
  return set_for_slice(c, {}, topology)
