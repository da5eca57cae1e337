"""Claims a workdir in a bucket for one process, which proves by a heartbeat that it is alive.

The claim is an object that its owner writes again every few seconds, on the condition that no other
process has written it. A process that finds a claim watches it, by its own clock. If the object
changes, the process is refused. If it does not change for as long as its owner may be silent, the
process takes it over. An owner that was silent for so long writes nothing any more.
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
from typing import Any, NamedTuple

from rlvr_jax.storage.bucket import Bucket, ChangedError
from rlvr_jax.storage.places import OWNER
from rlvr_jax.train.cluster.process import exit_immediately
from rlvr_jax.train.reporting.progress import say

BEAT_S = 10.0  # seconds between two heartbeats
LIMIT_S = 60.0  # seconds without one after which a claim may be taken over


class WorkdirError(RuntimeError):
  """The workdir belongs to another configuration or to a running process."""


class _Owner(NamedTuple):
  """The process that has a claim; JSON."""

  id: str  # of the claim
  host: str
  process: int
  began: str | None  # when the process began, see `_began`
  machine: str  # see `_machine`
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
    on_loss: Callable[[str], Any] = exit_immediately,
  ):
    """Waits for as long as it takes to know whether the last owner is alive.

    Args:
      bucket: the folder.
      beat_s: seconds between heartbeats.
      limit_s: seconds without a heartbeat after which others may take the folder over.
      machine: identifies the machine and its start; None for this one.
      on_loss: called by another thread with a message when another process has taken over.
    Raises:
      WorkdirError: another process has the folder.
    """
    self._bucket = bucket
    self._owner = _Owner(
      id=uuid.uuid4().hex,
      host=socket.gethostname(),
      process=os.getpid(),
      began=_began(os.getpid()),
      machine=_machine() if machine is None else machine,
      limit_s=limit_s,
    )
    self._beats = 0
    generation = self._free_generation()
    self._confirmed = _now()
    try:
      self._generation = self._put(generation)
    except ChangedError:
      raise WorkdirError(self._in_use()) from None
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._beat, args=(beat_s, on_loss), daemon=True)
    self._thread.start()

  def check(self) -> float:
    """Seconds for which this process certainly has the claim; call it before every write.

    Raises:
      WorkdirError: another process may have taken over.
    """
    silent = _now() - self._confirmed
    left = 0.9 * self._owner.limit_s - silent
    if left <= 0:
      raise WorkdirError(
        f"{self._bucket.url} has had no heartbeat of this process for {silent:.0f} s, so that"
        " another one may have taken it over. Rerun the same command to resume"
      )
    return left

  def close(self) -> None:
    """Gives the claim up."""
    self._ended.set()
    self._thread.join()
    with contextlib.suppress(WorkdirError, OSError):  # then it expires
      self._bucket.delete(OWNER, generation=self._generation)

  def _content(self) -> bytes:
    self._beats += 1
    return (json.dumps(self._owner._asdict() | {"beats": self._beats}) + "\n").encode()

  def _free_generation(self) -> int:
    """The generation of a claim that has no living owner; 0 if there is no claim."""
    try:
      data, first = self._bucket.read_generation(OWNER)
    except FileNotFoundError:
      return 0
    owner = self._parse(data)
    if owner.machine == self._owner.machine and _began(owner.process) != owner.began:
      return first
    say(
      f"{self._bucket.url} is claimed by process {owner.process} on {owner.host}: waiting for"
      f" up to {owner.limit_s:.0f} s for a heartbeat, to see whether it is alive"
    )
    seen = _now()
    while _now() - seen < owner.limit_s:
      time.sleep(min(1.0, owner.limit_s / 20))
      try:
        _, generation = self._bucket.read_generation(OWNER)
      except FileNotFoundError:
        return 0
      if generation != first:
        raise WorkdirError(self._in_use())
    return first

  def _parse(self, data: bytes) -> _Owner:
    """The owner that a claim names."""
    try:
      content = json.loads(data)
      return _Owner(**{name: content[name] for name in _Owner._fields})
    except (ValueError, KeyError, TypeError):
      raise WorkdirError(
        f"{self._bucket.url}/{OWNER} is not a claim of this version of rlvr_jax; remove it if no"
        " run is using this workdir"
      ) from None

  def _in_use(self) -> str:
    who = "another process"
    with contextlib.suppress(FileNotFoundError):  # it has just ended
      owner = self._parse(self._bucket.read(OWNER))
      who = f"process {owner.process} on {owner.host}"
    return f"{self._bucket.url} is in use by {who}. Wait for it, stop it, or use another --workdir."

  def _beat(self, beat_s: float, on_loss: Callable[[str], Any]) -> None:
    """Runs in a thread; arguments as of `__init__`."""
    while not self._ended.wait(beat_s):
      began = _now()
      try:
        self.check()
        self._generation = self._proven()
        self._confirmed = began
      except ChangedError:
        on_loss(
          f"error: another process has taken over {self._bucket.url}, since this one was silent for"
          f" more than {self._owner.limit_s:.0f} s; this one has stopped writing"
        )
        return
      except WorkdirError as error:
        on_loss(f"error: {error}")
        return
      except OSError:
        pass  # tried again until the limit

  def _proven(self) -> int:
    """The generation of the claim after a heartbeat; raises ChangedError if it is another's."""
    try:
      return self._put(self._generation)
    except ChangedError:
      with contextlib.suppress(FileNotFoundError):
        data, generation = self._bucket.read_generation(OWNER)
        if self._owner.id.encode() in data:  # an earlier heartbeat, whose answer was lost
          return self._put(generation)
      raise

  def _put(self, generation: int) -> int:
    # A connection that hangs must not cost the claim: several are tried within the limit.
    limit_s = self._owner.limit_s / 5
    content = self._content()
    return self._bucket.put(OWNER, content, generation=generation, deadline_s=limit_s)


def _now() -> float:
  """Seconds, those included for which the machine was suspended."""
  return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
  """Identifies this machine since its start, and in it the container."""
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _began(process: int) -> str | None:
  """When a process of this machine began, in ticks; None if there is none."""
  try:
    text = pathlib.Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return None
  state, *fields = text.rpartition(")")[2].split()
  return None if state in ("Z", "X") else fields[18]
