"""The host's side of generation: puts rollouts into slots, which decode them in bursts."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.decoder import Emitted, Fresh, Known, Prefilled, Settings
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import Array, Params

NOT_SAMPLED = -1  # version of tokens that no policy of the run has sampled

Place: TypeAlias = tuple[int, int, int]  # (draw, index of the group, number in the group)


class MissingWeightsError(ValueError):
  """The engine does not have the weights of the version that a rollout needs next."""


@dataclasses.dataclass
class SlotUsage:
  """Counts of an engine's decoding steps and tokens, and the costs of replies in dialogues.

  Attributes:
    slot_steps: decoding steps times slots, idle slots included.
    slot_tokens: sampled tokens, without tokens that a burst of a dialogue repeats.
    drain_slot_steps, drain_tokens: slot_steps and slot_tokens of the bursts that had fewer
      unfinished responses than slots, as when no requests are left. A response that waits for a
      reply counts as unfinished.
    idle_slot_steps: decoding steps of slots without a rollout, while dialogues waited for replies.
    rebuilt_tokens: tokens of prompts and responses for which the cache was computed again after a
      reply.
  """

  slot_steps: int = 0
  slot_tokens: int = 0
  drain_slot_steps: int = 0
  drain_tokens: int = 0
  idle_slot_steps: int = 0
  rebuilt_tokens: int = 0

  def add(self, slot_steps: int, tokens: int, *, drain: bool) -> None:
    """Adds the counts of one burst."""
    self.slot_steps += slot_steps
    self.slot_tokens += tokens
    self.drain_slot_steps += slot_steps * drain
    self.drain_tokens += tokens * drain

  def add_costs(self, *, idle_slot_steps: int = 0, rebuilt_tokens: int = 0) -> None:
    """Adds the costs that replies in dialogues have caused."""
    self.idle_slot_steps += idle_slot_steps
    self.rebuilt_tokens += rebuilt_tokens


@dataclasses.dataclass
class Rollout:
  """A response in progress; NumPy.

  Attributes:
    place: identifies the rollout for the caller, see `Place`; the engine only names it in errors.
    prompt: i32[n], n ≥ 1 tokens.
    key: u32[2], data of the rollout's PRNG key.
    arrays: arrays by name, made by `Engine.rollout`; the engine fills the arrays in place.
    plan: i32[n], n ≥ 1, the version that samples each token of the response; all tokens after the
      first n are sampled by the last version. None: the newest version samples.
    length: number of tokens of the response so far.
    stopped: whether a stop token or a stop string has ended the turn.
  """

  place: Place
  prompt: np.ndarray
  key: np.ndarray
  arrays: dict[str, np.ndarray]
  plan: np.ndarray | None = None
  length: int = 0
  stopped: bool = False

  def append(
    self, tokens: np.ndarray, logprobs: np.ndarray, version: int, *, stopped: bool
  ) -> None:
    """Appends tokens that a version has sampled, with their log-probabilities."""
    new = slice(self.length, self.length + len(tokens))
    self.arrays["tokens"][new] = tokens
    self.arrays["behavior_logprobs"][new] = logprobs
    self.arrays["versions"][new] = version
    if "turns" in self.arrays:
      # The policy's turn goes on, or a new turn follows a reply; turns of replies have odd numbers.
      last = int(self.arrays["turns"][self.length - 1]) if self.length else 0
      self.arrays["turns"][new] = last + last % 2
    self.length, self.stopped = new.stop, stopped

  def add_reply(self, tokens: np.ndarray) -> None:
    """Appends tokens of the environment, up to the response's maximum length."""
    new = slice(self.length, min(self.length + len(tokens), len(self.arrays["tokens"])))
    self.arrays["tokens"][new] = tokens[: new.stop - new.start]
    self.arrays["turns"][new] = self.arrays["turns"][self.length - 1] + 1
    self.length = new.stop

  def end(self, *, is_cut_off: bool) -> None:
    """Sets `stopped` at a dialogue's end: False if the length limit cut it off, else True."""
    self.stopped = not is_cut_off

  def cut(self, length: int, pad_token: int) -> None:
    """Ends the policy's turn after `length` tokens of the response and drops later tokens."""
    empty = {"tokens": pad_token, "behavior_logprobs": 0, "versions": NOT_SAMPLED}
    for name, value in {**empty, "turns": 0, "routes": 0}.items():
      if name in self.arrays:
        self.arrays[name][length : self.length] = value
    self.length, self.stopped = length, True


class _Run(NamedTuple):
  """A rollout that has a slot or waits for one."""

  rollout: Rollout
  cached: int = 0  # number of the response's cached tokens, a multiple of a burst's steps
  routed: int = 0  # number of the response's tokens with recorded routes; a burst may repeat some
  version: int = NOT_SAMPLED  # version of the weights that last computed its cache

  def next_token(self) -> int:
    """The first token that the slot decodes for the rollout."""
    rollout = self.rollout
    return int(rollout.arrays["tokens"][self.cached - 1] if self.cached else rollout.prompt[-1])

  def cached_tokens(self) -> np.ndarray:
    """i32[n], tokens of prompt and response in the cache when the rollout gets a slot."""
    # The prompt's last token is cached together with the response's first token.
    prompt = self.rollout.prompt if self.cached else self.rollout.prompt[:-1]
    return np.append(prompt, self.rollout.arrays["tokens"][: max(self.cached - 1, 0)])

  def known_tokens(self) -> np.ndarray:
    """i32[n], tokens of the response that are not in the cache."""
    return self.rollout.arrays["tokens"][self.cached : self.rollout.length]

  def append(self, emitted: Emitted, slot: int, version: int) -> int:
    """Appends the tokens that a version has sampled in a slot; returns their number."""
    start, end = self.rollout.length, int(emitted.generated[slot])
    steps = slice(start - self.cached, end - self.cached)
    self.rollout.append(
      np.asarray(emitted.tokens[slot, steps]),
      np.asarray(emitted.behavior_logprobs[slot, steps]),
      version,
      stopped=bool(emitted.stopped[slot]),
    )
    if emitted.routes is not None:
      first = max(self.routed, self.cached)
      steps = slice(first - self.cached, end - self.cached)
      self.rollout.arrays["routes"][first:end] = emitted.routes[slot, steps]
    return end - start

  def record_prefilled(self, routes: np.ndarray) -> None:
    """Records the new routes [n, layers, k] of `cached_tokens`: the prompt's or the reply's."""
    prompt, arrays = len(self.rollout.prompt) - 1, self.rollout.arrays
    if self.routed < self.cached:
      arrays["routes"][self.routed : self.cached] = routes[prompt + self.routed :]
    elif not self.rollout.length:  # later, the prompt's routes are recorded already
      places = len(arrays["prompt_routes"]) - 1
      arrays["prompt_routes"][places - prompt : places] = routes[:prompt]


class _Context(NamedTuple):
  """Tokens to be prefilled, and the rollouts that begin with these tokens."""

  tokens: np.ndarray  # i32[n], all but the last token, which is decoded
  prompt: int  # number of these tokens that belong to the prompt
  padded: int  # length to which the tokens are padded
  runs: list[_Run]

  @property
  def has_response(self) -> bool:
    return self.prompt < len(self.tokens)


class _Pending(NamedTuple):
  """A rollout that waits for a slot, and its row in a prefilled batch."""

  run: _Run
  prefilled: Prefilled
  row: int


@dataclasses.dataclass
class _Weights:
  """The weights of the versions that may sample.

  Attributes:
    loaded: weights by version, from `EnginePrograms.load`.
    newest: the version that samples rollouts without a plan, see `Rollout.plan`.
    rebuilds: whether a running rollout's cache is computed again before another version samples the
      rollout; otherwise the rollout keeps the cache that earlier versions have computed.
  """

  loaded: dict[int, Params] = dataclasses.field(default_factory=dict)
  newest: int = NOT_SAMPLED
  rebuilds: bool = False

  def swap(self, version: int, params: Params, *, rebuild: bool) -> None:
    """Makes a version the newest version, which samples rollouts without a plan."""
    self.loaded[version] = params
    self.newest, self.rebuilds = version, rebuild

  def version(self, rollout: Rollout) -> int:
    """The version that samples a rollout's next token."""
    plan = rollout.plan
    return self.newest if plan is None else int(plan[min(rollout.length, len(plan) - 1)])

  def params(self, rollout: Rollout) -> Params:
    """The weights that sample a rollout's next token.

    Raises:
      MissingWeightsError: the engine does not have these weights.
    """
    version = self.version(rollout)
    if version not in self.loaded:
      raise MissingWeightsError(
        f"version {version} must sample token {rollout.length} of rollout {rollout.place} (draw,"
        " group, number in the group), but the engine has only the weights of the versions"
        f" {sorted(self.loaded)}: give it the weights of version {version} by `swap` first"
      )
    return self.loaded[version]


class _Queue:
  """Rollouts that have begun or got a reply, and have no slot yet.

  Attributes:
    waiting: contexts that wait for their prefill, in order.
    prefilled: prefilled rollouts that wait for a slot, in order.
  """

  def __init__(self, programs: EnginePrograms, weights: _Weights):
    self._programs, self._weights = programs, weights
    self.waiting: list[_Context] = []
    self.prefilled: collections.deque[_Pending] = collections.deque()
    # (routes on the devices, contexts by row) of the prefills since the last burst
    self._routes: list[tuple[Array, list[_Context]]] = []

  def add(self, runs: Iterable[_Run]) -> _Context:
    """Adds rollouts that begin with the same tokens, which then wait for their prefill."""
    context = self.context(runs)
    self.waiting.append(context)
    return context

  def context(self, runs: Iterable[_Run]) -> _Context:
    """The tokens with which all these rollouts begin, to be prefilled once for all of them."""
    first, *others = runs
    tokens, prompt = first.cached_tokens(), len(first.rollout.prompt) - 1
    padded = self._programs.padded_length(len(tokens), has_response=prompt < len(tokens))
    return _Context(tokens, prompt, padded, [first, *others])

  @property
  def num_rollouts(self) -> int:
    """Number of rollouts in the queue."""
    return len(self.prefilled) + sum(len(context.runs) for context in self.waiting)

  def lacks(self, free: int) -> bool:
    """Whether more contexts are needed to fill `free` slots from full prefill batches."""
    if self.num_rollouts < free:
      return True
    rollouts, contexts = len(self.prefilled), self.waiting
    while rollouts < free and len(contexts) >= self._programs.prefill_rows(1):
      batch, contexts = self._choose(contexts)
      rollouts += sum(len(context.runs) for context in batch)
    return rollouts < free

  def fill(self, free: int) -> None:
    """Prefills until there is a rollout for each of `free` slots, or no context waits."""
    while len(self.prefilled) < free and self.waiting:
      batch, self.waiting = self.prefill(self.waiting)
      self.prefilled += batch

  def prefill(self, contexts: list[_Context]) -> tuple[list[_Pending], list[_Context]]:
    """Prefills the first context, together with further contexts of its kind.

    Returns:
      The prefilled rollouts, and the contexts that are left.
    """
    members, left = self._choose(contexts)
    length, has_response, version = self._kind(members[0])
    params = self._weights.params(members[0].runs[0].rollout)
    prefilled = self._programs.prefill(
      params,
      [context.tokens for context in members],
      [context.prompt for context in members],
      length=length,
      has_response=has_response,
    )
    if prefilled.routes is not None:
      self._routes.append((prefilled.routes, members))
    pending = [
      _Pending(run._replace(version=version), prefilled, row)
      for row, context in enumerate(members)
      for run in context.runs
    ]
    return pending, left

  def put_back(self) -> None:
    """Moves rollouts back to `waiting` that one version prefilled and another will sample."""
    is_stale = lambda of: self._weights.version(of.run.rollout) != of.run.version
    stale = [of for of in self.prefilled if is_stale(of)]
    if not stale:
      return
    self.prefilled = collections.deque(of for of in self.prefilled if not is_stale(of))
    rows = itertools.groupby(stale, key=lambda of: (id(of.prefilled), of.row))
    self.waiting[:0] = [self.context(of.run for of in row) for _, row in rows]

  def take_routes(self) -> list[tuple[Array, list[_Context]]]:
    """(routes on the devices, contexts by row) of each prefill since the last call."""
    routes, self._routes = self._routes, []
    return routes

  def _choose(self, contexts: list[_Context]) -> tuple[list[_Context], list[_Context]]:
    """(the first context and further contexts of its kind, as a prefill batch; the other contexts).

    A context's padded length, and the number of rows of its batch, depend only on its own length.
    """
    kind, most = self._kind(contexts[0]), self._programs.prefill_rows(1)
    size = self._programs.prefill_rows(kind[0])
    members: list[_Context] = []
    left: list[_Context] = []
    for context in contexts[:most]:
      fits = len(members) < size and self._kind(context) == kind
      (members if fits else left).append(context)
    return members, left + contexts[most:]

  def _kind(self, context: _Context) -> tuple[int, bool, int]:
    """The kind of a context; contexts of one kind are prefilled together.

    Returns:
      (padded length, whether the context has a response, version of the weights).
    """
    return (context.padded, context.has_response, self._weights.version(context.runs[0].rollout))


class Engine:
  """Decodes rollouts in slots, which are refilled as turns end.

  In a loop, a driver gives weights by `swap`, begins rollouts while the engine is free, and calls
  `burst`. If a rollout's turn has ended, the driver may resume the rollout with the environment's
  reply.

  Attributes:
    settings: the settings of the programs.
    usage: the usage of the slots so far.
  """

  def __init__(
    self,
    programs: EnginePrograms,
    find_stop: Callable[[Rollout, int], int | None] | None = None,
  ):
    """Starts with empty slots; slots take device memory only while rollouts are decoded.

    Args:
      programs: the programs that this engine runs.
      find_stop: (response, number of its tokens that were searched before) → the length at which a
        stop string ends the turn, None if there is no stop string. Without `find_stop`, only stop
        tokens end turns.
    """
    self.settings: Settings = programs.settings
    self.usage = SlotUsage()
    self._programs, self._find_stop = programs, find_stop
    self._weights = _Weights()
    self._queue = _Queue(programs, self._weights)
    self._slots: list[_Run | None] = [None] * programs.settings.slots
    self._state: decoder.State | None = None  # None: all slots are idle

  @property
  def free(self) -> bool:
    """Whether to begin the rollouts of one more prompt, to fill slots or a prefill batch."""
    return self._queue.lacks(self.idle_slots)

  @property
  def busy(self) -> bool:
    """Whether there is something to decode."""
    return self.num_rollouts > 0

  @property
  def idle_slots(self) -> int:
    """Number of slots without a rollout."""
    return self._slots.count(None)

  @property
  def num_rollouts(self) -> int:
    """Number of rollouts to be decoded, in slots or waiting for a slot."""
    return len(self._slots) - self.idle_slots + self._queue.num_rollouts

  def rollout(
    self, place: Place, prompt: np.ndarray, key: np.ndarray, plan: np.ndarray | None = None
  ) -> Rollout:
    """A new `Rollout` that has not begun.

    It has these arrays, with T = `max_new_tokens` and S = `max_prompt_length`:
      tokens: i32[T], right-padded.
      behavior_logprobs: f32[T], under the sampled distribution; 0 where padded or not sampled.
      versions: i32[T], the version that sampled each token; −1 where padded or not sampled.
      turns, turn_scores: i32[T] and f32[T], only for dialogues, see `TrainBatch`.
      routes, prompt_routes: [T, layers, k] and [S, layers, k], if routes are recorded.
    """
    settings, programs = self.settings, self._programs
    T, routes = settings.max_new_tokens, settings.routes
    arrays = {
      "tokens": np.full(T, programs.pad_token, np.int32),
      "behavior_logprobs": np.zeros(T, decoder.logprobs_dtype(settings)),
      "versions": np.full(T, NOT_SAMPLED, np.int32),
    }
    if settings.has_replies:
      arrays["turns"] = np.zeros(T, np.int32)
      arrays["turn_scores"] = np.full(T, np.nan, np.float32)
    if routes is not None:
      arrays["routes"] = np.zeros((T, *routes.shape), routes.dtype)
      arrays["prompt_routes"] = np.zeros((programs.max_prompt_length, *routes.shape), routes.dtype)
    return Rollout(place, prompt, key, arrays, plan)

  def begin(self, rollouts: Sequence[Rollout]) -> None:
    """Begins rollouts of one prompt; they share the prefill if the same version samples them."""
    version = self._weights.version
    for _, alike in itertools.groupby(sorted(rollouts, key=version), version):
      self._queue.add(map(_Run, alike))

  def resume(self, rollout: Rollout, reply: np.ndarray) -> None:
    """Appends the environment's reply to a turn that has ended; the policy's next turn follows.

    Args:
      rollout: a rollout that `burst` has returned.
      reply: i32[n], n ≥ 1 tokens; the response must have room for more than n tokens.
    """
    steps, before = self.settings.shape.steps, rollout.length
    rollout.add_reply(reply)
    run = _Run(rollout, cached=(rollout.length // steps) * steps, routed=before)
    context = self._queue.add([run])
    self.usage.add_costs(rebuilt_tokens=len(context.tokens))

  def swap(self, version: int, params: Params, *, rebuild: bool = False) -> None:
    """Lets a version sample from the next burst on.

    The weights of earlier versions are kept for rollouts with plans.

    Args:
      version: the number of the version.
      params: the result of `EnginePrograms.load`.
      rebuild: whether a running rollout's cache is computed again before another version samples
        the rollout; otherwise the rollout keeps the cache that earlier versions have computed.
    """
    self._weights.swap(version, params, rebuild=rebuild)
    self._queue.put_back()

  def release(self, before: int) -> None:
    """Releases the weights of versions below `before`.

    If a later burst needs one of these versions, `swap` must first give that version's weights
    again.
    """
    for version in [version for version in self._weights.loaded if version < before]:
      del self._weights.loaded[version]

  def burst(self, *, waiting: int = 0) -> list[Rollout]:
    """Fills free slots and decodes one burst.

    Args:
      waiting: number of rollouts that wait for a reply and may be resumed, for `usage`.
    Returns:
      The rollouts whose turn has ended, in the order of their slots.
    Raises:
      ValueError: there is nothing to decode.
      MissingWeightsError: the engine lacks the weights of the version that a rollout needs next.
    """
    programs = self._programs.programs
    if not self.busy:
      raise ValueError("there is nothing to decode: begin or resume a rollout before a burst")
    state = programs.empty_slots() if self._state is None else self._state
    if self._weights.rebuilds:
      state = self._rebuild(state)
    state = self._insert(state, self._fill_slots())
    runs = {slot: run for slot, run in enumerate(self._slots) if run is not None}
    # If a recorded run is repeated, slots may need several versions: one version samples per burst.
    versions = {slot: self._weights.version(run.rollout) for slot, run in runs.items()}
    version = min(versions.values())
    halted = {slot: runs.pop(slot) for slot, other in versions.items() if other != version}
    if halted:
      state = programs.halt(state, self._mask(halted))
    state, emitted = self._programs.compiled.bursts.run(
      self._weights.params(next(iter(runs.values())).rollout),
      state,
      prompt=max(len(run.rollout.prompt) - 1 for run in runs.values()),
      response=max(run.cached for run in runs.values()),
      has_halted=bool(halted),
    )
    emitted = self._to_host(emitted)
    before = {slot: run.rollout.length for slot, run in runs.items()}
    tokens = sum(run.append(emitted, slot, version) for slot, run in runs.items())
    self._count(int(emitted.steps), len(runs), tokens, waiting)
    ended = {slot for slot in runs if not emitted.running[slot]}
    cut = {slot for slot, run in runs.items() if self._cut_at_stop_string(run, before[slot])}
    if cut - ended:
      state = programs.halt(state, self._mask(cut))
    if halted:
      state = programs.resume(state, self._mask(halted), *self._to_decode(halted))
    for slot, run in runs.items():
      length = run.rollout.length
      goes_on = run._replace(cached=length, routed=length, version=version)
      self._slots[slot] = None if slot in ended | cut else goes_on
    self._state = state if self.idle_slots < len(self._slots) else None
    return [runs[slot].rollout for slot in sorted(ended | cut)]

  def _fill_slots(self) -> dict[int, _Pending]:
    """Gives free slots to waiting rollouts; returns these rollouts by slot."""
    free = [slot for slot, run in enumerate(self._slots) if run is None]
    self._queue.fill(len(free))
    new = {slot: self._queue.prefilled.popleft() for slot in free[: len(self._queue.prefilled)]}
    for slot, pending in new.items():
      self._slots[slot] = pending.run
    return new

  def _rebuild(self, state: decoder.State) -> decoder.State:
    """Recomputes the caches of running rollouts that another version samples from now on."""
    changed = {
      id(run.rollout): (slot, run)
      for slot, run in enumerate(self._slots)
      if run is not None and self._weights.version(run.rollout) != run.version
    }
    contexts = [self._queue.context([run]) for _, run in changed.values()]
    while contexts:
      batch, contexts = self._queue.prefill(contexts)
      new = {changed[id(pending.run.rollout)][0]: pending for pending in batch}
      for slot, pending in new.items():
        self._slots[slot] = pending.run
      state = self._insert(state, new)
    return state

  def _insert(self, state: decoder.State, new: Mapping[int, _Pending]) -> decoder.State:
    """Puts rollouts into their slots on the devices."""
    for prefilled, fresh in self._by_prefilled_batch(new):
      state = self._programs.programs.insert(state, prefilled, fresh)
    return state

  def _by_prefilled_batch(self, new: Mapping[int, _Pending]) -> Iterator[tuple[Prefilled, Fresh]]:
    """Yields arguments of `decoder.insert` for rollouts by slot, once per prefilled batch."""
    slots = self.settings.slots
    for _, members in itertools.groupby(new.items(), key=lambda item: id(item[1].prefilled)):
      numbers = np.full((2, slots), -1, np.int32)
      keys = np.zeros((slots, 2), np.uint32)
      cached = np.zeros(slots, np.int32)
      runs: dict[int, _Run] = {}
      for slot, pending in members:
        runs[slot] = run = pending.run
        numbers[:, slot] = (pending.row, len(run.rollout.prompt) - 1)
        keys[slot] = run.rollout.key
        cached[slot] = run.cached
      token, known = self._to_decode(runs)
      fresh = Fresh(row=numbers[0], token=token, prompt=numbers[1], keys=keys, known=known)
      if self.settings.has_replies or cached.any():
        fresh = fresh._replace(generated=cached)
      yield pending.prefilled, fresh

  def _to_decode(self, runs: Mapping[int, _Run]) -> tuple[np.ndarray, Known | None]:
    """(first token to decode, known tokens after it in dialogues) of rollouts by slot."""
    slots, steps = self.settings.slots, self.settings.shape.steps
    token = np.full(slots, -1, np.int32)
    known_tokens = np.zeros((slots, steps), np.int32)
    known_number = np.zeros(slots, np.int32)
    for slot, run in runs.items():
      token[slot] = run.next_token()
      tokens = run.known_tokens()
      known_tokens[slot, : len(tokens)] = tokens
      known_number[slot] = len(tokens)
    has_replies = self.settings.has_replies
    return token, Known(known_tokens, known_number) if has_replies else None

  def _to_host(self, on_devices: Emitted) -> Emitted:
    """Fetches the results of a burst, and records the routes of the prefills before the burst."""
    prefilled = self._queue.take_routes()
    emitted: Emitted
    emitted, routes = self._programs.to_host((on_devices, [routes for routes, _ in prefilled]))
    for of_batch, (_, contexts) in zip(routes, prefilled, strict=True):
      for row, context in zip(of_batch, contexts, strict=False):
        for run in context.runs:
          run.record_prefilled(row[: len(context.tokens)])
    return emitted

  def _count(self, steps: int, busy: int, tokens: int, waiting: int) -> None:
    """Counts a burst.

    Args:
      steps: number of decoding steps.
      busy: number of slots with a rollout.
      tokens: number of sampled tokens.
      waiting: number of rollouts that wait for a reply.
    """
    slots = self.settings.slots
    # A burst belongs to the drain if slots would be idle even with all replies.
    self.usage.add(steps * slots, tokens, drain=busy + waiting < slots)
    if waiting:
      self.usage.add_costs(idle_slot_steps=steps * (slots - busy))

  def _cut_at_stop_string(self, run: _Run, before: int) -> bool:
    """Ends a turn at its stop string; returns False if the turn has no stop string."""
    length = None if self._find_stop is None else self._find_stop(run.rollout, before)
    if length is None:
      return False
    run.rollout.cut(length, self._programs.pad_token)
    return True

  def _mask(self, slots: Iterable[int]) -> np.ndarray:
    """bool[slots], True for the given slots."""
    return np.isin(np.arange(self.settings.slots), [*slots])
