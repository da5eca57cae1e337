"""What a route to the Gram matrix is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rlvr_jax.types import Array, Forward, Metrics, Params, TrainBatch


class GramContext(NamedTuple):
  """What a route needs to know of the run."""

  model: Any  # as of `Method`, with `config.tied_head`; without sharding constraints
  temperature: float = 1.0  # of the target policy
  mesh: Any = None  # jax.sharding.Mesh with axes (data, fsdp, tensor); None: one device


class GramFn(NamedTuple):
  """A way to the inner products of per-rollout gradient features.

  The feature of rollout i is g_i = ∇_φ(−Σ_t m[i,t] log π[i,t]) for a subset φ of the parameters;
  m is the loss mask before any veto.

  Attributes:
    gram: (trained, frozen, batch, forward, context) → f32[B, B], g_i · g_j, not divided by B,
      rollouts in the order of batch.tokens.reshape(B, T). `frozen` is {} where all parameters are
      trained, `forward` is None where `needs_forward` is False.
    needs_forward: whether `gram` reads `forward`.
    projection: V → f32[V, R], the rows R_v of a random projection of the vocabulary that the
      forward pass is to accumulate, or None.
    cost: (hidden [P, G, T, D], kernel [D, V], context) → what one Gram matrix costs, by the name of
      the metric, as metrics, from shapes and dtypes alone.
    error: as `gram` → f32[], the estimated ‖K̂ − K‖_F/‖K‖_F of a route that is not exact; or None.
  """

  gram: Callable[[Params, Params, TrainBatch, Forward | None, GramContext], Array]
  needs_forward: bool = True
  projection: Callable[[int], Array] | None = None
  cost: Callable[[Array, Array, GramContext], Metrics] = lambda hidden, kernel, context: {}
  error: Callable[[Params, Params, TrainBatch, Forward | None, GramContext], Array] | None = None
