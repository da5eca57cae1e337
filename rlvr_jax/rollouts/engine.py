"""The host's side of generation: a stream of requests through slots that are refilled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.ops.caches import CacheShape, Part
from rlvr_jax.ops.precision import with_matmul_precision
from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.decoder import Emitted, Fresh, Settings
from rlvr_jax.types import Array, Params, Prompts, Rollouts, Sampling

_PREFILL_TOKENS = 8192  # of a batch of prompts


Owner = TypeVar("Owner")  # whoever asks for rollouts; it comes back with them


class Request(NamedTuple, Generic[Owner]):
  """A prompt and the keys of its rollouts."""

  owner: Owner
  prompt_index: int  # in the owner's batch
  prompt: np.ndarray  # i32[n], n ≥ 1 tokens
  keys: np.ndarray  # u32[G, 2], data of one PRNG key per rollout


class Group(NamedTuple, Generic[Owner]):
  """The rollouts of a request; NumPy."""

  owner: Owner
  prompt_index: int
  tokens: np.ndarray  # i32[G, T], right-padded
  lengths: np.ndarray  # i32[G], 1 ≤ length ≤ T
  stopped: np.ndarray  # bool[G], ended by a stop token
  behavior_logprobs: np.ndarray  # f32[G, T], under the distribution sampled from; 0 where padded


def requests(
  prompts: Prompts, key: Array, group_size: int, owner: Owner, first: int = 0
) -> list[Request[Owner]]:
  """A request per prompt; rollout g of prompt p has its own key.

  Args:
    prompts: P prompts, NumPy.
    key: one PRNG key; equal keys and prompts' numbers give equal noise, whatever else is sampled.
    group_size: G.
    owner: of the requests.
    first: index of the first prompt in the owner's batch.
  """
  keys = np.asarray(_row_keys(key, np.zeros((len(prompts.lengths), group_size), bool)))
  real = zip(prompts.tokens, prompts.lengths, strict=True)
  return [
    Request(owner, first + p, np.asarray(row[len(row) - n :]), keys[p])
    for p, (row, n) in enumerate(real)
  ]


@functools.partial(jax.jit, keep_unused=True)
def _row_keys(key: Array, rows: Array) -> Array:
  """u32[P, G, 2] from a key and any array [P, G]."""
  return jax.random.key_data(jax.random.split(key, rows.shape))


def _placed(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def joined(groups: Sequence[Group]) -> Rollouts:
  """The groups of P prompts as one record; NumPy."""
  stack: Any = lambda name: np.stack([getattr(group, name) for group in groups])
  return Rollouts(
    tokens=stack("tokens"),
    lengths=stack("lengths"),
    stopped=stack("stopped"),
    behavior_logprobs=stack("behavior_logprobs"),
  )


@dataclasses.dataclass
class Usage:
  """What streams have done with their slots.

  Attributes:
    slot_steps: decoding steps times slots, idle slots included.
    slot_tokens: sampled.
    drain_slot_steps, drain_tokens: of bursts that began with an idle slot, as no request was left.
  """

  slot_steps: int = 0
  slot_tokens: int = 0
  drain_slot_steps: int = 0
  drain_tokens: int = 0

  def add(self, slot_steps: int, tokens: int, *, drain: bool) -> None:
    """Counts a burst."""
    self.slot_steps += slot_steps
    self.slot_tokens += tokens
    self.drain_slot_steps += slot_steps * drain
    self.drain_tokens += tokens * drain

  def since(self, earlier: Usage) -> Usage:
    """What was done after a copy of this one was made."""
    return Usage(**{name: value - getattr(earlier, name) for name, value in vars(self).items()})


class _Row(NamedTuple):
  """One rollout of a group that is being sampled, and its prompt in a prefilled batch."""

  group: Group
  rollout: int
  prompt: np.ndarray
  key: np.ndarray
  batch: tuple[Part, ...]
  row: int

  def take(self, emitted: Emitted, slot: int) -> int:
    """Appends what the row's slot has emitted; returns the number of tokens."""
    g, lengths = self.rollout, self.group.lengths
    new = slice(int(lengths[g]), int(emitted.generated[slot]))
    count = new.stop - new.start
    self.group.tokens[g, new] = emitted.tokens[slot, :count]
    self.group.behavior_logprobs[g, new] = emitted.behavior_logprobs[slot, :count]
    self.group.stopped[g] = emitted.stopped[slot]
    lengths[g] = new.stop
    return count


class Programs(NamedTuple):
  """The jitted functions of `rollouts.decoder`, with an engine's settings bound."""

  take_layer: Callable[..., Any]
  load_layer: Callable[..., Any]
  load_others: Callable[..., Any]
  empty: Callable[..., Any]
  prefill: Callable[..., Any]
  insert: Callable[..., Any]
  burst: Callable[..., Any]


class Engine:
  """The functions of `rollouts.decoder`, for one policy, one distribution and a number of slots.

  Attributes:
    settings: what is compiled in.
    programs: what `load` and `serve` run.
  """

  def __init__(
    self,
    model: Any,
    sampling: Sampling,
    *,
    slots: int,
    prefill_rows: int,
    max_prompt_length: int,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
    pad_token: int,
    cache: str = "blocks",
    to_host: Callable[[Any], Any] = jax.device_get,
  ):
    """Binds the functions; nothing is compiled yet.

    Args:
      model: of the policy, on the mesh that generates.
      sampling: the distribution.
      slots: responses decoded at a time; rounded up to a multiple of the mesh's batch devices.
      prefill_rows: prompts encoded at a time, at most, and rounded up likewise.
      max_prompt_length, max_new_tokens: S and T, tokens.
      stop_tokens: any of them ends a response.
      pad_token: fills responses after their end.
      cache: "blocks" or "pages", as `caches.choose_cache` returned it.
      to_host: device arrays → NumPy; called once per burst.
    """
    devices = 1 if model.mesh is None else model.mesh.shape["data"] * model.mesh.shape["fsdp"]
    split_evenly = lambda rows: -(-rows // devices) * devices
    self.settings = Settings(
      model=model,
      sampling=sampling,
      slots=split_evenly(slots),
      shape=CacheShape.of(max_prompt_length, max_new_tokens),
      max_new_tokens=max_new_tokens,
      stop_tokens=stop_tokens,
      cache=cache,
    )
    self._prefill_rows = lambda length: split_evenly(
      min(prefill_rows, max(_PREFILL_TOKENS // length, 1))
    )
    self._pad_token, self._to_host = pad_token, to_host
    exactly = functools.partial(with_matmul_precision, precision=model.config.precision)
    bound = lambda function: exactly(functools.partial(function, settings=self.settings))
    state, host = decoder.shardings(self.settings)
    of_model = lambda function: jax.jit(exactly(functools.partial(function, model=model)))
    self.programs = Programs(
      take_layer=of_model(decoder.take_layer),
      load_layer=of_model(decoder.load_layer),
      load_others=of_model(decoder.load_others),
      empty=jax.jit(bound(decoder.empty), out_shardings=state),
      prefill=jax.jit(bound(decoder.prefill)),
      insert=jax.jit(bound(decoder.insert), donate_argnums=0, out_shardings=state),
      burst=jax.jit(bound(decoder.burst), donate_argnums=1, out_shardings=(state, host)),
    )

  def load(self, trained: Params, frozen: Params) -> Params:
    """The parameters that `serve` takes, in the layout of the mesh that generates."""
    layers = range(self.settings.model.config.num_layers)
    taken = (self.programs.take_layer(trained, frozen, np.int32(layer)) for layer in layers)
    blocks = tuple(map(self.programs.load_layer, taken))
    return {**self.programs.load_others(trained, frozen), "blocks": blocks}

  def lowered(self, trained: Params, frozen: Params) -> Any:
    """A `jax.stages.Lowered` for shapes: a burst whose slots are all nearly full.

    The trainer's parameters are arguments as well, since they stay in memory.
    """
    settings = self.settings
    state, host = decoder.shardings(settings)
    shapes = jax.eval_shape(self.programs.empty)
    shapes = shapes if state is None else jax.tree.map(_placed, shapes, state)
    run = lambda trained, frozen, params, state: decoder.burst(
      params, decoder.full(state, settings=settings), settings=settings
    )
    run = with_matmul_precision(run, settings.model.config.precision)
    jitted = jax.jit(run, donate_argnums=3, out_shardings=(state, host), keep_unused=True)
    return jitted.lower(trained, frozen, self._loaded(trained, frozen), shapes)

  def _loaded(self, trained: Params, frozen: Params) -> Params:
    """The shapes of what `load` returns, with the shardings that its programs choose."""

    def of(program: Any, *args: Any) -> Any:
      lowered = program.lower(*args)
      return jax.tree.map(_placed, lowered.out_info, lowered.compile().output_shardings)

    number = jax.ShapeDtypeStruct((), jnp.int32)
    layer = of(self.programs.load_layer, of(self.programs.take_layer, trained, frozen, number))
    layers = self.settings.model.config.num_layers
    return {**of(self.programs.load_others, trained, frozen), "blocks": (layer,) * layers}

  def serve(
    self, params: Params, asked: Iterable[Request[Owner]], usage: Usage | None = None
  ) -> Iterator[list[Group[Owner]]]:
    """Yields after every burst the groups that it has finished, in any order.

    Args:
      params: from `load`.
      asked: taken as slots become free.
      usage: counts what the slots do.
    """
    state, usage = self.programs.empty(), usage or Usage()
    slots: list[_Row | None] = [None] * self.settings.slots
    rows = self._rows(params, asked)
    while True:
      free = [slot for slot, row in enumerate(slots) if row is None]
      new = dict(zip(free, rows, strict=False))  # in this order: a row is taken for a slot only
      for batch, fresh in self._fresh(new):
        state = self.programs.insert(state, batch, fresh)
      for slot, row in new.items():
        slots[slot] = row
      busy = {slot: row for slot, row in enumerate(slots) if row is not None}
      if not busy:
        return
      state, emitted = self.programs.burst(params, state)
      emitted = self._to_host(emitted)
      tokens = sum(row.take(emitted, slot) for slot, row in busy.items())
      usage.add(int(emitted.steps) * len(slots), tokens, drain=len(busy) < len(slots))
      ended = {slot: row for slot, row in busy.items() if not emitted.running[slot]}
      for slot in ended:
        slots[slot] = None
      running = {id(row.group) for slot, row in busy.items() if slot not in ended}
      groups = {id(row.group): row.group for row in ended.values()}
      yield [group for key, group in groups.items() if key not in running and group.lengths.all()]

  def _rows(self, params: Params, asked: Iterable[Request]) -> Iterator[_Row]:
    """The rollouts of the requests; their prompts are prefilled in batches of like length.

    The padded length of a prompt, and the number of rows that it is computed with, depend on its
    own length alone.
    """
    coming = iter(asked)
    ahead: list[Request] = []
    T = self.settings.max_new_tokens
    while True:
      ahead += itertools.islice(coming, self._prefill_rows(1) - len(ahead))
      if not ahead:
        return
      length = self._padded_length(ahead[0].prompt)
      size = self._prefill_rows(length)
      alike = [i for i, r in enumerate(ahead) if self._padded_length(r.prompt) == length][:size]
      chosen = [ahead[i] for i in alike]
      ahead = [request for i, request in enumerate(ahead) if i not in alike]
      tokens = np.full((size, length), self._pad_token, np.int32)
      for index, request in enumerate(chosen):
        tokens[index, : len(request.prompt) - 1] = request.prompt[:-1]
      batch = self.programs.prefill(params, tokens)
      for row, request in enumerate(chosen):
        G = len(request.keys)
        group = Group(
          owner=request.owner,
          prompt_index=request.prompt_index,
          tokens=np.full((G, T), self._pad_token, np.int32),
          lengths=np.zeros(G, np.int32),
          stopped=np.zeros(G, bool),
          behavior_logprobs=np.zeros((G, T), decoder.logprobs_dtype(self.settings)),
        )
        for g, key in enumerate(request.keys):
          yield _Row(group, g, request.prompt, key, batch, row)

  def _padded_length(self, prompt: np.ndarray) -> int:
    """A block, doubled until all but the last token fit, or the longest prompt's length."""
    room = self.settings.shape.prompt
    length = room.size
    while length < len(prompt) - 1:
      length *= 2
    return min(length, room.tokens)

  def _fresh(self, new: dict[int, _Row]) -> Iterator[tuple[tuple[Part, ...], Fresh]]:
    """New rows by their slots, as arguments of `engine.insert`, one for each prefilled batch."""
    slots = self.settings.slots
    for _, members in itertools.groupby(new.items(), key=lambda item: id(item[1].batch)):
      rows: Any = np.full((3, slots), -1, np.int32)
      keys: Any = np.zeros((slots, 2), np.uint32)
      for slot, row in members:
        rows[:, slot], keys[slot] = (row.row, row.prompt[-1], len(row.prompt) - 1), row.key
      yield row.batch, Fresh(row=rows[0], token=rows[1], prompt=rows[2], keys=keys)
