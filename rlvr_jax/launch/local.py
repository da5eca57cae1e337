"""Starts a run, and its samplers, as processes on this machine that connect over loopback.

`start` lasts until the run and its samplers have ended. It fails if the run failed or was stopped.
It prints the output of the run's process 0. If a process of the run fails, `start` restarts all
processes of the run, up to --retries times; the same holds for each sampler. After Ctrl-C, `stop`
or the end of the terminal, the run saves and ends; the same command resumes it. Under nohup or tmux
the run outlives the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rlvr_jax.launch.run import Run, at_least
from rlvr_jax.launch.shell import LaunchError, Shell, say

_LOG = "process_0.log"
_END_S = 30.0  # seconds for other processes to end by themselves after one has failed or finished
_SAVE_S = 300.0  # seconds for a run to save and end when it is asked to


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--processes", type=at_least(1), default=2, help="processes of the run")
  add("--devices", type=at_least(1), default=1, help="CPU devices of each process")
  add("--sampler_processes", type=at_least(1), default=1, help="processes of each sampler")


def start(programs: Sequence[Run], args: argparse.Namespace, shell: Shell) -> None:
  """Starts the programs, and supervises them until all have ended."""
  counts = [args.processes, *[args.sampler_processes] * (len(programs) - 1)]
  devices = f"--xla_force_host_platform_device_count={args.devices}"
  xla = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()}
  with contextlib.nullcontext() if shell.dry_run else _lock(args.name):
    for run, count in zip(programs, counts, strict=True):
      say(f"{run.name}: starts these processes, output in {folder_of(run.name)}")
      for command in process_commands(run, count, "PORT"):
        say(shlex.join(command))
    if shell.dry_run:
      return
    begun = []
    for run, count in zip(programs, counts, strict=True):
      # If this process is killed, the programs save and end, too.
      run = run._replace(flags=(*run.flags, f"--parent={os.getpid()}"))
      commands = functools.partial(process_commands, run, count)
      begun.append(Program(run.name, commands, {**xla, **run.environment}, run.retries))
    state = supervise(begun[0], begun[1:])
  if state != "finished":
    raise LaunchError(f"{args.name} has {state}; its output is in {folder_of(args.name)}")


def status(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Prints whether the run is still running."""
  del args, shell
  pid = _holder(name)
  say(f"{name}: {f'runs, as process {pid}' if pid else 'does not run'}; see {folder_of(name)}")


def logs(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of a program's process 0 as it appears, until Ctrl-C."""
  del args
  shell.run(["tail", "-n", "100", "-f", str(folder_of(name) / _LOG)])


def stop(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Asks a run to save and end, and waits until it has ended."""
  del args
  pid = _holder(name)
  if pid and shell.dry_run:
    say(f"{name}: would be asked to stop, process {pid}")
    return
  if pid:
    with contextlib.suppress(ProcessLookupError):  # the process has just ended
      os.kill(pid, signal.SIGTERM)
  deadline = time.monotonic() + _SAVE_S
  while _holder(name):
    if time.monotonic() > deadline:
      raise LaunchError(f"{name} still runs {_SAVE_S:.0f} s after `stop`; `logs` prints its output")
    time.sleep(0.1)
  say(f"{name}: {'stopped' if pid else 'does not run'}")


def stop_all(args: argparse.Namespace, shell: Shell) -> None:
  """Stops all runs of this machine.

  Raises:
    LaunchError: a run does not end.
  """
  base, left = folder_of(""), []
  for path in sorted(base.glob("*/launcher")):
    name = path.parent.name
    if _holder(name):
      try:
        stop(name, args, shell)
      except LaunchError as error:  # the other runs are stopped nevertheless
        left.append(str(error))
  if left:
    raise LaunchError("; ".join(left))
  if not shell.dry_run:
    say("no run of rlvr_jax.launch is left on this machine")


def process_commands(run: Run, count: int, port: str) -> list[list[str]]:
  """The command of each process; a sweep has one process, which starts its runs."""
  places = [
    (f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={i}")
    for i in range(1 if run.is_sweep else count)
  ]
  return [run.command(sys.executable, *place) for place in places]


def folder_of(name: str) -> pathlib.Path:
  """The folder of a program's output on this machine."""
  base = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
  return pathlib.Path(base) / "rlvr_jax" / "launch" / name


# --- one launch at a time -------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
  """Context in which this process has the lock of a run; the lock ends with the process.

  Raises:
    LaunchError: another process has the lock.
  """
  path = folder_of(name) / "launcher"
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, "a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      message = f"{name} is running already: print its output with `logs`, or end it with `stop`"
      raise LaunchError(message) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    yield


def _holder(name: str) -> int | None:
  """The process that has the lock of a run; None if no process has the lock."""
  with contextlib.suppress(FileNotFoundError), open(folder_of(name) / "launcher") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
      return int(file.read() or 0) or None  # the file is still empty if the process has just begun
  return None


# --- supervision ----------------------------------------------------------------------------------


def supervise(trainer: Program, samplers: Sequence[Program] = ()) -> str:
  """Supervises programs until all have ended, and prints the output of the first program.

  Samplers end by themselves after the run has finished. They are told to end if they still run 30 s
  later, or if the run has failed or was stopped.

  Returns:
    How the first program ended: "finished", "stopped" or "failed".
  """
  requested: list[int] = []
  end_samplers_at = float("inf")
  with _signals(requested), open(folder_of(trainer.name) / _LOG, errors="replace") as log:
    while any(program.state == "running" for program in (trainer, *samplers)):
      if requested:
        trainer.end()
      for program in (trainer, *samplers):
        program.step()
      if trainer.state != "running":
        wait_s = _END_S if trainer.state == "finished" else 0.0
        end_samplers_at = min(end_samplers_at, time.monotonic() + wait_s)
      for sampler in samplers:
        if requested or time.monotonic() >= end_samplers_at:
          sampler.end()
      sys.stdout.write(log.read())
      sys.stdout.flush()
      time.sleep(0.1)
  return trainer.state


@contextlib.contextmanager
def _signals(requested: list[int]) -> Iterator[None]:
  """Context in which the signals that request an end are appended to a list."""
  numbers = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
    numbers.append(signal.SIGHUP)
  before = {n: signal.signal(n, lambda number, _: requested.append(number)) for n in numbers}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


class Program:
  """Processes that work together: if one fails, all are restarted, up to a limit."""

  def __init__(
    self,
    name: str,
    commands: Callable[[str], list[list[str]]],
    environment: Mapping[str, str],
    retries: int,
  ):
    """Starts the processes; their output is in files of the program's folder.

    Args:
      name: the name of the program.
      commands: a free port → the command of each process.
      environment: environment variables in addition to this process's variables.
      retries: how often to start the processes again.
    """
    for log in folder_of(name).glob("process_*.log"):  # output of an earlier launch
      os.truncate(log, 0)  # the file is not removed, so that `logs` can go on reading it
    self.name = name
    self.state = "running"  # later "finished", "stopped" or "failed"
    self._start = lambda: _start_processes(name, commands, environment)
    self._retries = retries  # number of retries that are left
    self._processes = self._start()
    self._is_ending = False  # whether the program was told to end
    self._kill_at = float("inf")

  def end(self) -> None:
    """Tells the processes to save and end without a restart; kills them if they take too long."""
    if self.state == "running" and not self._is_ending:
      self._is_ending = True
      self._kill_at = time.monotonic() + _SAVE_S
      for process in self._processes:
        process.send_signal(signal.SIGTERM)

  def step(self) -> None:
    """Notes which processes have ended, and restarts or ends processes as needed."""
    if self.state != "running":
      return
    statuses = [process.poll() for process in self._processes]
    if None in statuses:
      if any(statuses):  # the other processes may wait minutes for the failed one to connect
        self._kill_at = min(self._kill_at, time.monotonic() + _END_S)
      for process in self._processes if time.monotonic() > self._kill_at else ():
        process.kill()
    elif self._is_ending:
      self.state = "stopped"
    elif not any(statuses):
      self.state = "finished"
    elif self._retries == 0:
      self.state = "failed"
      say(f"{self.name} has failed with statuses {statuses}; see {folder_of(self.name)}")
    else:
      self._retries -= 1
      say(f"{self.name}: statuses {statuses}, starts again; {self._retries} retries are left")
      self._kill_at = float("inf")
      self._processes = self._start()


def _start_processes(
  name: str, commands: Callable[[str], list[list[str]]], environment: Mapping[str, str]
) -> list[subprocess.Popen]:
  """Starts the processes of a program, see `Program`, with a free port for them."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
  folder = folder_of(name)
  folder.mkdir(parents=True, exist_ok=True)
  processes = []
  for number, command in enumerate(commands(port)):
    with open(folder / f"process_{number}.log", "ab") as file:
      processes.append(
        subprocess.Popen(
          command,
          stdin=subprocess.DEVNULL,
          stdout=file,
          stderr=file,
          env=os.environ | environment,
          start_new_session=True,  # signals of the terminal reach only the launching process
        )
      )
  return processes
