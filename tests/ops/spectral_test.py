"""Spectra of Gram matrices, against NumPy on the features themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.ops import spectral

SIZE = 6
participation_ratio = jax.jit(spectral.participation_ratio)
effective_rollouts = jax.jit(spectral.effective_rollouts)
carries_gradient = jax.jit(spectral.carries_gradient)
spectrum_of = jax.jit(spectral.spectrum)
UNUSABLE = {
  "zero": np.zeros((SIZE, SIZE)),
  "nan": np.diag([1.0, 1, 1, 1, 1, np.nan]),
  "inf off the diagonal": np.eye(SIZE) + np.where(np.eye(SIZE, k=1) > 0, np.inf, 0),
  "inf": np.diag([np.inf, 1, 1, 1, 1, 1]),
  "overflowing trace": np.full((SIZE, SIZE), 3e38),
  "subnormal trace": np.eye(SIZE) * 1e-40,
}


def _features(seed, size=SIZE, width=9):
  """Rows of different norms that share a direction."""
  rng = np.random.default_rng(seed)
  return rng.normal(size=(size, width)) * rng.uniform(0.2, 3, (size, 1)) + rng.normal(size=width)


def test_participation_ratio_equals_that_of_the_singular_values(x64):
  for seed in range(3):
    features = _features(seed)
    energies = np.linalg.svd(features, compute_uv=False) ** 2
    expected = energies.sum() ** 2 / (energies**2).sum()
    np.testing.assert_allclose(participation_ratio(features @ features.T), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_participation_ratio_of_identical_and_of_orthogonal_rollouts(size):
  np.testing.assert_allclose(participation_ratio(3 * jnp.ones((size, size))), 1, rtol=1e-6)
  np.testing.assert_allclose(participation_ratio(3 * jnp.eye(size)), size, rtol=1e-6)


def test_effective_rollouts_equals_the_norm_of_the_sum_over_the_sum_of_norms(x64):
  for seed in range(3):
    features, a = _features(seed), np.random.default_rng(seed).normal(size=SIZE)
    together = np.linalg.norm(a @ features) ** 2
    separate = (np.linalg.norm(a[:, None] * features, axis=1) ** 2).sum()
    result = effective_rollouts(jnp.asarray(a), features @ features.T)
    np.testing.assert_allclose(result, together / separate, rtol=1e-12)


def test_effective_rollouts_of_hand_sized_batches():
  same, apart = jnp.full((4, 4), 2.0), 2 * jnp.eye(4)
  equal, balanced = jnp.full(4, 0.3), jnp.array([1.0, -1, 1, -1])
  np.testing.assert_allclose(effective_rollouts(equal, same), 4, rtol=1e-6)
  assert effective_rollouts(balanced, same) == 0
  np.testing.assert_allclose(effective_rollouts(balanced, apart), 1, rtol=1e-6)
  np.testing.assert_allclose(effective_rollouts(equal, apart), 1, rtol=1e-6)


def test_without_a_coefficient_on_a_gradient_nothing_is_carried():
  gram = jnp.diag(jnp.array([0.0, 1.0, 2.0]))
  for a, carried in (([0, 0, 0], False), ([5, 0, 0], False), ([5, 1e-3, 0], True)):
    a = jnp.asarray(a, jnp.float32)
    assert carries_gradient(a, gram) == carried
    np.testing.assert_allclose(effective_rollouts(a, gram), float(carried), rtol=1e-6)


@pytest.mark.parametrize("gram", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_gram_is_known_and_replaced_by_the_identity(gram):
  gram, a = jnp.asarray(gram, jnp.float32), jnp.ones(SIZE)
  assert not spectral.is_usable(gram)
  assert participation_ratio(gram) == 0
  assert effective_rollouts(a, gram) == 0
  assert not carries_gradient(a, gram)
  np.testing.assert_array_equal(spectral.normalized_gram(gram), np.eye(SIZE))
  spectrum = spectrum_of(gram)
  assert not spectrum.usable
  np.testing.assert_allclose(spectrum.eigenvalues, np.ones(SIZE), rtol=1e-6)
  np.testing.assert_allclose(spectrum.vectors @ spectrum.vectors.T, np.eye(SIZE), atol=1e-6)


def test_spectrum_is_that_of_the_symmetric_part_in_descending_order(x64):
  features = _features(1)
  gram = features @ features.T
  skew = np.random.default_rng(2).normal(size=gram.shape)
  spectrum = spectrum_of(gram + skew - skew.T)
  np.testing.assert_allclose(spectrum.eigenvalues, np.linalg.eigvalsh(gram)[::-1], rtol=1e-10)
  rebuilt = spectrum.vectors @ np.diag(spectrum.eigenvalues) @ spectrum.vectors.T
  np.testing.assert_allclose(rebuilt, gram, rtol=1e-10, atol=1e-12)
  assert spectrum.usable


def test_eigenvalues_are_not_negative():
  features = _features(3, width=1).astype(np.float32)
  assert np.all(np.asarray(spectrum_of(features @ features.T).eigenvalues) >= 0)


@pytest.mark.parametrize(
  "ratio, scale, minimum, maximum, expected",
  [
    (2.4, 1.0, 1, 64, 2),
    (2.6, 1.0, 1, 64, 3),
    (2.6, 0.1, 1, 64, 1),  # round(0.26) = 0 is below the minimum
    (2.6, 2.0, 1, 64, 5),
    (5.9, 1.0, 1, 64, 5),  # B − 1
    (5.9, 1e30, 1, 64, 5),
    (5.9, 1.0, 1, 4, 4),
    (1.0, 1.0, 3, 64, 3),
    (1.0, 1.0, 9, 64, 5),  # where the bounds cross, the upper one holds
  ],
)
def test_rank_is_the_rounded_ratio_within_its_bounds(ratio, scale, minimum, maximum, expected):
  eigenvalues = jnp.arange(6.0, 0, -1)
  rank = spectral.subspace_rank(
    eigenvalues, jnp.float32(ratio), 6, scale=scale, minimum=minimum, maximum=maximum
  )
  assert rank == expected and rank.dtype == jnp.int32


@pytest.mark.parametrize("ratio, expected", [(5.0, 2), (1.2, 1)])
def test_rank_counts_no_eigenvalue_that_is_a_rounding_error(ratio, expected):
  eigenvalues = jnp.array([2.0, 4e-6, 1e-6, 0, 0, 0])
  limits = {"scale": 1.0, "minimum": 1, "maximum": 64}
  assert spectral.subspace_rank(eigenvalues, jnp.float32(ratio), 6, **limits) == expected


def test_rank_of_a_low_rank_gram_in_float32_is_at_most_its_rank():
  features = _features(0, 256, 3).astype(np.float32)
  limits = {"scale": 100.0, "minimum": 1, "maximum": 64}
  eigenvalues = spectrum_of(features @ features.T).eigenvalues
  assert spectral.subspace_rank(eigenvalues, jnp.float32(3), 256, **limits) == 3


def test_projection_by_a_mask_is_projection_by_a_slice(x64):
  vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0]
  x = np.random.default_rng(1).normal(size=SIZE)
  project = jax.jit(spectral.project)
  for rank in range(SIZE + 1):
    expected = vectors[:, :rank] @ (vectors[:, :rank].T @ x)
    np.testing.assert_allclose(project(vectors, rank, x), expected, atol=1e-14)
  np.testing.assert_allclose(project(vectors, SIZE, x), x, atol=1e-14)


def test_a_random_basis_is_orthonormal_and_its_key_s():
  basis = lambda n, valid: spectral.random_basis(jax.random.key(n), valid, jnp.float32)
  one, same, other = (basis(n, jnp.ones(5, bool)) for n in (0, 0, 1))
  np.testing.assert_allclose(one @ one.T, np.eye(5), atol=1e-5)
  np.testing.assert_array_equal(one, same)
  assert np.abs(one - other).max() > 0.1
  three = basis(0, jnp.array([True, False, True, True, False]))[:, :3]
  np.testing.assert_allclose(three.T @ three, np.eye(3), atol=1e-5)
  np.testing.assert_allclose(three[1::3], 0, atol=1e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(-100, 100), st.integers(-100, 100))
def test_the_scale_of_gradients_and_of_coefficients_changes_nothing(gram_power, power):
  """Exactly, for powers of two, from 1e-30 to 1e30 in float32."""
  features = _features(4).astype(np.float32)
  gram, a = features @ features.T, features[:, 0]
  scaled_gram, scaled = gram * np.float32(2) ** gram_power, a * np.float32(2) ** power
  for function in (jax.jit(spectral.normalized_gram), participation_ratio):
    np.testing.assert_array_equal(function(scaled_gram), function(gram))
  np.testing.assert_array_equal(
    effective_rollouts(scaled, scaled_gram), effective_rollouts(a, gram)
  )


def test_bfloat16_is_computed_in_float32():
  gram = jnp.asarray(_features(5) @ _features(5).T, jnp.bfloat16)
  a = jnp.ones(SIZE, jnp.bfloat16)
  for function in (participation_ratio, lambda k: effective_rollouts(a, k)):
    assert function(gram).dtype == jnp.float32
    np.testing.assert_allclose(function(gram), function(gram.astype(jnp.float32)), rtol=1e-6)


def test_every_product_asks_for_full_precision():
  def all_of_it(a, gram):
    vectors = spectral.spectrum(gram).vectors
    return spectral.project(vectors, 2, a), spectral.effective_rollouts(a, gram)

  lowered = jax.jit(all_of_it).lower(jnp.ones(SIZE), jnp.eye(SIZE)).as_text()
  products = [line for line in lowered.splitlines() if "dot_general" in line]
  assert len(products) >= 4
  assert all("HIGHEST" in line for line in products)
