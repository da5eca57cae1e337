"""Helpers for several kinds of processes: ending a forked child, and running code."""

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

SOLUTION = "<solution>"  # file name of the program's code


@contextlib.contextmanager
def never_returning() -> Iterator[None]:
  """Ends a forked child at the end of the context, so that it never returns to the caller."""
  try:
    yield
  except BaseException:
    with contextlib.suppress(BaseException):
      traceback.print_exc()
  finally:
    os._exit(1)


def replace_streams(
  channel: socket.socket | None, stdin: int | None = None, output: int | None = None,
  error: int | None = None,
) -> None:  # fmt: skip
  """Closes all descriptors except the channel, and sets the standard streams.

  A stream that is None becomes /dev/null. `channel` is None if there is no channel.
  """
  os.setsid()
  null = os.open(os.devnull, os.O_RDWR)
  for number, descriptor in enumerate((stdin, output, error)):
    os.dup2(null if descriptor is None else descriptor, number)
  channel_descriptor = 2 if channel is None else channel.fileno()
  os.closerange(3, channel_descriptor)
  os.closerange(channel_descriptor + 1, 1024)
  sys.argv[:] = ["solution.py"]
  for number, name in enumerate(("stdin", "stdout", "stderr")):
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = f"<{name}>"
    file = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    errors = "backslashreplace" if name == "stderr" else "surrogateescape"
    stream = io.TextIOWrapper(file, encoding="utf-8", errors=errors)
    vars(stream)["mode"] = "w" if number else "r"  # contestants' faster streams read it
    vars(sys).update({name: stream, f"__{name}__": stream})


def execute(source: str | ast.Module, name: str, namespace: dict[str, Any]) -> None:
  """Runs code in a namespace; tracebacks show `name` as the code's file."""
  exec(compile(source, name, "exec", dont_inherit=True), namespace)
