"""The pool's side of one worker: its process, pipes and sessions, and the time of requests."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar

from rlvr_jax.workers.worker import MARK, MEMORY_STATUS, Message, find_processes, kill

KILL_WAIT_S = 5.0  # time for the kernel to end a process after SIGKILL
DIED = "its process ended"
_MAX_LINE = 16 * 2**20  # bytes; a worker's lines are shorter, although JSON may write a byte as 6
_PART = 2**16  # bytes that are sent or received at a time
_LAST_OUTPUT = 2000  # characters of the output of a worker that did not start
# Requests that a worker has at a time: as many as its threads, enough to hide the round trip.
_MAX_SENT = 32
_MAX_SENT_BYTES = 16 * 2**20
# Signals that end a process if a text overloads its C libraries: their stack overflows, or an
# allocation fails.
_CAUSED_BY_TEXT = (-signal.SIGSEGV, -signal.SIGABRT)
_SINGLE_THREADED = dict.fromkeys(
  ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS",
   "VECLIB_MAXIMUM_THREADS"), "1",
)  # fmt: skip
_numbers = itertools.count()  # numbers of sessions
_START = "from rlvr_jax.workers.worker import main; main()"

Result = TypeVar("Result")
# (context of a session, question of its program) → a future of the answer, JSON
Answer: TypeAlias = Callable[[Any, Any], "Future[Any]"]


class StartError(RuntimeError):
  """A worker could not be started, or workers end again and again."""


class Service(NamedTuple):
  """The program of a pool's workers, and its limits.

  Attributes:
    name: the name in messages, such as "the grading worker for 'gsm8k'".
    program: "module:factory" of a `worker.Program`.
    arguments: the arguments of the factory, keywords; JSON-serializable.
    limit_s: wall-clock limit of a request, seconds. `worker.waiting` has limits of its own.
    startup_timeout_s: limit for a worker to start and make its program, seconds.
    memory_mib: limit on each worker's address space, MiB; None for no limit.
    variables: environment variables that are added for the workers.
    memory_field: the field to increase, for messages about too little memory.
    start_error: class of the error if a worker cannot be started.
    answer: answers the questions of programs (`worker.Ask`).
  """

  name: str
  program: str
  arguments: Mapping[str, object]
  limit_s: float
  startup_timeout_s: float
  memory_mib: int | None
  variables: Mapping[str, str]
  memory_field: str = "memory_mib"
  start_error: type[StartError] = StartError
  answer: Answer | None = None


class BrokenWorkerError(Exception):
  """A worker has ended, or broke the protocol."""


class _Child(NamedTuple):
  """A worker's process with its streams."""

  process: subprocess.Popen[bytes]
  stdin: IO[bytes]
  stdout: IO[bytes]
  stderr: IO[bytes]  # a file, read if the worker fails to start
  mark: str  # value of the environment variable `MARK`


class WorkerProcess:
  """One worker, used by one thread at a time.

  Only `kill` and the methods that call it wait: for the end of the process. Workers are new
  interpreters, never forks, and each leads its own OS session (setsid).

  Attributes:
    sessions: the sessions in this worker, by number.
    clock: the time and limits of the worker's requests.
  """

  def __init__(self, service: Service):
    self._service = service
    self._child = _start(service)
    self._outgoing = bytearray()
    self._incoming = bytearray()
    self.sessions: dict[int, Session] = {}
    self.clock = Clock(service.limit_s)
    self._sent_bytes: dict[int, int] = {}  # session → bytes of its unanswered request
    self._startup_limit: float | None = time.monotonic() + service.startup_timeout_s

  @property
  def pid(self) -> int:
    return self._child.process.pid

  @property
  def stdin(self) -> IO[bytes]:
    return self._child.stdin

  @property
  def stdout(self) -> IO[bytes]:
    return self._child.stdout

  @property
  def has_output(self) -> bool:
    """Whether lines wait to be sent."""
    return bool(self._outgoing)

  @property
  def is_ready(self) -> bool:
    """Whether the worker has made its program."""
    return self._startup_limit is None

  def set_ready(self) -> None:
    """Notes that the worker has reported that it is ready."""
    self._startup_limit = None

  def is_alive(self) -> bool:
    return self._child.process.poll() is None

  def has_room(self, share: int) -> bool:
    """Whether the worker should get one more request.

    True if the worker is ready, not full, and has fewer than `share` requests that do not wait.
    """
    num_sent = len(self._sent_bytes)
    if not self.is_ready or num_sent >= _MAX_SENT:
      return False
    is_large = sum(self._sent_bytes.values()) > _MAX_SENT_BYTES
    return not is_large and num_sent - self.clock.num_waiting < share

  def next_limit(self) -> tuple[float, int | None]:
    """The next time limit, and the session to which it applies, if any."""
    return self.clock.next_limit() if self._startup_limit is None else (self._startup_limit, None)

  # --- lines

  def send(self, line: bytes) -> None:
    """Queues a line; `flush` sends it."""
    self._outgoing += line

  def send_request(self, number: int, line: bytes) -> None:
    """Queues a session's request."""
    self._sent_bytes[number] = len(line)
    self.send(line)

  def end_request(self, number: int) -> None:
    """Notes that the worker has answered a session's request."""
    self._sent_bytes.pop(number, None)

  def flush(self) -> None:
    """Sends as many bytes as the pipe takes now."""
    try:
      del self._outgoing[: os.write(self.stdin.fileno(), self._outgoing[:_PART])]
    except BlockingIOError:
      pass
    except BrokenPipeError:
      self._outgoing.clear()  # the worker has died or is dying; reading will report it

  def receive(self) -> Iterator[Message]:
    """Reads all available output and yields the complete lines.

    Raises:
      BrokenWorkerError: the worker has ended, or has violated the protocol. Earlier lines are
        yielded first: they say which session was running, and so which one caused the error.
    """
    try:
      data = os.read(self.stdout.fileno(), _PART)
    except BlockingIOError:
      return
    if not data:
      self.kill()
      raise BrokenWorkerError(f"{DIED}: {_describe_exit(self._child.process)}")
    self._incoming += data
    *lines, rest = self._incoming.split(b"\n") if b"\n" in data else [self._incoming]
    self._incoming = rest
    for line in lines:
      try:
        message = json.loads(line)
      except ValueError as error:
        raise BrokenWorkerError("its process sent a line that is not JSON") from error
      yield message
    if len(rest) > _MAX_LINE:
      raise BrokenWorkerError(f"its process sent a line of over {_MAX_LINE} bytes")

  # --- its end

  def ended_by_text(self) -> bool:
    """Whether the process's exit status is one that the text of a request can cause."""
    status = self._child.process.returncode
    has_limit = self._service.memory_mib is not None
    return status in _CAUSED_BY_TEXT or (has_limit and status == MEMORY_STATUS)

  def last_output(self) -> str:
    """The last output of a worker that did not start."""
    self._child.stderr.seek(0)
    return self._child.stderr.read().decode(errors="replace").strip()[-_LAST_OUTPUT:]

  def kill(self) -> None:
    """Kills the worker and all processes that it has started."""
    process = self._child.process
    started = find_processes(self._child.mark)
    if process.returncode is None:  # not yet reaped, so its id has not been reused
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    kill(started - {process.pid})
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(KILL_WAIT_S)

  def close(self) -> None:
    """Kills the worker and closes its pipes."""
    self.kill()
    for stream in (self.stdin, self.stdout, self._child.stderr):
      stream.close()


def _start(service: Service) -> _Child:
  """Starts a worker, with unbuffered pipes that do not block."""
  # With our sys.path, the worker imports a user's module exactly as this process would. The fixed
  # hash seed gives code that iterates over sets the same result every time.
  path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  mark = uuid.uuid4().hex
  # With more arenas, each thread would reserve address space of its own, which is limited.
  variables = {"MALLOC_ARENA_MAX": "1", **_SINGLE_THREADED, **service.variables}
  fixed_variables = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", MARK: mark}
  settings = {
    "program": service.program, "arguments": service.arguments, "limit_s": service.limit_s,
    "memory_mib": service.memory_mib,
  }  # fmt: skip
  stderr = tempfile.TemporaryFile()
  process = subprocess.Popen(
    [sys.executable, "-P", "-c", _START, json.dumps(settings)],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
    env=os.environ | variables | fixed_variables, start_new_session=True, bufsize=0,
  )  # fmt: skip
  assert process.stdin and process.stdout
  os.set_blocking(process.stdin.fileno(), False)
  os.set_blocking(process.stdout.fileno(), False)
  return _Child(process, process.stdin, process.stdout, stderr, mark)


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
  """How a process ended, such as "signal SIGKILL" or "exit status 3"."""
  code = process.returncode
  if code is None:
    return "still running"
  if code < 0:
    return f"signal {signal.Signals(-code).name}"
  return f"exit status {code}"


# --- sessions -------------------------------------------------------------------------------------


class _Exchange(NamedTuple):
  """A request that was answered."""

  line: bytes
  digest: bytes  # digest of the reply


class _Pending(NamedTuple):
  """A request without a reply."""

  line: bytes
  future: Future[Any]
  convert: Callable[[Any], Any]


class Session:
  """Requests that one process answers in order, and how many it has answered.

  If the process ends, another process repeats the session, and each reply has to be the same.

  Args:
    context: data for the pool's `answer`, which stays in this process.
  """

  def __init__(self, context: object = None):
    self.number = next(_numbers)
    self.context = context
    self.worker: WorkerProcess | None = None
    self.pending: _Pending | None = None
    self.has_ended = False
    self._past: list[_Exchange] = []
    self._position = 0  # number of earlier requests that this worker has answered
    self.answers: dict[str, object] = {}  # answers by question, so that each is asked once

  def add(self, line: bytes, future: Future[Result], convert: Callable[[Any], Result]) -> None:
    """Adds the next request."""
    self.pending = _Pending(line, future, convert)

  def enter(self, worker: WorkerProcess) -> None:
    """Continues the session in a new worker, from its first request."""
    self.worker = worker
    worker.sessions[self.number] = self

  def leave_worker(self) -> None:
    """Notes that the worker of the session has ended."""
    self.worker = None
    self._position = 0

  @property
  def repeats(self) -> bool:
    """Whether an earlier request is being repeated, so that the pending one was not run."""
    return self._position < len(self._past)

  def send_next(self) -> None:
    """Sends the pending request, or an earlier request that has to be repeated first."""
    if self.worker is not None and self.pending is not None:
      line = self._past[self._position].line if self.repeats else self.pending.line
      self.worker.send_request(self.number, line)

  def take_reply(self, reply: object, *, ends: bool) -> _Pending | None:
    """Takes a reply; returns the request that it answers, or None for a repeated request.

    Args:
      reply: JSON.
      ends: whether the reply is the session's last; a last reply is not kept for repetition.
    Raises:
      ValueError: a repeated reply differs from the recorded reply.
    """
    if ends and self._position == len(self._past):
      pending, self.pending = self.pending, None
      return pending
    digest = hashlib.sha256(json.dumps(reply, sort_keys=True).encode()).digest()
    self._position += 1
    if self._position <= len(self._past):
      if digest != self._past[self._position - 1].digest:
        raise ValueError(
          "it is not deterministic: its process had ended, another process repeated the dialogue,"
          f" and the reply to turn {self._position - 1} differed; let replies depend only on"
          " problem, seed and texts"
        )
      return None
    pending, self.pending = self.pending, None
    if pending is not None:
      self._past.append(_Exchange(pending.line, digest))
    return pending

  def end(self) -> Future[Any] | None:
    """Ends the session; returns the future of its pending request."""
    self.has_ended = True
    if self.worker is not None:
      self.worker.sessions.pop(self.number, None)
    pending, self.pending = self.pending, None
    return None if pending is None else pending.future


# --- time -----------------------------------------------------------------------------------------


class Clock:
  """The time that the requests of one worker take, and their limits; seconds of `time.monotonic`.

  One session runs at a time. The time in which a session waits (`worker.waiting`) has a separate
  limit. The time in which a session waits for its turn to run has no limit.
  """

  def __init__(self, limit_s: float):
    self._limit_s = limit_s
    self._running: tuple[int, float] | None = None  # the session that runs, and since when
    self._used_s: dict[int, float] = {}  # seconds that requests in progress have run, by session
    self._waiting: dict[int, float] = {}  # session → the time at which the limit of its wait passes

  @property
  def running(self) -> int | None:
    """The session that runs; None if no session runs."""
    return None if self._running is None else self._running[0]

  @property
  def num_waiting(self) -> int:
    """Number of sessions that wait."""
    return len(self._waiting)

  def update(self, event: str, session: int, limit_s: float, now: float) -> None:
    """Takes an event that the worker reports; `limit_s` is the limit of a wait.

    Raises:
      ValueError: the event names a session that is not running.
    """
    match event:
      case "running":
        self._running = (session, now)
      case "waiting":
        self._stop(session, now)
        self._waiting[session] = now + limit_s
      case "waited":
        self._waiting.pop(session, None)
      case "result" | "closed":
        self._stop(session, now)
        del self._used_s[session]

  def _stop(self, session: int, now: float) -> None:
    if self.running != session or self._running is None:
      raise ValueError(f"an event names session {session}, which is not running")
    self._used_s[session] = self._used_s.get(session, 0.0) + now - self._running[1]
    self._running = None

  def next_limit(self) -> tuple[float, int | None]:
    """(time of the earliest limit, its session); (∞, None) if no session runs or waits."""
    limits = [(limit, session) for session, limit in self._waiting.items()]
    if self._running is not None:
      session, since = self._running
      limits.append((since + self._limit_s - self._used_s.get(session, 0.0), session))
    return min(limits, default=(math.inf, None))

  def slow_at(self) -> float:
    """The time at which the running session has used half its limit; ∞ if no session runs."""
    if self._running is None:
      return math.inf
    session, since = self._running
    return since + self._limit_s / 2 - self._used_s.get(session, 0.0)


def check_variables(variables: Mapping[str, str], name: str) -> None:
  """Raises ValueError unless these are valid environment variables; `name` is for the message."""
  for key, value in variables.items():
    are_texts = isinstance(key, str) and isinstance(value, str)
    if not are_texts or not key or "=" in key or "\0" in key + value:
      raise ValueError(
        f"{name} has {key!r}: {value!r}; a name must be a text that is not empty and has no '=', a "
        "value must be a text, and neither may have a NUL character; write, for example, "
        "{'NAME': '1'}"
      )
