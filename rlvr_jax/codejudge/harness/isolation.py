"""Isolation, rights and limits that the kernel enforces: namespaces, mounts and processes."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import math
import os
import resource
import signal
from collections.abc import Sequence
from typing import Any

from .processes import never_returning
from .system_calls import call_number, prctl

PROCESSES = 32  # the most processes of one item, threads included
OPEN_FILES = 128
PENDING_SIGNALS = 128
STACK_MIB = 64
FILE_MIB = 16  # the most MiB of one file
SCRATCH_MIB = 32  # /tmp
SHARED_MIB = 8  # /dev/shm
UNPRIVILEGED = 65534  # the user and group called nobody

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _NEW_NAMES, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USERS, _NEW_PROCESSES, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_RECURSIVE_BIND, _PRIVATE, _DETACH = 0x5000, 0x44000, 2
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 4, 36, 38
_CAPABILITIES_VERSION = 0x20080522
_MOUNT_SETATTR = 442  # on every architecture
_AT_RECURSIVE = 0x8000


def _check_result(result: int, action: str) -> None:
  """Raises the OSError of a system call that failed."""
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{action}: {os.strerror(number)}")


def _system_call(number: int, action: str, *arguments: Any) -> None:
  _check_result(_LIBC.syscall(ctypes.c_long(number), *arguments), action)


def _unshare(flags: int) -> None:
  _check_result(_LIBC.unshare(flags), "unshare")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
  encoded = [text.encode() if text else None for text in (source, target, kind)]
  arguments = (ctypes.c_ulong(flags), options.encode() or None)
  _check_result(_LIBC.mount(*encoded, *arguments), f"mount {source} on {target}")


def _mount_proc(target: str, flags: int = 0, options: str = "") -> None:
  _mount("proc", target, "proc", flags | _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS, options)


def _mount_scratch(target: str, mebibytes: int) -> None:
  options = f"size={mebibytes}m,nr_inodes=4096,mode=1777"
  _mount("tmpfs", target, "tmpfs", _NO_SETUID | _NO_DEVICES, options)


def die_with_parent() -> None:
  """Makes the kernel kill this process when its parent dies; a later change of user undoes this."""
  prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
  """Makes this process the parent of orphaned descendants."""
  prctl(_SET_CHILD_SUBREAPER, 1)


def _write(path: str, text: str) -> None:
  with open(path, "w") as file:
    file.write(text)


def _new_user_namespace(flags: int, inside: int) -> None:
  """Enters new namespaces, in which the current user has the id `inside` and all rights."""
  user = os.geteuid()
  group = os.getegid()
  _unshare(_NEW_USERS | flags)
  _write("/proc/self/setgroups", "deny")
  _write("/proc/self/uid_map", f"{inside} {user} 1")
  _write("/proc/self/gid_map", f"{inside} {group} 1")


def _become_nobody() -> None:
  """Changes to the user nobody."""
  os.setgroups([])
  os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
  os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
  prctl(_SET_DUMPABLE, 1)  # the change of user cleared it, and root would own /proc/self


def enter_namespaces(paths: Sequence[str]) -> None:
  """Forks this process into new namespaces; returns in the child.

  The child has no network, sees no other processes, and has the rights of an ordinary user, even if
  root started it. Its root folder has only `paths`, all read-only.
  """
  flags = _NEW_MOUNTS | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC | _NEW_NAMES
  as_root = os.geteuid() == 0
  if as_root:
    try:
      _unshare(flags)
    except PermissionError:  # root of a container, with limited rights
      as_root = False
      _become_nobody()
  if not as_root:
    _new_user_namespace(flags, os.geteuid())
  child = os.fork()
  if child:
    with never_returning():
      os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
  die_with_parent()
  _build_root(paths)
  if as_root:
    _become_nobody()
    die_with_parent()  # the change of user canceled it


def _build_root(paths: Sequence[str]) -> None:
  """Makes a new root that has only `paths` of the current file system; unmounts the old root."""
  root = "/sys"  # a place to mount: every system has this folder, and its files are not needed
  _mount("none", "/", None, _PRIVATE)
  _mount("tmpfs", root, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
  for path in paths:
    _make_visible(path, root)
    for packages in glob.glob(f"{root}{path}/python3*/*-packages"):  # not the standard library
      _mount("tmpfs", packages, "tmpfs", _READ_ONLY, "size=4k")
  for directory in ("/proc", "/tmp", "/dev/shm"):
    os.makedirs(root + directory, exist_ok=True)
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
  _mount_proc(root + "/proc")
  os.chdir(root)
  _system_call(call_number("pivot_root"), "pivot_root", b".", b".")
  _check_result(_LIBC.umount2(b".", _DETACH), "umount the old root")
  os.chdir("/")
  _set_mount_attributes("/", _READ_ONLY | _NO_SETUID, recursive=False)


def _make_visible(path: str, root: str) -> None:
  """Makes one path of the current file system visible below `root`, read-only."""
  target = root + path
  os.makedirs(os.path.dirname(target), exist_ok=True)
  if os.path.islink(path):
    os.symlink(os.readlink(path), target)
    return
  if os.path.isdir(path):
    os.makedirs(target, exist_ok=True)
  else:
    _write(target, "")
  _mount(path, target, None, _RECURSIVE_BIND)
  # Even on a read-only mount a device can be written to; only its timestamps cannot be changed.
  is_device = path.startswith("/dev/")
  _set_mount_attributes(target, _READ_ONLY | _NO_SETUID | (0 if is_device else _NO_DEVICES))


def _set_mount_attributes(path: str, attributes: int, recursive: bool = True) -> None:
  """Adds attributes to a mount, and to all mounts below it; needs Linux 5.12."""
  settings = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
  flags = _AT_RECURSIVE if recursive else 0
  arguments = (ctypes.c_int(-100), path.encode(), ctypes.c_uint(flags), settings)
  _system_call(_MOUNT_SETATTR, "mount_setattr", *arguments, ctypes.c_size_t(32))


def enter_item_namespaces() -> None:
  """Enters new namespaces for one item; the next child is the first process in them (`isolate`)."""
  _new_user_namespace(_NEW_PROCESSES | _NEW_IPC, UNPRIVILEGED)


def die_first() -> None:
  """Makes the kernel kill this process and its descendants before others if memory runs out."""
  with contextlib.suppress(OSError):
    _write("/proc/self/oom_score_adj", "1000")


def isolate() -> None:
  """Hides other items' processes and files; the first process in an item's namespaces calls it."""
  _unshare(_NEW_MOUNTS)  # not earlier, since the supervisor needs the launcher's /proc
  try:
    # Read-only, so that the item cannot undo `die_first`; without information about the machine.
    _mount_proc("/proc", _READ_ONLY, "subset=pid")
  except OSError:  # not permitted if parts of the outer /proc are hidden
    _mount("tmpfs", "/proc", "tmpfs", _READ_ONLY)
  _mount_scratch("/tmp", SCRATCH_MIB)
  _mount_scratch("/dev/shm", SHARED_MIB)
  os.chdir("/tmp")


def limit_resources(memory_mib: int, seconds: float) -> None:
  """Limits the resources of this process and its descendants, and drops all rights for good.

  Args:
    memory_mib: address space of each process, MiB.
    seconds: processor time of each process.
  """
  limits = {
    resource.RLIMIT_AS: memory_mib * 2**20,
    resource.RLIMIT_CPU: math.ceil(seconds) + 1,
    resource.RLIMIT_FSIZE: FILE_MIB * 2**20,
    resource.RLIMIT_NPROC: PROCESSES,
    resource.RLIMIT_NOFILE: OPEN_FILES,
    resource.RLIMIT_SIGPENDING: PENDING_SIGNALS,
    resource.RLIMIT_STACK: STACK_MIB * 2**20,
    resource.RLIMIT_CORE: 0,
  }
  for kind, value in limits.items():
    hard_limit = resource.getrlimit(kind)[1]
    value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
    # Programs may raise the limit of their stack, as programs for contests do, since the stack
    # counts as address space.
    resource.setrlimit(kind, (value, hard_limit if kind == resource.RLIMIT_STACK else value))
  prctl(_SET_NO_NEW_PRIVILEGES, 1)
  header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
  _system_call(call_number("capset"), "capset", header, (ctypes.c_uint32 * 6)())
  # Neither the program, forked from here, nor anything it starts can trace this process, read its
  # memory, or open its descriptors.
  prctl(_SET_DUMPABLE, 0)
