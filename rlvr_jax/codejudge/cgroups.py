"""A control group (cgroup v2) around each sandbox: the kernel's own limits, where it is delegated.

Delegated means: below this process's group or one above it, this process may make groups, limit
their memory and number of processes, and move processes there. Root of a system may, and what an
ordinary user starts with `systemd-run --user --scope`. No process that is there already is moved.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import subprocess
import time
from collections.abc import Iterator, Sequence

from .harness.isolation import PROCESSES

_PREFIX = "rlvr_jax-"  # of a group's name; the process that made it and a count follow
_LAUNCHER_MIB = 16  # the launcher and an item's supervisor
_LAUNCHER_PROCESSES = 8
_REMOVAL_S = 2.0  # for killed processes to be gone

_count = itertools.count()


class GroupError(RuntimeError):
  """There is no control group to be had; says why."""


class Group:
  """A new group, empty; its processes share one core where the controller of that is to be had."""

  def __init__(self, parent: pathlib.Path):
    """Raises OSError where this is not delegated."""
    needed, there = {"memory", "pids"}, (parent / "cgroup.controllers").read_text().split()
    if not needed <= set(there):
      raise OSError(f"has the controllers {there}, needs memory and pids")
    controllers = (parent / "cgroup.subtree_control").read_text().split()
    if not needed <= set(controllers):
      (parent / "cgroup.subtree_control").write_text("+memory +pids")
    if "cpu" not in controllers:
      with contextlib.suppress(OSError):
        (parent / "cgroup.subtree_control").write_text("+cpu")
    _remove_abandoned(parent)
    self.path = parent / f"{_PREFIX}{os.getpid()}-{next(_count)}"
    self.path.mkdir()
    try:
      subprocess.run(self.entering(["true"]), check=True, stderr=subprocess.DEVNULL)
      self._write("pids.max", PROCESSES + _LAUNCHER_PROCESSES)
    except (OSError, subprocess.CalledProcessError) as error:
      self.path.rmdir()
      raise OSError(f"no process can be moved there ({error})") from error
    for name, value in (("memory.swap.max", "0"), ("cpu.max", "100000 100000")):
      with contextlib.suppress(OSError):  # no swap here, or no such controller
        self._write(name, value)

  def entering(self, command: Sequence[str]) -> list[str]:
    """The command, which first moves itself into the group."""
    return ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(self.path), *command]

  def limit_memory(self, mebibytes: int) -> None:
    """Of an item; what the sandbox needs for itself comes on top."""
    self._write("memory.max", (mebibytes + _LAUNCHER_MIB) * 2**20)

  def out_of_memory(self) -> int:
    """How many processes have been killed because the limit was reached."""
    events = (self.path / "memory.events").read_text().split()
    return int(events[events.index("oom_kill") + 1])

  def close(self) -> None:
    """Kills all that is in the group, and removes it."""
    with contextlib.suppress(OSError):  # before Linux 5.14; the launcher takes all along
      self._write("cgroup.kill", 1)
    deadline = time.monotonic() + _REMOVAL_S
    while not _removed(self.path) and time.monotonic() < deadline:
      time.sleep(0.005)

  def _write(self, name: str, value: object) -> None:
    (self.path / name).write_text(str(value))


def why_none() -> str | None:
  """The reason why there is no control group to be had; None where there is."""
  try:
    open_group().close()
  except GroupError as error:
    return str(error)
  return None


def open_group() -> Group:
  """A group below the nearest one that is delegated.

  Raises:
    GroupError: none is.
  """
  reasons = []
  for parent in _groups_above():
    try:
      return Group(parent)
    except OSError as error:
      reasons.append(f"{parent}: {error}")
  raise GroupError("; ".join(reasons) or "no cgroup v2 is mounted here")


def _groups_above() -> Iterator[pathlib.Path]:
  """This process's own group, and those above it, as far as they are mounted here."""
  lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
  own = next((line[3:] for line in lines if line.startswith("0::")), None)
  mounts = [line.split() for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()]
  mount = next((fields for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"), None)
  if own is None or mount is None:
    return
  below = pathlib.PurePath(own)
  while below.is_relative_to(mount[3]):
    yield pathlib.Path(mount[4], below.relative_to(mount[3]))
    if below == below.parent:
      return
    below = below.parent


def _remove_abandoned(parent: pathlib.Path) -> None:
  """Those of processes that were killed before they could."""
  for group in parent.glob(f"{_PREFIX}*"):
    if not os.path.exists(f"/proc/{group.name.removeprefix(_PREFIX).partition('-')[0]}"):
      _removed(group)


def _removed(group: pathlib.Path) -> bool:
  try:
    group.rmdir()
  except FileNotFoundError:
    return True
  except OSError:  # something still runs in it
    return False
  return True
