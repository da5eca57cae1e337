"""Tasks that contain no other tasks, by name: the possible parts of a mixture or a curriculum."""

from rlvr_jax.data.guess import guess
from rlvr_jax.data.jsonl import jsonl
from rlvr_jax.data.published.from_files import published
from rlvr_jax.data.reasoning_gym import reasoning_gym
from rlvr_jax.data.steps import steps
from rlvr_jax.data.sums import sums
from rlvr_jax.data.tour import tour

__all__ = ["guess", "jsonl", "published", "reasoning_gym", "steps", "sums", "tour"]
