"""Diagnostics that need no Gram matrix: statistics of an update or of its coefficients.

An undefined value is 0, never NaN.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.ops import spectral
from rlvr_jax.ops.masked import for_tokens, masked_mean, upcast
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, Params


def rank_one_fraction(update: Array) -> Array:
  """σ₁²/Σσ² of an update's singular values σ: the share that one outer product explains.

  The share is intended for the accumulated update W_t − W_0 of the output head. If it rises toward
  1 during training, the updates repeat one direction. The FADE paper reports this collapse if
  failures have a larger gradient mass (`advantage/mass_failure`) than successes. The minimum is
  1/min(D, V).

  Args:
    update: U, [D, V] or [V, D]; σ² are computed as eigenvalues of the smaller of UUᵀ and UᵀU.
  Returns:
    f32[], in [1/min(D, V), 1]; 0 for an update that is zero or not finite.
  Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490).
  """
  chex.assert_rank(update, 2)
  update = upcast(update)
  update = update / spectral.largest(update)
  wide = update if update.shape[0] <= update.shape[1] else update.T
  gram = jnp.matmul(wide, wide.T, precision=EXACT)
  largest = jnp.linalg.eigvalsh(spectral.normalized_gram(gram))[-1] / gram.shape[0]
  return jnp.where(spectral.is_usable(gram), jnp.clip(largest, 0.0, 1.0), 0.0)


def head_share(update: Params, head_path: str) -> Array:
  """The share of an update's squared norm that is in the output head.

  Compare this share with the head's share of the number of parameters. If the head's share of the
  squared norm is far above its share of the parameters, the update is mostly in the last
  projection. Such an update changes token frequencies rather than the network's computation.

  Args:
    update: nested dict of arrays, parameters_t − parameters_0.
    head_path: the path of the head's kernel, its keys joined by "/": "head_kernel", or "embedding"
      with tied embeddings. The embedding's update includes that of the input lookup.
  Returns:
    f32[], in [0, 1]; 0 for an update that is zero or not finite.
  Raises:
    ValueError: no parameter has this path.
  Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490).
  """
  by_path = {
    jax.tree_util.keystr(path, simple=True, separator="/"): upcast(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(update)
  }
  if head_path not in by_path:
    raise ValueError(f"head_share: no parameter {head_path!r}; choose one of {sorted(by_path)}")
  largest = spectral.largest(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in by_path.values()]))
  squares = {path: jnp.sum((leaf / largest) ** 2) for path, leaf in by_path.items()}
  total = sum(squares.values())
  defined = jnp.isfinite(total) & (total > 0)
  return jnp.where(defined, squares[head_path] / jnp.where(defined, total, 1.0), 0.0)


def advantage_logprob_covariance(coefficients: Array, logprobs: Array, mask: Array) -> Array:
  """−Cov(A, log π) over loss tokens, an indicator of the change of entropy.

  If this value is negative, the update makes likely tokens more likely or unlikely tokens less
  likely, and entropy tends to decrease. If it is positive, entropy tends to increase. This is a
  heuristic: compare the value with the measured change of entropy.

  Args:
    coefficients: f32[P, G], A, the same for all tokens of a rollout, or f32[P, G, T].
    logprobs: f32[P, G, T], nats, under the policy.
    mask: [P, G, T], loss tokens.
  Returns:
    f32[], nats times the unit of A; 0 without loss tokens.
  Source: "Don't Let Gains FADE: Breaking Down Policy Gradient Weights in RL" (arXiv:2607.01490);
    "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
    (arXiv:2505.22617).
  """
  chex.assert_rank([coefficients, logprobs, mask], [{2, 3}, 3, 3])
  per_token = jnp.broadcast_to(for_tokens(upcast(coefficients)), mask.shape)
  centered = per_token - masked_mean(per_token, mask)
  return -masked_mean(centered * (logprobs - masked_mean(logprobs, mask)), mask)
