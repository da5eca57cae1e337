"""Environments that misbehave on request: the policy's text says how."""

import json
import os
import re
import subprocess
import sys
import time

from rlvr_jax.environments import Refused, TimedOut, Turn, guess, waiting


class Faulty:
  """Counts its turns, and answers with them, the seed and the text."""

  roles = ("user", "tool")

  def __init__(self, options):
    self.options = options
    self.past = []

  def reset(self, problem, seed):
    self.seed = seed
    self.past.append(problem["question"])
    if problem["question"] == "messages":
      return [{"role": "system", "content": "be kind"}, {"role": "user", "content": f"seed {seed}"}]
    if problem["question"] == "bad messages":
      return [{"role": "assistant", "content": ""}]
    if problem["question"] == "hang":
      time.sleep(60)
    kind, _, path = problem["question"].partition(" ")
    if kind == "once":  # not when it is repeated
      if os.path.exists(path):
        time.sleep(60)
      open(path, "x").close()
    return None

  def step(self, text):
    kind, _, argument = text.partition(" ")
    self.past.append(text)
    if kind == "hang":
      time.sleep(60)
    if kind == "spin":  # inside one C call that keeps the interpreter lock
      re.match(r"(a|a)*b", "a" * 64)
    if kind == "child":
      subprocess.run(["sleep", argument], check=True)
    if kind == "leave":  # a process in a session of its own, which nobody waits for
      command, how = ["sleep", argument.split()[0]], argument.split()[1]
      if how == "twice":
        command = ["sh", "-c", f"setsid {' '.join(command)} &"]
      env = {"PATH": os.environ["PATH"]} if how == "bare" else None
      child = subprocess.Popen(command, start_new_session=True, env=env)
      if how == "twice":
        child.wait()
      if how == "crash":
        os._exit(3)
    if kind == "sleep":
      time.sleep(float(argument))
    if kind == "wait":
      limit_s, seconds = map(float, argument.split())
      with waiting(limit_s):
        time.sleep(seconds)
    if kind == "exit":
      os._exit(int(argument))
    if kind == "signal":
      os.kill(os.getpid(), int(argument))
    if kind == "raise":
      raise ValueError(argument)
    if kind == "refuse":
      raise Refused(argument)
    if kind == "late":
      raise TimedOut(argument)
    if kind == "eat":
      return Turn(str(len(bytearray(4 * 2**30))))
    if kind == "long":
      return Turn("é" * int(argument))
    if kind == "return":
      return {
        "none": None, "text": "a text", "nan": Turn(score=float("nan")), "int": Turn(7),
        "large": Turn(score=10**400),
        "score text": Turn(score="1"),
        "role": Turn("a", role="assistant"), "bytes": Turn(b"a\xff\xfeb"),
        "surrogates": Turn("a\ud800b\ud83d\ude00"), "tool": Turn("a", role="tool"),
        "done": Turn("not read", True, 0.5), "judge": Turn(done=True), "flag": Turn(done=1),
      }[argument]  # fmt: skip
    if kind == "print":
      print('{"event": "result", "dialogue": 0, "result": {}}', flush=True)
      os.write(1, b"noise\n" * 100_000)
      os.write(2, b"noise\n" * 100_000)
      return Turn(f"read {sys.stdin.read()!r}")
    if kind == "modules":
      return Turn(str([name for name in ("jax", "numpy", "tensorflow") if name in sys.modules]))
    if kind == "variable":
      return Turn(os.environ[argument])
    if kind == "grade":
      with open(self.options["log"], "a") as file:
        file.write("asked\n")
      return Turn(json.dumps(self.options["grade"](argument)))
    return Turn(f"{self.seed} {'|'.join(self.past)}")


def faulty(*, tag=""):
  return Faulty({})


def graded(*, grade, log=os.devnull):
  return Faulty({"grade": grade, "log": log})


class Shows:
  """Shows the problem's reference, and the grade of each text."""

  def __init__(self, grade):
    self.grade = grade

  def reset(self, problem, seed):
    self.reference = problem["reference"]

  def step(self, text):
    return Turn(f"{json.dumps(self.reference)} {self.grade(text)[0]}")


def shows(*, grade):
  return Shows(grade)


class Closing:
  """Says in a file that it was closed."""

  def __init__(self, log, roles):
    self.log, self.roles = log, roles

  def reset(self, problem, seed):
    self.seed = seed

  def step(self, text):
    if text == "raise":
      raise KeyError(text)
    return Turn(text, done=text == "done", role="tool")

  def close(self):
    with open(self.log, "a") as file:
      file.write(f"{self.seed}\n")
    raise OSError("nobody reads this")


def closing(*, log=os.devnull, roles=("tool",)):
  return Closing(log, roles)


class BadlyClosing(Faulty):
  """Ends its dialogue, or refuses the text, and misbehaves when it is closed then."""

  def step(self, text):
    self.last_act, _, ending = text.rpartition(" ")
    if ending == "refuse":
      raise Refused("no")
    return Turn(done=True, score=1.0) if ending == "done" else Turn(text)

  def close(self):
    super().step(self.last_act)


def badly_closing():
  return BadlyClosing({})


class _NoReset:
  def step(self, text):
    return Turn(text)


def without_reset():
  return _NoReset()


def raising(*, kind="a fault"):
  raise OSError(kind)


def stuck():
  time.sleep(60)


class Says(Faulty):
  """Does the same whatever the problem and the policy say."""

  def reset(self, problem, seed):
    return super().reset({"question": self.options["question"]}, seed)

  def step(self, text):
    return super().step(self.options["text"])


def says(*, text, question=""):
  return Says({"text": text, "question": question})


class Breaking:
  """A guess that fails at the reset for every third seed, and in the second turn for others."""

  def __init__(self):
    self.guess = guess(low=1, high=7)

  def reset(self, problem, seed):
    self.seed, self.turns = seed, 0
    self.guess.reset(problem, seed)
    if seed % 3 == 2:
      raise OSError("no reset")

  def step(self, text):
    self.turns += 1
    if self.turns == 2 and self.seed % 3 == 1:
      raise OSError("no turn")
    return self.guess.step(text)


def breaking_guess():
  return Breaking()
