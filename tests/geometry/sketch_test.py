"""The sketch: unbiased, with the error that its design predicts and that it reports itself."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.flops import product_flops
from oracles.gram_cases import V, in_rows, make_case, make_forward

from rlvr_jax.geometry import sketch, sketch_with_error, streaming
from rlvr_jax.reweighting import salt
from rlvr_jax.types import Forward

CASE = dict(dtype="float32", soft_cap=2.0, scale=0.7, temperature=1.3)


@functools.cache
def exact_case():
  *case, setting = make_case(**CASE)
  exact = jax.jit(lambda params, *rest: streaming().gram(params, {}, *rest, setting))(*case)
  return np.asarray(exact, np.float64), *case, setting


@functools.cache
def estimates(copies, a, b, num_seeds):
  """(exact Gram, estimates [N, B, B], reported relative errors [N], true ones [N])."""
  sizes = dict(copies=copies, hidden_size=a, vocabulary_size=b)
  exact, params, batch, _, setting = exact_case()

  def one(seed):
    projection = sketch(**sizes, seed=seed).projection(V)
    forward = make_forward(params, batch, setting, projection)
    return sketch_with_error(params, {}, batch, forward, setting, **sizes, seed=seed)

  found, reported = jax.jit(jax.vmap(one))(jnp.arange(num_seeds))
  found = np.asarray(found, np.float64)
  true = np.linalg.norm(found - exact, axis=(1, 2)) / np.linalg.norm(exact)
  return exact, found, np.asarray(reported), true


def rms(x):
  return np.sqrt(np.mean(np.square(x)))


def test_is_unbiased():
  exact, found, _, _ = estimates(1, 4, 4, 2000)
  standard_error = found.std(axis=0, ddof=1) / np.sqrt(len(found))
  assert standard_error.max() < 0.05 * exact.max()
  assert np.all(np.abs(found.mean(axis=0) - exact) <= 4 * standard_error)
  assert np.all(found[:, 3] == 0)  # the rollout whose mask is empty


def test_error_falls_as_designed():
  error = lambda *sizes: rms(estimates(*sizes)[3])
  one = error(1, 4, 4, 2000)
  assert error(9, 4, 4, 300) == pytest.approx(one / 3, rel=0.1)
  for a, b in ((16, 4), (4, 16), (16, 16)):
    predicted = one * np.sqrt(1 / a + 1 / b) / np.sqrt(1 / 4 + 1 / 4)
    assert predicted / 1.3 < error(1, a, b, 300) < 1.3 * predicted, (a, b)


def test_reports_its_own_error():
  _, _, reported, true = estimates(9, 4, 4, 300)
  assert rms(reported) == pytest.approx(rms(true), rel=0.15)
  # Each batch's own figure, which rests on nine copies.
  assert np.mean((reported > true / 2) & (reported < 2 * true)) > 0.9
  assert np.all(np.isnan(estimates(1, 4, 4, 2000)[2]))


def test_the_default_sizes_keep_salts_coefficients_within_a_tenth():
  """As on a real model, see docs/reading_geometry.md; with 4 copies they would not."""
  sizes = {name: x.default for name, x in inspect.signature(sketch).parameters.items()}
  A = jnp.asarray(np.random.default_rng(0).normal(size=len(exact_case()[0])), jnp.float32)

  @jax.jit
  def reweighted(gram):
    return salt().apply(A[None], gram[None], jnp.ones((1, A.size), bool), jax.random.key(0))[0][0]

  def error(copies):
    exact, found, *_ = estimates(copies, sizes["hidden_size"], sizes["vocabulary_size"], 4)
    right = reweighted(jnp.asarray(exact, jnp.float32))
    off = [jnp.linalg.norm(reweighted(jnp.asarray(x, jnp.float32)) - right) for x in found]
    return np.mean(off) / np.linalg.norm(right)

  assert error(sizes["copies"]) < 0.1 < error(4)


def test_seed_alone_decides():
  _, params, batch, _, setting = exact_case()

  def run(seed, spoil=lambda x, mask: x):
    route = sketch(copies=2, hidden_size=4, vocabulary_size=4, seed=seed)
    forward = make_forward(params, batch, setting, route.projection(V))
    mask = batch.mask.reshape(1, -1, batch.mask.shape[-1], 1)
    forward = Forward(spoil(forward.hidden, mask), None, spoil(forward.projected, mask))
    return np.asarray(route.gram(params, {}, batch, forward, setting))

  expected = run(5)
  np.testing.assert_array_equal(run(5), expected)
  assert np.abs(run(6) - expected).max() > 0.01
  spoilt = run(5, lambda x, mask: jnp.where(mask > 0, x, jnp.nan))
  np.testing.assert_array_equal(spoilt, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, 100])
def test_rows_give_the_same_estimate(x64, rows):
  """In several micro-batches and in one."""
  params, batch, _, setting = make_case(soft_cap=2.0, temperature=1.3)
  route = sketch(copies=2, hidden_size=4, vocabulary_size=4)
  forward = make_forward(params, batch, setting, route.projection(V))
  expected = route.gram(params, {}, batch, forward, setting)
  packed, laid = in_rows(batch, forward, rows=rows)
  assert (packed.packed.tokens.shape[0] > 1) == (rows == 2)
  found = jax.jit(lambda *args: route.gram(params, {}, *args, setting))(packed, laid)
  np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("copies", "D", "products"), [(4, 1536, 0.2), (64, 3584, 1.3)])
def test_costs_a_fifth_of_a_head_product_or_half_of_streaming(copies, D, products):
  P, G, T, vocabulary = 8, 8, 128, 151_936
  route = sketch(copies=copies)
  projection = jax.eval_shape(lambda: route.projection(vocabulary))
  abstract = jax.ShapeDtypeStruct
  batch = jax.tree.map(lambda x: abstract((P, G, T), x.dtype), exact_case()[2])
  projected = abstract((1, P * G, T, projection.shape[1]), jnp.float32)
  forward = Forward(abstract((1, P * G, T, D), jnp.bfloat16), None, projected)
  jaxpr = jax.make_jaxpr(lambda *args: route.gram(None, {}, *args, None))(batch, forward)
  accumulated = 2 * P * G * T * vocabulary * projection.shape[1]
  head_product = 2 * P * G * T * D * vocabulary
  assert product_flops(jaxpr) + accumulated < products * head_product


def test_sizes_are_positive():
  for name in ("copies", "hidden_size", "vocabulary_size"):
    with pytest.raises(ValueError, match=f"sketch: {name} = 0"):
      sketch(**{name: 0})
