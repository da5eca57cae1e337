"""The sampler against the trainer's own log-probabilities, and as a sampler."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import toys
from oracles.engines import LONG, MODEL, PAD, S, V, few_slots, programs, trained
from oracles.sampling import Request, assert_same, drive, make_requests, sample, serve, stack

from rlvr_jax.ops.logprobs import distribution, head_logits, token_logprobs
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import Prompts, Sampling

P, G, T = 3, 4, 9
_response_hidden = jax.jit(MODEL.response_hidden)
SAMPLINGS = [
  Sampling(),
  Sampling(temperature=0.5),
  Sampling(temperature=1.7),
  Sampling(top_k=4),
  Sampling(top_p=0.7),
  Sampling(temperature=0.8, top_k=6, top_p=0.9),
  Sampling(temperature=1.3, min_p=0.1),
]
QUICK = SAMPLINGS[0], SAMPLINGS[5]  # whose programs other tests use, or which truncate twice


@functools.cache
def _prompts():
  rng = np.random.default_rng(0)
  return Prompts(
    tokens=rng.integers(0, V, (P, S)).astype(np.int32),
    lengths=np.asarray([6, 2, 4], np.int32),
  )


def _engine(sampling=SAMPLINGS[0], slots=P * G, length=T, **settings):
  return programs(sampling, slots=slots, length=length, **settings)


def _generate(sampling=SAMPLINGS[0], key=0, prompts=None, group_size=G, **settings):
  engine = _engine(sampling, **settings)
  return sample(engine, trained(), {}, prompts or _prompts(), jax.random.key(key), group_size)


@pytest.mark.parametrize(
  "sampling",
  [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in SAMPLINGS if x not in QUICK)],
)
def test_logprobs_equal_the_trainers(sampling):
  rollouts = _generate(sampling)
  hidden = _response_hidden(trained(), _prompts(), rollouts.tokens)
  head = MODEL.head(trained())
  trainer, _ = token_logprobs(hidden, head, rollouts.tokens, sampling)
  mask = np.arange(T) < np.asarray(rollouts.lengths)[..., None]
  # Where a token's keep/drop margin is below 1e-5, sampler and trainer may keep different sets.
  scaled = np.sort(np.asarray(head_logits(hidden, head)) / sampling.temperature, axis=-1)[..., ::-1]
  undecided = np.zeros(mask.shape, bool)
  if sampling.top_k:
    undecided |= scaled[..., sampling.top_k - 1] - scaled[..., sampling.top_k] < 1e-5
  if sampling.top_p < 1:
    kept = scaled[..., : sampling.top_k or V]
    mass = np.cumsum(np.exp(kept) / np.exp(kept).sum(-1, keepdims=True), axis=-1)
    undecided |= np.abs(mass - sampling.top_p).min(-1) < 1e-5
  if sampling.min_p:
    threshold = scaled[..., :1] + np.log(sampling.min_p)
    undecided |= np.abs(scaled - threshold).min(-1) < 1e-5
  assert undecided.mean() < 0.01
  compared = mask & ~undecided
  difference = np.abs(np.asarray(trainer) - np.asarray(rollouts.behavior_logprobs))[compared]
  assert compared.sum() > 40 and difference.max() < 1e-5


def test_greedy_equals_the_argmax_of_the_full_forward_pass():
  rollouts = _generate(Sampling(temperature=0.0), stop_tokens=(V,))
  tokens = np.zeros((P, G, T), np.int32)
  for t in range(T):
    hidden = _response_hidden(trained(), _prompts(), tokens)
    tokens[:, :, t] = np.argmax(head_logits(hidden, MODEL.head(trained()))[:, :, t], axis=-1)
  np.testing.assert_array_equal(rollouts.tokens, tokens)
  np.testing.assert_array_equal(rollouts.behavior_logprobs, 0.0)


def test_rows_end_at_a_stop_token_or_the_limit():
  rollouts = _generate()
  tokens, lengths = np.asarray(rollouts.tokens), np.asarray(rollouts.lengths)
  stops = np.isin(tokens, (3, 11))
  for p, g in np.ndindex(P, G):
    row, length = tokens[p, g], lengths[p, g]
    assert not stops[p, g, : length - 1].any()
    assert bool(rollouts.stopped[p, g]) == bool(stops[p, g, length - 1])
    assert rollouts.stopped[p, g] or length == T
    assert (row[length:] == PAD).all()
    assert (rollouts.behavior_logprobs[p, g, length:] == 0).all()
  assert 0 < rollouts.stopped.mean() < 1  # both ends occur in this sample


@pytest.mark.slow
def test_frequencies_pass_a_chi_square_test():
  """First tokens of 4,096 rollouts of one prompt, against the exact distribution."""
  prompts = jax.tree.map(lambda x: x[:1], _prompts())
  for sampling in (
    Sampling(temperature=2.0),
    Sampling(temperature=4.0, top_p=0.9),
    Sampling(temperature=4.0, min_p=0.01),
  ):
    rollouts = _generate(sampling, key=5, prompts=prompts, group_size=4096, slots=4096)
    hidden = _response_hidden(trained(), prompts, rollouts.tokens[:, :1])[0, 0, 0]
    p = np.exp(distribution(head_logits(hidden, MODEL.head(trained())), sampling))
    observed = np.bincount(np.asarray(rollouts.tokens[0, :, 0]), minlength=V)
    assert (observed[p == 0] == 0).all()
    kept = p > 1e-3
    statistic = np.sum((observed - 4096 * p)[kept] ** 2 / (4096 * p)[kept])
    freedom = kept.sum() - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_keys_decide_the_samples_and_nothing_else_does():
  assert bool(jnp.all(_generate(key=1).tokens == _generate(key=1).tokens))
  assert not bool(jnp.all(_generate(key=1).tokens == _generate(key=2).tokens))
  groups = np.asarray(_generate(key=1).tokens)
  assert len({row.tobytes() for row in groups[0]}) > 1  # rollouts of a prompt differ


# --- slots ----------------------------------------------------------------------------------------


@functools.cache
def _requests(count=7):
  """Prompts of 1 to 6 tokens, two rollouts each."""
  rng = np.random.default_rng(1)
  lengths = 1 + np.arange(count, dtype=np.int32) % S
  prompts = Prompts(tokens=rng.integers(0, V, (count, S)).astype(np.int32), lengths=lengths)
  return make_requests(prompts, jax.random.key(4), 2)


def _serve(engine, asked):
  """The groups by index."""
  return serve(engine, trained(), asked)


@functools.cache
def _served(cache_format=""):
  """The groups of all requests in their order, by few slots."""
  return _serve(few_slots(cache_format), _requests())


each_cache = pytest.mark.parametrize(
  "cache_format", ["", pytest.param("int8", marks=pytest.mark.slow)]
)


@each_cache
def test_the_order_of_requests_changes_no_bit(cache_format):
  engine, expected = few_slots(cache_format), _served(cache_format)
  lengths = np.concatenate([group.lengths for group in expected.values()])
  assert lengths.min() < 16 < lengths.max()  # so slots were refilled at different times
  order = np.random.default_rng(0).permutation(len(_requests()))
  assert_same(_serve(engine, [_requests()[i] for i in order]), expected)


@each_cache
def test_neighbors_change_no_bit(cache_format):
  engine, expected = few_slots(cache_format), _served(cache_format)
  for request in _requests()[::3]:
    assert_same(_serve(engine, [request]), {request.index: expected[request.index]})


@pytest.mark.slow
def test_the_number_of_slots_changes_rounding_only():
  many = _serve(_engine(stop_tokens=(3,), slots=14, length=LONG), _requests())
  for index, group in _served().items():
    np.testing.assert_array_equal(group.tokens, many[index].tokens)
    np.testing.assert_allclose(group.behavior_logprobs, many[index].behavior_logprobs, atol=2e-6)


@pytest.mark.slow
def test_frequencies_with_refilled_slots_pass_a_chi_square_test():
  """Two prompts of unequal length, 2,048 rollouts each through 512 slots."""
  engine = _engine(stop_tokens=(3, 11), slots=512)
  prompts = jax.tree.map(lambda x: x[:2], _prompts())
  groups = _serve(engine, make_requests(prompts, jax.random.key(8), 2048))
  hidden = _response_hidden(trained(), prompts, np.zeros((2, 1, T), np.int32))[:, 0, 0]
  p = np.exp(distribution(head_logits(hidden, MODEL.head(trained())), Sampling()))
  for index, group in groups.items():
    observed, kept = np.bincount(group.tokens[:, 0], minlength=V), 2048 * p[index] > 2
    statistic = np.sum((observed - 2048 * p[index])[kept] ** 2 / (2048 * p[index])[kept])
    assert statistic < kept.sum() + 4 * np.sqrt(2 * kept.sum())


def test_prompts_of_like_length_are_prefilled_together():
  """Up to three blocks of 32 tokens; the response is that of a prompt by itself."""
  rng, length = np.random.default_rng(2), 24
  lengths = [5, 92, 35, 3, 80, 36, 1]
  prompts = [rng.integers(0, V, n).astype(np.int32) for n in lengths]
  keys = _requests()
  asked = [Request(i, p, keys[i].keys) for i, p in enumerate(prompts)]
  engine = EnginePrograms(
    MODEL,
    Sampling(),
    slots=4,
    prefill_rows=2,
    max_prompt_length=96,
    max_new_tokens=length,
    stop_tokens=(3,),
    pad_token=PAD,
  )
  groups = _serve(engine, asked)
  rollouts = stack(groups)
  padded = np.stack([np.pad(prompt, (96 - len(prompt), 0)) for prompt in prompts])
  hidden = _response_hidden(trained(), Prompts(padded, np.asarray(lengths)), rollouts.tokens)
  trainer, _ = token_logprobs(hidden, MODEL.head(trained()), rollouts.tokens)
  mask = np.arange(length) < rollouts.lengths[..., None]
  np.testing.assert_allclose(np.where(mask, trainer, 0), rollouts.behavior_logprobs, atol=2e-5)
  assert_same(_serve(engine, asked[::-1]), groups)


def _long_engine(compiles_ahead=False):
  return EnginePrograms(
    MODEL,
    Sampling(),
    slots=4,
    prefill_rows=2,
    max_prompt_length=129,
    max_new_tokens=257,
    stop_tokens=(3,),
    pad_token=PAD,
    compiles_ahead=compiles_ahead,
  )


def _prompts_of(lengths):
  rng = np.random.default_rng(3)
  keys = _requests()
  return [
    Request(i, rng.integers(0, V, n).astype(np.int32), keys[i].keys) for i, n in enumerate(lengths)
  ]


@functools.cache
def _by_a_long_engine():
  """(requests, an engine that has served them first, their groups)."""
  requests, engine = _prompts_of([5, 30, 17]), _long_engine()
  return requests, engine, _serve(engine, requests)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_program_that_decodes():
  """A quarter, a half or all of the caches is read; a long prompt first, and all is always read."""
  long = _prompts_of([129])
  short, engine, groups = _by_a_long_engine()
  responses = [group.lengths.max() for group in groups.values()]
  assert engine.programs.burst._cache_size() > 1 and max(responses) > 64
  other = _long_engine()
  _serve(other, long)
  assert_same(_serve(other, short), groups)
  later = _serve(engine, long)
  assert engine.programs.burst._cache_size() <= 4
  assert_same(_serve(other, long), later)


@pytest.mark.slow
def test_the_next_burst_is_compiled_while_one_runs():
  requests, _, expected = _by_a_long_engine()
  engine = _long_engine(compiles_ahead=True)
  groups = _serve(engine, requests)
  assert engine.programs.burst._cache_size() == 1  # the first; the others came from the thread
  assert engine.programs.prefill._cache_size() == 1
  assert_same(groups, expected)


# --- rollouts pushed by hand, on toy programs ----------------------------------------------------


class _ToyPrograms(toys.ToyPrograms):
  """They prefill three prompts of any length together; a cache knows the weights that made it."""

  def prefill_rows(self, length):
    return P

  def prefill(self, params, tokens, prompts, **options):
    prefilled = super().prefill(params, tokens, prompts, **options)
    return prefilled._replace(prompts=tuple((params, *row) for row in prefilled.prompts))

  def padded_length(self, tokens, *, has_response):
    return toys.S


def _toy_engine(*versions, slots=3):
  """An engine with the weights of versions, which are their numbers."""
  engine = Engine(_ToyPrograms(slots=slots))
  for version in versions:
    engine.swap(version, f"weights {version}")
  return engine


def _rollouts(engine, request, plan=None):
  """The rollouts of a request, which have not begun."""
  places = [(request.index, g) for g in range(len(request.keys))]
  pairs = zip(places, request.keys, strict=True)
  return [engine.rollout(place, request.prompt, key, plan) for place, key in pairs]


def _assert_same_arrays(rollouts, expected):
  assert rollouts.keys() == expected.keys()
  for place, rollout in rollouts.items():
    for name in ("tokens", "behavior_logprobs", "versions"):
      np.testing.assert_array_equal(rollout.arrays[name], expected[place].arrays[name], name)


def test_what_the_slots_do_is_counted():
  engine = _toy_engine(0)
  ended = drive(engine, _requests())
  usage = engine.usage
  assert usage.slot_tokens == sum(rollout.length for rollout in ended.values())
  assert 0 < usage.drain_tokens < usage.slot_tokens
  assert usage.slot_tokens < usage.slot_steps < 3 * usage.slot_tokens
  assert usage.slot_steps % 3 == 0 and 0 < usage.drain_slot_steps < usage.slot_steps


def test_as_many_prompts_begin_as_fill_the_slots_and_a_batch_of_prompts():
  """Three slots, two rollouts a prompt, three prompts prefilled together."""
  engine = _toy_engine(0)
  begun = 0
  while engine.free:
    engine.begin(_rollouts(engine, _requests()[begun]))
    begun += 1
  assert begun == P and engine.num_rollouts == 2 * P and engine.idle_slots == 3
  engine.burst()
  assert not engine.free  # three prefilled rollouts are left for three slots at most
  # Seven slots want a rollout of a second batch.
  engine = _toy_engine(slots=7)
  for request in _requests()[:P]:
    assert engine.free
    engine.begin(_rollouts(engine, request))
  assert engine.free


def test_rollouts_that_wait_for_a_slot_begin_with_the_newest_weights():
  """As if the older ones, with which they were prefilled, had not been there."""
  engine = _toy_engine(0)
  ended = drive(engine, _requests(), between=lambda: engine.swap(1, "weights 1"))
  expected = drive(_toy_engine(1), _requests())
  newer = {place: r for place, r in ended.items() if r.arrays["versions"][0] == 1}
  assert len(newer) == len(ended) - 3  # all but those of the first burst
  _assert_same_arrays(newer, {place: expected[place] for place in newer})


def test_a_shorter_plan_repeats_its_last_version():
  with_plan = lambda plan: drive(_toy_engine(0, 1), _requests(), plan=lambda place: plan)
  steps = toys.STEPS
  complete = with_plan(np.repeat([0, 1], (steps, toys.T - steps)))
  _assert_same_arrays(with_plan(np.repeat([0, 1], (steps, 1))), complete)
  later = np.concatenate([r.arrays["versions"][steps:] for r in complete.values()])
  assert {*later} == {-1, 1}


def test_what_an_engine_cannot_decode_is_said():
  engine = _toy_engine()
  with pytest.raises(ValueError, match="begin or resume"):
    engine.burst()
  engine.swap(3, "weights 3")
  engine.begin(_rollouts(engine, _requests()[2], np.asarray([4])))
  with pytest.raises(ValueError, match=r"version 4 .* token 0 of rollout \(2, 0\).* \[3\]"):
    engine.burst()
  engine = _toy_engine(3)
  engine.release(before=4)
  engine.begin(_rollouts(engine, _requests()[0]))
  with pytest.raises(ValueError, match=r"version 3 .* \[\]"):
    engine.burst()


# --- memory and programs --------------------------------------------------------------------------


def test_idle_slots_take_no_memory():
  decoding = few_slots()
  params, count = decoding.load(trained(), {}), lambda: len(jax.live_arrays())

  def decode(between=lambda: None):
    engine = Engine(decoding)
    engine.swap(0, params)
    assert len(drive(engine, _requests(), between=between)) == 2 * len(_requests())
    return engine

  decode()  # compiles, which makes constants
  before, during = count(), []
  engine = decode(lambda: during.append(count()))
  assert not engine.busy and count() == before < during[0]


PEAK = """
import resource
import jax, numpy as np
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.types import Sampling

network = TransformerConfig(
  vocab_size=24, width=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64, mlp_width=16
)
programs = EnginePrograms(
  transformer(network), Sampling(), slots=8, prefill_rows=8, max_prompt_length=513,
  max_new_tokens=16, stop_tokens=(), pad_token=0,
)
params = programs.load(programs.settings.model.init(jax.random.key(0)), {})
keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), (256, 1))))
prompt = np.ones(513, np.int32)

def peak_kib(count):
  engine, begun, ended = Engine(programs), 0, 0
  engine.swap(0, params)
  while engine.busy or begun < count:
    while engine.free and begun < count:
      engine.begin([engine.rollout(begun, prompt, keys[begun, 0])])
      begun += 1
    ended += len(engine.burst())
  assert ended == count
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

peak_kib(16)
few, many = peak_kib(16), peak_kib(256)
assert many - few < 40 * 1024, (few, many)
"""


@pytest.mark.slow
def test_more_requests_than_slots_take_no_more_memory():
  """A prompt's keys and values take half a MiB; 240 more of them, if they were kept, 120 MiB."""
  subprocess.run([sys.executable, "-c", PEAK], check=True, timeout=300)


def test_a_burst_of_longer_responses_is_no_longer_program():
  """So the time of compiling does not depend on the greatest length."""

  def lines(length):
    engine = _engine(stop_tokens=(3,), slots=3, length=length)
    params = jax.eval_shape(engine.load, trained(), {})
    state, read = jax.eval_shape(engine.programs.empty_slots), engine.settings.shape.everything
    return engine.programs.burst.lower(params, state, read=read).as_text().count("\n")

  assert lines(1024) == lines(65_536) > 500


@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(
  ("cache_format", "dtype"), [("", "f32"), pytest.param("int8", "s8", marks=pytest.mark.slow)]
)
def test_the_caches_are_written_in_place(cache_format, dtype):
  """No instruction of the compiled burst copies a layer's keys or values.

  On CPUs a layer's 8-bit numbers are widened for its products; elsewhere within these.
  """
  engine = few_slots(cache_format=cache_format)
  params = engine.load(trained(), {})
  state = jax.eval_shape(engine.programs.empty_slots)
  read = engine.settings.shape.everything
  program = engine.programs.burst.lower(params, state, read=read).compile().as_text()
  size = [x.shape for x in jax.tree.leaves(state.responses[0])]
  of_cache = "|".join(",".join(map(str, shape)) for shape in size)
  assert re.search(rf"= {dtype}\[({of_cache})\]\S* dynamic-update-slice", program)
  copied = "copy|transpose|concatenate"
  copies = re.findall(rf"= \w+\[(?:{of_cache})\]\S* (?:{copied})\(", program)
  assert not copies
