"""The interface of methods that compute a Gram matrix of rollouts' gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rlvr_jax.ops.component_repr import component_repr
from rlvr_jax.types import Array, Forward, Metrics, Params, TrainBatch

FEATURES = ("score", "sampled")


class GramContext(NamedTuple):
  """Properties of the run that a `GramFn` needs."""

  model: Any  # `Method.model` without its sharding constraints; it has `config.tied_head`
  temperature: float = 1.0  # the temperature that defines the trained policy
  mesh: Any = None  # jax.sharding.Mesh with axes (data, fsdp, tensor); None: one device


class GramFn(NamedTuple):
  """A method that computes the inner products of per-rollout gradient features.

  The feature "score" of rollout i is g_i = ∇_φ(−Σ_t m[i,t] log π[i,t]) for a subset φ of the
  parameters. π[i,t] is the policy's probability of token t of rollout i. m is the loss mask before
  any veto of tokens. The feature "sampled" omits the softmax term in the derivative of log π with
  respect to the logits: g_i = ∇_φ(−Σ_t m[i,t] z[i,t]/τ), where z is the logit of the sampled token
  and τ the temperature.

  Attributes:
    gram: (trained, frozen, batch, forward, context) → f32[B, B] with the entries g_i · g_j, not
      divided by B. Rollouts are in the order of batch.tokens.reshape(B, T). `frozen` is {} if all
      parameters are trained, and `forward` is None if `needs_forward` is False.
    needs_forward: whether `gram` reads `forward`.
    projection: size V of the vocabulary → f32[V, C], a random projection R_v of the vocabulary.
      The forward pass accumulates R_vᵀd for the derivatives d of −log π with respect to the product
      of hidden states and head kernel. None: no projection.
    cost: (batch, hidden [M, R, L, D], kernel [D, V], context) → metrics of the cost of one Gram
      matrix, computed from shapes, dtypes and the number of micro-batches only.
    error: arguments as for `gram` → f32[], an estimate of the error ‖K̂ − K‖_F/‖K‖_F. K̂ is the
      result of `gram`, and K the exact matrix. None: `gram` is exact, or its error is unknown.
    feature: "score" or "sampled".
  """

  gram: Callable[[Params, Params, TrainBatch, Forward | None, GramContext], Array]
  needs_forward: bool = True
  projection: Callable[[int], Array] | None = None
  cost: Callable[[TrainBatch, Array, Array, GramContext], Metrics] = lambda *_: {}
  error: Callable[[Params, Params, TrainBatch, Forward | None, GramContext], Array] | None = None
  feature: str = "score"

  def __repr__(self) -> str:
    return component_repr(self)
