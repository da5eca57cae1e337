"""What is counted and said of the batches that are sampled and trained on."""

import dataclasses
import itertools
import json
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import make_host_batch
from train import tiny
from train.sums import sums

from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.batches import Batch, Position
from rlvr_jax.rollouts.group import Group
from rlvr_jax.train.reporting.advice import WarmStart
from rlvr_jax.train.reporting.log import Clock, LoggedRun, NonFiniteError, RunLog
from rlvr_jax.train.reporting.writer import open_writer


def batch(number, statistics, samples=(), *, prompts=1, timings=()):
  """A batch of one group, as far as the log reads it."""
  groups = [Group(0, 0, 0, {}, {}, list(samples), {})]
  return Batch(number, groups, Position(), 1, prompts, 60, statistics, dict(timings), 0.0)


@pytest.fixture
def make_log(tmp_path):
  network = TransformerConfig(
    vocab_size=8, width=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_width=8
  )
  config = tiny.config()

  def make(schedule=None):
    run = LoggedRun(
      task=sums(),
      network=network,
      schedule=schedule or staleness.on_policy(),
      batch=config.batch,
      max_response_length=config.max_response_length,
      warm_start=WarmStart(num_steps=10, batch_size=8, demonstrations=16),
      num_updates=config.num_updates,
      max_skipped_in_a_row=2,
      ks=config.evaluation.ks,
      logging=config.logging,
    )
    return RunLog(run, writer)

  with open_writer(tmp_path) as writer:
    yield make


@pytest.fixture
def log(make_log):
  return make_log()


def write(log, step, *, finish=True, host_batch=None, **metrics):
  """An update with these metrics; returns the counters."""
  values = {"rows/filled": 1.0, "update/skipped_in_a_row": 0.0} | metrics
  counters = log.write_update(
    step,
    make_host_batch(np.ones((1, 1, 1))) if host_batch is None else host_batch,
    {name: jnp.float32(value) for name, value in values.items()},
    statistics={},
    dispatched=0.0,
    geometry={},
    adapters=None,
  )
  if finish:
    log.finish_update()
  return counters


def records(log):
  lines = (log.writer.workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def evaluate(log, step, rows):
  values = {f"eval/pass@{k}{end}": 0.0 for k in (1, 2) for end in ("", "_low", "_high")}
  lengths = [np.ones(2, np.int64), *[np.ones((2, 2), np.int64)] * 2]
  return log.write_evaluation(step, values, rows, lengths, began=0.0)


# --- records --------------------------------------------------------------------------------------


def test_an_update_has_the_counters_and_measurements_up_to_its_own(log):
  """Although it is written later, when the next batch is there."""
  timings = {"time/generate_seconds": 2.0, "time/slot_tokens": 30, "time/slot_steps": 40}
  log.count_sampled(batch(0, {}, prompts=125, timings=timings), 0)
  log.add_measurement("memory/grade_host_gib", 2.0)
  log.add_measurement("memory/grade_host_gib", 1.0)
  with log.measure("time/sync_weights_seconds"):
    pass
  assert write(log, 1, finish=False)["tokens_trained"] == 1
  log.count_sampled(batch(1, {}, prompts=125, timings={"time/replies": 0}), 1)
  log.count_sampled(batch(2, {}, prompts=125), 1)  # read from the store
  counters = write(log, 2)
  assert (counters["batches"], counters["tokens_generated"]) == (3, 180)
  first, second = records(log)
  assert first["time/rollout_tokens_per_second"] == 30.0  # 60 tokens in 2 s
  assert first["time/slots_busy"] == 0.75 and "time/drain_share" not in first
  assert first["memory/grade_host_gib"] == 2.0 and "time/sync_weights_seconds" in first
  assert [r["counter/prompts_sampled"] for r in (first, second)] == [125, 375]
  assert second["data/passes"] == 375 / 1000 and "time/tokens" not in first
  assert not {"time/slots_busy", "time/seconds_per_reply"} & second.keys()


def test_values_that_are_nan_are_left_out_unless_the_update_was_skipped(log):
  write(log, 1, **{"reward/mean": float("nan")})
  write(log, 2, **{"reward/mean": float("nan"), "update/skipped_in_a_row": 1.0})
  first, second = records(log)
  assert "reward/mean" not in first and second["reward/mean"] == "nan"


def test_too_many_updates_that_are_not_finite_end_the_run_with_their_batch(log):
  write(log, 1, **{"update/skipped_in_a_row": 1.0})
  with pytest.raises(NonFiniteError, match=r"2 updates in a row, up to update 2"):
    write(log, 2, **{"update/skipped_in_a_row": 2.0})
  assert (log.writer.workdir / "nonfinite_batch_2.safetensors").exists()
  assert len(records(log)) == 2


def test_the_line_of_an_update_has_the_last_result_and_the_time_left(log, capsys):
  log.resume(log.counters, {"eval/pass@1": 0.43121, "eval/pass@2": 0.5})
  for step in (2, 3, 12):
    write(log, step)
  first, second, last = capsys.readouterr().out.splitlines()
  assert first.endswith("held-out pass@1 0.431") and last.endswith("held-out pass@1 0.431")
  assert re.search(r"held-out pass@1 0\.431  \d+ s left$", second)


# --- times ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
  """A clock that shows these seconds in turn."""

  def make(*seconds, elapsed=0.0):
    shown = iter(seconds)
    fake = types.SimpleNamespace(perf_counter=lambda: next(shown))
    # The module's own, not everybody's: other threads look at a clock as well.
    monkeypatch.setattr("rlvr_jax.train.reporting.log.time", fake)
    return Clock(elapsed)

  return make


def test_what_is_in_no_phase_is_idle(clock):
  times = clock(100.0, 110.0, 111.0, elapsed=50.0)
  expected = {"time/idle_seconds": 3.0, "time/elapsed_seconds": 60.0}
  assert times.record({"time/optimise_seconds": 7.0}) == expected
  assert times.record({"time/optimise_seconds": 7.0})["time/idle_seconds"] == 0.0


def test_the_first_update_of_a_process_is_no_measure_of_the_time_left(clock):
  """It compiles."""
  times, found = clock(0.0, 160.0, 162.0, 166.0), []
  for step in (3, 4, 5):
    times.record({})
    found.append(times.left(step, 12))
  assert found == [None, 2.0 * 8, 3.0 * 7]


def test_the_process_that_waits_least_is_the_busiest(clock):
  times = clock(0.0, 10.0, 20.0)
  times.record({})
  assert times.busy([1.0, 2.0, 3.0]) == {}  # since when is unknown
  times.record({})
  busy = {"hosts/busy_seconds_0": 7.0, "hosts/busy_seconds_1": 9.0, "hosts/busy_seconds_2": 1.0}
  assert times.busy([4.0, 3.0, 12.0]) == busy


# --- advice ---------------------------------------------------------------------------------------


def test_advice_is_given_once_until_it_no_longer_holds(log, capsys):
  told = []
  for step, share in enumerate([0.5, 0.51, 0.9, 0.2, 0.75]):
    log.count_sampled(batch(step, {"response/truncated": share}), step)
    told.append("were truncated at config.max_response_length" in capsys.readouterr().out)
  assert told == [False, True, False, False, True]


def test_a_fault_is_told_also_in_an_evaluation(log, capsys):
  """Held-out accuracy is 0 then, and no policy is to blame."""
  crashed = {"outcome": "crashed", "detail": "KeyError: 'x'"}
  log.count_sampled(batch(0, {}, [crashed]), 0)
  assert "warning: the grader crashed on 100% of the responses" in capsys.readouterr().out
  for step in (0, 5):
    evaluate(log, step, [[crashed, {"outcome": "wrong"}], [crashed, crashed]])
  out = capsys.readouterr().out
  told = "warning: the grader crashed on 75% of the held-out responses after update 0; the first"
  assert out.count("warning") == 1 and told in out and "They count as wrong" in out


def test_padding_and_what_the_warm_start_left_are_told(log, capsys):
  nothing = {"groups/effective": 0.0, "policy/entropy": 0.0}
  told = []
  for step, filled in ((1, 0.9), (2, 0.2), (3, 0.1)):
    write(log, step, **nothing, **{"rows/filled": filled})
    out = capsys.readouterr().out
    told.append(
      re.findall("after the warm start the policy|positions in update 2 are padding", out)
    )
  assert [*itertools.chain(*told)] == [
    "after the warm start the policy",
    "positions in update 2 are padding",
  ]


def test_an_update_without_a_graded_rollout_is_no_fault_of_rows_or_warm_start(log, capsys):
  """Why none has a grade is told with the batch."""
  host = make_host_batch(np.ones((1, 1, 1)))
  none = dataclasses.replace(host, valid=np.zeros((1, 1), bool), mask=np.zeros_like(host.mask))
  values = {"rows/filled": 0.0, "groups/effective": 0.0, "policy/entropy": 0.0}
  for step in (1, 2):
    write(log, step, host_batch=none, **values)
  assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
  ("schedule", "expected"),
  [
    (staleness.updates_per_refresh(batches=3), [1, 2, 3]),
    (staleness.updates_per_refresh(batches=1, epochs=2), [1, 3, 5]),
    (staleness.fixed_lag(lag=2, num_updates=12), [1, 2, 3]),
  ],
)
def test_a_warning_names_the_update_that_trains_on_the_batch(make_log, capsys, schedule, expected):
  """Not the one before which it was sampled: under a lag that comes earlier."""
  log, told, number = make_log(schedule), [], 0
  for step in range(12):
    for _ in range(schedule.samples(step)):
      for truncated in (1.0, 0.0):  # told anew
        log.count_sampled(batch(number, {"response/truncated": truncated}), step)
      told += re.findall(r"sampled for update (\d+)", capsys.readouterr().out)
      number += 1
  assert [int(update) for update in told[:3]] == expected
