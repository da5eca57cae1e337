"""Processes in which environments run, many dialogues in each, with a limit on every turn."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

from rlvr_jax.environments.base import Message, Problem, Turn
from rlvr_jax.environments.by_name import parse_environment
from rlvr_jax.environments.process import EnvironmentProcess, ProcessDiedError
from rlvr_jax.ops.checks import check_between, check_integer

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_SEND_S = 10.0  # limit on sending a request
_CLOSE_S = 10.0  # limit on the end of a thread
_KINDS = ("failed", "timeout", "refused", "memory")


class EnvironmentStartError(RuntimeError):
  """A process of environments could not be started."""


class Failure(NamedTuple):
  """Why an environment gave no answer."""

  kind: str  # failed: its own fault; timeout, memory, refused: the policy's text
  detail: str


# What a dialogue begins with: messages, None for the problem's own prompt, or a failure.
First = Sequence[Message] | None | Failure
# (completions, references) → an object whose `result()` is a list of grades.
Submit = Callable[[list[str], list[Mapping[str, Any]]], Any]


class Dialogue:
  """A dialogue of a pool; only the pool uses more than `first`.

  Attributes:
    first: a future of what it begins with.
    number: in the pool, from 0.
    problem, seed: of its environment.
    texts, turns: of the policy and of the environment so far.
  """

  def __init__(self, number: int, problem: Problem, seed: int):
    self.first: Future[First] = Future()
    self.number, self.problem, self.seed = number, problem, seed
    self.texts: list[str] = []
    self.turns: list[Turn] = []
    self._failure: Failure | None = None
    self._lives_in: EnvironmentProcess | None = None

  def opened_in(self, process: EnvironmentProcess) -> None:
    """Its state is in this process from now on."""
    self._lives_in = process

  def lives_in(self, process: EnvironmentProcess) -> bool:
    return self._lives_in is process

  def fail(self, failure: Failure) -> None:
    """The dialogue has no environment from now on."""
    self._failure = failure

  @property
  def failure(self) -> Failure | None:
    return self._failure


class _Task(NamedTuple):
  """Something that a process is to do."""

  dialogue: Dialogue
  text: str | None  # of a step; None: open
  future: Future


class EnvironmentPool:
  """Runs environments in separate processes; every turn has a wall-clock limit.

  A dialogue stays in one process. A process that exceeds the limit, or dies, is replaced. The turn
  in progress is then a `Failure`. Other dialogues of the process are repeated from their seeds and
  texts before their next turn; if an environment replies differently then, it has failed.

  Args:
    environment: string of an environment, see `by_name`.
    processes: number of processes, each of which answers one turn at a time, ≥ 1.
    deadline_s: limit per turn, seconds; the time that a grader takes is not counted.
    memory_mib: limit on each process's address space, MiB; None for no limit.
    startup_timeout_s: limit for a process to start, seconds.
    variables: added to the processes' environment variables.
    grade: for environments that ask for a verdict; `GraderPool.submit`. None: none may ask.
  Raises:
    ValueError: an argument out of range, or an unknown environment.
    EnvironmentStartError: the environment cannot be made.
  """

  def __init__(
    self,
    environment: str,
    *,
    processes: int = 1,
    deadline_s: float = 30.0,
    memory_mib: int | None = None,
    startup_timeout_s: float = 60.0,
    variables: Mapping[str, str] = _NO_VARIABLES,
    grade: Submit | None = None,
  ):
    parse_environment("environment", environment)
    check_integer("EnvironmentPool", "processes", processes, low=1)
    check_between("EnvironmentPool", "deadline_s", deadline_s, low=0.0, open_low=True)
    if memory_mib is not None:
      check_integer("EnvironmentPool", "memory_mib", memory_mib, low=1)
    settings = {"environment": environment, "memory_mib": memory_mib}
    start = lambda: EnvironmentProcess(settings, variables)
    self._hosts = [_Host(start, deadline_s, startup_timeout_s, grade) for _ in range(processes)]
    self._count_lock = threading.Lock()
    self._num_opened = 0
    try:
      for host in self._hosts:
        host.wait_ready()
    except BaseException:
      for host in self._hosts:
        host.close()
      raise
    for host in self._hosts:
      host.start()

  def open(self, problem: Problem, seed: int) -> Dialogue:
    """Begins a dialogue and returns immediately.

    Args:
      problem: JSON-serializable.
      seed: of its environment.
    """
    with self._count_lock:
      number, self._num_opened = self._num_opened, self._num_opened + 1
    dialogue = Dialogue(number, problem, seed)
    self._host_of(dialogue).submit(_Task(dialogue, None, dialogue.first))
    return dialogue

  def step(self, dialogue: Dialogue, text: str) -> Future[Turn | Failure]:
    """Has the environment answer a turn of the policy; returns immediately."""
    future: Future[Turn | Failure] = Future()
    self._host_of(dialogue).submit(_Task(dialogue, text, future))
    return future

  def close_dialogue(self, dialogue: Dialogue) -> None:
    """Forgets a dialogue."""
    self._host_of(dialogue).submit(dialogue)

  def worker_pids(self) -> list[int]:
    """Process ids of the current processes; each leads its own session."""
    return [host.pid for host in self._hosts]

  def close(self) -> None:
    """Kills the processes; unfinished turns are failures. A second call has no effect."""
    for host in self._hosts:
      host.close()

  def __enter__(self) -> EnvironmentPool:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _host_of(self, dialogue: Dialogue) -> _Host:
    return self._hosts[dialogue.number % len(self._hosts)]


class _Host:
  """A thread with one process at a time."""

  def __init__(
    self,
    start: Callable[[], EnvironmentProcess],
    deadline_s: float,
    startup_timeout_s: float,
    grade: Submit | None,
  ):
    self._start, self._grade = start, grade
    self._deadline_s, self._startup_timeout_s = deadline_s, startup_timeout_s
    self._process = start()
    self._tasks: queue.SimpleQueue[_Task | Dialogue | None] = queue.SimpleQueue()
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name="environments", daemon=True)

  @property
  def pid(self) -> int:
    return self._process.pid

  def wait_ready(self) -> None:
    """Waits until the process has made its environment once.

    Raises:
      EnvironmentStartError: it failed, or took too long.
    """
    try:
      problem = self._process.receive(time.monotonic() + self._startup_timeout_s).get("error")
    except TimeoutError:
      problem = f"it was not ready within {self._startup_timeout_s:g} s"
    except ProcessDiedError as error:
      problem = f"{error}\n{self._process.last_output()}".strip()
    if problem is not None:
      raise EnvironmentStartError(f"a process of environments did not start: {problem}")

  def start(self) -> None:
    self._thread.start()

  def submit(self, task: _Task | Dialogue) -> None:
    """Takes a task, or a dialogue to forget."""
    self._tasks.put(task)
    if self._closed.is_set():
      self._drain()

  def close(self) -> None:
    self._closed.set()
    self._tasks.put(None)
    self._process.kill()  # the thread then reads the end of the pipe
    if self._thread.is_alive():
      self._thread.join(_CLOSE_S)
    self._process.close()

  def _run(self) -> None:
    while (task := self._tasks.get()) is not None:
      if isinstance(task, Dialogue):
        self._forget(task)
        continue
      try:
        result = self._do(task)
      except Exception as error:  # otherwise callers would wait for a result indefinitely
        result = Failure("failed", f"{type(error).__name__}: {error}")
      if isinstance(result, Failure) and task.text is not None:
        task.dialogue.fail(result)
      task.future.set_result(result)
    self._drain()

  def _drain(self) -> None:
    """Gives the tasks that are left to a closed pool their results."""
    with contextlib.suppress(queue.Empty):
      while True:
        if isinstance(task := self._tasks.get_nowait(), _Task):
          task.future.set_result(Failure("failed", "the pool of environments is closed"))

  def _do(self, task: _Task) -> Any:
    """The result of a task: what a dialogue begins with, a turn, or a failure."""
    dialogue = task.dialogue
    if self._closed.is_set():
      return Failure("failed", "the pool of environments is closed")
    if dialogue.failure is not None:
      return dialogue.failure
    if not self._process.is_alive():
      self._replace()
    if task.text is None:
      return self._open(dialogue)
    if not dialogue.lives_in(self._process) and (failure := self._repeat(dialogue)):
      return failure
    answer = self._ask({"step": dialogue.number, "text": task.text}, dialogue)
    if isinstance(answer, Turn):
      dialogue.texts.append(task.text)
      dialogue.turns.append(answer)
    return answer

  def _open(self, dialogue: Dialogue) -> Any:
    request = {"open": dialogue.number, "problem": dialogue.problem, "seed": dialogue.seed}
    first = self._ask(request, dialogue)
    dialogue.opened_in(self._process)
    return first

  def _repeat(self, dialogue: Dialogue) -> Failure | None:
    """Repeats a dialogue whose process has died, up to its last turn; None if that succeeds."""
    first = self._open(dialogue)
    if isinstance(first, Failure):
      return first
    for text, expected in zip(dialogue.texts, dialogue.turns, strict=True):
      turn = self._ask({"step": dialogue.number, "text": text}, dialogue)
      if isinstance(turn, Failure):
        return turn
      if turn != expected:
        return Failure(
          "failed",
          "after its process died, the environment repeated a dialogue with other replies: it"
          " depends on more than problem, seed and texts",
        )
    return None

  def _ask(self, request: Mapping[str, Any], dialogue: Dialogue) -> Any:
    """Sends a request and waits for its answer; the process is dead after some failures."""
    deadline = time.monotonic() + self._deadline_s
    try:
      self._process.send(request, time.monotonic() + _SEND_S)
      while True:
        answer = self._process.receive(deadline)
        if "grade" not in answer:
          break
        asked = time.monotonic()
        self._process.send(self._verdict(answer["grade"], dialogue), asked + 1e9)
        deadline += time.monotonic() - asked
    except TimeoutError:
      self._process.kill()
      return Failure("timeout", f"no answer within {self._deadline_s:g} s")
    except ProcessDiedError as error:
      self._process.kill()
      # A stack overflow or a failed allocation in a C library, as a text may cause it.
      by_text = self._process.exit_signal() in (signal.SIGSEGV, signal.SIGABRT)
      return Failure("memory" if by_text else "failed", str(error))
    if "failure" in answer:
      return Failure(*answer["failure"])
    return Turn(*answer["turn"]) if "turn" in answer else answer["messages"]

  def _verdict(self, text: str, dialogue: Dialogue) -> dict[str, Any]:
    """The grader's verdict on a text, for the process."""
    if self._grade is None:
      return {"error": "this pool of environments has no grader"}
    try:
      (grade,) = self._grade([text], [dialogue.problem["reference"]]).result()
    except Exception as error:
      return {"error": f"{type(error).__name__}: {error}"}
    return {"verdict": [str(grade.outcome), grade.score, grade.detail]}

  def _forget(self, dialogue: Dialogue) -> None:
    if dialogue.lives_in(self._process) and self._process.is_alive():
      try:
        self._process.send({"close": dialogue.number}, time.monotonic() + _SEND_S)
      except (TimeoutError, ProcessDiedError):
        self._process.kill()

  def _replace(self) -> None:
    """Starts a new process in place of one that has died."""
    self._process.close()
    self._process = self._start()
    if self._closed.is_set():
      self._process.kill()
    self.wait_ready()
