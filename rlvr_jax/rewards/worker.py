"""A grading worker: reads JSON lines on stdin, writes JSON lines on stdout, one item at a time.

`GraderPool` starts it as `python -m rlvr_jax.rewards.worker SETTINGS`. It first writes
{"ready": true} or {"error": text}. Then it answers each {"completion", "reference"} line, in order,
with {"outcome", "score", "detail", "answer", "feedback"}. Before an answer, {"longer_s"} lines may
extend the item's limit by that many seconds. An {"asleep"} line reports that the item uses no core:
other workers get the items after it, and this worker drops them, up to `deadlines.GO_ON`. The
worker ends when its stdin does.

A failure that a completion can cause is graded wrong: the grader exceeds the limit of `memory_mib`
or of recursion. Any other exception is the grader's fault, and graded crashed.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
from typing import Any, BinaryIO

from rlvr_jax import processes
from rlvr_jax.rewards import deadlines
from rlvr_jax.rewards.by_name import Grader, load_grader
from rlvr_jax.rewards.outcome import Grade, Outcome

MAX_DETAIL = 1000  # characters; a detail is human-readable
_MARGIN_S = 1.0  # after the limit; then a worker that its parent has not killed ends by itself


def _describe(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"


def _shorten(answer: str) -> str:
  """Replaces the end of a long answer by a hash, so that different answers stay different votes."""
  if len(answer) <= MAX_DETAIL:
    return answer
  return f"{answer[:100]}… sha256 {hashlib.sha256(answer.encode(errors='replace')).hexdigest()}"


def _make_reply(grade: Grade) -> dict[str, Any]:
  return {
    "outcome": grade.outcome,
    "score": grade.score,
    "detail": grade.detail[:MAX_DETAIL],
    "answer": _shorten(grade.answer),
    "feedback": grade.feedback[:MAX_DETAIL],
  }


def _grade_line(grader: Grader, line: bytes, memory_mib: int | None) -> dict[str, Any]:
  """Grades one request; returns the reply."""
  try:
    item = json.loads(line)
    return _make_reply(grader(item["completion"], item["reference"]))
  except RecursionError as error:
    outcome, detail = Outcome.WRONG, f"recursion limit exceeded ({error})"
  except MemoryError as error:
    # If this process has no limit, the machine's memory is exhausted.
    outcome = Outcome.CRASHED if memory_mib is None else Outcome.WRONG
    detail = f"memory limit exceeded ({_describe(error)})"
  except BaseException as error:  # sys.exit() in a grader is a crash of that item as well
    outcome, detail = Outcome.CRASHED, _describe(error)
  return _make_reply(Grade(outcome, detail=detail))


def _send(stream: BinaryIO, message: dict[str, Any]) -> None:
  stream.write(json.dumps(message).encode() + b"\n")
  stream.flush()


def _load_graders(settings: dict[str, Any]) -> Grader:
  """Limits this process's memory, loads and tests all graders, and returns the main one."""
  processes.limit_memory(settings["memory_mib"])
  grader = load_grader(settings["grader"])
  for text in settings["preload"]:
    load_grader(text)
  return grader


def main() -> int:
  settings = json.loads(sys.argv[1])
  requests, replies = processes.protect_streams()
  try:
    grader = _load_graders(settings)
  except BaseException as error:
    _send(replies, {"error": _describe(error)})
    return 1
  # Until here the parent reads errors from stderr; from here on a grader's output is discarded.
  os.dup2(1, 2)
  _send(replies, {"ready": True})
  limit_s = settings["timeout_s"] + _MARGIN_S

  def end_after(seconds: float) -> None:
    # The parent kills a worker at the limit. If the parent is dead, this ends the worker. It is a C
    # thread without the interpreter lock, so neither a sleeping nor a spinning grader delays it.
    faulthandler.dump_traceback_later(seconds, file=2, exit=True)

  def extend(seconds: float) -> None:
    end_after(limit_s + seconds)
    _send(replies, {"longer_s": seconds})

  drops_items = False

  def report_asleep() -> None:
    nonlocal drops_items
    drops_items = True
    _send(replies, {"asleep": True})

  deadlines.extend = extend
  deadlines.report_asleep = report_asleep
  for line in requests:
    if drops_items:
      drops_items = line != deadlines.GO_ON
      continue
    end_after(limit_s)
    reply = _grade_line(grader, line, settings["memory_mib"])
    faulthandler.cancel_dump_traceback_later()
    _send(replies, reply)
  processes.end_with_children()


if __name__ == "__main__":
  sys.exit(main())
