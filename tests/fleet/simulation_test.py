"""A fleet of 100 samplers in virtual time: how much is sampled twice, and what polls cost."""

import functools
import heapq
import itertools
import math
import random
from typing import NamedTuple

import pytest
from fleet import toy

from rlvr_jax.fleet import program, remote
from rlvr_jax.fleet.exchange import Exchange


class Setting(NamedTuple):
  samplers: int = 100
  groups: int = 200  # of a batch
  lag: int = 4
  updates: int = 20
  update_s: float = 32.0
  capacity: int = 6  # groups that a sampler decodes at a time
  median_s: float = 20.0  # of a group
  sigma: float = 0.5  # of its logarithm
  speed_sigma: float = 0.2  # of the logarithm of a sampler's speed
  killed_per_minute: float = 0.05  # share of the samplers; another one joins for each
  patience_s: float = 30.0
  poll_s: float = 2.0


class World:
  """Virtual time, in which events happen."""

  def __init__(self):
    self.now, self._events, self._order = 0.0, [], itertools.count()

  def at(self, time_s, action):
    heapq.heappush(self._events, (time_s, next(self._order), action))

  def clock(self):
    return self.now

  def sleep(self, seconds):
    until = self.now + seconds
    while self._events and self._events[0][0] <= until:
      self.now, _, action = heapq.heappop(self._events)
      action()
    self.now = until


class Sampler:
  """A member whose groups take random times; it decodes `capacity` of them at once."""

  def __init__(self, world, exchange, setting, number):
    self._world, self._setting = world, setting
    self._rng = random.Random(number)
    self._speed = math.exp(setting.speed_sigma * self._rng.gauss(0, 1))
    self._dead = False
    self.tokens = 0
    settings = program.Settings(
      f"s{number}", toy.IDENTITY, setting.capacity, patience_s=setting.patience_s
    )
    self.member = program.Member(exchange, settings, world.clock)
    world.at(world.now, self._beat)
    world.at(world.now + self._rng.random() * setting.poll_s, self._look)
    if setting.killed_per_minute:
      lifetime = self._rng.expovariate(setting.killed_per_minute / 60)
      world.at(world.now + lifetime, self._die)

  def _die(self):
    self._dead = True

  def _beat(self):
    if not self._dead:
      self.member.beat(int(self._world.now))
      self._world.at(self._world.now + 30 / program.BEATS, self._beat)

  def _look(self):
    if self._dead:
      return
    step = self.member.look()
    if step.restore is not None:
      self._world.at(self._world.now + 5, functools.partial(self.member.adopt, step.restore))
    for draw, indices in step.want:
      for index in indices:
        scale = self._setting.median_s / self._speed
        seconds = scale * math.exp(self._setting.sigma * self._rng.gauss(0, 1))
        done = functools.partial(self._finish, draw, index, seconds)
        self._world.at(self._world.now + seconds, done)
    if not step.ended:
      self._world.at(self._world.now + self._setting.poll_s, self._look)

  def _finish(self, draw, index, seconds):
    if not self._dead:
      version = self.member.record.version
      group = toy.group(draw, index, version)
      self.tokens += int(group.arrays["lengths"].sum())
      self.member.give([group])


def simulate(setting):
  """Trains a run; returns (groups by place, measurements)."""
  world, objects, weights = World(), toy.MemoryObjects(), toy.Weights()
  exchange = Exchange(objects)
  samplers = []

  def join():
    samplers.append(Sampler(world, exchange, setting, len(samplers)))

  for _ in range(setting.samplers):
    world.at(random.Random(len(samplers)).random(), join)
  if setting.killed_per_minute:
    every = 60 / (setting.killed_per_minute * setting.samplers)
    for number in range(1, int(setting.updates * setting.update_s * 3 / every)):
      world.at(number * every, join)
  polls = []

  def sleep(seconds):
    polls.append(world.now)
    world.sleep(seconds)

  trainer = remote.RemoteSampler(
    exchange,
    weights.publish,
    remote.Settings(toy.IDENTITY, toy.ALLOWED, poll_s=1.0),
    clock=world.clock,
    sleep=sleep,
    say=lambda text: None,
  )
  update = lambda t: world.sleep(setting.update_s)
  store = toy.train(
    trainer, updates=setting.updates, lag=setting.lag, size=setting.groups, update=update
  )
  duplicates = sum(s.member.record.duplicate_tokens for s in samplers)
  sampled = sum(s.tokens for s in samplers)
  return store, {
    "duplicate share": duplicates / sampled,
    "trainer busy": setting.updates * setting.update_s / world.now,
    "requests per s": objects.requests / world.now,
    "most listed": objects.most_listed,
    "samplers": len(samplers),
    "seconds": world.now,
  }


@pytest.mark.parametrize(
  ("samplers", "killed"),
  [(25, 0.05), *(pytest.param(100, killed, marks=pytest.mark.slow) for killed in (0.0, 0.05))],
)
def test_few_tokens_are_sampled_twice(samplers, killed):
  setting = Setting(
    samplers, 6 * samplers // 5, lag=2, updates=4, capacity=3, poll_s=4.0, killed_per_minute=killed
  )
  store, measured = simulate(setting)
  assert sorted(store) == [(t, i) for t in range(setting.updates) for i in range(setting.groups)]
  for (number, _), group in store.items():  # the lag bound, from the groups alone
    assert all(number - setting.lag <= version <= number for version in group.versions)
  assert measured["duplicate share"] <= 0.03
  # No listing has more than draws that are open or just complete with their groups, samplers,
  # policies and the term.
  opened = (setting.lag + 3) * (setting.groups + 1)
  assert measured["most listed"] <= opened + measured["samplers"] + 3
