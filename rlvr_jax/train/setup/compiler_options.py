"""Options of XLA's compiler for the programs of a run."""

from __future__ import annotations

import ast
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh

Options = dict[str, bool | int | float | str]


class CompilerOptions(NamedTuple):
  """Options by kind of program, as `jax.jit` takes them; None: the compiler's defaults."""

  training: Options | None
  generation: Options | None


def parse_compiler_options(settings: ml_collections.ConfigDict) -> CompilerOptions:
  """The options of `config.compiler_options`.

  Raises:
    ValueError: a text is not of the form "name=value name=value".
  """
  return CompilerOptions(
    training=_parse("config.compiler_options.training", settings.training),
    generation=_parse("config.compiler_options.generation", settings.generation),
  )


def _parse(field: str, text: str) -> Options | None:
  """Options by name, with their values as numbers or booleans if they read so; None if none."""
  options: dict[str, bool | int | float | str] = {}
  for item in text.split():
    name, equals, value = item.partition("=")
    if not (name and equals and value):
      raise ValueError(
        f"{field} = {text!r}: {item!r} is not name=value; separate options by spaces"
      )
    if name in options:
      raise ValueError(f"{field} = {text!r} sets {name} twice; remove one of them")
    options[name] = _literal(value)
  return options or None


def _literal(value: str) -> bool | int | float | str:
  if value in ("true", "false"):
    return value == "true"
  try:
    number = ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return value
  return number if isinstance(number, int | float) else value


def check_compiler_options(field: str, options: Options | None, mesh: Mesh) -> None:
  """Raises ValueError if the compiler for the devices of a mesh does not accept the options.

  Args:
    field: its name, for messages.
    options: to try; None needs no trial.
    mesh: whose first device is compiled for. One without devices is not checked.
  """
  if options is None or not isinstance(mesh, Mesh):
    return
  device = mesh.devices.flat[0]
  argument = jax.ShapeDtypeStruct(
    (), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
  )
  try:
    jax.jit(lambda x: x + 1, compiler_options=options).lower(argument).compile()
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    raise ValueError(
      f"{field}: the compiler for {device.device_kind} does not accept it: {reason}; remove the"
      " option, or run where it exists"
    ) from error
