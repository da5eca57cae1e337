"""Clip-Cov and KL-Cov restrain the updates of the tokens that reduce the entropy most."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.losses.base import Loss, Tokens, clip_metrics, prepare_tokens
from rlvr_jax.losses.ppo_clip import clipped_surrogate
from rlvr_jax.ops.checks import MAX_INT32, check_between, check_integer
from rlvr_jax.ops.masked import masked_count, masked_mean, mean_metric
from rlvr_jax.types import Array, Metrics, TrainBatch


def covariances(tokens: Tokens) -> Array:
  """Each loss token's term c of the covariance of A and log π, f32[P, G, T]; 0 where masked.

  c = (A − mean A)·(log π − mean log π), with means over the loss tokens of the full batch.
  """
  A = jnp.broadcast_to(tokens.coefficients, tokens.mask.shape)
  logprobs = jax.lax.stop_gradient(tokens.policy_logprobs)
  centered = lambda x: x - masked_mean(x, tokens.mask)
  return jnp.where(tokens.mask > 0, centered(A) * centered(logprobs), 0.0)


def number_of(share: float, mask: Array) -> Array:
  """max(1, ⌊share·n⌋) for n loss tokens: the number of tokens to select, f32[]."""
  return jnp.maximum(jnp.floor(share * masked_count(mask)), 1.0)


def largest(scores: Array, eligible: Array, count: Array) -> Array:
  """A mask of the `count` eligible entries with the largest scores; earlier entries win ties."""
  flat = jnp.where(eligible, scores, -jnp.inf).reshape(-1)
  order = jnp.argsort(-flat)  # stable
  rank = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.arange(flat.size, dtype=jnp.int32))
  return (rank < count).reshape(scores.shape) & eligible


def chances_of(batch: TrainBatch, seed: int) -> Array:
  """A uniform random number for each loss token, f32[P, G, T]; arbitrary at other tokens.

  The seed, the batch's loss tokens and their order determine the numbers. So a rerun draws the same
  numbers. Padding and the tokens of an environment do not change the numbers.
  """
  is_kept = batch.mask > 0
  ranks = (jnp.cumsum(is_kept) - is_kept.reshape(-1)).reshape(is_kept.shape)  # loss tokens before
  tokens = jnp.where(is_kept, batch.tokens, 0).astype(jnp.uint32)
  # In integer arithmetic modulo 2³², the order of the sum does not matter.
  hashed = jnp.sum(tokens * (2 * ranks.astype(jnp.uint32) + 1), dtype=jnp.uint32)
  key = jax.random.fold_in(jax.random.key(seed), hashed)
  return jax.vmap(lambda rank: jax.random.uniform(jax.random.fold_in(key, rank)))(
    ranks.reshape(-1)
  ).reshape(is_kept.shape)


def clip_cov(
  *,
  share: float = 2e-4,
  low: float = 1.0,
  high: float = 5.0,
  epsilon_low: float = 0.2,
  epsilon_high: float = 0.2,
  seed: int = 0,
) -> Loss:
  """`ppo_clip`, except that the loss is 0 at randomly drawn tokens with a large covariance.

  The covariance of a token is c = (A − mean A)·(log π − mean log π), with means over the batch's
  loss tokens. A loss token is eligible if its ratio is not clipped and low < c < high. If the batch
  has n loss tokens, max(1, ⌊share·n⌋) eligible tokens are drawn, or all eligible tokens if there
  are fewer.

  Args:
    share: in (0, 1], the drawn share of the loss tokens.
    low, high: the interval of c; high above low.
    epsilon_low: in [0, 1].
    epsilon_high: ≥ 0.
    seed: an integer ≥ 0; this seed and the batch's loss tokens determine the random numbers.
  Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
    (arXiv:2505.22617). **open**: the means and the draw are over the full batch here; other
    implementations use a micro-batch.
  """
  check_between("clip_cov", "share", share, low=0.0, high=1.0, open_low=True)
  check_between("clip_cov", "low", low)
  check_between("clip_cov", "high", high, low=low, open_low=True)
  check_between("clip_cov", "epsilon_low", epsilon_low, low=0.0, high=1.0)
  check_between("clip_cov", "epsilon_high", epsilon_high, low=0.0)
  check_integer("clip_cov", "seed", seed, low=0, high=MAX_INT32)

  def surrogate_of(tokens: Tokens) -> tuple[Array, Array]:
    return clipped_surrogate(
      tokens.log_ratios, tokens.coefficients, low=1 - epsilon_low, high=1 + epsilon_high
    )

  def statistics(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Array:
    """The drawn tokens, bool[P, G, T]."""
    tokens = prepare_tokens(jax.lax.stop_gradient(policy_logprobs), batch, coefficients)
    _, clipped = surrogate_of(tokens)
    c = covariances(tokens)
    eligible = (tokens.mask > 0) & ~clipped & (c > low) & (c < high)
    return largest(chances_of(batch, seed), eligible, number_of(share, tokens.mask))

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Array
  ) -> tuple[Array, Metrics]:
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    losses, clipped = surrogate_of(tokens)
    return jnp.where(statistics, 0.0, losses), {
      **clip_metrics(clipped, tokens),
      "loss/held_back": mean_metric(statistics, tokens.mask),
    }

  return Loss(per_token, statistics, ratio_to="old")


def kl_cov(*, share: float = 2e-4, coefficient: float = 1.0) -> Loss:
  """ℓ = −A·ρ, plus χ·|log ρ| for the tokens with the largest covariance; ρ = π/β.

  The covariance of a token is c = (A − mean A)·(log π − mean log π), with means over the batch's
  loss tokens. The penalty applies to the max(1, ⌊share·n⌋) tokens with the largest c among the n
  loss tokens. No ratio is clipped.

  Args:
    share: in (0, 1]; the authors use 2e−3 for 7B and 2e−4 for 32B; verl uses 2e−4.
    coefficient: χ ≥ 0.
  Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
    (arXiv:2505.22617). **open**: the means and the ranks are over the full batch here; other
    implementations use a micro-batch.
  """
  check_between("kl_cov", "share", share, low=0.0, high=1.0, open_low=True)
  check_between("kl_cov", "coefficient", coefficient, low=0.0)

  def statistics(policy_logprobs: Array, batch: TrainBatch, coefficients: Array) -> Array:
    """The tokens with the penalty, bool[P, G, T]."""
    tokens = prepare_tokens(jax.lax.stop_gradient(policy_logprobs), batch, coefficients)
    return largest(covariances(tokens), tokens.mask > 0, number_of(share, tokens.mask))

  def per_token(
    policy_logprobs: Array, batch: TrainBatch, coefficients: Array, statistics: Array
  ) -> tuple[Array, Metrics]:
    tokens = prepare_tokens(policy_logprobs, batch, coefficients)
    losses, _ = clipped_surrogate(tokens.log_ratios, tokens.coefficients, low=0.0, high=jnp.inf)
    # This form of |log ρ| has the derivative 0 at 0.
    signs = jnp.sign(jax.lax.stop_gradient(tokens.log_ratios))
    penalty = jnp.where(statistics, coefficient * signs * tokens.log_ratios, 0.0)
    return losses + penalty, {
      **clip_metrics(False, tokens),
      "loss/held_back": mean_metric(statistics, tokens.mask),
    }

  return Loss(per_token, statistics, ratio_to="old")
