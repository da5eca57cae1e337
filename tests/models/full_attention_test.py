"""Networks in which full layers have other heads than sliding ones: rows, sampler and sizes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from oracles import updates
from oracles.flops import product_flops
from oracles.rows import lay_rows
from oracles.sampling import sample
from oracles.updates import relative_distance

from rlvr_jax.models import lora, peft
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.memory import activation_bytes
from rlvr_jax.models.rotary import PartialFrequencies
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.logprobs import head_logits, token_logprobs
from rlvr_jax.rollouts.decoder import token_bytes
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.checks import check_heads, sampling_splits
from rlvr_jax.types import Prompts, Sampling
from rlvr_jax.update.optimizer import adamw, lion

V, S, T, G = 32, 6, 5, 3
SLIDES, FULL = True, False
# As Gemma 4, with a loop over both kinds of layers.
CONFIG = TransformerConfig(
  vocab_size=V,
  width=16,
  num_layers=4,
  num_heads=8,
  num_kv_heads=4,
  head_dim=4,
  mlp_width=20,
  activation="gelu_tanh",
  rope_theta=100.0,
  rope_scaling=PartialFrequencies(part=0.5),
  sliding_rope_theta=10.0,
  sliding_layers=(SLIDES, FULL) * 2,
  sliding_window=3,
  full_head_dim=12,
  full_kv_heads=2,
  full_keys_as_values=True,
  value_norm=True,
  qk_norm=True,
  post_norm=True,
  layer_scale=True,
  scaled_embedding=True,
  query_scale=1.0,
  final_soft_cap=5.0,
)
# A loop whose layers are two in one stack and one in the other.
LONGER = dict(sliding_layers=(SLIDES, SLIDES, FULL) * 2, num_layers=6)


def random_params(config, seed=0):
  """Of the parameters' shapes, with factors, norms and kernels that are none of them 1."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
  draw = lambda x: rng.normal(size=x.shape) * 0.3 + (x.ndim < 3)
  params = jax.tree.map(lambda x: jnp.asarray(draw(x), x.dtype), shapes)
  params["embedding"] = params["embedding"] - 1
  return params


def plain_hidden(c, params, tokens):
  """Final states [L, D] of one sequence, layer by layer."""
  root = lambda x: jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
  norm = lambda x, weights: x / root(x) * weights["scale"]
  position = jnp.arange(len(tokens))
  distance = position[:, None] - position
  x = params["embedding"][tokens] * 4.0
  stacks, seen = params["blocks"], {SLIDES: 0, FULL: 0}
  for layer, slides in enumerate(c.sliding_layers):
    of = stacks if slides else stacks["full"]
    row, H, K = seen[slides], *((4, 4) if slides else (12, 2))
    seen[slides] += 1
    names = [n for n in ("query", "key", "value", "output", "query_norm", "key_norm") if n in of]
    a = jax.tree.map(lambda stacked, row=row: stacked[row], {name: of[name] for name in names})
    rest = {name: stacks[name] for name in stacks if name not in (*names, "full")}
    w = jax.tree.map(lambda stacked, layer=layer: stacked[layer], rest)
    # Of full layers half of the 6 pairs (i, i + 6) rotate, with the frequencies of all 6.
    frequencies = 10.0 ** -(np.arange(2) / 2) if slides else 100.0 ** -(np.arange(6) / 6)
    frequencies = frequencies if slides else frequencies * (np.arange(6) < 3)

    def rotated(head, frequencies=frequencies, H=H):
      pairs = head[..., : H // 2] + 1j * head[..., H // 2 :]
      turned = pairs * jnp.exp(1j * position[:, None] * frequencies)
      return jnp.concatenate([turned.real, turned.imag], axis=-1)

    normed = norm(x, w["attention_norm"])
    queries, keys = normed @ a["query"], normed @ a["key"]
    values = normed @ a["value"] if "value" in a else keys
    visible = (distance >= 0) & (distance < (3 if slides else 99))
    of_heads = lambda y, H=H: jnp.swapaxes(y.reshape(len(y), -1, H), 0, 1)
    queries = rotated(norm(of_heads(queries), a["query_norm"]))
    keys = rotated(norm(of_heads(keys), a["key_norm"]))
    values = of_heads(values) / root(of_heads(values))
    keys, values = (jnp.repeat(y, 8 // K, axis=0) for y in (keys, values))
    scores = jnp.where(visible, queries @ jnp.swapaxes(keys, 1, 2), -jnp.inf)
    heads = jnp.swapaxes(jax.nn.softmax(scores, axis=-1) @ values, 0, 1)
    x = x + norm(heads.reshape(len(tokens), -1) @ a["output"], w["post_attention_norm"])
    normed = norm(x, w["mlp_norm"])
    gate = jax.nn.gelu(normed @ w["gate"], approximate=True)
    x = x + norm((gate * (normed @ w["up"])) @ w["down"], w["post_mlp_norm"])
    x = x * w["layer_scale"]
  return norm(x, params["final_norm"])


@pytest.mark.parametrize(
  "changes",
  [
    dict(full_keys_as_values=False),
    pytest.param(dict(sliding_layers=(SLIDES, FULL), num_layers=2), marks=pytest.mark.slow),
    pytest.param(dict(remat="full", **LONGER), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_rows_and_their_gradients_are_those_of_the_plain_formulas(x64, changes):
  """But the factors of layers get none, since they are not trained."""
  config = dataclasses.replace(CONFIG, compute_dtype="float64", param_dtype="float64", **changes)
  model, params = transformer(config), random_params(config)
  tokens = np.random.default_rng(0).integers(0, V, (2, 7))
  rows = lay_rows(7, [(2, [5])], [(4, [3])], alignment=1)

  def gradient(hidden):
    return jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(hidden(p)))))(params)

  found = gradient(lambda params: model.row_hidden(params, tokens, rows))
  plain = jax.vmap(functools.partial(plain_hidden, config), in_axes=(None, 0))
  expected = gradient(lambda params: plain(params, tokens))
  factors = [gradient["blocks"].pop("layer_scale") for _, gradient in (found, expected)]
  assert not np.any(factors[0]) and np.all(factors[1])
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)
  assert all(np.any(x != 0) for x in jax.tree.leaves(found))


@pytest.mark.parametrize("optimizer", [adamw, lion])
def test_factors_of_layers_are_not_trained(optimizer):
  params = {"blocks": {"layer_scale": jnp.full((2, 1), 0.7), "gate": jnp.ones((2, 3, 3))}}
  rule = optimizer(learning_rate=optax.constant_schedule(0.1), weight_decay=0.5)
  zeros = jax.tree.map(jnp.zeros_like, params)
  changes, _ = rule.update(zeros, rule.init(params), params)
  assert not np.any(changes["blocks"]["layer_scale"]) and np.all(changes["blocks"]["gate"])


def make_engine(config, layout, **settings):
  sizes = dict(max_prompt_length=S, max_new_tokens=T, stop_tokens=(3,), pad_token=0)
  return EnginePrograms(transformer(config, layout), Sampling(), **sizes, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["", "int8"])
def test_the_sampler_has_the_trainers_probabilities(cache_format):
  config = dataclasses.replace(CONFIG, **LONGER)
  params = random_params(config)
  rng = np.random.default_rng(0)
  prompts = Prompts(rng.integers(4, V, (2, S)).astype(np.int32), np.asarray([S, 3], np.int32))
  engine = make_engine(
    config, sharding.make_layout(None), slots=6, prefill_rows=2, cache_format=cache_format
  )
  rollouts = sample(engine, params, {}, prompts, jax.random.key(1), G)
  tokens, model = jnp.asarray(rollouts.tokens), transformer(config)
  hidden = jax.jit(model.response_hidden)(params, jax.tree.map(jnp.asarray, prompts), tokens)
  logprobs, _ = token_logprobs(hidden, model.head(params), tokens, Sampling())
  sampled = np.arange(T) < rollouts.lengths[..., None]
  difference = np.abs(np.asarray(logprobs) - rollouts.behavior_logprobs)[sampled]
  if cache_format:
    assert 0 < difference.mean() < 0.05
  else:
    assert difference.max() < 1e-4


# --- devices --------------------------------------------------------------------------------------


@functools.cache
def make_method(mesh=None):
  config = dataclasses.replace(
    CONFIG, compute_dtype="float64", param_dtype="float64", remat="dots", **LONGER
  )
  method = updates.make_method("float64", mesh)
  return method._replace(model=updates.small_model(config, mesh))


@pytest.mark.slow
def test_a_mesh_changes_no_gradient(x64):
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  batch = updates.make_batch(np.float64)
  params = random_params(make_method().model.config)
  expected = updates.gradient_of(make_method(), batch, params)
  placed = jax.device_put(params, sharding.state_shardings(params, mesh))
  assert placed["blocks"]["full"]["query"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
  assert placed["blocks"]["full"]["output"].sharding.spec == PartitionSpec(None, "tensor", "fsdp")
  on_mesh = updates.in_rows(batch, rows=2, mesh=mesh)
  found = sharding.to_host(updates.gradient_of(make_method(mesh), on_mesh, placed))
  assert relative_distance(found[1], expected[1]) < 1e-12


@pytest.mark.slow
def test_generation_on_a_mesh_is_that_of_one_device():
  """With 4 devices that share a layer, those of full layers have copies of its 2 key heads."""
  params = random_params(CONFIG)
  prompts = Prompts(
    np.random.default_rng(0).integers(4, V, (6, S)).astype(np.int32), np.full(6, S, np.int32)
  )

  def generate(layout, params):
    engine = make_engine(CONFIG, layout, slots=8, prefill_rows=8)
    return sample(engine, params, {}, prompts, jax.random.key(1), G)

  one = generate(sharding.make_layout(None), params)
  for sizes in (dict(data=2, fsdp=2, tensor=2), dict(data=2, tensor=4)):
    mesh = sharding.make_mesh(**sizes)
    placed = jax.device_put(params, sharding.state_shardings(params, mesh))
    many = generate(sharding.make_layout(mesh), placed)
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.behavior_logprobs, one.behavior_logprobs, atol=1e-5)


def test_devices_share_whole_key_heads_of_every_layer():
  mesh = lambda tensor: sharding.make_mesh(tensor=tensor)
  check_heads(CONFIG, mesh(2))
  with pytest.raises(ValueError, match=r"the network's 4 and 2 key/value heads; allowed: \[1, 2\]"):
    check_heads(CONFIG, mesh(4))
  assert [n for n in range(1, 17) if sampling_splits(CONFIG, n)] == [1, 2, 4, 8]


# --- sizes ----------------------------------------------------------------------------------------


def test_a_cached_token_takes_the_heads_of_each_layer():
  """2 sliding layers of 4·4 keys and as many values, 2 full layers of 2·12, in float32."""
  assert token_bytes(CONFIG, 1) == 2 * 4 * 2 * (4 * 4 + 2 * 12)
  assert token_bytes(CONFIG, 2) == 2 * 4 * 2 * (2 * 4 + 12)
  assert token_bytes(CONFIG, 4) == token_bytes(CONFIG, 8) == 2 * 4 * 2 * (4 + 12)  # with copies
  assert token_bytes(CONFIG, 1, "int8") == 2 * 2 * (4 * (4 + 4) + 2 * (12 + 4))


def test_activations_are_those_of_each_layer():
  config = dataclasses.replace(CONFIG, remat="dots")
  rest = 3 * 16 + 2 * 20  # a layer's input, and results of its other products
  near, full = rest + (8 + 2 * 4) * 4, rest + (8 + 2 * 2) * 12
  assert activation_bytes(config, tokens=64, tensor=1) == 64 * 4 * (2 * (near + full) + 4 * full)


@pytest.mark.parametrize("keys_as_values", [True, False])
def test_flops_are_those_of_the_programs_products(keys_as_values):
  """All of a program's products but the scores, which it computes for keys that are not visible."""
  config = dataclasses.replace(CONFIG, full_keys_as_values=keys_as_values)
  model, length = transformer(config), 9
  rows = lay_rows(length, [(length, [])], alignment=1)

  def logits(params):
    hidden = model.row_hidden(params, jnp.zeros((1, length), jnp.int32), rows)
    return head_logits(hidden, model.head(params))

  params = jax.eval_shape(model.init, jax.random.key(0))
  program = product_flops(jax.make_jaxpr(logits)(params))
  of_keys = lambda near, far: 4 * 8 * 2 * (4 * near + 12 * far)
  program -= of_keys(length**2, length**2) - of_keys(1 + 2 + 3 * 7, length * (length + 1) / 2)
  assert program == forward_flops(config, [1], [[length]])


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(full_kv_heads=None), "full_kv_heads=None must be at least 1; set full_head_dim and"),
    (dict(full_kv_heads=3), "num_heads=8 is not a multiple of full_kv_heads=3"),
    (dict(full_head_dim=7), "full_head_dim=7 must be even"),
    (dict(rotary_width=2), "rotary_width=2 and full_head_dim are both set"),
    (dict(sliding_layers=(SLIDES,) * 4), "full_head_dim=12 is set but all layers slide"),
    (dict(full_head_dim=None, full_kv_heads=None), "full_keys_as_values is set but"),
  ],
)
def test_impossible_heads_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **changes)


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("targets", "modules"),
  [
    (r"blocks/(full/)?query$", ["q_proj"]),
    (r"blocks/full/(query|key)$", [f"layers.{i}.self_attn.{x}_proj" for x in "kq" for i in (1, 3)]),
    (r"blocks/(full/)?(value|down)$", ["down_proj", "v_proj"]),
  ],
)
def test_adapters_have_the_published_modules_of_each_layer(tmp_path, targets, modules):
  base = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
  settings = lora.LoraSettings(rank=2, alpha=4.0, targets=targets)
  adapters = lora.init(jax.random.key(1), base, settings)
  adapters = jax.tree.map(lambda x: x + 1.0, adapters)
  peft.save_adapters(tmp_path / "out", adapters, settings, CONFIG)
  description = json.loads((tmp_path / "out" / peft.CONFIG_FILE).read_text())
  assert description["target_modules"] == modules
  found, _ = peft.load_adapters(tmp_path / "out", CONFIG)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)


def test_adapters_are_of_all_kernels_by_default():
  base = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
  kernels = lora.target_kernels(base, lora.LoraSettings(rank=2, alpha=4.0))
  assert [name for name in kernels if name.startswith("full/")] == [
    "full/key", "full/output", "full/query"
  ]  # fmt: skip
  assert len(kernels) == 3 + 4 + 3
