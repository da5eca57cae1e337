"""Runs the program as a script: once per case, each time in a separate process."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any

from .isolation import FILE_MIB
from .messages import MAX_MESSAGE, MAX_TEXT, receive, send
from .processes import SOLUTION, execute, never_returning, take_streams

MAX_INPUT = FILE_MIB * 2**20  # bytes of a case: it is a file of the program
MAX_OUTPUT = MAX_MESSAGE // 8  # bytes of a case: in JSON a byte may take six


def serve_cases(channel: socket.socket, sources: Sequence[str]) -> None:
  """Runs the program once per request, each time in a separate process."""
  take_streams(channel)
  send(channel, {"started": True})
  while True:
    send(channel, run_case(receive(channel)["input"], sources))


def run_case(text: str, sources: Sequence[str]) -> dict[str, Any]:
  """Runs the program as a script.

  Returns:
    "output": its standard output; "status": 0 if it ended well; "stderr": the end of that.
  """
  with tempfile.TemporaryFile(dir="/tmp") as file:
    file.write(text.encode())
    file.seek(0)
    stdin = os.dup(file.fileno())
  output_end, output = os.pipe()
  error_end, error = os.pipe()
  process = os.fork()
  if not process:
    with never_returning():
      take_streams(None, stdin, output, error)
      _run_script(sources)
  for descriptor in (stdin, output, error):
    os.close(descriptor)
  try:
    printed, complained = _read_until_exit(process, output_end, error_end)
  finally:
    os.close(output_end)
    os.close(error_end)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
  if len(printed) > MAX_OUTPUT:
    status, complained = -1, b"more than the output limit was printed"
  return {
    "output": printed[:MAX_OUTPUT].decode(errors="replace"),
    "status": status,
    "stderr": complained[-MAX_TEXT:].decode(errors="replace"),
  }


def _read_until_exit(process: int, output: int, error: int) -> tuple[bytes, bytes]:
  """Reads what a process writes to two pipes, until it ends or prints too much."""
  printed, complained = bytearray(), bytearray()
  watch = os.pidfd_open(process)
  poll = select.poll()
  for descriptor in (watch, output, error):
    poll.register(descriptor, select.POLLIN)
  for descriptor in (output, error):
    os.set_blocking(descriptor, False)
  ended = False
  while len(printed) <= MAX_OUTPUT:
    ready = [descriptor for descriptor, _ in poll.poll(0 if ended else None)]
    if ended and not ready:
      break
    if watch in ready:
      ended = True
      poll.unregister(watch)
    for descriptor, kept in ((output, printed), (error, complained)):
      if descriptor in ready:
        part = os.read(descriptor, 2**16)
        kept += part
        if not part:
          poll.unregister(descriptor)
    del complained[:-MAX_TEXT]
  os.close(watch)
  return bytes(printed), bytes(complained)


def _run_script(sources: Sequence[str]) -> None:
  """Runs sources as `__main__`, and ends the process as an interpreter would."""
  module = types.ModuleType("__main__")
  sys.modules["__main__"] = module
  module.__dict__["__builtins__"] = builtins  # by itself it would be their dict
  status = 0
  try:
    for source in sources:
      execute(source, SOLUTION, module.__dict__)
  except SystemExit as stop:
    status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
  except BaseException as error:
    _print_error(error)
    status = 1
  for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
      thread.join()
  atexit._run_exitfuncs()
  _flush()
  module.__dict__.clear()  # files that the program has left open are written out
  gc.collect()
  _flush()
  os._exit(status & 0xFF)


def _print_error(error: BaseException) -> None:
  """Prints the end of a traceback, without the frames of the harness."""
  trace = error.__traceback__
  while trace is not None and trace.tb_frame.f_code.co_filename != SOLUTION:
    trace = trace.tb_next
  traceback.print_exception(type(error), error, trace, limit=-3)


def _flush() -> None:
  for stream in filter(None, (sys.stdout, sys.__stdout__, sys.stderr)):
    with contextlib.suppress(Exception):  # it has been closed, or put out of order
      stream.flush()
