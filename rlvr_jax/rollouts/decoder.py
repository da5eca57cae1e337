"""Generation in slots, as pure functions: prefill prompts, insert them, decode in bursts.

A slot decodes one response. When a response has ended, its slot takes the next response, so that
short responses do not wait for long responses. `rollouts.engine` runs these functions from the
host.

A layer with attention has a KV cache. A gated DeltaNet has a state, which a burst carries from
token to token; the state changes only in running slots.

The bits of a rollout depend only on its prompt, its key and the parameters: not on its slot, on the
rollouts in other slots, or on the order of requests. To ensure this, every matrix product has a
fixed number of rows and more than one column. For the same reason a burst always begins at a
multiple of its length, and blocks of the cache are accumulated in order (`ops.decoding`).

In a dialogue the environment's replies stand between the policy's turns. After each reply a prefill
computes the response's cache again, up to the last multiple of a burst's length. The next burst
first decodes the known tokens after this multiple again, and then samples. So the bits do not
depend on the time at which a reply came.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlvr_jax.ops.caches import Blocks, Cache, CacheShape, Pages, Part, Reach, Read, read_back
from rlvr_jax.ops.decoding import cached_attention
from rlvr_jax.ops.delta_rule import DeltaInputs, DeltaState, mix_token
from rlvr_jax.ops.draw import draw_tokens, random_bits
from rlvr_jax.ops.layers import DELTA, Heads, Kind, layers_in, rows_of, take_rows
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.types import Array, Head, Params, Sampling

_SLOTS = ("data", "fsdp")  # axes of the mesh over which the slots are split
_CACHES: dict[str, type[Cache] | type[Pages]] = {"blocks": Cache, "pages": Pages}
_Part = TypeVar("_Part", bound=Part)
OnHost: TypeAlias = Array | np.ndarray  # filled by the host, read by a program
_Parts: TypeAlias = tuple[Part, ...]  # one per layer with attention
_States: TypeAlias = tuple[DeltaState, ...]  # one per gated DeltaNet


class DeltaSizes(Protocol):
  """The fields of a `models.delta_net.DeltaSettings` that decoding reads."""

  @property
  def value_heads(self) -> int: ...
  @property
  def key_heads(self) -> int: ...
  @property
  def key_dim(self) -> int: ...
  @property
  def value_dim(self) -> int: ...
  @property
  def num_taps(self) -> int: ...
  @property
  def channels(self) -> tuple[int, int, int]: ...


class NetworkSizes(Protocol):
  """The fields of a `models.transformer.TransformerConfig` that decoding reads."""

  @property
  def heads(self) -> tuple[Heads, ...]: ...
  @property
  def compute_dtype(self) -> str: ...
  @property
  def precision(self) -> str: ...
  @property
  def kinds(self) -> tuple[Kind, ...]: ...
  @property
  def delta(self) -> DeltaSizes | None: ...
  @property
  def routes(self) -> jax.ShapeDtypeStruct | None: ...


class Tables(Protocol):
  """Rotary tables for the steps of a burst."""

  def at(self, index: Array) -> Tables:
    """The tables of one step, for `DecodedModel.decode`."""
    ...


class DecodedModel(Protocol):
  """The functions of a `models.functional.Model` that decoding calls."""

  @property
  def config(self) -> NetworkSizes: ...
  @property
  def mesh(self) -> Mesh | None: ...
  @property
  def init(self) -> Callable[[Array], Params]: ...
  @property
  def head(self) -> Callable[[Params], Head]: ...
  @property
  def combine(self) -> Callable[[Params, Params], Params]: ...
  @property
  def decoding_params(self) -> Callable[[Params], Params]: ...
  @property
  def decoding_shardings(self) -> Callable[[Params], Params] | None: ...
  @property
  def rotary(self) -> Callable[[Array], Tables]: ...
  @property
  def prefill(
    self,
  ) -> Callable[..., tuple[list[tuple[Array, Array]], list[DeltaState], Array | None]]: ...
  @property
  def decode(self) -> Callable[..., tuple[Array, list[Cache], list[DeltaState], Array | None]]: ...


class Settings(NamedTuple):
  """Settings that are fixed when the functions are compiled."""

  model: DecodedModel
  sampling: Sampling  # the distribution to sample from
  slots: int  # responses decoded at a time
  shape: CacheShape
  max_new_tokens: int  # T
  stop_tokens: tuple[int, ...]  # a stop token ends a response and is part of it
  cache: str = "blocks"  # or "pages", as `caches.choose_cache` returned it
  cache_format: str = ""  # one of `caches.FORMATS`
  cores: int = 1  # cores of a device, over which the kernel for pages splits the slots
  has_replies: bool = False  # whether responses are dialogues
  records_routes: bool = False  # whether bursts return the experts that a mixture chooses

  @property
  def routes(self) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of a token's routes, if they are recorded."""
    return self.model.config.routes if self.records_routes else None


class Known(NamedTuple):
  """Tokens that a dialogue already has when a burst begins."""

  tokens: OnHost  # i32[slots, steps], response tokens from the burst's first step on
  number: OnHost  # i32[slots], number of known tokens, after which the burst samples


class State(NamedTuple):
  """The slots between two bursts."""

  prompts: tuple[Part, ...]  # KV cache of the prompts, one per layer with attention
  responses: tuple[Part, ...]  # KV cache of the responses, one per layer with attention
  states: tuple[
    DeltaState, ...
  ]  # one per gated DeltaNet: its recurrent state after the cached tokens
  token: Array  # i32[slots], the next token to decode: at first the prompt's last token
  prompt: Array  # i32[slots], number of cached tokens of the prompt: all but the last
  generated: Array  # i32[slots], number of tokens of the response
  running: Array  # bool[slots]
  keys: Array  # u32[slots, 2], data of the responses' PRNG keys
  known: Known | None = None  # known tokens of the next burst, for dialogues


class Prefilled(NamedTuple):
  """Results of prefill: a KV cache per layer with attention, and a state per gated DeltaNet."""

  prompts: tuple[Part, ...]
  states: tuple[DeltaState, ...]
  responses: tuple[Part, ...] = ()  # KV cache of the responses so far, for dialogues that go on
  routes: Array | None = None  # [R, S, sparse layers, k], if they are recorded


class Fresh(NamedTuple):
  """New contents of slots; row s is for slot s."""

  row: OnHost  # i32[slots], index of the prompt in its prefilled batch; −1 leaves the slot as it is
  token: OnHost  # i32[slots], as in `State`
  prompt: OnHost  # i32[slots], as in `State`
  keys: OnHost  # u32[slots, 2], as in `State`
  # The next two are for dialogues.
  generated: OnHost | None = None  # i32[slots], number of cached tokens of the response
  known: Known | None = None


class Emitted(NamedTuple):
  """The results of a burst, copied to the host after the burst."""

  tokens: Array  # i32[slots, steps]
  behavior_logprobs: Array  # f32[slots, steps], exact, under the sampled distribution
  generated: Array  # i32[slots], number of tokens of the response so far
  running: Array  # bool[slots]; False after a stop token or T tokens
  stopped: Array  # bool[slots], whether the last token was a stop token
  steps: Array  # i32[], decoding steps of this burst
  # [slots, steps, sparse layers, k], the experts chosen for each step's input token; None unless
  # recorded
  routes: Array | None = None


# Values carried from step to step of a burst: tokens to decode, staged keys and values, states, and
# results so far.
_Carry: TypeAlias = tuple[Array, tuple[Cache, ...], _States, Emitted]


def take_layer(
  trained: Params, frozen: Params, rows: Mapping[str, Array], *, model: DecodedModel
) -> Params:
  """Selects the parameters of one layer, sharded as on the trainer's devices.

  Layers are loaded one by one, since a program that resharded all layers would hold many layers
  unsharded. This function and `load_layer` are compiled separately: in one program, XLA might also
  copy the layers that are not selected.

  Args:
    trained, frozen: see `Model.combine`.
    rows: the layer's index in each stack of parameters, i32[] each, from `ops.layers.rows_of`.
  """
  return _select_layer(trained, frozen, rows, model)["blocks"]


def load_layer(blocks: Params, *, model: DecodedModel) -> Params:
  """Converts a layer from `take_layer` to the form that `decode` takes."""
  return model.decoding_params({"blocks": blocks})["blocks"][0]


def load_others(trained: Params, frozen: Params, *, model: DecodedModel) -> Params:
  """Converts all parameters except the layers to the form that `decode` takes."""
  first = rows_of(0, model.config.kinds)
  return {**model.decoding_params(_select_layer(trained, frozen, first, model)), "blocks": ()}


def _select_layer(
  trained: Params, frozen: Params, rows: Mapping[str, Array | np.int32], model: DecodedModel
) -> Params:
  """The combined parameters, with one layer in "blocks"."""
  params = model.combine(trained, frozen)
  select = lambda stacked, row: jax.lax.dynamic_slice_in_dim(stacked, row, 1)
  return {**params, "blocks": take_rows(params["blocks"], rows, select)}


def empty_slots(settings: Settings) -> State:
  """The state of slots without responses; the caches are zero."""
  c, shape, slots = settings.model.config, settings.shape, settings.slots

  def make_caches(part: Blocks) -> tuple[Part, ...]:
    kind, dtype = _CACHES[settings.cache], cache_dtype(c, settings.cache_format)

    def zeros(heads: Heads) -> Part:
      axes = (cached_heads(heads, _tensor_size(settings)), part.number, slots)
      return _split_over_devices(
        settings, heads, kind.zeros(axes, part.size, heads.width, dtype), slots=2
      )

    return tuple(zeros(heads) for heads in c.heads)

  integers = jnp.zeros(slots, jnp.int32)
  return State(
    prompts=make_caches(shape.prompt),
    responses=make_caches(shape.response),
    states=_empty_states(settings),
    token=integers,
    prompt=integers,
    generated=integers,
    running=jnp.zeros(slots, bool),
    keys=jnp.zeros((slots, 2), jnp.uint32),
    known=_nothing_known(settings) if settings.has_replies else None,
  )


def _empty_states(settings: Settings) -> _States:
  """The states of slots without tokens."""
  c, slots = settings.model.config, settings.slots
  if c.delta is None:
    return ()
  sizes = c.delta
  zeros = lambda *shape: jnp.zeros((slots, *shape), c.compute_dtype)
  query, key, value = (zeros(sizes.num_taps - 1, channels) for channels in sizes.channels)
  memory = jnp.zeros(
    (slots, sizes.value_heads, sizes.key_dim, sizes.value_dim), logprobs_dtype(settings)
  )
  state = _split_states(settings, DeltaState(memory, (query, key, value)))
  return (state,) * len(layers_in(DELTA, c.kinds))


def _nothing_known(settings: Settings) -> Known:
  slots, steps = settings.slots, settings.shape.steps
  return Known(jnp.zeros((slots, steps), jnp.int32), jnp.zeros(slots, jnp.int32))


def _no_routes(settings: Settings) -> Array | None:
  routes = settings.routes
  if routes is None:
    return None
  return jnp.zeros((settings.slots, settings.shape.steps, *routes.shape), routes.dtype)


def prefill(
  params: Params,
  tokens: Array,
  lengths: Array | None = None,
  prompt: Array | None = None,
  *,
  settings: Settings,
) -> Prefilled:
  """Computes the KV caches of prompts, in the layout of `ops.caches`, and the DeltaNet states.

  Args:
    params: the result of `Model.decoding_params`.
    tokens: i32[R, S], right-padded; S is a multiple of the cache's block size. If dialogues
      continue, each row has the prompt and the tokens of the response so far.
    lengths: i32[R], the number of tokens in each row; None: S in every row.
    prompt: i32[R], for dialogues that continue: the number of tokens in the prompt's cache. The
      prompt's last token does not count: it is the first token in the response's cache.
  """
  # Prompts attend to keys and values as their caches will hold them, like decoded tokens.
  attended = (read_back,) if settings.cache_format else ()
  layers, found, routes = settings.model.prefill(params, tokens, lengths, *attended)
  states = tuple(_split_states(settings, state) for state in found)
  shape = settings.shape
  recorded = None
  if settings.routes is not None and routes is not None:
    recorded = routes.astype(settings.routes.dtype)
  if prompt is None:
    return Prefilled(_to_caches(layers, shape.prompt, settings), states, routes=recorded)
  # A response begins directly after its prompt, so its positions differ by row.
  room = min(tokens.shape[1], shape.response.tokens)
  places = prompt[:, None] + jnp.arange(-(-room // shape.response.size) * shape.response.size)
  # Positions after the end are never read.
  places = jnp.minimum(places, tokens.shape[1] - 1)[..., None, None]
  take_response = lambda x: jnp.take_along_axis(x, places, axis=1)
  prompts = [(k[:, : shape.prompt.tokens], v[:, : shape.prompt.tokens]) for k, v in layers]
  responses = [(take_response(k), take_response(v)) for k, v in layers]
  return Prefilled(
    _to_caches(prompts, shape.prompt, settings),
    states,
    _to_caches(responses, shape.response, settings),
    recorded,
  )


def _to_caches(
  layers: Sequence[tuple[Array, Array]], part: Blocks, settings: Settings
) -> tuple[Part, ...]:
  """The keys and values [R, S, K, H] of layers, as parts of a cache with the blocks `part`."""
  c = settings.model.config
  kind, dtype = _CACHES[settings.cache], cache_dtype(c, settings.cache_format)

  def to_cache(heads: Heads, keys: Array, values: Array) -> Part:
    copies = cached_heads(heads, _tensor_size(settings)) // heads.keys
    repeat = lambda x: jnp.repeat(x, copies, axis=2)
    cache = kind.of_prompts(repeat(keys), repeat(values), part.size, dtype)
    return _split_over_devices(settings, heads, cache, slots=None)

  return tuple(to_cache(heads, *layer) for heads, layer in zip(c.heads, layers, strict=True))


def insert(state: State, prefilled: Prefilled, fresh: Fresh, *, settings: Settings) -> State:
  """Copies the prefilled caches and states of prompts, and of dialogues that continue, into slots.

  The slots with new contents run from now on. The caller should donate `state`.
  """
  new = jnp.asarray(fresh.row >= 0)

  def put(cached: Array, prompts: Array) -> Array:
    blocks = prompts.shape[1]
    by_slot = jnp.take(prompts, jnp.maximum(fresh.row, 0), axis=2)
    is_new = new.reshape(-1, *[1] * (cached.ndim - 3))
    updated = jnp.where(is_new, by_slot, cached[:, :blocks])
    return cached.at[:, :blocks].set(updated)

  where_new = lambda x, y: jnp.where(new.reshape(-1, *[1] * (y.ndim - 1)), x, y)
  of_slots = lambda x: jnp.take(x, jnp.maximum(fresh.row, 0), axis=0)
  responses = state.responses
  if prefilled.responses:
    responses = jax.tree.map(put, responses, prefilled.responses)
  generated = 0 if fresh.generated is None else fresh.generated
  return State(
    prompts=jax.tree.map(put, state.prompts, prefilled.prompts),
    responses=responses,
    states=jax.tree.map(lambda x, y: where_new(of_slots(x), y), prefilled.states, state.states),
    token=where_new(fresh.token, state.token),
    prompt=where_new(fresh.prompt, state.prompt),
    generated=where_new(generated, state.generated),
    running=new | state.running,
    keys=where_new(fresh.keys, state.keys),
    known=jax.tree.map(where_new, fresh.known, state.known),
  )


def halt(state: State, ended: Array) -> State:
  """Stops the slots `ended`, bool[slots], until `insert` refills or `resume` restarts them."""
  return state._replace(running=state.running & ~ended)


def resume(state: State, halted: Array, token: Array, known: Known | None = None) -> State:
  """Restarts slots that were halted during a burst of other slots.

  Args:
    state: the state after that burst.
    halted: bool[slots], the slots to restart.
    token: i32[slots], the next tokens of these slots, which the burst has overwritten.
    known: the known tokens of dialogues, as in `State`.
  """
  where_halted = lambda x, y: jnp.where(halted.reshape(-1, *[1] * (y.ndim - 1)), x, y)
  return state._replace(
    running=state.running | halted,
    token=where_halted(token, state.token),
    known=jax.tree.map(where_halted, known, state.known),
  )


def burst(
  params: Params, state: State, *, settings: Settings, read: Read, has_halted: bool = False
) -> tuple[State, Emitted]:
  """Decodes up to `shape.steps` tokens in every slot; ends early when no slot is running.

  The caches do not change within a burst; new keys and values go into a small buffer, `staged`. So
  the loop carries few arrays, and no step copies a cache. The caller should donate `state`.

  Args:
    params: the result of `Model.decoding_params`.
    state: the state of the slots.
    settings: settings that are compiled into the program.
    read: the blocks of the caches that running slots may have reached; also compiled into the
      program.
    has_halted: whether slots that are not running keep their caches, for `resume`.
  """
  c, shape, slots = settings.model.config, settings.shape, settings.slots
  reach = Reach.of(state.prompt, state.generated, state.running)
  head = settings.model.head(params)
  dtype = cache_dtype(c, settings.cache_format)

  def stage_nothing(heads: Heads) -> Cache:
    axes = (cached_heads(heads, _tensor_size(settings)), slots)
    return _split_over_devices(
      settings, heads, Cache.zeros(axes, shape.steps, heads.width, dtype), slots=1
    )

  staged = tuple(stage_nothing(heads) for heads in c.heads)
  emitted = Emitted(
    tokens=jnp.zeros((slots, shape.steps), jnp.int32),
    behavior_logprobs=jnp.zeros((slots, shape.steps), logprobs_dtype(settings)),
    generated=state.generated,
    running=state.running,
    stopped=jnp.zeros(slots, bool),
    steps=jnp.int32(0),
    routes=_no_routes(settings),
  )

  caches = tuple(
    (prompt.first(read.prompt), response.first(read.response))
    for prompt, response in zip(state.prompts, state.responses, strict=True)
  )
  tables = rotary_tables(reach, settings=settings)

  def step(carry: _Carry) -> _Carry:
    token, staged, states, emitted = carry
    now = emitted.steps
    hidden, staged, states, routes = decode(
      params, caches, staged, states, reach, tables, token, now, emitted.running, settings=settings
    )
    token, logprob = _sample(settings, hidden, head, state.keys, state.generated + now)
    sampled = jnp.ones(slots, bool)
    if state.known is not None:
      sampled = now >= state.known.number
      known = jax.lax.dynamic_index_in_dim(state.known.tokens, now, axis=1, keepdims=False)
      token, logprob = jnp.where(sampled, token, known), jnp.where(sampled, logprob, 0)
    recorded = _record_token(settings, emitted, token, logprob, sampled, routes)
    return token, staged, states, recorded

  is_unfinished = lambda carry: (carry[-1].steps < shape.steps) & jnp.any(carry[-1].running)
  carry = (state.token, staged, state.states, emitted)
  token, staged, states, emitted = jax.lax.while_loop(is_unfinished, step, carry)
  responses = state.responses
  if shape.response.number:  # without a cache of responses, every response is a single burst
    flushed = state.running if has_halted else None
    responses = _flush_staged(settings, responses, staged, state.generated, flushed)
  generated, running = emitted.generated, emitted.running
  state = state._replace(
    responses=responses, states=states, token=token, generated=generated, running=running
  )
  if state.known is not None:
    state = state._replace(known=_nothing_known(settings))
  return state, emitted


def rotary_tables(reach: Reach, *, settings: Settings) -> Tables:
  """The rotary tables of a burst, by step, so that no step computes cosines."""
  steps = jnp.arange(settings.shape.steps)[:, None]
  return settings.model.rotary((reach.prompt + reach.response + steps)[..., None])


def decode(
  params: Params,
  caches: Sequence[tuple[Part, Part]],
  staged: tuple[Cache, ...],
  states: tuple[DeltaState, ...],
  reach: Reach,
  tables: Tables,
  token: Array,
  step: Array,
  running: Array,
  *,
  settings: Settings,
) -> tuple[Array, tuple[Cache, ...], tuple[DeltaState, ...], Array | None]:
  """Runs one token of every slot through the network.

  Args:
    params: the result of `Model.decoding_params`.
    caches: the caches of prompts and of responses, per layer with attention; they do not change
      within a burst.
    staged: keys and values of the burst's earlier tokens in these layers.
    states: a state per gated DeltaNet, after these tokens.
    reach: per slot, the numbers of cached tokens of prompt and response that attention reads.
    tables: the result of `rotary_tables`.
    token: i32[slots].
    step: i32[], index of the token in the burst.
    running: bool[slots], the slots whose result is used; the states of other slots do not change.
  Returns:
    Hidden states [slots, D], which predict the next tokens; `staged` with the keys and values of
    `token`; the states after `token`; and the experts that a mixture chose, i32[slots, sparse
    layers, k].
  """

  def attend(
    layer: int, query: Array, key: Array, value: Array, attention_settings: dict[str, Any]
  ) -> tuple[Array, Cache]:
    heads = settings.model.config.heads[layer]
    copies = cached_heads(heads, _tensor_size(settings)) // heads.keys
    repeat = lambda x: jnp.repeat(x, copies, axis=1)
    staged_in_layer = staged[layer].stage(repeat(key), repeat(value), step)
    attention = _make_attention(settings, heads, attention_settings)
    return attention(query, *caches[layer], staged_in_layer, reach, step), staged_in_layer

  def delta(layer: int, inputs: DeltaInputs) -> tuple[Array, DeltaState]:
    return mix_token(inputs, states[layer], running)

  # One step serves all slots: results of slots that have ended are ignored, and experts skip them.
  hidden, now_staged, now_states, routes = settings.model.decode(
    params, token, tables.at(step), attend, delta, running
  )
  return hidden, tuple(now_staged), tuple(now_states), routes


def _make_attention(
  settings: Settings, of_layer: Heads, attention_settings: dict[str, Any]
) -> Callable[..., Array]:
  """`cached_attention` of a layer; on a mesh, each device runs a kernel on its slots and heads."""
  attend = functools.partial(cached_attention, **attention_settings, cores=settings.cores)
  mesh = settings.model.mesh
  if settings.cache == "blocks" or mesh is None or mesh.size == 1:
    return attend
  heads = _heads_axis(settings, of_layer)
  slots: Any = PartitionSpec(_SLOTS)
  queries, cache = PartitionSpec(_SLOTS, heads), PartitionSpec(heads, None, _SLOTS)
  reach = Reach(slots, slots)
  specs = (queries, cache, cache, PartitionSpec(heads, _SLOTS), reach, PartitionSpec())
  return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)


def _sample(
  settings: Settings, hidden: Array, head: Head, keys: Array, position: Array
) -> tuple[Array, Array]:
  """Samples from hidden [slots, D]: (tokens i32[slots], their log-probabilities f32[slots])."""
  with jax.named_scope("head"):
    logits = head_logits(hidden, head)
  tensor = _tensor_size(settings)
  shards = tensor if logits.shape[-1] % tensor == 0 else 1
  bits = random_bits(keys, position)
  return draw_tokens(logits, settings.sampling, bits, shards=shards)


def _record_token(
  settings: Settings,
  emitted: Emitted,
  token: Array,
  logprob: Array,
  sampled: Array,
  routes: Array | None,
) -> Emitted:
  """Adds a token of every running slot to `emitted`; a known stop token does not end a response."""
  now, running, of = emitted.steps, emitted.running, emitted.routes
  put = lambda into, x: jax.lax.dynamic_update_slice_in_dim(into, x[:, None], now, axis=1)
  stop = jnp.any(token[:, None] == jnp.asarray(settings.stop_tokens, jnp.int32), axis=-1)
  generated = emitted.generated + running
  return Emitted(
    tokens=put(emitted.tokens, token),
    behavior_logprobs=put(
      emitted.behavior_logprobs, logprob.astype(emitted.behavior_logprobs.dtype)
    ),
    generated=generated,
    running=running & ~(stop & sampled) & (generated < settings.max_new_tokens),
    stopped=jnp.where(running, stop, emitted.stopped),
    steps=now + 1,
    routes=None if of is None else put(of, jnp.asarray(routes, of.dtype)),
  )


def _flush_staged(
  settings: Settings,
  caches: tuple[Part, ...],
  staged: tuple[Cache, ...],
  response: Array,
  flushed: Array | None = None,
) -> tuple[Part, ...]:
  """Writes staged keys and values to the responses' caches; each device writes its slots in place.

  Args:
    settings: settings that are compiled into the program.
    caches: the responses' caches, per layer with attention.
    staged: keys and values of a burst in these layers.
    response: i32[slots], number of tokens of the response that were cached before the burst.
    flushed: bool[slots], the slots that are written; None: all slots.
  """

  def at_once(
    caches: _Parts, staged: tuple[Cache, ...], response: Array, flushed: Array | None = None
  ) -> _Parts:
    pairs = zip(caches, staged, strict=True)
    return tuple(cache.flush(x, response, flushed) for cache, x in pairs)

  def slot_by_slot(
    caches: _Parts, staged: tuple[Cache, ...], response: Array, flushed: Array | None = None
  ) -> _Parts:
    def flush_slot(slot: Array, caches: _Parts) -> _Parts:
      start = response[slot]
      flush: Callable[[_Parts], _Parts] = lambda caches: tuple(
        cache.flush_slot(x, slot, start) for cache, x in zip(caches, staged, strict=True)
      )
      if flushed is None:
        return flush(caches)
      kept: _Parts = jax.lax.cond(flushed[slot], flush, lambda caches: caches, caches)
      return kept

    written: _Parts = jax.lax.fori_loop(0, response.size, flush_slot, caches)
    return written

  def on_device(*arguments: Any) -> _Parts:
    # On a GPU a loop over slots takes thousands of launches; on other devices a scatter is slower.
    written: _Parts = jax.lax.platform_dependent(*arguments, cuda=at_once, default=slot_by_slot)
    return written

  arguments = (caches, staged, response, *([] if flushed is None else [flushed]))

  mesh = settings.model.mesh
  if mesh is None or mesh.size == 1:
    return on_device(*arguments)
  axes = [_heads_axis(settings, heads) for heads in settings.model.config.heads]
  of_caches = tuple(PartitionSpec(axis, None, _SLOTS) for axis in axes)
  of_staged = tuple(PartitionSpec(axis, _SLOTS) for axis in axes)
  specs = (of_caches, of_staged, *[PartitionSpec(_SLOTS)] * (len(arguments) - 2))
  run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=of_caches, check_vma=False)
  written: _Parts = run(*arguments)
  return written


def slot_bytes(
  network: NetworkSizes,
  shape: CacheShape,
  tensor: int,
  cache_format: str = "",
  cache: str = "blocks",
) -> int:
  """Bytes of a slot on one device: KV cache, states, and keys/values that a burst stages or copies.

  Args:
    network: `TransformerConfig`.
    shape: sizes of the cache.
    tensor: number of devices that share a slot.
    cache_format: one of `caches.FORMATS`.
    cache: as in `Settings`.
  """
  copied = shape.copied_tokens if cache == "blocks" else 0
  of_tokens = (shape.tokens + copied) * token_bytes(network, tensor, cache_format)
  return of_tokens + state_bytes(network, tensor)


def state_bytes(network: NetworkSizes, tensor: int) -> int:
  """Bytes of a slot's states in all gated DeltaNets, on one device; see `slot_bytes`."""
  if network.delta is None:
    return 0
  sizes, shared = network.delta, tensor if network.delta.key_heads % tensor == 0 else 1
  compute = jnp.dtype(network.compute_dtype)
  memory = sizes.value_heads * sizes.key_dim * sizes.value_dim
  window = (sizes.num_taps - 1) * sum(sizes.channels)
  wide = jnp.promote_types(compute, jnp.float32)
  per_layer = memory * wide.itemsize + window * compute.itemsize
  return len(layers_in(DELTA, network.kinds)) * per_layer // shared


def token_bytes(network: NetworkSizes, tensor: int, cache_format: str = "") -> int:
  """Bytes of a token's keys and values on one device, in all layers; see `slot_bytes`."""
  dtype = cache_dtype(network, cache_format)

  def bytes_of_layer(heads: Heads) -> int:
    number = cached_heads(heads, tensor)
    on_device = number // tensor if number % tensor == 0 else number
    token = jax.eval_shape(lambda: Cache.zeros((on_device,), 1, heads.width, dtype))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(token))

  return sum(bytes_of_layer(heads) for heads in network.heads)


def cache_dtype(network: NetworkSizes, cache_format: str) -> str:
  """The dtype of cached keys and values: `cache_format`, or if it is "", the network's dtype."""
  return cache_format or network.compute_dtype


def cached_heads(heads: Heads, tensor: int) -> int:
  """Number of key/value heads in the cache, copies included.

  If `tensor` is a multiple of the number of key/value heads and divides the number of query heads,
  heads are copied so that each device has exactly one key/value head.

  Args:
    heads: the head counts of the layer.
    tensor: number of devices over which the heads are split.
  """
  copied = tensor % heads.keys == 0 and heads.queries % tensor == 0
  return tensor if copied else heads.keys


def _tensor_size(settings: Settings) -> int:
  """Size of the mesh axis `tensor`."""
  mesh = settings.model.mesh
  return 1 if mesh is None else mesh.shape["tensor"]


def logprobs_dtype(settings: Settings) -> jnp.dtype:
  """The dtype of the log-probabilities: at least float32."""
  return jnp.promote_types(settings.model.config.compute_dtype, jnp.float32)


def shardings(settings: Settings) -> tuple[State | None, NamedSharding | None]:
  """Shardings of the state and of the results that the host reads; None without a mesh.

  Slots are split over the mesh axes (data, fsdp). Heads are split over the axis `tensor` if the
  size of this axis divides the number of heads.
  """
  mesh = settings.model.mesh
  if mesh is None:
    return None, None
  sharding: Any = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  rows = sharding(_SLOTS)
  empty = jax.eval_shape(functools.partial(empty_slots, settings=settings))

  def of_caches(parts: _Parts) -> Any:
    axes = [_heads_axis(settings, heads) for heads in settings.model.config.heads]
    place = lambda part, axis: jax.tree.map(lambda _: sharding(axis, None, _SLOTS), part)
    return tuple(place(part, axis) for part, axis in zip(parts, axes, strict=True))

  caches = of_caches(empty.prompts), of_caches(empty.responses)
  states = tuple(
    jax.tree.map(lambda spec: sharding(*spec), _state_specs(settings)) for _ in empty.states
  )
  numbers = [rows] * (len(State._fields) - 4)
  values: Any = (*caches, states, *numbers)
  state = State(*values)
  known: Any = Known(rows, rows)
  return state._replace(known=known) if settings.has_replies else state, sharding()


def cores_per_device(mesh: Mesh | AbstractMesh | None) -> int:
  """Cores per device of the mesh: 2 on a TPU v5p, 1 on a v5e; 1 if the device reports no number."""
  if isinstance(mesh, AbstractMesh):
    return 1  # an abstract mesh has no devices to ask
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  return getattr(device, "num_cores", 1)


def loaded_shardings(model: DecodedModel) -> Params | None:
  """Shardings of the results of `load_layer` ("blocks") and `load_others`; None without a mesh.

  If the arguments of these functions are sharded in another way than the results, XLA may put the
  complete parameters on every device unless it is given these shardings.
  """
  if model.mesh is None or model.decoding_shardings is None:
    return None
  return model.decoding_shardings(jax.eval_shape(model.init, jax.random.key(0)))


def _heads_axis(settings: Settings, heads: Heads) -> str | None:
  """The mesh axis over which a layer's cached heads are split; None if they are replicated."""
  tensor = _tensor_size(settings)
  return "tensor" if cached_heads(heads, tensor) % tensor == 0 else None


def _split_over_devices(
  settings: Settings, heads: Heads, cache: _Part, *, slots: int | None
) -> _Part:
  """Keys and values [K, ...], split over devices by heads and, if `slots` is given, by slots."""
  mesh = settings.model.mesh
  if mesh is None or mesh.size == 1:
    return cache
  spec = [_heads_axis(settings, heads), *[_SLOTS if axis == slots else None for axis in (1, 2)]]
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  split: _Part = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), cache)
  return split


def _state_specs(settings: Settings) -> DeltaState:
  """The partition of a state: slots over (data, fsdp), heads over `tensor` if divisible by it."""
  sizes, tensor = settings.model.config.delta, _tensor_size(settings)
  heads = "tensor" if sizes is not None and sizes.key_heads % tensor == 0 else None
  memory: Any = PartitionSpec(_SLOTS, heads)
  window: Any = PartitionSpec(_SLOTS, None, heads)
  return DeltaState(memory, (window, window, window))


def _split_states(settings: Settings, state: DeltaState) -> DeltaState:
  """The states of rows or slots, split over the devices."""
  mesh = settings.model.mesh
  if mesh is None or mesh.size == 1:
    return state
  split: DeltaState = jax.tree.map(
    lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)),
    state,
    _state_specs(settings),
  )
  return split
