"""Options of XLA's compiler for the compiled programs of a run."""

from __future__ import annotations

import ast
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
from jax.sharding import Mesh

from rlvr_jax.train.cluster.process import lacks_bfloat16
from rlvr_jax.train.reporting.progress import say

Options = dict[str, bool | int | float | str]


class CompilerOptions(NamedTuple):
  """Options for `jax.jit`, by kind of compiled program; None for the compiler's defaults."""

  training: Options | None
  generation: Options | None


# Default options by (platform, kind of program). On GPUs no product is tuned: tuning takes a minute
# of each start, and the next start may choose other products, so that bits differ.
_DEFAULTS: dict[tuple[str, str], Options] = {
  ("gpu", "training"): {
    "xla_gpu_autotune_level": 0,
    # cuBLAS computes products: hundreds of Triton kernels take minutes to compile, and some in
    # float32 cannot be compiled without tuning.
    "xla_gpu_enable_triton_gemm": False,
    # Gradients of equal tokens, and those of attention, are added in a fixed order.
    "xla_gpu_deterministic_ops": True,
  },
  ("gpu", "generation"): {
    "xla_gpu_autotune_level": 0,
    # Triton computes products, which then belong to command buffers: a step is launched as a whole.
    # Products are not merged, since every step would first copy weights side by side.
    "xla_gpu_dot_merger_threshold_mb": 0,
  },
}


def make_compiler_options(
  settings: ml_collections.ConfigDict, training: Mesh, generation: Mesh
) -> CompilerOptions:
  """The options of a run: the configured options, and the devices' defaults for other options.

  Args:
    settings: `config.compiler_options`.
    training, generation: the meshes of updates and of rollouts. For a mesh without devices there
      are no defaults, and the compiler is not asked whether it accepts the options.
  Raises:
    ValueError: a text is not a list of options, or the compiler does not accept an option.
  """

  def options(kind: str, mesh: Mesh) -> Options | None:
    field, given = f"config.compiler_options.{kind}", _given(settings, kind)
    if not isinstance(mesh, Mesh):
      return given or None
    if given and (reason := _refusal(given, mesh)):
      raise ValueError(
        f"{field}: the compiler for {mesh.devices.flat[0].device_kind} refuses an option: {reason};"
        " remove the option, or run on a device whose compiler accepts it"
      )
    return {**_defaults(kind, mesh), **given} or None

  return CompilerOptions(options("training", training), options("generation", generation))


def _defaults(kind: str, mesh: Mesh) -> Options:
  """The default options of a kind of program that the compiler for a mesh's devices accepts."""
  known = _DEFAULTS.get((mesh.devices.flat[0].platform, kind), {})
  if not known or _refusal(known, mesh) is None:
    return known
  # Another version of the compiler may not know all options.
  return {name: x for name, x in known.items() if _refusal({name: x}, mesh) is None}


def format_options(options: Options | None) -> str:
  """The options as text, in the form of `config.compiler_options`."""
  lower = lambda value: str(value).lower() if isinstance(value, bool) else str(value)
  return " ".join(f"{name}={lower(value)}" for name, value in (options or {}).items())


def announce_defaults(options: CompilerOptions, settings: ml_collections.ConfigDict) -> None:
  """Prints the run's default options, except those that `config.compiler_options` names."""
  for kind, wanted in options._asdict().items():
    given = _given(settings, kind)
    added = {name: value for name, value in (wanted or {}).items() if name not in given}
    if added:
      field = f"config.compiler_options.{kind}"
      say(f"{kind} is compiled with {format_options(added)}; {field} takes precedence")


def slow_precision(compute_dtype: str) -> str | None:
  """A warning if a network computes in bfloat16 on a CPU without bfloat16 arithmetic."""
  if compute_dtype != "bfloat16" or jax.default_backend() != "cpu" or not lacks_bfloat16():
    return None
  return (
    "this CPU has no bfloat16 arithmetic, so that bfloat16 saves memory, but takes more time;"
    " config.model.overrides.compute_dtype = 'float32' is faster"
  )


def _given(settings: ml_collections.ConfigDict, kind: str) -> Options:
  """The configured options of a kind, by name, with values as numbers or booleans if possible.

  Raises:
    ValueError: the text is not of the form "name=value name=value".
  """
  field, text = f"config.compiler_options.{kind}", settings[kind]
  options: Options = {}
  for item in text.split():
    name, equals, value = item.partition("=")
    if not (name and equals and value):
      raise ValueError(
        f"{field} = {text!r}: {item!r} is not name=value; separate options by spaces"
      )
    if name in options:
      raise ValueError(f"{field} = {text!r} sets {name} twice; remove one of them")
    options[name] = _literal(value)
  return options


def _literal(value: str) -> bool | int | float | str:
  if value in ("true", "false"):
    return value == "true"
  try:
    number = ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return value
  return number if isinstance(number, int | float) else value


def _refusal(options: Options, mesh: Mesh) -> str | None:
  """Why the compiler for a mesh's devices refuses the options; None if it accepts them."""
  device = mesh.devices.flat[0]
  argument = jax.ShapeDtypeStruct(
    (), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
  )
  try:
    jax.jit(lambda x: x + 1, compiler_options=options).lower(argument).compile()
  except jax.errors.JaxRuntimeError as error:
    return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
  return None
