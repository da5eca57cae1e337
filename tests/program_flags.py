"""Flags of several programs in one process: each program defines its own, some of the same name."""

import contextlib
import importlib.util
import pathlib

from absl import flags

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"


@contextlib.contextmanager
def set_aside(belongs):
  """Without the flags for which `belongs(name, module that defines it)`; they come back."""
  module_of = lambda name: flags.FLAGS.find_module_defining_flag(name) or ""
  modules = {name: module_of(name) for name in flags.FLAGS if belongs(name, module_of(name))}
  aside = flags.FlagValues()
  for name in modules:
    aside[name] = flags.FLAGS[name]
  flags.FLAGS.remove_flag_values(aside)
  try:
    yield
  finally:
    flags.FLAGS.append_flag_values(aside)
    for name, module in modules.items():
      flags.FLAGS.register_flag_by_module(module, flags.FLAGS[name])


@contextlib.contextmanager
def experiment(name):
  """The program of an experiment as a module; its flags are there meanwhile."""
  file = EXPERIMENTS / name / "__main__.py"
  file = file if file.exists() else EXPERIMENTS / f"{name}.py"
  spec = importlib.util.spec_from_file_location(f"{name}_program", file)
  module = importlib.util.module_from_spec(spec)
  with set_aside(lambda name, module: module == "rlvr_jax.main"):
    before = set(flags.FLAGS)
    spec.loader.exec_module(module)
    yield module
    flags.FLAGS.remove_flag_values(set(flags.FLAGS) - before)
