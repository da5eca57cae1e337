"""Networks of gated DeltaNets and attention: training, sampling, adapters, copies and settings."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import updates
from oracles.sampling import drive, groups_of, make_requests, stack
from oracles.updates import relative_distance

from rlvr_jax.geometry import GramContext
from rlvr_jax.geometry.per_rollout import num_selected
from rlvr_jax.models import lora, peft
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.linear import merge_low_rank
from rlvr_jax.models.quantized import FORMATS, adapt_to_quantized, dequantize, quantize
from rlvr_jax.models.safetensors import SINGLE
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops import delta_rule
from rlvr_jax.ops.logprobs import distribution, head_logits, token_logprobs
from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.engines import TrainerLayout, choose_slots
from rlvr_jax.types import BatchShape, Prompts, Sampling
from rlvr_jax.update import optimizer
from rlvr_jax.update.accumulate import update_gradient
from rlvr_jax.update.objective import estimate_coefficients

DELTA, ATTENTION = True, False
DENSE = TransformerConfig(
  vocab_size=32,
  width=16,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=20,
  qk_norm=True,
  zero_centered_norm=True,
  attention_gate=True,
  rotary_width=2,
  delta_layers=(DELTA, ATTENTION, DELTA),
  delta_key_heads=2,
  delta_value_heads=4,
  delta_key_dim=8,
  delta_value_dim=12,
  delta_num_taps=4,
)
MIXTURE = dataclasses.replace(
  DENSE,
  num_experts=5,
  experts_per_token=2,
  expert_width=12,
  shared_expert_width=10,
  normalized_expert_weights=True,
)
NETWORKS = {"dense": DENSE, "mixture": MIXTURE}
# Of three key heads, which two devices do not divide.
ODD = dataclasses.replace(DENSE, delta_key_heads=3, delta_value_heads=3)


@pytest.fixture(autouse=True, scope="module")
def short_chunks():
  """So that a prompt and a row have several."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(delta_rule, "CHUNK", 8)
    yield


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(delta_layers=(DELTA,)), "delta_layers names 1 layers, num_layers=3"),
    (dict(delta_layers=(DELTA,) * 3), "at least one layer must have attention"),
    (dict(delta_layers=None), "delta_key_heads is set but delta_layers=None has none"),
    (dict(delta_layers=(ATTENTION,) * 3), "delta_key_heads is set but delta_layers=.* has none"),
    (dict(delta_num_taps=0), "delta_num_taps=0 must be at least 1, a whole number"),
    (dict(delta_key_dim=4.0), "delta_key_dim=4.0 must be at least 1, a whole number"),
    (dict(delta_value_heads=3), "delta_value_heads=3 is not a multiple of delta_key_heads=2"),
    (dict(shared_expert_width=8), "shared_expert_width=8 is set but num_experts=0"),
  ],
)
def test_settings_that_contradict_one_another_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(DENSE, **changes)


# --- sizes ---------------------------------------------------------------------------------------

QWEN3_5_4B = TransformerConfig(
  vocab_size=248_320,
  width=2560,
  num_layers=32,
  num_heads=16,
  num_kv_heads=4,
  head_dim=256,
  mlp_width=9216,
  qk_norm=True,
  zero_centered_norm=True,
  attention_gate=True,
  rotary_width=64,
  delta_layers=(DELTA, DELTA, DELTA, ATTENTION) * 8,
  delta_key_heads=16,
  delta_value_heads=32,
  delta_key_dim=128,
  delta_value_dim=128,
  delta_num_taps=4,
  compute_dtype="bfloat16",
)


def test_a_slot_of_qwen3_5_4b_has_51_5_mb_of_states():
  states = decoder.state_bytes(QWEN3_5_4B, tensor=1)
  assert states == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) == pytest.approx(51.5e6, rel=1e-3)
  assert decoder.state_bytes(QWEN3_5_4B, tensor=4) == states / 4
  assert decoder.state_bytes(QWEN3_5_4B, tensor=3) == states  # which divides no heads
  assert decoder.token_bytes(QWEN3_5_4B, 1) == 32 * 1024  # of 8 layers with attention


def test_slots_are_limited_by_their_states_too():
  model = transformer(QWEN3_5_4B)
  trainer = TrainerLayout(sharding.make_mesh(), False, frozen=True, bytes_per_trained=4.0)
  shape = BatchShape(4096, 1, 256, 256)
  slots = choose_slots(0, shape, model, trainer, 64 * 10**9, cache="pages")
  parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
  per_slot = 51.5e6 + (512 + 16) * 32 * 1024 + 8 * 248_320
  assert slots == pytest.approx((0.85 * 64e9 - (4 + 2) * parameters) / per_slot, rel=0.02)


# --- training -------------------------------------------------------------------------------------


@functools.cache
def make_method(network="dense", mesh=None, **changes):
  dtypes = dict(compute_dtype="float64", param_dtype="float64")
  config = dataclasses.replace((NETWORKS | {"odd": ODD})[network], **dtypes, **changes)
  return updates.make_method("float64", mesh)._replace(model=updates.small_model(config, mesh))


@functools.cache
def padded(network):
  """(batch, parameters, gradient) of padded rollouts, with nothing recomputed."""
  batch = updates.make_batch(np.float64)
  params = make_method(network).model.init(jax.random.key(0))
  return batch, params, updates.gradient_of(make_method(network), batch, params)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("network", "rows", "remat"),
  [("dense", 10**6, "none"), ("dense", 2, "dots"), ("mixture", 2, "full")],
)
def test_micro_batches_of_rows_have_the_gradient_of_padded_rollouts(x64, network, rows, remat):
  """In value too, whatever the backward pass computes anew."""
  batch, params, expected = padded(network)
  packed = updates.in_rows(batch, rows=rows, length=24, several=rows == 2)
  found = updates.gradient_of(make_method(network, remat=remat), packed, params)
  np.testing.assert_allclose(found[0][0], expected[0][0], rtol=1e-12)
  assert relative_distance(found[1], expected[1]) < 1e-11
  assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(found[1]["blocks"]["delta"]))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("network", "sizes"),
  [
    ("dense", dict(data=2, fsdp=2, tensor=2)),
    ("odd", dict(fsdp=4, tensor=2)),
    ("mixture", dict(data=2, fsdp=2, tensor=2)),
  ],
)
def test_a_mesh_changes_no_gradient(x64, network, sizes):
  batch, params, expected = padded(network)
  mesh = sharding.make_mesh(**sizes)
  placed = jax.device_put(params, sharding.state_shardings(params, mesh))
  on_mesh = updates.in_rows(batch, rows=1, length=24, mesh=mesh, several=None)
  found = sharding.to_host(updates.gradient_of(make_method(network, mesh), on_mesh, placed))
  assert relative_distance(found[1], expected[1]) < 1e-11


def test_the_last_block_has_its_own_parameters_alone():
  """Those of its gated DeltaNet, and not those of attention in the layer before."""
  context = GramContext(updates.small_model(DENSE), 1.0)
  count = lambda pattern: num_selected(params_of(), {}, context, parameters=pattern)
  of_all = "blocks/(attention_norm|mlp_norm|gate|up|down)"
  assert count("last_block") == count(of_all) // 3 + count("blocks/delta") // 2


# --- sampling -------------------------------------------------------------------------------------

V, P, G, S, T = 32, 4, 2, 9, 48
STOPS = (3, 11, 17, 25)


@functools.cache
def params_of(config=DENSE, seed=0):
  params = updates.small_model(config).init(jax.random.key(seed))
  return {**params, "embedding": params["embedding"] * 1.5}


@functools.cache
def prompts():
  rng = np.random.default_rng(0)
  tokens = rng.integers(4, V, (P, S)).astype(np.int32)
  return Prompts(tokens=tokens, lengths=np.asarray([9, 1, 4, 2], np.int32))


def requests():
  return make_requests(prompts(), jax.random.key(4), G)


@functools.cache
def programs(config=DENSE, slots=3, has_replies=True, model=None):
  return EnginePrograms(
    model or updates.small_model(config),
    Sampling(),
    slots=slots,
    prefill_rows=2,
    max_prompt_length=S,
    max_new_tokens=T,
    stop_tokens=STOPS,
    pad_token=0,
    has_replies=has_replies,
  )


def loaded(programs, *versions):
  engine = Engine(programs)
  for version in versions or (0,):
    engine.swap(version, programs.load(params_of(programs.settings.model.config, version), {}))
  return engine


def serve(programs, trained, requests, frozen=None):
  engine = Engine(programs)
  engine.swap(0, programs.load(trained, frozen or {}))
  return groups_of(drive(engine, requests))


def reply(rollout):
  """What follows a turn that ended early; nothing ends the dialogue."""
  tokens = rollout.arrays["tokens"][: rollout.length]
  is_last = rollout.arrays["turns"][rollout.length - 1] >= 4 or rollout.length > T - 12
  said = int(tokens.sum())
  return ((np.arange(1 + said % 5) * 5 + said) % V).astype(np.int32)[: 0 if is_last else None]


@functools.cache
def dialogues(config=DENSE):
  return groups_of(drive(loaded(programs(config)), requests(), reply=reply))


def assert_equal(groups, expected):
  assert groups.keys() == expected.keys()
  for index, group in groups.items():
    for name, value in group._asdict().items():
      np.testing.assert_array_equal(value, getattr(expected[index], name), err_msg=name)


@functools.cache
def scored(config):
  model = updates.small_model(config)

  @jax.jit
  def score(params, tokens):
    hidden = model.response_hidden(params, jax.tree.map(jnp.asarray, prompts()), tokens)
    return token_logprobs(hidden, model.head(params), tokens)[0]

  return score


def test_logprobs_of_all_turns_equal_the_trainers():
  rollouts = stack(dialogues())
  found = scored(DENSE)(params_of(), rollouts.tokens)
  places = np.arange(T) < rollouts.lengths[..., None]
  sampled = places & (rollouts.turns % 2 == 0)
  assert sampled.sum() > 80 and rollouts.turns.max() >= 4
  np.testing.assert_allclose(
    np.asarray(found)[sampled], rollouts.behavior_logprobs[sampled], atol=1e-5
  )


@pytest.mark.slow
def test_late_replies_and_the_order_of_requests_change_no_bit():
  idle = 0
  for seed in (1, 2, 3):
    rng, engine = np.random.default_rng(seed), loaded(programs())
    asked = [requests()[i] for i in rng.permutation(P)]
    late = lambda rng=rng: int(rng.integers(1, 6))  # bursts
    assert_equal(groups_of(drive(engine, asked, reply=reply, delay=late)), dialogues())
    idle += engine.usage.idle_slot_steps
  assert idle > 0


def test_neighbors_change_no_bit():
  for request in requests()[::3]:
    found = groups_of(drive(loaded(programs()), [request], reply=reply))
    assert_equal(found, {request.index: dialogues()[request.index]})


@functools.cache
def changing(rebuild):
  """The groups of rollouts that get a newer version every two bursts, up to the third."""
  engine, bursts = loaded(programs()), 0

  def swap():
    nonlocal bursts
    bursts += 1
    version = min(bursts // 2, 2)
    weights = programs().load(params_of(DENSE, version), {})
    engine.release(before=version)
    engine.swap(version, weights, rebuild=rebuild)

  return groups_of(drive(engine, requests(), between=swap))


def test_states_that_are_computed_anew_are_those_of_the_new_weights():
  rollouts, compared = stack(changing(True)), 0
  for version in range(3):
    found = np.asarray(scored(DENSE)(params_of(DENSE, version), rollouts.tokens))
    own = rollouts.versions == version
    np.testing.assert_allclose(rollouts.behavior_logprobs[own], found[own], atol=2e-5)
    compared += own.sum()
  assert compared == rollouts.lengths.sum()
  assert np.any(np.diff(rollouts.versions) > 0)


@pytest.mark.parametrize("rebuilds", [False, True])
def test_recorded_versions_give_the_same_bits(rebuilds):
  """Slots of several versions take turns: those that wait keep their states."""
  groups, again = changing(rebuilds), Engine(programs())
  for version in range(3):
    again.swap(version, programs().load(params_of(DENSE, version), {}), rebuild=rebuilds)
  plan = lambda place: groups[place[0]].versions[place[1]]
  assert_equal(groups_of(drive(again, requests()[::-1], plan=plan)), groups)


@pytest.mark.slow
def test_without_new_states_each_token_is_of_its_version_after_a_mixed_past():
  """Each under its version, behind the state that earlier versions have left."""
  model, groups = updates.small_model(DENSE), changing(False)

  @jax.jit
  def step(params, cache, states, token, position):
    def attend(layer, query, key, value, settings):
      keys, values = (x.at[position].set(y[0]) for x, y in zip(cache, (key, value), strict=True))
      queries = query[0].reshape(DENSE.num_kv_heads, -1, DENSE.head_dim)
      scores = jnp.einsum("knh,jkh->knj", queries, keys) * settings["scale"]
      scores = jnp.where(jnp.arange(len(keys)) <= position, scores, -jnp.inf)
      out = jnp.einsum("knj,jkh->knh", jax.nn.softmax(scores, axis=-1), values)
      return out.reshape(query.shape), (keys, values)

    delta = lambda layer, inputs: delta_rule.mix_token(inputs, states[layer], jnp.ones(1, bool))
    tables = model.rotary(jnp.full((1, 1, 1), position)).at(0)
    hidden, (cache,), states, _ = model.decode(params, token[None], tables, attend, delta)
    logits = head_logits(hidden, model.head(params))
    return distribution(logits, Sampling())[0], cache, tuple(states)

  weights = [jax.jit(model.decoding_params)(params_of(DENSE, version)) for version in range(3)]
  empty = jax.tree.map(lambda x: x[:1], decoder.empty_slots(programs().settings).states)
  mixed = 0
  for group, tokens, length in zip(
    groups.values(), prompts().tokens, prompts().lengths, strict=True
  ):
    rows = (group.versions, group.tokens, group.lengths, group.behavior_logprobs)
    for versions, response, count, expected in zip(*rows, strict=True):
      cache = (jnp.zeros((S + T, DENSE.num_kv_heads, DENSE.head_dim)),) * 2
      states, context = empty, [*tokens[S - length :], *response[: count - 1]]
      for position, token in enumerate(context):
        place = max(position - (length - 1), 0)  # of the token that is predicted
        logprobs, cache, states = step(
          weights[versions[place]], cache, states, jnp.int32(token), position
        )
        if position >= length - 1:
          assert expected[place] == pytest.approx(float(logprobs[response[place]]), abs=1e-5)
          mixed += versions[place] != versions[0]
  assert mixed > 20


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_other_numbers_of_slots_change_rounding_only(network):
  config = NETWORKS[network]
  few = groups_of(drive(loaded(programs(config)), requests()))
  many = groups_of(drive(loaded(programs(config, slots=8, has_replies=False)), requests()))
  for index, group in few.items():
    np.testing.assert_array_equal(group.tokens, many[index].tokens)
    np.testing.assert_allclose(group.behavior_logprobs, many[index].behavior_logprobs, atol=1e-5)
  rollouts = stack(few)
  sampled = np.arange(T) < rollouts.lengths[..., None]
  found = np.asarray(scored(config)(params_of(config), rollouts.tokens))
  np.testing.assert_allclose(found[sampled], rollouts.behavior_logprobs[sampled], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("network", "sizes"),
  [
    ("dense", dict(data=2, fsdp=2, tensor=2)),
    ("dense", dict(fsdp=2, tensor=4)),  # of two key heads
    ("mixture", dict(data=2, fsdp=2, tensor=2)),
  ],
)
def test_generation_on_a_mesh_is_that_of_one_device(network, sizes):
  mesh, config = sharding.make_mesh(**sizes), NETWORKS[network]
  layout = sharding.make_layout(mesh)
  on_mesh = programs(config, slots=8, has_replies=False, model=transformer(config, layout))
  placed = jax.device_put(params_of(config), sharding.state_shardings(params_of(config), mesh))
  many = serve(on_mesh, placed, requests())
  one = groups_of(drive(loaded(programs(config, slots=8, has_replies=False)), requests()))
  for index, group in many.items():
    np.testing.assert_array_equal(group.tokens, one[index].tokens)
    np.testing.assert_allclose(group.behavior_logprobs, one[index].behavior_logprobs, atol=1e-5)


# --- copies in 8 bits -----------------------------------------------------------------------------


def test_a_copy_in_8_bits_has_exact_gates_taps_and_rates():
  pytest.importorskip("qwix", reason="the extra `quantized` needs flax 0.12")
  shapes = jax.eval_shape(updates.small_model(DENSE).init, jax.random.key(0))
  copy = jax.eval_shape(functools.partial(quantize, format="int8"), shapes)
  rounded = {name for name, leaf in copy["blocks"]["delta"].items() if hasattr(leaf, "qvalue")}
  assert rounded == {"query", "key", "value", "gate", "output"}
  assert hasattr(copy["blocks"]["output_gate"], "qvalue")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_recorded_logprobs_are_those_of_the_rounded_policy(format):
  model = adapt_to_quantized(updates.small_model(MIXTURE), format, decode_rounded=True)
  copy = jax.jit(quantize, static_argnums=1)(params_of(MIXTURE), format)
  rounded = programs(MIXTURE, slots=8, has_replies=False, model=model)
  rollouts = stack(serve(rounded, copy, requests()))
  sampled = np.arange(T) < rollouts.lengths[..., None]
  found = np.asarray(scored(MIXTURE)(jax.jit(dequantize)(copy), rollouts.tokens))
  np.testing.assert_allclose(found[sampled], rollouts.behavior_logprobs[sampled], atol=1e-5)


# --- adapters -------------------------------------------------------------------------------------

SETTINGS = lora.LoraSettings(rank=2, alpha=5.0)


def random_adapters(config=DENSE, settings=SETTINGS):
  key = jax.random.key(0)
  base = jax.eval_shape(updates.small_model(config).init, key)
  shapes = jax.eval_shape(lambda key: lora.init(key, base, settings), key)
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.2, shapes)


def test_adapters_are_of_the_projections_of_both_kinds_of_layers():
  found = random_adapters()["blocks"]
  assert sorted(lora.flatten(found)) == [
    *(f"delta/{name}" for name in ("gate", "key", "output", "query", "value")),
    *("down", "gate", "key", "output", "output_gate", "query", "up", "value"),
  ]
  assert found["delta"]["value"]["a"].shape == (2, 16, 2)  # of two layers
  assert found["delta"]["value"]["b"].shape == (2, 2, 4 * 12)
  assert found["query"]["a"].shape == (1, 16, 2)  # of one
  base = jax.eval_shape(updates.small_model(DENSE).init, jax.random.key(0))
  targets = lambda pattern: [
    *lora.target_kernels(base, lora.LoraSettings(rank=2, alpha=1.0, targets=pattern))
  ]
  assert targets("blocks/query$") == ["query"]
  assert targets("delta/(query|strength)$") == ["delta/query", "delta/strength"]
  with pytest.raises(ValueError, match="matches no kernel"):
    targets("taps|log_rate|decay_bias|scale")


def test_adapters_are_sharded_as_their_kernels():
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  adapters = jax.eval_shape(random_adapters)
  base = jax.eval_shape(updates.small_model(DENSE).init, jax.random.key(0))
  of_kernels = sharding.state_shardings(base, mesh)["blocks"]["delta"]
  for name, pair in sharding.state_shardings(adapters, mesh)["blocks"]["delta"].items():
    _, rows, columns = of_kernels[name].spec
    assert {rows, columns} == {"fsdp", "tensor"}
    assert pair["a"].spec[1] == rows and pair["b"].spec[2] == columns


@pytest.mark.parametrize("targets", ["", "delta/(query|value|strength|output)|blocks/query"])
def test_adapters_in_files_are_those_of_the_published_modules(tmp_path, targets):
  """W + (α/R)·B·A of the files is the published tensor of the merged network."""
  numpy = pytest.importorskip("safetensors.numpy")
  settings = dataclasses.replace(SETTINGS, **(dict(targets=targets) if targets else {}))
  adapters, base = random_adapters(settings=settings), params_of()
  merged = merge_low_rank(lora.combine(adapters, base, settings))
  for name, params in (("base", base), ("merged", merged)):
    save_checkpoint(tmp_path / name, params, DENSE, dtype="float32")
  peft.save_adapters(tmp_path / "adapter", adapters, settings, DENSE)
  before, after = (numpy.load_file(tmp_path / name / SINGLE) for name in ("base", "merged"))
  description = json.loads((tmp_path / "adapter" / peft.CONFIG_FILE).read_text())
  files = numpy.load_file(tmp_path / "adapter" / peft.WEIGHTS_FILE)
  for name in before:
    at = f"base_model.model.{name.removesuffix('.weight')}"
    a, b = files.pop(f"{at}.lora_A.weight", None), files.pop(f"{at}.lora_B.weight", None)
    module = at.split(".")[-1]
    assert (a is not None) == (module in description["target_modules"]), name
    rank = description.get("rank_pattern", {}).get(module, 2)
    scale = description.get("alpha_pattern", {}).get(module, 5.0) / rank
    change = 0 if a is None else scale * (b @ a)
    np.testing.assert_allclose(after[name], before[name] + change, atol=1e-6, err_msg=name)
  assert not files
  found, again = peft.load_adapters(tmp_path / "adapter", DENSE)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  assert (again.rank, again.alpha) == (2, 5.0)
  if not targets:
    assert sorted(description["target_modules"]) == [
      *("down_proj", "gate_proj", "in_proj_qkv", "in_proj_z", "k_proj", "o_proj", "out_proj"),
      *("q_proj", "up_proj", "v_proj"),
    ]
    assert description["rank_pattern"] == {"in_proj_qkv": 6, "q_proj": 4}


def test_muon_knows_the_kernels_and_weight_decay_spares_norms_and_rates():
  shapes = jax.eval_shape(updates.small_model(DENSE).init, jax.random.key(0))
  muon = optimizer.muon(learning_rate=optax.constant_schedule(1.0))
  state = jax.eval_shape(muon.init, shapes).inner_states["matrix"]
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  found = [name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
  moments = {x.rpartition("mu/blocks/")[2] for x in found if "mu/blocks/" in x}
  kernels = {"query", "key", "value", "gate", "output", "strength", "decay"}
  assert {x.removeprefix("delta/") for x in moments if x.startswith("delta/")} == kernels
  assert "output_gate" in moments
  decayed = optimizer.decay_mask(shapes)["blocks"]["delta"]
  assert sorted(name for name, decays in decayed.items() if not decays) == [
    *("decay_bias", "log_rate", "scale")
  ]


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_merged_sampling_agrees_with_unmerged_scoring(network):
  config = NETWORKS[network]
  adapters, model = random_adapters(config), updates.small_model(config)
  adapted = programs(config, slots=8, has_replies=False, model=lora.adapt(model, SETTINGS))
  rollouts = stack(serve(adapted, adapters, requests(), params_of(config)))
  sampled = np.arange(T) < rollouts.lengths[..., None]
  score = scored(config)
  found = score(lora.combine(adapters, params_of(config), SETTINGS), rollouts.tokens)
  np.testing.assert_allclose(
    np.asarray(found)[sampled], rollouts.behavior_logprobs[sampled], atol=1e-5
  )
  base = np.asarray(score(params_of(config), rollouts.tokens))
  assert np.abs(base - rollouts.behavior_logprobs)[sampled].mean() > 0.05


@pytest.mark.slow
def test_gradients_of_adapters_are_the_chain_rule_of_merged_kernels(x64):
  """dA = s·dW·Bᵀ and dB = s·Aᵀ·dW at W + s·A·B."""
  batch, base, _ = padded("dense")
  method, scale = make_method(), SETTINGS.scale
  adapters = jax.tree.map(lambda x: x.astype(np.float64), random_adapters())
  merged = merge_low_rank(lora.combine(adapters, base, SETTINGS))
  whole = updates.gradient_of(method, batch, merged)[1]["blocks"]
  adapted = method._replace(model=lora.adapt(method.model, SETTINGS))

  @jax.jit
  def gradient(adapters, base):
    estimate = functools.partial(estimate_coefficients, (), method=adapted)
    return update_gradient(adapters, base, batch, estimate, jax.random.key(0), method=adapted)

  found = gradient(adapters, base)[1]["blocks"]
  for name, pair in lora.flatten(adapters["blocks"]).items():
    folder, _, last = name.rpartition("/")
    dW = np.asarray((whole[folder] if folder else whole)[last])
    pair_found = lora.flatten(found)[name]
    for letter, values in (
      ("a", scale * np.einsum("lde,lre->ldr", dW, pair["b"])),
      ("b", scale * np.einsum("ldr,lde->lre", pair["a"], dW)),
    ):
      np.testing.assert_allclose(pair_found[letter], values, rtol=1e-7, atol=1e-12)
