"""The four aggregations, by hand and by parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import random_case

from rlvr_jax.ops.aggregate import AGGREGATIONS, aggregate

# Two prompts of two rollouts with 3, 1, 2 and 0 loss tokens.
MASK = jnp.array([[[1.0, 1, 1], [1, 0, 0]], [[1, 1, 0], [0, 0, 0]]])
LOSSES = jnp.array([[[1.0, 2, 6], [5, 9, 9]], [[2, 4, 9], [9, 9, 9]]])


@pytest.mark.parametrize(
  "how, total, weight",
  [
    ("token_mean", 20.0, 6.0),
    ("sequence_mean", 3.0 + 5.0 + 3.0, 3.0),
    ("sequence_sum", 20.0, 3.0),
    ("constant", 20.0, 4 * 7.0),
  ],
)
def test_hand_sized_numbers(how, total, weight):
  pair = aggregate(LOSSES, MASK, how=how, max_response_length=7)
  np.testing.assert_allclose([pair.total, pair.weight], [total, weight], rtol=1e-6)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_micro_batches_add_up(how):
  losses, batch, _ = random_case(4, (4, 3, 5))
  whole = aggregate(losses, batch.mask, how=how, max_response_length=5)
  parts = [
    aggregate(losses[i : i + 1], batch.mask[i : i + 1], how=how, max_response_length=5)
    for i in range(4)
  ]
  np.testing.assert_allclose(sum(p.total for p in parts), whole.total, rtol=1e-5)
  assert sum(p.weight for p in parts) == whole.weight


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("fill", [jnp.nan, jnp.inf])
def test_masked_losses_do_not_matter(how, fill):
  total = lambda x: aggregate(x, MASK, how=how, max_response_length=7).total
  spoilt = jax.value_and_grad(total)(jnp.where(MASK > 0, LOSSES, fill))
  clean = jax.value_and_grad(total)(LOSSES)
  jax.tree.map(np.testing.assert_array_equal, spoilt, clean)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_a_batch_without_a_token(how):
  pair = aggregate(LOSSES, jnp.zeros_like(MASK), how=how, max_response_length=7)
  assert pair.total == 0
  assert pair.weight == (28 if how == "constant" else 0)


def test_a_large_constant_weight_does_not_overflow_an_integer():
  losses = jnp.zeros((1000, 100, 1))
  pair = aggregate(losses, losses, how="constant", max_response_length=100_000)
  assert pair.weight == pytest.approx(1e10)


def test_an_unknown_aggregation_lists_the_known_ones():
  with pytest.raises(ValueError, match=r"'mean'.*sequence_mean"):
    aggregate(LOSSES, MASK, how="mean", max_response_length=7)
