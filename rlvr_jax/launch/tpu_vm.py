"""TPU VMs as queued resources: creates, prepares and watches them, and replaces preempted ones.

Every host runs one process as a systemd service of its user, which survives a lost connection.
systemd restarts a failed process; this program replaces preempted machines. --retries limits both.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import tempfile
import time

from rlvr_jax.launch import shell as shells
from rlvr_jax.launch import tpu_host
from rlvr_jax.launch.run import SHARED, Run, check_shared
from rlvr_jax.launch.shell import CommandError, LaunchError, Shell, say
from rlvr_jax.launch.slices import find_slice

ON_HOSTS = True
_LOST = ("SUSPENDED", "FAILED")  # a preempted queued resource is suspended


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--zone", required=True, help="such as us-west4-a")
  add("--project", default="", help="default: gcloud's project")
  add("--type", default="", help="slice in Cloud's spelling: v5litepod-64, v5p-32; for start")
  add("--num_slices", type=int, default=1, help="of that type; config.mesh.data is a multiple")
  add("--spot", action="store_true", help="cheaper, but may be preempted at any time")
  add("--service_account", default="", help="account of the machines; needs access to the bucket")
  add("--nfs", default="", help=f"IP:/SHARE of a Filestore, mounted at {SHARED} on every host")
  add("--keep", action="store_true", help="do not delete the machines when the run has finished")
  add("--poll_s", type=float, default=60.0, help="seconds between polls of the machines")


# --- commands -------------------------------------------------------------------------------------


def create_command(run: Run, args: argparse.Namespace) -> list[str]:
  """The command that requests the machines from Cloud."""
  tpu_slice = find_slice(args.type)
  one_node = [f"--node-id={run.name}"]
  several_nodes = [f"--node-count={args.num_slices}", f"--node-prefix={run.name}"]
  command = _queued_resource_command(run, args, "create")
  command += several_nodes if args.num_slices > 1 else one_node
  command += [f"--accelerator-type={tpu_slice.name}", f"--runtime-version={tpu_slice.runtime}"]
  command += ["--async"] + ["--spot"] * args.spot
  return command + [f"--service-account={args.service_account}"] * bool(args.service_account)


def describe_command(run: Run, args: argparse.Namespace) -> list[str]:
  """The command that prints the state of the queued resource, or nothing if there is none."""
  place = _location_flags(args)
  command = ["gcloud", "compute", "tpus", "queued-resources", "list", *place]
  return [*command, f"--filter=name~/{run.name}$", "--format=value(state.state)"]


def delete_command(run: Run, args: argparse.Namespace) -> list[str]:
  """The command that deletes the queued resource and its machines."""
  return [*_queued_resource_command(run, args, "delete"), "--force"]


def copy_command(node: str, archive: pathlib.Path, args: argparse.Namespace) -> list[str]:
  """The command that copies the archive to all hosts of a slice."""
  command = ["gcloud", "compute", "tpus", "tpu-vm", "scp", str(archive), f"{node}:"]
  return [*command, *_location_flags(args), "--worker=all"]


def ssh_command(node: str, script: str, args: argparse.Namespace, worker: str = "all") -> list[str]:
  """The command that runs a script on all hosts of a slice, or on one."""
  command = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *_location_flags(args)]
  return [*command, f"--worker={worker}", f"--command={script}"]


def follow_command(run: Run, args: argparse.Namespace, lines: str) -> list[str]:
  """The command that prints the last lines of process 0, and then new ones."""
  script = tpu_host.logs_script(run, lines, follow=True)
  return ssh_command(node_names(run, args)[0], script, args, worker="0")


def node_names(run: Run, args: argparse.Namespace) -> list[str]:
  """Names of the slices."""
  return [run.name] if args.num_slices == 1 else [f"{run.name}-{i}" for i in range(args.num_slices)]


def _queued_resource_command(run: Run, args: argparse.Namespace, verb: str) -> list[str]:
  return ["gcloud", "compute", "tpus", "queued-resources", verb, run.name, *_location_flags(args)]


def _location_flags(args: argparse.Namespace) -> list[str]:
  project = [f"--project={args.project}"] if args.project else []
  return [f"--zone={args.zone}", *project, "--quiet"]


# --- verbs ----------------------------------------------------------------------------------------


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Creates the machines, starts the run on them, and supervises it until it has finished.

  Ctrl-C ends only this program; the same command continues to supervise the run.
  """
  find_slice(args.type)
  check_shared(run, "--nfs", args.nfs)
  if shell.dry_run:
    return _print_steps(run, args, shell)
  watch = _Watch(run, args, shell)
  try:
    watch.run_to_end()
  finally:
    shells.terminate(watch.log)
  if args.keep:
    return say(f"the machines of {run.name} still exist: stop deletes them")
  return shell.run(delete_command(run, args))


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the state of the machines, and of the process on every host."""
  state = shell.capture(describe_command(run, args)).strip()
  if not shell.dry_run:
    say(f"{run.name}: {state or 'no queued resource'}")
  if state == "ACTIVE" or shell.dry_run:
    for node in node_names(run, args):
      shell.run(ssh_command(node, tpu_host.state_script(run), args))


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0 as it comes, until Ctrl-C."""
  shell.run(follow_command(run, args, "100"))


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Requests the run's shutdown, before which it saves, then deletes the machines."""
  for node in node_names(run, args):
    try:
      shell.run(ssh_command(node, tpu_host.stop_script(run), args))
    except CommandError as error:  # preempted machines cannot be reached, but must be deleted
      shells.warn(str(error))
  shell.run(delete_command(run, args))


def _print_steps(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  assert run.package is not None
  shell.run(create_command(run, args))
  shell.capture(describe_command(run, args))
  for node in node_names(run, args):
    shell.run(copy_command(node, pathlib.Path(f"{run.package.version}.tar.gz"), args))
    shell.run(ssh_command(node, tpu_host.start_script(run, args.nfs), args))
  shell.follow(follow_command(run, args, "all"))
  if not args.keep:
    shell.run(delete_command(run, args))


class _Watch:
  """Supervises a run until it has finished: polls the machines and takes the next step."""

  def __init__(self, run: Run, args: argparse.Namespace, shell: Shell):
    self.run = run
    self.args = args
    self.shell = shell
    self.log: subprocess.Popen | None = None  # the followed output of process 0
    self.is_prepared = False  # whether the hosts were prepared
    self.was_active = False  # whether the machines ever existed
    self.preemptions = 0
    self.previous_state = ""  # of the queued resource

  def run_to_end(self) -> None:
    """Polls until the run has finished on all hosts; raises LaunchError if it cannot."""
    while True:
      state = self.read_state()
      if state != self.previous_state:
        say(f"{self.run.name}: {state or 'no queued resource yet'}")
      if state == "" and self.previous_state not in ("", *_LOST):
        raise LaunchError(f"the machines of {self.run.name} were deleted during the run")
      self.previous_state = state
      if state == "":
        self.shell.run(create_command(self.run, self.args))
      elif state in _LOST:
        self.replace_machines(state)
      elif state == "ACTIVE":
        self.was_active = True
        if self.maintain_hosts():
          return
      time.sleep(self.args.poll_s)

  def read_state(self) -> str:
    """Reads the state of the queued resource; "" if there is none."""
    try:
      return self.shell.capture(describe_command(self.run, self.args)).strip()
    except CommandError as error:
      if not self.is_prepared:
        raise
      shells.warn(f"{error}; trying again in {self.args.poll_s:g} s")  # this machine is offline
      return self.previous_state

  def replace_machines(self, state: str) -> None:
    """Deletes preempted machines, so that the next poll requests new ones."""
    if state == "FAILED" and not self.was_active:
      self.shell.run(_queued_resource_command(self.run, self.args, "describe"))
      raise LaunchError(
        f"Cloud did not make the machines of {self.run.name}; the reason is above, often the quota"
        " (docs/tpu.md). stop deletes the request"
      )
    if self.preemptions == self.run.retries:
      raise LaunchError(
        f"{self.run.name} is {state}, after --retries = {self.run.retries} replacements: run the"
        " same command again to continue, or choose another --zone or --type; stop deletes the"
        " queued resource"
      )
    self.preemptions += 1
    shells.terminate(self.log)
    self.is_prepared = False
    self.shell.run(delete_command(self.run, self.args))

  def maintain_hosts(self) -> bool:
    """Starts the run on hosts where it is missing; returns whether it has finished on all."""
    try:
      states = self.read_host_states() if self.is_prepared else ["missing"]
      if "stopped" in states:
        raise LaunchError(f"{self.run.name} was stopped: run the same command again to resume it")
      if "failed" in states:
        self.report_failure()
      if "missing" in states:
        self.prepare_hosts()
      elif all(state == "finished" for state in states):
        return True
    except CommandError as error:  # a host restarts, or the machines are being preempted
      shells.warn(f"{error}; trying again in {self.args.poll_s:g} s")
      return False
    if shells.has_ended(self.log):
      self.log = self.shell.follow(follow_command(self.run, self.args, "20" if self.log else "all"))
    return False

  def read_host_states(self) -> list[str]:
    """Reads the state of the process on each host; raises CommandError if a slice reports none."""
    script = tpu_host.state_script(self.run)
    states = []
    for node in node_names(self.run, self.args):
      text = self.shell.capture(ssh_command(node, script, self.args))
      lines = [line for line in text.splitlines() if line.startswith(tpu_host.HOST_STATE)]
      if not lines:
        raise CommandError(f"no host of {node} has reported its state: {text[-300:]!r}")
      states += [line.split()[2] for line in lines]
    return states

  def prepare_hosts(self) -> None:
    """Copies the package to all hosts, installs it, and starts the run."""
    assert self.run.package is not None
    with tempfile.TemporaryDirectory() as folder:
      archive = pathlib.Path(folder) / f"{self.run.package.version}.tar.gz"
      self.run.package.write(archive)
      for node in node_names(self.run, self.args):
        self.shell.run(copy_command(node, archive, self.args))
        self.shell.run(ssh_command(node, tpu_host.start_script(self.run, self.args.nfs), self.args))
    self.is_prepared = True

  def report_failure(self) -> None:
    """Prints the last output of all hosts, and raises LaunchError."""
    script = tpu_host.logs_script(self.run, "30", follow=False)
    for node in node_names(self.run, self.args):
      self.shell.run(ssh_command(node, script, self.args))
    raise LaunchError(
      f"{self.run.name} has failed {self.run.retries + 1} times; its last output is above. Fix"
      " the cause and run the same command again, or stop, which deletes the machines"
    )
