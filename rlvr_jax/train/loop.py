"""The training loop on the host: collect → grade → update → log → evaluate → save.

The policy samples the batches of its schedule, and graders score them while the devices continue.
Each batch goes through the store to one or more updates, whose metrics are logged. At intervals the
policy is evaluated, and everything that determines the rest of the run is saved. Nothing numerical
happens here: updates are in `train.step`, sampling in `rollouts.engine`.

The order within a step is fixed: a killed and resumed run repeats the uninterrupted one bit for bit
on the same kind of machine with the same versions. A warm start, if any, comes before this loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time

import numpy as np

from rlvr_jax.evaluate.held_out import accuracy, evaluated
from rlvr_jax.rewards.pool import GraderPool
from rlvr_jax.rollouts.batch import RolloutBatch
from rlvr_jax.rollouts.queue import RolloutQueue
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train import multihost, parameters
from rlvr_jax.train.async_generator import AsyncGenerator, GeneratorStoppedError
from rlvr_jax.train.build import Parts
from rlvr_jax.train.checkpoint import Checkpointer, Restored
from rlvr_jax.train.generator import Generator, PolicySnapshot, fingerprint_of
from rlvr_jax.train.grading import make_collector
from rlvr_jax.train.host import EndRequestedError, alive
from rlvr_jax.train.metrics import MetricWriter, progress, say
from rlvr_jax.train.restore import layout_of
from rlvr_jax.train.run_log import DispatchedUpdate, RunLog, raise_non_finite
from rlvr_jax.train.scoring import Scorer
from rlvr_jax.types import Params, TrainState


class Trainer:
  """The loop's state and its phases."""

  def __init__(
    self,
    parts: Parts,
    frozen: parameters.Frozen,
    writer: MetricWriter,
    checkpointer: Checkpointer,
    pool: GraderPool,
    store: RolloutStore,
    *,
    initial: Params,
    elapsed: float = 0.0,
  ):
    """Creates the objects of the phases.

    Args:
      parts, writer, checkpointer, pool, store: of the run; frozen: of `parameters.load_frozen`.
      initial: trained parameters before the first update.
      elapsed: seconds that the run had taken before it was resumed.
    """
    c = self.config = parts.config
    self.parts, self.frozen, self.schedule = parts, frozen.trainer, parts.schedule
    self.checkpointer = checkpointer
    self.log = RunLog(c, parts.task, parts.model.config, parts.schedule, writer, elapsed=elapsed)
    self.scorer = Scorer(parts, frozen.trainer, initial, self.log)
    self.queue = RolloutQueue(store)
    self.collector = make_collector(parts, pool)
    self.generator = Generator(parts, frozen.sampler, self.collector, store)
    if not self.schedule.real_time:
      # The same devices generate and train: they are free once an update's metrics are read.
      self.generator.on_dispatch, self.generator.clock = self.read_metrics, self.log.clock
    self.background: AsyncGenerator | None = None
    self.step = 0
    self.after = self.generator.state()  # the generator's state after the last batch
    self.unread: DispatchedUpdate | None = None
    self.evaluation: dict[str, float] = {}
    self.evaluated = -1  # after which update

  def begin(self, params: Params) -> None:
    """Evaluates and saves step 0."""
    entropy = self.scorer.initial_entropy(params, self.collector)
    self.start(parameters.first_state(self.parts, params, entropy))
    self.evaluate()
    self.save()

  def start(self, state: TrainState) -> None:
    """Sets the state that the next update starts from."""
    self.state = state
    self.record_fingerprint()

  def resume(self, restored: Restored) -> None:
    """Continues from a checkpoint."""
    self.step, host = restored.step, restored.host
    self.evaluation, self.after = host["evaluation"], host["after"]
    self.evaluated = host.get("evaluated", self.step)  # absent from earlier versions' checkpoints
    self.log.counters = host["counters"]
    store, real_time = self.queue.store, self.schedule.real_time
    # In real time any policy may sample a damaged batch again, so all batches from the first
    # damaged one on are dropped here; `start_background` continues after the others.
    keep = lambda number: not real_time or store.is_intact(number)
    missing = self.queue.restore(host["queue"], restored.arrays or {}, keep)
    if missing is not None:
      self.after = store.info(missing - 1)["after"] if missing else self.generator.state()
    self.start(restored.state)
    self.generator.set_state(self.after)
    say(
      f"resumed at update {self.step}: parameters, optimizer and algorithm state,"
      f" {self.log.counters['batches']} batches of prompts sampled, {len(self.queue)} batches of"
      " rollouts pending"
    )

  def run(self) -> None:
    """Runs updates until the last one.

    Raises:
      EndRequestedError: the run was asked to end before; it has been saved.
    """
    total = self.config.num_updates
    with contextlib.ExitStack() as stack:
      bar = stack.enter_context(progress(total, "updates", unit="update", initial=self.step))
      try:
        if self.evaluation_is_due():  # the run was asked to end within it
          self.evaluate()
          self.save()
        if self.schedule.real_time:
          self.background = stack.enter_context(contextlib.closing(self.start_background()))
        while self.step < total:
          self.log.profile.before(self.step + 1)
          self.advance()
          bar.update()
          if due := self.evaluation_is_due():
            self.evaluate()
          if due or self.step % self.config.checkpoint.every == 0 or self.at_long_refresh():
            self.save()
      except EndRequestedError as request:
        say(f"{request}; saving")
        self.save()
        raise EndRequestedError(f"asked to end: saved after update {self.step}") from request
      except GeneratorStoppedError as error:
        say(f"{error}; saving")  # printed first, in case the devices hang too
        self.save()
        raise

  def advance(self) -> None:
    """Collects, then makes an update; a request to end undoes both (groups stay on the disk)."""
    pending = {number: dataclasses.replace(x) for number, x in self.queue.batches.items()}
    before = dict(self.log.counters), self.after, pending
    try:
      with multihost.phase("generation"):
        multihost.end_if_asked()
        self.collect()
      with multihost.phase("an update"):
        self.update()
    except EndRequestedError:
      self.log.counters, self.after, self.queue.batches = before
      raise

  def evaluation_is_due(self) -> bool:
    """Whether the policy is still to be evaluated after this many updates."""
    c, step = self.config, self.step
    return step != self.evaluated and (step == c.num_updates or step % c.evaluation.every == 0)

  def at_long_refresh(self) -> bool:
    """Whether more batches are sampled now than there are updates between checkpoints.

    A checkpoint is then saved first, so that damaged batches can be sampled again from it.
    """
    if self.schedule.real_time or self.step == self.config.num_updates:
      return False
    return self.schedule.samples(self.step) > self.config.checkpoint.every

  def start_background(self) -> AsyncGenerator:
    """Takes the batches that the store has already, then starts the thread that generates."""
    while (state := self.generator.stored()) and (batch := self.generator.recall(state)):
      self.take(batch)
    # Batches after a gap are sampled again: the batch in the gap will differ, so policies will too.
    for number in self.queue.store.numbers():
      if number >= self.generator.number:
        self.generator.set_aside(number, f"rollouts {number} came after a damaged batch")
    assert self.schedule.max_lag is not None  # every real-time schedule has one
    background = AsyncGenerator(
      self.generator,
      max_lag=self.schedule.max_lag,
      deadline_s=self.config.generation_deadline_s,
      num_batches=self.config.num_updates,
    )
    background.offer(self.sync_weights())
    return background

  def sync_weights(self) -> PolicySnapshot:
    """The current policy, for sampling rollouts."""
    began = time.perf_counter()
    policy = self.generator.sync_weights(self.state.params, self.step)
    self.log.spent("time/sync_weights_seconds", time.perf_counter() - began)
    return policy

  def collect(self) -> None:
    """Collects the graded batches that the schedule samples before the next update."""
    if self.background is not None:
      while self.schedule.batch(self.step) not in self.queue:
        if not self.background.has_ready():
          self.read_metrics()  # so that the time of the update does not include the wait
        self.take(self.background.take())
    elif count := self.schedule.samples(self.step):
      policies = iter([self.sync_weights()] * count)
      self.generator.last = self.generator.number + count
      for batch in self.generator.batches(lambda *_: next(policies, None)):
        self.take(batch)

  def take(self, batch: RolloutBatch) -> None:
    """Adds a graded batch to the queue of batches to train on."""
    self.log.count_sampled(batch, self.step)
    self.after = batch.after
    self.queue.put(batch)

  def update(self) -> None:
    """Dispatches one update, then reads the metrics of the previous one."""
    number = self.schedule.batch(self.step)
    self.queue.check_fingerprint(number)
    rollouts = multihost.together(lambda: self.queue.load(number))
    assert rollouts.graded is not None
    batch = self.scorer.prepared(rollouts, self.state, self.step)
    dispatched = time.perf_counter()
    on_devices = self.parts.batch_to_devices(batch)
    measured, arrays = self.scorer.measure(self.state, on_devices, self.step)
    self.state, metrics = self.parts.programs.train_step(self.state, self.frozen, on_devices)
    if measured:
      entropy = self.parts.programs.mean_entropy.jitted(self.state.params, self.frozen, on_devices)
      metrics |= measured | {"policy/entropy_change": entropy - metrics["policy/entropy"]}
    self.log.count_trained(batch, self.state.params if self.parts.lora else None)
    host = self.log.host_metrics(rollouts.graded.statistics, self.step)
    self.queue.release(number)
    self.step += 1
    self.record_fingerprint()
    if self.background is not None and self.step < self.config.num_updates:
      self.background.offer(self.sync_weights())
    # No batch that is ready in the background has an older version.
    oldest = self.step - (self.schedule.max_lag or 0)
    self.queue.forget(before=self.schedule.first(self.step), versions_before=oldest)
    self.read_metrics()
    self.unread = DispatchedUpdate(self.step, dispatched, metrics, host, batch, arrays)

  def record_fingerprint(self) -> None:
    """Records the current parameters' fingerprint; the policy that samples has to match it."""
    if self.schedule.real_time or self.schedule.samples(self.step):
      self.queue.record(self.step, fingerprint_of(self.parts.programs.checksums(self.state.params)))

  def read_metrics(self) -> None:
    """Waits for the last dispatched update and writes its metrics; raises on repeated NaN."""
    if self.unread is None:
      return
    update, self.unread = self.unread, None
    values = self.log.write_update(update)
    if values["update/skipped_in_a_row"] >= self.config.max_skipped_in_a_row:
      raise_non_finite(update, values, self.log.writer.workdir)

  def evaluate(self) -> None:
    """Measures held-out accuracy with the current parameters."""
    self.read_metrics()
    c, began, batches = self.config, time.perf_counter(), []
    engine, problems = self.parts.programs.held_out_engine, self.parts.task.held_out
    sizes = dict(batch_size=c.evaluation.batch_prompts, num_samples=c.evaluation.num_samples)
    of_run = dict(collector=self.collector, seed=c.evaluation.seed, version=self.step)
    with multihost.phase("an evaluation"):
      params = engine.load(self.state.params, self.frozen)
      for batch in evaluated(engine, params, problems, **sizes, **of_run):
        batches.append(batch)
        alive()
    samples = [row for batch in batches for row in batch.samples]
    self.evaluation = accuracy(samples, ks=c.evaluation.ks, seed=c.evaluation.seed)
    self.evaluated = self.step
    lengths = [np.concatenate(x) for x in zip(*(batch[1:] for batch in batches), strict=True)]
    self.log.write_evaluation(self.step, self.evaluation, samples, lengths, began=began)

  def save(self) -> None:
    """Saves everything that determines the rest of the run, except the rollouts in the store."""
    self.read_metrics()
    c, (queue, arrays) = self.config, self.queue.state()
    host = {
      "after": self.after,
      "counters": self.log.counters,
      "evaluated": self.evaluated,
      "evaluation": self.evaluation,
      "layout": layout_of(self.parts),
      "queue": queue,
      "written": self.log.writer.written(self.step),
    }
    measured = self.evaluated == self.step
    self.checkpointer.save(
      self.step,
      self.state,
      host=host,
      arrays=arrays,
      metric=self.evaluation[f"eval/pass@{c.evaluation.ks[0]}"] if measured else None,
      keep_at_or_before=self.queue.oldest_version(),
    )
    if not c.store.keep_used:
      # Batches that a run resumed from the last checkpoints may train on are kept.
      needed = self.schedule.first(self.checkpointer.steps()[-c.checkpoint.keep :][0])
      multihost.on_first(lambda: self.queue.remove_used(before=needed), None)
