"""Options of XLA's compiler: how they are written, which are refused, which programs get them."""

import jax
import pytest
from train import tiny

from rlvr_jax.commands import ahead_of_time
from rlvr_jax.costs import programs
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup import compiler_options
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.compiler_options import CompilerOptions, make_compiler_options
from rlvr_jax.train.setup.programs import abstract_update_batch

ACCEPTED_NAME = "xla_cpu_enable_fast_math"
ACCEPTED = f"{ACCEPTED_NAME}=false"


def options_on(mesh, **fields):
  config = tiny.config(**{f"compiler_options__{name}": text for name, text in fields.items()})
  return make_compiler_options(config.compiler_options, mesh, mesh)


def test_values_have_the_types_that_the_compiler_takes():
  text = f"{ACCEPTED} xla_backend_optimization_level=2 xla_dump_to=/tmp/x"
  expected = {
    "xla_cpu_enable_fast_math": False,
    "xla_backend_optimization_level": 2,
    "xla_dump_to": "/tmp/x",
  }
  no_devices = programs.make_topology_mesh(dict(data=1, fsdp=1, tensor=1), None)
  expected = CompilerOptions(training=expected, generation=None)
  assert options_on(no_devices, training=text) == expected


def test_defaults_are_those_that_the_compiler_knows_and_that_are_not_set(monkeypatch):
  """GPUs alone have defaults; the compiler for CPUs is given some here."""
  defaults = {ACCEPTED_NAME: True, "xla_backend_optimization_level": 1, "xla_no_such_option": 0}
  for kind in ("training", "generation"):
    monkeypatch.setitem(compiler_options._DEFAULTS, ("cpu", kind), defaults)
  found = options_on(sharding.make_mesh(), training=f"{ACCEPTED} xla_dump_to=/tmp/x")
  assert found.generation == {ACCEPTED_NAME: True, "xla_backend_optimization_level": 1}
  assert found.training == {**found.generation, ACCEPTED_NAME: False, "xla_dump_to": "/tmp/x"}


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("xla_cpu_enable_fast_math", r"training = 'xla.*': 'xla.*' is not name=value; separate"),
    (f"{ACCEPTED} {ACCEPTED}", r"sets xla_cpu_enable_fast_math twice; remove one"),
    (
      "xla_tpu_enable_windowed_einsum_for_all_gather=false",
      r"^config\.compiler_options\.training: the compiler for cpu refuses an option: No such"
      r" compile option: 'xla_tpu_.*'; remove the option",
    ),
    ("xla_cpu_enable_fast_math=maybe", r"'maybe' is not a valid bool value\.?; remove the option"),
  ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(text, message):
  with pytest.raises(ValueError, match=message) as error:
    build(tiny.config(compiler_options__training=text))
  assert "\n" not in str(error.value)


def test_each_program_gets_those_of_its_kind():
  """A jitted function with options refuses to be called within another one."""

  def has_options(program, *arguments):
    try:
      jax.jit(lambda *x: program(*x)).lower(*arguments)
    except ValueError as error:
      assert "compiler_options" in str(error)
      return True
    return False

  for kind in CompilerOptions._fields:
    parts = build(tiny.config(**{f"compiler_options__{kind}": ACCEPTED}))
    placement, programs = parts.placement, parts.programs
    batch = abstract_update_batch(parts.method, placement, parts.shape)
    update = (placement.state.params, placement.frozen, batch)
    assert has_options(programs.mean_entropy, *update) == (kind == "training")
    assert has_options(programs.engine.programs.empty_slots) == (kind == "generation")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CompilerOptions._fields)
def test_reports_compile_with_them(kind, tmp_path):
  """An option that leaves a trace: the compiler writes each program into a folder."""
  parts = build(tiny.config(**{f"compiler_options__{kind}": f"xla_dump_to={tmp_path}"}))
  for lower in ahead_of_time.lowerings(parts).values():
    lower().compile()
  written = {path.name.split(".")[1] for path in tmp_path.glob("module_*")}
  expected = {"training": "jit_update", "generation": "jit_longest_burst"}
  assert written & {*expected.values()} == {expected[kind]}
