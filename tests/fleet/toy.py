"""A fleet without jax: objects in memory, samplers of random numbers, and a trainer of 20 lines."""

import pathlib
import random
import sys
import threading
import time

import numpy as np

from rlvr_jax.data.problems import Problem
from rlvr_jax.fleet import program, remote
from rlvr_jax.fleet.exchange import Exchange
from rlvr_jax.rollouts import group as group_file
from rlvr_jax.rollouts.group import Draw, Group, Policy
from rlvr_jax.storage.objects import FolderObjects, Listed

GROUP_SIZE, PROMPT, RESPONSE, VOCABULARY = 2, 4, 8, 50
IDENTITY = {"code": "1", "config": "ab"}
QUICK = dict(silent_s=0.3, poll_s=0.005)


class MemoryObjects:
  """As `storage.objects.Objects`."""

  def __init__(self):
    self.data, self._lock, self._writes = {}, threading.Lock(), 0
    self.requests = 0
    self.most_listed = 0

  def put(self, name, data):
    with self._lock:
      self.requests += 1
      if name in self.data:
        return False
      self._write(name, data)
      return True

  def replace(self, name, data):
    with self._lock:
      self.requests += 1
      self._write(name, data)

  def _write(self, name, data):
    self._writes += 1
    self.data[name] = data, self._writes

  def get(self, name):
    self.requests += 1
    return self.data.get(name, (None,))[0]

  def list(self):
    with self._lock:
      self.requests += 1
      self.most_listed = max(self.most_listed, len(self.data))
      return {name: Listed(len(data), write) for name, (data, write) in self.data.items()}

  def remove(self, name):
    with self._lock:
      self.requests += 1
      self.data.pop(name, None)


def draw(number, size=6, version=0, seed=3):
  problems = [
    Problem(f"{number} + {i}?", str(number + i), "", {"answer": number + i}, where="line 1")
    for i in range(size)
  ]
  return Draw(number, problems, seed, version, [0] * size)


def group(of, index, version=0, fingerprint=None, tokens=None):
  """A group, whose tokens follow from draw, index and version."""
  rng = np.random.default_rng((of.seed, of.number, index, version))
  lengths = rng.integers(1, RESPONSE + 1, GROUP_SIZE).astype(np.int32)
  inside = np.arange(RESPONSE) < lengths[:, None]
  tokens = rng.integers(1, VOCABULARY, (GROUP_SIZE, RESPONSE)) if tokens is None else tokens
  return Group(
    draw=of.number,
    index=index,
    source=of.sources[index],
    versions={version: fingerprint or f"bits {version}"},
    arrays={
      "prompts.tokens": np.ones(PROMPT, np.int32),
      "prompts.lengths": np.array(PROMPT, np.int32),
      "tokens": (tokens * inside).astype(np.int32),
      "lengths": lengths,
      "stopped": lengths < RESPONSE,
      "mask": inside.astype(np.float32),
      "behavior_logprobs": (-rng.random((GROUP_SIZE, RESPONSE)) * inside).astype(np.float32),
      "rewards": rng.random(GROUP_SIZE).astype(np.float32),
      "correct": np.ones(GROUP_SIZE, np.float32),
      "valid": np.ones(GROUP_SIZE, bool),
    },
    samples=[
      {"prompt": of.problems[index].question, "outcome": "correct"} for _ in range(GROUP_SIZE)
    ],
    measured={"seconds": 1.0},
  )


ALLOWED = remote.Allowed([group(draw(0), 0)], VOCABULARY)


class Sampler:
  """Finishes a group every `seconds` on average; calls `at_end` after `lifetime` groups."""

  def __init__(self, seconds=0.002, lifetime=10**9, at_end=None, seed=0):
    self._seconds, self._rng = seconds, random.Random(seed)
    self._lifetime, self.at_end = lifetime, at_end
    self._policy, self._wanted = None, []
    self.sampled = []

  def offer(self, policy):
    self._policy = policy

  def want(self, of, indices):
    self._wanted += [(of, index) for index in indices]

  def take(self):
    time.sleep(self._seconds * 2 * self._rng.random())
    if len(self.sampled) >= self._lifetime:
      self.at_end()
    of, index = self._wanted.pop(0)
    self.sampled.append((of.number, index))
    return [group(of, index, self._policy.version, self._policy.fingerprint())]

  def close(self):
    pass


class Killed(BaseException):
  """A kill."""


class Line:
  """Objects that a killed program can no longer reach."""

  def __init__(self, objects):
    self._objects, self.cut = objects, False

  def __getattr__(self, name):
    if self.cut:
      raise Killed
    return getattr(self._objects, name)

  def kill(self):
    self.cut = True
    raise Killed


class Weights:
  """Policies that can be restored: version → fingerprint."""

  def __init__(self):
    self.fingerprints = {}

  def publish(self, policy, done):
    self.fingerprints[policy.version] = policy.fingerprint()
    done()

  def restore(self, version, fingerprint):
    if self.fingerprints.get(version) != fingerprint:
      raise program.PolicyGoneError(version)
    return {}


def settings(name, **fields):
  return program.Settings(name, IDENTITY, **{"capacity": 2, "patience_s": 0.3, **QUICK, **fields})


def trainer(exchange, weights, *, identity=IDENTITY, fingerprints=None, **fields):
  fields = {"deadline_s": 20.0, **QUICK, **fields}
  return remote.RemoteSampler(
    exchange,
    weights.publish,
    remote.Settings(identity, ALLOWED, **fields),
    fingerprints=fingerprints,
    say=lambda text: None,
  )


def policy(version, run=0):
  """`run`: another one has other bits."""
  return Policy(version, {}, lambda: f"bits {version}" if not run else f"bits {version} of {run}")


def train(sampler, *, updates, lag=2, first=0, store=None, run=0, update=lambda t: None, size=6):
  """Trains an asynchronous run: batch t has all groups of draw t; returns the store.

  Args:
    store: (draw, index) → group, of an earlier start.
    update: called before each update, and may raise.
  """
  store = {} if store is None else store
  begun = first
  for t in range(first, updates):
    sampler.offer(policy(t, run))
    while begun < min(t + lag + 1, updates):
      of = draw(begun, size, version=max(0, begun - lag))
      missing = [i for i in range(size) if (begun, i) not in store]
      sampler.want(of, missing)
      begun += 1
    while any((t, i) not in store for i in range(size)):
      for found in sampler.take():
        assert (found.draw, found.index) not in store, "a group came twice"
        store[found.draw, found.index] = found
    update(t)
  sampler.end()
  return store


class Files:
  """Groups by place, in objects: a store that a killed trainer leaves as it is."""

  def __init__(self, objects):
    self._objects = objects

  def __contains__(self, place):
    return self._objects.get(f"store/{place[0]}.{place[1]}") is not None

  def __setitem__(self, place, found):
    assert self._objects.put(f"store/{place[0]}.{place[1]}", group_file.encode([found], {}))

  def read(self):
    names = [name for name in self._objects.list() if name.startswith("store/")]
    groups = [group_file.decode(self._objects.get(name))[0][0] for name in names]
    return {(found.draw, found.index): found for found in groups}


class FolderWeights(Weights):
  """Policies that can be restored in another program."""

  def __init__(self, objects):
    self._objects = objects

  def publish(self, offered, done):
    self._objects.replace(f"weights/{offered.version}", offered.fingerprint().encode())
    done()

  def restore(self, version, fingerprint):
    if self._objects.get(f"weights/{version}") != fingerprint.encode():
      raise program.PolicyGoneError(version)
    return {}


def main(role, folder, updates):
  """A trainer that saves every third update, or a sampler."""
  own = FolderObjects(pathlib.Path(folder, "own"))
  exchange = Exchange(FolderObjects(pathlib.Path(folder, "fleet")))
  if role != "trainer":
    chosen = settings(role, silent_s=1.0, patience_s=1.0)
    program.run_sampler(exchange, Sampler(0.02), chosen, FolderWeights(own).restore)
    return
  first = int(own.get("checkpoint/step") or 0)
  known = {version: f"bits {version}" for version in range(first)}

  def update(t):
    time.sleep(0.05)
    if t % 3 == 2:
      own.replace("checkpoint/step", b"%d" % (t + 1))

  waits = dict(silent_s=1.0, deadline_s=200.0)  # programs of a busy machine start late
  made = trainer(exchange, FolderWeights(own), fingerprints=known, **waits)
  train(made, updates=updates, first=first, store=Files(own), update=update)


if __name__ == "__main__":
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
