"""Tasks by name: `getattr(tasks, name)(**kwargs)` gives a `Task`."""

from rlvr_jax.data.curriculum import curriculum
from rlvr_jax.data.jsonl import jsonl
from rlvr_jax.data.mixture import mixture
from rlvr_jax.data.published.from_files import published
from rlvr_jax.data.reasoning_gym import reasoning_gym
from rlvr_jax.data.steps import steps
from rlvr_jax.data.tour import tour

__all__ = ["curriculum", "jsonl", "mixture", "published", "reasoning_gym", "steps", "tour"]
