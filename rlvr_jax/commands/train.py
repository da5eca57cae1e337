"""The command train: opens the workdir, starts or resumes the run, trains, and reports."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlvr_jax.bucket import ChangedError
from rlvr_jax.data import Task
from rlvr_jax.data.batches import PromptError
from rlvr_jax.files import DamagedFileError, replacing
from rlvr_jax.rewards.outcome import GradingStoppedError
from rlvr_jax.rewards.pool import GraderPool
from rlvr_jax.rewards.worker_process import GraderStartError
from rlvr_jax.rollouts.queue import FingerprintError
from rlvr_jax.rollouts.store import RolloutStore, StoreError, TornShardError
from rlvr_jax.storage import Workdir
from rlvr_jax.train import (
  checks,
  multihost,
  observe,
  parameters,
  raw_logprobs,
  trackers,
  warm_start_cache,
)
from rlvr_jax.train.async_generator import GeneratorStoppedError
from rlvr_jax.train.build import Parts
from rlvr_jax.train.checkpoint import Checkpointer, Restored
from rlvr_jax.train.checkpoint_files import CheckpointError
from rlvr_jax.train.generator import AgreementError, DynamicSamplingError
from rlvr_jax.train.grading import announce_partial_credit, check_first_grade, grader_pool
from rlvr_jax.train.host import EndRequestedError, deadline
from rlvr_jax.train.loop import Trainer
from rlvr_jax.train.metrics import MetricWriter, progress, say
from rlvr_jax.train.report import write_report
from rlvr_jax.train.restore import as_begun, elapsed_seconds, layout_of, records_of, resumable
from rlvr_jax.train.warm_start import warm_start
from rlvr_jax.train.workdir import LAYOUT_FILE, StartFiles, WorkdirError, opened
from rlvr_jax.types import Params

ROLLOUTS_FOLDER = "rollouts"


# Errors that end a run with a message that says how to fix it, not with a traceback.
FAILURES = (
  AgreementError,
  ChangedError,
  CheckpointError,
  DamagedFileError,
  DynamicSamplingError,
  FingerprintError,
  FloatingPointError,
  GeneratorStoppedError,
  GraderStartError,
  GradingStoppedError,
  OSError,
  PromptError,
  StoreError,
  TornShardError,
  WorkdirError,
  multihost.OtherProcessError,
)


def train(
  parts: Parts, workdir: str | Path, *, profile: str = "", tracked_by: Sequence[str] = ()
) -> dict[str, float]:
  """Starts or resumes the training of `build(config)`.

  Args:
    parts: parts of the run.
    workdir: folder of all files of the run, or gs://BUCKET/FOLDER; after a kill the same call
      resumes there.
    profile: first and last update of a trace by jax.profiler, such as "10:13"; "" for none.
    tracked_by: names of `trackers.TRACKERS`.
  Returns:
    The values of the last evaluation.
  Raises:
    EndRequestedError: a signal asked the run to end before its last update; it has been saved.
    WorkdirError: the workdir belongs to another configuration or process.
    OtherProcessError: another process of the run failed with one of these.
    NonFiniteError: `config.max_skipped_in_a_row` updates in a row were skipped.
  """
  config = parts.config
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.only_first_prints())
    stack.enter_context(_saying_why())
    stack.enter_context(deadline())
    folder, files = _opened(workdir, parts, enter)
    workdir = folder.local
    parts = as_begun(parts, workdir)
    _announce(parts)
    frozen = parameters.load_frozen(parts)
    saved = lambda name, keep: enter(Checkpointer(folder.kept / name, keep=keep, workdir=folder))
    warm_starts = saved("warm_start", 1)
    warm = warm_starts.restore(parts.abstract_state.params)
    checkpointer = saved("checkpoints", config.checkpoint.keep)
    store = _store(folder, enter)
    restored = resumable(checkpointer, parts, store)
    records, no_writer = records_of(restored, warm), multihost.NoWriter(workdir)
    writer = multihost.on_first(
      lambda: enter(_writer(folder, config, records, tracked_by)), no_writer
    )
    pool = multihost.together(lambda: _graders(config, parts.task, enter))
    # A resumed run whose warm-start folder is gone still has its records.
    records_to = no_writer if restored else writer
    params, cold = first_params(parts, warm, records_to, warm_starts)
    multihost.on_first(files.begin, None)
    # Before this, a signal ends the process at once: there was nothing to save.
    stack.enter_context(multihost.ending_in_order())
    if cold:
      params = warm_started(parts, params, frozen.trainer, records_to, warm_starts)
    elapsed = elapsed_seconds(workdir)
    trainer = Trainer(
      *(parts, frozen, writer, checkpointer, pool, store), initial=params, elapsed=elapsed
    )
    trainer.log.profile = enter(observe.Profile(profile, workdir, folder.kept))
    trainer.resume(restored) if restored else trainer.begin(params)
    del params, warm, restored  # the trainer keeps what it needs
    trainer.run()
    if multihost.is_first():
      say(write_report(workdir, folder.kept))
  return trainer.evaluation


def _announce(parts: Parts) -> None:
  """Says what a reader of the configuration may overlook."""
  raw_logprobs.announce(parts)
  announce_partial_credit(parts.config, parts.task)


@contextlib.contextmanager
def _saying_why() -> Iterator[None]:
  """Prints where the run was when it was asked to end, once its files are closed."""
  try:
    yield
  except EndRequestedError as error:
    say(f"{error}; rerun the same command to continue")
    raise


def _opened(workdir: str | Path, parts: Parts, enter: Any) -> tuple[Workdir, StartFiles]:
  folder, files = opened(workdir, enter)
  multihost.on_first(lambda: _check_config(folder, files, parts), None)
  return folder, files


def _check_config(workdir: Workdir, files: StartFiles, parts: Parts) -> None:
  workdir.fetch()
  allowed = checks.may_differ(parts.config, parts.schedule)
  files.check_config(parts.config.to_json_best_effort(), allowed)  # now a failure leaves nothing
  parameters.check_start(parts.config, workdir.kept)
  warm_start_cache.check(parts.config)
  with replacing(workdir.local / LAYOUT_FILE) as file:
    file.write((json.dumps(layout_of(parts)) + "\n").encode())


def _store(workdir: Workdir, enter: Any) -> RolloutStore:
  """The first process repairs the files of a killed run before the others read them."""
  opened = functools.partial(RolloutStore, workdir.kept / ROLLOUTS_FOLDER, workdir=workdir)
  first = multihost.on_first(lambda: enter(opened(writable=True)), None)
  return first or enter(opened(writable=False))


def _writer(
  workdir: Workdir, config: Any, records: tuple[int | None, Any], tracked_by: Sequence[str]
) -> MetricWriter:
  """The writer of a run that continues after these records, see `records_of`."""
  opened = [trackers.Tracker(name, workdir.local, config) for name in tracked_by]
  return MetricWriter(
    workdir.local, *records, trackers=opened, publish=workdir.publish, kept=workdir.kept
  )


def _graders(config: Any, task: Task, enter: Any) -> GraderPool:
  """The grading processes, which have graded the first problem."""
  pool = enter(grader_pool(config, task))
  check_first_grade(config, pool, task)
  return pool


def first_params(
  parts: Parts, warm: Restored | None, writer: MetricWriter, warm_starts: Checkpointer
) -> tuple[Any, bool]:
  """The trained parameters before the first update, and whether a warm start is still to be done.

  In that case they come with the state of its optimizer. `warm` are those of an earlier process.
  """
  if warm:
    return warm.state, False
  if parts.config.start.checkpoint:
    return started(parts, writer, warm_starts), False
  if parts.config.warm_start.num_steps:
    return parameters.supervised_state(parts), True
  return parameters.initial_params(parts), False  # cheap to recompute, so they are not saved


def started(parts: Parts, writer: MetricWriter, checkpointer: Checkpointer) -> Params:
  """The policy of `config.start`, saved: a resumed run does not need the other run any more."""
  folder = parameters.start_folder(parts.config)
  params, step = parameters.chosen_params(parts, folder)
  moments = " and its optimizer's moments" if parts.config.start.optimizer else ""
  say(f"starts with the policy of {folder}, after {step} updates there{moments}")
  checkpointer.save(step, params, host={"written": writer.written(0)})
  checkpointer.wait()
  return params


def warm_started(
  parts: Parts,
  state: tuple[Params, Any],
  frozen: Params,
  writer: MetricWriter,
  checkpointer: Checkpointer,
) -> Params:
  """The initial parameters after the supervised phase, saved as a separate checkpoint.

  They are taken from `config.warm_start.cache`, or trained, and then saved there too.

  Args:
    state: from `parameters.supervised_state`.
  Raises:
    EndRequestedError: the process was asked to end meanwhile; the phase begins again then.
  """
  with multihost.phase("the warm start"), contextlib.ExitStack() as stack:
    entry = None
    if parts.config.warm_start.cache:
      entry = warm_start_cache.Entry(parts, state, frozen)
      stack.enter_context(entry.claimed())
    if found := entry and entry.load():
      say(f"takes the warm start {entry.path}")
      for index, loss in found.losses:
        _record(writer, index, loss)
    else:
      found = trained(parts, state, frozen, writer)
      if entry:
        entry.save(found)
  checkpointer.save(
    parts.config.warm_start.num_steps, found.params, host={"written": writer.written(0)}
  )
  checkpointer.wait()
  return found.params


def trained(
  parts: Parts, state: tuple[Params, Any], frozen: Params, writer: MetricWriter
) -> warm_start_cache.Trained:
  """The supervised phase; arguments as of `warm_started`."""
  num_steps, losses = parts.config.warm_start.num_steps, list[tuple[int, float]]()
  with progress(num_steps, "warm start", unit="step") as bar:

    def report(index: int, loss: float) -> None:
      bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
      bar.update(index - bar.n)
      losses.append((index, loss))
      _record(writer, index, loss)
      multihost.end_if_asked()

    params = warm_start(
      state,
      frozen,
      map(parts.to_devices, parameters.supervised_batches(parts)),
      parts.programs.supervised_step,
      num_steps=num_steps,
      report=report,
    )
  return warm_start_cache.Trained(params, losses)


def _record(writer: MetricWriter, index: int, loss: float) -> None:
  writer.write(index, "warm_start", {"warm_start/loss": loss})
