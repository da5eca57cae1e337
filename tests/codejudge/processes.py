"""What runs on this machine, for tests that must leave nothing running."""

import pathlib
import time
from collections.abc import Callable


def _stats() -> dict[int, tuple[str, int]]:
  """Process id → state and parent."""
  found = {}
  for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      text = stat.read_text(errors="replace")  # a process may call itself anything
    except OSError:  # it has just ended
      continue
    state, parent = text.rpartition(")")[2].split()[:2]
    found[int(text.split()[0])] = (state, int(parent))
  return found


def descendants(*pids: int) -> set[int]:
  """Processes below some, these apart."""
  stats, found, new = _stats(), set(), set(pids)
  while new:
    new = {pid for pid, (_, parent) in stats.items() if parent in new}
    found |= new
  return found


def running(pids: set[int]) -> set[int]:
  """Those that still run; a zombie does not."""
  return {pid for pid, (state, _) in _stats().items() if pid in pids and state not in "ZX"}


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
  """Fails the test unless the condition comes true, in a time that a busy machine keeps, too."""
  deadline = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline, "waited in vain"
    time.sleep(0.02)
