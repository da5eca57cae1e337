"""The pool's end of one process of environments: a line out, lines in, each under a limit."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO, Any

_KILL_WAIT_S = 5.0  # for the kernel to end a process after SIGKILL
_MAX_LINE = 2**24  # bytes; longer than any valid message
_SINGLE_THREADED = dict.fromkeys(
  ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)


class ProcessDiedError(Exception):
  """The process has ended, or broke the protocol."""


class EnvironmentProcess:
  """A new interpreter that runs environments. Used by one thread, except for `kill`."""

  def __init__(self, settings: Mapping[str, Any], variables: Mapping[str, str]):
    self._stderr = tempfile.TemporaryFile()
    # With our sys.path, the worker imports a user's environment exactly as this process would.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    fixed = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-P", "-m", "rlvr_jax.environments.worker", json.dumps(settings)]
    self._process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
      env=os.environ | _SINGLE_THREADED | dict(variables) | fixed, start_new_session=True,
      bufsize=0,
    )  # fmt: skip
    assert self._process.stdin and self._process.stdout
    self._stdin, self._stdout = self._process.stdin, self._process.stdout
    os.set_blocking(self._stdin.fileno(), False)
    os.set_blocking(self._stdout.fileno(), False)
    self._incoming = bytearray()

  @property
  def pid(self) -> int:
    return self._process.pid

  def is_alive(self) -> bool:
    return self._process.poll() is None

  def exit_signal(self) -> int | None:
    """The signal that ended the process; None if it was none."""
    code = self._process.returncode
    return None if code is None or code >= 0 else -code

  def last_output(self) -> str:
    """The end of what the process wrote to stderr at its start."""
    self._stderr.seek(0)
    return self._stderr.read().decode(errors="replace").strip()[-2000:]

  def send(self, message: Mapping[str, Any], deadline: float) -> None:
    """Sends a line.

    Raises:
      TimeoutError: the process does not read.
      ProcessDiedError: it has ended.
    """
    line = json.dumps(message).encode() + b"\n"
    while line:
      try:
        line = line[os.write(self._stdin.fileno(), line[:65536]) :]
      except BlockingIOError:
        self._wait(self._stdin, selectors.EVENT_WRITE, deadline)
      except OSError as error:  # the pipe is closed
        raise ProcessDiedError("the environment's process ended") from error

  def receive(self, deadline: float) -> dict[str, Any]:
    """Waits for a line.

    Args:
      deadline: on the clock of `time.monotonic`.
    Raises:
      TimeoutError: there was none in time.
      ProcessDiedError: the process has ended, or has sent something else.
    """
    while (end := self._incoming.find(b"\n")) < 0:
      if len(self._incoming) > _MAX_LINE:
        raise ProcessDiedError(f"the environment's process sent a line of over {_MAX_LINE} bytes")
      self._wait(self._stdout, selectors.EVENT_READ, deadline)
      data = os.read(self._stdout.fileno(), 65536)
      if not data:
        self.kill()
        raise ProcessDiedError("the environment's process ended")
      self._incoming += data
    line = bytes(self._incoming[:end])
    del self._incoming[: end + 1]
    try:
      return json.loads(line)
    except ValueError as error:
      raise ProcessDiedError(f"the environment's process sent {line[:200]!r}") from error

  def _wait(self, file: IO[bytes], event: int, deadline: float) -> None:
    with selectors.DefaultSelector() as selector:
      selector.register(file, event)
      if not selector.select(max(0.0, deadline - time.monotonic())):
        raise TimeoutError

  def kill(self) -> None:
    """Kills the process group; safe at any time, from any thread."""
    if self._process.returncode is None:  # not yet reaped, so its id has not been reused
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(self._process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(_KILL_WAIT_S)

  def close(self) -> None:
    """Kills the process and closes its pipes."""
    self.kill()
    for stream in (self._stdin, self._stdout, self._stderr):
      stream.close()
