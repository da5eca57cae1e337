"""The learning-rate schedules to choose from in `config.learning_rate`."""

from __future__ import annotations

import optax

from rlvr_jax.ops.checks import check_between, check_integer

__all__ = ["constant", "cosine", "linear"]


def constant(*, peak: float, warmup: int = 10) -> optax.Schedule:
  """Linear warm-up from 0, then constant at the peak.

  Args:
    peak: ≥ 0.
    warmup: updates until the peak.
  """
  _check("constant", peak, warmup)
  return _prepend_warmup(optax.constant_schedule(peak), peak, warmup)


def linear(
  *, peak: float, warmup: int = 10, final_fraction: float = 0.1, num_updates: int
) -> optax.Schedule:
  """Linear warm-up from 0, then linear decay to a fraction of the peak.

  Args:
    peak: ≥ 0.
    warmup: updates until the peak.
    final_fraction: the rate would reach this fraction of the peak one update after the last update.
      So even with 0, no update is wasted at a rate of 0.
    num_updates: the number of updates of the run.
  """
  _check("linear", peak, warmup, final_fraction)
  rest = max(num_updates - warmup, 1)
  return _prepend_warmup(optax.linear_schedule(peak, peak * final_fraction, rest), peak, warmup)


def cosine(
  *, peak: float, warmup: int = 10, final_fraction: float = 0.1, num_updates: int
) -> optax.Schedule:
  """Linear warm-up from 0, then cosine decay to a fraction of the peak.

  Args:
    peak: ≥ 0.
    warmup: updates until the peak.
    final_fraction: the rate would reach this fraction of the peak one update after the last update.
      So even with 0, no update is wasted at a rate of 0.
    num_updates: the number of updates of the run.
  """
  _check("cosine", peak, warmup, final_fraction)
  rest = max(num_updates - warmup, 1)
  decay = optax.cosine_decay_schedule(peak, rest, alpha=final_fraction)
  return _prepend_warmup(decay, peak, warmup)


def _check(owner: str, peak: float, warmup: int, final_fraction: float = 0.0) -> None:
  check_between(owner, "peak", peak, low=0.0)
  check_integer(owner, "warmup", warmup, low=0, high=2**31 - 1)
  check_between(owner, "final_fraction", final_fraction, low=0.0, high=1.0)


def _prepend_warmup(after: optax.Schedule, peak: float, warmup: int) -> optax.Schedule:
  if not warmup:
    return after
  # Step 0 uses 1/warmup of the peak: at a rate of 0 the first update would be wasted.
  rising = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
  return optax.join_schedules([rising, after], [warmup])
