"""One run in several processes, as on a TPU pod: exchanging values, grades, signals and failures.

Every process runs the same loop on the same data, so that all dispatch the same device programs in
the same order. Whatever could differ between them (grades, a signal, a failure) is exchanged before
it has an effect, over connections of their own (`control`). With one process, nothing here has one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlvr_jax.rewards.outcome import Grade, Outcome
from rlvr_jax.rewards.pool import GraderPool, GradingFuture
from rlvr_jax.train.cluster import control
from rlvr_jax.train.cluster.process import (
  DEADLINE_S,
  EndRequestedError,
  alive,
  ask,
  asked,
  ends_after,
  ends_in_order,
  in_order,
  wait,
  waited_s,
  waiting,
)

T = TypeVar("T")
_ADDRESS_BYTES = 1024
_MEETING_S = 300  # for all processes to connect to the first; they may start minutes apart
# Shorter than that of the process itself, whose message could not name the one that is missing.
_EXCHANGE_S = 0.9 * DEADLINE_S
_channel: control.Channel | None = None  # with several processes
_left = threading.Event()  # set when this process has said that it ends
_waits: list[float] = []
_phase = "the start"


class OtherProcessError(RuntimeError):
  """Another process of the run failed, with this message."""


def initialize(
  coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the processes of a run; call it before any device is used.

  If a process dies, the others end with a message that names it.

  Args:
    coordinator: host:port, a free port of process 0; None, like the other two, if the cluster
      identifies the processes (TPU pods, SLURM, Open MPI).
    num_processes: of the run.
    process_id: of this process, 0 ≤ id < num_processes.
  Raises:
    ValueError: only some of the three are given, or they are invalid.
    RuntimeError: the others could not be reached within five minutes (a ControlError, if devices
      meet and hosts do not).
  """
  given = dict(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
  missing = [f"--{name}" for name, value in given.items() if value is None]
  if missing and len(missing) < len(given):
    raise ValueError(f"--coordinator, --num_processes and --process_id go together: add {missing}")
  # Its handler of SIGTERM would catch the signal before ours is installed; see `host`.
  if "jax_enable_preemption_service" in jax.config.values:  # not in jax 0.7
    jax.config.update("jax_enable_preemption_service", False)
  late = (
    f"error: the processes of the run did not all connect to process 0 within {_MEETING_S} s. Start"
    " the same command on every host, and allow TCP connections between the hosts"
  )
  with ends_after(_MEETING_S, late):  # a little later jax would abort with a stack trace
    place = (coordinator, num_processes, process_id)
    jax.distributed.initialize(*place, initialization_timeout=_MEETING_S + 10)
  _open_channel(coordinator)


def _open_channel(coordinator: str | None) -> None:
  """Connects the processes by `control`; its address alone comes over the devices."""
  global _channel
  process, count = jax.process_index(), jax.process_count()
  if count == 1:
    return
  known_as = [coordinator.rpartition(":")[0]] if coordinator else []
  server = control.Server(count, known_as) if is_first() else None
  text = json.dumps(server.address if server else []).encode().ljust(_ADDRESS_BYTES)
  shared = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
  if server:
    connections = server.accept(_MEETING_S)
  else:
    address = control.Address(*json.loads(np.asarray(shared, np.uint8).tobytes()))
    connections = {0: control.connect(address, process)}
    # When the first process dies, jax aborts this one with nothing but a stack trace. The aborting
    # thread then calls sleep(6), since SIGABRT is 6, which leaves time for `_end_with`.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
  _channel = control.Channel(process, count, connections, on_request=ask, on_loss=_end_with)


def _end_with(message: str) -> None:
  """Ends this process, as another one has died or failed: what it waits for would not come."""
  if not _left.wait(1.0):  # a more specific message may be printed meanwhile
    os.write(2, f"error: {message}\n".encode())  # sys.stderr may be silenced
    os._exit(1)


def is_first() -> bool:
  """Whether this is the process that writes metrics and prints."""
  return jax.process_index() == 0


def exchange(value: Any) -> list[Any]:
  """The values of all processes, in order of process id; every process must call it.

  Runs no collective, so that it does not wait for what the devices compute.

  Args:
    value: a JSON value; floats are exchanged exactly.
  Raises:
    ControlError: another process did not call it in time; the message names the phase.
  """
  alive()
  if jax.process_count() == 1:
    return [value]
  assert _channel is not None  # `initialize` has opened it
  with waiting():
    sent = _channel.exchange([waited_s(), value], _phase, _EXCHANGE_S)
  _waits[:] = [waits for waits, _ in sent]
  return [value for _, value in sent]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
  """Within it, messages say that the run was doing this."""
  global _phase
  before, _phase = _phase, name
  try:
    yield
  finally:
    _phase = before


def waits() -> list[float]:
  """Seconds that each process had waited before it entered the last `exchange`; [] if alone."""
  return list(_waits)


def anywhere(flag: bool) -> bool:
  """Whether the flag is set on any process."""
  return any(exchange(flag))


def ending_in_order() -> contextlib.AbstractContextManager[None]:
  """`host.ends_in_order`, for all processes: a signal to one of them asks all."""
  return ends_in_order(_channel.request if _channel else lambda: None)


def end_if_asked() -> None:
  """Raises EndRequestedError on all processes if one has been asked to end; all must call it.

  Call it where a run can be saved as it was before the phase; outside of `ending_in_order` it does
  nothing.
  """
  if in_order() and anywhere(asked()):
    raise EndRequestedError(f"shutdown requested during {_phase}")


def grades(futures: Sequence[GradingFuture]) -> list[Grade]:
  """Waits for the grades of this process's submissions, in one list; as `end_if_asked`."""
  with phase("grading"):
    for future in futures:
      wait(future, future.limit_s)
    end_if_asked()
  return together(lambda: [grade for future in futures for grade in future.result()])


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
    own = grades([share.own for share in submitted])
    shares = [iter(x) for x in exchange([dataclasses.astuple(grade) for grade in own])]
    taken = [next(shares[turn]) for share in submitted for turn in share.turns]
    return [Grade(Outcome(outcome), *rest) for outcome, *rest in taken]


class _SharedGrades(NamedTuple):
  own: Any  # the future of this process's share
  turns: np.ndarray  # i32[completions], the process that grades each


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


def leave(failure: str = "") -> None:
  """Tells the other processes that this one ends, in order or with a failure, which ends them."""
  _left.set()
  if _channel:
    _channel.leave(failure)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
  """With several processes, ends this one immediately if an exception is raised within.

  An orderly exit would wait minutes for the other processes, which may be waiting for this one.
  They are told, and end as well.
  """
  try:
    yield
    leave()
  except BaseException as error:
    if not _channel:
      raise
    if isinstance(error, Exception):
      time.sleep(3.0)  # if the cause is another one's death, `_end_with` reports it
    if isinstance(error, SystemExit):
      print(error, file=sys.stderr)
    else:
      traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    leave(f"failed ({type(error).__name__}: {error})")
    os._exit(1)


def end_in_order(status: int) -> NoReturn:
  """Ends all processes after each has closed its files, even while it compiles.

  An orderly exit of the interpreter would wait for the compilation, or abort.
  """
  if _channel:  # alone, a sweep ends without asking for devices
    exchange("closed")
  leave()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
