"""Runs generated code in a sandbox: isolated from network and files, limited, and always killed.

The package `harness` runs inside the sandbox; its docstring describes the processes. `harness`
enters namespaces and filters system calls. For this it needs libseccomp and Linux 5.12 or later.
The system must also permit the user, who may be root, to create namespaces. An item (one program
with its tests) gets:

* an empty network; no environment variables; at most the rights of an ordinary user
* from the file system only the system's programs and libraries and the interpreter, read-only; no
  home, no working directory; an empty and small /tmp and /dev/shm, deleted with the item
* only its own processes, limited in number, time, address space and file size
* only the system calls of an allow list (`harness.system_calls`). The list omits calls that create
  memory that belongs to no process, calls by which items could communicate, and all calls that
  programs do not need
* a control group, if one is available (`cgroups`), that limits memory, processes and cores (to one)
* a limit of processor time, the same limit for time asleep, and a deadline (`deadline_s`). All the
  item's processes are killed at any of these limits, and when the process that waits for the item
  dies
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import cgroups
from .harness import messages

NAMESPACES = "namespaces"
NONE = "none"  # separate processes and limits, but no isolation

# Generated code runs without isolation only if this environment variable has this value.
UNSANDBOXED = "RLVR_JAX_UNSANDBOXED_CODE"
ACCEPTED = "I accept that generated code runs with my rights"

# The deadline is this multiple of the limit of processor time, so that a grade does not change if
# the program waits long for a core. A program that sleeps is already killed at the limit.
WALL_CLOCK_FACTOR = 20.0
_LONGEST_S = 480.0  # maximum deadline of an item
_START_S = 20.0  # time for the launcher to start
_MARGIN_S = 5.0  # seconds after an item's deadline within which its end is detected
_LAST_OUTPUT = 1000  # characters of the output of a launcher that does not start, for the message


class SandboxError(RuntimeError):
  """The sandbox does not work; nothing is known about the code to run in it."""


def deadline_s(time_limit_s: float) -> float:
  """Wall-clock seconds after which an item with this limit of processor time is killed."""
  return min(WALL_CLOCK_FACTOR * time_limit_s, _LONGEST_S)


def verdict_deadline_s(time_limit_s: float) -> float:
  """The most wall-clock seconds until an item with this limit of processor time has a verdict."""
  return deadline_s(time_limit_s) + _MARGIN_S


def _ignore() -> None:
  pass


class Sandbox:
  """A launcher process, which runs one item (a program with its tests) at a time.

  Args:
    mechanism: "namespaces" isolates items from the system and from one another; "none" does not.
  Raises:
    SandboxError: the sandbox does not work here.
  """

  def __init__(self, mechanism: str):
    self.mechanism = mechanism
    self._control, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = _launcher_command(mechanism, far_end.fileno())
    self._group: cgroups.Group | None = None
    with contextlib.suppress(cgroups.GroupError):  # a run warns at its start
      self._group = cgroups.open_group()
      command = self._group.entering_command(command)
    with tempfile.TemporaryFile() as stderr, far_end:
      self._process = subprocess.Popen(
        command, pass_fds=[far_end.fileno()], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=stderr, cwd="/",
        env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0"},
      )  # fmt: skip
      far_end.close()
      problem = self._wait_ready()
      if problem is not None:
        self.close()
        stderr.seek(0)
        last_output = stderr.read().decode(errors="replace").strip()[-_LAST_OUTPUT:]
        raise SandboxError(f"{mechanism}: {problem} {last_output}".strip())

  def _wait_ready(self) -> str | None:
    """Waits until the launcher is ready; returns the reason if it fails."""
    self._control.settimeout(_START_S)
    try:
      message = self._control.recv(2**16)
    except OSError as error:
      return str(error)
    return json.loads(message).get("error") if message else "the launcher ended."

  def run(
    self,
    program: Mapping[str, Any],
    task: Mapping[str, Any],
    *,
    time_limit_s: float,
    memory_mib: int,
    on_asleep: Callable[[], None] = _ignore,
  ) -> dict[str, Any]:
    """Judges one program.

    Args:
      program: "mode" ("calls", "cases" or "last") and "sources", see `harness`.
      task: the tests, see `harness.judge.judge`; the program's process never has them.
      time_limit_s: total processor time of all processes, seconds. The same limit holds for the
        time in which all processes sleep: none runs, and none waits for a core or the disk. Without
        isolation neither time is measured, and time_limit_s limits the wall-clock time.
      memory_mib: limit on the address space of each process, and on the total memory of all
        processes, MiB.
      on_asleep: called at most once, when the program sleeps and leaves its core to others.
    Returns:
      The judge's verdict; or {"timeout": true}; or {"memory": true} if all processes together
      used more than `memory_mib`; or {"died": status} if the judge was killed.
    Raises:
      SandboxError: the sandbox no longer works.
    """
    isolated = self.mechanism != NONE
    settings = {
      "time_limit_s": time_limit_s,
      "deadline_s": deadline_s(time_limit_s) if isolated else time_limit_s,
      "memory_mib": memory_mib,
      "isolated": isolated,
    }
    deadline = time.monotonic() + verdict_deadline_s(time_limit_s)
    if self._group is not None:
      self._group.limit_memory(memory_mib)
      kills_before = self._group.count_memory_kills()
    item, far_end = socket.socketpair()
    with item:
      try:
        with far_end:
          socket.send_fds(self._control, [json.dumps(settings).encode()], [far_end.fileno()])
        item.settimeout(verdict_deadline_s(time_limit_s))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # killed before it read
          messages.send(item, program)
          messages.send(item, task)
        if "asleep" in (verdict := messages.receive(item)):
          on_asleep()
          verdict = messages.receive(item)
        item.settimeout(max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(ConnectionResetError):  # killed before it read its tests
          while item.recv(2**12):  # until nothing of the item is left
            pass
      except (OSError, EOFError, ValueError) as error:
        self.close()
        raise SandboxError(f"{self.mechanism}: no verdict came ({error!r})") from error
    if self._group is not None and self._group.count_memory_kills() > kills_before:
      return {"memory": True}
    if "broken" in verdict:
      raise SandboxError(f"{self.mechanism}: {verdict['broken']}")
    return verdict

  def close(self) -> None:
    """Kills the launcher and all its processes."""
    self._control.close()
    self._process.kill()
    self._process.wait()
    if self._group is not None:
      self._group.close()


# Starts the harness from its folder, the first argument. The package is created here, and
# not imported (its `__init__.py` has no code), so nothing outside of that folder is importable.
_START = """
import sys
harness = sys.modules["harness"] = type(sys)("harness")
harness.__path__ = [sys.argv.pop(1)]
from harness.launcher import main
main()
"""
_FOLDER = os.path.dirname(messages.__file__)


def _launcher_command(mechanism: str, control: int) -> list[str]:
  """The command that starts a launcher, with the descriptor of its control socket."""
  interpreter = os.path.realpath(sys.executable)
  # With -P -s -S only the standard library is importable, however the interpreter is installed.
  python = [interpreter, "-P", "-s", "-S", "-B", "-c", _START]
  devices = [f"/dev/{name}" for name in ("null", "full", "random", "urandom")]
  return [*python, _FOLDER, str(control), mechanism, *visible_paths(), *devices]


@functools.cache
def visible_paths() -> tuple[str, ...]:
  """The paths that generated code may read: system programs and libraries, and the interpreter."""
  names = ("bin", "lib", "lib32", "lib64", "libx32")
  system = [*(f"/usr/{name}" for name in names), *(f"/{name}" for name in names)]
  system += ["/usr/share/zoneinfo", "/etc/ld.so.cache"]
  prefix = pathlib.Path(os.path.realpath(sys.base_prefix))
  executable = pathlib.Path(os.path.realpath(sys.executable))
  candidates = dict.fromkeys([prefix / "lib", prefix / sys.platlibdir, executable])
  interpreter = [path for path in candidates if not any(map(path.is_relative_to, system))]
  return tuple(path for path in [*system, *map(str, interpreter)] if os.path.lexists(path))


_PROBE = """
import os, socket, time

def holes(hidden, address):
  found = [f"{path} is visible" for path in hidden if os.path.lexists(path)]
  for path in ("/probe", "/usr/probe", "/etc/probe", os.path.dirname(os.__file__) + "/probe"):
    try:
      open(path, "w").close()
      found.append(f"{path} can be written")
    except OSError:
      pass
  inet = (socket.AF_INET, socket.SOCK_DGRAM)
  for kind, name in ((inet, ("192.0.2.1", 9)), ((socket.AF_UNIX, socket.SOCK_STREAM), address)):
    try:
      with socket.socket(*kind) as probe:
        probe.connect(name)
      found.append(f"{name!r} can be reached")
    except OSError:
      pass
  children = []
  try:
    while len(children) <= 64:
      if not (child := os.fork()):
        os._exit(time.sleep(60))
      children.append(child)
    found.append("processes are not limited")
  except OSError:
    pass
  for child in children:
    os.kill(child, 9)
  return found
"""
_PROBE_S = 10.0


def probe(sandbox: Sandbox) -> None:
  """Runs a program that tests the isolation.

  Raises:
    SandboxError: the isolation has a hole, which the message describes; the sandbox is then closed.
  """
  with (
    tempfile.NamedTemporaryFile() as marker,
    socket.socket(socket.AF_UNIX) as outside,
  ):
    outside.bind("")  # an abstract address that the kernel chooses
    outside.listen()
    address = outside.getsockname().decode()
    case = {"input": [[marker.name, *_hidden_paths()], address], "output": []}
    task = {"style": "function", "entry_point": "holes", "cases": [case], "total": 1}
    program = {"mode": "calls", "sources": [_PROBE]}
    verdict = sandbox.run(program, task, time_limit_s=_PROBE_S, memory_mib=1024)
  if verdict.get("passed") != 1:
    sandbox.close()
    raise SandboxError(f"{sandbox.mechanism}: {verdict.get('failure', verdict)}")


def _hidden_paths() -> list[str]:
  """At most 100 paths that programs must not see: in home and working directory, and /etc/shadow.

  Paths that overlap `visible_paths`, such as an interpreter's folder, are left out.
  """
  visible = [pathlib.Path(os.path.realpath(path)) for path in visible_paths()]

  def overlaps_visible(path: pathlib.Path) -> bool:
    return any(other.is_relative_to(path) or path.is_relative_to(other) for other in visible)

  folders = {pathlib.Path.home().resolve(), pathlib.Path.cwd().resolve()} - {pathlib.Path("/")}
  paths = [path for folder in folders if os.access(folder, os.R_OK) for path in folder.iterdir()]
  return ["/etc/shadow", *(str(path) for path in paths if not overlaps_visible(path))][:100]


def open_sandbox() -> Sandbox:
  """Opens a sandbox whose isolation has been tested.

  Raises:
    SandboxError: the sandbox does not work here, and the environment variable that `UNSANDBOXED`
      names does not have the value `ACCEPTED`.
  """
  try:
    sandbox = Sandbox(NAMESPACES)
    probe(sandbox)
    return sandbox
  except SandboxError as error:
    if os.environ.get(UNSANDBOXED) == ACCEPTED:
      return Sandbox(NONE)
    raise SandboxError(
      f"generated code is not run here, because the sandbox does not work: {error}. Allow user "
      "namespaces (sysctl kernel.unprivileged_userns_clone=1, "
      "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces > 0; in a "
      "container, a seccomp profile that lets unshare pass). To run generated code without a "
      f"sandbox, set {UNSANDBOXED}={ACCEPTED!r}"
    ) from error
