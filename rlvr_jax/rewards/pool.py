"""A pool of grading processes with a wall-clock limit on every item."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

from rlvr_jax.rewards.loading import checked_grader
from rlvr_jax.rewards.outcome import Grade, Outcome

# Items handed to a worker at a time, at most: enough to hide the round trip.
_MAX_CHUNK = 32
_MAX_REPLY = 2**20  # bytes; longer than any real reply, so a runaway one is caught
_MAX_LONGER_S = 600.0  # that a grader may announce for an item
_KILL_WAIT_S = 5.0  # for the kernel to take down a process after SIGKILL
_MOST_WORKERS = 32  # by default: each holds what its grader imports
_NOTHING: Mapping[str, str] = MappingProxyType({})
_SINGLE_THREADED = {
  name: "1"
  for name in (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
  )
}  # fmt: skip


class GraderStartError(RuntimeError):
  """A grading worker could not be started."""


class _WorkerDiedError(Exception):
  """The worker's process ended, or sent what no worker sends."""


def default_workers() -> int:
  """A grading process for each core that this process may use, at most 32."""
  if hasattr(os, "sched_getaffinity"):
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
  return min(os.cpu_count() or 1, _MOST_WORKERS)


class GradingFuture(Future[list[Grade]]):
  """Grades to come; `result(timeout)` gives them in the order of the inputs.

  Without a timeout `result` waits `limit_s` seconds at most, longer than grading can take: every
  item, and every replacement of a worker, has a limit of its own.
  """

  def __init__(self, size: int, limit_s: float):
    super().__init__()
    self._limit_s = limit_s
    self._grades: list[Grade | None] = [None] * size
    self._missing = size
    self._count_lock = threading.Lock()
    self.set_running_or_notify_cancel()  # cannot be cancelled: workers may be at it already
    if not size:
      self.set_result([])

  def result(self, timeout: float | None = None) -> list[Grade]:
    return super().result(self._limit_s if timeout is None else timeout)

  def deliver(self, index: int, grade: Grade) -> None:
    """Takes the grade of one item; the last one completes the future."""
    with self._count_lock:
      self._grades[index] = grade
      self._missing -= 1
      if not self._missing and not self.done():
        self.set_result(self._grades)  # type: ignore[arg-type]

  def fail(self, error: Exception) -> None:
    """Gives up on the grades still missing."""
    with self._count_lock:
      if not self.done():
        self.set_exception(error)


class _Item(NamedTuple):
  future: GradingFuture
  position: int
  line: bytes


class _Worker:
  """One grading process and the two pipes to it. Used by one thread, except for `kill`."""

  def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]):
    self._grader = settings["grader"]
    self._stderr = tempfile.TemporaryFile()
    # sys.path goes along: the worker imports a user's grader exactly as this process would. The
    # hash seed makes graders that iterate over sets give the same grade every time.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    fixed = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    environment = os.environ | _SINGLE_THREADED | dict(environment) | fixed
    command = [sys.executable, "-P", "-m", "rlvr_jax.rewards.worker", json.dumps(settings)]
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
      env=environment, start_new_session=True, bufsize=0,
    )  # fmt: skip
    assert self._process.stdin and self._process.stdout
    self._stdin, self._stdout = self._process.stdin, self._process.stdout
    os.set_blocking(self._stdin.fileno(), False)
    os.set_blocking(self._stdout.fileno(), False)
    self._selector = selectors.DefaultSelector()
    self._selector.register(self._stdout, selectors.EVENT_READ)
    self._outgoing = b""
    self._incoming = bytearray()

  @property
  def pid(self) -> int:
    return self._process.pid

  def alive(self) -> bool:
    return self._process.poll() is None

  def wait_ready(self, timeout_s: float) -> None:
    """Waits for the worker to have loaded its grader.

    Raises:
      GraderStartError: it could not, or not in time; the worker is then gone.
    """
    try:
      message = json.loads(self._next_line(time.monotonic() + timeout_s))
      problem = message.get("error")
    except TimeoutError:
      problem = f"it was not ready within startup_timeout_s = {timeout_s:g} s"
    except (_WorkerDiedError, ValueError) as error:
      self._stderr.seek(0)
      last_words = self._stderr.read().decode(errors="replace").strip()[-2000:]
      problem = f"{error}\n{last_words}".strip()
    if problem is not None:
      self.close()
      raise GraderStartError(
        f"the grading worker for {self._grader!r} did not start: {problem}. One of your own is"
        " named 'my_module:function', importable with this process's sys.path."
      )

  def grades(
    self, lines: Sequence[bytes], timeout_s: float, slow: Callable[[], None]
  ) -> Iterator[Grade]:
    """Yields grades of the items in order, each as soon as it is known.

    Calls `slow` whenever an item has taken half its limit.

    Ends early, after a `timeout` or `crashed` grade, when an item cost the worker its life: the
    items after that one have not been graded.
    """
    self._outgoing = b"".join(lines)
    for _ in lines:
      # The worker goes from one item to the next without a pause, so an item's time starts when
      # the reply before it was seen: never before it really started.
      try:
        grade = _parse_reply(self._next_reply(timeout_s, slow))
      except TimeoutError:
        grade = Grade(Outcome.TIMEOUT, detail=f"no grade within {timeout_s:g} s")
        self.kill()
      except _WorkerDiedError as error:
        grade = Grade(Outcome.CRASHED, detail=str(error))
        self.kill()
      yield grade
      if not self.alive():
        return

  def _next_reply(self, timeout_s: float, slow: Callable[[], None]) -> bytes:
    """As `_next_line`, with the time that a grader announces to take by itself; see `deadlines`."""
    deadline = time.monotonic() + timeout_s
    last = deadline + _MAX_LONGER_S
    while (line := self._reply_or_slow(deadline, timeout_s / 2, slow)).startswith(b'{"longer_s"'):
      deadline = min(last, deadline + json.loads(line)["longer_s"])
    return line

  def _reply_or_slow(
    self, deadline: float, second_half_s: float, slow: Callable[[], None]
  ) -> bytes:
    try:
      return self._next_line(deadline - second_half_s)
    except TimeoutError:
      slow()
      return self._next_line(deadline)

  def _next_line(self, deadline: float) -> bytes:
    """Waits for a line, sending what there is to send meanwhile.

    Raises:
      TimeoutError: the deadline has passed and nothing lies in the pipe.
      _WorkerDiedError: the process has ended, or has sent a line beyond any limit.
    """
    while (end := self._incoming.find(b"\n")) < 0:
      if len(self._incoming) > _MAX_REPLY:
        raise _WorkerDiedError(f"the grader's process sent a reply of over {_MAX_REPLY} bytes")
      self._watch_stdin(bool(self._outgoing))
      ready = self._selector.select(max(0.0, deadline - time.monotonic()))
      if not ready:
        raise TimeoutError
      for key, _ in ready:
        if key.fileobj is self._stdin:
          self._send_some()
        else:
          self._receive_some()
    line = bytes(self._incoming[:end])
    del self._incoming[: end + 1]
    return line

  def _watch_stdin(self, watch: bool) -> None:
    watched = self._stdin in self._selector.get_map()
    if watch and not watched:
      self._selector.register(self._stdin, selectors.EVENT_WRITE)
    elif watched and not watch:
      self._selector.unregister(self._stdin)

  def _send_some(self) -> None:
    try:
      sent = os.write(self._stdin.fileno(), self._outgoing[:65536])
    except BlockingIOError:
      return
    except BrokenPipeError:
      sent = len(self._outgoing)  # it has died, or is about to: reading will tell
    self._outgoing = self._outgoing[sent:]

  def _receive_some(self) -> None:
    data = os.read(self._stdout.fileno(), 65536)
    if not data:
      self.kill()
      raise _WorkerDiedError(f"the grader's process ended: {_exit_reason(self._process)}")
    self._incoming += data

  def kill(self) -> None:
    """Kills the worker's whole process group; safe at any time, from any thread."""
    if self._process.returncode is None:  # not yet reaped, so the number is still its own
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self._process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(_KILL_WAIT_S)

  def close(self) -> None:
    """Kills the worker and gives back its pipes."""
    self.kill()
    self._selector.close()
    for stream in (self._stdin, self._stdout, self._stderr):
      stream.close()


def _exit_reason(process: subprocess.Popen) -> str:
  code = process.returncode
  if code is None:
    return "still running"
  if code < 0:
    return f"signal {signal.Signals(-code).name}"
  return f"exit status {code}"


def _parse_reply(line: bytes) -> Grade:
  try:
    reply = json.loads(line)
    texts = str(reply["detail"]), str(reply["answer"])
    return Grade(Outcome(reply["outcome"]), float(reply["score"]), *texts)
  except (ValueError, KeyError, TypeError) as error:
    raise _WorkerDiedError(f"the grader's process sent a broken reply {line[:200]!r}") from error


class GraderPool:
  """Grades completions in separate processes, each item under a wall-clock limit.

  A worker that exceeds the limit is killed with its whole process group and replaced, and its item
  is graded `timeout`; a worker that dies is replaced, and its item is `crashed`. An exception in
  the grader, or a return value that is no grade, is `crashed` too and costs no worker. Workers are
  fresh interpreters (never forks of this process), without jax. They end when this process does.
  A worker's successor is started when an item has taken half its limit, so that the others need not
  wait for it to load its grader. It stays ready where that item ends in time after all.

  Args:
    grader: string of a grader, "name(keyword=value)" or "my_module:function"; see `by_name`.
    num_workers: processes.
    timeout_s: wall-clock limit per item, seconds; on top of it comes what a grader announces that
      ends its work by itself (`deadlines`), as that of programs does.
    startup_timeout_s: limit for a worker to start and load the grader, seconds.
    memory_mib: limit on each worker's address space, MiB; None for no limit.
    environment: variables added to the workers' environment.
    preload: strings of further graders that each worker loads and tests at its start: those
      that only references name (see `combined`), which else do so in an item's time.
    on_grade: called by a thread of the pool at every grade: a sign that grading goes on.
  Raises:
    ValueError: an argument out of range, an unknown grader, or an environment that is not text.
    GraderStartError: the grader cannot be loaded, or its self-test fails.
  """

  def __init__(
    self,
    grader: str,
    *,
    num_workers: int = 1,
    timeout_s: float = 5.0,
    startup_timeout_s: float = 60.0,
    memory_mib: int | None = None,
    environment: Mapping[str, str] = _NOTHING,
    preload: Sequence[str] = (),
    on_grade: Callable[[], None] = lambda: None,
  ):
    _check_arguments(num_workers, timeout_s, startup_timeout_s, memory_mib)
    _check_environment(environment)
    for text in (grader, *preload):
      checked_grader("grader", text)
    self._settings = {
      "grader": grader, "timeout_s": timeout_s, "memory_mib": memory_mib, "preload": [*preload],
    }  # fmt: skip
    self._environment = dict(environment)
    self._on_grade = on_grade
    self._timeout_s = timeout_s
    self._startup_timeout_s = startup_timeout_s
    self._changed = threading.Condition()  # guards everything below
    self._queue: collections.deque[_Item] = collections.deque()
    self._in_progress: set[GradingFuture] = set()
    self._failure: Exception | None = None
    self._workers = [_Worker(self._settings, self._environment) for _ in range(num_workers)]
    self._successors: dict[int, _Worker] = {}  # by slot
    try:
      for worker in self._workers:
        worker.wait_ready(startup_timeout_s)
    except BaseException:
      for worker in self._workers:
        worker.close()
      raise
    self._threads = [
      threading.Thread(target=self._dispatch, args=(slot,), name=f"grading-{slot}", daemon=True)
      for slot in range(num_workers)
    ]
    for thread in self._threads:
      thread.start()

  def submit(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> GradingFuture:
    """Hands over completions to grade and returns at once.

    Args:
      completions: texts.
      references: what the grader needs to judge each one; JSON-able.
    Returns:
      A future of the grades, in the order of the completions.
    Raises:
      ValueError: the two differ in length.
      TypeError: a reference that JSON cannot hold.
      RuntimeError: the pool is closed, or has failed.
    """
    if len(completions) != len(references):
      raise ValueError(f"{len(completions)} completions but {len(references)} references")
    lines = [_request(*pair) for pair in zip(completions, references, strict=True)]
    with self._changed:
      if self._failure is not None:
        raise self._failure
      # Each item, ahead of us, in progress or ours, costs at most its limit and a new worker.
      waiting = len(self._queue) + len(lines) + _MAX_CHUNK * len(self._workers)
      item_s = self._timeout_s + _MAX_LONGER_S + self._startup_timeout_s
      future = GradingFuture(len(lines), waiting * item_s)
      if lines:
        self._in_progress.add(future)
        self._queue.extend(_Item(future, position, line) for position, line in enumerate(lines))
        self._changed.notify_all()
    return future

  def grade(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> list[Grade]:
    """Grades completions and waits for it; see `submit`."""
    return self.submit(completions, references).result()

  def worker_pids(self) -> list[int]:
    """Process ids of the present workers; each is the leader of its own session."""
    with self._changed:
      return [worker.pid for worker in self._workers]

  def close(self) -> None:
    """Kills the workers; grades still missing fail their future. Closing twice is harmless."""
    self._fail(RuntimeError("the grader pool is closed"))
    for thread in self._threads:
      thread.join(_KILL_WAIT_S)
    for worker in self._all():
      worker.close()

  def __enter__(self) -> GraderPool:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _all(self) -> list[_Worker]:
    return [*self._workers, *self._successors.values()]

  def _fail(self, error: Exception) -> None:
    """Ends the pool: no more grading, every dispatcher thread returns."""
    with self._changed:
      self._failure = self._failure or error
      self._queue.clear()
      futures, self._in_progress = self._in_progress, set()
      for worker in self._all():
        worker.kill()  # its thread sees the end of the pipe
      self._changed.notify_all()
    for future in futures:
      future.fail(self._failure)

  def _dispatch(self, slot: int) -> None:
    """The life of a thread: feeds one worker, and replaces it when it is gone."""
    try:
      while (items := self._take(slot)) is not None:
        lines, slow = [item.line for item in items], functools.partial(self._prepare, slot)
        grades = self._workers[slot].grades(lines, self._timeout_s, slow)
        graded = 0
        for item, grade in zip(items, grades, strict=False):
          graded += 1
          self._deliver(item, grade)
        with self._changed:
          if self._failure is None:
            self._queue.extendleft(reversed(items[graded:]))
            self._changed.notify_all()
    except Exception as error:  # else those who wait for a result would wait for ever
      self._fail(error)

  def _take(self, slot: int) -> list[_Item] | None:
    """Waits for items and a living worker; None when the pool has ended."""
    with self._changed:
      while not self._queue and self._failure is None:
        self._changed.wait()
    if not self._workers[slot].alive():
      self._replace(slot)
    with self._changed:
      if self._failure is not None:
        return None
      # A share of what is left, so that no worker sits on slow items while others are idle.
      share = math.ceil(len(self._queue) / (2 * len(self._workers)))
      return [self._queue.popleft() for _ in range(min(share, _MAX_CHUNK))]

  def _prepare(self, slot: int) -> None:
    """Starts the successor of a worker, if it has none."""
    with self._changed:
      if self._failure is None and slot not in self._successors:
        self._successors[slot] = _Worker(self._settings, self._environment)

  def _replace(self, slot: int) -> None:
    with self._changed:
      if self._failure is not None:
        return
      self._workers[slot].close()
      successor = self._successors.pop(slot, None)
      if successor is None or not successor.alive():
        if successor is not None:
          successor.close()
        successor = _Worker(self._settings, self._environment)
      self._workers[slot] = successor
    self._workers[slot].wait_ready(self._startup_timeout_s)

  def _deliver(self, item: _Item, grade: Grade) -> None:
    self._on_grade()
    item.future.deliver(item.position, grade)
    if item.future.done():
      with self._changed:
        self._in_progress.discard(item.future)


def _request(completion: str, reference: Mapping[str, Any]) -> bytes:
  try:
    return json.dumps({"completion": completion, "reference": reference}).encode() + b"\n"
  except (TypeError, ValueError) as error:
    raise TypeError(
      f"a grader's reference must be JSON-able ({error}): {reference!r:.300}"
    ) from error


def _check_environment(environment: Mapping[str, str]) -> None:
  for name, value in environment.items():
    texts = isinstance(name, str) and isinstance(value, str)
    if not texts or not name or "=" in name or "\0" in name + value:
      raise ValueError(
        f"environment has {name!r}: {value!r}, expected a name without '=' and a text, such as "
        "{'NAME': '1'}"
      )


def _check_arguments(
  num_workers: int, timeout_s: float, startup_timeout_s: float, memory_mib: int | None
) -> None:
  if num_workers < 1:
    raise ValueError(f"num_workers is {num_workers}, must be at least 1")
  for name, value in (("timeout_s", timeout_s), ("startup_timeout_s", startup_timeout_s)):
    if not (math.isfinite(value) and value > 0):
      raise ValueError(f"{name} is {value}, must be a positive, finite number of seconds")
  if memory_mib is not None and memory_mib < 1:
    raise ValueError(f"memory_mib is {memory_mib}, must be at least 1, or None for no limit")
