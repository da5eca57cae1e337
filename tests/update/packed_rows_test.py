"""Updates on packed rows: how rollouts were packed changes nothing, and little is paid in vain."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from ml_collections import ConfigDict
from oracles.updates import (
  G,
  P,
  S,
  T,
  gradient_of,
  in_rows,
  make_batch,
  make_method,
  relative_distance,
)

from rlvr_jax import losses
from rlvr_jax.configs.full_size import base
from rlvr_jax.costs.workload import Workload, count_packing
from rlvr_jax.models.presets import preset
from rlvr_jax.ops.reductions import values
from rlvr_jax.ops.row_attention import row_alignment
from rlvr_jax.ops.splash import splash_cost
from rlvr_jax.rollouts.packing import computed_rows, min_row_length, pack, row_layout
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.build import batch_shape
from rlvr_jax.train.setup.programs import abstract_batch, choose_row_attention, make_row_layout
from rlvr_jax.types import BatchShape
from rlvr_jax.update.step import initial_state, train_step


def test_short_rows_change_nothing(x64):
  """Nor the metrics, nor what is computed of the whole batch in a forward pass of its own."""
  method, batch = make_method("float64", loss=losses.p3o()), make_batch(np.float64)
  params = method.model.init(jax.random.key(0))
  whole, mixed = (in_rows(batch, rows=1, length=24, has_short_rows=x) for x in (False, True))
  packed = mixed.packed
  first_short = (packed.num_micro_batches - packed.num_short) * packed.tokens[0].size
  assert packed.num_short > 0 and (packed.places >= first_short).any()
  (loss, metrics), expected = gradient_of(method, whole, params)
  (found, found_metrics), gradient = gradient_of(method, mixed, params)
  np.testing.assert_allclose(found, loss, rtol=1e-11)
  assert relative_distance(gradient, expected) < 1e-11
  chex.assert_trees_all_close(values(found_metrics), values(metrics), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("has_short_rows", [False, True])
def test_programs_are_made_for_the_rows_that_batches_have(has_short_rows):
  """Else a run would compile its update twice."""
  batch = in_rows(make_batch(), rows=1, length=24, has_short_rows=has_short_rows)
  layout = row_layout(
    prompts=P, group_size=G, max_prompt_length=S, max_response_length=T, length=24, alignment=1,
    devices=1, tokens_per_micro_batch=24, has_short_rows=has_short_rows,
  )  # fmt: skip
  mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
  abstract = abstract_batch(BatchShape(P, G, S, T), layout, mesh)
  chex.assert_trees_all_equal_shapes_and_dtypes(abstract.packed, batch.packed)
  assert (abstract.packed.num_short is not None) == has_short_rows


@pytest.mark.slow
def test_short_rows_compile_nothing():
  """One program serves batches with any number of micro-batches of short rows, none included."""
  method = make_method()
  step = jax.jit(functools.partial(train_step, method=method))
  state = initial_state(method, method.model.init(jax.random.key(0)), jnp.zeros(()))
  counts = set()
  for seed in range(6):
    batch = in_rows(make_batch(seed=seed), rows=1, length=24, has_short_rows=True)
    counts.add(int(batch.packed.num_short))
    state, metrics = step(state, {}, batch)
    rows = batch.packed.rows
    lengths = (int(batch.packed.num_micro_batches) - int(batch.packed.num_short)) * 24
    places = (lengths + int(batch.packed.num_short) * 8) * rows.prompts.shape[1]
    filled = (rows.prompts >= 0).sum() / places
    np.testing.assert_allclose(metrics["rows/filled"], filled, rtol=1e-6)
  assert len(counts) > 1 and step._cache_size() == 1


def test_lengths_compile_nothing():
  """One program serves batches of one, two and all micro-batches; traced alone."""
  method = make_method()
  state = jax.eval_shape(
    lambda: initial_state(method, method.model.init(jax.random.key(0)), jnp.zeros(()))
  )
  batches = []
  for longest in (1, 2, 4, T):
    batch = make_batch()
    mask = batch.mask * (np.arange(T) < longest)
    batches.append(in_rows(dataclasses.replace(batch, mask=mask), rows=3, several=None))
  chex.assert_trees_all_equal_shapes_and_dtypes(*batches)
  assert len({int(batch.packed.num_micro_batches) for batch in batches}) > 2
  after, _ = jax.eval_shape(functools.partial(train_step, method=method), state, {}, batches[0])
  assert jax.tree.leaves(after) == jax.tree.leaves(state)


# --- what is paid, at full size -------------------------------------------------------------------


def lognormal_case():
  """(layout, prompts' and responses' lengths): mean 1500, σ 0.8, at most 8192, on 16 devices.

  64 prompts with 16 rollouts.
  """
  config = base.get_config()
  config.batch.prompts = 64
  mesh = jax.sharding.AbstractMesh((1, 16, 1), sharding.AXES)
  rng = np.random.default_rng(1)
  shape = (config.batch.prompts, config.batch.group_size)
  lengths = np.minimum(rng.lognormal(np.log(1500) - 0.32, 0.8, shape), 8192).astype(np.int32)
  prompts = rng.integers(100, 300, shape[0]).astype(np.int32)
  return make_row_layout(config.batch, batch_shape(config), "splash", mesh), prompts, lengths


def packed_as(layout, prompts, lengths):
  """Rows of tokens that are all zero."""
  tokens = lambda shape, length: np.zeros((*shape, length.max()), np.int32)
  inputs = tokens(prompts.shape, prompts), prompts, tokens(lengths.shape, lengths), lengths
  return pack(*inputs, layout)


def test_linear_work_is_near_what_is_useful():
  """Places of all rows that run, empty ones too; a prompt is useful once per group."""
  layout, prompts, lengths = lognormal_case()
  assert layout.length == 9216 and layout.alignment == 32
  packed = packed_as(layout, prompts, lengths)
  executed = sum(rows.prompts.size for rows in computed_rows(packed))
  useful = prompts.sum() + lengths.sum()
  assert lengths.mean() == pytest.approx(1500, rel=0.1)
  assert 1 <= executed / useful <= 1.09
  assert (executed, useful) == count_packing(Workload(prompts, lengths[..., None]), layout)[1:]
  padded = lengths.size * 8192 + prompts.size * 1024
  assert padded / useful > 5


@pytest.mark.parametrize(
  ("kind", "limit", "longest"), [("splash", 2**17, 16_384), ("cudnn", 2**14, 4096)]
)
def test_rows_are_not_longer_than_the_kernel_allows(kind, limit, longest):
  config = base.get_config()
  config.max_prompt_length = config.max_response_length = longest
  config.batch.tokens_per_micro_batch = 16 * longest
  mesh = jax.sharding.AbstractMesh((1, 16, 1), sharding.AXES)
  assert make_row_layout(config.batch, batch_shape(config), kind, mesh).length == limit
  assert make_row_layout(config.batch, batch_shape(config), "reference", mesh).length > limit


@pytest.mark.parametrize(
  ("prompt", "response", "asked"),
  [(257, 65_280, 65_600), (3810, 61_531, 66_318), (1107, 63_557, 66_161), (257, 65_280, 0)],
)
def test_rows_have_room_for_the_longest_rollout_as_they_align_it(prompt, response, asked):
  """Rows above 65,536 tokens are aligned more coarsely than those that would do."""
  config = base.get_config()
  config.max_prompt_length, config.max_response_length = prompt, response
  config.batch.tokens_per_row, config.batch.tokens_per_micro_batch = asked, 2**17
  mesh = jax.sharding.AbstractMesh((1, 4, 1), sharding.AXES)
  layout = make_row_layout(config.batch, batch_shape(config), "splash", mesh)
  assert layout.length >= asked and layout.alignment == row_alignment("splash", layout.length)
  assert min_row_length(prompt, response, alignment=layout.alignment) <= layout.length <= 2**17


def test_places_of_rows_are_counted():
  config = base.get_config()
  config.max_prompt_length, config.max_response_length = 1024, 66_000
  config.batch.prompts, config.batch.group_size = 16_500, 1
  config.batch.tokens_per_row = config.batch.tokens_per_micro_batch = 2**17
  mesh = jax.sharding.AbstractMesh((1, 4, 1), sharding.AXES)
  with pytest.raises(ValueError, match=r"may need 216\d+ positions in rows of 131072 tokens"):
    make_row_layout(config.batch, batch_shape(config), "splash", mesh)


def test_a_soft_cap_keeps_a_network_from_cudnn(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  mesh = jax.sharding.AbstractMesh((1, 16, 1), sharding.AXES)
  network = preset("gemma2_2b", attention="cudnn", compute_dtype="bfloat16", head_dim=128)
  with pytest.raises(
    ValueError, match=r"needs scores without a soft cap \(here: attention_soft_cap=50"
  ):
    choose_row_attention(network, mesh, batch_shape(base.get_config()), tokens_per_row=0)


def test_attention_computes_at_most_twice_what_is_needed():
  """Forward and backward kernels, of all rows that run, against causal pairs of the rollouts."""
  layout, prompts, lengths = lognormal_case()
  packed = packed_as(layout, prompts, lengths)
  heads = dict(num_heads=1, num_kv_heads=1, head_dim=1)
  costs = [splash_cost(rows, **heads) for rows in computed_rows(packed)]
  forward, backward = (
    sum(getattr(cost, f"{direction}_flops") for cost in costs)
    for direction in ("forward", "backward")
  )
  s, t = prompts.astype(float), lengths.astype(float)
  pairs = (s * s / 2).sum() + (t * (s[:, None] + t / 2)).sum()  # a prompt once per group
  # Products of a pair, of 2 FLOPs each: 2 forward, 5 backward.
  assert 1 <= forward / (4 * pairs) <= 2
  assert 1 <= (forward + backward) / (14 * pairs) <= 2


def test_a_small_batch_has_a_row_for_each_of_several_chips():
  settings = ConfigDict(dict(tokens_per_row=0, tokens_per_micro_batch=10_000))
  mesh = AbstractMesh((1, 4, 1), sharding.AXES, axis_types=(AxisType.Auto,) * 3)
  layout = make_row_layout(settings, BatchShape(8, 4, 8, 4), "splash", mesh)
  assert (layout.length, layout.alignment, layout.devices) == (384, 8, 4)
