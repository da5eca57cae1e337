"""Graders that misbehave on request: the completion says how."""

import os
import re
import signal
import subprocess
import sys
import time

from rlvr_jax.rewards import Grade, Outcome
from rlvr_jax.workers.worker import waiting


def faulty(completion, reference):
  kind, _, argument = completion.partition(" ")
  if kind == "ok":
    return Grade(Outcome.CORRECT, 1.0, argument)
  if kind == "sleep":
    time.sleep(float(argument))
    return Grade(Outcome.CORRECT, 1.0, argument)
  if kind == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
      time.sleep(60)
  if kind == "spin":  # exponential, inside one C call that keeps the interpreter lock
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    re.match(r"(a|a)*b", "a" * 64)
  if kind == "child":
    subprocess.run(["sleep", argument], check=True)
  if kind == "alarm":  # a limit of its own, as some libraries of verifiers have
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return Grade(Outcome.CORRECT, 1.0)
  if kind == "exit":
    os._exit(int(argument))
  if kind == "sys.exit":
    sys.exit(argument)
  if kind == "nap":
    with waiting(60):
      time.sleep(float(argument))
    return Grade(Outcome.CORRECT, 1.0, argument)
  if kind == "recursion":
    return faulty(completion, reference)
  if kind == "signal":
    os.kill(os.getpid(), int(argument))
  if kind == "no-memory":
    raise MemoryError
  if kind == "raise":
    raise ValueError(argument)
  if kind == "flood":  # guesses the descriptors of the protocol
    for descriptor in range(3, 16):
      try:
        os.write(descriptor, b"x" * 2**22)
      except OSError:
        pass
  if kind == "eat":
    return Grade(Outcome.CORRECT, float(len(bytearray(4 * 2**30))))
  if kind == "detail":
    return Grade(Outcome.WRONG, 0.5, "y" * 10_000_000)
  if kind == "modules":
    return Grade(Outcome.CORRECT, 1.0, str([m for m in ("jax", "tensorflow") if m in sys.modules]))
  if kind == "environment":
    return Grade(Outcome.CORRECT, 1.0, os.environ[argument])
  return reference["return"]


def untestable(completion, reference):
  raise AssertionError("never called")


def untestable_self_test():
  raise OSError("no licence for this grader")


def dead_at_start_self_test():
  os.write(2, b"last words\n")
  os._exit(7)


def dead_at_start(completion, reference):
  raise AssertionError("never called")
