"""Functions of both targets on Kubernetes: watch a JobSet, and follow its first pod."""

from __future__ import annotations

import argparse
import subprocess
import time

from rlvr_jax.launch import shell as shells
from rlvr_jax.launch.run import Run
from rlvr_jax.launch.shell import CommandError, LaunchError, Shell, say

_JOBSET = "jobset.sigs.k8s.io"


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--type", default="", help="slice in Cloud's spelling: v5litepod-64, v5p-32; for start")
  add("--num_slices", type=int, default=1, help="of that type; config.mesh.data is a multiple")
  add("--poll_s", type=float, default=15.0, help="seconds between polls of the JobSet")


def logs_command(run: Run) -> list[str]:
  """The command that prints the output of process 0 as it comes."""
  labels = {
    f"{_JOBSET}/jobset-name": run.name,
    f"{_JOBSET}/job-index": "0",
    "batch.kubernetes.io/job-completion-index": "0",
  }
  selector = ",".join(f"{name}={value}" for name, value in labels.items())
  return ["kubectl", "logs", f"--selector={selector}", "--tail=-1", "--follow"]


def state_command(run: Run) -> list[str]:
  """The command that prints Completed or Failed, or nothing while the run continues."""
  path = "--output=jsonpath={.status.terminalState}"
  return ["kubectl", "get", "jobset", run.name, path]


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the JobSet and its pods."""
  del args
  shell.run(["kubectl", "get", "jobset", run.name])
  shell.run(["kubectl", "get", "pods", f"--selector={_JOBSET}/jobset-name={run.name}"])


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0 as it comes, until its pod ends."""
  del args
  shell.run(logs_command(run))


def watch(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Follows the run to its end. Kubernetes restarts the run independently of this program.

  Raises:
    LaunchError: the run has failed more often than --retries, or was deleted.
  """
  if shell.dry_run:
    shell.follow(logs_command(run))
    return
  log: subprocess.Popen | None = None
  try:
    while not (state := shell.capture(state_command(run)).strip()):
      if shells.has_ended(log):
        log = shell.follow(logs_command(run))
      time.sleep(args.poll_s)
  except CommandError as error:
    raise LaunchError(f"{run.name} can no longer be watched: {error}") from error
  finally:
    shells.terminate(log)
  if state != "Completed":
    raise LaunchError(
      f"{run.name} has {state.lower()}, with --retries={run.retries}: see it with logs, and stop it"
      " before you start it again"
    )
  say(f"{run.name}: {state}")
