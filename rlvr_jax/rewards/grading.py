"""Grades completions in worker processes."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from rlvr_jax.rewards.by_name import load_grader, parse_grader
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.workers.pool import Failure, Pool, PoolOwner, check_limits, encode
from rlvr_jax.workers.process import Service, Session, StartError, check_variables
from rlvr_jax.workers.worker import MAX_DETAIL, Ask

_LONGEST_WAIT_S = 600.0  # limit on an item's wait: the sandbox kills a program earlier
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_OUTCOMES = {
  "timeout": Outcome.TIMEOUT,
  "memory": Outcome.WRONG,  # else a policy could learn to have its worst rollouts left out
  "failed": Outcome.CRASHED,
}


class GraderStartError(StartError):
  """A grading worker could not be started."""


# --- in the worker --------------------------------------------------------------------------------


class Graders:
  """A worker's program, see `workers.worker.Program`: loads and tests graders, then grades."""

  ready = True

  def __init__(self, ask: Ask, *, grader: str, preload: Sequence[str]):
    del ask  # a grader knows what it needs
    self._grade = load_grader(grader)
    for text in preload:
      load_grader(text)

  def answer(self, session: int, request: Any) -> tuple[Any, bool]:
    """Grades a completion; every request is a session of its own."""
    try:
      grade = self._grade(request["completion"], request["reference"])
    except RecursionError as error:  # which a completion can cause
      grade = Grade(Outcome.WRONG, detail=f"recursion limit exceeded ({error})")
    fields = grade.outcome, grade.score, grade.detail[:MAX_DETAIL], _shorten(grade.answer)
    return [*fields, grade.feedback[:MAX_DETAIL], grade.parts], True


def _shorten(answer: str) -> str:
  """The answer; a long answer's end becomes a hash, so that different answers still differ."""
  if len(answer) <= MAX_DETAIL:
    return answer
  return f"{answer[:100]}… sha256 {hashlib.sha256(answer.encode(errors='replace')).hexdigest()}"


# --- in the parent --------------------------------------------------------------------------------


def _read_grade(reply: Any) -> Grade:
  outcome, score, detail, answer, feedback, parts = reply
  texts = str(detail), str(answer), str(feedback)
  return Grade(Outcome(outcome), float(score), *texts, tuple(map(float, parts)))


class GradingFuture(Future[list[Grade]]):
  """A future of grades; `result(timeout)` returns them in the order of the inputs.

  Without a timeout, `result` waits at most `limit_s` seconds. This limit is longer than grading can
  take, since every item and every replacement of a worker has its own time limit.
  """

  def __init__(self, size: int, limit_s: float):
    super().__init__()
    self.limit_s = limit_s
    self._grades: dict[int, Grade] = {}
    self._size = size
    self._count_lock = threading.Lock()
    self.set_running_or_notify_cancel()  # cannot be canceled: workers may have started already
    if not size:
      self.set_result([])

  def result(self, timeout: float | None = None) -> list[Grade]:
    return super().result(self.limit_s if timeout is None else timeout)

  def deliver(self, index: int, item: Future[Grade | Failure]) -> None:
    """Receives the grade of one item; the last grade, or an error, completes the future."""
    error = item.exception()
    with self._count_lock:
      if self.done():
        return
      if error is not None:
        self.set_exception(error)
        return
      grade = item.result()
      if isinstance(grade, Failure):
        grade = Grade(_OUTCOMES[grade.kind], detail=grade.detail)
      self._grades[index] = grade
      if len(self._grades) == self._size:
        self.set_result([self._grades[i] for i in range(self._size)])


class GraderPool(PoolOwner):
  """Grades completions in worker processes, each item under a wall-clock limit.

  An item that exceeds the limit is graded `timeout`. An item that ends its worker is graded
  `crashed`, or `wrong` if the completion may have caused it (see `outcome`). An exception in the
  grader, or a return value that is not a grade, is `crashed` too, and the worker continues.

  Args:
    grader: string of a grader, "name(keyword=value)" or "my_module:function"; see `by_name`.
    num_workers: number of processes, ≥ 1.
    timeout_s: wall-clock limit per item, seconds. While an item waits in `workers.worker.waiting`,
      the limit of `waiting` applies instead, and the process grades other items. The grader `code`
      waits in this way for the program that it tests.
    startup_timeout_s: limit for a worker to start and load the grader, seconds.
    memory_mib: limit on each worker's address space, MiB; None for no limit.
    environment: variables added to the workers' environment.
    preload: strings of further graders that each worker loads and tests at its start. Other graders
      that references name (see `by_name`) are loaded within an item's time limit.
    on_grade: a thread of the pool calls it at every grade, as a sign of progress.
  Raises:
    ValueError: an argument is out of range, the grader is unknown, or environment variables are not
      text.
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
    environment: Mapping[str, str] = _NO_VARIABLES,
    preload: Sequence[str] = (),
    on_grade: Callable[[], None] = lambda: None,
  ):
    seconds = {"timeout_s": timeout_s, "startup_timeout_s": startup_timeout_s}
    check_limits(
      "GraderPool", counts={"num_workers": num_workers}, seconds=seconds, memory_mib=memory_mib
    )
    check_variables(environment, "environment")
    for text in (grader, *preload):
      parse_grader("grader", text)
    service = Service(
      f"the grading worker for {grader!r}",
      "rlvr_jax.rewards.grading:Graders",
      {"grader": grader, "preload": [*preload]},
      limit_s=timeout_s,
      startup_timeout_s=startup_timeout_s,
      memory_mib=memory_mib,
      variables=environment,
      memory_field="memory_mib, which is config.grading.memory_mib",
      start_error=GraderStartError,
    )
    self._on_grade = on_grade
    self._item_s = timeout_s + startup_timeout_s + _LONGEST_WAIT_S
    self._pool = Pool(service, num_workers)

  def submit(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> GradingFuture:
    """Submits completions for grading and returns immediately.

    Args:
      completions: texts.
      references: the grader's data about the problem of each completion; JSON-serializable.
    Returns:
      A future of the grades, in the order of the completions.
    Raises:
      ValueError: the lists differ in length.
      TypeError: a reference is not JSON-serializable.
      RuntimeError: the pool is closed, or has failed.
    """
    if len(completions) != len(references):
      raise ValueError(
        f"{len(completions)} completions cannot be graded with {len(references)} references; give"
        " one reference for each completion"
      )
    requests = [_encode(*pair) for pair in zip(completions, references, strict=True)]
    # Each item (unanswered or new) takes at most its limit and a worker's replacement.
    num_items = self._pool.num_unanswered() + len(requests)
    future = GradingFuture(len(requests), num_items * self._item_s)
    for index, request in enumerate(requests):
      item = self._pool.submit(Session(), request, _read_grade)
      item.add_done_callback(functools.partial(self._deliver, future, index))
    return future

  def _deliver(self, future: GradingFuture, index: int, item: Future[Grade | Failure]) -> None:
    self._on_grade()
    future.deliver(index, item)

  def grade(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> list[Grade]:
    """Grades completions and waits for the grades; see `submit`."""
    return self.submit(completions, references).result()


def _encode(completion: str, reference: Mapping[str, Any]) -> bytes:
  """The bytes of a request; raises TypeError unless the reference is JSON-serializable."""
  try:
    return encode({"completion": completion, "reference": reference})
  except (TypeError, ValueError) as error:
    raise TypeError(
      f"a grader's reference must be JSON-serializable ({error}): {reference!r:.300}"
    ) from error
