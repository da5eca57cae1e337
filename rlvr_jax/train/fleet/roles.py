"""Starts the two roles of a fleet in a workdir: the trainer's side, and a sampler."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import ml_collections
import numpy as np

import rlvr_jax
from rlvr_jax.data import Problem, ProblemSource, Task, Tokenizer
from rlvr_jax.data.tokenizer import PromptError, encode_prompt
from rlvr_jax.fleet import program, remote
from rlvr_jax.fleet.exchange import Exchange, draw_from_json, draw_to_json
from rlvr_jax.fleet.program import PolicyGoneError, RefusedError
from rlvr_jax.fleet.remote import FleetError, RemoteSampler
from rlvr_jax.rewards.outcome import GradingStoppedError
from rlvr_jax.rollouts.answers import EnvironmentStoppedError
from rlvr_jax.rollouts.grading import sampled_places
from rlvr_jax.rollouts.group import Draw, Group, Policy, decode, encode
from rlvr_jax.rollouts.sampler import LocalSampler, SamplerStoppedError
from rlvr_jax.rollouts.sources import Sources
from rlvr_jax.storage.files import JSON
from rlvr_jax.storage.objects import open_objects
from rlvr_jax.storage.places import Workdir, in_bucket
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.checkpointing.workdir import differing_fields, read_config
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import (
  EndRequestedError,
  current_commit,
  restart_deadline,
  shutdown_requested,
)
from rlvr_jax.train.fleet import policies as published
from rlvr_jax.train.fleet.policies import (
  PolicyDamagedError,
  PolicyPublisher,
  PolicyReader,
)
from rlvr_jax.train.generation.agreement import AgreementError, Compared
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.grading import named_graders, used_graders
from rlvr_jax.train.start.restore import SOURCES_FILE, restore_sources
from rlvr_jax.types import Params

FOLDER = "fleet"  # folder of a workdir through which trainer and samplers exchange files
WEIGHTS = "fleet_weights"  # folder of a workdir for the published policies
# Fields of a sampler's machine, which may differ from the trainer's.
OF_A_SAMPLER = (
  *("mesh", "generation_mesh", "compiler_options", "sampling.slots", "logging"),
  *("grading.num_workers", "environment.processes", "generation_deadline_s"),
)
# Fields that a resumed run may change; its samplers then use the new values.
_SETTINGS = ("fleet", "grading", "environment", "max_behavior_gap")


class ForeignGraderError(RefusedError):
  """A problem of the run names a grader that no sampler of the run knows."""


# Errors that any sampler would meet, so that the run must end.
OF_THE_RUN = (
  *(AgreementError, EnvironmentStoppedError, GradingStoppedError, PromptError, PolicyDamagedError),
  ForeignGraderError,
)
_COMPARED_PROBLEMS = 16
_WRITTEN_S = 0.1  # seconds between two checks whether a policy is written
T = TypeVar("T")


class FleetSampler:
  """The `Sampler` of a trainer with a fleet; the first process exchanges files with samplers."""

  def __init__(
    self,
    settings: remote.Settings,
    publisher: PolicyPublisher,
    policies: Policies,
    workdir: Workdir,
    has_all: Callable[[], bool],
  ):
    """Makes samplers follow this trainer from now on; see `RemoteSampler`.

    Args:
      settings: the result of `trainer_settings`.
      publisher: writes policies into the folder `WEIGHTS` of the workdir.
      policies, workdir: policies and workdir of the run.
      has_all: whether all batches of the run are sampled.
    """
    self._publisher, self._has_all, self._poll_s = publisher, has_all, settings.poll_s
    self._measured: dict[str, float] = {}
    self._not_announced = ""  # why the last policy could not be announced to samplers
    known = {int(version): x for version, x in policies.state().items()}
    begin = lambda: RemoteSampler(
      Exchange(open_objects(workdir.path / FOLDER, workdir.guard)),
      self._when_written,
      settings,
      fingerprints=known,
      say=say,
    )
    self._remote = multihost.run_on_first(begin, None)

  def offer(self, policy: Policy) -> None:
    """Publishes a newer policy to the samplers; every process writes its part of the weights."""
    name = published.Policy(policy.version, policy.fingerprint())
    for metric, value in self._publisher.publish(policy.params, name).items():
      self._measured[metric] = self._measured.get(metric, 0.0) + value
    if self._remote is not None:
      self._remote.offer(policy)

  def want(self, draw: Draw, indices: Collection[int]) -> None:
    """Requests groups of a draw from the samplers."""
    if self._remote is not None:
      self._remote.want(draw, indices)

  def take(self) -> list[Group]:
    """Waits for groups; all processes get the same groups.

    Raises:
      SamplerStoppedError: no group can come any more, see `RemoteSampler.look`; or the last policy
        could not be published.
    """
    began = time.monotonic()
    while not (groups := self._look_together(time.monotonic() - began)):
      time.sleep(self._poll_s)
    key = "time/fleet_wait_seconds"
    self._measured[key] = self._measured.get(key, 0.0) + time.monotonic() - began
    return groups

  def poll(self) -> list[Group]:
    """The groups that have arrived; does not wait. Raises the errors of `take`."""
    return self._look_together(0.0)

  def _look_together(self, waited_s: float) -> list[Group]:
    """The groups that have arrived, the same in all processes; see `RemoteSampler.look`."""
    multihost.raise_if_shutdown_requested()
    restart_deadline()
    if failures := [
      *filter(None, multihost.exchange(self._publisher.failure() or self._not_announced))
    ]:
      raise SamplerStoppedError(failures[0])
    look = functools.partial(self._look, waited_s)
    error, text = multihost.result_of_first(look)
    if error:
      raise SamplerStoppedError(error)
    return decode(base64.b64decode(text))[0] if text else []

  def _look(self, waited_s: float) -> tuple[str, str]:
    """(error of the fleet, encoded groups that have arrived); "" for no error, "" for no groups."""
    try:
      groups = self._remote.look(waited_s) if self._remote is not None else []
    except FleetError as error:
      return str(error), ""
    return "", base64.b64encode(encode(groups, {})).decode() if groups else ""

  def measure(self) -> dict[str, float]:
    """Metrics of the fleet since the last call, and of its present samplers."""
    measured, self._measured = self._measured, {}
    return measured | (self._remote.statistics() if self._remote is not None else {})

  def close(self) -> None:
    """Closes the fleet; ends the samplers too if all batches have been sampled."""
    try:
      self._publisher.close()
    finally:
      if self._remote is not None and self._has_all():
        self._remote.end()

  def _when_written(self, policy: Policy, announce: Callable[[], None]) -> None:
    """Starts a thread that announces a policy as soon as samplers can restore it."""

    def wait() -> None:
      deadline = time.monotonic() + 3600.0
      try:
        while time.monotonic() < deadline:
          if any(known.version == policy.version for known in self._publisher.published()):
            return announce()
          time.sleep(_WRITTEN_S)
      except Exception as error:  # `take` raises it, since it would wait in vain
        self._not_announced = f"version {policy.version} could not be announced: {error}"

    threading.Thread(target=wait, name="announces a policy", daemon=True).start()


# --- samplers -------------------------------------------------------------------------------------


class ComparedSampler:
  """A sampler that checks its log-probabilities on the first group of every policy and source.

  The check is a comparison with the log-probabilities of the trainer's network. The sampler samples
  the groups that a trainer requests. It refuses a problem that names a grader in a user's module,
  unless the sampler's own task names this grader too.
  """

  def __init__(
    self,
    inner: LocalSampler,
    policies: Policies,
    sources: Sources,
    task: Task,
    compare: Callable[..., Compared],
  ):
    """Keeps the parts of the sampler; nothing runs yet.

    Args:
      inner: samples and grades the groups.
      policies: the policies that `inner` loads.
      sources, task: sources and task of the run.
      compare: `agreement.behavior_gaps`, with the arguments bound that are the same for all
        comparisons.
    """
    self._inner, self._policies, self._sources, self._task = inner, policies, sources, task
    self._compare_with_trainer = compare
    self._checked: set[tuple[int, int]] = set()  # (version, index of the source)
    self._graders = {*used_graders(task)}

  def offer(self, policy: Policy) -> None:
    """Lets another policy sample, after a restart of the trainer perhaps an earlier policy."""
    self._checked = {(v, source) for v, source in self._checked if v < policy.version}
    self._policies.repeat_from(policy.version)
    self._inner.offer(policy)

  def want(self, draw: Draw, indices: Collection[int]) -> None:
    """Asks for groups of a draw.

    Raises:
      ForeignGraderError: a problem names a grader in a user's module, but none of the first
        problems of this sampler's task names this grader.
    """
    for problem in draw.problems:
      self._check(problem)
    self._inner.want(draw, indices)

  def _check(self, problem: Problem) -> None:
    named = named_graders(self._task.grader, problem.reference)
    if foreign := sorted({name for name in named if ":" in name} - self._graders):
      raise ForeignGraderError(
        f"the trainer sends a problem with the grader {foreign[0]!r}. A sampler imports only"
        " graders that the first problems of its task name: name this grader in one of these"
        " problems, and start again in another --workdir"
      )

  def take(self) -> list[Group]:
    """Works until groups are finished; returns [] if no group is wanted or the sampler is to end.

    Raises:
      AgreementError: this sampler samples from another distribution than the trainer computes.
    """
    try:
      return [self._compare(group) for group in self._inner.take()]
    except EndRequestedError:
      return []  # the caller checks for requests itself

  def close(self) -> None:
    """Does nothing, since nothing runs in the background."""

  def _compare(self, group: Group) -> Group:
    """The group, with the gaps of a comparison if one of its policies was not compared before."""
    policies, live = self._policies, self._sources.live
    source = live[group.source]
    versions = {*group.versions} or {0}
    if all((version, group.source) in self._checked for version in versions):
      return group
    used = policies.used({v for v in versions if (v, group.source) not in self._checked})
    if not group.versions:  # sampled by another run's policy, so no version of this run is needed
      used = policies.newest_used()
    if not used:
      return group
    of_tokens = group.arrays.get("token_versions")
    compared = self._compare_with_trainer(
      [group],
      sampled_places(group.arrays)[None].astype(np.float32),
      of_tokens[None] if of_tokens is not None else None,
      used,
      policies.frozen,
      sources=Sources([source._replace(prompts=1)]),
    )
    self._checked |= {(version, group.source) for version in versions}
    alike = (all((v, i) in self._checked for i in range(len(live))) for v in versions)
    policies.mark_compared([v for v, is_done in zip(versions, alike, strict=True) if is_done])
    return group._replace(measured=compared.gaps)


class Leader:
  """The sampler of the first of several processes; it sends its calls to the other processes."""

  def __init__(self, inner: ComparedSampler, reader: PolicyReader):
    """Keeps this process's sampler, and a reader of policies on the mesh of all processes."""
    self._inner, self._reader = inner, reader

  def offer(self, policy: Policy) -> None:
    _tell("offer", policy.version, policy.fingerprint())
    _offer(self._inner, self._reader, policy.version, policy.fingerprint())

  def want(self, draw: Draw, indices: Collection[int]) -> None:
    _tell("want", draw_to_json(draw), sorted(indices))
    self._inner.want(draw, indices)

  def take(self) -> list[Group]:
    _tell("take")
    return self._inner.take()

  def close(self) -> None:
    _tell("close")

  def is_ending(self) -> bool:
    """Whether the sampler is to end; all processes learn the answer."""
    _tell("wait")
    return _is_ending()


def follow(inner: ComparedSampler, reader: PolicyReader) -> None:
  """Repeats the calls of the first process's `Leader`, until the leader closes."""
  while True:
    command, *arguments = multihost.exchange(None)[0]
    if command == "offer":
      with contextlib.suppress(PolicyGoneError):  # the first process gets the same error
        _offer(inner, reader, *arguments)
    elif command == "want":
      inner.want(draw_from_json(arguments[0]), arguments[1])
    elif command == "take":
      inner.take()
    elif command == "wait":
      _is_ending()
    else:
      return


def _tell(*command: JSON) -> None:
  multihost.exchange([*command])


def _is_ending() -> bool:
  """Whether this program is to end; all its processes call this together."""
  restart_deadline()
  return multihost.any_process(shutdown_requested())


def _offer(inner: ComparedSampler, reader: PolicyReader, version: int, fingerprint: str) -> None:
  """Restores a policy in all processes, and lets it sample.

  Raises:
    PolicyGoneError: the policy is gone for at least one process; all processes raise this.
  """
  policy = published.Policy(version, fingerprint)
  params = _unless_gone(lambda: reader.restore(policy))
  _unless_gone(lambda: reader.verify(policy, params))
  inner.offer(Policy(version, params, lambda: fingerprint))


def _unless_gone(action: Callable[[], T]) -> T:
  """The result of an action; if it raises PolicyGoneError in one process, all processes do."""
  result: list[T] = []

  def attempt() -> None:
    with contextlib.suppress(PolicyGoneError):
      result.append(action())

  multihost.run_together(attempt)
  if multihost.any_process(not result):
    raise PolicyGoneError("a policy is no longer published")
  return result[0]


def sample_for(
  folder: pathlib.Path, sampler: ComparedSampler, settings: program.Settings, policy: Params
) -> None:
  """Samples for the trainer of a workdir until the trainer has all its batches.

  Args:
    folder: the workdir, from `parse_path`.
    sampler: the sampler in this process.
    settings: the result of `sampler_settings`.
    policy: shapes, dtypes and shardings of a published policy, from `abstract_policy`.
  Raises:
    EndRequestedError: a signal requested shutdown.
    RefusedError: the trainer has other code, another configuration or other data.
  """
  reader = PolicyReader(folder / WEIGHTS, policy)
  restore = lambda version, fingerprint: reader.restore(published.Policy(version, fingerprint))
  leader = Leader(sampler, reader)
  is_alone = multihost.num_processes() == 1
  if multihost.is_first():
    program.run_sampler(
      Exchange(open_objects(folder / FOLDER)),
      sampler if is_alone else leader,
      settings,
      restore if is_alone else lambda version, fingerprint: {},  # the leader restores policies
      ends_run=OF_THE_RUN,
      stop=_is_ending if is_alone else leader.is_ending,
      say=say,
    )
  else:
    follow(sampler, reader)
  if multihost.any_process(shutdown_requested()):
    raise EndRequestedError("shutdown requested")


# --- what trainer and samplers have in common -----------------------------------------------------


def poll_s(folder: pathlib.Path) -> float:
  """Seconds between two reads of a fleet's objects."""
  return 1.0 if in_bucket(folder) else 0.1


def trainer_settings(
  folder: pathlib.Path,
  fleet: ml_collections.ConfigDict,
  allowed: remote.Allowed,
  *,
  identity: Mapping[str, str],
  deadline_s: float,
) -> remote.Settings:
  """The settings of the trainer of a fleet.

  Args:
    folder: the workdir.
    fleet: `config.fleet`.
    allowed: the run's limits, which all groups from samplers must respect.
    identity: the result of `identify`.
    deadline_s: `config.generation_deadline_s`.
  """
  return remote.Settings(
    identity,
    allowed,
    silent_s=fleet.silent_s,
    deadline_s=deadline_s,
    poll_s=poll_s(folder),
  )


def sampler_settings(
  folder: pathlib.Path,
  fleet: ml_collections.ConfigDict,
  sources: Sources,
  *,
  identity: Mapping[str, str],
  group_size: int,
  deadline_s: float,
) -> program.Settings:
  """The settings of a sampler of a fleet.

  Args:
    folder: the workdir.
    fleet: `config.fleet`.
    sources: the sources of the run, on this sampler's devices.
    identity: the result of `identify`.
    group_size: G.
    deadline_s: `config.generation_deadline_s`.
  """
  slots = max(source.programs.settings.slots for source in sources.live)
  return program.Settings(
    name=f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}".replace(".", "-"),
    identity=identity,
    capacity=-(-slots // group_size) + 1,
    silent_s=fleet.silent_s,
    patience_s=fleet.silent_s,
    poll_s=poll_s(folder),
    idle_s=max(3600.0, 2 * deadline_s),
  )


def identify(
  config: Mapping[str, JSON], may_differ: Sequence[str], source: ProblemSource, tokenizer: Tokenizer
) -> dict[str, str]:
  """Texts, by name, that must be equal for the trainer and all samplers of a fleet.

  The texts identify the code, the configuration and the data. "settings" identifies the values of
  the fields in `_SETTINGS`: a resumed run may change some of these fields, and its samplers must
  then have the new values.

  Args:
    config: the run's configuration, as JSON.
    may_differ: fields that a resumed run may change.
    source: the source of training problems.
    tokenizer: the tokenizer of the run.
  """
  commit = current_commit()
  followed = {name: config[name] for name in _SETTINGS}
  return {
    "code": f"{rlvr_jax.__version__}{f' at {commit}' if commit else ''}",
    "config": _digest(_differences({}, config, [*may_differ, *OF_A_SAMPLER])),
    "data": _fingerprint_data(source, tokenizer),
    "settings": _digest(_differences({}, followed, OF_A_SAMPLER)),
  }


def _fingerprint_data(source: ProblemSource, tokenizer: Tokenizer) -> str:
  """16 hexadecimal digits of the number of training problems, some problems and their tokens."""
  size = len(source)
  indices = np.unique(np.linspace(0, size - 1, _COMPARED_PROBLEMS, dtype=int)).tolist()
  problems = [source[index] for index in indices]
  texts: list[JSON] = [[problem.question, dict(problem.reference)] for problem in problems]
  tokens = [list(map(int, encode_prompt(p, tokenizer))) for p in problems]
  return _digest([size, texts, tokens])


def _digest(value: JSON) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def check_same_run(ours: Mapping[str, JSON], folder: pathlib.Path) -> None:
  """Raises WorkdirError unless a sampler has the configuration of the run in a workdir.

  Args:
    ours: the sampler's configuration, as JSON.
    folder: the workdir.
  """
  path = folder / "config.json"
  if not path.exists():
    raise WorkdirError(
      f"{folder} has no run yet; start the trainer first, with config.fleet.samplers = True, or"
      " leave --config out: then a sampler waits"
    )
  theirs = read_config(path)
  if not theirs.get("fleet", {}).get("samplers", False):
    raise WorkdirError(
      f"{folder} belongs to a run that samples by itself; start its trainer again with"
      " --config.fleet.samplers=True, or train another run"
    )
  if differences := _differences(theirs, ours, OF_A_SAMPLER):
    lines = [f"  {name}: {old} in the workdir, {new} here" for name, old, new in differences]
    raise WorkdirError(
      f"a sampler must have the configuration of its run; these fields differ from {folder}:\n"
      + "\n".join(lines)
      + f"\nOnly these may be set for a sampler: {', '.join(OF_A_SAMPLER)}"
    )


def _differences(
  theirs: Mapping[str, JSON], ours: Mapping[str, JSON], may_differ: Sequence[str]
) -> list[tuple[str, str, str]]:
  """The result of `differing_fields`, without fields that are null or absent on both sides."""
  found = differing_fields(theirs, ours, may_differ)
  return [fields for fields in found if not {*fields[1:]} <= {"absent", "null"}]


def sources_of_run(
  sources: Sources, make_sources: Callable[..., Sources], folder: pathlib.Path
) -> Sources:
  """A sampler's sources, which read the same checkpoints of other runs as when the run began.

  Args:
    sources: the sources made from the present configuration.
    make_sources: see `restore_sources`.
    folder: the workdir.
  """
  if all(source.pin is None for source in sources):
    return sources
  if not (folder / SOURCES_FILE).exists():
    raise WorkdirError(f"{folder} has no {SOURCES_FILE} yet; start the sampler a little later")
  return restore_sources(sources, make_sources, folder)
