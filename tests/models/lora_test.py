"""LoRA: what is adapted, what it computes, updates, meshes and memory."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.updates import in_rows, make_batch, make_method, relative_distance

from rlvr_jax import geometry, reweighting
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.linear import merge_low_rank
from rlvr_jax.models.lora import LoraSettings, adapt, combine, init, target_kernels
from rlvr_jax.ops.checksums import checksums
from rlvr_jax.train.cluster import sharding
from rlvr_jax.update.accumulate import update_gradient
from rlvr_jax.update.objective import Estimate
from rlvr_jax.update.step import initial_state, train_step

SETTINGS = LoraSettings(rank=3, alpha=7.5, targets="blocks/(query|value|down)$")
EVERYTHING = LoraSettings(rank=2, alpha=4.0)

# Many programs, each run on little: compiled quickly rather than well.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def setup(dtype="float64", settings=SETTINGS, **changes):
  """(model, base, adapters, new adapters): the first ones are random and change the logits."""
  config = make_method(dtype).model.config
  model = transformer(dataclasses.replace(config, qkv_bias=True, **changes))
  base = jit(model.init)(jax.random.key(0))
  new = jit(functools.partial(init, settings=settings))(jax.random.key(1), base)
  rng = np.random.default_rng(0)
  adapters = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), new)
  return model, base, adapters, new


def names(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


# --- what is adapted ------------------------------------------------------------------------------


def test_adapters_begin_as_published_and_mirror_their_kernels():
  """A uniform within ±1/√D: its variance is 1/(3·D); B zero."""
  model = transformer(dataclasses.replace(make_method().model.config, width=64, mlp_width=96))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  settings = LoraSettings(rank=16, alpha=1.0)
  adapters = jit(lambda key: init(key, shapes, settings))(jax.random.key(0))
  assert adapters["blocks"].keys() == target_kernels(shapes, settings).keys()
  assert len(adapters["blocks"]) == 7
  drawn = []
  for name, pair in adapters["blocks"].items():
    L, D, E = shapes["blocks"][name].shape
    assert pair["a"].shape == (L, D, 16) and pair["b"].shape == (L, 16, E)
    assert not np.any(pair["b"]) and pair["a"].dtype == pair["b"].dtype == jnp.float32
    a = np.asarray(pair["a"])
    assert 0.95 * D**-0.5 < np.abs(a).max() <= D**-0.5
    np.testing.assert_allclose(a.var(), 1 / (3 * D), rtol=0.1)
    drawn += list(a[:, :10].reshape(L, -1))
  assert len({x.tobytes() for x in drawn}) == len(drawn)  # no two layers or kernels alike
  half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
  found = jax.eval_shape(lambda key: init(key, half, settings), jax.random.key(0))
  assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(rank=0), "rank = 0 is not an integer ≥ 1; set rank to 1 or more"),
    (dict(rank=2.0), "rank = 2.0 is not an integer"),
    (dict(rank=17), r"rank = 17 exceeds the rank of blocks/\w+, a \d+×\d+ kernel; set rank"),
    (dict(alpha=0.0), r"alpha = 0.0 is not a number in \(0, inf\)"),
    (dict(targets="blocks/(query"), "not a regular expression"),
    (
      dict(targets="embedding"),
      r"matches no kernel of the layers; the kernels are \['blocks/down', ",
    ),
    (dict(targets="blocks/query_bias"), "matches no kernel of the layers"),
  ],
)
def test_impossible_settings_are_refused(fields, message):
  config = dataclasses.replace(make_method().model.config, qkv_bias=True)
  shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
  with pytest.raises(ValueError, match=message):
    init(jax.random.key(0), shapes, LoraSettings(**{"rank": 2, "alpha": 1.0, **fields}))


# --- what it computes -----------------------------------------------------------------------------


def test_new_adapters_change_nothing():
  model, base, _, new = setup("float32", EVERYTHING)
  batch = make_batch()
  score = jit(lambda params: model.response_hidden(params, batch.prompts, batch.tokens))
  params = combine(new, base, EVERYTHING)
  np.testing.assert_array_equal(score(params), score(base))
  np.testing.assert_array_equal(model.head(params).kernel, model.head(base).kernel)
  jax.tree.map(np.testing.assert_array_equal, merge_low_rank(params), base)


def test_decoding_casts_the_head_before_its_loop_as_without_adapters():
  model = transformer(dataclasses.replace(make_method().model.config, compute_dtype="bfloat16"))
  base = jax.eval_shape(model.init, jax.random.key(0))

  def heads(base, key):
    params = combine(init(key, base, EVERYTHING), base, EVERYTHING)
    return model.head(params).kernel, model.head(model.decoding_params(params)).kernel

  scoring, decoding = jax.eval_shape(heads, base, jax.random.key(0))
  assert (scoring.dtype, decoding.dtype) == (jnp.float32, jnp.bfloat16)


# --- updates --------------------------------------------------------------------------------------


def lora_method(dtype="float64", mesh=None, **changes):
  """An update of adapters by GRPO and SALT."""
  method = make_method(dtype, mesh=mesh, reweighting=reweighting.salt(), **changes)
  config = dataclasses.replace(method.model.config, qkv_bias=True)
  single = adapt(transformer(config), SETTINGS)
  return method._replace(
    model=adapt(transformer(config, sharding.make_layout(mesh)), SETTINGS),
    gram=geometry.streaming(),
    gram_context=geometry.GramContext(single, method.temperature, mesh),
  )


@pytest.mark.slow
def test_an_update_moves_adapters_alone():
  """The base is an argument that comes out of nothing; B moves first, A with the second update."""
  _, base, _, adapters = setup("float32")
  batch = jax.tree.map(jnp.asarray, make_batch())

  @jit
  def step(state, batch, base):
    return train_step(state, base, batch, method=lora_method(dtype="float32"))

  state = jit(functools.partial(initial_state, lora_method(dtype="float32")))(
    adapters, jnp.float32(0.0)
  )
  moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
  assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(adapters))
  first, metrics = step(state, batch, base)
  assert metrics["update/gradient_norm"] > 0 and metrics["gram/head_products"] > 0
  for name, leaf in names(first.params).items():
    change = np.abs(np.asarray(leaf - names(adapters)[name])).max()
    # Weight decay alone moves an A whose B is still zero: optax.adamw(1e-2) decays by 1e-4.
    assert change > 5e-3 if name.endswith("/b") else change < 1e-5, name
  assert np.sum(np.asarray(checksums(first.params)) != np.asarray(checksums(adapters))) >= 3
  second, _ = step(first, batch, base)
  for name, leaf in names(second.params).items():
    assert np.abs(np.asarray(leaf - names(first.params)[name])).max() > 1e-3, name
  other, _ = step(state, batch, jax.tree.map(lambda x: 1.1 * np.asarray(x), base))
  assert relative_distance(other.params, first.params) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_meshes_and_micro_batches_give_the_same_update(x64, shape):
  _, base, adapters, _ = setup()
  batch = make_batch(np.float64)
  coefficients = make_method("float64").advantage.apply((), batch)
  estimate = lambda _: Estimate(coefficients, coefficients, {})

  def gradient(base, adapters, batch, **how):
    run = lambda base, params, batch: update_gradient(
      params, base, batch, estimate, jax.random.key(0), method=lora_method(**how)
    )
    (loss, _), gradient = jit(run)(base, adapters, batch)
    return loss, gradient

  loss, expected = gradient(base, adapters, batch)
  mesh = sharding.make_mesh(**dict(zip(sharding.AXES, shape, strict=True)))
  place = lambda tree: jax.device_put(tree, sharding.state_shardings(tree, mesh))
  placed = in_rows(batch, rows=1, mesh=mesh)
  found, other = gradient(place(base), place(adapters), placed, mesh=mesh)
  np.testing.assert_allclose(found, loss, rtol=1e-9)
  assert relative_distance(other, expected) < 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("no_compilation_cache")
def test_a_gradient_holds_neither_gradients_of_kernels_nor_low_rank_products():
  """As the program's products say, and its memory under remat beside that of a full gradient."""
  shape = dict(width=64, mlp_width=256, num_layers=4, head_dim=16, remat="dots")
  model = transformer(dataclasses.replace(make_method().model.config, **shape))
  base = jax.eval_shape(model.init, jax.random.key(0))
  adapters = jax.eval_shape(lambda key: init(key, base, EVERYTHING), jax.random.key(0))
  batch = make_batch()

  def loss(params):
    return jnp.sum(jnp.sin(model.response_hidden(params, batch.prompts, batch.tokens)))

  full = jax.grad(loss)
  low = jax.grad(lambda a, base: loss(combine(a, base, EVERYTHING)))
  products = lambda program: set(re.findall(r"f32\[([\d,]+)\] = dot_general", str(program)))
  sizes = [w.shape[1:] for w in target_kernels(base, EVERYTHING).values()]
  kernels = {f"{D},{E}" for pair in sizes for D, E in (pair, pair[::-1])}
  assert products(jax.make_jaxpr(full)(base)) & kernels
  assert not products(jax.make_jaxpr(low)(adapters, base)) & kernels

  memory = lambda function, *shapes: jit(function).lower(*shapes).compile().memory_analysis()
  of_full, of_low = memory(full, base), memory(low, adapters, base)
  size = sum(4 * x.size for x in jax.tree.leaves(adapters))
  assert of_low.output_size_in_bytes < 1.1 * size < 0.1 * of_full.output_size_in_bytes
  assert of_low.temp_size_in_bytes < 1.25 * of_full.temp_size_in_bytes
