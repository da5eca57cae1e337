"""The arms on `steps`: one baseline, equal budgets, and that each of them builds."""

import pytest
from train import tiny

from experiments.steps.config import ROLLOUTS
from experiments.steps.sweep import ARMS, CONFIG, FADE, P3O, SALT, get_sweep
from rlvr_jax.commands import sweep
from rlvr_jax.train.cluster.sharding import make_mesh
from rlvr_jax.train.setup import config_file
from rlvr_jax.train.setup.build import (
  batch_shape,
  make_method,
  make_model,
  make_network,
  make_schedule,
)


@pytest.fixture(scope="module", name="configs")
def _configs():
  """Label → configuration, of seed 0."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(tiny.ROOT)
    runs = sweep.read_runs("experiments/steps/sweep.py", CONFIG, {}, "runs/steps")
    return {run.label: config_file.read(run.flags) for run in runs if run.seed == 0}


def test_the_other_policy_comes_before_the_runs_that_need_it():
  first, *rest = get_sweep()
  assert first == {"label": "other policy", "seed": 1000}
  assert {run["label"] for run in rest} == ARMS.keys() and ARMS["GRPO"] == {}


def test_no_two_arms_are_the_same_run(configs):
  assert configs.keys() == ARMS.keys()
  assert len({config.to_json_best_effort() for config in configs.values()}) == len(configs)


def test_runs_have_the_same_updates_rollouts_and_evaluations(configs):
  for config in configs.values():
    assert config.batch.prompts * config.batch.group_size == ROLLOUTS == 128
    assert config.num_updates == 192 and config.task.kwargs.held_out_size == 64
  assert len({str(c.evaluation) + str(c.warm_start) for c in configs.values()}) == 1


def test_all_four_have_what_each_has():
  all_four = ARMS["all four"]
  assert {**FADE, **SALT, **P3O}.items() <= all_four.items()
  assert all_four["veto.scope"] == "suffix" and all_four["schedule"] == "stages(count=2)"


@pytest.mark.slow
def test_arms_build(configs):
  """Their components, with a network of one layer; the rest is of tests of the base."""
  built = {}
  for label, config in configs.items():
    names = (config.advantage, config.reweighting, config.gram, config.loss, config.schedule)
    built.setdefault(names, (label, config))
  for label, config in built.values():
    config = config.copy_and_resolve_references()
    config.model.overrides.num_layers = 1
    mesh = make_mesh(**config.mesh)
    network = make_network(config.model, config.tokenizer, 260)
    model = make_model(network, None, batch_shape(config), mesh, tokens_per_row=0)
    method = make_method(config, model, mesh)
    make_schedule(config.schedule, num_updates=config.num_updates, seed=config.seed)
    assert (method.veto is not None) == config.veto.enabled, label
    assert (method.gram is not None) == (config.reweighting != "none"), label
