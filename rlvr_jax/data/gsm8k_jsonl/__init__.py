"""GSM8K from its published JSONL files, as a tensorflow-datasets builder without TensorFlow."""

from rlvr_jax.data.gsm8k_jsonl.builder import Gsm8kJsonl as Gsm8kJsonl
from rlvr_jax.data.gsm8k_jsonl.builder import load_records as load_records
from rlvr_jax.data.gsm8k_jsonl.builder import read_jsonl as read_jsonl
