"""Weights that change within responses: a token is of the distribution that its version says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.engines import CONFIG, LONG, MODEL, S, V, few_slots, trained
from oracles.sampling import assert_same, drive, groups_of, make_requests, stack

from rlvr_jax.ops.logprobs import distribution, head_logits, token_logprobs
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.types import Prompts, Sampling

P, G, T = 4, 3, LONG
STEPS = 16  # of a burst


@functools.cache
def weights(version):
  return few_slots().load(trained(version), {})


@functools.cache
def prompts():
  rng = np.random.default_rng(0)
  lengths = np.asarray([6, 2, 4, 3], np.int32)
  return Prompts(tokens=rng.integers(0, V, (P, S)).astype(np.int32), lengths=lengths)


def _no_delta(layer, inputs):
  raise AssertionError(f"{layer} is no gated DeltaNet: {inputs}")


def requests():
  return make_requests(prompts(), jax.random.key(4), G)


@functools.cache
def sampled(rebuild, last=3, every=2):
  """The groups of rollouts that get a newer version every two bursts, up to the last."""
  found, bursts = Engine(few_slots()), 0
  found.swap(0, weights(0), rebuild=rebuild)

  def swap():
    nonlocal bursts
    bursts += 1
    version = min(bursts // every, last)
    found.release(before=version)
    found.swap(version, weights(version), rebuild=rebuild)

  return groups_of(drive(found, requests(), between=swap))


def test_tokens_bear_the_version_of_their_burst():
  for rebuilds in (False, True):
    groups = sampled(rebuilds)
    changed = 0
    for group in groups.values():
      for row, length in zip(group.versions, group.lengths, strict=True):
        assert (row[length:] == -1).all() and (row[:length] >= 0).all()
        assert (np.diff(row[:length]) >= 0).all()
        changes = np.flatnonzero(np.diff(row[:length])) + 1
        assert (changes % STEPS == 0).all()
        changed += len(changes)
    assert changed >= 5
    assert {*np.concatenate([g.versions.ravel() for g in groups.values()])} == {-1, 0, 1, 2, 3}


def test_with_a_rebuilt_cache_each_token_is_of_its_version():
  """As the forward pass of the version that it bears computes it, over all that stands before."""
  rollouts = stack(sampled(True))
  forward = jax.jit(MODEL.response_hidden)
  compared = 0
  for version in range(4):
    hidden = forward(trained(version), prompts(), rollouts.tokens)
    found, _ = token_logprobs(hidden, MODEL.head(trained(version)), rollouts.tokens)
    own = rollouts.versions == version
    np.testing.assert_allclose(
      rollouts.behavior_logprobs[own], np.asarray(found)[own], rtol=0, atol=1e-5
    )
    compared += own.sum()
    others = rollouts.versions == (version + 1) % 4
    assert np.abs(rollouts.behavior_logprobs - found)[others].mean() > 0.05
  assert compared == rollouts.lengths.sum()


@functools.cache
def step_under():
  """(params, keys and values by layer, token, position) → log-probabilities and the new cache."""

  @jax.jit
  def step(params, cache, token, position):
    updated = list(cache)

    def attend(layer, query, key, value, settings):
      keys, values = updated[layer]
      keys = keys.at[position].set(key[0])
      values = values.at[position].set(value[0])
      updated[layer] = keys, values
      queries = query[0].reshape(CONFIG.num_kv_heads, -1, CONFIG.head_dim)
      scores = jnp.einsum("knh,jkh->knj", queries, keys) * settings["scale"]
      places = jnp.arange(len(keys))
      visible = (places <= position) & (position - places < settings["window"])
      shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
      return jnp.einsum("knj,jkh->knh", shares, values).reshape(query.shape), None

    tables = MODEL.rotary(jnp.full((1, 1, 1), position)).at(0)
    hidden, *_ = MODEL.decode(params, token[None], tables, attend, _no_delta, None)
    return distribution(head_logits(hidden, MODEL.head(params)), Sampling())[0], updated

  return step


def test_with_the_old_cache_each_token_is_of_its_version_after_a_mixed_past():
  """Each under its version, beside the keys and values that earlier versions have left.

  The first rollout of each prompt; those of the last prompts have waited for a slot.
  """
  step, groups = step_under(), sampled(False)
  empty = jnp.zeros((S + T, CONFIG.num_kv_heads, CONFIG.head_dim))
  mixed = 0
  for group, tokens, length in zip(
    groups.values(), prompts().tokens, prompts().lengths, strict=True
  ):
    cache = [(empty, empty)] * CONFIG.num_layers
    versions, response = group.versions[0], group.tokens[0, : group.lengths[0]]
    context = [*tokens[S - length :], *response[:-1]]
    for position, token in enumerate(context):
      place = max(position - (length - 1), 0)  # of the token that is predicted
      logprobs, cache = step(weights(int(versions[place])), cache, jnp.int32(token), position)
      if position >= length - 1:
        expected = float(logprobs[response[place]])
        assert group.behavior_logprobs[0, place] == pytest.approx(expected, abs=1e-5)
        mixed += versions[place] != versions[0]
  assert mixed > 50


@pytest.mark.parametrize("rebuilds", [False, True])
def test_recorded_versions_give_the_same_bits(rebuilds):
  """In another order, where slots at a time have several versions, which take turns."""
  groups, again = sampled(rebuilds), Engine(few_slots())
  for version in range(4):
    again.swap(version, weights(version), rebuild=rebuilds)
  plan = lambda place: groups[place[0]].versions[place[1]]
  assert_same(groups_of(drive(again, requests()[::-1], plan=plan)), groups)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_a_version_that_comes_again_is_as_one(rebuilds):
  plain = Engine(few_slots())
  plain.swap(0, weights(0))
  assert_same(sampled(rebuilds, last=0), groups_of(drive(plain, requests())))
