"""A worker of environments: reads and writes JSON lines, has many dialogues, runs one at a time.

`EnvironmentPool` starts it as `python -m rlvr_jax.environments.worker SETTINGS`. It first writes
{"ready": roles of replies} or {"error": text}. Requests name a dialogue by its number:
{"kind": "reset", "problem", "seed"}, {"kind": "step", "text"}, {"kind": "close"}. Of a request it
reports {"event": "running"} when the environment's code starts, and its "result" at the end:
{"messages"}, {"turn"}, {"failure": [kind, detail]} or {}. An environment is closed by a request of
its own, so that its `close` cannot take away a result. Where the code waits (`base.waiting`), it
reports "waiting" with "limit_s", then "waited", then "running" again, and other dialogues run
meanwhile. {"event": "grade", "text"} asks for a grade, and {"kind": "grade", "grade": […]} answers,
or {"kind": "grade", "error": text}. The worker ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

from rlvr_jax import processes
from rlvr_jax.environments import base
from rlvr_jax.environments.base import Environment
from rlvr_jax.environments.by_name import make_environment

FIELD = "environment"  # start of messages about the environment's string
MAX_DETAIL = 1000  # characters
MEMORY_STATUS = 77  # exit status if the memory is used up outside of an environment's code
_MARGIN_S = 1.0  # after the limit; then a worker that its parent has not killed ends by itself
_MAX_THREADS = 32  # dialogues that wait at a time, and one that runs
_STACK_BYTES = 4 * 2**20  # of a thread; stacks count as address space, which may be limited


def _describe(error: BaseException) -> str:
  """The error in one line, with the line of the program that raised it."""
  frames = traceback.extract_tb(error.__traceback__)
  position = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
  return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_DETAIL]}{position}"


class _Channel:
  """Sends lines to the parent, from any thread."""

  def __init__(self, stream: BinaryIO):
    self._stream = stream
    self._lock = threading.Lock()

  def send(self, message: dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    with self._lock:
      self._stream.write(line)
      self._stream.flush()


class _Worker:
  """The dialogues of this process, and the threads that run them, one at a time."""

  def __init__(self, settings: dict[str, Any], channel: _Channel):
    self._settings = settings
    self._channel = channel
    self._dialogues: dict[int, Environment] = {}
    self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    self._grades: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
    self._core = threading.Lock()  # held while an environment's code runs
    self._num_threads = 0  # this and the next change while their thread has the core
    self._num_waiting = 0
    self._start_thread()

  def receive(self, message: dict[str, Any]) -> None:
    """Takes a line of the parent."""
    if message["kind"] == "grade":
      if answers := self._grades.get(message["dialogue"]):
        answers.put(message)
    else:
      self._requests.put(message)

  def _start_thread(self) -> None:
    """Starts a thread if all wait."""
    if self._num_threads <= min(self._num_waiting, _MAX_THREADS - 1):
      threading.Thread(target=self._serve, daemon=True).start()
      self._num_threads += 1

  def _serve(self) -> None:
    """Runs in threads: answers requests."""
    try:
      while True:
        request = self._requests.get()
        dialogue = request["dialogue"]
        base.set_waiter(functools.partial(self._wait, dialogue))
        self._enter_core(dialogue)
        result = self._answer(dialogue, request)
        self._leave_core({"event": "result", "dialogue": dialogue, "result": result})
    except MemoryError:
      os._exit(MEMORY_STATUS)
    except BaseException:
      os._exit(1)

  def _enter_core(self, dialogue: int) -> None:
    self._core.acquire()
    # The parent kills a worker at the limit. If the parent is dead, this ends the worker. It is a C
    # thread without the interpreter lock: neither a sleeping nor a spinning environment delays it.
    try:
      faulthandler.dump_traceback_later(self._settings["deadline_s"] + _MARGIN_S, file=2, exit=True)
    except RuntimeError:  # there is no memory for its stack
      os._exit(MEMORY_STATUS)
    self._channel.send({"event": "running", "dialogue": dialogue})

  def _leave_core(self, message: dict[str, Any]) -> None:
    faulthandler.cancel_dump_traceback_later()
    self._channel.send(message)  # before the next dialogue is reported to run
    self._core.release()

  @contextlib.contextmanager
  def _wait(self, dialogue: int, limit_s: float) -> Iterator[None]:
    """What `base.waiting` does in a request's thread."""
    self._num_waiting += 1
    with contextlib.suppress(RuntimeError):  # there is no memory for one more thread
      self._start_thread()
    self._leave_core({"event": "waiting", "dialogue": dialogue, "limit_s": float(limit_s)})
    try:
      yield
    finally:
      self._channel.send({"event": "waited", "dialogue": dialogue})
      self._enter_core(dialogue)
      self._num_waiting -= 1

  def _answer(self, dialogue: int, request: dict[str, Any]) -> dict[str, Any]:
    """Runs the environment's code; returns the result."""
    try:
      match request["kind"]:
        case "reset":
          environment = self._dialogues[dialogue] = self._make(dialogue)
          messages = environment.reset(request["problem"], request["seed"])
          return {"messages": base.check_messages(messages)}
        case "step":
          environment = self._dialogues[dialogue]
          roles = base.declared_roles(environment)
          return {"turn": base.check_turn(environment.step(request["text"]), roles)}
      self._close(dialogue)
      return {}
    except base.Refused as error:
      kind = "refused"
      detail = str(error)
    except base.TimedOut as error:
      kind = "timeout"
      detail = str(error)
    except MemoryError as error:
      kind = "memory"
      detail = _describe(error)
    except BaseException as error:  # sys.exit() in an environment is its failure as well
      kind = "failed"
      detail = _describe(error)
    return {"failure": [kind, base.clean("detail", detail)[:MAX_DETAIL]]}

  def _close(self, dialogue: int) -> None:
    """Closes the environment of a dialogue, if it has one that can be closed."""
    environment = self._dialogues.pop(dialogue, None)
    with contextlib.suppress(BaseException):  # nobody waits for it
      close = getattr(environment, "close", None)
      if close is not None:
        close()

  def _make(self, dialogue: int) -> Environment:
    grade = functools.partial(self._grade, dialogue) if self._settings["has_grade"] else None
    deadline_s = self._settings["deadline_s"]
    return make_environment(FIELD, self._settings["environment"], grade, deadline_s=deadline_s)

  def _grade(self, dialogue: int, text: str) -> tuple[str, float, str]:
    """The `grade` of an environment: asks the parent."""
    text = base.clean("grade is called with text", text)
    answers = self._grades[dialogue] = queue.SimpleQueue()
    with base.waiting(self._settings["grade_s"]):
      self._channel.send({"event": "grade", "dialogue": dialogue, "text": text})
      message = answers.get(timeout=self._settings["grade_s"])
    del self._grades[dialogue]
    if "error" in message:
      raise RuntimeError(f"grading failed: {message['error']}")
    outcome, score, feedback = message["grade"]
    return outcome, score, feedback


def _test(settings: dict[str, Any]) -> list[str]:
  """Makes the environment once, so that a mistake ends the worker's start; returns its roles."""

  def refuse(text: str) -> tuple[str, float, str]:
    raise RuntimeError("grade was called by the factory; call it in step")

  grade = refuse if settings["has_grade"] else None
  environment = make_environment(
    FIELD, settings["environment"], grade, deadline_s=settings["deadline_s"]
  )
  return base.declared_roles(environment)


def main() -> int:
  settings = json.loads(sys.argv[1])
  requests, replies = processes.protect_streams()
  channel = _Channel(replies)
  try:
    processes.limit_memory(settings["memory_mib"])
    roles = _test(settings)
  except ValueError as error:
    channel.send({"error": str(error)})
    return 1
  except BaseException as error:
    channel.send({"error": _describe(error)})
    return 1
  # Until here the parent reads errors from stderr; from here on others' output is discarded.
  os.dup2(1, 2)
  channel.send({"ready": roles})
  threading.stack_size(_STACK_BYTES)
  worker = _Worker(settings, channel)
  try:
    for line in requests:
      worker.receive(json.loads(line))
  except MemoryError:
    os._exit(MEMORY_STATUS)
  processes.end_with_children()


if __name__ == "__main__":
  sys.exit(main())
