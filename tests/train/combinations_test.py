"""Every estimator with every loss, veto on and off: micro-batches and a mesh equal one device."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlvr_jax import advantages, losses, reweighting
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.reductions import values
from rlvr_jax.ops.veto import negative_advantage_veto
from rlvr_jax.train import sharding
from rlvr_jax.train.step import (
  Method,
  initial_state,
  policy_logprobs,
  train_step,
  update_gradient,
)
from rlvr_jax.types import Prompts, TrainBatch

P, G, S, T, V = 8, 4, 3, 4, 16
CONFIG = TransformerConfig(
  vocab_size=V, width=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, mlp_width=8
)
VETOES = {"plain": None, "veto": negative_advantage_veto(threshold=0.9)}
MESH_SHAPE = dict(data=2, fsdp=2, tensor=2)


def make_method(advantage, loss, veto, **changes):
  fields = dict(
    model=transformer(CONFIG),
    optimizer=optax.adam(1e-2),
    schedule=optax.constant_schedule(1e-2),
    advantage=getattr(advantages, advantage)(),
    coefficient_metrics=gradient_masses,
    reweighting=reweighting.none(),
    loss=getattr(losses, loss)(),
    aggregation="sequence_mean",
    max_response_length=T,
    veto=VETOES[veto],
  )
  return Method(**{**fields, **changes})


@functools.cache
def make_batch_and_params():
  """A stale batch: the behaviour policy is the policy with its parameters disturbed."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, T + 1, (P, G))
  tokens = rng.integers(0, V, (P, G, T)).astype(np.int32)
  correct = (tokens[..., 0] < V // 2).astype(np.float32)
  correct[0] = 1
  batch = TrainBatch(
    prompts=Prompts(
      tokens=rng.integers(0, V, (P, S)).astype(np.int32),
      lengths=rng.integers(1, S + 1, P).astype(np.int32),
    ),
    tokens=tokens,
    mask=(np.arange(T) < lengths[..., None]).astype(np.float32),
    behavior_logprobs=np.zeros((P, G, T), np.float32),
    rewards=correct,
    correct=correct,
    solve_rate=np.full(P, correct.mean(), np.float32),
  )
  method = make_method("grpo", "ppo_clip", "plain")
  params = method.model.init(jax.random.key(0))
  near = jax.tree.map(lambda p: p + 0.2 * rng.normal(size=p.shape).astype(np.float32), params)
  nearer = jax.tree.map(lambda p, q: p + 0.3 * (q - p), params, near)
  score = lambda p: np.asarray(policy_logprobs(p, batch, method=method)[0])
  return dataclasses.replace(
    batch, behavior_logprobs=score(near), proximal_logprobs=score(nearer)
  ), params


def assert_close(found, expected, what):
  difference = optax.tree.norm(optax.tree.sub(jax.device_get(found), jax.device_get(expected)))
  # Some estimators push equally in both directions: scale by one where nothing is left.
  scale = max(float(optax.tree.norm(expected)), 1e-3)
  assert float(difference) < 2e-5 * scale, what


def on_mesh(batch, params):
  mesh = sharding.make_mesh(**MESH_SHAPE)
  placed = jax.device_put(params, sharding.state_shardings(params, mesh))
  constrain = sharding.batch_constraint(mesh)
  return (
    transformer(CONFIG, constrain),
    sharding.to_devices(batch, sharding.batch_sharding(mesh)),
    placed,
  )


@pytest.mark.parametrize("veto", VETOES)
@pytest.mark.parametrize("loss", losses.__all__)
def test_all_pairs(loss, veto):
  """A subset that covers every pair of estimator, loss, veto and way of splitting the batch.

  The update's two phases, compiled once per loss: without the veto, against micro-batches, fed with
  every estimator's coefficients; with it, against a mesh and micro-batches together, with two
  estimators per loss, in turn, so that all have theirs. The slow test has the whole product.
  """
  batch, params = make_batch_and_params()
  single = make_method("grpo", loss, veto)
  other = (single._replace(num_micro_batches=4), batch, params)
  estimators = list(advantages.__all__)
  if veto == "veto":
    model, *placed = on_mesh(batch, params)
    other = (single._replace(model=model, num_micro_batches=2), *placed)
    turn = losses.__all__.index(loss)
    estimators = [estimators[(turn + i) % len(estimators)] for i in (0, len(losses.__all__))]

  def run(method, batch, params):
    @jax.jit
    def update(params, batch, coefficients):
      return update_gradient(params, batch, coefficients, jax.random.key(0), method=method)

    return functools.partial(update, params, batch)

  update_single, update_other = run(single, batch, params), run(*other)
  for advantage in estimators:
    estimator = getattr(advantages, advantage)()
    coefficients = estimator.apply(estimator.init(jnp.float32(0.7)), batch)
    (expected, metrics), gradient = update_single(coefficients)
    numbers = values(metrics)
    assert all(bool(jnp.isfinite(x)) for x in numbers.values()), (advantage, numbers)
    (value, other_metrics), other_gradient = update_other(coefficients)
    assert_close(other_gradient, gradient, advantage)
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6, err_msg=advantage)
    for metric, number in values(other_metrics).items():
      np.testing.assert_allclose(
        number, numbers[metric], rtol=1e-4, atol=1e-5, err_msg=f"{advantage} {metric}"
      )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("advantage", "loss", "veto"), itertools.product(advantages.__all__, losses.__all__, VETOES)
)
def test_every_combination_makes_the_same_update(advantage, loss, veto):
  """The whole jitted train step."""
  batch, params = make_batch_and_params()
  model, sharded_batch, sharded_params = on_mesh(batch, params)
  method = make_method(advantage, loss, veto)

  def updated(method, batch, params):
    state = initial_state(method, params, jnp.float32(0.7))
    return jax.jit(functools.partial(train_step, method=method))(state, batch)

  expected, metrics = updated(method, batch, params)
  assert all(bool(jnp.isfinite(x)) for x in metrics.values()), metrics
  assert int(expected.skipped) == 0
  for variant in (
    updated(method._replace(num_micro_batches=4), batch, params),
    updated(method._replace(model=model), sharded_batch, sharded_params),
  ):
    np.testing.assert_allclose(
      variant[1]["loss/surrogate"], metrics["loss/surrogate"], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
      variant[1]["update/gradient_norm"], metrics["update/gradient_norm"], rtol=1e-4, atol=1e-6
    )
