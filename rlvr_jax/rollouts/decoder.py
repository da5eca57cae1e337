"""Generation in slots, as pure functions: prefill prompts, insert them, decode in bursts.

A slot decodes one response. When it has ended, the slot takes the next one, so that short responses
do not wait for long ones. `rollouts.engine` runs these functions from the host.

A row's bits depend on its prompt, its key and the parameters alone: not on its slot, its neighbors
or the order of requests. So every product has a fixed number of rows, a burst always begins at a
multiple of its length, and blocks of the cache are accumulated in order (`ops.decoding`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rlvr_jax.ops.caches import Blocks, Cache, CacheShape, Pages, Part, Reach
from rlvr_jax.ops.decoding import cached_attention
from rlvr_jax.ops.logprobs import distribution, head_logits
from rlvr_jax.types import Array, Params, Sampling

_SLOTS = ("data", "fsdp")  # axes of the mesh over which the slots are split
_CACHES: dict[str, Any] = {"blocks": Cache, "pages": Pages}


class Settings(NamedTuple):
  """What is fixed when the functions are compiled."""

  model: Any  # provides `config`, `mesh`, `prefill`, `rotary`, `decode` and `head`
  sampling: Sampling  # the distribution to sample from
  slots: int  # responses that are decoded at a time
  shape: CacheShape
  max_new_tokens: int  # T
  stop_tokens: tuple[int, ...]  # any of them ends a response; it is part of the response
  cache: str = "blocks"  # or "pages", as `caches.choose_cache` returned it


class State(NamedTuple):
  """The slots between two bursts."""

  prompts: tuple[Part, ...]  # one per layer
  responses: tuple[Part, ...]
  token: Array  # i32[slots], the next token to decode: at first the prompt's last one
  prompt: Array  # i32[slots], cached tokens of the prompt, all but its last one
  generated: Array  # i32[slots], tokens of the response
  running: Array  # bool[slots]
  keys: Array  # u32[slots, 2], data of the responses' PRNG keys


class Fresh(NamedTuple):
  """New contents of slots; row s is for slot s."""

  row: Array  # i32[slots], index of the prompt in its prefilled batch; −1 leaves the slot as it is
  token: Array  # i32[slots]
  prompt: Array  # i32[slots]
  keys: Array  # u32[slots, 2]


class Emitted(NamedTuple):
  """What a burst has sampled; on the host after every burst."""

  tokens: Array  # i32[slots, steps]
  behavior_logprobs: Array  # f32[slots, steps], exact, under the distribution sampled from
  generated: Array  # i32[slots], tokens of the response so far
  running: Array  # bool[slots]; False after a stop token or T tokens
  stopped: Array  # bool[slots], the last token was a stop token
  steps: Array  # i32[], decoding steps of this burst


def take_layer(trained: Params, frozen: Params, layer: Array, *, model: Any) -> Params:
  """The parameters of one of the layers, as they lie on the trainer's devices.

  Layers are loaded one by one: a program that moved all of them into another layout would hold
  many of them whole. Nor may `load_layer` take one out, since XLA may then move the others too.

  Args:
    trained, frozen: see `Model.combine`.
    layer: i32[], its number.
  """
  return _with_layer(trained, frozen, layer, model)["blocks"]


def load_layer(blocks: Params, *, model: Any) -> Params:
  """A layer from `take_layer` as `decode` takes it."""
  return model.decoding_params({"blocks": blocks})["blocks"][0]


def load_others(trained: Params, frozen: Params, *, model: Any) -> Params:
  """The parameters that `decode` takes, without layers."""
  return {**model.decoding_params(_with_layer(trained, frozen, 0, model)), "blocks": ()}


def _with_layer(trained: Params, frozen: Params, layer: Array | int, model: Any) -> Params:
  params = model.combine(trained, frozen)
  one = lambda stacked: jax.lax.dynamic_slice_in_dim(stacked, layer, 1)
  return {**params, "blocks": jax.tree.map(one, params["blocks"])}


def empty(settings: Settings) -> State:
  """Slots without responses; their caches are zero."""
  c, shape, slots = settings.model.config, settings.shape, settings.slots
  heads = cached_heads(c, _tensor(settings))

  def caches(part: Blocks) -> tuple[Part, ...]:
    axes = (heads, part.number, slots)
    zeros = lambda: _CACHES[settings.cache].zeros(axes, part.size, c.head_dim, c.compute_dtype)
    return tuple(_placed(settings, zeros(), slots=2) for _ in range(c.num_layers))

  integers = jnp.zeros(slots, jnp.int32)
  return State(
    prompts=caches(shape.prompt),
    responses=caches(shape.response),
    token=integers,
    prompt=integers,
    generated=integers,
    running=jnp.zeros(slots, bool),
    keys=jnp.zeros((slots, 2), jnp.uint32),
  )


def prefill(params: Params, tokens: Array, *, settings: Settings) -> tuple[Part, ...]:
  """Keys and values of prompts, per layer [K, blocks, R, block, H].

  Args:
    params: from `Model.decoding_params`.
    tokens: i32[R, S], right-padded; S is a multiple of the block.
  """

  c, block = settings.model.config, settings.shape.prompt.size
  copies = cached_heads(c, _tensor(settings)) // c.num_kv_heads
  each = lambda x: jnp.repeat(x, copies, axis=2)
  kind = _CACHES[settings.cache]
  cached = lambda k, v: kind.of_prompts(each(k), each(v), block, c.compute_dtype)
  layers = settings.model.prefill(params, tokens)
  return tuple(_placed(settings, cached(*layer), slots=None) for layer in layers)


def insert(state: State, prefilled: tuple[Part, ...], fresh: Fresh, *, settings: Settings) -> State:
  """Puts prompts into slots, where they start to run; `state` is to be donated."""
  new = fresh.row >= 0

  def put(cached, prompts):
    blocks = prompts.shape[1]
    taken = jnp.take(prompts, jnp.maximum(fresh.row, 0), axis=2)
    kept = jnp.where(new[:, None, None], taken, cached[:, :blocks])
    return cached.at[:, :blocks].set(kept)

  either = lambda one, other: jnp.where(new.reshape(-1, *[1] * (other.ndim - 1)), one, other)
  return State(
    prompts=jax.tree.map(put, state.prompts, prefilled),
    responses=state.responses,
    token=either(fresh.token, state.token),
    prompt=either(fresh.prompt, state.prompt),
    generated=either(0, state.generated),
    running=new | state.running,
    keys=either(fresh.keys, state.keys),
  )


def burst(params: Params, state: State, *, settings: Settings) -> tuple[State, Emitted]:
  """Decodes up to `shape.steps` tokens in every slot; ends early when no slot is running.

  The caches do not change within a burst, in which keys and values are staged: so the loop carries
  little, and nothing is copied. `state` is to be donated.
  """
  c, shape, slots = settings.model.config, settings.shape, settings.slots
  reach = Reach.of(shape, state.prompt, state.generated, state.running)
  head = settings.model.head(params)
  axes = (cached_heads(c, _tensor(settings)), slots)
  empty = lambda: Cache.zeros(axes, shape.steps, c.head_dim, c.compute_dtype)
  staged = tuple(_placed(settings, empty(), slots=1) for _ in state.prompts)
  emitted = Emitted(
    tokens=jnp.zeros((slots, shape.steps), jnp.int32),
    behavior_logprobs=jnp.zeros((slots, shape.steps), logprobs_dtype(settings)),
    generated=state.generated,
    running=state.running,
    stopped=jnp.zeros(slots, bool),
    steps=jnp.int32(0),
  )

  caches = tuple(zip(state.prompts, state.responses, strict=True))
  tables = rotary(reach, settings=settings)

  def step(loop):
    token, staged, emitted = loop
    now = emitted.steps
    hidden, staged = decode(params, caches, staged, reach, tables, token, now, settings=settings)
    token, logprob = _sample(settings, hidden, head, state.keys, state.generated + now)
    return token, staged, _recorded(settings, emitted, token, logprob)

  unfinished = lambda loop: (loop[2].steps < shape.steps) & jnp.any(loop[2].running)
  token, staged, emitted = jax.lax.while_loop(unfinished, step, (state.token, staged, emitted))
  responses = state.responses
  if shape.response.number:  # else every response is a single burst
    responses = _flushed(settings, responses, staged, state.generated)
  generated, running = emitted.generated, emitted.running
  state = state._replace(responses=responses, token=token, generated=generated, running=running)
  return state, emitted


def rotary(reach: Reach, *, settings: Settings) -> Any:
  """The rotary tables of a burst, by step: once, so that no step and no layer computes cosines."""
  steps = jnp.arange(settings.shape.steps)[:, None]
  return settings.model.rotary((reach.prompt + reach.response + steps)[..., None])


def decode(
  params: Params,
  caches: Sequence[tuple[Part, Part]],
  staged: tuple[Cache, ...],
  reach: Reach,
  tables: Any,
  token: Array,
  step: Array,
  *,
  settings: Settings,
) -> tuple[Array, tuple[Cache, ...]]:
  """One token of every slot through the network.

  Args:
    params: from `Model.decoding_params`.
    caches: per layer, of the prompts and of the responses; not changed within a burst.
    staged: per layer, keys and values of the burst's earlier tokens.
    reach: of the caches.
    tables: from `rotary`.
    token: i32[slots].
    step: i32[], number of the token in its burst.
  Returns:
    Hidden states [slots, D] that predict the next tokens, and `staged` with this one.
  """

  network = settings.model.config
  copies = cached_heads(network, _tensor(settings)) // network.num_kv_heads
  each = lambda x: jnp.repeat(x, copies, axis=1)

  def attend(layer, query, key, value, of_layer):
    own = staged[layer].staged(each(key), each(value), step)
    out = _attention(settings, of_layer)(query, *caches[layer], own, reach, step)
    return out, own

  # A slot that has ended goes on like the others, to be ignored: one step serves all slots.
  hidden, staged = settings.model.decode(params, token, tables.at(step), attend)
  return hidden, tuple(staged)


def _attention(settings: Settings, of_layer: dict[str, Any]) -> Callable[..., Array]:
  """`cached_attention`; a kernel sees the slots and heads of its device."""
  attend = functools.partial(cached_attention, **of_layer)
  mesh = settings.model.mesh
  if settings.cache == "blocks" or mesh is None or mesh.size == 1:
    return attend
  heads, slots = _heads(settings), PartitionSpec(_SLOTS)
  queries, cache = PartitionSpec(_SLOTS, heads), PartitionSpec(heads, None, _SLOTS)
  reach: Any = slots, slots, PartitionSpec(), PartitionSpec()
  specs = (queries, cache, cache, PartitionSpec(heads, _SLOTS), Reach(*reach), PartitionSpec())
  return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)


def full(state: State, *, settings: Settings) -> State:
  """The same slots before the last burst of the longest responses to the longest prompts."""
  shape, constant = settings.shape, lambda value: jnp.full(settings.slots, value)
  return state._replace(
    prompt=constant(shape.prompt.tokens),
    generated=constant(shape.response.tokens),
    running=constant(True),
  )


def _sample(settings, hidden, head, keys, position):
  """Tokens i32[slots] and their log-probabilities f32[slots] from hidden [slots, D]."""
  with jax.named_scope("head"):
    logprobs = distribution(head_logits(hidden, head), settings.sampling)
  if settings.sampling.temperature == 0:
    tokens = jnp.argmax(logprobs, axis=-1)
  else:
    noise = lambda key, t: jax.random.gumbel(jax.random.fold_in(key, t), logprobs.shape[-1:])
    noise = jax.vmap(noise)(jax.random.wrap_key_data(keys), position)
    tokens = _first_largest(jax.lax.optimization_barrier(logprobs + noise))
  chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
  return tokens.astype(jnp.int32), chosen


def _first_largest(x: Array) -> Array:
  """The argmax of every row of x[R, V], in two reductions that XLA on CPU can vectorize.

  A row with NaN gives V − 1. Where XLA may fuse what computes x, a barrier must keep both
  reductions from rounding it differently.
  """
  last = x.shape[-1] - 1
  return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), jnp.arange(last + 1), last), -1)


def _recorded(settings: Settings, emitted: Emitted, token: Array, logprob: Array) -> Emitted:
  """`emitted` with one more token in every slot that is running."""
  now, running = emitted.steps, emitted.running
  put = lambda into, x: jax.lax.dynamic_update_slice_in_dim(into, x[:, None], now, axis=1)
  stop = jnp.any(token[:, None] == jnp.asarray(settings.stop_tokens, jnp.int32), axis=-1)
  generated = emitted.generated + running
  return Emitted(
    tokens=put(emitted.tokens, token),
    behavior_logprobs=put(
      emitted.behavior_logprobs, logprob.astype(emitted.behavior_logprobs.dtype)
    ),
    generated=generated,
    running=running & ~stop & (generated < settings.max_new_tokens),
    stopped=jnp.where(running, stop, emitted.stopped),
    steps=now + 1,
  )


def _flushed(
  settings: Settings, caches: tuple[Part, ...], staged: tuple[Cache, ...], response: Array
) -> tuple[Part, ...]:
  """The responses with what a burst has staged; every device writes its own slots, in place.

  Args:
    response: i32[slots], tokens of the response that were cached before the burst.
  """

  def on_device(caches, staged, response):
    def one(slot, caches):
      start = response[slot]
      return tuple(cache.flushed(x, slot, start) for cache, x in zip(caches, staged, strict=True))

    return jax.lax.fori_loop(0, response.size, one, caches)

  mesh = settings.model.mesh
  if mesh is None or mesh.size == 1:
    return on_device(caches, staged, response)
  into, new = PartitionSpec(_heads(settings), None, _SLOTS), PartitionSpec(_heads(settings), _SLOTS)
  specs = (into, new, PartitionSpec(_SLOTS))
  run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=into, check_vma=False)
  return run(caches, staged, response)


def slot_bytes(network: Any, shape: CacheShape, tensor: int) -> int:
  """Of a slot's keys and values, staged ones included, on one device of `tensor` that share it.

  Args:
    network: `TransformerConfig`.
  """
  heads = cached_heads(network, tensor)
  of_device = heads // tensor if heads % tensor == 0 else heads
  size = jnp.dtype(network.compute_dtype).itemsize
  token = network.num_layers * of_device * network.head_dim * 2 * size
  return token * shape.tokens


def cached_heads(network: Any, tensor: int) -> int:
  """Key/value heads in the cache: more than the network's where each of `tensor` devices has one.

  Args:
    network: `TransformerConfig`.
    tensor: devices that the heads are split over.
  """
  copied = tensor % network.num_kv_heads == 0 and network.num_heads % tensor == 0
  return tensor if copied else network.num_kv_heads


def _tensor(settings: Settings) -> int:
  mesh = settings.model.mesh
  return 1 if mesh is None else mesh.shape["tensor"]


def logprobs_dtype(settings: Settings) -> Any:
  """Of the log-probabilities: at least float32."""
  return jnp.promote_types(settings.model.config.compute_dtype, jnp.float32)


def shardings(settings: Settings) -> tuple[Any, Any]:
  """Where the state lies, and what the host reads; None where there is no mesh.

  Slots are split over (data, fsdp), and heads over `tensor` where it divides them.
  """
  mesh = settings.model.mesh
  if mesh is None:
    return None, None
  place: Any = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  rows = place(_SLOTS)
  cache = place(_heads(settings), None, _SLOTS)
  caches = (_CACHES[settings.cache](cache, cache),) * settings.model.config.num_layers
  return State(caches, caches, *[rows] * (len(State._fields) - 2)), place()


def _heads(settings: Settings) -> str | None:
  tensor = _tensor(settings)
  return "tensor" if cached_heads(settings.model.config, tensor) % tensor == 0 else None


def _placed(settings: Settings, cache: Any, *, slots: int | None) -> Any:
  """Keys and values [K, ...], with heads and the axis of slots, if any, split over devices."""
  mesh = settings.model.mesh
  if mesh is None or mesh.size == 1:
    return cache
  spec = [_heads(settings), *[_SLOTS if axis == slots else None for axis in (1, 2)]]
  place = NamedSharding(mesh, PartitionSpec(*spec))
  return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place), cache)
