"""Which policy samples which batch, and that a killed run repeats itself; on a toy run."""

import contextlib
import itertools
import os
import shutil

import numpy as np
import pytest
from oracles import toys

from rlvr_jax.data import curriculum
from rlvr_jax.rollouts import batches, staleness
from rlvr_jax.rollouts.batches import (
  Batches,
  BatchSettings,
  DynamicSamplingError,
  Inputs,
  is_mixed,
  read_batch,
)
from rlvr_jax.rollouts.grading import FOREIGN, solve_rates
from rlvr_jax.rollouts.group import join
from rlvr_jax.rollouts.recorded import RecordedGroups
from rlvr_jax.rollouts.sampler import CHOICES, FINISH, ThreadSampler
from rlvr_jax.rollouts.store import RolloutStore

U = 8
VERSIONS = [0, 0, 0, 2, 2, 3, 6, 6]
# Schedule, and the version that samples each batch.
SCHEDULES = {
  "on_policy": (staleness.on_policy(), [*range(U)]),
  "fixed_lag": (staleness.fixed_lag(lag=2, num_updates=U), [0, 0, 0, 1, 2, 3, 4, 5]),
  "refresh": (staleness.updates_per_refresh(batches=2, epochs=2), [0, 0, 4, 4]),
  "stages": (staleness.stages(count=2, num_updates=U), [0, 0, 0, 0, 4, 4, 4, 4]),
  "versions": (staleness.schedule_from_versions(VERSIONS, open_ended=False), VERSIONS),
}
BATCHES = {name: [*range(U)] for name in SCHEDULES} | {"refresh": [0, 1, 0, 1, 2, 3, 2, 3]}
ABOUT = {
  "tokenizer": "bytes",
  "truncated": False,
  "shaped": False,
  "group_size": toys.G,
  "max_prompt_length": toys.S,
  "max_response_length": toys.T,
}


@pytest.fixture(scope="module", autouse=True)
def _no_power_fails():
  """Processes are killed here, machines are not: no test waits for the disk."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, "fsync", lambda descriptor: None)
    yield


class World:
  """The objects of one process of a run, whose store is on disk."""

  def __init__(self, folder, *, threaded=False, turns=1, around=None, sampler=(), **settings):
    inner = toys.local(toys.Workers(turns=turns), **dict(sampler))
    self.sampler = toys.Watched(ThreadSampler(inner, deadline_s=20.0) if threaded else inner)
    self.store = RolloutStore(folder, writable=True)
    self.around = around or toys.Around()
    self.batches = toys.make_batches(self.sampler, self.store, self.around, **settings)

  def train(self, schedule, now=None, **options):
    with contextlib.closing(self.store), contextlib.closing(self.sampler):
      args = schedule, U, self.sampler, self.batches, self.around
      return toys.train(*args, now, **options)


def kill(folder, schedule, at, *, before=False, **options):
  """Runs until the process is killed at a call of the store.

  Returns:
    What it has saved, by update; None if it ended before that call.
  """
  saved = {}
  world = World(folder, around=toys.Around(kill_at=at, kills_before=before), **options)
  try:
    world.train(schedule, saved=saved)
  except toys.Killed:
    return saved
  return None


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory):
  """(folder of a run on policy, its updates, what it has saved by update)."""
  folder, saved = tmp_path_factory.mktemp("whole"), {}
  return folder, World(folder).train(staleness.on_policy(), saved=saved), saved


@pytest.fixture
def ended(whole, tmp_path):
  """`whole` in a folder of this test."""
  folder, updates, saved = whole
  shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
  return updates, saved


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_batch_is_sampled_by_the_version_of_its_schedule(tmp_path, name):
  schedule, versions = SCHEDULES[name]
  updates = World(tmp_path).train(schedule)
  found = [(update.batch, update.versions) for update in updates]
  assert found == [(batch, (versions[batch],)) for batch in BATCHES[name]]


def make_curriculum():
  parts = {"easy": toys.problems(6), "hard": toys.problems(12)[6:]}
  settings = curriculum.Settings("problem", "learnable", rate=0.5, first=0.5, floor=0.05, seed=0)
  return curriculum.Curriculum(parts, settings)


# Every schedule once, and what else a draw depends on.
KILLED = {name: (name, {}) for name in ("refresh", "versions")} | {
  "dynamic sampling": ("on_policy", dict(max_draws=9)),
  "dynamic sampling, ahead": ("fixed_lag", dict(max_draws=9)),
  "dialogues": ("fixed_lag", dict(turns=3)),
  "sources": ("fixed_lag", dict(quotas=[2, 1], sampler=dict(sources=2))),
  "curriculum": ("fixed_lag", dict(source=make_curriculum())),
  "curriculum, dynamic sampling": ("stages", dict(source=make_curriculum(), max_draws=9)),
}


@pytest.mark.parametrize("every", [23, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KILLED)
def test_a_killed_run_repeats_itself(tmp_path, name, every):
  """Killed before or after any call of the store, it goes on from an earlier checkpoint."""
  of_schedule, options = KILLED[name]
  schedule, _ = SCHEDULES[of_schedule]
  expected = World(tmp_path / "whole", **options).train(schedule)
  num_stored = 0
  for first in range(3, 3 + every):
    for at in itertools.count(first, every):
      folder = tmp_path / str(at)
      saved = kill(folder, schedule, at, before=at % 3 == 0, **options)
      if saved is None:
        break
      step = max(0, max(saved) - at % 3)
      with RolloutStore(folder, writable=False) as store:
        stored = {(draw, index) for draw in range(9 * U) for index in store.read_groups(draw)}
      world = World(folder, **options)
      assert world.train(schedule, saved[step]) == expected[step:]
      assert world.around.warnings == [] and not stored & {*world.sampler.wanted}
      num_stored += len(stored)
    assert at > 10
    if num_stored:  # on a busy machine grades come together, and fewer calls leave groups behind
      break
  assert num_stored


def test_batches_of_the_store_are_not_sampled_again(tmp_path):
  schedule, _ = SCHEDULES["fixed_lag"]
  saved = {}
  expected = World(tmp_path).train(schedule, saved=saved)
  world = World(tmp_path)
  assert world.train(schedule, saved[0]) == expected
  assert world.sampler.wanted == [] and world.around.counted == [*range(U)]


# --- what the store has and what would be sampled -------------------------------------------------


CHANGES = {
  "none": lambda group: group,
  "unknown version": lambda group: group._replace(versions={3: "another"}),
  "other version": lambda group: group._replace(versions={2: group.versions[3]}),
  "other source": lambda group: group._replace(source=1),
  "other question": lambda group: group._replace(samples=[{"prompt": "?"}] * toys.G),
  "no such index": lambda group: group._replace(index=7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stored_group_that_would_not_be_sampled_is_not_used(tmp_path, ended, name):
  expected, saved = ended
  with RolloutStore(tmp_path, writable=True) as store:
    (_, group), _ = store.read(3)
    for number in range(3, U):
      store.set_aside(number)
    store.write_groups([CHANGES[name](group)])
  world = World(tmp_path)
  assert world.train(staleness.on_policy(), saved[3]) == expected[3:]
  assert (3, 0) in world.sampler.wanted
  assert ((3, 1) in world.sampler.wanted) == (name != "none")


DAMAGED = {
  "fixed_lag": ("fixed_lag", {}),
  "dynamic sampling": ("stages", dict(max_draws=9)),
  "sources": ("stages", dict(quotas=[2, 1], sampler=dict(sources=2))),
  "curriculum": ("stages", dict(source=make_curriculum())),
}


@pytest.mark.parametrize(
  ("name", "is_missing"), [*((name, False) for name in DAMAGED), ("fixed_lag", True)]
)
def test_of_a_damaged_batch_and_all_later_ones_the_damaged_one_is_sampled_again(
  tmp_path, name, is_missing
):
  """With dynamic sampling those too whose groups were dropped."""
  of_schedule, options = DAMAGED[name]
  schedule, _ = SCHEDULES[of_schedule]
  saved = {}
  expected = World(tmp_path, **options).train(schedule, saved=saved)
  batches = batches_of(tmp_path)
  path = tmp_path / f"{2:08d}.safetensors"
  data = path.read_bytes()
  path.unlink()
  if not is_missing:
    path.write_bytes(data[:-9])
  world = World(tmp_path, **options)
  assert world.train(schedule, saved[0]) == expected
  intact = {(group.draw, group.index) for batch in batches[3:] for group in batch.groups}
  first = batches[1].after.draws
  assert {draw for draw, _ in world.sampler.wanted} >= {*range(first, batches[2].after.draws)}
  assert not intact & {*world.sampler.wanted} and min(world.sampler.wanted) >= (first, 0)
  (warning,) = world.around.warnings
  assert "batch 2" in warning and "set aside" in warning
  names = {path.name[:8] for path in (tmp_path / "torn").iterdir()}
  assert names == {f"{number:08d}" for number in range(2 + is_missing, U)}
  assert [toys.bits_of(batch) for batch in batches_of(tmp_path)] == [*map(toys.bits_of, batches)]


def sample_with_other_weights(folder, number, version):
  """Says of a stored batch that other weights of this version have sampled it."""
  with RolloutStore(folder, writable=True) as store:
    groups, info = store.read(number)
    store.set_aside(number)
    changed = [group._replace(versions={version: "0123456789abcdef"}) for group in groups]
    store.write(number, changed, info)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_batch_of_other_weights_and_all_later_ones_are_set_aside(tmp_path, ended, threaded):
  """Of a version that this trainer has, but not with these bits."""
  expected, saved = ended
  sample_with_other_weights(tmp_path, 5, 5)
  schedule = staleness.asynchronous(max_lag=0) if threaded else staleness.on_policy()
  world = World(tmp_path, threaded=threaded)
  assert world.train(schedule, saved[0]) == expected
  assert {draw for draw, _ in world.sampler.wanted} == {5}
  (warning,) = world.around.warnings
  assert "batch 5 was sampled by version 5 with fingerprint 0123456789abcdef" in warning


def test_a_batch_of_a_later_version_waits_until_that_is_offered(tmp_path, ended):
  """By a trainer whose last updates were lost: they are repeated, and the batch is used."""
  expected, saved = ended
  world = World(tmp_path, threaded=True, waits_for_all=False)
  assert world.train(staleness.asynchronous(max_lag=4), saved[0]) == expected
  assert world.sampler.wanted == [] and world.around.warnings == []


def test_take_says_once_that_it_begins_to_wait(tmp_path):
  world, waits = World(tmp_path), []
  world.sampler.offer(toys.Policy(0, {"w": 1}, lambda: "0"))
  world.batches.open(until=2, version=0)
  take = lambda number: world.batches.take(number, before_waiting=lambda: waits.append(number))
  assert [take(0).number, take(1).number, take(0).number] == [0, 1, 0]
  assert waits == [0]  # which waits for all that have begun
  assert [batch.number for batch in world.batches.added()] == [0, 1]
  assert not world.batches.added()


# --- a thread -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("max_lag", "new_weights"), [(0, FINISH), *((4, choice) for choice in CHOICES)]
)
def test_a_thread_keeps_the_bound_of_the_lag(tmp_path, max_lag, new_weights):
  sampler = dict(new_weights=new_weights)
  world = World(tmp_path, threaded=True, waits_for_all=False, sampler=sampler)
  updates = world.train(staleness.asynchronous(max_lag=max_lag), update_s=0.03)
  assert [update.batch for update in updates] == [*range(U)]
  lags = [update.step - version for update in updates for version in update.versions]
  assert min(lags) >= 0 and max(lags) <= max_lag
  if max_lag == 4:
    assert max(lags) > 1


def test_a_killed_run_with_a_thread_goes_on(tmp_path):
  """Every batch once and in order, and no group is sampled twice by the same weights."""
  options = dict(threaded=True, waits_for_all=False)
  schedule = staleness.asynchronous(max_lag=2)
  for at in itertools.count(4, 9):
    saved = kill(folder := tmp_path / str(at), schedule, at, **options)
    if saved is None:
      break
    step = max(0, max(saved) - 1)
    world = World(folder, **options)
    updates = world.train(schedule, saved[step])
    assert [update.batch for update in updates] == [*range(step, U)]
    lags = [update.step - version for update in updates for version in update.versions]
    assert min(lags) >= 0 and max(lags) <= 2
  assert at > 20


@pytest.mark.parametrize(
  ("max_draws", "new_weights"), [(9, FINISH), *((0, choice) for choice in CHOICES)]
)
def test_a_recorded_run_is_repeated_bit_for_bit(tmp_path, new_weights, max_draws):
  """With the versions that the clock has given to its tokens.

  Bursts take longer than updates, so that on a busy machine too new weights find responses in the
  slots.
  """
  how_drawn = {"burst_steps": toys.STEPS, "slots": toys.SLOTS, "new_weights": new_weights}
  sampler = dict(new_weights=new_weights, burst_s=0.01)
  options = dict(threaded=True, waits_for_all=False, how_drawn=how_drawn, max_draws=max_draws)
  world = World(tmp_path / "rollouts", sampler=sampler, **options)
  expected = world.train(staleness.asynchronous(max_lag=4))
  schedule = staleness.simulated_asynchronous(
    max_lag=4, recorded=str(tmp_path), num_updates=U, seed=0
  )
  recorded = schedule.recorded
  if new_weights != FINISH:
    assert recorded.has_several
  several = recorded.has_several
  sampler |= dict(has_plans=several)
  if several:
    sampler |= dict(oldest_needed=schedule.oldest_sampling)
  options = dict(repeats=recorded, max_draws=max_draws, sampler=sampler)
  again = World(tmp_path / "again", **options).train(schedule)
  assert again == expected


# --- draws ----------------------------------------------------------------------------------------


def batches_of(folder):
  with RolloutStore(folder, writable=False) as store:
    return [read_batch(store, number) for number in store.numbers()]


def test_dynamic_sampling_fills_batches_with_mixed_groups_in_the_order_of_draws(tmp_path):
  schedule, _ = SCHEDULES["fixed_lag"]
  options = dict(max_draws=9, quotas=[2, 1], sampler=dict(sources=2))
  World(tmp_path, **options).train(schedule)
  batches = batches_of(tmp_path)
  next_draw = 0
  for batch in batches:
    assert all(is_mixed(group) for group in batch.groups)
    assert [group.source for group in batch.groups] == [0, 0, 1]
    draws = range(next_draw, next_draw + batch.draws)
    next_draw = batch.after.draws
    assert next_draw == draws.stop and {group.draw for group in batch.groups} <= {*draws}
    for source in (0, 1):
      places = [(g.draw, g.index) for g in batch.groups if g.source == source]
      assert places == sorted(places)
    assert batch.prompts == 3 * batch.draws
    assert batch.statistics["dynamic_sampling/prompts_per_group"] == batch.draws
    assert batch.tokens > sum(g.arrays["lengths"].sum() for g in batch.groups) or batch.draws == 1
  assert max(batch.draws for batch in batches) > 1


def test_the_limit_of_draws_ends_a_run_and_says_why(tmp_path):
  source = [toys.Problem("7+7=", "", "", {"always": "right"})] * 4
  with pytest.raises(
    DynamicSamplingError,
    match=r"2 batches of 2 prompts at update 0 have too few groups with both right and"
    r" wrong rollouts \(solve rate 1\.000\)\. Raise config\.dynamic_sampling\.max_batches",
  ):
    World(tmp_path, max_draws=2, source=source).train(SCHEDULES["on_policy"][0])


class Order:
  """Draws of a run, and what became of them."""

  def __init__(self):
    self.calls = []

  def draw(self, draw, version):
    self.calls.append(("draw", draw, version))
    return toys.problems(2)

  def observe(self, draw, solve_rates, state):
    self.calls.append(("observe", draw, len(solve_rates)))
    return state | {"observed": draw}, {"draw": float(draw)}

  def get_state(self):
    return {"calls": len(self.calls)}

  def set_state(self, state):
    pass


def test_solve_rates_are_observed_in_the_order_of_draws_dropped_groups_included(tmp_path):
  schedule, _ = SCHEDULES["fixed_lag"]
  world, order = World(tmp_path, max_draws=9), Order()
  inputs, settings = Inputs(world.sampler, order, None), BatchSettings([2], 5, max_draws=9)
  world.batches = Batches(inputs, world.store, settings, world.around.functions())
  world.train(schedule)
  observed = [draw for what, draw, _ in order.calls if what == "observe"]
  drawn = [draw for what, draw, _ in order.calls if what == "draw"]
  assert observed == drawn == [*range(len(drawn))] and len(drawn) > U
  # All of a version are observed before the next one draws.
  for number, (what, _, version) in enumerate(order.calls):
    if what == "draw" and version:
      before = {d for w, d, _ in order.calls[:number] if w == "observe"}
      assert before >= {d for w, d, v in order.calls if w == "draw" and v < version}
  batches = batches_of(tmp_path)
  for batch in batches:
    assert batch.after.problems["observed"] == batch.after.draws - 1
    first = batch.after.draws - batch.draws
    assert batch.statistics["draw"] == np.mean(range(first, batch.after.draws))


# --- recorded groups ------------------------------------------------------------------------------


def recorded_groups(folder):
  sizes = dict(max_prompt_length=toys.S, max_response_length=toys.T)
  return RecordedGroups(
    folder, tokenizer="bytes", pad_token=toys.TOKENIZER.pad_id, group_size=toys.G, **sizes
  )


def test_all_groups_of_a_run_may_be_recorded(tmp_path):
  """Nothing is drawn or sampled; they begin again after the last one."""
  World(tmp_path / "other", about=ABOUT, quotas=[3]).train(SCHEDULES["on_policy"][0])
  source = [group for batch in batches_of(tmp_path / "other") for group in batch.groups]
  recorded = recorded_groups(tmp_path / "other")
  options = dict(recorded=recorded, quotas=[5], sampler=dict(sources=0))
  world = World(tmp_path / "own", **options)
  expected = world.train(SCHEDULES["fixed_lag"][0])
  assert world.sampler.wanted == [] and [update.versions for update in expected] == [()] * U
  found = [group for batch in batches_of(tmp_path / "own") for group in batch.groups]
  assert len(found) == 5 * U > len(source) == 3 * U
  for group, other in zip(found, source + source, strict=False):
    np.testing.assert_array_equal(group.arrays["tokens"], other.arrays["tokens"])
    assert group.versions == {} and (group.source, group.samples) == (0, other.samples)
  saved = kill(tmp_path / "killed", SCHEDULES["fixed_lag"][0], 9, **options)
  again = World(tmp_path / "killed", **options).train(SCHEDULES["fixed_lag"][0], saved[max(saved)])
  assert again == expected[max(saved) :]


def test_recorded_groups_follow_those_that_are_sampled(tmp_path):
  World(tmp_path / "other", about=ABOUT).train(SCHEDULES["on_policy"][0])
  options = dict(recorded=recorded_groups(tmp_path / "other"), quotas=[2, 1])
  updates = World(tmp_path / "own", **options).train(SCHEDULES["on_policy"][0])
  assert [update.versions for update in updates] == [(t,) for t in range(U)]
  for batch in batches_of(tmp_path / "own"):
    assert [group.source for group in batch.groups] == [0, 0, 1]
    assert batch.versions.tolist() == [batch.number, batch.number, FOREIGN]
    assert batch.prompts == 2
    sampled = solve_rates(join(batch.groups))[:2]
    np.testing.assert_allclose(batch.train.solve_rate, np.mean(sampled), rtol=1e-6)


def test_times_of_the_draws_of_a_batch_add_up_and_what_is_no_time_is_their_maximum():
  parts = [{"time/slot_steps": 2.0, "fleet/running": 3.0}, {"time/slot_steps": 5.0}]
  parts += [{"fleet/running": 1.0}]
  assert batches.join_timings(parts) == {"time/slot_steps": 7.0, "fleet/running": 3.0}
