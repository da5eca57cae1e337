"""Rounding against a NumPy search over the formats' values, and sampling from a rounded policy."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.sampling import sample

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.quantized import FORMATS, adapt_to_quantized, dequantize, quantize
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts, Sampling

pytest.importorskip("qwix", reason="the extra `quantized` needs flax 0.12")

V, P, G, T = 24, 3, 4, 9
CASES = list(zip(FORMATS, (True, False), strict=True))  # format, whether the head is tied
CONTRACTED = {"embedding": 1, "head_kernel": 0}  # of the others, kernels under their layer: 1

jitted_quantize = jax.jit(quantize, static_argnums=1)


@functools.cache
def make_model(tied_head, num_layers):
  config = TransformerConfig(
    vocab_size=V,
    width=64,
    num_layers=num_layers,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=96,
    qkv_bias=True,
    tied_head=tied_head,
  )
  return transformer(config)


@functools.cache
def make_params(tied_head, num_layers=2):
  """Random parameters; one channel is all zeros, another has its extremes on both sides."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(make_model(tied_head, num_layers).init, jax.random.key(0))
  draw = lambda x: np.asarray(rng.normal(size=x.shape) * x.shape[-1] ** -0.5, np.float32)
  params = jax.tree.map(draw, shapes)
  params["blocks"]["gate"][-1, :, 3] = 0.0
  params["blocks"]["gate"][0, :2, 5] = 4.0, -4.0
  return jax.tree.map(jnp.asarray, params)


def leaves(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def values_of(format):
  """Every finite value of the format in ascending order, and the bound that it is scaled to."""
  if format == "int8":
    return np.arange(-128.0, 128.0), 127.5
  normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]  # 4, 3 bits
  positive = np.array([m / 8 * 2.0**-6 for m in range(1, 8)] + normal)
  return np.concatenate([-positive[::-1], [0.0], positive]), 448.0


@pytest.mark.parametrize(("format", "tied_head"), CASES)
def test_every_matrix_is_rounded_to_the_nearest_values(format, tied_head):
  params = make_params(tied_head)
  copy = jitted_quantize(params, format)
  found, restored = leaves(copy), leaves(jax.jit(dequantize)(copy))
  grid, bound = values_of(format)
  assert restored.keys() == leaves(params).keys()
  size = lambda arrays: sum(x.nbytes for x in arrays.values())
  assert size(found) < 0.3 * size(leaves(params))
  matrices = 0
  for name, weights in leaves(params).items():
    if name.endswith(("/scale", "_bias")):
      np.testing.assert_array_equal(found[name], weights)
      continue
    matrices += 1
    weights = weights.astype(np.float64)
    largest = np.abs(weights).max(CONTRACTED.get(name, 1), keepdims=True)
    scale = np.where(largest > 0, largest / bound, 1.0)
    np.testing.assert_allclose(found[f"{name}/scale"], scale, rtol=1e-6)
    q = found[f"{name}/qvalue"]
    assert q.dtype == format and q.shape == weights.shape
    exact, q = weights / scale, q.astype(np.float64)
    above = np.clip(np.searchsorted(grid, exact), 1, len(grid) - 1)
    nearest = np.minimum(np.abs(exact - grid[above - 1]), np.abs(exact - grid[above]))
    # Between two equally near values the float32 quotient may fall on either side.
    assert np.isin(q, grid).all()
    assert (np.abs(exact - q) <= nearest + 1e-6 * np.abs(exact)).all()
    # Half a step: of the integers, or of three mantissa bits and at least of the subnormals.
    half = 0.5 if format == "int8" else np.maximum(np.abs(exact) / 16, 2.0**-10)
    assert (np.abs(restored[name] - weights) <= scale * (half + 1e-6 * np.abs(exact))).all()
    assert np.abs(restored[name] - weights).max() > 0
  assert matrices == (8 if tied_head else 9)


def test_a_copy_repeats_and_outlives_the_original():
  """Also without jit and from bfloat16, whose values are rounded in float32."""
  values = jnp.sin(jnp.arange(24.0)).reshape(4, 6).astype(jnp.bfloat16)
  wide = {"embedding": values.astype(jnp.float32), "final_norm": {"scale": jnp.ones(6)}}
  expected = leaves(jitted_quantize(wide, "int8"))
  for original in (wide, {**wide, "embedding": values}):
    original = jax.tree.map(jnp.copy, original)
    copy = quantize(original, "int8")
    jax.tree.map(lambda x: x.delete(), original)  # as donation does
    for name, found in leaves(copy).items():
      assert (found.dtype, found.tobytes()) == (expected[name].dtype, expected[name].tobytes())


def test_an_unknown_format_is_refused():
  with pytest.raises(ValueError, match=r"format = 'int4' is unknown; choose one of \['float8_e4m"):
    quantize(make_params(True), "int4")


PROMPTS = Prompts(
  tokens=np.random.default_rng(0).integers(0, V, (P, 6)).astype(np.int32),
  lengths=np.asarray([6, 2, 4], np.int32),
)


def make_engine(model):
  return EnginePrograms(
    model,
    Sampling(),
    slots=P * G,
    prefill_rows=P,
    max_prompt_length=6,
    max_new_tokens=T,
    stop_tokens=(3,),
    pad_token=0,
  )


@pytest.mark.parametrize(
  ("format", "tied_head", "decode_rounded"),
  [(*CASES[0], True), pytest.param(*CASES[1], False, marks=pytest.mark.slow)],
)
def test_recorded_logprobs_are_those_of_the_rounded_policy(format, tied_head, decode_rounded):
  model = adapt_to_quantized(make_model(tied_head, 1), format, decode_rounded=decode_rounded)
  params = make_params(tied_head, 1)
  copy = jitted_quantize(params, format)
  engine = make_engine(model)
  dtypes = {x.dtype.name for x in leaves(engine.load(copy, {})).values()}
  assert dtypes == ({"float32", format} if decode_rounded else {"float32"})
  rollouts = sample(engine, copy, {}, PROMPTS, jax.random.key(0), G)
  mask = np.arange(T) < np.asarray(rollouts.lengths)[..., None]
  assert mask.sum() > 40

  @jax.jit
  def trainer_logprobs(params):
    hidden = model.response_hidden(params, PROMPTS, rollouts.tokens)
    return token_logprobs(hidden, model.head(params), rollouts.tokens)[0]

  def gap(params):
    difference = trainer_logprobs(params) - rollouts.behavior_logprobs
    return np.abs(np.asarray(difference))[mask].max()

  assert gap(jax.jit(dequantize)(copy)) < 1e-5
  assert gap(params) > 1e-3
  np.testing.assert_array_equal(model.head(copy).kernel, model.head(dequantize(copy)).kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("format", "tied_head", "parameters"), [(*CASES[0], None), (*CASES[1], dict(fsdp=8))]
)
def test_8_bits_are_decoded_on_a_mesh_as_on_one_device(format, tied_head, parameters):
  """Also of parameters that come from another layout."""
  results = []
  for sizes, trained in ((dict(), None), (dict(data=2, fsdp=2, tensor=2), parameters)):
    mesh = sharding.make_mesh(**sizes)
    layout = sharding.make_layout(mesh, trained and sharding.make_mesh(**trained))
    plain = transformer(make_model(tied_head, 2).config, layout)
    engine = make_engine(adapt_to_quantized(plain, format, decode_rounded=True))
    placed = sharding.state_shardings(
      make_params(tied_head), sharding.make_mesh(**trained) if trained else mesh
    )
    copy = jitted_quantize(jax.device_put(make_params(tied_head), placed), format)
    down = engine.load(copy, {})["blocks"][0]["down"].values
    assert down.dtype == format
    assert down.addressable_shards[0].data.shape == (96 // mesh.shape["tensor"], 64)
    results.append(sample(engine, copy, {}, PROMPTS, jax.random.key(0), G))
  one, many = results
  np.testing.assert_array_equal(many.tokens, one.tokens)
  np.testing.assert_allclose(many.behavior_logprobs, one.behavior_logprobs, atol=1e-5)


def test_qwix_is_missing(monkeypatch):
  model = make_model(True, 1)
  monkeypatch.setitem(sys.modules, "qwix", None)
  with pytest.raises(ImportError, match=r"config\.sources\.quantized needs qwix: .*\[quantized\]"):
    # As a run is built, with nothing compiled yet.
    adapt_to_quantized(model, "int8", decode_rounded=True)
