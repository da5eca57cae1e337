"""Compilation that a request to end the run does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from rlvr_jax.train.cluster import multihost, process


class Program:
  """A jitted function. While it is compiled, the process and all others may be asked to end.

  XLA cannot be interrupted. So where a request to end matters, a thread compiles and the main
  thread waits, which then leaves the run as it was before the call. The call finds what the thread
  has compiled in jax's cache.
  """

  def __init__(self, jitted: Any):
    """`jitted`: from `jax.jit`; its own call looks at no request."""
    self.jitted = jitted
    self._compiled: set[Any] = set()  # for arguments like these

  def __call__(self, *args: Any, **static: Any) -> Any:
    """Calls the function; raises EndRequestedError if asked to end before it is compiled."""
    self.compile(*args, **static)
    return self.jitted(*args, **static)

  def lower(self, *args: Any, **static: Any) -> Any:
    """As of the function from `jax.jit`."""
    return self.jitted.lower(*args, **static)

  def compile(self, *args: Any, **static: Any) -> None:
    """Compiles for arguments like these, unless that has been done.

    Call it on every process, and where the function's own call must not raise.

    Raises:
      EndRequestedError: a process has been asked to end.
    """
    if not process.in_order():
      return
    leaves, structure = jax.tree.flatten(args)
    kind = (structure, *map(_kind, leaves), *static.items())
    if kind not in self._compiled:
      process.wait(compiled := _in_thread(lambda: self.lower(*args, **static).compile()))
      multihost.end_if_asked()
      compiled.result()
      self._compiled.add(kind)


def jit(function: Callable[..., Any], **options: Any) -> Program:
  """`jax.jit` as a Program."""
  return Program(jax.jit(function, **options))


def _kind(x: Any) -> Any:
  """What a compiled program depends on, of an array or a Python number."""
  return getattr(x, "shape", ()), getattr(x, "dtype", type(x)), getattr(x, "sharding", None)


def _in_thread(action: Callable[[], Any]) -> Future[Any]:
  """Runs an action in a thread that does not keep the process from ending."""
  future: Future[Any] = Future()

  def run() -> None:
    try:
      future.set_result(action())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, name="compiling", daemon=True).start()
  return future
