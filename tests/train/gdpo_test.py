"""Runs with several rewards: what updates get, what is refused."""

import pytest
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.train.setup.build import build

NUMBER = "pattern(regex='^[0-9]+$')"
FIELDS = dict(advantage="gdpo(weights=(1.0, 0.5))", grading__extra=((NUMBER, 0.1),), num_updates=2)


@pytest.mark.slow
def test_updates_get_the_scores_of_each_grader(tmp_path):
  train(build(tiny.config(**FIELDS)), tmp_path)
  for record in tiny.records(tmp_path, "train"):
    # The quickly trained policy answers with a number more often than with the right one.
    assert record["advantage/reward_mean_0"] == pytest.approx(record["outcome/correct"], abs=1e-6)
    assert record["outcome/correct"] < record["advantage/reward_mean_1"] < 1
    assert record["advantage/ess"] > 0 and record["update/skipped"] == 0


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(grading__extra=()), r"config\.grading\.extra = \(\) names no grader"),
    (dict(environment__name="guess"), r"config\.environment\.name = 'guess' gives one score"),
    (dict(overlong__buffer=2), r"config\.overlong\.buffer = 2 shapes only the sum"),
    (dict(sources__recorded__fraction=0.5), r"config\.sources\.recorded\.fraction = 0\.5"),
    (
      dict(advantage="gdpo(weights=(1.0,))"),
      r"weights = \(1\.0,\) has length 1, but there are K = 2 rewards",
    ),
  ],
  ids=["one grader", "environment", "overlong", "recorded", "weights"],
)
def test_what_has_no_rewards_by_name_is_refused_before_compilation(fields, message):
  with pytest.raises(ValueError, match=message):
    build(tiny.config(**FIELDS | fields))


def test_an_unknown_need_is_refused(tmp_path, monkeypatch):
  (tmp_path / "needy.py").write_text(
    "from rlvr_jax.advantages import grpo\n\n"
    "def needy():\n  return grpo()._replace(needs=('moods',))\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(
    ValueError, match=r"field `needs` names \['moods'\], which no batch has; allowed are"
  ):
    build(tiny.config(advantage="needy:needy"))
