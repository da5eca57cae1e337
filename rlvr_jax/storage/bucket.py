"""Objects of a bucket of Google Cloud Storage, through gcsfs; each is complete or absent.

If several processes write an object, a precondition on the object's generation decides which
process succeeds. fsspec has no preconditions, so this module makes requests to the JSON API itself,
with the session of gcsfs.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from rlvr_jax.storage.files import JsonObject

MAX_CONCURRENT_REQUESTS = 8
DEADLINE_S = 300.0  # seconds for a request, with its retries by gcsfs
# Cached listings would lack objects that other hosts have written since.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
for _name in ("gcsfs", "fsspec"):  # these log every file that they read
  logging.getLogger(_name).setLevel(logging.WARNING)


class ChangedError(RuntimeError):
  """An object does not have the generation that its writer expects: another process wrote it."""


class UnreachableError(OSError):
  """The bucket does not respond, or refuses a request."""


@contextlib.contextmanager
def _explain_errors(url: str) -> Iterator[None]:
  """Converts errors of gcsfs, which have no common class, into OSError or ChangedError."""
  try:
    yield
  except FileNotFoundError:
    raise
  except Exception as error:
    # Status 412 has either form, depending on the version of gcsfs.
    if isinstance(error, FileExistsError) or str(getattr(error, "code", "")) == "412":
      raise ChangedError(
        f"{url} was changed by another process; rerun the same command when that process has ended"
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
      folder: the result of `parse_path`.
      guard: called before every write; raises if this process may no longer write, else returns the
        seconds for which writing is certainly allowed. A write that takes longer is cancelled.
    """
    self.url = os.fspath(folder).rstrip("/")
    self._bucket, _, self._prefix = self.url.removeprefix("gs://").partition("/")
    self._system: fsspec.AbstractFileSystem = fsspec.filesystem("gcs")
    self._guard = guard

  def allowed_s(self) -> float:
    """Seconds for which this process certainly may write; raises the errors of `guard`."""
    return self._guard()

  def names(self, prefix: str = "") -> list[str]:
    """The object names that begin with `prefix`, sorted."""
    return sorted(self.describe(prefix))

  def describe(self, prefix: str = "") -> dict[str, tuple[int, int]]:
    """(bytes, generation) of the objects whose names begin with `prefix`, by name."""
    found: dict[str, tuple[int, int]] = {}
    page: JsonObject | None = None
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

  def read(self, name: str) -> bytes:
    """Reads an object; raises FileNotFoundError if it does not exist."""
    return self.read_generation(name)[0]

  def read_generation(self, name: str) -> tuple[bytes, int]:
    """Reads an object and its generation; raises FileNotFoundError if it does not exist."""
    with _explain_errors(f"{self.url}/{name}"):
      headers, data = self._call("GET", "b/{}/o/{}", *self._key(name), alt="media")
    return data, int(headers["X-Goog-Generation"])

  def read_start(self, name: str, size: int) -> bytes:
    """Reads the first `size` bytes of an object; the whole object if the object is shorter."""
    with _explain_errors(f"{self.url}/{name}"):
      data: bytes = self._system.cat_file("/".join(self._key(name)), start=0, end=size)
    return data

  def put(
    self,
    name: str,
    data: bytes,
    *,
    generation: int | None = None,
    deadline_s: float = DEADLINE_S,
  ) -> int:
    """Writes an object, and compares its checksum with the checksum that the bucket computed.

    Args:
      name: name of the object.
      data: the bytes to write.
      generation: the generation that the object must have; 0: it must not exist; None: any
        generation.
      deadline_s: seconds after which the request is cancelled.
    Returns:
      The new generation.
    Raises:
      ChangedError: the object has another generation, or none, and its bytes are not `data`.
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
      # If the response was lost, gcsfs has retried, and found the object that it wrote itself.
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
    """Removes the objects, in any order."""
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      list(pool.map(self.delete, names))

  def _key(self, name: str) -> tuple[str, str]:
    return self._bucket, f"{self._prefix}/{name}"

  def _call(self, *request: str, deadline_s: float = DEADLINE_S, **options: Any) -> Any:
    """Makes a request to the JSON API by gcsfs, which cancels it at the deadline."""
    return self._system.call(*request, timeout=deadline_s, **options)
