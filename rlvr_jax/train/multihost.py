"""One run in several processes, as on a TPU pod: exchanging values, grades, signals and failures.

Every process runs the same loop on the same data, so that all dispatch the same device programs in
the same order. Whatever could differ between them (grades, a signal, a failure) is exchanged before
it has an effect. With one process, nothing here has an effect.
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
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rewards.pool import GraderPool
from rlvr_jax.train.host import alive, waited_s, waiting
from rlvr_jax.train.metrics import MetricWriter

T = TypeVar("T")
_ended = threading.Event()  # set when the run has ended without an error
_listening: list[socket.socket] = []
_waits: list[float] = []


class OtherProcessError(RuntimeError):
  """Another process of the run failed, with this message."""


def initialize(
  coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the processes of a run; call it before any device is used.

  If a process dies, the others notice within 100 s and end.

  Args:
    coordinator: host:port, a free port of process 0; None, like the other two, if the cluster
      identifies the processes (TPU pods, SLURM, Open MPI).
    num_processes: of the run.
    process_id: of this process, 0 ≤ id < num_processes.
  Raises:
    ValueError: only some of the three are given, or they are invalid.
    RuntimeError: the others could not be reached within five minutes.
  """
  given = dict(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
  missing = [f"--{name}" for name, value in given.items() if value is None]
  if missing and len(missing) < len(given):
    raise ValueError(f"--coordinator, --num_processes and --process_id go together: add {missing}")
  # Its handler of SIGTERM would catch the signal before ours is installed; see `anywhere`.
  if "jax_enable_preemption_service" in jax.config.values:  # not in jax 0.7
    jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(coordinator, num_processes, process_id)
  _watch_first()


def _watch_first() -> None:
  """Ends this process with a message when the first process has died.

  The kernel then closes the connection to it. Without this, jax's own thread aborts the process
  with nothing but a stack trace.
  """
  address = None
  if is_first():
    # Connections that are never accepted stay in the queue, and end with the process.
    _listening.append(socket.create_server(("", 0), backlog=jax.process_count()))
    address = (socket.gethostname(), _listening[0].getsockname()[1])
  host, port = exchange(address)[0]
  if is_first():
    return
  try:
    connection = socket.create_connection((host, port), 60)
  except OSError:
    return  # the port is blocked or the name is unknown: there will be no message
  connection.settimeout(None)

  def watch() -> None:
    with contextlib.suppress(OSError):
      connection.recv(1)
    if not _ended.wait(1.0):  # a more specific message may be printed meanwhile
      message = (
        f"error: process 0 of {jax.process_count()} has died or cannot be reached; see what it"
        " printed. Rerun the same command on every host to resume from the last checkpoint\n"
      )
      os.write(2, message.encode())  # sys.stderr may be silenced
      os._exit(1)

  # The aborting thread then calls sleep(6), since SIGABRT is 6, which leaves time for the message.
  libc = ctypes.CDLL(None)
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
  threading.Thread(target=watch, daemon=True).start()


def is_first() -> bool:
  """Whether this is the process that writes metrics and prints."""
  return jax.process_index() == 0


def exchange(value: Any) -> list[Any]:
  """The values of all processes, in order of process id; every process must call it.

  Args:
    value: a JSON value; floats are exchanged exactly.
  """
  alive()
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps([waited_s(), value]).encode(), np.uint8)
  with waiting():
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    length = 1 << int(sizes.max() - 1).bit_length()  # powers of two, to compile few programs
    rows = multihost_utils.process_allgather(np.pad(text, (0, length - text.size)))
  sent = [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
  _waits[:] = [waits for waits, _ in sent]
  return [value for _, value in sent]


def waits() -> list[float]:
  """Seconds that each process had waited before it entered the last `exchange`; [] if alone."""
  return list(_waits)


def anywhere(flag: bool) -> bool:
  """Whether the flag is set on any process."""
  return any(exchange(flag))


def together(action: Callable[[], T]) -> T:
  """Runs `action` on every process; if it raises on one, all processes raise.

  Returns:
    The result on this process.
  Raises:
    OtherProcessError: `action` raised on another process, but not here.
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
  """Runs `action` on the first process, as in `together`; the other processes get `elsewhere`."""
  return together(action if is_first() else lambda: elsewhere)


class SharedGrader:
  """Each process grades a share in its own pool; all get the same grades.

  Each item is graded by one process, so a timeout on one process applies to all of them.
  """

  def __init__(self, pool: GraderPool):
    self._pool, self._submitted = pool, 0

  def submit(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> _SharedGrades:
    """As `GraderPool.submit`; every process passes all completions, in the same order."""
    # In turn over all submissions, so that small ones do not all go to the first processes.
    turns = (self._submitted + np.arange(len(completions))) % jax.process_count()
    self._submitted += len(completions)
    mine = np.flatnonzero(turns == jax.process_index()).tolist()
    own = self._pool.submit([completions[i] for i in mine], [references[i] for i in mine])
    return _SharedGrades(own, turns)

  def results(self, submitted: Sequence[_SharedGrades]) -> list[Grade]:
    """Waits for the grades of several submissions, in one list; every process must call it."""
    own = together(lambda: [grade for share in submitted for grade in share.own.result()])
    shares = [iter(x) for x in exchange([dataclasses.astuple(grade) for grade in own])]
    taken = [next(shares[turn]) for share in submitted for turn in share.turns]
    return [Grade(Outcome(outcome), *rest) for outcome, *rest in taken]


class _SharedGrades(NamedTuple):
  own: Any  # the future of this process's share
  turns: np.ndarray  # i32[completions], the process that grades each


class NoWriter(MetricWriter):
  """A MetricWriter that writes nothing, for all processes except the first."""

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
def only_first_prints() -> Iterator[None]:
  """Silences the output of the other processes; their exceptions are still raised."""
  if is_first():
    yield
    return
  with (
    open(os.devnull, "w", encoding="utf-8") as null,
    contextlib.redirect_stdout(null),
    contextlib.redirect_stderr(null),
  ):
    yield


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
  """With several processes, ends this one immediately if an exception is raised within.

  An orderly exit would wait minutes for the other processes, which may be waiting for this one.
  They end once its connections are closed.
  """
  try:
    yield
    _ended.set()  # from now on the first process may end
  except BaseException as error:
    if jax.process_count() == 1:
      raise
    if isinstance(error, Exception) and not is_first():
      time.sleep(3.0)  # if the cause is the first process's death, `_watch_first` reports it
    if isinstance(error, SystemExit):
      print(error, file=sys.stderr)
    else:
      traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
