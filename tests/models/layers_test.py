"""Mixtures in which some layers have an MLP: their loops, numbers of layers, and values."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import updates
from oracles.sampling import sample
from oracles.updates import relative_distance

from rlvr_jax.geometry import GramContext, per_rollout_features
from rlvr_jax.models import flops, lora, peft
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import load_params, save_checkpoint
from rlvr_jax.models.huggingface_config import checkpoint_config, config_fields
from rlvr_jax.models.safetensors import open_checkpoint
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.layers import layers_in, rows_of, split_into_loops, take_rows
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts, Sampling

V, S, T, G = 32, 6, 5, 3
DENSE, SPARSE = False, True
CONFIG = TransformerConfig(
  vocab_size=V,
  width=16,
  num_layers=5,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=20,
  qk_norm=True,
  num_experts=5,
  experts_per_token=2,
  expert_width=12,
  sparse_layers=(DENSE, SPARSE, DENSE, SPARSE, SPARSE),
  normalized_expert_weights=True,
)
# One loop over pairs; a loop of its own for the first layers, and for the last one.
PATTERNS = {
  "every second": (DENSE, SPARSE, DENSE, SPARSE),
  "first dense": (DENSE, SPARSE, SPARSE),
  "last dense": (SPARSE, SPARSE, DENSE),
}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def with_layers(pattern, **changes):
  return dataclasses.replace(CONFIG, sparse_layers=pattern, num_layers=len(pattern), **changes)


def test_loops_are_the_layers_in_order_and_as_few_as_can_be():
  for length in range(1, 8):
    for pattern in itertools.product((DENSE, SPARSE), repeat=length):
      loops = split_into_loops(pattern)
      assert sum((kinds * count for kinds, count in loops), ()) == pattern
      if len(set(pattern)) == 1:
        assert loops == [(pattern[:1], length)]
  assert split_into_loops((DENSE, *[SPARSE] * 40)) == [((DENSE,), 1), ((SPARSE,), 40)]
  assert split_into_loops((DENSE, SPARSE) * 9) == [((DENSE, SPARSE), 9)]


def test_a_layer_has_its_row_in_each_stack():
  kinds = CONFIG.kinds
  assert [layers_in(stack, kinds) for stack in ("all", "sparse", "dense")] == [
    [0, 1, 2, 3, 4], [1, 3, 4], [0, 2]
  ]  # fmt: skip
  stacks = dict(query=np.arange(5), gate=np.asarray([0, 2]), experts={"up": np.asarray([1, 3, 4])})
  for layer in range(5):
    rows = take_rows(stacks, rows_of(layer, kinds))
    assert rows == dict(query=layer) | (
      dict(experts={"up": layer}) if kinds[layer][1] == "sparse" else dict(gate=layer)
    )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(sparse_layers=(SPARSE,)), "sparse_layers names 1 layers, num_layers=5"),
    (dict(sparse_layers=(DENSE,) * 5), "experts in at least one layer"),
    (dict(num_experts=0, experts_per_token=0, expert_width=0), "with num_experts=0"),
  ],
)
def test_layers_that_contradict_the_network_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **changes)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  "pattern",
  [CONFIG.sparse_layers, *PATTERNS.values()],
  ids=str,
)
def test_decoding_layer_by_layer_agrees_with_the_loops(pattern):
  """The sampler, which has no loop over layers, and the trainer: log-probabilities and routes."""
  model = updates.small_model(with_layers(pattern))
  params = model.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  lengths = np.asarray([S, 3], np.int32)
  prompts = Prompts(rng.integers(4, V, (2, S)).astype(np.int32), lengths)
  settings = dict(max_prompt_length=S, max_new_tokens=T, stop_tokens=(3,), pad_token=0)
  engine = EnginePrograms(
    model, Sampling(), slots=6, prefill_rows=2, records_routes=True, **settings
  )
  rollouts = sample(engine, params, {}, prompts, jax.random.key(1), G)
  tokens = jnp.asarray(rollouts.tokens)
  hidden, routes, sums = jax.jit(model.response_routed)(
    params, jax.tree.map(jnp.asarray, prompts), tokens, None, rollouts.lengths
  )
  assert sums.shape == (sum(pattern), 5)
  logprobs, _ = token_logprobs(hidden, model.head(params), tokens, Sampling())
  sampled = np.arange(T) < rollouts.lengths[..., None]
  np.testing.assert_allclose(
    np.asarray(logprobs)[sampled], rollouts.behavior_logprobs[sampled], atol=1e-5
  )
  # A place's routes are those of the token before it.
  np.testing.assert_array_equal(
    np.asarray(routes.responses)[:, :, :-1][sampled[:, :, 1:]],
    rollouts.routes[:, :, 1:][sampled[:, :, 1:]],
  )
  np.testing.assert_array_equal(np.asarray(routes.prompts)[:, -1], rollouts.routes[:, 0, 0])


@functools.cache
def make_method(mesh=None, pattern=CONFIG.sparse_layers, **changes):
  config = with_layers(pattern, compute_dtype="float64", param_dtype="float64", **changes)
  method = updates.make_method("float64", mesh)
  return method._replace(model=updates.small_model(config, mesh))


@pytest.mark.slow
def test_the_gradient_is_that_of_finite_differences(x64):
  """Along a random direction, of every parameter, with each kind of recomputation."""
  batch = updates.make_batch(np.float64)
  params = make_method().model.init(jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  direction = tree.unflatten([rng.normal(size=leaf.shape) for leaf in leaves])
  (_, _), gradient = updates.gradient_of(make_method(), batch, params)
  slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction)))
  move = lambda step: jax.tree.map(lambda x, d: x + step * d, params, direction)
  ends = [updates.gradient_of(make_method(), batch, move(step))[0][0] for step in (1e-6, -1e-6)]
  np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, slope, rtol=1e-5)
  full = updates.gradient_of(make_method(remat="full"), batch, params)[1]
  assert relative_distance(full, gradient) < 1e-13
  assert all(
    np.all(np.any(np.asarray(g).reshape(len(g), -1), axis=1))
    for g in jax.tree.leaves(gradient["blocks"])
  )


@pytest.mark.slow
@each_pattern
def test_a_mesh_changes_no_gradient(x64, pattern):
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  batch = updates.make_batch(np.float64)
  params = make_method(pattern=pattern).model.init(jax.random.key(0))
  expected = updates.gradient_of(make_method(pattern=pattern), batch, params)
  params = jax.device_put(params, sharding.state_shardings(params, mesh))
  on_mesh = updates.in_rows(batch, rows=2, mesh=mesh)
  found = sharding.to_host(updates.gradient_of(make_method(mesh, pattern), on_mesh, params))
  assert relative_distance(found[1], expected[1]) < 1e-12


@pytest.mark.slow
def test_generation_on_a_mesh_is_that_of_one_device():
  params = updates.small_model(CONFIG).init(jax.random.key(0))
  prompts = Prompts(
    np.random.default_rng(0).integers(4, V, (6, S)).astype(np.int32), np.full(6, S, np.int32)
  )
  settings = dict(max_prompt_length=S, max_new_tokens=T, stop_tokens=(3,), pad_token=0)
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  one, many = (
    sample(
      EnginePrograms(transformer(CONFIG, layout), Sampling(), slots=8, prefill_rows=8, **settings),
      placed, {}, prompts, jax.random.key(1), G,
    )
    for layout, placed in (
      (sharding.make_layout(None), params),
      (sharding.make_layout(mesh), jax.device_put(params, sharding.state_shardings(params, mesh))),
    )
  )  # fmt: skip
  np.testing.assert_array_equal(many.tokens, one.tokens)
  np.testing.assert_allclose(many.behavior_logprobs, one.behavior_logprobs, atol=1e-5)


@pytest.mark.slow
def test_the_last_block_has_its_own_parameters_alone(x64):
  """The MLP's of a last layer without experts, and not the experts' of the layer before."""
  model = make_method(pattern=PATTERNS["last dense"]).model
  params, batch = model.init(jax.random.key(0)), updates.make_batch(np.float64)
  context = GramContext(model, 1.0)
  of = lambda parameters: per_rollout_features(params, {}, batch, context, parameters=parameters)
  norms = lambda pattern: np.sum(np.square(of(pattern)), axis=-1)
  rest = norms("blocks/(query|key|value|output|attention_norm|mlp_norm|query_norm|key_norm)")
  found, mlp = norms("last_block"), norms("blocks/(gate|up|down)$")
  assert np.all(mlp < found) and np.all(found < mlp + rest)


# --- numbers of layers ----------------------------------------------------------------------------


def load(folder, **sizes):
  config = checkpoint_config(folder)
  shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
  placed = sharding.add_shardings(shapes, sharding.make_mesh(**sizes))
  return load_params(folder, placed, config)


@pytest.mark.parametrize(
  ("fields", "layers"),
  [
    (dict(decoder_sparse_step=2), (DENSE, SPARSE, DENSE, SPARSE, DENSE)),
    (dict(mlp_only_layers=[0, 2]), CONFIG.sparse_layers),
    (dict(decoder_sparse_step=2, mlp_only_layers=[1, 9]), (DENSE, DENSE, DENSE, SPARSE, DENSE)),
    (dict(decoder_sparse_step=1, mlp_only_layers=None), None),
  ],
)
def test_layers_are_read_as_transformers_reads_them(fields, layers):
  published = dict(model_type="qwen3_moe", num_hidden_layers=5, num_experts=4)
  assert config_fields(published | fields, "config.json")["sparse_layers"] == layers


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(decoder_sparse_step=0), "decoder_sparse_step = 0"),
    (dict(decoder_sparse_step=6), "leave none of 5 layers with experts"),
    (dict(mlp_only_layers=["0"]), r"mlp_only_layers = \['0'\] is not a list of numbers"),
  ],
)
def test_layers_that_cannot_be_are_refused(fields, message):
  published = dict(model_type="qwen3_moe", num_hidden_layers=5, num_experts=4)
  with pytest.raises(ValueError, match=message):
    config_fields(published | fields, "config.json")


@each_pattern
def test_a_checkpoint_has_the_numbers_of_the_layers(tmp_path, pattern):
  config = with_layers(pattern, tied_head=True)
  params = updates.small_model(config).init(jax.random.key(0))
  save_checkpoint(tmp_path / "out", params, config, dtype="float32")
  assert checkpoint_config(tmp_path / "out") == config
  names = open_checkpoint(tmp_path / "out").keys()
  for layer, sparse in enumerate(pattern):
    assert (f"model.layers.{layer}.mlp.gate_proj.weight" in names) == (not sparse)
    assert (f"model.layers.{layer}.mlp.experts.4.down_proj.weight" in names) == sparse
  for sizes in (dict(), dict(fsdp=4, tensor=2)):
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out", **sizes), params)
  if sum(pattern) < len(pattern) - 1:  # other numbers: named before anything is read
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(mlp_only_layers=[1, 3])))
    with pytest.raises(ValueError, match=r"missing: model.layers.1.mlp.down_proj.weight"):
      load(tmp_path / "out")


def test_a_family_without_such_layers_is_not_written(tmp_path):
  config = dataclasses.replace(CONFIG, qk_norm=False)
  params = updates.small_model(config).init(jax.random.key(0))
  with pytest.raises(ValueError, match=r"nearest, mixtral, differs in .*sparse_layers"):
    save_checkpoint(tmp_path / "out", params, config)


def test_adapters_have_the_numbers_of_the_layers(tmp_path):
  base = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
  settings = lora.LoraSettings(rank=2, alpha=4.0, targets="blocks/(query|down)$")
  adapters = lora.init(jax.random.key(1), base, settings)
  assert adapters["blocks"]["down"]["a"].shape == (2, 20, 2)
  peft.save_adapters(tmp_path / "out", adapters, settings, CONFIG)
  description = json.loads((tmp_path / "out" / peft.CONFIG_FILE).read_text())
  assert description["target_modules"] == [
    "layers.0.mlp.down_proj", "layers.2.mlp.down_proj", "q_proj"
  ]  # fmt: skip
  found, _ = peft.load_adapters(tmp_path / "out", CONFIG)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  with pytest.raises(ValueError, match=r"missing are \['base_model.*layers.4.mlp.down_proj"):
    peft.load_adapters(tmp_path / "out", with_layers((SPARSE, SPARSE, DENSE, SPARSE, DENSE)))


def test_adapters_of_experts_are_refused(tmp_path):
  name = "base_model.model.model.layers.1.mlp.experts.0.down_proj.lora_{}.weight"
  safetensors = pytest.importorskip("safetensors.numpy")
  description = dict(peft_type="LORA", r=2, lora_alpha=4, target_modules=["down_proj"])
  (tmp_path / peft.CONFIG_FILE).write_text(json.dumps(description))
  pair = {name.format("A"): np.zeros((2, 12)), name.format("B"): np.zeros((16, 2))}
  safetensors.save_file(pair, tmp_path / peft.WEIGHTS_FILE)
  with pytest.raises(ValueError, match=r"experts.0.down_proj.* not only adapters of layers"):
    peft.load_adapters(tmp_path, CONFIG)


def test_flops_are_those_of_each_layer():
  count = lambda pattern: flops.forward_flops(with_layers(pattern), [4], [[3]])
  dense, sparse, both = map(
    count, ((DENSE,) * 2 + (SPARSE,), (SPARSE,) * 3, (DENSE, SPARSE, SPARSE))
  )
  np.testing.assert_allclose(both - dense, sparse - both)
  assert both != dense


def test_routes_of_other_layers_do_not_fit():
  one, other = (with_layers(x).mixture for x in ((DENSE, SPARSE, SPARSE), (SPARSE, DENSE, SPARSE)))
  assert one != other and one[:3] == other[:3] == (2, 5, 2)
  assert dataclasses.replace(CONFIG, sparse_layers=None).mixture == (5, 5, 2)
