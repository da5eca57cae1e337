import math

import numpy as np

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
  assert "reward nan" in progress.compact_line(1, 1, {"reward/mean": math.nan})


def test_progress_without_a_terminal_is_plain_lines(capsys):
  bar = progress.progress(20, "rollouts", unit="token", initial=4)
  bar.update(8)
  bar.update(8)
  bar.close()
  bar.close()
  assert list(progress.progress(iter("ab"), "warm start")) == ["a", "b"]
  out, err = capsys.readouterr()
  lines = [line.split(", ")[0] for line in err.splitlines()]
  assert lines == ["rollouts: 4/20 token", "rollouts: 20/20 token", *lines[2:]]
  assert lines[-1] == "warm start: 2 it" and "\r" not in err and out == ""


def test_say_goes_to_stdout(capsys):
  progress.say("a line")
  assert capsys.readouterr().out == "a line\n"
