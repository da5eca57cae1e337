"""Several processes on this machine, which meet over loopback: a pod in small, as tests use it."""

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

from rlvr_jax.launch.run import Run
from rlvr_jax.launch.shell import LaunchError, Shell, say
from rlvr_jax.launch.supervise import PORT

ON_HOSTS = False


def add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--processes", type=int, default=2, help="of the run")
  parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")


def commands(run: Run, args: argparse.Namespace) -> list[list[str]]:
  """The command of each process; a sweep is one process, which starts its runs."""
  if run.is_sweep:
    return [run.program(sys.executable)]
  places = [
    (f"--coordinator=127.0.0.1:{PORT}", f"--num_processes={args.processes}", f"--process_id={i}")
    for i in range(args.processes)
  ]
  return [run.program(sys.executable, *place) for place in places]


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Starts the processes in the background, and prints what process 0 does until all have ended."""
  if shell.dry_run:
    for command in commands(run, args):
      shell.run(command)
    return
  folder = _folder(run)
  if _state(folder)["state"] == "running":
    raise LaunchError(f"{run.name} is running already: see it with logs, or end it with stop")
  _prepare(folder, run, args)
  with open(folder / "supervisor.log", "ab") as log:
    supervisor = subprocess.Popen(
      [sys.executable, "-m", "rlvr_jax.launch.supervise", str(folder)],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      cwd=folder / "code",
      start_new_session=True,  # it outlives this program, and its terminal
    )
  _wait(folder, lambda state: state["state"] != "absent" or supervisor.poll() is not None)
  logs(run, args, shell)
  state = _state(folder)
  if state["state"] != "finished":
    raise LaunchError(f"{run.name} has {state['state']}: {state}; its output is in {folder}")


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the state of the run."""
  del args, shell
  say(f"{run.name}: {json.dumps(_state(_folder(run)))}")


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0 until the run has ended."""
  del args
  folder = _folder(run)
  if shell.dry_run:
    say(f"tail -f {folder / 'process_0.log'}")
    return
  if not (folder / "process_0.log").exists():
    raise LaunchError(f"{folder} has no output: start {run.name} first")
  with open(folder / "process_0.log", encoding="utf-8", errors="replace") as log:
    while True:
      running = _state(folder)["state"] == "running"
      sys.stdout.write(log.read())
      sys.stdout.flush()
      if not running:
        return
      time.sleep(0.2)


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Asks the run to save and end, and waits until it has."""
  del args
  folder = _folder(run)
  state = _state(folder)
  if state["state"] == "running" and not shell.dry_run:
    os.kill(state["pid"], signal.SIGTERM)
    _wait(folder, lambda state: state["state"] != "running")
  say(f"{run.name}: {_state(folder)['state']}")


def _folder(run: Run) -> pathlib.Path:
  base = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local" / "state"
  return pathlib.Path(base) / "rlvr_jax" / "launch" / run.name


def _prepare(folder: pathlib.Path, run: Run, args: argparse.Namespace) -> None:
  """Puts the code, the commands and empty logs into the folder."""
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
  described = {
    "commands": commands(run, args),
    "directory": os.getcwd(),  # a relative workdir is here, as without launch
    "environment": environment | dict(run.environment),
    "retries": run.retries,
    "version": run.package.version,
  }
  (folder / "state.json").unlink(missing_ok=True)
  (folder / "process_0.log").write_bytes(b"")
  (folder / "run.json").write_text(json.dumps(described, indent=2))
  say(f"{run.name}: commit {run.package.version}, output in {folder}")


def _state(folder: pathlib.Path) -> dict:
  try:
    state = json.loads((folder / "state.json").read_text())
  except FileNotFoundError:
    return {"state": "absent"}
  if state["state"] == "running" and not os.path.exists(f"/proc/{state['pid']}"):
    state["state"] = "killed"
  return state


def _wait(folder: pathlib.Path, until) -> None:
  while not until(_state(folder)):
    time.sleep(0.1)
