"""What a run writes: the files that a killed and resumed run ends with, damage, and trackers."""

import json
import math
import pathlib
import re
import struct
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from train import tiny

from rlvr_jax.commands import choose
from rlvr_jax.evaluate import run_files
from rlvr_jax.storage import files
from rlvr_jax.storage.files import DamagedFileError
from rlvr_jax.train.reporting import writer as metrics


def write_run(workdir, steps, resume_step=None, written=None, clock=0.0, until=None):
  """A run that writes three kinds of record per step, and returns what a checkpoint stores.

  The warm start is before the first step; the checkpoint is of step `until`, or the last.
  """
  with metrics.open_writer(workdir, resume_step, written) as writer:
    if resume_step is None:
      for step in (1, 2, 50):
        writer.write(step, "warm_start", {"loss": 1 / step})
    for step in steps:
      values = {"reward/mean": np.float32(math.sin(step)), "time/seconds": clock + step}
      writer.write(step, "train", values)
      if step % 2 == 0:
        writer.write(step, "eval", {"eval/pass@1": 0.1 * step})
      writer.write_rollouts(step, [{"completion": f"answer {step}\n", "reward": 1.0}] * 2)
    return writer.written(steps[-1] if until is None else until)


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
  with metrics.open_writer(tmp_path) as writer:
    writer.write(1, "train", {"x": value})
  (record,) = run_files.read_metrics(tmp_path)
  assert record["x"] == value and math.copysign(1, record["x"]) == math.copysign(1, value)


def test_non_finite_values_keep_the_file_valid_json(tmp_path):
  values = {"a": float("nan"), "b": jnp.float32(jnp.inf), "c": np.float64(-np.inf)}
  with metrics.open_writer(tmp_path) as writer:
    writer.write(1, "train", values)
  line = (tmp_path / run_files.METRICS_FILE).read_text()

  def refuse(constant):
    raise AssertionError(constant)

  record = json.loads(line, parse_constant=refuse)
  assert record == {"step": 1, "phase": "train", "a": "nan", "b": "inf", "c": "-inf"}
  (read,) = run_files.read_metrics(tmp_path)
  assert math.isnan(read["a"]) and read["b"] == math.inf and read["c"] == -math.inf


def test_a_completion_that_spells_nan_stays_text(tmp_path):
  with metrics.open_writer(tmp_path) as writer:
    writer.write_rollouts(3, [{"completion": "nan"}], phase="eval")
  (record,) = files.read_records(tmp_path / run_files.ROLLOUTS_FILE)
  assert record == {"step": 3, "phase": "eval", "completion": "nan"}


@pytest.mark.parametrize(
  ("reached", "torn"),
  [(4, b""), (9, b'{"step": 10, "ph'), (9, b'{"step": 4, "phase": "train"}')],
)
def test_resumed_run_ends_with_the_same_bytes(tmp_path, reached, torn):
  write_run(tmp_path / "whole", range(1, 11))
  killed = tmp_path / "killed"
  written = write_run(killed, range(1, reached + 1), until=4)
  for name in content(killed):
    with open(killed / name, "ab") as file:
      file.write(torn)
  write_run(killed, range(5, 11), resume_step=4, written=written)
  assert content(killed) == content(tmp_path / "whole")


def test_beginning_again_drops_everything_but_a_finished_warm_start(tmp_path):
  written = write_run(tmp_path, range(1, 4), until=0)
  metrics.open_writer(tmp_path, metrics.BEFORE_FIRST_STEP, written).close()
  kept = [(r["phase"], r["step"]) for r in run_files.read_metrics(tmp_path)]
  assert kept == [("warm_start", 1), ("warm_start", 2), ("warm_start", 50)]
  assert (tmp_path / run_files.ROLLOUTS_FILE).read_bytes() == b""
  metrics.open_writer(tmp_path).close()
  assert content(tmp_path) == {run_files.METRICS_FILE: b"", run_files.ROLLOUTS_FILE: b""}


def test_a_process_without_files_writes_nothing(tmp_path):
  writer = metrics.MetricWriter(tmp_path / "run")
  writer.write(1, "train", {"x": 1})
  writer.write_rollouts(1, [{"y": 2}])
  writer.write_geometry(1, {"x": np.ones(2)})
  writer.write_stage(1, 1)
  assert writer.written(1) == {} and not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ['{"st', "[1]", "1", '{"step": "1", "phase": "train"}', "{}"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
  (tmp_path / run_files.METRICS_FILE).write_text('{"step": 1, "phase": "train"}\n' + line + "\n")
  with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2 .*; remove that line"):
    list(run_files.read_metrics(tmp_path))


def without(line):
  return lambda lines: [other for number, other in enumerate(lines) if number != line]


# What happens to the lines of metrics.jsonl: three of the warm start, then train 1, train 2,
# eval 2, train 3, train 4, eval 4 (saved), train 5; and how many of the nine are left.
DAMAGES = {
  "cut": (lambda lines: [*lines[:5], lines[5][:9]], 5),
  "emptied": (lambda lines: [], 0),
  "missing": (without(4), 8),
  "doubled": (lambda lines: [*lines[:5], *lines[3:]], 11),
  "changed": (lambda lines: [line.replace(b'p": 1,', b'p": 7,') for line in lines], 8),
  "digit": (lambda lines: [*lines[:4], lines[4].replace(b"0.9", b"0.8"), *lines[5:]], 9),
  "foreign": (lambda lines: [*lines[:2], b"[1]\n", b"no\n", *lines[2:]], 9),
  "turned": (lambda lines: lines[::-1], 9),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_before_the_checkpoint_is_said_once(tmp_path, capsys, kind):
  """The records up to the checkpoint that are left are kept, and so is the damaged file."""
  written = write_run(tmp_path, range(1, 6), until=4)
  path = tmp_path / run_files.METRICS_FILE
  damage, count = DAMAGES[kind]
  damaged = damage(path.read_bytes().splitlines(keepends=True))
  path.write_bytes(b"".join(damaged))
  with metrics.open_writer(tmp_path, 4, written) as writer:
    written = writer.written(step=4)
  (said,) = capsys.readouterr().out.splitlines()
  assert f"the {count} records that are left; the old file is {path}.damaged-1" in said
  assert path.with_name("metrics.jsonl.damaged-1").read_bytes() == b"".join(damaged)
  left = [line for line in damaged if line.startswith(b'{"step"') and line.endswith(b"\n")]
  left = [x for x in left if json.loads(x)["step"] < 5 or json.loads(x)["phase"] != "train"]
  assert path.read_bytes().splitlines(keepends=True) == left and len(left) == count
  # What is lost is not missed again.
  metrics.open_writer(tmp_path, 4, written).close()
  assert capsys.readouterr().out == ""


def test_a_file_that_was_removed_is_said(tmp_path, capsys):
  written = write_run(tmp_path, [1])
  (tmp_path / run_files.ROLLOUTS_FILE).unlink()
  metrics.open_writer(tmp_path, 1, written).close()
  said = capsys.readouterr().out
  assert re.search(r"rollouts\.jsonl differs .* the 0 records .* the file was removed", said)
  assert (tmp_path / run_files.ROLLOUTS_FILE).read_bytes() == b""


def test_records_of_an_update_that_was_not_made_are_not_part_of_its_checkpoint(tmp_path, capsys):
  written = write_run(tmp_path, range(1, 4))
  saved = content(tmp_path)
  with metrics.open_writer(tmp_path, 3, written) as writer:
    writer.write_rollouts(4, [{"completion": "prepared"}])
    assert writer.written(step=3) == written
  metrics.open_writer(tmp_path, 3, written).close()
  assert content(tmp_path) == saved and capsys.readouterr().out == ""


def test_tensorboard_holds_the_values_and_the_purge(tmp_path):
  written = write_run(tmp_path, range(1, 6), until=2)
  write_run(tmp_path, range(3, 5), resume_step=2, written=written)
  board = tmp_path / metrics.TENSORBOARD_FOLDER
  found = scalars(board / "train")
  assert found["reward/mean"] == [(s, pytest.approx(math.sin(s))) for s in (1, 2, 3, 4)]
  assert scalars(board / "warm_start")["loss"] == [(1, 1.0), (2, 0.5), (50, pytest.approx(0.02))]
  assert [step for step, _ in scalars(board / "eval")["eval/pass_at_1"]] == [2, 4]


@pytest.mark.parametrize("kind", [pytest.param("rollouts", marks=pytest.mark.slow), "metrics"])
def test_a_full_disk_has_a_message(tmp_path, kind):
  """A file size limit stands in for a full disk."""
  code = """
import resource, signal, sys
from rlvr_jax.storage import files
from rlvr_jax.evaluate import run_files
from rlvr_jax.train.reporting import writer as metrics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = metrics.open_writer(sys.argv[1])
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


# --- trackers -------------------------------------------------------------------------------------

FAKE = """
  import json

  class Run:
    def log(self, values):
      if values.get("train/fails"):
        raise OSError("the site is down")
      print("log", json.dumps(values))

    def finish(self):
      print("finish")

  def init(**given):
    print("init", json.dumps(given, sort_keys=True))
    return Run()
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
  """Modules in place of the trackers' own, which print what they are given."""
  folder = tmp_path / "modules"
  folder.mkdir()
  for name in metrics.TRACKERS:
    (folder / f"{name}.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.syspath_prepend(folder)
  yield
  for name in metrics.TRACKERS:
    sys.modules.pop(name, None)


CONFIG = {"seed": 1, "ks": [1, 4]}


@pytest.mark.parametrize("name", metrics.TRACKERS)
def test_a_tracker_gets_the_numbers_and_goes_on_after_a_resume(installed, name, tmp_path, capsys):
  workdir = tmp_path / "run"
  workdir.mkdir()
  given = []
  for step in (1, 2):
    with_tracker = [metrics.Tracker(name, workdir, CONFIG)]
    writer = metrics.open_writer(workdir, trackers=with_tracker)
    writer.write(step, "train", {"reward/mean": 0.5, "note": "text"})
    writer.write(step, "eval", {"eval/pass@1": 0.25})
    writer.close()
    lines = capsys.readouterr().out.splitlines()
    given.append(json.loads(lines[0].removeprefix("init ")))
    values = {"train/step": step, "train/reward/mean": 0.5}
    evaluated = {"eval/step": step, "eval/pass@1": 0.25}
    assert lines[1:] == [f"log {json.dumps(v)}" for v in (values, evaluated)] + ["finish"]
  assert given[0] == given[1]  # the same run
  assert given[0]["resume"] == "allow" and given[0]["config"] == {"seed": 1, "ks": [1, 4]}
  identity = json.loads((workdir / metrics.TRACKED_FILE).read_text())["id"]
  assert given[0].get("id", given[0]["name"]).endswith(identity)


def test_a_tracker_that_fails_does_not_end_the_run(installed, tmp_path, capsys):
  tracker = metrics.Tracker("wandb", tmp_path, CONFIG)
  tracker.write(1, "train", {"fails": 1})
  tracker.write(2, "train", {"x": 1})
  tracker.close()
  out = capsys.readouterr().out
  assert "\nlog " not in out
  assert out.count("warning: wandb gets no more metrics of this run: the site is down") == 1


def test_a_tracker_that_is_unknown_or_absent_is_refused(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match="--trackers=mlflow is unknown; allowed: trackio, wandb"):
    choose.prepare_command(
      "train", tiny.get_config(), str(tmp_path), None, None, tracked_by=["mlflow"]
    )
  monkeypatch.setattr(sys, "path", [str(pathlib.Path(tmp_path))])
  monkeypatch.setattr(sys, "path_importer_cache", {})
  with pytest.raises(ValueError, match=r'wandb is not installed: pip install "rlvr_jax\[wandb\]"'):
    metrics.check_tracker("wandb")
