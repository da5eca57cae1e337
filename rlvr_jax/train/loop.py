"""The training loop on the host: offer weights; then take → update → offer → evaluate → save.

The policy samples the batches of its schedule, and graders score them while the devices continue.
Each batch goes through the store to one or more updates, whose metrics are logged. At intervals the
policy is evaluated, and everything that determines the rest of the run is saved. Nothing numerical
happens here: updates are in `update.step`, sampling in `rollouts.decoder`.

The order within a step is fixed: a killed and resumed run repeats the uninterrupted one bit for bit
on the same kind of machine with the same versions. A warm start, if any, comes before this loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from rlvr_jax.evaluate.held_out import accuracy, evaluate_problems
from rlvr_jax.rollouts.batch import Position
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.queue import RolloutQueue
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.host_state import HostState
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import (
  EndRequestedError,
  restart_deadline,
  return_freed_memory,
)
from rlvr_jax.train.fleet.generation import collector_of_graded
from rlvr_jax.train.fleet.roles import start_fleet
from rlvr_jax.train.generation import modes
from rlvr_jax.train.generation.async_generator import GeneratorStoppedError
from rlvr_jax.train.generation.generator import Generator
from rlvr_jax.train.generation.policies import lazy_fingerprint, sync_weights
from rlvr_jax.train.generation.scoring import Scorer
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.reporting.run_log import DispatchedUpdate, RunLog, check_state
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.programs import is_on_cpu
from rlvr_jax.train.start import parameters
from rlvr_jax.train.start.restore import Resumed, describe_layout
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params, TrainState


class RunState(NamedTuple):
  """Where a run stands: what changes from update to update, besides the queue and the log."""

  step: int  # number of updates so far
  state: TrainState  # donated by the next update
  position: Position  # of generation, after the last batch taken
  evaluation: Mapping[str, float] = {}  # the last one
  evaluated: int = -1  # number of updates before it


@dataclasses.dataclass(frozen=True)
class Trainer:
  """The phases of the loop, and the objects that they use.

  Attributes:
    parts: the run's parts.
    rows: where its rollouts lie in rows.
    frozen: the parameters that are not trained.
    generator: makes batches.
    queue: batches that updates will train on.
    scorer: computes log-probabilities of batches.
    collector: encodes, decodes and grades.
    log: counts, and writes records.
    checkpointer: saves checkpoints.
    workdir: of the run; None where no other program reads it.
  """

  parts: Parts
  rows: RunRows
  frozen: parameters.Frozen
  generator: Generator
  queue: RolloutQueue
  scorer: Scorer
  collector: Collector
  log: RunLog
  checkpointer: Checkpointer
  workdir: Workdir | None = None

  def run(self, now: RunState) -> RunState:
    """Runs updates until the last one.

    Raises:
      EndRequestedError: shutdown was requested before the last update; the run has been saved.
      GeneratorStoppedError: there was no next batch; the run has been saved.
    """
    c, total = self.parts.config, self.parts.config.num_updates
    with contextlib.ExitStack() as stack:
      try:
        if self.evaluation_is_due(now):  # a shutdown has interrupted the last one
          now = self.evaluate(now)
          self.save(now)
        generation = stack.enter_context(contextlib.closing(self.start_generation()))
        self.offer_weights(now, generation)
        for step in range(now.step, total):
          self.log.before_update(step + 1)
          with self.undo_if_interrupted():
            now = self.update(self.take_batches(now, generation))
          self.offer_weights(now, generation)
          if due := self.evaluation_is_due(now):
            now = self.evaluate(now)
          if due or now.step % c.checkpoint.every == 0 or self.at_long_refresh(now):
            self.save(now)
      except EndRequestedError as request:
        say(f"{request}; saving")
        self.save(now)
        raise EndRequestedError(f"shutdown requested: saved after update {now.step}") from request
      except GeneratorStoppedError as error:
        say(f"{error}; saving")  # printed first, in case the devices hang too
        self.save(now)
        raise
    return now

  # --- start --------------------------------------------------------------------------------------

  def begin(self, params: Params) -> RunState:
    """Evaluates and saves step 0."""
    entropy = self.scorer.initial_entropy(params, self.collector)
    state = parameters.first_state(self.parts, params, entropy)
    now = self.evaluate(RunState(0, state, self.generator.position()))
    self.save(now)
    return now

  def resume(self, resumed: Resumed) -> RunState:
    """Continues from a checkpoint."""
    host, position = resumed.host, resumed.host.position
    self.log.rewind(host.counters)
    self.log.remember_evaluation(host.evaluation)
    missing = self.queue.restore(host.queue, resumed.arrays or {}, resumed.damaged)
    if missing is not None:
      # It is sampled again, so generation goes on after the batch before it.
      before = self.queue.store.info(missing - 1)["after"] if missing else None
      position = Position(**before) if before else self.generator.position()
    self.generator.move_to(position)
    say(
      f"resumed at update {resumed.step}: parameters, optimizer and algorithm state,"
      f" {self.log.counters['batches']} batches of prompts sampled, {len(self.queue)} batches of"
      " rollouts pending"
    )
    return RunState(resumed.step, resumed.state, position, host.evaluation, host.evaluated)

  def start_generation(self) -> modes.Generation:
    """Generation from the generator's position on."""
    c = self.parts.config
    if c.fleet.samplers:
      assert self.workdir is not None  # where samplers find the run
      return start_fleet(self.parts, self.generator, self.queue, self.checkpointer, self.workdir)
    return modes.start(
      self.generator,
      self.parts.schedule,
      deadline_s=c.generation_deadline_s,
      num_updates=c.num_updates,
    )

  # --- one update ---------------------------------------------------------------------------------

  def offer_weights(self, now: RunState, generation: modes.Generation) -> None:
    """Syncs the weights to the devices that generate, if the schedule samples from this policy."""
    if now.step == self.parts.config.num_updates or not self.parts.schedule.refreshes(now.step):
      return
    # The policy that samples has to match these parameters.
    checksums = self.parts.programs.checksums(now.state.params)
    self.queue.record(now.step, lazy_fingerprint(checksums))
    began = time.perf_counter()
    policy = sync_weights(self.parts, self.frozen.sampler, now.state.params, now.step)
    self.log.add_measurement("time/sync_weights_seconds", time.perf_counter() - began)
    generation.offer(policy)

  def take_batches(self, now: RunState, generation: modes.Generation) -> RunState:
    """Takes the graded batches that are due before the next update."""
    position = now.position
    with multihost.phase("generation"):
      multihost.raise_if_shutdown_requested()
      # Before a wait the last update's metrics are read, so that its time does not include it.
      for batch in generation.take(self.parts.schedule.batch(now.step), self._end_update):
        assert batch.position is not None  # every batch that was generated has one
        self.log.count_sampled(batch, now.step)
        self.queue.put(batch)
        position = batch.position
    return now._replace(position=position)

  def _end_update(self) -> None:
    """Reads the last update's metrics; its buffer is then free for what comes next."""
    self.log.read_update()
    return_freed_memory()

  def update(self, now: RunState) -> RunState:
    """Dispatches one update, then reads the metrics of the previous one."""
    schedule, programs = self.parts.schedule, self.parts.programs
    number = schedule.batch(now.step)
    with multihost.phase("an update"):
      if is_on_cpu(self.parts.placement.mesh):
        self.log.read_update()  # so that its buffer is free before this update takes one
      self.queue.check_fingerprint(number)
      rollouts = multihost.run_together(lambda: self.queue.load(number))
      assert rollouts.graded is not None  # a loaded batch has its contents
      statistics = rollouts.graded.statistics
      rollouts, batch = self.scorer.prepare(rollouts, now.state, now.step)
      self.queue.update(rollouts)
      dispatched = time.perf_counter()
      on_devices = self.rows.placement(batch).pack_to_devices(batch)
      return_freed_memory()
      measured, arrays = self.scorer.measure(now.state, on_devices, now.step)
      state, metrics = programs.train_step(now.state, self.frozen.trainer, on_devices)
      if measured:
        entropy = programs.mean_entropy(state.params, self.frozen.trainer, on_devices)
        metrics |= measured | {"policy/entropy_change": entropy - metrics["policy/entropy"]}
      self.log.count_trained(batch, state.params if self.parts.lora else None)
      host = self.log.host_metrics(statistics, now.step)
      self.queue.release(number)
      now = now._replace(step=now.step + 1, state=state)
      # No batch that is still to come from generation was sampled by an older version.
      is_last = now.step == self.parts.config.num_updates
      oldest = now.step if is_last else schedule.oldest_sampling(now.step)
      self.queue.forget(before=schedule.first(now.step), versions_before=oldest)
      self.log.read_update()
      self.log.remember_update(DispatchedUpdate(now.step, dispatched, metrics, host, batch, arrays))
    return now

  @contextlib.contextmanager
  def undo_if_interrupted(self) -> Iterator[None]:
    """Context that restores queue and counters if it is interrupted; sampled groups stay stored."""
    counters, pending = dict(self.log.counters), dict(self.queue.batches)
    try:
      yield
    except (EndRequestedError, GeneratorStoppedError):
      self.log.rewind(counters)
      self.queue.rewind(pending)
      raise

  # --- evaluation and checkpoints -----------------------------------------------------------------

  def evaluation_is_due(self, now: RunState) -> bool:
    """Whether the policy is still to be evaluated after this many updates."""
    c = self.parts.config
    last = now.step == c.num_updates
    return now.step != now.evaluated and (last or now.step % c.evaluation.every == 0)

  def at_long_refresh(self, now: RunState) -> bool:
    """Whether more batches are sampled now than there are updates between checkpoints.

    A checkpoint is then saved first, so that damaged batches can be sampled again from it.
    """
    c, schedule = self.parts.config, self.parts.schedule
    if now.step == c.num_updates or schedule.threaded:
      return False
    return schedule.samples(now.step) > c.checkpoint.every

  def evaluate(self, now: RunState) -> RunState:
    """Measures held-out accuracy with the current parameters."""
    self._end_update()
    settings, began = self.parts.config.evaluation, time.perf_counter()
    engine, batches = self.parts.programs.held_out_engine, []
    with multihost.phase("an evaluation"):
      for batch in evaluate_problems(
        engine,
        engine.load(now.state.params, self.frozen.trainer),
        self.parts.task.held_out,
        collector=self.collector,
        batch_size=settings.batch_prompts,
        num_samples=settings.num_samples,
        seed=settings.seed,
        version=now.step,
      ):
        batches.append(batch)
        restart_deadline()
    samples = [row for batch in batches for row in batch.samples]
    evaluation = accuracy(
      samples,
      ks=settings.ks,
      seed=settings.seed,
      max_turns=self.parts.config.environment.max_turns,
      best_play=self.parts.task.best_play,
    )
    prompts = np.concatenate([batch.prompt_lengths for batch in batches])
    responses = np.concatenate([batch.response_lengths for batch in batches])
    sampled = np.concatenate([batch.sampled_lengths for batch in batches])
    lengths = prompts, responses, sampled
    self.log.write_evaluation(now.step, evaluation, samples, lengths, began=began)
    return now._replace(evaluation=evaluation, evaluated=now.step)

  def save(self, now: RunState) -> None:
    """Saves everything that determines the rest of the run, except the rollouts in the store."""
    self._end_update()
    check_state(now.state, now.step)
    c, (queue, arrays) = self.parts.config, self.queue.state()
    host = HostState(
      position=now.position,
      counters=self.log.counters,
      evaluation=dict(now.evaluation),
      evaluated=now.evaluated,
      layout=describe_layout(self.parts, self.rows),
      queue=queue,
      written=self.log.writer.written(now.step),
    )
    measured = now.evaluated == now.step
    recorded = self.parts.schedule.recorded
    begins_again = recorded is not None and recorded.has_several  # see `find_resumable`
    self.checkpointer.save(
      now.step,
      now.state,
      host=host.to_json(),
      arrays=arrays,
      metric=now.evaluation[f"eval/pass@{c.evaluation.ks[0]}"] if measured else None,
      keep_at_or_before=0 if begins_again else self.queue.oldest_version(),
    )
    if not c.store.keep_used:
      # Batches that a run resumed from the last checkpoints may train on are kept.
      needed = self.parts.schedule.first(self.checkpointer.steps()[-c.checkpoint.keep :][0])
      multihost.run_on_first(lambda: self.queue.remove_used(before=needed), None)


def make_trainer(
  parts: Parts,
  rows: RunRows,
  frozen: parameters.Frozen,
  log: RunLog,
  checkpointer: Checkpointer,
  collector: Collector,
  store: RolloutStore,
  *,
  initial: Params,
  workdir: Workdir | None = None,
) -> Trainer:
  """The trainer of a run.

  Args:
    parts, rows, log, checkpointer, collector, store: of the run.
    frozen: from `parameters.load_frozen`.
    initial: trained parameters before the first update.
    workdir: of the run; None where no other program reads it.
  """
  clock = modes.clock_of_generation(parts.schedule, log.clock)
  return Trainer(
    parts=parts,
    rows=rows,
    frozen=frozen,
    generator=Generator(
      parts,
      rows,
      frozen.sampler,
      collector_of_graded(collector) if parts.config.fleet.samplers else collector,
      store,
      clock,
    ),
    queue=RolloutQueue(store),
    scorer=Scorer(parts, rows, frozen.trainer, initial, log),
    collector=collector,
    log=log,
    checkpointer=checkpointer,
    workdir=workdir,
  )
