"""What a training process arranges with its operating system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from absl import app

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


def parse_flags(argv: list[str]) -> list[str]:
  """Parses all flags; a configuration that is not there, or lacks a field, ends the process."""
  try:
    return app.parse_flags_with_usage(argv)
  except FileNotFoundError as error:
    sys.exit(f"error: --config: {error}")
  except (AttributeError, KeyError) as error:
    cause = error.args[0]
    text = str(cause.args[0] if isinstance(cause, KeyError) else cause)
    near = text.replace("\nDid", "; did")
    sys.exit(
      f"error: the configuration has no field {near} (configs/base.py and the recipe list them)"
    )


def end_at_once(message: str) -> NoReturn:
  """Ends the process with the message alone, when all that was open is closed.

  Libraries' complaints at an orderly end would bury it.
  """
  stderr, sys.stderr = sys.stderr, open(os.devnull, "w", encoding="utf-8")
  print(message, file=stderr, flush=True)
  sys.stdout.flush()
  os._exit(1)


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
