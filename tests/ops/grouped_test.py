"""Grouped products against a loop over the rows, in value, gradient and bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops import grouped, megablox

E, D, F, K = 5, 24, 16, 2


def draw_case(tokens=70, dtype=np.float64, seed=0):
  """Tokens, kernels and choices; group 3 is never chosen, and some tokens choose none."""
  rng = np.random.default_rng(seed)
  x, kernels = rng.normal(size=(tokens, D)), rng.normal(size=(E, D, F))
  choices = np.argsort(rng.random((tokens, E)), axis=1)[:, :K]
  choices[(choices == 3) | (rng.random((tokens, 1)) < 0.2)] = E
  return x.astype(dtype), kernels.astype(dtype), choices.astype(np.int32)


def multiply(x, kernels, choices, kind):
  """The product of each token with the matrix of each of its choices, [N, k, F]."""
  order = grouped.order_by_group(jnp.asarray(choices), E, kind=kind)
  rows = grouped.to_rows(jnp.asarray(x), order)
  out = grouped.from_rows(grouped.grouped_product(rows, kernels, order.groups, kind), order)
  return jnp.where(order.chosen[..., None], out, 0)


@functools.partial(jax.jit, static_argnames="kind")
def value_and_gradients(x, kernels, choices, cotangent, kind):
  """The product, and what a cotangent of it is for x and for the kernels."""
  of_floats = functools.partial(multiply, choices=choices, kind=kind)
  out, pullback = jax.vjp(of_floats, x, kernels)
  return out, *pullback(cotangent.astype(out.dtype))


def looped(x, kernels, choices):
  padded = np.concatenate([kernels, np.zeros((1, D, F))])
  return np.einsum("nd,nkdf->nkf", x, padded[choices])


@pytest.mark.parametrize("kind", ["reference", "blocks"])
def test_values_and_gradients_are_those_of_a_loop(x64, kind):
  x, kernels, choices = draw_case()
  cotangent = np.random.default_rng(1).normal(size=(*choices.shape, F))
  out, into_x, into_kernels = value_and_gradients(x, kernels, choices, cotangent, kind)
  np.testing.assert_allclose(out, looped(x, kernels, choices), rtol=1e-12, atol=1e-12)
  expected_x, expected_kernels = np.zeros_like(x), np.zeros_like(kernels)
  for (n, j), e in np.ndenumerate(choices):
    if e < E:
      expected_x[n] += kernels[e] @ cotangent[n, j]
      expected_kernels[e] += np.outer(x[n], cotangent[n, j])
  np.testing.assert_allclose(into_x, expected_x, rtol=1e-11, atol=1e-11)
  np.testing.assert_allclose(into_kernels, expected_kernels, rtol=1e-11, atol=1e-11)


@jax.jit
def emulated(rows, columns, kernels, sizes):
  """The three kernels for TPUs, as an interpreter runs them."""
  return (
    megablox.multiply(rows, kernels, sizes, transposed=False, interpret=True),
    megablox.multiply(columns, kernels, sizes, transposed=True, interpret=True),
    megablox.multiply_outer(rows, columns, sizes, dtype=jnp.float32, interpret=True),
  )


def test_the_kernels_for_tpus_are_those_of_a_loop():
  """Emulated, since there is no TPU; what is in rows behind the groups has no effect."""
  x, kernels, choices = draw_case(tokens=150, dtype=np.float32)
  order = grouped.order_by_group(jnp.asarray(choices), E, kind="megablox")
  sizes, used = order.groups.sizes, np.asarray(order.choices) < choices.size
  rows, group = grouped.to_rows(jnp.asarray(x), order), choices.ravel()[order.choices[used]]
  columns = jnp.cos(jnp.arange(len(rows) * F, dtype=jnp.float32)).reshape(-1, F)
  rows, columns = (jnp.where(used[:, None], x, jnp.nan) for x in (rows, columns))
  with jax.default_matmul_precision("highest"):
    out, back, outer = emulated(rows, columns, kernels, sizes)
  assert 0 < used.mean() < 1
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
  close(out[used], np.einsum("md,mdf->mf", rows[used], kernels[group]))
  close(back[used], np.einsum("mf,mdf->md", columns[used], kernels[group]))
  for e in range(E):
    mine = np.flatnonzero(used)[group == e]
    close(outer[e], np.asarray(rows)[mine].T @ np.asarray(columns)[mine])


def test_gradients_of_float32_kernels_are_not_rounded_to_bfloat16():
  x, kernels, choices = draw_case(dtype=np.float32)
  x = jnp.asarray(x, jnp.bfloat16)
  for kind in ("reference", "blocks"):
    ones = jnp.ones((*choices.shape, F))
    out, into_x, into_kernels = value_and_gradients(x, kernels, choices, ones, kind)
    assert (out.dtype, into_x.dtype, into_kernels.dtype) == (x.dtype, x.dtype, jnp.float32)
    expected = np.zeros((E, D))
    for (n, _), e in np.ndenumerate(choices):
      if e < E:
        expected[e] += np.asarray(x[n], np.float64)
    np.testing.assert_allclose(into_kernels[..., 0], expected, rtol=1e-5, atol=1e-5)


def test_bits_of_a_token_do_not_depend_on_its_neighbors():
  """Not on their values, their choices or their places, nor on the size of a token's group."""
  x, kernels, choices = draw_case(dtype=np.float32)
  run = jax.jit(functools.partial(multiply, kind="blocks"))
  expected = np.asarray(run(x, kernels, choices))
  rng = np.random.default_rng(2)
  for _ in range(3):
    order = rng.permutation(len(x))
    np.testing.assert_array_equal(run(x[order], kernels, choices[order]), expected[order])
    kept = rng.random(len(x)) < 0.5
    others, _, other_choices = draw_case(dtype=np.float32, seed=int(rng.integers(99)))
    mixed = np.where(kept[:, None], x, others), np.where(kept[:, None], choices, other_choices)
    np.testing.assert_array_equal(run(mixed[0], kernels, mixed[1])[kept], expected[kept])


def test_groups_hold_the_choices_alone():
  """Tokens without a choice are in no group; `blocks` visits blocks with rows only."""
  _, _, choices = draw_case()
  order = grouped.order_by_group(jnp.asarray(choices), E, kind="blocks")
  np.testing.assert_array_equal(order.groups.sizes, np.bincount(choices.ravel(), minlength=E)[:E])
  group_of, number = grouped._plan_blocks(order.groups, len(order.choices))
  sizes = np.asarray(order.groups.sizes)
  assert number == np.sum(-(-sizes // grouped.BLOCK)) < len(group_of)
  assert set(np.asarray(group_of[: int(number)]).tolist()) == {0, 1, 2, 4}


@pytest.mark.parametrize("kind", ["reference", "blocks"])
def test_vmap_is_one_product_after_the_other(x64, kind):
  cases = [draw_case(tokens=9, seed=seed) for seed in range(3)]
  kernels = cases[0][1]
  loss = lambda kernels, x, choices: jnp.sum(jnp.sin(multiply(x, kernels, choices, kind)))
  x, choices = (np.stack([case[i] for case in cases]) for i in (0, 2))
  found = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(kernels, x, choices)
  one = jax.jit(jax.grad(loss))
  for gradient, case in zip(found, cases, strict=True):
    expected = one(kernels, case[0], case[2])
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


def test_the_implementation_is_that_of_the_platform():
  choose = functools.partial(grouped.choose_products, dtype="bfloat16")
  kinds = {platform: choose("auto", platform=platform) for platform in ("cpu", "gpu", "tpu")}
  assert kinds == {"cpu": "blocks", "gpu": "reference", "tpu": "megablox"}
  assert choose("reference", platform="tpu") == "reference"
  assert grouped.choose_products("auto", platform="tpu", dtype="float64") == "reference"
  with pytest.raises(ValueError, match=r"'megablox' needs a TPU \(here: platform='cpu'\)"):
    choose("megablox", platform="cpu")
  with pytest.raises(ValueError, match="compute_dtype='float64'"):
    grouped.choose_products("megablox", platform="tpu", dtype="float64")
  with pytest.raises(ValueError, match="expert_products='gmm'; allowed"):
    choose("gmm", platform="tpu")


def test_decoding_fetches_the_chosen_experts_only_and_each_once():
  """Of 64 slots with 8 choices among 128 experts, in the order in which the kernel visits them.

  It fetches a matrix when the group changes from one visit to the next, since a whole inner
  dimension is one tile.
  """
  from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

  rng = np.random.default_rng(0)
  experts = np.argsort(rng.random((64, 100)), axis=1)[:, :8].astype(np.int32)
  experts[:8] = 128  # idle slots
  ordered = jax.jit(grouped.order_by_group, static_argnums=1, static_argnames="kind")
  order = ordered(jnp.asarray(experts), 128, kind="megablox")
  static = "m", "tm", "num_nonzero_groups", "visit_empty_groups"
  (_, visited, _), count = jax.jit(make_group_metadata, static_argnames=static)(
    group_sizes=order.groups.sizes,
    m=len(order.choices),
    tm=grouped.TILE,
    start_group=jnp.int32(0),
    num_nonzero_groups=128,
    visit_empty_groups=False,
  )
  visited = np.asarray(visited)[: int(count)]
  fetched = visited[np.append(True, np.diff(visited) != 0)]
  assert sorted(fetched) == sorted(set(experts[8:].ravel()))
  assert len(visited) > len(fetched)  # some experts' rows lie in two tiles
  for inner in (2048, 768, 192, 1024):  # Qwen3-30B-A3B, also split over tensor = 4, and OLMoE
    assert megablox._tile_size(inner, megablox._MATRIX[0]) == inner
