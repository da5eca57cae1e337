"""A small network and engines that sample with it, which a process of tests makes once."""

import functools

import jax

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import Sampling

V, S, PAD = 24, 6, 0  # vocabulary, longest prompt
LONG = 90  # tokens of a response: several bursts, whose keys are read from several blocks
CONFIG = TransformerConfig(
  vocab_size=V,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  qk_norm=True,
  final_soft_cap=15.0,
  sliding_window=4,
  sliding_layers=(True, False),
)
MODEL = transformer(CONFIG)


@functools.cache
def trained(version=0):
  """Parameters of a version; larger embeddings make a peaked, interesting distribution."""
  params = MODEL.init(jax.random.key(version))
  return {**params, "embedding": params["embedding"] * 2.5}


def programs(sampling=None, *, stop_tokens=(3, 11), slots, length, cache_format=""):
  """Compiled once for all tests, however they write the arguments; three prompts a prefill."""
  return _programs(sampling or Sampling(), stop_tokens, slots, length, cache_format)


@functools.cache
def _programs(sampling, stop_tokens, slots, length, cache_format):
  return EnginePrograms(
    MODEL,
    sampling,
    slots=slots,
    prefill_rows=3,
    max_prompt_length=S,
    max_new_tokens=length,
    stop_tokens=stop_tokens,
    pad_token=PAD,
    cache_format=cache_format,
  )


def few_slots(cache_format=""):
  """Three slots, which long responses leave at different times."""
  return programs(stop_tokens=(3,), slots=3, length=LONG, cache_format=cache_format)
