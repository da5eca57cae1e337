"""Runs the programs of a local launch: a trainer, or another run, and the samplers of a fleet.

  python -m rlvr_jax.launch.supervise FOLDER

A program is processes that work together. If one of them fails, all are started again, up to a
limit; other programs go on. FOLDER/run.json has the commands, and how many samplers there are to
be, which `scale` changes. FOLDER/state.json has the state. SIGTERM requests a shutdown.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

PORT = "@PORT@"  # placeholder in the commands for a port that is free when they start
_RESTART_S = 1.0
_SHUTDOWN_S = 30.0  # for others to report and end by themselves after one has failed or finished


def supervise(folder: pathlib.Path) -> str:
  """Runs the programs of FOLDER/run.json; returns the last state: finished, stopped or failed."""
  shutdown_requests: list[int] = []
  for signal_number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signal_number, lambda *_: shutdown_requests.append(1))
  signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may close
  trainer = _Program(folder, read_run(folder), "commands", "")
  samplers: dict[int, _Program] = {}
  while True:
    run = read_run(folder)
    if shutdown_requests:
      trainer.end()
    trainer.step()
    if trainer.runs and not shutdown_requests:
      wanted = run["samplers"]
      for number in set(range(wanted)) - samplers.keys():
        samplers[number] = _Program(folder, run, "sampler_commands", f"sampler_{number}_")
    elif trainer.has_finished(within_s=_SHUTDOWN_S):
      wanted = len(samplers)  # which end by themselves, too
    else:
      wanted = 0
    for number, sampler in samplers.items():
      if number >= wanted:
        sampler.end(kill_after_s=_SHUTDOWN_S)
      sampler.step()
    if trainer.runs:  # those that were scaled away
      samplers = {n: sampler for n, sampler in samplers.items() if n < wanted or sampler.runs}
    has_ended = not any(program.runs for program in (trainer, *samplers.values()))
    state = trainer.describe() | ({} if has_ended else {"state": "running"})
    state["samplers"] = {str(number): s.describe() for number, s in sorted(samplers.items())}
    _write_state(folder, state)
    if has_ended:
      return state["state"]
    time.sleep(0.1)


def read_run(folder: pathlib.Path) -> dict[str, Any]:
  """Reads FOLDER/run.json."""
  return json.loads((folder / "run.json").read_text())


def write_run(folder: pathlib.Path, run: Mapping[str, Any]) -> None:
  """Replaces FOLDER/run.json."""
  replace_text(folder / "run.json", json.dumps(run, indent=2))


def began(pid: int) -> str | None:
  """When a process began, which tells it from a later one of that number; None if it has ended."""
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  except (FileNotFoundError, ProcessLookupError):
    return None
  return None if fields[0] in ("Z", "X") else f"{boot} {fields[19]}"


def _write_state(folder: pathlib.Path, state: Mapping[str, Any]) -> None:
  """Replaces FOLDER/state.json if it has changed; `pid` and `began` in it are this process's."""
  own = {"pid": os.getpid(), "began": began(os.getpid())}
  path, text = folder / "state.json", json.dumps(own | dict(state))
  if not path.exists() or path.read_text() != text:
    replace_text(path, text)


def replace_text(path: pathlib.Path, text: str) -> None:
  """Replaces a file at once: a reader finds the old text or the new one."""
  temporary = path.with_name(f"{path.name}.tmp")
  temporary.write_text(text)
  temporary.replace(path)


class _Program:
  """A program of one or several processes, which are started again together."""

  def __init__(self, folder: pathlib.Path, run: Mapping[str, Any], kind: str, log: str):
    """Starts the processes; their output is appended to FOLDER/`log`process_NUMBER.log.

    Args:
      folder, run: FOLDER, and what its run.json has.
      kind: name of the program's commands in `run`.
      log: start of the names of its logs.
    """
    self._start = lambda: _start_processes(folder, run, run[kind], log)
    self._retries = run["retries"]
    self._attempt = 0
    self._state = "running"  # or finished, stopped, failed
    self._processes: list[subprocess.Popen] = self._start()
    self._changed = 0.0  # when a process failed, or all had finished; 0: neither
    self._kill_at = 0.0  # after it was told to end; 0: it was not

  @property
  def runs(self) -> bool:
    """Whether it runs, or will be started again."""
    return self._state == "running"

  def has_finished(self, *, within_s: float) -> bool:
    """Whether it has ended by itself, without an error, within the last seconds."""
    return self._state == "finished" and time.monotonic() - self._changed < within_s

  def describe(self) -> dict[str, Any]:
    """Its state, for state.json."""
    state = {"state": self._state, "attempt": self._attempt}
    if self.runs:
      return state | {"processes": [process.pid for process in self._processes]}
    return state | {"statuses": [process.returncode for process in self._processes]}

  def end(self, *, kill_after_s: float = float("inf")) -> None:
    """Tells the processes to end, once, and not to start again; later kills what still runs."""
    if self.runs and not self._kill_at:
      self._kill_at = time.monotonic() + kill_after_s
      for process in self._processes:
        process.send_signal(signal.SIGTERM)

  def step(self) -> None:
    """Notes which processes have ended, and does what is due."""
    if not self.runs:
      return
    now, statuses = time.monotonic(), [process.poll() for process in self._processes]
    if any(statuses) and not self._changed:
      self._changed = now
    if None in statuses:
      # One that never connects would wait for the others for minutes.
      kill_at = self._kill_at or (self._changed or float("inf")) + _SHUTDOWN_S
      for process in self._processes if now > kill_at else ():
        process.kill()
    elif self._kill_at or not any(statuses):
      self._state, self._changed = "stopped" if self._kill_at else "finished", now
    elif self._attempt == self._retries:
      self._state = "failed"
    elif now - self._changed > _RESTART_S:
      self._attempt, self._changed = self._attempt + 1, 0.0
      self._processes = self._start()


def _start_processes(
  folder: pathlib.Path, run: Mapping[str, Any], commands: list[list[str]], log: str
) -> list[subprocess.Popen]:
  """Starts commands of a run, with a free port for them."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
  processes = []
  for number, command in enumerate(commands):
    with open(folder / f"{log}process_{number}.log", "ab") as file:
      processes.append(
        subprocess.Popen(
          [argument.replace(PORT, port) for argument in command],
          stdin=subprocess.DEVNULL,
          stdout=file,
          stderr=file,
          cwd=run["directory"],
          env=os.environ | run["environment"],
        )
      )
  return processes


if __name__ == "__main__":
  sys.exit(0 if supervise(pathlib.Path(sys.argv[1])) == "finished" else 1)
