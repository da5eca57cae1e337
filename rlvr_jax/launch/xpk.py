"""A workload on a cluster created by xpk, which writes and applies the JobSet."""

from __future__ import annotations

import argparse
import shlex

from rlvr_jax.launch import image, kubernetes
from rlvr_jax.launch.kubernetes import logs, status  # noqa: F401  (verbs of this target)
from rlvr_jax.launch.run import Run
from rlvr_jax.launch.shell import LaunchError, Shell
from rlvr_jax.launch.slices import find_slice

ON_HOSTS = True


def add_flags(parser: argparse.ArgumentParser) -> None:
  kubernetes.add_flags(parser)
  image.add_flags(parser)
  parser.add_argument("--cluster", required=True, help="created with xpk cluster create")
  parser.add_argument("--zone", required=True, help="zone of the cluster, such as us-west4-a")
  parser.add_argument("--project", default="", help="default: gcloud's project")


def create_command(run: Run, args: argparse.Namespace) -> list[str]:
  """The command that creates the workload, with the storage that is attached to the cluster."""
  command = ["xpk", "workload", "create", *_location_flags(run, args)]
  command += [f"--tpu-type={find_slice(args.type).name}", f"--num-slices={args.num_slices}"]
  command += [f"--docker-image={image.image_name(run, args)}", f"--max-restarts={run.retries}"]
  # xpk restarts pods that a signal has ended. Status 1: another host was lost, so restart, too.
  command += ["--restart-on-exit-codes=1", "--termination-grace-period-seconds=300"]
  command += [f"--env={name}={value}" for name, value in run.environment.items()]
  return [*command, f"--command={shlex.join(run.program_command('python'))}"]


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Builds the image, creates the workload and follows it; Ctrl-C only stops following."""
  if not args.image:
    raise LaunchError("--image is needed to start; see docs/tpu.md")
  command = create_command(run, args)
  image.build(run, args, shell)
  shell.run(command)
  kubernetes.watch(run, args, shell)


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Deletes the workload; its processes save before they end."""
  shell.run(["xpk", "workload", "delete", *_location_flags(run, args)])


def _location_flags(run: Run, args: argparse.Namespace) -> list[str]:
  project = [f"--project={args.project}"] if args.project else []
  place = [f"--workload={run.name}", f"--cluster={args.cluster}", f"--zone={args.zone}"]
  return place + project
