"""Several processes on this machine, connected over loopback: a small pod, for tests."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from rlvr_jax.launch.run import Run
from rlvr_jax.launch.shell import LaunchError, Shell, say
from rlvr_jax.launch.supervise import PORT

ON_HOSTS = False


def add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--processes", type=int, default=2, help="processes of the run")
  parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")


def process_commands(run: Run, args: argparse.Namespace) -> list[list[str]]:
  """The command of each process; a sweep has one process, which starts its runs."""
  if run.is_sweep:
    return [run.program_command(sys.executable)]
  places = [
    (f"--coordinator=127.0.0.1:{PORT}", f"--num_processes={args.processes}", f"--process_id={i}")
    for i in range(args.processes)
  ]
  return [run.program_command(sys.executable, *place) for place in places]


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Starts the processes in the background, and prints process 0's output until all have ended."""
  if shell.dry_run:
    for command in process_commands(run, args):
      shell.run(command)
    return
  folder = _run_folder(run)
  if _read_state(folder)["state"] == "running":
    raise LaunchError(f"{run.name} is running already: see it with logs, or end it with stop")
  _prepare_folder(folder, run, args)
  with open(folder / "supervisor.log", "ab") as log:
    supervisor = subprocess.Popen(
      [sys.executable, "-m", "rlvr_jax.launch.supervise", str(folder)],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      cwd=folder / "code",
      start_new_session=True,  # so that it outlives this program and its terminal
    )
  _wait_until(folder, lambda state: state["state"] != "absent" or supervisor.poll() is not None)
  logs(run, args, shell)
  state = _read_state(folder)
  if state["state"] != "finished":
    raise LaunchError(f"{run.name} has {state['state']}: {state}; its output is in {folder}")


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the state of the run."""
  del args, shell
  say(f"{run.name}: {json.dumps(_read_state(_run_folder(run)))}")


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0 until the run has ended."""
  del args
  folder = _run_folder(run)
  if shell.dry_run:
    say(f"tail -f {folder / 'process_0.log'}")
    return
  if not (folder / "process_0.log").exists():
    raise LaunchError(f"{folder} has no output: start {run.name} first")
  with open(folder / "process_0.log", encoding="utf-8", errors="replace") as log:
    while True:
      running = _read_state(folder)["state"] == "running"
      sys.stdout.write(log.read())
      sys.stdout.flush()
      if not running:
        return
      time.sleep(0.2)


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Requests the run's shutdown, before which it saves, and waits for it."""
  del args
  folder = _run_folder(run)
  state = _read_state(folder)
  if state["state"] == "running" and not shell.dry_run:
    os.kill(state["pid"], signal.SIGTERM)
    _wait_until(folder, lambda state: state["state"] != "running")
  say(f"{run.name}: {_read_state(folder)['state']}")


def _run_folder(run: Run) -> pathlib.Path:
  """The folder of a run's code, state and output."""
  base = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
  return pathlib.Path(base) / "rlvr_jax" / "launch" / run.name


def _prepare_folder(folder: pathlib.Path, run: Run, args: argparse.Namespace) -> None:
  """Writes the code, the commands and an empty log of process 0 into the folder."""
  assert run.package is not None
  code = folder / "code"
  archive = run.package.write(folder / f"{run.package.version}.tar.gz")
  shutil.rmtree(code, ignore_errors=True)
  code.mkdir()
  subprocess.run(["tar", "-xzf", str(archive), "-C", str(code)], check=True)
  archive.unlink()
  devices = f"--xla_force_host_platform_device_count={args.devices}"
  environment = {
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip(),
    "PYTHONPATH": os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")])),
  }
  description = {
    "commands": process_commands(run, args),
    "directory": os.getcwd(),  # a relative workdir is here, as without launch
    "environment": environment | dict(run.environment),
    "retries": run.retries,
    "version": run.package.version,
  }
  (folder / "state.json").unlink(missing_ok=True)
  (folder / "process_0.log").write_bytes(b"")
  (folder / "run.json").write_text(json.dumps(description, indent=2))
  say(f"{run.name}: commit {run.package.version}, output in {folder}")


def _read_state(folder: pathlib.Path) -> dict:
  """Reads the supervisor's state; "absent" without one, "killed" if its process is gone."""
  try:
    state = json.loads((folder / "state.json").read_text())
  except FileNotFoundError:
    return {"state": "absent"}
  if state["state"] == "running" and not os.path.exists(f"/proc/{state['pid']}"):
    state["state"] = "killed"
  return state


def _wait_until(folder: pathlib.Path, condition: Callable[[dict], bool]) -> None:
  while not condition(_read_state(folder)):
    time.sleep(0.1)
