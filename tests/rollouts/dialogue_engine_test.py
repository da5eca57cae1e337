"""The engine with dialogues: the bits of a response depend on its prompt, key and replies only."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.caches import CacheShape
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.serve import Answer, make_requests, serve, stack_groups
from rlvr_jax.types import Prompts, Sampling
from rlvr_jax.update.objective import routes_of_inputs

V, P, G, S = 24, 3, 4, 40
PAD, STOPS = 0, (3, 11)
CONFIG = TransformerConfig(
  vocab_size=V,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  qk_norm=True,
  sliding_window=4,
  sliding_layers=(True, False),
)
MODEL = transformer(CONFIG)


class Replies:
  """Replies of 1 to 7 tokens that depend on the policy's turns; they come after some bursts."""

  def __init__(self, T, *, max_turns=4, delays=0, stop_tokens=()):
    self._T, self._max_turns, self._stop = T, max_turns, list(stop_tokens)
    self._rng = np.random.default_rng(delays) if delays else None
    self._asked = []  # (bursts to wait, group, rollout)
    self._begun = set()  # rollouts whose first turn has ended
    self.patient = []  # numbers of these whenever the engine was ready to wait
    self.idle_slot_steps = self.rebuilt_tokens = 0

  def find_stop(self, group, rollout, start):
    tokens = group.tokens[rollout]
    for length in range(start + 1, group.lengths[rollout] + 1):
      is_policys = (group.turns[rollout, length - len(self._stop) : length] % 2 == 0).all()
      if self._stop and is_policys and tokens[:length][-len(self._stop) :].tolist() == self._stop:
        return length
    return None

  def ask(self, group, rollout):
    delay = int(self._rng.integers(0, 5)) if self._rng else 0
    self._asked.append((delay, group, rollout))
    self._begun.add((group.prompt_index, rollout))

  def take(self, *, patience_s, until_one):
    if patience_s > 0:
      self.patient.append(len(self._begun))
    ready = [entry for entry in self._asked if entry[0] == 0 or until_one]
    self._asked = [(n - 1, *rest) for n, *rest in self._asked if not (n == 0 or until_one)]
    return [self._answer(group, rollout) for _, group, rollout in ready]

  def add_costs(self, *, idle_slot_steps=0, rebuilt_tokens=0):
    self.idle_slot_steps += idle_slot_steps
    self.rebuilt_tokens += rebuilt_tokens

  def _answer(self, group, rollout):
    length = int(group.lengths[rollout])
    reply = _reply(group.tokens[rollout, :length], group.turns[rollout], self._max_turns, self._T)
    return Answer(group, rollout, reply, is_last=not len(reply))


def _reply(response, turns, max_turns, T):
  """What follows the response's last turn; nothing if the dialogue ends."""
  said = int(response.sum())
  reply = (np.arange(1 + said % 7) * 5 + said) % V
  is_last = turns[len(response) - 1] // 2 + 1 >= max_turns or len(response) + len(reply) >= T
  return reply.astype(np.int32)[: 0 if is_last else None]


@functools.cache
def _params():
  params = MODEL.init(jax.random.key(0))
  return {**params, "embedding": params["embedding"] * 2.5}


@functools.cache
def _prompts():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, V, (P, S)).astype(np.int32)
  return Prompts(tokens=tokens, lengths=np.asarray([40, 2, 17], np.int32))


@functools.cache
def _engine(T, slots, has_replies=True, temperature=1.0, cache_format=""):
  return EnginePrograms(
    MODEL,
    Sampling(temperature=temperature),
    slots=slots,
    prefill_rows=P,
    max_prompt_length=S,
    max_new_tokens=T,
    stop_tokens=STOPS,
    pad_token=PAD,
    has_replies=has_replies,
    cache_format=cache_format,
  )


def _serve(T, slots, dialogues, temperature=1.0, cache_format=""):
  engine = _engine(T, slots, dialogues is not None, temperature, cache_format)
  params = engine.load(_params(), {})
  requests = make_requests(_prompts(), jax.random.key(5), G, None)
  groups = [g for some in serve(engine, params, requests, dialogues=dialogues) for g in some]
  return sorted(groups, key=lambda group: group.prompt_index)


@functools.cache
def _dialogues(T=128, slots=12, cache_format=""):
  return _serve(T, slots, Replies(T), cache_format=cache_format)


def _assert_equal(groups, expected):
  assert len(groups) == len(expected) == P
  for group, other in zip(groups, expected, strict=True):
    for name in ("tokens", "lengths", "stopped", "turns", "behavior_logprobs"):
      np.testing.assert_array_equal(getattr(group, name), getattr(other, name), err_msg=name)


def test_dialogues_have_turns_in_order():
  groups = _dialogues()
  longest = 0
  for group in groups:
    for g in range(G):
      length = group.lengths[g]
      turns, tokens = group.turns[g], group.tokens[g]
      steps = np.diff(turns[:length])
      assert turns[0] == 0 and set(steps) <= {0, 1} and not turns[length:].any()
      assert (group.behavior_logprobs[g][turns % 2 == 1] == 0).all()
      assert (group.behavior_logprobs[g, :length][turns[:length] % 2 == 0] < 0).all()
      # A reply follows a stop token, or the dialogue ended.
      last_of_turns = np.flatnonzero((steps == 1) & (turns[: length - 1] % 2 == 0))
      assert np.isin(tokens[last_of_turns], STOPS).all()
      longest = max(longest, turns.max())
  assert longest >= 4  # three turns of the policy at least


def test_the_first_turn_is_that_of_a_run_without_dialogues():
  plain = _serve(128, 12, None)
  for group, other in zip(_dialogues(), plain, strict=True):
    for g in range(G):
      first = int((group.turns[g, : group.lengths[g]] == 0).sum())
      np.testing.assert_array_equal(group.tokens[g, :first], other.tokens[g, :first])
      np.testing.assert_array_equal(
        group.behavior_logprobs[g, :first], other.behavior_logprobs[g, :first]
      )
      assert first == other.lengths[g]


@pytest.mark.parametrize(("delays", "cache_format"), [(1, ""), (2, ""), (1, "int8")])
def test_a_reply_may_come_at_any_time(delays, cache_format):
  found = _serve(128, 12, Replies(128, delays=delays), cache_format=cache_format)
  _assert_equal(found, _dialogues(cache_format=cache_format))


@pytest.mark.parametrize("slots", [1, 4, 64])
def test_the_record_does_not_depend_on_delays_at_other_numbers_of_slots(slots):
  expected = _serve(128, slots, Replies(128))
  _assert_equal(_serve(128, slots, Replies(128, delays=3)), expected)
  for group, other in zip(expected, _dialogues(), strict=True):  # but for rounding
    np.testing.assert_array_equal(group.tokens, other.tokens)
    np.testing.assert_allclose(group.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("bursts", [0, 3])
def test_rollouts_are_resumed_with_replies(bursts):
  """By hand, so many bursts after their turn has ended; the record is that of a stream."""
  T, slots = 128, 12
  programs = _engine(T, slots)
  engine, ended, waiting = Engine(programs), {}, []
  engine.swap(0, programs.load(_params(), {}))
  for p, request in enumerate(make_requests(_prompts(), jax.random.key(5), G, None)):
    keys = enumerate(request.keys)
    engine.begin([engine.rollout((p, g), request.prompt, key) for g, key in keys])
  number = 0  # of bursts
  while engine.busy or waiting:
    due = [entry for entry in waiting if entry[0] <= number or not engine.busy]
    waiting = [entry for entry in waiting if entry not in due]
    for _, rollout, reply in due:
      engine.resume(rollout, reply)
    for rollout in engine.burst(waiting=len(waiting)):
      arrays = rollout.arrays
      reply = _reply(arrays["tokens"][: rollout.length], arrays["turns"], 4, T)
      if len(reply):
        waiting.append((number + bursts, rollout, reply))
      else:
        ended[rollout.place] = rollout
    number += 1
  assert len(ended) == P * G
  for (p, g), rollout in ended.items():
    assert rollout.length == _dialogues()[p].lengths[g]
    for name in ("tokens", "turns", "behavior_logprobs"):
      np.testing.assert_array_equal(rollout.arrays[name], getattr(_dialogues()[p], name)[g], name)
    sampled = rollout.arrays["turns"][: rollout.length] % 2 == 0
    np.testing.assert_array_equal(rollout.arrays["versions"][: rollout.length], sampled - 1)
  assert (engine.usage.idle_slot_steps > 0) == (bursts > 0) and engine.usage.rebuilt_tokens > 0


def test_a_stop_string_ends_the_turn_of_a_pushed_rollout():
  """It is handed on with nothing behind the stop string."""
  programs = _engine(128, 12)
  [request, *_] = make_requests(_prompts(), jax.random.key(5), G, None)

  def turns(find_stop):
    engine = Engine(programs, find_stop)
    engine.swap(0, programs.load(_params(), {}))
    engine.begin([engine.rollout(g, request.prompt, key) for g, key in enumerate(request.keys)])
    ended = {}
    while engine.busy:
      ended |= {rollout.place: rollout for rollout in engine.burst()}
    return ended

  seen = []

  def at_fives(rollout, start):
    seen.append((rollout.place, start, rollout.length))
    return 5 if rollout.length >= 5 else None

  whole, cut = turns(None), turns(at_fives)
  assert max(rollout.length for rollout in whole.values()) > 5
  for g, rollout in cut.items():
    n = rollout.length
    assert n == min(whole[g].length, 5) and rollout.stopped
    for name, empty in dict(tokens=PAD, behavior_logprobs=0, versions=-1, turns=0).items():
      np.testing.assert_array_equal(rollout.arrays[name][:n], whole[g].arrays[name][:n], name)
      assert (rollout.arrays[name][n:] == empty).all()
  assert [entry[:2] for entry in seen] == [(g, 0) for g in range(G)]  # all in the first burst


def test_logprobs_of_all_turns_equal_the_trainers():
  rollouts = stack_groups(_dialogues())
  hidden = jax.jit(MODEL.response_hidden)(_params(), _prompts(), rollouts.tokens)
  trainer, _ = token_logprobs(hidden, MODEL.head(_params()), rollouts.tokens, Sampling())
  places = np.arange(rollouts.tokens.shape[-1]) < rollouts.lengths[..., None]
  sampled = places & (rollouts.turns % 2 == 0)
  difference = np.abs(np.asarray(trainer) - rollouts.behavior_logprobs)[sampled]
  assert sampled.sum() > 100 and difference.max() < 1e-5


def test_every_place_of_a_dialogue_has_its_routes():
  """Those of replies too, in a cache that is computed anew or behind it; and delays change none."""
  config = dataclasses.replace(CONFIG, num_experts=8, experts_per_token=2, expert_width=16)
  model, T, stop = transformer(config), 96, [5, 5]
  engine = EnginePrograms(
    model, Sampling(), slots=12, prefill_rows=P, max_prompt_length=S, max_new_tokens=T,
    stop_tokens=STOPS, pad_token=PAD, has_replies=True, records_routes=True,
  )  # fmt: skip
  params = model.init(jax.random.key(0))
  requests = make_requests(_prompts(), jax.random.key(5), G, None)

  def with_delays(delays):
    replies = Replies(T, delays=delays, stop_tokens=stop)
    served = serve(engine, engine.load(params, {}), requests, dialogues=replies)
    return sorted((g for some in served for g in some), key=lambda group: group.prompt_index)

  groups = with_delays(0)
  rollouts = stack_groups(groups)
  assert rollouts.turns.max() >= 4
  _, own, _ = jax.jit(model.response_routed)(
    params, _prompts(), rollouts.tokens, None, rollouts.lengths
  )
  recorded = routes_of_inputs(rollouts.prompt_routes, rollouts.routes)
  for found, expected in zip(recorded, own, strict=True):
    real = np.asarray(expected)[..., 0, 0] >= 0
    same = (np.asarray(found) == np.asarray(expected))[real]
    assert len(same) > 50 and same.mean() > 0.999  # but for ties up to rounding
  behind = np.arange(T) >= rollouts.lengths[..., None]
  assert not rollouts.routes[behind].any()
  for group, other in zip(with_delays(3), groups, strict=True):
    np.testing.assert_array_equal(group.routes, other.routes)
    np.testing.assert_array_equal(group.prompt_routes, other.prompt_routes)


def test_a_turn_ends_at_a_stop_string_and_what_follows_is_dropped():
  """The tokens up to the stop string are those of a run without it."""
  plain = _serve(128, 12, None)
  tokens = plain[1].tokens[2]
  end = next(n for n in range(4, 128) if tokens[n - 1] != tokens[n - 2])
  stop = tokens[end - 2 : end].tolist()  # first occurs, or has occurred, by `end`
  end = next(n for n in range(2, 128) if tokens[n - 2 : n].tolist() == stop)
  groups = _serve(128, 12, Replies(128, stop_tokens=stop, max_turns=2))
  np.testing.assert_array_equal(groups[1].tokens[2, :end], tokens[:end])
  assert (groups[1].turns[2, : end + 1] == [0] * end + [1]).all() and plain[1].lengths[2] > end
  _assert_equal(_serve(128, 12, Replies(128, stop_tokens=stop, max_turns=2, delays=4)), groups)


@pytest.mark.parametrize(
  ("T", "steps"), [(1, 1), (9, 1), (16, 2), (24, 2), (96, 8), (128, 16), (4096, 16)]
)
def test_bursts_are_an_eighth_of_a_response_of_several_turns_at_most(T, steps):
  assert CacheShape.of(S, T, has_replies=True).steps == steps
  assert CacheShape.of(S, T).steps == min(T, 16)


def test_short_responses_have_short_bursts():
  groups = _serve(16, 5, Replies(16), temperature=5.0)
  assert max(group.turns.max() for group in groups) >= 2
  _assert_equal(_serve(16, 5, Replies(16, delays=1), temperature=5.0), groups)


def test_idle_slots_and_caches_that_are_computed_anew_are_counted():
  """With a slot per rollout and replies at once no slot is idle because of them."""
  at_once, delayed = Replies(128), Replies(128, delays=3)
  groups, _ = _serve(128, 12, at_once), _serve(128, 12, delayed)
  steps, expected = 16, 0
  for prompt, group in zip(_prompts().lengths, groups, strict=True):
    for turns, length in zip(group.turns, group.lengths, strict=True):
      # A reply has an odd number, and another turn behind it.
      ends = np.flatnonzero(np.diff(turns[:length]) * (turns[: length - 1] % 2)) + 1
      cached = ends // steps * steps
      # The first token that is decoded anew is the one before those behind the cache.
      expected += int(np.sum(prompt - 1 + cached))
  assert at_once.rebuilt_tokens == delayed.rebuilt_tokens == expected > 0
  assert at_once.idle_slot_steps == 0 < delayed.idle_slot_steps


def test_the_engine_waits_for_replies_only_where_no_other_rollout_wants_the_slot():
  dialogues = Replies(128, delays=3)
  _serve(128, 4, dialogues)
  # All twelve rollouts have begun: their first turn has ended, or is in one of four slots.
  assert dialogues.patient and min(dialogues.patient) >= P * G - 4
