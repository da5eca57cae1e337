"""The host's side of generation: a stream of requests, decoded in slots that are refilled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from rlvr_jax.ops.caches import CacheShape, Part
from rlvr_jax.ops.precision import with_matmul_precision
from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.decoder import Emitted, Fresh, Settings
from rlvr_jax.types import Array, Params, Prompts, Rollouts, Sampling

_PREFILL_TOKENS = 8192  # the most tokens of a batch of prompts, padding included


Owner = TypeVar("Owner")  # of a request; returned with its rollouts


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
  lengths: np.ndarray  # i32[G], 1 ≤ length ≤ T; 0 before the first token
  stopped: np.ndarray  # bool[G], ended by a stop token
  behavior_logprobs: np.ndarray  # f32[G, T], under the distribution sampled from; 0 where padded


def make_requests(
  prompts: Prompts, key: Array, group_size: int, owner: Owner, first: int = 0
) -> list[Request[Owner]]:
  """Makes a request per prompt; rollout g of prompt p has its own key.

  Args:
    prompts: P prompts, NumPy.
    key: one PRNG key; equal keys and indices (p, g) give equal noise, whatever else is sampled.
    group_size: G.
    owner: of the requests.
    first: index of the first prompt in the owner's batch.
  """
  keys = np.asarray(_row_keys(key, np.zeros((len(prompts.lengths), group_size), bool)))
  rows = zip(prompts.tokens, prompts.lengths, strict=True)
  return [
    Request(owner, first + p, np.asarray(row[len(row) - length :]), keys[p])
    for p, (row, length) in enumerate(rows)
  ]


@functools.partial(jax.jit, keep_unused=True)
def _row_keys(key: Array, rows: Array) -> Array:
  """u32[P, G, 2] from a key and any array [P, G]."""
  return jax.random.key_data(jax.random.split(key, rows.shape))


def _add_sharding(
  shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def stack_groups(groups: Sequence[Group]) -> Rollouts:
  """Stacks the groups of P prompts into one record; NumPy."""
  stack: Any = lambda name: np.stack([getattr(group, name) for group in groups])
  return Rollouts(
    tokens=stack("tokens"),
    lengths=stack("lengths"),
    stopped=stack("stopped"),
    behavior_logprobs=stack("behavior_logprobs"),
  )


@dataclasses.dataclass
class Usage:
  """Counts of the decoding steps and tokens of streams.

  Attributes:
    slot_steps: decoding steps times slots, idle slots included.
    slot_tokens: sampled tokens.
    drain_slot_steps, drain_tokens: the same, in bursts with idle slots, when requests had run out.
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
    """The counts since `earlier`, a copy of this record."""
    return Usage(**{name: value - getattr(earlier, name) for name, value in vars(self).items()})


class _Pending(NamedTuple):
  """One rollout of a group that is being sampled, and its prompt in a prefilled batch."""

  group: Group  # whose arrays are filled in place
  rollout: int  # index in the group
  prompt: np.ndarray
  key: np.ndarray
  prefilled: tuple[Part, ...]  # caches of a batch of prompts
  prompt_row: int  # of that batch

  def append(self, emitted: Emitted, slot: int) -> int:
    """Appends the tokens that the rollout's slot has emitted; returns their number."""
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

  take_layer: jax.stages.Wrapped
  load_layer: jax.stages.Wrapped
  load_others: jax.stages.Wrapped
  empty_slots: jax.stages.Wrapped
  prefill: jax.stages.Wrapped
  insert: jax.stages.Wrapped
  burst: jax.stages.Wrapped


class Engine:
  """The functions of `rollouts.decoder`, for one policy, one distribution and a number of slots.

  Attributes:
    settings: compiled into the programs.
    programs: run by `load` and `serve`.
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
    to_host: Callable[[Emitted], Emitted] = jax.device_get,
    compiler_options: dict[str, bool | int | float | str] | None = None,
  ):
    """Binds the functions; nothing is compiled yet.

    Args:
      model: of the policy, on the mesh that generates.
      sampling: the distribution.
      slots: responses decoded at a time; rounded up to a multiple of the mesh's batch devices, and
        of their cores if a kernel splits slots over them.
      prefill_rows: the most prompts encoded at a time; rounded up likewise.
      max_prompt_length, max_new_tokens: S and T, tokens.
      stop_tokens: each ends a response.
      pad_token: fills responses after their end.
      cache: "blocks" or "pages", as `caches.choose_cache` returned it.
      to_host: device arrays → NumPy; called once per burst.
      compiler_options: of all programs, as `jax.jit` takes them.
    """
    self._batch_devices = (
      1 if model.mesh is None else model.mesh.shape["data"] * model.mesh.shape["fsdp"]
    )
    self._max_prefill_rows = prefill_rows
    cores = decoder.cores_per_device(model.mesh) if cache == "pages" else 1
    self.settings = Settings(
      model=model,
      sampling=sampling,
      slots=self._round_up(-(-slots // cores)) * cores,
      shape=CacheShape.of(max_prompt_length, max_new_tokens),
      max_new_tokens=max_new_tokens,
      stop_tokens=stop_tokens,
      cache=cache,
      cores=cores,
    )
    self._pad_token = pad_token
    self._to_host = to_host
    at_precision = functools.partial(with_matmul_precision, precision=model.config.precision)
    with_model = lambda function: at_precision(functools.partial(function, model=model))
    bind = lambda function: at_precision(functools.partial(function, settings=self.settings))
    state, host = decoder.shardings(self.settings)
    loaded = decoder.loaded_shardings(model)
    layer, others = (loaded["blocks"], {**loaded, "blocks": ()}) if loaded else (None, None)
    self._jit = functools.partial(jax.jit, compiler_options=compiler_options)
    self.programs = Programs(
      take_layer=self._jit(with_model(decoder.take_layer)),
      load_layer=self._jit(with_model(decoder.load_layer), out_shardings=layer),
      load_others=self._jit(with_model(decoder.load_others), out_shardings=others),
      empty_slots=self._jit(bind(decoder.empty_slots), out_shardings=state),
      prefill=self._jit(bind(decoder.prefill)),
      insert=self._jit(bind(decoder.insert), donate_argnums=0, out_shardings=state),
      burst=self._jit(bind(decoder.burst), donate_argnums=1, out_shardings=(state, host)),
    )

  def load(self, trained: Params, frozen: Params) -> Params:
    """Converts parameters to those that `serve` takes, resharded for the mesh that generates."""
    layers = range(self.settings.model.config.num_layers)
    blocks = (self.programs.take_layer(trained, frozen, np.int32(layer)) for layer in layers)
    loaded_blocks = tuple(map(self.programs.load_layer, blocks))
    return {**self.programs.load_others(trained, frozen), "blocks": loaded_blocks}

  def lower_burst(self, trained: Params, frozen: Params) -> jax.stages.Lowered:
    """Lowers the last burst of the longest responses, for parameters or their shapes.

    The trainer's parameters are arguments as well, since they stay in memory.
    """
    settings = self.settings
    state, host = decoder.shardings(settings)
    shapes = jax.eval_shape(self.programs.empty_slots)
    shapes = shapes if state is None else jax.tree.map(_add_sharding, shapes, state)

    def last_burst(trained: Params, frozen: Params, params: Params, state: decoder.State) -> Any:
      return decoder.burst(params, decoder.fill_slots(state, settings=settings), settings=settings)

    jitted = self._jit(
      with_matmul_precision(last_burst, settings.model.config.precision),
      donate_argnums=3,
      out_shardings=(state, host),
      keep_unused=True,
    )
    return jitted.lower(trained, frozen, self._loaded_shapes(trained, frozen), shapes)

  def _loaded_shapes(self, trained: Params, frozen: Params) -> Params:
    """The shapes of the parameters that `load` returns, with their shardings."""
    programs, index = self.programs, jax.ShapeDtypeStruct((), np.int32)
    taken = programs.take_layer.lower(trained, frozen, index).out_info
    layer = programs.load_layer.lower(taken).out_info
    shapes = {**programs.load_others.lower(trained, frozen).out_info, "blocks": layer}
    if shardings := decoder.loaded_shardings(self.settings.model):
      shapes = jax.tree.map(_add_sharding, shapes, shardings)
    return {**shapes, "blocks": (shapes["blocks"],) * self.settings.model.config.num_layers}

  def serve(
    self, params: Params, requests: Iterable[Request[Owner] | None], usage: Usage | None = None
  ) -> Iterator[list[Group[Owner]]]:
    """Yields, after every burst, the groups that it has finished, in any order.

    Args:
      params: from `load`.
      requests: consumed as slots become free; None: there is none now, ask again after a burst.
      usage: counts the steps and tokens of the slots.
    """
    state = self.programs.empty_slots()
    usage = usage or Usage()
    slots: list[_Pending | None] = [None] * self.settings.slots
    coming = iter(requests)
    pending = self._prefill(params, coming)
    while True:
      free = [slot for slot, rollout in enumerate(slots) if rollout is None]
      # `zip` stops at `free`, its first argument, so that no rollout is consumed without a slot.
      new = dict(zip(free, pending, strict=False))
      if len(new) < len(free):
        pending = self._prefill(params, coming)  # of requests that come later
      for batch, fresh in self._by_prefilled_batch(new):
        state = self.programs.insert(state, batch, fresh)
      for slot, rollout in new.items():
        slots[slot] = rollout
      busy = {slot: rollout for slot, rollout in enumerate(slots) if rollout is not None}
      if not busy:
        return
      state, emitted = self.programs.burst(params, state)
      emitted = self._to_host(emitted)
      tokens = sum(rollout.append(emitted, slot) for slot, rollout in busy.items())
      usage.add(int(emitted.steps) * len(slots), tokens, drain=len(busy) < len(slots))
      ended = {slot: rollout for slot, rollout in busy.items() if not emitted.running[slot]}
      for slot in ended:
        slots[slot] = None
      running = {id(rollout.group) for slot, rollout in busy.items() if slot not in ended}
      groups = {id(rollout.group): rollout.group for rollout in ended.values()}
      yield [group for key, group in groups.items() if key not in running and group.lengths.all()]

  def _round_up(self, rows: int) -> int:
    """The next multiple of the devices that rows are split over."""
    return -(-rows // self._batch_devices) * self._batch_devices

  def _prefill_rows(self, length: int) -> int:
    """Prompts of a padded length that are prefilled at a time."""
    return self._round_up(min(self._max_prefill_rows, max(_PREFILL_TOKENS // length, 1)))

  def _prefill(self, params: Params, requests: Iterator[Request | None]) -> Iterator[_Pending]:
    """Yields the rollouts of requests up to a None; prefills prompts in batches of like length.

    A prompt's padded length, and the number of rows of its batch, depend only on its own length.
    """
    waiting: list[Request] = []
    T = self.settings.max_new_tokens
    while True:
      for request in itertools.islice(requests, self._prefill_rows(1) - len(waiting)):
        if request is None:
          break
        waiting.append(request)
      if not waiting:
        return
      length = self._padded_length(waiting[0].prompt)
      size = self._prefill_rows(length)
      same_length = [i for i, r in enumerate(waiting) if self._padded_length(r.prompt) == length]
      indices = same_length[:size]
      members = [waiting[i] for i in indices]
      waiting = [request for i, request in enumerate(waiting) if i not in indices]
      tokens = np.full((size, length), self._pad_token, np.int32)
      for index, request in enumerate(members):
        tokens[index, : len(request.prompt) - 1] = request.prompt[:-1]
      batch = self.programs.prefill(params, tokens)
      for row, request in enumerate(members):
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
          yield _Pending(group, g, request.prompt, key, batch, row)

  def _padded_length(self, prompt: np.ndarray) -> int:
    """A block's size times the least power of two that holds all but the last token, capped."""
    blocks = self.settings.shape.prompt
    length = blocks.size
    while length < len(prompt) - 1:
      length *= 2
    return min(length, blocks.tokens)

  def _by_prefilled_batch(
    self, new: dict[int, _Pending]
  ) -> Iterator[tuple[tuple[Part, ...], Fresh]]:
    """Yields arguments of `decoder.insert` for new rollouts by slot, once per prefilled batch."""
    slots = self.settings.slots
    for _, members in itertools.groupby(new.items(), key=lambda item: id(item[1].prefilled)):
      rows: Any = np.full((3, slots), -1, np.int32)
      keys: Any = np.zeros((slots, 2), np.uint32)
      for slot, rollout in members:
        rows[:, slot] = (rollout.prompt_row, rollout.prompt[-1], len(rollout.prompt) - 1)
        keys[slot] = rollout.key
      yield rollout.prefilled, Fresh(row=rows[0], token=rows[1], prompt=rows[2], keys=keys)
