"""Starts the two roles of a fleet in a workdir: the trainer's generation, and a sampler."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import rlvr_jax
from rlvr_jax.data.batches import PromptError, encode_prompt
from rlvr_jax.fleet.leases import BEATS
from rlvr_jax.fleet.records import DamagedError, TrainerRecord, problem_checksum
from rlvr_jax.rewards.outcome import GradingStoppedError
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.dialogues import EnvironmentStoppedError
from rlvr_jax.rollouts.queue import RolloutQueue
from rlvr_jax.storage.places import Workdir, in_bucket
from rlvr_jax.storage.shared import SharedFiles, open_shared
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.workdir import WorkdirError, differing_fields, read_config
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import current_commit
from rlvr_jax.train.fleet import policies
from rlvr_jax.train.fleet.board import Board
from rlvr_jax.train.fleet.desk import Desk
from rlvr_jax.train.fleet.generation import FleetGeneration, Limits
from rlvr_jax.train.fleet.policies import PolicyDamagedError, PolicyPublisher, PolicyReader
from rlvr_jax.train.fleet.sampler import Identity, Meter, Sampler, Weights
from rlvr_jax.train.generation.agreement import AgreementError
from rlvr_jax.train.generation.generator import Generator
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.start.parameters import Frozen
from rlvr_jax.train.start.restore import SOURCES_FILE, restore_sources

FOLDER = "fleet"  # of a workdir
# Fields that a sampler may have otherwise than the trainer: those of its machine.
OF_A_SAMPLER = (
  *("mesh", "generation_mesh", "compiler_options", "sampling.slots", "logging"),
  *("grading.num_workers", "environment.processes", "generation_deadline_s"),
)
# Fields that a resumed run may change, and its samplers then follow.
_SETTINGS = ("fleet", "grading", "max_behavior_gap")
# Errors that any sampler would meet, so that the run must end.
_OF_THE_RUN = (
  *(AgreementError, EnvironmentStoppedError, GradingStoppedError, PromptError),
  *(DamagedError, PolicyDamagedError),
)
_COMPARED_PROBLEMS = 16


def start_fleet(
  parts: Parts,
  generator: Generator,
  queue: RolloutQueue,
  checkpointer: Checkpointer,
  workdir: Workdir,
) -> FleetGeneration:
  """Generation by samplers, for the trainer of a run.

  Args:
    parts: of the run.
    generator: at the position where it goes on.
    queue: of the run, with the fingerprints of its policies.
    checkpointer, workdir: of the run.
  """
  c = parts.config
  folder = workdir.path / FOLDER
  publisher = PolicyPublisher(folder / policies.FOLDER, parts, workdir=workdir, beside=checkpointer)
  identity = identify(parts)

  def start_board() -> Board:
    record = TrainerRecord(
      incarnation=uuid.uuid4().hex,
      **identity._asdict(),
      policies=[],
      draws=[generator.position().draws, -1],
      ended=False,
      beat=0,
    )
    return Board(
      open_shared(folder, workdir.guard),
      record,
      publisher.published,
      beat_s=c.fleet.silent_s / BEATS,
      poll_s=poll_s(workdir.path),
    )

  board = multihost.run_on_first(start_board, None)
  limits = Limits(
    schedule=parts.schedule,
    num_batches=c.num_updates,
    quotas=[source.prompts for source in parts.sources.live],
    groups_per_lease=c.fleet.groups_per_lease,
    dynamic_batches=c.dynamic_sampling.max_batches if c.dynamic_sampling.enabled else 0,
    silent_s=c.fleet.silent_s,
    poll_s=poll_s(workdir.path),
  )
  return FleetGeneration(generator, board, publisher, limits, queue.fingerprint)


@contextlib.contextmanager
def open_sampler(
  parts: Parts, folder: pathlib.Path, frozen: Frozen, collector: Collector
) -> Iterator[Sampler]:
  """Context with a sampler that has joined the fleet of a workdir.

  An error that other samplers would meet as well is published, and ends the run.

  Args:
    parts, frozen, collector: of the sampler.
    folder: the workdir, from `parse_path`.
  """
  name = multihost.exchange(f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}")[0]
  meter = Meter(name, socket.gethostname(), collector.usage())
  files: Callable[[], SharedFiles] = lambda: open_shared(folder / FOLDER)
  slots = max(source.engine.settings.slots for source in parts.sources.live if source.engine)
  ahead = -(-slots // (parts.config.fleet.groups_per_lease * parts.shape.group_size))
  start = lambda: Desk(
    files(),
    name,
    meter.describe,
    ahead=ahead,
    poll_s=poll_s(folder),
    limit_s=parts.config.fleet.silent_s,
  )
  reader = PolicyReader(folder / FOLDER / policies.FOLDER, parts)
  desk = multihost.run_on_first(start, None)
  weights = Weights(reader, parts, frozen.sampler)
  try:
    yield Sampler(parts, frozen, collector, desk, weights, identify(parts), meter)
  except _OF_THE_RUN as error:
    if desk is not None:
      desk.fail(f"{type(error).__name__}: {error}")
    raise
  finally:
    weights.close()
    if desk is not None:
      desk.close()


def poll_s(folder: pathlib.Path) -> float:
  """Seconds between two looks at the objects of a fleet."""
  return 1.0 if in_bucket(folder) else 0.1


def identify(parts: Parts) -> Identity:
  """What all programs of a fleet must have in common."""
  commit = current_commit()
  return Identity(
    code=f"{rlvr_jax.__version__}{f' at {commit}' if commit else ''}",
    config=_fingerprint_config(parts),
    data=_fingerprint_data(parts),
    settings=_fingerprint_settings(parts),
  )


def _fingerprint_config(parts: Parts) -> str:
  """16 hexadecimal digits of the fields that all programs of a fleet must have in common."""
  free = [*checks.may_differ(parts.config, parts.schedule), *OF_A_SAMPLER]
  return _digest(_differences({}, json.loads(parts.config.to_json_best_effort()), free))


def _fingerprint_settings(parts: Parts) -> str:
  """16 hexadecimal digits of the fields that samplers follow where a resumed run changes them."""
  own = json.loads(parts.config.to_json_best_effort())
  return _digest(_differences({}, {name: own[name] for name in _SETTINGS}, OF_A_SAMPLER))


def _fingerprint_data(parts: Parts) -> str:
  """16 hexadecimal digits of some training problems, their number, and how they are tokenized."""
  source = parts.task.train
  size = len(source)
  indices = np.unique(np.linspace(0, size - 1, _COMPARED_PROBLEMS, dtype=int)).tolist()
  problems = [source[index] for index in indices]
  sums = [problem_checksum(problem.question, problem.reference) for problem in problems]
  tokens = [list(map(int, encode_prompt(p, parts.tokenizer))) for p in problems]
  return _digest([size, sums, tokens])


def _digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def check_same_run(parts: Parts, folder: pathlib.Path) -> None:
  """Raises WorkdirError unless a sampler has the configuration of the run in a workdir."""
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
      " --config.fleet.samplers=True, or train another one"
    )
  ours = json.loads(parts.config.to_json_best_effort())
  if differences := _differences(theirs, ours, OF_A_SAMPLER):
    lines = [f"  {name}: {old} in the workdir, {new} here" for name, old, new in differences]
    raise WorkdirError(
      f"a sampler has the configuration of its run; these fields differ from {folder}:\n"
      + "\n".join(lines)
      + f"\nOnly these may be set for a sampler: {', '.join(OF_A_SAMPLER)}"
    )


def _differences(
  theirs: dict[str, Any], ours: dict[str, Any], may_differ: Sequence[str]
) -> list[tuple[str, str, str]]:
  """As `differing_fields`; a field that is not set may as well be absent."""
  found = differing_fields(theirs, ours, may_differ)
  return [fields for fields in found if not {*fields[1:]} <= {"absent", "null"}]


def with_sources_of_run(parts: Parts, folder: pathlib.Path) -> Parts:
  """The parts with the checkpoint of another run that the trainer has begun with, if any."""
  if all(source.pin is None for source in parts.sources):
    return parts
  if not (folder / SOURCES_FILE).exists():
    raise WorkdirError(f"{folder} has no {SOURCES_FILE} yet; start the sampler a little later")
  return restore_sources(parts, folder)
