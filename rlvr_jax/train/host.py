"""What a training process arranges with its operating system."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import signal
from collections.abc import Iterator

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


class Termination:
  """Whether the process has been asked to end; a preempted machine sends SIGTERM first."""

  def __init__(self):
    self.requested = False

  def request(self, signum, frame) -> None:
    del signum, frame
    self.requested = True


@contextlib.contextmanager
def termination_signals() -> Iterator[Termination]:
  """Within it SIGTERM asks for an orderly end instead of killing; works in the main thread."""
  termination = Termination()
  before = signal.signal(signal.SIGTERM, termination.request)
  try:
    yield termination
  finally:
    signal.signal(signal.SIGTERM, before)
