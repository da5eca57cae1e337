"""What a training process arranges with its operating system."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

DEADLINE_S = 3600.0  # seconds without a sign of life; longer than any one program runs

# glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
  """Lets glibc reuse freed memory instead of giving it back to the kernel.

  XLA on a CPU allocates and frees its buffers at every step; faulting the same pages in again and
  again took up to half of a step. Does nothing elsewhere.
  """
  if platform.libc_ver()[0] != "glibc":
    return
  libc = ctypes.CDLL("libc.so.6")
  libc.mallopt(_M_MMAP_MAX, 0)
  libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
  libc.mallopt(_M_TOP_PAD, 2**26)


def keep_compiled(workdir: str) -> None:
  """Lets a rerun in `workdir` load what this run compiles: it compiles nothing again.

  In the workdir, since all hosts of a pod see it: process 0 alone writes, all read. Does nothing
  where JAX_COMPILATION_CACHE_DIR names a folder; JAX_ENABLE_COMPILATION_CACHE=false turns it off.
  """
  import jax

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", os.path.join(workdir, "compilation_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def end_at_once(message: str) -> NoReturn:
  """Ends the process when all that was open is closed, with the message as its last words.

  Libraries' complaints would bury it: those of an orderly end, and those of threads that are
  writing one now. Their descriptor leads nowhere before the message is written to another.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  terminal = os.dup(sys.stderr.fileno())
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
  time.sleep(0.2)  # writes that have begun still go where they were meant to
  os.write(terminal, f"{message}\n".encode(errors="backslashreplace"))
  os._exit(1)


_open_deadlines = 0


@contextlib.contextmanager
def deadline() -> Iterator[None]:
  """Ends the process, with every thread's traceback, without a sign of life for `DEADLINE_S`.

  No collective and no library's pool of threads has a limit of its own.
  """
  global _open_deadlines
  _open_deadlines += 1
  alive()
  try:
    yield
  finally:
    _open_deadlines -= 1
    alive()


def alive() -> None:
  """A sign of life: the deadline, if one is open, begins anew."""
  if _open_deadlines:
    # Not a thread of Python's: what hangs in native code may hold the interpreter's lock.
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=2)  # stderr may be silenced
  else:
    faulthandler.cancel_dump_traceback_later()


class Termination:
  """Whether the process has been asked to end: by SIGTERM, as before a preemption, or by Ctrl-C."""

  def __init__(self):
    self.requested = False

  def request(self, signum, frame) -> None:
    """Takes note; a second request is not waited for."""
    del frame
    if self.requested:
      signal.signal(signum, signal.SIG_DFL)
      signal.raise_signal(signum)
    self.requested = True


@contextlib.contextmanager
def termination_signals() -> Iterator[Termination]:
  """Within it SIGTERM and SIGINT ask for an orderly end; works in the main thread."""
  termination = Termination()
  signals = (signal.SIGTERM, signal.SIGINT)
  before = [signal.signal(number, termination.request) for number in signals]
  try:
    yield termination
  finally:
    for number, handler in zip(signals, before, strict=True):
      signal.signal(number, handler)
