"""What is told of the batches that are sampled and trained on."""

import dataclasses
import re

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
from rlvr_jax.train.reporting.data_use import WarmStart
from rlvr_jax.train.reporting.run_log import DispatchedUpdate, LoggedRun, RunLog, Stopwatch
from rlvr_jax.train.reporting.writer import MetricWriter


def batch(number, statistics, samples=(), *, prompts=1):
  """A batch of one group, as far as the log reads it."""
  groups = [Group(0, 0, 0, {}, {}, list(samples), {})]
  return Batch(number, groups, Position(), 1, prompts, 1, statistics, {}, 0.0)


@pytest.fixture
def log(tmp_path):
  network = TransformerConfig(
    vocab_size=8, width=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_width=8
  )
  with MetricWriter(tmp_path, None) as writer:
    run = LoggedRun(
      task=sums(),
      network=network,
      schedule=staleness.on_policy(),
      batch=tiny.config().batch,
      max_response_length=tiny.config().max_response_length,
      warm_start=WarmStart(num_steps=10, batch_size=8, demonstrations=16),
      num_updates=tiny.config().num_updates,
      max_skipped_in_a_row=tiny.config().max_skipped_in_a_row,
      ks=tiny.config().evaluation.ks,
      logging=tiny.config().logging,
    )
    yield RunLog(run, writer)


@pytest.mark.parametrize(
  ("outcome", "what"),
  [("crashed", "the grader crashed on "), ("environment_failed", "the environment failed in ")],
)
def test_a_fault_is_told_with_its_error_once_until_there_is_none(log, capsys, outcome, what):
  told = []
  for step, crashed in enumerate([[], [0, 1], [0], [], [1]]):
    fault = lambda i: {"outcome": outcome, "detail": f"KeyError: {i}"}
    fine = {"outcome": "environment_refused", "detail": "no"}
    samples = [fault(i) if i in crashed else fine for i in range(4)]
    log.count_sampled(batch(step, {}, samples), step)
    out = capsys.readouterr().out
    told.append(out.partition(what)[2].partition(" of the")[0])
    assert not crashed or not told[-1] or f"the first error is: KeyError: {crashed[0]}" in out
  assert told == ["", "50%", "", "", "25%"]


def test_a_fault_in_an_evaluation_is_told_too(log, capsys):
  """Held-out accuracy is 0 then, and no policy is to blame."""
  crashed = {"outcome": "crashed", "detail": "KeyError: 'x'"}
  rows = [[crashed, {"outcome": "wrong"}], [crashed, crashed]]
  values = {f"eval/pass@{k}{end}": 0.0 for k in (1, 2) for end in ("", "_low", "_high")}
  lengths = [np.ones(2, np.int64), *[np.ones((2, 2), np.int64)] * 2]
  for step in (0, 5):
    log.write_evaluation(step, values, rows, lengths, began=0.0)
  out = capsys.readouterr().out
  told = "warning: the grader crashed on 75% of the held-out responses after update 0; the first"
  assert out.count("warning") == 1 and told in out
  assert "error is: KeyError: 'x'. They count as wrong" in out


def test_rows_that_are_mostly_padding_are_told_once_until_they_are_not(log, capsys):
  told = []
  for step, filled in enumerate([0.5, 0.49, 0.1, 0.9, 0.25]):
    log._warn_of_padding(filled, step)
    out = capsys.readouterr().out
    told.append(out.partition("warning: ")[2].partition(" of the positions")[0])
    assert not told[-1] or "a lower config.batch.tokens_per_micro_batch (now 0) or" in out
  assert told == ["", "51%", "", "", "75%"]


def test_an_update_of_mostly_padding_is_told(log, capsys):
  for step, filled in enumerate([0.9, 0.2], start=2):
    metrics = {"rows/filled": jnp.float32(filled)}
    batch = make_host_batch(np.ones((1, 1, 1)))
    log.write_update(DispatchedUpdate(step, 0.0, metrics, {}, batch, {}))
    told = "80% of the positions in update 3 are padding" in capsys.readouterr().out
    assert told == (filled < 0.5)


def test_an_update_without_a_graded_rollout_is_no_fault_of_rows_or_warm_start(log, capsys):
  """Why none has a grade is told with the batch."""
  batch = make_host_batch(np.ones((1, 1, 1)))
  none = dataclasses.replace(batch, valid=np.zeros((1, 1), bool), mask=np.zeros_like(batch.mask))
  values = {"rows/filled": 0.0, "groups/effective": 0.0, "policy/entropy": 0.0}
  metrics = {name: jnp.float32(value) for name, value in values.items()}
  for step in (1, 2):
    log.write_update(DispatchedUpdate(step, 0.0, metrics, {}, none, {}))
  assert "warning" not in capsys.readouterr().out


def test_responses_that_are_mostly_truncated_are_told_once_until_it_is_less(log, capsys):
  told = []
  for step, share in enumerate([0.5, 0.51, 0.9, 0.2, 0.75]):
    log.count_sampled(batch(step, {"response/truncated": share}), step)
    told.append("were truncated at config.max_response_length" in capsys.readouterr().out)
  assert told == [False, True, False, False, True]


@pytest.mark.parametrize(
  ("schedule", "expected"),
  [
    (staleness.updates_per_refresh(batches=3), [1, 2, 3]),
    (staleness.updates_per_refresh(batches=1, epochs=2), [1, 3, 5]),
    (staleness.fixed_lag(lag=2, num_updates=12), [1, 2, 3]),
  ],
)
def test_a_warning_names_the_update_that_trains_on_the_batch(log, capsys, schedule, expected):
  """Not the one before which it was sampled: under a lag that comes earlier."""
  log._run = log._run._replace(schedule=schedule)
  told, number = [], 0
  for step in range(log._run.num_updates):
    for _ in range(schedule.samples(step)):
      for truncated in (1.0, 0.0):  # told anew
        statistics = {"response/truncated": truncated}
        log.count_sampled(batch(number, statistics), step)
      told += re.findall(r"sampled for update (\d+)", capsys.readouterr().out)
      number += 1
  assert [int(update) for update in told[:3]] == expected


def test_dialogues_that_mostly_end_by_limits_are_told_once_until_it_is_less(log, capsys):
  """The limits count together; the remedy is that of the most frequent one."""
  told = []
  for step, (turns, length) in enumerate([(0.2, 0.3), (0.3, 0.4), (0.0, 1.0), (0.1, 0), (0.6, 0)]):
    shares = {"outcome/turn_limit": turns, "outcome/length_limit": length}
    statistics = {"dialogue/turns": 2.0, "response/truncated": length, **shares}
    log.count_sampled(batch(step, statistics), step)
    told.append(capsys.readouterr().out)
  assert told == [
    "",
    "warning: 70% of the dialogues sampled for update 2 ended so: turn_limit 30%, length_limit 40%,"
    " environment_limit 0%. That may be right; otherwise raise config.max_response_length\n",
    "",
    "",
    "warning: 60% of the dialogues sampled for update 5 ended so: turn_limit 60%, length_limit 0%,"
    " environment_limit 0%. That may be right; otherwise raise config.environment.max_turns\n",
  ]


def test_what_the_warm_start_left_is_told_at_the_first_update_alone(log, capsys):
  values = {"rows/filled": 1.0, "groups/effective": 0.0, "policy/entropy": 0.0}
  metrics = {name: jnp.float32(value) for name, value in values.items()}
  told = []
  for step in (1, 2):
    batch = make_host_batch(np.ones((1, 1, 1)))
    log.write_update(DispatchedUpdate(step, 0.0, metrics, {}, batch, {}))
    told.append(
      "warning: after the warm start the policy has an entropy" in capsys.readouterr().out
    )
  assert told == [True, False]


def test_passes_are_prompts_by_training_problems(log):
  """Prompts of the groups that dynamic sampling has dropped included."""
  for step in range(3):
    log.count_sampled(batch(step, {}, prompts=125), step)
  assert log.counter_metrics()["data/passes"] == 3 * 125 / 1000


def test_the_first_update_of_a_process_is_no_measure_of_the_time_left():
  """It compiles."""
  watch = Stopwatch(0.0, ())
  watch.end_update(160.0)
  assert watch.left(3, 12) is None
  watch.end_update(162.0)
  assert watch.left(4, 12) == 2.0 * 8
  watch.end_update(166.0)
  assert watch.left(5, 12) == 3.0 * 7


def test_the_line_of_an_update_has_the_last_result_and_the_time_left(log, capsys):
  log.remember_evaluation({"eval/pass@1": 0.43121, "eval/pass@2": 0.5})
  for step in (2, 3, 12):
    metrics = {"rows/filled": jnp.float32(1.0)}
    batch = make_host_batch(np.ones((1, 1, 1)))
    log.write_update(DispatchedUpdate(step, 0.0, metrics, {}, batch, {}))
  first, second, last = capsys.readouterr().out.splitlines()
  assert first.endswith("held-out pass@1 0.431") and last.endswith("held-out pass@1 0.431")
  assert re.search(r"held-out pass@1 0\.431  \d+ s left$", second)
