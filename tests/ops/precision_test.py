"""Every product of a run's programs has the precision that the configuration asks for.

Read off what tracing leaves, kernels' bodies included, and off what is lowered for NVIDIA's GPUs.
What is compiled for TPUs is in tests/commands/costs_tpu_test.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from oracles import rows as packed
from train import tiny

from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops import paged, precision, row_attention
from rlvr_jax.ops.decoding import Pages
from rlvr_jax.train import behavior_sources
from rlvr_jax.train.build import build
from rlvr_jax.train.parameters import supervised_batches, supervised_state
from rlvr_jax.train.programs import abstract_batch
from rlvr_jax.types import Sampling

EXACT = (precision.EXACT,) * 2
ROUNDED = (jax.lax.Precision.DEFAULT,) * 2
of_shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))


def products(jaxpr):
  """Every product of matrices, in loops, branches and kernels too."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield equation
    for inner in core.jaxprs_in_params(equation.params):
      yield from products(inner)


def precisions(jaxpr):
  return {equation.params["precision"] for equation in products(jaxpr)}


@functools.cache
def parts_of(**fields):
  return build(tiny.config(**fields))


def traced(parts):
  """The programs of a run that multiply, by name, traced with shapes that they are called with."""
  programs, engine, state = parts.programs, parts.programs.engine, parts.abstract_state
  frozen, params = parts.abstract_frozen, parts.abstract_state.params
  batch = abstract_batch(parts.config, parts.row_layout, parts.mesh)
  rollouts = (params, frozen, batch.prompts, batch.tokens)
  demonstrations = next(supervised_batches(parts))
  loaded, block = engine._loaded(params, frozen), engine.settings.shape.prompt.size
  trace = lambda program, *args, **static: program.jitted.trace(*args, **static)
  return {
    "update": trace(programs.train_step, state, frozen, batch),
    "score": trace(programs.score, params, frozen, batch),
    "entropy": trace(programs.mean_entropy, params, frozen, batch),
    "geometry": trace(programs.measure, state, frozen, params, batch),
    "gap": trace(
      programs.behavior_gap, *rollouts, batch.mask, batch.behavior_logprobs, sampling=Sampling()
    ),
    "unheated": trace(programs.unheated_logprobs, *rollouts),
    "warm start": trace(
      programs.supervised_step, jax.eval_shape(lambda: supervised_state(parts)), frozen,
      *demonstrations,
    ),
    "prefill": trace(engine._prefill, loaded, jax.ShapeDtypeStruct((4, block), jnp.int32)),
    "decoding": trace(engine._burst, loaded, jax.eval_shape(engine._empty.jitted)),
  }  # fmt: skip


EXACT = {(precision.EXACT,) * 2}
ROUNDED = {(jax.lax.Precision.DEFAULT,) * 2}
SALT = dict(reweighting="salt", gram="streaming(feature='sampled')", diagnostics__every=1)
LORA = dict(lora__rank=2)


@pytest.mark.parametrize("fields", [SALT, LORA], ids=["salt", "lora"])
def test_every_product_is_exact_in_float32(fields):
  found = {name: precisions(program.jaxpr.jaxpr) for name, program in traced(parts_of(**fields)).items()}
  assert found == dict.fromkeys(found, EXACT)


def test_in_bfloat16_only_the_geometry_is_exact():
  """What is computed of Gram matrices needs all digits under every configuration."""
  programs = traced(parts_of(**SALT, model__overrides__compute_dtype="bfloat16"))
  found = {name: precisions(program.jaxpr.jaxpr) for name, program in programs.items()}
  with_gram = {"update", "geometry"}
  assert found == {name: EXACT | ROUNDED if name in with_gram else ROUNDED for name in found}
