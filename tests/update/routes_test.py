"""Recorded routes: from the sampler through rows into updates, replayed or only compared."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import updates
from oracles.sampling import sample
from oracles.updates import relative_distance

from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.route_changes import RouteChanges, change_metrics, changes_by_layer, count_changes
from rlvr_jax.rollouts.packing import pack_batch, row_layout
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts, Routes, Sampling
from rlvr_jax.update.accumulate import policy_logprobs
from rlvr_jax.update.agreement import response_logprobs
from rlvr_jax.update.objective import policy_forward, recorded_routes, routes_of_inputs

P, G, S, T, V, E, K, LAYERS = 8, 4, 5, 6, 32, 5, 2, 2
CONFIG = TransformerConfig(
  vocab_size=V, width=16, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=1,
  num_experts=E, experts_per_token=K, expert_width=12, normalized_expert_weights=True,
)  # fmt: skip


MANY = dict(num_experts=64, experts_per_token=4)  # of many experts some are nearly chosen


@functools.cache
def make_method(dtype="float32", **network):
  method = updates.make_method("float32" if dtype == "bfloat16" else dtype)
  fields = dict(compute_dtype=dtype, param_dtype=dtype, **network)
  return method._replace(model=updates.small_model(dataclasses.replace(CONFIG, **fields)))


# Op by op, each small operation would be a program of its own.
scored = jax.jit(response_logprobs, static_argnames=("model", "sampling"))
policy_scored = jax.jit(policy_logprobs, static_argnames="method")


def replaying(method):
  return method._replace(replays_routes=True)


@functools.cache
def make_params(dtype="float32", **network):
  """Parameters whose experts matter."""
  params = make_method(dtype, **network).model.init(jax.random.key(0))
  experts = params["blocks"]["experts"]
  return {
    **params,
    "blocks": {**params["blocks"], "experts": {**experts, "down": 16 * experts["down"]}},
  }


def draw_routes(batch, seed=3):
  """Random distinct experts of all places, on the host; a prompt's are those of its group."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.permuted(
    np.broadcast_to(np.arange(E, dtype=np.uint8), (*shape, LAYERS, E)), axis=-1
  )[..., :K]
  routes = draw(P, G, T)
  routes[:, :, 0] = routes[:, :1, 0]
  return dataclasses.replace(batch, routes=routes, prompt_routes=draw(P, S))


@functools.partial(jax.jit, static_argnames="method")
def own_routes(params, batch, method):
  """The routes of a padded batch as a sampler would record them."""
  lengths = jnp.asarray(batch.mask.sum(-1), jnp.int32)
  _, routes, _ = method.model.response_routed(params, batch.prompts, batch.tokens, None, lengths)
  prompts, responses = jax.tree.map(lambda x: jnp.maximum(x, 0).astype(jnp.uint8), routes)
  first = jnp.broadcast_to(prompts[:, None, -1:], (P, G, 1, LAYERS, K))
  responses = jnp.concatenate([first, responses[:, :, :-1]], axis=2)
  return responses, prompts.at[:, -1].set(0)


def with_own_routes(params, batch, method=None):
  routes, prompt_routes = jax.device_get(own_routes(params, batch, method or make_method()))
  return dataclasses.replace(batch, routes=routes, prompt_routes=prompt_routes)


# --- the sampler ----------------------------------------------------------------------------------


@functools.cache
def make_engine(dtype="float32", records_routes=True, **network):
  settings = dict(max_prompt_length=S, max_new_tokens=T, stop_tokens=(3,), pad_token=0)
  model = make_method(dtype, **network).model
  return EnginePrograms(
    model, Sampling(), slots=8, prefill_rows=4, records_routes=records_routes, **settings
  )


@functools.cache
def sampled(dtype="float32", records_routes=True, **network):
  """A batch of rollouts by the engine, on the host."""
  batch = updates.make_batch()
  engine = make_engine(dtype, records_routes, **network)
  prompts = jax.device_get(batch.prompts)
  rollouts = sample(engine, make_params(dtype, **network), {}, prompts, jax.random.key(1), G)
  return dataclasses.replace(
    batch,
    prompts=prompts,
    tokens=rollouts.tokens,
    mask=(np.arange(T) < rollouts.lengths[..., None]).astype(np.float32),
    behavior_logprobs=rollouts.behavior_logprobs,
    routes=rollouts.routes,
    prompt_routes=rollouts.prompt_routes,
  )


def test_the_sampler_records_the_choice_of_every_place():
  """As the trainer's routers choose in float32; each prompt once, and nothing at padding."""
  batch = sampled()
  assert batch.routes.dtype == batch.prompt_routes.dtype == np.uint8
  expected = with_own_routes(make_params(), dataclasses.replace(batch, routes=None))
  places = batch.mask > 0
  np.testing.assert_array_equal(batch.routes[places], expected.routes[places])
  assert not batch.routes[~places].any()
  real = np.arange(S) >= S - np.asarray(batch.prompts.lengths)[:, None]
  real[:, -1] = False  # its routes are those of the first token that it predicts
  np.testing.assert_array_equal(batch.prompt_routes[real], expected.prompt_routes[real])
  assert not batch.prompt_routes[~real].any()
  assert len(np.unique(batch.routes[places])) == E


def test_recording_changes_no_bit_of_the_rollouts():
  plain, batch = sampled(records_routes=False), sampled()
  assert plain.routes is None and plain.prompt_routes is None
  np.testing.assert_array_equal(plain.tokens, batch.tokens)
  np.testing.assert_array_equal(plain.behavior_logprobs, batch.behavior_logprobs)


def gaps(method, params, batch):
  """|log π − behavior log-probability| of the tokens, by the forward pass of updates."""
  packed = updates.in_rows(batch, several=False)
  logprobs, _ = policy_scored(params, {}, packed, method=method)
  return np.abs(np.asarray(logprobs) - batch.behavior_logprobs)[batch.mask > 0]


@pytest.mark.slow
def test_replay_removes_what_routing_adds_to_rounding():
  """In bfloat16, where sampler and trainer choose otherwise in places."""
  params, batch = make_params("bfloat16", **MANY), sampled("bfloat16", **MANY)
  method = make_method("bfloat16", **MANY)
  replayed, recomputed = (gaps(m, params, batch) for m in (replaying(method), method))
  # The mean hangs on few tokens: 3.1 times with jax 0.10.2, 2.3 times with 0.7.2.
  assert 2 * replayed.mean() < recomputed.mean()
  assert 5 * replayed.max() < recomputed.max()
  assert np.median(replayed) > 0.2 * np.median(recomputed)  # what is left is rounding


# --- rows and updates -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ("normalized", "rows"),
  [(True, dict(rows=2, alignment=2)), (False, dict(several=False))],
  ids=str,
)
def test_replaying_the_own_routes_is_recomputing(normalized, rows):
  """To the bit, in value and gradient: in one micro-batch of rows, and in several."""
  method, params = make_method(normalized_expert_weights=normalized), make_params()
  batch = updates.in_rows(with_own_routes(params, updates.make_batch(), method), **rows)
  compared = updates.gradient_of(method, batch, params)
  replayed = updates.gradient_of(replaying(method), batch, params)
  jax.tree.map(np.testing.assert_array_equal, replayed, compared)
  assert compared[0][1]["routing/changed"].total == 0


def test_any_routes_replay_alike_padded_packed_and_accumulated():
  """In value, gradient and the share of choices that the trainer would make otherwise."""
  method, params = replaying(make_method()), make_params()
  batch = draw_routes(updates.make_batch())
  expected = updates.gradient_of(method, batch, params)
  other = updates.gradient_of(method, draw_routes(batch, seed=4), params)
  assert relative_distance(expected[1], other[1]) > 0.05  # the routes matter
  router = expected[1]["blocks"]["experts"]["router"]
  assert np.abs(np.asarray(router)).max() > 0  # and the router learns
  packed = updates.in_rows(batch, rows=2, alignment=2)
  assert packed.routes is None and packed.packed.routes.dtype == np.uint8
  found = updates.gradient_of(method, packed, params)
  assert relative_distance(found[1], expected[1]) < 1e-5
  shares = [
    float(metrics["routing/changed"].total / metrics["routing/changed"].weight)
    for (_, metrics), _ in (expected, found)
  ]
  assert 0.4 < shares[0] < 0.8 and shares[0] == pytest.approx(shares[1], abs=0.02)
  # Of groups in another order, which lie in other rows.
  order = np.random.default_rng(0).permutation(P)
  permuted = updates.in_rows(jax.tree.map(lambda x: x[order], batch), rows=2, alignment=2)
  found = updates.gradient_of(method, permuted, params)
  assert relative_distance(found[1], expected[1]) < 1e-5


def test_rows_hold_the_routes_of_their_tokens():
  batch = draw_routes(updates.make_batch())
  packed = updates.in_rows(batch, rows=2).packed
  flat = packed.routes.reshape(-1, LAYERS, K)
  np.testing.assert_array_equal(
    flat[packed.places[packed.places >= 0]], batch.routes[batch.mask > 0]
  )
  rows = packed.rows
  of_prompt = (rows.prompts >= 0) & (rows.starts == rows.prompt_ends)
  of_prompt &= rows.positions < np.asarray(batch.prompts.lengths)[rows.prompts] - 1
  at = S - np.asarray(batch.prompts.lengths)[rows.prompts] + rows.positions
  expected = batch.prompt_routes[rows.prompts[of_prompt], at[of_prompt]]
  np.testing.assert_array_equal(packed.routes[of_prompt], expected)
  assert not packed.routes[rows.prompts < 0].any()


def test_the_load_is_that_of_the_experts_that_are_taken():
  batch, params = updates.in_rows(draw_routes(updates.make_batch()), several=False), make_params()
  real = batch.packed.rows.prompts[0] >= 0
  taken = batch.packed.routes[0][real]
  expected = [np.bincount(taken[:, layer].ravel(), minlength=E) for layer in range(LAYERS)]
  forward = jax.jit(policy_forward, static_argnames="method")
  (replayed, _), (recomputed, _) = (
    forward(params, {}, batch, method=m) for m in (replaying(make_method()), make_method())
  )
  np.testing.assert_array_equal(replayed.load.choices, expected)
  assert not np.array_equal(recomputed.load.choices, expected)
  # Both routers read the same inputs in the first layer, and change the same choices there.
  assert replayed.changes.choices[0] == recomputed.changes.choices[0] > 0


def test_a_process_packs_the_routes_of_its_own_rows():
  batch = draw_routes(updates.make_batch())
  layout = row_layout(
    prompts=P, group_size=G, max_prompt_length=S, max_response_length=T, length=12, alignment=1,
    devices=4, tokens_per_micro_batch=12,
  )  # fmt: skip
  whole, part = pack_batch(batch, layout).packed, pack_batch(batch, layout, {1, 2}).packed
  np.testing.assert_array_equal(part.routes[:, 1:3], whole.routes[:, 1:3])
  assert whole.routes[:, [0, 3]].any() and not part.routes[:, [0, 3]].any()
  np.testing.assert_array_equal(part.tokens, whole.tokens)
  mesh = sharding.make_mesh()
  assert sharding.rows_of_process(mesh, 6) == set(range(6))


def test_raw_logprobs_replay_too():
  """The padded pass of `recorded="raw"` and the update's agree under the same routes."""
  method, params = replaying(make_method()), make_params()
  batch = draw_routes(updates.make_batch())
  raw = scored(
    params, {}, batch.prompts, batch.tokens, batch.mask.sum(-1).astype(np.int32),
    batch.prompt_routes, batch.routes, model=method.model, sampling=Sampling(),
  )  # fmt: skip
  logprobs, _ = policy_scored(params, {}, updates.in_rows(batch, several=False), method=method)
  real = batch.mask > 0
  np.testing.assert_allclose(np.asarray(raw)[real], np.asarray(logprobs)[real], atol=1e-5)


def test_padding_takes_no_expert_where_raw_logprobs_replay():
  """Recorded routes are padded with 0: k times expert 0, for which blocks would have no room."""
  rng, p, g, length = np.random.default_rng(0), 4, 4, 7
  model = make_method(num_experts=K, expert_products="blocks").model
  params = make_params(num_experts=K, expert_products="blocks")
  prompts = Prompts(rng.integers(1, V, (p, 8)).astype(np.int32), np.full(p, 8, np.int32))
  tokens = rng.integers(1, V, (p, g, length)).astype(np.int32)
  lengths = rng.integers(1, length + 1, (p, g)).astype(np.int32)
  both = rng.permuted(np.tile(np.arange(K, dtype=np.uint8), (p, g, length, LAYERS, 1)), axis=-1)
  both[:, :, 0] = both[:, :1, 0]
  before = np.tile(np.arange(K, dtype=np.uint8), (p, 8, LAYERS, 1))
  padded = np.where((np.arange(length) > lengths[..., None])[..., None, None], np.uint8(0), both)
  raw = functools.partial(
    scored, params, {}, prompts, tokens, lengths, model=model, sampling=Sampling()
  )
  counted = np.arange(length) < lengths[..., None]
  found, expected = (np.asarray(raw(before, routes))[counted] for routes in (padded, both))
  np.testing.assert_array_equal(found, expected)


def test_a_batch_without_routes_is_not_replayed():
  with pytest.raises(AssertionError, match="no routes to replay"):
    policy_logprobs(make_params(), {}, updates.make_batch(), method=replaying(make_method()))


# --- how many change ------------------------------------------------------------------------------


def test_changes_are_counted_as_sets():
  recorded = jnp.asarray([[[0, 1], [2, 3]], [[4, 1], [0, 2]], [[0, 0], [0, 0]]], jnp.uint8)
  chosen = jnp.asarray([[[1, 0], [2, 4]], [[1, 4], [2, 0]], [[-1, -1], [-1, -1]]])
  changes = count_changes(recorded, chosen)
  np.testing.assert_array_equal(changes.choices, [0, 1])
  assert (changes.tokens, changes.num_choices, changes.num_tokens) == (1, 4, 2)
  metrics = change_metrics(changes)
  assert metrics["routing/changed"].total / metrics["routing/changed"].weight == 1 / 8
  assert changes_by_layer(changes, [0, 3])["routing/changed_layer_3"] == 1 / 4
  nothing = RouteChanges(jnp.zeros(2), jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))
  assert changes_by_layer(nothing, [0, 3])["routing/changed_layer_0"] == 0


def test_recorded_routes_belong_to_the_token_that_is_read():
  batch = draw_routes(updates.make_batch())
  routes = recorded_routes(batch)
  assert isinstance(routes, Routes)
  np.testing.assert_array_equal(routes.responses[:, :, 0], batch.routes[:, :, 1])
  np.testing.assert_array_equal(routes.prompts[:, -1], batch.routes[:, 0, 0])
  again = routes_of_inputs(batch.prompt_routes, batch.routes)
  jax.tree.map(np.testing.assert_array_equal, again, routes)
