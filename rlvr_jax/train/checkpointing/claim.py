"""Claims a workdir in a bucket for one process, which shows by a heartbeat that it is alive.

The claim is an object that its owner rewrites every few seconds, on the condition that no other
process has written it. A process that finds a claim watches the object, by its own clock. If the
object changes, its owner is alive, and the process ends with an error. If the object does not
change within the owner's time limit, the process takes the claim over. An owner that was silent for
longer than its limit stops writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

from rlvr_jax.storage.bucket import Bucket, ChangedError
from rlvr_jax.storage.places import OWNER
from rlvr_jax.train.cluster.process import exit_immediately
from rlvr_jax.train.reporting.progress import say

BEAT_S = 10.0  # seconds between two heartbeats
LIMIT_S = 60.0  # seconds without a heartbeat after which a claim may be taken over


class WorkdirError(RuntimeError):
  """The workdir belongs to another configuration or to a running process."""


class _Owner(NamedTuple):
  """The process that has a claim; all fields are JSON values."""

  id: str  # identifies the claim
  host: str
  process: int
  began: str | None  # when the process started, see `_start_ticks`
  machine: str  # see `_machine_id`
  limit_s: float  # seconds without a heartbeat after which others may take over


class BucketClaim:
  """The claim of this process on a folder of a bucket, until `close`."""

  def __init__(
    self,
    bucket: Bucket,
    *,
    beat_s: float,
    limit_s: float,
    machine: str | None = None,
    on_loss: Callable[[str], object] = exit_immediately,
  ):
    """Claims the folder; waits until it is known whether the last owner is alive.

    Args:
      bucket: the folder.
      beat_s: seconds between heartbeats.
      limit_s: seconds without a heartbeat after which others may take over the folder.
      machine: identifier of a machine and its latest boot; None for this machine.
      on_loss: called by another thread with a message when the claim is lost.
    Raises:
      WorkdirError: another process has claimed the folder.
    """
    self._bucket = bucket
    self._owner = _Owner(
      id=uuid.uuid4().hex,
      host=socket.gethostname(),
      process=os.getpid(),
      began=_start_ticks(os.getpid()),
      machine=_machine_id() if machine is None else machine,
      limit_s=limit_s,
    )
    self._beats = 0
    generation = self._wait_until_free()
    self._confirmed = _now()  # when the last successful heartbeat began
    try:
      self._generation = self._put(generation)
    except ChangedError:
      raise WorkdirError(self._in_use_message()) from None
    self._ended = threading.Event()
    thread_args = (beat_s, on_loss)
    self._thread = threading.Thread(target=self._send_heartbeats, args=thread_args, daemon=True)
    self._thread.start()

  def check(self) -> float:
    """For how many seconds this process certainly keeps the claim; call it before every write.

    Raises:
      WorkdirError: another process may have taken over the claim.
    """
    silent_s = _now() - self._confirmed
    left_s = 0.9 * self._owner.limit_s - silent_s
    if left_s <= 0:
      raise WorkdirError(
        f"{self._bucket.url} has had no heartbeat of this process for {silent_s:.0f} s, so that"
        " another process may have taken it over. Rerun the same command to resume"
      )
    return left_s

  def close(self) -> None:
    """Releases the claim."""
    self._ended.set()
    self._thread.join()
    with contextlib.suppress(WorkdirError, OSError):  # the claim then expires
      self._bucket.delete(OWNER, generation=self._generation)

  def _wait_until_free(self) -> int:
    """Returns the generation of a claim without a living owner; 0 if there is no claim.

    Raises:
      WorkdirError: the owner is alive.
    """
    try:
      data, first = self._bucket.read_generation(OWNER)
    except FileNotFoundError:
      return 0
    owner = self._parse(data)
    if owner.machine == self._owner.machine and _start_ticks(owner.process) != owner.began:
      return first
    say(
      f"{self._bucket.url} is claimed by process {owner.process} on {owner.host}: waiting for"
      f" up to {owner.limit_s:.0f} s for a heartbeat, to see whether it is alive"
    )
    start = _now()
    while _now() - start < owner.limit_s:
      time.sleep(min(1.0, owner.limit_s / 20))
      try:
        _, generation = self._bucket.read_generation(OWNER)
      except FileNotFoundError:
        return 0
      if generation != first:
        raise WorkdirError(self._in_use_message())
    return first

  def _parse(self, data: bytes) -> _Owner:
    """The owner named in a claim."""
    try:
      content = json.loads(data)
      return _Owner(**{name: content[name] for name in _Owner._fields})
    except (ValueError, KeyError, TypeError):
      raise WorkdirError(
        f"{self._bucket.url}/{OWNER} is not a claim of this version of rlvr_jax; remove it if no"
        " run is using this workdir"
      ) from None

  def _in_use_message(self) -> str:
    name = "another process"
    with contextlib.suppress(FileNotFoundError):  # the owner has just ended
      owner = self._parse(self._bucket.read(OWNER))
      name = f"process {owner.process} on {owner.host}"
    return (
      f"{self._bucket.url} is in use by {name}. Wait for it, stop it, or use another --workdir."
    )

  def _send_heartbeats(self, beat_s: float, on_loss: Callable[[str], object]) -> None:
    """Sends heartbeats until `close`; runs in a thread. For arguments see `__init__`."""
    while not self._ended.wait(beat_s):
      start = _now()
      try:
        self.check()
        self._generation = self._send_heartbeat()
        self._confirmed = start
      except ChangedError:
        on_loss(
          f"error: another process has taken over {self._bucket.url}, since this process was silent"
          f" for more than {self._owner.limit_s:.0f} s; it has stopped writing"
        )
        return
      except WorkdirError as error:
        on_loss(f"error: {error}")
        return
      except OSError:
        pass  # retried until the limit

  def _send_heartbeat(self) -> int:
    """Rewrites the claim; returns its generation. ChangedError: another process has the claim."""
    try:
      return self._put(self._generation)
    except ChangedError:
      with contextlib.suppress(FileNotFoundError):
        data, generation = self._bucket.read_generation(OWNER)
        if self._owner.id.encode() in data:  # an earlier heartbeat, whose response was lost
          return self._put(generation)
      raise

  def _put(self, generation: int) -> int:
    """Writes the claim if it has this generation; returns the new generation."""
    self._beats += 1
    content = json.dumps(self._owner._asdict() | {"beats": self._beats}) + "\n"
    # A hanging connection must not lose the claim: the limit leaves time for several attempts.
    limit_s = self._owner.limit_s / 5
    return self._bucket.put(OWNER, content.encode(), generation=generation, deadline_s=limit_s)


def _now() -> float:
  """Seconds since boot, including suspended time."""
  return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine_id() -> str:
  """Identifies this machine since its boot, and the container within it."""
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _start_ticks(process: int) -> str | None:
  """Start time of a process here, in clock ticks since boot; None if there is no such process."""
  try:
    text = pathlib.Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return None
  state, *fields = text.rpartition(")")[2].split()
  return None if state in ("Z", "X") else fields[18]
