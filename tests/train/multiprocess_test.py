"""Several processes over loopback, eight devices together, as one run; and what they agree on."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from train import routes_test, tiny

from rlvr_jax.train.checkpointing.workdir import WorkdirLock
from rlvr_jax.train.cluster import multihost

MESH = [f"--config.mesh.{axis}=2" for axis in ("data", "fsdp", "tensor")]
# In two stages, reweighted by gradients whose Gram matrix is over all processes.
METHOD = ["--config.schedule=stages(count=2)", "--config.reweighting=salt"]
FLAGS = [*MESH, *METHOD, "--config.num_updates=6"]
TIMEOUT_S = 900


def free_port():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def place(coordinator, process, count=2):
  """The flags that tell a process which one of a run it is."""
  return [f"--coordinator={coordinator}", f"--num_processes={count}", f"--process_id={process}"]


class Processes:
  """Some processes of one program, given what tells them apart."""

  def __init__(self, command_of, devices, count=2, **variables):
    port = free_port()
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    self.processes = [
      subprocess.Popen(
        command_of(f"127.0.0.1:{port}", process),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tiny.ROOT,
        env=tiny.environment(XLA_FLAGS=flags, **variables),
      )
      for process in range(count)
    ]

  def signal_all(self, number):
    for process in self.processes:
      process.send_signal(number)

  def ended(self):
    """Waits for both; their exit statuses and what they printed."""
    outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in self.processes]
    return [process.returncode for process in self.processes], outputs


@contextlib.contextmanager
def training(workdir, count=2, config_file=tiny.__file__):
  """The program as so many processes, which have eight devices together."""

  def command_of(coordinator, process):
    flags = [*FLAGS, *place(coordinator, process, count)]
    return tiny.command(workdir, *flags, config_file=config_file)

  processes = Processes(command_of, devices=8 // count, count=count)
  try:
    yield processes
  finally:
    processes.signal_all(signal.SIGKILL)


def train_to_the_end(workdir, count=2, config_file=tiny.__file__):
  with training(workdir, count, config_file) as processes:
    statuses, outputs = processes.ended()
  assert statuses == [0] * count, "\n".join(outputs)[-5000:]
  return outputs


# --- training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """(workdir, outputs) of the pair's run from beginning to end."""
  workdir = tmp_path_factory.mktemp("pair") / "run"
  return workdir, train_to_the_end(workdir)


@pytest.mark.slow
def test_only_the_first_process_speaks(undisturbed):
  first, second = undisturbed[1]
  assert "held-out after update 6" in first and "learning_curves.png" in first
  assert not re.search(r"update|step|held-out", re.sub(r"(?m)^(W\d|\[Gloo\]).*$", "", second))


def assert_equal_to_one_process(workdir, one, get_config=tiny.get_config):
  """To float tolerance: sums over eight devices are taken in another order between processes."""
  found, expected = tiny.records(workdir), tiny.records(one)
  assert len(expected) == 4 + 3 + 6 + 2
  for record, other in zip(found, expected, strict=True):
    assert record.keys() == other.keys()
    for name, value in other.items():
      close = record[name] == value or abs(record[name] - value) <= 1e-3 * abs(value) + 1e-5
      assert close, (other["phase"], other["step"], name, value, record[name])
  texts = lambda workdir: [
    (r["prompt"], r["completion"], r["outcome"])
    for r in map(json.loads, tiny.rollouts(workdir).splitlines())
  ]
  assert texts(workdir) == texts(one)
  # One process reads the checkpoint that several have written, with its checksums.
  (step, _, arrays), (step0, _, arrays0) = (
    tiny.last_checkpoint(x, get_config) for x in (workdir, one)
  )
  assert step == step0 == 6
  assert [path for path, _ in arrays] == [path for path, _ in arrays0]
  # What is compared has learned something.
  assert any(r.get("update/gradient_norm", 0) > 0.01 for r in expected)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """The workdir of the same run as one process."""
  workdir = tmp_path_factory.mktemp("alone") / "run"
  tiny.run(workdir, *FLAGS)
  return workdir


@pytest.mark.slow
def test_two_processes_equal_one(undisturbed, alone):
  assert_equal_to_one_process(undisturbed[0], alone)


@pytest.mark.slow
def test_two_processes_of_a_mixture_equal_one(tmp_path):
  """Each has the routes of its own rows; they are replayed there."""
  train_to_the_end(tmp_path / "pair", config_file=routes_test.__file__)
  tiny.run(tmp_path / "one", *FLAGS, config_file=routes_test.__file__)
  assert_equal_to_one_process(tmp_path / "pair", tmp_path / "one", routes_test.get_config)


@pytest.mark.soak
def test_eight_processes_equal_one(alone, tmp_path):
  train_to_the_end(tmp_path / "run", count=8)
  assert_equal_to_one_process(tmp_path / "run", alone)


@pytest.mark.slow
def test_both_end_where_the_first_refuses(tmp_path):
  workdir = tmp_path / "run"
  lock = WorkdirLock(workdir)
  with training(workdir) as pair:
    began = time.monotonic()
    statuses, outputs = pair.ended()
  lock.close()
  assert statuses == [1, 1]
  assert all("is in use by process" in output for output in outputs)
  assert "process 0 of 2 failed: WorkdirError" in outputs[1]
  assert time.monotonic() - began < TIMEOUT_S / 2


def assert_death_is_named(count, killed, waiting):
  arguments = [str(count), str(killed), waiting]
  command_of = lambda coordinator, i: [
    *(sys.executable, "-c", textwrap.dedent(DEATH), coordinator, str(i), *arguments)
  ]
  statuses, outputs = Processes(command_of, devices=1, count=count).ended()
  now = time.time()
  assert statuses == [-signal.SIGKILL if i == killed else 1 for i in range(count)], outputs
  assert now - float(outputs[killed].split()[-1]) < 20
  for survivor in {*range(count)} - {killed}:
    last = outputs[survivor].strip().splitlines()[-1]
    message = f"error: process {killed} of {count} has died .* process {survivor} was at 'a test'.*"
    assert re.match(f"{message} Rerun", last), outputs[survivor]
    assert "Traceback" not in outputs[survivor] and "most recent call" not in outputs[survivor]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("killed", "waiting"),
  [(0, "for a message"), (0, "in a collective"), (0, "alone"), (1, "in a collective")],
)
def test_the_death_of_a_process_is_named(killed, waiting):
  """Found by one that waits for a message or in a collective, and by one that computes alone."""
  assert_death_is_named(2, killed, waiting)


@pytest.mark.soak
@pytest.mark.parametrize(
  ("killed", "waiting"), [(0, "for a message"), (5, "in a collective"), (5, "alone")]
)
def test_the_death_of_one_of_eight_processes_is_named(killed, waiting):
  assert_death_is_named(8, killed, waiting)


@pytest.mark.slow
def test_a_process_whose_others_never_come_says_so():
  program = "from rlvr_jax.train.cluster import multihost as m; m._CONNECTING_S = 3; import sys; "
  program += "m.initialize(sys.argv[1], 2, 0)"
  command_of = lambda coordinator, _: [sys.executable, "-c", program, coordinator]
  began = time.monotonic()
  (status,), (output,) = Processes(command_of, devices=1, count=1).ended()
  assert (status, time.monotonic() - began < 100) == (1, True)
  last = output.strip().splitlines()[-1]
  assert "did not all connect to process 0 within 3 s. Start the same command" in last, output


# --- agreement ------------------------------------------------------------------------------------

DEATH = """
  import os, signal, sys, time
  from rlvr_jax.train.cluster import multihost

  me, count, killed, waiting = *map(int, sys.argv[2:5]), sys.argv[5]
  multihost.initialize(sys.argv[1], count, me)
  with multihost.exit_on_error(), multihost.silence_all_but_first(), multihost.phase("a test"):
    multihost.exchange("both are there")
    if me == killed:
      time.sleep(1)
      os.write(1, f"{time.time()}\\n".encode())
      os.kill(os.getpid(), signal.SIGKILL)
    if waiting == "alone":
      time.sleep(60)
    if waiting == "in a collective":
      multihost.multihost_utils.process_allgather(0)
    multihost.exchange("the other one is gone")
"""

PROGRAM = """
  import json, sys, time
  import jax
  import numpy as np
  from jax.experimental import multihost_utils
  from rlvr_jax.train.cluster import multihost, process

  me = int(sys.argv[2])
  multihost.initialize(sys.argv[1], 2, me)
  from rlvr_jax.data import ByteTokenizer, Problem
  from rlvr_jax.rewards.grading import GraderPool
  from rlvr_jax.rollouts.answers import Answers, Asked, Beginning, Processes
  from rlvr_jax.rollouts.engine import Rollout

  # From here on the devices compute nothing.
  programs = []
  jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: programs.append(name))
  multihost_utils.process_allgather = multihost_utils.broadcast_one_to_all = None

  def report(name, value):
    print(f"{name}={json.dumps(value)}", flush=True)

  def failing():
    if me == 1:
      raise ValueError("the disk is full")
    return "fine"

  with multihost.exit_on_error():
    report("exchanged", multihost.exchange({"process": me, "text": "é" * 50 * me, "x": 0.1 + me}))
    before = multihost.process_waits_s()
    time.sleep(me)  # the first process waits for the second
    multihost.exchange("where they wait")
    multihost.exchange("what is said of it")
    report("waits", [now - then for now, then in zip(multihost.process_waits_s(), before)])
    report("anywhere", [multihost.any_process(me == 1), multihost.any_process(False)])
    report("on_first", multihost.run_on_first(lambda: "written", "nothing"))
    with multihost.share_shutdown_signals(), multihost.phase("generation"):
      multihost.raise_if_shutdown_requested()
      if me == 1:
        process.request_shutdown()
      try:
        report("ended", multihost.raise_if_shutdown_requested())
      except process.EndRequestedError as request:
        report("ended", str(request))
    try:
      report("together", multihost.run_together(failing))
    except Exception as error:
      report("together", f"{type(error).__name__}: {error}")
    with GraderPool("rewards.faulty_graders:faulty", num_workers=1, timeout_s=1.0) as pool:
      texts = ["ok 1", "hang", "ok 2", "raise it", "exit 3"]  # the second process meets the hanging
      encode = ByteTokenizer().encode
      gather = lambda action: multihost.exchange(action())
      answers = Answers(ByteTokenizer(), pool.submit, processes=Processes(me, 2, gather))
      for number, text in enumerate(texts):
        tokens = np.array(encode(text), np.int32)
        turn = Rollout(number, tokens, np.zeros(2), {"tokens": tokens}, length=len(tokens))
        answers.ask(turn, Asked(Problem("", "", "", {}), Beginning(), 0, ""))
      grades = {}
      while answers.is_waiting:
        came = answers.take(patience_s=0.0, until_one=True)
        grades |= {turn.place: [grade.outcome, grade.score] for turn, _, grade in came}
      report("grades", [grades[number] for number in sorted(grades)])
    report("collectives", [name for name in programs if "compile" in name])
    if me == 1:
      raise RuntimeError("out of the blue")
    multihost.exchange("the other one is gone")
"""


@pytest.mark.slow
def test_agreement():
  program = textwrap.dedent(PROGRAM)
  command_of = lambda coordinator, i: [sys.executable, "-c", program, coordinator, str(i)]
  pair = Processes(command_of, devices=1)
  began = time.monotonic()
  statuses, outputs = pair.ended()
  assert all(statuses), outputs
  assert time.monotonic() - began < 100, "the first waited for a process that had ended"
  found = []
  for output in outputs:
    lines = [line.partition("=") for line in output.splitlines()]
    found.append({name: json.loads(value) for name, _, value in lines if name.isidentifier()})
  first, second = found
  for report in found:
    assert report["exchanged"] == [
      {"process": 0, "text": "", "x": 0.1},
      {"process": 1, "text": "é" * 50, "x": 1.1},
    ]
    assert report["anywhere"] == [True, False]
    assert report["ended"] == "shutdown requested during generation"
    assert report["collectives"] == [], "a message runs no program on the devices"
    assert report["waits"][0] - report["waits"][1] > 0.5, "who waited for whom"
    outcomes = [outcome for outcome, _ in report["grades"]]
    assert outcomes == ["correct", "timeout", "correct", "crashed", "crashed"]
  assert (first["on_first"], second["on_first"]) == ("written", "nothing")
  elsewhere = "OtherProcessError: process 1 of 2 failed: ValueError: the disk is full"
  assert first["together"] == elsewhere
  assert second["together"] == "ValueError: the disk is full"
  assert first["grades"] == second["grades"]
  assert "out of the blue" in outputs[1]
  assert "process 1 of 2 failed (RuntimeError: out of the blue)" in outputs[0]


@pytest.mark.parametrize("given", [dict(coordinator="a:1"), dict(num_processes=2, process_id=0)])
def test_half_a_place_is_refused(given):
  with pytest.raises(ValueError, match="go together: add"):
    multihost.initialize(**given)
