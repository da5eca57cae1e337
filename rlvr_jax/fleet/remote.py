"""The trainer's side of a fleet: a sampler that gets its groups from other programs."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlvr_jax.fleet.exchange import Exchange, Place, RecordError, View, Watch
from rlvr_jax.rollouts.group import Draw, Group, Policy, check_arrays
from rlvr_jax.storage.objects import Listed

SAY_EVERY_S = 30.0
_TAKEN_BYTES = 2**28  # approximate number of bytes of groups that are read at a time
_EXPLAINED = ("crashed", "environment_failed")  # outcomes whose details the trainer prints
_START = "start a sampler with --mode=sample and this --workdir"
GONE_S = 600.0  # seconds without a change after which a sampler's record is removed


class FleetError(RuntimeError):
  """The trainer cannot continue with its samplers."""


class Allowed(NamedTuple):
  """Limits of a run that groups from samplers must respect."""

  examples: Sequence[Group]  # a group per source; its arrays have the required names, shapes, types
  vocabulary: int
  experts: int = 0  # number of experts of a mixture; 0 for other models


class Settings(NamedTuple):
  """The settings of the trainer in a fleet."""

  identity: Mapping[str, str]  # code, configuration, data …: samplers must have the same identity
  allowed: Allowed
  silent_s: float = 30.0  # seconds without a new record after which a sampler counts as dead
  deadline_s: float = 3600.0  # seconds without a group after which the run ends
  poll_s: float = 0.1  # seconds between two polls of the exchange


@dataclasses.dataclass
class _OpenDraw:
  """A draw of which some groups have not been taken.

  Attributes:
    draw, digest: the draw and its digest.
    missing: indices of the groups that have not been taken.
    early: groups, by index, that were sampled before a restart by policies that this trainer has
      not offered again yet.
  """

  draw: Draw
  digest: str
  missing: set[int]
  early: dict[int, Group] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _State:
  """The state of a trainer's exchange with its fleet.

  Attributes:
    fingerprints: fingerprints of the run's policies, by version.
    watch: tracks which samplers are alive.
    said_at: when a message about the wait was last printed.
    open: draws with missing groups, by number.
    complete: numbers of complete draws; the exchange still has the draws and their groups.
    withdrawn: numbers of earlier complete draws; the exchange still has only their groups.
    next_draw: number of the next draw.
    counts: the numbers of late and of dropped groups, by the metric's name.
  """

  fingerprints: dict[int, str]
  watch: Watch
  said_at: float
  open: dict[int, _OpenDraw] = dataclasses.field(default_factory=dict)
  complete: list[int] = dataclasses.field(default_factory=list)
  withdrawn: list[int] = dataclasses.field(default_factory=list)
  next_draw: int = 0
  counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

  @property
  def taken(self) -> list[int]:
    """Numbers of complete draws whose groups are still in the exchange."""
    return [*self.complete, *self.withdrawn]

  def begin(self, number: int, found: _OpenDraw | None) -> None:
    """Notes that a draw was requested; `found`: its open draw, or None if no group is missing."""
    self.next_draw = number + 1
    if found is not None:
      self.open[number] = found

  def note(self, groups: Sequence[Group]) -> None:
    """Notes that groups are taken."""
    for group in groups:
      found = self.open[group.draw]
      found.missing.discard(group.index)
      if not found.missing:
        del self.open[group.draw]
        self.complete.append(group.draw)

  def withdraw_complete(self) -> None:
    """Notes that complete draws were withdrawn; forgets policies older than all open draws."""
    self.withdrawn, self.complete = self.complete, []
    oldest = min((found.draw.version for found in self.open.values()), default=0)
    self.fingerprints = {v: x for v, x in self.fingerprints.items() if v >= oldest}

  def is_due(self, now: float) -> bool:
    """Whether to print a message about the wait now: at most one in `SAY_EVERY_S` seconds."""
    if now - self.said_at <= SAY_EVERY_S:
      return False
    self.said_at = now
    return True


class RemoteSampler:
  """A `Sampler` whose groups are sampled by other programs, which read the draws in an exchange."""

  def __init__(
    self,
    exchange: Exchange,
    publish: Callable[[Policy, Callable[[], None]], None],
    settings: Settings,
    *,
    fingerprints: Mapping[int, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = print,
  ):
    """Begins a term: samplers follow this trainer from now on.

    Args:
      exchange: the run's folder or bucket in which trainer and samplers exchange files.
      publish: writes a policy for the samplers, and calls the given function when the samplers can
        restore the policy, perhaps later and in another thread.
      settings: the settings of the trainer.
      fingerprints: the fingerprints of the versions before this start, as far as they are known.
      clock, sleep: this machine's clock, and a function that waits; both in seconds.
      say: prints a line.
    """
    self._exchange, self._publish, self._settings = exchange, publish, settings
    self._clock, self._sleep, self._say = clock, sleep, say
    self._term = exchange.begin_term(settings.identity)
    self._state = _State(dict(fingerprints or {}), Watch(settings.silent_s, clock), clock())

  def offer(self, policy: Policy) -> None:
    """Writes newer weights for the samplers, and announces them when they can be restored."""
    fingerprint, term = policy.fingerprint(), self._term
    self._state.fingerprints[policy.version] = fingerprint
    self._publish(policy, lambda: self._exchange.announce(term, policy.version, fingerprint))

  def want(self, draw: Draw, indices: Collection[int]) -> None:
    """Requests groups of a draw from the samplers; draws must come in order."""
    if draw.plan is not None:
      raise ValueError(
        "a fleet cannot repeat a run whose record has a version for each token; set"
        " config.fleet.samplers = False to repeat it in one program"
      )
    found = None
    if indices:
      digest = self._exchange.put_draw(self._term, draw, indices)
      found = _OpenDraw(draw, digest, {*indices})
    self._state.begin(draw.number, found)

  def take(self) -> list[Group]:
    """Waits for groups and returns at least one.

    The caller must have saved the groups of earlier calls.

    Raises:
      FleetError: see `look`.
    """
    began = self._clock()
    while not (groups := self.look(self._clock() - began)):
      self._sleep(self._settings.poll_s)
    return groups

  def look(self, waited_s: float) -> list[Group]:
    """The groups that have arrived; the caller must have saved the groups of earlier calls.

    Args:
      waited_s: seconds since a call last returned groups.
    Raises:
      FleetError: no sampler is alive, a sampler has met an error that ends the run, or no group
        arrived before the deadline; another trainer has begun; or all requested groups have been
        returned already.
    """
    self._remove_complete()
    if not self._state.open:
      raise FleetError(
        "no group is awaited: `want` has requested none, or all requested groups have been"
        " returned; this is a bug in the code that calls the sampler"
      )
    view = self._exchange.look()
    if view.term != self._term:
      raise FleetError(
        "another trainer has begun on this workdir; only one may run. End the other trainer, then"
        " rerun this command"
      )
    groups = self._collect(view)
    if not groups:
      self._check_samplers(view, waited_s)
    return groups

  def end(self) -> None:
    """Tells the samplers that the trainer has all batches."""
    self._exchange.end(self._term)

  def statistics(self) -> dict[str, float]:
    """Metrics: samplers that are alive, and counts since the start.

    `late_groups` arrived after their draw was complete; `dropped_groups` are sampled again.
    `duplicate_groups` counts groups that a living sampler finished after another sampler, and
    `duplicate_tokens` counts the tokens in these groups.
    """
    view = self._exchange.look()
    living = self._state.watch.look(view.samplers)
    records = [record for name in living if (record := self._exchange.sampler(name)) is not None]
    measured = {
      "running": len(living),
      "late_groups": self._state.counts["late_groups"],
      "dropped_groups": self._state.counts["dropped_groups"],
      "duplicate_groups": sum(record.duplicate_groups for record in records),
      "duplicate_tokens": sum(record.duplicate_tokens for record in records),
    }
    return {f"fleet/{name}": float(value) for name, value in measured.items()}

  # --- groups -------------------------------------------------------------------------------------

  def _collect(self, view: View) -> list[Group]:
    """The checked groups that have come for open draws; removes groups that come too late."""
    taken: list[Group] = []
    size = 0
    for place, listed in view.groups.items():
      if taken and size > _TAKEN_BYTES:
        break  # the next call takes the remaining groups
      size += listed.size
      number, index = place
      if number in self._state.open:
        if index in self._state.open[number].missing:
          group = self._read(self._state.open[number], place, listed)
          taken += [] if group is None else [group]
      elif number < self._state.next_draw and number not in self._state.taken:
        self._state.counts["late_groups"] += 1
        self._exchange.remove_group(place)
    self._state.note(taken)
    return taken

  def _read(self, of: _OpenDraw, place: Place, listed: Listed) -> Group | None:
    """A group that may be trained on; None if it may not, or not yet."""
    index = place[1]
    group = of.early.get(index)
    try:
      if group is None:
        if (found := self._exchange.get_group(place, listed)) is None:
          return None
        group, digest = found
        if digest != of.digest:
          raise RecordError("its draw has other problems, seed or sources than the trainer's draw")
        check_group(group, of.draw, self._settings.allowed)
      if self._is_early(group):
        of.early[index] = group
        return None
    except ValueError as error:
      of.early.pop(index, None)
      self._drop(place, str(error))
      return None
    of.early.pop(index, None)
    return group

  def _is_early(self, group: Group) -> bool:
    """Whether a group has a version that this trainer, since a restart, has not offered again yet.

    Raises:
      RecordError: the group was sampled by policies of another trainer.
    """
    known = self._state.fingerprints
    for version, fingerprint in group.versions.items():
      if version > max(known, default=-1):
        if group.draw == min(self._state.open):  # the trainer needs this draw to reach that version
          raise RecordError(
            f"version {version} comes after the update on this draw, so it cannot have sampled the"
            " draw"
          )
        return True
      if known.get(version) != fingerprint:
        raise RecordError(
          f"version {version} had the fingerprint {fingerprint} at the sampler, but has"
          f" {known.get(version)} at the trainer"
        )
    return False

  def _drop(self, place: Place, why: str) -> None:
    """Removes a group, which is sampled again."""
    self._say(f"warning: group {place[1]} of draw {place[0]} is sampled again: {why}")
    self._state.counts["dropped_groups"] += 1
    self._exchange.remove_group(place)

  def _remove_complete(self) -> None:
    """Removes complete draws, and the groups of draws that were removed earlier.

    A listing is no snapshot. If a sampler saw a draw, but no longer its groups, it would sample the
    groups again. So groups are removed later than their draw: when the next draws are complete.
    """
    if not self._state.complete:
      return
    for number in self._state.complete:
      self._exchange.remove_draw(self._term, number)
    for place in self._exchange.look().groups:
      if place[0] in self._state.withdrawn:
        self._exchange.remove_group(place)
    self._state.withdraw_complete()

  # --- samplers -----------------------------------------------------------------------------------

  def _check_samplers(self, view: View, waited: float) -> None:
    """Prints what the trainer waits for, now and then; raises FleetError if waiting is useless."""
    settings, watch, now = self._settings, self._state.watch, self._clock()
    living = watch.look(view.samplers)
    for name in watch.dead(GONE_S):
      self._exchange.remove_sampler(name)
    missing = self._describe_missing()
    if waited > settings.deadline_s and not living:
      raise FleetError(
        f"no sampler is running{self._errors(view)}, and {missing} have been missing for"
        f" {waited:.0f} s: {_START}"
      )
    if waited > settings.deadline_s:
      raise FleetError(
        f"no group has come for {waited:.0f} s; the limit is {settings.deadline_s:.0f} s"
        f" (config.generation_deadline_s){self._errors(view)}; still missing: {missing}"
      )
    if self._state.is_due(now):
      who = f"{len(living)} samplers" if living else f"no sampler is running: {_START}"
      self._say(f"waits for {missing}, for {waited:.0f} s so far; {who}{self._errors(view)}")

  def _errors(self, view: View) -> str:
    """The errors of samplers of this term, as text; "" if there are none.

    Raises:
      FleetError: a sampler's error ends the run.
    """
    found = []
    for name in view.samplers:
      record = self._exchange.sampler(name)
      if record is not None and record.term == self._term and record.error:
        found.append(f"{name} ended with {record.error:.500}")
        if record.ends_run:
          raise FleetError(
            f"sampler {found[-1]}. Sampled groups are kept: fix the cause and rerun the same"
            " commands"
          )
    return "".join(f"; {text}" for text in found)

  def _describe_missing(self) -> str:
    """Names the missing groups."""
    parts = [
      f"groups {', '.join(map(str, sorted(found.missing)[:8]))}"
      f"{', …' if len(found.missing) > 8 else ''} of draw {number}"
      for number, found in sorted(self._state.open.items())[:3]
    ]
    return "; ".join(parts) + ("; …" if len(self._state.open) > 3 else "")


def check_group(group: Group, draw: Draw, allowed: Allowed) -> None:
  """Raises ValueError unless a group's contents are consistent with its draw and `allowed`."""
  check_arrays(group.arrays)
  if group.source != draw.sources[group.index]:
    raise RecordError(f"it comes from source {group.source}, not {draw.sources[group.index]}")
  example = allowed.examples[group.source]
  if differing := group.arrays.keys() ^ example.arrays.keys():
    lacks = "lacks" if differing - group.arrays.keys() else "must not have"
    raise RecordError(f"it {lacks} the arrays {', '.join(sorted(differing))}")
  for name, array in group.arrays.items():
    expected = example.arrays[name]
    if (array.shape, array.dtype) != (expected.shape, expected.dtype):
      raise RecordError(
        f"{name} has the shape {array.shape}, expected {expected.shape}, and the dtype"
        f" {array.dtype}, expected {expected.dtype}"
      )
  _check_values(group.arrays, allowed)
  _check_versions(group, draw, has_versions=bool(example.versions))
  _check_samples(group, draw.problems[group.index].question)


def _check_values(arrays: Mapping[str, np.ndarray], allowed: Allowed) -> None:
  """Raises RecordError if an array has values that no sampler produces."""
  most = {"tokens": allowed.vocabulary - 1, "prompts.tokens": allowed.vocabulary - 1}
  most |= {"routes": allowed.experts - 1, "prompt_routes": allowed.experts - 1}
  most |= {"lengths": arrays["tokens"].shape[-1], "mask": 1, "correct": 1}
  most |= {"prompts.lengths": arrays["prompts.tokens"].shape[-1]}
  for name in most.keys() & arrays.keys():
    values = arrays[name]
    if values.size and not 0 <= values.min() <= values.max() <= most[name]:
      raise RecordError(f"{name} has values outside 0 … {most[name]}")
  for name in ("behavior_logprobs", "rewards"):
    if not np.isfinite(arrays[name]).all():
      raise RecordError(f"{name} has values that are not finite")


def _check_versions(group: Group, draw: Draw, *, has_versions: bool) -> None:
  """Raises RecordError if a version is too old for the draw, or versions do not fit the tokens.

  If `has_versions`, every group has versions; otherwise none has. A group has several versions only
  if its tokens have versions.
  """
  versions = {*group.versions}
  if any(version < draw.version for version in versions):
    raise RecordError(f"version {min(versions)} is older than config.schedule allows")
  of_tokens = group.arrays.get("token_versions")
  found = versions if of_tokens is None else {*np.unique(of_tokens).tolist()} - {-1}
  is_one = of_tokens is not None or len(versions) < 2
  if found != versions or bool(versions) != has_versions or not is_one:
    raise RecordError(
      f"it has the versions {sorted(versions)} and its tokens have the versions {sorted(found)}, a"
      " combination that no sampler of this run writes"
    )


def _check_samples(group: Group, question: str) -> None:
  """Raises RecordError unless a group's samples belong to a problem and are graded."""
  if len(group.samples) != len(group.arrays["tokens"]):
    raise RecordError(
      f"it has {len(group.samples)} samples for {len(group.arrays['tokens'])} rollouts"
    )
  for sample in group.samples:
    if sample.get("prompt") != question:
      raise RecordError("the prompt of a sample is not the question of its problem")
    if not isinstance(sample.get("outcome"), str):
      raise RecordError("a sample lacks its outcome")
    if sample["outcome"] in _EXPLAINED and not isinstance(sample.get("detail"), str):
      raise RecordError(f"a sample with the outcome {sample['outcome']} lacks its detail")
