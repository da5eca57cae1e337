"""What the notebook on staleness plots."""

import matplotlib

matplotlib.use("Agg")

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from rlvr_jax.colab import runs, staleness
from rlvr_jax.colab import toy as toys
from rlvr_jax.colab.toy import Recipe
from rlvr_jax.losses import ppo_clip
from rlvr_jax.rollouts import staleness as schedules
from rlvr_jax.rollouts.group import Group
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.setup.build import build


@pytest.fixture(scope="module")
def found():
  """One stage of four updates."""
  toy = toys.make_toy(prompts=2, length=3, vocabulary=5, width=6)
  recipe = Recipe(ppo_clip(epsilon_low=1.0, epsilon_high=4.0), learning_rate=20.0)
  schedule = schedules.stages(count=1, num_updates=4)
  runs = toys.train(toy, recipe, schedule, num_updates=4, group_size=8, seeds=(0,))
  return staleness.Stages(toy, {staleness.RELAXED: runs}, length=4, threshold=0.1)


def test_lags_of_schedules():
  by_name = staleness.named_schedules(8, refresh=2, stages=2, lag=3)
  lags = {name: staleness.lags(schedule, 8).tolist() for name, schedule in by_name.items()}
  assert lags["updates_per_refresh(batches=2)"] == [0, 1] * 4
  assert lags["stages(count=2)"] == [0, 1, 2, 3] * 2
  assert lags["fixed_lag(lag=3)"] == [0, 1, 2, 3, 3, 3, 3, 3]
  assert max(lags["simulated_asynchronous(max_lag=3)"]) <= 3


def test_the_lags_drawn_are_those_of_the_schedule():
  staleness.draw_lags(num_updates=8, refresh=2, stages=2, lag=1)
  panels = plt.gcf().axes
  assert panels[1].get_title() == "stages(count=2): mean 1.5, largest 3"
  assert panels[1].get_lines()[0].get_ydata().tolist() == [0, 1, 2, 3] * 2
  plt.close("all")


@pytest.mark.parametrize(
  ("scope", "failed"),
  [
    ("suffix", [staleness.TRAINED, staleness.TRIGGER, staleness.EXCLUDED]),
    ("trigger", [staleness.TRAINED, staleness.EXCLUDED_TRIGGER, staleness.TRAINED]),
    ("trigger_and_suffix", [0, staleness.EXCLUDED_TRIGGER, staleness.EXCLUDED]),
    ("response", [staleness.EXCLUDED, staleness.EXCLUDED_TRIGGER, staleness.EXCLUDED]),
  ],
)
def test_states_of_tokens(scope, failed):
  ratios = jnp.array([[[1.0, 0.05, 1.0], [1.0, 0.05, 1.0], [1.0, 0.5, 1.0]]])
  A = jnp.array([[-1.0, 1.0, -1.0]])
  states = staleness.veto_states(ratios, jnp.ones((1, 3, 3)), A, threshold=0.1, scope=scope)
  assert states.tolist() == [[failed, [0, 0, 0], [0, 0, 0]]]


@pytest.mark.slow
def test_nothing_is_vetoed_at_age_zero_and_a_larger_threshold_has_more_triggers(found):
  vetoed, triggers = staleness.shares_by_age(found, (0.5, 0.999))
  assert vetoed.shape == triggers.shape == (2, 4)
  assert not vetoed[:, 0].any() and not triggers[:, 0].any()
  # A suffix keeps its triggers: more of them do not always mean that more is vetoed.
  assert np.all(triggers[1] >= triggers[0]) and np.all(triggers[1, 1:] > 0)
  assert np.all(vetoed[:, -1] > 0)


def test_ages_reach_from_sampling_to_the_end_of_the_stage():
  stages = staleness.Stages(toys.make_toy(), {}, length=4, threshold=0.1)
  assert stages.ages == [0, 1, 2, 3] and stages._replace(length=32).ages[-1] == 31
  with pytest.raises(ValueError, match="age"):
    staleness.draw_scopes(stages, age=4)


def test_the_fleet_of_the_notebook_is_one():
  parts = build(runs.fleet_config())
  assert parts.config.fleet.samplers and parts.schedule.threaded
  assert parts.config.fleet.new_weights == "switch"


def test_who_sampled_what(tmp_path):
  """A batch of two groups, of two samplers; the second response goes on under newer weights."""
  of_tokens = np.array([[[0, 0, -1]], [[1, 2, 2]]], np.int32)
  versions = [{0: "f"}, {1: "g", 2: "h"}]
  samples = [dict(tokens=2, sampler="a"), dict(tokens=3, sampler="b")]
  plain = [
    Group(0, p, 0, versions[p], {"tokens": np.zeros((1, 3), np.int32)}, [samples[p]], {})
    for p in range(2)
  ]
  several = [
    group._replace(arrays=group.arrays | {"token_versions": of_group})
    for group, of_group in zip(plain, of_tokens, strict=True)
  ]
  with RolloutStore(tmp_path / "rollouts", writable=True) as store:
    store.write(0, plain, {})
    store.write(1, several, {})
  sampled = staleness.load_sampled(tmp_path)
  assert sampled.versions[0].tolist() == [[0, 0, -1], [1, 1, 1]]  # a version per group
  assert sampled.versions[1].tolist() == [[0, 0, -1], [1, 2, 2]]
  assert sorted(sampled.lags(1).tolist()) == [-1, -1, 0, 1, 1]
  assert sampled.samplers == [["a", "b"]] * 2
  staleness.draw_sampled(sampled)
  versions, lags, who = plt.gcf().axes[:3]
  assert versions.get_title() == "batch 1"  # with more versions
  assert lags.get_lines()[0].get_ydata().tolist() == [0, 1]  # the oldest token
  assert [patch.get_height() for patch in who.patches] == [0.5] * 4
  plt.close("all")
