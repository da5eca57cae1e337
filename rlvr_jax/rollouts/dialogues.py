"""Dialogues with an environment: the environment's replies as tokens, and how dialogues end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from rlvr_jax.data import Problem, Tokenizer
from rlvr_jax.data.stop_strings import find_stop
from rlvr_jax.environments.base import Message, Turn
from rlvr_jax.environments.dialogues import EnvironmentPool, Started
from rlvr_jax.rewards.graders import thought_prefix
from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rollouts.engine import Place, Rollout
from rlvr_jax.storage.files import JSON
from rlvr_jax.workers.pool import Failure

CUTS = ("tail", "head", "middle")
CUT_NOTE = " [cut] "  # replaces the part of a reply that was cut off


@dataclasses.dataclass(frozen=True)
class DialogueSettings:
  """Limits of a run's dialogues.

  Attributes:
    max_turns: the most turns of the policy, ≥ 1.
    max_reply_length: the most tokens of a reply's text, without the template around it; a longer
      text is cut. 0: no limit.
    cut: which part of a reply is cut off: "tail", "head" or "middle".
    stop_strings: strings that end a turn of the policy, as a stop token does, and are part of the
      turn.
    grade_all_turns: whether the grader reads the whole dialogue, not just the policy's last turn.
  """

  max_turns: int
  max_reply_length: int = 0
  cut: str = "tail"
  stop_strings: tuple[str, ...] = ()
  grade_all_turns: bool = False


class Beginning(NamedTuple):
  """How every dialogue about a problem begins; JSON."""

  messages: Sequence[Message] | None = None  # first messages; None: the problem's own prompt
  failure: str | None = None  # why the reset failed, which ends all these dialogues


class Dialogues:
  """The dialogues of one sampler with their environments.

  Attributes:
    settings: the settings of the run.
  """

  def __init__(
    self, settings: DialogueSettings, tokenizer: Tokenizer, pool: EnvironmentPool | None
  ):
    """Takes the objects of a run; begins no dialogue yet.

    Args:
      settings, tokenizer: settings and tokenizer of the run.
      pool: the processes of environments; None except on the first process of a run.
    """
    self.settings = settings
    self._tokenizer, self._pool = tokenizer, pool
    self._started: dict[Place, Future[Started | Failure]] = {}  # resets, by `Rollout.place`

  def reset(
    self, problems: Sequence[Problem], seeds: Sequence[int]
  ) -> list[Future[Started | Failure]]:
    """Resets the environments of problems; the results say how dialogues begin."""
    pairs = zip(problems, seeds, strict=True)
    return [
      self.pool.reset(as_mapping(problem), seed, problem.reference) for problem, seed in pairs
    ]

  def begun(self, resets: Sequence[Future[Started | Failure]]) -> list[Beginning]:
    """The beginnings of dialogues, from finished resets; JSON."""
    return [self._begun(reset.result()) for reset in resets]

  def _begun(self, started: Started | Failure) -> Beginning:
    if isinstance(started, Failure):
      return Beginning(None, started.detail)
    self.pool.close_dialogue(started.dialogue)
    return Beginning(started.messages and [dict(message) for message in started.messages])

  @property
  def pool(self) -> EnvironmentPool:
    """The pool of environment processes; only the first process of a run has it."""
    if self._pool is None:
      raise RuntimeError("only the first process of a run has environments")
    return self._pool

  def find_stop(self, rollout: Rollout, start: int) -> int | None:
    """The length at which a stop string ends the response's turn; None if there is no stop string.

    Args:
      rollout: the rollout up to its newest token.
      start: the index of the first new token.
    """
    strings = self.settings.stop_strings
    if not strings:
      return None
    first = turn_start(rollout, rollout.length)
    ids = rollout.arrays["tokens"][first : rollout.length].tolist()
    kept = find_stop(self._tokenizer, ids, strings, searched=start - first)
    return None if kept is None else first + kept

  def step(self, rollout: Rollout, problem: Problem, seed: int) -> Future[Turn | Failure]:
    """A future of the environment's answer to a turn; the first turn begins the dialogue."""
    text, pool = self._last_turn(rollout), self.pool
    if rollout.place in self._started:
      started = self._started[rollout.place].result()
      if isinstance(started, Failure):
        raise RuntimeError(f"the dialogue cannot go on: its environment failed: {started.detail}")
      return pool.step(started.dialogue, text)
    reset = pool.reset(as_mapping(problem), seed, problem.reference)
    self._started[rollout.place] = reset
    answer: Future[Turn | Failure] = Future()

    def step(reset: Future[Started | Failure]) -> None:
      if (error := reset.exception()) is not None:
        answer.set_exception(error)
      elif isinstance(started := reset.result(), Failure):
        # The environment has not read the policy's text, so the text is not to blame.
        answer.set_result(started._replace(kind="failed"))
      else:
        try:
          pool.step(started.dialogue, text).add_done_callback(copy)
        except Exception as closed:  # the pool was closed meanwhile
          answer.set_exception(closed)

    def copy(done: Future[Turn | Failure]) -> None:
      if (error := done.exception()) is not None:
        answer.set_exception(error)
      else:
        answer.set_result(done.result())

    reset.add_done_callback(step)
    return answer

  def answer(self, rollout: Rollout, turn: Turn) -> np.ndarray | Grade | None:
    """What an environment's answer means: a reply, i32[n] tokens, or the dialogue's grade.

    The result is None if the dialogue has ended and a grader judges it.
    """
    if turn.done:
      if turn.score is None:
        return None
      return Grade(Outcome.CORRECT if turn.is_correct else Outcome.WRONG, turn.score)
    length = rollout.length
    if turn.score is not None:
      rollout.arrays["turn_scores"][length - 1] = turn.score
    if int(rollout.arrays["turns"][length - 1]) // 2 + 1 >= self.settings.max_turns:
      return Grade(Outcome.TURN_LIMIT)
    tokens = self._encode(turn, last=int(rollout.arrays["tokens"][length - 1]))
    if not len(tokens):
      detail = f"the reply {turn.reply!r:.100} has no tokens"
      return Grade(Outcome.ENVIRONMENT_REFUSED, detail=detail)
    # The policy's next turn needs room for at least one token.
    if length + len(tokens) >= len(rollout.arrays["tokens"]):
      return Grade(Outcome.LENGTH_LIMIT)
    return tokens

  def judged_text(self, rollout: Rollout, thought: str) -> str:
    """The text that a grader judges: the policy's last turn, or the whole dialogue.

    Args:
      rollout: a rollout that has ended.
      thought: "<think>" if the rollout's prompt ends with it, else "".
    """
    if self.settings.grade_all_turns:
      return thought + self._tokenizer.decode(rollout.arrays["tokens"][: rollout.length].tolist())
    return self._last_turn(rollout)

  def end(self, rollout: Rollout) -> None:
    """Closes the dialogue of a graded rollout."""
    started = self._started.pop(rollout.place, None)
    if started is not None:
      began = started.result()  # no wait: the reset ended before the first answer
      if isinstance(began, Started):
        self.pool.close_dialogue(began.dialogue)

  def _last_turn(self, rollout: Rollout) -> str:
    """The text of the policy's last turn, which ends the response so far.

    The result begins with "<think>" if the text before the turn ends with "<think>", as in some
    chat templates.
    """
    length = rollout.length
    first = turn_start(rollout, length)
    before = rollout.prompt
    if first:
      before = rollout.arrays["tokens"][turn_start(rollout, first) : first]
    text = self._tokenizer.decode(rollout.arrays["tokens"][first:length].tolist())
    return thought_prefix(self._tokenizer.decode(before.tolist())) + text

  def _encode(self, turn: Turn, *, last: int) -> np.ndarray:
    """The tokens of a reply, cut if it is too long; `last` is the response's last token so far."""
    settings, tokenizer = self.settings, self._tokenizer
    text, most = turn.reply, settings.max_reply_length
    if most and len(tokenizer.encode(text)) > most:
      text = shorten(text, settings.cut, lambda part: len(tokenizer.encode(part)) <= most)
    return np.asarray(tokenizer.encode_reply(text, turn.role, last), np.int32)


def shorten(text: str, cut: str, fits: Callable[[str], bool]) -> str:
  """The text without its tail, head or middle, and with a note in place of the removed part.

  Args:
    text: a text that is too long.
    cut: one of `CUTS`.
    fits: text → whether it is short enough; bisection finds roughly the longest text that fits.
  """
  kept, too_many = 0, len(text)  # numbers of characters
  while too_many - kept > 1:
    middle = (kept + too_many) // 2
    if fits(_without(text, cut, middle)):
      kept = middle
    else:
      too_many = middle
  return _without(text, cut, kept)


def _without(text: str, cut: str, kept: int) -> str:
  """The text shortened to `kept` characters, with the note in place of the removed part."""
  if cut == "tail":
    return text[:kept] + CUT_NOTE
  if cut == "head":
    return CUT_NOTE + text[len(text) - kept :]
  first = (kept + 1) // 2
  return text[:first] + CUT_NOTE + text[len(text) - (kept - first) :]


def turn_start(rollout: Rollout, length: int) -> int:
  """The index at which the last turn among the first `length` response tokens begins."""
  turns = rollout.arrays["turns"][:length]
  return int(np.argmax(turns == turns[-1]))


def as_mapping(problem: Problem) -> dict[str, JSON]:
  """A problem as the mapping that environments get."""
  return {
    "question": problem.question,
    "answer": problem.answer,
    "reference": dict(problem.own_reference),
  }
