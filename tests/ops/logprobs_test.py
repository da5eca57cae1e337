"""Token log-probabilities against full logits: value, gradient, memory, every sampling setting."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlvr_jax.ops.logprobs import (
  check_sampling,
  distribution,
  head_logits,
  token_logprobs,
  token_statistics,
)
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Head, Sampling

SAMPLINGS = [
  Sampling(),
  Sampling(temperature=0.6),
  Sampling(top_k=5),
  Sampling(temperature=1.3, top_p=0.8),
  Sampling(temperature=0.9, top_k=7, top_p=0.9),
  Sampling(temperature=1.2, min_p=0.2),
  Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.1),
]


distributed = jax.jit(distribution, static_argnums=1)


def _inputs(seed=0, B=3, T=7, D=8, V=23, dtype=np.float32):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(B, T, D)).astype(dtype)
  kernel = rng.normal(size=(D, V)).astype(dtype)
  return jnp.asarray(hidden), jnp.asarray(kernel), jnp.asarray(rng.integers(0, V, size=(B, T)))


def _numpy_distribution(logits, sampling):
  """By sorting one row at a time."""
  out = np.full(logits.shape, -np.inf)
  for index in np.ndindex(logits.shape[:-1]):
    row = logits[index] / sampling.temperature
    order = np.argsort(-row, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    p = np.exp(row[kept] - row[kept].max())
    p /= p.sum()
    before = np.cumsum(p) - p
    kept = kept[before < sampling.top_p] if sampling.top_p < 1 else kept
    kept = kept[np.exp(row[kept] - row.max()) >= sampling.min_p]
    out[index][kept] = row[kept] - row[kept].max()
    out[index][kept] -= np.log(np.exp(out[index][kept]).sum())
  return out


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_distribution_equals_a_row_by_row_oracle(x64, sampling):
  logits = np.random.default_rng(1).normal(size=(4, 6, 30)) * 2
  ours = np.asarray(distributed(jnp.asarray(logits), sampling))
  np.testing.assert_allclose(ours, _numpy_distribution(logits, sampling), rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(np.exp(ours).sum(-1), 1.0, rtol=1e-12)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Sampling)])
def test_every_field_has_an_effect_and_is_tested(field):
  """`SAMPLINGS` is what the tests of this module compare with oracles."""
  logits = jnp.asarray(np.random.default_rng(1).normal(size=(64, 30)) * 2)
  default = getattr(Sampling(), field)
  others = [sampling for sampling in SAMPLINGS if getattr(sampling, field) != default]
  assert others, f"add a Sampling with another {field} than {default} to SAMPLINGS"
  for sampling in others:
    without = dataclasses.replace(sampling, **{field: default})
    differ = np.any(distributed(logits, sampling) != distributed(logits, without))
    assert differ, f"{field} of {sampling} has no effect in `distribution`"


def test_greedy_distribution_puts_all_mass_on_the_first_largest():
  logits = jnp.asarray([[1.0, 3.0, 3.0, 0.0]])
  out = distribution(logits, Sampling(temperature=0.0))
  np.testing.assert_array_equal(out, [[-np.inf, 0.0, -np.inf, -np.inf]])


@pytest.mark.parametrize(
  ("chunk_rows", "sampling"),
  [
    *((5, sampling) for sampling in SAMPLINGS),
    pytest.param(1, SAMPLINGS[-1], marks=pytest.mark.slow),
    (None, SAMPLINGS[-1]),
  ],
)
def test_value_and_gradient_equal_those_of_full_logits(x64, sampling, chunk_rows):
  hidden, kernel, tokens = _inputs(dtype=np.float64)
  weights = jnp.asarray(np.random.default_rng(2).normal(size=(2, *tokens.shape)))
  # Tokens that the settings can draw; others have no finite log-probability.
  tokens = jnp.argmax(head_logits(hidden, Head(kernel, 0.7, 5.0)), axis=-1)

  def ours(hidden, kernel):
    head = Head(kernel, 0.7, 5.0)
    logprobs, entropy = token_logprobs(hidden, head, tokens, sampling, chunk_rows=chunk_rows)
    return jnp.sum(weights[0] * logprobs + weights[1] * entropy), (logprobs, entropy)

  def full(hidden, kernel):
    logits = 5.0 * jnp.tanh(hidden @ kernel * 0.7 / 5.0)
    kept = jax.lax.stop_gradient(distribution(logits, sampling)) > -jnp.inf
    p = jax.nn.softmax(jnp.where(kept, logits / sampling.temperature, -jnp.inf))
    logp = jnp.log(jnp.where(kept, p, 1.0))
    logprobs = jnp.take_along_axis(logp, tokens[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(p * logp, axis=-1)
    return jnp.sum(weights[0] * logprobs + weights[1] * entropy), (logprobs, entropy)

  grad = lambda f: jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(hidden, kernel)
  (value, parts), gradients = grad(ours)
  (expected, expected_parts), expected_gradients = grad(full)
  np.testing.assert_allclose(value, expected, rtol=1e-10)
  for a, b in zip((*parts, *gradients), (*expected_parts, *expected_gradients), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_the_backward_pass_builds_no_mask_and_no_softmax_again():
  """It takes the maximum, the sum and the smallest kept logit from the forward pass."""
  hidden, kernel, tokens = _inputs()
  sampling = Sampling(top_k=12, top_p=0.9, min_p=0.1)

  def statistics(hidden, kernel):
    return token_logprobs(hidden, Head(kernel), tokens, sampling)

  forward = str(jax.make_jaxpr(statistics)(hidden, kernel))
  results, backward = jax.vjp(statistics, hidden, kernel)
  text = str(jax.make_jaxpr(backward)(results))
  for primitive in ("top_k", "sort", "cumsum", "reduce_max", " log "):
    assert primitive in forward, primitive
    assert primitive not in text, primitive
  assert "dot_general" in text and " exp " in text


def test_bfloat16_inputs_give_float32_statistics_near_the_float32_ones():
  hidden, kernel, tokens = _inputs()
  low = token_logprobs(hidden.astype(jnp.bfloat16), Head(kernel), tokens)
  high = token_logprobs(hidden, Head(kernel), tokens)
  for a, b in zip(low, high, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=0.1)


@pytest.mark.parametrize(("soft_cap", "chunk_rows"), [(None, None), (2.0, 1)])
def test_what_the_gram_matrix_needs_of_the_same_pass(x64, soft_cap, chunk_rows):
  """Normalizers and projected derivatives, by differentiating through the full logits."""
  hidden, kernel, tokens = _inputs(dtype=np.float64)
  scale, temperature = 0.5, 0.7
  projection = jnp.asarray(np.random.default_rng(5).normal(size=(kernel.shape[1], 4)))

  def capped(product):
    z = scale * product
    return z if soft_cap is None else soft_cap * jnp.tanh(z / soft_cap)

  def negative_logprob(product, token):
    return -jax.nn.log_softmax(capped(product) / temperature)[token]

  product = hidden @ kernel
  derivatives = jax.jit(jax.vmap(jax.vmap(jax.grad(negative_logprob))))(product, tokens)
  head, sampling = Head(kernel, scale, soft_cap), Sampling(temperature=temperature)

  @jax.jit
  def run(hidden):
    found = token_statistics(
      hidden, head, tokens, sampling, projection=projection, chunk_rows=chunk_rows
    )
    return found, token_logprobs(hidden, head, tokens, sampling)

  found, (logprobs, entropy) = run(hidden)
  near = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
  near(found.log_normalizers, jax.nn.logsumexp(capped(product) / temperature, axis=-1))
  near(found.projected, derivatives @ projection)
  near(found.logprobs, logprobs)
  near(found.entropy, entropy)


@pytest.mark.parametrize(
  ("sizes", "counts", "spoilt"),
  [(None, (0, 2, 4, 10), np.nan), ((2, 2, 2), 4, np.nan), ((2, 2, 2), (0, 2, 4, 10), 7.0)],
)
def test_tokens_that_are_not_wanted_are_left_out(x64, sizes, counts, spoilt):
  """In chunks of two no NaN is touched: none of those tokens meets the head.

  On a mesh each device computes as many chunks as the one with the most wanted tokens.
  """
  mesh = sizes and sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))
  rng = np.random.default_rng(3)
  hidden, kernel = rng.normal(size=(4, 10, 8)), jnp.asarray(rng.normal(size=(8, 24)))
  tokens = jnp.asarray(rng.integers(0, 24, size=(4, 10)))
  weights, projection = rng.normal(size=(2, 4, 10)), rng.normal(size=(24, 3))
  counts = np.broadcast_to(counts, 4)
  wanted = rng.permuted(np.arange(10) < counts[:, None], axis=1)
  others = np.where(wanted[..., None], hidden, spoilt)

  @functools.partial(jax.jit, static_argnames="chooses")
  def run(hidden, kernel, chooses):
    def loss(hidden, kernel):
      found = token_statistics(
        hidden,
        Head(kernel, 0.7, 5.0),
        tokens,
        projection=jnp.asarray(projection),
        wanted=jnp.asarray(wanted) if chooses else None,
        mesh=mesh,
        chunk_rows=2,
      )
      keep = lambda x: jnp.where(wanted if x.ndim == 2 else wanted[..., None], x, 0)
      kept = jax.tree.map(keep, found)
      return jnp.sum(weights[0] * kept.logprobs + weights[1] * kept.entropy), (found, kept)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, kernel)

  place = lambda x: (
    jnp.asarray(x) if mesh is None else jax.device_put(x, sharding.batch_sharding(mesh))
  )
  (_, (_, expected)), gradients = run(place(hidden), kernel, False)
  (_, (found, _)), found_gradients = run(place(others), kernel, True)
  near = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12)
  jax.tree.map(near, (found, found_gradients), (expected, gradients))


@pytest.mark.usefixtures("no_compilation_cache")
def test_no_array_of_tokens_times_vocabulary_at_a_large_vocabulary():
  """Forward and backward at V = 151,936 allocate far less than one [B, T, V] float32."""
  B, T, D, V = 8, 2048, 64, 151_936
  of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def loss(hidden, kernel, tokens):
    logprobs, entropy = token_logprobs(hidden, Head(kernel), tokens)
    return jnp.sum(logprobs) + jnp.sum(entropy)

  compiled = (
    jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    .lower(of(B, T, D), of(D, V), jax.ShapeDtypeStruct((B, T), jnp.int32))
    .compile()
  )
  full = 4 * B * T * V  # bytes: 9.3 GiB
  kernel = 4 * D * V  # its float32 gradient: 37 MiB
  chunk = 4 * 2048 * V  # 1.2 GiB
  assert compiled.memory_analysis().temp_size_in_bytes < 3 * kernel + 4 * chunk < 0.7 * full


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"temperature": -1.0}, "temperature=-1.0"),
    (
      {"temperature": 1e-38},
      "temperature=1e-38; it must be 0, which decodes greedily, or finite and ≥ 0.001",
    ),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_k": 24}, "0 .off. … 23"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.5}, "top_p=1.5"),
    ({"min_p": -0.1}, "min_p=-0.1"),
    ({"min_p": 1.1}, "min_p=1.1"),
  ],
)
def test_settings_that_name_no_distribution_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    check_sampling("config.sampling", Sampling(**settings), vocab_size=23)


def test_greedy_has_no_density_to_train_on():
  hidden, kernel, tokens = _inputs()
  with pytest.raises(ValueError, match="greedy"):
    token_logprobs(hidden, Head(kernel), tokens, Sampling(temperature=0.0))


@pytest.mark.parametrize(
  ("sizes", "sampling", "width"),
  [
    ((2, 2, 2), Sampling(top_k=5, top_p=0.9), 7),
    ((1, 1, 8), Sampling(top_k=5, top_p=0.9), 7),
    pytest.param((8, 1, 1), Sampling(temperature=0.7), 16, marks=pytest.mark.slow),
    pytest.param((1, 4, 2), Sampling(temperature=0.7), 16, marks=pytest.mark.slow),
  ],
)
def test_a_mesh_gives_the_values_and_gradients_of_one_device(x64, sizes, sampling, width):
  """Also where the axis `fsdp` does not divide the kernel's rows, nor `tensor` its columns."""
  rng = np.random.default_rng(3)
  # Five tokens on each of eight devices, in chunks of two: the last chunk is padded.
  hidden = jnp.asarray(rng.normal(size=(8, 1, 5, width)))
  kernel = jnp.asarray(rng.normal(size=(width, 23)))
  weights = jnp.asarray(rng.normal(size=(2, 8, 1, 5)))
  tokens = jnp.argmax(hidden @ kernel, axis=-1)
  mesh = sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)))

  def loss(hidden, kernel, mesh):
    logprobs, entropy = token_logprobs(
      hidden, Head(kernel), tokens, sampling, mesh=mesh, chunk_rows=2
    )
    return jnp.sum(weights[0] * logprobs + weights[1] * entropy), (logprobs, entropy)

  of = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
  single = of(hidden, kernel, None)
  rows = lambda axes: NamedSharding(mesh, PartitionSpec(*axes))
  split = "fsdp" if width % sizes[1] == 0 else None
  spread = of(
    jax.device_put(hidden, sharding.batch_sharding(mesh)),
    jax.device_put(kernel, rows((split,))),
    mesh,
  )
  chex.assert_trees_all_close(spread, single, rtol=1e-12, atol=1e-12)


def test_the_kernel_travels_once_whatever_the_number_of_chunks():
  """No collective stands in a loop over chunks; the gradient is reduced in float32."""
  mesh = sharding.make_mesh(fsdp=8)
  of = lambda shape, dtype, spec: jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )
  rows = ("fsdp",)

  def loss(hidden, kernel, tokens):
    return jnp.sum(token_logprobs(hidden, Head(kernel), tokens, mesh=mesh, chunk_rows=4)[0])

  arguments = (
    of((64, 5, 16), jnp.bfloat16, rows),
    of((16, 96), jnp.float32, rows),
    of((64, 5), jnp.int32, rows),
  )
  text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile().as_text()
  computations = dict(re.findall(r"^%?([\w.\-]+) .*? \{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
  bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
  collective = re.compile(r" (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")
  found = {name: len(collective.findall(body)) for name, body in computations.items()}
  assert len(bodies) == 2 and "dot" in "".join(computations[name] for name in bodies)
  assert [found[name] for name in bodies] == [0, 0]
  # The kernel there and its gradient back, and the sum that is the loss.
  assert 2 <= sum(found.values()) <= 4


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5)])
def test_the_masses_of_bins_are_those_of_the_distribution(sampling):
  """In chunks, with tokens that are not wanted; against all probabilities at once."""
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.normal(size=(2, 7, 6)), jnp.float32)
  head = Head(jnp.asarray(2 * rng.normal(size=(6, 500)), jnp.float32))
  tokens = jnp.asarray(rng.integers(0, 500, (2, 7)))
  wanted = jnp.asarray(rng.random((2, 7)) < 0.7)
  run = lambda hidden: token_statistics(
    hidden, head, tokens, sampling, wanted=wanted, masses=True, chunk_rows=3
  )
  found = jax.jit(run)(hidden).masses
  p = np.exp(np.asarray(distribution(head_logits(hidden, head), sampling)))
  bounds = [np.inf, 0.1, 0.01, 1e-3, 1e-4, -1]
  for mass, high, low in zip(found, bounds[:-1], bounds[1:], strict=True):
    expected = np.sum(np.where((p < high) & (p >= low), p, 0), axis=-1) * np.asarray(wanted)
    np.testing.assert_allclose(mass, expected, rtol=1e-5, atol=1e-7)
  without = jax.eval_shape(lambda: token_statistics(hidden, head, tokens, sampling))
  assert without.masses is None


@pytest.mark.parametrize("sizes", [None, dict(data=2, fsdp=2, tensor=2)], ids=["one", "mesh"])
def test_squared_probabilities_are_summed_chunk_by_chunk(x64, sizes):
  """In chunks, with tokens that are not wanted, on a mesh; constants beside the gradients."""
  rng = np.random.default_rng(0)
  hidden, kernel = rng.normal(size=(4, 7, 8)), 2 * rng.normal(size=(8, 30))
  tokens, wanted = rng.integers(0, 30, (4, 7)), rng.random((4, 7)) < 0.7
  mesh = sizes and sharding.make_mesh(**sizes)
  sampling = Sampling(temperature=0.7)

  def statistics(hidden, squares):
    return token_statistics(
      hidden, Head(jnp.asarray(kernel)), jnp.asarray(tokens), sampling,
      wanted=jnp.asarray(wanted), squares=squares, mesh=mesh, chunk_rows=3,
    )  # fmt: skip

  total = lambda hidden, squares: (
    jnp.sum(statistics(hidden, squares).logprobs)
    + (jnp.sum(statistics(hidden, True).squared_probabilities) if squares else 0.0)
  )
  found = jax.jit(statistics, static_argnums=1)(jnp.asarray(hidden), True)
  p = np.exp(np.asarray(distribution(jnp.asarray(hidden @ kernel), sampling)))
  expected = np.square(p).sum(-1) * wanted
  np.testing.assert_allclose(found.squared_probabilities, expected, rtol=1e-10)
  with_squares, without = (jax.jit(jax.grad(total), static_argnums=1)(hidden, s) for s in (1, 0))
  np.testing.assert_allclose(with_squares, without, rtol=1e-12)
  plain = jax.eval_shape(lambda x: statistics(x, False), jnp.asarray(hidden))
  assert plain.squared_probabilities is None
