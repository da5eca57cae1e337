"""Rollouts of one turn, straight from an engine: nothing is graded or stored."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from rlvr_jax.rollouts.engine import Engine, Rollout
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.sampler import row_keys
from rlvr_jax.types import Params, Prompts


def begin(programs: EnginePrograms, params: Params) -> Engine:
  """An engine that has these weights, from `EnginePrograms.load`, and nothing to decode."""
  engine = Engine(programs)
  engine.swap(0, params)
  return engine


def groups(engine: Engine, prompts: Prompts, key: jax.Array, size: int) -> list[list[Rollout]]:
  """For each prompt, `size` rollouts that have not begun; `place` is (prompt, rollout)."""
  rows = zip(
    prompts.tokens, prompts.lengths, row_keys(key, len(prompts.lengths), size), strict=True
  )
  return [
    [engine.rollout((p, g), np.asarray(row[len(row) - n :]), keys[g]) for g in range(size)]
    for p, (row, n, keys) in enumerate(rows)
  ]


def bursts(engine: Engine, waiting: Iterable[Sequence[Rollout]]) -> Iterator[list[Rollout]]:
  """Yields, after every burst, the rollouts that have ended, until all groups have."""
  left = collections.deque(waiting)
  while left or engine.busy:
    while left and engine.free:
      engine.begin(left.popleft())
    yield engine.burst()


def sample(engine: Engine, waiting: Iterable[Sequence[Rollout]]) -> list[Rollout]:
  """All rollouts of these groups, ended, in the order of their places."""
  ended = (rollout for burst in bursts(engine, waiting) for rollout in burst)
  return sorted(ended, key=lambda rollout: rollout.place)
