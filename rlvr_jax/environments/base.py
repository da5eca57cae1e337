"""Defines the interface of an environment, and checks the values that an environment returns.

An environment answers the policy in one rollout. Its factory is called once per rollout, with
hyper-parameters as keywords:

    class Echo:
      def reset(self, problem, seed):
        return None  # the problem's own prompt

      def step(self, text):
        return Turn("You said: " + text)

    def echo() -> Environment:
      return Echo()

A factory with a keyword `grade` gets the task's grader for the rollout's problem. A factory with a
keyword `deadline_s` gets the time limit of a turn in seconds. Replies may depend only on problem,
seed and the policy's texts: if the process of an environment dies, the dialogue is repeated in
another process and must give the same replies. Take random numbers from `random.Random(seed)`, and
keep no state outside of the environment's object. All rollouts of a problem have the same seed. The
code runs in a thread, so it cannot set signal handlers.

Replies have the role "user", unless the class says `roles = ("tool",)`. An environment with open
resources, such as a connection, may have a method `close()`, which is called when the dialogue has
ended.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from rlvr_jax.ops.checks import MAX_SCORE, is_score
from rlvr_jax.workers.worker import Stopped

MAX_REPLY = 2**20  # the most bytes of a reply, in UTF-8
ROLES = ("user", "tool")  # roles that a reply may have

# "question", "answer" and "reference" of the problem; JSON-serializable.
Problem: TypeAlias = Mapping[str, Any]
# {"role": "system" or "user", "content": text}
Message: TypeAlias = Mapping[str, str]
# From the policy's text to (the outcome's value, such as "correct" or "wrong"; score; feedback, the
# text that the grader lets the policy read, or ""). Raises RuntimeError if the grader crashes.
Grade: TypeAlias = Callable[[str], tuple[str, float, str]]


class Turn(NamedTuple):
  """An environment's answer to a turn of the policy: its reply, or the end of the dialogue."""

  reply: str = ""  # ignored if done; bytes are decoded as UTF-8
  done: bool = False  # whether the dialogue ends
  # If done: the score of the dialogue; None: the task's grader judges the dialogue. Else: the score
  # of the policy's turn, which is no reward, but which an advantage such as `mt_grpo` compares.
  score: float | None = None
  role: str = "user"  # role of the reply in chat templates: "user" or "tool"
  # If done with a score: whether the dialogue is correct; None: it is correct if the score is ≥ 1.
  correct: bool | None = None

  @property
  def is_correct(self) -> bool:
    """Whether the dialogue counts as correct."""
    if self.correct is not None:
      return self.correct
    return self.score is not None and self.score >= 1


class Refused(Stopped):
  """Raised by `step` to refuse the policy's text; the outcome `ENVIRONMENT_REFUSED` has a reward.

  The outcome is not a fault of the environment.
  """

  kind = "refused"


class TimedOut(Stopped):
  """Raised by `step` if the policy's text causes too much work.

  The outcome `ENVIRONMENT_LIMIT` has a reward, and is not a fault of the environment. An
  environment may raise this error at a limit of its own, below the pool's limit. At the pool's
  limit the process is killed.
  """

  kind = "timeout"


class Environment(Protocol):
  """The interface of an environment, which answers the policy in one rollout."""

  def reset(self, problem: Problem, seed: int) -> Sequence[Message] | None:
    """Starts the dialogue; returns the prompt's messages, or None for the problem's prompt."""

  def step(self, text: str) -> Turn:
    """Answers the policy's text."""


# --- checks ---------------------------------------------------------------------------------------


def declared_roles(environment: Environment) -> list[str]:
  """The roles that an environment's replies may have.

  Raises:
    ValueError: the declared roles are invalid.
  """
  roles = getattr(environment, "roles", ROLES[:1])
  if isinstance(roles, str) or not roles or not set(roles) <= set(ROLES):
    raise ValueError(
      f"{type(environment).__name__} has roles = {roles!r:.100}, expected a sequence of roles from"
      f" {ROLES}, such as ('tool',)"
    )
  return list(roles)


def check_turn(turn: Any, roles: Sequence[str]) -> Turn:
  """Checks the result of `step`; makes the reply valid text of at most `MAX_REPLY` bytes.

  Args:
    turn: the result of `step`.
    roles: the result of `declared_roles`.
  Raises:
    Refused: see `check_score`.
    TypeError: `turn` is not a Turn, or a field has a wrong type.
    ValueError: the reply's role is not declared.
  """
  if not isinstance(turn, Turn):
    raise TypeError(f"step returned {turn!r:.100}, expected a Turn")
  if not isinstance(turn.done, bool):
    raise TypeError(f"step returned done = {turn.done!r:.100}, expected True or False")
  if not turn.done and turn.role not in roles:
    raise ValueError(
      f"step returned role = {turn.role!r:.100}, expected one of {roles}; declare every"
      " role of a reply in the environment's class, such as roles = ('tool',)"
    )
  if not isinstance(turn.score, numbers.Real | None):
    raise TypeError(f"step returned score = {turn.score!r:.100}, expected a number or None")
  if not isinstance(turn.correct, bool | None):
    raise TypeError(f"step returned correct = {turn.correct!r:.100}, expected True, False or None")
  score = None if turn.score is None else check_score("step returned score", turn.score)
  reply = "" if turn.done else cut(clean("step returned a reply", turn.reply))
  return Turn(reply, turn.done, score, turn.role, turn.correct)


def check_score(owner: str, score: numbers.Real) -> float:
  """The score as a float; a score that cannot be a reward, such as NaN, is refused.

  Raises:
    Refused: the score is not finite, or too large; the message begins with `owner`.
  """
  if not is_score(score):
    raise Refused(f"{owner} = {score!r:.100}, expected a number within ±{MAX_SCORE:g}")
  return float(score)


def check_messages(messages: Any) -> list[dict[str, str]] | None:
  """Checks the result of `reset`.

  Raises:
    TypeError: `messages` is neither None nor a sequence of messages.
  """
  if messages is None:
    return None
  example = '[{"role": "user", "content": "…"}]'
  if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
    raise TypeError(f"reset returned {messages!r:.100}, expected None or messages, as {example}")
  for message in messages:
    is_message = isinstance(message, Mapping) and message.keys() == {"role", "content"}
    if not is_message or message["role"] not in ("system", "user"):
      raise TypeError(
        f"reset returned the message {message!r:.100}, expected a role, 'system' or 'user', and"
        f" content, as {example}"
      )
  return [
    {"role": message["role"], "content": cut(clean("reset returned content", message["content"]))}
    for message in messages
  ]


def clean(owner: str, text: Any) -> str:
  """Converts str or bytes to text; invalid parts become U+FFFD.

  Raises:
    TypeError: the text is neither str nor bytes; the message begins with `owner`.
  """
  if isinstance(text, bytes | bytearray):
    return text.decode(errors="replace")
  if not isinstance(text, str):
    raise TypeError(f"{owner} of type {type(text).__name__}, expected text")
  if text.isascii():
    return str(text)
  return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def cut(text: str, max_bytes: int = MAX_REPLY) -> str:
  """Cuts text to `max_bytes` bytes in UTF-8, and adds a note at its end if it was longer."""
  data = text.encode()
  if len(data) <= max_bytes:
    return text
  note = f"\n[Cut: this text had {len(data)} bytes, at most {max_bytes} are kept.]"
  return data[: max_bytes - len(note)].decode(errors="ignore") + note
