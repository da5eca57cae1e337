"""Agreement of two Gram matrices against NumPy on the features themselves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.geometry import agreement as module

B = 12
gram_agreement = jax.jit(module.gram_agreement, static_argnames=("feature_dim", "num_permutations"))


def agreement(a, b, feature_dim=40):
  return gram_agreement(a @ a.T, b @ b.T, jax.random.key(0), feature_dim=feature_dim)


def test_agreement_is_the_correlation_of_cosines_and_1_with_itself(x64):
  features = np.random.default_rng(0).normal(size=(B, 9))
  features[5] = 0
  other = features[:, :4] + 0.5 * np.random.default_rng(2).normal(size=(B, 4))
  other[7] = 0
  found = agreement(features, other)
  pairs = [(i, j) for i, j in itertools.combinations(range(B), 2) if not {i, j} & {5, 7}]
  of = lambda x: [x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j]) for i, j in pairs]
  expected = np.corrcoef(of(features), of(other))[0, 1]
  np.testing.assert_allclose(found.correlation, expected, rtol=1e-10)
  np.testing.assert_allclose(agreement(features, -7 * features).correlation, 1, rtol=1e-12)


def test_nulls_of_agreement_hold_what_independent_features_give():
  rng = np.random.default_rng(3)
  features = lambda: rng.normal(size=(B, 40)).astype(np.float32)
  mine = features()
  results = [agreement(mine, features()) for _ in range(20)]
  pairs = B * (B - 1) / 2
  for found in results:
    assert abs(found.correlation) < 4 / np.sqrt(pairs)
    np.testing.assert_allclose([found.permutation_mean, found.noise_mean], 0, atol=0.04)
    for quantile in (found.permutation_quantile, found.noise_quantile):
      np.testing.assert_allclose(quantile, 1.645 / np.sqrt(pairs), rtol=0.3)
  above = sum(f.correlation > min(f.permutation_quantile, f.noise_quantile) for f in results)
  assert above <= 4  # 1 expected of 20
  related = agreement(mine, mine + 0.3 * features())
  assert related.correlation > 3 * max(related.permutation_quantile, related.noise_quantile)


def test_the_permutation_null_permutes_rows_and_columns_alike():
  # Two blocks of six against themselves: 5 % of the matchings leave at least five of six together.
  blocks = np.float32(np.kron(np.eye(2), np.ones((6, 1))))
  found = agreement(blocks, blocks)
  np.testing.assert_allclose(found.correlation, 1, rtol=1e-5)
  np.testing.assert_allclose(found.permutation_mean, 0, atol=0.04)
  swapped = blocks[[6, 1, 2, 3, 4, 5, 0, 7, 8, 9, 10, 11]]
  of = lambda x: (x @ x.T)[np.triu_indices(B, 1)]
  expected = np.corrcoef(of(blocks), of(swapped))[0, 1]
  np.testing.assert_allclose(found.permutation_quantile, expected, rtol=1e-4)


@pytest.mark.parametrize("dim", [4, 20])
def test_cosines_without_features_follow_the_law_of_gaussian_features(dim):
  size, draws = 8, 4000
  sample = jax.vmap(lambda k: module._gaussian_cosines(k, size, dim, jnp.float32))
  found = np.asarray(sample(jax.random.split(jax.random.key(0), draws)))
  drawn = np.random.default_rng(0).normal(size=(draws, size, dim))
  drawn /= np.linalg.norm(drawn, axis=-1, keepdims=True)
  drawn = drawn @ drawn.swapaxes(1, 2)
  for i, j, k in [(0, 1, 2), (0, 6, 7), (5, 6, 7)]:
    for of in (found, drawn):
      np.testing.assert_allclose(np.mean(of[:, i, j] ** 2), 1 / dim, rtol=0.1)
      triangle = of[:, i, j] * of[:, j, k] * of[:, i, k]
      np.testing.assert_allclose(np.mean(triangle), 1 / dim**2, rtol=0.4)
    quantiles = [np.quantile(of[:, i, j], [0.05, 0.25, 0.75, 0.95]) for of in (found, drawn)]
    np.testing.assert_allclose(*quantiles, atol=0.15 / np.sqrt(dim))
  np.testing.assert_allclose(found[:, range(size), range(size)], 1, rtol=1e-5)
  eigenvalues = np.linalg.eigvalsh(found)[:, ::-1]
  assert np.all(np.sum(eigenvalues > 1e-5, axis=1) == min(size, dim))


def test_the_noise_null_at_the_dimension_of_a_7b_head():
  features = np.random.default_rng(4).normal(size=(B, 5)).astype(np.float32)
  found = agreement(features, features, feature_dim=152_064 * 3584 * 8)
  assert 0.1 < found.noise_quantile < 0.4 and abs(found.noise_mean) < 0.05


def test_the_noise_null_has_the_zero_gradients_of_the_second_subset():
  few = np.random.default_rng(10).normal(size=(B, 40)).astype(np.float32)
  few[4:] = 0  # 6 pairs, whose correlations with noise are large by chance
  found = agreement(np.random.default_rng(11).normal(size=(B, 40)).astype(np.float32), few)
  assert 0.4 < found.noise_quantile < 0.95


def test_agreement_of_cosines_that_do_not_differ_is_0():
  rng = np.random.default_rng(5)  # of unequal norms: equal cosines but for rounding
  same = (rng.normal(size=40) * rng.uniform(0.3, 3, size=(B, 1))).astype(np.float32)
  other = np.random.default_rng(6).normal(size=(B, 40)).astype(np.float32)
  assert agreement(same, other) == (0, 0, 0, 0, 0)
  assert agreement(same * 0, other) == (0, 0, 0, 0, 0)
  assert agreement(other * np.nan, other)[:3] == (0, 0, 0)
