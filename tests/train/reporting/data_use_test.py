"""How often a run sees its data: what it says of it at the start and at the first update."""

import re

import pytest
from train import tiny
from train.sums import sums

from rlvr_jax.train.reporting import data_use
from rlvr_jax.train.setup.build import build, make_schedule


def test_a_run_begins_with_both(capsys):
  """The issue's warm start: 150 batches of 64, of 60 demonstrations."""
  fields = dict(num_steps=150, batch_size=64)
  config = tiny.config(**{f"warm_start__{name}": x for name, x in fields.items()})
  parts = build(config, task=sums(warm_start_size=60))
  data_use.announce(
    parts.schedule,
    data_use.plan_warm_start(config.warm_start, parts.task, checkpoint=""),
    num_updates=config.num_updates,
    groups=parts.sources.num_live,
    problems=len(parts.task.train),
    dynamic_sampling=False,
  )
  assert capsys.readouterr().out.splitlines() == [
    # Two batches of 8 prompts at every fourth of 12 updates.
    "12 updates sample 48 prompts from 1,000 training problems, 0.048 passes over them",
    "warning: the warm start makes 160 passes over 60 demonstrations; from about 20 on the policy"
    " memorizes them. Lower config.warm_start.num_steps = 150 to at most 18, or give more"
    " demonstrations (for most tasks, config.task.kwargs.warm_start_size)",
  ]


@pytest.mark.parametrize(
  ("fields", "expected"),
  [
    (dict(schedule="on_policy", num_updates=250), "250 updates sample 2,000 prompts .*, 20 passes"),
    (dict(schedule="asynchronous", num_updates=25), "25 updates sample 200 prompts .*, 2 passes"),
    (dict(schedule="on_policy", dynamic_sampling__enabled=True),
     "12 updates sample at least 96 prompts from 100 training problems, at least 0.96 passes"),
  ],
)  # fmt: skip
def test_planned_passes(fields, expected):
  config = tiny.config(**fields)
  line = data_use.planned_passes(
    make_schedule(config.schedule, num_updates=config.num_updates, seed=config.seed),
    num_updates=config.num_updates,
    groups=8,
    problems=100,
    dynamic_sampling=config.dynamic_sampling.enabled,
  )
  assert re.match(expected, line)


def test_more_than_twenty_passes_are_warned_of():
  def warns(steps, checkpoint=""):
    config = tiny.config(warm_start__num_steps=steps, warm_start__batch_size=64)
    task = sums(warm_start_size=60)
    warm_start = data_use.plan_warm_start(config.warm_start, task, checkpoint=checkpoint)
    return data_use.warm_start_warning(warm_start) is not None

  assert not warns(18)  # 19.2 passes
  assert warns(19)  # 20.3
  assert not warns(0)
  assert not warns(150, checkpoint="another run's")  # in place of the warm start


GOOD = {
  "groups/effective": 0.5, "groups/all_wrong": 0.3, "groups/all_correct": 0.2,
  "policy/entropy": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
  ("steps", "values", "expected"),
  [
    (150, {}, None),
    (15, {"policy/entropy": 0.05}, None),  # of long regular answers
    (15, {"dynamic_sampling/prompts_per_group": 4.0}, None),
    (150, {"groups/effective": 0.03, "policy/entropy": 0.05},
     "an entropy of 0.050 nats per token, and 3% of its groups .* memorized in 160 passes over 60"
     " demonstrations. Lower config.warm_start.num_steps = 150, or give more"),
    (15, {"policy/entropy": 0.01}, "memorized in 16 passes over 60 .*. Lower config.warm_start"),
    (15, {"groups/effective": 0.05, "groups/all_wrong": 0.95},
     "5% of its groups .* It seldom succeeds. Raise config.warm_start.num_steps = 15"),
    (15, {"groups/effective": 0.05, "groups/all_correct": 0.9},
     "It solves most problems already. Choose harder ones"),
    (15, {"groups/effective": 1.0, "dynamic_sampling/prompts_per_group": 20.0}, "5% of its groups"),
    (0, {"groups/effective": 0.0, "policy/entropy": 0.0}, None),
  ],
)  # fmt: skip
def test_what_a_warm_start_leaves_is_judged_by_the_first_update(steps, values, expected):
  text = data_use.first_update_warning(data_use.WarmStart(steps, 64, 60), GOOD | values)
  assert re.search(expected, text) if expected else text is None


def test_a_warm_start_is_not_judged_by_an_update_on_nothing():
  """Where every rollout is left out, the warning of its cause is the right one."""
  assert data_use.first_update_warning(data_use.WarmStart(150, 64, 60), {}) is None
