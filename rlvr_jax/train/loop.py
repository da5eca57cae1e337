"""The host's loop: warm start, then collect, grade, update, log, evaluate, save.

Nothing numerical happens here. The order within a step is fixed, so that a killed and resumed run
repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.data import problem_batches
from rlvr_jax.evaluate.held_out import accuracy, evaluated
from rlvr_jax.files import DamagedFileError
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rewards.outcome import GradingStoppedError
from rlvr_jax.rewards.pool import GraderPool, GraderStartError
from rlvr_jax.rollouts.collect import write_batch
from rlvr_jax.rollouts.drawn import Drawn, from_shard
from rlvr_jax.rollouts.store import RolloutStore, StoreError, TornShardError
from rlvr_jax.train import components, multihost, sharding
from rlvr_jax.train.checkpoint import (
  Checkpointer,
  CheckpointError,
  Restored,
  WorkdirError,
  WorkdirLock,
  check_config,
)
from rlvr_jax.train.generator import (
  AgreementError,
  Behavior,
  DynamicSamplingError,
  Generator,
  fingerprint,
)
from rlvr_jax.train.host import Termination, alive, deadline, termination_signals
from rlvr_jax.train.metrics import (
  MetricWriter,
  compact_line,
  progress,
  say,
  stage_summary,
)
from rlvr_jax.train.report import write_report
from rlvr_jax.train.resuming import as_begun, elapsed_seconds, records_of, resumable
from rlvr_jax.train.texts import grader_pool, make_collector
from rlvr_jax.train.warm_start import warm_start
from rlvr_jax.train.worker import GeneratorStoppedError, GeneratorWorker
from rlvr_jax.types import Params, TrainBatch, TrainState

ROLLOUTS_FOLDER = "rollouts"
COUNTERS = (
  *("batches", "prompts_drawn", "tokens_generated", "tokens_trained", "tokens_evaluated"),
  *("flops_generate", "flops_score", "flops_optimise", "flops_evaluate"),
)
_SCORES = ("reference_logprobs", "proximal_logprobs")
_HELD = 16  # batches kept in memory; a long stage's others are read when their time comes
_OF_GENERATION = ("time/generate_seconds", "time/grade_seconds")
_PHASES = (
  *_OF_GENERATION,
  *("time/hand_over_seconds", "time/optimise_seconds", "time/evaluate_seconds"),
)


class EndRequestedError(Exception):
  """The process was asked to end before there was anything to save."""


class FingerprintError(RuntimeError):
  """Rollouts are not of the policy whose version they bear."""


class NonFiniteError(FloatingPointError):
  """Too many updates in a row had a loss or gradient that was not finite."""


# What ends a run with a message that says what to do, not with a traceback.
FAILURES = (
  AgreementError,
  CheckpointError,
  DamagedFileError,
  DynamicSamplingError,
  FingerprintError,
  FloatingPointError,
  GeneratorStoppedError,
  GraderStartError,
  GradingStoppedError,
  OSError,
  StoreError,
  TornShardError,
  WorkdirError,
  multihost.OtherProcessError,
)


def train(parts: components.Parts, workdir: str | Path) -> dict[str, float]:
  """Runs, or goes on with, the training of `components.build(config)`.

  Args:
    parts: of the run.
    workdir: holds all that the run writes; the same call continues there after a kill.
  Returns:
    The last evaluation's values; none if asked to end before the first.
  Raises:
    WorkdirError: the workdir belongs to another configuration or process.
    OtherProcessError: another process of the run failed with one of these.
    NonFiniteError: `config.max_skipped_in_a_row` updates in a row were skipped.
  """
  config, workdir = parts.config, Path(workdir)
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.only_the_first_speaks())
    multihost.on_first(lambda: _claim(workdir, parts, enter), None)
    parts = as_begun(parts, workdir)
    components.load_base(parts)
    warm_starts = enter(Checkpointer(workdir / "warm_start", keep=1))
    warm = warm_starts.restore(parts.abstract_state.params)
    checkpointer = enter(Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep))
    folder = workdir / ROLLOUTS_FOLDER
    # The first process repairs what a kill has left before the others look.
    first = multihost.on_first(lambda: enter(RolloutStore(folder, writable=True)), None)
    store = first or enter(RolloutStore(folder, writable=False))
    restored = resumable(checkpointer, parts, store)
    resume_step, written = records_of(restored, warm)
    no_writer = multihost.NoWriter(workdir)
    writer = multihost.on_first(
      lambda: enter(MetricWriter(workdir, resume_step, written)), no_writer
    )
    pool = multihost.together(lambda: enter(grader_pool(config, parts.task)))
    termination = stack.enter_context(termination_signals())
    stack.enter_context(deadline())
    try:
      if warm:
        params = warm.state
      elif config.warm_start.num_steps:
        # A resumed run, whose folder of the warm start is gone, has the records of it.
        first_writer = no_writer if restored else writer
        params = warm_started(parts, first_writer, warm_starts, termination)
      else:  # nothing that a file of its own would save
        params = components.initial_params(parts)
    except EndRequestedError:
      say("asked to end during the warm start; rerun the same command to begin it again")
      return {}
    trainer = Trainer(
      parts, writer, checkpointer, pool, store, initial=params, elapsed=elapsed_seconds(workdir)
    )
    trainer.resume(restored) if restored else trainer.begin(params)
    del params, warm, restored  # the trainer keeps what it needs
    trainer.run(termination)
  if multihost.is_first():
    say(write_report(workdir))
  return trainer.evaluation


def _claim(workdir: Path, parts: components.Parts, enter: Any) -> None:
  enter(WorkdirLock(workdir))
  allowed = components.may_differ(parts.config, parts.schedule)
  check_config(workdir, parts.config.to_json_best_effort(), may_differ=allowed)


def warm_started(
  parts: components.Parts,
  writer: MetricWriter,
  checkpointer: Checkpointer,
  termination: Termination,
) -> Params:
  """The initial parameters after the supervised phase, kept as a checkpoint of their own.

  Raises:
    EndRequestedError: the process was asked to end meanwhile.
  """
  num_steps = parts.config.warm_start.num_steps
  with progress(num_steps, "warm start", unit="step") as bar:

    def report(index: int, loss: float) -> None:
      bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
      bar.update(index - bar.n)
      writer.write(index, "warm_start", {"warm_start/loss": loss})
      if multihost.anywhere(termination.requested):
        raise EndRequestedError

    params = warm_start(
      components.supervised_state(parts),
      components.supervised_batches(parts),
      parts.supervised_step,
      num_steps=num_steps,
      report=report,
    )
  checkpointer.save(num_steps, params, host={"written": writer.written()})
  checkpointer.wait()
  return params


@dataclasses.dataclass
class Pending:
  """A drawn batch that updates will train on, or train on again; its rollouts are in the store."""

  version: int
  fingerprint: str
  reference_logprobs: np.ndarray | None = None  # f32[P, G, T], once they are needed
  proximal_logprobs: np.ndarray | None = None  # the same
  scored_at: int | None = None  # update at which the proximal policy's were taken


class Update(NamedTuple):
  """A dispatched update whose metrics have not been read yet."""

  step: int
  dispatched: float  # seconds, of the host's clock
  metrics: dict[str, jax.Array]
  host: dict[str, float]
  batch: TrainBatch
  geometry: dict[str, jax.Array]  # arrays of a measurement before it, or none


class Trainer:
  """The loop's state and its phases."""

  def __init__(
    self,
    parts: components.Parts,
    writer: MetricWriter,
    checkpointer: Checkpointer,
    pool: GraderPool,
    store: RolloutStore,
    *,
    initial: Params,
    elapsed: float = 0.0,
  ):
    """Prepares the phases.

    Args:
      initial: parameters before the first update.
      elapsed: seconds that the run has taken before.
    """
    c = self.config = parts.config
    self.parts, self.writer, self.checkpointer, self.store = parts, writer, checkpointer, store
    self.schedule = parts.schedule
    # Kept only where something reads them: they take as much memory as the policy.
    keep = c.reference.kl_coefficient or c.diagnostics.every
    self.initial = initial if keep else None
    self.collector = make_collector(parts, pool)
    self.generator = Generator(parts, self.collector, store)
    if not self.schedule.real_time:
      # The last update ends where its metrics are read; the devices go on to generate.
      self.generator.on_dispatch = self.read_metrics
    self.worker: GeneratorWorker | None = None
    self.step = 0
    self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
    self.pending: dict[int, Pending] = {}
    self.held: dict[int, Drawn] = {}  # some of them, in memory
    self.after = self.generator.state()  # of the last batch taken
    self.records: dict[int, Any] = {}  # version → fingerprint, or the checksums it is made of
    self.timings: dict[str, float] = {}  # of what came before the next update
    self.fresh_tokens = 0  # drawn since the last update
    self.sampled_at = -1  # update before which rollouts were last written out for a person
    self.unread: Update | None = None
    self.evaluation: dict[str, float] = {}
    self.devices_free = 0.0  # seconds, of the host's clock: when the last update ended
    self.began = time.perf_counter() - elapsed
    self.cycle_began = time.perf_counter()

  def begin(self, params: Params) -> None:
    """Evaluates and saves step 0."""
    self.start(components.first_state(self.parts, params, self.initial_entropy(params)))
    self.evaluate()
    self.save()

  def start(self, state: TrainState) -> None:
    """Takes the state that the next update begins with."""
    self.state = state
    self.record()

  def initial_entropy(self, params: Params) -> float:
    """`measure_entropy` of the initial policy; 0, without measuring, where nothing reads it."""
    stateful = jax.tree.leaves(self.parts.abstract_state.advantage_state)
    return self.measure_entropy(params) if stateful else 0.0

  def measure_entropy(self, params: Params) -> float:
    """Mean entropy, nats per token, on responses to the first training prompts.

    They are drawn with keys of their own, so that measuring changes nothing else.
    """
    c = self.config
    problems = next(problem_batches(self.parts.task.train, batch_size=c.batch.prompts, seed=c.seed))
    key = key_for(c.seed, "initial_entropy")
    generate = lambda prompts: [
      self.parts.generate(params, self.parts.to_devices(prompts), key)
    ]
    generation = self.collector.start(problems, generate, [0] * len(problems))
    graded = self.collector.finish(generation, *self.collector.submit_grading(generation))
    _, entropy = self.parts.score(params, self.parts.to_devices(plain(graded.batch)))
    mask = graded.batch.mask
    return float(np.sum(sharding.to_host(entropy) * mask) / max(mask.sum(), 1))

  def resume(self, restored: Restored) -> None:
    """Takes up a checkpoint where it was left."""
    self.step, host = restored.step, restored.host
    self.evaluation = host["evaluation"]
    self.records = {int(version): found for version, found in host["records"].items()}
    self.after = host["after"]
    self.start(restored.state)
    self.counters = host["counters"]
    for number in sorted(map(int, host["pending"])):
      if self.schedule.real_time and not self.store.whole(number):
        # Any policy may draw it; what was drawn after it is told to `start_worker`.
        self.after = self.store.info(number - 1)["after"] if number else self.generator.state()
        break
      arrays = (restored.arrays or {}).get(str(number), {})
      self.pending[number] = Pending(**host["pending"][str(number)], **arrays)
    self.generator.set_state(self.after)
    say(
      f"resumed at update {self.step}: parameters, optimizer and algorithm state,"
      f" {self.counters['batches']} batches of prompts drawn, {len(self.pending)} batches of"
      " rollouts pending"
    )

  def run(self, termination: Termination) -> None:
    """Updates until the last one, or until the process is asked to end."""
    c = self.config
    ending = multihost.anywhere(termination.requested)
    with (
      contextlib.ExitStack() as stack,
      progress(c.num_updates, "updates", unit="update", initial=self.step) as bar,
    ):
      if self.schedule.real_time:
        self.worker = stack.enter_context(contextlib.closing(self.start_worker()))
      while self.step < c.num_updates and not ending:
        try:
          ending = not self.collect(lambda: multihost.anywhere(termination.requested))
        except GeneratorStoppedError as error:
          say(f"{error}; saving")  # should the devices hang too
          self.save()
          raise
        if ending:
          self.save()
          break
        self.update()
        bar.update()
        last = self.step == c.num_updates
        evaluate_now = last or self.step % c.evaluation.every == 0
        if evaluate_now:
          self.evaluate()
        ending = multihost.anywhere(termination.requested)
        if evaluate_now or ending or self.step % c.checkpoint.every == 0 or self.at_long_refresh():
          self.save()
    if ending:
      say(f"asked to end: saved after update {self.step}; rerun the same command to go on")

  def start_worker(self) -> GeneratorWorker:
    """The thread that generates, after whatever batches the store has already."""
    while (state := self.generator.stored()) and (drawn := self.generator.recall(state)):
      self.take(drawn)
    # Behind a gap nothing can be trusted: a batch drawn anew makes other policies.
    for number in self.store.numbers():
      if number >= self.generator.number:
        self.generator.set_aside(number, f"rollouts {number} came after a damaged batch")
    assert self.schedule.max_lag is not None  # every schedule in real time has one
    worker = GeneratorWorker(
      self.generator,
      max_lag=self.schedule.max_lag,
      deadline_s=self.schedule.deadline_s,
      num_batches=self.config.num_updates,
    )
    worker.offer(self.hand_over())
    return worker

  def hand_over(self) -> Behavior:
    """The present policy, to draw rollouts from."""
    began = time.perf_counter()
    behavior = self.generator.hand_over(self.state.params, self.step)
    self.spent("time/hand_over_seconds", time.perf_counter() - began)
    return behavior

  def spent(self, phase: str, seconds: float) -> None:
    """Adds to what the next update's record says of a phase."""
    self.timings[phase] = self.timings.get(phase, 0.0) + seconds

  def at_long_refresh(self) -> bool:
    """Whether more rollouts are drawn now than updates pass between checkpoints.

    So that what is damaged of them can be drawn again without going back further.
    """
    if self.schedule.real_time or self.step == self.config.num_updates:
      return False
    return self.schedule.draws(self.step) > self.config.checkpoint.every

  def collect(self, give_up: Callable[[], bool] = lambda: False) -> bool:
    """The batches that the schedule draws now.

    Args:
      give_up: whether to begin no more of them; asked by every process at the same points.
    Returns:
      Whether they are all there. If not, what was drawn is in the store, to be read again.
    """
    if self.worker is not None:
      while self.schedule.batch(self.step) not in self.pending:
        if not self.worker.has_ready():
          self.read_metrics()  # the update ends before the wait begins: waiting is idle time
        drawn = self.worker.take(give_up)
        if drawn is None:
          return False
        self.take(drawn)
      return True
    count = self.schedule.draws(self.step)
    if not count:
      return True
    before = (dict(self.counters), self.after, dict(self.pending))
    behaviors, last = iter([self.hand_over()] * count), self.generator.number + count
    for drawn in self.generator.batches(lambda *_: None if give_up() else next(behaviors, None)):
      self.take(drawn)
    if self.generator.number < last:
      self.counters, self.after, self.pending = before
      return False
    return True

  def take(self, drawn: Drawn) -> None:
    """Counts a drawn batch among those that updates will train on."""
    graded = drawn.graded
    self.counters["batches"] += drawn.draws
    self.counters["prompts_drawn"] += graded.prompts
    self.counters["tokens_generated"] += graded.tokens
    self.counters["flops_generate"] += drawn.flops
    self.after = drawn.after
    self.pending[drawn.number] = Pending(drawn.version, drawn.fingerprint)
    if len(self.held) < _HELD:  # the first ones drawn are the first ones trained on
      self.held[drawn.number] = drawn
    for phase, seconds in drawn.timings.items():
      self.spent(phase, seconds)
    self.fresh_tokens += graded.tokens if drawn.timings else 0
    self.write_samples(drawn)

  def drawn(self, number: int) -> Drawn:
    """A pending batch, from memory or from the store.

    Raises:
      TornShardError: it was damaged since it was written.
    """
    held = self.held.get(number)
    if held is not None:
      return held
    return multihost.together(lambda: from_shard(number, *self.store.read(number)))

  def prepared(self, drawn: Drawn) -> TrainBatch:
    """The batch as the next update takes it: permuted in a control run, scored, with its lags."""
    c, batch, pending = self.config, drawn.graded.batch, self.pending[drawn.number]
    if c.permute_rewards:
      batch = permute_rewards(batch, np.random.default_rng([c.seed, drawn.number]))
    if c.reference.kl_coefficient and pending.reference_logprobs is None:
      pending.reference_logprobs = self.score(self.initial, batch)
    if self.parts.method.loss.needs_proximal:
      self.refresh_proximal(pending, batch)
    behind = np.where(drawn.versions >= 0, self.step - drawn.versions, -1)
    lags: Any = np.broadcast_to(behind[:, None], batch.rewards.shape).astype(np.int32)
    of_policies: Any = {name: getattr(pending, name) for name in _SCORES}
    return dataclasses.replace(batch, lags=lags, **of_policies)

  def score(self, params: Params, batch: TrainBatch) -> Any:
    """f32[P, G, T], the responses' log-probabilities at the policy's temperature."""
    self.counters["flops_score"] += self.flops(batch)
    return sharding.to_host(self.parts.score(params, self.parts.to_devices(plain(batch)))[0])

  def flops(self, batch: TrainBatch) -> float:
    """Model FLOPs of one forward pass over the batch."""
    return forward_flops(self.parts.model.config, batch.prompts.lengths, response_lengths(batch))

  def refresh_proximal(self, pending: Pending, batch: TrainBatch) -> None:
    """Scores a batch by the present policy at its first update, and again when that is old."""
    every, taken = self.config.schedule.proximal_every, pending.scored_at
    if taken is None or (every and self.step - taken >= every):
      pending.proximal_logprobs = self.score(self.state.params, batch)
      pending.scored_at = self.step

  def record(self) -> None:
    """Takes down the fingerprint of the present parameters, if they are to draw rollouts.

    Before anything else can touch them: what is handed over later has to match it.
    """
    if self.schedule.real_time or self.schedule.draws(self.step):
      self.records[self.step] = self.parts.checksums(self.state.params)

  def check_fingerprint(self, number: int) -> None:
    """Raises FingerprintError unless the batch is of the policy whose version it bears."""
    pending = self.pending[number]
    known = self.records.get(pending.version)
    if known is not None and not isinstance(known, str):
      known = self.records[pending.version] = fingerprint(known)
    if known != pending.fingerprint:
      raise FingerprintError(
        f"rollouts {number} bear version {pending.version} and were drawn by parameters with"
        f" fingerprint {pending.fingerprint}; the trainer's of that version have {known}."
        " Parameters changed without a hand-over, or the rollouts are of another run; nothing was"
        f" trained on them. They are in {self.store.directory}; where a run was taken up on another"
        " kind of machine, move that batch and later ones elsewhere and rerun: they are drawn again"
      )

  def update(self) -> None:
    """Dispatches one update, then reads the metrics of the one before."""
    number = self.schedule.batch(self.step)
    self.check_fingerprint(number)
    drawn = self.drawn(number)
    batch = self.prepared(drawn)
    dispatched = time.perf_counter()
    on_devices = self.parts.to_devices(batch)
    measured, arrays = self.measure(on_devices)
    self.state, metrics = self.parts.train_step(self.state, on_devices)
    if measured:
      entropy = self.parts.mean_entropy(self.state.params, on_devices)
      metrics |= measured | {"policy/entropy_change": entropy - metrics["policy/entropy"]}
    self.counters["tokens_trained"] += int(batch.mask.sum())
    self.counters["flops_optimise"] += update_flops(
      self.parts.model.config,
      batch.prompts.lengths,
      response_lengths(batch),
      adapters=self.state.params if self.parts.programs.settings else None,
    )
    host = drawn.graded.statistics | self.counted() | self.timings
    if seconds := self.timings.get("time/generate_seconds"):
      host["time/rollout_tokens_per_second"] = self.fresh_tokens / seconds
    if self.schedule.stage_length:
      host["stage/number"], host["stage/age"] = divmod(self.step, self.schedule.stage_length)
    self.timings, self.fresh_tokens = {}, 0
    self.step += 1
    self.record()
    if self.worker is not None and self.step < self.config.num_updates:
      self.worker.offer(self.hand_over())
    self.forget()
    self.read_metrics()
    self.unread = Update(self.step, dispatched, metrics, host, batch, arrays)

  def counted(self) -> dict[str, float]:
    """What the run has cost until now."""
    return {f"counter/{name}": value for name, value in self.counters.items()}

  def forget(self) -> None:
    """Drops batches and records that no later update needs."""
    first = self.schedule.first(self.step)
    self.pending = {number: p for number, p in self.pending.items() if number >= first}
    self.held = {number: drawn for number, drawn in self.held.items() if number >= first}
    # Batches that a worker has ready are as old as they may be, at most.
    oldest = self.step - (self.schedule.max_lag or 0)
    oldest = min([oldest, *(p.version for p in self.pending.values())])
    self.records = {version: found for version, found in self.records.items() if version >= oldest}

  def measure(self, batch: TrainBatch) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Scalars and arrays of the gradient geometry, at the updates that the configuration names."""
    every = self.config.diagnostics.every
    if not every or self.step % every:
      return {}, {}
    return self.parts.measure(self.state, self.initial, batch)

  def read_metrics(self) -> None:
    """Waits for the update last dispatched and writes its metrics; stops on repeated NaN."""
    if self.unread is None:
      return
    update, self.unread = self.unread, None
    values = {name: float(value) for name, value in jax.device_get(update.metrics).items()}
    done = time.perf_counter()
    seconds = done - max(update.dispatched, self.devices_free)
    self.set_devices_free(done)
    tokens = float(update.batch.prompts.lengths.sum() + update.batch.mask.sum())
    values |= update.host | {
      "time/optimise_seconds": seconds,
      "time/update_tokens_per_second": tokens / seconds,
    }
    values |= self.clock(values)
    self.writer.write(update.step, "train", values)
    if update.geometry:
      self.writer.write_geometry(update.step - 1, jax.device_get(update.geometry))
    if update.step % self.config.logging.print_every == 0 or update.step == self.config.num_updates:
      say(compact_line(update.step, self.config.num_updates, values))
    stage = self.schedule.stage_length
    if stage and update.step % stage == 0 and multihost.is_first():
      summary = stage_summary(self.writer.workdir, update.step, stage)
      self.writer.write(update.step, "stage", summary)
    if values["update/skipped_in_a_row"] >= self.config.max_skipped_in_a_row:
      path = self.writer.workdir / f"nonfinite_batch_{update.step}.npz"
      if multihost.is_first():
        write_batch(path, update.batch)
      raise NonFiniteError(
        f"{values['update/skipped_in_a_row']:.0f} updates in a row, the last being {update.step},"
        f" had a loss or gradient that was not finite; its batch is in {path}. Lower"
        " config.optimizer.learning_rate (in another --workdir), or look into that batch; skipped"
        " updates have not changed the parameters"
      )

  def set_devices_free(self, now: float) -> None:
    """Takes down when the trainer's devices ended what they were doing."""
    self.devices_free = now
    if not self.schedule.real_time:
      self.generator.free_from = now  # they are the same devices, or wait for each other

  def clock(self, phases: dict[str, Any]) -> dict[str, float]:
    """The run's seconds until now, and those since the last record that no phase accounts for."""
    now = time.perf_counter()
    cycle, self.cycle_began = now - self.cycle_began, now
    names = [name for name in _PHASES if name in phases]
    if self.schedule.real_time:
      names = [name for name in names if name not in _OF_GENERATION]  # beside the trainer's
    idle = cycle - sum(phases[name] for name in names)
    return {"time/idle_seconds": max(idle, 0.0), "time/elapsed_seconds": now - self.began}

  def evaluate(self) -> None:
    """Held-out accuracy under the present parameters."""
    self.read_metrics()
    c = self.config
    began = time.perf_counter()
    batches = []
    for batch in evaluated(
      functools.partial(self.parts.generate_held_out, self.state.params),
      self.parts.task.held_out,
      collector=self.collector,
      to_devices=self.parts.to_devices,
      batch_size=c.evaluation.batch_prompts,
      seed=c.evaluation.seed,
      version=self.step,
    ):
      batches.append(batch)
      alive()
    samples = [row for batch in batches for row in batch.samples]
    values = accuracy(samples, ks=c.evaluation.ks, seed=c.evaluation.seed)
    lengths = [np.concatenate(x) for x in zip(*(batch[1:] for batch in batches), strict=True)]
    self.set_devices_free(time.perf_counter())
    self.counters["tokens_evaluated"] += int(lengths[1].sum())
    self.counters["flops_evaluate"] += forward_flops(self.parts.model.config, *lengths)
    timings = {"time/evaluate_seconds": self.devices_free - began}
    timings |= self.clock(timings)
    self.writer.write(self.step, "eval", values | self.counted() | timings)
    first = [row[0] for row in samples[: c.logging.rollouts_per_refresh]]
    self.writer.write_rollouts(self.step, first, phase="eval")
    self.evaluation = values
    shown = ", ".join(
      f"{name} {values[f'eval/{name}']:.3f}"
      f" [{values[f'eval/{name}_low']:.3f}, {values[f'eval/{name}_high']:.3f}]"
      for name in (f"pass@{k}" for k in c.evaluation.ks)
    )
    say(f"held-out after update {self.step}: {shown}")

  def save(self) -> None:
    """A checkpoint of everything that determines the future, but the rollouts in the store."""
    self.read_metrics()
    arrays: dict[str, dict[str, np.ndarray]] = {}
    of_host: dict[str, dict[str, Any]] = {}
    for number, pending in sorted(self.pending.items()):
      fields = dict(vars(pending))
      scores = {name: fields.pop(name) for name in _SCORES}
      arrays[str(number)] = {name: x for name, x in scores.items() if x is not None}
      of_host[str(number)] = fields
    as_text = lambda found: found if isinstance(found, str) else fingerprint(found)
    self.records = {version: as_text(found) for version, found in self.records.items()}
    host = {
      "after": self.after,
      "counters": self.counters,
      "evaluation": self.evaluation,
      "pending": of_host,
      "records": {str(version): found for version, found in self.records.items()},
      "written": self.writer.written(),
    }
    last = self.step == self.config.num_updates
    evaluated = last or self.step % self.config.evaluation.every == 0
    self.checkpointer.save(
      self.step,
      self.state,
      host=host,
      arrays=arrays,
      metric=self.evaluation[f"eval/pass@{self.config.evaluation.ks[0]}"] if evaluated else None,
      keep_at_or_before=min((p.version for p in self.pending.values()), default=None),
    )
    if not self.config.store.keep_used:
      # What the last checkpoints may still have to train on stays.
      last_steps = self.checkpointer.steps()[-self.config.checkpoint.keep :]
      needed = self.schedule.first(last_steps[0])
      multihost.on_first(lambda: self.remove_used(needed), None)

  def remove_used(self, needed: int) -> None:
    """Removes the batches before `needed` from the store."""
    for number in self.store.numbers():
      if number < needed:
        self.store.remove(number)

  def write_samples(self, drawn: Drawn) -> None:
    """One rollout of each of the first prompts, under the number of the update that comes next."""
    logging = self.config.logging
    if self.step % logging.rollouts_every == 0 and self.sampled_at != self.step:
      self.sampled_at = self.step  # once, however many batches are drawn
      samples = drawn.graded.samples[:: self.config.batch.group_size]
      self.writer.write_rollouts(self.step + 1, samples[: logging.rollouts_per_refresh])


def plain(batch: TrainBatch) -> TrainBatch:
  """Without what an update alone reads, so that every scoring has the same shapes."""
  return dataclasses.replace(
    batch, reference_logprobs=None, proximal_logprobs=None, lags=None, sources=None
  )


def response_lengths(batch: TrainBatch) -> np.ndarray:
  """i32[P, G], tokens up to the last that counts in the loss."""
  positions = np.arange(1, batch.mask.shape[-1] + 1)
  return np.max((batch.mask > 0) * positions, axis=-1)


def permute_rewards(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
  """Rewards, and correctness with them, dealt out anew over all rollouts: a control.

  The batch keeps its distribution of rewards, but they no longer say anything of the rollouts.
  """
  order = rng.permutation(batch.rewards.size)
  deal = lambda x: x.reshape(-1)[order].reshape(x.shape)
  return dataclasses.replace(batch, rewards=deal(batch.rewards), correct=deal(batch.correct))
