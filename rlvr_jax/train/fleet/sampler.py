"""A sampler: restores the trainer's newest policy, samples leases of groups, and grades them.

While a newer policy is restored, in a thread, the engine decodes on. With `fleet.new_weights` =
"finish" a response ends with the weights that it began with: once the newer ones are there, no
further lease begins, the responses in the slots end, and then the weights are swapped. With
"switch" and "recompute" they are swapped between two bursts. What is decoded at any time has one
version, so that one copy of the weights and one of those being restored are held; and, where they
are swapped between bursts, those that have sampled tokens which are not compared yet.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.data.draws import problem_draws
from rlvr_jax.data.problems import Problem
from rlvr_jax.fleet.leases import Lease
from rlvr_jax.fleet.records import (
  GradedGroup,
  GroupRecord,
  Plan,
  SamplerRecord,
  problem_checksum,
)
from rlvr_jax.ops.keys import seeds_for
from rlvr_jax.rollouts.batch import Flight, PolicySnapshot, sampled_places
from rlvr_jax.rollouts.collect import Collector, serve_graded
from rlvr_jax.rollouts.engine import NOT_SAMPLED, Usage
from rlvr_jax.rollouts.serve import ChangingWeights, Group, OneVersion, Request, row_keys
from rlvr_jax.storage.bucket import UnreachableError
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.train.fleet.desk import Counts, Desk, View, Work
from rlvr_jax.train.fleet.policies import Policy, PolicyGoneError, PolicyReader, Restoring
from rlvr_jax.train.generation import agreement
from rlvr_jax.train.generation.new_weights import FINISH, RECOMPUTE, SWITCH
from rlvr_jax.train.generation.streams import source_key
from rlvr_jax.train.reporting.progress import duration, say
from rlvr_jax.train.setup.behavior_sources import Source, Sources
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.start.parameters import Frozen
from rlvr_jax.types import Params, Prompts

SAY_EVERY_S = 30.0
_WAIT_S = 0.05
ENDED_S = 60.0  # in which a run that had ended when the sampler began may go on
UNREACHABLE_S = 600.0  # without any answer of the storage, until the sampler ends
_KEPT_DRAWS = 8  # whose problems are kept in memory


class RefusedError(RuntimeError):
  """This program must not sample for the trainer: its code, configuration or data are others."""


class Identity(NamedTuple):
  """What trainer and samplers must have in common; text, or a fingerprint."""

  code: str
  config: str
  data: str
  settings: str  # that a resumed run may change


class _Step(NamedTuple):
  """What to do next; JSON values."""

  action: str  # sample, restore, wait, end
  policy: list[Any] | None = None  # [version, fingerprint] to restore
  message: str = ""  # what it waits for


class _Run(NamedTuple):
  """What a sampler has of its run."""

  parts: Parts
  frozen: Frozen
  collector: Collector
  identity: Identity
  draws: _Draws


class _Lease(NamedTuple):
  """A lease that is being sampled."""

  work: Work
  policy: Policy
  source: int  # index


class _SampledBy:
  """The policies that have sampled tokens of unfinished leases, and which of them were compared.

  Attributes:
    names: by version.
    checked: (version, source) whose agreement was checked.
  """

  def __init__(self) -> None:
    self.names: dict[int, Policy] = {}
    self.checked: set[tuple[Policy, int]] = set()
    self._snapshots: dict[int, PolicySnapshot] = {}

  def use(self, policy: Policy, snapshot: PolicySnapshot) -> None:
    """Notes a policy that samples from now on."""
    self.names[policy.version] = policy
    self._snapshots[policy.version] = snapshot

  def policies_of(self, group: Group, begun_by: Policy) -> dict[str, str]:
    """`GroupRecord.policies` of a group in a lease that a policy has begun."""
    versions = {begun_by.version}
    if group.token_versions is not None:
      versions = ({*np.unique(group.token_versions).tolist()} - {NOT_SAMPLED}) or versions
    return {str(v): self.names[v].fingerprint for v in sorted(versions)}

  def unchecked(self, versions: Iterable[int], source: int) -> list[PolicySnapshot]:
    """Those of these versions whose tokens of a source are not compared yet."""
    return [
      self._snapshots[version]
      for version in sorted(versions)
      if version in self._snapshots and (self.names[version], source) not in self.checked
    ]

  def check(self, versions: Iterable[int], source: int) -> None:
    """Notes that tokens of these versions were compared."""
    self.checked |= {(self.names[version], source) for version in versions}

  def release(self, *, before: int, newest: int, compared: Iterable[int]) -> None:
    """Lets policies go that no lease has tokens of, and parameters that need not be compared.

    Args:
      before: no lease has tokens of an older version.
      newest: the version that samples now.
      compared: the sources whose tokens of an older version are compared first.
    """
    self.names = {v: name for v, name in self.names.items() if v >= before}
    unchecked = {
      v for v, name in self.names.items() if any((name, s) not in self.checked for s in compared)
    }
    kept = unchecked | {newest}
    self._snapshots = {v: snapshot for v, snapshot in self._snapshots.items() if v in kept}
    self.checked = {key for key in self.checked if key[0] in self.names.values()}


class _BetweenBursts(NamedTuple):
  """Weights that a sampler swaps between bursts; see `serve.ChangingWeights`."""

  rebuilds: bool
  weights: Weights
  number: int  # of the source
  source: Source
  swap: Callable[[], None]  # swaps the weights if newer ones are there

  def ask(self) -> None:
    self.swap()

  def version(self, group: Group, rollout: int, length: int) -> int:
    assert self.weights.current is not None  # it samples
    return self.weights.current.version

  def params(self, version: int) -> Params:
    return self.weights.load(self.number, self.source)


class Sampler:
  """Samples for a trainer until that has all its batches; all processes call it together."""

  def __init__(
    self,
    parts: Parts,
    frozen: Frozen,
    collector: Collector,
    desk: Desk | None,
    weights: Weights,
    identity: Identity,
    meter: Meter,
  ):
    """Nothing is sampled yet.

    Args:
      parts, frozen, collector: of this sampler.
      desk: on the first process.
      weights: of the policies.
      identity: of this program, for the comparison with the trainer's.
      meter: measures what the sampler does.
    """
    self._run = _Run(parts, frozen, collector, identity, _Draws(parts))
    self._desk, self._weights, self._meter = desk, weights, meter
    self._leases: dict[int, _Lease] = {}  # by id of their flights
    self._waiting: list[Group[Flight]] = []  # for grades
    self._next: Work | None = None  # of another source than the stream's
    self._sampled_by = _SampledBy()

  def run(self) -> None:
    """Samples until the trainer says that it has all batches.

    Raises:
      RefusedError: this program must not sample for that trainer.
      EndRequestedError: shutdown was requested.
      AgreementError: it samples another distribution than the trainer computes.
    """
    while (step := self._decide()).action != "end":
      multihost.raise_if_shutdown_requested()
      restart_deadline()
      if step.policy is not None:
        self._weights.begin(Policy(*step.policy))
      if self._weights.ready():
        self._check_before_swap()
        self._swap()
      elif step.action == "sample" and (work := self._take()) is not None:
        self._sample(work)
      else:
        self._meter.wait(step.message)
      self._grade()
    say(f"sampler {self._meter.name}: the trainer has all its batches")

  # --- what to do ---------------------------------------------------------------------------------

  def _decide(self) -> _Step:
    """The first process decides for all."""
    decide = lambda: [*self._next_step(self._desk.view())] if self._desk else None
    return _Step(*multihost.exchange(multihost.run_on_first(decide, None))[0])

  def _next_step(self, view: View) -> _Step:
    trainer, newest, current = view.trainer, view.newest(), self._weights.current
    assert self._desk is not None
    unanswered_s = time.monotonic() - view.answered
    if unanswered_s > UNREACHABLE_S:
      raise UnreachableError(f"the workdir has not answered for {duration(unanswered_s)}")
    if trainer is None:
      return _Step("wait", message="waits for a trainer to begin")
    theirs = Identity(trainer.code, trainer.config, trainer.data, trainer.settings)
    if theirs != self._run.identity:
      if not view.was_alive:  # it may be of an earlier trainer
        return _Step("wait", message="waits for a sign of the trainer")
      self._refuse(theirs)
    if trainer.ended:
      if view.was_alive or view.silent_s > ENDED_S:
        return _Step("end")
      return _Step("wait", message="the run has ended: waits for a trainer that goes on")
    if newest is None:
      return _Step("wait", message="waits for the trainer's first policy")
    listed = current is not None and list(current) in trainer.policies
    silent = view.silent_s > self._run.parts.config.fleet.silent_s
    self._desk.want(current.version if current is not None and listed and not silent else -1)
    if silent:
      return _Step("wait", message="the trainer is silent: waits for it, or for its successor")
    wanted = any(plan.lowest_version <= newest.version for plan in view.plans.values())
    policy = [*newest] if newest != current and wanted else None
    if not listed:
      return _Step("wait", policy, f"waits for version {newest.version} of the policy")
    return _Step("sample", policy, "waits for groups to sample")

  def _refuse(self, theirs: Identity) -> None:
    """Raises RefusedError for a trainer with another identity."""
    what = Identity("code", "a configuration", "problems or a tokenizer", "settings")
    pairs = zip(what, self._run.identity, theirs, strict=True)
    name, own, other = next(pair for pair in pairs if pair[1] != pair[2])
    if name == what.settings:
      raise RefusedError(
        "the trainer was started with other settings of config.fleet, config.grading or"
        " config.max_behavior_gap; start the sampler again, which takes them"
      )
    raise RefusedError(
      f"this sampler has {name} {own}, the trainer has {other}; start the sampler again"
      " with the trainer's code, --workdir and data"
    )

  # --- sampling -----------------------------------------------------------------------------------

  def _swap(self) -> None:
    """Lets the restored policy sample."""
    self._weights.swap()
    self._meter.restored(self._weights)
    if self._weights.current is not None and self._weights.snapshot is not None:
      self._sampled_by.use(self._weights.current, self._weights.snapshot)
      self._release_policies()

  def _swap_if_newer(self) -> None:
    """Between two bursts: begins to restore the newest policy, and swaps one that is there.

    An older one waits for the responses to end: a trainer has begun again, from an earlier update.
    """
    step = self._decide()
    if step.policy is not None:
      self._weights.begin(Policy(*step.policy))
    if self._weights.comes_newer() and self._weights.ready():
      self._swap()

  def _changing(self, index: int, source: Source) -> ChangingWeights | None:
    """The weights of a stream that change between bursts; None: they do not."""
    setting = self._run.parts.config.fleet.new_weights
    if setting == FINISH:
      return None
    if not source.of_this_run:
      return OneVersion(self._weights.load(index, source))
    return _BetweenBursts(setting == RECOMPUTE, self._weights, index, source, self._swap_if_newer)

  def _take(self) -> Work | None:
    """The next lease, the same on all processes; None if there is none now."""
    version = -1 if self._weights.current is None else self._weights.current.version
    if self._next is not None:
      work, self._next = self._next, None
      return work

    def take() -> list[Any] | None:
      if self._desk is None:
        return None
      work = self._desk.take()
      if work is not None and work.plan.lowest_version > version:
        self._desk.give_back(work.lease)  # the trainer has begun again, from an earlier policy
        return None
      return None if work is None else [[*work.lease], work.plan._asdict(), work.groups]

    taken = multihost.exchange(multihost.run_on_first(take, None))[0]
    if taken is None:
      return None
    lease, plan, groups = taken
    return Work(Lease(*lease), Plan(**plan), groups)

  def _sample(self, first: Work) -> None:
    """Samples leases of one source under the weights of now, until newer ones are there."""
    collector, policy = self._run.collector, self._weights.current
    index, source = self._source_of(first)
    assert policy is not None and source.engine is not None  # a fleet samples with engines
    requests = self._requests(first, index)
    changing = self._changing(index, source)
    loaded = None if changing else self._weights.load(index, source)
    with self._meter.busy():
      for _ in serve_graded(
        source.engine,
        loaded,
        requests,
        collector,
        self._meter.usage,
        self._waiting.extend,
        changing,
      ):
        restart_deadline()
        self._grade()
        self._meter.report()

  def _source_of(self, work: Work) -> tuple[int, Source]:
    """(index, source) that samples a lease, which has groups of one."""
    first = work.groups[0]
    for index, source in enumerate(self._run.parts.sources.live):
      if first < source.prompts:
        return index, source
      first -= source.prompts
    raise AssertionError("a plan has the groups of the sources")

  def _requests(self, first: Work, source: int) -> Iterator[Request[Flight] | None]:
    """The requests of leases; None: there is none now."""
    finishes = self._run.parts.config.fleet.new_weights == FINISH
    work: Work | None = first
    while True:
      if work is None:
        yield None
      elif self._source_of(work)[0] != source:
        self._next = work
        return
      else:
        yield from self._requests_of(work, source)
      step = self._decide()
      if step.policy is not None:
        self._weights.begin(Policy(*step.policy))
      if self._weights.ready() and (finishes or not self._weights.comes_newer()):
        return
      work = self._take() if step.action == "sample" else None

  def _requests_of(self, work: Work, source: int) -> Iterator[Request[Flight]]:
    policy = self._weights.current
    assert policy is not None  # it samples
    parts, collector = self._run.parts, self._run.collector
    seed, plan, groups = parts.config.seed, work.plan, work.groups
    problems = self._run.draws.problems(plan)
    seeds = seeds_for(seed, "rollout", plan.draw, len(problems))
    flight = collector.begin([problems[g] for g in groups], [seeds[g] for g in groups])
    sources = parts.sources.live
    start = sum(s.prompts for s in sources[:source])
    keys = row_keys(
      source_key(seed, plan.draw, source), sources[source].prompts, parts.shape.group_size
    )
    self._leases[id(flight)] = _Lease(work, policy, source)
    rows = zip(flight.prompts.tokens, flight.prompts.lengths, strict=True)
    for i, (row, length) in enumerate(rows):
      prompt = np.asarray(row[len(row) - length :])
      yield Request(flight, i, prompt, keys[groups[i] - start])

  # --- grades -------------------------------------------------------------------------------------

  def _grade(self) -> None:
    """Writes the groups that have their grades."""
    if not self._waiting:
      return
    submitted = [group.owner.grades[group.prompt_index] for group in self._waiting]
    done = multihost.exchange([submission.done() for submission in submitted])
    graded = [all(flags) for flags in zip(*done, strict=True)]
    groups = self._waiting.copy()
    self._waiting.clear()  # the stream has this list
    for group, is_done in zip(groups, graded, strict=True):
      if is_done:
        self._write(group)
      else:
        self._waiting.append(group)

  def _write(self, group: Group[Flight]) -> None:
    """Lets the desk write a graded group."""
    collector, flight, index = self._run.collector, group.owner, group.prompt_index
    lease = self._leases[id(flight)]
    grades = collector.results([flight.grades[index]])
    gaps = self._compare(group, lease)
    policies = self._sampled_by.policies_of(group, lease.policy)
    del flight.grades[index]  # what is left shows whether the lease is finished
    if finished := not flight.grades and flight.sampled:
      del self._leases[id(flight)]
      self._release_policies()
    if self._desk is None:
      return
    names = set(Group._fields) - {"owner", "prompt_index", "details"}
    arrays = {name: getattr(group, name) for name in names if getattr(group, name) is not None}
    record = GroupRecord(
      plan=lease.work.plan.id,
      sampler=self._meter.name,
      policies=policies,
      grades=[[g.outcome.value, g.score, g.detail, g.answer] for g in grades],
      details=group.details,
      gaps=gaps,
    )
    data = GradedGroup(record, arrays).encode()
    work = lease.work
    self._desk.write(work.lease, work.groups[index], data, int(np.sum(group.lengths)))
    if finished:
      self._desk.finish(work.lease)

  def _check_before_swap(self) -> None:
    """Writes the first group of each source whose policy is unchecked; waits for its grades.

    All groups if no newer policy comes: another one may have the number of an old one.
    """
    comes_newer = self._weights.comes_newer()
    groups = self._waiting.copy()
    self._waiting.clear()
    for group in groups:
      lease = self._leases[id(group.owner)]
      if comes_newer and (lease.policy, lease.source) in self._sampled_by.checked:
        self._waiting.append(group)
      else:
        self._write(group)

  def _compare(self, group: Group[Flight], lease: _Lease) -> dict[str, float]:
    """Gaps of log-probabilities to the trainer's forward pass, of a policy's first group.

    Raises:
      AgreementError: a gap is too large.
    """
    parts, frozen, collector, *_ = self._run
    source, versions = parts.sources.live[lease.source], [lease.policy.version]
    if group.token_versions is not None and source.of_this_run:
      versions = np.unique(group.token_versions).tolist()
    policies = self._sampled_by.unchecked(versions, lease.source)
    if not policies:
      return {}
    flight = _alone(group)
    graded = collector.finish(flight, [lease.policy.version])
    compared = agreement.behavior_gaps(
      graded.train,
      sampled_places(flight.rollouts).astype(np.float32),
      policies,
      frozen.sampler,
      sources=Sources([source._replace(prompts=1)]),
      placement=parts.placement,
      programs=parts.programs,
      mixes_caches=parts.config.fleet.new_weights == SWITCH,
    )
    self._sampled_by.check(compared.versions, lease.source)
    return compared.gaps

  def _release_policies(self) -> None:
    """Lets the policies go that no lease needs any more."""
    assert self._weights.current is not None  # it samples
    parts, newest = self._run.parts, self._weights.current.version
    begun = [lease.policy.version for lease in self._leases.values()]
    changing = [i for i, source in enumerate(parts.sources.live) if source.of_this_run]
    self._sampled_by.release(
      before=min([newest, *begun]),
      newest=newest,
      compared=[] if parts.config.fleet.new_weights == FINISH else changing,
    )


def _alone(group: Group[Flight]) -> Flight:
  """A flight of one group, with its grades."""
  flight, index = group.owner, group.prompt_index
  row = slice(index, index + 1)
  prompts = Prompts(tokens=flight.prompts.tokens[row], lengths=flight.prompts.lengths[row])
  alone = Flight([flight.problems[index]], prompts, flight.seeds[row])
  alone.add(group._replace(owner=alone, prompt_index=0), flight.texts[index], flight.grades[index])
  return alone


class _Draws:
  """The problems of plans, which this program draws as the trainer has."""

  def __init__(self, parts: Parts):
    self._draws = problem_draws(
      parts.task.train, batch_size=max(parts.sources.num_live, 1), seed=parts.config.seed
    )
    self._kept: collections.OrderedDict[tuple[int, str], list[Problem]] = collections.OrderedDict()

  def problems(self, plan: Plan) -> list[Problem]:
    """The problems of a plan's draw.

    Raises:
      RefusedError: they are not those of the trainer.
    """
    key = plan.draw, plan.id
    if key not in self._kept:
      self._draws.set_state(plan.position)
      problems = self._draws.draw(plan.draw, plan.drawn_by)
      if [problem_checksum(p.question, p.reference) for p in problems] != plan.problems:
        raise RefusedError(
          f"this sampler draws other problems for draw {plan.draw} than the trainer; give it the"
          " same data, and the same version of what generates the problems"
        )
      self._kept[key] = problems
      while len(self._kept) > _KEPT_DRAWS:
        self._kept.popitem(last=False)
    return self._kept[key]


class Weights:
  """The policy that samples, and the one that a thread restores.

  Attributes:
    current: the policy of `snapshot`; None before the first.
    snapshot: what samples.
    last: the last restoration.
  """

  def __init__(self, reader: PolicyReader, parts: Parts, frozen: Params):
    """`frozen`: the parameters that are not trained."""
    self._reader, self._run = reader, (parts, frozen)
    self._thread = ThreadPoolExecutor(1, "restore")
    self._coming: tuple[Policy, Future[Restoring | None]] | None = None
    self._loaded: dict[int, Params] = {}  # by index of the source
    self.current: Policy | None = None
    self.snapshot: PolicySnapshot | None = None
    self.last: Restoring | None = None

  def begin(self, policy: Policy) -> None:
    """Begins to restore a policy, unless another one is being restored."""
    if self._coming is None:
      self._coming = policy, self._thread.submit(self._restore, policy)

  def ready(self) -> bool:
    """Whether `swap` is due, on all processes."""
    return self._coming is not None and all(multihost.exchange(self._coming[1].done()))

  def comes_newer(self) -> bool:
    """Whether the policy that is being restored is a later one than that of now."""
    current = -1 if self.current is None else self.current.version
    return self._coming is not None and self._coming[0].version > current

  def swap(self) -> None:
    """Lets the restored policy sample; the old one if the new one has vanished meanwhile."""
    assert self._coming is not None
    (policy, future), self._coming = self._coming, None
    restored = multihost.run_together(future.result)
    if multihost.any_process(restored is None):
      return
    assert restored is not None
    if multihost.any_process(not self._is_verified(policy, restored.params)):
      return
    parts, frozen = self._run
    self._loaded = {}
    by_source = tuple(source.params_of(restored.params, frozen) for source in parts.sources.live)
    fingerprint = lambda: policy.fingerprint
    self.current = policy
    self.snapshot = PolicySnapshot(restored.params, policy.version, fingerprint, by_source)
    self.last = restored._replace(params={})

  def load(self, index: int, source: Source) -> Params:
    """The parameters of a source, as its engine takes them."""
    assert self.snapshot is not None and source.engine is not None
    if index not in self._loaded:
      self._loaded[index] = source.engine.load(*self.snapshot.source_params[index])
    return self._loaded[index]

  def _restore(self, policy: Policy) -> Restoring | None:
    try:
      return self._reader.restore(policy)
    except PolicyGoneError:
      return None  # the newest one is taken next

  def _is_verified(self, policy: Policy, params: Params) -> bool:
    """Whether restored parameters are those of the policy."""
    try:
      if jax.process_count() > 1:
        self._reader.verify(policy, params)
    except PolicyGoneError:
      return False
    return True

  def close(self) -> None:
    """Ends the thread."""
    self._thread.shutdown(wait=False, cancel_futures=True)


class Meter:
  """Measures what a sampler does, and says so.

  Attributes:
    name: of the sampler.
    usage: of its slots.
  """

  def __init__(self, name: str, host: str, usage: Usage):
    self.name, self.usage = name, usage
    self._record = SamplerRecord(host, -1, 0.0, 0.0, 0.0, 1.0, 0, 0, 0, 0, "starts", 0)
    self._busy_s = 0.0
    self._busy_since: float | None = None
    self._before = (time.monotonic(), 0.0, 0)  # of the last record: time, busy seconds, tokens
    self._waits = ("", 0.0, time.monotonic())  # for what, since when, and when it was said

  @contextlib.contextmanager
  def busy(self) -> Iterator[None]:
    """Context in which the slots decode."""
    began = self._busy_since = time.monotonic()
    self._record = self._record._replace(message="")
    try:
      yield
    finally:
      now = time.monotonic()
      self._busy_s += now - began
      self._busy_since = None
      self._waits = (self._waits[0], now, self._waits[2])  # it did not wait meanwhile

  def restored(self, weights: Weights) -> None:
    """Notes a restored policy."""
    if weights.current is not None and weights.last is not None:
      self._record = self._record._replace(
        version=weights.current.version,
        restore_seconds=weights.last.seconds,
        restore_gib=weights.last.bytes / 2**30,
      )

  def wait(self, message: str) -> None:
    """Waits a moment; says for what, when that changes, and now and then since when."""
    self._record = self._record._replace(message=message)
    waits_for, since, said = self._waits
    now = time.monotonic()
    if message != waits_for:
      self._waits = message, now, now
      say(f"sampler {self.name}: {message}")
    elif now - max(since, said) > SAY_EVERY_S:
      self._waits = message, since, now
      say(f"sampler {self.name}: {message}, for {duration(now - since)} so far")
    time.sleep(_WAIT_S)

  def report(self) -> None:
    """Prints now and then what is being sampled."""
    if time.monotonic() - self._waits[2] > SAY_EVERY_S:
      self._waits = "", 0.0, time.monotonic()
      say(f"sampler {self.name}: {self._record.describe()}")

  def describe(self, counts: Counts, leases: int) -> SamplerRecord:
    """The sampler's record, for what has happened since the last one."""
    now, tokens = time.monotonic(), self.usage.slot_tokens
    since = self._busy_since
    busy_s = self._busy_s + (0.0 if since is None else now - since)
    then, busy_before, tokens_before = self._before
    self._before = now, busy_s, tokens
    seconds = max(now - then, 1e-9)
    self._record = self._record._replace(
      tokens_per_second=(tokens - tokens_before) / seconds,
      idle_share=min(1.0, max(0.0, 1 - (busy_s - busy_before) / seconds)),
      leases=leases,
      beat=self._record.beat + 1,
      **vars(counts),
    )
    return self._record
