"""Objects of a bucket of Google Cloud Storage, through gcsfs; each is complete or absent.

fsspec has no preconditions on generations, by which a bucket decides between writers. So this
module makes requests to the JSON API itself, with the session of gcsfs.

A file of lines is stored in segments: appended lines become the objects NAME/00000000,
NAME/00000001, … One process writes such a file, on the condition that the segments are those that
it knows. So a process that has lost its claim cannot change what its successor has written.
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
DEADLINE_S = 300.0  # for a request, with its retries by gcsfs
# Cached listings would lack what other hosts have written since.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
for _name in ("gcsfs", "fsspec"):  # which log every file that they read
  logging.getLogger(_name).setLevel(logging.WARNING)


class ChangedError(RuntimeError):
  """An object does not have the generation that its writer expects: another process wrote it."""


class UnreachableError(OSError):
  """The bucket does not respond, or refuses."""


class Segment(NamedTuple):
  """An object with a part of a file of lines."""

  number: int
  data: bytes
  generation: int


@contextlib.contextmanager
def _explain_errors(url: str) -> Iterator[None]:
  """Converts errors of gcsfs, which have no common class, into OSError or ChangedError."""
  try:
    yield
  except FileNotFoundError:
    raise
  except Exception as error:
    # Status 412 is one or the other, depending on the version of gcsfs.
    if isinstance(error, FileExistsError) or str(getattr(error, "code", "")) == "412":
      raise ChangedError(
        f"{url} was changed by another process; rerun the same command when that has ended"
      ) from error
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, TimeoutError):
      text = "no response in time"
    raise UnreachableError(
      f"{url} cannot be reached: {text}. Check the bucket's name, the network and the account's"
      " role (roles/storage.objectUser), then rerun the same command"
    ) from error


class Bucket:
  """The objects under a folder of a bucket; each is written and read as a whole."""

  def __init__(self, folder: str | os.PathLike[str], guard: Callable[[], float] = lambda: math.inf):
    """Makes no request yet.

    Args:
      folder: from `parse_path`.
      guard: called before every write; raises if this process may no longer write, and returns the
        seconds for which it certainly may. A write that takes longer is cancelled.
    """
    self.url = os.fspath(folder).rstrip("/")
    self._bucket, _, self._prefix = self.url.removeprefix("gs://").partition("/")
    self._system: Any = fsspec.filesystem("gcs")
    self._guard = guard

  def allowed_s(self) -> float:
    """Seconds for which this process certainly may write; raises as `guard` does."""
    return self._guard()

  def names(self, prefix: str = "") -> list[str]:
    """Names of the objects that begin with `prefix`, sorted."""
    return sorted(self.sizes(prefix))

  def sizes(self, prefix: str = "") -> dict[str, int]:
    """Bytes of the objects whose names begin with `prefix`, by name."""
    return {name: size for name, (size, _) in self.describe(prefix).items()}

  def describe(self, prefix: str = "") -> dict[str, tuple[int, int]]:
    """(bytes, generation) of the objects whose names begin with `prefix`, by name."""
    found: dict[str, tuple[int, int]] = {}
    page: dict[str, Any] | None = None
    folder = f"{self._prefix}/"
    with _explain_errors(self.url):
      while page is None or "nextPageToken" in page:
        page = self._call(
          *("GET", "b/{}/o", self._bucket),
          prefix=folder + prefix,
          fields="items(name,size,generation),nextPageToken",
          pageToken=(page or {}).get("nextPageToken"),
          json_out=True,
        )
        for item in page.get("items", ()):
          name = item["name"].removeprefix(folder)
          found[name] = int(item["size"]), int(item["generation"])
    return found

  def exists(self, name: str) -> bool:
    """Whether an object has this name."""
    return name in self.names(name)

  def read(self, name: str) -> bytes:
    """Reads an object; raises FileNotFoundError if it does not exist."""
    return self.read_generation(name)[0]

  def read_generation(self, name: str) -> tuple[bytes, int]:
    """Reads an object and its generation; raises FileNotFoundError if it does not exist."""
    with _explain_errors(f"{self.url}/{name}"):
      headers, data = self._call("GET", "b/{}/o/{}", *self._key(name), alt="media")
    return data, int(headers["X-Goog-Generation"])

  def read_start(self, name: str, size: int) -> bytes:
    """Reads so many bytes of an object from its beginning on; all if it is shorter."""
    with _explain_errors(f"{self.url}/{name}"):
      return self._system.cat_file("/".join(self._key(name)), start=0, end=size)

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
      name: name of the object.
      data: its bytes.
      generation: the generation that it must have; 0: it must not exist; None: any.
      deadline_s: seconds after which the request is cancelled.
    Returns:
      The new generation.
    Raises:
      ChangedError: the object has another generation, and other bytes.
      UnreachableError: the request failed; the object may have been written nevertheless.
    """
    limit_s = min(deadline_s, self.allowed_s())
    upload_url = self._system.base.replace("/storage/", "/upload/storage/")
    url = f"{self.url}/{name}"
    digest = base64.b64encode(hashlib.md5(data).digest()).decode()
    bucket, key = self._key(name)
    try:
      with _explain_errors(url):
        stored = self._call(
          *("POST", f"{upload_url}b/{bucket}/o"),
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
        f"{url} cannot be written: there is no bucket {bucket}, or this account cannot access it"
      ) from None
    except ChangedError:
      # After a lost response gcsfs retries the request, which then meets its own object.
      with _explain_errors(url), contextlib.suppress(FileNotFoundError):
        stored = self._call("GET", "b/{}/o/{}", bucket, key, json_out=True)
        if stored["md5Hash"] == digest:
          return int(stored["generation"])
      raise
    if stored["md5Hash"] != digest:
      raise OSError(f"{url} arrived damaged in the bucket; check the network and rerun")
    return int(stored["generation"])

  def delete(self, name: str, *, generation: int | None = None) -> None:
    """Removes an object; does nothing if it does not exist or has another generation."""
    limit_s = min(DEADLINE_S, self.allowed_s())
    with (
      contextlib.suppress(FileNotFoundError, ChangedError),
      _explain_errors(f"{self.url}/{name}"),
    ):
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
    """Reads the segments with these numbers, in this order."""
    read = lambda number: Segment(number, *self.read_generation(segment_name(name, number)))
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      return list(pool.map(read, numbers))

  def _key(self, name: str) -> tuple[str, str]:
    return self._bucket, f"{self._prefix}/{name}"

  def _call(self, *request: Any, deadline_s: float = DEADLINE_S, **options: Any) -> Any:
    """Makes a request to the JSON API by gcsfs, which cancels it at the deadline."""
    return self._system.call(*request, timeout=deadline_s, **options)


def segment_name(name: str, number: int) -> str:
  """Name of the object of a segment of the file `name`."""
  return f"{name}/{number:08d}"


# --- files of lines -------------------------------------------------------------------------------


class _Published(NamedTuple):
  """A segment in the bucket."""

  number: int
  size: int
  checksum: int
  generation: int


class Lines:
  """A local file of lines and its segments in the bucket."""

  def __init__(self, bucket: Bucket, name: str, segments: Sequence[Segment] = ()):
    """`segments`: those that exist already."""
    self._bucket = bucket
    self._name = name
    self._segments = [_describe_segment(*segment) for segment in segments]
    self._inode = -1  # of the file when it was last compared with the segments

  def publish(self, file: IO[bytes]) -> None:
    """Puts the lines of the file that are not in the bucket yet.

    Raises:
      OSError: the bucket cannot be reached; the next call puts the remaining lines.
      ChangedError: another process has written segments.
    """
    if self._inode != (inode := os.fstat(file.fileno()).st_ino):  # a resumed run replaced the file
      self._replace_changed(file)
      self._inode = inode
    file.seek(sum(segment.size for segment in self._segments))
    self._put(_complete_lines(file.read()))

  def remove(self) -> None:
    """Removes all segments."""
    self._bucket.delete_all(segment_name(self._name, part.number) for part in self._segments)
    self._segments = []

  def _replace_changed(self, file: IO[bytes]) -> None:
    """Replaces the segments that differ from the file.

    It removes them from the last one on, and overwrites the first: a kill in between leaves too
    many lines, which the next resume drops, but not too few.
    """
    is_same = lambda segment: zlib.crc32(file.read(segment.size)) == segment.checksum
    num_same = len(list(itertools.takewhile(is_same, self._segments)))
    while len(self._segments) > num_same + 1:
      last = self._segments[-1]
      self._bucket.delete(segment_name(self._name, last.number), generation=last.generation)
      self._segments.pop()
    if len(self._segments) > num_same:
      number, *_, generation = self._segments[-1]
      file.seek(sum(segment.size for segment in self._segments[:num_same]))
      data = _complete_lines(file.read())
      name = segment_name(self._name, number)
      generation = self._bucket.put(name, data, generation=generation)
      self._segments[-1] = _describe_segment(number, data, generation)

  def _put(self, data: bytes) -> None:
    """Puts lines as the next segment."""
    if not data:
      return
    number = self._segments[-1].number + 1 if self._segments else 0
    name = segment_name(self._name, number)
    stored = data
    try:
      generation = self._bucket.put(name, data, generation=0)
    except ChangedError:
      # The response to an earlier put was lost; its object lacks the lines appended since.
      stored, generation = self._bucket.read_generation(name)
      if not (stored and data.startswith(stored)):
        raise
    self._segments.append(_describe_segment(number, stored, generation))
    self._put(data[len(stored) :])


def _describe_segment(number: int, data: bytes, generation: int) -> _Published:
  return _Published(number, len(data), zlib.crc32(data), generation)


def _complete_lines(data: bytes) -> bytes:
  """The complete lines of `data`; another thread may be writing the rest."""
  return data[: data.rfind(b"\n") + 1]
