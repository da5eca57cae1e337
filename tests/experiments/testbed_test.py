"""The lists of runs on the testbed: their order, their one baseline, and that each arm builds."""

import collections
import copy

import pytest
from train import tiny

from experiments import again, evidence
from experiments.testbed.arms import (
  BASE,
  GRPO,
  SEEDS,
  committed_runs,
  group_size_fields,
  merge_arms,
)
from experiments.testbed.config import ROLLOUTS
from experiments.together import testbed as together
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

CONFIG = "experiments/testbed/config.py"
ARMS = {**evidence.FIRST, **evidence.REST}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


@pytest.fixture(scope="module", name="configs")
def _configs(tmp_path_factory):
  """Label → configuration, of seed 0."""
  path = tmp_path_factory.mktemp("sweep") / "seed_0.py"
  listed = [{"label": label, **fields} for label, fields in ARMS.items()]
  path.write_text(f"def get_sweep():\n  return {listed!r}\n")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(tiny.ROOT)
    runs = sweep.read_runs(str(path), CONFIG, {}, "runs/evidence")
  return {run.label: config_file.read(run.flags) for run in runs}


def test_seeds_are_the_outer_loop_of_each_part():
  found = [(run["label"], run["seed"]) for run in evidence.IN_ORDER]
  parts = (evidence.FIRST, evidence.REST)
  in_order = [(label, seed) for part in parts for seed in SEEDS for label in part]
  in_order.insert(len(evidence.FIRST) * len(SEEDS), ("other policy", 1000))
  assert found == in_order
  assert [len(part) for part in parts] == [12, 90]  # as ORDER.md says
  assert found[0] == (GRPO, 0) and list(SEEDS) == [0, 1, 2, 3, 4]
  folders = {sweep.Run(label, seed, ()).name for label, seed in found}
  assert len(folders) == len(found)


def test_committed_runs_are_not_repeated():
  listed = {(run["label"], run["seed"]) for run in evidence.get_sweep()}
  everything = {(run["label"], run["seed"]) for run in evidence.IN_ORDER}
  assert listed == everything - committed_runs()
  assert committed_runs() <= everything


def test_an_experiment_alone_has_the_same_runs():
  of_all = {(run["label"], run["seed"]): run for run in evidence.IN_ORDER}
  counts = collections.Counter()
  for experiment in evidence.EXPERIMENTS:
    runs = experiment.get_sweep()
    assert all(of_all[run["label"], run["seed"]] == run for run in runs)
    counts.update(run["label"] for run in runs)
  assert counts.keys() == ARMS.keys() | {"other policy"}
  assert counts[GRPO] == 5 * len(SEEDS)  # one baseline, which all of them share


def test_one_arm_of_every_experiment_runs_again():
  names = {experiment.__name__.split(".")[1] for experiment in evidence.EXPERIMENTS}
  assert again.ARMS.keys() == names
  for run, experiment in zip(again.get_sweep(), evidence.EXPERIMENTS, strict=True):
    assert run in experiment.get_sweep() and run["label"] != GRPO


def test_runs_are_the_same_by_their_numbers_but_not_by_their_seconds():
  first = {
    "commit": "a",
    "seconds": {"optimise": 1.0},
    "evaluations": {"seconds": [1.0], "eval/pass@1": [0.25, 0.5]},
    "masses": [(3, 0.5, 0.5)],
    "signs": None,
  }
  second = copy.deepcopy(first)
  second["commit"], second["seconds"]["optimise"], second["evaluations"]["seconds"] = "b", 2.0, [2]
  assert len(again.numbers(first)) == 6 and again.differing_paths(first, second) == []
  second["evaluations"]["eval/pass@1"][1] = 0.500001
  del second["masses"][0]
  second["signs"] = 0.5
  assert again.differing_paths(first, second) == [
    "['evaluations']['eval/pass@1'][1]",
    "['masses'][0][0]",
    "['masses'][0][1]",
    "['masses'][0][2]",
    "['signs']",
  ]


def test_no_two_arms_are_the_same_run(configs):
  assert len({config.to_json_best_effort() for config in configs.values()}) == len(configs)


def test_runs_of_a_task_have_the_same_updates_rollouts_and_evaluations(configs):
  for config in configs.values():
    assert config.batch.prompts * config.batch.group_size == ROLLOUTS == 128
    assert config.num_updates == 192 and config.task.kwargs.held_out_size == 64
  evaluations = {(c.task.name, str(c.evaluation)) for c in configs.values()}
  warm_starts = {(c.task.name, str(c.warm_start)) for c in configs.values()}
  assert len(evaluations) == len(warm_starts) == 2
  with pytest.raises(ZeroDivisionError):
    group_size_fields(0)


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


def test_a_label_stands_for_one_thing():
  with pytest.raises(ValueError, match=r"two experiments call an arm 'P3O', but one sets \{'loss'"):
    merge_arms([BASE, {"P3O": {"loss": "p3o"}}, {"P3O": {"loss": "p3o(kl_term=False)"}}])
  assert merge_arms([BASE, BASE]) == BASE


def test_all_four_have_what_each_has():
  own = {**together.SINGLE["FADE"], **together.SINGLE["SALT, sampled"], **together.SINGLE["P3O"]}
  all_four = together.CLAIMS["all four"]
  assert all(all_four[path] == value for path, value in own.items())
  assert all_four["veto.scope"] == "suffix" and all_four["schedule"] == "stages(count=2)"
  assert len(together.ABLATIONS) == 4
  for fields in together.ABLATIONS.values():
    assert fields.items() <= {**all_four, **together.STAGES}.items() | {("loss", "p3o")}
