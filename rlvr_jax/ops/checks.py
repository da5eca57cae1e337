"""Checks of hyper-parameters, which run when a component is made, before any compilation."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

MAX_SCORE = 1e30  # of a reward, which is a float32 and may be summed


MAX_INT32 = 2**31 - 1  # of indices and counters on the devices


def check_between(
  owner: str,
  name: str,
  value: float,
  *,
  low: float = -math.inf,
  high: float = math.inf,
  open_low: bool = False,
  open_high: bool = False,
) -> None:
  """Raises ValueError unless value is a real number in [low, high]; an open end is excluded."""
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value < math.inf
  is_open_end = (open_low and value == low) or (open_high and value == high)
  if not is_number or not low <= value <= high or is_open_end:
    bracket = "(" if open_low or low == -math.inf else "["
    close = ")" if open_high or high == math.inf else "]"
    raise ValueError(
      f"{owner}: {name} = {value!r} is not a number in {bracket}{low:g}, {high:g}{close};"
      f" set {name} within this range"
    )


def check_integer(owner: str, name: str, value: int, *, low: int, high: int | None = None) -> None:
  """Raises ValueError unless value is an integer, low ≤ value ≤ high."""
  is_integer = isinstance(value, int) and not isinstance(value, bool)
  if not is_integer or value < low or (high is not None and value > high):
    within = f" ≥ {low}; set {name} to {low} or more"
    if high is not None:
      within = f" in [{low}, {high}]; set {name} within this range"
    raise ValueError(f"{owner}: {name} = {value!r} is not an integer{within}")


def check_order(owner: str, low: tuple[str, float], high: tuple[str, float]) -> None:
  """Raises ValueError unless the first (name, value) is at most the second."""
  if low[1] > high[1]:
    raise ValueError(
      f"{owner}: {low[0]} = {low[1]!r} is above {high[0]} = {high[1]!r};"
      f" lower {low[0]} or raise {high[0]}"
    )


def is_score(value: Any) -> bool:
  """Whether a grader or an environment may give this score: a number within ±`MAX_SCORE`."""
  return isinstance(value, numbers.Real) and abs(value) <= MAX_SCORE  # type: ignore[operator]


def check_choice(owner: str, name: str, value: Any, allowed: Collection[Any]) -> None:
  """Raises ValueError unless `value` is one of `allowed`."""
  if value not in allowed:
    raise ValueError(f"{owner}: {name} = {value!r} is unknown; choose one of {sorted(allowed)}")


def check_reasons(owner: str, reasons: Mapping[str, object], *, remedy: str = "") -> None:
  """Raises ValueError if a reason applies; its message is owner + first such reason + remedy.

  Args:
    owner: start of the message, such as "config.fleet.samplers = True, but ".
    reasons: text of a reason → whether the reason applies. A text may also say what to change.
    remedy: text on what to change, whatever the reason is.
  """
  for why, applies in reasons.items():
    if applies:
      raise ValueError(f"{owner}{why}{remedy}")


def describe(value: Any) -> str:
  """Describes types and shapes for messages, such as "(float32[8, 16], dict)"."""
  if isinstance(value, (tuple, list)):
    return f"({', '.join(describe(part) for part in value)})"
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return f"{value.dtype}{list(value.shape)}"
  return type(value).__name__
