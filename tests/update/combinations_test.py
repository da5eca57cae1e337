"""Every estimator with every loss, veto on and off, with and without SALT: rows and a mesh
equal the padded layout on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles.batches import with_needs
from oracles.updates import P, gradient_of, in_rows, make_batch, make_method

from rlvr_jax import advantages, geometry, losses, reweighting
from rlvr_jax.models.functional import transformer
from rlvr_jax.ops.reductions import values
from rlvr_jax.ops.veto import negative_advantage_veto
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Max, Min
from rlvr_jax.update.accumulate import policy_logprobs
from rlvr_jax.update.step import initial_state, train_step

VETOES = {"plain": None, "veto": negative_advantage_veto(threshold=0.9)}
REWEIGHTINGS = {"none": reweighting.none(), "salt": reweighting.salt()}
ESTIMATORS = {name: getattr(advantages, name)() for name in advantages.__all__}
ESTIMATORS["pass_at_k"] = advantages.pass_at_k(k=2)  # groups here have four
MESH = dict(data=2, fsdp=2, tensor=2)


def method_of(loss, veto, reweighter, mesh=None, **changes):
  context = geometry.GramContext(transformer(make_method("float64").model.config), mesh=mesh)
  return make_method(
    "float64",
    mesh,
    reweighting=REWEIGHTINGS[reweighter],
    gram=geometry.streaming() if reweighter == "salt" else None,
    gram_context=context,
    loss=getattr(losses, loss)(),
    aggregation="sequence_mean",
    veto=VETOES[veto],
    **changes,
  )


@functools.cache
def batch_and_params():
  """A stale batch: the behavior policy is the policy with its parameters disturbed."""
  rng = np.random.default_rng(0)
  batch = make_batch(np.float64)
  method = make_method("float64")
  params = method.model.init(jax.random.key(0))
  near = jax.tree.map(lambda p: p + 0.2 * rng.normal(size=p.shape).astype(np.float64), params)
  nearer = jax.tree.map(lambda p, q: p + 0.3 * (q - p), params, near)
  logprobs = jax.jit(functools.partial(policy_logprobs, method=method))
  score = lambda params: np.asarray(logprobs(params, {}, batch)[0])
  return dataclasses.replace(
    batch,
    behavior_logprobs=score(near),
    proximal_logprobs=score(nearer),
    solve_rate=np.full(P, batch.correct.mean()),
  ), params


def updater(loss, veto, reweighter, *, on_mesh=False, rows=None, several=True):
  """Coefficients → ((loss, metrics), gradient), compiled once.

  Args:
    rows: of a micro-batch on each device; None leaves the batch padded, the reference layout.
    several: whether these are several micro-batches, or one.
  """
  batch, params = batch_and_params()
  mesh = sharding.make_mesh(**MESH) if on_mesh else None
  if rows is not None:
    batch = in_rows(batch, rows=rows, mesh=mesh, several=several)
  elif mesh:
    batch = sharding.to_devices(batch, sharding.batch_sharding(mesh))
  if mesh:
    params = jax.device_put(params, sharding.state_shardings(params, mesh))
  method = method_of(loss, veto, reweighter, mesh)
  return lambda coefficients: gradient_of(method, batch, params, coefficients)


def _is_finite(metric):
  """An extreme of nothing is infinite."""
  return isinstance(metric, (Max, Min)) or np.isfinite(jax.tree.leaves(metric)).all()


def check_updates(single, others, estimators):
  """Each estimator's coefficients make the same finite update in every way."""
  batch, _ = batch_and_params()
  for advantage in estimators:
    estimator = ESTIMATORS[advantage]
    coefficients = estimator.apply(estimator.init(jnp.float64(0.7)), with_needs(batch))
    (expected, metrics), gradient = single(coefficients)
    numbers = values(metrics)
    assert all(_is_finite(metric) for metric in metrics.values()), (advantage, metrics)
    # Some estimators push equally in both directions: scale by one where nothing is left.
    scale = max(float(optax.tree.norm(gradient)), 1e-3)
    for other in others:
      (value, other_metrics), other_gradient = other(coefficients)
      difference = optax.tree.sub(jax.device_get(other_gradient), jax.device_get(gradient))
      assert float(optax.tree.norm(difference)) < 1e-9 * scale, advantage
      np.testing.assert_allclose(value, expected, rtol=1e-8, atol=1e-10, err_msg=advantage)
      for metric, number in values(other_metrics).items():
        if not metric.startswith("gram/"):  # what the Gram cost, which differs
          np.testing.assert_allclose(
            number, numbers[metric], rtol=1e-8, atol=1e-10, err_msg=f"{advantage} {metric}"
          )


@pytest.mark.slow
@pytest.mark.parametrize("loss", losses.__all__)
@pytest.mark.parametrize("veto", VETOES)
def test_all_pairs(x64, loss, veto):
  """A subset of the product, which the soak test has in full.

  The update's two phases, compiled once per loss, of the padded batch. Without veto and SALT:
  against micro-batches of rows, fed with every estimator's coefficients. With both: against those
  on a mesh, with two estimators per loss, in turn, so that all have theirs.
  """
  if veto == "plain":
    single, other = updater(loss, veto, "none"), updater(loss, veto, "none", rows=4)
    check_updates(single, [other], advantages.__all__)
  else:
    turn, num_losses = losses.__all__.index(loss), len(losses.__all__)
    chosen = [advantages.__all__[(turn + i) % len(advantages.__all__)] for i in (0, num_losses)]
    other = updater(loss, veto, "salt", on_mesh=True, rows=2)
    check_updates(updater(loss, veto, "salt"), [other], chosen)


@pytest.mark.soak
@pytest.mark.parametrize("reweighter", REWEIGHTINGS)
@pytest.mark.parametrize("veto", VETOES)
@pytest.mark.parametrize("loss", losses.__all__)
def test_every_combination_makes_the_same_update(x64, loss, veto, reweighter):
  """All estimators: in one and in several micro-batches of rows, and on a mesh, padded and not."""
  others = [
    updater(loss, veto, reweighter, rows=10**6, several=False),
    updater(loss, veto, reweighter, rows=4),
    updater(loss, veto, reweighter, on_mesh=True),
    updater(loss, veto, reweighter, on_mesh=True, rows=2),
  ]
  check_updates(updater(loss, veto, reweighter), others, advantages.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", advantages.__all__)
def test_every_estimator_steps(x64, advantage):
  """The whole jitted train step with the estimator and its state inside."""
  batch, params = batch_and_params()
  batch = dataclasses.replace(batch, rewards_by_name=batch.rewards[..., None])
  batch = in_rows(batch, rows=8)
  method = method_of("ppo_clip", "veto", "none")
  method = method._replace(advantage=ESTIMATORS[advantage], gram=geometry.streaming())
  state = initial_state(method, params, jnp.float64(0.7))
  state, metrics = jax.jit(functools.partial(train_step, method=method))(state, {}, batch)
  assert not any(bool(jnp.isinf(x)) for x in metrics.values()), metrics  # NaN: over nothing
  assert int(state.skipped) == 0
  assert int(state.step) == 1
