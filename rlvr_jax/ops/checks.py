"""Checks of hyper-parameters, run when a component is made, before anything is compiled."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def check_between(
  owner: str,
  name: str,
  value: float,
  *,
  low: float = -math.inf,
  high: float = math.inf,
  open_low: bool = False,
) -> None:
  """Raises unless low ≤ value ≤ high (low < value with `open_low`) and value is a real number."""
  number = isinstance(value, (int, float)) and not isinstance(value, bool) and value < math.inf
  if not number or not low <= value <= high or (open_low and value == low):
    bracket = "(" if open_low or low == -math.inf else "["
    close = ")" if high == math.inf else "]"
    raise ValueError(
      f"{owner}: {name} = {value!r} is not a number in {bracket}{low:g}, {high:g}{close};"
      f" set {name} within it"
    )


def check_choice(owner: str, name: str, value: Any, allowed: Collection[Any]) -> None:
  """Raises unless `value` is one of `allowed`."""
  if value not in allowed:
    raise ValueError(f"{owner}: {name} = {value!r} is unknown; choose one of {sorted(allowed)}")
