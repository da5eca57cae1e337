"""Generation in a separate thread, with a bounded lag behind the trainer."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from rlvr_jax.rollouts.batch import PolicySnapshot, RolloutBatch
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.process import EndRequestedError
from rlvr_jax.train.generation.generator import Generator

_POLL_S = 0.2  # interval at which a wait checks whether the run is to end
_CLOSING_S = 10.0  # limit on the wait for a batch in progress when the run ends


class GeneratorStoppedError(RuntimeError):
  """The generating thread produced no batch within its deadline, or died."""


class _Limits(NamedTuple):
  """See `AsyncGenerator`."""

  limit: Callable[[int], int]
  deadline_s: float
  num_batches: int


class AsyncGenerator:
  """Samples batches with the newest policy it was offered; `take` yields them in order.

  Batches that the store has already come first.

  Back-pressure: batch b is started once b < limit(version), where update b trains on batch b and
  `version` is that of the newest policy. With limit(v) = v + L + 1 at most L + 1 batches are
  sampled and not yet taken, and no lag is above L. If `config.fleet.new_weights` lets newer
  policies take over responses, `version` is that of the batch's oldest token.
  """

  def __init__(
    self,
    generator: Generator,
    *,
    limit: Callable[[int], int],
    deadline_s: float,
    num_batches: int,
  ):
    """Starts the thread; it waits for the first `offer`.

    Args:
      generator: from now on used by the thread alone.
      limit: of the schedule, see `Schedule`.
      deadline_s: seconds that `take` waits for one batch.
      num_batches: of the run; no more are sampled.
    """
    self._generator, self._limits = generator, _Limits(limit, deadline_s, num_batches)
    self._num_taken = generator.number
    self._changed = threading.Condition()
    self._newest: PolicySnapshot | None = None
    self._closing = False
    self._ready: queue.Queue[RolloutBatch | BaseException] = queue.Queue()
    # A daemon: a thread that hangs in a device must not keep the process from ending.
    self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
    self._thread.start()

  def offer(self, policy: PolicySnapshot) -> None:
    """Sets the newest policy of the trainer; batches started from now on are sampled from it."""
    with self._changed:
      self._newest = policy
      self._changed.notify_all()

  def take(self, number: int, before_waiting: Callable[[], None]) -> Iterator[RolloutBatch]:
    """Yields batches in order, until the one with this number has been taken.

    Args:
      number: of a batch that is needed now.
      before_waiting: called before a wait.
    """
    while self._num_taken <= number:
      if self._ready.empty():
        before_waiting()
      batch = self._next()
      self._num_taken = batch.number + 1
      yield batch

  def _next(self) -> RolloutBatch:
    """The next batch.

    Raises:
      EndRequestedError: shutdown was requested meanwhile.
      GeneratorStoppedError: there was no batch within the deadline, or the thread died.
    """
    deadline = time.monotonic() + self._limits.deadline_s
    batch: RolloutBatch | BaseException | None = None
    while batch is None:
      multihost.raise_if_shutdown_requested()
      try:
        batch = self._ready.get(timeout=min(_POLL_S, self._limits.deadline_s))
      except queue.Empty:
        if time.monotonic() >= deadline:
          raise GeneratorStoppedError(
            f"the generator produced no batch within {self._limits.deadline_s:g} s; check whether"
            " it or the grader hangs, or raise config.generation_deadline_s. Sampled batches are"
            " kept: rerun the same command to continue"
          ) from None
    if isinstance(batch, BaseException):
      raise GeneratorStoppedError(
        f"the generator died ({type(batch).__name__}: {batch}). Sampled batches are kept: fix the"
        " cause and rerun the same command to continue"
      ) from batch
    return batch

  def close(self) -> None:
    """Lets the thread end after the current batch; waits up to `_CLOSING_S` for it."""
    with self._changed:
      self._closing = True
      self._changed.notify_all()
    self._thread.join(timeout=_CLOSING_S)

  def _run(self) -> None:
    try:
      for batch in itertools.chain(
        self._generator.recall_stored(),
        self._generator.batches(self._next_policy, newest=self._newest_policy),
      ):
        self._ready.put(batch)
    except EndRequestedError:
      pass  # `take` notices the request by itself
    except BaseException as error:  # of any kind: `take` raises it in the trainer
      self._ready.put(error)

  def _next_policy(self, *, wait: bool, until: Future[None] | None) -> PolicySnapshot | None:
    grades_are_ready = lambda: until is not None and until.done()
    if wait and until is not None:
      until.add_done_callback(lambda _: self._wake())
    with self._changed:
      if wait:
        self._changed.wait_for(lambda: self._ended() or self._may_begin() or grades_are_ready())
      return self._newest if self._may_begin() and not self._ended() else None

  def _newest_policy(self) -> PolicySnapshot | None:
    with self._changed:
      return self._newest

  def _wake(self) -> None:
    with self._changed:
      self._changed.notify_all()

  def _ended(self) -> bool:
    return self._closing or self._generator.number >= self._limits.num_batches

  def _may_begin(self) -> bool:
    """Whether the newest policy may sample: new enough, and not older than the last batch's policy.

    It is older after a resume, while the trainer trains on batches sampled before.
    """
    newest, generator = self._newest, self._generator
    if newest is None or newest.version < generator.version:
      return False
    return generator.number < self._limits.limit(newest.version)
