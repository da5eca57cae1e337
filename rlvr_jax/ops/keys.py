"""Random keys from a seed, a purpose and a counter, so that a resumed run repeats no key."""

from __future__ import annotations

import jax
import numpy as np

from rlvr_jax.types import Array

# Changing a number changes the randomness of every run.
_PURPOSES = {
  "init": 0,
  "rollout": 1,
  "evaluation": 2,
  "initial_entropy": 3,
  "reweighting": 4,
  "diagnostics": 5,
  "source": 6,
}


def key_for(seed: int, purpose: str, counter: int | Array = 0) -> Array:
  """The key of the `counter`-th use of randomness for `purpose`.

  Raises:
    ValueError: unknown purpose.
  """
  return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _number(purpose)), counter)


def seeds_for(seed: int, purpose: str, counter: int, count: int) -> list[int]:
  """Seeds below 2³² for the host's use, such as seeds of environments.

  Args:
    seed, purpose, counter: as for `key_for`.
    count: the number of seeds.
  """
  words = np.random.SeedSequence((seed, _number(purpose), counter)).generate_state(count)
  return words.tolist()


def _number(purpose: str) -> int:
  if purpose not in _PURPOSES:
    raise ValueError(f"purpose = {purpose!r} is unknown; choose one of {sorted(_PURPOSES)}")
  return _PURPOSES[purpose]
