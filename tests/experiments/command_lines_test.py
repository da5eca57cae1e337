"""The command lines of the experiments on staleness: each builds, no two are the same run."""

import importlib

import pytest
from absl import flags
from ml_collections import config_flags

from rlvr_jax import specs
from rlvr_jax.train.build import build, make_veto


def parsed(arguments):
  """The configuration that a command line stands for."""
  values, argv = flags.FlagValues(), ["main", *arguments]
  config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
  values(argv)
  return values.config


def imported(name):
  """An experiment's program; its flags, which others have too, are taken out again."""
  module = importlib.import_module(f"experiments.{name}.run")
  own = flags.FLAGS.flags_by_module_dict().get(module.__name__, [])
  flags.FLAGS.remove_flag_values([flag.name for flag in own])
  return module


def runs_of(name, tmp_path):
  module = imported(name)
  if name == "mu_grpo":
    return module.RUNS
  other = module.arguments("grpo", "refresh")
  (tmp_path / "config.json").write_text(parsed(other).to_json_best_effort())
  (tmp_path / "checkpoints" / "80").mkdir(parents=True)  # read when the run begins
  return module.all_runs(tmp_path)


def quick_to_build(config):
  """The same components around less: fewer problems to write out, fewer layers to trace."""
  config = config.copy_and_resolve_references()
  config.task.kwargs.warm_start_size = config.task.kwargs.held_out_size = 8
  config.model.overrides.num_layers = config.model.overrides.unroll_layers = 1
  return config


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # ml_collections' import of a config
@pytest.mark.parametrize("name", ["mu_grpo", "p3o_mismatch"])
def test_every_command_line_is_a_run_of_its_own_and_builds(name, tmp_path):
  configs = {label: parsed(arguments) for label, arguments in runs_of(name, tmp_path).items()}
  assert len({config.to_json_best_effort() for config in configs.values()}) == len(configs)
  # Each source and schedule, each loss with and without veto; the rest differs in numbers only.
  name = lambda c, field: specs.parse(field, c[field]).name
  traced = {(str(c.sources), name(c, "schedule")): label for label, c in configs.items()}
  traced |= {(name(c, "loss"), c.veto.enabled): label for label, c in configs.items()}
  for label in set(traced.values()):
    build(quick_to_build(configs[label]))
  for config in configs.values():
    make_veto(config)
