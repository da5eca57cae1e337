"""SIGTERM at any moment: the program is saved and has ended within 20 s, and goes on from there."""

import contextlib
import signal
import subprocess
import time

import numpy as np
import pytest
from rewards.user_graders import SECONDS
from train import preempted, tiny
from train.multiprocess_test import MESH, Processes, place

from rlvr_jax.storage.objects import open_objects
from rlvr_jax.storage.places import parse_path

STATUS = 143  # what the launcher asks for
LIMIT_S = 20.0  # a preempted TPU VM gives about 30


@contextlib.contextmanager
def running(workdir, count, **variables):
  """The program as so many processes, which have eight devices together."""

  def command_of(coordinator, process):
    flags = [*MESH, f"--stopped_status={STATUS}"]
    if count > 1:
      flags += place(coordinator, process, count)
    return tiny.command(workdir, *flags, config_file=preempted.__file__)

  processes = Processes(command_of, devices=8 // count, count=count, **variables)
  try:
    yield processes
  finally:
    processes.signal_all(signal.SIGKILL)


def finished(workdir, count):
  """Runs to the end; what the first process printed."""
  with running(workdir, count) as processes:
    statuses, outputs = processes.ended()
  assert statuses == [0] * count, "\n".join(outputs)[-5000:]
  return outputs[0]


def preempted_when(workdir, count, when, **variables):
  """SIGTERM to the last process at a moment; all end in time; what the first one printed."""
  with running(workdir, count, **variables) as processes:
    try:
      tiny.wait_for(lambda: when(processes), processes.processes[-1])
    except AssertionError as error:
      raise AssertionError("\n".join(processes.ended()[1])[-5000:]) from error
    began = time.monotonic()
    processes.processes[-1].send_signal(signal.SIGTERM)
    statuses, outputs = processes.ended()
    took = time.monotonic() - began
  assert statuses == [STATUS] * count, "\n".join(outputs)[-5000:]
  assert took < LIMIT_S, f"{took:.1f} s from the signal to the end"
  print(f"ended after {took:.1f} s")
  return outputs[0]


def batches(workdir):
  names = open_objects(parse_path("", workdir) / "rollouts").list()
  return len([name for name in names if name.endswith(".safetensors") and "/" not in name])


@pytest.fixture(scope="module", params=[(1, "disk"), (2, "bucket")], ids=["one", "two_in_a_bucket"])
def undisturbed(request, tmp_path_factory):
  """(processes, where workdirs are to be, outcome of the run on a disk that nothing disturbed)."""
  count, where = request.param
  workdir = tmp_path_factory.mktemp("undisturbed") / "run"
  finished(workdir, count)
  return count, where, tiny.outcome(workdir)


@pytest.fixture
def workdirs(undisturbed, emulator, folder, tmp_path):
  """Name → a new workdir."""
  on_disk = undisturbed[1] == "disk"
  return lambda name: tmp_path / name if on_disk else f"gs://bucket/{folder}_{name}"


@pytest.mark.slow
def test_sigterm_in_every_phase(undisturbed, workdirs):
  (count, _, expected), workdir = undisturbed, workdirs("run")

  def after(update):
    return tiny.has_record(tiny.written(workdir), update, "train")()

  # Updates 1 to 4 are made and not saved; the groups of the next four batches come one by one.
  in_refresh = lambda _: after(4) and tiny.unfinished_groups(workdir)
  output = preempted_when(workdir, count, in_refresh, **{SECONDS: "0.02"})
  assert "shutdown requested during generation; saving" in output
  assert tiny.last_checkpoint(workdir)[0] == 4 and batches(workdir) == 4
  kept = tiny.unfinished_groups(workdir)
  assert 0 < kept < 32

  # The others are sampled at once and wait for their grades.
  in_grading = lambda _: tiny.unfinished_groups(workdir) > kept
  output = preempted_when(workdir, count, in_grading, **{SECONDS: "1"})
  assert "shutdown requested during generation; saving" in output
  assert tiny.last_checkpoint(workdir)[0] == 4 and batches(workdir) == 4

  finished(workdir, count)
  assert tiny.outcome(workdir) == expected


@pytest.mark.soak
def test_sigterm_at_random_moments(undisturbed, workdirs):
  """Twenty, over whole runs."""
  count, _, expected = undisturbed
  rng, stops = np.random.default_rng(0), 0
  with running(workdirs("first"), count) as processes:
    tiny.wait_for(tiny.holds(workdirs("first"), processes.processes[0]), processes.processes[0])
    began = time.monotonic()
    processes.ended()
    duration = time.monotonic() - began
  while stops < 20:
    workdir = workdirs(f"after{stops}")
    for after in rng.uniform(0, duration, 4):
      with running(workdir, count) as processes:
        last = processes.processes[-1]
        # Before the run has its workdir, a signal ends the process as it ends any other.
        tiny.wait_for(tiny.holds(workdir, processes.processes[0]), last)
        with contextlib.suppress(subprocess.TimeoutExpired):
          last.wait(after)
        if last.poll() is not None:
          break  # it was faster
        began = time.monotonic()
        last.send_signal(signal.SIGTERM)
        statuses, outputs = processes.ended()
        took = time.monotonic() - began
      stops += 1
      said = [line for line in outputs[0].splitlines() if "shutdown requested" in line]
      print(f"stop {stops}: after {after:.1f} of {duration:.1f} s, {took:.1f} s: {said[-1:]}")
      assert took < LIMIT_S
      if 0 in statuses:  # it had just finished
        assert tiny.outcome(workdir) == expected
        break
      assert set(statuses) <= {STATUS, -signal.SIGTERM, 1 if count > 1 else STATUS}, outputs
      assert said or statuses != [STATUS] * count
    finished(workdir, count)
    assert tiny.outcome(workdir) == expected


@pytest.mark.slow
def test_resumed_with_one_process_instead_of_two(tmp_path):
  """On another mesh, too: the same results but for rounding, which it says."""
  workdir, alone = tmp_path / "run", tmp_path / "alone"
  in_refresh = lambda _: tiny.has_record(workdir, 4, "train")() and tiny.unfinished_groups(workdir)
  preempted_when(workdir, 2, in_refresh, **{SECONDS: "0.02"})
  flags = ["--config.mesh.data=4", "--config.batch.tokens_per_row=0"]
  output = tiny.run(workdir, *flags, config_file=preempted.__file__)
  said = next(line for line in output.splitlines() if line.startswith("resumed with processes"))
  assert "processes 2 → 1" in said and "differ by rounding" in said
  tiny.run(alone, config_file=preempted.__file__)
  found, expected = tiny.records(workdir), tiny.records(alone)
  assert [(r["phase"], r["step"]) for r in found] == [(r["phase"], r["step"]) for r in expected]
  for record, other in zip(found, expected, strict=True):
    for name, value in other.items():
      close = record[name] == value or abs(record[name] - value) <= 1e-3 * abs(value) + 1e-5
      assert close, (other["phase"], other["step"], name, value, record[name])
