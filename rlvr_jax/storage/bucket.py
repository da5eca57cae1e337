"""Objects of a bucket of Google Cloud Storage, through gcsfs; each is complete or absent.

fsspec has no conditions on generations, by which a bucket decides between writers. So this module
makes requests of the JSON API itself, with the session of gcsfs.

A file of lines is in parts, its segments: what is appended comes as NAME/00000000, NAME/00000001, …
One process writes such a file, and each write is on the condition that the bucket has what this
process knows of. So one that has lost its claim cannot change what its successor has written.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import logging
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple

import fsspec

SEGMENT = re.compile(r"(.+\.jsonl)/(\d{8,})")  # a segment of a file of lines
MAX_CONCURRENT_REQUESTS = 8
DEADLINE_S = 300.0  # for a request, with its repetitions by gcsfs
# Listings that gcsfs would keep do not show what other hosts have written since.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
for _name in ("gcsfs", "fsspec"):  # they log every file that is read
  logging.getLogger(_name).setLevel(logging.WARNING)


class ChangedError(RuntimeError):
  """An object has another generation than its writer expects: another process has written it."""


class UnreachableError(OSError):
  """The bucket does not answer, or refuses."""


class Segment(NamedTuple):
  """An object that has a part of a file of lines."""

  number: int
  data: bytes
  generation: int


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
  """Converts errors of gcsfs, which have no common class, into OSError."""
  try:
    yield
  except FileNotFoundError:
    raise
  except Exception as error:
    # gcsfs has either for status 412, by its version.
    if isinstance(error, FileExistsError) or str(getattr(error, "code", "")) == "412":
      raise ChangedError(
        f"{what} was changed by another process; rerun the same command when that has ended"
      ) from error
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, TimeoutError):
      text = "no answer in time"
    raise UnreachableError(
      f"{what} cannot be reached: {text}. Check the bucket's name, the network and the account's"
      " role (roles/storage.objectUser), then rerun the same command"
    ) from error


class Bucket:
  """The objects under a folder of a bucket; each is written and read in one piece."""

  def __init__(self, folder: str | os.PathLike[str], guard: Callable[[], float] = lambda: math.inf):
    """Opens nothing yet.

    Args:
      folder: of `place`.
      guard: called before every write; raises if this process may not write any more, and returns
        the seconds for which it certainly may. A write that takes longer is given up.
    """
    self.url = os.fspath(folder).rstrip("/")
    self._bucket, _, self._prefix = self.url.removeprefix("gs://").partition("/")
    self._system: Any = fsspec.filesystem("gcs")
    self._guard = guard

  def allowed_s(self) -> float:
    """Seconds for which this process certainly may write; raises if it may not, see `guard`."""
    return self._guard()

  def names(self, folder: str = "") -> list[str]:
    """Names of the objects, sorted; those whose names begin with `folder`."""
    return sorted(self.sizes(folder))

  def sizes(self, folder: str = "") -> dict[str, int]:
    """Bytes of the same objects, by name."""
    found: dict[str, int] = {}
    page: dict[str, Any] | None = None
    prefix = f"{self._prefix}/"
    with _explained(self.url):
      while page is None or "nextPageToken" in page:
        page = self._call(
          *("GET", "b/{}/o", self._bucket),
          prefix=prefix + folder,
          fields="items(name,size),nextPageToken",
          pageToken=(page or {}).get("nextPageToken"),
          json_out=True,
        )
        for item in page.get("items", ()):
          found[item["name"].removeprefix(prefix)] = int(item["size"])
    return found

  def exists(self, name: str) -> bool:
    """Whether there is an object of this name."""
    return name in self.names(name)

  def read(self, name: str) -> bytes:
    """An object's bytes; raises FileNotFoundError if there is none."""
    return self.read_generation(name)[0]

  def read_generation(self, name: str) -> tuple[bytes, int]:
    """An object's bytes and generation; raises FileNotFoundError if there is none."""
    with _explained(f"{self.url}/{name}"):
      headers, data = self._call("GET", "b/{}/o/{}", *self._key(name), alt="media")
    return data, int(headers["X-Goog-Generation"])

  def put(
    self,
    name: str,
    data: bytes,
    *,
    generation: int | None = None,
    deadline_s: float = DEADLINE_S,
  ) -> int:
    """Writes an object, and compares its checksum with the one that the bucket computed.

    Args:
      name: of the object.
      data: its bytes.
      generation: the one that it must have; 0 if it must not exist; None for any.
      deadline_s: seconds after which it is given up.
    Returns:
      Its generation.
    Raises:
      ChangedError: it has another generation, and other bytes.
      UnreachableError: it may be there nevertheless.
    """
    limit_s = min(deadline_s, self.allowed_s())
    url, what = self._system.base.replace("/storage/", "/upload/storage/"), f"{self.url}/{name}"
    digest = base64.b64encode(hashlib.md5(data).digest()).decode()
    bucket, key = self._key(name)
    try:
      with _explained(what):
        stored = self._call(
          *("POST", f"{url}b/{bucket}/o"),
          deadline_s=limit_s,
          uploadType="media",
          name=key,
          ifGenerationMatch=generation,
          headers={"Content-Type": "application/octet-stream"},
          data=data,
          json_out=True,
        )
    except FileNotFoundError:
      raise UnreachableError(
        f"{what} cannot be written: there is no bucket {bucket}, or this account does not see it"
      ) from None
    except ChangedError:
      # After a lost answer gcsfs repeats the request, which then finds what it has written.
      with _explained(what), contextlib.suppress(FileNotFoundError):
        stored = self._call("GET", "b/{}/o/{}", bucket, key, json_out=True)
        if stored["md5Hash"] == digest:
          return int(stored["generation"])
      raise
    if stored["md5Hash"] != digest:
      raise OSError(f"{what} arrived damaged in the bucket; check the network and rerun")
    return int(stored["generation"])

  def delete(self, name: str, *, generation: int | None = None) -> None:
    """Removes an object; does nothing if there is none, or with another generation."""
    limit_s = min(DEADLINE_S, self.allowed_s())
    with contextlib.suppress(FileNotFoundError, ChangedError), _explained(f"{self.url}/{name}"):
      self._call(
        *("DELETE", "b/{}/o/{}", *self._key(name)),
        ifGenerationMatch=generation,
        deadline_s=limit_s,
      )

  def delete_all(self, names: Iterable[str]) -> None:
    """Removes these objects, in any order."""
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      list(pool.map(self.delete, names))

  def segments(self, name: str, *, first: int = 0) -> list[Segment]:
    """The segments of a file of lines, in order, from number `first` on."""
    matches = map(SEGMENT.fullmatch, self.names(f"{name}/"))
    numbers = [int(match[2]) for match in matches if match and match[1] == name]
    return self.read_segments(name, [number for number in numbers if number >= first])

  def read_segments(self, name: str, numbers: Sequence[int]) -> list[Segment]:
    """These segments."""
    read = lambda number: Segment(number, *self.read_generation(segment_name(name, number)))
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      return list(pool.map(read, numbers))

  def _key(self, name: str) -> tuple[str, str]:
    return self._bucket, f"{self._prefix}/{name}"

  def _call(self, *request: Any, deadline_s: float = DEADLINE_S, **options: Any) -> Any:
    """A request of the JSON API, as of gcsfs; it is cancelled at its deadline."""
    return self._system.call(*request, timeout=deadline_s, **options)


def segment_name(name: str, number: int) -> str:
  return f"{name}/{number:08d}"


# --- files of lines -------------------------------------------------------------------------------


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
