"""MT-GRPO's coefficients of turns against the oracle, and where they are those of GRPO."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.advantage_oracles import mt_grpo_turns
from oracles.batches import make_batch, metric_value

from rlvr_jax import advantages, losses, parts
from rlvr_jax.train.cluster import sharding

pytestmark = pytest.mark.usefixtures("x64")
P, G, LIMIT = 8, 5, 4


def dialogues(seed=0, chance=0.7):
  """(batch, scores by prompt, rollout and turn); a turn has a score with this chance, else None."""
  rng = np.random.default_rng(seed)
  T = 5 * LIMIT
  turns, mask = np.zeros((P, G, T), np.int32), np.zeros((P, G, T))
  at_ends, scores = np.full((P, G, T), np.nan), np.empty((P, G), object)
  for p, g in np.ndindex(P, G):
    scores[p, g], t = [], 0
    for n in range(rng.integers(1, LIMIT + 1)):
      length, reply = rng.integers(1, 4), rng.integers(1, 3)
      turns[p, g, t : t + length], mask[p, g, t : t + length] = 2 * n, 1
      scores[p, g].append(float(rng.integers(0, 3)) if rng.random() < chance else None)
      if scores[p, g][-1] is not None:
        at_ends[p, g, t + length - 1] = scores[p, g][-1]
      turns[p, g, t + length : t + length + reply] = 2 * n + 1
      t += length + reply
  rewards = rng.integers(0, 2, (P, G)).astype(float)
  rewards[0] = 1.0
  return make_batch(mask, rewards=rewards, turns=turns, turn_scores=at_ends), scores


def coefficients(batch, **hyper):
  estimator = advantages.mt_grpo(**hyper)
  run = jax.jit(lambda batch: estimator.in_loss((), batch, estimator.apply((), batch)))
  return np.asarray(run(batch))


@pytest.mark.parametrize("hyper", [{}, {"turn_weight": 0.3}, {"epsilon": 0.1}], ids=str)
def test_coefficients_equal_the_oracle(hyper):
  batch, scores = dialogues()
  found = coefficients(batch, **hyper)
  seen = set()
  for p in range(P):
    expected = mt_grpo_turns(list(map(float, batch.rewards[p])), list(scores[p]), **hyper)
    for g, of_turns in enumerate(expected):
      for n, coefficient in enumerate(of_turns):
        tokens = (batch.mask[p, g] > 0) & (batch.turns[p, g] == 2 * n)
        np.testing.assert_allclose(found[p, g][tokens], coefficient, rtol=1e-12, atol=1e-12)
        seen.add(n)
  assert seen == {*range(LIMIT)}


def test_without_scores_of_turns_it_is_grpo_to_the_bit():
  batch, _ = dialogues()
  expected = np.asarray(jax.jit(advantages.grpo().apply)((), batch))
  per_token = np.broadcast_to(expected[..., None], batch.mask.shape)
  equal_scores = jnp.where(jnp.isnan(batch.turn_scores), jnp.nan, 0.1)
  none = jnp.full_like(batch.turn_scores, jnp.nan)
  for scores in (none, equal_scores):
    other = dataclasses.replace(batch, turn_scores=scores)
    np.testing.assert_array_equal(coefficients(other), per_token)
  np.testing.assert_array_equal(coefficients(batch, turn_weight=0.0), per_token)
  one_turn = dataclasses.replace(batch, turns=None, turn_scores=None)
  np.testing.assert_array_equal(coefficients(one_turn), expected)
  assert np.any(coefficients(batch) != per_token)


def test_on_several_devices_nothing_is_sent():
  batch, _ = dialogues()
  mesh = sharding.make_mesh(data=4, fsdp=1, tensor=2)
  placed = sharding.to_devices(jax.device_get(batch), sharding.batch_sharding(mesh))
  estimator = advantages.mt_grpo()
  run = jax.jit(lambda batch: estimator.in_loss((), batch, estimator.apply((), batch)))
  np.testing.assert_array_equal(run(placed), coefficients(batch))
  program = run.lower(placed).compile().as_text()
  assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", program)


def test_a_group_without_signal_learns_from_its_turns():
  """All dialogues are right; the second turn of one is better than the others'."""
  turns = np.broadcast_to([0, 1, 2, 3, 4], (1, 3, 5))
  scores = np.full((1, 3, 5), np.nan)
  scores[..., 2] = 1, 0, 0
  mask = np.broadcast_to([1.0, 0, 1, 0, 1], (1, 3, 5))
  batch = make_batch(mask, rewards=np.ones((1, 3)), turns=turns, turn_scores=scores)
  expected = np.zeros((1, 3, 5))
  expected[..., 2] = np.array([2, -1, -1]) / 3 / np.sqrt(1 / 3)
  np.testing.assert_allclose(coefficients(batch, epsilon=0.0) * mask, expected, rtol=1e-12)


def test_the_share_of_turns_that_are_compared():
  batch, scores = dialogues()
  found = metric_value(advantages.mt_grpo().metrics((), batch)["advantage/turns_compared"])
  compared, scored = 0, 0
  for group in scores:
    for n in range(LIMIT):
      values = [s[n] for s in group if n < len(s) and s[n] is not None]
      scored += len(values)
      compared += len(values) if len({*values}) > 1 else 0
  assert found == pytest.approx(compared / scored, rel=1e-6)
  batch = dataclasses.replace(batch, turn_scores=None)
  assert advantages.mt_grpo().metrics((), batch) == {}


def test_the_parts_take_turns():
  batch, _ = dialogues()
  fields = dict(mask=batch.mask, turns=batch.turns, turn_scores=batch.turn_scores)
  found = parts.advantages_of(advantages.mt_grpo(), batch.rewards, **fields)
  np.testing.assert_allclose(found, coefficients(batch), rtol=1e-12, atol=1e-12)
  logprobs = -jnp.ones(batch.mask.shape)
  case = logprobs, logprobs, found, batch.mask
  loss, _ = parts.loss_of(losses.reinforce(), *case)
  np.testing.assert_allclose(loss, (found * batch.mask).sum() / batch.mask.sum(), rtol=1e-12)
  with pytest.raises(ValueError, match=r"coefficients is .*; it must be \[P, G\]"):
    parts.loss_of(losses.gmpo(), *case)
