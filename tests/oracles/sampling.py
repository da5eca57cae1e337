"""Rollouts of prompts by an engine: the least that drives one, for tests without a sampler."""

import collections
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.rollouts.sampler import row_keys


class Request(NamedTuple):
  """A prompt to be sampled."""

  index: int
  prompt: np.ndarray  # i32[n], n ≥ 1 tokens
  keys: np.ndarray  # u32[G, 2], data of one PRNG key per rollout


class Sampled(NamedTuple):
  """Rollouts of one prompt, or with one more axis of several; see `Engine.rollout`."""

  tokens: np.ndarray  # i32[G, T]
  lengths: np.ndarray  # i32[G]
  stopped: np.ndarray  # bool[G]
  behavior_logprobs: np.ndarray  # f32[G, T]
  versions: np.ndarray  # i32[G, T]
  turns: Any = None  # i32[G, T]
  routes: Any = None  # [G, T, layers, k]
  prompt_routes: Any = None  # [S, layers, k]


def make_requests(prompts, key, group_size):
  """A request for each of P prompts; equal keys and places give equal noise."""
  keys = row_keys(key, len(prompts.lengths), group_size)
  rows = zip(prompts.tokens, prompts.lengths, keys, strict=True)
  return [
    Request(index, np.asarray(row[len(row) - length :]), of_prompt)
    for index, (row, length, of_prompt) in enumerate(rows)
  ]


def drive(engine, requests, *, plan=None, reply=None, delay=lambda: 0, between=lambda: None):
  """The rollouts of requests by place (index, number), decoded in an engine's slots.

  Args:
    engine: with weights.
    requests: begin in this order.
    plan: (place) → the version of each token of a rollout; None: the newest one samples.
    reply: (rollout whose turn has ended) → the environment's tokens; none end the dialogue. None: a
      rollout is one turn.
    delay: () → bursts until a reply comes, unless there is nothing else to decode.
    between: called after every burst.
  """
  asked, ended = collections.deque(requests), {}
  waiting = []  # (number of the burst before which the reply comes, rollout, reply)
  number = 0
  while True:
    is_idle = not engine.busy and not asked
    for entry in [entry for entry in waiting if entry[0] <= number or is_idle]:
      waiting.remove(entry)
      engine.resume(*entry[1:])
    while asked and engine.free:
      index, prompt, keys = asked.popleft()
      places = [(index, g) for g in range(len(keys))]
      plans = [None if plan is None else plan(place) for place in places]
      engine.begin(list(map(engine.rollout, places, [prompt] * len(keys), keys, plans)))
    if not engine.busy:
      return ended
    for rollout in engine.burst(waiting=len(waiting)):
      answer = () if reply is None else reply(rollout)
      if len(answer):
        waiting.append((number + 1 + delay(), rollout, answer))
      else:
        assert rollout.place not in ended
        ended[rollout.place] = rollout
    number += 1
    between()


def groups_of(ended):
  """The rollouts of `drive`, as `Sampled` by index."""
  indices = sorted({index for index, _ in ended})
  groups = {}
  for index in indices:
    rollouts = [ended[place] for place in sorted(ended) if place[0] == index]
    arrays = {
      name: np.stack([rollout.arrays[name] for rollout in rollouts])
      for name in rollouts[0].arrays.keys() - {"prompt_routes", "turn_scores"}
    }
    if "prompt_routes" in rollouts[0].arrays:
      arrays["prompt_routes"] = rollouts[0].arrays["prompt_routes"]
    lengths = np.asarray([rollout.length for rollout in rollouts], np.int32)
    stopped = np.asarray([rollout.stopped for rollout in rollouts], bool)
    groups[index] = Sampled(lengths=lengths, stopped=stopped, **arrays)
  return groups


def assert_same(groups, expected):
  """Groups by index are equal to the bit."""
  assert groups.keys() == expected.keys()
  for index, group in groups.items():
    for name, value in group._asdict().items():
      np.testing.assert_array_equal(value, getattr(expected[index], name), err_msg=name)


def serve(programs, trained, requests, **options):
  """The groups of requests by index, sampled with version 0; `options` are those of `drive`."""
  engine = Engine(programs)
  engine.swap(0, programs.load(trained, {}))
  return groups_of(drive(engine, requests, **options))


def stack(groups):
  """P groups in the order of their indices as one record, each array with a first axis P."""
  rows = [groups[index] for index in sorted(groups)]
  return Sampled(*(None if x[0] is None else np.stack(x) for x in zip(*rows, strict=True)))


def sample(programs, trained, frozen, prompts, key, group_size):
  """The rollouts [P, G, …] of one batch of prompts."""
  engine = Engine(programs)
  engine.swap(0, programs.load(trained, frozen))
  return stack(groups_of(drive(engine, make_requests(prompts, key, group_size))))
