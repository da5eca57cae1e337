"""Runs the processes of a local launch, and restarts all if one fails, up to a limit.

  python -m rlvr_jax.launch.supervise FOLDER

FOLDER/run.json has the commands, FOLDER/state.json the state. SIGTERM requests a shutdown.
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

PORT = "@PORT@"  # placeholder in the commands for a port that is free when they start
_RESTART_S = 1.0
_SHUTDOWN_S = 30.0  # for the others to report and end by themselves after a process has failed


def supervise(folder: pathlib.Path) -> str:
  """Runs the commands of FOLDER/run.json; returns the last state: finished, stopped or failed."""
  run = json.loads((folder / "run.json").read_text())
  shutdown_requests: list[int] = []
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: shutdown_requests.append(1))
  signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal may close
  for attempt in range(run["retries"] + 1):
    processes = _start_processes(folder, run)
    pids = [process.pid for process in processes]
    write_state(folder, state="running", attempt=attempt, processes=pids)
    statuses = _wait_for_processes(processes, shutdown_requests)
    if shutdown_requests or not any(statuses):
      state = "stopped" if shutdown_requests else "finished"
      break
    state = "failed"
    time.sleep(_RESTART_S)
  write_state(folder, state=state, attempt=attempt, statuses=statuses)
  return state


def write_state(folder: pathlib.Path, **state: Any) -> None:
  """Replaces FOLDER/state.json; its `pid` is this process."""
  temporary = folder / "state.json.tmp"
  temporary.write_text(json.dumps({"pid": os.getpid(), **state}))
  temporary.replace(folder / "state.json")


def _start_processes(folder: pathlib.Path, run: dict[str, Any]) -> list[subprocess.Popen]:
  """Starts a run's commands, with a free port; their output is appended to FOLDER."""
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


def _wait_for_processes(
  processes: list[subprocess.Popen], shutdown_requests: list[int]
) -> list[int]:
  """Waits for all processes and returns their statuses.

  Forwards a shutdown request once. If a process fails, kills the others that do not end in time.
  """
  is_forwarded = False
  failed_at = 0.0
  while None in (statuses := [process.poll() for process in processes]):
    if any(statuses) and not failed_at:
      failed_at = time.monotonic()
    if failed_at and not shutdown_requests and time.monotonic() - failed_at > _SHUTDOWN_S:
      for process in processes:
        process.kill()  # it may wait minutes for a process that never connects
    if shutdown_requests and not is_forwarded:
      is_forwarded = True
      for process in processes:
        process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
  return [int(status or 0) for status in statuses]


if __name__ == "__main__":
  sys.exit(0 if supervise(pathlib.Path(sys.argv[1])) == "finished" else 1)
