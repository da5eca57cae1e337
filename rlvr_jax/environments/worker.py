"""A process of environments: JSON lines on stdin and stdout, one request at a time.

`EnvironmentPool` starts it as `python -m rlvr_jax.environments.worker SETTINGS`. It first writes
{"ready": true} or {"error": text}. A request is {"open": number, "problem": …, "seed": …}, {"step":
number, "text": …} or {"close": number}. Each of the first two is answered by {"messages": …},
{"turn": […]} or {"failure": [kind, detail]}; before that the worker may write {"grade": text}, and
then reads the verdict. The worker ends when its stdin does.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any, BinaryIO

from rlvr_jax.environments.base import Environment, Refused, Turn, Verdict
from rlvr_jax.environments.by_name import make_environment

MAX_REPLY = 2**20  # characters of a reply
_MAX_DETAIL = 1000  # characters
ROLES = ("user", "tool")


class _Worker:
  """The dialogues of this process."""

  def __init__(self, settings: dict[str, Any], requests: BinaryIO, replies: BinaryIO):
    self._settings, self._requests, self._replies = settings, requests, replies
    self._environments: dict[int, Environment] = {}

  def send(self, message: dict[str, Any]) -> None:
    self._replies.write(json.dumps(message).encode() + b"\n")
    self._replies.flush()

  def run(self) -> None:
    """Answers requests until there are no more."""
    for line in self._requests:
      request = json.loads(line)
      if "close" in request:
        self._environments.pop(request["close"], None)
      else:
        self.send(self._answer(request))

  def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
    try:
      if "open" in request:
        environment = make_environment(self._settings["environment"], self._grade)
        self._environments[request["open"]] = environment
        return {"messages": _messages(environment.reset(request["problem"], request["seed"]))}
      return {"turn": _turn(self._environments[request["step"]].step(request["text"]))}
    except Refused as error:
      return {"failure": ["refused", str(error)[:_MAX_DETAIL]]}
    except (MemoryError, RecursionError) as error:
      return {"failure": ["memory", _describe(error)]}
    except BaseException as error:  # sys.exit() in an environment is its fault as well
      return {"failure": ["failed", _describe(error)]}

  def _grade(self, text: str) -> Verdict:
    """Has the parent grade a text."""
    self.send({"grade": text})
    answer = json.loads(self._requests.readline())
    if "error" in answer:
      raise RuntimeError(f"the grader failed: {answer['error']}")
    return Verdict(*answer["verdict"])


def _messages(messages: Any) -> list[dict[str, str]] | None:
  """Checked messages of a reset."""
  if messages is None:
    return None
  found = [{"role": str(m["role"]), "content": clean(m["content"])} for m in messages]
  wrong = [m["role"] for m in found if m["role"] not in ("system", "user")]
  if wrong or not found:
    raise ValueError(f"reset returned messages of {wrong or 'nobody'}, expected system and user")
  return found


def _turn(turn: Any) -> list[Any]:
  """The fields of a checked turn."""
  if not isinstance(turn, Turn):
    raise TypeError(f"step returned {type(turn).__name__}, expected a Turn of environments.base")
  if turn.role not in ROLES:
    raise ValueError(f"step returned a Turn with role = {turn.role!r}, expected one of {ROLES}")
  score = None if turn.score is None else float(turn.score)
  if score is not None and not abs(score) < float("inf"):
    raise ValueError(f"step returned a Turn with score = {score}, expected a finite number")
  correct = None if turn.correct is None else bool(turn.correct)
  return [clean(turn.reply), bool(turn.done), score, turn.role, correct]


def clean(reply: Any) -> str:
  """A reply as text that has a UTF-8 form, and at most `MAX_REPLY` characters."""
  if isinstance(reply, bytes | bytearray):
    reply = bytes(reply[: 4 * MAX_REPLY]).decode("utf-8", errors="replace")
  if not isinstance(reply, str):
    raise TypeError(f"a reply is {type(reply).__name__}, expected text")
  if len(reply) > MAX_REPLY:
    reply = f"{reply[:MAX_REPLY]} [cut after {MAX_REPLY} of {len(reply)} characters]"
  return reply.encode("utf-8", errors="replace").decode("utf-8")


def _describe(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"[:_MAX_DETAIL]


def main() -> int:
  settings = json.loads(sys.argv[1])
  # What environments read and print stays out of the protocol.
  requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  null = os.open(os.devnull, os.O_RDWR)
  for stream in (0, 1):
    os.dup2(null, stream)
  worker = _Worker(settings, requests, replies)
  try:
    if settings["memory_mib"] is not None:
      limit = settings["memory_mib"] * 2**20
      resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    make_environment(settings["environment"], worker._grade)  # so that errors come at the start
  except BaseException as error:
    worker.send({"error": _describe(error)})
    return 1
  os.dup2(null, 2)
  worker.send({"ready": True})
  worker.run()
  return 0


if __name__ == "__main__":
  sys.exit(main())
