"""A grading worker: JSON lines in on stdin, JSON lines out on stdout, one item after another.

Started by `GraderPool` as `python -m rlvr_jax.rewards.worker SETTINGS`. First it says
{"ready": true} or {"error": text}; then {"completion", "reference"} lines are each answered, in
order, by {"outcome", "score", "detail", "answer"}, before which {"longer_s"} lines may announce
that it takes so many seconds more than the limit. It ends when its stdin does.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import inspect
import json
import math
import numbers
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from rlvr_jax.rewards import deadlines
from rlvr_jax.rewards.outcome import Grade, Outcome

MAX_DETAIL = 1000  # characters; a detail is for a person to read
_MARGIN_S = 1.0  # past the limit, a worker that its parent has not killed ends by itself
_NOT_PLAIN = (
  inspect.iscoroutinefunction,
  inspect.isasyncgenfunction,
  inspect.isgeneratorfunction,
)


def load_grader(path: str) -> tuple[Callable[..., Any], Callable[[], None] | None]:
  """Imports "module:function" and the function's self-test, where there is one.

  Raises:
    ValueError: the path is not of that form.
    ImportError, AttributeError: there is no such module or function.
    TypeError: it is not a plain function of (completion, reference).
  """
  module_name, colon, function_name = path.partition(":")
  if not (module_name and colon and function_name):
    raise ValueError(f"{path!r} is no grader, expected 'package.module:function'")
  module = importlib.import_module(module_name)
  grader = getattr(module, function_name)
  if not callable(grader):
    raise TypeError(f"{path!r} is a {type(grader).__name__}, not a function")
  if any(is_kind(grader) for is_kind in _NOT_PLAIN):
    raise TypeError(f"{path!r} is a coroutine or generator function; a grader returns its grade")
  _check_signature(path, grader)
  return grader, getattr(module, f"{function_name}_self_test", None)


def _check_signature(path: str, grader: Callable[..., Any]) -> None:
  try:
    signature = inspect.signature(grader)
  except ValueError:
    return  # some functions written in C do not tell
  try:
    signature.bind("completion", {})
  except TypeError as error:
    raise TypeError(
      f"{path!r} has the signature {signature}, but is called as (completion, reference): {error}"
    ) from error


def load_tested(path: str) -> Callable[..., Any]:
  """`load_grader`, then the self-test, whose exceptions pass through."""
  grader, self_test = load_grader(path)
  if self_test is not None:
    self_test()
  return grader


def _describe(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"


def _crashed(detail: str) -> dict[str, Any]:
  return _reply(Grade(Outcome.CRASHED, detail=detail))


def as_grade(value: Any) -> Grade:
  """What a grader returned, as a grade; a number is a score: correct at 1 or more, wrong below.

  Raises:
    TypeError: it is neither a Grade with an Outcome nor a number.
    ValueError: the score is not finite.
  """
  if isinstance(value, numbers.Real | np.bool_):
    outcome = Outcome.CORRECT if float(value) >= 1 else Outcome.WRONG
    value = Grade(outcome, float(value))
  if not isinstance(value, Grade) or not isinstance(value.outcome, Outcome):
    raise TypeError(f"the grader returned {value!r:.200}, expected a Grade or a number")
  try:
    score = float(value.score)
  except (TypeError, ValueError):
    score = math.nan
  if not math.isfinite(score):
    raise ValueError(f"the grader returned score {value.score!r:.200}, expected a finite number")
  return Grade(value.outcome, score, str(value.detail), str(value.answer))


def _short(answer: str) -> str:
  """Long answers by their hash, so that those that differ far behind remain different votes."""
  if len(answer) <= MAX_DETAIL:
    return answer
  return f"{answer[:100]}… sha256 {hashlib.sha256(answer.encode(errors='replace')).hexdigest()}"


def _reply(grade: Grade) -> dict[str, Any]:
  return {
    "outcome": grade.outcome,
    "score": grade.score,
    "detail": grade.detail[:MAX_DETAIL],
    "answer": _short(grade.answer),
  }


def _grade_line(grader: Callable[..., Any], line: bytes) -> dict[str, Any]:
  item = json.loads(line)
  try:
    return _reply(as_grade(grader(item["completion"], item["reference"])))
  except BaseException as error:  # sys.exit() in a grader is a crash of that item, too
    return _crashed(_describe(error))


def _send(stream: BinaryIO, message: dict[str, Any]) -> None:
  stream.write(json.dumps(message).encode() + b"\n")
  stream.flush()


def _protected_streams() -> tuple[BinaryIO, BinaryIO]:
  """Takes over stdin and stdout, so that a grader cannot read or print into the protocol."""
  requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  return requests, replies


def _prepare(settings: dict[str, Any]) -> Callable[..., Any]:
  if settings["memory_mib"] is not None:
    limit = settings["memory_mib"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  grader = load_tested(settings["grader"])
  for path in settings["preload"]:
    load_tested(path)
  return grader


def main() -> int:
  settings = json.loads(sys.argv[1])
  requests, replies = _protected_streams()
  try:
    grader = _prepare(settings)
  except BaseException as error:
    _send(replies, {"error": _describe(error)})
    return 1
  # From here on stderr, too, belongs to the grader: at start-up it told the parent what went wrong.
  os.dup2(1, 2)
  _send(replies, {"ready": True})
  limit_s = settings["timeout_s"] + _MARGIN_S

  def end_after(seconds: float) -> None:
    # The parent kills a worker at the limit. With the parent dead, this ends the worker: a thread
    # in C without the interpreter lock, so neither a sleeping nor a spinning grader holds it up.
    faulthandler.dump_traceback_later(seconds, file=2, exit=True)

  def announce(seconds: float) -> None:
    end_after(limit_s + seconds)
    _send(replies, {"longer_s": seconds})

  deadlines.announce = announce
  for line in requests:
    end_after(limit_s)
    reply = _grade_line(grader, line)
    faulthandler.cancel_dump_traceback_later()
    _send(replies, reply)
  return 0


if __name__ == "__main__":
  sys.exit(main())
