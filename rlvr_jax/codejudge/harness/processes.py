"""Helpers for several kinds of processes: ending a forked child, and running a text."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from typing import Any

SOLUTION = "<solution>"  # the file name that the program's own code has


@contextlib.contextmanager
def never_returning() -> Iterator[None]:
  """A forked child runs within this context and ends there, without returning to the caller."""
  try:
    yield
  except BaseException:
    with contextlib.suppress(BaseException):
      traceback.print_exc()
  finally:
    os._exit(1)


def take_streams(
  channel: socket.socket | None, stdin: int | None = None, output: int | None = None,
  error: int | None = None,
) -> None:  # fmt: skip
  """Leaves only the given descriptors open: as standard streams (null for None), and a channel."""
  os.setsid()
  null = os.open(os.devnull, os.O_RDWR)
  for number, descriptor in enumerate((stdin, output, error)):
    os.dup2(null if descriptor is None else descriptor, number)
  kept = 2 if channel is None else channel.fileno()
  os.closerange(3, kept)
  os.closerange(kept + 1, 1024)
  sys.argv[:] = ["solution.py"]
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = f"<{name}>"
    file = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    errors = "backslashreplace" if name == "stderr" else "surrogateescape"
    stream = io.TextIOWrapper(file, encoding="utf-8", errors=errors)
    vars(stream)["mode"] = "w" if number else "r"  # contestants' faster streams look at it
    vars(sys).update({name: stream, f"__{name}__": stream})


def execute(source: str | ast.Module, name: str, namespace: dict[str, Any]) -> None:
  """Runs a text in a namespace; `name` is the file that tracebacks give for it."""
  exec(compile(source, name, "exec", dont_inherit=True), namespace)
