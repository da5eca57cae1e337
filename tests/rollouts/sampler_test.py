"""Samplers on toy programs: nothing depends on what comes when; sources, plans, ends."""

import gc
import itertools
import json
import threading
import time
import weakref

import numpy as np
import pytest
from oracles import toys

from rlvr_jax.rewards import Grade, Outcome
from rlvr_jax.rollouts.answers import Processes
from rlvr_jax.rollouts.grading import sampled_places
from rlvr_jax.rollouts.group import Draw, Policy
from rlvr_jax.rollouts.sampler import (
  FINISH,
  RECOMPUTE,
  SWITCH,
  LocalSampler,
  ReplayError,
  SamplerSettings,
  SamplerStoppedError,
  SamplingSource,
  ThreadSampler,
)

P = 4


def policy(version):
  return Policy(version, {"w": 100 + version}, lambda: f"{version:08x}")


def draw(number=0, *, sources=None, plan=None, version=0):
  return Draw(number, toys.problems(P), 5, version, sources or [0] * P, plan)


def take_all(sampler, count=P):
  """The groups of draws, by number and index."""
  groups = []
  while len(groups) < count:
    groups += sampler.take()
  assert len(groups) == count
  return {(group.draw, group.index): group for group in groups}


def sampled(sampler, *draws):
  sampler.offer(policy(0))
  for one in draws or (draw(),):
    sampler.want(one, range(P))
  return take_all(sampler, P * max(len(draws), 1))


def assert_same(groups, expected):
  assert groups.keys() == expected.keys()
  for place, group in groups.items():
    other = expected[place]
    assert group.arrays.keys() == other.arrays.keys()
    for name, array in group.arrays.items():
      np.testing.assert_array_equal(array, other.arrays[name], name)
    assert group._replace(arrays={}) == other._replace(arrays={})


@pytest.mark.parametrize("turns", [1, 3])
def test_a_group_does_not_depend_on_delays_neighbors_or_slots(turns):
  make = lambda seed, **options: toys.local(toys.Workers(turns=turns, seed=seed), **options)
  expected = sampled(make(0), draw(0), draw(1))
  for seed, slots in ((1, 2), (2, 16)):
    assert_same(sampled(make(seed, slots=slots), draw(1), draw(0)), expected)
  sampler = make(3)
  sampler.offer(policy(0))
  for index in (2, 0):
    sampler.want(draw(1), [index])
  assert_same(take_all(sampler, 2), {(1, index): expected[1, index] for index in (0, 2)})
  thread = ThreadSampler(make(4), deadline_s=20.0)
  assert_same(sampled(thread, draw(0), draw(1)), expected)
  thread.close()
  if turns > 1:
    assert max(group.arrays["turns"].max() for group in expected.values()) == 4


def test_a_dialogue_s_environment_is_closed():
  workers = toys.Workers(turns=3)
  sampled(toys.local(workers))
  histories = workers.dialogues.values()
  # One of each problem shows how its dialogues begin; those that were cut off at once have none.
  assert P < len(histories) <= P + P * toys.G
  assert all(history[-1] == "closed" for history in histories)


# --- sources --------------------------------------------------------------------------------------


class Weights:
  def __repr__(self):
    return "weights"


class HeldGrades(toys.Workers):
  """Grades come when `release` is called."""

  def __init__(self):
    super().__init__()
    self.held = threading.Event()

  def grade(self, texts, references):
    self.graded += texts
    return self._pool.submit(lambda: self.held.wait(20) and [Grade(Outcome.WRONG)])


@pytest.fixture
def _only_new_garbage():
  """Collections look at objects of this test alone, not at all that jax has made."""
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.mark.usefixtures("_only_new_garbage")
def test_a_source_begins_when_the_one_before_has_sampled_and_its_weights_are_released():
  """Also while grades of the first one are outstanding."""
  workers, loads, alive = HeldGrades(), [], []

  def source(number):
    def load(offered):
      gc.collect()
      alive.append([reference() is not None for _, reference in loads])
      weights = Weights()
      loads.append((number, weakref.ref(weights)))
      return weights

    return SamplingSource(toys.ToyPrograms(), load, of_this_run=number == 0)

  settings = SamplerSettings(toys.G)
  sources = [source(0), source(1)]
  sampler = LocalSampler(sources, toys.grading(), workers.answers(), settings)
  sampler.offer(policy(7))
  sampler.want(draw(sources=[0, 0, 1, 1]), range(P))
  for _ in range(200):
    if len(workers.graded) < P * toys.G:
      sampler.step()
  assert len(workers.graded) == P * toys.G and sampler.poll() == []
  assert [number for number, _ in loads] == [0, 1] and alive == [[], [False]]
  workers.held.set()
  groups = take_all(sampler)
  assert {index: group.versions for (_, index), group in groups.items()} == {
    0: {7: "00000007"}, 1: {7: "00000007"}, 2: {}, 3: {}
  }  # fmt: skip
  assert [groups[0, index].source for index in range(P)] == [0, 0, 1, 1]


def test_sources_have_other_noise():
  both = sampled(toys.local(sources=2), draw(sources=[0, 0, 1, 1]))
  alone = sampled(toys.local(), draw())
  keys = lambda groups, index: groups[0, index].arrays["tokens"].tobytes()
  assert all(keys(both, index) != keys(alone, index) for index in (2, 3))


@pytest.mark.parametrize(("turns", "new_weights"), [(1, SWITCH), (3, FINISH)])
def test_examples_have_the_arrays_of_sampled_groups(turns, new_weights):
  sampler = toys.local(toys.Workers(turns=turns), sources=2, new_weights=new_weights)
  examples = sampler.examples()
  groups = sampled(sampler, draw(sources=[0, 0, 1, 1]))
  kinds = lambda group: {name: (a.shape, a.dtype) for name, a in group.arrays.items()}
  for group in groups.values():
    example = examples[group.source]
    assert kinds(example) == kinds(group) and bool(example.versions) == bool(group.versions)


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_weights", [SWITCH, RECOMPUTE])
def test_newer_weights_go_on_with_responses_from_the_next_burst_on(new_weights):
  sampler = toys.local(new_weights=new_weights)
  sampler.want(draw(), range(P))
  for version in range(4):
    sampler.offer(policy(version))
    sampler.step()
  groups = take_all(sampler)
  several = 0
  for group in groups.values():
    versions, lengths = group.arrays["token_versions"], group.arrays["lengths"]
    for row, length in zip(versions, lengths, strict=True):
      assert (row[length:] == -1).all() and (np.diff(row[:length]) >= 0).all()
      assert (np.flatnonzero(np.diff(row[:length])) % toys.STEPS == toys.STEPS - 1).all()
    sampled_by = {*np.unique(versions).tolist()} - {-1}
    assert group.versions == {version: f"{version:08x}" for version in sampled_by}
    several += len(sampled_by) > 1
  assert several
  # The plan of these versions repeats them, whatever the order of the groups.
  plan = np.stack([groups[0, index].arrays["token_versions"] for index in range(P)])
  again = toys.local(new_weights=new_weights, has_plans=True, oldest_needed=lambda version: 0)
  for version in range(4):
    again.offer(policy(version))
  for index in (3, 1, 0, 2):
    again.want(draw(plan=plan), [index])
  assert_same(take_all(again), groups)


def test_a_response_that_finishes_keeps_its_weights():
  sampler = toys.local()
  sampler.want(draw(), range(P))
  for version in range(5):
    sampler.offer(policy(version))
    sampler.step()
  groups = take_all(sampler)
  assert all(len(group.versions) == 1 for group in groups.values())
  assert len({version for group in groups.values() for version in group.versions}) > 1


def test_a_token_beyond_its_plan_is_said():
  plan = np.full((P, toys.G, toys.T), -1, np.int32)
  plan[..., : toys.STEPS] = 0
  sampler = toys.local(has_plans=True, new_weights=SWITCH)
  with pytest.raises(ReplayError, match=r"differs from the recorded run: version -1 .* token 4 of"):
    sampled(sampler, draw(plan=plan))


# --- measurements ---------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 3])
def test_measurements_are_sums_since_the_last_call(turns):
  sampler = toys.local(toys.Workers(turns=turns))
  groups = sampled(sampler)
  first = sampler.measure()
  tokens = sum(sampled_places(group.arrays).sum() for group in groups.values())
  assert first["time/slot_tokens"] == tokens
  assert first["time/slot_steps"] >= first["time/slot_tokens"]
  assert first["time/slot_steps"] % toys.SLOTS == 0 and first["time/generate_seconds"] > 0
  assert (first["time/replies"] > 0) == (turns > 1) == (first["time/rebuilt_tokens"] > 0)
  assert not any(sampler.measure().values())
  sampler.want(draw(), range(P))
  take_all(sampler)
  assert sampler.measure()["time/slot_tokens"] == first["time/slot_tokens"]


def test_progress_is_told_after_every_burst():
  told = []
  source = SamplingSource(toys.ToyPrograms(), lambda offered: 1)
  args = [source], toys.grading(), toys.Workers().answers(), SamplerSettings(toys.G), told.append
  sampled(LocalSampler(*args))
  assert sum(progress.finished for progress in told) == P and told[-1].left == 0
  assert all(a.left >= b.left for a, b in itertools.pairwise(told))


# --- several processes ----------------------------------------------------------------------------


class Together:
  """Threads as the processes of a run."""

  def __init__(self, count):
    self._barrier, self._results = threading.Barrier(count, timeout=20), [None] * count

  def process(self, index):
    def gather(action):
      self._results[index] = json.dumps(action())
      self._barrier.wait()
      results = [json.loads(result) for result in self._results]
      self._barrier.wait()
      return results

    return Processes(index, len(self._results), gather)


@pytest.mark.parametrize("turns", [1, 3])
def test_all_processes_sample_alike_and_share_the_grading(turns):
  expected = sampled(toys.local(toys.Workers(turns=turns)))
  together, found = Together(2), {}
  workers = [toys.Workers(turns=turns, seed=n, delay_s=0.004 * n) for n in range(2)]

  def run(number):
    sampler = toys.local(workers[number], processes=together.process(number))
    found[number] = sampled(sampler), sampler.measure()["time/slot_steps"]

  threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert_same(found[0][0], expected)
  assert_same(found[1][0], expected)
  assert found[0][1] == found[1][1]  # burst by burst
  if turns == 1:
    assert [len(of_process.graded) for of_process in workers] == [P * toys.G // 2] * 2
  else:
    assert workers[0].dialogues and not workers[1].dialogues


# --- a thread -------------------------------------------------------------------------------------


class Failing(toys.Workers):
  def grade(self, texts, references):
    raise OSError("no space left")


def test_an_error_of_the_thread_is_raised_by_take():
  sampler = ThreadSampler(toys.local(Failing()), deadline_s=20.0)
  sampler.offer(policy(0))
  sampler.want(draw(), range(P))
  match = r"failed \(OSError: no space left\).*rerun"
  with pytest.raises(SamplerStoppedError, match=match) as told:
    sampler.take()
  assert isinstance(told.value.__cause__, OSError)
  sampler.close()


def test_a_thread_that_gives_nothing_within_its_deadline_is_said():
  workers = HeldGrades()
  sampler = ThreadSampler(toys.local(workers), deadline_s=0.3)
  sampler.offer(policy(0))
  sampler.want(draw(), range(P))
  with pytest.raises(SamplerStoppedError, match=r"within 0\.3 s.*generation_deadline_s"):
    sampler.take()
  workers.held.set()
  sampler.close()


def test_waits_for_answers_have_a_deadline(monkeypatch):
  monkeypatch.setattr("rlvr_jax.rollouts.answers._WAIT_S", 0.05)
  workers = HeldGrades()
  sampler = toys.local(workers, slots=16, deadline_s=0.3)
  sampler.offer(policy(0))
  sampler.want(draw(7), [2])
  message = r"for 0\.3 s; these groups are missing: group 2 of draw 7\."
  with pytest.raises(SamplerStoppedError, match=message):
    sampler.take()
  workers.held.set()
  assert [group.index for group in sampler.take()] == [2]
  message = "no group is awaited: `want` has requested none, or all requested groups have been"
  with pytest.raises(SamplerStoppedError, match=message):
    sampler.take()


def test_a_slow_burst_is_progress():
  sampler = toys.local(slots=1, burst_s=0.05, deadline_s=0.04)
  assert len(sampled(sampler)) == P


def test_a_request_to_end_is_noticed_while_groups_are_waited_for():
  ends = threading.Event()

  def raise_if_ending():
    if ends.is_set():
      raise InterruptedError("end requested")

  workers = HeldGrades()
  sampler = ThreadSampler(toys.local(workers), deadline_s=20.0, raise_if_ending=raise_if_ending)
  sampler.offer(policy(0))
  sampler.want(draw(), range(P))
  threading.Timer(0.2, ends.set).start()
  began = time.monotonic()
  with pytest.raises(InterruptedError, match="end requested"):
    sampler.take()
  assert time.monotonic() - began < 10
  workers.held.set()
  sampler.close()


def test_closing_ends_the_thread_after_its_burst():
  sampler = ThreadSampler(toys.local(burst_s=0.01), deadline_s=20.0)
  sampler.offer(policy(0))
  for number in range(20):
    sampler.want(draw(number), range(P))
  assert sampler.take()
  began = time.monotonic()
  sampler.close()
  names = [thread.name for thread in threading.enumerate()]
  assert time.monotonic() - began < 5 and "sampler" not in names


def test_a_trainer_that_has_lost_updates_goes_back_to_an_earlier_policy():
  """As a fleet's trainer that begins again at its checkpoint; the number of updates may repeat."""
  sampler = toys.local(toys.Workers())
  for version in (12, 10, 11):
    sampler.offer(policy(version))
    sampler.want(draw(version), range(P))
    groups = take_all(sampler)
    assert {(*group.versions.items(),) for group in groups.values()} == {
      ((version, f"{version:08x}"),)
    }


def test_a_thread_keeps_groups_before_anybody_takes_them():
  kept = []
  thread = ThreadSampler(toys.local(toys.Workers()), deadline_s=20.0, keep=kept.extend)
  thread.offer(policy(0))
  thread.want(draw(), range(P))
  deadline = time.monotonic() + 20.0
  while len(kept) < P and time.monotonic() < deadline:
    time.sleep(0.01)
  assert sorted(group.index for group in kept) == [*range(P)]
  assert len(take_all(thread)) == P
  thread.close()
