"""A program of workers that does what a request says."""

import os
import time

from rlvr_jax.workers.worker import Stopped, waiting


class _Enough(Stopped):
  kind = "enough"


class Toy:
  """Adds the numbers of each session."""

  ready = "toy"

  def __init__(self, ask, *, log=os.devnull):
    self.ask, self.log, self.sums = ask, log, {}

  def answer(self, session, request):
    kind, value = request
    match kind:
      case "add":
        self.sums[session] = self.sums.get(session, 0) + value
      case "exit":
        os._exit(value)
      case "chance":
        return os.getpid(), False
      case "wait":
        with waiting(60):
          time.sleep(value)
      case "hang":
        time.sleep(60)
      case "ask":
        return self.ask(session, value, 30.0), False
      case "enough":
        raise _Enough(value)
      case "forge":  # guesses the descriptor of the protocol
        with open(self.log, "a") as file:
          file.write("forged\n")
        for descriptor in range(3, 16):
          try:
            os.write(descriptor, value.encode() + b"\n")
          except OSError:
            pass
    return self.sums.get(session, 0), kind == "end"

  def close(self, session):
    with open(self.log, "a") as file:
      file.write(f"{self.sums.pop(session, 0)}\n")


def broken(ask):
  raise OSError("out of order")
