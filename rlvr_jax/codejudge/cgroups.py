"""Limits each sandbox by a control group of the kernel (cgroup v2), if groups are delegated.

A group is *delegated* if it is this process's group or an ancestor, and this process may create
groups below it, limit their memory and number of processes, and move processes into them. Root has
this right, and so has a process that a user starts with `systemd-run --user --scope`. No existing
process is moved.
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

_PREFIX = "rlvr_jax-"  # start of a group's name; then the id of its process and a count
_LAUNCHER_MIB = 16  # for the launcher and an item's supervisor
_LAUNCHER_PROCESSES = 8
_REMOVAL_S = 2.0  # for killed processes to end

_count = itertools.count()


class GroupError(RuntimeError):
  """No control group is available; the message says why."""


class Group:
  """A new, empty group; its processes share one core if the cpu controller is available."""

  def __init__(self, parent: pathlib.Path):
    """Creates the group below `parent`; raises OSError if that is not delegated."""
    needed = {"memory", "pids"}
    available = (parent / "cgroup.controllers").read_text().split()
    if not needed <= set(available):
      raise OSError(f"the controllers memory and pids are needed, but the group has {available}")
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
      subprocess.run(self.entering_command(["true"]), check=True, stderr=subprocess.DEVNULL)
      self._write("pids.max", PROCESSES + _LAUNCHER_PROCESSES)
    except (OSError, subprocess.CalledProcessError) as error:
      self.path.rmdir()
      raise OSError(f"no process can be moved into a new group below it ({error})") from error
    for name, value in (("memory.swap.max", "0"), ("cpu.max", "100000 100000")):
      with contextlib.suppress(OSError):  # no swap here, or no such controller
        self._write(name, value)

  def entering_command(self, command: Sequence[str]) -> list[str]:
    """A command whose process moves itself into the group and then runs `command`."""
    return ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(self.path), *command]

  def limit_memory(self, mebibytes: int) -> None:
    """Limits an item's memory to `mebibytes`; the sandbox's own memory is added to the limit."""
    self._write("memory.max", (mebibytes + _LAUNCHER_MIB) * 2**20)

  def count_memory_kills(self) -> int:
    """Counts the processes that the kernel has killed because the memory limit was reached."""
    events = (self.path / "memory.events").read_text().split()
    return int(events[events.index("oom_kill") + 1])

  def close(self) -> None:
    """Kills all processes in the group, and removes it."""
    with contextlib.suppress(OSError):  # before Linux 5.14, where the launcher's end kills them
      self._write("cgroup.kill", 1)
    deadline = time.monotonic() + _REMOVAL_S
    while not _try_remove(self.path) and time.monotonic() < deadline:
      time.sleep(0.005)

  def _write(self, name: str, value: object) -> None:
    (self.path / name).write_text(str(value))


def unavailable_reason() -> str | None:
  """The reason why no control group is available; None if a group is available."""
  try:
    open_group().close()
  except GroupError as error:
    return str(error)
  return None


def open_group() -> Group:
  """Creates a group below the nearest delegated group.

  Raises:
    GroupError: no group is delegated.
  """
  reasons = []
  for parent in _groups_above():
    try:
      return Group(parent)
    except OSError as error:
      reasons.append(f"{parent}: {error}")
  raise GroupError("; ".join(reasons) or "no cgroup v2 is mounted here")


def _groups_above() -> Iterator[pathlib.Path]:
  """Yields the mounted folders of this process's control group and of the group's ancestors."""
  lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
  group = next((line[3:] for line in lines if line.startswith("0::")), None)
  mounts = [line.split() for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()]
  mount = next((fields for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"), None)
  if group is None or mount is None:
    return
  path = pathlib.PurePath(group)
  while path.is_relative_to(mount[3]):
    yield pathlib.Path(mount[4], path.relative_to(mount[3]))
    if path == path.parent:
      return
    path = path.parent


def _remove_abandoned(parent: pathlib.Path) -> None:
  """Removes the groups of processes that were killed before they could remove them."""
  for group in parent.glob(f"{_PREFIX}*"):
    if not os.path.exists(f"/proc/{group.name.removeprefix(_PREFIX).partition('-')[0]}"):
      _try_remove(group)


def _try_remove(group: pathlib.Path) -> bool:
  """Removes a group; returns False if a process still runs in it."""
  try:
    group.rmdir()
  except FileNotFoundError:
    return True
  except OSError:
    return False
  return True
