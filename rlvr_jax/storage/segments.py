"""Files of lines in a bucket, in parts: what is appended comes as NAME/00000000, NAME/00000001, …

One process writes such a file, and each write is on the condition that the bucket has what this
process knows of. So one that has lost its claim cannot change what its successor has written.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from typing import IO, NamedTuple

from rlvr_jax.storage.bucket import Bucket, ChangedError, Segment, segment_name


class _Published(NamedTuple):
  """A segment in the bucket."""

  number: int
  size: int
  checksum: int
  generation: int


class Lines:
  """A local file of lines, and its segments in the bucket."""

  def __init__(self, bucket: Bucket, name: str, found: Sequence[Segment] = ()):
    """`found`: the segments that there are."""
    self._bucket, self._name = bucket, name
    self._segments = [_published(*segment) for segment in found]
    self._inode = -1  # of the file when it was last compared with the segments

  def publish(self, file: IO[bytes]) -> None:
    """Puts the file's lines that are not in the bucket yet.

    Raises:
      OSError: the bucket cannot be reached; what was not put is put by the next call.
      ChangedError: another process has written segments.
    """
    if self._inode != (inode := os.fstat(file.fileno()).st_ino):  # was replaced by a resumed run
      self._replace_changed(file)
      self._inode = inode
    file.seek(sum(segment.size for segment in self._segments))
    self._put(_complete(file.read()))

  def remove(self) -> None:
    """Removes all segments."""
    self._bucket.delete_all(segment_name(self._name, part.number) for part in self._segments)
    self._segments = []

  def _replace_changed(self, file: IO[bytes]) -> None:
    """Replaces the segments that the file does not begin with.

    The last one goes first, and the first of them is replaced: a kill in between leaves too many
    lines, which the next resume drops, but not too few.
    """
    same = lambda segment: zlib.crc32(file.read(segment.size)) == segment.checksum
    kept = len(list(itertools.takewhile(same, self._segments)))
    while len(self._segments) > kept + 1:
      last = self._segments[-1]
      self._bucket.delete(segment_name(self._name, last.number), generation=last.generation)
      self._segments.pop()
    if len(self._segments) > kept:
      number, *_, generation = self._segments[-1]
      file.seek(sum(segment.size for segment in self._segments[:kept]))
      data = _complete(file.read())
      name = segment_name(self._name, number)
      generation = self._bucket.put(name, data, generation=generation)
      self._segments[-1] = _published(number, data, generation)

  def _put(self, data: bytes) -> None:
    """Puts lines as the next segment."""
    if not data:
      return
    number = self._segments[-1].number + 1 if self._segments else 0
    name, there = segment_name(self._name, number), data
    try:
      generation = self._bucket.put(name, data, generation=0)
    except ChangedError:
      # A put whose answer was lost is there, without the lines that have come since.
      there, generation = self._bucket.read_generation(name)
      if not (there and data.startswith(there)):
        raise
    self._segments.append(_published(number, there, generation))
    self._put(data[len(there) :])


def _published(number: int, data: bytes, generation: int) -> _Published:
  return _Published(number, len(data), zlib.crc32(data), generation)


def _complete(data: bytes) -> bytes:
  """The complete lines; another thread may be writing the rest."""
  return data[: data.rfind(b"\n") + 1]
