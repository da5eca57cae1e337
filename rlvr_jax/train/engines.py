"""The engines that sample a run's rollouts, one per policy and distribution."""

from __future__ import annotations

import ml_collections

from rlvr_jax.data import Tokenizer
from rlvr_jax.models.functional import Model
from rlvr_jax.rollouts.scheduler import Engine
from rlvr_jax.train import sharding
from rlvr_jax.types import Sampling


def make_engine(
  config: ml_collections.ConfigDict,
  tokenizer: Tokenizer,
  model: Model,
  sampling: Sampling,
  *,
  prompts: int,
  group_size: int,
) -> Engine:
  """The engine for batches of `prompts` prompts; `model`: on the mesh that generates."""
  return Engine(
    model,
    sampling,
    slots=config.sampling.slots or prompts * group_size,
    prefill_rows=prompts,
    max_prompt_length=config.max_prompt_length,
    max_new_tokens=config.max_response_length,
    stop_tokens=tokenizer.stop_ids,
    pad_token=tokenizer.pad_id,
    to_host=sharding.to_host,
  )
