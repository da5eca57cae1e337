"""The training loop on the host: offer a policy, open and take batches, update, evaluate, save.

Nothing numerical happens here: updates are in `update.step`, sampling in `rollouts.decoder`.

The order within a step is fixed: a killed and resumed run repeats the uninterrupted one bit for bit
on the same kind of machine with the same versions. A warm start, if any, comes before this loop.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from rlvr_jax.evaluate.held_out import accuracy, evaluate_problems
from rlvr_jax.rollouts.batches import Batch, Batches, Position
from rlvr_jax.rollouts.group import Policy
from rlvr_jax.rollouts.sampler import LocalSampler, SamplerStoppedError, ThreadSampler
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.host_state import HostState
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import (
  EndRequestedError,
  restart_deadline,
  return_freed_memory,
)
from rlvr_jax.train.fleet.roles import FleetSampler
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.generation.scoring import Scorer
from rlvr_jax.train.reporting.log import RunLog, check_state
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.programs import is_on_cpu
from rlvr_jax.train.start.parameters import Frozen
from rlvr_jax.train.start.restore import describe_layout
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params, TrainState


class RunState(NamedTuple):
  """Where a run stands: all that changes from update to update."""

  step: int  # number of updates so far
  state: TrainState  # donated by the next update
  position: Position  # of drawing, behind the last batch that was complete at the last update
  counters: Mapping[str, float]  # of the run log, likewise
  evaluation: Mapping[str, float] = {}  # the last one
  evaluated: int = -1  # number of updates before it


@dataclasses.dataclass(frozen=True)
class Run:
  """The objects of a run that its loop uses.

  Attributes:
    parts: what the run is.
    rows: where its rollouts lie in rows.
    frozen: the parameters that are not trained.
    policies: makes policies to sample with.
    sampler: samples and grades.
    rest: called when a batch was taken; lets policies go that are not needed before the next offer.
    batches: in order, of the groups that the sampler gives.
    store: of batches.
    scorer: computes log-probabilities of batches.
    first_entropy: (parameters) → their entropy on the first prompts, nats per token.
    held_out_sampler: of evaluations.
    log: counts, and writes records.
    checkpointer: saves checkpoints.
  """

  parts: Parts
  rows: RunRows
  frozen: Frozen
  policies: Policies
  sampler: LocalSampler | ThreadSampler | FleetSampler
  rest: Callable[[], None]
  batches: Batches
  store: RolloutStore
  scorer: Scorer
  first_entropy: Callable[[Params], float]
  held_out_sampler: LocalSampler
  log: RunLog
  checkpointer: Checkpointer


def train(run: Run, now: RunState) -> RunState:
  """Runs updates until the last one. A killed and resumed run repeats the uninterrupted one.

  Raises:
    EndRequestedError: shutdown was requested before the last update; the run has been saved.
    SamplerStoppedError: there was no next batch; the run has been saved.
  """
  total = run.parts.config.num_updates
  try:
    now = evaluate_and_save(run, now)  # where a shutdown has interrupted the last evaluation
    for step in range(now.step, total):
      run.log.before_update(step + 1)
      with multihost.phase("generation"):
        multihost.raise_if_shutdown_requested()
        batch = next_batch(run, now)
      with multihost.phase("an update"):
        now = update(run, now, batch)
      now = evaluate_and_save(run, now)
  except EndRequestedError as request:
    say(f"{request}; saving")
    save(run, now)
    raise EndRequestedError(f"shutdown requested: saved after update {now.step}") from request
  except SamplerStoppedError as error:
    say(f"{error}; saving")  # printed first, in case the devices hang too
    save(run, now)
    raise
  return now


def next_batch(run: Run, now: RunState) -> Batch:
  """The graded batch of the next update, which this trainer's policies have sampled."""
  schedule, step, total = run.parts.schedule, now.step, run.parts.config.num_updates
  if schedule.refreshes(step):
    with run.log.measure("time/sync_weights_seconds"):
      run.sampler.offer(run.policies.make(now.state.params, step))
  limit = schedule.limit(step)
  run.batches.open(until=min(limit, total) if schedule.threaded else limit, version=step)
  number = schedule.batch(step)
  if not run.batches.has(number):
    end_update(run)  # so that its time does not include the wait
  batch = run.batches.take(number)
  run.rest()
  run.policies.check(batch, run.store.directory)
  return batch


def update(run: Run, now: RunState, batch: Batch) -> RunState:
  """Dispatches one update, then waits for the record of the previous one."""
  parts, programs, schedule = run.parts, run.parts.programs, run.parts.schedule
  if is_on_cpu(parts.placement.mesh):
    run.log.finish_update()  # so that its buffer is free before this update takes one
  prepared = run.scorer.prepare(batch, now.state, now.step)
  dispatched = time.perf_counter()
  on_devices = run.rows.placement(lambda: prepared).pack_to_devices(prepared)
  return_freed_memory()
  measured, arrays = run.scorer.measure(now.state, on_devices, now.step)
  state, metrics = programs.train_step(now.state, run.frozen.trainer, on_devices)
  if measured:
    entropy = programs.mean_entropy(state.params, run.frozen.trainer, on_devices)
    metrics |= measured | {"policy/entropy_change": entropy - metrics["policy/entropy"]}
  step = now.step + 1
  first = schedule.first(step)
  run.batches.forget(before=first)
  run.scorer.forget(before=first)
  if step < parts.config.num_updates:
    oldest = min(schedule.oldest_sampling(step), schedule.oldest_trained(step))
    run.policies.forget(before=oldest)
  counters = run.log.write_update(
    step,
    prepared,
    metrics,
    statistics=batch.statistics,
    dispatched=dispatched,
    geometry=arrays,
    adapters=state.params if parts.lora else None,
  )
  return now._replace(step=step, state=state, position=run.batches.position(), counters=counters)


def end_update(run: Run) -> None:
  """Waits for the last update; its buffer is then free for what comes next."""
  run.log.finish_update()
  return_freed_memory()


# --- evaluation and checkpoints -------------------------------------------------------------------


def evaluate_and_save(run: Run, now: RunState) -> RunState:
  """Evaluates the policy and saves the run, as far as that is due after this many updates."""
  if evaluation_is_due(run, now):
    now = evaluate(run, now)
    save(run, now)
  elif now.step % run.parts.config.checkpoint.every == 0 or at_long_refresh(run, now):
    save(run, now)
  return now


def evaluation_is_due(run: Run, now: RunState) -> bool:
  """Whether the policy is still to be evaluated after this many updates."""
  c = run.parts.config
  last = now.step == c.num_updates
  return now.step != now.evaluated and (last or now.step % c.evaluation.every == 0)


def at_long_refresh(run: Run, now: RunState) -> bool:
  """Whether more batches are sampled now than there are updates between checkpoints.

  A checkpoint is then saved first, so that damaged batches can be sampled again from it.
  """
  c, schedule = run.parts.config, run.parts.schedule
  if now.step == c.num_updates or schedule.threaded:
    return False
  return schedule.samples(now.step) > c.checkpoint.every


def evaluate(run: Run, now: RunState) -> RunState:
  """Measures held-out accuracy with the current parameters."""
  end_update(run)
  settings, began, batches = run.parts.config.evaluation, time.perf_counter(), []
  with multihost.phase("an evaluation"):
    for batch in evaluate_problems(
      run.held_out_sampler,
      Policy(now.step, now.state.params, lambda: ""),
      run.parts.task.held_out,
      batch_size=settings.batch_prompts,
      seed=settings.seed,
    ):
      batches.append(batch)
      restart_deadline()
  samples = [row for batch in batches for row in batch.samples]
  evaluation = accuracy(
    samples,
    ks=settings.ks,
    seed=settings.seed,
    max_turns=run.parts.config.environment.max_turns,
    best_play=run.parts.task.best_play,
  )
  prompts = np.concatenate([batch.prompt_lengths for batch in batches])
  responses = np.concatenate([batch.response_lengths for batch in batches])
  sampled = np.concatenate([batch.sampled_lengths for batch in batches])
  counters = run.log.write_evaluation(
    now.step, evaluation, samples, (prompts, responses, sampled), began=began
  )
  return now._replace(evaluation=evaluation, evaluated=now.step, counters=counters)


def save(run: Run, now: RunState) -> None:
  """Saves everything that determines the rest of the run, except the rollouts in the store."""
  end_update(run)
  check_state(now.state, now.step)
  c, schedule = run.parts.config, run.parts.schedule
  scored_at, arrays = run.scorer.state()
  host = HostState(
    position=now.position,
    counters=dict(now.counters),
    evaluation=dict(now.evaluation),
    evaluated=now.evaluated,
    layout=describe_layout(run.parts, run.rows),
    fingerprints=run.policies.state(),
    scored_at=scored_at,
    written=run.log.writer.written(now.step),
  )
  measured = now.evaluated == now.step
  run.checkpointer.save(
    now.step,
    now.state,
    host=host.to_json(),
    arrays=arrays,
    metric=now.evaluation[f"eval/pass@{c.evaluation.ks[0]}"] if measured else None,
    keep_at_or_before=oldest_to_return_to(schedule, now),
  )
  complete = run.checkpointer.steps()[-c.checkpoint.keep :]
  if complete and not c.store.keep_used:
    # Batches that a run resumed from the last checkpoints may train on are kept.
    needed = schedule.first(complete[0])
    multihost.run_on_first(lambda: remove_used(run.store, needed), None)


def oldest_to_return_to(schedule: Schedule, now: RunState) -> int | None:
  """The update from which the pending batches can be sampled again; None if there are none."""
  if schedule.recorded is not None and schedule.recorded.has_several:  # see `find_resumable`
    return 0
  first = schedule.first(now.step)
  if first >= now.position.number:
    return None
  return schedule.oldest_version(first, update=now.step)


def remove_used(store: RolloutStore, before: int) -> None:
  """Removes batches with a lower number from the store."""
  store.remove(*(number for number in store.numbers() if number < before))
