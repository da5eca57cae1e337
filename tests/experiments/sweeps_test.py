"""The experiments' sweeps: each run is one of its own and builds; their tables are the README's."""

import importlib
import re
import shlex

import pytest
from train import tiny

from experiments.testbed import report
from rlvr_jax import specs
from rlvr_jax.commands import sweep
from rlvr_jax.evaluate.compare import read_results
from rlvr_jax.train.setup import config_file
from rlvr_jax.train.setup.build import build, make_veto

FOLDER = tiny.ROOT / "experiments"
RUNS = {
  "quickstart": 12,
  "steps": 93,
  "pretrained": 7,
  "recipes": 0,
  "salt_geometry": 45,
  "mu_grpo": 42,
  "p3o_mismatch": 76,
  "dialogues": 10,
  "mixtures": 60,
  "large_ratios": 272,
  "high_entropy": 55,
  "sampled_feature": 95,
  "other_samplers": 50,
  "low_precision": 159,
  "language_model": 47,
}
# Runs of a sweep without results. The language model's first pilot has its figures on the page.
WITHOUT_RESULTS = {
  "language_model": {
    (f"pilot, {method}, {rate}", 100) for method in ("GRPO", "P3O") for rate in ("3e-6", "1e-5")
  }
}
# Arms without runs have no row of their own: new recipes, and methods that are columns.
ROWS_OF_RUNS = ("recipes", "p3o_mismatch")
each_experiment = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


def listed(name, workdir="runs/x"):
  return sweep.read_runs(f"experiments/{name}/sweep.py", "configs/quickstart.py", {}, str(workdir))


def test_no_experiment_is_forgotten():
  assert {path.parent.name for path in FOLDER.glob("*/sweep.py")} == set(RUNS)


@each_experiment
def test_a_sweep_has_the_runs_of_its_results(name):
  found = {(run.label, run.seed) for run in listed(name)}
  results = {
    (result["label"], result["seed"]) for result in read_results(FOLDER / name / "results.json")
  }
  assert len(found) == RUNS[name] or name == "recipes"  # new recipes are there before their results
  assert results <= found
  without_results = WITHOUT_RESULTS.get(name, {("other policy", 1000)})
  assert name in ("recipes", "pretrained") or found - results <= without_results


@each_experiment
def test_the_tables_are_those_of_the_readme(name, tmp_path):
  results = read_results(FOLDER / name / "results.json")
  text = importlib.import_module(f"experiments.{name}.tables").tables(results)
  page, readme = tmp_path / "README.md", (FOLDER / name / "README.md").read_text(encoding="utf-8")
  page.write_text(readme)
  report.write_tables(page, text, results)
  assert page.read_text() == readme and "\n|" in text
  assert f"--sweep=experiments/{name}/sweep.py" in readme
  assert f"python -m experiments.{name}.tables" in readme
  recipe = re.search(r"--mode=sweep --config=(\S+)", readme)[1]
  assert (tiny.ROOT / recipe).exists()


PARTS = {
  "no run": lambda runs: [],
  "one run": lambda runs: runs[:1],
  "the pilot": lambda runs: [(label, seed) for label, seed in runs if seed >= 100],
  "the first seed": lambda runs: [(label, seed) for label, seed in runs if seed in (0, 100)],
  "one arm": lambda runs: [run for run in runs if run[0] == runs[-1][0]],
}


@each_experiment
@pytest.mark.parametrize("part", PARTS)
def test_a_sweep_that_has_only_begun_shows_what_is_there(name, part, tmp_path):
  """No claim is decided, and arms that are missing are named."""
  module = importlib.import_module(f"experiments.{name}.tables")
  results = {(r["label"], r["seed"]): r for r in read_results(FOLDER / name / "results.json")}
  begun = PARTS[part](list(results))
  text = module.tables([results[run] for run in begun])
  compared = {label for label, seed in results if seed < 100} if name not in ROWS_OF_RUNS else set()
  assert not [label for label in compared if label.partition(", seed")[0] not in text]
  assert all("undecided" in line for line in text.splitlines() if "| more |" in line)
  if hasattr(module, "draw"):
    module.draw([results[run] for run in begun], tmp_path)
    (figure,) = tmp_path.iterdir()
    assert figure.stat().st_size > 5_000


def test_the_constant_weights_are_the_means_of_fade():
  runs = importlib.import_module("experiments.language_model.sweep")
  results = read_results(FOLDER / "language_model" / "results.json")
  measured = {r["seed"]: r["measured"] for r in results if r["label"] == runs.FADE}
  means = {seed: (f"{m['α']:.4g}", f"{m['δ']:.4g}") for seed, m in measured.items()}
  assert means == {seed: (str(α), str(δ)) for seed, (α, δ) in runs.FADE_MEANS.items()}


def test_the_runs_of_the_language_model_had_the_fields_of_the_sweep():
  runs = {(run.label, run.seed): run for run in listed("language_model")}
  for result in read_results(FOLDER / "language_model" / "results.json"):
    fields = [f for f in runs[result["label"], result["seed"]].flags if f[:9] != "--config="]
    given = shlex.split(result["command"])
    assert len(fields) > 5 and not [field for field in fields if field not in given]


# --- the experiments on staleness -----------------------------------------------------------------


def quick_to_build(config):
  """The same components around less: fewer problems to write out, fewer layers to trace."""
  config = config.copy_and_resolve_references()
  config.task.kwargs.warm_start_size = config.task.kwargs.held_out_size = 8
  config.model.overrides.num_layers = config.model.overrides.unroll_layers = 1
  return config


def other_policy(tmp_path):
  """What the runs that draw rollouts of another policy read of it when they begin."""
  folder = tmp_path / "other_policy_1000"
  (folder / "checkpoints" / "80").mkdir(parents=True)
  (run,) = [run for run in listed("p3o_mismatch") if run.name == folder.name]
  (folder / "config.json").write_text(config_file.read(run.flags).to_json_best_effort())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # ml_collections' import of a config
@pytest.mark.parametrize("name", ["mu_grpo", "p3o_mismatch"])
def test_every_run_is_one_of_its_own_and_builds(name, tmp_path):
  if name == "p3o_mismatch":
    pytest.importorskip("qwix", reason="its 8-bit samplers need the extra quantized")
  other_policy(tmp_path)
  first = [run for run in listed(name, tmp_path) if run.seed == 0]
  configs = {run.label: config_file.read(run.flags) for run in first}
  assert len({config.to_json_best_effort() for config in configs.values()}) == len(configs)
  # Each source and schedule, each loss with and without veto; the rest differs in numbers only.
  name = lambda c, field: specs.parse(field, c[field]).name
  traced = {(str(c.sources), name(c, "schedule")): label for label, c in configs.items()}
  traced |= {(name(c, "loss"), c.veto.enabled): label for label, c in configs.items()}
  for label in set(traced.values()):
    build(quick_to_build(configs[label]))
  for config in configs.values():
    make_veto(config.veto)
