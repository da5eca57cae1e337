"""Processes on this machine, connected over loopback, and samplers beside them: a small pod."""

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

from rlvr_jax.launch import fleet
from rlvr_jax.launch.run import Run
from rlvr_jax.launch.shell import LaunchError, Shell, say
from rlvr_jax.launch.supervise import PORT, began, read_run, write_run

ON_HOSTS = False
SAY_EVERY_S = 30.0  # during a wait


def add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--processes", type=int, default=2, help="processes of the run")
  parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")
  fleet.add_flags(parser)
  text = "processes of each sampler"
  parser.add_argument("--sampler_processes", type=int, default=1, help=text)


def process_commands(run: Run, processes: int) -> list[list[str]]:
  """The command of each process; a sweep has one process, which starts its runs."""
  if run.is_sweep:
    return [run.program_command(sys.executable)]
  places = [
    (f"--coordinator=127.0.0.1:{PORT}", f"--num_processes={processes}", f"--process_id={i}")
    for i in range(processes)
  ]
  return [run.program_command(sys.executable, *place) for place in places]


def sampler_commands(run: Run, args: argparse.Namespace) -> list[list[str]]:
  """The command of each process of a sampler, the same for all samplers; [] without a fleet."""
  if args.samplers is None:
    return []
  return process_commands(fleet.sampler_of(run, 0, args), args.sampler_processes)


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Starts the processes in the background, and prints process 0's output until all have ended."""
  if shell.dry_run:
    for command in process_commands(run, args.processes):
      shell.run(command)
    for command in sampler_commands(run, args) * (args.samplers or 0):
      shell.run(command)
    return
  folder = run.folder
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
  begun = lambda state: state["state"] != "absent" or supervisor.poll() is not None
  _wait_until(folder, "the run to begin", begun)
  logs(run, args, shell)
  state = _read_state(folder)
  if state["state"] != "finished":
    raise LaunchError(f"{run.name} has {state['state']}: {state}; its output is in {folder}")


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the state of the run, and of its samplers."""
  del args, shell
  state = _read_state(run.folder)
  samplers = state.pop("samplers", {})
  say(f"{run.name}: {json.dumps(state)}")
  for number, sampler in samplers.items():
    say(f"{fleet.sampler_name(run, number)}: {json.dumps(sampler)}")


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0, of the run or of a sampler, until the run has ended."""
  folder = run.folder
  path = folder / ("process_0.log" if args.sampler is None else _sampler_log(args.sampler))
  if shell.dry_run:
    say(f"tail -f {path}")
    return
  if not path.exists():
    raise LaunchError(f"there is no {path}: start {run.name} first; status says what it has")
  with open(path, encoding="utf-8", errors="replace") as log:
    while True:
      running = _read_state(folder)["state"] == "running"
      sys.stdout.write(log.read())
      sys.stdout.flush()
      if not running:
        return
      time.sleep(0.2)


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Requests the run's shutdown, before which it saves, and waits for it and its samplers."""
  del args
  folder = run.folder
  state = _read_state(folder)
  if state["state"] == "running" and not shell.dry_run:
    os.kill(state["pid"], signal.SIGTERM)
    _wait_until(folder, "the run to save and end", lambda state: state["state"] != "running")
  say(f"{run.name}: {_read_state(folder)['state']}")


def scale(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Starts or ends samplers, until there are as many as wanted; waits for their end."""
  folder = run.folder
  if shell.dry_run:
    say(f"{folder / 'run.json'}: samplers = {args.samplers}")
    return
  if _read_state(folder)["state"] != "running":
    raise LaunchError(f"{run.name} does not run: start it with --samplers={args.samplers}")
  description = read_run(folder)
  if not description["sampler_commands"]:
    raise LaunchError(f"{run.name} samples by itself: stop it, and start it with --samplers")
  write_run(folder, description | {"samplers": args.samplers})
  is_done = lambda state: state["state"] != "running" or len(state["samplers"]) == args.samplers
  _wait_until(folder, f"{args.samplers} samplers", is_done)
  samplers = _read_state(folder).get("samplers", {})
  if failed := [number for number, sampler in samplers.items() if sampler["state"] == "failed"]:
    raise LaunchError(
      f"samplers {', '.join(failed)} of {run.name} have failed: see logs --sampler={failed[0]},"
      " then stop the run and start it again"
    )
  say(f"{run.name}: {args.samplers} samplers")


def _sampler_log(number: int) -> str:
  """Name of the output of a sampler's process 0."""
  return f"sampler_{number}_process_0.log"


def _prepare_folder(folder: pathlib.Path, run: Run, args: argparse.Namespace) -> None:
  """Writes the code, the commands and empty logs of processes 0 into the folder."""
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
    "commands": process_commands(run, args.processes),
    "sampler_commands": sampler_commands(run, args),
    "samplers": args.samplers or 0,
    "directory": os.getcwd(),  # a relative workdir is here, as without launch
    "environment": environment | dict(run.environment),
    "retries": run.retries,
    "version": run.package.version,
  }
  (folder / "state.json").unlink(missing_ok=True)
  for log in folder.glob("*process_0.log"):
    log.unlink()
  (folder / "process_0.log").touch()
  write_run(folder, description)
  say(f"{run.name}: commit {run.package.version}, output in {folder}")


def _read_state(folder: pathlib.Path) -> dict:
  """Reads the supervisor's state; "absent" without one, "killed" if its process is gone.

  Raises:
    LaunchError: state.json is damaged.
  """
  path = folder / "state.json"
  try:
    state = json.loads(path.read_text())
    start, pid, is_running = state.pop("began", None), state["pid"], state["state"] == "running"
  except FileNotFoundError:
    return {"state": "absent"}
  except (ValueError, TypeError, AttributeError, KeyError) as error:
    raise LaunchError(
      f"{path} is not the state of a run ({type(error).__name__}: {error}), as after a crash of the"
      " machine: end the run's processes if any are left, and remove it"
    ) from error
  if is_running and (start is None or began(pid) != start):
    state["state"] = "killed"
  return state


def _wait_until(folder: pathlib.Path, what: str, condition: Callable[[dict], bool]) -> None:
  """Waits, and says now and then for what."""
  start = said = time.monotonic()
  while not condition(state := _read_state(folder)):
    if time.monotonic() - said > SAY_EVERY_S:
      said = time.monotonic()
      say(f"waits for {what}, for {said - start:.0f} s so far: {json.dumps(state)}")
    time.sleep(0.1)
