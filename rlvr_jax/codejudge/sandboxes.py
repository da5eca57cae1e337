"""The sandboxes of one process: one program at a time uses the core, and others may sleep."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from .sandbox import Sandbox, open_sandbox

_MAX_SANDBOXES = 4  # for one program that uses the core, and programs that sleep


class Sandboxes:
  """Lends sandboxes to the threads of this process."""

  def __init__(self) -> None:
    self._is_tested = False
    self._lock = threading.Lock()
    self._free: list[Sandbox] = []
    self._places = threading.Semaphore(_MAX_SANDBOXES)
    self._core = threading.Semaphore(1)

  def open(self) -> None:
    """Opens the first sandbox at the first call; raises SandboxError if it does not work here."""
    with self._lock:
      if not self._is_tested:
        self._free.append(open_sandbox())
        self._is_tested = True

  @contextlib.contextmanager
  def take(self) -> Iterator[tuple[Sandbox, Callable[[], None]]]:
    """Waits for a sandbox and the core.

    Yields:
      A sandbox, and a function to call, at most once, when the program sleeps and leaves the core
      to others. If the `with` block raises, a new sandbox replaces this one.
    """
    is_on_core = True

    def leave_core() -> None:
      nonlocal is_on_core
      is_on_core = False
      self._core.release()

    with self._places:
      self._core.acquire()
      try:
        with self._lock:
          opened = self._free.pop() if self._free else None
        opened = opened or open_sandbox()
        try:
          yield opened, leave_core
        except BaseException:
          opened.close()  # the next program gets a new one
          raise
        with self._lock:
          self._free.append(opened)
      finally:
        if is_on_core:
          self._core.release()
