"""A run from its first file to its last: what is opened, in which order, and closed at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from rlvr_jax.rewards.pool import GraderPool
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.files import replacing
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.workdir import LAYOUT_FILE, StartFiles, opened
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import EndRequestedError, deadline
from rlvr_jax.train.generation import raw_logprobs
from rlvr_jax.train.loop import Progress, Trainer, make_trainer
from rlvr_jax.train.reporting import data_use, machines, trackers
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.reporting.run_log import RunLog
from rlvr_jax.train.reporting.writer import MetricWriter, NoWriter
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.grading import announce_partial_credit, check_first_grade, grader_pool
from rlvr_jax.train.start import parameters, warm_start_cache
from rlvr_jax.train.start.first_params import first_params, warm_start
from rlvr_jax.train.start.restore import (
  as_begun,
  elapsed_seconds,
  layout_of,
  records_of,
  resumable,
)

ROLLOUTS_FOLDER = "rollouts"


class Session(NamedTuple):
  """A run that is ready for its next update."""

  trainer: Trainer
  now: Progress
  workdir: Workdir


class Closable(Protocol):
  def close(self) -> None: ...


Resource = TypeVar("Resource", bound=Closable)
Enter = Callable[[Resource], Resource]  # has a resource closed when the session ends


@contextlib.contextmanager
def session(
  parts: Parts, workdir: str | Path, *, profile: str = "", tracked_by: Sequence[str] = ()
) -> Iterator[Session]:
  """Starts or resumes a run; within it the run has its workdir, graders and files.

  Args:
    parts: of the run.
    workdir: folder of all files of the run, or gs://BUCKET/FOLDER.
    profile: first and last update of a trace by jax.profiler, such as "10:13"; "" for none.
    tracked_by: names of `trackers.TRACKERS`.
  Raises:
    EndRequestedError: a signal asked the run to end.
    WorkdirError: the workdir belongs to another configuration or process.
    OtherProcessError: another process of the run failed.
  """
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.only_first_prints())
    stack.enter_context(_saying_why())
    stack.enter_context(deadline())
    folder, files = opened(workdir, enter)
    multihost.on_first(lambda: _check_config(folder, files, parts), None)
    parts = as_begun(parts, folder.local)
    raw_logprobs.announce(parts)
    announce_partial_credit(parts.config, parts.task)
    data_use.announce(parts.config, parts.task, parts.schedule, parts.sources.num_live)
    frozen = parameters.load_frozen(parts)
    warm_starts = enter(Checkpointer(folder.kept / "warm_start", keep=1, workdir=folder))
    warm = warm_starts.restore(parts.placement.state.params)
    keep = parts.config.checkpoint.keep
    checkpointer = enter(Checkpointer(folder.kept / "checkpoints", keep=keep, workdir=folder))
    store = _open_store(folder, enter)
    resumed = resumable(checkpointer, parts, store)
    no_writer = NoWriter(folder.local)
    records = records_of(resumed, warm)
    writer = multihost.on_first(
      lambda: enter(_open_writer(folder, parts, records, tracked_by)), no_writer
    )
    pool = multihost.together(lambda: _start_graders(parts, enter))
    # A resumed run whose warm-start folder is gone still has its records.
    records_to = no_writer if resumed else writer
    params, needs_warm_start = first_params(parts, warm, records_to, warm_starts)
    multihost.on_first(files.begin, None)
    # Before this, a signal ends the process at once: there was nothing to save.
    stack.enter_context(multihost.ending_in_order())
    if needs_warm_start:
      params = warm_start(parts, params, frozen.trainer, records_to, warm_starts)
    log = RunLog(
      parts.config,
      parts.task,
      parts.model.config,
      parts.schedule,
      writer,
      elapsed=elapsed_seconds(folder.local),
      profile=enter(machines.Profile(profile, folder.local, folder.kept)),
    )
    trainer = make_trainer(parts, frozen, log, checkpointer, pool, store, initial=params)
    now = trainer.resume(resumed) if resumed else trainer.begin(params)
    del params, warm, resumed  # the trainer keeps what it needs
    yield Session(trainer, now, folder)


@contextlib.contextmanager
def _saying_why() -> Iterator[None]:
  """Prints where the run was when it was asked to end, once its files are closed."""
  try:
    yield
  except EndRequestedError as error:
    say(f"{error}; rerun the same command to continue")
    raise


def _check_config(workdir: Workdir, files: StartFiles, parts: Parts) -> None:
  """Raises unless the workdir is new, or of a run of this configuration."""
  workdir.fetch()
  allowed = checks.may_differ(parts.config, parts.schedule)
  files.check_config(parts.config.to_json_best_effort(), allowed)  # now a failure leaves nothing
  parameters.check_start(parts.config.start, parts.config.lora.adapters, workdir.kept)
  warm_start_cache.check(parts.config)
  with replacing(workdir.local / LAYOUT_FILE) as file:
    file.write((json.dumps(layout_of(parts)) + "\n").encode())


def _open_store(workdir: Workdir, enter: Enter) -> RolloutStore:
  """The store; the first process repairs the files of a killed run before the others read them."""
  open_store = lambda writable: enter(
    RolloutStore(workdir.kept / ROLLOUTS_FOLDER, workdir=workdir, writable=writable)
  )
  return multihost.on_first(lambda: open_store(True), None) or open_store(False)


def _open_writer(
  workdir: Workdir,
  parts: Parts,
  records: tuple[int | None, Any],
  tracked_by: Sequence[str],
) -> MetricWriter:
  """The writer of a run that continues after these records, see `records_of`."""
  config = json.loads(parts.config.to_json_best_effort())
  used = [trackers.Tracker(name, workdir.local, config) for name in tracked_by]
  return MetricWriter(
    workdir.local,
    *records,
    trackers=used,
    publish=workdir.publish,
    kept=workdir.kept,
  )


def _start_graders(parts: Parts, enter: Enter) -> GraderPool:
  """The grading processes, which have graded the first problem."""
  pool = enter(grader_pool(parts.config, parts.task))
  check_first_grade(parts.config, pool, parts.task)
  return pool
