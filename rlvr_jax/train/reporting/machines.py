"""Measurements of a run's machines: memory, and profiles."""

from __future__ import annotations

import os
import pathlib

import jax

from rlvr_jax.train.reporting.progress import say

PROFILE_FOLDER = "profile"  # folder in a workdir, which TensorBoard and xprof read
_GIB = 2**30


def memory(phase: str) -> dict[str, float]:
  """GiB in use at the end of a phase: RAM of this process, and memory of its fullest device.

  The device's value is the peak since the process began. So the first phase that reports the final
  value is the phase that reached the peak. CPU devices have no value.
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


class Profile:
  """A trace of some updates by jax.profiler, written into the workdir by every process."""

  def __init__(
    self,
    updates: str,
    workdir: str | os.PathLike[str],
    kept: str | os.PathLike[str] | None = None,
  ):
    """Parses the updates to trace.

    Args:
      updates: the first and the last update, such as "10:13"; "" for no trace.
      workdir: local folder to which this process writes.
      kept: folder or bucket that keeps the trace, for the message; None for `workdir`.

    Raises:
      ValueError: the text has another form.
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
    """Starts the trace if `update` is one of the updates to trace, and no trace is open."""
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
