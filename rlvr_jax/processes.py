"""Worker processes: how a parent starts and ends them, and what a worker does first.

Workers are new interpreters, never forks, and each leads a session of its own. A worker speaks JSON
lines over its standard input and output, ends when its input does, and never loads jax.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import uuid
import weakref
from collections.abc import Iterable, Mapping
from typing import IO, Any, BinaryIO, NoReturn

KILL_WAIT_S = 5.0  # for the kernel to end a process after SIGKILL
# A variable by which a worker's processes are known: also those in sessions of their own, or of a
# worker that has ended, which belong to nobody.
_MARK = "RLVR_JAX_WORKER"
_marks: weakref.WeakKeyDictionary[subprocess.Popen[bytes], str] = weakref.WeakKeyDictionary()
_SINGLE_THREADED = dict.fromkeys(
  ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
   "VECLIB_MAXIMUM_THREADS"), "1",
)  # fmt: skip

# Tests of programs have integers as long as LiveCodeBench allows, in messages in JSON.
sys.set_int_max_str_digits(50_000)


# --- in the parent --------------------------------------------------------------------------------


def start_worker(
  module: str, settings: Mapping[str, Any], variables: Mapping[str, str], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
  """Starts `python -m module SETTINGS`, with unbuffered pipes that do not block.

  Args:
    module: the worker's program.
    settings: its argument, JSON-serializable.
    variables: added to the environment of the process.
    stderr: file of its standard error.
  """
  # With our sys.path, the worker imports a user's module exactly as this process would. The fixed
  # hash seed gives code that iterates over sets the same result every time.
  path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  mark = uuid.uuid4().hex
  fixed_variables = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", _MARK: mark}
  process = subprocess.Popen(
    [sys.executable, "-P", "-m", module, json.dumps(settings)],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
    env=os.environ | _SINGLE_THREADED | dict(variables) | fixed_variables,
    start_new_session=True, bufsize=0,
  )  # fmt: skip
  assert process.stdin and process.stdout
  os.set_blocking(process.stdin.fileno(), False)
  os.set_blocking(process.stdout.fileno(), False)
  _marks[process] = mark
  return process


def kill_group(process: subprocess.Popen[bytes]) -> None:
  """Kills a worker and all that it has started; safe at any time, from any thread."""
  started = _find_processes(_marks[process])
  if process.returncode is None:  # not yet reaped, so its id has not been reused
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(process.pid, signal.SIGKILL)
  _kill(started - {process.pid})
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(KILL_WAIT_S)


def _find_processes(mark: str) -> set[int]:
  """The processes that have a worker's mark or descend from one that has it."""
  marked = f"{_MARK}={mark}".encode()
  found, parents = set[int](), dict[int, int]()
  for entry in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError):  # it has ended, or is another user's
      with open(f"/proc/{entry}/stat", "rb") as file:
        parents[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
      with open(f"/proc/{entry}/environ", "rb") as file:
        if marked in file.read().split(b"\0"):
          found.add(int(entry))
  while more := {pid for pid, parent in parents.items() if parent in found} - found:
    found |= more
  return found


def _kill(pids: Iterable[int]) -> None:
  for pid in pids:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.kill(pid, signal.SIGKILL)


def describe_exit(process: subprocess.Popen[bytes]) -> str:
  """How a process ended, such as "signal SIGKILL" or "exit status 3"."""
  code = process.returncode
  if code is None:
    return "still running"
  if code < 0:
    return f"signal {signal.Signals(-code).name}"
  return f"exit status {code}"


def check_variables(variables: Mapping[str, str], name: str) -> None:
  """Raises ValueError unless these can be variables of a process; `name` is theirs in messages."""
  for key, value in variables.items():
    are_texts = isinstance(key, str) and isinstance(value, str)
    if not are_texts or not key or "=" in key or "\0" in key + value:
      raise ValueError(
        f"{name} has {key!r}: {value!r}, expected a name without '=' and a text, such as "
        "{'NAME': '1'}"
      )


# --- in the worker --------------------------------------------------------------------------------


def protect_streams() -> tuple[BinaryIO, BinaryIO]:
  """Duplicates stdin and stdout for the protocol, and redirects those of others to /dev/null."""
  requests = os.fdopen(os.dup(0), "rb")
  replies = os.fdopen(os.dup(1), "wb")
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  return requests, replies


def end_with_children() -> NoReturn:
  """Kills this worker and all that it has started."""
  _kill(_find_processes(os.environ.get(_MARK, "")) - {os.getpid()})
  os.killpg(0, signal.SIGKILL)
  os._exit(1)


def limit_memory(memory_mib: int | None) -> None:
  """Limits this process's address space; None is no limit.

  Raises:
    MemoryError: the process takes more already, so that its first work would end it.
  """
  if memory_mib is None:
    return
  limit = memory_mib * 2**20
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  if _address_space_bytes() >= limit:
    raise MemoryError(f"without an item it takes {_address_space_bytes() / 2**20:.0f} MiB")


def _address_space_bytes() -> int:
  """Bytes of this process's address space; 0 if the system does not report them."""
  try:
    with open("/proc/self/statm", encoding="ascii") as file:
      return int(file.read().split()[0]) * resource.getpagesize()
  except OSError:
    return 0
