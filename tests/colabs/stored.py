"""Batches in the store of a run, with the arrays that a test chooses."""

import numpy as np

from rlvr_jax.rollouts.batches import Batch, Position
from rlvr_jax.rollouts.group import Group
from rlvr_jax.rollouts.store import RolloutStore


def write(folder, batches):
  """Writes batches into a store.

  Args:
    folder: of the store.
    batches: (version, arrays [P, …] by name, samples of all rollouts) of each.
  """
  with RolloutStore(folder, writable=True) as store:
    for number, (version, arrays, samples) in enumerate(batches):
      P, G, _ = arrays["tokens"].shape
      prompts = {
        "prompts.tokens": np.ones((P, 2), np.int32),
        "prompts.lengths": np.ones(P, np.int32),
      }
      groups = []
      for p in range(P):
        of_group = {name: np.asarray(x[p]) for name, x in (arrays | prompts).items()}
        texts = samples[p * G : (p + 1) * G]
        groups.append(Group(number, p, 0, {version: "f"}, of_group, texts, {}))
      batch = Batch(
        number, groups, Position(number + 1, number + 1), draws=1, prompts=P, tokens=0,
        statistics={}, timings={}, flops=0.0,
      )  # fmt: skip
      store.write(number, groups, batch.info())
