"""The launcher, and each item's supervisor and judge, which start, await and end one another."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib
import json
import math
import os
import re
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .handles import Program, UnsupportedTestError
from .isolation import (
  adopt_orphans,
  die_first,
  die_with_parent,
  enter_item_namespaces,
  enter_namespaces,
  isolate,
  limit,
)
from .judge import judge
from .messages import describe, receive, receive_exactly, send
from .processes import never_returning
from .scripts import serve_cases
from .serving import serve_calls
from .system_calls import filter_system_calls, prepared_filter

# What programs import most: loaded once here, instead of in every program.
PRELOADED = ("bisect", "copy", "heapq", "random", "re", "statistics", "string", "typing")

WATCH_S = 0.05  # between checks of an item's memory and time
ASLEEP_S = 0.2  # of sleep, after which an item is reported to be asleep
# What a second counts as sleep, by the state of a thread. One that runs or waits for a core does
# not sleep. State D is a wait for the disk, or one that a program arranges (vfork): it ends too.
_SLEEP = {"R": 0.0, "D": 0.25}
_MAX_RACES = 100  # with threads that end while they are counted
# KiB: what lies in memory, is swapped out, and what it takes to find both.
_HELD = re.compile(r"^(?:RssAnon|RssShmem|VmSwap|VmPTE):\s+(\d+)", re.MULTILINE)
_MAX_SETTINGS = 4096  # bytes of what comes with an item's socket


def launch(control: socket.socket, mechanism: str, paths: Sequence[str]) -> None:
  """Runs the launcher: prepares, reports that it is ready, and starts items until the caller ends.

  An item is received as its settings, a JSON object, and a socket for the program, the tests and
  the verdict, in this order.
  """
  os.umask(0o022)
  vars(builtins).update(exit=sys.exit, quit=sys.exit)  # usually there by the module site
  for name in PRELOADED:
    importlib.import_module(name)
  prepared_filter()
  if mechanism == "namespaces":
    enter_namespaces(paths)
  control.send(json.dumps({"ready": True}).encode())
  for signal_number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signal_number, signal.SIG_DFL)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are reaped automatically
  gc.freeze()
  while True:
    message, descriptors, _, _ = socket.recv_fds(control, _MAX_SETTINGS, 1)
    if not message:
      return
    with socket.socket(fileno=descriptors[0]) as item:
      if not os.fork():
        with never_returning():
          control.close()
          _supervise(item, json.loads(message))
          os._exit(0)


def _supervise(item: socket.socket, settings: Mapping[str, Any]) -> None:
  """Starts an item's judge, and ensures that none of its processes is left on return."""
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  if settings["isolated"]:
    enter_item_namespaces()
  else:
    adopt_orphans()
  die_with_parent()
  first = os.fork()
  if not first:
    with never_returning():
      die_with_parent()
      os.setsid()
      _judge_item(item, settings)
      os._exit(0)
  verdict = _watch(first, item, settings)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(first, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
  # The first process of its namespace takes all others along, and is gone only after them.
  status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
  if not settings["isolated"]:
    _kill_children()
  if verdict is None and status:
    verdict = {"died": status}
  if verdict is not None:
    send(item, verdict)


def _watch(first: int, item: socket.socket, settings: Mapping[str, Any]) -> dict[str, Any] | None:
  """Waits until the judge ends or its caller hangs up; returns a verdict if neither is in time."""
  poll = select.poll()
  poll.register(os.pidfd_open(first), select.POLLIN)
  poll.register(item, 0)  # hanging up is always reported
  deadline, limit_s = time.monotonic() + settings["deadline_s"], settings["time_limit_s"]
  spent, held = _processor_seconds(), _memory_mib()  # before the item: the launcher's and its own
  sleep = Sleep(others={"/proc/1", f"/proc/{os.getpid()}"})
  while (left := deadline - time.monotonic()) > 0:
    if poll.poll(1000 * min(left, WATCH_S)):
      return None
    if not settings["isolated"]:
      continue
    if _memory_mib() - held > settings["memory_mib"]:
      return {"memory": True}
    before, now = sleep.seconds, sleep.measure()
    if before < ASLEEP_S <= now:
      send(item, {"asleep": True})
    if now > limit_s or _processor_seconds() - spent > limit_s:
      break
  return {"timeout": True}


def _judge_item(item: socket.socket, settings: Mapping[str, Any]) -> None:
  """Runs the judge, from the program's text to the verdict.

  The program can exhaust the judge's memory. So once it runs, every error here counts as its
  failure, and nothing more is read.
  """
  started = False
  try:
    die_first()
    if settings["isolated"]:
      isolate()
    limit(settings["memory_mib"], settings["time_limit_s"])
    filter_system_calls()
    program = receive(item)
    channel, far_end = socket.socketpair()
    if not os.fork():
      with never_returning():
        receive_exactly(far_end, 1)
        {"calls": serve_calls, "cases": serve_cases}[program["mode"]](far_end, program["sources"])
    far_end.close()
    task = receive(item)
    started = True
    channel.sendall(b"g")
    verdict = judge(Program(channel), task)
  except BaseException as error:
    if started and not isinstance(error, UnsupportedTestError):
      os._exit(1)  # "died": a verdict that needs no memory
    verdict = {"broken": describe(error)}
  send(item, verdict)


def _processes() -> list[str]:
  """Folders of all processes that this one sees."""
  return [f"/proc/{name}" for name in os.listdir("/proc") if name.isdigit()]


def _threads(process: str) -> list[str]:
  """Folders of all threads of a process."""
  return [f"{process}/task/{name}" for name in os.listdir(f"{process}/task")]


def _memory_mib() -> float:
  """Memory of all processes and sockets, files apart, MiB.

  Shared memory counts for each process, and every socket counts as full, including sockets that no
  process has: they wait to be accepted, or are being sent to another process.
  """
  kib = 0.0
  for process in _processes():
    with contextlib.suppress(OSError):  # it has just ended
      kib += _held_kib(process)
  return kib / 1024 + (_read("/proc/net/unix").count("\n") - 1) * _socket_mib()


def _held_kib(process: str) -> float:
  """Memory of a process, KiB; OSError if it has ended.

  A main thread that has exited has none to show, while other threads live. Infinite for a process
  whose threads keep being replaced before they are read.
  """
  found = _HELD.findall(_read(f"{process}/status"))
  for _ in range(_MAX_RACES):
    if found:
      return sum(map(int, found))
    threads = _threads(process)
    try:
      statuses = [_read(f"{thread}/status") for thread in threads]
    except OSError:  # a thread has just ended
      continue
    if not (found := _HELD.findall(next(filter(_HELD.search, statuses), ""))):
      return 0.0  # no thread lives
  return math.inf


@functools.cache
def _socket_mib() -> float:
  """Memory of a full socket: the last message may have half its size, and is accepted fully."""
  with socket.socket(socket.AF_UNIX) as any_socket:
    return 1.5 * any_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) / 2**20


class Sleep:
  """Counts the seconds in which no thread of an item ran, or waited for a core or the disk."""

  def __init__(self, others: Collection[str]):
    """Begins; `others` are the folders of processes that are not the item's."""
    self.seconds = 0.0
    self._others = others
    self._last = time.monotonic()
    self._awake: dict[str, float] = {}  # by thread

  def measure(self) -> float:
    """Adds the time since the last call; returns `seconds`.

    What the kernel counts (schedstat) is exact, but has a wait for a core only once it is over, and
    nothing of a core that the host gives to another machine. So the states count as well.
    """
    states, awake = set(), {}
    for process in set(_processes()).difference(self._others):
      with contextlib.suppress(OSError):  # it has just ended
        for thread in _threads(process):
          states.add(_read(f"{thread}/stat").rpartition(")")[2].split()[0])
          awake[thread] = _awake_s(thread)
    now = time.monotonic()
    known = sum(seconds - self._awake.get(thread, 0.0) for thread, seconds in awake.items())
    weight = min((_SLEEP.get(state, 1.0) for state in states), default=1.0)
    self.seconds += weight * max(0.0, now - self._last - known)
    self._last, self._awake = now, awake
    return self.seconds


def _awake_s(thread: str) -> float:
  """Seconds that a thread has run, or waited for a core; 0 where the kernel does not count them."""
  try:
    return sum(map(int, _read(f"{thread}/schedstat").split()[:2])) / 1e9
  except FileNotFoundError:
    return 0.0


def _processor_seconds() -> float:
  """Processor time of all processes, including those that have ended."""
  ticks = 0
  for process in _processes():
    with contextlib.suppress(OSError):
      fields = _read(f"{process}/stat").rpartition(")")[2].split()
      ticks += sum(map(int, fields[11:15]))  # its own and its ended children's, user and system
  return ticks / os.sysconf("SC_CLK_TCK")


def _kill_children() -> None:
  """Without a process namespace: kills the processes that have become children of this one."""
  while children := _read(f"/proc/self/task/{os.getpid()}/children").split():
    for child in map(int, children):
      with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)


def _read(path: str) -> str:
  with open(path, errors="replace") as file:  # names in there may be of any bytes
    return file.read()


def _forget_modules() -> None:
  """Removes the harness from the interpreter's tables, so that no program can find it by name."""
  for name in [name for name in sys.modules if f"{name}.".startswith(f"{__package__}.")]:
    del sys.modules[name]
  sys.modules["__main__"] = types.ModuleType("__main__")
  sys.path_importer_cache.pop(os.path.dirname(__file__), None)


def main() -> None:
  """Runs the interpreter; its arguments are the control descriptor, the mechanism and paths."""
  _forget_modules()
  descriptor, mechanism, *paths = sys.argv[1:]
  control = socket.socket(fileno=int(descriptor))
  try:
    launch(control, mechanism, paths)
  except Exception as error:
    control.send(json.dumps({"error": describe(error)}).encode())
