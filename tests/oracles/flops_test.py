"""The counter of matrix products against counts by hand and XLA's own."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from oracles.flops import product_flops

from rlvr_jax.train.cluster import sharding

M, K, N = 3, 5, 7
ONE = 2 * M * K * N
X, W = jnp.ones((M, K)), jnp.ones((K, N))
SQUARE = jnp.ones((K, K))


def count(function, *args):
  return product_flops(jax.make_jaxpr(function)(*args))


def chain(x, w, length, unroll=1):
  step = lambda x, _: (jnp.tanh(x @ w), None)
  return jax.lax.scan(step, x, None, length=length, unroll=unroll)[0]


def test_products_and_loops():
  assert count(jnp.dot, X, W) == ONE
  assert count(jax.jit(jnp.dot), X, W) == ONE
  assert count(lambda x, w: jnp.einsum("bmk,bkn->bmn", x, w), X[None], W[None]) == ONE
  assert count(lambda x: jnp.tanh(x) * 2, X) == 0
  assert count(lambda x: chain(x, SQUARE, 6), X) == 6 * 2 * M * K * K
  nested = lambda x: jax.lax.map(lambda _: chain(x, SQUARE, 6), jnp.arange(4))
  assert count(nested, X) == 4 * 6 * 2 * M * K * K


def test_branches_and_loops_of_unknown_length():
  branches = lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x @ SQUARE @ SQUARE, lambda: x @ SQUARE)
  assert count(branches, X) == 2 * 2 * M * K * K
  until = lambda body: lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, body, x)
  assert count(until(lambda x: x + 1), X) == 0
  with pytest.raises(ValueError, match="while loop of unknown length"):
    count(until(lambda x: x @ SQUARE), X)


def test_derivatives_count_what_is_computed_again():
  loss = lambda w, step: jnp.sum(step(step(X, w), w))
  step = lambda x, w: jnp.tanh(x @ w)
  of_step = 2 * M * K * K
  # Two forward, four backward less the one into the first input, which is a constant.
  assert count(jax.grad(lambda w: loss(w, step)), SQUARE) == 5 * of_step
  assert count(jax.grad(lambda w: loss(w, jax.checkpoint(step))), SQUARE) == 7 * of_step

  @jax.custom_vjp
  def custom(x, w):
    return x @ w

  custom.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g @ w.T, None))
  assert count(custom, X, SQUARE) == of_step
  assert count(jax.grad(lambda x: jnp.sum(custom(x, SQUARE))), X) == 2 * of_step


def test_devices_add_up():
  mesh = sharding.make_mesh(data=2, tensor=4)
  split = jax.shard_map(
    lambda x, w: x @ w,
    mesh=mesh,
    in_specs=(PartitionSpec("data"), PartitionSpec()),
    out_specs=PartitionSpec("data"),
  )
  x = jnp.ones((4, K))
  assert count(split, x, W) == 4 * (2 * 4 * K * N)  # the tensor axis repeats the work


@pytest.mark.usefixtures("no_compilation_cache")
def test_unrolled_program_has_the_count_of_its_compilation():
  x, w = jnp.ones((64, 64)), jnp.ones((64, 64))
  value = lambda x, w, unroll: jnp.sum(chain(x, w, 5, unroll))
  compiled = jax.jit(jax.grad(lambda *a: value(*a, 5), argnums=(0, 1))).lower(x, w).compile()
  counted = count(jax.grad(lambda *a: value(*a, 1), argnums=(0, 1)), x, w)
  assert compiled.cost_analysis()["flops"] == pytest.approx(counted, rel=0.05)
