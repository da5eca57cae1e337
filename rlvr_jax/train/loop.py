"""The host's loop: warm start, then collect, grade, update, log, evaluate, save.

Nothing numerical happens here. The order within a step is fixed, so that a killed and resumed run
repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.data import problem_batches
from rlvr_jax.evaluate.held_out import evaluate
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rewards.outcome import GradingStoppedError, rewards_from_grades
from rlvr_jax.rewards.pool import GraderPool, GraderStartError
from rlvr_jax.rollouts.collect import (
  Collector,
  Generation,
  Graded,
  batch_from_arrays,
  batch_to_arrays,
  keep_mixed_groups,
  mean_statistics,
  write_batch,
)
from rlvr_jax.train import components, multihost, sharding
from rlvr_jax.train.checkpoint import (
  Checkpointer,
  CheckpointError,
  Restored,
  WorkdirError,
  WorkdirLock,
  check_config,
)
from rlvr_jax.train.host import Termination, termination_signals
from rlvr_jax.train.metrics import DamagedFileError, MetricWriter, compact_line, progress, say
from rlvr_jax.train.report import write_report
from rlvr_jax.train.warm_start import warm_start
from rlvr_jax.types import Params, TrainBatch


class EndRequestedError(Exception):
  """The process was asked to end before there was anything to save."""


class DynamicSamplingError(RuntimeError):
  """A batch could not be filled with groups that carry a signal."""


class NonFiniteError(FloatingPointError):
  """Too many updates in a row had a loss or gradient that was not finite."""


# What ends a run with a message that says what to do, not with a traceback.
FAILURES = (
  CheckpointError,
  DamagedFileError,
  DynamicSamplingError,
  FloatingPointError,
  GraderStartError,
  GradingStoppedError,
  OSError,
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
    multihost.on_first(lambda: _claim(workdir, config, enter), None)
    warm_starts = enter(Checkpointer(workdir / "warm_start", keep=1))
    warm = warm_starts.restore(parts.abstract_state.params)
    checkpointer = enter(Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep))
    restored = checkpointer.restore(parts.abstract_state)
    resume_step, was_warm = restored.step if restored else None, warm is not None
    writer = multihost.on_first(
      lambda: enter(MetricWriter(workdir, resume_step, keep_warm_start=was_warm)),
      multihost.NoWriter(workdir),
    )
    pool = multihost.together(
      lambda: enter(
        GraderPool(
          parts.task.grader,
          num_workers=config.grading.num_workers,
          timeout_s=config.grading.timeout_s,
        )
      )
    )
    termination = stack.enter_context(termination_signals())
    try:
      params = warm.state if warm else warm_started(parts, writer, warm_starts, termination)
    except EndRequestedError:
      say("asked to end during the warm start; rerun the same command to begin it again")
      return {}
    trainer = Trainer(parts, writer, checkpointer, pool, initial=params)
    trainer.resume(restored) if restored else trainer.begin(params)
    del params, warm, restored  # the trainer keeps what it needs
    trainer.run(termination)
  if multihost.is_first():
    say(write_report(workdir))
  return trainer.evaluation


def _claim(workdir: Path, config: Any, enter: Any) -> None:
  enter(WorkdirLock(workdir))
  allowed = components.may_differ(config)
  check_config(workdir, config.to_json_best_effort(), may_differ=allowed)


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
  checkpointer.save(num_steps, params, host={})
  checkpointer.wait()
  return params


@dataclasses.dataclass
class Refresh:
  """The rollouts of one behaviour policy, and how many updates have used them."""

  batches: list[TrainBatch]  # NumPy
  version: int  # updates behind the behaviour policy
  statistics: dict[str, float]  # of the collection, reported with each of its updates
  used: int = 0
  scored: dict[str, int] = dataclasses.field(default_factory=dict)  # batch → update of π_prox


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
    *,
    initial: Params,
  ):
    c = self.config = parts.config
    self.parts, self.writer, self.checkpointer = parts, writer, checkpointer
    # Kept only where something reads them: they take as much memory as the policy.
    keep = c.reference.kl_coefficient or c.diagnostics.every
    self.initial = initial if keep else None
    self.collector = Collector(
      generate=parts.generate,
      encode=parts.encode,
      decode=parts.tokenizer.decode,
      submit=pool.submit if jax.process_count() == 1 else multihost.SharedGrader(pool).submit,
      rewards_from_grades=lambda grades: rewards_from_grades(grades, parts.outcome_policy),
      to_devices=parts.to_devices,
      to_host=sharding.to_host,
      overlong_buffer=c.overlong.buffer,
      overlong_filter=c.overlong.filter,
    )
    self.problems = problem_batches(parts.task.train, batch_size=c.batch.prompts, seed=c.seed)
    self.step = 0
    counted = ("batches", "prompts_drawn", "tokens_generated", "tokens_trained")
    self.counters = dict.fromkeys(counted, 0)
    self.refresh: Refresh | None = None
    self.unread: Update | None = None
    self.evaluation: dict[str, float] = {}
    self.devices_free = 0.0  # seconds, of the host's clock: when the last update ended

  def begin(self, params: Params) -> None:
    """Evaluates and saves step 0."""
    self.state = components.first_state(self.parts, params, self.initial_entropy(params))
    self.evaluate()
    self.save()

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
    generation = self.collector.start(params, problems, key, 0)
    graded = self.collector.finish(generation, *self.collector.submit_grading(generation))
    _, entropy = self.parts.score(params, self.parts.to_devices(graded.batch))
    mask = graded.batch.mask
    return float(np.sum(sharding.to_host(entropy) * mask) / max(mask.sum(), 1))

  def resume(self, restored: Restored) -> None:
    """Takes up a checkpoint where it was left."""
    self.state, self.step, host = restored.state, restored.step, restored.host
    self.problems.set_state(host["problems"])
    self.counters, self.evaluation = host["counters"], host["evaluation"]
    if restored.arrays is not None:
      batches = [batch_from_arrays(arrays) for arrays in restored.arrays]
      self.refresh = Refresh(batches, **host["refresh"])
    pending = len(self.refresh.batches) if self.refresh else 0
    say(
      f"resumed at update {self.step}: parameters, optimizer and algorithm state,"
      f" {self.counters['batches']} batches of prompts drawn, {pending} batches of rollouts pending"
    )

  def run(self, termination: Termination) -> None:
    """Updates until the last one, or until the process is asked to end."""
    c = self.config
    ending = multihost.anywhere(termination.requested)
    with progress(c.num_updates, "updates", unit="update", initial=self.step) as bar:
      while self.step < c.num_updates and not ending:
        timings: dict[str, float] = {}
        if self.refresh is None:
          self.refresh, timings = self.collect()
        self.update(self.refresh, timings)
        bar.update()
        last = self.step == c.num_updates
        evaluate_now = last or self.step % c.evaluation.every == 0
        if evaluate_now:
          self.evaluate()
        ending = multihost.anywhere(termination.requested)
        if evaluate_now or ending or self.step % c.checkpoint.every == 0:
          self.save()
    if ending:
      say(f"asked to end: saved after update {self.step}; rerun the same command to go on")

  def collect(self) -> tuple[Refresh, dict[str, float]]:
    """All rollouts of one refresh, and how long they took."""
    c = self.config
    timings = {"time/rollout_seconds": 0.0, "time/grading_seconds": 0.0}
    if c.dynamic_sampling.enabled:
      graded = [self.draw_mixed_groups(timings) for _ in range(c.schedule.batches_per_refresh)]
    else:
      graded = self.draw(c.schedule.batches_per_refresh, timings)
    tokens = sum(g.tokens for g in graded)
    self.counters["tokens_generated"] += tokens
    self.counters["prompts_drawn"] += sum(g.prompts for g in graded)
    timings["time/rollout_tokens_per_second"] = tokens / timings["time/rollout_seconds"]
    self.write_samples(graded)
    batches = [self.prepare(g.batch, index) for index, g in enumerate(graded)]
    return Refresh(batches, self.step, mean_statistics(graded)), timings

  def draw(self, num_batches: int, timings: dict[str, float]) -> list[Graded]:
    """Graded batches; one is graded by the workers while the devices generate the next."""
    began = time.perf_counter()
    graded: list[Graded] = []
    generating: Generation | None = None
    grading: tuple[Any, ...] = ()
    for index in range(num_batches + 1):
      previous, generating = generating, None
      if index < num_batches:
        key = key_for(self.config.seed, "rollout", self.counters["batches"])
        generating = self.collector.start(self.state.params, next(self.problems), key, self.step)
        self.counters["batches"] += 1
      self.read_metrics()  # the last update ends here; the devices go on to generate
      if previous is not None:
        submitted = (previous, *self.collector.submit_grading(previous))
        if grading:
          graded.append(self.collector.finish(*grading))
        grading = submitted
    generated = time.perf_counter()
    graded.append(self.collector.finish(*grading))
    timings["time/rollout_seconds"] += generated - max(began, self.devices_free)
    timings["time/grading_seconds"] += time.perf_counter() - generated
    return graded

  def draw_mixed_groups(self, timings: dict[str, float]) -> Graded:
    """One batch of groups that are neither all right nor all wrong."""
    limit = self.config.dynamic_sampling.max_batches
    drawn: list[Graded] = []
    while len(drawn) < limit:
      drawn += self.draw(1, timings)
      kept = keep_mixed_groups(drawn, self.config.batch.prompts)
      if kept is not None:
        return kept
    solved = np.mean([g.batch.correct.mean() for g in drawn])
    raise DynamicSamplingError(
      f"dynamic sampling: {limit} batches of {self.config.batch.prompts} prompts at update"
      f" {self.step} hold too few groups that are neither all right nor all wrong (solve rate"
      f" {solved:.3f}). Raise config.dynamic_sampling.max_batches, or choose, in another"
      " --workdir, a larger config.batch.group_size or problems nearer to what the policy can do"
    )

  def prepare(self, batch: TrainBatch, index: int) -> TrainBatch:
    """The batch as it is trained on: permuted in a control run, scored by the reference policy."""
    c = self.config
    if c.permute_rewards:
      batch = permute_rewards(batch, np.random.default_rng([c.seed, self.step, index]))
    if c.reference.kl_coefficient:
      batch = dataclasses.replace(batch, reference_logprobs=self.score(self.initial, batch))
    return batch

  def score(self, params: Params, batch: TrainBatch) -> Any:
    """f32[P, G, T], the responses' log-probabilities at the policy's temperature."""
    # Without what the update alone reads, so that every call has the same shapes.
    plain = dataclasses.replace(batch, reference_logprobs=None, proximal_logprobs=None)
    return sharding.to_host(self.parts.score(params, self.parts.to_devices(plain))[0])

  def refresh_proximal(self, refresh: Refresh, index: int) -> None:
    """Scores a batch by the present policy at its first update, and again when that is old."""
    every, taken = self.config.schedule.proximal_every, refresh.scored.get(str(index))
    if taken is None or (every and self.step - taken >= every):
      batch = refresh.batches[index]
      logprobs = self.score(self.state.params, batch)
      refresh.batches[index] = dataclasses.replace(batch, proximal_logprobs=logprobs)
      refresh.scored[str(index)] = self.step

  def update(self, refresh: Refresh, timings: dict[str, float]) -> None:
    """Dispatches one update, then reads the metrics of the one before."""
    index = refresh.used % len(refresh.batches)
    if self.parts.method.loss.needs_proximal:
      self.refresh_proximal(refresh, index)
    batch = refresh.batches[index]
    dispatched = time.perf_counter()
    on_devices = self.parts.to_devices(batch)
    measured, arrays = self.measure(on_devices)
    self.state, metrics = self.parts.train_step(self.state, on_devices)
    if measured:
      entropy = self.parts.mean_entropy(self.state.params, on_devices)
      metrics |= measured | {"policy/entropy_change": entropy - metrics["policy/entropy"]}
    self.counters["tokens_trained"] += int(batch.mask.sum())
    host = {
      **refresh.statistics,
      **{f"counter/{name}": value for name, value in self.counters.items()},
      "staleness/mean": self.step - refresh.version,
      **timings,
    }
    self.step += 1
    refresh.used += 1
    if refresh.used == len(refresh.batches) * self.config.schedule.epochs_per_refresh:
      self.refresh = None
    self.read_metrics()
    self.unread = Update(self.step, dispatched, metrics, host, batch, arrays)

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
    self.devices_free = done
    tokens = float(update.batch.prompts.lengths.sum() + update.batch.mask.sum())
    timings = {
      "time/update_seconds": seconds,
      "time/update_tokens_per_second": tokens / seconds,
    }
    values |= update.host | timings
    self.writer.write(update.step, "train", values)
    if update.geometry:
      self.writer.write_geometry(update.step - 1, jax.device_get(update.geometry))
    if update.step % self.config.logging.print_every == 0 or update.step == self.config.num_updates:
      say(compact_line(update.step, self.config.num_updates, values))
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

  def evaluate(self) -> None:
    """Held-out accuracy under the present parameters."""
    self.read_metrics()
    c = self.config
    began = time.perf_counter()
    values, samples = evaluate(
      self.state.params,
      self.parts.task.held_out,
      collector=dataclasses.replace(self.collector, generate=self.parts.generate_held_out),
      batch_size=c.evaluation.batch_prompts,
      ks=c.evaluation.ks,
      seed=c.evaluation.seed,
      version=self.step,
    )
    self.devices_free = time.perf_counter()
    timings = {"time/evaluation_seconds": self.devices_free - began}
    self.writer.write(self.step, "eval", values | timings)
    first = samples[:: c.evaluation.num_samples]
    self.writer.write_rollouts(self.step, first[: c.logging.rollouts_per_refresh], phase="eval")
    self.evaluation = values
    accuracy = ", ".join(
      f"{name} {values[f'eval/{name}']:.3f}"
      f" [{values[f'eval/{name}_low']:.3f}, {values[f'eval/{name}_high']:.3f}]"
      for name in (f"pass@{k}" for k in c.evaluation.ks)
    )
    say(f"held-out after update {self.step}: {accuracy}")

  def save(self) -> None:
    """A checkpoint of everything that determines the future."""
    self.read_metrics()
    refresh = self.refresh
    host = {
      "problems": self.problems.get_state(),
      "counters": self.counters,
      "evaluation": self.evaluation,
    }
    if refresh is not None:
      fields = ("version", "statistics", "used", "scored")
      host["refresh"] = {name: getattr(refresh, name) for name in fields}
    last = self.step == self.config.num_updates
    evaluated = last or self.step % self.config.evaluation.every == 0
    self.checkpointer.save(
      self.step,
      self.state,
      host=host,
      arrays=[batch_to_arrays(batch) for batch in refresh.batches] if refresh else None,
      metric=self.evaluation[f"eval/pass@{self.config.evaluation.ks[0]}"] if evaluated else None,
    )

  def write_samples(self, graded: list[Graded]) -> None:
    """One rollout of each of the first prompts, under the number of the update that uses it."""
    logging = self.config.logging
    if self.step % logging.rollouts_every == 0:
      samples = graded[0].samples[:: self.config.batch.group_size]
      self.writer.write_rollouts(self.step + 1, samples[: logging.rollouts_per_refresh])


def permute_rewards(batch: TrainBatch, rng: np.random.Generator) -> TrainBatch:
  """Rewards, and correctness with them, dealt out anew over all rollouts: a control.

  The batch keeps its distribution of rewards, but they no longer say anything of the rollouts.
  """
  order = rng.permutation(batch.rewards.size)
  deal = lambda x: x.reshape(-1)[order].reshape(x.shape)
  return dataclasses.replace(batch, rewards=deal(batch.rewards), correct=deal(batch.correct))
