"""TPU VMs as queued resources: creates, prepares and watches them, and replaces preempted ones.

Every host runs one process as a systemd service of its user, which survives a lost connection.
systemd restarts a failed process at most --retries times. The launcher replaces preempted machines,
also at most --retries times. Each sampler of a fleet has its own queued resource, so that it starts
and ends independently. Ctrl-C ends only the launcher, and the run continues. Another `start`
watches the run again, also with another number of samplers.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rlvr_jax.launch import slices, tpu_host
from rlvr_jax.launch.package import SHARED, ship
from rlvr_jax.launch.run import Run, sampler_name
from rlvr_jax.launch.shell import CommandError, LaunchError, Shell, say, warn
from rlvr_jax.launch.slices import Machines

_SLICES = "rlvr_jax_slices"  # label of each queued resource; its value is the number of slices
_LOST = ("SUSPENDED", "FAILED")  # a preempted queued resource is suspended


def add_flags(parser: argparse.ArgumentParser) -> None:
  slices.add_flags(parser)
  add = parser.add_argument
  add("--service_account", default="", help="account of the machines; needs access to the bucket")
  add("--nfs", default="", help=f"IP:/SHARE of a Filestore, mounted at {SHARED} on every host")
  add("--keep", action="store_true", help="do not delete the machines when the run has finished")
  add("--poll_s", type=float, default=60.0, help="seconds between polls of the machines")


class QueuedResource:
  """The machines of a program, one or several slices: a queued resource with the program's name."""

  def __init__(self, name: str, num_slices: int, args: argparse.Namespace, shell: Shell):
    """Makes no machines yet; `args` has their zone and project."""
    self.name = name
    self.shell = shell
    self._num_slices = num_slices
    self._place = _place(args)
    self._nodes = [name] if num_slices == 1 else [f"{name}-{i}" for i in range(num_slices)]

  def state(self) -> str:
    """The state of the queued resource, such as ACTIVE; "" if there is none."""
    shown = (f"--filter=name~/{self.name}$", "--format=value(state.state)")
    return self.shell.capture(self._command("queued-resources", "list", *shown)).strip()

  def samplers(self) -> list[str]:
    """The names of the run's samplers that have machines."""
    pattern = sampler_name(self.name, "[0-9]+")
    shown = (f"--filter=name~/{pattern}$", "--format=value(name.basename())")
    names = self.shell.capture(self._command("queued-resources", "list", *shown)).split()
    return sorted(names, key=lambda name: int(name.rpartition("-")[2]))

  def create(self, machines: Machines, service_account: str) -> None:
    """Requests the machines."""
    one_node = (f"--node-id={self.name}",)
    several_nodes = (f"--node-count={self._num_slices}", f"--node-prefix={self.name}")
    kind = machines.slice
    self.shell.run(
      self._command(
        *("queued-resources", "create", self.name),
        *(several_nodes if self._num_slices > 1 else one_node),
        *(f"--accelerator-type={kind.name}", f"--runtime-version={kind.runtime}", "--async"),
        *["--spot"] * machines.spot,
        f"--labels={_SLICES}={self._num_slices}",
        *[f"--service-account={service_account}"] * bool(service_account),
      )
    )

  def describe(self) -> None:
    """Prints Cloud's description of the queued resource, such as why it has failed."""
    self.shell.run(self._command("queued-resources", "describe", self.name))

  def delete(self) -> None:
    """Deletes the queued resource and its machines."""
    self.shell.run(self._command("queued-resources", "delete", self.name, "--force"))

  def copy(self, archive: pathlib.Path) -> None:
    """Copies a file to all hosts."""
    for node in self._nodes:
      self.shell.run(self._command("tpu-vm", "scp", str(archive), f"{node}:", "--worker=all"))

  def run_on_hosts(self, script: str) -> None:
    """Runs a script on all hosts."""
    for node in self._nodes:
      self.shell.run(self._ssh(node, script))

  def host_states(self) -> list[str]:
    """The state of the process on each host; CommandError if no host of a slice reports a state."""
    states = []
    for node in self._nodes:
      text = self.shell.capture(self._ssh(node, tpu_host.state_script(self.name)))
      lines = [line for line in text.splitlines() if line.startswith(tpu_host.HOST_STATE)]
      if not lines:
        raise CommandError(f"no host of {node} has reported its state: {text[-300:]!r}")
      states += [line.split()[2] for line in lines]
    return states

  def follow_command(self, lines: str) -> list[str]:
    """The command that prints the last lines of process 0, and then new lines."""
    script = tpu_host.logs_script(self.name, lines, follow=True)
    return self._ssh(self._nodes[0], script, worker="0")

  def stop(self) -> None:
    """Asks the program to save and end, waits for its end, then deletes the machines."""
    try:
      self.run_on_hosts(tpu_host.stop_script(self.name))
    except CommandError as error:  # preempted machines cannot be reached, but must be deleted
      warn(str(error))
    self.delete()

  def _ssh(self, node: str, script: str, worker: str = "all") -> list[str]:
    return self._command("tpu-vm", "ssh", node, f"--worker={worker}", f"--command={script}")

  def _command(self, *arguments: str) -> list[str]:
    return ["gcloud", "compute", "tpus", *arguments, *self._place, "--quiet"]


# --- verbs ----------------------------------------------------------------------------------------


def start(programs: Sequence[Run], args: argparse.Namespace, shell: Shell) -> None:
  """Creates the machines, starts the programs, and watches until the first program has finished."""
  machines = slices.machines_of(args, count=len(programs))
  programs, package = ship(programs, machines[0], allow_dirty=args.allow_dirty, share=args.nfs)
  with tempfile.TemporaryDirectory() as folder:
    archive = package.write(pathlib.Path(folder))  # written once: the checkout may change later
    watches = []
    for program, own in zip(programs, machines, strict=True):
      say(f"{program.name}: asks for {own}, in {args.zone}")
      say(f"{program.name}: costs {own.price_class()}, from ACTIVE until they are deleted")
      setup = _Setup(program, own, args.service_account, archive, package.version, args.nfs)
      watches.append(_Watch(setup, QueuedResource(program.name, own.num_slices, args, shell)))
    if shell.dry_run:
      for watch in watches:
        watch.create()
        watch.prepare_hosts()
      shell.follow(watches[0].resource.follow_command("all"))
    else:
      for name in watches[0].resource.samplers():
        if name not in (program.name for program in programs):  # other samplers take its groups
          QueuedResource(name, 1, args, shell).stop()
      _supervise(watches, args.poll_s)
  if args.keep:
    say(f"the machines of {args.name} still exist: `stop` deletes them")
  else:
    _of_each(_resources(args.name, args, shell), QueuedResource.delete)


def status(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the state of the machines and of the process on every host, also for samplers."""
  for resource in _resources(name, args, shell):
    state = resource.state()
    if not shell.dry_run:
      say(f"{resource.name}: {state or 'no queued resource'}")
    if state == "ACTIVE" or shell.dry_run:
      resource.run_on_hosts(tpu_host.state_script(resource.name))


def logs(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Prints the output of a program's process 0 as it appears, until Ctrl-C."""
  num_slices = _num_slices(name, args, shell) if name == args.name else 1
  shell.run(QueuedResource(name, num_slices, args, shell).follow_command("100"))


def stop(name: str, args: argparse.Namespace, shell: Shell) -> None:
  """Asks the run to save and end, and its samplers to end; then deletes all machines."""
  _of_each(_resources(name, args, shell), QueuedResource.stop)


def stop_all(args: argparse.Namespace, shell: Shell) -> None:
  """Stops and deletes all machines that the launcher has created in the zone; lists others.

  A dry run also lists the machines, and prints the commands that would stop and delete them.

  Raises:
    LaunchError: machines that the launcher has created are left.
  """
  for name, state, num_slices in _listed(args, shell):
    if num_slices:
      say(f"{name}: {state}")
      try:
        QueuedResource(name, int(num_slices), args, shell).stop()
      except CommandError as error:  # the other machines are deleted nevertheless
        warn(str(error))
  if shell.dry_run:
    return
  left = _listed(args, shell)
  for name, state, num_slices in left:
    if not num_slices:
      say(f"{name}: {state}, without the label {_SLICES}: not touched")
  if own := [name for name, _, num_slices in left if num_slices]:
    raise LaunchError(
      f"machines still exist and are billed: {', '.join(own)}; run the command again"
    )
  say(f"no machines of rlvr_jax.launch are left in {args.zone}")


def _listed(args: argparse.Namespace, shell: Shell) -> list[list[str]]:
  """[name, state, label] of each queued resource in the zone; "" for a missing label."""
  shown = f"value(name.basename(),state.state,tpu.nodeSpec[0].node.labels.{_SLICES})"
  command = ["gcloud", "compute", "tpus", "queued-resources", "list", f"--format={shown}"]
  command += [*_place(args), "--quiet"]
  if shell.dry_run:  # listing changes nothing, so a dry run lists, too
    shell.capture(command)  # prints the command
    shell = Shell()
  lines = shell.capture(command).splitlines()
  return [[*line.split("\t"), "", ""][:3] for line in lines if line.strip()]


def _place(args: argparse.Namespace) -> list[str]:
  return [f"--zone={args.zone}", *[f"--project={args.project}"] * bool(args.project)]


def _resources(name: str, args: argparse.Namespace, shell: Shell) -> list[QueuedResource]:
  """The run's machines, and then its samplers' machines."""
  run = QueuedResource(name, _num_slices(name, args, shell), args, shell)
  return [run, *(QueuedResource(name, 1, args, shell) for name in run.samplers())]


def _num_slices(name: str, args: argparse.Namespace, shell: Shell) -> int:
  """The number of slices that a run's machines were made with; in a dry run --num_slices."""
  if shell.dry_run:
    return args.num_slices
  labels = {listed: label for listed, _, label in _listed(args, shell)}
  return int(labels.get(name) or args.num_slices)


def _of_each(resources: Sequence[QueuedResource], action: Callable[[QueuedResource], None]) -> None:
  """Stops or deletes all resources, also if that fails for one of them.

  Raises:
    LaunchError: it has failed for some.
  """
  failed = []
  for resource in resources:
    try:
      action(resource)
    except CommandError as error:  # it may be gone already; the others cost money
      warn(str(error))
      failed.append(resource.name)
  if failed:
    raise LaunchError(
      f"could not delete {', '.join(failed)}; `status` says whether its machines still exist"
    )


# --- supervision ----------------------------------------------------------------------------------


class _Setup(NamedTuple):
  """The settings with which a program's machines are made and prepared."""

  run: Run
  machines: Machines
  service_account: str
  archive: pathlib.Path  # the file of the package
  version: str  # the version of the package
  nfs: str


def _supervise(watches: Sequence[_Watch], poll_s: float) -> None:
  """Watches programs until the first program has finished, and prints the output of that program.

  A sampler that cannot go on is no longer watched: the run goes on without it.

  Raises:
    LaunchError: the first program cannot go on.
  """
  run = watches[0]
  log: subprocess.Popen | None = None
  is_first_round = True
  try:
    with ThreadPoolExecutor(len(watches)) as pool:  # preparing a host takes minutes
      while True:
        steps = [(watch, pool.submit(watch.step)) for watch in watches]
        for watch, step in steps:
          try:
            has_finished = step.result()
          except CommandError as error:  # this machine is offline, or the machines are gone
            if is_first_round:
              raise
            warn(f"{error}; trying again in {poll_s:g} s")
          except LaunchError as error:
            if watch is run:
              raise
            warn(f"{error}. {run.resource.name} goes on without this sampler")
            watches = [other for other in watches if other is not watch]
          else:
            if has_finished and watch is run:
              return
        if log is not None and not run.is_prepared:
          _terminate(log)  # the machines that it reads from are gone
        if run.is_prepared and (log is None or log.poll() is not None):
          lines = "20" if log else "all"
          log = run.resource.shell.follow(run.resource.follow_command(lines))
        is_first_round = False
        time.sleep(poll_s)
  finally:
    if log is not None:
      _terminate(log)


def _terminate(process: subprocess.Popen) -> None:
  process.terminate()
  process.wait()


class _Watch:
  """Supervises one program: polls its machines, and creates, prepares or replaces them."""

  def __init__(self, setup: _Setup, resource: QueuedResource):
    self.setup = setup
    self.resource = resource
    self.is_prepared = False  # whether the hosts were prepared
    self._was_active = False  # whether the machines ever existed
    self._preemptions = 0
    self._state = ""  # last seen state of the queued resource

  def step(self) -> bool:
    """Polls the machines once, and acts on changes.

    Returns:
      Whether the program has finished on all hosts.
    Raises:
      CommandError: a command failed, for example while a host restarts; a later step may succeed.
      LaunchError: the program cannot go on.
    """
    name, previous = self.resource.name, self._state
    state = self._state = self.resource.state()
    if state != previous:
      say(f"{name}: {state or 'no queued resource yet'}")
    if state == "" and previous:  # `stop` has deleted them: this program requests new ones at once
      raise LaunchError(f"the machines of {name} were deleted during the run")
    if state == "":
      self.create()
    elif state in _LOST:
      self._replace_machines(state)
    elif state == "ACTIVE":
      self._was_active = True
      return self._maintain_hosts()
    return False

  def create(self) -> None:
    """Requests the machines."""
    self.resource.create(self.setup.machines, self.setup.service_account)

  def prepare_hosts(self) -> None:
    """Copies the package to all hosts, installs it, and starts the program if not yet running."""
    setup = self.setup
    self.resource.copy(setup.archive)
    self.resource.run_on_hosts(tpu_host.start_script(setup.run, setup.version, setup.nfs))
    self.is_prepared = True

  def _replace_machines(self, state: str) -> None:
    """Deletes preempted machines and requests new machines; if that fails, `step` tries again."""
    name, retries = self.resource.name, self.setup.run.retries
    if state == "FAILED" and not self._was_active:
      self.resource.describe()
      raise LaunchError(
        f"Google Cloud did not create the machines of {name}; the reason is above, often the quota"
        " (docs/tpu.md). The command `stop` deletes the request"
      )
    if self._preemptions == retries:
      raise LaunchError(
        f"{name} is {state}, and --retries = {retries} allows no further replacement: run the same"
        " command again to continue, or choose another --zone or --type; `stop` deletes the queued"
        " resource"
      )
    self._preemptions += 1
    self.is_prepared = False
    self.resource.delete()  # fails if `stop` was faster
    self._state = ""
    self.create()

  def _maintain_hosts(self) -> bool:
    """Starts the program on hosts that lack it; returns whether it has finished on all hosts."""
    name = self.resource.name
    states = self.resource.host_states() if self.is_prepared else ["missing"]
    if "stopped" in states:
      raise LaunchError(f"{name} was stopped: run the same command again to resume it")
    if "failed" in states:
      self.resource.run_on_hosts(tpu_host.logs_script(name, "30", follow=False))
      raise LaunchError(
        f"{name} has failed {self.setup.run.retries + 1} times; its last output is above. Fix the"
        " cause and run the same command again, or delete the machines with `stop`"
      )
    if "missing" in states:
      self.prepare_hosts()
      return False
    return all(state == "finished" for state in states)
