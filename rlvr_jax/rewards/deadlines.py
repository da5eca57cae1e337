"""What a grader such as the sandbox's tells the pool: how long it takes, and when it sleeps."""

from __future__ import annotations

from collections.abc import Callable


def _ignore_seconds(seconds: float) -> None:
  del seconds


def _ignore() -> None:
  pass


# A pool's worker sets both.
# Makes the pool wait this many seconds longer for the current item.
announce: Callable[[float], None] = _ignore_seconds
# Tells the pool that the current item uses no core from here on; at most once per item.
asleep: Callable[[], None] = _ignore
# The pool's answer, after the items that the worker has and other workers get.
GO_ON = b'{"go_on": true}\n'
