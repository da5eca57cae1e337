"""Hooks by which a grader, such as `code`, extends its deadline and reports that it sleeps."""

from __future__ import annotations

from collections.abc import Callable


def _ignore_seconds(seconds: float) -> None:
  del seconds


def _ignore() -> None:
  pass


# A pool's worker sets both hooks.
# Extends the current item's deadline by this many seconds.
extend: Callable[[float], None] = _ignore_seconds
# Reports that the current item uses no core from now on; called at most once per item.
report_asleep: Callable[[], None] = _ignore
# The pool's reply to that report. It follows the items that were already sent to the worker, which
# other workers grade.
GO_ON = b'{"go_on": true}\n'
