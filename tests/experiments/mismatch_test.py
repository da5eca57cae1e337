"""The comparison of losses under mismatch on a tiny policy: what must hold by construction."""

import program_flags
import pytest
from experiments.compare_test import _config


@pytest.fixture(scope="module")
def module():
  with program_flags.experiment("mismatch") as module:
    yield module


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
