"""The engine with dialogues: the bits of a response depend on its prompt, key and replies only."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from oracles import toys
from oracles.engines import CONFIG, MODEL, PAD, V, trained
from oracles.sampling import assert_same, drive, groups_of, make_requests, stack

from rlvr_jax.models.functional import transformer
from rlvr_jax.ops.caches import CacheShape
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import Prompts, Sampling
from rlvr_jax.update.objective import routes_of_inputs

P, G, S = 3, 4, 40
STOPS = (3, 11)


def _reply(response, turns, max_turns, T):
  """What follows the response's last turn; nothing if the dialogue ends."""
  said = int(response.sum())
  reply = (np.arange(1 + said % 7) * 5 + said) % V
  is_last = turns[len(response) - 1] // 2 + 1 >= max_turns or len(response) + len(reply) >= T
  return reply.astype(np.int32)[: 0 if is_last else None]


@functools.cache
def _prompts():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, V, (P, S)).astype(np.int32)
  return Prompts(tokens=tokens, lengths=np.asarray([40, 2, 17], np.int32))


def _engine(T, slots, has_replies=True, temperature=1.0, cache_format=""):
  """Compiled once for all tests, however they write the arguments."""
  return _programs(T, slots, has_replies, temperature, cache_format)


@functools.cache
def _programs(T, slots, has_replies, temperature, cache_format):
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


@dataclasses.dataclass(frozen=True)
class Dialogue:
  """What answers the policy: replies that come after some bursts, and stop strings."""

  max_turns: int = 4
  delays: int = 0  # seed of the numbers of bursts; 0: replies come at once
  stop_tokens: tuple[int, ...] = ()

  def find_stop(self, rollout, start):
    tokens, turns = (rollout.arrays[name][: rollout.length] for name in ("tokens", "turns"))
    size = len(self.stop_tokens)
    for end in range(max(start + 1, size), rollout.length + 1) if size else ():
      last = slice(end - size, end)
      if tuple(tokens[last]) == self.stop_tokens and (turns[last] % 2 == 0).all():
        return end
    return None

  def drive(self, engine):
    """The rollouts of all prompts; their replies come in any order."""
    rng, T = np.random.default_rng(self.delays), engine.settings.max_new_tokens
    delay = (lambda: int(rng.integers(0, 5))) if self.delays else (lambda: 0)

    def reply(rollout):
      arrays = rollout.arrays
      return _reply(arrays["tokens"][: rollout.length], arrays["turns"], self.max_turns, T)

    return drive(engine, _requests(), reply=reply, delay=delay)


def _requests():
  return make_requests(_prompts(), jax.random.key(5), G)


def _loaded(programs, dialogue=None):
  engine = Engine(programs, dialogue and dialogue.find_stop)
  engine.swap(0, programs.load(trained(), {}))
  return engine


def _serve(T, slots, dialogue, temperature=1.0, cache_format=""):
  engine = _loaded(_engine(T, slots, dialogue is not None, temperature, cache_format), dialogue)
  return groups_of(drive(engine, _requests()) if dialogue is None else dialogue.drive(engine))


@functools.cache
def _driven(delays):
  """(usage of the slots, rollouts of dialogues whose replies come after some bursts)."""
  engine = _loaded(_engine(128, 12))
  return engine.usage, Dialogue(delays=delays).drive(engine)


@functools.cache
def _dialogues(cache_format=""):
  if not cache_format:
    return groups_of(_driven(0)[1])
  return _serve(128, 12, Dialogue(), cache_format=cache_format)


@functools.cache
def _plain():
  """The groups of a run without dialogues."""
  return _serve(128, 12, None)


def test_dialogues_have_turns_in_order():
  groups = _dialogues()
  longest = 0
  for group in groups.values():
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
  for group, other in zip(_dialogues().values(), _plain().values(), strict=True):
    for g in range(G):
      first = int((group.turns[g, : group.lengths[g]] == 0).sum())
      np.testing.assert_array_equal(group.tokens[g, :first], other.tokens[g, :first])
      np.testing.assert_array_equal(
        group.behavior_logprobs[g, :first], other.behavior_logprobs[g, :first]
      )
      assert first == other.lengths[g]


def test_a_reply_may_come_at_any_time():
  assert_same(groups_of(_driven(1)[1]), _dialogues())


@pytest.mark.slow
def test_a_reply_may_come_at_any_time_beside_rounded_caches():
  found = _serve(128, 12, Dialogue(delays=1), cache_format="int8")
  assert_same(found, _dialogues(cache_format="int8"))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_the_record_does_not_depend_on_delays_at_other_numbers_of_slots(slots):
  expected = _serve(128, slots, Dialogue())
  assert_same(_serve(128, slots, Dialogue(delays=3)), expected)
  for index, group in expected.items():  # but for rounding
    other = _dialogues()[index]
    np.testing.assert_array_equal(group.tokens, other.tokens)
    np.testing.assert_allclose(group.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("delays", [0, 1])
def test_tokens_of_the_policy_bear_its_version_and_those_of_replies_none(delays):
  for rollout in _driven(delays)[1].values():
    sampled = rollout.arrays["turns"][: rollout.length] % 2 == 0
    np.testing.assert_array_equal(rollout.arrays["versions"][: rollout.length], sampled - 1)


def test_a_stop_string_ends_the_turn_of_a_pushed_rollout():
  """It is handed on with nothing behind the stop string; on toy programs."""
  [request, *_] = _requests()
  prompt = request.prompt[: toys.S]

  def turns(find_stop):
    engine = Engine(toys.ToyPrograms(has_replies=True), find_stop)
    engine.swap(0, "weights")
    engine.begin([engine.rollout(g, prompt, key) for g, key in enumerate(request.keys)])
    ended = {}
    while engine.busy:
      ended |= {rollout.place: rollout for rollout in engine.burst()}
    return ended

  seen = []

  def at_fives(rollout, start):
    seen.append((rollout.place, start))
    return 5 if rollout.length >= 5 else None

  whole, cut = turns(None), turns(at_fives)
  assert max(rollout.length for rollout in whole.values()) > 5
  for g, rollout in cut.items():
    n = rollout.length
    assert n == min(whole[g].length, 5) and rollout.stopped
    for name, empty in dict(tokens=256, behavior_logprobs=0, versions=-1, turns=0).items():
      np.testing.assert_array_equal(rollout.arrays[name][:n], whole[g].arrays[name][:n], name)
      assert (rollout.arrays[name][n:] == empty).all()
  assert seen[:G] == [(g, 0) for g in range(G)]  # all begin with the first burst
  assert {start for _, start in seen[G:]} == {toys.STEPS}


def test_logprobs_of_all_turns_equal_the_trainers():
  rollouts = stack(_dialogues())
  hidden = jax.jit(MODEL.response_hidden)(trained(), _prompts(), rollouts.tokens)
  trainer, _ = token_logprobs(hidden, MODEL.head(trained()), rollouts.tokens, Sampling())
  places = np.arange(rollouts.tokens.shape[-1]) < rollouts.lengths[..., None]
  sampled = places & (rollouts.turns % 2 == 0)
  difference = np.abs(np.asarray(trainer) - rollouts.behavior_logprobs)[sampled]
  assert sampled.sum() > 100 and difference.max() < 1e-5


@pytest.mark.slow
def test_every_place_of_a_dialogue_has_its_routes():
  """Those of replies too, in a cache that is computed anew or behind it; and delays change none."""
  config = dataclasses.replace(CONFIG, num_experts=8, experts_per_token=2, expert_width=16)
  model, T, stop = transformer(config), 96, (5, 5)
  programs = EnginePrograms(
    model, Sampling(), slots=12, prefill_rows=P, max_prompt_length=S, max_new_tokens=T,
    stop_tokens=STOPS, pad_token=PAD, has_replies=True, records_routes=True,
  )  # fmt: skip
  params = model.init(jax.random.key(0))

  def with_delays(delays):
    dialogue = Dialogue(delays=delays, stop_tokens=stop)
    engine = Engine(programs, dialogue.find_stop)
    engine.swap(0, programs.load(params, {}))
    return groups_of(dialogue.drive(engine))

  groups = with_delays(0)
  rollouts = stack(groups)
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
  for group, other in zip(with_delays(3).values(), groups.values(), strict=True):
    np.testing.assert_array_equal(group.routes, other.routes)
    np.testing.assert_array_equal(group.prompt_routes, other.prompt_routes)


def test_a_turn_ends_at_a_stop_string_and_what_follows_is_dropped():
  """The tokens up to the stop string are those of a run without it."""
  plain = _plain()
  tokens = plain[1].tokens[2]
  end = next(n for n in range(4, 128) if tokens[n - 1] != tokens[n - 2])
  stop = tokens[end - 2 : end].tolist()  # first occurs, or has occurred, by `end`
  end = next(n for n in range(2, 128) if tokens[n - 2 : n].tolist() == stop)
  groups = _serve(128, 12, Dialogue(stop_tokens=tuple(stop), max_turns=2))
  np.testing.assert_array_equal(groups[1].tokens[2, :end], tokens[:end])
  assert (groups[1].turns[2, : end + 1] == [0] * end + [1]).all() and plain[1].lengths[2] > end
  assert_same(_serve(128, 12, Dialogue(stop_tokens=tuple(stop), max_turns=2, delays=4)), groups)


@pytest.mark.parametrize(("T", "steps"), [(1, 1), (9, 1), (16, 2), (96, 8), (128, 16), (4096, 16)])
def test_bursts_are_an_eighth_of_a_response_of_several_turns_at_most(T, steps):
  assert CacheShape.of(S, T, has_replies=True).steps == steps
  assert CacheShape.of(S, T).steps == min(T, 16)


def test_idle_slots_and_caches_that_are_computed_anew_are_counted():
  """With a slot per rollout and replies at once no slot is idle because of them."""
  (at_once, _), (delayed, _) = _driven(0), _driven(1)
  groups = _dialogues()
  steps, expected = 16, 0
  for prompt, group in zip(_prompts().lengths, groups.values(), strict=True):
    for turns, length in zip(group.turns, group.lengths, strict=True):
      # A reply has an odd number, and another turn behind it.
      ends = np.flatnonzero(np.diff(turns[:length]) * (turns[: length - 1] % 2)) + 1
      cached = ends // steps * steps
      # The first token that is decoded anew is the one before those behind the cache.
      expected += int(np.sum(prompt - 1 + cached))
  assert at_once.rebuilt_tokens == delayed.rebuilt_tokens == expected > 0
  assert at_once.idle_slot_steps == 0 < delayed.idle_slot_steps


@pytest.mark.parametrize(("waiting", "idle", "drained"), [(0, 0, 3), (1, 1, 0)])
def test_slots_are_idle_because_of_replies_alone(waiting, idle, drained):
  """Two rollouts in three slots, while none or one more waits for its reply."""
  engine = Engine(toys.ToyPrograms(slots=3, has_replies=True))
  engine.swap(0, "weights")
  [request, *_] = _requests()
  prompt = request.prompt[: toys.S]
  engine.begin([engine.rollout(g, prompt, key) for g, key in enumerate(request.keys[:2])])
  engine.burst(waiting=waiting)
  usage = engine.usage
  assert usage.slot_steps == 3 * toys.STEPS
  assert usage.idle_slot_steps == idle * toys.STEPS
  assert usage.drain_slot_steps == drained * toys.STEPS
