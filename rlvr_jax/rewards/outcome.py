"""The possible outcomes of grading a completion, and the reward of each."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from rlvr_jax.ops.checks import MAX_SCORE, is_score


class Outcome(enum.StrEnum):
  """The result of grading a completion."""

  CORRECT = "correct"
  WRONG = "wrong"  # or the completion exhausts the grader's memory or recursion limit
  UNPARSEABLE = "unparseable"  # the completion has no answer
  TIMEOUT = "timeout"  # grading took longer than the limit
  CRASHED = "crashed"  # the grader or the host failed, which no completion can cause
  # Outcomes of dialogues that ended before the environment or a grader judged them:
  TURN_LIMIT = "turn_limit"  # the policy has had its last turn
  LENGTH_LIMIT = "length_limit"  # the response has reached its maximum length
  ENVIRONMENT_LIMIT = "environment_limit"  # the text exceeded the environment's time or memory
  ENVIRONMENT_REFUSED = "environment_refused"  # the environment does not accept the policy's text
  ENVIRONMENT_FAILED = "environment_failed"  # the environment's own fault


DIALOGUE_OUTCOMES = (
  Outcome.TURN_LIMIT, Outcome.LENGTH_LIMIT, Outcome.ENVIRONMENT_LIMIT,
  Outcome.ENVIRONMENT_REFUSED, Outcome.ENVIRONMENT_FAILED,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Grade:
  """The verdict on one completion.

  Attributes:
    outcome: what happened.
    score: the grader's own score, normally in [0, 1]; 0 if there is no score.
    detail: human-readable, such as the extracted answer or the exception.
    answer: normal form of the extracted answer, for majority votes; "" if there is no answer. For
      the same reference, equal answers have equal outcomes.
    feedback: a text that the policy may read before it tries again, such as the first failing test.
      The policy must not read `detail` and `answer`, which may contain the reference's answer.
    parts: with `by_name.weighted`, the unweighted score of each grader; otherwise ().
  """

  outcome: Outcome
  score: float = 0.0
  detail: str = ""
  answer: str = ""
  feedback: str = ""
  parts: tuple[float, ...] = ()


class GradingStoppedError(RuntimeError):
  """An outcome whose policy is "stop" occurred."""


OutcomePolicy = Mapping[Outcome, float | str]

SCORE = "score"  # the reward is the grade's score
MASK = "mask"  # as if the rollout had not been sampled
STOP = "stop"  # the run ends with an error message
_ACTIONS = (SCORE, MASK, STOP)

_DEFAULTS: dict[Outcome, float | str] = {
  Outcome.CORRECT: SCORE,
  Outcome.WRONG: 0.0,
  Outcome.UNPARSEABLE: 0.0,
  Outcome.TIMEOUT: 0.0,
  # A crash is the grader's fault, not the policy's: never train on it.
  Outcome.CRASHED: MASK,
  Outcome.TURN_LIMIT: 0.0,
  Outcome.LENGTH_LIMIT: 0.0,
  Outcome.ENVIRONMENT_LIMIT: 0.0,
  Outcome.ENVIRONMENT_REFUSED: 0.0,
  Outcome.ENVIRONMENT_FAILED: MASK,
}


def outcome_policy(overrides: Mapping[str, float | str] | None = None) -> OutcomePolicy:
  """The reward of each outcome: a number, "score", "mask" or "stop".

  Args:
    overrides: outcome name → a number (the reward), "score" (the grade's score), "mask"
      (as if the rollout had not been sampled) or "stop" (end the run). Other outcomes keep their
      default: correct "score", crashed and environment_failed "mask", all others 0.
  Returns:
    The complete table, read-only.
  Raises:
    ValueError: an outcome or action is unknown, or a number is beyond ±1e30.
  """
  table = dict(_DEFAULTS)
  names = [outcome.value for outcome in Outcome]
  for name, action in (overrides or {}).items():
    if name not in names:
      similar_names = difflib.get_close_matches(str(name), names, n=1)
      hint = f"; did you mean {similar_names[0]!r}?" if similar_names else ""
      raise ValueError(f"unknown outcome {name!r} in the reward policy, allowed: {names}{hint}")
    table[Outcome(name)] = _parse_action(name, action)
  return MappingProxyType(table)


def _parse_action(name: str, action: float | str) -> float | str:
  """The action for one outcome, a number as float; raises ValueError if it is not allowed."""
  if isinstance(action, str) and action in _ACTIONS:
    return action
  if is_score(action) and not isinstance(action, bool):
    return float(action)
  raise ValueError(
    f"reward policy of outcome {name!r} is {action!r}, allowed: a number within ±{MAX_SCORE:g},"
    f" or one of {list(_ACTIONS)}"
  )


def reward_of(grade: Grade, outcome_policy: OutcomePolicy) -> float | None:
  """The reward of one grade; None if the policy of its outcome is "mask".

  Raises:
    GradingStoppedError: the policy of this outcome is "stop".
  """
  action = outcome_policy[grade.outcome]
  if action == MASK:
    return None
  if action == STOP:
    raise GradingStoppedError(
      f"a completion was graded {grade.outcome.value!r} ({grade.detail or 'no detail'}). The run "
      f"stops because the reward policy of {grade.outcome.value!r} is 'stop'. Fix the grader, or "
      "set this reward policy to a number or 'mask'."
    )
  return grade.score if action == SCORE else float(action)


class Rewards(NamedTuple):
  """Grades as arrays; B rollouts in the order of the grades."""

  rewards: np.ndarray  # f32[B]; 0 where not valid
  valid: np.ndarray  # bool[B]; False: the update ignores the rollout, see `types.TrainBatch`
  correct: np.ndarray  # f32[B] in {0, 1}


def rewards_from_grades(grades: Sequence[Grade], outcome_policy: OutcomePolicy) -> Rewards:
  """The rewards of B grades.

  Args:
    grades: the grades of B rollouts.
    outcome_policy: the result of `outcome_policy`.
  Raises:
    GradingStoppedError: the policy of a grade's outcome is "stop".
  """
  values = [reward_of(grade, outcome_policy) for grade in grades]
  correct = [grade.outcome is Outcome.CORRECT for grade in grades]
  return Rewards(
    rewards=np.array([value or 0.0 for value in values], np.float32),
    valid=np.array([value is not None for value in values], bool),
    correct=np.array(correct, np.float32),
  )
