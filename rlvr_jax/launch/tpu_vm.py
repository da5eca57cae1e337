"""TPU VMs through queued resources: created, prepared, watched, and created again when preempted.

Every host runs one process as a systemd service of its user, so that a lost connection ends
nothing. systemd starts a process again that fails; this program brings back machines that were
preempted. Both have the limit --retries.
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
from rlvr_jax.launch.slices import slice_of

ON_HOSTS = True
_LOST = ("SUSPENDED", "FAILED")  # a preempted queued resource is suspended


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--zone", required=True, help="such as us-west4-a")
  add("--project", default="", help="default: that of gcloud")
  add("--type", default="", help="slice in Cloud's spelling: v5litepod-64, v5p-32; for start")
  add("--num_slices", type=int, default=1, help="of that type; config.mesh.data is a multiple")
  add("--spot", action="store_true", help="cheaper, and preempted at any time")
  add("--service_account", default="", help="of the machines; it needs access to the bucket")
  add("--nfs", default="", help=f"IP:/SHARE of a Filestore, mounted at {SHARED} on every host")
  add("--keep", action="store_true", help="keep the machines when the run has finished")
  add("--poll_s", type=float, default=60.0, help="seconds between looks at the machines")


# --- commands -------------------------------------------------------------------------------------


def create_command(run: Run, args: argparse.Namespace) -> list[str]:
  """Asks Cloud for the machines."""
  wanted = slice_of(args.type)
  one = [f"--node-id={run.name}"]
  several = [f"--node-count={args.num_slices}", f"--node-prefix={run.name}"]
  command = _queued(run, args, "create")
  command += several if args.num_slices > 1 else one
  command += [f"--accelerator-type={wanted.name}", f"--runtime-version={wanted.runtime}"]
  command += ["--async"] + ["--spot"] * args.spot
  return command + [f"--service-account={args.service_account}"] * bool(args.service_account)


def describe_command(run: Run, args: argparse.Namespace) -> list[str]:
  """Prints the state of the queued resource; nothing if there is none."""
  place = _place(args)
  command = ["gcloud", "compute", "tpus", "queued-resources", "list", *place]
  return [*command, f"--filter=name~/{run.name}$", "--format=value(state.state)"]


def delete_command(run: Run, args: argparse.Namespace) -> list[str]:
  """Deletes the queued resource and its machines."""
  return [*_queued(run, args, "delete"), "--force"]


def copy_command(node: str, archive: pathlib.Path, args: argparse.Namespace) -> list[str]:
  """Copies the archive to all hosts of a slice."""
  command = ["gcloud", "compute", "tpus", "tpu-vm", "scp", str(archive), f"{node}:", *_place(args)]
  return [*command, "--worker=all"]


def ssh_command(node: str, script: str, args: argparse.Namespace, worker: str = "all") -> list[str]:
  """Runs a script on all hosts of a slice, or on one."""
  command = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *_place(args)]
  return [*command, f"--worker={worker}", f"--command={script}"]


def follow_command(run: Run, args: argparse.Namespace, lines: str) -> list[str]:
  """Prints the last lines of process 0, and those that come."""
  script = tpu_host.logs_script(run, lines, follow=True)
  return ssh_command(nodes(run, args)[0], script, args, worker="0")


def nodes(run: Run, args: argparse.Namespace) -> list[str]:
  """Names of the slices."""
  return [run.name] if args.num_slices == 1 else [f"{run.name}-{i}" for i in range(args.num_slices)]


def _queued(run: Run, args: argparse.Namespace, verb: str) -> list[str]:
  return ["gcloud", "compute", "tpus", "queued-resources", verb, run.name, *_place(args)]


def _place(args: argparse.Namespace) -> list[str]:
  project = [f"--project={args.project}"] if args.project else []
  return [f"--zone={args.zone}", *project, "--quiet"]


# --- verbs ----------------------------------------------------------------------------------------


def start(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Creates the machines, starts the run there, and brings it to its end.

  Ctrl-C ends this program alone; the same command takes the run up again.
  """
  slice_of(args.type)
  check_shared(run, "--nfs", args.nfs)
  if shell.dry_run:
    return _print_steps(run, args, shell)
  watched = _Watch(run, args, shell)
  try:
    watched.until_the_end()
  finally:
    shells.end(watched.log)
  if args.keep:
    return say(f"the machines of {run.name} are still there: stop deletes them")
  return shell.run(delete_command(run, args))


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the state of the machines, and of the process on every host."""
  state = shell.output(describe_command(run, args)).strip()
  if not shell.dry_run:
    say(f"{run.name}: {state or 'no queued resource'}")
  if state == "ACTIVE" or shell.dry_run:
    for node in nodes(run, args):
      shell.run(ssh_command(node, tpu_host.state_script(run), args))


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0 as it comes, until Ctrl-C."""
  shell.run(follow_command(run, args, "100"))


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Asks the run to save and end, then deletes the machines."""
  for node in nodes(run, args):
    try:
      shell.run(ssh_command(node, tpu_host.stop_script(run), args))
    except CommandError as error:  # preempted ones cannot be reached, and still must be deleted
      shells.warn(str(error))
  shell.run(delete_command(run, args))


def _print_steps(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  assert run.package is not None
  shell.run(create_command(run, args))
  shell.output(describe_command(run, args))
  for node in nodes(run, args):
    shell.run(copy_command(node, pathlib.Path(f"{run.package.version}.tar.gz"), args))
    shell.run(ssh_command(node, tpu_host.start_script(run, args.nfs), args))
  shell.follow(follow_command(run, args, "all"))
  if not args.keep:
    shell.run(delete_command(run, args))


class _Watch:
  """Brings a run to its end: looks at the machines now and then, and does what is missing."""

  def __init__(self, run: Run, args: argparse.Namespace, shell: Shell):
    self.run, self.args, self.shell = run, args, shell
    self.log: subprocess.Popen | None = None  # the followed output of process 0
    self.began = False  # whether the hosts were prepared
    self.active = False  # whether there ever were machines
    self.preemptions = 0
    self.before = ""

  def until_the_end(self) -> None:
    while True:
      state = self.state()
      if state != self.before:
        say(f"{self.run.name}: {state or 'no queued resource yet'}")
      if state == "" and self.before not in ("", *_LOST):
        raise LaunchError(f"the machines of {self.run.name} were deleted meanwhile")
      self.before = state
      if state == "":
        self.shell.run(create_command(self.run, self.args))
      elif state in _LOST:
        self.replace(state)
      elif state == "ACTIVE":
        self.active = True
        if self.attend():
          return
      time.sleep(self.args.poll_s)

  def state(self) -> str:
    """Of the queued resource; "" if there is none."""
    try:
      return self.shell.output(describe_command(self.run, self.args)).strip()
    except CommandError as error:
      if not self.began:
        raise
      shells.warn(f"{error}; trying again in {self.args.poll_s:g} s")  # this machine is offline
      return self.before

  def replace(self, state: str) -> None:
    """Deletes machines that were preempted; then there are none, and others are asked for."""
    if state == "FAILED" and not self.active:
      self.shell.run(_queued(self.run, self.args, "describe"))
      raise LaunchError(
        f"Cloud did not make the machines of {self.run.name}; the reason is above, often the quota"
        " (docs/tpu.md). stop deletes the request"
      )
    if self.preemptions == self.run.retries:
      raise LaunchError(
        f"{self.run.name} is {state} for the {self.preemptions + 1}. time, --retries ="
        f" {self.run.retries}: run the same command again to go on, or choose another --zone or"
        " --type; stop deletes what is left"
      )
    self.preemptions += 1
    shells.end(self.log)
    self.began = False
    self.shell.run(delete_command(self.run, self.args))

  def attend(self) -> bool:
    """Starts what is missing on the hosts; returns whether the run has finished on all."""
    try:
      states = self.host_states() if self.began else ["missing"]
      if "stopped" in states:
        raise LaunchError(f"{self.run.name} was stopped: run the same command again to resume it")
      if "failed" in states:
        self.report_failure()
      if "missing" in states:
        self.prepare()
      elif all(state == "finished" for state in states):
        return True
    except CommandError as error:  # a host restarts, or the machines are just being preempted
      shells.warn(f"{error}; trying again in {self.args.poll_s:g} s")
      return False
    if shells.ended(self.log):
      self.log = self.shell.follow(follow_command(self.run, self.args, "20" if self.log else "all"))
    return False

  def host_states(self) -> list[str]:
    script, found = tpu_host.state_script(self.run), []
    for node in nodes(self.run, self.args):
      text = self.shell.output(ssh_command(node, script, self.args))
      lines = [line for line in text.splitlines() if line.startswith(tpu_host.HOST_STATE)]
      if not lines:
        raise CommandError(f"no host of {node} has told its state: {text[-300:]!r}")
      found += [line.split()[2] for line in lines]
    return found

  def prepare(self) -> None:
    assert self.run.package is not None
    with tempfile.TemporaryDirectory() as folder:
      archive = pathlib.Path(folder) / f"{self.run.package.version}.tar.gz"
      self.run.package.write(archive)
      for node in nodes(self.run, self.args):
        self.shell.run(copy_command(node, archive, self.args))
        self.shell.run(ssh_command(node, tpu_host.start_script(self.run, self.args.nfs), self.args))
    self.began = True

  def report_failure(self) -> None:
    last = tpu_host.logs_script(self.run, "30", follow=False)
    for node in nodes(self.run, self.args):
      self.shell.run(ssh_command(node, last, self.args))
    raise LaunchError(
      f"{self.run.name} has failed {self.run.retries + 1} times; its last output is above. Correct"
      " it and run the same command again, or stop, which deletes the machines"
    )
