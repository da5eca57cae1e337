"""Answers to a turn of the policy: the environment's reply, or the grade that ends the rollout.

A grader acts as an environment with one turn. Graders and environments work in other processes of
this machine, so answers arrive late and in any order. If a run has several processes, all of them
get the same answers after the same burst of decoding. The first process asks the environments; the
processes take turns in asking the graders.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from rlvr_jax.data import Problem, Tokenizer
from rlvr_jax.environments.base import Turn
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rollouts.dialogues import Beginning, Dialogues
from rlvr_jax.rollouts.engine import Rollout
from rlvr_jax.storage.files import JSON
from rlvr_jax.workers.pool import Failure

_WAIT_S = 2.0  # the most seconds of a wait, after which the processes exchange answers
_OUTCOME_OF_FAILURE = {
  "failed": Outcome.ENVIRONMENT_FAILED,
  "timeout": Outcome.ENVIRONMENT_LIMIT,
  "memory": Outcome.ENVIRONMENT_LIMIT,
  "refused": Outcome.ENVIRONMENT_REFUSED,
}

Reply = np.ndarray  # i32[n], n ≥ 1, the environment's tokens


class EnvironmentStoppedError(RuntimeError):
  """The environments of all problems failed before the policy had written any text."""


def _same(value: JSON) -> JSON:
  return value


def in_this_process(action: Callable[[], JSON]) -> list[Any]:
  """Runs an action and returns [its result]; the `Processes.gather` of a run of one process."""
  return [action()]


@dataclasses.dataclass(frozen=True)
class Processes:
  """The processes of a run, which exchange answers.

  Attributes:
    index: the index of this process.
    count: number of the processes.
    gather: runs an action in each process and returns all results (JSON) in the order of the
      processes. All processes call `gather` together, and all raise an error if one process does.
  """

  index: int = 0
  count: int = 1
  gather: Callable[[Callable[[], JSON]], list[Any]] = in_this_process


ALONE = Processes()


class Asked(NamedTuple):
  """What graders and environments need to know about a rollout in order to answer its turns."""

  problem: Problem
  beginning: Beginning
  seed: int  # the seed of the problem's environment
  thought: str  # "<think>" if the prompt ends with it, as in some chat templates; else ""


@dataclasses.dataclass
class AnswerCounts:
  """Counts of answers, summed over the run so far.

  Attributes:
    replies: turns that an environment has answered.
    reply_waits_s: seconds from the end of a turn until its reply was taken, summed over replies.
    environment_wait_seconds: seconds for which the sampler waited for replies.
    grade_seconds: seconds for which the sampler had nothing to decode and waited for grades.
    dropped_tokens: number of tokens that were sampled after a stop string.
  """

  replies: int = 0
  reply_waits_s: float = 0.0
  environment_wait_seconds: float = 0.0
  grade_seconds: float = 0.0
  dropped_tokens: int = 0

  def add_reply(self, waited_s: float) -> None:
    """Counts an environment's answer, and the seconds since the policy's turn ended."""
    self.replies += 1
    self.reply_waits_s += waited_s

  def add_wait(self, seconds: float, *, for_replies: bool) -> None:
    """Adds a wait of the sampler: for replies, or else for grades."""
    if for_replies:
      self.environment_wait_seconds += seconds
    else:
      self.grade_seconds += seconds

  def drop(self, tokens: int) -> None:
    """Counts tokens that were sampled after a stop string."""
    self.dropped_tokens += tokens


class _Waiting(NamedTuple):
  """A turn that has no answer yet."""

  rollout: Rollout
  asked: Asked
  since: float  # when the turn ended, seconds on the host's clock
  future: Future[Any] | None  # the answer to come; None if this process does not ask for it
  kind: str  # "grade" or "turn"


class Answers:
  """Asks graders for grades, and environments for replies if rollouts are dialogues.

  Attributes:
    counts: the counts of the answers so far.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    grade: Callable[[Sequence[str], Sequence[Mapping[str, JSON]]], Future[list[Grade]]],
    dialogues: Dialogues | None = None,
    processes: Processes = ALONE,
  ):
    """Takes the objects of a run; asks for nothing yet.

    Args:
      tokenizer: the tokenizer of the run.
      grade: (completions, references) → a future of grades.
      dialogues: the dialogues of one sampler; None: a rollout is one turn.
      processes: the processes of the run.
    """
    self.counts = AnswerCounts()
    self._tokenizer, self._grade = tokenizer, grade
    self._dialogues, self._processes = dialogues, processes
    self._num_asked = 0
    # Turns without an answer, and grades that need no grader, both by the number of the request.
    # All processes have the same entries.
    self._waiting: dict[int, _Waiting] = {}
    self._known: dict[int, Grade] = {}

  @property
  def is_waiting(self) -> bool:
    """Whether a turn still has no answer."""
    return bool(self._waiting)

  @property
  def replies_to_come(self) -> int:
    """Number of turns that an environment has yet to answer."""
    return sum(waiting.kind == "turn" for waiting in self._waiting.values())

  def any_process(self, flag: bool) -> bool:
    """Whether a flag is set in any process; all processes call this together."""
    return any(self._processes.gather(functools.partial(_same, flag)))

  def begin(self, problems: Sequence[Problem], seeds: Sequence[int], *, of: int) -> list[Beginning]:
    """Resets the environments of problems and returns the beginning of each problem's rollouts.

    Args:
      problems: the problems whose rollouts begin now.
      seeds: the seed of each problem's environment.
      of: number of problems in the whole draw; `problems` may be a part of them.
    Raises:
      EnvironmentStoppedError: the environments of all problems of a draw failed at their reset.
    """
    if self._dialogues is None:
      return [Beginning()] * len(problems)
    resets = self._dialogues.reset(problems, seeds) if self._processes.index == 0 else []
    begun: list[Any] | None = None
    while begun is None:  # waits in short pieces, so that a request to end is noticed
      unfinished = concurrent.futures.wait(resets, timeout=_WAIT_S).not_done
      mine = None if unfinished else self._dialogues.begun(resets)
      begun = self._processes.gather(functools.partial(_same, mine))[0]
    beginnings = [Beginning(*fields) for fields in begun]
    if problems and len(problems) == of and all(beginning.failure for beginning in beginnings):
      raise EnvironmentStoppedError(
        f"the environment failed at its reset for all {len(problems)} problems of a batch; the"
        f" first error is: {beginnings[0].failure}"
      )
    return beginnings

  def find_stop(self, rollout: Rollout, start: int) -> int | None:
    """The length at which a stop string ends the response's turn; None if there is no stop string.

    Args:
      rollout: the rollout up to its newest token.
      start: the index of the first new token.
    """
    if self._dialogues is None:
      return None
    length = self._dialogues.find_stop(rollout, start)
    if length is not None:
      self.counts.drop(rollout.length - length)
    return length

  def ask(self, rollout: Rollout, asked: Asked) -> None:
    """Asks for the answer to a turn that has ended; `take` returns the answer."""
    number, self._num_asked = self._num_asked, self._num_asked + 1
    self._waiting[number] = _Waiting(rollout, asked, time.monotonic(), None, "turn")
    if self._dialogues is None:
      text = self._tokenizer.decode(rollout.arrays["tokens"][: rollout.length].tolist())
      self._ask_grader(number, asked.thought + text)
    elif asked.beginning.failure is not None:
      self._known[number] = Grade(Outcome.ENVIRONMENT_FAILED, detail=asked.beginning.failure)
    elif not rollout.stopped:
      self._known[number] = Grade(Outcome.LENGTH_LIMIT)
    elif self._processes.index == 0:
      future = self._dialogues.step(rollout, asked.problem, asked.seed)
      self._waiting[number] = self._waiting[number]._replace(future=future)

  def take(
    self, *, patience_s: float, until_one: bool
  ) -> list[tuple[Rollout, Asked, Reply | Grade]]:
    """The answers that have arrived, in the order in which they were requested.

    Waits only for a few seconds, so that the caller can react to signals.

    Args:
      patience_s: seconds to wait for the outstanding replies of environments.
      until_one: whether to wait until at least one answer has arrived.
    """
    known, self._known = self._known, {}
    if not self._waiting:
      return []
    self._wait(patience_s, until_one and not known)
    by_process = self._processes.gather(self._results)
    results = {number: (kind, fields) for of_one in by_process for number, kind, fields in of_one}
    answers: list[tuple[Rollout, Asked, Reply | Grade]] = []
    for number in sorted([*known, *results]):
      answer = known[number] if number in known else self._answer(number, *results[number])
      if answer is not None:
        rollout, asked, *_ = self._waiting.pop(number)
        if self._dialogues is not None and isinstance(answer, Grade):
          rollout.end(is_cut_off=answer.outcome is Outcome.LENGTH_LIMIT)
          self._dialogues.end(rollout)
        answers.append((rollout, asked, answer))
    return answers

  def _ask_grader(self, number: int, text: str) -> None:
    """Asks for a grade in one process, whose result, such as a timeout, all processes then use."""
    waiting = self._waiting[number]._replace(kind="grade", future=None)
    if number % self._processes.count == self._processes.index:
      waiting = waiting._replace(future=self._grade([text], [waiting.asked.problem.reference]))
    self._waiting[number] = waiting

  def _wait(self, patience_s: float, until_one: bool) -> None:
    """Waits for futures of this process, see `take`; counts the time."""
    began = time.monotonic()
    futures = {kind: [*self._futures(kind)] for kind in ("turn", "grade")}
    if until_one:
      first = concurrent.futures.FIRST_COMPLETED
      both = [*futures["turn"], *futures["grade"]]
      concurrent.futures.wait(both, timeout=_WAIT_S, return_when=first)
    if patience_s and futures["turn"]:
      concurrent.futures.wait(futures["turn"], timeout=patience_s)
    self.counts.add_wait(time.monotonic() - began, for_replies=bool(futures["turn"]))

  def _futures(self, kind: str) -> Collection[Future[Any]]:
    return [w.future for w in self._waiting.values() if w.kind == kind and w.future is not None]

  def _results(self) -> list[JSON]:
    """The results of this process's finished futures, as JSON: [number, kind, fields] each."""
    results: list[JSON] = []
    for number, waiting in self._waiting.items():
      if waiting.future is None or not waiting.future.done():
        continue
      result = waiting.future.result()
      if waiting.kind == "grade":
        (grade,) = result
        results.append([number, "grade", [*dataclasses.astuple(grade)]])
      else:
        kind = "failure" if isinstance(result, Failure) else "turn"
        results.append([number, kind, [*result]])
    return results

  def _answer(self, number: int, kind: str, fields: list[Any]) -> Reply | Grade | None:
    """The answer that a result contains; None if a grader has yet to judge the dialogue."""
    rollout, asked, since, *_ = self._waiting[number]
    if kind == "grade" or self._dialogues is None:
      outcome, score, detail, answer, feedback, parts = fields
      return Grade(Outcome(outcome), score, detail, answer, feedback, tuple(parts))
    self.counts.add_reply(time.monotonic() - since)
    if kind == "failure":
      failure = Failure(*fields)
      return Grade(_OUTCOME_OF_FAILURE[failure.kind], detail=failure.detail)
    answer = self._dialogues.answer(rollout, Turn(*fields))
    if answer is None:
      self._ask_grader(number, self._dialogues.judged_text(rollout, asked.thought))
    return answer
