"""A pool of worker processes: requests with time limits, and sessions that outlive a process."""

from __future__ import annotations

import collections
import functools
import json
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Self, TypeVar

from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.workers.process import (
  DIED,
  KILL_WAIT_S,
  Answer,
  BrokenWorkerError,
  Service,
  Session,
  WorkerProcess,
)
from rlvr_jax.workers.worker import MAX_DETAIL, Message

_MAX_IDLE_DEATHS = 3  # the pool ends after so many idle workers in a row have ended
_MAX_DEFAULT_WORKERS = 32  # each worker has the imports of its program in memory
_LONGEST_POLL_S = 3600.0  # poll() accepts a few weeks at most
_LONGEST_LIMIT_S = 1e9  # of a request; timers overflow at larger ones

Result = TypeVar("Result")


class Failure(NamedTuple):
  """Why a request has no reply."""

  # "timeout"; "memory": the request used up the memory; "failed": any other fault; or a kind of the
  # program's own (`worker.Stopped`)
  kind: str
  detail: str


def default_workers() -> int:
  """The number of cores that this process may use, at most 32: one worker per core."""
  if hasattr(os, "sched_getaffinity"):
    return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_WORKERS)
  return min(os.cpu_count() or 1, _MAX_DEFAULT_WORKERS)


def check_limits(
  owner: str,
  *,
  memory_mib: int | None,
  counts: Mapping[str, int],
  seconds: Mapping[str, float],
) -> None:
  """Raises ValueError, with the owner's name, if an argument of a pool is out of range."""
  for name, count in counts.items():
    check_integer(owner, name, count, low=1)
  for name, limit_s in seconds.items():
    check_between(owner, name, limit_s, low=0.0, high=_LONGEST_LIMIT_S, open_low=True)
  if memory_mib is not None:
    check_integer(owner, "memory_mib", memory_mib, low=1)


def encode(request: object) -> bytes:
  """Encodes a request for the pool; TypeError or ValueError unless it is JSON-serializable."""
  return json.dumps(request).encode()


# --- workers and their successors -----------------------------------------------------------------


class _Crew:
  """The workers of a pool, and spare workers that replace slow ones."""

  def __init__(self, service: Service, size: int):
    self.service = service
    self.workers = [WorkerProcess(service) for _ in range(size)]
    self._spares: dict[WorkerProcess, WorkerProcess] = {}  # spares by the worker to be replaced
    self._idle_deaths = 0

  def find_room(self, num_queued: int) -> WorkerProcess | None:
    """The worker that should get the next of the queued sessions: the one with the fewest sessions.

    A worker takes only a share of the queue: else its slow requests could leave other workers idle.
    """
    share = math.ceil(num_queued / (2 * len(self.workers)))
    open_ones = [worker for worker in self.workers if worker.has_room(share)]
    return min(open_ones, key=lambda worker: len(worker.sessions), default=None)

  def next_time(self) -> float:
    """The next time at which a time limit expires or a worker becomes slow."""
    limits = [worker.next_limit()[0] for worker in self.workers]
    return min(limits + [w.clock.slow_at() for w in self.workers if w not in self._spares])

  def prepare_spares(self, now: float) -> None:
    """Starts a spare for each slow worker, so that no request has to wait for the start.

    If the worker answers in time, its spare stays ready.
    """
    for worker in self.workers:
      if worker not in self._spares and worker.clock.slow_at() <= now:
        self._spares[worker] = WorkerProcess(self.service)

  def replace(self, worker: WorkerProcess) -> None:
    """Closes a worker and puts its spare in its place, or else a new worker."""
    worker.close()
    spare = self._spares.pop(worker, None)
    if spare is not None and not spare.is_alive():
      spare.close()
      spare = None
    self.workers[self.workers.index(worker)] = spare or WorkerProcess(self.service)

  def count_death(self, *, is_idle: bool) -> bool:
    """Counts the end of a worker; returns whether too many in a row ended while idle."""
    self._idle_deaths = self._idle_deaths + 1 if is_idle else 0
    return self._idle_deaths == _MAX_IDLE_DEATHS

  def count_result(self) -> None:
    """Notes a result, which resets the count of idle workers that have ended."""
    self._idle_deaths = 0

  def start_problem(self, problem: str) -> str:
    """The message about a worker that did not start."""
    memory_mib = self.service.memory_mib
    # "failed to map segment": the loader of shared libraries has run out of memory.
    is_short = problem.startswith(("MemoryError", DIED)) or "failed to map segment" in problem
    if memory_mib is not None and is_short:
      problem += (
        f" (its address space is limited to {memory_mib} MiB; if that is too little, raise"
        f" {self.service.memory_field})"
      )
    return f"{self.service.name} did not start: {problem}"

  def close(self) -> None:
    """Kills all workers."""
    for worker in (*self.workers, *self._spares.values()):
      worker.close()


class _Bell:
  """Wakes the pool's thread; any thread may ring it."""

  def __init__(self) -> None:
    self._ringing, self.woken = socket.socketpair()
    self._ringing.setblocking(False)
    self.woken.setblocking(False)

  def ring(self) -> None:
    try:
      self._ringing.send(b"!")
    except OSError:
      pass  # the bell rings already, or the thread has ended

  def silence(self) -> None:
    try:
      self.woken.recv(2**12)
    except BlockingIOError:
      pass

  def close(self) -> None:
    self._ringing.close()
    self.woken.close()


# --- the pool -------------------------------------------------------------------------------------


class Pool:
  """Answers requests in worker processes; each request has a limit of wall-clock time.

  Any thread may call the methods. The constructor waits until all workers are ready; no other
  method waits for a worker's code. A reply depends only on the requests of its session.

  A worker has many sessions and runs one at a time. If a request exceeds the limit, the pool kills
  the request's worker and all processes that this worker has started; another worker replaces it.
  The request's result is then a `Failure`. The result is also a `Failure` if the code raises an
  exception or ends the worker. A failure ends the session. If the worker has ended, its other
  sessions are repeated in other workers and continue there.

  Workers end when this process ends. If a replacement cannot be started, the pool ends, and all
  futures get the error.

  Args:
    service: the program of the workers, and its limits.
    processes: number of workers.
  Raises:
    StartError: the program cannot be made; `service.start_error` is the class of the error.
  """

  def __init__(self, service: Service, processes: int):
    self._lock = threading.RLock()  # guards everything below
    self._bell = _Bell()
    self._queue: collections.deque[Session] = collections.deque()  # sessions without a worker
    # Calls to make without the lock, since they may call the pool themselves.
    self._later: collections.deque[Callable[[], None]] = collections.deque()
    self._failure: Exception | None = None
    self._ready: Future[Any] = Future()
    self._crew = _Crew(service, processes)
    self._thread = threading.Thread(target=self._run, name=service.program, daemon=True)
    self._thread.start()
    try:
      self._ready.result(service.startup_timeout_s + KILL_WAIT_S)
    except BaseException:
      self.close()
      raise

  @property
  def ready(self) -> Any:
    """The value that a worker's program returned when it started."""
    return self._ready.result(0)

  def num_unanswered(self) -> int:
    """Number of sessions that wait for a worker or are in a worker."""
    with self._lock:
      return len(self._queue) + sum(len(worker.sessions) for worker in self._crew.workers)

  def worker_pids(self) -> list[int]:
    """Process ids of the current workers; each leads its own OS session (setsid)."""
    return [worker.pid for worker in self._crew.workers]

  def submit(
    self, session: Session, request: bytes, convert: Callable[[Any], Result] = lambda reply: reply
  ) -> Future[Result | Failure]:
    """Submits a session's next request, and returns at once.

    Args:
      session: a new session, or a session whose earlier requests have replies.
      request: the result of `encode`.
      convert: reply → the future's result.
    Returns:
      A future of the result, or of a Failure. It cannot be canceled.
    Raises:
      ValueError: the session has ended, or has a request under way.
      RuntimeError: the pool is closed, or has failed.
    """
    future: Future[Result | Failure] = Future()
    future.set_running_or_notify_cancel()
    line = b'{"session": %d, "request": %b}\n' % (session.number, request)
    with self._lock:
      if self._failure is not None:
        raise self._failure
      if session.has_ended or session.pending is not None:
        problem = "has ended" if session.has_ended else "has a step under way"
        raise ValueError(f"dialogue {session.number} {problem}")
      session.add(line, future, convert)
      if session.worker is None:
        self._queue.append(session)
      session.send_next()
    self._bell.ring()
    return future

  def close_session(self, session: Session) -> None:
    """Ends a session that is no longer needed; has no effect on a session that has ended."""
    with self._lock:
      worker, is_under_way = session.worker, session.pending is not None
      if session.has_ended or self._failure is not None:
        return
      self._resolve(session.end(), RuntimeError(f"dialogue {session.number} was closed"))
      if worker is not None and not is_under_way:  # else it is closed after the result
        _send_close(worker, session.number)
    self._bell.ring()
    self._call_later_ones()

  def close(self) -> None:
    """Kills the workers; unfinished futures get an error. A second call has no effect."""
    self._end(RuntimeError("the pool is closed"))
    self._call_later_ones()
    if threading.current_thread() is not self._thread:  # a future's callback may close the pool
      self._thread.join(KILL_WAIT_S * (1 + len(self._crew.workers)))

  def __enter__(self) -> Pool:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  # --- futures

  def _resolve(self, future: Future[Any] | None, result: object) -> None:
    if future is None:
      return
    if isinstance(result, Exception):
      self._later.append(functools.partial(future.set_exception, result))
    else:
      self._later.append(functools.partial(future.set_result, result))

  def _call_later_ones(self) -> None:
    while self._later:
      try:
        call = self._later.popleft()
      except IndexError:  # another thread was faster
        return
      call()

  def _end(self, error: Exception) -> None:
    """Ends the pool: fails all futures, and takes no more requests."""
    with self._lock:
      if self._failure is not None:
        return
      self._failure = error
      in_workers = [s for worker in self._crew.workers for s in worker.sessions.values()]
      for session in [*self._queue, *in_workers]:
        self._resolve(session.end(), error)
      if not self._ready.done():
        self._resolve(self._ready, error)
    self._bell.ring()

  def _fail_start(self, problem: str) -> None:
    self._end(self._crew.service.start_error(self._crew.start_problem(problem)))

  # --- the thread

  def _run(self) -> None:
    """Runs until the pool is closed or fails."""
    try:
      while self._failure is None:
        self._turn()
    except Exception as error:  # otherwise callers would wait for a result indefinitely
      self._end(error)
    finally:
      self._call_later_ones()
      self._crew.close()
      self._bell.close()

  def _turn(self) -> None:
    """Waits for messages, queued sessions or limits, and handles them."""
    with selectors.DefaultSelector() as selector:
      with self._lock:
        self._send_queued()
        selector.register(self._bell.woken, selectors.EVENT_READ)
        for worker in self._crew.workers:
          selector.register(worker.stdout, selectors.EVENT_READ, worker)
          if worker.has_output:
            selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
        limit = self._crew.next_time()
      ready = selector.select(max(0.0, min(_LONGEST_POLL_S, limit - time.monotonic())))
    with self._lock:
      self._bell.silence()
      for key, events in ready:
        if events & selectors.EVENT_WRITE:
          key.data.flush()
      has_sent = [key.data for key, event in ready if key.data and event & selectors.EVENT_READ]
      for worker in has_sent:
        self._read(worker)
      now = time.monotonic()
      for worker in [*self._crew.workers]:
        # This process may have waited for a core: messages of a worker come before its limit.
        if worker not in has_sent and worker.next_limit()[0] <= now:
          self._end_worker(worker, "")
      if self._failure is None:
        self._crew.prepare_spares(now)
    self._call_later_ones()

  def _send_queued(self) -> None:
    """Hands queued sessions to workers that have room."""
    while self._queue and (worker := self._crew.find_room(len(self._queue))) is not None:
      session = self._queue.popleft()
      if session.pending is not None:
        session.enter(worker)
        session.send_next()

  def _read(self, worker: WorkerProcess) -> None:
    """Handles the messages that a worker has sent."""
    try:
      for message in worker.receive():
        self._take_message(worker, message)
    except BrokenWorkerError as error:
      self._end_worker(worker, str(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      self._end_worker(worker, f"its process broke the protocol: {error!r:.200}")

  def _take_message(self, worker: WorkerProcess, message: Message) -> None:
    if "error" in message:
      self._fail_start(str(message["error"]))
    elif "ready" in message:
      worker.set_ready()
      if all(other.is_ready for other in self._crew.workers) and not self._ready.done():
        self._resolve(self._ready, message["ready"])
    elif message["event"] == "ask":
      self._take_question(worker, message["session"], message["question"])
    else:
      event, number = message["event"], message["session"]
      worker.clock.update(event, number, message.get("limit_s", 0.0), time.monotonic())
      if event == "result":
        worker.end_request(number)
        self._crew.count_result()
        self._take_result(worker, number, message)

  def _take_result(self, worker: WorkerProcess, number: int, result: Message) -> None:
    session = worker.sessions.get(number)
    if session is None:  # the session was closed meanwhile
      if not result.get("ends", True):
        _send_close(worker, number)
      return
    if "failure" in result:
      kind, detail = map(str, result["failure"])
      # The pending text was not run, so it is not to blame for a repetition that fails.
      kind = "failed" if session.repeats else kind
      self._resolve(session.end(), Failure(kind, detail))
      return
    try:
      answered = session.take_reply(result["reply"], ends=result["ends"])
    except ValueError as error:
      self._resolve(session.end(), Failure("failed", str(error)))
      _send_close(worker, number)
      return
    if answered is None:
      session.send_next()
      return
    if result["ends"]:
      session.end()
    self._resolve(answered.future, answered.convert(result["reply"]))

  # --- the end of a worker

  def _end_worker(self, worker: WorkerProcess, problem: str) -> None:
    """Replaces a worker that has ended or exceeds a limit, and fails the session at fault.

    Args:
      worker: the worker.
      problem: why the worker has ended; "" if it exceeds a limit of time.
    """
    limit, culprit = worker.next_limit()
    # A worker also ends by itself soon after a limit, if this process is late to kill it.
    is_late = limit <= time.monotonic()
    if not is_late:
      culprit = worker.clock.running
    worker.kill()
    if not worker.is_ready:
      limit_s = self._crew.service.startup_timeout_s
      problem = problem or f"it was not ready within startup_timeout_s = {limit_s:g} s"
      self._fail_start(f"{problem} {worker.last_output()}".strip())
      return
    if self._crew.count_death(is_idle=culprit is None):
      self._fail_start(f"{problem}; several workers in a row have ended while they were idle")
      return
    if culprit is not None and culprit in worker.sessions:
      kind = "timeout" if is_late else "memory" if worker.ended_by_text() else "failed"
      kind = "failed" if worker.sessions[culprit].repeats else kind
      if is_late and culprit == worker.clock.running:
        problem = f"it took longer than {self._crew.service.limit_s:g} s"
      elif is_late:
        problem = "it waited longer than the limit of the wait"
      failure = Failure(kind, problem[:MAX_DETAIL])
      self._resolve(worker.sessions[culprit].end(), failure)
    left = [*worker.sessions.values()]
    for session in left:
      session.leave_worker()
    self._queue.extendleft(s for s in reversed(left) if s.pending is not None)
    self._crew.replace(worker)

  # --- questions

  def _take_question(self, worker: WorkerProcess, number: int, question: object) -> None:
    """Answers a question of a session, or passes the question on to `Service.answer`."""
    session, answer = worker.sessions.get(number), self._crew.service.answer
    if session is None or answer is None:
      _send_answer(worker, number, {"error": "nobody answers: the dialogue was closed"})
    elif (key := json.dumps(question)) in session.answers:
      _send_answer(worker, number, {"answer": session.answers[key]})
    else:
      ask = functools.partial(self._ask, answer, worker, session, question)
      self._later.append(ask)

  def _ask(self, answer: Answer, worker: WorkerProcess, session: Session, question: object) -> None:
    try:
      future = answer(session.context, question)
    except Exception as error:
      future = Future()
      future.set_exception(error)
    future.add_done_callback(functools.partial(self._take_answer, worker, session, question))

  def _take_answer(
    self, worker: WorkerProcess, session: Session, question: object, done: Future[object]
  ) -> None:
    """Sends an answer to the session that has asked, if the session is still in that worker."""
    with self._lock:
      try:
        answer = session.answers[json.dumps(question)] = done.result(0)
        message = {"answer": answer}
      except Exception as error:
        message = {"error": f"{type(error).__name__}: {error}"}
      if session.worker is worker and self._failure is None:  # a new worker would ask again
        _send_answer(worker, session.number, message)
    self._bell.ring()


class PoolOwner:
  """The base class of `GraderPool` and `EnvironmentPool`: it owns a pool and closes it."""

  _pool: Pool

  def worker_pids(self) -> list[int]:
    """Process ids of the current workers; each leads its own OS session (setsid)."""
    return self._pool.worker_pids()

  def close(self) -> None:
    """Kills the workers; unfinished futures get an error. A second call has no effect."""
    self._pool.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


def _send_close(worker: WorkerProcess, number: int) -> None:
  worker.send(b'{"session": %d, "close": true}\n' % number)


def _send_answer(worker: WorkerProcess, number: int, answer: Mapping[str, object]) -> None:
  worker.send(encode({"session": number, **answer}) + b"\n")
