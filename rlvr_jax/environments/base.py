"""What an environment is: plain Python that answers the policy's turns. No jax.

An environment's string names a factory with keyword-only hyper-parameters, which is called once per
rollout. If it has a parameter `grade`, it gets the function with which the task's grader judges a
text. All rollouts of a problem get the same seed. The same problem, seed and texts must give the
same replies: then a dialogue can be repeated after its process was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Problem = Mapping[str, Any]  # {"question": text, "answer": text, "reference": JSON}
Message = Mapping[str, str]  # {"role": "system" or "user", "content": text}


class Verdict(NamedTuple):
  """What the task's grader says of a text."""

  outcome: str  # an outcome's value, such as "correct" or "wrong"
  score: float
  detail: str


Grade = Callable[[str], Verdict]


class Turn(NamedTuple):
  """The environment's answer to a turn of the policy."""

  reply: str = ""  # not read if `done`
  done: bool = False
  # Of the dialogue, if `done`. None: the task's grader judges the dialogue. Otherwise the dialogue
  # counts as correct if the score is 1 or more, unless `correct` says so.
  score: float | None = None
  role: str = "user"  # of the reply, for chat templates: "user" or "tool"
  correct: bool | None = None

  @property
  def is_correct(self) -> bool:
    if self.correct is not None:
      return self.correct
    return self.score is not None and self.score >= 1


class Environment(Protocol):
  """The environment of one rollout."""

  def reset(self, problem: Problem, seed: int) -> Sequence[Message] | None:
    """Begins a dialogue.

    Args:
      problem: of the task.
      seed: below 2³², of all randomness.
    Returns:
      The messages with which the dialogue begins; None: the problem's own prompt.
    """
    ...

  def step(self, text: str) -> Turn:
    """Answers a turn of the policy.

    Raises:
      Refused: the text is not accepted, which is the policy's fault. Any other exception is the
        environment's own.
    """
    ...


class Refused(Exception):
  """The environment does not accept the policy's text."""
