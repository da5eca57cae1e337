"""A rollout without a grade has no effect, found by walking the exports.

What each estimator, statistic and reweighting gives the others is what it gives them alone. A
failure says what to do about it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.advantage_oracles import OF_BATCH, WITHOUT_GROUP
from oracles.batches import make_batch

from rlvr_jax import advantages, parts, reweighting
from rlvr_jax.geometry.diagnostics import diagnose
from rlvr_jax.ops import reductions
from rlvr_jax.ops.ratios import source_metrics
from rlvr_jax.ops.update_metrics import batch_metrics

REMEDY = (
  "reduce over a group by ops/groups.py with batch.valid, and end with"
  " advantages.base.zero_if_constant, or ops.masked.masked_fill by batch.valid."
)
ESTIMATORS = {name: getattr(advantages, name)() for name in advantages.__all__} | {
  "fade-entropy": advantages.fade(schedule="entropy"),
  "gdpo-leave_one_out": advantages.gdpo(leave_one_out=True),
  "otb-truncated": advantages.otb(truncation=2.0, zero_constant=False),
  "pass_at_k-2": advantages.pass_at_k(k=2),
  "pass_at_k-plug_in": advantages.pass_at_k(form="plug_in"),
  "reinforce_plus_plus-baseline": advantages.reinforce_plus_plus(baseline=True),
  "reinforce_plus_plus-tokens": advantages.reinforce_plus_plus(baseline=True, over="tokens"),
}
READS_LOSS_TOKENS = ("opo", "opob", "otb", "otb-truncated", "reinforce_plus_plus-tokens")
REWEIGHTINGS = {name: getattr(reweighting, name)() for name in reweighting.__all__} | {
  "salt-all": reweighting.salt(rank_scale=100.0),
  "salt-residual": reweighting.salt(channels="residual", alpha_min=1.0),
}
FEWEST = {
  "pass_at_k": 5,
  "pass_at_k-2": 3,
}  # valid rollouts for a group to count, where it is neither one nor two
P, G, T = 6, 7, 5
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


def _batch(valid, *, shaped=False, spoilt=None):
  """Random rollouts; `spoilt` stands for reward and correctness where they are not valid."""
  rng = np.random.default_rng(5)
  correct = rng.integers(0, 2, (P, G)).astype(np.float32)
  correct[0] = 1.0
  rewards = correct - shaped * rng.random((P, G)).astype(np.float32)
  mask = (np.arange(T) < rng.integers(0, T + 1, (P, G))[..., None]).astype(np.float32)
  if spoilt is not None:
    rewards, correct = (np.where(valid, x, np.float32(spoilt)) for x in (rewards, correct))
    mask = np.where(valid[..., None], mask, np.float32(abs(spoilt) > 1))
  turn_scores = np.where(rng.random(mask.shape) < 0.7, rng.integers(0, 3, mask.shape), np.nan)
  if spoilt is not None:
    turn_scores = np.where(valid[..., None], turn_scores, spoilt)
  turns = np.broadcast_to(np.arange(T, dtype=np.int32), mask.shape)  # of one token each
  turn_scores = np.where(turns % 2 == 0, turn_scores, np.nan)
  fields = dict(rewards=rewards, correct=correct, valid=valid, sources=np.arange(P) % 2)
  fields |= dict(turns=turns, turn_scores=turn_scores.astype(np.float32))
  several = rng.integers(0, 2, (P, G, 3)).astype(np.float32)
  if spoilt is not None:
    several = np.where(valid[..., None], several, np.float32(spoilt))
  fields["rewards_by_name"] = several
  logprobs = -rng.exponential(1.0, mask.shape).astype(np.float32)
  squares = np.exp(2 * logprobs) + rng.random(mask.shape).astype(np.float32)
  norms = rng.random((P, G)).astype(np.float32)
  if spoilt is not None:
    spoil = lambda x: np.where(valid[..., None], x, np.float32(spoilt))
    logprobs, squares = spoil(logprobs), spoil(squares)
    norms = np.where(valid, norms, np.float32(spoilt))
  fields |= dict(policy_logprobs=logprobs, squared_probabilities=squares, squared_norms=norms)
  return make_batch(mask, -np.ones((P, G, T), np.float32), **fields)


def _only(batch, chosen):
  """The batch of the chosen rollouts, indices [P, n], all of them valid."""
  index = lambda x: chosen.reshape(chosen.shape + (1,) * (x.ndim - 2))
  take = lambda x: np.take_along_axis(np.asarray(x), index(x), 1)
  fields = ("tokens", "mask", "behavior_logprobs", "rewards", "correct", "valid")
  fields += ("turns", "turn_scores", "rewards_by_name")
  fields += ("policy_logprobs", "squared_probabilities", "squared_norms")
  return dataclasses.replace(batch, **{name: take(getattr(batch, name)) for name in fields})


@functools.cache
def _program(name):
  """Op by op, each small operation would be a program of its own for every size of a group."""
  estimator = ESTIMATORS[name]

  @jax.jit
  def run(batch):
    state = estimator.init(jnp.float32(0.7))
    return estimator.in_loss(state, batch, estimator.apply(state, batch))

  return run


def _apply(name, batch):
  return np.asarray(_program(name)(batch))


@pytest.mark.parametrize(
  ("name", "shaped"),
  [
    (name, shaped)
    for name, estimator in ESTIMATORS.items()
    for shaped in ([False] if estimator.needs_binary else [False, True])
  ],
)
def test_coefficients_are_those_of_the_valid_rollouts_alone(name, shaped):
  """With 7, 5, 1 and no valid rollouts in a group."""
  rng = np.random.default_rng(0)
  counts = np.array([7, 5, 5, 5, 1, 0])
  valid = rng.permuted(np.arange(G) < counts[:, None], axis=1)
  found = _apply(name, _batch(valid, shaped=shaped))
  for spoilt in (np.nan, np.inf, -1e30, 0.5):
    other = _apply(name, _batch(valid, shaped=shaped, spoilt=spoilt))
    np.testing.assert_array_equal(other, found, REMEDY)
  assert not np.any(found[~valid]), REMEDY
  if name.split("-")[0] in OF_BATCH:  # other groups have an effect
    return
  whole = _batch(np.ones((P, G), bool), shaped=shaped)
  for group, count in enumerate(counts):
    alone = np.tile(np.flatnonzero(valid[group]), (P, 1))
    own = found[group, valid[group]]
    if count >= FEWEST.get(name, 1 if name in WITHOUT_GROUP else 2):
      expected = _apply(name, _only(whole, alone))[group]
      np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6, err_msg=REMEDY)
    else:
      assert not np.any(own), REMEDY


@each_estimator
def test_a_rollout_that_only_the_loss_leaves_out_stays_in_the_baseline(name):
  """As `overlong.filter` does; some read lengths in the loss."""
  batch = _batch(np.ones((P, G), bool))
  filtered = dataclasses.replace(batch, mask=batch.mask.at[:, 0].set(0.0))
  same = np.array_equal(_apply(name, filtered), _apply(name, batch))
  assert same != (name in READS_LOSS_TOKENS), (
    "take validity from batch.valid, not from the loss mask"
  )


def _with_and_without():
  """(chosen rollouts, the batch, the batch of those): two of seven are left out everywhere."""
  rng = np.random.default_rng(1)
  chosen = np.sort(rng.permuted(np.tile(np.arange(G), (P, 1)), axis=1)[:, :5], axis=1)
  valid = (np.arange(G) == chosen[..., None]).any(axis=1)
  batch = _batch(valid, spoilt=0.5)
  # The collector leaves them out of the loss.
  batch = dataclasses.replace(batch, mask=np.asarray(batch.mask) * valid[..., None])
  return chosen, batch, _only(batch, chosen)


def _assert_near(found, expected):
  near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=REMEDY)
  jax.tree.map(near, found, expected)


@each_estimator
def test_statistics_of_an_estimator_are_those_of_the_valid_rollouts_alone(name):
  """Its coefficients, its metrics and its state."""
  chosen, batch, few = _with_and_without()
  estimator = ESTIMATORS[name]

  @jax.jit
  def statistics(batch):
    state = estimator.init(jnp.float32(0.7))
    metrics = reductions.values(estimator.metrics(state, batch))
    return metrics, estimator.update(state, batch, jnp.float32(0.5))

  if jax.tree.leaves(jax.eval_shape(statistics, batch)):
    _assert_near(statistics(batch), statistics(few))
  _assert_near(_apply(name, batch)[np.arange(P)[:, None], chosen], _apply(name, few))


def test_metrics_of_a_batch_are_those_of_the_valid_rollouts_alone():
  """Gradient masses, and metrics of the batch and of its sources."""
  _, batch, few = _with_and_without()
  estimator = ESTIMATORS["grpo"]

  @jax.jit
  def measured(batch):
    A = estimator.apply(estimator.init(jnp.float32(0.7)), batch)
    metrics = advantages.gradient_masses(A, batch.rewards, batch.correct, batch.valid)
    metrics |= batch_metrics(batch)
    metrics |= source_metrics(-0.9 * jnp.ones(batch.mask.shape), batch, ("policy", "other"))
    return reductions.values(metrics)

  _assert_near(measured(batch), measured(few))


def test_groups_without_a_valid_rollout_do_not_count():
  valid = np.arange(P)[:, None] * np.ones(G) < 3
  batch = _batch(valid)
  batch = dataclasses.replace(batch, mask=batch.mask * valid[..., None])
  three = jax.tree.map(lambda x: x[:3], batch)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
  measured = jax.jit(lambda batch: reductions.values(batch_metrics(batch)))
  jax.tree.map(near, measured(batch), measured(three))
  fade = advantages.fade()
  after = jax.jit(lambda batch: fade.update(fade.init(jnp.float32(0.7)), batch, jnp.float32(0.5)))
  jax.tree.map(near, after(batch), after(three))
  assert after(_batch(np.zeros((P, G), bool))).solve_rate == 0.5  # as it was


def test_two_right_and_five_wrong_beside_one_that_crashed():
  rewards = np.array([[1.0, 1, 0, 0, 0, 0, 0, 0]])
  valid = np.arange(8)[None] < 7
  of = lambda estimator: parts.advantages_of(estimator, rewards, valid=valid)[0]
  np.testing.assert_allclose(of(advantages.grpo())[:7:6], [1.464, -0.586], atol=1e-3)
  np.testing.assert_allclose(of(advantages.pass_at_k(k=4))[6], -0.229, atol=1e-3)
  np.testing.assert_allclose(of(advantages.rloo())[:7:6], [5 / 6, -1 / 3], rtol=1e-6)


def _gram_case(blocks, size):
  rng = np.random.default_rng(3)
  features = rng.normal(size=(blocks, size, 40)).astype(np.float32)
  coefficients = rng.normal(size=(blocks, size)).astype(np.float32)
  return coefficients, features


@pytest.mark.parametrize("name", REWEIGHTINGS)
def test_a_reweighting_is_that_of_the_valid_rollouts_alone(name):
  coefficients, features = _gram_case(3, 6)
  chosen = np.array([0, 2, 3, 5])
  valid = np.isin(np.arange(6), chosen) * np.ones((3, 1), bool)
  gram = np.einsum("nid,njd->nij", *[features * valid[..., None]] * 2)
  apply, key = jax.jit(REWEIGHTINGS[name].apply), jax.random.key(0)
  found, metrics = apply(jnp.asarray(coefficients * valid), gram, jnp.asarray(valid), key)
  few = gram[:, chosen][:, :, chosen]
  alone = jnp.asarray(coefficients[:, chosen]), few, jnp.ones((3, 4), bool)
  expected, expected_metrics = apply(*alone, key)
  assert not np.any(np.asarray(found)[~valid])
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  near(np.asarray(found)[:, chosen], expected)
  jax.tree.map(near, *map(reductions.values, (metrics, expected_metrics)))


def test_salt_leaves_a_block_of_one_valid_rollout_as_it_is():
  coefficients, features = _gram_case(2, 3)
  valid = np.array([[True, False, False], [True, True, True]])
  gram = np.einsum("nid,njd->nij", *[features * valid[..., None]] * 2)
  apply, key = jax.jit(reweighting.salt(alpha_max=0.1).apply), jax.random.key(0)
  found, metrics = apply(coefficients * valid, gram, jnp.asarray(valid), key)
  np.testing.assert_array_equal(found[0], [coefficients[0, 0], 0, 0])
  own, expected = apply(coefficients[1:], gram[1:], jnp.ones((1, 3), bool), key)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  near(found[1], own[0])
  jax.tree.map(near, *map(reductions.values, (metrics, expected)))


def test_diagnostics_are_those_of_the_valid_rollouts_alone():
  coefficients, features = _gram_case(3, 6)
  chosen = np.array([0, 2, 3, 5])
  valid = np.isin(np.arange(6), chosen) * np.ones((3, 1), bool)
  A, features = coefficients * valid, features * valid[..., None]
  whole, few = features.reshape(18, -1), features[:, chosen].reshape(12, -1)
  # With a rank as large as the number of rollouts allows.
  run = jax.jit(functools.partial(diagnose, num_prompts=3, rank_scale=100.0))
  found = run(whole @ whole.T, A, 2 * A, valid=valid)
  A = A[:, chosen]
  expected = run(few @ few.T, A, 2 * A)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  jax.tree.map(near, found, expected)
