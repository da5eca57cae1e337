"""The pool's end of one grading process: sends items line by line and receives their grades."""

from __future__ import annotations

import json
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from rlvr_jax.processes import describe_exit, kill_group, start_worker
from rlvr_jax.rewards.deadlines import GO_ON
from rlvr_jax.rewards.outcome import Grade, Outcome

_DIED = "the grader's process ended"
_MAX_REPLY = 2**20  # bytes; longer than any valid reply
MAX_LONGER_S = 600.0  # seconds by which a grader may extend the limit of an item


class GraderStartError(RuntimeError):
  """A grading worker could not be started."""


class _WorkerDiedError(Exception):
  """The worker's process ended, or broke the protocol."""


# Signals that end a process if a completion overloads the grader's C libraries: their stack
# overflows, or an allocation fails.
_CAUSED_BY_TEXT = (-signal.SIGSEGV, -signal.SIGABRT)


def encode_request(completion: str, reference: Mapping[str, Any]) -> bytes:
  """Encodes the line that requests a grade; TypeError unless the reference is JSON-serializable."""
  try:
    return json.dumps({"completion": completion, "reference": reference}).encode() + b"\n"
  except (TypeError, ValueError) as error:
    raise TypeError(
      f"a grader's reference must be JSON-serializable ({error}): {reference!r:.300}"
    ) from error


class _Pipes(NamedTuple):
  """Pipes to and from a worker."""

  stdin: IO[bytes]
  stdout: IO[bytes]
  stderr: IO[bytes]  # a file, read after the worker has died
  selector: selectors.BaseSelector


class WorkerProcess:
  """One grading process and the pipes to it. Used by one thread, except for `kill`."""

  def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]):
    self._grader = settings["grader"]
    self._memory_mib = settings["memory_mib"]
    stderr = tempfile.TemporaryFile()
    self._process = start_worker("rlvr_jax.rewards.worker", settings, environment, stderr)
    assert self._process.stdin and self._process.stdout
    self._pipes = _Pipes(
      self._process.stdin, self._process.stdout, stderr, selectors.DefaultSelector()
    )
    self._pipes.selector.register(self._pipes.stdout, selectors.EVENT_READ)
    self._outgoing = b""
    self._incoming = bytearray()
    self._is_ready = False

  @property
  def pid(self) -> int:
    return self._process.pid

  def is_alive(self) -> bool:
    return self._process.poll() is None

  def wait_ready(self, timeout_s: float) -> None:
    """Waits until the worker has loaded its grader; a second call returns at once.

    Raises:
      GraderStartError: loading failed or took too long; the worker is closed.
    """
    if self._is_ready:
      return
    self._is_ready = True
    try:
      message = json.loads(self._read_line(time.monotonic() + timeout_s))
      problem = message.get("error")
    except TimeoutError:
      problem = f"it was not ready within startup_timeout_s = {timeout_s:g} s"
    except (_WorkerDiedError, ValueError) as error:
      self._pipes.stderr.seek(0)
      last_output = self._pipes.stderr.read().decode(errors="replace").strip()[-2000:]
      problem = f"{error}\n{last_output}".strip()
    if problem is not None:
      self.close()
      if self._memory_mib is not None and problem.startswith(("MemoryError", _DIED)):
        problem += (
          f" (its address space may have {self._memory_mib} MiB; if that is too little, raise"
          " memory_mib, which is config.grading.memory_mib)"
        )
      raise GraderStartError(f"the grading worker for {self._grader!r} did not start: {problem}")

  def grade_items(
    self,
    lines: Sequence[bytes],
    timeout_s: float,
    *,
    on_slow: Callable[[], None],
    on_asleep: Callable[[], None],
  ) -> Iterator[Grade]:
    """Grades items; yields the grades in order, each as soon as it is known.

    Ends early after an item that ended the worker or was asleep; the items after it are not graded.

    Args:
      lines: from `encode_request`, one per item.
      timeout_s: limit per item, seconds.
      on_slow: called whenever an item has taken half its limit.
      on_asleep: called when an item uses no core; it is the last item to be graded.
    """
    self._outgoing += b"".join(lines)
    is_last = False

    def end_after_item() -> None:
      nonlocal is_last
      is_last = True
      self._outgoing += GO_ON
      on_asleep()

    for _ in lines:
      # The worker starts each item right after the previous one, so an item's time is counted from
      # the moment the previous reply was read, which is never before the item started.
      try:
        grade = _parse_reply(self._read_reply(timeout_s, on_slow, end_after_item))
      except TimeoutError:
        grade = Grade(Outcome.TIMEOUT, detail=f"no grade within {timeout_s:g} s")
        self.kill()
      except _WorkerDiedError as error:
        self.kill()
        is_caused_by_text = self._process.returncode in _CAUSED_BY_TEXT
        grade = Grade(Outcome.WRONG if is_caused_by_text else Outcome.CRASHED, detail=str(error))
      yield grade
      if is_last or not self.is_alive():
        return

  def _read_reply(
    self, timeout_s: float, on_slow: Callable[[], None], on_asleep: Callable[[], None]
  ) -> bytes:
    """Reads a reply, with the time by which the grader extends its limit; see `deadlines`."""
    deadline = time.monotonic() + timeout_s
    last_deadline = deadline + MAX_LONGER_S
    while True:
      line = self._read_line_or_report_slow(deadline, timeout_s / 2, on_slow)
      if line.startswith(b'{"longer_s"'):
        deadline = min(last_deadline, deadline + json.loads(line)["longer_s"])
      elif line.startswith(b'{"asleep"'):
        on_asleep()
      else:
        return line

  def _read_line_or_report_slow(
    self, deadline: float, second_half_s: float, on_slow: Callable[[], None]
  ) -> bytes:
    try:
      return self._read_line(deadline - second_half_s)
    except TimeoutError:
      on_slow()
      return self._read_line(deadline)

  def _read_line(self, deadline: float) -> bytes:
    """Waits for a line, and sends pending output meanwhile.

    Raises:
      TimeoutError: the deadline has passed and the pipe is empty, or the worker has ended. A worker
        ends by itself soon after the deadline, and this process may have had to wait for a core.
      _WorkerDiedError: the worker has ended before, or has sent a line of over `_MAX_REPLY` bytes.
    """
    while (end := self._incoming.find(b"\n")) < 0:
      if len(self._incoming) > _MAX_REPLY:
        raise _WorkerDiedError(f"the grader's process sent a reply of over {_MAX_REPLY} bytes")
      self._watch_stdin(bool(self._outgoing))
      ready = self._pipes.selector.select(max(0.0, deadline - time.monotonic()))
      if not ready:
        raise TimeoutError
      for key, _ in ready:
        if key.fileobj is self._pipes.stdin:
          self._send_some()
        elif not self._receive_some():
          if time.monotonic() > deadline:
            raise TimeoutError
          raise _WorkerDiedError(f"{_DIED}: {describe_exit(self._process)}")
    line = bytes(self._incoming[:end])
    del self._incoming[: end + 1]
    return line

  def _watch_stdin(self, watch: bool) -> None:
    is_watched = self._pipes.stdin in self._pipes.selector.get_map()
    if watch and not is_watched:
      self._pipes.selector.register(self._pipes.stdin, selectors.EVENT_WRITE)
    elif is_watched and not watch:
      self._pipes.selector.unregister(self._pipes.stdin)

  def _send_some(self) -> None:
    try:
      num_sent = os.write(self._pipes.stdin.fileno(), self._outgoing[:65536])
    except BlockingIOError:
      return
    except BrokenPipeError:
      num_sent = len(self._outgoing)  # the worker has died or is dying; reading will report it
    self._outgoing = self._outgoing[num_sent:]

  def _receive_some(self) -> bool:
    """Reads available bytes; returns False if the worker has ended, or closed its pipe.

    A worker that closed its pipe is killed.
    """
    data = os.read(self._pipes.stdout.fileno(), 65536)
    if not data:
      self.kill()
    self._incoming += data
    return bool(data)

  def kill(self) -> None:
    """Kills the worker with all that it has started; safe at any time, from any thread."""
    kill_group(self._process)

  def close(self) -> None:
    """Kills the worker and closes its pipes."""
    self.kill()
    self._pipes.selector.close()
    for stream in (self._pipes.stdin, self._pipes.stdout, self._pipes.stderr):
      stream.close()


def _parse_reply(line: bytes) -> Grade:
  """Parses a worker's reply; raises _WorkerDiedError if it is broken."""
  try:
    reply = json.loads(line)
    texts = [str(reply[name]) for name in ("detail", "answer", "feedback")]
    return Grade(Outcome(reply["outcome"]), float(reply["score"]), *texts)
  except (ValueError, KeyError, TypeError) as error:
    raise _WorkerDiedError(f"the grader's process sent a broken reply {line[:200]!r}") from error
