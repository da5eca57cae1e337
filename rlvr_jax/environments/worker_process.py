"""The pool's end of one worker: its process and pipes, and the time that its dialogues take."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

from rlvr_jax.environments.worker import MEMORY_STATUS
from rlvr_jax.processes import describe_exit, kill_group, start_worker

DIED = "the environment's process ended"
_MAX_LINE = 16 * 2**20  # bytes; longer than any line of a worker: in JSON a byte may take six
_PART = 2**16  # bytes that are sent or received at a time
_LAST_OUTPUT = 2000  # characters of the output of a worker that did not start
# Signals that end a process whose C libraries meet a failed allocation.
_OF_MEMORY = (-signal.SIGSEGV, -signal.SIGABRT, MEMORY_STATUS)


class BrokenWorkerError(Exception):
  """A worker has ended, or broke the protocol."""


class _Pipes(NamedTuple):
  """Pipes to and from a worker."""

  stdin: IO[bytes]
  stdout: IO[bytes]
  stderr: IO[bytes]  # a file, read after a worker has failed to start


class WorkerProcess:
  """One worker and the pipes to it; used by one thread. Only the end of a process is waited for."""

  def __init__(self, settings: Mapping[str, Any], variables: Mapping[str, str]):
    stderr = tempfile.TemporaryFile()
    self._has_limit = settings["memory_mib"] is not None
    # Otherwise each thread reserves address space of its own, which may be limited.
    variables = {"MALLOC_ARENA_MAX": "1", **variables}
    self._process = start_worker("rlvr_jax.environments.worker", settings, variables, stderr)
    assert self._process.stdin and self._process.stdout
    self._pipes = _Pipes(self._process.stdin, self._process.stdout, stderr)
    self._outgoing = bytearray()
    self._incoming = bytearray()

  @property
  def pid(self) -> int:
    return self._process.pid

  @property
  def stdin(self) -> IO[bytes]:
    return self._pipes.stdin

  @property
  def stdout(self) -> IO[bytes]:
    return self._pipes.stdout

  @property
  def has_output(self) -> bool:
    """Whether lines wait to be sent."""
    return bool(self._outgoing)

  def send(self, message: Mapping[str, Any]) -> None:
    """Queues a line; `flush` sends it."""
    self._outgoing += json.dumps(message).encode() + b"\n"

  def flush(self) -> None:
    """Sends what the pipe takes now."""
    try:
      del self._outgoing[: os.write(self._pipes.stdin.fileno(), self._outgoing[:_PART])]
    except BlockingIOError:
      pass
    except BrokenPipeError:
      self._outgoing.clear()  # the worker has died or is dying; reading will report it

  def receive(self) -> list[dict[str, Any]]:
    """Reads what is there, when there is something; returns the complete lines.

    Raises:
      BrokenWorkerError: the worker has ended, or has sent what is not its protocol.
    """
    try:
      data = os.read(self._pipes.stdout.fileno(), _PART)
    except BlockingIOError:
      return []
    if not data:
      self.kill()
      raise BrokenWorkerError(f"{DIED}: {describe_exit(self._process)}")
    self._incoming += data
    *lines, rest = self._incoming.split(b"\n") if b"\n" in data else [self._incoming]
    self._incoming = rest
    if len(rest) > _MAX_LINE:
      raise BrokenWorkerError(f"the environment's process sent a line of over {_MAX_LINE} bytes")
    try:
      return [json.loads(line) for line in lines]
    except ValueError as error:
      raise BrokenWorkerError("the environment's process sent a line that is not JSON") from error

  def ended_by_memory(self) -> bool:
    """Whether the process, which has ended, did so because its memory was used up."""
    return self._has_limit and self._process.returncode in _OF_MEMORY

  def last_output(self) -> str:
    """The end of what a worker that did not start has written."""
    self._pipes.stderr.seek(0)
    return self._pipes.stderr.read().decode(errors="replace").strip()[-_LAST_OUTPUT:]

  def kill(self) -> None:
    """Kills the worker with all that it has started."""
    kill_group(self._process)

  def close(self) -> None:
    """Kills the worker and closes its pipes."""
    self.kill()
    for stream in self._pipes:
      stream.close()


class Clock:
  """The time that the dialogues of one worker take, and their limits; seconds of `time.monotonic`.

  One dialogue runs at a time. The time in which it waits (`base.waiting`) has a limit of its own,
  and the time in which it is ready to go on, but another one runs, has none.
  """

  def __init__(self, limit_s: float):
    self._limit_s = limit_s
    self._running: tuple[int, float] | None = None  # the dialogue that runs, and since when
    self._used_s: dict[int, float] = {}  # by dialogues that run or wait
    self._waiting: dict[int, float] = {}  # dialogue → the end of its wait's limit

  @property
  def running(self) -> int | None:
    """The dialogue that runs."""
    return None if self._running is None else self._running[0]

  def update(self, message: Mapping[str, Any], now: float) -> None:
    """Takes an event that the worker reports."""
    dialogue = message["dialogue"]
    match message["event"]:
      case "running":
        self._running = (dialogue, now)
      case "waiting":
        self._stop(dialogue, now)
        self._waiting[dialogue] = now + message["limit_s"]
      case "waited":
        self._waiting.pop(dialogue, None)
      case "result":
        self._stop(dialogue, now)
        del self._used_s[dialogue]

  def _stop(self, dialogue: int, now: float) -> None:
    since = now if self._running is None else self._running[1]
    self._used_s[dialogue] = self._used_s.get(dialogue, 0.0) + now - since
    self._running = None

  def next_limit(self) -> tuple[float, int | None]:
    """The earliest limit, and its dialogue; infinity if none runs or waits."""
    limits = [(limit, dialogue) for dialogue, limit in self._waiting.items()]
    if self._running is not None:
      dialogue, since = self._running
      limits.append((since + self._limit_s - self._used_s.get(dialogue, 0.0), dialogue))
    return min(limits, default=(math.inf, None))
