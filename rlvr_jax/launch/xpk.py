"""Workloads on a GKE cluster that xpk has created; Kubernetes restarts failed workloads.

xpk adds the current commit's files to a container image with the dependencies. Each sampler of a
fleet is a separate workload, so that it restarts independently after a failure. `start` returns
once the workloads exist. Another `start`, also with another number of samplers, creates missing
workloads and deletes surplus workloads.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
import tempfile
from collections.abc import Sequence

from rlvr_jax.launch import slices
from rlvr_jax.launch.package import SHARED, ship
from rlvr_jax.launch.run import Run, sampler_name
from rlvr_jax.launch.shell import LaunchError, Shell, say
from rlvr_jax.launch.slices import Machines

_JOBSET = "jobset.sigs.k8s.io"


def add_flags(parser: argparse.ArgumentParser) -> None:
  slices.add_flags(parser)
  add = parser.add_argument
  add("--cluster", required=True, help="created with xpk cluster create")
  add("--image", default="", help="image of the Dockerfile, in a registry; for start")
  text = f"storage that xpk has attached to the cluster at {SHARED}, for a workdir in it"
  add("--storage", default="", help=text)


def start(programs: Sequence[Run], args: argparse.Namespace, shell: Shell) -> None:
  """Creates the workloads that do not run yet, and deletes samplers that are not in `programs`."""
  if not args.image:
    raise LaunchError("--image is needed to start: docs/launch.md says how to build the image")
  run = programs[0]
  machines = slices.machines_of(args, count=len(programs))
  programs, package = ship(programs, machines[0], allow_dirty=args.allow_dirty, share=args.storage)
  runs = _workloads(run.name, args, shell)
  with tempfile.TemporaryDirectory() as folder:
    package.copy(pathlib.Path(folder))
    for program, own in zip(programs, machines, strict=True):
      if runs.get(program.name):
        say(f"{program.name} runs already")
        continue
      say(f"{program.name}: creates {own}")
      say(f"{program.name}: costs {own.price_class()}, while the cluster has their nodes")
      shell.run(create_command(program, own, folder, args))
  for name in runs.keys() - {program.name for program in programs}:
    shell.run(delete_command(name, args))
  say(f"{run.name}: Kubernetes runs it; see it with `logs` and `status`, end it with `stop`")


def status(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the workloads of the run and of its samplers, as xpk lists them."""
  shell.run(list_command(name, args))


def logs(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of a program's process 0 as it appears, until its pod ends."""
  del args
  labels = {
    f"{_JOBSET}/jobset-name": name,
    f"{_JOBSET}/job-index": "0",
    "batch.kubernetes.io/job-completion-index": "0",
  }
  selector = ",".join(f"{label}={value}" for label, value in labels.items())
  # xpk has no command for logs, but it has made kubectl's credentials for the cluster.
  shell.run(["kubectl", "logs", f"--selector={selector}", "--tail=-1", "--follow"])


def stop(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Deletes the workloads; their processes save before they end."""
  for workload in sorted(_workloads(name, args, shell)) or [name]:
    shell.run(delete_command(workload, args))


def stop_all(args: argparse.Namespace, shell: Shell) -> None:
  """Raises LaunchError, because other users may have workloads in the cluster."""
  del shell
  raise LaunchError(
    "`stop --all` works for local and tpu_vm only: give --name. The machines of the cluster are"
    f" billed until `xpk cluster delete {' '.join(_place_flags(args))}` deletes them"
  )


# --- commands -------------------------------------------------------------------------------------


def create_command(
  run: Run, machines: Machines, folder: str, args: argparse.Namespace
) -> list[str]:
  """The command that creates a program's workload; `folder` has the commit's files."""
  command = ["xpk", "workload", "create", f"--workload={run.name}", *_place_flags(args)]
  command += [f"--tpu-type={machines.slice.name}", f"--num-slices={machines.num_slices}"]
  command += ["--spot"] * machines.spot
  command += [f"--base-docker-image={args.image}", f"--script-dir={folder}"]
  command += [f"--storage={args.storage}"] * bool(args.storage)
  # xpk restarts pods that a signal has ended. Status 1: another host was lost, so restart, too.
  command += [f"--max-restarts={run.retries}", "--restart-on-exit-codes=1"]
  command += ["--termination-grace-period-seconds=300"]  # time to save
  command += [f"--env={name}={value}" for name, value in run.environment.items()]
  command += ["--quiet"]  # an earlier workload of this name has ended: overwrite it
  # `exec` puts the program in place of xpk's shell, so that it gets the signals of that shell.
  return [*command, f"--command=exec {shlex.join(run.command('python', '--distributed'))}"]


def delete_command(name: str, args: argparse.Namespace) -> list[str]:
  """The command that deletes a workload."""
  return ["xpk", "workload", "delete", f"--workload={name}", *_place_flags(args)]


def list_command(name: str, args: argparse.Namespace) -> list[str]:
  """The command that lists the workloads whose names begin with a run's name."""
  return ["xpk", "workload", "list", f"--filter-by-job={name}", *_place_flags(args)]


def _workloads(name: str, args: argparse.Namespace, shell: Shell) -> dict[str, bool]:
  """The workloads of a run and of its samplers → whether each still runs, or waits to run."""
  own = re.compile(f"{name}|{sampler_name(name, '[0-9]+')}")
  rows = [line.split() for line in shell.capture(list_command(name, args)).splitlines()]
  return {row[0]: "Finished" not in row for row in rows if row and own.fullmatch(row[0])}


def _place_flags(args: argparse.Namespace) -> list[str]:
  project = [f"--project={args.project}"] if args.project else []
  return [f"--cluster={args.cluster}", f"--zone={args.zone}", *project]
