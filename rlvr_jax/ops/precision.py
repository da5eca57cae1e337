"""Precision of float32 matrix products, whose inputs accelerators round unless told otherwise.

TPUs round them to bfloat16, with 8 bits of significand, and recent NVIDIA GPUs to TensorFloat-32,
with 11. CPUs do not. Products of bfloat16 arrays are the same under every setting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

EXACT = jax.lax.Precision.HIGHEST  # of products whose rounding would spoil what is made of them

# "highest" rounds nothing, "default" as the platform does. What lies between is left out: kernels
# for TPUs know these two alone.
PRECISIONS = ("highest", "default")


def with_matmul_precision(function: Callable[..., Any], precision: str) -> Callable[..., Any]:
  """`function`, whose products are traced with a precision where they do not give their own.

  That holds for all that tracing reaches: backward passes, loops, and the bodies of Pallas kernels.

  Args:
    function: to be jitted; may be a `functools.partial`.
    precision: one of `PRECISIONS`.
  """

  def traced(*args: Any, **kwargs: Any) -> Any:
    with jax.default_matmul_precision(precision):
      return function(*args, **kwargs)

  functools.update_wrapper(traced, function)
  # Names the compiled program; a partial has no name of its own.
  traced.__name__ = getattr(function, "func", function).__name__
  return traced
