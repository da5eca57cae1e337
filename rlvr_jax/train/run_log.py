"""What a run logs: counters, seconds by phase, and a record of every update and evaluation."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import ml_collections
import numpy as np

from rlvr_jax.data import Task
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.batch import Graded, RolloutBatch, response_lengths, write_batch
from rlvr_jax.rollouts.schedules import Schedule
from rlvr_jax.train import multihost, observe
from rlvr_jax.train.data_use import first_update_warning
from rlvr_jax.train.host import waiting
from rlvr_jax.train.metrics import MetricWriter, compact_line, say, stage_summary
from rlvr_jax.types import Params, TrainBatch

COUNTERS = (
  *("batches", "prompts_sampled", "tokens_generated", "tokens_trained", "tokens_evaluated"),
  *("flops_generate", "flops_score", "flops_optimise", "flops_evaluate"),
)
_OF_GENERATION = ("time/generate_seconds", "time/grade_seconds")
_PHASES = (
  *_OF_GENERATION,
  *("time/sync_weights_seconds", "time/optimise_seconds", "time/evaluate_seconds"),
)


@dataclasses.dataclass
class DeviceClock:
  """When a set of devices last became free, in seconds on the host's clock."""

  free_from: float = 0.0


class DispatchedUpdate(NamedTuple):
  """An update that was dispatched to the devices, whose metrics have not been read yet."""

  step: int  # number of updates, this one included
  dispatched: float  # seconds on the host's clock
  metrics: dict[str, jax.Array]
  host: dict[str, float]  # metrics computed on the host
  batch: TrainBatch
  geometry: dict[str, jax.Array]  # arrays measured before the update; may be empty


class NonFiniteError(FloatingPointError):
  """Too many updates in a row had a loss or gradient that was not finite."""


class RunLog:
  """Counts, measures time, and writes records; does not affect what a run computes.

  Attributes:
    counters: totals of the run so far, by the names in `COUNTERS`.
    timings: seconds by phase since the last update.
    clock: of the trainer's devices.
    profile: of some updates; of none, unless it is set.
  """

  def __init__(
    self,
    config: ml_collections.ConfigDict,
    task: Task,
    network: TransformerConfig,
    schedule: Schedule,
    writer: MetricWriter,
    *,
    elapsed: float = 0.0,
  ):
    """Starts with all counters at 0.

    Args:
      config, task: of the run.
      network: settings of the policy's network, to count its FLOPs.
      schedule: of the run.
      writer: writes the records.
      elapsed: seconds that the run had taken before it was resumed.
    """
    self.writer = writer
    self._config, self._task = config, task
    self._network, self._schedule = network, schedule
    self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
    self.timings: dict[str, float] = {}
    self.clock = DeviceClock()
    self.profile = observe.Profile("", writer.workdir)
    self._hosts = observe.Hosts()
    self._written = time.perf_counter()  # when the last update was
    self._fresh_tokens = 0  # sampled since the last update
    self._told: set[str] = set()  # what was warned of and still holds
    self._samples_written_at = -1  # update before which rollouts were last written
    self._began = time.perf_counter() - elapsed
    self._cycle_began = time.perf_counter()

  # --- counting -----------------------------------------------------------------------------------

  def spent(self, name: str, amount: float) -> None:
    """Adds to a phase's seconds, or to its memory's maximum, in the next update's record."""
    before = self.timings.get(name, 0.0)
    self.timings[name] = before + amount if name.startswith("time/") else max(before, amount)

  def count_sampled(self, batch: RolloutBatch, step: int) -> None:
    """Counts a graded batch and writes some of its rollouts; `step`: number of updates so far."""
    graded = batch.graded
    assert graded is not None
    self.counters["batches"] += batch.draws
    self.counters["prompts_sampled"] += graded.prompts
    self.counters["tokens_generated"] += graded.tokens
    self.counters["flops_generate"] += batch.flops
    for phase, seconds in batch.timings.items():
      self.spent(phase, seconds)
    self._fresh_tokens += graded.tokens if batch.timings else 0
    self._warn_of_truncation(graded.statistics.get("response/truncated", 0.0), step)
    self._warn_of_crashes(graded, step)
    logging = self._config.logging
    if step % logging.rollouts_every == 0 and self._samples_written_at != step:
      self._samples_written_at = step  # once, however many batches are sampled
      samples = graded.samples[:: self._config.batch.group_size]
      self.writer.write_rollouts(step + 1, samples[: logging.rollouts_per_refresh])

  def _begins(self, trouble: str, holds: bool) -> bool:
    """Whether a trouble holds that did not the last time."""
    begins = holds and trouble not in self._told
    self._told = self._told | {trouble} if holds else self._told - {trouble}
    return begins

  def _warn_of_truncation(self, share: float, step: int) -> None:
    """Says when more than half of the responses are truncated, once until it is less."""
    if self._begins("truncation", share > 0.5):
      limit = self._config.max_response_length
      say(
        f"warning: {share:.0%} of the responses sampled before update {step + 1} were cut at"
        f" config.max_response_length = {limit} tokens, before any answer that they would have"
        " given; raise it, or shorten responses with config.overlong.buffer"
      )

  def _warn_of_crashes(self, graded: Graded, step: int) -> None:
    """Says that the grader has failed, and how, once until it does not."""
    details = [sample["detail"] for sample in graded.samples if "detail" in sample]
    if self._begins("crashes", bool(details)):
      share = len(details) / len(graded.samples)
      say(
        f"warning: the grader crashed on {share:.0%} of the responses sampled before update"
        f" {step + 1}, at first with: {details[0]}. What becomes of them says"
        " config.grading.outcomes.crashed; by default they are left out of the loss"
      )

  def _warn_of_padding(self, filled: float, step: int) -> None:
    """Says when most places of the rows hold no token, once until they do."""
    if self._begins("padding", filled < 0.5):
      batch = self._config.batch
      say(
        f"warning: {1 - filled:.0%} of the places that update {step} computed hold no token, as its"
        " rollouts do not fill the rows of a micro-batch for every device; lower"
        f" config.batch.tokens_per_micro_batch = {batch.tokens_per_micro_batch} or"
        f" config.batch.tokens_per_row = {batch.tokens_per_row} (0: chosen by the greatest"
        f" lengths), or raise config.batch.prompts = {batch.prompts}"
      )

  def count_scored(self, batch: TrainBatch) -> None:
    """Counts a forward pass over the batch."""
    lengths = batch.prompts.lengths, response_lengths(batch)
    self.counters["flops_score"] += forward_flops(self._network, *lengths)

  def count_trained(self, batch: TrainBatch, adapters: Params | None) -> None:
    """Counts an update on the batch; `adapters`: the trained parameters if others are frozen."""
    lengths = batch.prompts.lengths, response_lengths(batch)
    self.counters["tokens_trained"] += int(batch.mask.sum())
    self.counters["flops_optimise"] += update_flops(self._network, *lengths, adapters=adapters)

  def counted(self) -> dict[str, float]:
    """The counters as metrics."""
    passes = self.counters["prompts_sampled"] / len(self._task.train)
    counters = {f"counter/{name}": value for name, value in self.counters.items()}
    return {**counters, "data/passes": passes}

  def times(self, phases: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the run so far, and seconds since the last record that belong to no phase."""
    now = time.perf_counter()
    cycle, self._cycle_began = now - self._cycle_began, now
    names = [name for name in _PHASES if name in phases]
    if self._schedule.real_time:
      names = [name for name in names if name not in _OF_GENERATION]  # parallel to the trainer
    idle = cycle - sum(phases[name] for name in names)
    return {"time/idle_seconds": max(idle, 0.0), "time/elapsed_seconds": now - self._began}

  # --- records ------------------------------------------------------------------------------------

  def host_metrics(self, statistics: Mapping[str, float], step: int) -> dict[str, float]:
    """The host's metrics of the update after `step` others; resets the timings."""
    host = {**statistics, **self.counted(), **self.timings}
    if seconds := self.timings.get("time/generate_seconds"):
      host["time/rollout_tokens_per_second"] = self._fresh_tokens / seconds
    if host.get("time/slot_steps"):
      host["time/slots_busy"] = host["time/slot_tokens"] / host["time/slot_steps"]
      host["time/drain_share"] = host["time/drain_slot_steps"] / host["time/slot_steps"]
    if length := self._schedule.stage_length:
      host["stage/number"], host["stage/age"] = divmod(step, length)
    self.timings, self._fresh_tokens = {}, 0
    return host

  def write_update(self, update: DispatchedUpdate) -> dict[str, float]:
    """Waits for the update's metrics, writes its record and returns it."""
    with waiting():
      values = {name: float(value) for name, value in jax.device_get(update.metrics).items()}
    done = time.perf_counter()
    seconds = done - max(update.dispatched, self.clock.free_from)
    self.clock.free_from = done
    tokens = float(update.batch.prompts.lengths.sum() + update.batch.mask.sum())
    values |= update.host | {
      "time/optimise_seconds": seconds,
      "time/update_tokens_per_second": tokens / seconds,
    }
    values |= (
      self.times(values) | observe.memory("optimise") | self._hosts.metrics(done - self._written)
    )
    self._written = done
    self._warn_of_padding(values["rows/filled"], update.step)
    if update.step == 1 and (text := first_update_warning(self._config, self._task, values)):
      say(f"warning: {text}")
    self.writer.write(update.step, "train", values)
    if update.geometry:
      self.writer.write_geometry(update.step - 1, jax.device_get(update.geometry))
    last = update.step == self._config.num_updates
    if update.step % self._config.logging.print_every == 0 or last:
      say(compact_line(update.step, self._config.num_updates, values))
    stage = self._schedule.stage_length
    if stage and update.step % stage == 0 and multihost.is_first():
      summary = stage_summary(self.writer.workdir, update.step, stage)
      self.writer.write(update.step, "stage", summary)
    self.profile.after(update.step)
    return values

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
      lengths: (of prompts, of responses), in tokens.
      began: when the evaluation began, seconds on the host's clock.
    """
    self.clock.free_from = time.perf_counter()
    self.counters["tokens_evaluated"] += int(lengths[1].sum())
    self.counters["flops_evaluate"] += forward_flops(self._network, *lengths)
    timings = {"time/evaluate_seconds": self.clock.free_from - began}
    timings |= self.times(timings) | observe.memory("evaluate")
    self.writer.write(step, "eval", {**values, **self.counted(), **timings})
    first = [row[0] for row in samples[: self._config.logging.rollouts_per_refresh]]
    self.writer.write_rollouts(step, first, phase="eval")
    shown = ", ".join(
      f"{name} {values[f'eval/{name}']:.3f}"
      f" [{values[f'eval/{name}_low']:.3f}, {values[f'eval/{name}_high']:.3f}]"
      for name in (f"pass@{k}" for k in self._config.evaluation.ks)
    )
    say(f"held-out after update {step}: {shown}")


def raise_non_finite(
  update: DispatchedUpdate, values: Mapping[str, float], workdir: pathlib.Path
) -> NoReturn:
  """Raises NonFiniteError after writing the update's batch into the workdir."""
  path = workdir / f"nonfinite_batch_{update.step}.npz"
  if multihost.is_first():
    write_batch(path, update.batch)
  raise NonFiniteError(
    f"{values['update/skipped_in_a_row']:.0f} updates in a row, the last being {update.step}, had a"
    f" loss or gradient that was not finite; its batch is in {path.name} of the workdir. Lower"
    " config.learning_rate's peak (in another --workdir), or inspect that batch; skipped"
    " updates have not changed the parameters"
  )
