"""Every product of a run's programs has the precision that the configuration asks for.

Read off what tracing leaves, kernels' bodies included, and off what is lowered for NVIDIA's GPUs.
What is compiled for TPUs is in tests/costs/costs_tpu_test.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from oracles import rows as packed
from train import tiny

from rlvr_jax.models.presets import model_settings, preset
from rlvr_jax.ops import paged, precision
from rlvr_jax.ops.caches import Pages
from rlvr_jax.ops.row_attention import row_attention
from rlvr_jax.train.setup import behavior_sources
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.programs import abstract_update_batch
from rlvr_jax.train.start.parameters import supervised_batches
from rlvr_jax.types import Sampling

EXACT = {(precision.EXACT,) * 2}
ROUNDED = {(jax.lax.Precision.DEFAULT,) * 2}
SALT = dict(reweighting="salt", gram="streaming(feature='sampled')", diagnostics__every=1)
LORA = dict(lora__rank=2)


def equations(jaxpr):
  """Every operation, in loops, branches and kernels too."""
  for equation in jaxpr.eqns:
    yield equation
    for inner in jax.tree.leaves(equation.params):
      if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
        yield from equations(getattr(inner, "jaxpr", inner))


def products(jaxpr):
  return [each for each in equations(jaxpr) if each.primitive.name == "dot_general"]


def precisions(jaxpr):
  return {equation.params["precision"] for equation in products(jaxpr)}


@functools.cache
def parts_of(**fields):
  return build(tiny.config(**fields))


def traced(parts):
  """The programs of a run that multiply, by name, traced with shapes that they are called with."""
  programs, engine, state = parts.programs, parts.programs.engine, parts.placement.state
  frozen, params = parts.placement.frozen, parts.placement.state.params
  batch = abstract_update_batch(parts.method, parts.placement, parts.shape)
  rollouts = (params, frozen, batch.prompts, batch.tokens)
  lengths = jax.ShapeDtypeStruct(batch.rewards.shape, jnp.int32)
  demonstrations = next(
    supervised_batches(parts.task.warm_start, parts.tokenizer, parts.shape, batch_size=4, seed=0)
  )
  loaded, block = engine._loaded_shapes(params, frozen), engine.settings.shape.prompt.size
  trace = lambda program, *args, **static: program.trace(*args, **static)
  return {
    "update": trace(programs.train_step, state, frozen, batch),
    "score": trace(programs.score, params, frozen, batch),
    "entropy": trace(programs.mean_entropy, params, frozen, batch),
    "geometry": trace(programs.measure, state, frozen, params, batch),
    "gap": trace(programs.behavior_gap, params, frozen, batch, sampling=Sampling()),
    "temperature 1": trace(programs.logprobs_at_temperature_1, *rollouts, lengths),
    "warm start": trace(
      programs.supervised_step, (params, jax.eval_shape(programs.supervised_init, params)), frozen,
      *demonstrations,
    ),
    "prefill": trace(engine.programs.prefill, loaded, jax.ShapeDtypeStruct((4, block), jnp.int32)),
    "decoding": trace(
      engine.programs.burst, loaded, jax.eval_shape(engine.programs.empty_slots),
      read=engine.settings.shape.everything,
    ),
  }  # fmt: skip


@pytest.mark.parametrize(
  "fields", [pytest.param(SALT, id="salt"), pytest.param(LORA, id="lora", marks=pytest.mark.slow)]
)
def test_every_product_is_exact_in_float32(fields):
  programs = traced(parts_of(**fields))
  found = {name: precisions(program.jaxpr.jaxpr) for name, program in programs.items()}
  assert found == dict.fromkeys(found, EXACT)


@pytest.mark.slow
def test_in_bfloat16_only_the_geometry_is_exact():
  """What is computed of Gram matrices needs all digits under every configuration."""
  programs = traced(parts_of(**SALT, model__overrides__compute_dtype="bfloat16"))
  found = {name: precisions(program.jaxpr.jaxpr) for name, program in programs.items()}
  with_gram = {"update", "geometry"}
  assert found == {name: EXACT | ROUNDED if name in with_gram else ROUNDED for name in found}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "expected"), [("float32", "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_what_is_lowered_for_nvidias_gpus(dtype, expected):
  programs = traced(parts_of(model__overrides__compute_dtype=dtype))
  for name in ("update", "decoding"):
    text = programs[name].lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"stablehlo\.dot_general.*precision = \[(\w+), (\w+)\]", text)
    assert len(found) == text.count("stablehlo.dot_general ") > 5
    assert set(found) == {(expected,) * 2}


# --- kernels, which a CPU can trace ---------------------------------------------------------------


def kernel_precisions(function, *args, asked):
  """Of the products within kernels, and how many these are."""
  traced = precision.with_matmul_precision(function, asked)
  found = []
  for equation in equations(jax.make_jaxpr(traced)(*args).jaxpr):
    if equation.primitive.name == "pallas_call":
      found += [product.params["precision"] for product in products(equation.params["jaxpr"])]
  return set(found), len(found)


@pytest.mark.parametrize(("asked", "expected"), [("highest", EXACT), ("default", ROUNDED)])
def test_the_kernels_of_tpus_take_the_precision(asked, expected):
  """The flash kernels forward and backward, and the paged one."""
  rows = jax.tree.map(jnp.asarray, packed.lay_rows(256, [(60, [100])]))
  heads = jnp.zeros((1, 256, 2, 32))

  def loss(queries, keys, values):
    return jnp.sum(row_attention(queries, keys, values, rows, scale=0.2, kind="splash"))

  gradient = jax.grad(loss, argnums=(0, 1, 2))
  assert kernel_precisions(gradient, heads, heads, heads, asked=asked) == (expected, 2 + 5)
  pages = Pages(*[jnp.zeros((1, 2, 3, 16, 128), jnp.bfloat16)] * 2)
  arguments = jnp.zeros((3, 2, 128)), pages, jnp.ones(3, jnp.int32)
  assert kernel_precisions(paged.paged_sums, *arguments, asked=asked) == (expected, 2)


# --- the field ------------------------------------------------------------------------------------


def test_rounded_products_are_bound_as_those_of_bfloat16():
  """A bound of 1e-4 would stop a sound run whose float32 products are rounded."""
  for fields, expected in (
    (dict(), 1e-4),
    (dict(matmul_precision="highest"), 1e-4),
    (dict(matmul_precision="default"), 5e-2),
    (dict(compute_dtype="bfloat16"), 5e-2),
  ):
    config = tiny.config(**{f"model__overrides__{name}": x for name, x in fields.items()})
    network = model_settings(config.model)
    bound = functools.partial(behavior_sources.max_gap, network=network, sampling=Sampling())
    assert bound(config.max_behavior_gap) == expected
    assert bound(config.max_behavior_gap, rounded=True) == 5e-2  # a cache in int8
    assert bound(0.3, rounded=True) == 0.3


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(matmul_precision="high"), r"'high'; allowed: \['auto', 'highest', 'default'\]"),
    (dict(matmul_precision="highest", compute_dtype="bfloat16"), "no effect .* choose 'auto'"),
  ],
)
def test_a_wrong_precision_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    preset("tiny", **fields)
