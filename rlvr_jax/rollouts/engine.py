"""The host's side of generation: a stream of requests, decoded in slots that are refilled."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from rlvr_jax.ops.caches import CacheShape, Read
from rlvr_jax.ops.layers import rows_of, take_rows
from rlvr_jax.ops.precision import with_matmul_precision
from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.decoder import Emitted, Fresh, Known, Prefilled, Settings
from rlvr_jax.types import Array, Params, Prompts, Rollouts, Sampling

_PREFILL_TOKENS = 8192  # the most tokens of a batch of prompts, padding included
NOT_SAMPLED = -1  # version of tokens that no policy of the run has sampled
PATIENCE_S = 1.0  # with which idle slots wait for replies, at most; the first burst compiles


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
  # f32[G, T], under the distribution sampled from; 0 where padded, or not sampled
  behavior_logprobs: np.ndarray
  # Of dialogues, otherwise None:
  turns: np.ndarray | None = None  # i32[G, T], see `types.Rollouts`
  ends: np.ndarray | None = None  # i32[G], how each ended, an `End` of `rollouts.dialogues`
  scores: np.ndarray | None = None  # f32[G], from the environment; NaN where there is none
  details: list[str] | None = None  # G, why the environment failed or refused; "" if it did not
  turn_scores: np.ndarray | None = None  # f32[G, T], see `types.Rollouts`
  # If routes are recorded, otherwise None; see `types.Rollouts`:
  routes: np.ndarray | None = None  # [G, T, layers, k]
  prompt_routes: np.ndarray | None = None  # [S, layers, k]
  # If weights may change within a response, otherwise None; see `types.Rollouts`:
  token_versions: np.ndarray | None = None  # i32[G, T]


class Answer(NamedTuple, Generic[Owner]):
  """What follows a turn of the policy in a dialogue."""

  group: Group[Owner]
  rollout: int  # index in the group
  tokens: np.ndarray  # i32[n] of the environment; a dialogue that goes on has n ≥ 1
  is_last: bool  # whether the dialogue has ended


class Dialogues(Protocol):
  """Answers the policy's turns: `rollouts.dialogues.EnvironmentDialogues`."""

  def find_stop(self, group: Group, rollout: int, start: int) -> int | None:
    """Finds the end of a turn by a stop string.

    Args:
      group, rollout: the response, up to its newest token.
      start: of the tokens that are new.
    Returns:
      The length of the response with which the turn ends; None if it does not end so.
    """
    ...

  def ask(self, group: Group, rollout: int) -> None:
    """Takes a turn that has ended; the answer comes from `take`."""
    ...

  def take(self, *, patience_s: float, until_one: bool) -> list[Answer]:
    """Returns the answers that have come, in all processes the same.

    Args:
      patience_s: seconds to wait for all of those that are outstanding.
      until_one: whether to wait before that until there is one.
    """
    ...

  def add_costs(self, *, idle_slot_steps: int = 0, rebuilt_tokens: int = 0) -> None:
    """Counts what dialogues cost.

    Args:
      idle_slot_steps: of slots that had nothing to decode while dialogues waited for answers.
      rebuilt_tokens: of prompt and response whose cache is computed anew after a reply.
    """
    ...


class ChangingWeights(Protocol):
  """Weights that change within responses, between two bursts.

  Attributes:
    rebuilds: whether the cache of a running rollout is computed anew before other weights sample
      it; otherwise it goes on with the cache that earlier weights have made.
  """

  @property
  def rebuilds(self) -> bool: ...

  def ask(self) -> None:
    """Takes newer weights if there are any; called before a burst, in all processes."""
    ...

  def version(self, group: Group, rollout: int, length: int) -> int:
    """The version that samples a rollout's token after `length` ones; only `ask` changes it."""
    ...

  def params(self, version: int) -> Params:
    """The weights of a version, from `Engine.load`."""
    ...


class OneVersion(NamedTuple):
  """Weights that do not change; see `ChangingWeights`."""

  weights: Params
  number: int = NOT_SAMPLED  # of the version
  rebuilds: bool = False

  def ask(self) -> None:
    pass

  def version(self, group: Group, rollout: int, length: int) -> int:
    return self.number

  def params(self, version: int) -> Params:
    return self.weights


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
  keys = row_keys(key, len(prompts.lengths), group_size)
  rows = zip(prompts.tokens, prompts.lengths, strict=True)
  return [
    Request(owner, first + p, np.asarray(row[len(row) - length :]), keys[p])
    for p, (row, length) in enumerate(rows)
  ]


def row_keys(key: Array, prompts: int, group_size: int) -> np.ndarray:
  """u32[prompts, G, 2], data of the key of each rollout; NumPy."""
  return np.asarray(_row_keys(key, np.zeros((prompts, group_size), bool)))


@functools.partial(jax.jit, keep_unused=True)
def _row_keys(key: Array, rows: Array) -> Array:
  """u32[P, G, 2] from a key and any array [P, G]."""
  return jax.random.key_data(jax.random.split(key, rows.shape))


def _of_layer(loaded: Params | None, sparse: bool) -> Params | None:
  """Of what `decoder.loaded_shardings` returned, a layer's, with experts or without."""
  if loaded is None:
    return None
  rows = {"all": 0, "sparse" if sparse else "dense": 0}
  return take_rows(loaded["blocks"], rows, lambda sharding, _: sharding)


def _add_sharding(
  shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def stack_groups(groups: Sequence[Group]) -> Rollouts:
  """Stacks the groups of P prompts into one record; NumPy."""
  stack: Any = lambda name: np.stack([getattr(group, name) for group in groups])
  stack_if_any = lambda name: None if getattr(groups[0], name) is None else stack(name)
  return Rollouts(
    tokens=stack("tokens"),
    lengths=stack("lengths"),
    stopped=stack("stopped"),
    behavior_logprobs=stack("behavior_logprobs"),
    turns=stack_if_any("turns"),
    turn_scores=stack_if_any("turn_scores"),
    routes=stack_if_any("routes"),
    prompt_routes=stack_if_any("prompt_routes"),
    token_versions=stack_if_any("token_versions"),
  )


@dataclasses.dataclass
class Usage:
  """Counts of the decoding steps and tokens of streams.

  Attributes:
    slot_steps: decoding steps times slots, idle slots included.
    slot_tokens: tokens of the policy; not those that a burst of a dialogue repeats.
    drain_slot_steps, drain_tokens: the same, in bursts when requests had run out, and fewer
      responses than slots had not ended.
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
    return type(self)(**{k: value - getattr(earlier, k) for k, value in vars(self).items()})


class _Rollout(NamedTuple):
  """A rollout that is about to run in a slot."""

  group: Group  # whose arrays are filled in place
  number: int  # in the group
  prompt: np.ndarray
  key: np.ndarray
  cached: int = 0  # tokens of the response in the cache, a multiple of a burst's steps
  routed: int = 0  # places of the response whose routes are recorded; a burst repeats some of them
  version: int = 0  # of the weights that its cache was computed with last

  @property
  def length(self) -> int:
    """Tokens that the response has so far."""
    return int(self.group.lengths[self.number])

  def next_token(self) -> int:
    """The first token to decode."""
    return self.group.tokens[self.number, self.cached - 1] if self.cached else self.prompt[-1]

  def cached_tokens(self) -> np.ndarray:
    """i32[n], those of prompt and response in the cache when the rollout gets a slot."""
    # With the response's first token, the prompt's last is in the cache of the response.
    prompt = self.prompt if self.cached else self.prompt[:-1]
    return np.append(prompt, self.group.tokens[self.number, : max(self.cached - 1, 0)])

  def known_tokens(self) -> np.ndarray:
    """i32[n], those of the response behind the cache."""
    return self.group.tokens[self.number, self.cached : self.length]

  def append(self, emitted: Emitted, slot: int, version: int) -> int:
    """Appends the tokens that this version has sampled in a slot; returns their number."""
    g, start = self.number, self.length
    new = slice(start, int(emitted.generated[slot]))
    steps = slice(start - self.cached, new.stop - self.cached)
    self.group.tokens[g, new] = emitted.tokens[slot, steps]
    self.group.behavior_logprobs[g, new] = emitted.behavior_logprobs[slot, steps]
    if self.group.token_versions is not None:
      self.group.token_versions[g, new] = version
    if self.group.turns is not None:
      # A turn of the policy goes on, or follows the environment's, which have odd numbers.
      last = int(self.group.turns[g, start - 1]) if start else 0
      self.group.turns[g, new] = last + last % 2
    if self.group.routes is not None:
      assert emitted.routes is not None  # the engine records both
      first = max(self.routed, self.cached)
      steps = slice(first - self.cached, new.stop - self.cached)
      self.group.routes[g, first : new.stop] = emitted.routes[slot, steps]
    self.group.stopped[g] = emitted.stopped[slot]
    self.group.lengths[g] = new.stop
    return new.stop - start

  def record_prefilled(self, routes: np.ndarray) -> None:
    """Records routes [n, layers, k] of `cached_tokens`: the prompt's, and new ones of replies."""
    prompt = len(self.prompt) - 1
    if not self.cached:
      places = self.group.prompt_routes
      assert places is not None  # only where routes are recorded
      if self.group.lengths.any():  # they are recorded already
        return
      places[len(places) - 1 - prompt : len(places) - 1] = routes[:prompt]
    elif self.routed < self.cached:
      assert self.group.routes is not None
      self.group.routes[self.number, self.routed : self.cached] = routes[prompt + self.routed :]

  def cut(self, length: int, pad_token: int) -> None:
    """Ends the policy's turn after `length` tokens of the response; drops those after them."""
    g, dropped = self.number, slice(length, self.length)
    self.group.tokens[g, dropped] = pad_token
    self.group.behavior_logprobs[g, dropped] = 0
    assert self.group.turns is not None  # only turns of dialogues are cut
    self.group.turns[g, dropped] = 0
    if self.group.routes is not None:
      self.group.routes[g, dropped] = 0
    if self.group.token_versions is not None:
      self.group.token_versions[g, dropped] = NOT_SAMPLED
    self.group.stopped[g] = True
    self.group.lengths[g] = length

  def add_reply(self, tokens: np.ndarray) -> None:
    """Appends tokens of the environment, as many as there is room for."""
    g, start = self.number, self.length
    assert self.group.turns is not None  # only dialogues have replies
    new = slice(start, min(start + len(tokens), len(self.group.tokens[g])))
    self.group.tokens[g, new] = tokens[: new.stop - start]
    self.group.turns[g, new] = self.group.turns[g, start - 1] + 1
    self.group.lengths[g] = new.stop


class _Stream(NamedTuple):
  """The requests of a stream, and its rollouts that have begun and are in no slot."""

  requests: Iterator[Request | None]  # that no rollout has begun of
  weights: ChangingWeights
  has_versions: bool  # whether groups say which version sampled each token
  dialogues: Dialogues | None  # None: a response is one turn
  waiting: dict[tuple[int, int], _Rollout]  # for an answer, by (id of the group, number)
  resumed: collections.deque[_Rollout]  # have an answer, and no slot yet
  unfinished: dict[int, int]  # id of a group → number of its rollouts that have not ended
  # (routes on the devices, contexts by row) of prefilled batches since the last burst
  prefilled: list[tuple[Array, list[_Context]]]

  def version(self, rollout: _Rollout) -> int:
    """The version that samples the rollout's next token."""
    return self.weights.version(rollout.group, rollout.number, rollout.length)

  def begin(self, rollout: _Rollout) -> None:
    """Notes that a rollout is in a slot, for the first time or again."""
    self.unfinished.setdefault(id(rollout.group), len(rollout.group.lengths))

  def end_turn(self, rollout: _Rollout) -> list[Group]:
    """Asks for the answer to a rollout's turn; the rollout ends if there are no dialogues.

    Returns:
      Its group if this was the last rollout of it to end.
    """
    if self.dialogues is None:
      return self._end(rollout)
    self.waiting[id(rollout.group), rollout.number] = rollout
    self.dialogues.ask(rollout.group, rollout.number)
    return []

  def take_answers(self, steps: int, *, patience_s: float, until_one: bool) -> list[Group]:
    """Moves rollouts that have an answer from `waiting` to `resumed`; see `Dialogues.take`.

    Args:
      steps: of a burst.
    Returns:
      Groups whose last rollout has ended by its answer.
    """
    finished: list[Group] = []
    if self.dialogues is None or not self.waiting:
      return finished
    for answer in self.dialogues.take(patience_s=patience_s, until_one=until_one):
      rollout = self.waiting.pop((id(answer.group), answer.rollout))
      before = rollout.length
      rollout.add_reply(answer.tokens)
      if answer.is_last:
        finished += self._end(rollout)
        continue
      rollout = rollout._replace(cached=(rollout.length // steps) * steps, routed=before)
      self.dialogues.add_costs(rebuilt_tokens=len(rollout.cached_tokens()))
      self.resumed.append(rollout)
    return finished

  def record_prefilled(self, routes: Sequence[np.ndarray]) -> None:
    """Records the routes of `prefilled`, now on the host."""
    for of_batch, (_, contexts) in zip(routes, self.prefilled, strict=True):
      for row, context in zip(of_batch, contexts, strict=False):
        context.rollouts[0].record_prefilled(row[: len(context.tokens)])
    self.prefilled.clear()

  def _end(self, rollout: _Rollout) -> list[Group]:
    key = id(rollout.group)
    self.unfinished[key] -= 1
    if self.unfinished[key]:
      return []
    del self.unfinished[key]
    return [rollout.group]


class _Context(NamedTuple):
  """Tokens to be prefilled, and the rollouts that begin with them."""

  tokens: np.ndarray  # i32[n], without the last, which is decoded
  prompt: int  # of these, tokens of the prompt
  rollouts: list[_Rollout]

  @property
  def has_response(self) -> bool:
    return self.prompt < len(self.tokens)


class _Pending(NamedTuple):
  """A rollout that waits for a slot, and its row in a prefilled batch."""

  rollout: _Rollout
  prefilled: Prefilled
  row: int


class Programs(NamedTuple):
  """The jitted functions of `rollouts.decoder`, with an engine's settings bound."""

  take_layer: jax.stages.Wrapped
  load_layer: dict[bool, jax.stages.Wrapped]  # by whether the layer has experts
  load_others: jax.stages.Wrapped
  empty_slots: jax.stages.Wrapped
  prefill: jax.stages.Wrapped
  insert: jax.stages.Wrapped
  halt: jax.stages.Wrapped
  resume: jax.stages.Wrapped
  burst: jax.stages.Wrapped


class Ahead:
  """Versions of a program that a thread compiles while the devices run another."""

  def __init__(self, program: jax.stages.Wrapped):
    self._program = program
    self._compiled: dict[Hashable, concurrent.futures.Future[jax.stages.Compiled]] = {}
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "compiles ahead")

  def begin(self, key: Hashable, *arguments: Any, **static: Any) -> None:
    """Begins to compile for arguments or their shapes, unless it has been begun."""
    if key in self._compiled:
      return
    shapes = jax.tree.map(_shape_on_devices, arguments)
    compile_it = lambda: self._program.lower(*shapes, **static).compile()
    self._compiled[key] = self._thread.submit(compile_it)

  def find(self, key: Hashable) -> jax.stages.Compiled | None:
    """What was begun, as soon as it is compiled; None if nothing was."""
    begun = self._compiled.get(key)
    return None if begun is None else begun.result()

  @property
  def is_idle(self) -> bool:
    """Whether all that was begun is compiled: then the end of the program waits for nothing."""
    return all(begun.done() for begun in self._compiled.values())


def _shape_on_devices(x: Any) -> jax.ShapeDtypeStruct:
  # Where arrays may be is not said of those that are not held to a device.
  sharding = x.sharding if isinstance(x, jax.Array) and x.committed else None
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


class Bursts:
  """The burst programs of an engine: at most four, by the blocks of the caches that they read.

  Three read the prompts of the first burst, and a quarter, a half or all blocks of the responses.
  The fourth reads everything, where later prompts need more blocks than the first ones.
  """

  def __init__(self, burst: jax.stages.Wrapped, settings: Settings, *, compiles_ahead: bool):
    """Nothing is compiled yet.

    Args:
      burst: `decoder.burst`, jitted.
      settings: of the engine.
      compiles_ahead: whether a thread compiles the program for more blocks of the responses while
        one runs, so that responses that grow do not wait for it. On CPUs it would slow that one.
    """
    self._burst, self._shape, self._compiles_ahead = burst, settings.shape, compiles_ahead
    self._reads_all = settings.cache == "pages"  # the kernel does not read what is not filled
    self._prompt_blocks: int | None = None  # of the first burst
    self._ahead = Ahead(burst)

  def run(
    self, params: Params, state: decoder.State, *, prompt: int, response: int, has_halted: bool
  ) -> tuple[decoder.State, Emitted]:
    """Runs `decoder.burst`; donates `state`.

    Args:
      params, state, has_halted: see `decoder.burst`.
      prompt, response: the most tokens that the cache of a running slot has.
    """
    read = self._choose(prompt, response)
    following = self._shape.response.read_for(read.response * self._shape.response.size + 1)
    if has_halted:
      return self._burst(params, state, read=read, has_halted=True)
    if self._compiles_ahead and following > read.response:
      needed = read._replace(response=following)
      self._ahead.begin(needed, params, state, read=needed)
    if compiled := self._ahead.find(read):
      return compiled(params, state)
    return self._burst(params, state, read=read)

  def _choose(self, prompt: int, response: int) -> Read:
    shape = self._shape
    if self._reads_all:
      return shape.everything
    needed = Read(shape.prompt.read_for(prompt), shape.response.read_for(response))
    if self._prompt_blocks is None:
      self._prompt_blocks = needed.prompt
    if needed.prompt > self._prompt_blocks:
      return shape.everything
    return needed._replace(prompt=self._prompt_blocks)


class Prefills:
  """The prefill programs of an engine, by the shape of the prompts."""

  def __init__(self, prefill: jax.stages.Wrapped, expected: Sequence[tuple[int, int]]):
    """Nothing is compiled yet.

    Args:
      prefill: `decoder.prefill`, jitted.
      expected: shapes that a thread compiles for, one at a time, once there are parameters.
    """
    self._prefill, self._expected, self._ahead = prefill, [*expected], Ahead(prefill)

  def find(self, shape: tuple[int, ...], params: Params, has_response: bool) -> Callable:
    """The program for prompts of this shape."""
    if has_response:
      return self._prefill
    compiled = self._ahead.find(shape)
    if compiled is None and shape in self._expected:
      self._expected.remove(shape)  # it is compiled by this call
    if self._expected and self._ahead.is_idle:
      expected = self._expected.pop(0)
      tokens, lengths = np.zeros(expected, np.int32), np.zeros(expected[0], np.int32)
      self._ahead.begin(expected, params, tokens, lengths)
    return compiled or self._prefill


def _padded_lengths(block: int, longest: int) -> list[int]:
  """Lengths to which prompts are padded: a block's tokens, twice as many and so on, `longest`."""
  lengths = [min(block, longest)]
  while lengths[-1] < longest:
    lengths.append(min(2 * lengths[-1], longest))
  return lengths


class _Compiled(NamedTuple):
  """What compiles an engine's programs."""

  jit: Callable
  bursts: Bursts
  prefills: Prefills


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
    cache_format: str = "",
    has_replies: bool = False,
    records_routes: bool = False,
    to_host: Callable[[Any], Any] = jax.device_get,
    compiler_options: dict[str, bool | int | float | str] | None = None,
    compiles_ahead: bool = False,
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
      cache_format: one of `caches.FORMATS`.
      has_replies: whether `serve` may get dialogues.
      records_routes: whether groups have the routes of a mixture.
      to_host: a tree of device arrays → NumPy; called once per burst.
      compiler_options: of all programs, as `jax.jit` takes them.
      compiles_ahead: whether a thread compiles programs that will be needed while others run: the
        prefills of shorter and longer prompts, and the next burst, see `Bursts`.
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
      shape=CacheShape.of(
        max_prompt_length, max_new_tokens, has_replies=has_replies, pages=cache == "pages"
      ),
      max_new_tokens=max_new_tokens,
      stop_tokens=stop_tokens,
      cache=cache,
      cache_format=cache_format,
      cores=cores,
      has_replies=has_replies,
      records_routes=records_routes,
    )
    self._max_prompt_length = max_prompt_length
    self._pad_token = pad_token
    self._to_host = to_host
    at_precision = functools.partial(with_matmul_precision, precision=model.config.precision)
    with_model = lambda function: at_precision(functools.partial(function, model=model))
    bind = lambda function: at_precision(functools.partial(function, settings=self.settings))
    state, host = decoder.shardings(self.settings)
    loaded = decoder.loaded_shardings(model)
    others = {**loaded, "blocks": ()} if loaded else None
    jit = functools.partial(jax.jit, compiler_options=compiler_options)
    self.programs = Programs(
      take_layer=jit(with_model(decoder.take_layer)),
      load_layer={
        sparse: jit(with_model(decoder.load_layer), out_shardings=_of_layer(loaded, sparse))
        for sparse in set(model.config.sparse)
      },
      load_others=jit(with_model(decoder.load_others), out_shardings=others),
      empty_slots=jit(bind(decoder.empty_slots), out_shardings=state),
      prefill=jit(bind(decoder.prefill)),
      insert=jit(bind(decoder.insert), donate_argnums=0, out_shardings=state),
      halt=jit(decoder.halt, donate_argnums=0, out_shardings=state),
      resume=jit(decoder.resume, donate_argnums=0, out_shardings=state),
      burst=jit(
        bind(decoder.burst),
        donate_argnums=1,
        out_shardings=(state, host),
        static_argnames=("read", "has_halted"),
      ),
    )
    lengths = _padded_lengths(self.settings.shape.prompt.size, self.settings.shape.prompt.tokens)
    self._compiled = _Compiled(
      jit,
      Bursts(self.programs.burst, self.settings, compiles_ahead=compiles_ahead),
      Prefills(
        self.programs.prefill,
        [(self._prefill_rows(length), length) for length in lengths] if compiles_ahead else [],
      ),
    )

  def load(self, trained: Params, frozen: Params) -> Params:
    """Converts parameters to those that `serve` takes, resharded for the mesh that generates."""
    sparse, programs = self.settings.model.config.sparse, self.programs
    blocks = (programs.take_layer(trained, frozen, rows_of(i, sparse)) for i in range(len(sparse)))
    loaded = tuple(
      programs.load_layer[kind](layer) for kind, layer in zip(sparse, blocks, strict=True)
    )
    return {**programs.load_others(trained, frozen), "blocks": loaded}

  def lower_burst(self, trained: Params, frozen: Params) -> jax.stages.Lowered:
    """Lowers a burst that reads complete caches, for parameters or their shapes.

    The trainer's parameters are arguments as well, since they stay in memory.
    """
    settings = self.settings
    state, host = decoder.shardings(settings)

    def longest_burst(
      trained: Params, frozen: Params, params: Params, state: decoder.State
    ) -> tuple[decoder.State, Emitted]:
      return decoder.burst(params, state, settings=settings, read=settings.shape.everything)

    jitted = self._compiled.jit(
      with_matmul_precision(longest_burst, settings.model.config.precision),
      donate_argnums=3,
      out_shardings=(state, host),
      keep_unused=True,
    )
    return jitted.lower(trained, frozen, self._loaded_shapes(trained, frozen), self._slot_shapes())

  def lower_prefill(self, trained: Params, frozen: Params) -> jax.stages.Lowered:
    """Lowers the prefill of the longest dialogues after a reply, for parameters or their shapes.

    The trainer's parameters and the slots are arguments as well, since they stay in memory.
    """
    settings, (rows, length) = self.settings, self.longest_prefill()
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)

    def prefill(
      trained: Params,
      frozen: Params,
      params: Params,
      state: Any,
      tokens: Array,
      lengths: Array,
      prompts: Array,
    ) -> Prefilled:
      return decoder.prefill(params, tokens, lengths, prompts, settings=settings)

    jitted = self._compiled.jit(
      with_matmul_precision(prefill, settings.model.config.precision), keep_unused=True
    )
    return jitted.lower(
      trained,
      frozen,
      self._loaded_shapes(trained, frozen),
      self._slot_shapes(),
      integers(rows, length),
      integers(rows),
      integers(rows),
    )

  def longest_prefill(self) -> tuple[int, int]:
    """(rows, tokens of each) of the largest batch that is prefilled after replies."""
    shape = self.settings.shape
    blocks = shape.prompt
    length = -(-(blocks.tokens + shape.response.tokens) // blocks.size) * blocks.size
    return self._prefill_rows(length), length

  def _slot_shapes(self) -> decoder.State:
    """The shapes of the slots' state, with its shardings."""
    shapes = jax.eval_shape(self.programs.empty_slots)
    state, _ = decoder.shardings(self.settings)
    return shapes if state is None else jax.tree.map(_add_sharding, shapes, state)

  def _loaded_shapes(self, trained: Params, frozen: Params) -> Params:
    """The shapes of the parameters that `load` returns, with their shardings."""
    programs, sparse = self.programs, self.settings.model.config.sparse
    shardings = decoder.loaded_shardings(self.settings.model)
    place = lambda shapes, of: jax.tree.map(_add_sharding, shapes, of) if shardings else shapes
    layers = {}
    for kind, program in programs.load_layer.items():
      rows = rows_of(sparse.index(kind), sparse)
      taken = programs.take_layer.lower(trained, frozen, rows).out_info
      layers[kind] = place(program.lower(taken).out_info, _of_layer(shardings, kind))
    others = programs.load_others.lower(trained, frozen).out_info
    others = place(others, {**(shardings or {}), "blocks": ()})
    return {**others, "blocks": tuple(layers[kind] for kind in sparse)}

  def serve(
    self,
    params: Params | None,
    requests: Iterable[Request[Owner] | None],
    usage: Usage | None = None,
    dialogues: Dialogues | None = None,
    new_weights: ChangingWeights | None = None,
  ) -> Iterator[list[Group[Owner]]]:
    """Yields, after every burst, the groups that it has finished, in any order.

    Args:
      params: from `load`; None with `new_weights`, which has them.
      requests: consumed as slots become free; None: there is none now, ask again after a burst.
      usage: counts the steps and tokens of the slots.
      dialogues: answers turns; while it does, other rollouts have the slots. None: a response is
        one turn.
      new_weights: asked between bursts; groups then have `token_versions`. None: the weights do not
        change.
    """
    weights: ChangingWeights = new_weights or OneVersion(params)
    state = self.programs.empty_slots()
    usage = Usage() if usage is None else usage
    slots: list[_Rollout | None] = [None] * self.settings.slots
    stream = _Stream(
      iter(requests), weights, new_weights is not None, dialogues, {}, collections.deque(), {}, []
    )
    take_answers = functools.partial(stream.take_answers, self.settings.shape.steps)
    pending = self._prefill(self._contexts(stream), stream)
    burst_s, has_more = 0.0, True  # of what is to be decoded now
    while True:
      # A burst computes all slots: the more of them will be idle, the longer replies may take.
      idle = 0.0 if has_more else slots.count(None) / len(slots)
      finished = take_answers(patience_s=idle * burst_s, until_one=False)
      weights.ask()
      if weights.rebuilds:
        state = self._rebuild(state, slots, stream)
      free = [slot for slot, rollout in enumerate(slots) if rollout is None]
      # `zip` stops at `free`, its first argument, so that no rollout is consumed without a slot.
      new = dict(zip(free, pending, strict=False))
      while len(new) < len(free):
        # Of requests and answers that come later, or came after `pending` had been made.
        pending = self._prefill(self._contexts(stream), stream)
        if not stream.resumed:
          break
        new |= zip(free[len(new) :], pending, strict=False)
      has_more = len(new) == len(free)
      for prefilled, fresh in self._by_prefilled_batch(new.items()):
        state = self.programs.insert(state, prefilled, fresh)
      for slot, (rollout, *_) in new.items():
        slots[slot] = rollout
        stream.begin(rollout)
      busy = {slot: rollout for slot, rollout in enumerate(slots) if rollout is not None}
      if not busy:
        if stream.waiting:
          finished += take_answers(patience_s=burst_s, until_one=True)
          yield finished
          continue
        if finished:
          yield finished
        return
      began = time.monotonic()
      # At times rollouts have several versions where a recorded run is repeated: one after another.
      versions = {s: stream.version(r) for s, r in busy.items()} if stream.has_versions else {}
      version = min(versions.values(), default=NOT_SAMPLED)
      halted = {slot: busy.pop(slot) for slot, v in versions.items() if v != version}
      if halted:
        state = self.programs.halt(state, self._mask(halted))
      state, emitted = self._compiled.bursts.run(
        weights.params(version),
        state,
        prompt=max(len(rollout.prompt) - 1 for rollout in busy.values()),
        response=max(rollout.cached for rollout in busy.values()),
        has_halted=bool(halted),
      )
      emitted, routes = self._to_host((emitted, [routes for routes, _ in stream.prefilled]))
      stream.record_prefilled(routes)
      burst_s = min(time.monotonic() - began, PATIENCE_S)
      before = {slot: rollout.length for slot, rollout in busy.items()}
      tokens = sum(rollout.append(emitted, slot, version) for slot, rollout in busy.items())
      self._count_burst(usage, stream, int(emitted.steps), len(busy), tokens)
      ended = {slot: rollout for slot, rollout in busy.items() if not emitted.running[slot]}
      if dialogues is not None:
        cut = self._cut_at_stop_strings(dialogues, busy, before)
        if any(emitted.running[slot] for slot in cut):
          state = self.programs.halt(state, self._mask(cut))
        ended |= {slot: busy[slot] for slot in cut}
      if halted:
        state = self.programs.resume(state, self._mask(halted), *self._to_decode(halted))
      for slot, rollout in busy.items():
        length = rollout.length
        goes_on = rollout._replace(cached=length, routed=length, version=version)
        slots[slot] = None if slot in ended else goes_on
      for _, rollout in sorted(ended.items()):
        finished += stream.end_turn(rollout)
      yield finished

  def _count_burst(self, usage: Usage, stream: _Stream, steps: int, busy: int, tokens: int) -> None:
    """Counts a burst of so many steps, with so many busy slots and new tokens."""
    slots = self.settings.slots
    # In the drain slots are idle even if every reply comes at once.
    usage.add(steps * slots, tokens, drain=busy + len(stream.waiting) < slots)
    if stream.dialogues is not None and stream.waiting:
      stream.dialogues.add_costs(idle_slot_steps=steps * (slots - busy))

  def _cut_at_stop_strings(
    self, dialogues: Dialogues, busy: Mapping[int, _Rollout], before: Mapping[int, int]
  ) -> list[int]:
    """Ends turns at their stop strings; returns the slots of these turns."""
    halted = []
    for slot, rollout in busy.items():
      length = dialogues.find_stop(rollout.group, rollout.number, before[slot])
      if length is not None:
        rollout.cut(length, self._pad_token)
        halted.append(slot)
    return halted

  def _mask(self, slots: Iterable[int]) -> np.ndarray:
    """bool[slots], True for these."""
    return np.isin(np.arange(self.settings.slots), [*slots])

  def _rebuild(
    self, state: decoder.State, slots: list[_Rollout | None], stream: _Stream
  ) -> decoder.State:
    """Computes the caches of running rollouts anew that other weights sample from now on."""
    changed = {
      (id(rollout.group), rollout.number): (slot, rollout)
      for slot, rollout in enumerate(slots)
      if rollout is not None and stream.version(rollout) != rollout.version
    }
    contexts = (
      _Context(rollout.cached_tokens(), len(rollout.prompt) - 1, [rollout])
      for _, rollout in changed.values()
    )

    def place() -> Iterator[tuple[int, _Pending]]:
      for pending in self._prefill(contexts, stream):
        slot, _ = changed[id(pending.rollout.group), pending.rollout.number]
        slots[slot] = pending.rollout
        yield slot, pending

    for prefilled, fresh in self._by_prefilled_batch(place()):
      state = self.programs.insert(state, prefilled, fresh)
    return state

  def _contexts(self, stream: _Stream) -> Iterator[_Context | None]:
    """What is to be prefilled: dialogues that go on, then requests; None: nothing for now."""
    while True:
      if stream.resumed:
        rollout = stream.resumed.popleft()
        yield _Context(rollout.cached_tokens(), len(rollout.prompt) - 1, [rollout])
        continue
      try:
        request = next(stream.requests)
      except StopIteration:
        return
      if request is None:
        yield None
        continue
      group = self._empty_group(request, stream.has_versions)
      rollouts = [_Rollout(group, g, request.prompt, key) for g, key in enumerate(request.keys)]
      for _, alike in itertools.groupby(sorted(rollouts, key=stream.version), stream.version):
        yield _Context(request.prompt[:-1], len(request.prompt) - 1, [*alike])

  def _empty_group(self, request: Request, has_versions: bool) -> Group:
    """The arrays of a request's rollouts, none of them sampled yet."""
    G, T = len(request.keys), self.settings.max_new_tokens
    group = Group(
      owner=request.owner,
      prompt_index=request.prompt_index,
      tokens=np.full((G, T), self._pad_token, np.int32),
      lengths=np.zeros(G, np.int32),
      stopped=np.zeros(G, bool),
      behavior_logprobs=np.zeros((G, T), decoder.logprobs_dtype(self.settings)),
    )
    if has_versions:
      group = group._replace(token_versions=np.full((G, T), NOT_SAMPLED, np.int32))
    if (routes := self.settings.routes) is not None:
      S = self._max_prompt_length
      group = group._replace(
        routes=np.zeros((G, T, *routes.shape), routes.dtype),
        prompt_routes=np.zeros((S, *routes.shape), routes.dtype),
      )
    if not self.settings.has_replies:
      return group
    return group._replace(
      turns=np.zeros((G, T), np.int32),
      ends=np.zeros(G, np.int32),
      scores=np.full(G, np.nan, np.float32),
      details=[""] * G,
      turn_scores=np.full((G, T), np.nan, np.float32),
    )

  def _round_up(self, rows: int) -> int:
    """The next multiple of the devices that rows are split over."""
    return -(-rows // self._batch_devices) * self._batch_devices

  def _prefill_rows(self, length: int) -> int:
    """Prompts of a padded length that are prefilled at a time."""
    return self._round_up(min(self._max_prefill_rows, max(_PREFILL_TOKENS // length, 1)))

  def _prefill(self, contexts: Iterator[_Context | None], stream: _Stream) -> Iterator[_Pending]:
    """Yields the rollouts of contexts up to a None; prefills those of like length in batches.

    A context's padded length, and the number of rows of its batch, depend only on its own length.
    """
    waiting: list[_Context] = []
    while True:
      for context in itertools.islice(contexts, self._prefill_rows(1) - len(waiting)):
        if context is None:
          break
        waiting.append(context)
      if not waiting:
        return
      kind = self._kind(waiting[0], stream)
      length, has_response, version = kind
      size = self._prefill_rows(length)
      alike = (i for i, context in enumerate(waiting) if self._kind(context, stream) == kind)
      indices = [*itertools.islice(alike, size)]
      members = [waiting[i] for i in indices]
      waiting = [context for i, context in enumerate(waiting) if i not in indices]
      tokens = np.full((size, length), self._pad_token, np.int32)
      lengths, prompts = np.zeros((2, size), np.int32)
      for row, context in enumerate(members):
        tokens[row, : len(context.tokens)] = context.tokens
        lengths[row] = len(context.tokens)
        prompts[row] = context.prompt
      of_responses = (prompts,) if has_response else ()
      params = stream.weights.params(version)
      prefill = self._compiled.prefills.find(tokens.shape, params, has_response)
      prefilled = prefill(params, tokens, lengths, *of_responses)
      if prefilled.routes is not None:
        stream.prefilled.append((prefilled.routes, members))
      late: list[_Context] = []  # newer weights have come before there was a slot
      for row, context in enumerate(members):
        for i, rollout in enumerate(context.rollouts):
          if stream.version(rollout) != version:
            late.append(context._replace(rollouts=context.rollouts[i:]))
            break
          yield _Pending(rollout._replace(version=version), prefilled, row)
      waiting = late + waiting

  def _kind(self, context: _Context, stream: _Stream) -> tuple[int, bool, int]:
    """Contexts of one kind are prefilled together.

    Returns:
      (padded length, whether it has a response, version of the weights).
    """
    version = stream.version(context.rollouts[0])
    return self._padded_length(context), context.has_response, version

  def _padded_length(self, context: _Context) -> int:
    """A block's size times the least power of two that holds the context, capped."""
    blocks = self.settings.shape.prompt
    longest = self.longest_prefill()[1] if context.has_response else blocks.tokens
    lengths = _padded_lengths(blocks.size, longest)
    return next(length for length in lengths if length >= len(context.tokens))

  def _by_prefilled_batch(
    self, new: Iterable[tuple[int, _Pending]]
  ) -> Iterator[tuple[Prefilled, Fresh]]:
    """Yields arguments of `decoder.insert` for rollouts by slot, once per prefilled batch."""
    slots = self.settings.slots
    for _, members in itertools.groupby(new, key=lambda item: id(item[1].prefilled)):
      numbers: Any = np.full((2, slots), -1, np.int32)
      keys: Any = np.zeros((slots, 2), np.uint32)
      cached: Any = np.zeros(slots, np.int32)
      rollouts: dict[int, _Rollout] = {}
      for slot, waiting in members:
        rollouts[slot] = rollout = waiting.rollout
        numbers[:, slot] = (waiting.row, len(rollout.prompt) - 1)
        keys[slot] = rollout.key
        cached[slot] = rollout.cached
      token, known = self._to_decode(rollouts)
      fresh = Fresh(row=numbers[0], token=token, prompt=numbers[1], keys=keys, known=known)
      if self.settings.has_replies or cached.any():
        fresh = fresh._replace(generated=cached)
      yield waiting.prefilled, fresh

  def _to_decode(self, rollouts: Mapping[int, _Rollout]) -> tuple[Any, Known | None]:
    """Of rollouts by slot: the first token to decode, and of dialogues the known ones behind it."""
    slots, steps = self.settings.slots, self.settings.shape.steps
    token: Any = np.full(slots, -1, np.int32)
    known_tokens: Any = np.zeros((slots, steps), np.int32)
    known_number: Any = np.zeros(slots, np.int32)
    for slot, rollout in rollouts.items():
      token[slot] = rollout.next_token()
      tokens = rollout.known_tokens()
      known_tokens[slot, : len(tokens)] = tokens
      known_number[slot] = len(tokens)
    has_replies = self.settings.has_replies
    return token, Known(known_tokens, known_number) if has_replies else None
