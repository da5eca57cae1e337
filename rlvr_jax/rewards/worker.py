"""A grading worker: JSON lines in on stdin, JSON lines out on stdout, one item after another.

Started by `GraderPool` as `python -m rlvr_jax.rewards.worker SETTINGS`. It first writes
{"ready": true} or {"error": text}. Then it answers each {"completion", "reference"} line, in order,
with {"outcome", "score", "detail", "answer"}. Before an answer, {"longer_s"} lines may announce
that the item takes that many seconds more than the limit. An {"asleep"} line says that the item
uses no core: other workers get the items after it, which this one drops, up to `deadlines.GO_ON`.
It ends when its stdin does.

What the text can cause is a grade of the text: a grader that runs out of memory below the limit of
`memory_mib`, or of recursion, makes it wrong. Any other exception is the grader's own: crashed.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import resource
import sys
from typing import Any, BinaryIO

from rlvr_jax.rewards import deadlines
from rlvr_jax.rewards.by_name import Grader, load_tested
from rlvr_jax.rewards.outcome import Grade, Outcome

MAX_DETAIL = 1000  # characters; a detail is human-readable
_MARGIN_S = 1.0  # after the limit, a worker that its parent has not killed ends by itself


def _describe(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"


def _short(answer: str) -> str:
  """The answer, if long with a hash, so that answers that differ only late stay different votes."""
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


def _grade_line(grader: Grader, line: bytes, memory_mib: int | None) -> dict[str, Any]:
  try:
    item = json.loads(line)
    return _reply(grader(item["completion"], item["reference"]))
  except RecursionError as error:
    outcome, detail = Outcome.WRONG, f"recursion limit exceeded ({error})"
  except MemoryError as error:
    # Without a limit of this process it is the machine's memory that is exhausted.
    outcome = Outcome.CRASHED if memory_mib is None else Outcome.WRONG
    detail = f"memory limit exceeded ({_describe(error)})"
  except BaseException as error:  # sys.exit() in a grader is a crash of that item as well
    outcome, detail = Outcome.CRASHED, _describe(error)
  return _reply(Grade(outcome, detail=detail))


def _send(stream: BinaryIO, message: dict[str, Any]) -> None:
  stream.write(json.dumps(message).encode() + b"\n")
  stream.flush()


def _protected_streams() -> tuple[BinaryIO, BinaryIO]:
  """Duplicates of stdin and stdout for the protocol; a grader's own are redirected to /dev/null."""
  requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 0)
  os.dup2(null, 1)
  return requests, replies


def _address_space() -> int:
  """Bytes of this process's address space; 0 where the system does not say."""
  try:
    with open("/proc/self/statm", encoding="ascii") as file:
      return int(file.read().split()[0]) * resource.getpagesize()
  except OSError:
    return 0


def _prepare(settings: dict[str, Any]) -> Grader:
  if settings["memory_mib"] is not None:
    limit = settings["memory_mib"] * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if _address_space() >= limit:  # else the first item would end the process
      raise MemoryError(f"without an item it takes {_address_space() / 2**20:.0f} MiB")
  grader = load_tested(settings["grader"])
  for text in settings["preload"]:
    load_tested(text)
  return grader


def main() -> int:
  settings = json.loads(sys.argv[1])
  requests, replies = _protected_streams()
  try:
    grader = _prepare(settings)
  except BaseException as error:
    _send(replies, {"error": _describe(error)})
    return 1
  # Until here stderr told the parent what went wrong; now a grader's output there is discarded.
  os.dup2(1, 2)
  _send(replies, {"ready": True})
  limit_s = settings["timeout_s"] + _MARGIN_S

  def end_after(seconds: float) -> None:
    # The parent kills a worker at the limit. If the parent is dead, this ends the worker: a C
    # thread that needs no interpreter lock, so neither a sleeping nor a spinning grader delays it.
    faulthandler.dump_traceback_later(seconds, file=2, exit=True)

  def announce(seconds: float) -> None:
    end_after(limit_s + seconds)
    _send(replies, {"longer_s": seconds})

  dropping = False

  def asleep() -> None:
    nonlocal dropping
    dropping = True
    _send(replies, {"asleep": True})

  deadlines.announce, deadlines.asleep = announce, asleep
  for line in requests:
    if dropping:
      dropping = line != deadlines.GO_ON
      continue
    end_after(limit_s)
    reply = _grade_line(grader, line, settings["memory_mib"])
    faulthandler.cancel_dump_traceback_later()
    _send(replies, reply)
  return 0


if __name__ == "__main__":
  sys.exit(main())
