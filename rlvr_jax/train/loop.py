"""The host's training loop: offers policies to samplers, takes batches, updates, evaluates, saves.

Nothing numerical happens here: updates are in `update.step`, sampling in `rollouts.decoder`.

The order within a step is fixed. So a killed and resumed run repeats an uninterrupted run bit for
bit, on the same kind of machine with the same versions. A warm start, if any, comes before this
loop.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlvr_jax.rollouts.batches import Batch, Batches, Position
from rlvr_jax.rollouts.sampler import LocalSampler, SamplerStoppedError, ThreadSampler
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.rollouts.store import RolloutStore, TornShardError
from rlvr_jax.storage.files import JSON
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.host_state import HostState
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import EndRequestedError, return_freed_memory
from rlvr_jax.train.evaluation import Evaluation
from rlvr_jax.train.fleet.roles import FleetSampler
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.generation.scoring import Scorer
from rlvr_jax.train.reporting.log import RunLog, check_state
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.initial_params import Frozen
from rlvr_jax.train.setup.programs import Programs
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params, TrainState


class RunState(NamedTuple):
  """The state of a run: everything that changes from update to update."""

  step: int  # number of updates so far
  state: TrainState  # donated by the next update
  position: Position  # the state of drawing problems after the last complete batch
  counters: Mapping[str, float]  # the totals that the run log had after the last update
  evaluation: Mapping[str, float] = {}  # results of the last evaluation
  evaluated: int = -1  # number of updates before the last evaluation


class Plan(NamedTuple):
  """When a run samples, saves and ends, and what it keeps."""

  num_updates: int
  schedule: Schedule
  save_every: int  # number of updates between checkpoints
  keep: int  # number of latest checkpoints that are kept
  keeps_used: bool  # whether the store keeps batches that no resumed run needs
  reads_first: bool  # whether an update's metrics are read before the next update is prepared

  def saves(self, step: int) -> bool:
    """Whether the run is saved after `step` updates.

    The run is saved every `save_every` updates, and before a refresh that samples more than
    `save_every` batches. If one of these batches is damaged, a resumed run samples the batch again,
    from the checkpoint before the refresh.
    """
    if step % self.save_every == 0:
      return True
    if step == self.num_updates or self.schedule.threaded:
      return False
    return self.schedule.samples(step) > self.save_every


@dataclasses.dataclass(frozen=True)
class Run:
  """The objects of a run that the training loop uses.

  Attributes:
    plan: when the run samples, saves and ends.
    programs: the jitted functions.
    rows: the row layout of the run's rollouts.
    frozen: the parameters that are not trained.
    policies: makes policies to sample with.
    sampler: samples and grades groups.
    batches: assembles batches in order from the sampler's groups.
    store: the store of batches.
    scorer: computes log-probabilities of batches.
    first_entropy: parameters → the policy's entropy on the first prompts, nats per token.
    evaluation: measures held-out accuracy.
    log: counts, and writes records.
    checkpointer: saves checkpoints.
    layout: the machine and layout of this start, from `restore.describe_layout`.
  """

  plan: Plan
  programs: Programs
  rows: RunRows
  frozen: Frozen
  policies: Policies
  sampler: LocalSampler | ThreadSampler | FleetSampler
  batches: Batches
  store: RolloutStore
  scorer: Scorer
  first_entropy: Callable[[Params], float]
  evaluation: Evaluation
  log: RunLog
  checkpointer: Checkpointer
  layout: Mapping[str, JSON]


def train(run: Run, now: RunState) -> RunState:
  """Runs all updates that are left. A killed and resumed run repeats an uninterrupted run.

  Raises:
    EndRequestedError: shutdown was requested before the last update; the run has been saved.
    SamplerStoppedError: the sampler gave no next batch; the run has been saved.
  """
  try:
    now = evaluate_and_save(run, now)  # in case a shutdown has interrupted the last evaluation
    for step in range(now.step, run.plan.num_updates):
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
  """The graded batch of the next update, after checking that this trainer's policies sampled it."""
  schedule, step, total = run.plan.schedule, now.step, run.plan.num_updates
  if schedule.refreshes(step):
    with run.log.measure("time/sync_weights_seconds"):
      run.sampler.offer(run.policies.make(now.state.params, step))
  limit = schedule.limit(step)
  run.batches.open(until=min(limit, total) if schedule.threaded else limit, version=step)
  # The last update ends first, so that its time does not include the wait.
  batch = run.batches.take(schedule.batch(step), before_waiting=lambda: end_update(run.log))
  for new in run.batches.added():
    run.log.count_sampled(new, step)
  if isinstance(run.sampler, LocalSampler):  # else sampling goes on during the update
    run.sampler.rest()
    run.policies.rest()
  run.policies.check(batch, run.store.directory)
  return batch


def update(run: Run, now: RunState, batch: Batch) -> RunState:
  """Dispatches one update, then waits for the record of the previous update."""
  plan, programs, frozen = run.plan, run.programs, run.frozen.trainer
  if plan.reads_first:
    run.log.finish_update()
  prepared = run.scorer.prepare(batch, now.state, now.step)
  dispatched = time.perf_counter()
  on_devices = run.rows.placement(lambda: prepared).pack_to_devices(prepared)
  return_freed_memory()
  measured, arrays = run.scorer.measure(now.state, on_devices, now.step)
  state, metrics = programs.train_step(now.state, frozen, on_devices, run.scorer.teacher)
  if measured:
    entropy = programs.mean_entropy(state.params, frozen, on_devices)
    metrics |= measured | {"policy/entropy_change": entropy - metrics["policy/entropy"]}
  step = now.step + 1
  first = plan.schedule.first(step)
  run.batches.forget(before=first)
  run.scorer.forget(before=first)
  if step < plan.num_updates:
    oldest = min(plan.schedule.oldest_sampling(step), plan.schedule.oldest_trained(step))
    run.policies.forget(before=oldest)
  counters = run.log.write_update(
    step,
    prepared,
    metrics,
    statistics=batch.statistics,
    dispatched=dispatched,
    geometry=arrays,
    adapters=state.params if frozen else None,
  )
  return now._replace(step=step, state=state, position=run.batches.position(), counters=counters)


def end_update(log: RunLog) -> None:
  """Waits for the last update, after which its buffers are free."""
  log.finish_update()
  return_freed_memory()


# --- evaluation and checkpoints -------------------------------------------------------------------


def evaluate_and_save(run: Run, now: RunState) -> RunState:
  """Evaluates the policy and saves the run if an evaluation is due; else saves if a save is due."""
  is_due = run.evaluation.is_due(now.step, run.plan.num_updates)
  if is_due and now.step != now.evaluated:
    now = evaluate(run, now)
    save(run, now)
  elif run.plan.saves(now.step):
    save(run, now)
  return now


def evaluate(run: Run, now: RunState) -> RunState:
  """Measures held-out accuracy with the current parameters."""
  end_update(run.log)
  began = time.perf_counter()
  with multihost.phase("an evaluation"):
    found = run.evaluation.measure(now.state.params, now.step)
  counters = run.log.write_evaluation(
    now.step, found.values, found.samples, found.lengths, began=began
  )
  return now._replace(evaluation=found.values, evaluated=now.step, counters=counters)


def save(run: Run, now: RunState) -> None:
  """Saves everything that the rest of the run depends on, except rollouts in the store."""
  end_update(run.log)
  check_state(now.state, now.step)
  scored_at, arrays = run.scorer.state()
  host = HostState(
    position=now.position,
    counters=dict(now.counters),
    evaluation=dict(now.evaluation),
    evaluated=now.evaluated,
    layout={**run.layout, **run.rows.fields},
    fingerprints=run.policies.state(),
    scored_at=scored_at,
    written=run.log.writer.written(now.step),
  )
  measured = now.evaluated == now.step
  return_to = oldest_to_return_to(run.plan.schedule, now)
  run.checkpointer.save(
    now.step,
    now.state,
    host=host.to_json(),
    arrays=arrays,
    metric=now.evaluation[run.evaluation.metric] if measured else None,
    keep_at_or_before=return_to,
  )
  steps = run.checkpointer.steps()
  if steps and not run.plan.keeps_used:
    needed = run.plan.schedule.first(oldest_resumed(steps, run.plan.keep, return_to))
    multihost.run_on_first(lambda: remove_used(run.store, needed), None)


def oldest_resumed(steps: Sequence[int], keep: int, return_to: int | None) -> int:
  """The oldest checkpoint from which a run may resume, and so train on batches after it.

  Args:
    steps: steps of the complete checkpoints, ascending; at least one.
    keep: number of the latest checkpoints.
    return_to: the result of `oldest_to_return_to`.
  """
  earlier = [step for step in steps if return_to is not None and step <= return_to]
  return min([*steps[-keep:], *earlier[-1:]])


def oldest_to_return_to(schedule: Schedule, now: RunState) -> int | None:
  """The update from whose checkpoint all pending batches can be sampled again.

  Pending batches have been sampled for later updates. The result is 0 if the run repeats a recorded
  run that has a batch sampled by several versions of the policy. Otherwise the result is None if no
  batch is pending.
  """
  if schedule.recorded is not None and schedule.recorded.has_several:  # see `find_resumable`
    return 0
  first = schedule.first(now.step)
  if first >= now.position.number:
    return None
  return schedule.oldest_version(first, update=now.step)


def remove_used(store: RolloutStore, before: int) -> None:
  """Removes batches with numbers below `before` from the store; sets damaged batches aside."""
  for number in store.numbers():
    if number >= before:
      return
    try:
      store.remove(number)
    except TornShardError:
      store.set_aside(number)
