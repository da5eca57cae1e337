"""What a run logs: counters, seconds by phase, and a record of every update and evaluation."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import ml_collections
import numpy as np

from rlvr_jax.data import Task
from rlvr_jax.evaluate.held_out import GAP
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.finite import nonfinite_names
from rlvr_jax.rollouts.batch import (
  loss_tokens,
  response_lengths,
  write_batch,
)
from rlvr_jax.rollouts.batches import Batch
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import measure_wait
from rlvr_jax.train.reporting import machines
from rlvr_jax.train.reporting.data_use import WarmStart, first_update_warning
from rlvr_jax.train.reporting.progress import compact_line, say, warn
from rlvr_jax.train.reporting.writer import MetricWriter, stage_summary
from rlvr_jax.types import Params, TrainBatch, TrainState

COUNTERS = (
  *("batches", "prompts_sampled", "tokens_generated", "tokens_trained", "tokens_evaluated"),
  *("flops_generate", "flops_score", "flops_optimise", "flops_evaluate"),
)
_OF_GENERATION = ("time/generate_seconds", "time/grade_seconds")
_PHASES = (
  *_OF_GENERATION,
  *("time/sync_weights_seconds", "time/optimise_seconds", "time/evaluate_seconds"),
  *("time/publish_seconds", "time/fleet_wait_seconds"),
)


@dataclasses.dataclass
class DeviceClock:
  """When a set of devices last became free, in seconds on the host's clock."""

  free_from: float = 0.0

  def mark_free(self, now: float) -> None:
    """Notes that the devices have become free."""
    self.free_from = now


class DispatchedUpdate(NamedTuple):
  """An update that was dispatched to the devices, whose metrics have not been read yet."""

  step: int  # number of updates, this one included
  dispatched: float  # seconds on the host's clock
  metrics: dict[str, jax.Array]
  host: dict[str, float]  # metrics computed on the host
  batch: TrainBatch
  geometry: dict[str, jax.Array]  # arrays measured before the update; may be empty


class NonFiniteError(FloatingPointError):
  """Too many updates in a row were not finite, or one has made the state so."""


class Stopwatch:
  """Seconds by phase, and since when they are counted; all on the host's clock.

  Attributes:
    clock: of the trainer's devices.
    timings: seconds by phase since the last update.
    fresh_tokens: sampled since the last update.
  """

  def __init__(self, elapsed: float, phases: Sequence[str]):
    """Starts.

    Args:
      elapsed: seconds that the run had taken before it was resumed.
      phases: that alternate with each other, so that the rest of the time is idle.
    """
    self.clock = DeviceClock()
    self.timings: dict[str, float] = {}
    self.fresh_tokens = 0
    self._phases = phases
    self._began = time.perf_counter() - elapsed
    self._cycle_began = self._updated = time.perf_counter()  # at the last record, the last update
    self._first: tuple[int, float] | None = None  # update of this process, and when it ended

  def add_measurement(self, name: str, amount: float) -> None:
    """Adds to a phase's seconds, or to its memory's maximum, in the next update's record."""
    before = self.timings.get(name, 0.0)
    self.timings[name] = before + amount if name.startswith("time/") else max(before, amount)

  def count_tokens(self, tokens: int) -> None:
    """Counts tokens that were sampled since the last update."""
    self.fresh_tokens += tokens

  def restart(self) -> None:
    """Begins the timings of the next update."""
    self.timings = {}
    self.fresh_tokens = 0

  def times(self, phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the run so far, and seconds since the last record that belong to no phase."""
    now = time.perf_counter()
    cycle, self._cycle_began = now - self._cycle_began, now
    idle = cycle - sum(phases[name] for name in self._phases if name in phases)
    return {"time/idle_seconds": max(idle, 0.0), "time/elapsed_seconds": now - self._began}

  def end_update(self, now: float) -> float:
    """Seconds between the last update and this one, which ends `now`."""
    seconds, self._updated = now - self._updated, now
    return seconds

  def left(self, step: int, total: int) -> float | None:
    """Estimate of the seconds from update `step`, the last one, to update `total`.

    The mean of this process's updates after the first one, which compiles, evaluations included;
    None before there are any.
    """
    if self._first is None:
      self._first = step, self._updated
    first, ended = self._first
    return (self._updated - ended) * (total - step) / (step - first) if step > first else None


class Notices:
  """Remembers what was printed or written last, so that it is repeated only where it helps.

  Attributes:
    held_out: result of the last evaluation, such as "pass@1 0.431"; "" before the first.
  """

  def __init__(self) -> None:
    self._last: dict[str, object] = {}
    self.held_out = ""

  def remember_evaluation(self, values: Mapping[str, float], name: str) -> None:
    """Remembers the result of an evaluation for the lines of the updates after it.

    Args:
      values: its metrics; may be empty.
      name: of the one to print, such as "pass@1".
    """
    if f"eval/{name}" in values:
      self.held_out = f"{name} {values[f'eval/{name}']:.3f}"

  def begins(self, name: str, holds: bool) -> bool:
    """Whether something holds that did not the last time."""
    return self.changes(name, holds) and holds

  def changes(self, name: str, value: object) -> bool:
    """Whether a value differs from the last one of this name."""
    changes = self._last.get(name) != value
    self._last[name] = value
    return changes


class LoggedRun(NamedTuple):
  """What the log of a run has to know about it."""

  task: Task
  network: TransformerConfig
  schedule: Schedule
  batch: ml_collections.ConfigDict  # that section of the configuration
  max_response_length: int  # tokens
  warm_start: WarmStart
  num_updates: int
  max_skipped_in_a_row: int
  ks: Sequence[int]  # of pass@k
  logging: ml_collections.ConfigDict  # that section, too


class RunLog:
  """Counts, measures time, and writes records; does not affect what a run computes.

  Attributes:
    writer: of the records.
    counters: totals of the run so far, by the names in `COUNTERS`.
  """

  def __init__(
    self,
    run: LoggedRun,
    writer: MetricWriter,
    *,
    elapsed: float = 0.0,
    profile: machines.Profile | None = None,
  ):
    """Starts with all counters at 0.

    Args:
      run: that is logged.
      writer: writes the records.
      elapsed: seconds that the run had taken before it was resumed.
      profile: of some updates; None for none.
    """
    self.writer = writer
    self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
    self._run = run
    # In real time generation goes on beside the trainer.
    phases = [name for name in _PHASES if not (run.schedule.threaded and name in _OF_GENERATION)]
    self._stopwatch = Stopwatch(elapsed, phases)
    self._notices = Notices()
    self._hosts = machines.Hosts()
    self._profile = profile or machines.Profile("", writer.workdir)
    self._unread: DispatchedUpdate | None = None

  @property
  def clock(self) -> DeviceClock:
    """Of the trainer's devices."""
    return self._stopwatch.clock

  @property
  def timings(self) -> Mapping[str, float]:
    """Seconds by phase since the last update."""
    return self._stopwatch.timings

  # --- counting -----------------------------------------------------------------------------------

  def rewind(self, counters: Mapping[str, float]) -> None:
    """Makes these the counters: those of a checkpoint, or of before a phase that was undone."""
    self.counters = dict(counters)

  def remember_evaluation(self, values: Mapping[str, float]) -> None:
    """Makes this the last evaluation, as a resumed run has it from its checkpoint."""
    self._notices.remember_evaluation(values, f"pass@{self._run.ks[0]}")

  def add_measurement(self, name: str, amount: float) -> None:
    """Adds to a phase's seconds, or to its memory's maximum, in the next update's record."""
    self._stopwatch.add_measurement(name, amount)

  def count_sampled(self, batch: Batch, step: int) -> None:
    """Counts a new batch and writes some of its rollouts; `step`: number of updates so far."""
    statistics = batch.statistics
    self.counters["batches"] += batch.draws
    self.counters["prompts_sampled"] += batch.prompts
    self.counters["tokens_generated"] += batch.tokens
    self.counters["flops_generate"] += batch.flops
    timings = batch.timings and {**batch.timings, **machines.memory("generate")}
    for phase, seconds in timings.items():
      self.add_measurement(phase, seconds)
    self._stopwatch.count_tokens(batch.tokens if timings else 0)
    batch_of, total = self._run.schedule.batch, self._run.num_updates
    trained = (t for t in range(step, total) if batch_of(t) == batch.number)
    update = 1 + next(trained, step)  # the first one that trains on it
    if "dialogue/turns" in statistics:
      self._warn_of_limits(statistics, update)
    else:
      self._warn_of_truncation(statistics.get("response/truncated", 0.0), update)
    self._warn_of_faults(
      batch.samples,
      f"responses sampled for update {update}",
      "config.grading.outcomes.{} decides what happens to them; by default they are left out of the"
      " loss",
    )
    logging = self._run.logging
    # Once, however many batches are sampled before this update.
    if step % logging.rollouts_every == 0 and self._notices.changes("rollouts", step):
      samples = batch.samples[:: self._run.batch.group_size]
      self.writer.write_rollouts(step + 1, samples[: logging.rollouts_per_refresh])

  def _warn_of_truncation(self, share: float, update: int) -> None:
    """Warns when more than half of the responses are truncated, once until it is less."""
    if self._notices.begins("truncation", share > 0.5):
      limit = self._run.max_response_length
      warn(
        f"{share:.0%} of the responses sampled for update {update} were truncated at"
        f" config.max_response_length = {limit} tokens, most likely before their answer. Raise it,"
        " or reward shorter responses with config.overlong.buffer"
      )

  def _warn_of_limits(self, statistics: Mapping[str, float], update: int) -> None:
    """Warns when most dialogues end by limits, or without a reply, once until they do not."""
    remedies = {
      "turn_limit": "raise config.environment.max_turns",
      "length_limit": "raise config.max_response_length",
      "environment_limit": "raise config.environment.deadline_s or memory_mib",
      "environment_refused": "look at the turns in rollouts.jsonl",
    }
    shares = {outcome: statistics.get(f"outcome/{outcome}", 0.0) for outcome in remedies}
    limits = [outcome for outcome in remedies if outcome.endswith("_limit")]
    for name, outcomes in (("limits", limits), *((x, [x]) for x in remedies if x not in limits)):
      share = sum(shares[outcome] for outcome in outcomes)
      if self._notices.begins(name, share > 0.5):
        most = max(outcomes, key=lambda outcome: shares[outcome])
        parts = ", ".join(f"{outcome} {shares[outcome]:.0%}" for outcome in outcomes)
        warn(
          f"{share:.0%} of the dialogues sampled for update {update} ended so: {parts}. That may"
          f" be right; otherwise {remedies[most]}"
        )

  def _warn_of_faults(
    self, samples: Sequence[Mapping[str, Any]], which: str, consequence: str
  ) -> None:
    """Warns that the grader or the environment has failed, and how, once until it does not."""
    faults = {"crashed": "the grader crashed on", "environment_failed": "the environment failed in"}
    for outcome, what in faults.items():
      details = [sample["detail"] for sample in samples if sample["outcome"] == outcome]
      if self._notices.begins(f"{outcome}: {consequence}", bool(details)):
        warn(
          f"{what} {len(details) / len(samples):.0%} of the {which}; the first error is:"
          f" {details[0]}. {consequence.format(outcome)}"
        )

  def _warn_of_padding(self, filled: float, step: int) -> None:
    """Warns when more than half of a batch's positions are padding, once until it is less."""
    if self._notices.begins("padding", filled < 0.5):
      batch = self._run.batch
      warn(
        f"{1 - filled:.0%} of the positions in update {step} are padding: its rollouts do not fill"
        " a micro-batch on every device. Set a lower"
        f" config.batch.tokens_per_micro_batch (now {batch.tokens_per_micro_batch}) or"
        f" config.batch.tokens_per_row (now {batch.tokens_per_row}; both 0: as suited the first"
        f" batch), or raise config.batch.prompts = {batch.prompts}"
      )

  def _warn_of_warm_start(self, values: Mapping[str, float]) -> None:
    """Warns when the first update shows that the warm start has left little to learn from."""
    if text := first_update_warning(self._run.warm_start, values):
      warn(text)

  def count_scored(self, batch: TrainBatch) -> None:
    """Counts a forward pass over the batch."""
    lengths = batch.prompts.lengths, response_lengths(batch)
    predicted = loss_tokens(batch)
    self.counters["flops_score"] += forward_flops(self._run.network, *lengths, predicted=predicted)

  def count_trained(self, batch: TrainBatch, adapters: Params | None) -> None:
    """Counts an update on the batch; `adapters`: the trained parameters if others are frozen."""
    lengths = batch.prompts.lengths, response_lengths(batch)
    self.counters["tokens_trained"] += int(batch.mask.sum())
    self.counters["flops_optimise"] += update_flops(
      self._run.network, *lengths, predicted=loss_tokens(batch), adapters=adapters
    )

  def counter_metrics(self) -> dict[str, float]:
    """The counters as metrics."""
    passes = self.counters["prompts_sampled"] / len(self._run.task.train)
    counters = {f"counter/{name}": value for name, value in self.counters.items()}
    return {**counters, "data/passes": passes}

  # --- records ------------------------------------------------------------------------------------

  def before_update(self, update: int) -> None:
    """Starts the profile before its first update."""
    self._profile.before(update)

  def host_metrics(self, statistics: Mapping[str, float], step: int) -> dict[str, float]:
    """The host's metrics of the update after `step` others; restarts the timings."""
    host = {**statistics, **self.counter_metrics(), **self.timings}
    if seconds := self.timings.get("time/generate_seconds"):
      host["time/rollout_tokens_per_second"] = self._stopwatch.fresh_tokens / seconds
    if host.get("time/slot_steps"):
      host["time/slots_busy"] = host["time/slot_tokens"] / host["time/slot_steps"]
      host["time/drain_share"] = host["time/drain_slot_steps"] / host["time/slot_steps"]
    if host.get("time/replies"):
      host["time/seconds_per_reply"] = host["time/reply_waits_s"] / host["time/replies"]
    if "time/idle_slot_steps" in host and host["time/slot_steps"]:
      host["time/waiting_share"] = host["time/idle_slot_steps"] / host["time/slot_steps"]
      host["time/rebuilt_per_token"] = host["time/rebuilt_tokens"] / host["time/slot_tokens"]
    if length := self._run.schedule.stage_length:
      host["stage/number"], host["stage/age"] = divmod(step, length)
    self._stopwatch.restart()
    return host

  def remember_update(self, update: DispatchedUpdate) -> None:
    """Remembers an update, whose metrics `read_update` will read."""
    self._unread = update

  def read_update(self) -> None:
    """Waits for the last dispatched update, if it has not been read, and writes its metrics.

    Raises:
      NonFiniteError: too many updates in a row were not finite.
    """
    if self._unread is None:
      return
    update, self._unread = self._unread, None
    values = self.write_update(update)
    if values["update/skipped_in_a_row"] >= self._run.max_skipped_in_a_row:
      raise_non_finite(update, values, self.writer.workdir)

  def write_update(self, update: DispatchedUpdate) -> dict[str, float]:
    """Waits for the update's metrics, writes its record and returns it."""
    with measure_wait():
      values = {name: float(value) for name, value in jax.device_get(update.metrics).items()}
    if not values.get("update/skipped_in_a_row"):  # then NaN is what had nothing to be measured on
      values = {name: value for name, value in values.items() if not math.isnan(value)}
    done = time.perf_counter()
    seconds = done - max(update.dispatched, self.clock.free_from)
    self.clock.mark_free(done)
    tokens = float(update.batch.prompts.lengths.sum() + update.batch.mask.sum())
    values |= update.host | {
      "time/optimise_seconds": seconds,
      "time/update_tokens_per_second": tokens / seconds,
    }
    values |= (
      self._stopwatch.times(values)
      | machines.memory("optimise")
      | self._hosts.metrics(self._stopwatch.end_update(done))
    )
    if np.any(update.batch.valid):  # otherwise the grader or the environment is at fault
      self._warn_of_padding(values["rows/filled"], update.step)
      if update.step == 1:
        self._warn_of_warm_start(values)
    self.writer.write(update.step, "train", values)
    if update.geometry:
      self.writer.write_geometry(update.step - 1, jax.device_get(update.geometry))
    self._print(update.step, values)
    stage = self._run.schedule.stage_length
    if stage and update.step % stage == 0 and multihost.is_first():
      summary = stage_summary(self.writer.workdir, update.step, stage)
      self.writer.write(update.step, "stage", summary)
    self._profile.after(update.step)
    return values

  def _print(self, step: int, values: Mapping[str, float]) -> None:
    """Prints the line of an update, if it is due."""
    total = self._run.num_updates
    left = self._stopwatch.left(step, total)
    if step % self._run.logging.print_every == 0 or step == total:
      say(compact_line(step, total, values, held_out=self._notices.held_out, seconds_left=left))

  def write_evaluation(
    self,
    step: int,
    values: Mapping[str, float],
    samples: Sequence[Sequence[Mapping[str, Any]]],
    lengths: Sequence[np.ndarray],
    *,
    began: float,
  ) -> None:
    """Writes the record of an evaluation, and some of its rollouts.

    Args:
      step: number of updates so far.
      values: as `evaluate.held_out.accuracy` returns them.
      samples: [problems][samples].
      lengths: (of prompts, of responses, of these the policy's), in tokens.
      began: when the evaluation began, seconds on the host's clock.
    """
    self.clock.mark_free(time.perf_counter())
    prompts, responses, sampled = lengths
    self.counters["tokens_evaluated"] += int(sampled.sum())
    self.counters["flops_evaluate"] += forward_flops(
      self._run.network, prompts, responses, predicted=sampled
    )
    timings = {"time/evaluate_seconds": self.clock.free_from - began}
    timings |= self._stopwatch.times(timings) | machines.memory("evaluate")
    self.writer.write(step, "eval", {**values, **self.counter_metrics(), **timings})
    first = [row[0] for row in samples[: self._run.logging.rollouts_per_refresh]]
    self.writer.write_rollouts(step, first, phase="eval")
    flat = [sample for row in samples for sample in row]
    self._warn_of_faults(flat, f"held-out responses after update {step}", "They count as wrong")
    shown = ", ".join(
      f"{name} {values[f'eval/{name}']:.3f}"
      f" [{values[f'eval/{name}_low']:.3f}, {values[f'eval/{name}_high']:.3f}]"
      for name in (f"pass@{k}" for k in self._run.ks)
    )
    gap = f", {values[GAP]:.3f} below best play" if GAP in values else ""
    say(f"held-out after update {step}: {shown}{gap}")
    self.remember_evaluation(values)


def check_state(state: TrainState, step: int) -> None:
  """Raises NonFiniteError if the state after `step` updates is not finite: it must not be saved."""
  if names := nonfinite_names(state):
    raise NonFiniteError(
      f"after update {step} the optimizer has left NaN or infinite values in {len(names)} arrays of"
      f" the state, such as {names[0]}. This state is not saved; earlier checkpoints are untouched."
      " Check the settings of config.optimizer, or lower the peak of config.learning_rate, in"
      " another --workdir"
    )


def raise_non_finite(
  update: DispatchedUpdate, values: Mapping[str, float], workdir: pathlib.Path
) -> NoReturn:
  """Raises NonFiniteError after writing the update's batch into the workdir."""
  path = workdir / f"nonfinite_batch_{update.step}.safetensors"
  if multihost.is_first():
    write_batch(path, update.batch)
  raise NonFiniteError(
    f"{values['update/skipped_in_a_row']:.0f} updates in a row, up to update {update.step}, had a"
    " loss or gradient that was not finite; they were skipped and have not changed the parameters."
    " Lower the peak of config.learning_rate in another --workdir, or inspect the last batch,"
    f" {path.name} in the workdir"
  )
