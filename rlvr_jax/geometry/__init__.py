"""Gram matrices of per-rollout gradient features. Each function in `__all__` makes a `GramFn`."""

from rlvr_jax.geometry.base import FEATURES as FEATURES
from rlvr_jax.geometry.base import GramContext as GramContext
from rlvr_jax.geometry.base import GramFn as GramFn
from rlvr_jax.geometry.per_rollout import num_selected as num_selected
from rlvr_jax.geometry.per_rollout import per_rollout as per_rollout
from rlvr_jax.geometry.per_rollout import per_rollout_features as per_rollout_features
from rlvr_jax.geometry.sketch import sketch as sketch
from rlvr_jax.geometry.sketch import sketch_with_error as sketch_with_error
from rlvr_jax.geometry.streaming import bytes_moved as bytes_moved
from rlvr_jax.geometry.streaming import streaming as streaming

__all__ = ["per_rollout", "sketch", "streaming"]
