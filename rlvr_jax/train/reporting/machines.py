"""Measurements of a run's machines: memory, how busy each host is, and profiles."""

from __future__ import annotations

import os
import pathlib
import statistics
from collections.abc import Sequence

import jax

from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.reporting.progress import say, warn

PROFILE_FOLDER = "profile"  # of a workdir; TensorBoard and xprof read it
_GIB = 2**30
_SLOW = 1.25  # a straggler is this many times as busy as the median host
_SLOW_S = 0.5  # and by this many seconds
_PATIENCE = 5  # updates in a row before it is named


def memory(phase: str) -> dict[str, float]:
  """GiB in use at the end of a phase: RAM of this process, and memory of its fullest device.

  For a device it is the peak since the run began: the first phase with a value is the one that
  reached it. CPU devices have none.
  """
  values = {f"memory/{phase}_host_gib": _resident() / _GIB}
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  return values | ({f"memory/{phase}_device_gib": max(peaks) / _GIB} if peaks else {})


def _resident() -> int:
  """Bytes of this process in RAM; 0 where the system does not report them."""
  try:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  except OSError:
    return 0
  return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Hosts:
  """Seconds that each process of a run was busy between updates, and which one is a straggler.

  All wait for the slowest, which therefore waits least. Time that a process waits for devices or
  for other processes is measured where it waits, see `multihost.process_waits_s`.
  """

  def __init__(self) -> None:
    self._before: list[float] = []
    self._slow: list[int] = []  # the slowest, in the last updates in a row

  def metrics(self, seconds: float) -> dict[str, float]:
    """Seconds that each process was busy in the last `seconds`; {} with one process."""
    waits = multihost.process_waits_s()
    before, self._before = self._before, waits
    if len(before) < 2:
      return {}
    busy = [max(seconds - (now - then), 0.0) for now, then in zip(waits, before, strict=True)]
    if message := self._named(busy):
      warn(message)
    return {f"hosts/busy_seconds_{process}": value for process, value in enumerate(busy)}

  def _named(self, busy: Sequence[float]) -> str:
    """A message about a straggler, the slowest process in many updates in a row; "" if none."""
    slowest, median = max(range(len(busy)), key=busy.__getitem__), statistics.median_low(busy)
    slow = busy[slowest] > max(_SLOW * median, median + _SLOW_S)
    same = slow and (not self._slow or self._slow[-1] == slowest)
    self._slow = [*self._slow, slowest] if same else [slowest] * slow
    if len(self._slow) != _PATIENCE:  # said once, as long as it lasts
      return ""
    return (
      f"process {slowest} is a straggler: it was busy for {busy[slowest]:.1f} s of the last update,"
      f" the median process for {median:.1f} s. Look for other programs on its host, or replace it"
    )


class Profile:
  """A trace of some updates by jax.profiler, written into the workdir by every process."""

  def __init__(
    self,
    updates: str,
    workdir: str | os.PathLike[str],
    kept: str | os.PathLike[str] | None = None,
  ):
    """Parses "10:13", updates 10 to 13; "" for none.

    Args:
      updates: the first and the last one.
      workdir: local folder to which this process writes.
      kept: folder or bucket that keeps it, for the message; None for `workdir`.

    Raises:
      ValueError: it is not of that form.
    """
    first, _, last = (updates or "0:-1").partition(":")
    if updates and not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
      raise ValueError(
        f"--profile={updates}: write the first and the last update, 1 ≤ first ≤ last, such as 10:13"
      )
    self.first, self.last = int(first), int(last)
    self._folder = pathlib.Path(workdir) / PROFILE_FOLDER
    self._shown = f"{os.fspath(kept or workdir)}/{PROFILE_FOLDER}"
    self._open = False

  def before(self, update: int) -> None:
    """Starts the trace before its first update; a resumed run may be beyond that."""
    if self.first <= update <= self.last and not self._open:
      self._open = True
      jax.profiler.start_trace(str(self._folder))

  def after(self, update: int) -> None:
    """Writes the trace once the metrics of its last update have been read."""
    if self._open and update >= self.last:
      self.close()
      say(f"the profile of updates {self.first} to {self.last} is in {self._shown}")

  def close(self) -> None:
    """Writes the trace if one is open."""
    if self._open:
      self._open = False
      jax.profiler.stop_trace()
