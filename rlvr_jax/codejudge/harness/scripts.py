"""Runs the program as a script in a new process for each case, possibly after other programs."""

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
from .processes import SOLUTION, execute, never_returning, replace_streams

MAX_INPUT = FILE_MIB * 2**20  # bytes per case; the program reads it from a file
MAX_OUTPUT = MAX_MESSAGE // 8  # bytes per case; in JSON a byte may take six


def serve_cases(channel: socket.socket, sources: Sequence[str]) -> None:
  """Runs the program once per request, each time in a separate process."""
  _serve(channel, (), sources)


def serve_last(channel: socket.socket, sources: Sequence[str]) -> None:
  """Like `serve_cases` for the last source; each process first runs the other sources silently."""
  _serve(channel, sources[:-1], sources[-1:])


def _serve(channel: socket.socket, silent: Sequence[str], sources: Sequence[str]) -> None:
  replace_streams(channel)
  send(channel, {"started": True})
  while True:
    send(channel, run_case(receive(channel)["input"], sources, silent))


def run_case(text: str, sources: Sequence[str], silent: Sequence[str] = ()) -> dict[str, Any]:
  """Runs the program as a script.

  Args:
    text: the standard input.
    sources: the program's parts, which run in one namespace.
    silent: programs that run first in the same namespace, with their output dropped.
  Returns:
    "output" (the program's standard output), "status" (0 if the program succeeded) and "stderr"
    (the end of the program's standard error).
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
      replace_streams(None, stdin, output, error)
      _run_script(sources, silent)
  for descriptor in (stdin, output, error):
    os.close(descriptor)
  try:
    stdout, stderr = _read_until_exit(process, output_end, error_end)
  finally:
    os.close(output_end)
    os.close(error_end)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
  if len(stdout) > MAX_OUTPUT:
    status = -1
    stderr = b"more than the output limit was printed"
  return {
    "output": stdout[:MAX_OUTPUT].decode(errors="replace"),
    "status": status,
    "stderr": stderr[-MAX_TEXT:].decode(errors="replace"),
  }


def _read_until_exit(process: int, output: int, error: int) -> tuple[bytes, bytes]:
  """Reads two pipes from a process until it ends or prints too much.

  Returns:
    The bytes of `output`, and the last bytes of `error`.
  """
  stdout = bytearray()
  stderr = bytearray()
  watch = os.pidfd_open(process)
  poll = select.poll()
  for descriptor in (watch, output, error):
    poll.register(descriptor, select.POLLIN)
  for descriptor in (output, error):
    os.set_blocking(descriptor, False)
  has_ended = False
  while len(stdout) <= MAX_OUTPUT:
    ready = [descriptor for descriptor, _ in poll.poll(0 if has_ended else None)]
    if has_ended and not ready:
      break
    if watch in ready:
      has_ended = True
      poll.unregister(watch)
    for descriptor, content in ((output, stdout), (error, stderr)):
      if descriptor in ready:
        part = os.read(descriptor, 2**16)
        content += part
        if not part:
          poll.unregister(descriptor)
    del stderr[:-MAX_TEXT]
  os.close(watch)
  return bytes(stdout), bytes(stderr)


def _run_script(sources: Sequence[str], silent: Sequence[str]) -> None:
  """Runs sources as `__main__`, and ends the process as an interpreter would."""
  module = types.ModuleType("__main__")
  sys.modules["__main__"] = module
  module.__dict__["__builtins__"] = builtins  # as in a script; exec would set the dictionary
  status = 0
  try:
    if silent:
      _run_silently(silent, module.__dict__)
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
  module.__dict__.clear()  # flushes files that the program has left open
  gc.collect()
  _flush()
  os._exit(status & 0xFF)


def _run_silently(sources: Sequence[str], namespace: dict[str, Any]) -> None:
  """Runs programs up to their exit, and drops their output; raises the errors that they raise."""
  kept = [os.dup(1), os.dup(2)]
  null = os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, 1)
  os.dup2(null, 2)
  try:
    for source in sources:
      with contextlib.suppress(SystemExit):
        execute(source, SOLUTION, namespace)
  finally:
    _flush()
    for number, descriptor in enumerate(kept, 1):
      os.dup2(descriptor, number)
    for descriptor in (null, *kept):
      os.close(descriptor)


def _print_error(error: BaseException) -> None:
  """Prints the end of a traceback, without the frames of the harness."""
  trace = error.__traceback__
  while trace is not None and trace.tb_frame.f_code.co_filename != SOLUTION:
    trace = trace.tb_next
  traceback.print_exception(type(error), error, trace, limit=-3)


def _flush() -> None:
  for stream in filter(None, (sys.stdout, sys.__stdout__, sys.stderr)):
    with contextlib.suppress(Exception):  # the program may have closed or broken it
      stream.flush()
