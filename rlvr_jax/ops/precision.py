"""Precision of float32 matrix products, whose inputs accelerators round by default.

TPUs round the inputs to bfloat16, with 8 bits of significand, and recent NVIDIA GPUs to
TensorFloat-32, with 11 bits. CPUs do not round them. Products of bfloat16 arrays are the same under
every setting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

EXACT = jax.lax.Precision.HIGHEST  # for products whose rounding would spoil the result

# "highest" does not round inputs; "default" rounds them as the platform does. Kernels for TPUs
# support only these two settings.
PRECISIONS = ("highest", "default")


def with_matmul_precision(function: Callable[..., Any], precision: str) -> Callable[..., Any]:
  """`function`, computed with `precision` in all products that do not specify their own.

  These include products in backward passes, in loops and in the bodies of Pallas kernels.

  Args:
    function: a function to be jitted, which may be a `functools.partial`.
    precision: one of `PRECISIONS`.
  """

  def traced(*args: Any, **kwargs: Any) -> Any:
    with jax.default_matmul_precision(precision):
      return function(*args, **kwargs)

  functools.update_wrapper(traced, function)
  # The name of the compiled program; a partial has no name.
  traced.__name__ = getattr(function, "func", function).__name__
  return traced
