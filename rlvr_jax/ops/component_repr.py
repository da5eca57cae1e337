"""The repr of a component: the call of the factory that made it, with its hyper-parameters."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def component_repr(component: tuple[Any, ...]) -> str:
  """The call that makes an equal component, such as "grpo(epsilon=1e-06)".

  Hyper-parameters are read from the closures of the component's functions, so no factory has to
  list them. A hyper-parameter is shown as "…" if no closure has a variable of its name.

  Args:
    component: NamedTuple whose fields are the functions that a factory has made, and plain values.
  Returns:
    The call, or the class with its plain values if no function comes from a factory.
  """
  functions = [field for field in component if _has_arguments(field)]
  factory: Any = None
  arguments: dict[str, Any] = {}
  for function in functions:  # the list grows by the functions in their closures
    if isinstance(function, functools.partial):
      arguments = {**function.keywords, **arguments}
      continue
    name = function.__qualname__.partition(".<locals>")[0]
    maker = function.__globals__.get(name)
    factory = factory or (maker if maker is not function and _is_factory(maker) else None)
    closure = inspect.getclosurevars(function).nonlocals
    if maker is factory:
      arguments |= closure
    functions += [x for x in closure.values() if _has_arguments(x) and x not in functions]
  if factory is None:
    values = zip(type(component)._fields, component, strict=True)  # type: ignore[attr-defined]
    plain = (f"{name}={value!r}" for name, value in values if not callable(value))
    return f"{type(component).__name__}({', '.join(plain)})"
  texts = (
    f"{name}={arguments[name]!r}" if name in arguments else f"{name}=…"
    for name in inspect.signature(factory).parameters
  )
  return f"{factory.__name__}({', '.join(texts)})"


def _has_arguments(value: Any) -> bool:
  """Whether `value` is a function or a partial, which may hold arguments of a factory."""
  return inspect.isfunction(value) or isinstance(value, functools.partial)


def _is_factory(value: Any) -> bool:
  """Whether `value` is a function whose arguments, if any, are keyword-only."""
  if not inspect.isfunction(value):
    return False
  parameters = inspect.signature(value).parameters.values()
  return all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
