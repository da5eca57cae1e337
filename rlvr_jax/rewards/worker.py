"""A grading worker: JSON lines in on stdin, JSON lines out on stdout, one item after another.

Started by `GraderPool` as `python -m rlvr_jax.rewards.worker SETTINGS`. First it says
{"ready": true} or {"error": text}; then {"completion", "reference"} lines are each answered, in
order, by {"outcome", "score", "detail"}. It ends when its stdin does.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from rlvr_jax.rewards.outcome import Grade, Outcome

MAX_DETAIL = 1000  # characters; a detail is for a person to read
_MARGIN_S = 1.0  # past the limit, a worker that its parent has not killed ends by itself


def load_grader(path: str) -> tuple[Callable[..., Grade], Callable[[], None] | None]:
  """Imports "module:function" and the function's self-test, where there is one."""
  module_name, _, function_name = path.partition(":")
  module = importlib.import_module(module_name)
  grader = getattr(module, function_name)
  if not callable(grader):
    raise TypeError(f"{path!r} is a {type(grader).__name__}, not a function")
  return grader, getattr(module, f"{function_name}_self_test", None)


def _describe(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"


def _crashed(detail: str) -> dict[str, Any]:
  return {"outcome": Outcome.CRASHED, "score": 0.0, "detail": detail[:MAX_DETAIL]}


def _reply(grade: Any) -> dict[str, Any]:
  """A grade as its JSON object; anything that is no valid grade is a crash of the grader."""
  if not isinstance(grade, Grade) or not isinstance(grade.outcome, Outcome):
    return _crashed(f"the grader returned {grade!r:.200}, expected a Grade")
  try:
    score = float(grade.score)
  except (TypeError, ValueError):
    score = math.nan
  if not math.isfinite(score):
    return _crashed(f"the grader returned score {grade.score!r:.200}, expected a finite number")
  return {"outcome": grade.outcome, "score": score, "detail": str(grade.detail)[:MAX_DETAIL]}


def _grade_line(grader: Callable[..., Grade], line: bytes) -> dict[str, Any]:
  item = json.loads(line)
  try:
    return _reply(grader(item["completion"], item["reference"]))
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


def _prepare(settings: dict[str, Any]) -> Callable[..., Grade]:
  grader, self_test = load_grader(settings["grader"])
  if settings["memory_mib"] is not None:
    limit = settings["memory_mib"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  if self_test is not None:
    self_test()
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
  for line in requests:
    # The parent kills a worker at the limit. With the parent dead, this ends the worker: a thread
    # in C without the interpreter lock, so neither a sleeping nor a spinning grader holds it up.
    faulthandler.dump_traceback_later(limit_s, file=2, exit=True)
    reply = _grade_line(grader, line)
    faulthandler.cancel_dump_traceback_later()
    _send(replies, reply)
  return 0


if __name__ == "__main__":
  sys.exit(main())
