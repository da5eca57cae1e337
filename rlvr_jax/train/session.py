"""Opens a run's workdir, graders, checkpoints and metrics, in order; closes them at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from rlvr_jax.data import Problem
from rlvr_jax.environments.dialogues import EnvironmentPool
from rlvr_jax.fleet.remote import Allowed
from rlvr_jax.rewards.grading import GraderPool
from rlvr_jax.rollouts.sampler import LocalSampler
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.files import JSON, replace_file
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.begin import begin, in_a_thread, make_run, resume, with_fleet
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.workdir import LAYOUT_FILE, Enter, StartFiles, open_workdir
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import EndRequestedError, deadline
from rlvr_jax.train.fleet.policies import PolicyPublisher
from rlvr_jax.train.fleet.roles import WEIGHTS, FleetSampler, identify, trainer_settings
from rlvr_jax.train.generation import raw_logprobs
from rlvr_jax.train.loop import Run, RunState
from rlvr_jax.train.reporting import advice, machines
from rlvr_jax.train.reporting.log import LoggedRun, RunLog
from rlvr_jax.train.reporting.progress import say, warn
from rlvr_jax.train.reporting.writer import MetricWriter, Tracker, open_writer
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.compiler_options import announce_defaults, slow_precision
from rlvr_jax.train.setup.grading import (
  announce_partial_credit,
  check_first_dialogue,
  check_first_grade,
  check_first_messages,
)
from rlvr_jax.train.setup.programs import RowTokens
from rlvr_jax.train.setup.teachers import TeacherError, read_problem
from rlvr_jax.train.start import parameters
from rlvr_jax.train.start.every_line import check_every_line, check_every_problem
from rlvr_jax.train.start.first_params import load_from_other_run, warm_start
from rlvr_jax.train.start.restore import (
  LastRecords,
  describe_layout,
  elapsed_seconds,
  find_resumable,
  last_records,
  restore_sources,
)
from rlvr_jax.train.start.rows import ROWS_FILE, RunRows, read_rows, row_fields, write_rows

ROLLOUTS_FOLDER = "rollouts"


class Session(NamedTuple):
  """A run that is ready for its next update."""

  run: Run
  now: RunState
  workdir: Workdir


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
    stack.enter_context(report_shutdown("rerun the same command to continue"))
    stack.enter_context(deadline())
    config, placement = parts.config, parts.placement
    folder, files = open_workdir(workdir, enter)
    may_differ = checks.may_differ(config, parts.schedule)

    def check() -> RowTokens | None:
      found = _check_workdir(folder, files, config.to_json_best_effort(), may_differ)
      parameters.check_start(config.start, config.lora.adapters, folder.path)
      check_teachers(parts)
      return found

    recorded = multihost.result_of_first(check)
    parts = dataclasses.replace(
      parts, sources=restore_sources(parts.sources, parts.make_sources, folder.local)
    )
    layout = describe_layout(placement, parts.compiler_options, slots=config.sampling.slots)
    rows = RunRows(
      placement,
      parts.shape,
      parts.model.config,
      has_first_phase=parts.method.has_first_phase,
      configured=RowTokens(config.batch.tokens_per_row, config.batch.tokens_per_micro_batch),
      recorded=RowTokens(*recorded) if recorded else None,
      record=functools.partial(_record_rows, folder, layout),
    )
    multihost.run_on_first(lambda: _write_layout(folder, layout | rows.fields), None)
    logged = logged_run(parts)
    raw_logprobs.announce(parts.sources)
    announce_partial_credit(parts.grading.outcome_policy, parts.task, config.environment.name)
    announce_defaults(parts.compiler_options, config.compiler_options)
    if text := slow_precision(parts.model.config.compute_dtype):
      warn(text)
    announce_data(parts.schedule, logged, parts.sources.num_live, config.dynamic_sampling.enabled)
    frozen = parts.initial.frozen()
    warm_starts = enter(Checkpointer(folder.path / "warm_start", keep=1, workdir=folder))
    warm = warm_starts.restore(placement.state.params)
    keep = config.checkpoint.keep
    checkpointer = enter(Checkpointer(folder.path / "checkpoints", keep=keep, workdir=folder))
    store = _open_store(folder, enter)
    resumed = find_resumable(
      checkpointer, placement.state, parts.schedule, store, layout | rows.fields
    )
    no_writer = MetricWriter(folder.local)
    records = last_records(resumed, warm)
    in_json = json.loads(config.to_json_best_effort())
    writer = multihost.run_on_first(
      lambda: enter(_open_writer(folder, records, tracked_by, in_json)), no_writer
    )
    outcome_policy = parts.grading.outcome_policy

    def start() -> tuple[GraderPool, EnvironmentPool | None]:
      graders, environments = parts.start_pools(enter)
      check_first_grade(outcome_policy, graders, parts.task)
      check_every_line(outcome_policy, graders, parts.task)
      check_first_dialogue(outcome_policy, environments, parts.task)
      return graders, environments

    pools = multihost.run_together(start)
    make_answers = functools.partial(parts.make_answers, *pools)
    check_first_messages(
      make_answers(),
      parts.tokenizer,
      parts.shape.max_prompt_length,
      parts.task.held_out,
      parts.task.train,
    )
    # A resumed run whose warm-start folder is gone still has its records.
    records_to = no_writer if resumed else writer
    step = 0  # of the other run that this run starts with
    if warm:
      params, step = warm.state, warm.step
    elif config.start.checkpoint:
      params, step = load_from_other_run(config.start, parts.initial, records_to, warm_starts)
    else:
      params = parts.initial.trained()  # cheap to recompute, so they are not saved
    multihost.run_on_first(files.keep, None)
    # Until here a signal ends the process at once, since there is nothing to save.
    stack.enter_context(multihost.share_shutdown_signals())
    if config.warm_start.num_steps and not warm and not config.start.checkpoint:
      demonstrations = parameters.supervised_batches(
        parts.task.warm_start,
        parts.tokenizer,
        parts.shape,
        batch_size=config.warm_start.batch_size,
        seed=config.seed,
      )
      params = warm_start(
        params,
        frozen.trainer,
        demonstrations,
        config.warm_start.num_steps,
        parts.programs,
        placement,
        records_to,
        warm_starts,
      )
    log = RunLog(
      logged,
      writer,
      elapsed=elapsed_seconds(folder.local),
      profile=enter(machines.Profile(profile, folder.local, folder.path)),
    )
    run = make_run(parts, rows, frozen, log, checkpointer, make_answers, store, initial=params)
    if resumed:
      now = resume(run, resumed)
    else:
      stateful = jax.tree.leaves(placement.state.advantage_state)
      entropy = run.first_entropy(params) if stateful else 0.0
      moments_of = None
      if config.start.optimizer:
        moments_of = parameters.start_folder(config.start.checkpoint, step)
      now = begin(
        run,
        parameters.first_state(
          parts.method, placement.state, params, entropy, moments_of=moments_of
        ),
      )
    del params, warm, resumed  # the run keeps what it needs
    if config.fleet.samplers:
      identity = identify(in_json, may_differ, parts.task.train, parts.tokenizer)
      run = with_fleet(run, _fleet_sampler(parts, run, folder, identity))
    elif parts.schedule.threaded:
      run = in_a_thread(run, config.generation_deadline_s)
    enter(run.sampler)
    yield Session(run, now, folder)


def check_teachers(parts: Parts) -> None:
  """Raises TeacherError unless teachers fit the policy, and problems have what teachers read."""
  try:
    _check_teachers(parts)
  except ValueError as error:
    raise TeacherError(str(error)) from error


def _check_teachers(parts: Parts) -> None:
  for teacher in parts.teachers:
    teacher.check(parts.tokenizer)

  def check(problem: Problem) -> None:
    found = read_problem(parts.config.teacher, problem)
    if parts.teacher_prompts is not None:
      parts.teacher_prompts.encode(problem.question, found["privileged"])

  settings = parts.config.teacher
  if settings.by or settings.privileged:
    check_every_problem(parts.task, check)


def announce_data(
  schedule: Schedule, logged: LoggedRun, groups: int, dynamic_sampling: bool
) -> None:
  """Prints how often a run will see its problems; warns of too many passes over demonstrations.

  Args:
    schedule: the schedule of the run.
    logged: the result of `logged_run`.
    groups: number of groups that this run samples for a batch.
    dynamic_sampling: whether the run replaces some of these groups.
  """
  say(
    advice.planned_passes(
      schedule,
      num_updates=logged.num_updates,
      groups=groups,
      problems=len(logged.task.train),
      dynamic_sampling=dynamic_sampling,
    )
  )
  if text := advice.on_demonstrations(logged.warm_start):
    warn(text)


def logged_run(parts: Parts) -> LoggedRun:
  """The facts about a run that its log needs."""
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
def report_shutdown(remedy: str) -> Iterator[None]:
  """Context that prints the message of an `EndRequestedError` and `remedy`; raises the error again.

  Files that are opened within this context are closed before the message is printed.
  """
  try:
    yield
  except EndRequestedError as error:
    say(f"{error}; {remedy}")
    raise


def _check_workdir(
  workdir: Workdir, files: StartFiles, config_json: str, may_differ: Sequence[str]
) -> RowTokens | None:
  """Raises WorkdirError unless the workdir is new or its run has this configuration.

  Args:
    workdir, files: results of `open_workdir`.
    config_json: the configuration.
    may_differ: fields that a resumed run may change.
  Returns:
    The rows that the run began with, see `read_rows`.
  """
  workdir.fetch()
  rows = read_rows(workdir.local)  # first, since `check_config` may rewrite config.json
  # From here on, a failed start removes the files that it wrote.
  files.check_config(config_json, may_differ)
  if rows is not None and not (workdir.local / ROWS_FILE).exists():
    write_rows(workdir.local, rows)
  return rows


def _record_rows(workdir: Workdir, layout: Mapping[str, JSON], tokens: RowTokens) -> None:
  """Records the rows that were chosen for the first batch; `layout` is the layout without rows."""
  write_rows(workdir.local, tokens)
  _write_layout(workdir, {**layout, **row_fields(tokens)})
  workdir.publish(ROWS_FILE, LAYOUT_FILE)


def _write_layout(workdir: Workdir, layout: Mapping[str, JSON]) -> None:
  """Records the machine that has started or resumed the run, and the layout of work on it."""
  with replace_file(workdir.local / LAYOUT_FILE) as file:
    file.write((json.dumps(layout) + "\n").encode())


def _open_store(workdir: Workdir, enter: Enter) -> RolloutStore:
  """The run's store; the first process repairs files of a killed run before others read them."""

  def open_store(writable: bool) -> RolloutStore:
    folder = workdir.path / ROLLOUTS_FOLDER
    return enter(RolloutStore(folder, workdir=workdir, writable=writable))

  return multihost.run_on_first(lambda: open_store(True), None) or open_store(False)


def _open_writer(
  workdir: Workdir,
  records: LastRecords,
  tracked_by: Sequence[str],
  config: Mapping[str, JSON],
) -> MetricWriter:
  """The writer of metrics.

  Args:
    workdir: the workdir of the run.
    records: the records after which the writer continues, see `restore.last_records`.
    tracked_by: names of `writer.TRACKERS`.
    config: the run's configuration, for the trackers; JSON.
  """
  return open_writer(
    workdir.local,
    *records,
    trackers=[Tracker(name, workdir.local, config) for name in tracked_by],
    publish=workdir.publish,
    kept=workdir.path,
  )


def _fleet_sampler(
  parts: Parts, run: Run, workdir: Workdir, identity: Mapping[str, str]
) -> FleetSampler:
  """The trainer's sampler for a fleet, which exchanges files with it in the workdir.

  Args:
    parts, run, workdir: parts, objects and workdir of the run.
    identity: the result of `identify`.
  """
  if not isinstance(run.sampler, LocalSampler):
    raise TypeError(f"a fleet's trainer needs a LocalSampler, not {type(run.sampler).__name__}")
  config, network = parts.config, parts.model.config
  publisher = PolicyPublisher(
    workdir.path / WEIGHTS,
    network,
    adapters_only=parts.lora is not None,
    workdir=workdir,
    beside=run.checkpointer,
  )
  settings = trainer_settings(
    workdir.path,
    config.fleet,
    Allowed(run.sampler.examples(), network.vocab_size, network.num_experts),
    identity=identity,
    deadline_s=config.generation_deadline_s,
  )
  has_all = lambda: run.batches.position().number >= config.num_updates
  return FleetSampler(settings, publisher, run.policies, workdir, has_all)
