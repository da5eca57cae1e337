"""TPU VMs as queued resources: creates, prepares and watches them, and replaces preempted ones.

Every host runs one process as a systemd service of its user, which survives a lost connection.
systemd restarts a failed process; this program replaces preempted machines. --retries limits both.
Each sampler of a fleet has a queued resource of its own, so that it comes and goes by itself.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from rlvr_jax.launch import fleet, tpu_host
from rlvr_jax.launch import shell as shells
from rlvr_jax.launch.run import SHARED, Run, check_shared
from rlvr_jax.launch.shell import CommandError, LaunchError, Shell, say
from rlvr_jax.launch.slices import find_slice

ON_HOSTS = True
_WANTED = "samplers"  # note of how many there are to be
_LOST = ("SUSPENDED", "FAILED")  # a preempted queued resource is suspended


def add_flags(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("--zone", required=True, help="such as us-west4-a")
  add("--project", default="", help="default: gcloud's project")
  add("--type", default="", help="slice in Cloud's spelling: v5litepod-64, v5p-32; for start")
  add("--num_slices", type=int, default=1, help="of that type; config.mesh.data is a multiple")
  add("--service_account", default="", help="account of the machines; needs access to the bucket")
  add("--nfs", default="", help=f"IP:/SHARE of a Filestore, mounted at {SHARED} on every host")
  add("--keep", action="store_true", help="do not delete the machines when the run has finished")
  add("--poll_s", type=float, default=60.0, help="seconds between polls of the machines")
  fleet.add_flags(parser)
  fleet.add_slice_flags(parser)


# --- commands -------------------------------------------------------------------------------------


def create_command(run: Run, args: argparse.Namespace) -> list[str]:
  """The command that requests the machines from Cloud."""
  tpu_slice = find_slice(args.type)
  one_node = [f"--node-id={run.name}"]
  several_nodes = [f"--node-count={args.num_slices}", f"--node-prefix={run.name}"]
  command = _queued_resource_command(run, args, "create")
  command += several_nodes if args.num_slices > 1 else one_node
  command += [f"--accelerator-type={tpu_slice.name}", f"--runtime-version={tpu_slice.runtime}"]
  command += ["--async"] + ["--spot"] * (args.spot == "all")
  return command + [f"--service-account={args.service_account}"] * bool(args.service_account)


def describe_command(run: Run, args: argparse.Namespace) -> list[str]:
  """The command that prints the state of the queued resource, or nothing if there is none."""
  place = _location_flags(args)
  command = ["gcloud", "compute", "tpus", "queued-resources", "list", *place]
  return [*command, f"--filter=name~/{run.name}$", "--format=value(state.state)"]


def samplers_command(run: Run, args: argparse.Namespace) -> list[str]:
  """The command that prints the names of the queued resources of a run's samplers."""
  command = ["gcloud", "compute", "tpus", "queued-resources", "list", *_location_flags(args)]
  pattern = fleet.sampler_name(run, "[0-9]+")
  return [*command, f"--filter=name~/{pattern}$", "--format=value(name.basename())"]


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
    _print_steps(run, args, shell)
    for number in range(args.samplers or 0):
      _print_steps(fleet.sampler_of(run, number, args), fleet.with_slice_of_sampler(args), shell)
    return None
  watch = _Watch(run, args, shell)
  samplers = None
  if args.samplers is not None:
    fleet.write_note(run, _WANTED, str(args.samplers))
    samplers = _Samplers(run, args, shell)
  try:
    while not watch.step():
      if samplers is not None:
        samplers.step()
      time.sleep(args.poll_s)
  finally:
    shells.terminate(watch.log)
  if args.keep:
    return say(f"the machines of {run.name} still exist: stop deletes them")
  if samplers is not None:
    samplers.delete()
  return shell.run(delete_command(run, args))


def status(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the state of the machines, and of the process on every host, of samplers too."""
  for program, own in _programs(run, args, shell):
    state = shell.capture(describe_command(program, own)).strip()
    if not shell.dry_run:
      say(f"{program.name}: {state or 'no queued resource'}")
    if state == "ACTIVE" or shell.dry_run:
      for node in node_names(program, own):
        shell.run(ssh_command(node, tpu_host.state_script(program), own))


def logs(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of process 0, of the run or of a sampler, as it comes, until Ctrl-C."""
  program, own = run, args
  if args.sampler is not None:
    program, own = fleet.chosen(run, args.sampler), fleet.with_slice_of_sampler(args)
  shell.run(follow_command(program, own, "100"))


def scale(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Lets the program that supervises the run have as many samplers, from its next poll on."""
  if shell.dry_run:
    return say(f"{run.folder / _WANTED}: {args.samplers}")
  fleet.read_note(run, _WANTED)
  fleet.write_note(run, _WANTED, str(args.samplers))
  return say(f"{run.name}: {args.samplers} samplers, as soon as start has polled")


def stop(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Requests the run's shutdown, before which it saves, then deletes all machines."""
  for program, own in _programs(run, args, shell):
    _stop_machines(program, own, shell)


def _programs(
  run: Run, args: argparse.Namespace, shell: Shell
) -> list[tuple[Run, argparse.Namespace]]:
  """The run, and the samplers that have machines, with the flags of their slices."""
  own = fleet.with_slice_of_sampler(args)
  numbers = _samplers_with_machines(run, args, shell)
  return [(run, args), *((fleet.chosen(run, number), own) for number in numbers)]


def _samplers_with_machines(run: Run, args: argparse.Namespace, shell: Shell) -> list[int]:
  """The numbers of a run's samplers that have a queued resource."""
  names = shell.capture(samplers_command(run, args)).split()
  return sorted(int(name.rpartition("-")[2]) for name in names)


def _stop_machines(run: Run, args: argparse.Namespace, shell: Shell) -> None:
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
  if not run.is_sampler:
    shell.follow(follow_command(run, args, "all"))
  if not args.keep:
    shell.run(delete_command(run, args))


class _Samplers:
  """Supervises the samplers of a run, each by itself: one that fails is left alone."""

  def __init__(self, run: Run, args: argparse.Namespace, shell: Shell):
    self.run, self.args, self.shell = run, fleet.with_slice_of_sampler(args), shell
    self.watches: dict[int, _Watch] = {}
    self.left_alone: set[int] = set()

  def step(self) -> None:
    """Removes samplers beyond those wanted, and takes the next step of the others, all at once."""
    wanted = range(int(fleet.read_note(self.run, _WANTED)))
    try:  # from an earlier start, too; others sample their groups
      removed = [n for n in self.with_machines() if n not in wanted]
    except CommandError as error:  # this machine is offline
      shells.warn(f"{error}; trying again in {self.args.poll_s:g} s")
      return
    for number in wanted:
      if number not in self.watches:
        sampler = fleet.sampler_of(self.run, number, self.args)
        self.watches[number] = _Watch(sampler, self.args, self.shell)
    self.watches = {n: watch for n, watch in self.watches.items() if n in wanted}
    self.left_alone.intersection_update(wanted)
    with ThreadPoolExecutor(len(wanted) + len(removed) or 1) as pool:
      list(pool.map(self._step_one, [*removed, *wanted]))

  def delete(self) -> None:
    """Deletes the machines of all samplers, whose run has finished."""
    for number in self.with_machines():
      self.shell.run(delete_command(fleet.chosen(self.run, number), self.args))

  def with_machines(self) -> list[int]:
    """The numbers of the samplers that have a queued resource."""
    return _samplers_with_machines(self.run, self.args, self.shell)

  def _step_one(self, number: int) -> None:
    try:
      if number not in self.watches:
        _stop_machines(fleet.chosen(self.run, number), self.args, self.shell)
      elif number not in self.left_alone:
        self.watches[number].step()
    except LaunchError as error:
      shells.warn(f"{error}. {self.run.name} goes on without this sampler")
      self.left_alone.add(number)


class _Watch:
  """Supervises a run, or a sampler, until it has finished: polls the machines, does what is due."""

  def __init__(self, run: Run, args: argparse.Namespace, shell: Shell):
    self.run = run
    self.args = args
    self.shell = shell
    self.log: subprocess.Popen | None = None  # the followed output of process 0
    self.is_prepared = False  # whether the hosts were prepared
    self.was_active = False  # whether the machines ever existed
    self.preemptions = 0
    self.previous_state = ""  # of the queued resource

  def step(self) -> bool:
    """Polls once, and does what is due.

    Returns:
      Whether the run has finished on all hosts.
    Raises:
      LaunchError: it cannot go on.
    """
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
      return self.maintain_hosts()
    return False

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
    if not self.run.is_sampler and shells.has_ended(self.log):
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
