"""The optimizer and its schedule, from the configuration."""

from __future__ import annotations

import re
from typing import Any

import jax
import optax

from rlvr_jax.ops.checks import check_between, check_choice, check_whole

DECAYS = ("constant", "linear", "cosine")


def learning_rate_schedule(
  *,
  learning_rate: float,
  warmup_updates: int,
  decay: str,
  final_fraction: float,
  num_updates: int,
) -> optax.Schedule:
  """Linear warm-up from 0, then constant, or linear or cosine decay to a fraction of the peak.

  Args:
    learning_rate: peak.
    warmup_updates: updates until the peak.
    decay: one of `DECAYS`, over the updates after the warm-up.
    final_fraction: of the peak, reached at the last update; 1 for `constant`.
    num_updates: of the whole run.
  """
  check_choice("optimizer", "decay", decay, DECAYS)
  check_between("optimizer", "learning_rate", learning_rate, low=0.0)
  check_whole("optimizer", "warmup_updates", warmup_updates, low=0, high=2**31 - 1)
  check_between("optimizer", "final_fraction", final_fraction, low=0.0, high=1.0)
  rest = max(num_updates - warmup_updates, 1)
  after = {
    "constant": optax.constant_schedule(learning_rate),
    "linear": optax.linear_schedule(learning_rate, learning_rate * final_fraction, rest),
    "cosine": optax.cosine_decay_schedule(learning_rate, rest, alpha=final_fraction),
  }[decay]
  if not warmup_updates:
    return after
  # The first update already moves: step 0 uses 1/warmup of the peak.
  warmup = optax.linear_schedule(
    learning_rate / warmup_updates, learning_rate, max(warmup_updates - 1, 1)
  )
  return optax.join_schedules([warmup, after], [warmup_updates])


def adamw(
  schedule: optax.Schedule,
  *,
  b1: float,
  b2: float,
  epsilon: float,
  weight_decay: float,
  max_gradient_norm: float | None,
) -> optax.GradientTransformation:
  """AdamW behind a clip of the global gradient norm; norms and biases are not decayed."""
  check_between("optimizer", "b1", b1, low=0.0, high=1.0)
  check_between("optimizer", "b2", b2, low=0.0, high=1.0)
  check_between("optimizer", "epsilon", epsilon, low=0.0, open_low=True)
  check_between("optimizer", "weight_decay", weight_decay, low=0.0)
  parts = []
  if max_gradient_norm is not None:
    check_between("optimizer", "max_gradient_norm", max_gradient_norm, low=0.0, open_low=True)
    parts.append(optax.clip_by_global_norm(max_gradient_norm))
  parts.append(
    optax.adamw(schedule, b1=b1, b2=b2, eps=epsilon, weight_decay=weight_decay, mask=decayed)
  )
  return optax.chain(*parts)


def decayed(params: Any) -> Any:
  """Which parameters weight decay applies to: all but norms and biases."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return jax.tree_util.tree_map_with_path(
    lambda path, _: re.search(r"norm|bias", name(path)) is None, params
  )
