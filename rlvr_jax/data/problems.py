"""Problems, sources of problems, and tasks."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

sys.set_int_max_str_digits(50_000)  # as in `workers.worker`: references have long integers, too


@dataclasses.dataclass(frozen=True)
class Problem:
  question: str  # the prompt's text, without a chat template; or the texts of `messages`
  answer: str  # the reference answer; "" if many answers are right and the source names none
  solution: str  # demonstration for the warm start, written like a completion
  reference: Mapping[str, Any]  # what the grader needs; JSON-serializable
  # If the demonstration is a dialogue, its turns before `solution`: a text of the policy, a reply
  # of the environment, and so on.
  history: tuple[str, ...] = ()
  where: str = dataclasses.field(default="", compare=False)  # file and line, for error messages
  # The prompt's messages, {"role": "system" or "user" …, "content": text}; () if it is a text.
  messages: tuple[Mapping[str, str], ...] = ()
  # The source's own reference, if `reference` wraps it with the names of graders, as in mixtures.
  inner: Mapping[str, Any] | None = None

  @property
  def own_reference(self) -> Mapping[str, Any]:
    """The reference as the problem's source gave it, before any `wrap`."""
    return self.reference if self.inner is None else self.inner

  def wrap(self, reference: Mapping[str, Any]) -> Problem:
    """Returns the problem with a reference that names its graders."""
    return dataclasses.replace(self, reference=reference, inner=self.own_reference)


class ProblemSource(Protocol):
  """Random access to problems; the same index always gives the same problem."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int, /) -> Problem: ...


@dataclasses.dataclass(frozen=True)
class Task:
  """Problems for each phase.

  No question of `held_out` is in `train` or `warm_start`, except in the task `guess`, which has a
  single question.
  """

  name: str
  train: ProblemSource
  warm_start: ProblemSource  # a small, fixed set with demonstrations
  held_out: ProblemSource
  grader: str  # "name(keyword=value)", or "my_module:function" for a user's own
  # For dialogues: number of turns → pass@1 of the best possible policy. None if unknown.
  best_play: Callable[[int], float] | None = None

  def most_common_answer_share(self) -> float:
    """Share of the held-out problems that the best constant answer would solve, in [0, 1]."""
    size = len(self.held_out)
    answers = collections.Counter(self.held_out[index].answer for index in range(size))
    del answers[""]  # no reference answer
    return max(answers.values(), default=0) / size
