"""Dialogues in worker processes: the environment replies to each text of the policy."""

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
    """Calls an environment's `reset` or `step`; returns (reply, whether this is the last reply)."""
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
  """Grades a text as (outcome, score, feedback); environments get this function as `grade`."""
  try:
    outcome, score, feedback = ask(session, base.clean("grade is called with text", text), _GRADE_S)
  except RuntimeError as error:
    raise RuntimeError(f"grading failed: {error}") from error
  return outcome, score, feedback


# --- in the parent --------------------------------------------------------------------------------


class EnvironmentPool(PoolOwner):
  """Runs dialogues in worker processes, each reset and step under a wall-clock limit.

  Any thread may call the methods. Only the constructor and `close` block. A dialogue's results
  depend only on its problem, seed and texts. If the process of a dialogue ends, another process
  repeats the dialogue; if a repeated result differs, the dialogue has failed.

  A failure ends its dialogue. The kinds of a `Failure` are:

  * "timeout": a reset or step exceeded the limit, one of its waits exceeded the wait's limit, or
    the environment raised `TimedOut`.
  * "refused": the environment raised `Refused`.
  * "memory": an allocation failed under `memory_mib`, or SIGSEGV or SIGABRT ended the process.
  * "failed": any other exception, an invalid result, or a process that ended in another way.

  Args:
    environment: string of an environment, "name(keyword=value)" or "my_module:factory".
    processes: number of workers, ≥ 1.
    deadline_s: wall-clock limit of a reset or step, seconds. The limit excludes the time in which
      the environment waits for a grade, or in the context `workers.worker.waiting`; such waits have
      limits of their own.
    memory_mib: limit on each worker's address space, MiB; None for no limit.
    startup_timeout_s: limit for a worker to start, seconds.
    variables: environment variables that are added for the workers.
    grade: a `GraderPool`'s method `submit`, for environments whose factory has a keyword `grade`;
      None: no grader. A grade that takes over an hour is a timeout; the grader's own limits are
      shorter.
  Attributes:
    roles: the roles that replies may have: "user", "tool" or both.
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
      graded: the reference that the grader gets; None: "reference" of the problem.
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
      dialogue: the dialogue of a `Started`. Its previous result must have arrived, and must be
        neither a failure nor a turn with `done`: these end a dialogue.
      text: the policy's text.
    Raises:
      ValueError: the dialogue has ended or has a step under way.
      RuntimeError: the pool is closed, or has failed.
    """
    if not isinstance(text, str):
      raise TypeError(f"text = {text!r:.100} has type {type(text).__name__}, expected str")
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
