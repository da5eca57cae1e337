"""Tasks by name: `getattr(tasks, name)(**kwargs)` gives a `Task`."""

from rlvr_jax.data.from_files import published
from rlvr_jax.data.generated import reasoning_gym
from rlvr_jax.data.mixing import mixture

__all__ = ["mixture", "published", "reasoning_gym"]
