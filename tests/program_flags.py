"""Flags of several programs in one process: each program defines its own, some of the same name."""

import contextlib

from absl import flags


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
