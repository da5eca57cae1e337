"""Opens a run: its workdir, graders, checkpoints and metrics, in order, closed at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from rlvr_jax.rollouts.answers import Answers
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.files import replace_file
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.begin import begin, in_a_thread, make_run, resume, with_fleet
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.workdir import LAYOUT_FILE, StartFiles, open_workdir
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import EndRequestedError, deadline
from rlvr_jax.train.generation import raw_logprobs
from rlvr_jax.train.loop import Run, RunState
from rlvr_jax.train.reporting import advice, machines
from rlvr_jax.train.reporting.log import LoggedRun, RunLog
from rlvr_jax.train.reporting.progress import say, warn
from rlvr_jax.train.reporting.writer import MetricWriter, Tracker, open_writer
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.compiler_options import announce_defaults, announce_precision
from rlvr_jax.train.setup.grading import (
  announce_partial_credit,
  check_first_dialogue,
  check_first_grade,
  check_first_messages,
  start_pools,
)
from rlvr_jax.train.setup.programs import RowTokens
from rlvr_jax.train.start import parameters
from rlvr_jax.train.start.every_line import check_every_line
from rlvr_jax.train.start.first_params import make_first_params, warm_start
from rlvr_jax.train.start.restore import (
  describe_layout,
  elapsed_seconds,
  find_resumable,
  last_records,
  restore_sources,
)
from rlvr_jax.train.start.rows import ROWS_FILE, RunRows, read_rows, write_rows

ROLLOUTS_FOLDER = "rollouts"


class Session(NamedTuple):
  """A run that is ready for its next update."""

  run: Run
  now: RunState
  workdir: Workdir


class Closable(Protocol):
  def close(self) -> None: ...


Resource = TypeVar("Resource", bound=Closable)
Enter = Callable[[Resource], Resource]  # registers a resource to be closed with the session


@contextlib.contextmanager
def open_session(
  parts: Parts, workdir: str | Path, *, profile: str = "", tracked_by: Sequence[str] = ()
) -> Iterator[Session]:
  """Context in which a run, started or resumed, has its workdir, graders and files open.

  Args:
    parts: parts of the run.
    workdir: folder of all files of the run, or gs://BUCKET/FOLDER.
    profile: first and last update of a trace by jax.profiler, such as "10:13"; "" for none.
    tracked_by: names of `writer.TRACKERS`.
  Raises:
    EndRequestedError: a signal requested shutdown.
    WorkdirError: the workdir belongs to another configuration or process.
    OtherProcessError: another process of the run failed.
  """
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.silence_all_but_first())
    stack.enter_context(_report_shutdown())
    stack.enter_context(deadline())
    folder, files = open_workdir(workdir, enter)
    first = multihost.run_on_first(lambda: _check_config(folder, files, parts), None)
    parts = restore_sources(parts, folder.local)
    rows = RunRows(
      parts,
      RowTokens(*recorded) if (recorded := multihost.exchange(first)[0]) else None,
      lambda tokens: _record_rows(folder, parts, tokens),
    )
    logged = logged_run(parts)
    raw_logprobs.announce(parts.sources)
    announce_partial_credit(parts.outcome_policy, parts.task, parts.config.environment.name)
    announce_defaults(parts.compiler_options, parts.config.compiler_options)
    announce_precision(parts.model.config.compute_dtype)
    announce_data(parts, logged.warm_start)
    frozen = parameters.load_frozen(parts)
    warm_starts = enter(Checkpointer(folder.path / "warm_start", keep=1, workdir=folder))
    warm = warm_starts.restore(parts.placement.state.params)
    keep = parts.config.checkpoint.keep
    checkpointer = enter(Checkpointer(folder.path / "checkpoints", keep=keep, workdir=folder))
    store = _open_store(folder, enter)
    resumed = find_resumable(checkpointer, parts, store, rows)
    no_writer = MetricWriter(folder.local)
    records = last_records(resumed, warm)
    writer = multihost.run_on_first(
      lambda: enter(_open_writer(folder, parts, records, tracked_by)), no_writer
    )
    make_answers = multihost.run_together(lambda: _start_graders(parts, enter))
    check_first_messages(
      make_answers(),
      parts.tokenizer,
      parts.shape.max_prompt_length,
      parts.task.held_out,
      parts.task.train,
    )
    # A resumed run whose warm-start folder is gone still has its records.
    records_to = no_writer if resumed else writer
    params, needs_warm_start = make_first_params(parts, warm, records_to, warm_starts)
    multihost.run_on_first(files.keep, None)
    # Until here a signal ends the process at once, since there is nothing to save.
    stack.enter_context(multihost.share_shutdown_signals())
    if needs_warm_start:
      params = warm_start(parts, params, frozen.trainer, records_to, warm_starts)
    log = RunLog(
      logged,
      writer,
      elapsed=elapsed_seconds(folder.local),
      profile=enter(machines.Profile(profile, folder.local, folder.path)),
    )
    run = make_run(parts, rows, frozen, log, checkpointer, make_answers, store, initial=params)
    now = resume(run, resumed) if resumed else begin(run, params)
    del params, warm, resumed  # the run keeps what it needs
    if parts.config.fleet.samplers:
      run = with_fleet(run, folder)
    elif parts.schedule.threaded:
      run = in_a_thread(run)
    enter(run.sampler)
    yield Session(run, now, folder)


def announce_data(parts: Parts, warm_start: advice.WarmStart) -> None:
  """Prints how often a run will see its problems, and whether its demonstrations too often."""
  say(
    advice.planned_passes(
      parts.schedule,
      num_updates=parts.config.num_updates,
      groups=parts.sources.num_live,
      problems=len(parts.task.train),
      dynamic_sampling=parts.config.dynamic_sampling.enabled,
    )
  )
  if text := advice.on_demonstrations(warm_start):
    warn(text)


def logged_run(parts: Parts) -> LoggedRun:
  """What the log has to know about a run."""
  config = parts.config
  warm_start = advice.plan_warm_start(
    config.warm_start, parts.task, checkpoint=config.start.checkpoint
  )
  return LoggedRun(
    task=parts.task,
    network=parts.model.config,
    schedule=parts.schedule,
    batch=config.batch,
    max_response_length=config.max_response_length,
    warm_start=warm_start,
    num_updates=config.num_updates,
    max_skipped_in_a_row=config.max_skipped_in_a_row,
    ks=config.evaluation.ks,
    logging=config.logging,
  )


@contextlib.contextmanager
def _report_shutdown() -> Iterator[None]:
  """Prints the phase in which shutdown was requested, after the run's files are closed."""
  try:
    yield
  except EndRequestedError as error:
    say(f"{error}; rerun the same command to continue")
    raise


def _check_config(workdir: Workdir, files: StartFiles, parts: Parts) -> RowTokens | None:
  """Raises WorkdirError unless the workdir is new or its run has this configuration.

  Returns:
    The rows that the run began with, see `read_rows`.
  """
  workdir.fetch()
  rows = read_rows(workdir.local)  # first, since config.json may follow this start
  allowed = checks.may_differ(parts.config, parts.schedule)
  # From here on, a failed start removes the files that it wrote.
  files.check_config(parts.config.to_json_best_effort(), allowed)
  if rows is not None and not (workdir.local / ROWS_FILE).exists():
    write_rows(workdir.local, rows)
  parameters.check_start(parts.config.start, parts.config.lora.adapters, workdir.path)
  _write_layout(workdir, parts, rows)
  return rows


def _record_rows(workdir: Workdir, parts: Parts, tokens: RowTokens) -> None:
  """Records the rows that the first batch has chosen."""
  write_rows(workdir.local, tokens)
  _write_layout(workdir, parts, tokens)
  workdir.publish(ROWS_FILE, LAYOUT_FILE)


def _write_layout(workdir: Workdir, parts: Parts, rows: RowTokens | None) -> None:
  """Says which machine has started or resumed the run, and how work is laid out there."""
  layout = describe_layout(parts, RunRows(parts, rows))
  with replace_file(workdir.local / LAYOUT_FILE) as file:
    file.write((json.dumps(layout) + "\n").encode())


def _open_store(workdir: Workdir, enter: Enter) -> RolloutStore:
  """The store; the first process repairs the files of a killed run before the others read them."""

  def open_store(writable: bool) -> RolloutStore:
    folder = workdir.path / ROLLOUTS_FOLDER
    return enter(RolloutStore(folder, workdir=workdir, writable=writable))

  return multihost.run_on_first(lambda: open_store(True), None) or open_store(False)


def _open_writer(
  workdir: Workdir,
  parts: Parts,
  records: tuple[int | None, Any],
  tracked_by: Sequence[str],
) -> MetricWriter:
  """The writer of metrics, which continues after `records`; see `restore.last_records`."""
  config = json.loads(parts.config.to_json_best_effort())
  trackers = [Tracker(name, workdir.local, config) for name in tracked_by]
  return open_writer(
    workdir.local,
    *records,
    trackers=trackers,
    publish=workdir.publish,
    kept=workdir.path,
  )


def _start_graders(parts: Parts, enter: Enter) -> Callable[[], Answers]:
  """Starts graders and environments, and checks them: by all answers, and by the first dialogue."""
  graders, environments = start_pools(parts.config, parts.task, parts.tokenizer, enter)
  check_first_grade(parts.outcome_policy, graders, parts.task)
  check_every_line(parts.outcome_policy, graders, parts.task)
  check_first_dialogue(parts.outcome_policy, environments, parts.task)
  return lambda: parts.make_answers(graders, environments)
