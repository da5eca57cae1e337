"""Tasks by name: `getattr(tasks, name)(**kwargs)` gives a `Task`."""

from rlvr_jax.data.curriculum import curriculum
from rlvr_jax.data.mixture import mixture
from rlvr_jax.data.plain_tasks import guess, jsonl, published, reasoning_gym, steps, sums, tour

__all__ = [
  "curriculum",
  "guess",
  "jsonl",
  "mixture",
  "published",
  "reasoning_gym",
  "steps",
  "sums",
  "tour",
]
