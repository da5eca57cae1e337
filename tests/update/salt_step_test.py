"""SALT in the update: one trunk pass, scopes by hand, and what is measured."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from oracles.updates import (
  G,
  P,
  T,
  gradient_of,
  in_rows,
  make_batch,
  make_method,
  relative_distance,
)

from rlvr_jax import geometry, reweighting
from rlvr_jax.geometry.per_rollout import per_rollout_features
from rlvr_jax.models.functional import transformer
from rlvr_jax.ops import spectral
from rlvr_jax.ops.reductions import values
from rlvr_jax.update.accumulate import policy_logprobs
from rlvr_jax.update.diagnostics import mean_entropy, measure
from rlvr_jax.update.step import initial_state, train_step

ROUTES = {
  "streaming": geometry.streaming(),
  "sampled": geometry.streaming(feature="sampled"),
  "sketch": geometry.sketch(copies=2, hidden_size=8, vocabulary_size=8),
  "per_rollout": geometry.per_rollout(),
}


@functools.cache
def make_salt_method(dtype="float64", *, mesh=None, route="streaming", scope="batch", **changes):
  method = make_method(dtype, mesh=mesh, reweighting=reweighting.salt(scope=scope), **changes)
  setting = geometry.GramContext(transformer(method.model.config), method.temperature, mesh)
  return method._replace(gram=ROUTES[route], gram_context=setting)


def salt_by_hand(features, coefficients):
  """§3 of the paper in NumPy, from features [b, N]."""
  gram = features @ features.T / len(features)
  ratio = np.trace(gram) ** 2 / np.sum(gram**2)
  eigenvalues, vectors = np.linalg.eigh(gram)
  ceiling = min(64, len(gram) - 1, np.sum(eigenvalues > 1e-6 * eigenvalues[-1]))
  rank = int(np.clip(round(ratio), 1, ceiling))
  top = vectors[:, ::-1][:, :rank]
  separate = np.sum(coefficients**2 * np.diag(gram))
  n_eff = coefficients @ gram @ coefficients / separate if separate else 0.0
  alpha = np.clip(1 - n_eff, 0, 1)
  positive = np.maximum(coefficients, 0)
  if not separate:
    return coefficients
  return top @ (top.T @ coefficients) + alpha * (positive - top @ (top.T @ positive))


def blocks_of(scope):
  """Index sets of rollouts that share a Gram matrix."""
  size = {"batch": P * G, "group": G}.get(scope, scope)
  return np.arange(P * G).reshape(-1, size)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("scope", "rows"), [("batch", 100), (8, 4), ("group", 4), ("batch", 4), ("group", None)]
)
def test_the_update_is_that_of_coefficients_reweighted_by_hand(x64, scope, rows):
  """Padded, in one micro-batch of rows, and in several."""
  batch, several = make_batch(np.float64), rows == 4
  plain, method = make_method("float64"), make_salt_method(scope=scope)
  params = plain.model.init(jax.random.key(0))
  features = np.asarray(per_rollout_features(params, {}, batch, method.gram_context))
  coefficients = np.asarray(plain.advantage.apply((), batch)).ravel()
  by_hand = np.empty_like(coefficients)
  for block in blocks_of(scope):
    by_hand[block] = salt_by_hand(features[block], coefficients[block])
  assert np.abs(by_hand - coefficients).max() > 0.1
  (_, _), expected = gradient_of(plain, batch, params, jnp.asarray(by_hand.reshape(P, G)))
  places = P * G * T
  if rows:
    batch = in_rows(batch, rows=rows, several=several)
    places = batch.packed.num_micro_batches * batch.packed.tokens[0].size
  (_, metrics), gradient = gradient_of(method, batch, params)
  assert relative_distance(gradient, expected) < 1e-9
  assert values(metrics)["gram/forward_only_passes"] == several
  np.testing.assert_allclose(values(metrics)["gram/head_products"], 2 + (P * G) ** 2 / places)


@pytest.mark.parametrize(("rows", "passes"), [(100, 1), (4, 2)])
def test_the_trunk_runs_once_where_the_batch_is_one_micro_batch(rows, passes):
  method = make_salt_method("float32")
  row_hidden = method.model.row_hidden
  named = lambda *args: checkpoint_name(row_hidden(*args), "trunk")
  method = method._replace(model=method.model._replace(row_hidden=named))
  batch = in_rows(make_batch(), rows=rows, several=passes > 1)
  params = method.model.init(jax.random.key(0))
  state = initial_state(method, params, jnp.float32(0.0))
  step = functools.partial(train_step, method=method)
  assert str(jax.make_jaxpr(step)(state, {}, batch)).count("name=trunk") == passes


@pytest.mark.slow
def test_measure_reports_the_error_of_a_route_that_is_not_exact(x64):
  """Near the true error; 0, not NaN, where there is no gradient; left out of the exact route."""
  method = make_salt_method()
  batch = make_batch(np.float64)
  params = method.model.init(jax.random.key(0))
  state = initial_state(method, params, jnp.float64(0.0))
  run = lambda route, batch: jax.jit(
    functools.partial(measure, method=method, gram=route, compared="")
  )(state, {}, params, batch)
  sketched = geometry.sketch(copies=8, hidden_size=16, vocabulary_size=16)
  exact, found = run(geometry.streaming(), batch), run(sketched, batch)
  assert "geometry/gram_relative_error" not in exact[0]
  difference = np.linalg.norm(found[1]["gram"] - exact[1]["gram"])
  error = difference / np.linalg.norm(exact[1]["gram"])
  assert 0.5 * error < found[0]["geometry/gram_relative_error"] < 2 * error
  empty = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
  assert run(sketched, empty)[0]["geometry/gram_relative_error"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("own", "other"), [("score", "sampled"), ("sampled", "score")])
def test_measure_reports_both_features(x64, own, other):
  """That of config.gram under the plain names, the other under its own; here they differ."""
  method = make_salt_method()
  batch = make_batch(np.float64)
  params = method.model.init(jax.random.key(0))
  state = initial_state(method, params, jnp.float64(0.0))
  route = geometry.per_rollout(feature=own)
  run = functools.partial(measure, method=method, gram=route, compared="")
  scalars, arrays = jax.jit(run)(state, {}, params, batch)
  for key, feature in (("gram", own), (f"gram_{other}", other)):
    rows = per_rollout_features(params, {}, batch, method.gram_context, feature=feature)
    np.testing.assert_allclose(arrays[key], rows @ rows.T, rtol=1e-9, atol=1e-12)
  for suffix, key in (("", "gram"), (f"_{other}", f"gram_{other}")):
    found = scalars[f"geometry/participation_ratio{suffix}"]
    np.testing.assert_allclose(found, spectral.participation_ratio(arrays[key]), rtol=1e-9)
  both = [scalars[f"geometry/effective_rollouts{suffix}"] for suffix in ("", f"_{other}")]
  assert abs(both[0] - both[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rows", [100, 4])
def test_measure_sees_the_coefficients_of_the_update(x64, rows):
  method = make_salt_method()
  batch = in_rows(make_batch(np.float64), rows=rows, several=rows == 4)
  params = method.model.init(jax.random.key(0))
  moved = jax.tree.map(lambda p: p + 0.1 * jnp.sin(jnp.arange(p.size)).reshape(p.shape), params)
  state = initial_state(method, moved, jnp.float64(0.0))
  scalars, arrays = jax.jit(
    functools.partial(measure, method=method, gram=geometry.streaming(), compared="last_block")
  )(state, {}, params, batch)
  features = np.asarray(per_rollout_features(moved, {}, batch, method.gram_context))
  coefficients = np.asarray(arrays["coefficients"]).ravel()
  np.testing.assert_allclose(arrays["gram"], features @ features.T, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(
    np.ravel(arrays["reweighted"]), salt_by_hand(features, coefficients), rtol=1e-8, atol=1e-10
  )
  blocks = per_rollout_features(moved, {}, batch, method.gram_context, parameters="last_block")
  np.testing.assert_allclose(arrays["gram_compared"], blocks @ blocks.T, rtol=1e-8, atol=1e-12)
  norm = np.linalg.norm(coefficients @ features) / (P * G)
  np.testing.assert_allclose(scalars["geometry/update_norm"], norm, rtol=1e-9)
  change = np.asarray(method.model.head(moved).kernel - method.model.head(params).kernel)
  singular = np.linalg.svd(change, compute_uv=False)
  np.testing.assert_allclose(
    scalars["geometry/head_rank_one_fraction"], singular[0] ** 2 / np.sum(singular**2), rtol=1e-6
  )
  logprobs, entropy = policy_logprobs(moved, {}, batch, method=method)
  kept = np.asarray(batch.mask) > 0
  tokens = np.broadcast_to(coefficients.reshape(P, G, 1), kept.shape)[kept]
  covariance = np.cov(tokens, np.asarray(logprobs)[kept], bias=True)[0, 1]
  np.testing.assert_allclose(
    scalars["geometry/advantage_logprob_covariance"], -covariance, rtol=1e-9
  )
  np.testing.assert_allclose(
    mean_entropy(moved, {}, batch, method=method), np.asarray(entropy)[kept].mean(), rtol=1e-9
  )
