"""Runs the processes of a local launch, and starts all again when one fails, up to a limit.

  python -m rlvr_jax.launch.supervise FOLDER

FOLDER/run.json has the commands; state.json says how it goes. SIGTERM asks the processes to end.
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
from typing import Any

PORT = "@PORT@"  # stands in the commands for a port that is free when they start
_RESTART_S = 1.0
_OTHERS_S = 30.0  # for the others to end by themselves, and to say why, when a process has failed


def supervise(folder: pathlib.Path) -> str:
  """Runs FOLDER/run.json to its end; returns the last state: finished, stopped or failed."""
  run = json.loads((folder / "run.json").read_text())
  asked: list[int] = []
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: asked.append(1))
  signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may go
  for attempt in range(run["retries"] + 1):
    processes = _started(folder, run)
    pids = [process.pid for process in processes]
    write_state(folder, state="running", attempt=attempt, processes=pids)
    statuses = _waited(processes, asked)
    if asked or not any(statuses):
      state = "stopped" if asked else "finished"
      break
    state = "failed"
    time.sleep(_RESTART_S)
  write_state(folder, state=state, attempt=attempt, statuses=statuses)
  return state


def write_state(folder: pathlib.Path, **state: Any) -> None:
  """Replaces FOLDER/state.json; `pid` is this process."""
  temporary = folder / "state.json.tmp"
  temporary.write_text(json.dumps({"pid": os.getpid(), **state}))
  temporary.replace(folder / "state.json")


def _started(folder: pathlib.Path, run: dict[str, Any]) -> list[subprocess.Popen]:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
  processes = []
  for number, command in enumerate(run["commands"]):
    with open(folder / f"process_{number}.log", "ab") as log:
      processes.append(
        subprocess.Popen(
          [argument.replace(PORT, port) for argument in command],
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=log,
          cwd=run["directory"],
          env=os.environ | run["environment"],
        )
      )
  return processes


def _waited(processes: list[subprocess.Popen], asked: list[int]) -> list[int]:
  """Waits for all; passes a request to end on, once. One that fails ends the others."""
  told, failed = False, 0.0
  while None in (statuses := [process.poll() for process in processes]):
    if any(statuses) and not failed:
      failed = time.monotonic()
    if failed and not asked and time.monotonic() - failed > _OTHERS_S:
      for process in processes:
        process.kill()  # one may wait minutes for another that never came
    if asked and not told:
      told = True
      for process in processes:
        process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
  return [int(status or 0) for status in statuses]


if __name__ == "__main__":
  sys.exit(0 if supervise(pathlib.Path(sys.argv[1])) == "finished" else 1)
