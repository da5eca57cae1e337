"""The settings of sampling, in their own module so that configurations are read without jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# At lower temperatures, logits / temperature lose digits in float32 and may be infinite.
LEAST_TEMPERATURE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """The settings of the distribution from which tokens are sampled; static under jit."""

  temperature: float = 1.0  # 0.001 or more; 0 is greedy decoding
  top_k: int = 0  # keep the k most probable tokens; 0 keeps all
  top_p: float = 1.0  # keep the smallest set of tokens with this total probability; 1 keeps all
  min_p: float = 0.0  # keep tokens with at least min_p times the largest probability; 0: all


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
  """The settings in a section such as `config.sampling`, whose other fields are ignored."""
  return Sampling(**{field.name: settings[field.name] for field in dataclasses.fields(Sampling)})
