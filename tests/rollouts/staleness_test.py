"""Schedules: plans written out by hand, and what must hold of any plan."""

import collections
import inspect
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.staleness import plan
from rlvr_jax.rollouts.store import RolloutStore, StoreError


def sampled(schedule, updates):
  """Version of every batch sampled before updates 0 … updates − 1, by batch number."""
  return [t for t in range(updates) for _ in range(schedule.samples(t))]


def versions(schedule, updates):
  return [version for _, version in plan(schedule, updates)]


def lags(schedule, updates):
  return [t - version for t, version in enumerate(versions(schedule, updates))]


@st.composite
def any_schedule(draw):
  """A schedule with a plan, and how many updates to look at: whole refreshes of it."""
  kind = draw(st.sampled_from(["on_policy", "refresh", "stages", "lag", "simulated"]))
  updates = draw(st.integers(1, 30))
  small = st.integers(0, 8)
  if kind == "on_policy":
    return staleness.on_policy(), updates
  if kind == "refresh":
    batches, epochs = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    refreshes = draw(st.integers(1, 3))
    schedule = staleness.updates_per_refresh(batches=batches, epochs=epochs)
    return schedule, refreshes * batches * epochs
  if kind == "stages":
    count = draw(st.integers(1, 6))
    updates = count * draw(st.integers(1, 6))
    return staleness.stages(count=count, num_updates=updates), updates
  if kind == "lag":
    return staleness.fixed_lag(lag=draw(small), num_updates=updates), updates
  seed = draw(st.integers(0, 2**32 - 1))
  schedule = staleness.simulated_asynchronous(max_lag=draw(small), num_updates=updates, seed=seed)
  return schedule, updates


@given(any_schedule())
@settings(max_examples=150, deadline=None)
def test_draws_what_the_updates_train_on_and_no_more_and_no_later(case):
  schedule, updates = case
  made = sampled(schedule, updates)
  trained = [schedule.batch(t) for t in range(updates)]
  assert set(trained) == set(range(len(made)))  # each is used, none is missing
  assert all(made[b] <= t for t, b in enumerate(trained))
  assert plan(schedule, updates) == [(b, made[b]) for b in trained]


@given(any_schedule())
@settings(max_examples=150, deadline=None)
def test_first_drops_all_that_is_used_up_and_nothing_else(case):
  schedule, updates = case
  trained = [schedule.batch(t) for t in range(updates)]
  for t in range(updates):
    assert schedule.first(t) == min(trained[t:])


def test_two_batches_in_two_epochs():
  schedule = staleness.updates_per_refresh(batches=2, epochs=2)
  table = [  # sampled before it, trained on, lowest number kept
    (2, 0, 0),
    (0, 1, 0),
    (0, 0, 0),
    (0, 1, 1),
    (2, 2, 2),
    (0, 3, 2),
    (0, 2, 2),
    (0, 3, 3),
    (2, 4, 4),
  ]
  assert table == [(schedule.samples(t), schedule.batch(t), schedule.first(t)) for t in range(9)]
  assert versions(schedule, 9) == [0, 0, 0, 0, 4, 4, 4, 4, 8]


def test_a_run_may_end_within_a_refresh():
  schedule = staleness.updates_per_refresh(batches=3, epochs=1)
  assert plan(schedule, 5) == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3)]
  assert len(sampled(schedule, 5)) == 6


def test_stages_draw_all_they_train_on_at_their_start():
  schedule = staleness.stages(count=2, num_updates=6)
  assert [schedule.samples(t) for t in range(6)] == [3, 0, 0, 3, 0, 0]
  assert plan(schedule, 6) == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3), (5, 3)]
  assert schedule.stage_length == 3
  paper = staleness.stages(num_updates=4096)
  assert paper.stage_length == 1024
  assert max(lags(paper, 4096)) == 1023


@pytest.mark.parametrize(
  "schedule",
  [
    staleness.stages(count=12, num_updates=12),
    staleness.fixed_lag(lag=0, num_updates=12),
    staleness.simulated_asynchronous(max_lag=0, num_updates=12, seed=3),
    staleness.updates_per_refresh(),
  ],
)
def test_each_without_staleness_is_on_policy(schedule):
  on_policy = staleness.on_policy()
  for t in range(12):
    assert schedule.samples(t) == on_policy.samples(t)
    assert schedule.batch(t) == on_policy.batch(t)
    assert schedule.first(t) == on_policy.first(t)


def test_a_run_without_updates_has_a_schedule():
  for make in (staleness.stages, lambda num_updates: simulated(updates=num_updates)):
    schedule = make(num_updates=0)
    assert plan(schedule, 0) == []
    schedule.samples(0)


@pytest.mark.parametrize(
  ("schedule", "batches"),
  [
    (staleness.on_policy(), 1),
    (staleness.updates_per_refresh(batches=3, epochs=2), 3),
    (staleness.stages(count=2, num_updates=12), 6),
    (staleness.fixed_lag(lag=4, num_updates=12), 1),  # 5 before the first update
    (staleness.asynchronous(max_lag=4), 1),
  ],
)
def test_batches_of_most_refreshes(schedule, batches):
  assert schedule.batches_per_refresh(12) == batches
  assert schedule.batches_per_refresh(0) == 1


@given(st.integers(0, 12), st.integers(0, 40))
@settings(deadline=None)
def test_fixed_lag_is_exact_after_its_first_updates(lag, updates):
  measured = lags(staleness.fixed_lag(lag=lag, num_updates=updates), updates)
  assert measured[lag:] == [lag] * max(0, updates - lag)
  assert measured[:lag] == list(range(updates))[:lag]


def simulated(seed=0, max_lag=4, updates=64, **kwargs):
  return staleness.simulated_asynchronous(max_lag=max_lag, num_updates=updates, seed=seed, **kwargs)


@given(st.integers(0, 2**32 - 1), st.integers(0, 8), st.integers(0, 30))
@settings(deadline=None)
def test_simulated_lags_are_bounded_first_in_first_out_and_repeat(seed, max_lag, updates):
  measured = versions(simulated(seed, max_lag, updates), updates)
  assert all(0 <= t - v <= max_lag for t, v in enumerate(measured))
  assert measured == sorted(measured)
  assert measured == versions(simulated(seed, max_lag, updates), updates)


def test_simulated_versions_from_the_lags_of_a_seed():
  """The lags are what NumPy samples, the versions are worked out from them by hand."""
  sampled_lags = [1, 2, 4, 1, 2, 4, 4, 3, 4, 3, 4, 2, 2, 2, 3, 2]
  for batch, lag in enumerate(sampled_lags):
    entropy = np.random.SeedSequence(5, spawn_key=(batch,))
    assert np.random.default_rng(entropy).integers(0, 5) == lag
  by_hand = [0, 0, 0, 2, 2, 2, 2, 4, 4, 6, 6, 9, 10, 11, 11, 13]
  assert versions(simulated(seed=5, updates=16), 16) == by_hand


def test_simulated_lags_have_the_distribution_that_is_documented():
  """P(lag ≥ j) = Π_{i ≤ j} (1 − i/(L+1)), counted by hand for L = 2: 1, 2/3, 2/9."""
  updates = 20_000
  counts = collections.Counter(lags(simulated(max_lag=2, updates=updates), updates))
  expected = {0: 1 / 3, 1: 4 / 9, 2: 2 / 9}
  assert set(counts) == set(expected)
  for lag, share in expected.items():
    # Neighbouring lags are dependent, over max_lag updates: at most thrice the variance, 5 sigma.
    sigma = math.sqrt(3 * share * (1 - share) / updates)
    assert counts[lag] / updates == pytest.approx(share, abs=5 * sigma)


@pytest.mark.parametrize(
  ("versions", "message"),
  [
    ([0, 0, 3], "batch 2 was sampled by version 3, which comes after update 2"),
    ([0, 1, 1, 0], "batch 3 was sampled by version 0 after a batch of version 1"),
    ([0, 0, 0, 0], "batch 3 was sampled by version 0, a lag of 3 updates, above max_lag = 2"),
  ],
)
def test_versions_that_no_queue_gives_are_refused(versions, message):
  with pytest.raises(ValueError, match=message):
    staleness.check_versions("here", [[v] for v in versions], max_lag=2)
  staleness.check_versions("here", [[v] for v in [0, 0, 0, 1, 4]], max_lag=2)


def info_of(*versions):
  """What a store has beside the groups of a batch, as far as a repetition reads it."""
  return {"versions": dict.fromkeys(map(str, versions), "f"), "drawn": []}


def test_a_batch_of_several_versions_is_sampled_when_the_newest_is_there(tmp_path):
  several = [[0], [0], [0, 1, 2], [1, 3], [2, 3], [5]]
  drawn = staleness.Drawn(0, {}, 0, burst_steps=16, slots=4, new_weights="switch")
  with RolloutStore(tmp_path / "rollouts", writable=True) as store:
    for number, versions in enumerate(several):
      how = [drawn._replace(draw=number)._asdict()]
      store.write(number, [], info_of(*versions) | {"drawn": how})
    store.write(6, [], info_of(5, 6))
  schedule = simulated(max_lag=2, updates=6, recorded=str(tmp_path))
  assert plan(schedule, 6) == [(0, 0), (1, 0), (2, 2), (3, 3), (4, 3), (5, 5)]
  assert [schedule.refreshes(t) for t in range(6)] == [True] * 4 + [False, True]
  assert [schedule.recorded.oldest_needed(t) for t in range(7)] == [0, 0, 0, 1, 5, 5, 6]
  assert [schedule.oldest_trained(t) for t in range(7)] == [0, 0, 0, 1, 2, 5, 6]
  with pytest.raises(ValueError, match=r"batch 2 .* version 0, a lag of 2 updates, above"):
    simulated(max_lag=1, updates=6, recorded=str(tmp_path))
  message = "several versions have sampled batch 6, which has no record of how it was drawn"
  with pytest.raises(ValueError, match=message):
    simulated(max_lag=2, updates=7, recorded=str(tmp_path))


def test_groups_that_dynamic_sampling_drops_have_versions_too(tmp_path):
  """A batch of two draws: the first has the versions 0 and 2 in a group that was dropped."""
  first = np.array([[[0, 0, -1], [0, 2, 2]], [[0, 0, 0], [0, -1, 0]]], np.int32)
  second = np.array([1, 2], np.int32)  # a version for each group
  drawn = staleness.Drawn(0, {}, 0, burst_steps=16, slots=4, new_weights="switch")
  draws = [
    drawn._replace(draw=n, token_versions=staleness.encode_versions(versions))._asdict()
    for n, versions in enumerate((first, second))
  ]
  assert draws[0]["token_versions"] == [[[0, 2], [0, 1, 2, 2]], [[0, 3], [0, 1, -1, 1, 0, 1]]]
  with RolloutStore(tmp_path / "rollouts", writable=True) as store:
    for number in range(2):
      store.write(number, [], info_of(0))
    store.write(2, [], info_of(0) | {"drawn": draws})
  recorded = simulated(max_lag=2, updates=3, recorded=str(tmp_path)).recorded
  assert recorded.versions == [[0], [0], [0, 1, 2]]
  np.testing.assert_array_equal(recorded.token_versions(0)[..., :3], first)
  assert (recorded.token_versions(0)[..., 3:] == -1).all()
  assert recorded.token_versions(1).tolist() == [[[1]], [[2]]]
  assert recorded.drawn(1).draw == 1 and recorded.drawn(2) is None


def test_a_recorded_run_is_replayed_exactly(tmp_path):
  """Whatever the seed; the store still knows a deleted batch, and one that was sampled again."""
  recorded = [0, 0, 0, 1, 3, 3]
  with RolloutStore(tmp_path / "rollouts", writable=True) as store:
    for number, version in enumerate([0, 0, 0, 1, 2, 3]):
      store.write(number, [], info_of(version))
    store.remove(1)
    store.set_aside(4)
    store.write(4, [], info_of(3))
  for seed, updates in [(0, 6), (1, 6), (0, 4)]:
    schedule = simulated(seed, max_lag=2, updates=updates, recorded=str(tmp_path))
    assert plan(schedule, updates) == list(enumerate(recorded))[:updates]
  with pytest.raises(ValueError, match=r"has no batch 6, .* lower num_updates = 8 to 6"):
    simulated(updates=8, recorded=str(tmp_path))
  with pytest.raises(ValueError, match="a lag of 2 updates, above max_lag = 1"):
    simulated(max_lag=1, updates=6, recorded=str(tmp_path))
  with pytest.raises(StoreError, match="nowhere/rollouts does not exist"):
    simulated(updates=6, recorded=str(tmp_path / "nowhere"))


def test_asynchronous_is_left_to_the_clock():
  schedule = staleness.asynchronous(max_lag=3)
  assert schedule.threaded
  fixed = staleness.fixed_lag(lag=3, num_updates=9)  # the same limit, until all have begun
  assert [schedule.limit(v) for v in range(9)] == [4, 5, 6, 7, 8, 9, 10, 11, 12]
  assert [fixed.limit(v) for v in range(9)] == [min(v + 4, 9) for v in range(9)]
  assert [schedule.oldest_version(b) for b in range(6)] == [0, 0, 0, 0, 1, 2]
  assert [schedule.oldest_sampling(t) for t in range(6)] == [0, 0, 0, 0, 1, 2]
  assert [fixed.oldest_sampling(t) for t in range(6)] == [0, 1, 2, 3, 4, 5]
  assert [schedule.batch(t) for t in range(3)] == [schedule.first(t) for t in range(3)] == [0, 1, 2]
  with pytest.raises(ValueError, match="real-time schedule has no plan, since its lags depend"):
    plan(schedule, 1)
  assert all(map(schedule.refreshes, range(3)))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"limit": lambda v: v}, "update 0 trains on batch 0, but no batch is sampled"),
    ({"batch": lambda t: t + 1}, "update 0 trains on batch 1"),
    (
      {"batch": lambda t: 0},
      "update 1 trains on batch 0, but only batches 1 to 1 are available before this update",
    ),
  ],
)
def test_plan_finds_a_schedule_out_of_order(change, message):
  with pytest.raises(ValueError, match=message):
    plan(staleness.on_policy()._replace(**change), 3)


def test_a_run_may_be_prolonged_where_its_plan_does_not_depend_on_its_length():
  """Open-ended is what has the same samples and batches under any num_updates."""
  made = {
    "fixed_lag": lambda lag, n: staleness.fixed_lag(lag=lag, num_updates=n),
    "simulated": lambda lag, n: simulated(max_lag=lag, updates=n),
    "stages": lambda lag, n: staleness.stages(count=lag + 2, num_updates=n),
  }
  for make, lag in itertools.product(made.values(), (0, 2)):
    short, long = make(lag, 8), make(lag, 40)
    same = all(short.samples(t) == long.samples(t) for t in range(8))
    assert short.open_ended == long.open_ended == same
  assert staleness.on_policy().open_ended
  assert staleness.updates_per_refresh(batches=2, epochs=3).open_ended
  assert staleness.asynchronous().open_ended


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: staleness.updates_per_refresh(batches=0), "batches = 0 .* to 1 or more"),
    (lambda: staleness.updates_per_refresh(epochs=1.5), "epochs = 1.5 .* to 1 or more"),
    (lambda: staleness.stages(count=0, num_updates=4), "count = 0 .* to 1 or more"),
    (
      lambda: staleness.stages(num_updates=10),
      "count = 4 does not divide num_updates = 10; set count to 2 or 5, .* such as 12",
    ),
    (lambda: staleness.stages(count=9, num_updates=6), "set count to 6, .* such as 9"),
    (lambda: staleness.stages(num_updates=-4), "num_updates = -4 .* to 0 or more"),
    (lambda: staleness.fixed_lag(lag=1, num_updates=2.5), "num_updates = 2.5 .* to 0 or more"),
    (lambda: simulated(updates=-1), "num_updates = -1 .* to 0 or more"),
    (lambda: staleness.fixed_lag(lag=-1, num_updates=4), "lag = -1 .* to 0 or more"),
    (lambda: simulated(max_lag=-1), "max_lag = -1 .* to 0 or more"),
    (lambda: simulated(seed=-1), "seed = -1 .* to 0 or more"),
    (lambda: staleness.asynchronous(max_lag=True), "max_lag = True"),
  ],
)
def test_bad_hyper_parameters_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_exports_are_documented_factories_that_take_what_the_caller_has():
  for name in staleness.__all__:
    factory = getattr(staleness, name)
    assert factory.__name__ == name and factory.__doc__
    for parameter in inspect.signature(factory).parameters.values():
      assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
      given_by_caller = parameter.name in ("num_updates", "seed")
      assert given_by_caller == (parameter.default is parameter.empty) or parameter.name == "lag"


def test_a_limit_that_never_lets_a_batch_begin_is_an_error():
  schedule = staleness.asynchronous(max_lag=1)._replace(limit=lambda v: min(v + 2, 3))
  assert [schedule.oldest_version(b) for b in range(3)] == [0, 0, 1]
  message = (
    "the schedule's function `limit` lets no version sample batch 3 before update 3; return larger"
    " numbers"
  )
  with pytest.raises(ValueError, match=message):
    schedule.oldest_version(3)
