"""The sampler against the trainer's own log-probabilities, and as a sampler."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.logprobs import distribution, head_logits, token_logprobs
from rlvr_jax.rollouts import sampler
from rlvr_jax.rollouts.sampler import cache_lengths, generate
from rlvr_jax.types import Prompts, Sampling

V, P, G, S, T = 24, 3, 4, 6, 9
PAD = 0
CONFIG = TransformerConfig(
  vocab_size=V,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  qk_norm=True,
  final_soft_cap=15.0,
  sliding_window=4,
  sliding_layers=(True, False),
)
MODEL = transformer(CONFIG)
_response_hidden = jax.jit(MODEL.response_hidden)
SAMPLINGS = [
  Sampling(),
  Sampling(temperature=0.5),
  Sampling(temperature=1.7),
  Sampling(top_k=4),
  Sampling(top_p=0.7),
  Sampling(temperature=0.8, top_k=6, top_p=0.9),
]


@functools.cache
def _params():
  # Larger embeddings make a peaked, interesting distribution.
  params = MODEL.init(jax.random.key(0))
  return {**params, "embedding": params["embedding"] * 2.5}


@functools.cache
def _prompts():
  rng = np.random.default_rng(0)
  return Prompts(
    tokens=jnp.asarray(rng.integers(0, V, (P, S)), jnp.int32),
    lengths=jnp.asarray([6, 2, 4], jnp.int32),
  )


@functools.cache
def _generator(sampling, stop_tokens, group_size, cache_lengths):
  """Compiled once for all tests; the last argument tells apart what one of them replaces."""
  del cache_lengths
  return jax.jit(
    functools.partial(
      generate,
      model=MODEL,
      group_size=group_size,
      max_new_tokens=T,
      sampling=sampling,
      stop_tokens=stop_tokens,
      pad_token=PAD,
    )
  )


def _generate(sampling=SAMPLINGS[0], key=0, stop_tokens=(3, 11), prompts=None, group_size=G):
  run = _generator(sampling, stop_tokens, group_size, sampler.cache_lengths)
  return run(_params(), {}, prompts or _prompts(), jax.random.key(key))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_logprobs_equal_the_trainers(sampling):
  rollouts = _generate(sampling)
  hidden = _response_hidden(_params(), _prompts(), rollouts.tokens)
  head = MODEL.head(_params())
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
  assert undecided.mean() < 0.01
  compared = mask & ~undecided
  difference = np.abs(np.asarray(trainer) - np.asarray(rollouts.behavior_logprobs))[compared]
  assert compared.sum() > 40 and difference.max() < 1e-5


def test_greedy_equals_the_argmax_of_the_full_forward_pass():
  rollouts = _generate(Sampling(temperature=0.0), stop_tokens=(V,))
  tokens = np.zeros((P, 1, T), np.int32)
  for t in range(T):
    hidden = _response_hidden(_params(), _prompts(), jnp.asarray(tokens))
    tokens[:, :, t] = np.argmax(head_logits(hidden, MODEL.head(_params()))[:, :, t], axis=-1)
  np.testing.assert_array_equal(rollouts.tokens, np.repeat(tokens, G, axis=1))
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


def test_the_loop_ends_when_every_row_has_stopped():
  """With all tokens as stop tokens one token is sampled; the decode loop is never entered."""
  rollouts = _generate(stop_tokens=tuple(range(V)))
  np.testing.assert_array_equal(rollouts.lengths, 1)
  assert bool(rollouts.stopped.all())


def test_frequencies_pass_a_chi_square_test():
  """First tokens of 4,096 rollouts of one prompt, against the exact distribution."""
  prompts = jax.tree.map(lambda x: x[:1], _prompts())
  for sampling in (Sampling(temperature=2.0), Sampling(temperature=4.0, top_p=0.9)):
    rollouts = _generate(sampling, key=5, prompts=prompts, group_size=4096)
    hidden = _response_hidden(_params(), prompts, rollouts.tokens[:, :1])[0, 0, 0]
    p = np.exp(distribution(head_logits(hidden, MODEL.head(_params())), sampling))
    observed = np.bincount(np.asarray(rollouts.tokens[0, :, 0]), minlength=V)
    assert (observed[p == 0] == 0).all()
    kept = p > 1e-3
    statistic = np.sum((observed - 4096 * p)[kept] ** 2 / (4096 * p)[kept])
    freedom = kept.sum() - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_the_second_token_follows_its_own_first_token():
  """Chi-square of the second token given the first: the cache serves the right rows."""
  prompts = jax.tree.map(lambda x: x[1:2], _prompts())
  rollouts = _generate(key=6, prompts=prompts, group_size=4096, stop_tokens=(V,))
  first, second = np.asarray(rollouts.tokens[0, :, 0]), np.asarray(rollouts.tokens[0, :, 1])
  token = np.bincount(first).argmax()
  chosen = int(np.flatnonzero(first == token)[0])
  row = rollouts.tokens[:, chosen : chosen + 1]
  hidden = _response_hidden(_params(), prompts, row)[0, 0, 1]
  p = np.exp(distribution(head_logits(hidden, MODEL.head(_params())), Sampling()))
  observed = np.bincount(second[first == token], minlength=V)
  n = observed.sum()
  kept = n * p > 2
  statistic = np.sum((observed - n * p)[kept] ** 2 / (n * p)[kept])
  assert n > 300 and statistic < kept.sum() + 4 * np.sqrt(2 * kept.sum())


def test_keys_decide_the_samples_and_nothing_else_does():
  assert bool(jnp.all(_generate(key=1).tokens == _generate(key=1).tokens))
  assert not bool(jnp.all(_generate(key=1).tokens == _generate(key=2).tokens))
  groups = np.asarray(_generate(key=1).tokens)
  assert len({row.tobytes() for row in groups[0]}) > 1  # rollouts of a prompt differ


@pytest.mark.usefixtures("no_compilation_cache")
def test_the_cache_is_updated_in_place():
  """No instruction of the compiled decode loop copies a layer's keys or values."""
  lowered = jax.jit(
    functools.partial(
      generate,
      model=MODEL,
      group_size=G,
      max_new_tokens=T,
      sampling=Sampling(),
      stop_tokens=(3,),
      pad_token=PAD,
    )
  ).lower(_params(), {}, _prompts(), jax.random.key(0))
  program = lowered.compile().as_text()
  cache = rf"f32\[{P},{G},{CONFIG.num_kv_heads},({CONFIG.head_dim},{T}|{T},{CONFIG.head_dim})\]"
  computations = [c for c in program.split("\n\n") if not c.lstrip().startswith("ENTRY")]
  updates = [c for c in computations if re.search(rf"= {cache}\S* dynamic-update-slice", c)]
  assert updates  # the cache is there, and is written to
  copy = rf"= {cache}\S* (copy|transpose|concatenate)\("
  # Outside loops, where the cache is made or grows, it may be copied.
  loops = [c for c in computations if "dynamic-update-slice" in c or " dot(" in c]
  copies = [line for c in loops for line in c.splitlines() if re.search(copy, line)]
  assert not copies, copies


@pytest.mark.parametrize(
  ("tokens", "lengths"), [(1, [1]), (31, [31]), (33, [17, 33]), (512, [128, 256, 384, 512])]
)
def test_the_cache_grows_in_parts(tokens, lengths):
  assert cache_lengths(tokens) == lengths


def test_a_growing_cache_changes_no_token(monkeypatch):
  """Decoding with two sizes of the cache, as for long responses, gives the same rollouts."""
  whole = _generate(stop_tokens=(V,))
  monkeypatch.setattr(sampler, "cache_lengths", lambda tokens: [4, 7, tokens])
  grown = _generate(stop_tokens=(V,))
  np.testing.assert_array_equal(grown.tokens, whole.tokens)
  np.testing.assert_allclose(grown.behavior_logprobs, whole.behavior_logprobs, atol=1e-5)
