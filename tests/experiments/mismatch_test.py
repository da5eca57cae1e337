"""The comparison of losses under mismatch on a tiny policy: what must hold by construction."""

import importlib.util
import pathlib

import program_flags
import pytest
from absl import flags
from experiments.compare_test import _config

_FILE = pathlib.Path(__file__).parents[2] / "experiments" / "mismatch" / "__main__.py"


@pytest.fixture(scope="module")
def module():
  spec = importlib.util.spec_from_file_location("mismatch_program", _FILE)
  module = importlib.util.module_from_spec(spec)
  with program_flags.set_aside(lambda name, module: module == "rlvr_jax.main"):
    before = set(flags.FLAGS)
    spec.loader.exec_module(module)
    yield module
    flags.FLAGS.remove_flag_values(set(flags.FLAGS) - before)


@pytest.mark.slow
def test_where_sampler_and_policy_agree_losses_do_too(module, tmp_path):
  labels = ["policy gradient", "ppo_clip", "dppo", "ppo_clip, tis", "ppo_clip, k3_rejection"]
  losses = {label: module.LOSSES[label] for label in labels}
  rows = module.run(tmp_path, _config(), before=2, lags=[6], fresh=2, losses=losses)
  assert [*rows] == ["exact", "fp8 copy", "top-p 0.95", "lag 6"]
  plain = rows["exact"]["policy gradient"]
  for label in labels:
    row = rows["exact"][label]
    assert row["ESS"] == pytest.approx(1.0, abs=1e-5) and row["bounded"] == 0
    assert row["norm"] == 1 and row["cosine"] == pytest.approx(plain["cosine"], abs=1e-4)
    for condition in ("fp8 copy", "lag 6"):
      assert rows[condition][label]["ESS"] < 1 - 1e-7
  # At the same parameters the reference is the same; where rollouts are the exact ones, too.
  assert rows["fp8 copy"]["fresh"] == rows["exact"]["fresh"] != rows["lag 6"]["fresh"]
  assert rows["lag 6"]["ppo_clip"]["bounded"] > 0
  text = (tmp_path / "mismatch.md").read_text()
  assert text.count("\n") == len(labels) + 3 and (tmp_path / "mismatch.png").stat().st_size > 0
