"""Dialogues with an environment, in processes of their own and under limits."""

from __future__ import annotations

import collections
import functools
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from rlvr_jax.environments.base import Message, Problem, Turn
from rlvr_jax.environments.by_name import parse_environment
from rlvr_jax.environments.dialogues import Dialogue
from rlvr_jax.environments.worker import FIELD, MAX_DETAIL
from rlvr_jax.environments.worker_process import DIED, BrokenWorkerError, Clock, WorkerProcess
from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.processes import KILL_WAIT_S, check_variables

_GRADE_S = 3600.0  # limit for a grade
_MAX_IDLE_DEATHS = 3  # of workers in a row without a result or a dialogue that caused it
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

# From texts and references to a future of their grades, which have `outcome`, `score`, `detail` and
# `feedback`: `GraderPool.submit`.
SubmitGrades: TypeAlias = Callable[[Sequence[str], Sequence[Any]], "Future[Any]"]


class Failure(NamedTuple):
  """A dialogue that its environment, or the policy's text, has ended."""

  kind: Literal["failed", "timeout", "refused", "memory"]
  detail: str


class Started(NamedTuple):
  """A dialogue that has begun."""

  dialogue: int  # its number, for `EnvironmentPool.step`
  messages: Sequence[Message] | None  # of the prompt; None: the problem's own prompt


class EnvironmentStartError(RuntimeError):
  """A worker could not be started, or workers end again and again."""


class _Options(NamedTuple):
  """Arguments of a pool; `settings` are those of its workers."""

  settings: Mapping[str, Any]
  variables: Mapping[str, str]
  processes: int
  deadline_s: float
  startup_timeout_s: float
  grade: SubmitGrades | None


class EnvironmentPool:
  """Runs dialogues in separate processes, each reset and step under a wall-clock limit.

  Any thread may call the methods, and none of them blocks, except for the constructor and `close`.
  A dialogue's results depend on its problem, seed and texts only.

  A worker has many dialogues and runs one at a time. If a step exceeds the limit, its worker is
  killed with all that it has started and replaced. The step's result is `Failure("timeout")`, as
  where the environment raised `TimedOut`. The other kinds are "refused" (it raised `Refused`),
  "memory" (a failed allocation) and "failed" (any other exception, an invalid result, or a worker
  that died). A failure ends its dialogue. If a worker ends, its other dialogues are repeated in the
  new one, each before its next step: from reset, with the same seed and texts. If a result then
  differs, the dialogue has failed.

  Workers are new interpreters (never forks of this process), without jax. They end when this
  process does.

  Args:
    environment: string of an environment, "name(keyword=value)" or "my_module:factory".
    processes: number of workers, ≥ 1.
    deadline_s: wall-clock limit of a reset or step, seconds. Waiting for a grade, or in
      `base.waiting`, has limits of its own.
    memory_mib: limit on each worker's address space, MiB; None for no limit.
    startup_timeout_s: limit for a worker to start, seconds.
    variables: added to the workers' environment variables.
    grade: `GraderPool.submit`, for an environment with a keyword `grade`. A grade that has not come
      within an hour is a timeout; the grader's own limits are shorter.
  Attributes:
    roles: that replies may have, of "user" and "tool".
  Raises:
    ValueError: an argument out of range, an unknown environment, or variables that are not text.
    EnvironmentStartError: the environment cannot be made.
  """

  def __init__(
    self,
    environment: str,
    *,
    processes: int = 1,
    deadline_s: float,
    memory_mib: int | None = None,
    startup_timeout_s: float = 60.0,
    variables: Mapping[str, str] = _NO_VARIABLES,
    grade: SubmitGrades | None = None,
  ):
    check_integer("EnvironmentPool", "processes", processes, low=1)
    check_between("EnvironmentPool", "deadline_s", deadline_s, low=0.0, open_low=True)
    check_between("EnvironmentPool", "startup_timeout_s", startup_timeout_s, low=0.0, open_low=True)
    if memory_mib is not None:
      check_integer("EnvironmentPool", "memory_mib", memory_mib, low=1)
    check_variables(variables, "variables")
    parse_environment(FIELD, environment)
    settings = {
      "environment": environment, "deadline_s": deadline_s, "memory_mib": memory_mib,
      "has_grade": grade is not None, "grade_s": _GRADE_S,
    }  # fmt: skip
    self._dispatcher = _Dispatcher(
      _Options(settings, dict(variables), processes, deadline_s, startup_timeout_s, grade)
    )
    self._thread = threading.Thread(target=self._dispatcher.run, name="environments", daemon=True)
    self._thread.start()
    try:
      self.roles = tuple(self._dispatcher.ready.result(startup_timeout_s + KILL_WAIT_S))
    except BaseException:
      self.close()
      raise

  def reset(
    self, problem: Problem, seed: int, graded: Mapping[str, Any] | None = None
  ) -> Future[Started | Failure]:
    """Starts a dialogue.

    Args:
      problem: "question", "answer" and "reference"; JSON-serializable.
      seed: the same for all rollouts of a problem.
      graded: the reference for `grade`; None: the problem's.
    Raises:
      TypeError: the problem is not JSON-serializable.
      RuntimeError: the pool is closed, or has failed.
    """
    check_integer("EnvironmentPool.reset", "seed", seed, low=-(2**63), high=2**64)
    try:
      problem = json.loads(json.dumps(dict(problem)))  # a copy, which later changes cannot reach
    except (TypeError, ValueError) as error:
      raise TypeError(
        f"an environment's problem must be JSON-serializable ({error}): {problem!r:.300}"
      ) from error
    graded = problem.get("reference") if graded is None else graded
    return self._dispatcher.submit(
      lambda future: self._dispatcher.reset(problem, seed, graded, future)
    )

  def step(self, dialogue: int, text: str) -> Future[Turn | Failure]:
    """Gives the policy's text to a dialogue's environment.

    Args:
      dialogue: from `Started`. Its previous result has come; `done` or a failure ends it.
      text: the policy's.
    Returns:
      A future of the turn. Its exception is a ValueError if the dialogue has ended or has a step
      under way.
    Raises:
      RuntimeError: the pool is closed, or has failed.
    """
    if not isinstance(text, str):
      raise TypeError(f"text = {text!r:.100} is not a text")
    return self._dispatcher.submit(lambda future: self._dispatcher.step(dialogue, text, future))

  def close_dialogue(self, dialogue: int) -> None:
    """Ends a dialogue whose state is no longer needed; one that has ended already is fine."""
    self._dispatcher.post(functools.partial(self._dispatcher.close_dialogue, dialogue))

  def worker_pids(self) -> list[int]:
    """Process ids of the current workers; each leads its own session."""
    return self._dispatcher.pids()

  def close(self) -> None:
    """Kills the workers and fails the unfinished futures. A second call has no effect."""
    self._dispatcher.stop(RuntimeError("the environment pool is closed"))
    if threading.current_thread() is not self._thread:  # a future's callback may close the pool
      self._thread.join(KILL_WAIT_S * (1 + len(self._dispatcher.pids())))

  def __enter__(self) -> EnvironmentPool:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


class _Inbox:
  """What other threads ask of the dispatcher, and the futures that they wait for."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._calls: collections.deque[Callable[[], None]] = collections.deque()
    self._futures: set[Future[Any]] = set()
    self._failure: Exception | None = None
    self._wake, self.woken = socket.socketpair()
    self._wake.setblocking(False)
    self.woken.setblocking(False)

  @property
  def failure(self) -> Exception | None:
    """Why the pool has ended, if it has."""
    return self._failure

  def submit(self, call: Callable[[Future[Any]], None]) -> Future[Any]:
    """Adds a call that gets a future; returns the future."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # cannot be canceled: the worker may have it already
    with self._lock:
      if self._failure is not None:
        raise self._failure
      self._futures.add(future)
      self._calls.append(functools.partial(call, future))
      self._ring()
    return future

  def post(self, call: Callable[[], None]) -> None:
    """Adds a call; none is made once the pool has ended."""
    with self._lock:
      if self._failure is None:
        self._calls.append(call)
        self._ring()

  def _ring(self) -> None:
    try:
      self._wake.send(b"!")
    except BlockingIOError:
      pass  # it rings already

  def take_calls(self) -> list[Callable[[], None]]:
    """The calls to make now."""
    try:
      self.woken.recv(2**12)
    except BlockingIOError:
      pass
    with self._lock:
      calls = [*self._calls]
      self._calls.clear()
    return calls

  def resolve(self, future: Future[Any], result: Any) -> None:
    """Sets a future's result, or its exception."""
    with self._lock:
      if future not in self._futures:
        return
      self._futures.discard(future)
    if isinstance(result, Exception):
      future.set_exception(result)
    else:
      future.set_result(result)

  def fail(self, error: Exception) -> None:
    """Ends the pool: fails all futures, and takes no more calls."""
    with self._lock:
      if self._failure is not None:
        return
      self._failure = error
      futures, self._futures = self._futures, set()
      self._calls.clear()
      self._ring()
    for future in futures:
      future.set_exception(error)

  def close(self) -> None:
    """Closes the sockets, which only the dispatcher's thread reads."""
    with self._lock:
      self._wake.close()
      self.woken.close()


class _Place:
  """One of the pool's workers and its successors."""

  def __init__(self, options: _Options):
    self._options = options
    self._start()

  def _start(self) -> None:
    self.worker = WorkerProcess(self._options.settings, self._options.variables)
    self.clock = Clock(self._options.deadline_s)
    self.is_ready = False
    self._startup_limit = time.monotonic() + self._options.startup_timeout_s

  def replace_worker(self) -> None:
    """Closes the worker and starts another one."""
    self.worker.close()
    self._start()

  def set_ready(self) -> None:
    """The worker has reported that it is ready."""
    self.is_ready = True

  def next_limit(self) -> tuple[float, int | None]:
    """The next limit of time, and the dialogue that it is for, if any."""
    return self.clock.next_limit() if self.is_ready else (self._startup_limit, None)


class _Dispatcher:
  """Passes requests and results between threads and workers. One thread runs all but `_Inbox`."""

  def __init__(self, options: _Options):
    self.ready: Future[list[str]] = Future()  # of the first workers; the roles of replies
    self._options = options
    self._inbox = _Inbox()
    self._dialogues: dict[int, Dialogue] = {}
    self._num_dialogues = 0  # so far
    self._idle_deaths = 0
    self._places = [_Place(options) for _ in range(options.processes)]

  # --- from any thread

  def submit(self, call: Callable[[Future[Any]], None]) -> Future[Any]:
    """Has the thread make a call with a future; returns the future."""
    return self._inbox.submit(call)

  def post(self, call: Callable[[], None]) -> None:
    """Has the thread make a call."""
    self._inbox.post(call)

  def stop(self, error: Exception) -> None:
    """Ends the thread, and fails all futures."""
    self._inbox.fail(error)

  def pids(self) -> list[int]:
    """Process ids of the workers."""
    return [place.worker.pid for place in self._places]

  # --- the thread

  def run(self) -> None:
    """Runs until the pool is stopped or fails."""
    try:
      while self._inbox.failure is None:
        self._turn()
    except Exception as error:  # otherwise callers would wait for a result indefinitely
      self._inbox.fail(error)
    finally:
      for place in self._places:
        place.worker.close()
      self._inbox.close()
      if not self.ready.done():
        self.ready.set_exception(self._inbox.failure or RuntimeError("the thread has ended"))

  def _turn(self) -> None:
    """Waits for something to do, and does it."""
    limits = [place.next_limit()[0] for place in self._places]
    with selectors.DefaultSelector() as selector:
      selector.register(self._inbox.woken, selectors.EVENT_READ)
      for place in self._places:
        selector.register(place.worker.stdout, selectors.EVENT_READ, place)
        if place.worker.has_output:
          selector.register(place.worker.stdin, selectors.EVENT_WRITE, place)
      # An hour, since poll takes no longer time than some weeks.
      ready = selector.select(max(0.0, min(3600.0, min(limits) - time.monotonic())))
    has_sent = []
    for key, events in ready:
      if key.data is None:
        continue
      if events & selectors.EVENT_WRITE:
        key.data.worker.flush()
      else:
        has_sent.append(key.data)
    for place in has_sent:
      self._read(place)
    for call in self._inbox.take_calls():
      call()
    for place in self._places:
      # This process may have had to wait for a core: what a worker has sent comes before its limit.
      if place not in has_sent and place.next_limit()[0] <= time.monotonic():
        self._end_worker(place, "")

  def _read(self, place: _Place) -> None:
    """Takes what a worker has sent."""
    try:
      messages = place.worker.receive()
      for message in messages:
        self._take_message(place, message)
    except BrokenWorkerError as error:
      self._end_worker(place, str(error))
    except (KeyError, TypeError, ValueError) as error:
      self._end_worker(place, f"the environment's process broke the protocol: {error!r:.200}")

  def _take_message(self, place: _Place, message: dict[str, Any]) -> None:
    if "error" in message:
      self._fail_start(message["error"])
    elif "ready" in message:
      self._set_ready(place, message["ready"])
    elif message["event"] == "grade":
      self._ask_grade(place, message["dialogue"], message["text"])
    else:
      place.clock.update(message, time.monotonic())
      if message["event"] == "result":
        self._take_result(place, message["dialogue"], message["result"])

  def _set_ready(self, place: _Place, roles: list[str]) -> None:
    place.set_ready()
    if all(other.is_ready for other in self._places) and not self.ready.done():
      self.ready.set_result(roles)
    for number, dialogue in self._in_place(place):
      self._send_next(number, dialogue)

  def _fail_start(self, problem: str) -> None:
    text = self._options.settings["environment"]
    memory_mib = self._options.settings["memory_mib"]
    if memory_mib is not None and problem.startswith(("MemoryError", DIED)):
      problem += (
        f" (its address space may have {memory_mib} MiB; if that is too little, raise memory_mib)"
      )
    if not problem.startswith(f"{FIELD} = "):
      problem = f"the worker of the environment {text!r} did not start: {problem}"
    self._inbox.fail(EnvironmentStartError(problem))

  def _in_place(self, place: _Place) -> list[tuple[int, Dialogue]]:
    index = self._places.index(place)
    return [(n, dialogue) for n, dialogue in self._dialogues.items() if dialogue.place == index]

  # --- dialogues

  def reset(self, problem: Problem, seed: int, graded: Any, future: Future[Any]) -> None:
    """Starts a dialogue in the place that has the fewest."""
    counts = collections.Counter(dialogue.place for dialogue in self._dialogues.values())
    place = min(range(len(self._places)), key=lambda index: counts[index])
    number = self._num_dialogues
    self._num_dialogues += 1
    dialogue = self._dialogues[number] = Dialogue(place, graded)
    dialogue.add({"kind": "reset", "problem": problem, "seed": seed}, future)
    self._send_next(number, dialogue)

  def step(self, number: int, text: str, future: Future[Any]) -> None:
    """Sends a step, or what has to be repeated before it."""
    dialogue = self._dialogues.get(number)
    if dialogue is None or dialogue.pending is not None:
      problem = "has ended" if dialogue is None else "has a step under way"
      self._inbox.resolve(future, ValueError(f"dialogue {number!r:.50} {problem}"))
      return
    dialogue.add({"kind": "step", "text": text}, future)
    self._send_next(number, dialogue)

  def close_dialogue(self, number: int) -> None:
    """Forgets a dialogue, here and in its worker."""
    dialogue = self._dialogues.pop(number, None)
    if dialogue is None:
      return
    self._resolve(dialogue.end_pending(), RuntimeError(f"dialogue {number} was closed"))
    place = self._places[dialogue.place]
    if place.is_ready and not dialogue.is_sent:  # otherwise after the result
      place.worker.send({"kind": "close", "dialogue": number})

  def _send_next(self, number: int, dialogue: Dialogue) -> None:
    place = self._places[dialogue.place]
    if place.is_ready and (request := dialogue.next_request()) is not None:
      place.worker.send({**request, "dialogue": number})

  def _take_result(self, place: _Place, number: int, result: dict[str, Any]) -> None:
    self._idle_deaths = 0
    dialogue = self._dialogues.get(number)
    if dialogue is None:  # it was closed meanwhile; or this is the result of that
      if result:
        place.worker.send({"kind": "close", "dialogue": number})
      return
    try:
      future = dialogue.take_result(result)
    except ValueError as error:
      self._end_dialogue(number, Failure("failed", str(error)))
      place.worker.send({"kind": "close", "dialogue": number})
      return
    if future is None:
      self._send_next(number, dialogue)
    elif "messages" in result:
      self._resolve(future, Started(number, result["messages"]))
    else:
      turn = Turn(*result["turn"]) if "turn" in result else None
      if turn is None or turn.done:
        del self._dialogues[number]
        place.worker.send({"kind": "close", "dialogue": number})
      self._resolve(future, turn or Failure(*result["failure"]))

  def _end_dialogue(self, number: int, failure: Failure) -> None:
    dialogue = self._dialogues.pop(number, None)
    if dialogue is not None:
      self._resolve(dialogue.end_pending(), failure)

  def _resolve(self, future: Future[Any] | None, result: Any) -> None:
    if future is not None:
      self._inbox.resolve(future, result)

  # --- the end of a worker

  def _end_worker(self, place: _Place, problem: str) -> None:
    """Replaces a worker that has ended or exceeds a limit, which fails the dialogue that caused it.

    Args:
      place: of the worker.
      problem: why it has ended; "" for a limit of time.
    """
    limit, culprit = place.next_limit()
    # A worker ends by itself soon after a limit, and this process may have had to wait for a core.
    is_late = limit <= time.monotonic()
    if not is_late:
      culprit = place.clock.running
    place.worker.kill()
    if not place.is_ready:
      startup = f"it was not ready within startup_timeout_s = {self._options.startup_timeout_s:g} s"
      self._fail_start(f"{problem or startup} {place.worker.last_output()}".strip())
      return
    if culprit is None:
      self._idle_deaths += 1
      if self._idle_deaths == _MAX_IDLE_DEATHS:
        self._fail_start(f"{problem}; {_MAX_IDLE_DEATHS} have ended in a row while no dialogue ran")
        return
    elif is_late:
      what = "step" if culprit == place.clock.running else "wait"
      rule = f"deadline_s = {self._options.deadline_s:g} s" if what == "step" else "its limit"
      self._end_dialogue(culprit, Failure("timeout", f"the {what} did not end within {rule}"))
    else:
      kind = "memory" if place.worker.ended_by_memory() else "failed"
      self._end_dialogue(culprit, Failure(kind, problem[:MAX_DETAIL]))  # type: ignore[arg-type]
    for _, dialogue in self._in_place(place):
      dialogue.forget_worker()
    place.replace_worker()

  # --- grades

  def _ask_grade(self, place: _Place, number: int, text: str) -> None:
    """Asks for the grade of a text, once per dialogue and text."""
    dialogue = self._dialogues.get(number)
    if dialogue is None or self._options.grade is None:
      self._send_grade(place, number, {"error": "the dialogue was closed"})
      return
    if (grade := dialogue.recorded_grade(text)) is not None:
      self._send_grade(place, number, {"grade": grade})
      return
    try:
      future = self._options.grade([text], [dialogue.reference])
    except Exception as error:
      self._send_grade(place, number, {"error": f"{type(error).__name__}: {error}"})
      return
    worker = place.worker
    future.add_done_callback(
      lambda done: self.post(lambda: self._take_grade(place, worker, number, text, done))
    )

  def _take_grade(
    self, place: _Place, worker: WorkerProcess, number: int, text: str, done: Future[Any]
  ) -> None:
    try:
      (grade,) = done.result(0)
      if grade.outcome == "crashed":  # no verdict, and no policy can cause that
        raise RuntimeError(grade.detail)
      answer = [str(grade.outcome), float(grade.score), str(grade.feedback)]
    except Exception as error:
      if place.worker is worker:
        self._send_grade(place, number, {"error": f"{type(error).__name__}: {error}"})
      return
    if (dialogue := self._dialogues.get(number)) is not None:
      dialogue.record_grade(text, answer)
    if place.worker is worker:  # else the new one asks again
      self._send_grade(place, number, {"grade": answer})

  def _send_grade(self, place: _Place, number: int, answer: Mapping[str, Any]) -> None:
    place.worker.send({"kind": "grade", "dialogue": number, **answer})
