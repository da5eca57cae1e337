"""Dialogues in worker processes: an environment's turn is a reply to the policy's text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from rlvr_jax.environments import base
from rlvr_jax.environments.base import Environment, Message, Problem, Turn
from rlvr_jax.environments.by_name import make_environment, parse_environment
from rlvr_jax.ops.checks import check_integer
from rlvr_jax.workers.pool import Failure, Pool, PoolOwner, check_limits, encode
from rlvr_jax.workers.process import Service, Session, StartError, check_variables
from rlvr_jax.workers.worker import Ask

FIELD = "environment"  # start of messages about the environment's string
_GRADE_S = 3600.0  # the most seconds for a grade
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})

# From texts and references to a future of their grades, which have `outcome`, `score`, `detail` and
# `feedback`: `GraderPool.submit`.
SubmitGrades: TypeAlias = Callable[[Sequence[str], Sequence[Any]], "Future[Any]"]


class Started(NamedTuple):
  """A dialogue that has begun."""

  dialogue: Session  # the dialogue that `EnvironmentPool.step` takes
  messages: Sequence[Message] | None  # messages of the prompt; None: the problem's own prompt


class EnvironmentStartError(StartError):
  """A worker could not be started, or workers end again and again."""


# --- in the worker --------------------------------------------------------------------------------


class Environments:
  """The `workers.worker.Program` of a worker: it keeps the environments of the dialogues.

  A worker makes one environment at its start, so that a wrong configuration fails at once.
  """

  def __init__(self, ask: Ask, *, environment: str, deadline_s: float, has_grade: bool):
    def refuse(text: str) -> tuple[str, float, str]:
      raise RuntimeError("grade was called by the factory; call it in step")

    self._ask = ask if has_grade else None
    self._make = functools.partial(make_environment, FIELD, environment, deadline_s=deadline_s)
    self._environments: dict[int, Environment] = {}  # environments by session
    self.ready = base.declared_roles(self._make(refuse if has_grade else None))

  def answer(self, session: int, request: Any) -> tuple[Any, bool]:
    """Resets a dialogue's environment, or makes its step: (reply, whether it is the last reply)."""
    if "problem" in request:
      grade = None if self._ask is None else functools.partial(_grade, self._ask, session)
      environment = self._environments[session] = self._make(grade)
      messages = environment.reset(request["problem"], request["seed"])
      return base.check_messages(messages), False
    environment = self._environments[session]
    roles = base.declared_roles(environment)
    turn = base.check_turn(environment.step(request["text"]), roles)
    return list(turn), turn.done

  def close(self, session: int) -> None:
    """Closes the environment of a dialogue, if it has one that can be closed."""
    close = getattr(self._environments.pop(session, None), "close", None)
    if close is not None:
      close()


def _grade(ask: Ask, session: int, text: str) -> tuple[str, float, str]:
  """The grade of a text, (outcome, score, feedback): the function `grade` of an environment."""
  try:
    outcome, score, feedback = ask(session, base.clean("grade is called with text", text), _GRADE_S)
  except RuntimeError as error:
    raise RuntimeError(f"grading failed: {error}") from error
  return outcome, score, feedback


# --- in the parent --------------------------------------------------------------------------------


class EnvironmentPool(PoolOwner):
  """Runs dialogues in worker processes, each reset and step under a wall-clock limit.

  Any thread may call the methods, and none of them blocks, except for the constructor and `close`.
  A dialogue's results depend only on its problem, seed and texts. If the process of a dialogue
  ends, another process repeats the dialogue; if a result then differs, the dialogue has failed.

  The kind of a `Failure` is "timeout" for a step that exceeds the limit, or if the environment
  raised `TimedOut`; "refused" if it raised `Refused`; "memory" for a failed allocation; "failed"
  for any other exception, an invalid result, or a process that ended. A failure ends its dialogue.

  Args:
    environment: string of an environment, "name(keyword=value)" or "my_module:factory".
    processes: number of workers, ≥ 1.
    deadline_s: wall-clock limit of a reset or step, seconds. Waiting for a grade, or in
      `workers.worker.waiting`, has separate limits.
    memory_mib: limit on each worker's address space, MiB; None for no limit.
    startup_timeout_s: limit for a worker to start, seconds.
    variables: environment variables that are added for the workers.
    grade: `GraderPool.submit`, for an environment with a keyword `grade`. A grade that takes over
      an hour is a timeout; the grader's own limits are shorter.
  Attributes:
    roles: the roles that replies may have, of "user" and "tool".
  Raises:
    ValueError: an argument is out of range, the environment is unknown, or variables are not text.
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
    seconds = {"deadline_s": deadline_s, "startup_timeout_s": startup_timeout_s}
    check_limits(
      "EnvironmentPool", counts={"processes": processes}, seconds=seconds, memory_mib=memory_mib
    )
    check_variables(variables, "variables")
    parse_environment(FIELD, environment)
    service = Service(
      f"the worker of the environment {environment!r}",
      "rlvr_jax.environments.dialogues:Environments",
      {"environment": environment, "deadline_s": deadline_s, "has_grade": grade is not None},
      limit_s=deadline_s,
      startup_timeout_s=startup_timeout_s,
      memory_mib=memory_mib,
      variables=variables,
      memory_field="memory_mib, which is config.environment.memory_mib",
      start_error=EnvironmentStartError,
      answer=None if grade is None else functools.partial(_ask_grade, grade),
    )
    self._pool = Pool(service, processes)
    self.roles = tuple(self._pool.ready)

  def reset(
    self, problem: Problem, seed: int, graded: Mapping[str, Any] | None = None
  ) -> Future[Started | Failure]:
    """Starts a dialogue.

    Args:
      problem: "question", "answer" and "reference"; JSON-serializable.
      seed: the seed, which is the same for all rollouts of a problem.
      graded: the reference for `grade`; None for the problem's reference.
    Raises:
      TypeError: the problem is not JSON-serializable.
      RuntimeError: the pool is closed, or has failed.
    """
    check_integer("EnvironmentPool.reset", "seed", seed, low=-(2**63), high=2**64)
    try:
      request = encode({"problem": dict(problem), "seed": seed})
    except (TypeError, ValueError) as error:
      raise TypeError(
        f"an environment's problem must be JSON-serializable ({error}): {problem!r:.300}"
      ) from error
    session = Session(problem.get("reference") if graded is None else graded)
    return self._pool.submit(session, request, functools.partial(Started, session))

  def step(self, dialogue: Session, text: str) -> Future[Turn | Failure]:
    """Gives the policy's text to a dialogue's environment.

    Args:
      dialogue: the dialogue of a `Started`. Its previous result must have arrived; `done` or a
        failure ends it.
      text: the policy's text.
    Raises:
      ValueError: the dialogue has ended or has a step under way.
      RuntimeError: the pool is closed, or has failed.
    """
    if not isinstance(text, str):
      raise TypeError(f"text = {text!r:.100} is not a text")
    return self._pool.submit(dialogue, encode({"text": text}), lambda reply: Turn(*reply))

  def close_dialogue(self, dialogue: Session) -> None:
    """Ends a dialogue whose state is no longer needed, unless it has ended already."""
    self._pool.close_session(dialogue)


def _ask_grade(submit: SubmitGrades, reference: Any, text: str) -> Future[Any]:
  """A future of a text's grade, in the form that environments get: [outcome, score, feedback]."""
  answer: Future[Any] = Future()

  def take(done: Future[Any]) -> None:
    try:
      (grade,) = done.result(0)
      if grade.outcome == "crashed":  # there is no verdict, and the policy is not to blame
        raise RuntimeError(grade.detail)
      answer.set_result([str(grade.outcome), float(grade.score), str(grade.feedback)])
    except Exception as error:
      answer.set_exception(error)

  submit([text], [reference]).add_done_callback(take)
  return answer
