"""Floating-point operations of a program's matrix products, counted before compilation.

A compiled program's own cost analysis counts the body of a loop once.
"""

from __future__ import annotations

import math

from jax.extend import core


def product_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> int:
  """Sum of 2·M·N·K over all matrix products times the lengths of enclosing scans, over all devices.

  Rematerialized products count again where they are differentiated; a `cond` counts as its most
  expensive branch; in a `shard_map` over all axes of its mesh, the products of one device count
  once per device.

  Args:
    jaxpr: result of `jax.make_jaxpr`.
  Raises:
    ValueError: a product is in a `while` loop, whose length is not in the jaxpr.
  """
  if isinstance(jaxpr, core.ClosedJaxpr):
    jaxpr = jaxpr.jaxpr
  return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation) -> int:
  name = equation.primitive.name
  params = equation.params
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)
  inner = [product_flops(jaxpr) for jaxpr in _jaxprs(params.values())]
  if name == "cond":
    return max(inner)
  if name == "while" and sum(inner):
    raise ValueError("product_flops: a while loop of unknown length contains matrix products")
  if name == "scan":
    return params["length"] * sum(inner)
  if name == "shard_map":
    return params["mesh"].size * sum(inner)
  return sum(inner)


def _jaxprs(values):
  for value in values:
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
      yield value
    elif isinstance(value, tuple | list):
      yield from _jaxprs(value)
