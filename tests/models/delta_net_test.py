"""Networks of gated DeltaNets and attention: what their states add to `networks_test`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import updates
from oracles.networks import DELTA, V, params_of
from oracles.sampling import drive, groups_of, make_requests, stack

from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.quantized import quantize
from rlvr_jax.ops import delta_rule
from rlvr_jax.ops.logprobs import distribution, head_logits, token_logprobs
from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.engines import TrainerLayout, choose_slots
from rlvr_jax.types import BatchShape, Prompts, Sampling
from rlvr_jax.update import optimizer


@pytest.fixture(autouse=True, scope="module")
def short_chunks():
  """So that a prompt and a row have several."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(delta_rule, "CHUNK", 8)
    yield


# --- sizes ---------------------------------------------------------------------------------------

QWEN3_5_4B = dataclasses.replace(
  DELTA,
  vocab_size=248_320,
  width=2560,
  num_layers=32,
  num_heads=16,
  num_kv_heads=4,
  head_dim=256,
  mlp_width=9216,
  rotary_width=64,
  delta_layers=(True, True, True, False) * 8,
  delta_key_heads=16,
  delta_value_heads=32,
  delta_key_dim=128,
  delta_value_dim=128,
  compute_dtype="bfloat16",
)


def test_a_slot_of_qwen3_5_4b_has_51_5_mb_of_states():
  states = decoder.state_bytes(QWEN3_5_4B, tensor=1)
  assert states == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) == pytest.approx(51.5e6, rel=1e-3)
  assert decoder.state_bytes(QWEN3_5_4B, tensor=4) == states / 4
  assert decoder.state_bytes(QWEN3_5_4B, tensor=3) == states  # which divides no heads
  assert decoder.token_bytes(QWEN3_5_4B, 1) == 32 * 1024  # of 8 layers with attention


def test_flops_of_a_second_token_by_hand():
  tokens = lambda n: forward_flops(QWEN3_5_4B, [n], [[0]])
  delta = 2560 * (2 * 2048 + 3 * 4096 + 2 * 32)  # q, k; v, gate, output; gates
  attention = 2560 * (2 * 1024 + (2 + QWEN3_5_4B.attention_gate) * 4096)
  kernels = 24 * delta + 8 * attention + 32 * 3 * 2560 * 9216
  states = 24 * 2 * 32 * 128 * 128  # read once by the key and once by the query
  scores = 8 * 2 * 2 * 4096  # two keys, and their values
  assert tokens(2) - tokens(1) == 2 * (kernels + states + scores)


def test_slots_are_limited_by_their_states_too():
  model = transformer(QWEN3_5_4B)
  trainer = TrainerLayout(sharding.make_mesh(), False, frozen=True, bytes_per_trained=4.0)
  shape = BatchShape(4096, 1, 256, 256)
  slots = choose_slots(0, shape, model, trainer, 64 * 10**9, cache="pages")
  parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
  per_slot = 51.5e6 + (512 + 16) * 32 * 1024 + 8 * 248_320
  assert slots == pytest.approx((0.85 * 64e9 - (4 + 2) * parameters) / per_slot, rel=0.02)


# --- sampling -------------------------------------------------------------------------------------

P, G, S, T = 4, 2, 9, 48
STOPS = (3, 11, 17, 25)


@functools.cache
def prompts():
  rng = np.random.default_rng(0)
  tokens = rng.integers(4, V, (P, S)).astype(np.int32)
  return Prompts(tokens=tokens, lengths=np.asarray([9, 1, 4, 2], np.int32))


def requests():
  return make_requests(prompts(), jax.random.key(4), G)


@functools.cache
def programs():
  return EnginePrograms(
    updates.small_model(DELTA),
    Sampling(),
    slots=3,
    prefill_rows=2,
    max_prompt_length=S,
    max_new_tokens=T,
    stop_tokens=STOPS,
    pad_token=0,
    has_replies=True,
  )


def loaded(programs, *versions):
  engine = Engine(programs)
  for version in versions or (0,):
    engine.swap(version, programs.load(params_of(programs.settings.model.config, version), {}))
  return engine


def reply(rollout):
  """What follows a turn that ended early; nothing ends the dialogue."""
  tokens = rollout.arrays["tokens"][: rollout.length]
  is_last = rollout.arrays["turns"][rollout.length - 1] >= 4 or rollout.length > T - 12
  said = int(tokens.sum())
  return ((np.arange(1 + said % 5) * 5 + said) % V).astype(np.int32)[: 0 if is_last else None]


@functools.cache
def dialogues():
  return groups_of(drive(loaded(programs()), requests(), reply=reply))


def assert_equal(groups, expected):
  assert groups.keys() == expected.keys()
  for index, group in groups.items():
    for name, value in group._asdict().items():
      np.testing.assert_array_equal(value, getattr(expected[index], name), err_msg=name)


@functools.cache
def scored():
  model = updates.small_model(DELTA)

  @jax.jit
  def score(params, tokens):
    hidden = model.response_hidden(params, jax.tree.map(jnp.asarray, prompts()), tokens)
    return token_logprobs(hidden, model.head(params), tokens)[0]

  return score


def test_logprobs_of_all_turns_equal_the_trainers():
  rollouts = stack(dialogues())
  found = scored()(params_of(DELTA), rollouts.tokens)
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
  for request in requests()[3:]:
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
    weights = programs().load(params_of(DELTA, version), {})
    engine.release(before=version)
    engine.swap(version, weights, rebuild=rebuild)

  return groups_of(drive(engine, requests(), between=swap))


def test_states_that_are_computed_anew_are_those_of_the_new_weights():
  rollouts, compared = stack(changing(True)), 0
  for version in range(3):
    found = np.asarray(scored()(params_of(DELTA, version), rollouts.tokens))
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
    again.swap(version, programs().load(params_of(DELTA, version), {}), rebuild=rebuilds)
  plan = lambda place: groups[place[0]].versions[place[1]]
  assert_equal(groups_of(drive(again, requests()[::-1], plan=plan)), groups)


@pytest.mark.slow
def test_without_new_states_each_token_is_of_its_version_after_a_mixed_past():
  """Each under its version, behind the state that earlier versions have left."""
  model, groups = updates.small_model(DELTA), changing(False)

  @jax.jit
  def step(params, cache, states, token, position):
    def attend(layer, query, key, value, settings):
      keys, values = (x.at[position].set(y[0]) for x, y in zip(cache, (key, value), strict=True))
      queries = query[0].reshape(DELTA.num_kv_heads, -1, DELTA.head_dim)
      scores = jnp.einsum("knh,jkh->knj", queries, keys) * settings["scale"]
      scores = jnp.where(jnp.arange(len(keys)) <= position, scores, -jnp.inf)
      out = jnp.einsum("knj,jkh->knh", jax.nn.softmax(scores, axis=-1), values)
      return out.reshape(query.shape), (keys, values)

    delta = lambda layer, inputs: delta_rule.mix_token(inputs, states[layer], jnp.ones(1, bool))
    tables = model.rotary(jnp.full((1, 1, 1), position)).at(0)
    hidden, (cache,), states, _ = model.decode(params, token[None], tables, attend, delta)
    logits = head_logits(hidden, model.head(params))
    return distribution(logits, Sampling())[0], cache, tuple(states)

  weights = [jax.jit(model.decoding_params)(params_of(DELTA, version)) for version in range(3)]
  empty = jax.tree.map(lambda x: x[:1], decoder.empty_slots(programs().settings).states)
  mixed = 0
  for group, tokens, length in zip(
    groups.values(), prompts().tokens, prompts().lengths, strict=True
  ):
    rows = (group.versions, group.tokens, group.lengths, group.behavior_logprobs)
    for versions, response, count, expected in zip(*rows, strict=True):
      cache = (jnp.zeros((S + T, DELTA.num_kv_heads, DELTA.head_dim)),) * 2
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


# --- copies in 8 bits -----------------------------------------------------------------------------


def test_a_copy_in_8_bits_has_exact_gates_taps_and_rates():
  pytest.importorskip("qwix", reason="the extra `quantized` needs flax 0.12")
  shapes = jax.eval_shape(updates.small_model(DELTA).init, jax.random.key(0))
  copy = jax.eval_shape(functools.partial(quantize, format="int8"), shapes)
  rounded = {name for name, leaf in copy["blocks"]["delta"].items() if hasattr(leaf, "qvalue")}
  assert rounded == {"query", "key", "value", "gate", "output"}
  assert hasattr(copy["blocks"]["output_gate"], "qvalue")


def test_muon_knows_the_kernels_and_weight_decay_spares_norms_and_rates():
  shapes = jax.eval_shape(updates.small_model(DELTA).init, jax.random.key(0))
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
