"""A worker: reads and writes lines of JSON, has many sessions, runs one of them at a time.

A pool starts a worker with its settings as the argument. The worker first writes {"ready": value of
`Program.ready`} or {"error": text}. Requests name a session by its number: {"session", "request"},
or {"session", "close"} for a session that is no longer needed. For a request the worker reports
{"event": "running"} when the program's code starts, and {"event": "result"} at its end. The result
has the fields "reply" and "ends" (whether the reply is the session's last), or the field "failure":
[kind, detail]. A session that has ended is closed in a separate step, so that an error in its
`close` cannot replace the result; then the worker reports "closed". When the code waits
(`waiting`), the worker reports "waiting" with "limit_s", then "waited", then "running" again. While
the code waits, other sessions run. {"event": "ask", "question"} asks the pool, which answers
{"session", "answer"} or {"session", "error"}. The worker ends when its stdin does. It never loads
jax.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import functools
import importlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeAlias, TypeVar

MAX_DETAIL = 1000  # the most characters of a failure's detail
MEMORY_STATUS = 77  # exit status if the memory is used up outside of a program's code
# An environment variable that marks all processes which a worker has started: a process may begin
# its own OS session (setsid), or outlive the worker.
MARK = "RLVR_JAX_WORKER"
_MARGIN_S = 1.0  # seconds from a limit until a worker ends by itself, unless its parent kills it
_MAX_THREADS = 32  # largest number of threads: one request runs, the other requests wait
_EXECUTION_S = 1.0  # longest wait, in seconds, until a new process has its environment variables
_STACK_BYTES = 4 * 2**20  # stack of a thread; stacks count as address space, which may be limited

Result = TypeVar("Result")
Message: TypeAlias = dict[str, Any]  # a line of JSON; its fields depend on the kind of message
# (session, question, seconds to wait) → the pool's answer; RuntimeError if the pool has none.
Ask: TypeAlias = Callable[[int, object, float], Any]

# Messages with tests of programs may have integers as long as LiveCodeBench allows.
sys.set_int_max_str_digits(50_000)


class Stopped(Exception):
  """Raised by a program if a request fails, but the program is not at fault."""

  kind = "failed"


class Program(Protocol):
  """The program of a worker, made once per worker; may have `close(session)` for ended sessions.

  Attributes:
    ready: a JSON value about the program, which the pool gets at the start.
  """

  ready: object

  def answer(self, session: int, request: Any) -> tuple[object, bool]:
    """Answers a request; returns (JSON-serializable reply, whether it is the session's last)."""


# --- for code that runs in a worker ---------------------------------------------------------------


@contextlib.contextmanager
def _wait_alone(limit_s: float) -> Iterator[None]:
  del limit_s
  yield


_waiter: contextvars.ContextVar[Callable[[float], AbstractContextManager[None]]]
_waiter = contextvars.ContextVar("waiter", default=_wait_alone)


def waiting(limit_s: float) -> AbstractContextManager[None]:
  """Context in which a request waits, for example for a server, while other requests run.

  A worker runs the code of one request at a time, under the pool's limit of wall-clock time. Code
  in this context, such as reading from a socket, runs beside the code of other requests and has its
  own limit instead.

  Args:
    limit_s: wall-clock seconds after which the request counts as timed out.
  Raises:
    ValueError: `limit_s` is not positive and finite.
  """
  if not 0 < limit_s < float("inf"):
    raise ValueError(f"waiting: limit_s = {limit_s!r} is not a number in (0, inf)")
  return _waiter.get()(limit_s)


class _MainThread:
  """Makes calls for other threads in the main thread."""

  def __init__(self) -> None:
    self._calls: queue.SimpleQueue[tuple[Future[Any], contextvars.Context, Callable[[], Any]]]
    self._calls = queue.SimpleQueue()
    self._free = threading.Semaphore(0)  # `serve` sets it to 1

  def call(self, function: Callable[[], Result]) -> Result:
    if not self._free.acquire(blocking=False):  # `serve` does not run, or its present call waits
      return function()
    try:
      future: Future[Result] = Future()
      self._calls.put((future, contextvars.copy_context(), function))
      return future.result()
    finally:
      self._free.release()

  def serve(self, begin: Callable[[], None]) -> None:
    """Makes other threads' calls in this thread, forever; `begin` starts these threads."""
    self._free.release()
    begin()
    while True:
      future, context, function = self._calls.get()
      try:
        future.set_result(context.run(function))
      except BaseException as error:
        future.set_exception(error)
      del future, context, function


_main_thread = _MainThread()


def on_main_thread(function: Callable[[], Result]) -> Result:
  """Makes a call in the worker's main thread, which may set signal handlers; returns its result.

  If the main thread is in a call that waits (`waiting`), or if this process is no worker, the
  calling thread makes the call itself.
  """
  return _main_thread.call(function)


# --- the worker -----------------------------------------------------------------------------------


def _describe(error: BaseException) -> str:
  """The error in one line, with the line of the program that raised it."""
  frames = traceback.extract_tb(error.__traceback__)
  position = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
  return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_DETAIL]}{position}"


class _Channel:
  """Sends lines to the pool and gets its answers, in any thread."""

  def __init__(self, stream: BinaryIO):
    self._stream = stream
    self._lock = threading.Lock()
    self._answers: dict[int, queue.SimpleQueue[Message]] = {}  # queues of answers, by session

  def send(self, message: Message) -> None:
    line = json.dumps(message).encode() + b"\n"
    with self._lock:
      self._stream.write(line)
      self._stream.flush()

  def ask(self, session: int, question: object, limit_s: float) -> Any:
    """The pool's answer to a question of a session's request; see `Ask`."""
    answers = self._answers[session] = queue.SimpleQueue()
    with waiting(limit_s):
      self.send({"event": "ask", "session": session, "question": question})
      message = answers.get(timeout=limit_s)
    del self._answers[session]
    if "error" in message:
      raise RuntimeError(message["error"])
    return message["answer"]

  def take_answer(self, message: Message) -> None:
    """Hands an answer of the pool to the request that waits for it."""
    if answers := self._answers.get(message["session"]):
      answers.put(message)


class _Worker:
  """The requests of this process, and the threads that run them, one at a time."""

  def __init__(self, program: Program, channel: _Channel, limit_s: float, has_memory_limit: bool):
    self._program = program
    self._channel = channel
    self._limit_s = limit_s
    self._has_memory_limit = has_memory_limit
    self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
    self._core = threading.Lock()  # held while a program's code runs
    # A thread changes the next two while it holds `_core`.
    self._num_threads = 0
    self._num_waiting = 0
    self._start_thread()

  def receive(self, lines: Iterable[bytes]) -> None:
    """Handles the pool's messages, in a thread; when stdin ends, kills the worker's processes."""
    try:
      for line in lines:
        message = json.loads(line)
        if "request" in message or "close" in message:
          self._requests.put(message)
        else:
          self._channel.take_answer(message)
    except MemoryError:
      os._exit(MEMORY_STATUS)
    kill(find_processes(os.environ.get(MARK, "")) - {os.getpid()})
    os.killpg(0, signal.SIGKILL)

  def _start_thread(self) -> None:
    """Starts one more thread if all threads wait."""
    if self._num_threads <= min(self._num_waiting, _MAX_THREADS - 1):
      threading.Thread(target=self._serve, daemon=True).start()
      self._num_threads += 1

  def _serve(self) -> None:
    """Answers requests; runs in each of the threads."""
    try:
      while True:
        message = self._requests.get()
        session = message["session"]
        _waiter.set(functools.partial(self._wait, session))
        self._enter_core(session)
        if "close" in message:
          self._close(session)
          self._leave_core({"event": "closed", "session": session})
          continue
        result = self._answer(session, message["request"])
        if result.get("ends", True) and hasattr(self._program, "close"):
          self._requests.put({"session": session, "close": True})
        self._leave_core({"event": "result", "session": session, **result})
    except MemoryError:
      os._exit(MEMORY_STATUS)
    except BaseException:
      os._exit(1)

  def _enter_core(self, session: int) -> None:
    self._core.acquire()
    # The pool kills a worker at the limit. If the pool is dead, `faulthandler` ends the worker: its
    # C thread needs no interpreter lock, so neither a sleeping nor a spinning program delays it.
    try:
      faulthandler.dump_traceback_later(self._limit_s + _MARGIN_S, file=2, exit=True)
    except RuntimeError:  # there is no memory for the stack of that thread
      os._exit(MEMORY_STATUS)
    self._channel.send({"event": "running", "session": session})

  def _leave_core(self, message: Message) -> None:
    faulthandler.cancel_dump_traceback_later()
    self._channel.send(message)  # before the next session is reported to run
    self._core.release()

  @contextlib.contextmanager
  def _wait(self, session: int, limit_s: float) -> Iterator[None]:
    """The context `waiting` in a request's thread: lets other requests run."""
    self._num_waiting += 1
    with contextlib.suppress(RuntimeError):  # there is no memory for one more thread
      self._start_thread()
    self._leave_core({"event": "waiting", "session": session, "limit_s": float(limit_s)})
    try:
      yield
    finally:
      self._channel.send({"event": "waited", "session": session})
      self._enter_core(session)
      self._num_waiting -= 1

  def _answer(self, session: int, request: object) -> Message:
    """Runs the program's code; returns the result."""
    try:
      reply, ends = self._program.answer(session, request)
      return {"reply": reply, "ends": ends}
    except Stopped as error:
      kind, detail = error.kind, str(error)
    except MemoryError as error:
      # If this process has no limit, the machine's memory is used up.
      kind = "memory" if self._has_memory_limit else "failed"
      detail = _describe(error)
    except BaseException as error:  # sys.exit() in a program is also a failure of the program
      kind, detail = "failed", _describe(error)
    return {"failure": [kind, detail.encode(errors="replace").decode()[:MAX_DETAIL]]}

  def _close(self, session: int) -> None:
    with contextlib.suppress(BaseException):  # no request waits for the close
      self._program.close(session)  # type: ignore[attr-defined]


def main() -> None:
  """Runs a worker."""
  settings = json.loads(sys.argv[1])
  requests, channel = _protect_streams()
  try:
    limit_memory(settings["memory_mib"])
    module, _, name = settings["program"].partition(":")
    program = getattr(importlib.import_module(module), name)(channel.ask, **settings["arguments"])
  except ValueError as error:
    channel.send({"error": str(error)})
    return
  except BaseException as error:
    channel.send({"error": _describe(error)})
    return
  # Until here the pool reads errors from stderr; from here on all other output is discarded.
  os.dup2(1, 2)
  channel.send({"ready": program.ready})
  threading.stack_size(_STACK_BYTES)
  worker = _Worker(program, channel, settings["limit_s"], settings["memory_mib"] is not None)
  _main_thread.serve(threading.Thread(target=worker.receive, args=(requests,), daemon=True).start)


def _protect_streams() -> tuple[BinaryIO, _Channel]:
  """Duplicates stdin and stdout for the protocol, and redirects the originals to /dev/null."""
  requests = os.fdopen(os.dup(0), "rb")
  replies = os.fdopen(os.dup(1), "wb")
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  return requests, _Channel(replies)


def limit_memory(memory_mib: int | None) -> None:
  """Limits this process's address space; None sets no limit.

  Raises:
    MemoryError: the process already takes more than the limit.
  """
  if memory_mib is None:
    return
  limit = memory_mib * 2**20
  with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
    if taken >= limit:
      raise MemoryError(
        f"the process takes {taken / 2**20:.0f} MiB of address space before its first request"
      )
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# --- processes that belong to a worker ------------------------------------------------------------


def find_processes(mark: str) -> set[int]:
  """The processes that have a worker's mark, or descend from such a process.

  Just after `exec`, a process shows no environment variables for a moment, and its parent may have
  ended. So the search is repeated while any process is in that state, for at most `_EXECUTION_S`.
  """
  deadline = time.monotonic() + _EXECUTION_S
  while True:
    processes = list(_read_processes())
    if not any(is_being_executed(x.stat, x.variables) for x in processes):
      break
    if time.monotonic() > deadline:
      break
    time.sleep(0.001)
  marked = f"{MARK}={mark}".encode()
  found = {x.pid for x in processes if x.variables and marked in x.variables.split(b"\0")}
  while more := {x.pid for x in processes if int(x.stat[1]) in found} - found:
    found |= more
  return found


class _Process(NamedTuple):
  """A process of this machine."""

  pid: int
  stat: list[bytes]  # fields of /proc/PID/stat after the name: state, parent's id, …
  variables: bytes | None  # /proc/PID/environ, read after `stat`; None: another user's process


def _read_processes() -> Iterator[_Process]:
  for entry in filter(str.isdigit, os.listdir("/proc")):
    variables = None
    with contextlib.suppress(OSError):  # the process has ended
      with open(f"/proc/{entry}/stat", "rb") as file:
        stat = file.read().rpartition(b")")[2].split()
      with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
        variables = file.read()
      yield _Process(int(entry), stat, variables)


def is_being_executed(stat: Sequence[bytes], variables: bytes | None) -> bool:
  """Whether a process is within `exec`: it does not show its new environment variables yet.

  Args:
    stat, variables: as in `_Process`.
  Source: proc_pid_stat(5): the fields vsize, env_start and env_end.
  """
  if variables is None or variables or len(stat) < 49:
    return False
  size, start, end = int(stat[20]), int(stat[47]), int(stat[48])
  was_started_without = start == end > 0
  return size > 0 and not was_started_without  # threads of the kernel and zombies have no memory


def kill(pids: Iterable[int]) -> None:
  """Kills processes; ignores processes that have ended."""
  for pid in pids:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.kill(pid, signal.SIGKILL)
