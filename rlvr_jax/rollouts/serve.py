"""A stream of requests that an engine pulls: what drives `rollouts.engine` for batches."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from rlvr_jax.rollouts import decoder
from rlvr_jax.rollouts.engine import NOT_SAMPLED, Engine, Rollout, Usage
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import Array, Params, Prompts, Rollouts

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
    """The weights of a version, from `EnginePrograms.load`."""
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


class _Place(NamedTuple):
  """Where a rollout of an engine belongs."""

  group: Group
  number: int  # in the group
  plan: np.ndarray  # i32[1], the rollout's own: the version that samples its next token

  @property
  def key(self) -> tuple[int, int]:
    return id(self.group), self.number


class _Stream(NamedTuple):
  """The rollouts of a stream that have begun and not ended, by `_Place.key`."""

  engine: Engine
  weights: ChangingWeights
  loaded: set[int]  # versions that the engine has
  decoded: dict[tuple[int, int], Rollout]  # by the engine
  waiting: dict[tuple[int, int], Rollout]  # for an answer
  unfinished: dict[int, int]  # id of a group → number of its rollouts that have not ended

  def take_weights(self) -> None:
    """Takes newer weights if there are any, and gives the engine all that its rollouts need."""
    self.engine.release(before=max(self.loaded, default=0) + 1)  # so that one copy is kept
    self.loaded.clear()
    self.weights.ask()
    for rollout in self.decoded.values():
      self._set_version(rollout, rollout.length)
    for rollout in self.decoded.values():
      self._load(rollout)

  def begin(self, group: Group, request: Request) -> None:
    """Begins the rollouts of a request, whose arrays are rows of the group's."""
    rollouts = []
    for g, key in enumerate(request.keys):
      place = _Place(group, g, np.zeros(1, np.int32))
      rollout = self.engine.rollout(place, request.prompt, key, place.plan)
      rollout.arrays.update(_rows(group, g))
      rollouts.append(rollout)
      self._decode(rollout, 0)
    self.unfinished[id(group)] = len(rollouts)
    self.engine.begin(rollouts)

  def resume(self, rollout: Rollout, reply: np.ndarray) -> None:
    """Lets a dialogue go on."""
    self._decode(rollout, rollout.length + len(reply))
    self.engine.resume(rollout, reply)

  def end(self, group: Group) -> list[Group]:
    """Notes that a rollout of the group has ended; returns the group if it was the last."""
    self.unfinished[id(group)] -= 1
    if self.unfinished[id(group)]:
      return []
    del self.unfinished[id(group)]
    return [group]

  def _decode(self, rollout: Rollout, length: int) -> None:
    """Notes that the engine is to decode a rollout after so many tokens of the response."""
    self.decoded[rollout.place.key] = rollout
    self._set_version(rollout, length)
    self._load(rollout)

  def _set_version(self, rollout: Rollout, length: int) -> None:
    group, number, plan = rollout.place
    plan[:] = self.weights.version(group, number, length)

  def _load(self, rollout: Rollout) -> None:
    version = int(rollout.place.plan[0])
    if version not in self.loaded:
      self.loaded.add(version)
      params = self.weights.params(version)
      self.engine.swap(version, params, rebuild=self.weights.rebuilds)


def serve(
  programs: EnginePrograms,
  params: Params | None,
  requests: Iterable[Request[Owner] | None],
  usage: Usage | None = None,
  dialogues: Dialogues | None = None,
  new_weights: ChangingWeights | None = None,
) -> Iterator[list[Group[Owner]]]:
  """Yields, after every burst, the groups that it has finished, in any order.

  Args:
    programs: of the engine.
    params: from `EnginePrograms.load`; None with `new_weights`, which has them.
    requests: consumed as slots become free; None: there is none now, ask again after a burst.
    usage: counts the steps and tokens of the slots.
    dialogues: answers turns; while it does, other rollouts have the slots. None: a response is
      one turn.
    new_weights: asked between bursts; groups then have `token_versions`. None: the weights do not
      change.
  """
  find_stop = None if dialogues is None else functools.partial(_find_stop, dialogues)
  engine, asked = Engine(programs, find_stop), iter(requests)
  usage, counted = usage or Usage(), dataclasses.replace(engine.usage)
  weights = OneVersion(params) if new_weights is None else new_weights
  stream = _Stream(engine, weights, set(), {}, {}, {})
  answered: list[tuple[Rollout, np.ndarray]] = []  # have a reply, and go on

  def take_answers(patience_s: float, *, until_one: bool) -> list[Group[Owner]]:
    finished: list[Group] = []
    if dialogues is None or not stream.waiting:
      return finished
    for answer in dialogues.take(patience_s=patience_s, until_one=until_one):
      rollout = stream.waiting.pop((id(answer.group), answer.rollout))
      if answer.is_last:
        finished += stream.end(answer.group)
      else:
        answered.append((rollout, answer.tokens))
    return finished

  burst_s, is_full = 0.0, True  # whether there is a rollout for every slot
  while True:
    # A burst computes all slots: the more of them will be idle, the longer replies may take.
    idle = 0.0 if is_full else engine.idle_slots / engine.settings.slots
    finished = take_answers(idle * burst_s, until_one=False)
    stream.take_weights()
    while answered:
      stream.resume(*answered.pop(0))
    while engine.free and (request := next(asked, None)) is not None:
      stream.begin(_empty_group(programs, request, new_weights is not None), request)
    is_full = engine.num_rollouts >= engine.settings.slots
    if engine.busy:
      began = time.monotonic()
      ended = engine.burst(waiting=len(stream.waiting))
      burst_s = min(time.monotonic() - began, PATIENCE_S)
      new = engine.usage.since(counted)
      counted = dataclasses.replace(engine.usage)
      usage.add(new.slot_steps, new.slot_tokens, drain=new.drain_slot_steps > 0)
      if dialogues is not None:
        dialogues.add_costs(idle_slot_steps=new.idle_slot_steps, rebuilt_tokens=new.rebuilt_tokens)
      for rollout in ended:
        group, number, _ = _write_end(rollout)
        del stream.decoded[rollout.place.key]
        if dialogues is None:
          finished += stream.end(group)
        else:
          stream.waiting[rollout.place.key] = rollout
          dialogues.ask(group, number)
    elif stream.waiting:
      finished += take_answers(burst_s, until_one=True)
    else:
      if finished:
        yield finished
      return
    yield finished


def _find_stop(dialogues: Dialogues, rollout: Rollout, start: int) -> int | None:
  group, number, _ = _write_end(rollout)
  return dialogues.find_stop(group, number, start)


def _write_end(rollout: Rollout) -> _Place:
  """Writes into its group how far a rollout is; returns its place."""
  place: _Place = rollout.place
  place.group.lengths[place.number] = rollout.length
  place.group.stopped[place.number] = rollout.stopped
  return place


def _rows(group: Group, number: int) -> dict[str, np.ndarray]:
  """The rows of a group's arrays that are a rollout's, by their names there."""
  rows = {
    "tokens": group.tokens,
    "behavior_logprobs": group.behavior_logprobs,
    "versions": group.token_versions,
    "turns": group.turns,
    "routes": group.routes,
  }
  found = {name: array[number] for name, array in rows.items() if array is not None}
  # The prompt's routes are recorded once.
  if group.prompt_routes is not None and not number:
    found["prompt_routes"] = group.prompt_routes
  return found


def _empty_group(programs: EnginePrograms, request: Request, has_versions: bool) -> Group:
  """The arrays of a request's rollouts, none of them sampled yet."""
  settings = programs.settings
  G, T = len(request.keys), settings.max_new_tokens
  group = Group(
    owner=request.owner,
    prompt_index=request.prompt_index,
    tokens=np.full((G, T), programs.pad_token, np.int32),
    lengths=np.zeros(G, np.int32),
    stopped=np.zeros(G, bool),
    behavior_logprobs=np.zeros((G, T), decoder.logprobs_dtype(settings)),
  )
  if has_versions:
    group = group._replace(token_versions=np.full((G, T), NOT_SAMPLED, np.int32))
  if (routes := settings.routes) is not None:
    S = programs.max_prompt_length
    group = group._replace(
      routes=np.zeros((G, T, *routes.shape), routes.dtype),
      prompt_routes=np.zeros((S, *routes.shape), routes.dtype),
    )
  if not settings.has_replies:
    return group
  return group._replace(
    turns=np.zeros((G, T), np.int32),
    ends=np.zeros(G, np.int32),
    scores=np.full(G, np.nan, np.float32),
    details=[""] * G,
    turn_scores=np.full((G, T), np.nan, np.float32),
  )
