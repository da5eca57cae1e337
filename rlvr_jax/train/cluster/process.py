"""The training process and its operating system: memory, caches, signals, deadlines, exits."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import faulthandler
import math
import os
import pathlib
import platform
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import NoReturn

DEADLINE_S = 3600.0  # seconds without a call of `alive`; longer than any one program runs

# glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
  """Makes glibc reuse freed memory instead of returning it to the kernel.

  XLA on a CPU allocates and frees its buffers at every step, and page faults took up to half of a
  step. Does nothing with other C libraries.
  """
  if platform.libc_ver()[0] != "glibc":
    return
  libc = ctypes.CDLL("libc.so.6")
  libc.mallopt(_M_MMAP_MAX, 0)
  libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
  libc.mallopt(_M_TOP_PAD, 2**26)


def processor() -> str:
  """The name of this machine's processor."""
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.machine()


def usable_cores() -> int:
  """Those that this process may use."""
  limited = hasattr(os, "sched_getaffinity")
  return len(os.sched_getaffinity(0)) if limited else os.cpu_count() or 1


def keep_compiled(workdir: str) -> None:
  """Puts jax's compilation cache into `workdir`, so that a rerun there compiles nothing again.

  All hosts of a pod can access the workdir: process 0 writes, all read. Does nothing if
  JAX_COMPILATION_CACHE_DIR is set; JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
  """
  import jax

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", os.path.join(workdir, "compilation_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def open_closed_streams() -> None:
  """Opens /dev/null in place of standard streams that the caller has closed, such as by >&-.

  Without this, the next files to be opened would get their descriptors, and what others print.
  """
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # on the lowest free descriptor
      os.set_inheritable(getattr(sys, name).fileno(), True)


def described(error: BaseException) -> str:
  """The message of an error that ends the program, with the remedy where only the system has it."""
  # Here, since it loads fsspec, for which --help need not wait.
  from rlvr_jax.storage.files import is_out_of_descriptors

  if not is_out_of_descriptors(error):
    return str(error)
  limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return (
    f"too many open files: this process may have {limit}. Raise the limit, such as with ulimit -n"
    f" 4096, then rerun the same command ({type(error).__name__}: {str(error)[:100]}…)"
  )


def exit_immediately(message: str) -> NoReturn:
  """Ends the process after printing the message as its last line; call it after closing files.

  Without this, libraries print more: in an orderly exit, and in threads that are writing right now.
  So their stderr is redirected to /dev/null before the message is written to a duplicate.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  terminal = os.dup(sys.stderr.fileno())
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
  time.sleep(0.2)  # writes that have begun still go where they were meant to
  os.write(terminal, f"{message}\n".encode(errors="backslashreplace"))
  os._exit(1)


@contextlib.contextmanager
def ends_after(seconds: float, message: str) -> Iterator[None]:
  """Ends the process with a message if the block takes longer: a wait for devices has no limit."""
  timer = threading.Timer(seconds, exit_immediately, [message])
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


_open_deadlines = 0


@contextlib.contextmanager
def deadline() -> Iterator[None]:
  """Within it, the process ends with all threads' tracebacks after `DEADLINE_S` without `alive`.

  Collectives and the thread pools of libraries have no time limit themselves.
  """
  global _open_deadlines
  _open_deadlines += 1
  alive()
  try:
    yield
  finally:
    _open_deadlines -= 1
    alive()


_waited_s = 0.0


@contextlib.contextmanager
def waiting() -> Iterator[None]:
  """As `deadline`, around a wait for devices or other processes, whose time is counted."""
  global _waited_s
  began = time.perf_counter()
  try:
    with deadline():
      yield
  finally:
    _waited_s += time.perf_counter() - began


def waited_s() -> float:
  """Seconds that this process has waited so far, see `waiting`."""
  return _waited_s


def alive() -> None:
  """Restarts the deadline, if one is open."""
  if _open_deadlines:
    # Not a Python thread: native code that hangs may hold the interpreter's lock.
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=2)  # stderr may be silenced
  else:
    faulthandler.cancel_dump_traceback_later()


def end_with(parent: int) -> None:
  """Asks this process to end, as a signal does, once the process that started it has ended."""

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=watch, name="parent", daemon=True).start()


# --- the end --------------------------------------------------------------------------------------

_POLL_S = 0.1  # between two looks at whether the process is asked to end
_asked = threading.Event()
_in_order = False


class EndRequestedError(Exception):
  """The process was asked to end before the end of its work; the same command resumes it."""


def asked() -> bool:
  """Whether the process has been asked to end: by SIGTERM, as before a preemption, or by Ctrl-C."""
  return _asked.is_set()


def ask() -> None:
  """Asks it, as a signal does."""
  _asked.set()


def in_order() -> bool:
  """Whether the process is within `ends_in_order`."""
  return _in_order


def wait(future: concurrent.futures.Future, limit_s: float = math.inf) -> None:
  """Waits until the future is done, the process is asked to end, or the time is over."""
  last = time.monotonic() + limit_s
  while not (future.done() or asked()) and time.monotonic() < last:
    concurrent.futures.wait([future], timeout=_POLL_S)


@contextlib.contextmanager
def ends_in_order(pass_on: Callable[[], None]) -> Iterator[None]:
  """Within it SIGTERM, SIGINT and SIGHUP ask the process to end; works in the main thread.

  A thread notes a signal at once, also while the main thread is in native code. A second Ctrl-C
  ends the process immediately. SIGHUP stays ignored where it is, as by nohup and under launch.

  Args:
    pass_on: called in that thread at each signal, to ask the other processes.
  """
  global _in_order
  numbers = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    numbers.append(signal.SIGHUP)
  reader, writer = socket.socketpair()
  writer.setblocking(False)
  before = [signal.signal(number, lambda *_: None) for number in numbers]
  fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  thread = threading.Thread(target=_note, args=(reader, numbers, pass_on), name="signals")
  thread.start()
  _in_order = True
  try:
    yield
  finally:
    _in_order = False
    signal.set_wakeup_fd(fd_before)
    for number, handler in zip(numbers, before, strict=True):
      signal.signal(number, handler)
    writer.close()  # which ends the thread
    thread.join()
    reader.close()
    _asked.clear()


def _note(reader: socket.socket, numbers: Collection[int], pass_on: Callable[[], None]) -> None:
  """Runs in a thread: the interpreter writes the number of every signal that arrives."""
  interrupts = 0
  while received := reader.recv(64):
    interrupts += received.count(signal.SIGINT)
    if interrupts > 1:
      os._exit(128 + signal.SIGINT)
    if set(received) & set(numbers):
      ask()
      pass_on()
