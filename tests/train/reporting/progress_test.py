import math

import numpy as np
import pytest

from rlvr_jax.train.reporting import progress


def test_compact_line():
  values = {
    "reward/mean": 0.41234,
    "reward/pass_rate": 0.4,
    "groups/effective": 7.0,
    "policy/entropy": np.float32(0.25),
    "behavior/kl_k3": 0.000123,
    "loss/clip_fraction": 0.0012,
    "update/gradient_norm": 0.51239,
    "response/length_p50": 311.5,
    "response/length_p99": 2048.0,
    "response/truncated": 0.034,
    "time/slots_busy": 0.914,
    "time/drain_share": 0.08,
    "time/rollout_tokens_per_second": 12345.6,
    "time/update_tokens_per_second": 2345.6,
    "staleness/mean": 1.5,
    "something/else": 3.0,
  }
  assert progress.compact_line(3, 120, values) == (
    "step   3/120  reward 0.412  pass 40.0%  groups 7  entropy 0.250  kl 1.2e-04  clip 0.1%"
    "  grad 0.512  length p50 312  p99 2048  truncated 3.4%  slots busy 91%  drain 8%"
    "  rollout tok/s 12,346  update tok/s 2,346  stale 1.5"
  )
  assert progress.compact_line(3, 120, {"reward/mean": 1}) == "step   3/120  reward 1.000"
  line = progress.compact_line(3, 120, {}, held_out="pass@1 0.431", seconds_left=300.0)
  assert line == "step   3/120  held-out pass@1 0.431  5 min left"
  assert progress.compact_line(120, 120, {}, seconds_left=0.0) == "step 120/120"
  assert "reward nan" in progress.compact_line(1, 1, {"reward/mean": math.nan})


def test_the_line_of_dialogues_has_rare_outcomes_where_there_are_any():
  values = {
    "dialogue/turns": 2.75,
    "dialogue/policy_tokens": 311.4,
    "dialogue/environment_tokens": 1200.0,
    "outcome/turn_limit": 0.0,
    "outcome/environment_limit": 0.0,
    "outcome/environment_failed": 0.02,
    "time/seconds_per_reply": 1.23,
    "time/slots_busy": 0.9,
    "time/waiting_share": 0.06,
  }
  assert progress.compact_line(1, 2, values) == (
    "step 1/2  turns 2.8  policy tok 311  environment tok 1200  out of turns 0%  failed 2%"
    "  s/reply 1.2  slots busy 90%  waiting 6%"
  )


def test_progress_without_a_terminal_is_plain_lines(capsys):
  bar = progress.progress(20, "rollouts", unit="tokens", initial=4)
  bar.update(8)
  bar.update(8)
  bar.close()
  bar.close()
  assert list(progress.progress(iter("ab"), "warm start")) == ["a", "b"]
  out, err = capsys.readouterr()
  lines = [line.split(", ")[0] for line in err.splitlines()]
  assert lines == ["rollouts: 4/20 tokens", "rollouts: 20/20 tokens", *lines[2:]]
  assert lines[-1] == "warm start: 2 items" and "\r" not in err and out == ""


def test_a_plain_line_has_the_last_result_and_the_time_left(capsys):
  bar = progress.progress(20, "warm start", unit="steps", initial=4)
  bar.start_t -= 100  # seconds ago
  bar.set_postfix(loss="0.412", refresh=False)
  bar.update(8)
  bar.display()
  bar.update(8)
  bar.close()
  _, *lines = capsys.readouterr().err.splitlines()
  assert lines[0] == "warm start: 12/20 steps, loss=0.412, 2 min, 2 min left"
  assert lines[-1] == "warm start: 20/20 steps, loss=0.412, 2 min"


@pytest.mark.parametrize(
  ("seconds", "text"),
  [(0.4, "0 s"), (99.0, "99 s"), (100.0, "2 min"), (5940.0, "99 min"), (12600.0, "3.5 h")],
)
def test_a_duration_has_one_unit(seconds, text):
  assert progress.duration(seconds) == text
