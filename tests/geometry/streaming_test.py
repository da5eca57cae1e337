"""The streaming Gram matrix: the same numbers as differentiation, at its price, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from oracles.flops import product_flops
from oracles.gram_cases import (
  D,
  G,
  P,
  in_rows,
  make_batch,
  make_case,
  make_forward,
  make_transformer,
)

from rlvr_jax import specs
from rlvr_jax.configs.full_size import salt_qwen25_math_7b
from rlvr_jax.costs.hlo import walk
from rlvr_jax.geometry import GramContext, bytes_moved, per_rollout, streaming
from rlvr_jax.geometry.by_rollout import ROLLOUTS, TILES
from rlvr_jax.models.functional import take_trained
from rlvr_jax.ops.masked import upcast
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.build import batch_shape
from rlvr_jax.train.setup.programs import make_row_layout
from rlvr_jax.types import Forward, Head


def assert_close(found, expected, tolerance=1e-10):
  difference = np.linalg.norm(np.asarray(found, np.float64) - expected)
  assert difference < tolerance * np.linalg.norm(expected)


def streamed(args, setting, **route):
  params, *rest = args
  return jax.jit(lambda *args: streaming(**route).gram(*args, setting))(params, {}, *rest)


FEATURES = pytest.mark.parametrize("feature", ["score", "sampled"])


@FEATURES
@pytest.mark.parametrize(
  ("case", "routes"),
  [
    (dict(make=make_transformer, final_soft_cap=1.5), [dict()]),
    pytest.param(
      dict(make=make_transformer, tied_head=False, temperature=0.6),
      [dict()],
      marks=pytest.mark.slow,
    ),
    (dict(soft_cap=2.0, scale=0.3, temperature=1.7), [dict()]),
    # Blocks of 128, the last of them narrower; 256 and a last one; the whole.
    (
      dict(vocab_size=300, temperature=0.9),
      [
        dict(block_elements=1),
        dict(block_elements=P * G * D * 256),
        dict(block_elements=10**9),
      ],
    ),
  ],
)
def test_equals_differentiation(x64, case, routes, feature):
  params, batch, forward, setting = make_case(**case)
  reference = per_rollout(feature=feature)
  expected = jax.jit(lambda *args: reference.gram(*args, None, setting))(params, {}, batch)
  for route in routes:
    found = streamed((params, batch, forward), setting, feature=feature, **route)
    assert found.dtype == jnp.float64
    assert_close(found, expected)
    assert np.all(found[3] == 0)  # the rollout whose mask is empty
    np.testing.assert_allclose(found, found.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
  ("rows", "route"),
  [(2, dict(block_elements=1)), (2, dict(feature="sampled")), (100, dict())],
)
def test_rows_give_the_same_matrix(x64, rows, route):
  """In several micro-batches and in one; what lies beside the rollouts' tokens is NaN."""
  params, batch, forward, setting = make_case(vocab_size=300, soft_cap=2.0, temperature=0.9)
  packed, laid = in_rows(batch, forward, rows=rows)
  assert (packed.packed.tokens.shape[0] > 1) == (rows == 2)
  found = streamed((params, packed, laid), setting, **route)
  padded = streamed((params, batch, forward), setting, feature=route.get("feature", "score"))
  assert_close(found, padded)


@FEATURES
def test_what_is_masked_does_not_matter(feature):
  params, batch, forward, setting = make_case(dtype="float32")
  mask = batch.mask.reshape(forward.log_normalizers.shape)
  spoil = lambda x, mask: jnp.where(mask > 0, x, jnp.nan)
  spoilt = Forward(
    spoil(forward.hidden, mask[..., None]), spoil(forward.log_normalizers, mask), None
  )
  other = dataclasses.replace(batch, tokens=jnp.where(batch.mask > 0, batch.tokens, -1))
  np.testing.assert_array_equal(
    streamed((params, other, spoilt), setting, feature=feature),
    streamed((params, batch, forward), setting, feature=feature),
  )


@FEATURES
def test_bfloat16_is_near_float32(feature):
  *args, setting = make_case(dtype="bfloat16")
  found = streamed(args, setting, feature=feature)
  assert found.dtype == jnp.float32
  wide = lambda x: upcast(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
  # The same rounded parameters.
  exact = streamed(jax.tree.map(wide, args), setting, feature=feature)
  assert_close(found, exact, 0.01)


def test_what_cannot_be():
  with pytest.raises(ValueError, match="block_elements = 0"):
    streaming(block_elements=0)
  for route in (streaming, per_rollout):
    with pytest.raises(ValueError, match=r"feature = 'sample' is unknown.*'sampled', 'score'"):
      route(feature="sample")


# --- sampled tokens alone -------------------------------------------------------------------------


def released_features(hidden, logits, tokens, mask):
  """The per-sample gradients of the head, [B, V, D], as the authors' public code gets them.

  One graph holds the logits of all samples and is kept. Each sample's cross-entropy is
  differentiated in turn, and its backward pass, flash-attn's with `inplace_backward`, writes the
  gradient over the logits, with the log-normalizers of the forward pass. This is inferred from
  reading that code, not measured.
  """
  log_normalizers = np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  kept_logits, features = logits.copy(), []
  onehot = np.eye(logits.shape[-1])[tokens]
  for i in range(len(logits)):
    upstream = np.zeros(mask.shape)
    upstream[i] = mask[i]
    kept_logits[:] = (np.exp(kept_logits - log_normalizers) - onehot) * upstream[..., None]
    features.append(np.einsum("tv,td->vd", kept_logits[i], hidden[i]))
  return np.stack(features)


def test_sampled_is_what_the_released_code_computes_after_its_first_sample(x64):
  """Logits far above 0, as large models have them, leave exp(0 − log-normalizer) ≈ 0 as p."""
  params, batch, forward, setting = make_case()
  params["table"] = params["table"].at[..., 0].set(1.0)
  params["kernel"] = params["kernel"].at[0].add(60.0)  # the same probabilities
  forward = make_forward(params, batch, setting)
  hidden = np.asarray(forward.hidden[0])
  logits = hidden @ np.asarray(params["kernel"])
  flat = lambda x: np.asarray(x).reshape(P * G, -1)
  released = flat(released_features(hidden, logits, flat(batch.tokens), flat(batch.mask)))
  gram = lambda feature: streamed((params, batch, forward), setting, feature=feature)
  assert_close(gram("sampled")[1:, 1:], released[1:] @ released[1:].T, 1e-12)
  np.testing.assert_allclose(gram("score")[0, 0], released[0] @ released[0], rtol=1e-10)
  assert abs(gram("sampled")[0, 0] / (released[0] @ released[0]) - 1) > 0.01


def test_a_cost_report_knows_how_long_its_loops_are(x64):
  """Those whose length the batch decides have names."""
  params, batch, forward, setting = make_case(temperature=0.7)
  batch, forward = in_rows(batch, forward, rows=2)
  gram = jax.jit(lambda *args: streaming().gram(*args, setting))
  text = gram.lower(params, {}, batch, forward).compile().as_text()
  products = lambda lengths: [
    item.times for item in walk(text, {}, lengths) if item.flops and f"/{TILES}/" in item.op_name
  ]
  (once,) = products({})
  lengths = {rf"{ROLLOUTS}/while$": 5, rf"{TILES}/while$": 2}
  assert products(lengths) == [10 * once]


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sampled_in_several_tiles_and_blocks(x64, packed):
  """Tokens that meet in two tiles of 160 pairs; hidden states in three blocks."""
  params, batch, forward, setting = make_case(width=300, batch=make_batch(0, prompts=20, group=8))
  route = per_rollout(feature="sampled")
  expected = jax.jit(lambda *args: route.gram(*args, None, setting))(params, {}, batch)
  if packed:
    batch, forward = in_rows(batch, forward, rows=2)
  for block_elements in (1, 2**22):
    args = params, batch, forward
    found = streamed(args, setting, feature="sampled", block_elements=block_elements)
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("group", [8, 64])
def test_sampled_adds_at_most_a_tenth_of_a_head_product(group):
  """At the shape of a model of 1.5B parameters, as counted and as reported."""
  P, length, width, vocabulary = 8, 128, 1536, 151_936
  args = abstract_case(P, group, length, width, vocabulary)
  route = streaming(feature="sampled")
  run = lambda *args: route.gram(*args, GramContext(_HeadOnly))
  head_product = 2 * P * group * length * width * vocabulary
  counted = product_flops(jax.make_jaxpr(run)(*args)) / head_product
  assert counted <= 0.1
  kernel = jax.ShapeDtypeStruct((width, vocabulary), jnp.bfloat16)
  reported = route.cost(args[2], args[3].hidden, kernel, GramContext(_HeadOnly))
  assert float(reported["gram/head_products"].total) == pytest.approx(counted, rel=1e-6)


# --- price ----------------------------------------------------------------------------------------


class _HeadOnly:
  """A model of which only the head exists."""

  combine = staticmethod(take_trained)

  @staticmethod
  def head(params):
    return Head(params.T, 1.0, None)


def abstract_case(prompts, group, length, width, vocabulary, dtype=jnp.bfloat16, place=None):
  place = place or (lambda shape, dtype, _: jax.ShapeDtypeStruct(shape, dtype))
  batch = jax.eval_shape(lambda: make_batch(0, prompts=prompts, group=group))
  tokens = place((prompts, group, length), jnp.int32, "batch")
  mask = place((prompts, group, length), jnp.float32, "batch")
  batch = dataclasses.replace(batch, tokens=tokens, mask=mask)
  rows = (1, prompts * group, length)
  hidden = place((*rows, width), dtype, "rows")
  forward = Forward(hidden, place(rows, jnp.float32, "rows"), None)
  return place((vocabulary, width), dtype, "kernel"), {}, batch, forward


@pytest.mark.parametrize("vocabulary", [12_800, 9_999])
def test_costs_two_head_products_and_the_inner_products(vocabulary):
  P, G, length, width = 8, 8, 256, 512
  args = abstract_case(P, G, length, width, vocabulary)
  run = lambda *args: streaming().gram(*args, GramContext(_HeadOnly))
  head_product = 2 * P * G * length * width * vocabulary
  counted = product_flops(jax.make_jaxpr(run)(*args)) / head_product
  assert counted == pytest.approx(2 + P * G / length, rel=1e-3)
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  run = lambda *args: streaming().gram(*args, GramContext(_HeadOnly, mesh=mesh))
  counted = product_flops(jax.make_jaxpr(run)(*args)) / head_product
  assert counted == pytest.approx(2 + P * G / length, rel=2e-3)


@pytest.mark.usefixtures("no_compilation_cache")
def test_memory_is_that_of_a_block():
  """Beside a clean copy of the hidden states: neither [B, D, V], [B, T, V] nor another kernel."""
  P, G, length, width, vocabulary = 4, 2, 64, 32, 65_536
  args = abstract_case(P, G, length, width, vocabulary, jnp.float32)
  block = 2**17
  run = lambda *args: streaming(block_elements=block).gram(*args, GramContext(_HeadOnly))
  memory = jax.jit(run).lower(*args).compile().memory_analysis()
  hidden = P * G * length * width
  assert memory.temp_size_in_bytes < 4 * (4 * block + 2 * hidden)
  assert memory.temp_size_in_bytes < 4 * width * vocabulary / 2


# --- meshes ---------------------------------------------------------------------------------------


def on_mesh(sizes, params, batch, forward):
  """Laid out as training has them."""
  mesh = sharding.make_mesh(**sizes)
  rows = NamedSharding(mesh, PartitionSpec(None, *sharding.BATCH))
  batch = jax.device_put(batch, sharding.batch_shardings(batch, mesh))
  params = jax.device_put(params, sharding.state_shardings(params, mesh))
  return mesh, params, batch, jax.device_put(forward, rows)


@pytest.mark.parametrize(
  ("sizes", "case", "route"),
  [
    pytest.param(dict(data=8), dict(), dict(), marks=pytest.mark.slow),
    pytest.param(
      dict(data=2, fsdp=2, tensor=2), dict(make=make_transformer), dict(), marks=pytest.mark.slow
    ),
    (dict(data=2, fsdp=2, tensor=2), dict(soft_cap=2.0, width=7), dict()),
    pytest.param(
      dict(fsdp=2, tensor=4),
      dict(vocab_size=1061, temperature=0.7),
      dict(block_elements=1),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      dict(fsdp=4, tensor=2), dict(vocab_size=64, temperature=0.7), dict(), marks=pytest.mark.slow
    ),
    pytest.param(
      dict(data=8), dict(vocab_size=64), dict(feature="sampled"), marks=pytest.mark.slow
    ),
    (dict(data=2, fsdp=2, tensor=2), dict(soft_cap=2.0, width=7), dict(feature="sampled")),
  ],
)
def test_sharded_equals_unsharded(x64, sizes, case, route):
  """Vocabularies of 19 and 1061 tokens, which eight devices cannot share evenly, and of 64."""
  *args, setting = make_case(batch=make_batch(2, prompts=8), **case)
  expected = streamed(args, setting, feature=route.get("feature", "score"))
  mesh, *args = on_mesh(sizes, *args)
  found = streamed(args, setting._replace(mesh=mesh), **route)
  assert found.is_fully_replicated
  assert_close(found, expected, 1e-12)
  params, batch, forward = args
  packed, laid = in_rows(
    *jax.device_get((batch, forward)), devices=mesh.shape["data"] * mesh.shape["fsdp"]
  )
  _, _, *args = on_mesh(sizes, {}, packed, laid)
  assert_close(streamed((params, *args), setting._replace(mesh=mesh), **route), expected, 1e-12)


@pytest.mark.usefixtures("no_compilation_cache")
def test_bytes_moved_are_those_of_the_compiled_program():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  layouts = {"batch": sharding.BATCH, "kernel": PartitionSpec("tensor", "fsdp")}
  layouts["rows"] = PartitionSpec(None, *sharding.BATCH)
  place = lambda shape, dtype, what: jax.ShapeDtypeStruct(
    shape, dtype, sharding=NamedSharding(mesh, layouts[what])
  )
  args = abstract_case(8, 2, 16, 32, 4096, jnp.float32, place)
  run = lambda *args: streaming().gram(*args, GramContext(_HeadOnly, mesh=mesh))
  found = walk(jax.jit(run).lower(*args).compile().as_text(), {})
  kernel = jax.ShapeDtypeStruct((32, 4096), jnp.float32)
  received = sum(item.received_bytes for item in found)
  assert received == bytes_moved(args[3].hidden, kernel, mesh, rollouts=16), found
  assert bytes_moved(args[3].hidden, kernel, None, rollouts=16) == 0


def test_the_full_size_recipe_gathers_hidden_states_a_few_times():
  """Every block of the vocabulary gathers them anew; of v5p:2x2x4, which the recipe is for."""
  config = salt_qwen25_math_7b.get_config()
  mesh = AbstractMesh((1, 8, config.mesh.tensor), sharding.AXES)
  layout = make_row_layout(config.batch, batch_shape(config), "splash", mesh)
  rows = (layout.max_micro_batches, layout.devices * layout.rows_per_device, layout.length)
  hidden = jax.ShapeDtypeStruct((*rows, 3584), jnp.bfloat16)
  kernel = jax.ShapeDtypeStruct((3584, 152_064), jnp.bfloat16)
  moved = bytes_moved(
    hidden,
    kernel,
    mesh,
    rollouts=config.batch.prompts * config.batch.group_size,
    used=layout.max_micro_batches,
    **specs.parse("config.gram", config.gram).arguments,
  )
  assert 18 < moved / (2 * hidden.size * 7 / 8) < 21
