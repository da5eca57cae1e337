"""Samplers: `LocalSampler` works in the thread that calls it, `ThreadSampler` in its own thread.

A sampler is offered policies and asked for groups of draws; it returns graded groups in any order.
The content of a rollout depends only on its draw, its place in the draw and its policy. The time of
sampling and the other rollouts in the slots have no effect.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from rlvr_jax.data.tokenizer import encode_first_turn
from rlvr_jax.ops.keys import key_for, seeds_for
from rlvr_jax.rewards.graders import thought_prefix
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rollouts.answers import AnswerCounts, Answers, Asked
from rlvr_jax.rollouts.engine import NOT_SAMPLED, Engine, MissingWeightsError, Rollout, SlotUsage
from rlvr_jax.rollouts.grading import Grading
from rlvr_jax.rollouts.group import Draw, Group, Policy
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import Array, Params

# Values of `config.fleet.new_weights`: what happens to responses in progress when new weights come.
FINISH = "finish"  # a response ends with the weights that it began with
SWITCH = "switch"  # a response goes on with the new weights, and keeps the cache of the old weights
RECOMPUTE = "recompute"  # a response goes on with the new weights, which first recompute its cache
CHOICES = (FINISH, SWITCH, RECOMPUTE)

ROLLOUT = "rollout"  # the purpose of the random keys of training, see `ops.keys`
PATIENCE_S = 1.0  # the most seconds that a burst waits for replies that could fill idle slots
_CLOSING_S = 10.0  # limit on the wait for a burst in progress when a run ends
_IF_LATE = (
  "Check whether sampling or the grader hangs, or raise config.generation_deadline_s. Sampled"
  " groups are kept: rerun the same command to continue"
)
_POLL_S = 0.2  # interval at which a wait checks whether the run is to end


class ReplayError(RuntimeError):
  """A run that repeats a recorded run differs from it."""


class SamplerStoppedError(RuntimeError):
  """A sampler has given no group within its deadline, or has failed."""


class SamplingSource(NamedTuple):
  """A policy that samples some groups of every draw."""

  programs: EnginePrograms
  load: Callable[[Policy], Params]  # offered policy → source's weights, as the programs take them
  of_this_run: bool = True  # whether its weights derive from the trained policy's weights


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
  """Settings of a sampler.

  Attributes:
    group_size: G.
    purpose: the purpose of the sampler's random keys, see `ops.keys`.
    new_weights: one of `CHOICES`.
    has_plans: whether draws say which version samples each token.
    oldest_needed: newest version that was offered → oldest version that later draws may need.
    deadline_s: seconds without a token or an answer after which `LocalSampler.take` raises an
      error.
  """

  group_size: int
  purpose: str = ROLLOUT
  new_weights: str = FINISH
  has_plans: bool = False
  oldest_needed: Callable[[int], int] = lambda version: version
  deadline_s: float = math.inf

  @property
  def changes_weights(self) -> bool:
    """Whether several versions may sample a response."""
    return self.has_plans or self.new_weights != FINISH


class Progress(NamedTuple):
  """The progress of a sampler."""

  finished: int  # groups that the last burst has finished
  left: int  # groups that are requested and not finished
  usage: SlotUsage  # usage of all slots so far
  slots: int  # number of slots that decode at a time


@dataclasses.dataclass(frozen=True)
class _Begun:
  """A group whose rollouts are being sampled."""

  draw: Draw
  index: int
  asked: Asked
  ended: dict[int, tuple[Rollout, Grade]]  # graded rollouts, by number in the group


class _Prepared(NamedTuple):
  """Groups of a draw that are ready to begin."""

  wanted: Sequence[int]  # see `_Request`
  prompts: dict[int, np.ndarray]  # i32[n], by index
  asked: dict[int, Asked]  # facts for graders and environments, by index
  keys: dict[int, np.ndarray]  # u32[G, 2], by index


@dataclasses.dataclass(frozen=True)
class _Request:
  """A group that has not begun."""

  draw: Draw
  index: int
  wanted: Sequence[int]  # indices of the groups of its draw and source that were requested together


class _Lane:
  """One source with its engine and the groups that it has to sample.

  Attributes:
    source: the source.
    engine: the engine that decodes the source's rollouts.
    requests: groups that have not begun, in order.
    prepared: the groups that were requested together with the group that began last.
    resumed: rollouts that have got a reply, and the replies.
    loaded: versions whose weights the engine has.
  """

  def __init__(self, source: SamplingSource, find_stop: Callable[[Rollout, int], int | None]):
    self.source, self.engine = source, Engine(source.programs, find_stop)
    self.requests: collections.deque[_Request] = collections.deque()
    self.prepared: _Prepared | None = None
    self.resumed: collections.deque[tuple[Rollout, np.ndarray]] = collections.deque()
    self.loaded: set[int] = set()

  def prepare(self, request: _Request, prepare: Callable[[_Request], _Prepared]) -> _Prepared:
    """Prompts and keys of all groups that were requested together with this one; made once."""
    if self.prepared is None or self.prepared.wanted is not request.wanted:
      self.prepared = prepare(request)
    return self.prepared

  @property
  def decodes(self) -> bool:
    """Whether there is something to decode."""
    return self.engine.busy or bool(self.resumed)

  def has(self, policy: Policy) -> bool:
    """Whether the engine has a policy's weights."""
    return self._version(policy) in self.loaded

  def load(self, policy: Policy, *, rebuild: bool = False) -> None:
    """Gives the engine a policy's weights, unless it has them."""
    if not self.has(policy):
      version = self._version(policy)
      self.engine.swap(version, self.source.load(policy), rebuild=rebuild)
      self.loaded.add(version)

  def release(self) -> None:
    """Releases all weights."""
    self.engine.release(before=max(self.loaded, default=NOT_SAMPLED) + 1)
    self.loaded.clear()

  def _version(self, policy: Policy) -> int:
    return policy.version if self.source.of_this_run else NOT_SAMPLED


class LocalSampler:
  """Samples on the devices of this program, in the thread that calls `take` or `step`.

  The sources use the devices one after another. When a turn ends, a worker answers with a reply or
  with a grade. After a reply the rollout continues; a grade ends the rollout.
  """

  def __init__(
    self,
    sources: Sequence[SamplingSource],
    grading: Grading,
    answers: Answers,
    settings: SamplerSettings,
    after_burst: Callable[[Progress], None] = lambda progress: None,
  ):
    """Takes the objects of a run; samples nothing yet.

    Args:
      sources: the policies that sample.
      grading: makes groups of graded rollouts.
      answers: the answers of graders and environments, for this sampler alone.
      settings: the settings of this sampler.
      after_burst: called after every burst.
    """
    self._lanes = [_Lane(source, answers.find_stop) for source in sources]
    self._grading, self._answers, self._settings = grading, answers, settings
    self._policies: dict[int, Policy] = {}  # policies by version
    self._begun: dict[tuple[int, int], _Begun] = {}  # groups in progress, by (draw, index)
    self._finished: list[Group] = []
    self._meter = _Meter(after_burst)

  # --- as a `Sampler` -----------------------------------------------------------------------------

  def offer(self, policy: Policy) -> None:
    """Gives the sampler a newer policy.

    With FINISH, the policy samples the groups that have not begun. With SWITCH or RECOMPUTE, it
    samples all tokens from the next burst on. If draws have plans, the plans decide instead.
    """
    settings = self._settings
    needed = settings.oldest_needed(policy.version)
    oldest = min([needed, *(begun.draw.version for begun in self._begun.values())])
    # Groups in progress need the fingerprints of older policies. Known versions from the new
    # version on belong to updates that were lost, and are dropped.
    self._policies = {
      version: known if version >= needed else known._replace(params={})
      for version, known in self._policies.items()
      if oldest <= version < policy.version
    }
    self._policies[policy.version] = policy
    if settings.new_weights != FINISH and not settings.has_plans:
      for lane in self._lanes:
        if lane.loaded:
          self._load_newest(lane)

  def want(self, draw: Draw, indices: Collection[int]) -> None:
    """Asks for groups of a draw."""
    by_source: dict[int, list[int]] = {}
    for index in sorted(indices):
      by_source.setdefault(draw.sources[index], []).append(index)
    for source, wanted in by_source.items():
      self._lanes[source].requests.extend(_Request(draw, index, wanted) for index in wanted)

  def take(self) -> list[Group]:
    """Works until groups are finished.

    Raises:
      SamplerStoppedError: there was nothing to decode, and no grader or environment answered within
        the deadline; or all requested groups have been returned already.
    """
    deadline_s, since = self._settings.deadline_s, time.monotonic()
    while not self._finished:
      if not self.is_busy:
        raise SamplerStoppedError(
          "no group is awaited: `want` has requested none, or all requested groups have been"
          " returned; this is a bug in the code that calls the sampler"
        )
      if self.step():
        since = time.monotonic()
      elif self._answers.any_process(time.monotonic() - since >= deadline_s):
        raise SamplerStoppedError(
          f"no answer of a grader or an environment came for {deadline_s:g} s; these groups"
          f" are missing: {self._describe_missing()}. {_IF_LATE}"
        )
    return self.poll()

  def _describe_missing(self) -> str:
    """Names the groups that are not finished."""
    begun = [(begun.draw.number, begun.index) for begun in self._begun.values()]
    requests = [(r.draw.number, r.index) for lane in self._lanes for r in lane.requests]
    texts = [f"group {index} of draw {number}" for number, index in sorted(begun + requests)]
    return ", ".join(texts[:8]) + (", …" if len(texts) > 8 else "")

  def examples(self) -> list[Group]:
    """A template group of each source, with the arrays that the source's groups have.

    If a source has another run's policy, the `versions` of its group are empty.
    """
    G, found = self._settings.group_size, []
    for number, lane in enumerate(self._lanes):
      prompt, key = np.zeros(1, np.int32), np.zeros(2, np.uint32)
      rollouts = [lane.engine.rollout((0, 0, g), prompt, key) for g in range(G)]
      arrays = self._arrays(rollouts, [Grade(Outcome.CORRECT)] * G)
      versions = {0: ""} if lane.source.of_this_run else {}
      found.append(Group(0, 0, number, versions, arrays, [], {}))
    return found

  def rest(self) -> None:
    """Drops parameters that are not needed before the next offer; no group may be outstanding."""
    if not self._settings.has_plans:
      self._policies = {v: policy._replace(params={}) for v, policy in self._policies.items()}

  def measure(self) -> dict[str, float]:
    """Seconds and counts of sampling since the last call, by metric; all are sums."""
    return self._meter.take(self._usage(), self._answers.counts)

  def close(self) -> None:
    """Does nothing, since nothing runs in the background."""

  # --- one step -----------------------------------------------------------------------------------

  @property
  def is_busy(self) -> bool:
    """Whether requested groups are still unfinished."""
    return bool(self._begun) or any(lane.requests for lane in self._lanes)

  def poll(self) -> list[Group]:
    """The groups that have been finished since the last call."""
    groups, self._finished = self._finished, []
    return groups

  def step(self) -> bool:
    """Runs one burst, if there is anything to decode; then handles the answers that have arrived.

    Returns:
      Whether there was a burst or an answer. All processes return the same value.
    """
    before, lane = len(self._finished), self._active_lane()
    with self._meter.step(self._answers.counts):
      patience_s = None if lane is None else self._burst(lane)
      answers = self._answers.take(
        patience_s=self._meter.burst_s if patience_s is None else patience_s,
        until_one=patience_s is None,
      )
      for rollout, _, answer in answers:
        if isinstance(answer, Grade):
          self._end(rollout, answer)
        else:
          self._lane_of(rollout).resumed.append((rollout, answer))
    slots = 0 if lane is None else lane.engine.settings.slots
    if lane is not None and not self._is_sampling(lane):
      lane.release()
    left = len(self._begun) + sum(len(lane.requests) for lane in self._lanes)
    self._meter.after_burst(Progress(len(self._finished) - before, left, self._usage(), slots))
    return patience_s is not None or bool(answers)

  def _active_lane(self) -> _Lane | None:
    """The source that samples now; None if all rollouts wait for their grades."""
    has_weights = (lane for lane in self._lanes if lane.loaded)
    has_requests = (lane for lane in self._lanes if lane.requests)
    return next(has_weights, None) or next(has_requests, None)

  def _is_sampling(self, lane: _Lane) -> bool:
    return bool(lane.requests or lane.decodes or self._answers.replies_to_come)

  def _lane_of(self, rollout: Rollout) -> _Lane:
    draw, index, _ = rollout.place
    source: int = self._begun[draw, index].draw.sources[index]
    return self._lanes[source]

  def _burst(self, lane: _Lane) -> float | None:
    """Fills the slots and decodes a burst.

    Returns:
      Seconds to wait for replies that could fill idle slots; None if there was nothing to decode.
    """
    engine = lane.engine
    if not self._settings.changes_weights and self._may_swap(lane):
      self._load_newest(lane)
    while lane.resumed:
      engine.resume(*lane.resumed.popleft())
    while lane.requests and engine.free and self._may_begin(lane):
      self._begin(lane, lane.requests.popleft())
    if not engine.busy:
      return None
    is_full = engine.num_rollouts >= engine.settings.slots
    try:
      with self._meter.burst():
        ended = engine.burst(waiting=self._answers.replies_to_come)
    except MissingWeightsError as error:
      raise ReplayError(
        f"this run differs from the recorded run: {error}. Repeat that run with its seed and"
        " configuration, on the same devices, with the same versions of this package and jax"
      ) from error
    for rollout in ended:
      self._answers.ask(rollout, self._begun[rollout.place[:2]].asked)
    # A burst computes all slots: the more of them are idle, the longer the wait for replies.
    return 0.0 if is_full else self._meter.burst_s * engine.idle_slots / engine.settings.slots

  # --- weights ------------------------------------------------------------------------------------

  def _newest(self) -> Policy:
    return self._policies[max(self._policies)]

  def _may_swap(self, lane: _Lane) -> bool:
    """Whether the weights may change now: no response in progress needs the present weights."""
    return not lane.decodes and not self._answers.replies_to_come

  def _may_begin(self, lane: _Lane) -> bool:
    """Whether a group may begin; without `changes_weights`, the newest weights must be loaded."""
    return self._settings.changes_weights or lane.has(self._newest())

  def _load_newest(self, lane: _Lane) -> None:
    """Lets the newest policy sample, with one copy of weights at a time."""
    newest = self._newest()
    if not lane.has(newest):
      lane.release()
      lane.load(newest, rebuild=self._settings.new_weights == RECOMPUTE)

  def _plans(self, lane: _Lane, request: _Request) -> Sequence[np.ndarray | None]:
    """For each rollout of a group, the version of each token; loads these versions."""
    G, plan = self._settings.group_size, request.draw.plan
    if plan is None or not lane.source.of_this_run:
      return [None] * G
    of_group = plan[request.index]
    plans = [of_group[min(g, len(of_group) - 1)] for g in range(G)]
    for version in sorted({*np.unique(of_group).tolist()} & self._policies.keys()):
      lane.load(self._policies[version], rebuild=self._settings.new_weights == RECOMPUTE)
    return plans

  # --- groups -------------------------------------------------------------------------------------

  def _begin(self, lane: _Lane, request: _Request) -> None:
    """Begins the rollouts of a group."""
    draw, index = request.draw, request.index
    prepared, plans = lane.prepare(request, self._prepare), self._plans(lane, request)
    if self._settings.changes_weights and not lane.loaded:
      self._load_newest(lane)
    self._begun[draw.number, index] = _Begun(draw, index, prepared.asked[index], {})
    pairs = zip(prepared.keys[index], plans, strict=True)
    lane.engine.begin(
      [
        lane.engine.rollout((draw.number, index, g), prepared.prompts[index], key, plan)
        for g, (key, plan) in enumerate(pairs)
      ]
    )

  def _prepare(self, request: _Request) -> _Prepared:
    """Prompts and keys of the groups of a draw that were requested together from one source."""
    draw, wanted = request.draw, request.wanted
    purpose, grading = self._settings.purpose, self._grading
    all_seeds = seeds_for(draw.seed, purpose, draw.number, len(draw.problems))
    problems, seeds = [draw.problems[i] for i in wanted], [all_seeds[i] for i in wanted]
    beginnings = self._answers.begin(problems, seeds, of=len(draw.problems))
    encode = lambda problem, beginning: encode_first_turn(
      problem, grading.tokenizer, grading.max_prompt_length, beginning.messages
    )
    tokens = [*map(encode, problems, beginnings)]
    thoughts = [thought_prefix(grading.tokenizer.decode(prompt)) for prompt in tokens]
    asked = map(Asked, problems, beginnings, seeds, thoughts)
    keys = rollout_keys(draw, purpose, self._settings.group_size)
    return _Prepared(
      wanted,
      {index: np.array(prompt, np.int32) for index, prompt in zip(wanted, tokens, strict=True)},
      dict(zip(wanted, asked, strict=True)),
      {index: keys[index] for index in wanted},
    )

  def _end(self, rollout: Rollout, grade: Grade) -> None:
    """Adds a graded rollout to its group; the last rollout finishes the group."""
    draw, index, number = rollout.place
    begun = self._begun[draw, index]
    begun.ended[number] = rollout, grade
    if len(begun.ended) == self._settings.group_size:
      del self._begun[draw, index]
      self._finished.append(self._group(begun))

  def _group(self, begun: _Begun) -> Group:
    """The finished group; all its rollouts have their grades."""
    draw, index, ended = begun.draw, begun.index, begun.ended
    rollouts, grades = zip(*(ended[g] for g in sorted(ended)), strict=True)
    arrays = self._arrays(rollouts, grades)
    of_tokens = {v for rollout in rollouts for v in np.unique(rollout.arrays["versions"]).tolist()}
    versions = sorted(of_tokens - {NOT_SAMPLED})
    samples = self._grading.samples(
      begun.asked.problem,
      min(versions, default=NOT_SAMPLED),
      arrays,
      grades,
      begun.asked.beginning.messages,
    )
    fingerprints = {version: self._policies[version].fingerprint() for version in versions}
    return Group(draw.number, index, draw.sources[index], fingerprints, arrays, samples, {})

  def _arrays(self, rollouts: Sequence[Rollout], grades: Sequence[Grade]) -> dict[str, np.ndarray]:
    """The arrays of a group, by name."""
    arrays = self._grading.arrays(rollouts, grades)
    if self._settings.changes_weights:
      arrays["token_versions"] = np.stack([rollout.arrays["versions"] for rollout in rollouts])
    return arrays

  def _usage(self) -> SlotUsage:
    """The counts of all slots so far."""
    usages = [vars(lane.engine.usage) for lane in self._lanes]
    return SlotUsage(**{name: sum(usage[name] for usage in usages) for name in vars(SlotUsage())})


def rollout_keys(draw: Draw, purpose: str, group_size: int) -> np.ndarray:
  """u32[P, G, 2], data of the PRNG key of each rollout of a draw; keys differ between sources."""
  keys = []
  for source, of_source in itertools.groupby(draw.sources):
    key = key_for(draw.seed, purpose, draw.number)
    if source:
      key = jax.random.fold_in(key_for(draw.seed, "source", draw.number), source)
    keys.append(row_keys(key, len([*of_source]), group_size))
  return np.concatenate(keys)


def row_keys(key: Array, prompts: int, group_size: int) -> np.ndarray:
  """u32[prompts, G, 2], data of the PRNG key of each rollout, in NumPy."""
  return np.asarray(_row_keys(key, np.zeros((prompts, group_size), bool)))


@functools.partial(jax.jit, keep_unused=True)
def _row_keys(key: Array, rows: Array) -> Array:
  """u32[P, G, 2] from a key and any array [P, G]."""
  return jax.random.key_data(jax.random.split(key, rows.shape))


class _Meter:
  """Measures the time of a sampler.

  Attributes:
    after_burst: see `LocalSampler`.
    burst_s: seconds that the last burst has taken, at most `PATIENCE_S`.
  """

  def __init__(self, after_burst: Callable[[Progress], None]):
    self.after_burst, self.burst_s = after_burst, 0.0
    self._generate_s = 0.0
    self._taken: dict[str, float] = {}  # the sums at the last call of `take`

  @contextlib.contextmanager
  def step(self, counts: AnswerCounts) -> Iterator[None]:
    """Context manager for a step, whose time counts as sampling, except waits for grades."""
    began, waited_s = time.perf_counter(), counts.grade_seconds
    yield
    self._generate_s += time.perf_counter() - began - (counts.grade_seconds - waited_s)

  @contextlib.contextmanager
  def burst(self) -> Iterator[None]:
    """Context manager for a burst, which measures `burst_s`."""
    began = time.monotonic()
    yield
    self.burst_s = min(time.monotonic() - began, PATIENCE_S)

  def take(self, usage: SlotUsage, counts: AnswerCounts) -> dict[str, float]:
    """Sums of seconds and counts since the last call, by metric."""
    sums = {"generate_seconds": self._generate_s, **vars(usage), **vars(counts)}
    new = {name: value - self._taken.get(name, 0.0) for name, value in sums.items()}
    self._taken = sums
    return {f"time/{name}": value for name, value in new.items()}


class _Inbox(NamedTuple):
  """Calls of a `ThreadSampler` that its thread has not handled yet."""

  policy: Policy | None = None
  wanted: tuple[tuple[Draw, Collection[int]], ...] = ()
  is_closed: bool = False


class ThreadSampler:
  """A sampler that works in its own thread, beside the trainer."""

  def __init__(
    self,
    inner: LocalSampler,
    *,
    deadline_s: float,
    raise_if_ending: Callable[[], None] = lambda: None,
    keep: Callable[[Sequence[Group]], None] = lambda groups: None,
  ):
    """Starts the thread.

    Args:
      inner: the sampler, which only the thread uses from now on.
      deadline_s: seconds that `take` waits for a group.
      raise_if_ending: called now and then in `take`; raises if the run is to end.
      keep: called in the thread with finished groups, so that a kill does not lose them.
    """
    self._inner, self._deadline_s, self._calls = inner, deadline_s, (raise_if_ending, keep)
    self._changed = threading.Condition()
    self._inbox = _Inbox()
    self._graded: list[Group] = []
    self._error: BaseException | None = None
    # A daemon: a thread that hangs in a device must not keep the process from ending.
    self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
    self._thread.start()

  def offer(self, policy: Policy) -> None:
    """Lets a newer policy sample."""
    with self._changed:
      self._inbox = self._inbox._replace(policy=policy)
      self._changed.notify_all()

  def want(self, draw: Draw, indices: Collection[int]) -> None:
    """Asks for groups of a draw."""
    with self._changed:
      self._inbox = self._inbox._replace(wanted=(*self._inbox.wanted, (draw, indices)))
      self._changed.notify_all()

  def take(self) -> list[Group]:
    """Waits for groups.

    Raises:
      SamplerStoppedError: no group came within the deadline, or the thread has failed.
    """
    raise_if_ending, _ = self._calls
    deadline = time.monotonic() + self._deadline_s
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._graded or self._error, timeout=_POLL_S)
      raise_if_ending()  # first, because a request to end stops the thread as well
      with self._changed:
        if self._graded:
          graded, self._graded = self._graded, []
          return graded
        if self._error is not None:
          raise SamplerStoppedError(
            f"sampling has failed ({type(self._error).__name__}: {self._error}). Sampled groups are"
            " kept: fix the cause and rerun the same command to continue"
          ) from self._error
      if time.monotonic() >= deadline:
        raise SamplerStoppedError(
          f"no group was sampled and graded within {self._deadline_s:g} s. {_IF_LATE}"
        )

  def poll(self) -> list[Group]:
    """The groups that have been finished since the last call; does not wait."""
    with self._changed:
      graded, self._graded = self._graded, []
    return graded

  def measure(self) -> dict[str, float]:
    """Seconds and counts of sampling since the last call, by metric; all are sums."""
    return self._inner.measure()

  def close(self) -> None:
    """Asks the thread to end after the current burst; waits up to `_CLOSING_S` for its end."""
    with self._changed:
      self._inbox = _Inbox(is_closed=True)
      self._changed.notify_all()
    self._thread.join(timeout=_CLOSING_S)

  def _run(self) -> None:
    _, keep = self._calls
    try:
      while not (inbox := self._next()).is_closed:
        if inbox.policy is not None:
          self._inner.offer(inbox.policy)
        for draw, indices in inbox.wanted:
          self._inner.want(draw, indices)
        if self._inner.is_busy:
          self._inner.step()
        if graded := self._inner.poll():
          keep(graded)
          with self._changed:
            self._graded += graded
            self._changed.notify_all()
    except BaseException as error:  # `take` raises it in the trainer
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def _next(self) -> _Inbox:
    """The calls since `_next` last returned; waits for a call if all groups are finished."""
    with self._changed:
      self._changed.wait_for(lambda: self._inner.is_busy or self._inbox != _Inbox())
      inbox, self._inbox = self._inbox, _Inbox()
      return inbox
