"""Mixtures of experts: what router, routes, load and kernels of experts add to `networks_test`."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import checkpoints, updates
from oracles.networks import EXPERTS as CONFIG
from oracles.networks import FLOAT64, S, V, make_engine, make_method
from oracles.sampling import sample
from oracles.updates import relative_distance

from rlvr_jax.models.experts import NO_EXPERT, Experts
from rlvr_jax.models.functional import cast_to_decode, transformer
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.models.quantized import dequantize, quantize, rounded
from rlvr_jax.ops.reductions import values
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts

E, K, F = 5, 2, 12


@functools.cache
def make_model():
  model = updates.small_model(CONFIG)
  return model._replace(response_routed=jax.jit(model.response_routed))


def draw_batch():
  """(prompts, tokens, lengths) of random rollouts."""
  batch = updates.make_batch()
  return batch.prompts, batch.tokens, jnp.asarray(batch.mask.sum(-1), jnp.int32)


def test_a_sampler_has_the_routers_of_training():
  """In training they multiply in float32, whatever the other kernels are rounded to."""
  config = dataclasses.replace(CONFIG, shared_expert_width=8, compute_dtype="bfloat16")
  model = transformer(config)
  cast = jax.eval_shape(lambda key: cast_to_decode(model.init(key), config), jax.random.key(0))[
    "blocks"
  ]["experts"]
  in_float32 = {name for name, x in cast.items() if x.dtype == "float32"}
  assert in_float32 == {"router", "shared_weight"} < cast.keys()


# --- the layer ------------------------------------------------------------------------------------


def run_layer(config, x, *, routes=None, real=None, experts=None):
  """One layer's mixture of x[R, L, D], and its kernels as NumPy arrays."""
  rng = np.random.default_rng(1)
  draw = lambda x: np.asarray(rng.normal(size=x.shape) * x.shape[-2] ** -0.5, x.dtype)
  kernels = jax.tree.map(draw, nnx.to_pure_dict(layer_shapes(config)[1])) | (experts or {})
  module = make_layer(config, kernels)
  run = jax.jit(lambda x, routes, real: module(x, jax.nn.silu, routes=routes, real=real))
  mixed, routing = run(jnp.asarray(x), routes, real)
  return np.asarray(mixed), jax.tree.map(np.asarray, routing), kernels


def layer_shapes(config):
  """(graph, shapes of the kernels) of one layer's mixture."""
  build = lambda: Experts(
    config.experts, nnx.Rngs(0), width=config.width, dtype=config.param_dtype, residual_gain=1.0
  )
  return nnx.split(jax.eval_shape(build), nnx.Param)


def make_layer(config, kernels):
  return nnx.merge(layer_shapes(config)[0], jax.tree.map(jnp.asarray, kernels))


def oracle(x, kernels, *, normalized, routes=None):
  """(mixture, experts) token by token; ties go to the expert with the lower index."""
  silu = lambda z: z / (1 + np.exp(-z))
  out, chosen = np.zeros_like(x), np.zeros((*x.shape[:2], K), int)
  for at in np.ndindex(x.shape[:2]):
    logits = x[at] @ kernels["router"]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    chosen[at] = np.lexsort((np.arange(E), -p))[:K] if routes is None else routes[at]
    weights = p[chosen[at]] / (p[chosen[at]].sum() if normalized else 1)
    for e, w in zip(chosen[at], weights, strict=True):
      hidden = silu(x[at] @ kernels["gate"][e]) * (x[at] @ kernels["up"][e])
      out[at] += w * (hidden @ kernels["down"][e])
  return out, chosen


@pytest.mark.parametrize(("normalized", "replayed"), [(True, False), (False, True)])
def test_a_layer_is_the_weighted_sum_of_the_chosen_experts(x64, normalized, replayed):
  config = dataclasses.replace(CONFIG, normalized_expert_weights=normalized, **FLOAT64)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 7, 16))
  routes = np.argsort(rng.random((2, 7, E)), axis=-1)[..., :K].astype(np.uint8)
  routes = routes if replayed else None
  mixed, routing, kernels = run_layer(config, x, routes=routes)
  expected, chosen = oracle(x, kernels, normalized=normalized, routes=routes)
  np.testing.assert_array_equal(routing.experts, chosen)
  np.testing.assert_allclose(mixed, expected, rtol=1e-12, atol=1e-13)


def test_ties_go_to_the_first_experts():
  x = np.random.default_rng(0).normal(size=(1, 9, 16)).astype(np.float32)
  router = np.zeros((16, E), np.float32)  # all experts alike
  _, routing, _ = run_layer(CONFIG, x, experts={"router": router})
  np.testing.assert_array_equal(routing.experts, np.broadcast_to([0, 1], (1, 9, K)))


def test_the_router_is_at_least_float32():
  """Logits that differ by less than bfloat16 can tell decide."""
  config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
  x = jnp.ones((1, 3, 16), jnp.bfloat16)
  router = np.full((16, E), 0.5, np.float32) + np.asarray([0, 1, 3, 2, 0]) * np.float32(1e-5)
  mixed, routing, _ = run_layer(config, x, experts={"router": router})
  np.testing.assert_array_equal(routing.experts, np.broadcast_to([2, 3], (1, 3, K)))
  assert mixed.dtype == jnp.bfloat16 and routing.weights.dtype == jnp.float32


def test_places_without_a_token_have_no_expert():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 7, 16)).astype(np.float32)
  real = rng.random((2, 7)) < 0.6
  expected, _, _ = run_layer(CONFIG, x)
  mixed, routing, _ = run_layer(CONFIG, np.where(real[..., None], x, np.nan), real=real)
  np.testing.assert_array_equal(mixed[real], expected[real])
  assert not np.any(mixed[~real]) and np.all(routing.experts[~real] == NO_EXPERT)
  assert np.all(routing.experts[real] >= 0)


# --- the network ----------------------------------------------------------------------------------


def test_given_routes_replace_the_choice_but_not_the_router():
  """A network's own routes give the same bits; the router keeps its gradient."""
  model = make_model()
  params, (prompts, tokens, lengths) = model.init(jax.random.key(0)), draw_batch()
  hidden, routes, sums = model.response_routed(params, prompts, tokens, None, lengths)
  narrow = jax.tree.map(lambda x: jnp.maximum(x, 0).astype(jnp.uint8), routes)
  again, same, _ = model.response_routed(params, prompts, tokens, narrow, lengths)
  jax.tree.map(np.testing.assert_array_equal, (again, same), (hidden, routes))
  # The last token is not computed, and prompts are padded on the left.
  real = np.asarray(lengths)[..., None] > np.arange(1, updates.T + 1)
  asked = np.arange(updates.S) >= updates.S - prompts.lengths[:, None]
  for found, expected in ((routes.responses, real), (routes.prompts, asked)):
    np.testing.assert_array_equal(
      np.asarray(found) >= 0, np.broadcast_to(expected[..., None, None], found.shape)
    )
  np.testing.assert_allclose(np.sum(sums, axis=1), asked.sum() + real.sum(), rtol=1e-5)

  others = jax.tree.map(lambda x: (x + 1) % E, narrow)
  loss = lambda params: jnp.sum(
    jnp.sin(model.response_routed(params, prompts, tokens, others, lengths)[0])
  )
  assert not np.array_equal(loss(params), jnp.sum(jnp.sin(hidden)))
  gradient = jax.grad(loss)(params)["blocks"]["experts"]
  assert all(np.abs(gradient[name]).max(axis=(1, 2)).min() > 0 for name in gradient)


def test_replayed_experts_far_below_the_others_have_the_weights_of_their_own_logits():
  """Their probabilities, next to those of the experts left out, are 0 in float32."""
  x = np.ones((1, 1, 16), np.float32)
  router = np.zeros((16, E), np.float32)
  router[0] = [0.0, 200.0, 201.0, -1.0, 0.5]
  routes = np.array([[[0, 3]]])
  _, routing, _ = run_layer(CONFIG, x, routes=jnp.asarray(routes), experts={"router": router})
  odds = np.exp([0.0, -1.0])
  np.testing.assert_allclose(routing.weights[0, 0], odds / odds.sum(), rtol=1e-5)


def test_experts_are_never_chosen_again_in_the_backward_pass():
  prompts, tokens, lengths = draw_batch()

  def choices(config):
    model = updates.small_model(config)
    loss = lambda params: jnp.sum(model.response_hidden(params, prompts, tokens, None, lengths))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return str(jax.make_jaxpr(jax.grad(loss))(shapes)).count(" top_k[")

  assert choices(dataclasses.replace(CONFIG, remat="full")) == choices(CONFIG) == 1


def test_rows_choose_as_padded_rollouts_do():
  """The same hidden states, packed or not; and the same again by the routes of the rows."""
  model = make_model()
  params, batch = model.init(jax.random.key(0)), updates.make_batch()
  prompts, responses, lengths = draw_batch()
  hidden, _, _ = model.response_routed(params, prompts, responses, None, lengths)
  packed = updates.in_rows(batch, several=False).packed
  tokens, rows = jax.tree.map(lambda x: x[0], (packed.tokens, packed.rows))
  in_rows, routes, _ = jax.jit(model.row_routed)(params, tokens, rows)
  places = packed.places[packed.places >= 0]
  found = np.asarray(in_rows).reshape(-1, 16)[places]
  np.testing.assert_allclose(found, hidden[packed.places >= 0], atol=2e-5)
  assert np.all((np.asarray(routes) >= 0) == (np.asarray(rows.prompts) >= 0)[..., None, None])
  np.testing.assert_array_equal(jax.jit(model.row_hidden)(params, tokens, rows, routes), in_rows)


# --- sampling -------------------------------------------------------------------------------------


ENGINE = make_engine(updates.small_model(CONFIG), prefill_rows=4)


def test_bits_of_a_rollout_depend_on_its_own_prompt_and_key_alone():
  """Not on the order of requests, nor on what the other slots decode, nor on idle slots."""
  params = updates.small_model(CONFIG).init(jax.random.key(0))
  rng = np.random.default_rng(0)
  tokens = rng.integers(4, V, (6, S)).astype(np.int32)
  lengths = np.full(6, S, np.int32)
  key = jax.random.key(1)
  expected = sample(ENGINE, params, {}, Prompts(tokens, lengths), key, 2)
  kept = np.asarray([0, 3, 4])
  others = rng.integers(4, V, (6, S)).astype(np.int32)
  others[kept] = tokens[kept]
  found = sample(ENGINE, params, {}, Prompts(others, lengths), key, 2)
  for field in ("tokens", "behavior_logprobs", "lengths"):
    before, after = getattr(expected, field), getattr(found, field)
    np.testing.assert_array_equal(after[kept], before[kept])
  assert not np.array_equal(expected.tokens, found.tokens)
  # With a third as many prompts, slots are idle, and a prompt has other neighbors.
  few = sample(ENGINE, params, {}, Prompts(tokens[:2], lengths[:2]), key, 2)
  np.testing.assert_array_equal(few.behavior_logprobs, expected.behavior_logprobs[:2])


# --- on a mesh, and in updates --------------------------------------------------------------------


def test_a_mesh_that_does_not_divide_the_experts_is_refused():
  mesh = sharding.make_mesh(tensor=8)
  with pytest.raises(ValueError, match=r"config.mesh.tensor = 8 does not divide expert_width = 12"):
    transformer(CONFIG, sharding.make_layout(mesh))


# --- load -----------------------------------------------------------------------------------------


def balance_by_hand(batch, params):
  """(Switch Transformers' loss, its gradient, metrics), token by token."""
  model = updates.small_model(dataclasses.replace(CONFIG, **FLOAT64))
  lengths = jnp.asarray(batch.mask.sum(-1), jnp.int32)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def weighted(params, weights):
    """A sum over the router's probabilities, and its choice."""
    _, routes, sums = model.response_routed(params, batch.prompts, batch.tokens, None, lengths)
    return jnp.sum(weights * sums), routes

  (_, routes), _ = weighted(params, np.zeros((2, E)))
  routes = [np.asarray(part) for part in routes]
  chosen = [np.concatenate([x[..., layer, :].ravel() for x in routes]) for layer in range(2)]
  counts = np.stack([np.bincount(x[x >= 0], minlength=E) for x in chosen])
  shares = counts / counts.sum(1, keepdims=True)
  # Each layer's E·Σ share·(mean probability), and of these the mean over the two layers.
  (loss, _), gradient = weighted(params, E * shares / (counts.sum(1, keepdims=True) / K) / 2)
  logs = np.log(np.where(shares > 0, shares, 1))
  entropy = np.mean(-np.sum(shares * logs, axis=1)) / np.log(E)
  return loss, gradient, (entropy, np.mean(E * shares.max(axis=1)), np.mean(counts == 0))


def test_the_balance_loss_and_the_load(x64):
  """Its value, its gradient at a coefficient of one, and the metrics; of one micro-batch."""
  method = make_method(CONFIG, expert_balance=1.0)
  params, batch = method.model.init(jax.random.key(0)), updates.make_batch(np.float64)
  # Of equal rewards the advantages are 0, and the balance is all that has a gradient.
  batch = dataclasses.replace(batch, rewards=np.ones_like(batch.rewards))
  (_, metrics), gradient = updates.gradient_of(method, batch, params)
  balance, balance_gradient, load = balance_by_hand(batch, params)
  found = values(metrics)
  np.testing.assert_allclose(found["loss/expert_balance"], balance, rtol=1e-9)
  names = ("load_entropy", "largest_load", "unused_experts")
  np.testing.assert_allclose([found[f"routing/{name}"] for name in names], load, rtol=1e-6)
  # The routes and shares are constants: only the probabilities are differentiated.
  assert relative_distance(gradient, balance_gradient) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "constant"])
def test_the_balance_of_micro_batches_is_that_of_one(x64, aggregation):
  """Rows of one rollout's tokens each hold the prompt again, so both are packed alike."""
  method = make_method(CONFIG, expert_balance=0.5, aggregation=aggregation)
  params, batch = method.model.init(jax.random.key(0)), updates.make_batch(np.float64)
  (loss, metrics), gradient = updates.gradient_of(
    method, updates.in_rows(batch, several=False), params
  )
  (found_loss, found_metrics), found = updates.gradient_of(
    method, updates.in_rows(batch, rows=3), params
  )
  assert relative_distance(found, gradient) < 1e-11
  np.testing.assert_allclose(found_loss, loss, rtol=1e-11)
  for name in ("loss/expert_balance", "routing/load_entropy", "routing/largest_load"):
    np.testing.assert_allclose(values(found_metrics)[name], values(metrics)[name], rtol=1e-9)


# --- copies in 8 bits, adapters -------------------------------------------------------------------


@pytest.mark.parametrize("format", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_copies_in_8_bits_leave_the_router(format):
  """Products read the 8-bit numbers of the chosen experts, one scale per output channel."""
  pytest.importorskip("qwix", reason="the extra `quantized` needs flax 0.12")
  params = updates.small_model(CONFIG).init(jax.random.key(0))
  of_layer = lambda tree: jax.tree.map(lambda x: x[0], tree["blocks"]["experts"])

  @jax.jit
  def copied(params):
    copy = quantize(params, format)
    return of_layer(rounded(copy)), of_layer(dequantize(copy))

  to_decode, exact = copied(params)
  np.testing.assert_array_equal(to_decode["router"], params["blocks"]["experts"]["router"][0])
  assert to_decode["gate"].values.dtype == jnp.dtype(format)
  assert to_decode["gate"].scale.shape == (E, 1, F)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 16)), jnp.float32)
  mix = jax.jit(lambda kernels, x: make_layer(CONFIG, kernels)(x, jax.nn.silu)[0])
  found, expected = mix(to_decode, x), mix(exact, x)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# --- checkpoints ----------------------------------------------------------------------------------

FAMILIES = {
  "qwen3_moe": CONFIG,
  "olmoe": dataclasses.replace(CONFIG, qk_norm=False, joint_qk_norm=True, num_kv_heads=4),
  "mixtral": dataclasses.replace(CONFIG, qk_norm=False),
}
each_family = pytest.mark.parametrize(
  "family", ["qwen3_moe", "mixtral", pytest.param("olmoe", marks=pytest.mark.slow)]
)


def load(folder, **sizes):
  # Blocks of 200 bytes: an expert's kernel comes in several.
  return checkpoints.load(folder, sharding.make_mesh(**sizes), block_bytes=200)[1]


@each_family
def test_a_checkpoint_reads_back_in_every_form(tmp_path, family):
  """As published, in shards; with the experts of a layer in one tensor; and on a mesh."""
  safetensors = pytest.importorskip("safetensors.numpy")
  config = FAMILIES[family]
  params = updates.small_model(config).init(jax.random.key(0))
  settings = dict(dtype="float32", max_shard_bytes=4000)
  save_checkpoint(tmp_path / "out", params, config, **settings)
  files = sorted((tmp_path / "out").glob("*.safetensors"))
  assert len(files) > 2
  found = load(tmp_path / "out")
  jax.tree.map(np.testing.assert_array_equal, found, params)
  same = dict(mlp_width=F if family != "qwen3_moe" else 1, tied_head=True)
  assert checkpoint_config(tmp_path / "out") == dataclasses.replace(config, **same)

  tensors = {k: v for file in files for k, v in safetensors.load_file(file).items()}
  layer = "model.layers.1."
  names = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.3.w3"),
  }.get(family, ("mlp.gate", "mlp.experts.3.up_proj"))
  of_experts = params["blocks"]["experts"]
  for name, kernel in zip(names, (of_experts["router"][1], of_experts["up"][1, 3]), strict=True):
    np.testing.assert_array_equal(tensors.pop(f"{layer}{name}.weight"), kernel.T)

  fused = {name: x for name, x in tensors.items() if "moe" not in name and ".mlp." not in name}
  for i in range(2):
    kernels = {name: np.asarray(x[i]).swapaxes(-1, -2) for name, x in of_experts.items()}
    fused[f"model.layers.{i}.mlp.gate.weight"] = kernels["router"]
    both = np.concatenate([kernels["gate"], kernels["up"]], axis=1)
    fused[f"model.layers.{i}.mlp.experts.gate_up_proj"] = both
    fused[f"model.layers.{i}.mlp.experts.down_proj"] = kernels["down"]
  (tmp_path / "fused").mkdir()
  text = (tmp_path / "out" / "config.json").read_text()
  (tmp_path / "fused" / "config.json").write_text(text)
  contiguous = {name: np.ascontiguousarray(x) for name, x in fused.items()}
  safetensors.save_file(contiguous, tmp_path / "fused" / "model.safetensors")
  jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "fused", fsdp=4, tensor=2), params)


def test_experts_of_another_shape_are_refused_before_they_are_read(tmp_path):
  params = updates.small_model(CONFIG).init(jax.random.key(0))
  save_checkpoint(tmp_path / "out", params, CONFIG, dtype="float32")
  path = tmp_path / "out" / "config.json"
  published = json.loads(path.read_text())
  for changes, message in (
    (
      dict(moe_intermediate_size=8),
      r"experts.0.down_proj.weight' in .* has shape \(16, 12\), but the model needs \(16, 8\)",
    ),
    (dict(num_experts=6), r"6 missing: model.layers.0.mlp.experts.5.down_proj.weight"),
    (dict(num_experts=4), r"6 unknown: model.layers.0.mlp.experts.4.down_proj.weight"),
  ):
    path.write_text(json.dumps(published | changes))
    with pytest.raises(ValueError, match=message):
      load(tmp_path / "out")
