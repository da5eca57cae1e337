"""How often a run sees its data: what it says of it at the start and at the first update."""

import re

import pytest
from train import tiny
from train.sums import sums

from rlvr_jax.train import data_use
from rlvr_jax.train.build import build


def lines(capsys, **fields):
  data_use.announce(build(tiny.config(**fields)))
  return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    # Two batches of 8 prompts at every fourth of 12 updates.
    (dict(), "12 updates sample 48 prompts from 1,000 training problems: 0.048 passes over them"),
    (dict(schedule="on_policy", num_updates=250, task__kwargs=dict(train_size=100)),
     "250 updates sample 2,000 prompts from 100 training problems: 20 passes over them"),
    (dict(schedule="asynchronous", num_updates=25),
     "25 updates sample 200 prompts from 1,000 training problems: 0.2 passes over them"),
    (dict(schedule="on_policy", dynamic_sampling__enabled=True),
     "12 updates sample at least 96 prompts from 1,000 training problems: at least 0.096 passes"
     " over them"),
    (dict(schedule="on_policy", sources__quantized__fraction=0.25),
     "12 updates sample 96 prompts from 1,000 training problems: 0.096 passes over them"),
  ],
)  # fmt: skip
def test_passes_over_the_training_problems(capsys, fields, expected):
  assert lines(capsys, **fields) == [expected]


def test_a_warm_start_of_many_passes_is_warned_of(capsys):
  """The issue's: 60 demonstrations, 150 batches of 64."""
  of = lambda steps, size: dict(
    warm_start__num_steps=steps, warm_start__batch_size=64,
    task__kwargs=dict(warm_start_size=size),
  )  # fmt: skip
  _, warning = lines(capsys, **of(150, 60))
  assert warning == (
    "warning: config.warm_start.num_steps = 150 batches of 64 are 160 passes over 60"
    " demonstrations, which the policy memorizes from some 20 on: lower it to at most 18, or give"
    " more demonstrations (the task's warm_start_size)"
  )
  assert len(lines(capsys, **of(18, 60))) == 1  # 19.2 passes
  assert len(lines(capsys, **of(19, 60))) == 2  # 20.3
  assert len(lines(capsys, **of(0, 60))) == 1


GOOD = {
  "groups/effective": 0.5, "groups/all_wrong": 0.3, "groups/all_correct": 0.2,
  "policy/entropy": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
  ("steps", "values", "found"),
  [
    (150, {}, None),
    (15, {"policy/entropy": 0.05}, None),  # of long regular answers
    (15, {"dynamic_sampling/prompts_per_group": 4.0}, None),
    (150, {"groups/effective": 0.03, "policy/entropy": 0.05},
     "an entropy of 0.050 nats per token, and 3% of its groups .*; it repeats what 160 passes over"
     " 60 demonstrations have taught: lower config.warm_start.num_steps = 150, or give more"),
    (15, {"policy/entropy": 0.01}, "it repeats what 16 passes over 60 .*: lower config.warm_start"),
    (15, {"groups/effective": 0.05, "groups/all_wrong": 0.95},
     "5% of its groups .*; it seldom succeeds: raise config.warm_start.num_steps = 15"),
    (15, {"groups/effective": 0.05, "groups/all_correct": 0.9},
     "it solves most problems already: choose harder ones"),
    (15, {"groups/effective": 1.0, "dynamic_sampling/prompts_per_group": 20.0}, "5% of its groups"),
    (0, {"groups/effective": 0.0, "policy/entropy": 0.0}, None),
  ],
)  # fmt: skip
def test_what_a_warm_start_leaves_is_judged_by_the_first_update(steps, values, found):
  config = tiny.config(warm_start__num_steps=steps, warm_start__batch_size=64)
  text = data_use.first_update_warning(config, sums(warm_start_size=60), GOOD | values)
  assert re.search(found, text) if found else text is None
