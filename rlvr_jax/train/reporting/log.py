"""The log of a run: counters, seconds by phase, and a record of every update and evaluation."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

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
from rlvr_jax.storage.files import JSON
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import measure_wait
from rlvr_jax.train.reporting import advice, machines
from rlvr_jax.train.reporting.progress import compact_line, say, warn
from rlvr_jax.train.reporting.writer import MetricWriter
from rlvr_jax.types import Params, TrainBatch, TrainState

# Totals of a run, which its checkpoints keep.
COUNTERS = (
  *("batches", "prompts_sampled", "tokens_generated", "tokens_trained", "tokens_evaluated"),
  *("flops_generate", "flops_score", "flops_optimise", "flops_evaluate"),
)
_FRESH = "fresh_tokens"  # tokens sampled since the last update: part of a rate, not a metric
# Rates of measurements since the last update, recorded if both parts were measured. Measurements
# named "time/…" and _FRESH are sums, others are maxima.
_RATES = (  # name, dividend, divisor
  ("time/slots_busy", "time/slot_tokens", "time/slot_steps"),
  ("time/drain_share", "time/drain_slot_steps", "time/slot_steps"),
  ("time/waiting_share", "time/idle_slot_steps", "time/slot_steps"),
  ("time/rebuilt_per_token", "time/rebuilt_tokens", "time/slot_tokens"),
  ("time/seconds_per_reply", "time/reply_waits_s", "time/replies"),
  ("time/rollout_tokens_per_second", _FRESH, "time/generate_seconds"),
)
_OF_GENERATION = ("time/generate_seconds", "time/grade_seconds")
_PHASES = (  # phases whose seconds do not count as idle
  *_OF_GENERATION,
  *("time/sync_weights_seconds", "time/optimise_seconds", "time/evaluate_seconds"),
  *("time/publish_seconds", "time/fleet_wait_seconds"),
)


class NonFiniteError(FloatingPointError):
  """Too many updates in a row were not finite, or an update has made the state non-finite."""


class LoggedRun(NamedTuple):
  """The facts about a run that its log needs."""

  task: Task
  network: TransformerConfig
  schedule: Schedule
  batch: ml_collections.ConfigDict  # config.batch
  max_response_length: int  # tokens
  warm_start: advice.WarmStart
  num_updates: int
  max_skipped_in_a_row: int
  ks: Sequence[int]  # the values k of pass@k
  logging: ml_collections.ConfigDict  # config.logging


class DispatchedUpdate(NamedTuple):
  """An update that was dispatched to the devices, whose metrics have not been read yet."""

  step: int  # number of updates, this one included
  dispatched: float  # seconds on the host's clock
  metrics: dict[str, jax.Array]
  host: dict[str, float]  # metrics computed on the host
  batch: TrainBatch
  geometry: dict[str, jax.Array]  # arrays measured before the update; may be empty


def loss_tokens_alone(
  arrays: Mapping[str, np.ndarray], mask: jax.Array | np.ndarray
) -> dict[str, np.ndarray]:
  """The arrays of a measurement; arrays [P, G, T] become [N], their values at the N loss tokens.

  Arrays of another shape are unchanged. In [N], one rollout follows another, in the order [P, G].
  The measurement's array "lengths" says how many loss tokens each rollout has.
  """
  counts = np.asarray(mask) > 0
  return {name: x[counts] if x.shape == counts.shape else x for name, x in arrays.items()}


class Clock:
  """Times of a run on the host's clock, in seconds.

  Attributes:
    recorded: when the last record was written; the trainer's devices were then free.
  """

  def __init__(self, elapsed: float):
    """`elapsed`: seconds that the run had taken before it was resumed."""
    self.recorded = time.perf_counter()
    self._began = self.recorded - elapsed
    self._first: tuple[int, float] | None = None  # first update of this process, time of its end
    self._busy: list[float] = []  # seconds of each process without its waits, at the last update

  def record(self, phases: Mapping[str, float]) -> dict[str, float]:
    """Metrics of time: idle seconds since the last record, and seconds of the whole run.

    Args:
      phases: phase → seconds since the last record; these seconds do not count as idle.
    """
    before, self.recorded = self.recorded, time.perf_counter()
    idle = self.recorded - before - sum(phases.values())
    elapsed = self.recorded - self._began
    return {"time/idle_seconds": max(idle, 0.0), "time/elapsed_seconds": elapsed}

  def busy(self, waits: Sequence[float]) -> dict[str, float]:
    """Seconds that each process has worked since the last update.

    The result is {} with one process, and at the first update after a start. All processes wait for
    the slowest process, so the slowest process waits least and works longest.

    Args:
      waits: seconds that each process has waited so far for devices or other processes.
    """
    before, self._busy = self._busy, [self.recorded - seconds for seconds in waits]
    if len(before) < 2:
      return {}
    pairs = enumerate(zip(self._busy, before, strict=True))
    return {f"hosts/busy_seconds_{k}": max(now - then, 0.0) for k, (now, then) in pairs}

  def left(self, step: int, total: int) -> float | None:
    """Estimated seconds from update `step`, which was just recorded, to update `total`.

    The estimate assumes that each further update takes the mean time of this process's updates,
    evaluations included. The first update does not count, since it compiles; the result is None
    right after the first update.
    """
    if self._first is None:
      self._first = step, self.recorded
    first, ended = self._first
    return (self.recorded - ended) * (total - step) / (step - first) if step > first else None


class RunLog:
  """Counts, measures time, and writes records; does not affect what a run computes.

  The loop calls `write_update` and `write_evaluation`; sampling and scoring call the other methods.

  Attributes:
    writer: the writer of the records.
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
      run: the run that is logged.
      writer: writes the records.
      elapsed: seconds that the run had taken before it was resumed.
      profile: the profile of some updates; None for no profile.
    """
    self.writer = writer
    self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
    self._run = run
    self._clock = Clock(elapsed)
    self._profile = profile or machines.Profile("", writer.workdir)
    self._measured: dict[str, float] = {}  # measurements since the last update
    self._unread: DispatchedUpdate | None = None
    self._said: dict[str, object] = {}  # what was printed last, so that it is not repeated

  def resume(self, counters: Mapping[str, float], evaluation: Mapping[str, float]) -> None:
    """Continues with the counters and the last evaluation of a checkpoint."""
    self.counters = dict(counters)
    self._remember(evaluation)

  # --- counting -----------------------------------------------------------------------------------

  def add_measurement(self, name: str, amount: float) -> None:
    """Adds a measurement to the next update's record.

    Measurements of one name are summed if the name is "time/…" or "fresh_tokens"; of other
    measurements, the record has the maximum.
    """
    before = self._measured.get(name, 0.0)
    is_sum = name.startswith("time/") or name == _FRESH
    self._measured[name] = before + amount if is_sum else max(before, amount)

  @contextlib.contextmanager
  def measure(self, phase: str) -> Iterator[None]:
    """Context whose seconds are counted for this phase."""
    began = time.perf_counter()
    yield
    self.add_measurement(phase, time.perf_counter() - began)

  def count_sampled(self, batch: Batch, step: int) -> None:
    """Counts a new batch and writes some of its rollouts, after `step` updates."""
    run = self._run
    self.counters["batches"] += batch.draws
    self.counters["prompts_sampled"] += batch.prompts
    self.counters["tokens_generated"] += batch.tokens
    self.counters["flops_generate"] += batch.flops
    if batch.timings:  # the batch was sampled now, not read from the store
      timings = {**batch.timings, **machines.memory("generate"), _FRESH: batch.tokens}
      for name, amount in timings.items():
        self.add_measurement(name, amount)
    self._advise(advice.on_repetition(run.schedule.recorded, batch))
    trained = (t for t in range(step, run.num_updates) if run.schedule.batch(t) == batch.number)
    update = 1 + next(trained, step)  # the first update that trains on the batch
    self._advise(advice.on_responses(batch.statistics, update, run.max_response_length))
    self._advise(
      advice.on_faults(
        batch.samples,
        f"responses sampled for update {update}",
        "config.grading.outcomes.{} decides what happens to them; by default they are left out of"
        " the loss",
      )
    )
    # Rollouts are written once per update, however many batches are sampled before it.
    if step % run.logging.rollouts_every == 0 and self._said.get("rollouts") != step:
      self._said["rollouts"] = step
      samples = batch.samples[:: run.batch.group_size]
      self.writer.write_rollouts(step + 1, samples[: run.logging.rollouts_per_refresh])

  def count_scored(self, batch: TrainBatch) -> None:
    """Counts a forward pass over the batch."""
    lengths = batch.prompts.lengths, response_lengths(batch)
    predicted = loss_tokens(batch)
    self.counters["flops_score"] += forward_flops(self._run.network, *lengths, predicted=predicted)

  def _advise(self, texts: Mapping[str, str]) -> None:
    """Prints each text, unless the last call already had a text of the same name."""
    for name, text in texts.items():
      if text and not self._said.get(name):
        warn(text)
      self._said[name] = text

  def _totals(self) -> dict[str, float]:
    """The counters as metrics."""
    passes = self.counters["prompts_sampled"] / len(self._run.task.train)
    counters = {f"counter/{name}": value for name, value in self.counters.items()}
    return {**counters, "data/passes": passes}

  def _phases(self, values: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a record by phase, without phases of a thread that samples during updates."""
    beside = _OF_GENERATION if self._run.schedule.threaded else ()
    return {name: values[name] for name in _PHASES if name in values and name not in beside}

  # --- records ------------------------------------------------------------------------------------

  def before_update(self, update: int) -> None:
    """Starts the profile if the profile covers `update` and has not started yet."""
    self._profile.before(update)

  def write_update(
    self,
    step: int,
    batch: TrainBatch,
    metrics: dict[str, jax.Array],
    *,
    statistics: Mapping[str, float],
    dispatched: float,
    geometry: dict[str, jax.Array],
    adapters: Params | None,
  ) -> dict[str, float]:
    """Counts an update that was dispatched, and writes the record of the previous update.

    `finish_update` waits for the dispatched update and writes its record.

    Args:
      step: number of updates, this one included.
      batch: the batch that the update trains on.
      metrics: the metrics of the update, on the devices.
      statistics: the statistics of the batch's sampling and grading.
      dispatched: the time of dispatch on the host's clock, in seconds.
      geometry: arrays measured before the update; may be empty.
      adapters: the trained parameters, if other parameters are frozen.
    Returns:
      The counters, this update included.
    Raises:
      NonFiniteError: too many updates in a row were not finite.
    """
    lengths = batch.prompts.lengths, response_lengths(batch)
    self.counters["tokens_trained"] += int(batch.mask.sum())
    self.counters["flops_optimise"] += update_flops(
      self._run.network, *lengths, predicted=loss_tokens(batch), adapters=adapters
    )
    host = {**statistics, **self._totals(), **self._take_measured()}
    if length := self._run.schedule.stage_length:
      host["stage/number"], host["stage/age"] = divmod(step - 1, length)
    self.finish_update()
    self._unread = DispatchedUpdate(step, dispatched, metrics, host, batch, geometry)
    return dict(self.counters)

  def _take_measured(self) -> dict[str, float]:
    """The measurements since the last update, with their rates; resets them."""
    found, self._measured = self._measured, {}
    rates = {
      name: found[part] / found[whole]
      for name, part, whole in _RATES
      if part in found and found.get(whole)
    }
    found.pop(_FRESH, None)
    return found | rates

  def finish_update(self) -> None:
    """Waits for the dispatched update, and writes its record, unless the record is written already.

    Raises:
      NonFiniteError: too many updates in a row were not finite.
    """
    if self._unread is None:
      return
    update, self._unread = self._unread, None
    run, step = self._run, update.step
    with measure_wait():
      values = {name: float(value) for name, value in jax.device_get(update.metrics).items()}
    if not values.get("update/skipped_in_a_row"):  # then NaN means that nothing was measured
      values = {name: value for name, value in values.items() if not math.isnan(value)}
    seconds = time.perf_counter() - max(update.dispatched, self._clock.recorded)
    tokens = float(update.batch.prompts.lengths.sum() + update.batch.mask.sum())
    values |= update.host | {
      "time/optimise_seconds": seconds,
      "time/update_tokens_per_second": tokens / seconds,
    }
    values |= self._clock.record(self._phases(values)) | machines.memory("optimise")
    values |= self._clock.busy(multihost.process_waits_s())
    if np.any(update.batch.valid):  # otherwise the grader or the environment is at fault
      self._advise(advice.on_padding(values["rows/filled"], step, run.batch))
      if step == 1:
        self._advise({"warm start": advice.on_first_update(run.warm_start, values)})
    self.writer.write(step, "train", values)
    if update.geometry:
      arrays = loss_tokens_alone(jax.device_get(update.geometry), update.batch.mask)
      self.writer.write_geometry(step - 1, arrays)
    left = self._clock.left(step, run.num_updates)
    if step % run.logging.print_every == 0 or step == run.num_updates:
      held_out = str(self._said.get("held-out", ""))
      say(compact_line(step, run.num_updates, values, held_out=held_out, seconds_left=left))
    if run.schedule.stage_length and step % run.schedule.stage_length == 0:
      self.writer.write_stage(step, run.schedule.stage_length)
    self._profile.after(step)
    if values["update/skipped_in_a_row"] >= run.max_skipped_in_a_row:
      self._raise_non_finite(update, values["update/skipped_in_a_row"])

  def _raise_non_finite(self, update: DispatchedUpdate, skipped: float) -> NoReturn:
    """Raises NonFiniteError after writing the update's batch into the workdir."""
    path = self.writer.workdir / f"nonfinite_batch_{update.step}.safetensors"
    if multihost.is_first():
      write_batch(path, update.batch)
    raise NonFiniteError(
      f"{skipped:.0f} updates in a row, up to update {update.step}, had a loss or gradient that was"
      " not finite; they were skipped and have not changed the parameters. Lower the peak of"
      f" config.learning_rate in another --workdir, or inspect the last batch, {path.name} in the"
      " workdir"
    )

  def write_evaluation(
    self,
    step: int,
    values: Mapping[str, float],
    samples: Sequence[Sequence[Mapping[str, JSON]]],
    lengths: Sequence[np.ndarray],
    *,
    began: float,
  ) -> dict[str, float]:
    """Writes the record of an evaluation, and some of its rollouts.

    Args:
      step: number of updates so far.
      values: as `evaluate.held_out.accuracy` returns them.
      samples: for each problem, the records of its samples.
      lengths: numbers of tokens in (prompts, responses, the policy's parts of responses).
      began: when the evaluation began, seconds on the host's clock.
    Returns:
      The counters, this evaluation included.
    """
    prompts, responses, sampled = lengths
    self.counters["tokens_evaluated"] += int(sampled.sum())
    self.counters["flops_evaluate"] += forward_flops(
      self._run.network, prompts, responses, predicted=sampled
    )
    timings = {"time/evaluate_seconds": time.perf_counter() - began}
    timings |= self._clock.record(timings) | machines.memory("evaluate")
    self.writer.write(step, "eval", {**values, **self._totals(), **timings})
    first = [row[0] for row in samples[: self._run.logging.rollouts_per_refresh]]
    self.writer.write_rollouts(step, first, phase="eval")
    flat = [sample for row in samples for sample in row]
    which = f"held-out responses after update {step}"
    self._advise(advice.on_faults(flat, which, "They count as wrong"))
    shown = ", ".join(
      f"{name} {values[f'eval/{name}']:.3f}"
      f" [{values[f'eval/{name}_low']:.3f}, {values[f'eval/{name}_high']:.3f}]"
      for name in (f"pass@{k}" for k in self._run.ks)
    )
    gap = f", {values[GAP]:.3f} below best play" if GAP in values else ""
    say(f"held-out after update {step}: {shown}{gap}")
    self._remember(values)
    return dict(self.counters)

  def _remember(self, evaluation: Mapping[str, float]) -> None:
    """Keeps the result of an evaluation, which the printed lines of later updates show."""
    name = f"pass@{self._run.ks[0]}"
    if f"eval/{name}" in evaluation:
      self._said["held-out"] = f"{name} {evaluation[f'eval/{name}']:.3f}"


def check_state(state: TrainState, step: int) -> None:
  """Raises NonFiniteError if the state after `step` updates is not finite: it must not be saved."""
  if names := nonfinite_names(state):
    raise NonFiniteError(
      f"after update {step} the optimizer has left NaN or infinite values in {len(names)} arrays of"
      f" the state, such as {names[0]}. This state is not saved; earlier checkpoints are untouched."
      " Check the settings of config.optimizer, or lower the peak of config.learning_rate, in"
      " another --workdir"
    )
