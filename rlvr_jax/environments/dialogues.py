"""The pool's record of one dialogue, by which a new worker repeats it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple


class _Exchange(NamedTuple):
  """A request that was answered."""

  request: Mapping[str, Any]
  digest: bytes  # of the result


class Pending(NamedTuple):
  """A request without a result."""

  request: Mapping[str, Any]
  future: Future[Any]


class Dialogue:
  """Requests and results of one dialogue, and how far its worker is with them."""

  def __init__(self, place: int, reference: Any):
    self.place = place  # of its workers in the pool
    self.reference = reference  # of its problem, for the grader
    self.pending: Pending | None = None
    self.is_sent = False  # whether the worker has a request, which it has not answered
    self._past: list[_Exchange] = []
    self._position = 0  # exchanges that the worker has had
    self._grades: dict[str, Any] = {}

  @property
  def is_replayed(self) -> bool:
    """Whether the worker is behind the record."""
    return self._position < len(self._past)

  def add(self, request: Mapping[str, Any], future: Future[Any]) -> None:
    """Adds the next request."""
    self.pending = Pending(request, future)

  def forget_worker(self) -> None:
    """The worker has ended; the next one knows nothing of the dialogue."""
    self._position = 0
    self.is_sent = False

  def next_request(self) -> Mapping[str, Any] | None:
    """The request to send now, which counts as sent; None if there is none, or one is under way."""
    if self.is_sent or self.pending is None:  # a dialogue that nobody waits for is not replayed
      return None
    self.is_sent = True
    return self._past[self._position].request if self.is_replayed else self.pending.request

  def take_result(self, result: Mapping[str, Any]) -> Future[Any] | None:
    """Takes the worker's result; returns the future that gets it, None for a replayed one.

    Raises:
      ValueError: a replayed result is not the recorded one.
    """
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).digest()
    self.is_sent = False
    if self.is_replayed:
      if digest != self._past[self._position].digest:
        raise ValueError(
          f"the environment is not deterministic: its process had ended, and turn {self._position}"
          " was another one when the dialogue was repeated; let replies depend on problem, seed and"
          " texts only"
        )
      self._position += 1
      return None
    assert self.pending is not None
    self._past.append(_Exchange(self.pending.request, digest))
    self._position += 1
    return self.end_pending()

  def end_pending(self) -> Future[Any] | None:
    """Forgets the pending request; returns its future."""
    pending = self.pending
    self.pending = None
    return None if pending is None else pending.future

  def recorded_grade(self, text: str) -> Any:
    """The grade that `text` got before, so that a replay asks for none; None without one."""
    return self._grades.get(text)

  def record_grade(self, text: str, grade: Any) -> None:
    """Records a grade."""
    self._grades[text] = grade
