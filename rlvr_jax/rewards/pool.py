"""A pool of grading processes with a wall-clock limit on every item."""

from __future__ import annotations

import collections
import functools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.processes import KILL_WAIT_S, check_variables
from rlvr_jax.rewards.by_name import parse_grader
from rlvr_jax.rewards.outcome import Grade
from rlvr_jax.rewards.worker_process import (
  MAX_LONGER_S,
  WorkerProcess,
  encode_request,
)

_MAX_CHUNK = 32  # items sent to a worker at a time: enough to hide the round trip
_MAX_DEFAULT_WORKERS = 32  # each has its own copy of the grader's imports in memory
_MAX_ASLEEP = 3  # workers whose items sleep, per worker that grades meanwhile
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def default_workers() -> int:
  """The number of cores that this process may use, at most 32: one grading process per core."""
  if hasattr(os, "sched_getaffinity"):
    return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_WORKERS)
  return min(os.cpu_count() or 1, _MAX_DEFAULT_WORKERS)


class GradingFuture(Future[list[Grade]]):
  """A future of grades; `result(timeout)` returns them in the order of the inputs.

  Without a timeout, `result` waits at most `limit_s` seconds. That is longer than grading can take,
  since every item and every replacement of a worker has its own time limit.
  """

  def __init__(self, size: int, limit_s: float):
    super().__init__()
    self.limit_s = limit_s
    self._grades: list[Grade | None] = [None] * size
    self._missing = size
    self._count_lock = threading.Lock()
    self.set_running_or_notify_cancel()  # cannot be canceled: workers may have started already
    if not size:
      self.set_result([])

  def result(self, timeout: float | None = None) -> list[Grade]:
    return super().result(self.limit_s if timeout is None else timeout)

  def deliver(self, index: int, grade: Grade) -> None:
    """Sets the grade of one item; the last one completes the future."""
    with self._count_lock:
      self._grades[index] = grade
      self._missing -= 1
      if not self._missing and not self.done():
        self.set_result(self._grades)  # type: ignore[arg-type]

  def fail(self, error: Exception) -> None:
    """Sets the error, unless the future is done."""
    with self._count_lock:
      if not self.done():
        self.set_exception(error)


class _Item(NamedTuple):
  """A completion to grade."""

  future: GradingFuture
  position: int  # in the future's list of grades
  line: bytes  # from `encode_request`


class _Options(NamedTuple):
  """Arguments of a pool; `settings` are those of its workers."""

  settings: Mapping[str, Any]
  environment: Mapping[str, str]
  on_grade: Callable[[], None]
  num_workers: int
  timeout_s: float
  startup_timeout_s: float


class GraderPool:
  """Grades completions in separate processes, each item under a wall-clock limit.

  A worker that exceeds the limit is killed with all that it has started and replaced; its item is
  graded `timeout`. A worker that dies is replaced, and its item is `crashed`, or `wrong` if the
  completion may have caused it (see `outcome`). An exception in the grader, or a return value that
  is not a grade, is `crashed` too, and the worker continues. Workers are new interpreters (never
  forks of this process), without jax. They end when this process does.

  A replacement is started once an item has taken half its limit, so that the remaining items need
  not wait for it to load the grader. If that item finishes in time, the replacement stays ready.

  A worker whose item sleeps (see `deadlines`) does not occupy a core: another worker, started if
  there is none, gets the queued items. So there may be 4 times `num_workers` processes, of which
  `num_workers` grade at a time.

  Args:
    grader: string of a grader, "name(keyword=value)" or "my_module:function"; see `by_name`.
    num_workers: number of processes that grade at a time, ≥ 1.
    timeout_s: wall-clock limit per item, seconds. A grader with its own limit, such as `code`, may
      extend it; see `deadlines`.
    startup_timeout_s: limit for a worker to start and load the grader, seconds.
    memory_mib: limit on each worker's address space, MiB; None for no limit.
    environment: variables added to the workers' environment.
    preload: strings of further graders that each worker loads and tests at its start. Other graders
      that references name (see `by_name`) are loaded within an item's time limit.
    on_grade: called by a thread of the pool at every grade; shows that grading makes progress.
  Raises:
    ValueError: an argument out of range, an unknown grader, or an environment that is not text.
    GraderStartError: the grader cannot be loaded, or its self-test fails.
  """

  def __init__(
    self,
    grader: str,
    *,
    num_workers: int = 1,
    timeout_s: float = 5.0,
    startup_timeout_s: float = 60.0,
    memory_mib: int | None = None,
    environment: Mapping[str, str] = _NO_VARIABLES,
    preload: Sequence[str] = (),
    on_grade: Callable[[], None] = lambda: None,
  ):
    _check_arguments(num_workers, timeout_s, startup_timeout_s, memory_mib)
    check_variables(environment, "environment")
    for text in (grader, *preload):
      parse_grader("grader", text)
    settings = {
      "grader": grader, "timeout_s": timeout_s, "memory_mib": memory_mib, "preload": [*preload],
    }  # fmt: skip
    self._options = _Options(
      settings, dict(environment), on_grade, num_workers, timeout_s, startup_timeout_s
    )
    self._changed = threading.Condition()  # guards everything below
    self._queue: collections.deque[_Item] = collections.deque()
    self._in_progress: set[GradingFuture] = set()
    self._failure: Exception | None = None
    self._workers = [WorkerProcess(settings, environment) for _ in range(num_workers)]
    self._replacements: dict[int, WorkerProcess] = {}  # by slot
    self._free = num_workers  # number of further workers that may grade now
    self._asleep: set[int] = set()  # slots whose item sleeps
    try:
      for worker in self._workers:
        worker.wait_ready(startup_timeout_s)
    except BaseException:
      for worker in self._workers:
        worker.close()
      raise
    self._threads = [self._make_thread(slot) for slot in range(num_workers)]
    for thread in self._threads:
      thread.start()

  def submit(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> GradingFuture:
    """Submits completions for grading and returns immediately.

    Args:
      completions: texts.
      references: the grader's data about the problem of each completion; JSON-serializable.
    Returns:
      A future of the grades, in the order of the completions.
    Raises:
      ValueError: the lists differ in length.
      TypeError: a reference is not JSON-serializable.
      RuntimeError: the pool is closed, or has failed.
    """
    if len(completions) != len(references):
      raise ValueError(f"{len(completions)} completions but {len(references)} references")
    lines = [encode_request(*pair) for pair in zip(completions, references, strict=True)]
    with self._changed:
      if self._failure is not None:
        raise self._failure
      # Each item (queued, in progress or new) takes at most its limit and a worker's replacement.
      num_items = len(self._queue) + len(lines) + _MAX_CHUNK * len(self._workers)
      item_s = self._options.timeout_s + MAX_LONGER_S + self._options.startup_timeout_s
      future = GradingFuture(len(lines), num_items * item_s)
      if lines:
        self._in_progress.add(future)
        self._queue.extend(_Item(future, position, line) for position, line in enumerate(lines))
        self._wake_workers()
    return future

  def grade(
    self, completions: Sequence[str], references: Sequence[Mapping[str, Any]]
  ) -> list[Grade]:
    """Grades completions and waits for the grades; see `submit`."""
    return self.submit(completions, references).result()

  def worker_pids(self) -> list[int]:
    """Process ids of the current workers; each leads its own session."""
    with self._changed:
      return [worker.pid for worker in self._workers]

  def close(self) -> None:
    """Kills the workers and fails the unfinished futures. A second call has no effect."""
    self._fail(RuntimeError("the grader pool is closed"))
    for thread in self._threads:
      thread.join(KILL_WAIT_S)
    for worker in self._all_workers():
      worker.close()

  def __enter__(self) -> GraderPool:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _all_workers(self) -> list[WorkerProcess]:
    return [*self._workers, *self._replacements.values()]

  def _fail(self, error: Exception) -> None:
    """Shuts the pool down: grading stops, and every dispatcher thread returns."""
    with self._changed:
      self._failure = self._failure or error
      self._queue.clear()
      futures, self._in_progress = self._in_progress, set()
      for worker in self._all_workers():
        worker.kill()  # its thread then reads the end of the pipe
      self._changed.notify_all()
    for future in futures:
      future.fail(self._failure)

  def _dispatch(self, slot: int) -> None:
    """Runs in a thread: sends items to one worker, and replaces the worker when it has ended."""
    try:
      while (items := self._take_items(slot)) is not None:
        lines = [item.line for item in items]
        grades = self._workers[slot].grade_items(
          lines,
          self._options.timeout_s,
          on_slow=functools.partial(self._start_replacement, slot),
          on_asleep=functools.partial(self._release_core, slot, items),
        )
        for grade in grades:
          self._deliver_grade(items.popleft(), grade)
        with self._changed:
          if slot not in self._asleep:
            self._free += 1
          self._asleep.discard(slot)
          self._put_back(items)
    except Exception as error:  # otherwise callers would wait for a result indefinitely
      self._fail(error)

  def _release_core(self, slot: int, items: collections.deque[_Item]) -> None:
    """Lets another worker grade while the first of these items sleeps in this worker."""
    with self._changed:
      sleeping_item = items.popleft()
      self._free += 1
      self._asleep.add(slot)
      self._put_back(items)
      items.append(sleeping_item)

  def _put_back(self, items: collections.deque[_Item]) -> None:
    """Moves items to the start of the queue, and wakes the workers."""
    if self._failure is None:
      self._queue.extendleft(reversed(items))
      self._wake_workers()
    items.clear()

  def _wake_workers(self) -> None:
    """Wakes idle workers, and starts others if items are queued while workers are asleep."""
    max_workers = min(
      self._options.num_workers + len(self._asleep), (1 + _MAX_ASLEEP) * self._options.num_workers
    )
    while self._queue and (slot := len(self._workers)) < max_workers:
      self._workers.append(WorkerProcess(self._options.settings, self._options.environment))
      self._threads.append(self._make_thread(slot))
      self._threads[slot].start()
    self._changed.notify_all()

  def _make_thread(self, slot: int) -> threading.Thread:
    return threading.Thread(
      target=self._dispatch, args=(slot,), name=f"grading-{slot}", daemon=True
    )

  def _take_items(self, slot: int) -> collections.deque[_Item] | None:
    """Waits for a live worker, a core and items; returns None once the pool is shut down."""
    # Waits only for a worker that `_wake_workers` has just started.
    self._workers[slot].wait_ready(self._options.startup_timeout_s)
    with self._changed:
      while self._failure is None and not (self._queue and self._free):
        self._changed.wait()
      self._free -= 1
    if not self._workers[slot].is_alive():
      self._replace_worker(slot)
    with self._changed:
      if self._failure is not None:
        return None
      # Takes only a share of the queue, so that no worker has slow items while others are idle.
      share = math.ceil(len(self._queue) / (2 * self._options.num_workers))
      size = min(share, _MAX_CHUNK)
      return collections.deque(self._queue.popleft() for _ in range(size))

  def _start_replacement(self, slot: int) -> None:
    """Starts the replacement of a worker, unless one is running already."""
    with self._changed:
      if self._failure is None and slot not in self._replacements:
        self._replacements[slot] = WorkerProcess(self._options.settings, self._options.environment)

  def _replace_worker(self, slot: int) -> None:
    """Closes a worker that has ended, and waits until its replacement is ready."""
    with self._changed:
      if self._failure is not None:
        return
      self._workers[slot].close()
      replacement = self._replacements.pop(slot, None)
      if replacement is None or not replacement.is_alive():
        if replacement is not None:
          replacement.close()
        replacement = WorkerProcess(self._options.settings, self._options.environment)
      self._workers[slot] = replacement
    self._workers[slot].wait_ready(self._options.startup_timeout_s)

  def _deliver_grade(self, item: _Item, grade: Grade) -> None:
    self._options.on_grade()
    item.future.deliver(item.position, grade)
    if item.future.done():
      with self._changed:
        self._in_progress.discard(item.future)


def _check_arguments(
  num_workers: int, timeout_s: float, startup_timeout_s: float, memory_mib: int | None
) -> None:
  check_integer("GraderPool", "num_workers", num_workers, low=1)
  check_between("GraderPool", "timeout_s", timeout_s, low=0.0, open_low=True)
  check_between("GraderPool", "startup_timeout_s", startup_timeout_s, low=0.0, open_low=True)
  if memory_mib is not None:
    check_integer("GraderPool", "memory_mib", memory_mib, low=1)
