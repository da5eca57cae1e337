"""What updates say, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.geometry import updates

P, G = 3, 4
rank_one_fraction = jax.jit(updates.rank_one_fraction)


@pytest.mark.parametrize(("shape", "scale"), [((5, 30), 1e-25), ((30, 5), 1.0), ((5, 30), 1e25)])
def test_rank_one_fraction_is_that_of_the_singular_values(shape, scale):
  update = np.random.default_rng(7).normal(size=shape) + 1.0
  squares = np.linalg.svd(update, compute_uv=False) ** 2
  found = rank_one_fraction((update * scale).astype(np.float32))
  np.testing.assert_allclose(found, squares[0] / squares.sum(), rtol=1e-5)


def test_rank_one_fraction_of_an_outer_product_an_identity_and_nothing():
  fraction = rank_one_fraction
  outer = np.outer(np.arange(5.0), np.ones(30)).astype(np.float32)
  np.testing.assert_allclose(fraction(outer), 1, rtol=1e-6)
  np.testing.assert_allclose(fraction(jnp.eye(8, dtype=jnp.bfloat16)), 1 / 8, rtol=1e-6)
  assert fraction(np.zeros((2, 2))) == 0
  assert fraction(jnp.array([[1.0, jnp.nan], [0, 1]])) == 0
  assert fraction(jnp.array([[1.0, jnp.inf], [0, 1]])) == 0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_head_share(scale):
  tree = {"head_kernel": np.full((2, 3), 2.0), "blocks": {"head_kernel": np.full((4, 10), 0.5)}}
  tree = jax.tree.map(lambda x: jnp.float32(x * scale), tree)
  np.testing.assert_allclose(updates.head_share(tree, "head_kernel"), 24 / 34, rtol=1e-6)
  np.testing.assert_allclose(updates.head_share(tree, "blocks/head_kernel"), 10 / 34, rtol=1e-6)


def test_head_share_of_no_update_and_of_no_such_head():
  tree = {"embedding": jnp.zeros((2, 3)), "blocks": {"query": jnp.zeros(2)}}
  assert updates.head_share(tree, "embedding") == 0
  tree["blocks"]["query"] = jnp.array([1.0, jnp.nan])
  assert updates.head_share(tree, "embedding") == 0
  with pytest.raises(ValueError, match=r"'head_kernel'; choose one of \['blocks/query', 'embed"):
    updates.head_share(tree, "head_kernel")


def test_covariance_is_over_loss_tokens(x64):
  rng = np.random.default_rng(8)
  coefficients, logprobs = rng.normal(size=(P, G)), rng.normal(size=(P, G, 5)) - 2
  mask = (rng.uniform(size=(P, G, 5)) < 0.6) * 1.0
  kept = mask > 0
  each = np.repeat(coefficients[..., None], 5, -1)
  spoilt = np.where(kept, logprobs, np.nan)
  found = updates.advantage_logprob_covariance(coefficients, spoilt, mask)
  np.testing.assert_allclose(found, -np.cov(each[kept], logprobs[kept], bias=True)[0, 1])
  assert updates.advantage_logprob_covariance(coefficients, spoilt, 0 * mask) == 0
  np.testing.assert_array_equal(updates.advantage_logprob_covariance(each, spoilt, mask), found)
  # Pushing up what is likely already: entropy falls.
  likely = updates.advantage_logprob_covariance(coefficients, each, np.ones_like(mask))
  np.testing.assert_allclose(likely, -coefficients.var())
