"""Prints the progress of sampling a long refresh."""

from __future__ import annotations

import time

from rlvr_jax.rollouts.sampler import Progress
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.train.reporting.progress import say

_PRINT_EVERY_S = 30.0


def keep_alive(progress: Progress) -> None:
  """Restarts the process's deadline, since sampling makes progress."""
  del progress
  restart_deadline()


class Printer:
  """Prints the progress of a long refresh, at most once in `_PRINT_EVERY_S` seconds.

  A burst is some decoding steps of the engine; a refresh is the sampling from one new policy to
  the next.
  """

  def __init__(self) -> None:
    """Begins with the first refresh."""
    self._began = self._printed = time.monotonic()
    self._finished = 0  # groups finished in this refresh
    self._tokens = self._steps = 0  # the engine's totals when this refresh began

  def __call__(self, progress: Progress) -> None:
    """Counts a burst, and prints the progress if it is time."""
    keep_alive(progress)
    now, usage = time.monotonic(), progress.usage
    self._finished += progress.finished
    if not progress.left:  # the next burst belongs to another refresh
      self._began = self._printed = now
      self._finished, self._tokens, self._steps = 0, usage.slot_tokens, usage.slot_steps
    if now - self._printed < _PRINT_EVERY_S or usage.slot_steps == self._steps:
      return
    self._printed, elapsed = now, now - self._began
    left = ""
    if self._finished:
      left = f", about {elapsed * progress.left / self._finished:.0f} s left"
    tokens, steps = usage.slot_tokens - self._tokens, usage.slot_steps - self._steps
    say(
      f"sampling: {self._finished}/{self._finished + progress.left} groups,"
      f" {tokens / elapsed:,.0f} tokens/s, {tokens / steps:.0%} of {progress.slots} slots"
      f" busy{left}"
    )
