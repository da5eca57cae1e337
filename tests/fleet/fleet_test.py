"""What a fleet promises, with threads and toy samplers that meet in memory; one run in a folder.

Objects in a folder and in a bucket promise the same: see tests/storage/objects_test.py.
"""

import math
import threading
import time

import pytest
from fleet import toy

from rlvr_jax.fleet import program
from rlvr_jax.fleet.exchange import Exchange, RecordError, digest_draw
from rlvr_jax.fleet.remote import FleetError
from rlvr_jax.storage.objects import FolderObjects

UPDATES, SIZE, LAG = 8, 6, 2


class Fleet:
  """Samplers in threads."""

  def __init__(self, objects):
    self._objects = objects
    self.exchange, self.weights, self.threads = Exchange(objects), toy.Weights(), []
    self.errors, self.ended = {}, threading.Event()

  def start(self, name, sampler=None, **settings):
    sampler, line = sampler or toy.Sampler(), toy.Line(self._objects)
    sampler.at_end = sampler.at_end or line.kill

    def run():
      try:
        program.run_sampler(
          Exchange(line),
          sampler,
          toy.settings(name, **settings),
          self.weights.restore,
          ends_run=(ArithmeticError,),
          stop=self.ended.is_set,
          say=lambda text: None,
        )
      except BaseException as error:
        self.errors[name] = error

    self.threads.append(threading.Thread(target=run, daemon=True))
    self.threads[-1].start()
    return sampler

  def join(self):
    self.ended.set()
    for thread in self.threads:
      thread.join(10)
      assert not thread.is_alive()


@pytest.fixture
def objects(request, tmp_path):
  in_folder = getattr(request, "param", "memory") == "folder"
  return FolderObjects(tmp_path / "fleet") if in_folder else toy.MemoryObjects()


@pytest.fixture
def fleet(objects):
  made = Fleet(objects)
  yield made
  made.join()


def assert_complete(store, updates=UPDATES, lag=LAG):
  """Every batch once, with groups of its draw by policies that are not too old."""
  assert sorted(store) == [(t, i) for t in range(updates) for i in range(SIZE)]
  for (number, index), group in store.items():
    assert all(max(0, number - lag) <= version <= number for version in group.versions)
    assert group.samples[0]["prompt"] == f"{number} + {index}?"


@pytest.mark.parametrize("objects", ["memory", "folder"], indirect=True)
def test_samplers_share_a_run_and_end_with_it(fleet, objects):
  # Patient: on a busy machine a group would else count as late, and be sampled twice.
  samplers = [fleet.start(name, patience_s=20.0) for name in ("a", "b")]
  store = toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=UPDATES)
  for thread in fleet.threads:
    thread.join(10)
  assert fleet.errors == {} and not fleet.ended.is_set()
  assert_complete(store)
  counts = [len(sampler.sampled) for sampler in samplers]
  assert sum(counts) == UPDATES * SIZE and min(counts) > UPDATES  # both, and nothing twice
  assert {g.samples[1]["sampler"] for g in store.values()} == {"a", "b"}
  assert {name.partition("/")[0] for name in objects.list()} <= {
    *("terms", "policies", "draws", "groups", "ends")
  }
  # Those of the last draws, which nobody removes.
  assert len([name for name in objects.list() if name.startswith("groups/")]) <= (LAG + 2) * SIZE


def test_a_sampler_that_is_killed_and_one_that_joins_late(fleet):
  killed = fleet.start("a", toy.Sampler(lifetime=5))
  threading.Timer(0.5, fleet.start, "b").start()
  store = toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=UPDATES)
  assert len(killed.sampled) == 5 and isinstance(fleet.errors["a"], toy.Killed)
  assert_complete(store)


def test_a_slow_sampler_does_not_hold_the_others_up(fleet):
  slow = fleet.start("slow", toy.Sampler(seconds=0.5), patience_s=0.05)
  fleet.start("fast", patience_s=0.05)
  began = time.monotonic()
  store = toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=UPDATES)
  assert_complete(store)
  assert len(slow.sampled) < UPDATES * SIZE / 4
  assert time.monotonic() - began < 6


@pytest.mark.parametrize("run", [0, 1])
def test_a_trainer_that_is_killed_between_checkpoints_has_a_successor(fleet, run):
  """It begins again at update 2 of 6, with versions 3 to 5 as before (run 0) or other bits."""
  for name in ("a", "b"):
    fleet.start(name)
  first = toy.trainer(fleet.exchange, fleet.weights)

  def killed(t):
    if t == 5:
      raise toy.Killed

  with pytest.raises(toy.Killed):
    toy.train(first, updates=UPDATES + 4, update=killed, store=(lost := {}))
  time.sleep(0.2)  # samplers go on with the draws that are open
  store = {place: group for place, group in lost.items() if place[0] < 2}
  known = {version: f"bits {version}" for version in range(2)}
  second = toy.trainer(fleet.exchange, fleet.weights, fingerprints=known)
  toy.train(second, updates=UPDATES, first=2, store=store, run=run)
  assert_complete(store)
  bits = lambda version: f"bits {version}" + (f" of {run}" if run and version > 1 else "")
  for place, group in store.items():
    assert group.versions == {version: bits(version) for version in group.versions}, place
  dropped = second.statistics()["fleet/dropped_groups"]
  assert dropped > 0 if run else dropped <= SIZE


def test_the_second_of_two_trainers_goes_on(fleet):
  fleet.start("a")
  first, second = (toy.trainer(fleet.exchange, fleet.weights) for _ in range(2))
  first.offer(toy.policy(0))
  first.want(toy.draw(0), [0])
  with pytest.raises(FleetError, match="another trainer"):
    first.take()
  assert_complete(toy.train(second, updates=UPDATES))


def test_a_wait_in_vain_ends(fleet):
  trainer = toy.trainer(fleet.exchange, fleet.weights, deadline_s=0.3)
  with pytest.raises(
    FleetError,
    match="no group is awaited: `want` has requested none, or all requested groups have been",
  ):
    trainer.take()
  trainer.offer(toy.policy(0))
  trainer.want(toy.draw(4), [1, 5])
  with pytest.raises(
    FleetError, match=r"no sampler is running.* groups 1, 5 of draw 4 have been .*--mode=sam"
  ):
    trainer.take()
  trainer = toy.trainer(fleet.exchange, fleet.weights, deadline_s=0.3)
  trainer.offer(toy.policy(0))
  fleet.start("a", toy.Sampler(seconds=1))
  trainer.want(toy.draw(4), [1, 5])
  with pytest.raises(FleetError, match="still missing: groups 1, 5 of draw 4"):
    trainer.take()


def raise_error(error):
  raise error


def test_an_error_that_any_sampler_would_meet_ends_the_run(fleet, monkeypatch):
  monkeypatch.setattr("rlvr_jax.fleet.remote.SAY_EVERY_S", 0.05)
  fleet.start("ok")
  fleet.start("bad", toy.Sampler(lifetime=0, at_end=lambda: raise_error(OSError("no device"))))
  store = toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=2)
  assert len(store) == 2 * SIZE  # it was the trouble of that machine alone
  fleet.start("worse", toy.Sampler(lifetime=0, at_end=lambda: 1 / 0))
  with pytest.raises(FleetError, match="worse ended with ZeroDivisionError"):
    toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=10**3)


def test_a_sampler_with_another_configuration_is_refused(fleet):
  fleet.start("a", settle_s=0.2)
  trainer = toy.trainer(fleet.exchange, fleet.weights, identity={"code": "1", "config": "cd"})
  trainer.offer(toy.policy(0))
  fleet.threads[0].join(10)
  assert isinstance(fleet.errors["a"], program.RefusedError)
  assert "config: ab here, cd there" in str(fleet.errors["a"])
  assert "config: ab" in fleet.exchange.sampler("a").error


def test_a_sampler_of_an_ended_run_waits_a_while_for_a_trainer_that_extends_it(fleet):
  toy.trainer(fleet.exchange, fleet.weights).end()
  patient = fleet.start("a")
  fleet.start("b", settle_s=0.1)
  fleet.threads[1].join(10)
  assert not fleet.threads[1].is_alive() and fleet.threads[0].is_alive()
  toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=2)
  fleet.threads[0].join(10)
  assert len(patient.sampled) == 2 * SIZE and fleet.errors == {}


def test_a_sampler_without_a_trainer_ends(fleet):
  fleet.start("a", idle_s=0.1)
  fleet.threads[0].join(10)
  assert not fleet.threads[0].is_alive() and fleet.errors == {}


def test_a_policy_that_vanishes_while_it_is_read_is_read_anew_as_the_newest(fleet, monkeypatch):
  asked, restore = [], fleet.weights.restore

  def vanish(version, fingerprint):
    asked.append(version)
    return restore(version, "bits of another" if len(asked) == 1 else fingerprint)

  fleet.weights.restore = vanish
  fleet.start("a")
  assert_complete(toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=UPDATES))
  assert asked[0] == 0 and len(asked) > 1


def test_only_the_newest_two_policies_stay(fleet, objects):
  fleet.start("a")
  toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=5)
  versions = [name for name in objects.list() if name.startswith("policies/")]
  assert versions == ["policies/0.3", "policies/0.4"]


def test_another_clock_does_not_matter(fleet, monkeypatch):
  """The time of day is a year behind in this process, and no decision has read it."""
  monkeypatch.setattr(time, "time", lambda: 0.0)
  fleet.start("a")
  assert_complete(toy.train(toy.trainer(fleet.exchange, fleet.weights), updates=UPDATES))


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def member(objects, clock, **fields):
  return program.Member(Exchange(objects), toy.settings("a", **fields), clock)


def test_a_sampler_waits_for_a_policy_of_the_newest_term(objects):
  """Its version 5 is of a trainer that was killed; the successor has begun again with version 2."""
  exchange, weights = Exchange(objects), toy.Weights()
  first = toy.trainer(exchange, weights)
  first.offer(toy.policy(5))
  first.want(toy.draw(5, version=3), [0])
  sampler = member(objects, Clock())
  sampler.adopt(sampler.look().restore)
  assert [(draw.number, indices) for draw, indices in sampler.look().want] == [(5, [0])]
  second = toy.trainer(exchange, weights)
  second.offer(toy.policy(2, run=1))
  second.want(toy.draw(2), [0, 1])
  step = sampler.look()
  assert step.restore == (1, 2, "bits 2 of 1") and not step.want
  sampler.adopt(step.restore)
  assert [(draw.number, indices) for draw, indices in sampler.look().want] == [
    (2, [0])
  ]  # room for 2


def test_a_damaged_record_of_a_dead_trainer_is_waited_on(objects):
  exchange, now = Exchange(objects), [0.0]
  first = toy.trainer(exchange, toy.Weights())
  first.offer(toy.policy(0))
  objects.replace("policies/0.0", b"{}")
  sampler = program.Member(exchange, toy.settings("a", settle_s=5, idle_s=99), lambda: now[0])
  assert "policies/0.0 is damaged" in sampler.look().message
  toy.trainer(exchange, toy.Weights()).offer(toy.policy(0))
  assert sampler.look().restore is not None
  objects.replace("policies/1.0", b"{}")
  other = program.Member(exchange, toy.settings("b", settle_s=5, idle_s=99), lambda: now[0])
  other.look()
  now[0] = 6.0
  with pytest.raises(RecordError, match=r"policies/1\.0 is damaged"):
    other.look()


def test_a_policy_of_the_same_bits_is_not_restored_again(objects):
  exchange, weights = Exchange(objects), toy.Weights()
  toy.trainer(exchange, weights).offer(toy.policy(5))
  sampler = member(objects, Clock())
  sampler.adopt(sampler.look().restore)
  second = toy.trainer(exchange, weights)
  second.offer(toy.policy(5))
  second.want(toy.draw(5, version=3), [0])
  step = sampler.look()
  assert step.restore is None and len(step.want) == 1


def test_a_sampler_that_saw_the_trainer_at_work_ends_with_it(objects):
  trainer = toy.trainer(Exchange(objects), toy.Weights())
  trainer.offer(toy.policy(0))
  late, later = (member(objects, Clock()) for _ in range(2))
  late.look()
  trainer.offer(toy.policy(1))
  late.look()
  trainer.end()
  assert late.look().ended and not later.look().ended


def test_what_is_removed_during_a_listing_is_not_sampled_again():
  """Its draws are of before, its groups of after the removal of a complete draw."""
  objects = toy.MemoryObjects()
  exchange = Exchange(objects)
  trainer = toy.trainer(exchange, toy.Weights())
  trainer.offer(toy.policy(0))
  sampler = member(objects, Clock(), capacity=99)
  sampler.adopt(sampler.look().restore)
  for number in range(4):
    of = toy.draw(number)
    trainer.want(of, range(6))
    for index in range(6):
      exchange.put_group(toy.group(of, index), digest_draw(of))
    before = objects.list()
    assert not sampler.look().want
    assert len(trainer.take()) == 6  # removes the draw before this one
    torn = {name: x for name, x in before.items() if name.startswith("draws/")}
    torn |= {name: x for name, x in objects.list().items() if not name.startswith("draws/")}
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(objects, "list", lambda torn=torn: torn)
      assert not sampler.look().want


@pytest.mark.parametrize("seconds", [0.1, 3.0])
def test_what_a_living_sampler_has_begun_is_late_beside_what_groups_take(objects, seconds):
  """Not before some patiences, nor before eight times what a group of the observer has taken."""
  exchange, clock = Exchange(objects), Clock()
  trainer = toy.trainer(exchange, toy.Weights())
  trainer.offer(toy.policy(0))
  trainer.want(toy.draw(0), range(6))
  one = program.Member(exchange, toy.settings("one", capacity=3, patience_s=1, silent_s=9), clock)
  two = program.Member(exchange, toy.settings("two", capacity=20, patience_s=1, silent_s=9), clock)
  begun = lambda step, n=0: [index for of, found in step.want if of.number == n for index in found]
  for sampler in (one, two):
    sampler.adopt(sampler.look().restore)
    sampler.beat(1)
  first = begun(one.look())
  one.beat(2)
  second = begun(two.look())
  assert first and second and not {*first} & {*second}
  clock.now = 1.1  # those that nobody has begun are anyone's
  assert {*first, *second, *begun(two.look())} == {*range(6)}

  def at(now):
    clock.now = now
    one.beat(int(10 * now))
    return two.look()

  assert not begun(at(9.0))  # two has finished nothing: it cannot know
  trainer.want(toy.draw(1), range(6))
  own = begun(at(10.0), n=1)
  clock.now += seconds
  two.give([toy.group(toy.draw(1), own[0])])
  late_at = 1.1 + max(4.0, 8 * seconds)
  later = [now for now in range(11, 60) if {*begun(at(now))} == {*first}]
  assert later[:1] == [max(11, math.ceil(late_at))]
