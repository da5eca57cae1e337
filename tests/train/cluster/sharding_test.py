"""Meshes, the table of shardings, the way to the devices and back."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from oracles.batches import make_host_batch, random_prompts
from oracles.sampling import sample
from oracles.updates import relative_distance
from train import tiny

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.layers import rows_of
from rlvr_jax.rollouts.decoder import cached_heads
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.generation.policies import make_sync
from rlvr_jax.train.setup.build import build
from rlvr_jax.types import Prompts, Sampling

P, G, S, T, V = 8, 3, 5, 6, 64
CONFIG = TransformerConfig(
  vocab_size=V,
  width=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_width=96,
  qkv_bias=True,
)


def specs(tree, mesh):
  shardings = sharding.state_shardings(tree, mesh)
  path = lambda p: jax.tree_util.keystr(p, simple=True, separator="/")
  leaves = jax.tree_util.tree_leaves_with_path(shardings)
  return {path(p): leaf.spec for p, leaf in leaves}


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("sizes", "found"), [(dict(fsdp=-1), (1, 8, 1)), (dict(data=-1, fsdp=1, tensor=4), (2, 1, 4))]
)
def test_one_axis_can_take_the_devices_that_are_left(sizes, found):
  assert tuple(sharding.make_mesh(**sizes).shape.values()) == found


def test_mesh_is_of_the_devices_given():
  last = jax.devices()[4:]
  assert set(sharding.make_mesh(fsdp=4, devices=last).devices.flat) == set(last)
  with pytest.raises(ValueError, match="8 devices, but there are 4"):
    sharding.make_mesh(fsdp=8, devices=last)


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    (dict(data=0), "at least 1"),
    (dict(fsdp=-2), "at least 1"),
    (dict(data=-1, fsdp=-1), "one size may be -1"),
    (dict(fsdp=-1, tensor=3), "8 devices are not a multiple of 3"),
    (dict(data=3, tensor=4), r"3·1·4 = 12 devices, but there are 8.*device_count=12"),
  ],
)
def test_mesh_that_cannot_be(sizes, message):
  with pytest.raises(ValueError, match=f"config.mesh.*{message}"):
    sharding.make_mesh(**sizes)


def test_batch_that_does_not_split():
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  sharding.check_batch("config.batch.prompts", 8, mesh)
  with pytest.raises(ValueError, match=r"config.batch.prompts = 10 .* multiple of 4, for example"):
    sharding.check_batch("config.batch.prompts", 10, mesh)


# --- the table ------------------------------------------------------------------------------------


def test_every_kernel_is_sharded_along_both_axes():
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  found = specs(jax.eval_shape(transformer(CONFIG).init, jax.random.key(0)), mesh)
  for name in ("query", "key", "value", "gate", "up"):
    assert found[f"blocks/{name}"] == PartitionSpec(None, "fsdp", "tensor"), name
  for name in ("output", "down"):
    assert found[f"blocks/{name}"] == PartitionSpec(None, "tensor", "fsdp"), name
  assert found["embedding"] == PartitionSpec("tensor", "fsdp")
  assert found["blocks/query_bias"] == PartitionSpec(None, "tensor")
  assert not any(found["final_norm/scale"])


def test_optimizer_moments_follow_their_parameters():
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  params = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
  found = specs(jax.eval_shape(optax.adamw(1e-3).init, params), mesh)
  moments = {name: spec for name, spec in found.items() if name.endswith("blocks/down")}
  assert len(moments) == 2
  assert set(moments.values()) == {PartitionSpec(None, "tensor", "fsdp")}


def test_dimension_that_does_not_divide_is_replicated():
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  blocks = {"query": of(2, 6, 8), "down": of(2, 3, 5)}
  found = specs({"embedding": of(7, 12), "blocks": blocks}, mesh)
  assert found["embedding"] == PartitionSpec(None, "fsdp")
  assert found["blocks/query"] == PartitionSpec(None, None, "tensor")
  assert not any(found["blocks/down"])


# --- to the devices and back ----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [dict(fsdp=2, tensor=4), dict()])
def test_round_trip(sizes):
  mesh = sharding.make_mesh(**sizes)
  tree = {
    "tokens": np.arange(P * S, dtype=np.int32).reshape(P, S),
    "nested": [np.linspace(0, 1, P, dtype=np.float32), np.arange(P) % 2 == 0],
  }
  placed = sharding.to_devices(tree, sharding.batch_sharding(mesh))
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  assert placed["tokens"].addressable_shards[0].data.shape == (P // shards, S)
  back = sharding.to_host(placed)
  jax.tree.map(np.testing.assert_array_equal, back, tree)
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(back))


# --- training -------------------------------------------------------------------------------------


def gradient_of_hidden(config, mesh):
  """A jitted function: (parameters, prompts, tokens) → (a loss, its gradient) on a mesh."""
  model = transformer(config, sharding.make_layout(mesh))
  loss = lambda *args: jnp.sum(jnp.sin(model.response_hidden(*args)))
  return jax.jit(jax.value_and_grad(loss))


def training_inputs(config, mesh, length):
  rng = np.random.default_rng(0)
  params = transformer(config).init(jax.random.key(0))
  ints = lambda *shape: rng.integers(1, V, shape).astype(np.int32)
  lengths = rng.integers(1, S + 1, P).astype(np.int32)
  batch = sharding.to_devices(
    (Prompts(ints(P, S + 1), lengths), ints(P, G, length)), sharding.batch_sharding(mesh)
  )
  return jax.device_put(params, sharding.state_shardings(params, mesh)), *batch


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "length"), [("full", 7), ("full", 6), ("none", 7), ("dots", 7)])
def test_tokens_over_tensor_change_no_value_and_no_gradient(x64, remat, length):
  """Rows of 6 + 3·6 = 24 tokens split over two devices, those of 6 + 3·5 = 21 do not."""
  dtypes = dict(compute_dtype="float64", param_dtype="float64")
  config = dataclasses.replace(CONFIG, remat=remat, **dtypes)
  one, many = sharding.make_mesh(), sharding.make_mesh(data=2, fsdp=2, tensor=2)
  expected, found = (
    sharding.to_host(gradient_of_hidden(config, mesh)(*training_inputs(config, mesh, length)))
    for mesh in (one, many)
  )
  assert relative_distance(found, expected) < 1e-13


@pytest.mark.slow
@pytest.mark.usefixtures("no_compilation_cache")
def test_blocks_keep_their_own_tokens_for_the_backward_pass():
  """The layers' inputs, stacked by the loop, are f32[2 layers, P / 4, L / 2, D] on every device."""
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  config = dataclasses.replace(CONFIG, remat="full")
  arguments = training_inputs(config, mesh, 7)
  hlo = gradient_of_hidden(config, mesh).lower(*arguments).compile().as_text()
  stacked = lambda length: f"f32[2,2,{length},48]"
  assert stacked(12) in hlo and stacked(24) not in hlo


# --- generation -----------------------------------------------------------------------------------


def engine_on(sizes, config=CONFIG, parameters=None):
  """An engine on a mesh, and its parameters as shapes with shardings, those of another mesh."""
  mesh = sharding.make_mesh(**sizes)
  trained = sharding.make_mesh(**parameters or sizes)
  model = transformer(config, sharding.make_layout(mesh, trained))
  engine = EnginePrograms(
    model,
    Sampling(),
    slots=8,
    prefill_rows=P,
    max_prompt_length=S,
    max_new_tokens=T,
    stop_tokens=(1,),
    pad_token=0,
  )
  params = jax.eval_shape(model.init, jax.random.key(0))
  return engine, jax.tree.map(placed, params, sharding.state_shardings(params, trained))


def placed(shape, sharding):
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def gathers(lowered, *, larger_than):
  """Shapes of the all-gathers of a program that have more elements."""
  hlo = lowered.compile().as_text()
  shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", hlo)
  sizes = [tuple(map(int, shape.split(","))) for shape in shapes if shape]
  return [size for size in sizes if np.prod(size) > larger_than]


@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(
  ("sizes", "tied_head"),
  [pytest.param(dict(fsdp=8), False, marks=pytest.mark.slow), (dict(fsdp=4, tensor=2), True)],
)
def test_each_weight_is_gathered_once_and_none_by_a_burst(sizes, tied_head):
  """A layer at a time, before the first burst.

  Only the tokens' own small integers may cross the tensor axis in a burst, and nothing of a cache
  crosses at all.
  """
  config = CONFIG if tied_head else TransformerConfig(**vars(CONFIG) | {"tied_head": False})
  engine, params = engine_on(sizes, config)
  emitted = engine.settings.slots * T  # the host reads it
  assert gathers(engine.lower_burst(params, {}), larger_than=emitted) == []
  take = engine.programs.take_layer.lower(params, {}, rows_of(1, config.kinds))
  assert gathers(take, larger_than=0) == []
  taken = jax.tree.map(placed, take.out_info, take.compile().output_shardings)
  of_layer = gathers(engine.programs.load_layer[config.kinds[1]].lower(taken), larger_than=P * S)
  assert len(of_layer) == 7, of_layer
  others = gathers(engine.programs.load_others.lower(params, {}), larger_than=P * S)
  assert len(others) == (1 if tied_head else 2), others


def test_a_cache_has_a_key_value_head_per_device_of_tensor():
  for tensor, heads in ((1, 2), (2, 2), (4, 4), (8, 2)):  # of 4 query heads
    assert cached_heads(CONFIG.heads[0], tensor) == heads


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [
    dict(data=2, fsdp=2, tensor=2),
    dict(data=2, tensor=4),  # a copy of every key/value head
    dict(tensor=8),  # more than there are heads
  ],
  ids=str,
)
def test_generation_is_that_of_one_device(sizes):
  """With three times as many responses as slots."""
  rng = np.random.default_rng(0)
  prompts = Prompts(
    tokens=rng.integers(2, V, (P, S)).astype(np.int32),
    lengths=rng.integers(1, S + 1, P).astype(np.int32),
  )
  results = []
  for mesh_sizes in (dict(), sizes):
    engine, abstract = engine_on(mesh_sizes)
    params = jax.jit(
      transformer(CONFIG).init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract)
    )(jax.random.key(0))
    results.append(sample(engine, params, {}, prompts, jax.random.key(1), G))
  one, many = results
  np.testing.assert_array_equal(many.tokens, one.tokens)
  np.testing.assert_allclose(many.behavior_logprobs, one.behavior_logprobs, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Chip:
  """As much of a device of several TPU slices as a mesh asks for."""

  id: int
  slice_index: int
  process_index: int
  platform: str = "cpu"
  device_kind: str = "cpu"


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(2, 4, 1), (2, 2, 2), (4, 2, 1), (8, 1, 1)])
def test_only_data_goes_over_slices(data, fsdp, tensor):
  chips = [Chip(id=i, slice_index=i % 2, process_index=i % 2) for i in range(8)]
  mesh = sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=chips)
  assert tuple(mesh.shape.values()) == (data, fsdp, tensor)
  assert {chip.id for chip in mesh.devices.flat} == set(range(8))
  for at_data in mesh.devices:  # everything else is within a slice
    assert len({chip.slice_index for chip in at_data.flat}) == 1
  halves = mesh.devices.reshape(2, -1)
  assert [{chip.slice_index for chip in half} for half in halves] == [{0}, {1}]


def test_data_that_slices_do_not_divide_is_refused():
  chips = [Chip(id=i, slice_index=i % 2, process_index=i % 2) for i in range(8)]
  with pytest.raises(ValueError, match=r"config\.mesh\.data = 1 on 2 slices: .* a multiple of 2"):
    sharding.make_mesh(fsdp=8, devices=chips)


@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(
  ("trained", "generating"),
  [
    (dict(fsdp=8), dict(data=4, tensor=2)),
    pytest.param(dict(fsdp=4, tensor=2), dict(data=2, tensor=4), marks=pytest.mark.slow),
  ],
)
def test_layers_move_into_another_layout_one_by_one(trained, generating):
  """A device holds its part of a layer afterwards, and no complete layer on its way."""
  config = TransformerConfig(**vars(CONFIG) | {"num_layers": 16})
  engine, params = engine_on(generating, config, parameters=trained)
  take = engine.programs.take_layer.lower(params, {}, rows_of(1, config.kinds))
  taken = jax.tree.map(placed, take.out_info, take.compile().output_shardings)
  layer = engine.programs.load_layer[config.kinds[1]].lower(taken).compile().memory_analysis()
  size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
  whole = size(params["blocks"]) / config.num_layers
  part = whole / generating["tensor"]
  assert part <= layer.output_size_in_bytes < part + 0.1 * whole  # norms are not split
  assert layer.temp_size_in_bytes < 0.5 * whole
  taking = take.compile().memory_analysis()
  assert taking.output_size_in_bytes + taking.temp_size_in_bytes < 0.5 * whole  # an eighth, twice


@pytest.mark.slow
def test_sampling_has_a_layout_of_its_own():
  """Trained with fsdp=8, sampled with data=4 and tensor=2: moved once, with no copy on a device."""
  config = tiny.config(
    mesh=dict(data=1, fsdp=8, tensor=1),
    generation_mesh=dict(data=4, fsdp=0, tensor=2, same_devices=True),
    evaluation__batch_prompts=8,
  )
  parts, one = build(config), build(tiny.config())
  assert dict(parts.placement.generation_mesh.shape) == dict(data=4, fsdp=1, tensor=2)
  init = lambda parts: jax.jit(
    parts.model.init, out_shardings=jax.tree.map(lambda x: x.sharding, parts.placement.base)
  )(jax.random.key(0))
  prompts = one.encode([one.task.train[i] for i in range(8)])
  engine = parts.programs.engine
  assert engine.settings.model.mesh.shape["tensor"] == 2
  loaded = engine.load(init(parts), {})
  assert loaded["blocks"][0]["query"].sharding.spec == PartitionSpec(None, "tensor")
  ours, expected = (
    sample(x.programs.engine, init(x), {}, prompts, jax.random.key(1), 4) for x in (parts, one)
  )
  np.testing.assert_array_equal(ours.tokens, expected.tokens)
  np.testing.assert_allclose(ours.behavior_logprobs, expected.behavior_logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("same_devices", [True, False])
def test_the_sampler_is_compared_where_no_key_value_head_is_split(same_devices):
  """Two key/value heads, sampled with tensor=4, whose devices have copies of them."""
  sizes = dict(data=1, fsdp=1, tensor=4, same_devices=same_devices)
  parts = build(tiny.config(mesh=dict(data=1, fsdp=4, tensor=1), generation_mesh=sizes))
  placement = parts.placement
  expected = dict(data=1, fsdp=4, tensor=1) if same_devices else dict(data=1, fsdp=2, tensor=2)
  assert dict(placement.compared_mesh.shape) == expected
  params = jax.jit(
    parts.model.init, out_shardings=jax.tree.map(lambda x: x.sharding, placement.base)
  )(jax.random.key(0))
  shape = parts.shape
  rng = np.random.default_rng(0)
  mask = np.arange(shape.max_response_length) < rng.integers(
    1, shape.max_response_length + 1, (shape.prompts, shape.group_size, 1)
  )
  batch = make_host_batch(
    mask.astype(np.float32),
    prompts=random_prompts(rng, shape.prompts, shape.max_prompt_length, 90),
    tokens=rng.integers(3, 90, mask.shape).astype(np.int32),
  )
  logprobs, _ = parts.programs.score(params, {}, placement.pack_to_devices(batch))
  batch = dataclasses.replace(batch, behavior_logprobs=np.asarray(logprobs))
  sampled = make_sync(placement, parts.schedule)(params)
  few = jax.tree.map(lambda x: x[: placement.compared_groups - 1], batch)
  mean, most, _ = parts.programs.behavior_gap(
    sampled, {}, placement.pack_to_compare(few), sampling=Sampling()
  )
  assert 0 <= mean <= most < 1e-5
  off = dataclasses.replace(few, behavior_logprobs=few.behavior_logprobs - 1)
  mean, most, _ = parts.programs.behavior_gap(
    sampled, {}, placement.pack_to_compare(off), sampling=Sampling()
  )
  np.testing.assert_allclose([mean, most], 1, atol=1e-4)


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    (dict(data=3, tensor=2), r"3·1·2 = 6, but with same_devices = True it must be 8, the number"),
    (dict(data=1, tensor=8), r"tensor = 8 does not split 4 query heads and 2.* one of \[1, 2, 4\]"),
  ],
)
def test_a_layout_that_does_not_fit_is_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    build(
      tiny.config(
        mesh__fsdp=8,
        generation_mesh=dict(fsdp=1, same_devices=True) | sizes,
        evaluation__batch_prompts=8,
      )
    )
