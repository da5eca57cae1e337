import json
import math
import re
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from train.tiny import without_timings

from rlvr_jax.evaluate import run_files
from rlvr_jax.storage import files
from rlvr_jax.storage.files import DamagedFileError
from rlvr_jax.train.reporting import writer as metrics


def write_run(workdir, steps, resume_step=None, clock=0.0):
  """A run that writes three kinds of record per step; warm start before the first."""
  with metrics.MetricWriter(workdir, resume_step) as writer:
    if resume_step is None:
      for step in (1, 2, 50):
        writer.write(step, "warm_start", {"loss": 1 / step})
    for step in steps:
      values = {"reward/mean": np.float32(math.sin(step)), "time/seconds": clock + step}
      writer.write(step, "train", values)
      if step % 2 == 0:
        writer.write(step, "eval", {"eval/pass@1": 0.1 * step})
      writer.write_rollouts(step, [{"completion": f"answer {step}\n", "reward": 1.0}] * 2)


def content(workdir):
  names = (run_files.METRICS_FILE, run_files.ROLLOUTS_FILE)
  return {name: (workdir / name).read_bytes() for name in names}


def scalars(folder):
  """{tag: [(step, value)]} as TensorBoard shows them: a session start purges what it overlaps."""
  found = {}
  for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
    data, position = path.read_bytes(), 0
    while position < len(data):
      (size,) = struct.unpack_from("<Q", data, position)
      event = Event.FromString(data[position + 12 : position + 12 + size])
      position += 16 + size
      if event.session_log.status == SessionLog.START:
        found = {tag: [p for p in points if p[0] < event.step] for tag, points in found.items()}
      for value in event.summary.value:
        found.setdefault(value.tag, []).append((event.step, value.simple_value))
  return found


@pytest.mark.parametrize("value", [0.1 + 0.2, 1e-320, -0.0, 2**53 + 1, np.float32(0.1), 7, True])
def test_numbers_read_back_exactly(tmp_path, value):
  with metrics.MetricWriter(tmp_path, None) as writer:
    writer.write(1, "train", {"x": value})
  (record,) = run_files.read_metrics(tmp_path)
  assert record["x"] == value and math.copysign(1, record["x"]) == math.copysign(1, value)


def test_non_finite_values_keep_the_file_valid_json(tmp_path):
  values = {"a": float("nan"), "b": jnp.float32(jnp.inf), "c": np.float64(-np.inf)}
  with metrics.MetricWriter(tmp_path, None) as writer:
    writer.write(1, "train", values)
  line = (tmp_path / run_files.METRICS_FILE).read_text()

  def refuse(constant):
    raise AssertionError(constant)

  record = json.loads(line, parse_constant=refuse)
  assert record == {"step": 1, "phase": "train", "a": "nan", "b": "inf", "c": "-inf"}
  (read,) = run_files.read_metrics(tmp_path)
  assert math.isnan(read["a"]) and read["b"] == math.inf and read["c"] == -math.inf


def test_a_completion_that_spells_nan_stays_text(tmp_path):
  with metrics.MetricWriter(tmp_path, None) as writer:
    writer.write_rollouts(3, [{"completion": "nan"}], phase="eval")
  (record,) = files.read_records(tmp_path / run_files.ROLLOUTS_FILE)
  assert record == {"step": 3, "phase": "eval", "completion": "nan"}


def test_arrays_with_an_axis_are_refused(tmp_path):
  with metrics.MetricWriter(tmp_path, None) as writer, pytest.raises((TypeError, ValueError)):
    writer.write(1, "train", {"x": np.zeros(3)})


@pytest.mark.parametrize("reached", [4, 5, 9])
@pytest.mark.parametrize("torn", [b"", b'{"step": 10, "ph', b"{", b'{"step": 4, "phase": "train"}'])
def test_resumed_run_ends_with_the_same_bytes(tmp_path, reached, torn):
  write_run(tmp_path / "whole", range(1, 11))
  killed = tmp_path / "killed"
  write_run(killed, range(1, reached + 1))
  for name in content(killed):
    with open(killed / name, "ab") as file:
      file.write(torn)
  write_run(killed, range(5, 11), resume_step=4)
  assert content(killed) == content(tmp_path / "whole")


def test_only_timings_differ_between_runs(tmp_path):
  write_run(tmp_path / "a", range(1, 4))
  write_run(tmp_path / "b", range(1, 4), clock=100.0)
  a, b = list(run_files.read_metrics(tmp_path / "a")), list(run_files.read_metrics(tmp_path / "b"))
  assert a != b
  assert [*map(without_timings, a)] == [*map(without_timings, b)]
  assert "reward/mean" in without_timings(a[-1])


def test_beginning_again_drops_everything_but_a_cached_warm_start(tmp_path):
  write_run(tmp_path, range(1, 4))
  with metrics.MetricWriter(tmp_path, None) as writer:
    for step in (1, 2, 50):
      writer.write(step, "warm_start", {"loss": 1 / step})
    written = writer.written(step=0)
    writer.write(1, "train", {"x": 1})
  metrics.MetricWriter(tmp_path, None, written).close()
  kept = [(r["phase"], r["step"]) for r in run_files.read_metrics(tmp_path)]
  assert kept == [("warm_start", 1), ("warm_start", 2), ("warm_start", 50)]
  assert (tmp_path / run_files.ROLLOUTS_FILE).read_bytes() == b""
  metrics.MetricWriter(tmp_path, None).close()
  assert content(tmp_path) == {run_files.METRICS_FILE: b"", run_files.ROLLOUTS_FILE: b""}


@pytest.mark.parametrize("line", ['{"st', "[1]", "1", '{"step": "1", "phase": "train"}', "{}"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
  (tmp_path / run_files.METRICS_FILE).write_text('{"step": 1, "phase": "train"}\n' + line + "\n")
  with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2 .*; remove that line"):
    list(run_files.read_metrics(tmp_path))


def without(line):
  return lambda lines: [other for number, other in enumerate(lines) if number != line]


# What happens to the lines of metrics.jsonl, and what is said: three of the warm start, then train
# 1, train 2, eval 2, train 3, train 4, eval 4 (saved), train 5.
DAMAGES = {
  "cut": (lambda lines: [*lines[:5], lines[5][:9]], "it has 2 of 4 train records, 0 of 2 eval rec"),
  "emptied": (lambda lines: [], "0 of 3 warm_start records, 0 of 4 train records, 0 of 2 eval"),
  "missing": (without(4), r"it has 3 of 4 train records\."),
  "doubled": (lambda lines: [*lines[:5], *lines[3:]], r"it has 6 of 4 train records\."),
  "changed": (lambda lines: [line.replace(b'p": 1,', b'p": 7,') for line in lines],
              r"it has 3 of 4 train records\."),
  "digit": (lambda lines: [*lines[:4], lines[4].replace(b"0.9", b"0.8"), *lines[5:]],
            "records were changed or moved"),
  "foreign": (lambda lines: [*lines[:2], b"[1]\n", b"no\n", *lines[2:]],
              r"it has 2 lines that are not records\."),
  "turned": (lambda lines: lines[::-1], "records were changed or moved"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_before_the_checkpoint_is_said_once(tmp_path, capsys, kind):
  """The records up to the checkpoint that are left are kept, and so is the damaged file."""
  write_run(tmp_path, range(1, 5))
  with metrics.MetricWriter(tmp_path, 4) as writer:
    written = writer.written(step=4)
    writer.write(5, "train", {"x": 1})
  path = tmp_path / run_files.METRICS_FILE
  damage, message = DAMAGES[kind]
  damaged = damage(path.read_bytes().splitlines(keepends=True))
  path.write_bytes(b"".join(damaged))
  metrics.MetricWriter(tmp_path, 4, written).close()
  (said,) = capsys.readouterr().out.splitlines()
  assert re.search(message, said), said
  assert path.with_name("metrics.jsonl.damaged-1").read_bytes() == b"".join(damaged)
  assert f"the old file is {path}.damaged-1" in said
  records = [line for line in damaged if line.startswith(b'{"step"') and line.endswith(b"\n")]
  left = [x for x in records if json.loads(x)["step"] < 5 or json.loads(x)["phase"] != "train"]
  if kind == "changed":  # the one of step 1 is now of step 7
    left = [x for x in records if json.loads(x)["step"] not in (5, 7) or b"warm" in x]
  assert path.read_bytes().splitlines(keepends=True) == left
  # What is lost is not missed again.
  with metrics.MetricWriter(tmp_path, 4) as writer:
    again = writer.written(step=4)
  metrics.MetricWriter(tmp_path, 4, again).close()
  assert capsys.readouterr().out == ""


def test_a_file_that_was_removed_is_said(tmp_path, capsys):
  write_run(tmp_path, [1])
  with metrics.MetricWriter(tmp_path, 1) as writer:
    written = writer.written(step=1)
  (tmp_path / run_files.ROLLOUTS_FILE).unlink()
  metrics.MetricWriter(tmp_path, 1, written).close()
  assert "rollouts.jsonl was removed: it has 0 of 2 train records" in capsys.readouterr().out
  assert (tmp_path / run_files.ROLLOUTS_FILE).read_bytes() == b""


def test_rollouts_that_are_alike_are_each_a_record(tmp_path, capsys):
  write_run(tmp_path, [1])  # twice the same rollout
  with metrics.MetricWriter(tmp_path, 1) as writer:
    written = writer.written(step=1)
  metrics.MetricWriter(tmp_path, 1, written).close()
  assert capsys.readouterr().out == ""
  assert written[run_files.ROLLOUTS_FILE]["records"] == {"train": 2}
  path = tmp_path / run_files.ROLLOUTS_FILE
  path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
  metrics.MetricWriter(tmp_path, 1, written).close()
  assert "rollouts.jsonl differs from" in capsys.readouterr().out


def test_records_of_an_update_that_was_not_made_are_not_part_of_its_checkpoint(tmp_path, capsys):
  write_run(tmp_path, range(1, 4))
  saved = content(tmp_path)
  with metrics.MetricWriter(tmp_path, 3) as writer:
    writer.write_rollouts(4, [{"completion": "prepared"}])
    written = writer.written(step=3)
  metrics.MetricWriter(tmp_path, 3, written).close()
  assert content(tmp_path) == saved and capsys.readouterr().out == ""


def test_each_record_is_in_the_file_at_once(tmp_path):
  writer = metrics.MetricWriter(tmp_path, None)
  writer.write(1, "train", {"x": 1})
  writer.write_rollouts(1, [{"y": 2}])
  assert len(list(run_files.read_metrics(tmp_path))) == 1
  assert len(list(files.read_records(tmp_path / run_files.ROLLOUTS_FILE))) == 1
  writer.close()


def test_tensorboard_holds_the_values_and_the_purge(tmp_path):
  write_run(tmp_path, range(1, 6))
  write_run(tmp_path, range(3, 5), resume_step=2)
  board = tmp_path / metrics.TENSORBOARD_FOLDER
  found = scalars(board / "train")
  assert found["reward/mean"] == [(s, pytest.approx(math.sin(s))) for s in (1, 2, 3, 4)]
  assert scalars(board / "warm_start")["loss"] == [(1, 1.0), (2, 0.5), (50, pytest.approx(0.02))]
  assert [step for step, _ in scalars(board / "eval")["eval/pass_at_1"]] == [2, 4]


@pytest.mark.parametrize("kind", ["rollouts", "metrics"])
def test_a_full_disk_has_a_message(tmp_path, kind):
  """A file size limit stands in for a full disk."""
  code = """
import resource, signal, sys
from rlvr_jax.storage import files
from rlvr_jax.evaluate import run_files
from rlvr_jax.train.reporting import writer as metrics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = metrics.MetricWriter(sys.argv[1], None)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
try:
  for step in range(100):
    if sys.argv[2] == "rollouts":
      writer.write_rollouts(step, [{"completion": "x" * 100}])
    else:  # TensorBoard needs more bytes for this than the text file
      writer.write(step, "train", {f"{i}": 0 for i in range(9)})
except files.DiskFullError as error:
  print(error)
"""
  command = [sys.executable, "-c", code, tmp_path, kind]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert "no space left to write" in done.stdout and "rerun the same command" in done.stdout
  whole = list(files.read_records(tmp_path / f"{kind}.jsonl"))
  assert len(whole) >= 3  # what was written before is readable, the torn line left out
