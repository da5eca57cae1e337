"""Runs whose advantage needs to know the policy; what is refused."""

import pytest
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.train.setup.build import build

SMALL_ROWS = dict(batch__tokens_per_row=16, batch__tokens_per_micro_batch=64)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("advantage", "metric", "rows"),
  [
    ("otb(truncation=2.0)", "advantage/tail", {}),
    ("opob", "advantage/sequence_ess", SMALL_ROWS),
  ],
  ids=["one micro-batch", "several"],
)
def test_a_run_reports_what_it_measures(advantage, metric, rows, tmp_path):
  fields = dict(advantage=advantage, num_updates=2, diagnostics__every=2)
  train(build(tiny.config(**fields, **rows)), tmp_path)
  for record in tiny.records(tmp_path, "train"):
    assert 0 < record[metric] <= 1 + 1e-6 and record["update/skipped"] == 0


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      dict(advantage="opob", gram="streaming(feature='sampled')"),
      r"config\.advantage = 'opob' needs the norms of gradients, but config\.gram = .*'sampled'",
    ),
    (
      dict(advantage="otb", reweighting="salt"),
      r"config\.reweighting = 'salt' needs one coefficient",
    ),
    (dict(advantage="otb", loss="gmpo"), r"config\.loss = 'gmpo' works on full responses"),
  ],
  ids=["sampled", "salt", "gmpo"],
)
def test_what_does_not_fit_is_refused_before_compilation(fields, message):
  with pytest.raises(ValueError, match=message):
    build(tiny.config(**fields))
