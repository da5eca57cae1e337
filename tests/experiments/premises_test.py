"""The tables of premises: figures by feature and scope, and what they are taken to say."""

import sys
import time

import numpy as np
import program_flags
import pytest
from absl import flags
from ml_collections import config_flags

from rlvr_jax.train.setup.build import build

with program_flags.set_aside(lambda name, module: name in ("task", "size", "minutes", "workdir")):
  from experiments.premises import run as premises

  _own = flags.FLAGS.flags_by_module_dict()[premises.__name__]
  flags.FLAGS.remove_flag_values([flag.name for flag in _own])

P, G = 4, 4


@pytest.mark.parametrize("size", ["small", pytest.param("long", marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ["steps", "tour"])
def test_command_lines_build_and_share_the_warm_start(task, size, tmp_path):
  configs = {}
  for name, command in premises.commands(task, size, tmp_path).items():
    values, argv = flags.FlagValues(), ["main", *command[3:-1]]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    values(argv)
    configs[name] = values.config
    configs[name].task.kwargs.warm_start_size = 8
    lags = premises.STAGE if name == "stale" else 1
    plan = build(configs[name]).schedule
    assert plan is not None and configs[name].num_updates % lags == 0
  assert configs["stale"].start.checkpoint == str(tmp_path / "on_policy" / "checkpoints" / "0")
  assert configs["on_policy"].seed == configs["stale"].seed == 100


def test_figures_of_a_block_are_those_of_its_features():
  rng = np.random.default_rng(0)
  features, A = rng.normal(size=(P * G, 5)), rng.normal(size=(P, G))
  found = premises.block_geometry(*premises.scope_blocks(features @ features.T, A, "group", seed=0))
  n_eff, ratios = [], []
  for group in range(P):
    g, a = features[group * G : group * G + G], A[group]
    n_eff.append(np.sum((a @ g) ** 2) / np.sum(a**2 * np.sum(g**2, axis=1)))
    eigenvalues = np.linalg.eigvalsh(g @ g.T)
    ratios.append(eigenvalues.sum() ** 2 / np.sum(eigenvalues**2))
  assert found["n_eff"] == pytest.approx(np.mean(n_eff))
  assert found["participation_ratio"] == pytest.approx(np.mean(ratios))
  assert found["below_1"] == np.mean(np.array(n_eff) < 1)
  assert found["alpha"] == pytest.approx(np.mean(np.clip(1 - np.array(n_eff), 0, 1)))


def test_blocks_without_a_coefficient_do_not_count():
  A = np.zeros((P, G))
  of_groups = lambda: premises.block_geometry(
    *premises.scope_blocks(np.eye(P * G), A, "group", seed=0)
  )
  assert of_groups() == {}
  A[1] = [1, -1, 1, -1]
  found = of_groups()
  assert found["n_eff"] == 1 and found["participation_ratio"] == G


def test_scopes_are_partitions():
  A = np.arange(P * G)
  of = lambda scope, seed=0: premises.scope_blocks(
    A[:, None] * 100 + A, A.reshape(P, G), scope, seed
  )
  assert of("batch")[1:] == (pytest.approx(A), 1) and of("group")[1:] == (pytest.approx(A), P)
  gram, drawn, count = of(8)
  assert count == 2 and sorted(drawn) == list(range(P * G))
  np.testing.assert_array_equal(gram, drawn[:, None] * 100 + drawn)
  assert drawn.tolist() != of(8, seed=1)[1].tolist()
  assert of(5)[1].shape == (15,) and of(5)[2] == 3


def test_lags_are_averaged_over_the_updates_that_have_them():
  record = lambda lag, ess: {
    "staleness/mean": lag,
    "behavior/ess": ess,
    "behavior/kl_k3": 0.1,
    "behavior/ratio_max": 2.0,
  }
  found = premises.means_by_lag(
    [record(0.0, 1.0), record(1.0, 0.8), record(0.0, 1.0), record(1.0, 0.6)]
  )
  assert found == {
    "0": dict(ess=1.0, kl=0.1, largest=2.0),
    "1": dict(ess=pytest.approx(0.7), kl=0.1, largest=2.0),
  }


def test_a_sitting_ends_at_its_deadline():
  sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
  assert not premises.finish(sleeper, time.monotonic() + 0.1)
  assert premises.finish([sys.executable, "-c", ""], time.monotonic() + 60)
  with pytest.raises(SystemExit, match="exit status 7"):
    premises.finish([sys.executable, "-c", "raise SystemExit(7)"], time.monotonic() + 60)


def test_a_premise_is_had_or_none_is_found():
  row = dict(participation_ratio=10.0, below_1=0.1, alpha=0.0)
  passes = {str(k): 0.3 if k == 1 else 0.97 for k in premises.KS}
  found = dict(
    length=dict(p10=70.0, p50=90.0, p90=110.0, max=130.0),
    pass_at_k={"0": passes, "200": dict.fromkeys(passes, 0.9)},
    **{"pass@64_first_low": 0.92},
    mixed_groups=0.8,
    geometry={"score, batch": dict(row, n_eff=3.0), "sampled, group": dict(row, n_eff=0.3)},
    entropy={"1": 0.5, "100": 0.3},
    entropy_end=0.2,
    by_lag={"0": dict(ess=1.0, kl=0.0, largest=1.0), "15": dict(ess=0.95, kl=0.1, largest=2.0)},
  )
  verdicts = {premise: has for _, premise, has, _ in premises.premise_rows(found)}
  assert verdicts == {
    "n_eff below 1, score": False,
    "n_eff below 1, sampled": True,
    "stale rollouts lower the ESS below 0.9": False,
    "ratios leave [0.8, 1.2]": True,
    "entropy falls to less than half": True,
    "pass@64 falls below its first interval": True,
    "pass@1 of 0.15 to 0.5, pass@64 from 0.95": True,
  }
  found["pass@64_first_low"] = 0.88
  assert not {name: has for _, name, has, _ in premises.premise_rows(found)}[
    "pass@64 falls below its first interval"
  ]
  table = premises.format_markdown(found)
  assert "| SALT | n_eff below 1, score | none found | 3.00 (score, batch), the least |" in table
