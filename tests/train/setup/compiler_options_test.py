"""Options of XLA's compiler: how they are written, which are refused, which programs get them."""

import jax
import pytest
from train import tiny

from rlvr_jax.commands import ahead_of_time
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.compiler_options import CompilerOptions, parse_compiler_options
from rlvr_jax.train.setup.programs import abstract_update_batch

ACCEPTED = "xla_cpu_enable_fast_math=false"


def options_of(**fields):
  config = tiny.config(**{f"compiler_options__{name}": text for name, text in fields.items()})
  return parse_compiler_options(config.compiler_options)


def test_values_have_the_types_that_the_compiler_takes():
  text = f"{ACCEPTED} xla_backend_optimization_level=2 xla_dump_to=/tmp/x"
  expected = {
    "xla_cpu_enable_fast_math": False,
    "xla_backend_optimization_level": 2,
    "xla_dump_to": "/tmp/x",
  }
  assert options_of(training=text) == CompilerOptions(training=expected, generation=None)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("xla_cpu_enable_fast_math", r"training = 'xla.*': 'xla.*' is not name=value; separate"),
    (f"{ACCEPTED} {ACCEPTED}", r"sets xla_cpu_enable_fast_math twice; remove one"),
    (
      "xla_tpu_enable_windowed_einsum_for_all_gather=false",
      r"^config\.compiler_options\.training: the compiler for cpu does not accept it: No such"
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
