"""One run in several processes, as on a TPU pod: what they exchange and agree on.

Every process runs the same loop on the same data, so that they issue the same device programs in
the same order. What could differ between them (grades, a signal, a failure) is exchanged before it
has an effect. With one process nothing here does anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rewards.pool import GraderPool
from rlvr_jax.train.host import alive, deadline
from rlvr_jax.train.metrics import MetricWriter

T = TypeVar("T")
_ended = threading.Event()  # the run, in order
_listening: list[socket.socket] = []


class OtherProcessError(RuntimeError):
  """Another process of the run failed, with this message."""


def initialize(
  coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the processes of a run; call it before anything touches a device.

  A process that dies is noticed by the others within 100 s, and ends them.

  Args:
    coordinator: host:port, a free port of process 0; None, like the other two, where the cluster
      tells (TPU pods, SLURM, Open MPI).
    num_processes: how many there are.
    process_id: which one this is, 0 ≤ id < num_processes.
  Raises:
    ValueError: only some of the three are given, or they are wrong.
    RuntimeError: the others could not be reached within five minutes.
  """
  given = dict(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
  missing = [f"--{name}" for name, value in given.items() if value is None]
  if missing and len(missing) < len(given):
    raise ValueError(f"--coordinator, --num_processes and --process_id go together: add {missing}")
  # Its handler of SIGTERM would swallow the signal before ours is there; see `anywhere`.
  if "jax_enable_preemption_service" in jax.config.values:  # not in jax 0.7
    jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(coordinator, num_processes, process_id)
  _watch_first()


def _watch_first() -> None:
  """Ends this process with a message when the first one is gone.

  The kernel closes a connection to it then. jax's own thread aborts the process, with its stack
  alone, and lets no other answer through any more.
  """
  place = None
  if is_first():
    # Connections that nobody accepts stay in the queue, and end with the process.
    _listening.append(socket.create_server(("", 0), backlog=jax.process_count()))
    place = (socket.gethostname(), _listening[0].getsockname()[1])
  host, port = exchange(place)[0]
  if is_first():
    return
  try:
    connection = socket.create_connection((host, port), 60)
  except OSError:
    return  # another port is not let through, or the name is not known: without the message, then
  connection.settimeout(None)

  def watch() -> None:
    with contextlib.suppress(OSError):
      connection.recv(1)
    if not _ended.wait(1.0):  # a message that arrives meanwhile says more
      message = (
        f"error: process 0 of {jax.process_count()} has died or cannot be reached; see what it"
        " printed. Rerun the same command on every host: it goes on from the last checkpoint\n"
      )
      os.write(2, message.encode())  # sys.stderr may be silenced
      os._exit(1)

  # The thread that aborts stays in this handler for as many seconds as the signal's number, six.
  libc = ctypes.CDLL(None)
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
  threading.Thread(target=watch, daemon=True).start()


def is_first() -> bool:
  """Whether this is the process that writes metrics and speaks."""
  return jax.process_index() == 0


def exchange(value: Any) -> list[Any]:
  """Every process's value, in the order of the processes; all of them must call it.

  Args:
    value: of JSON; floats arrive exactly.
  """
  alive()
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  with deadline():
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    room = 1 << int(sizes.max() - 1).bit_length()  # powers of two, so that few programs do
    rows = multihost_utils.process_allgather(np.pad(text, (0, room - text.size)))
  return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def anywhere(flag: bool) -> bool:
  """Whether the flag is set on any process."""
  return any(exchange(flag))


def together(action: Callable[[], T]) -> T:
  """Runs `action` here, as the other processes do theirs; raises everywhere if one raises.

  Returns:
    This process's own result.
  Raises:
    OtherProcessError: where `action` did not raise but did elsewhere.
  """
  alive()
  if jax.process_count() == 1:
    return action()
  result: Any = None
  failure: Exception | None = None
  try:
    result = action()
  except Exception as error:
    failure = error
  messages = exchange(f"{type(failure).__name__}: {failure}" if failure else "")
  if failure:
    raise failure
  for process, message in enumerate(messages):
    if message:
      raise OtherProcessError(f"process {process} of {len(messages)} failed: {message}")
  return result


def on_first(action: Callable[[], T], elsewhere: T) -> T:
  """`together` with the other processes doing nothing; they get `elsewhere`."""
  return together(action if is_first() else lambda: elsewhere)


class SharedGrader:
  """Each process grades its share in its own pool; all get the same grades.

  A limit of wall-clock time may strike on one process only: it strikes once, for all of them.
  """

  def __init__(self, pool: GraderPool):
    self._pool = pool

  def submit(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> _SharedGrades:
    """As `GraderPool.submit`; every process gives all completions, and calls `result`."""
    share = slice(jax.process_index(), None, jax.process_count())
    return _SharedGrades(self._pool.submit(completions[share], references[share]), len(completions))


class _SharedGrades:
  def __init__(self, own: Any, size: int):
    self._own, self._size = own, size

  def result(self) -> list[Grade]:
    own = together(self._own.result)
    shares = exchange([dataclasses.astuple(grade) for grade in own])
    grades: list[Any] = [None] * self._size
    for process, share in enumerate(shares):
      grades[process :: len(shares)] = [Grade(Outcome(outcome), *rest) for outcome, *rest in share]
    return grades


class NoWriter(MetricWriter):
  """For the processes that write nothing."""

  def __init__(self, workdir: Path):
    self.workdir = workdir

  def write(self, *args: Any, **kwargs: Any) -> None:
    pass

  def write_rollouts(self, *args: Any, **kwargs: Any) -> None:
    pass

  def write_geometry(self, *args: Any, **kwargs: Any) -> None:
    pass

  def written(self) -> dict[str, Any]:
    return {}

  def close(self) -> None:
    pass


@contextlib.contextmanager
def only_the_first_speaks() -> Iterator[None]:
  """Silences what the other processes print; their exceptions still arrive."""
  if is_first():
    yield
    return
  with (
    open(os.devnull, "w", encoding="utf-8") as nowhere,
    contextlib.redirect_stdout(nowhere),
    contextlib.redirect_stderr(nowhere),
  ):
    yield


@contextlib.contextmanager
def failing_at_once() -> Iterator[None]:
  """Ends the process at once when an exception leaves it, if there are others.

  The interpreter's orderly end would wait minutes for the other processes, which may be waiting for
  this one; once its connections are closed they end too.
  """
  try:
    yield
    _ended.set()  # the first process may go from now on
  except BaseException as error:
    if jax.process_count() == 1:
      raise
    if isinstance(error, Exception) and not is_first():
      time.sleep(3.0)  # if it is because the first process died, `_watch_first` says so
    if isinstance(error, SystemExit):
      print(error, file=sys.stderr)
    else:
      traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
