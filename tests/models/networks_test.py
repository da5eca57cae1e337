"""What holds of every kind of network: one policy in sampler, trainer, copies and on meshes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import networks, updates
from oracles.networks import NETWORKS, on_mesh, sampled_and_scored
from oracles.sampling import make_requests, sample, serve
from oracles.updates import relative_distance

from rlvr_jax.geometry import GramContext
from rlvr_jax.geometry.per_rollout import num_selected
from rlvr_jax.models import lora, peft
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.linear import merge_low_rank
from rlvr_jax.models.quantized import FORMATS, adapt_to_quantized, dequantize, quantize
from rlvr_jax.models.safetensors import SINGLE
from rlvr_jax.ops import delta_rule
from rlvr_jax.train.cluster import sharding
from rlvr_jax.update.accumulate import update_gradient
from rlvr_jax.update.objective import estimate_coefficients

SIZES = dict(data=2, fsdp=2, tensor=2)
slow = pytest.mark.slow


def each_network(*names, quick=()):
  """Parametrizes by networks of these names, or all; those that are not quick are slow."""
  names = names or (*NETWORKS,)
  cases = [pytest.param(NETWORKS[n], id=n, marks=() if n in quick else slow) for n in names]
  return pytest.mark.parametrize("config", cases)


@pytest.fixture(autouse=True, scope="module")
def short_chunks():
  """So that the rows of gated DeltaNets have several."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(delta_rule, "CHUNK", 8)
    yield


# --- sampling -------------------------------------------------------------------------------------


@each_network(quick=("experts at first",))
def test_the_sampler_has_the_trainers_probabilities(config):
  """And a mixture's routes: those of a place are recorded with the token after it."""
  params, prompts = networks.params_of(config), networks.random_prompts(2, [networks.S, 3])
  has_experts = config.experts is not None
  engine = networks.make_engine(updates.small_model(config), records_routes=has_experts)
  rollouts = sample(engine, params, {}, prompts, jax.random.key(1), 3)
  recorded, scored = sampled_and_scored(config, params, prompts, rollouts)
  # A Gemma 4 with random factors has larger sums, which differ more by their order.
  bound = 1e-4 if config.full_head_dim else 1e-5
  np.testing.assert_allclose(recorded, scored, atol=bound)
  if not has_experts:
    return
  model = updates.small_model(config)
  _, routes, sums = jax.jit(model.response_routed)(
    params, jax.tree.map(jnp.asarray, prompts), rollouts.tokens, None, rollouts.lengths
  )
  assert len(sums) == sum(config.sparse_layers or (True,) * config.num_layers)
  later = (np.arange(1, 5) < rollouts.lengths[..., None])[..., None, None]
  found = np.where(later, routes.responses[:, :, :-1], 0)
  np.testing.assert_array_equal(found, np.where(later, rollouts.routes[:, :, 1:], 0))
  np.testing.assert_array_equal(routes.prompts[:, -1], rollouts.routes[:, 0, 0])


@slow
def test_a_cache_in_8_bits_is_near_with_other_heads_in_full_layers():
  config, prompts = NETWORKS["longer full heads"], networks.random_prompts(2, [networks.S, 3])
  params = networks.params_of(config)
  engine = networks.make_engine(updates.small_model(config), cache_format="int8")
  rollouts = sample(engine, params, {}, prompts, jax.random.key(1), 3)
  recorded, scored = sampled_and_scored(config, params, prompts, rollouts)
  assert 0 < np.abs(recorded - scored).mean() < 0.05


@each_network("delta mixture", "experts")
def test_the_order_of_requests_changes_no_bit(config):
  """Slots are refilled at other times, beside other rollouts; experts get other numbers of rows."""
  engine = networks.make_engine(updates.small_model(config), slots=3, prefill_rows=4)
  prompts = networks.random_prompts(7, 1 + np.arange(7) % networks.S)
  asked = make_requests(prompts, jax.random.key(5), 2)
  in_order = lambda order: serve(engine, networks.params_of(config), [asked[i] for i in order])
  expected = in_order(range(7))
  assert len({int(n) for group in expected.values() for n in group.lengths}) > 1
  for seed in range(3):
    found = in_order(np.random.default_rng(seed).permutation(7))
    for i in range(7):
      jax.tree.map(np.testing.assert_array_equal, found[i], expected[i])


# --- meshes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SIZES, dict(fsdp=2, tensor=4)], ids=str)
@each_network("delta", "delta mixture", "experts", "some experts", "full heads")
def test_generation_on_a_mesh_is_that_of_one_device(x64, config, sizes):
  """Also of fewer key heads than devices that share a layer, which then have copies.

  In float64: float32 differs by the order of sums, by 1.5e-5 with a Gemma 4's random factors.
  """
  config = dataclasses.replace(config, **networks.FLOAT64)
  params, prompts = networks.params_of(config), networks.random_prompts(6)
  mesh = sharding.make_mesh(**sizes)
  one, many = (
    sample(
      networks.make_engine(transformer(config, layout)), placed, {}, prompts, jax.random.key(1), 3
    )
    for layout, placed in (
      (sharding.make_layout(None), params),
      (sharding.make_layout(mesh), on_mesh(params, mesh)),
    )
  )
  np.testing.assert_array_equal(many.tokens, one.tokens)
  np.testing.assert_allclose(many.behavior_logprobs, one.behavior_logprobs, atol=1e-11)


@functools.cache
def padded(config):
  """(batch, parameters, gradient) of padded rollouts on one device, with nothing recomputed."""
  batch = updates.make_batch(np.float64)
  method = networks.make_method(config)
  params = networks.params_of(method.model.config)
  return batch, params, updates.gradient_of(method, batch, params)


@each_network()
@pytest.mark.parametrize("rows", [1, 2])
def test_a_mesh_changes_no_gradient(x64, config, rows):
  """In one micro-batch or several, on meshes that do not divide all heads too."""
  batch, params, expected = padded(config)
  mesh = sharding.make_mesh(**(SIZES if rows == 2 else dict(fsdp=4, tensor=2)))
  packed = updates.in_rows(batch, rows=rows, length=24, mesh=mesh, several=None)
  method = networks.make_method(config, mesh)
  found = sharding.to_host(updates.gradient_of(method, packed, on_mesh(params, mesh)))
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-11)
  assert relative_distance(found[1], expected[1]) < 1e-11


@each_network("plain", "delta", "delta mixture", "experts", "some experts", "longer full heads")
@pytest.mark.parametrize(
  ("rows", "remat", "unroll_layers"), [(10**6, "none", 1), (2, "dots", 1), (2, "full", 2)]
)
def test_rows_have_the_gradient_of_padded_rollouts(x64, config, rows, remat, unroll_layers):
  """In micro-batches too, whatever the backward pass computes anew."""
  batch, params, expected = padded(config)
  packed = updates.in_rows(batch, rows=rows, length=24, several=rows == 2)
  method = networks.make_method(
    dataclasses.replace(config, remat=remat, unroll_layers=unroll_layers)
  )
  found = updates.gradient_of(method, packed, params)
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-11)
  assert relative_distance(found[1], expected[1]) < 1e-11


@each_network("delta", "some experts", "longer full heads")
def test_the_gradient_is_that_of_finite_differences(x64, config):
  """Along a random direction, of every parameter that is trained."""
  batch, params, (_, gradient) = padded(config)
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  direction = tree.unflatten([rng.normal(size=leaf.shape) for leaf in leaves])
  if "layer_scale" in direction["blocks"]:
    direction["blocks"]["layer_scale"] *= 0  # constants
  slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction)))
  move = lambda step: jax.tree.map(lambda x, d: x + step * d, params, direction)
  method = networks.make_method(config)
  ends = [updates.gradient_of(method, batch, move(step))[0][0] for step in (1e-6, -1e-6)]
  np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, slope, rtol=1e-5)


# --- copies in 8 bits, adapters -------------------------------------------------------------------


@each_network("delta mixture", "experts")
@pytest.mark.parametrize("format", FORMATS)
def test_recorded_logprobs_are_those_of_the_rounded_policy(config, format):
  pytest.importorskip("qwix", reason="the extra `quantized` needs flax 0.12")
  model = adapt_to_quantized(updates.small_model(config), format, decode_rounded=True)
  copy = jax.jit(quantize, static_argnums=1)(networks.params_of(config), format)
  prompts = networks.random_prompts(4)
  rollouts = sample(networks.make_engine(model), copy, {}, prompts, jax.random.key(1), 2)
  rounded = jax.jit(dequantize)(copy)
  recorded, scored = sampled_and_scored(config, rounded, prompts, rollouts)
  np.testing.assert_allclose(recorded, scored, atol=1e-5)


SETTINGS = lora.LoraSettings(rank=2, alpha=5.0)


def random_adapters(config, settings=SETTINGS):
  base = jax.eval_shape(updates.small_model(config).init, jax.random.key(0))
  shapes = jax.eval_shape(lambda key: lora.init(key, base, settings), jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype) * 0.2, shapes)


@each_network("plain", "delta", "delta mixture", "experts", quick=("plain",))
def test_merged_sampling_agrees_with_unmerged_scoring(config):
  adapters, base = random_adapters(config), networks.params_of(config)
  adapted = lora.adapt(updates.small_model(config), SETTINGS)
  prompts = networks.random_prompts(4)
  rollouts = sample(networks.make_engine(adapted), adapters, base, prompts, jax.random.key(1), 2)
  whole = lora.combine(adapters, base, SETTINGS)
  recorded, scored = sampled_and_scored(config, whole, prompts, rollouts)
  np.testing.assert_allclose(recorded, scored, atol=1e-5)
  _, of_base = sampled_and_scored(config, base, prompts, rollouts)
  assert np.abs(of_base - recorded).mean() > 0.05


@each_network("plain", "delta", "longer full heads")
def test_gradients_of_adapters_are_the_chain_rule_of_merged_kernels(x64, config):
  """dA = s·dW·Bᵀ and dB = s·Aᵀ·dW at W + s·A·B."""
  batch, base, _ = padded(config)
  method, scale = networks.make_method(config), SETTINGS.scale
  adapters = jax.tree.map(lambda x: x.astype(np.float64), random_adapters(config))
  merged = merge_low_rank(lora.combine(adapters, base, SETTINGS))
  whole = lora.flatten(updates.gradient_of(method, batch, merged)[1]["blocks"])
  adapted = method._replace(model=lora.adapt(method.model, SETTINGS))

  @jax.jit
  def gradient(adapters, base):
    estimate = functools.partial(estimate_coefficients, (), method=adapted)
    return update_gradient(adapters, base, batch, estimate, jax.random.key(0), method=adapted)

  found = lora.flatten(gradient(adapters, base)[1]["blocks"])
  for name, pair in lora.flatten(adapters["blocks"]).items():
    dW = np.asarray(whole[name])
    dA, dB = np.einsum("lde,lre->ldr", dW, pair["b"]), np.einsum("ldr,lde->lre", pair["a"], dW)
    np.testing.assert_allclose(found[name]["a"], scale * dA, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(found[name]["b"], scale * dB, rtol=1e-7, atol=1e-12)


@pytest.fixture(scope="module")
def base_tensors(tmp_path_factory):
  """(network) → its published tensors, without adapters."""
  numpy = pytest.importorskip("safetensors.numpy")

  @functools.cache
  def tensors(config):
    folder = tmp_path_factory.mktemp("base") / "out"
    save_checkpoint(folder, networks.params_of(config), config, dtype="float32")
    return numpy.load_file(folder / SINGLE)

  return tensors


# As GLM-4: rows of queries and keys have another order in files, and gate and up are one tensor.
FUSED = dataclasses.replace(updates.CONFIG, head_dim=6, post_norm=True, rotary_width=4)


@pytest.mark.parametrize(
  ("config", "targets", "modules"),
  [
    (
      networks.DELTA,
      "",
      "q_proj k_proj v_proj o_proj in_proj_qkv in_proj_z out_proj gate_proj up_proj down_proj",
    ),
    (networks.DELTA, "delta/(query|value|strength|output)|blocks/query", None),
    (FUSED, "blocks/(query|output|gate|up)$", None),
    (FUSED, "blocks/(key|up)$", None),
    (
      networks.SOME_EXPERTS,
      "blocks/(query|down)$",
      "layers.0.mlp.down_proj layers.2.mlp.down_proj q_proj",
    ),
    (networks.FULL_HEADS, r"blocks/(full/)?query$", "q_proj"),
    (
      networks.FULL_HEADS,
      "blocks/full/(query|key)$",
      " ".join(f"layers.{i}.self_attn.{x}_proj" for i in (1, 3) for x in "kq"),
    ),
    (networks.FULL_HEADS, "blocks/(full/)?(value|down)$", "down_proj v_proj"),
  ],
)
def test_adapters_in_files_are_those_of_the_published_modules(
  tmp_path, base_tensors, config, targets, modules
):
  """W + (α/R)·B·A of the files is the published tensor of the merged network."""
  numpy = pytest.importorskip("safetensors.numpy")
  settings = dataclasses.replace(SETTINGS, **(dict(targets=targets) if targets else {}))
  adapters, base = random_adapters(config, settings), networks.params_of(config)
  merged = merge_low_rank(lora.combine(adapters, base, settings))
  save_checkpoint(tmp_path / "merged", merged, config, dtype="float32")
  peft.save_adapters(tmp_path / "adapter", adapters, settings, config)
  before, after = base_tensors(config), numpy.load_file(tmp_path / "merged" / SINGLE)
  description = json.loads((tmp_path / "adapter" / peft.CONFIG_FILE).read_text())
  files = numpy.load_file(tmp_path / "adapter" / peft.WEIGHTS_FILE)
  for name in before:
    at = f"base_model.model.{name.removesuffix('.weight')}"
    a, b = files.pop(f"{at}.lora_A.weight", None), files.pop(f"{at}.lora_B.weight", None)
    module = at.split(".")[-1]
    rank = description.get("rank_pattern", {}).get(module, 2)
    scale = description.get("alpha_pattern", {}).get(module, 5.0) / rank
    assert a is None or len(a) == rank
    change = 0 if a is None else scale * (b @ a)
    np.testing.assert_allclose(after[name], before[name] + change, atol=1e-6, err_msg=name)
  assert not files
  if modules is not None:
    assert sorted(description["target_modules"]) == sorted(modules.split())
  found, again = peft.load_adapters(tmp_path / "adapter", config)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  assert (again.rank, again.alpha) == (2, 5.0)


@pytest.mark.parametrize(
  ("config", "shared", "own", "layers"),
  [
    # Not of attention in the layer before, nor of experts there.
    (networks.DELTA, "attention_norm|mlp_norm|gate|up|down", "delta", 2),
    (
      NETWORKS["experts at first"],
      "attention_norm|mlp_norm|query|key|value|output|query_norm|key_norm",
      "gate|up|down",
      1,
    ),
  ],
)
def test_the_last_block_has_its_own_parameters_alone(config, shared, own, layers):
  context, params = GramContext(updates.small_model(config), 1.0), networks.params_of(config)
  count = lambda parameters: num_selected(params, {}, context, parameters=parameters)
  of_own = f"blocks/({own})" + ("$" if own != "delta" else "")
  expected = count(f"blocks/({shared})/?(scale)?$") // 3 + count(of_own) // layers
  assert count("last_block") == expected


@pytest.mark.parametrize(
  ("config", "kernels"),
  [
    (networks.NETWORKS["plain"], "down gate key output query up value"),
    (
      networks.DELTA,
      "delta/gate delta/key delta/output delta/query delta/value"
      " down gate key output output_gate query up value",
    ),
    (networks.EXPERTS, "key output query value"),
    (
      networks.FULL_HEADS,
      "down full/key full/output full/query gate key output query up value",
    ),
  ],
)
def test_adapters_are_of_the_projections_and_sharded_as_these(config, kernels):
  base = jax.eval_shape(updates.small_model(config).init, jax.random.key(0))
  assert sorted(lora.target_kernels(base, SETTINGS)) == kernels.split()
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  of = lambda tree: lora.flatten(sharding.state_shardings(tree, mesh)["blocks"])
  adapters = jax.eval_shape(functools.partial(random_adapters, config))
  both = (adapters, optax.adamw(1e-3).init(adapters)[0].mu)
  for pairs in map(of, both):
    for name, pair in pairs.items():
      _, rows, columns = of(base)[name].spec
      assert {rows, columns} == {"fsdp", "tensor"}
      assert pair["a"].spec[1] == rows and pair["b"].spec[2] == columns


@pytest.mark.parametrize(
  ("config", "targets", "message"),
  [
    (networks.DELTA, "taps|log_rate|decay_bias|scale", "matches no kernel"),
    (networks.EXPERTS, "gate", "adapters of experts"),
  ],
)
def test_adapters_of_other_parameters_are_refused(config, targets, message):
  base = jax.eval_shape(updates.small_model(config).init, jax.random.key(0))
  with pytest.raises(ValueError, match=message):
    lora.target_kernels(base, dataclasses.replace(SETTINGS, targets=targets))
