"""Starts and ends a sandbox's processes: a launcher, and for each item a supervisor and a judge."""

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
  limit_resources,
)
from .judge import judge
from .messages import MAX_DIGITS, describe, receive, receive_exactly, send
from .processes import never_returning
from .scripts import serve_cases, serve_last
from .serving import serve_calls
from .system_calls import compile_filter, filter_system_calls

# The modules that programs import most are loaded once here, not in every program.
PRELOADED = ("bisect", "copy", "heapq", "random", "re", "statistics", "string", "typing")

WATCH_S = 0.05  # between polls of an item's memory and time
ASLEEP_S = 0.2  # seconds of sleep after which an item is reported to be asleep
# State of a thread → the fraction of its time that counts as sleep; 1 for other states. A thread
# that runs or waits for a core (R) does not sleep. In state D a thread waits for the disk, or
# arranges the wait itself (vfork), which must be limited, too.
_SLEEP = {"R": 0.0, "D": 0.25}
# Mode of a program → the function that its process runs.
_SERVE = {"calls": serve_calls, "cases": serve_cases, "last": serve_last}
_MAX_RACES = 100  # retries if threads end while they are counted
# The lines of /proc/PID/status with memory, swap and page tables, in KiB.
_MEMORY_FIELDS = re.compile(r"^(?:RssAnon|RssShmem|VmSwap|VmPTE):\s+(\d+)", re.MULTILINE)
_MAX_SETTINGS = 4096  # bytes of the settings that come with an item's socket


def launch(control: socket.socket, mechanism: str, paths: Sequence[str]) -> None:
  """Runs the launcher: prepares, reports that it is ready, and starts items until the caller ends.

  For each item it receives the item's settings, as a JSON object, and a socket. The socket carries
  the program, then the tests, then the verdict.
  """
  os.umask(0o022)
  vars(builtins).update(exit=sys.exit, quit=sys.exit)  # usually added by the module site
  for name in PRELOADED:
    importlib.import_module(name)
  compile_filter()
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
  """Starts an item's judge; when it returns, none of the item's processes is left."""
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
      _run_judge(item, settings)
      os._exit(0)
  verdict = _watch(first, item, settings)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(first, signal.SIGKILL)
    os.kill(first, signal.SIGKILL)
  # When a namespace's first process ends, the kernel kills all others; it reports its end after
  # theirs.
  status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
  if not settings["isolated"]:
    _kill_children()
  if verdict is None and status:
    verdict = {"died": status}
  if verdict is not None:
    send(item, verdict)


def _watch(first: int, item: socket.socket, settings: Mapping[str, Any]) -> dict[str, Any] | None:
  """Waits until the judge ends or the caller hangs up; a verdict if the item exceeds a limit."""
  poll = select.poll()
  poll.register(os.pidfd_open(first), select.POLLIN)
  poll.register(item, 0)  # hanging up is always reported
  deadline = time.monotonic() + settings["deadline_s"]
  limit_s = settings["time_limit_s"]
  # The memory and time that the launcher and this process use before the item starts.
  initial_seconds = _processor_seconds()
  initial_mib = _memory_mib()
  sleep = Sleep(others={"/proc/1", f"/proc/{os.getpid()}"})
  while (remaining_s := deadline - time.monotonic()) > 0:
    if poll.poll(1000 * min(remaining_s, WATCH_S)):
      return None
    if not settings["isolated"]:
      continue
    if _memory_mib() - initial_mib > settings["memory_mib"]:
      return {"memory": True}
    previous_sleep_s = sleep.seconds
    sleep_s = sleep.measure()
    if previous_sleep_s < ASLEEP_S <= sleep_s:
      send(item, {"asleep": True})
    if sleep_s > limit_s or _processor_seconds() - initial_seconds > limit_s:
      break
  return {"timeout": True}


def _run_judge(item: socket.socket, settings: Mapping[str, Any]) -> None:
  """Runs the judge: receives the program and the tests from `item`, and sends the verdict there.

  The program can exhaust the judge's memory. So once the program runs, every error in the judge
  counts as the program's failure, and nothing more is read from `item`.
  """
  is_started = False
  try:
    die_first()
    if settings["isolated"]:
      isolate()
    limit_resources(settings["memory_mib"], settings["time_limit_s"])
    filter_system_calls()
    program = receive(item)
    channel, far_end = socket.socketpair()
    if not os.fork():
      with never_returning():
        receive_exactly(far_end, 1)
        _SERVE[program["mode"]](far_end, program["sources"])
    far_end.close()
    task = receive(item)
    is_started = True
    channel.sendall(b"g")
    verdict = judge(Program(channel), task)
  except BaseException as error:
    if is_started and not isinstance(error, UnsupportedTestError):
      os._exit(1)  # "died": a verdict that needs no memory
    verdict = {"broken": describe(error)}
  send(item, verdict)


def _list_processes() -> list[str]:
  """Lists the folders in /proc of all visible processes."""
  return [f"/proc/{name}" for name in os.listdir("/proc") if name.isdigit()]


def _list_threads(process: str) -> list[str]:
  """Lists the folders in /proc of all threads of a process."""
  return [f"{process}/task/{name}" for name in os.listdir(f"{process}/task")]


def _memory_mib() -> float:
  """Memory of all processes and sockets, without files, MiB.

  Shared memory counts for each process. Every socket counts as full, also while no process holds
  it: while it waits to be accepted, or is being sent to another process.
  """
  kib = 0.0
  for process in _list_processes():
    with contextlib.suppress(OSError):  # the process has just ended
      kib += _process_memory_kib(process)
  return kib / 1024 + (_read("/proc/net/unix").count("\n") - 1) * _socket_mib()


def _process_memory_kib(process: str) -> float:
  """Memory of a process, KiB; raises OSError if it has ended.

  If the main thread has exited, its status has no memory, and another thread's status is read. The
  result is infinite for a process that replaces its threads faster than they can be read.
  """
  sizes = _MEMORY_FIELDS.findall(_read(f"{process}/status"))
  for _ in range(_MAX_RACES):
    if sizes:
      return sum(map(int, sizes))
    threads = _list_threads(process)
    try:
      statuses = [_read(f"{thread}/status") for thread in threads]
    except OSError:  # a thread has just ended
      continue
    if not (sizes := _MEMORY_FIELDS.findall(next(filter(_MEMORY_FIELDS.search, statuses), ""))):
      return 0.0  # no thread lives
  return math.inf


@functools.cache
def _socket_mib() -> float:
  """Memory of a full socket, MiB.

  The last message may have half a socket's size, and is accepted even if it exceeds the room that
  is left.
  """
  with socket.socket(socket.AF_UNIX) as any_socket:
    return 1.5 * any_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) / 2**20


class Sleep:
  """Counts the seconds in which no thread of an item ran or waited for a core or the disk."""

  def __init__(self, others: Collection[str]):
    """Starts counting; `others` are the folders in /proc of processes that are not the item's."""
    self.seconds = 0.0
    self._others = others
    self._last = time.monotonic()
    self._awake_s: dict[str, float] = {}  # by thread

  def measure(self) -> float:
    """Adds the time asleep since the last call; returns `seconds`, the total.

    The kernel's counters (schedstat) are exact. But they include a wait for a core only once the
    wait is over, and they ignore the time in which the host gives the core to another machine. So
    the states of threads are also used.
    """
    states = set()
    awake_s = {}
    for process in set(_list_processes()).difference(self._others):
      with contextlib.suppress(OSError):  # the process has just ended
        for thread in _list_threads(process):
          states.add(_read(f"{thread}/stat").rpartition(")")[2].split()[0])
          awake_s[thread] = _thread_awake_s(thread)
    now = time.monotonic()
    counted_s = sum(seconds - self._awake_s.get(thread, 0.0) for thread, seconds in awake_s.items())
    weight = min((_SLEEP.get(state, 1.0) for state in states), default=1.0)
    self.seconds += weight * max(0.0, now - self._last - counted_s)
    self._last = now
    self._awake_s = awake_s
    return self.seconds


def _thread_awake_s(thread: str) -> float:
  """Seconds that a thread has run or waited for a core; 0 if the kernel does not count them."""
  try:
    return sum(map(int, _read(f"{thread}/schedstat").split()[:2])) / 1e9
  except FileNotFoundError:
    return 0.0


def _processor_seconds() -> float:
  """Processor time of all processes, including ended ones, seconds."""
  ticks = 0
  for process in _list_processes():
    with contextlib.suppress(OSError):
      fields = _read(f"{process}/stat").rpartition(")")[2].split()
      ticks += sum(map(int, fields[11:15]))  # user and system; its own, and its ended children's
  return ticks / os.sysconf("SC_CLK_TCK")


def _kill_children() -> None:
  """Kills the processes that have become this process's children; used without namespaces only."""
  while children := _read(f"/proc/self/task/{os.getpid()}/children").split():
    for child in map(int, children):
      with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)


def _read(path: str) -> str:
  with open(path, errors="replace") as file:  # names of processes may have any bytes
    return file.read()


def _forget_modules() -> None:
  """Removes the harness from the interpreter's tables, so no program can find it by name."""
  for name in [name for name in sys.modules if f"{name}.".startswith(f"{__package__}.")]:
    del sys.modules[name]
  sys.modules["__main__"] = types.ModuleType("__main__")
  sys.path_importer_cache.pop(os.path.dirname(__file__), None)


def main() -> None:
  """Runs the launcher; the arguments are the control descriptor, the mechanism and the paths."""
  _forget_modules()
  sys.set_int_max_str_digits(MAX_DIGITS)
  descriptor, mechanism, *paths = sys.argv[1:]
  control = socket.socket(fileno=int(descriptor))
  try:
    launch(control, mechanism, paths)
  except Exception as error:
    control.send(json.dumps({"error": describe(error)}).encode())
