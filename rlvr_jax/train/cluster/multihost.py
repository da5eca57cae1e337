"""A run's processes, as on a TPU pod: they exchange values, grades, signals and failures.

Every process runs the same loop on the same data, so that all processes dispatch the same compiled
programs in the same order. Whatever could differ between processes (grades, a signal, a failure) is
exchanged before it has an effect, over separate connections (`control`). A run of one process makes
the same calls without any exchange.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlvr_jax.storage.files import JSON
from rlvr_jax.train.cluster import control
from rlvr_jax.train.cluster.process import (
  DEADLINE_S,
  EndRequestedError,
  exit_after,
  handle_shutdown_signals,
  handles_shutdown_signals,
  measure_wait,
  request_shutdown,
  restart_deadline,
  shutdown_requested,
  total_wait_s,
)

T = TypeVar("T")
_ADDRESS_BYTES = 1024
_CONNECTING_S = 300  # seconds for all processes to connect; they may start minutes apart
# Seconds that an exchange waits. `process.deadline` is longer, since its message cannot name the
# missing process.
_EXCHANGE_S = 0.9 * DEADLINE_S
_channel = control.Channel(0, 1, {})  # until several processes are connected
_left = threading.Event()  # set when this process has announced its end
_process_waits_s: list[float] = []
# Each thread has its own phase, such as the thread that samples in the background.
_phase = contextvars.ContextVar("phase", default="the start")


class OtherProcessError(RuntimeError):
  """Another process of the run failed; the message is the message of its error."""


def initialize(
  coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
  """Joins the processes of a run; to be called before any device is used.

  If a process dies, the other processes end with a message that names it.

  Args:
    coordinator: "HOST:PORT", the host of process 0 and a free port there. All three arguments are
      None if the cluster identifies the processes (TPU pods, SLURM, Open MPI).
    num_processes: number of processes of the run.
    process_id: index of this process, 0 ≤ id < num_processes.
  Raises:
    ValueError: only some of the three arguments are given, or they are invalid.
    RuntimeError: the other processes could not be reached within five minutes (a ControlError if
      jax connected the processes, but the TCP connections of `control` failed).
  """
  flags = dict(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
  missing = [f"--{name}" for name, value in flags.items() if value is None]
  if missing and len(missing) < len(flags):
    raise ValueError(
      f"--coordinator, --num_processes and --process_id go together: add {', '.join(missing)}"
    )
  # jax's preemption service handles SIGTERM: it would catch signals before `process` does.
  if "jax_enable_preemption_service" in jax.config.values:  # not in jax 0.7
    jax.config.update("jax_enable_preemption_service", False)
  message = (
    f"error: the processes of the run did not all connect to process 0 within {_CONNECTING_S} s."
    " Start the same command on every host, and allow TCP connections between the hosts"
  )
  with exit_after(_CONNECTING_S, message):  # a little later jax would abort with a stack trace
    jax.distributed.initialize(
      coordinator, num_processes, process_id, initialization_timeout=_CONNECTING_S + 10
    )
  _open_channel(coordinator)


def _open_channel(coordinator: str | None) -> None:
  """Connects the processes by TCP, see `control`; the address is broadcast over the devices."""
  global _channel
  process, count = jax.process_index(), jax.process_count()
  if count == 1:
    return
  hosts = [coordinator.rpartition(":")[0]] if coordinator else []
  server = None if process else control.Server(count, hosts)
  text = json.dumps(server.address if server else []).encode().ljust(_ADDRESS_BYTES)
  broadcast = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
  if server:
    connections = server.accept(_CONNECTING_S)
  else:
    address = control.Address(*json.loads(np.asarray(broadcast, np.uint8).tobytes()))
    connections = {0: control.connect(address, process)}
    # When the first process dies, jax aborts this one with nothing but a stack trace. With this
    # handler the aborting thread calls sleep(6), since SIGABRT is 6: time for `_exit_with`.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
  _channel = control.Channel(
    process, count, connections, on_request=request_shutdown, on_loss=_exit_with
  )


def _exit_with(message: str) -> None:
  """Ends this process after another process died or failed; else it would wait forever."""
  if not _left.wait(1.0):  # meanwhile a more specific message may be printed
    os.write(2, f"error: {message}\n".encode())  # sys.stderr may be silenced
    os._exit(1)


def is_first() -> bool:
  """Whether this is process 0, which writes metrics and prints."""
  return _channel.process == 0


def num_processes() -> int:
  """Number of processes of the run."""
  return _channel.count


def exchange(value: JSON) -> list[Any]:
  """Exchanges values between processes; every process must call this.

  The exchange uses no collective, so it does not wait for compiled programs on the devices.

  Args:
    value: a JSON value; floats are exchanged exactly. In a run of one process, the value may be any
      object.
  Returns:
    The values of all processes, in order of process id.
  Raises:
    ControlError: another process did not call this in time; the message names the phase.
  """
  restart_deadline()
  if _channel.count == 1:  # any thread may call it
    return [value]
  with measure_wait():
    pairs = _channel.exchange([total_wait_s(), value], _phase.get(), _EXCHANGE_S)
  _process_waits_s[:] = [wait_s for wait_s, _ in pairs]
  return [value for _, value in pairs]


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
  """Context that names what the run is doing, for messages."""
  token = _phase.set(name)
  try:
    yield
  finally:
    _phase.reset(token)


def process_waits_s() -> list[float]:
  """Seconds that each process had waited before the last `exchange`; [] with one process."""
  return list(_process_waits_s)


def any_process(flag: bool) -> bool:
  """Whether `flag` is true on any process."""
  return any(exchange(flag))


def share_shutdown_signals() -> contextlib.AbstractContextManager[None]:
  """Handles shutdown signals for all processes: a signal to one process shuts all down."""
  return handle_shutdown_signals(_channel.request_shutdown)


def raise_if_shutdown_requested() -> None:
  """Raises EndRequestedError on all processes if shutdown was requested; all must call this.

  Call this where the run can still be saved as it was before the current `phase`. Outside of
  `share_shutdown_signals`, this function does nothing.
  """
  if handles_shutdown_signals() and any_process(shutdown_requested()):
    raise EndRequestedError(f"shutdown requested during {_phase.get()}")


def run_together(action: Callable[[], T]) -> T:
  """Runs `action` on every process; if it raises on one process, all processes raise.

  Returns:
    The result on this process.
  Raises:
    OtherProcessError: `action` raised on another process, but not here.
  """
  try:
    result = action()
  except Exception as error:
    exchange(f"{type(error).__name__}: {error}")
    raise
  for process, message in enumerate(exchange("")):
    if message:
      raise OtherProcessError(f"process {process} of {_channel.count} failed: {message}")
  return result


def run_on_first(action: Callable[[], T], elsewhere: T) -> T:
  """Runs `action` on the first process, like `run_together`; other processes get `elsewhere`."""
  return run_together(action if is_first() else lambda: elsewhere)


def result_of_first(action: Callable[[], JSON]) -> Any:
  """Runs `action` on the first process, like `run_together`; all processes get its JSON result."""
  return exchange(run_on_first(action, None))[0]


@contextlib.contextmanager
def silence_all_but_first() -> Iterator[None]:
  """Context that silences all processes but the first; their exceptions are still raised."""
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
  """Announces the end of this process; after a failure the other processes end too."""
  _left.set()
  _channel.leave(failure)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
  """Context that ends one of several processes immediately, at its own end or on an exception.

  An orderly exit would wait minutes for the other processes, which may be waiting for this
  process, or may have been ended by a signal. After an exception, the other processes receive the
  failure and end as well. In a run of one process, the context does not end the process.
  """
  try:
    yield
    if _channel.count > 1:
      exit_together(0)
  except BaseException as error:
    if _channel.count == 1:
      raise
    if isinstance(error, Exception):
      time.sleep(3.0)  # if another process has died, `_exit_with` reports this first
    if isinstance(error, SystemExit):
      print(error, file=sys.stderr)
    else:
      traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    leave(f"failed ({type(error).__name__}: {error})")
    os._exit(1)


def exit_together(status: int) -> NoReturn:
  """Ends all processes once each has called this; call it after closing files.

  A process may still compile a program in a thread. An orderly exit of the interpreter would wait
  for this compilation, or abort.
  """
  exchange("closed")
  leave()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
