"""A durable store of sampled batches: one ArrayRecord shard each, and an append-only index.

A shard is written under a temporary name, synced to disk, read back and renamed; then a line is
appended to index.jsonl. So a kill loses at most the shard being written, whose groups are in the
journal, and a concurrent reader sees complete batches only. No stored batch is ever overwritten.

In a bucket, a shard is read back before the upload, and is in the bucket when `append` returns. The
index is in the run's staging folder; the bucket has its lines up to the last checkpoint.

A shard is NUMBER.array_record, see `shards`. Index line: {"format", "number", "state", "file",
"bytes", "file_crc32", "info", "crc32"}; the last line of a batch counts. A damaged or missing line
does not lose a batch, since the shards have the same information.
"""

from __future__ import annotations

import copy
import errno
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from absl import logging

from rlvr_jax.ops.checks import check_integer
from rlvr_jax.rollouts.shards import (
  Stored,
  StoreError,
  make_entry,
  make_shard,
  read_line,
  read_shard,
  write_shard,
)
from rlvr_jax.storage.bucket import UnreachableError
from rlvr_jax.storage.files import (
  TEMPORARY,
  DiskFullError,
  JsonLines,
  disk_full_error,
  file_crc32,
  path_within,
  report_full_disk,
  shortage,
  sync_folder,
  with_crc32,
)
from rlvr_jax.storage.places import Workdir, in_bucket, open_files, open_tail, parse_path

if TYPE_CHECKING:
  from rlvr_jax.rollouts.journal import GroupJournal

INDEX = "index.jsonl"
TORN_FOLDER = "torn"
GROUPS_FOLDER = "groups"  # of `rollouts.journal`
_SHARD = re.compile(r"(\d{8,})\.array_record")
_SPARE_BYTES = 2**20  # for the header, ArrayRecord's blocks and the index


class TornShardError(RuntimeError):
  """A batch whose shard is missing, truncated or changed."""


class RolloutStore:
  """Batches of rollouts by number, in a folder; safe to use from several threads.

  One process at a time may open it for writing; any number may read concurrently.

  Attributes:
    directory: of the store.
    local: the same folder on a disk; for a bucket, the folder of this name in the staging folder.
  """

  def __init__(
    self, directory: str | os.PathLike[str], *, writable: bool, workdir: Workdir | None = None
  ):
    """Opens `directory`.

    Args:
      directory: has the store and nothing else; a folder, or gs://BUCKET/FOLDER.
      writable: whether to create the folder if needed and repair it after a killed writer: remove
        temporary files and a torn last line of the index, add intact shards that the index lacks,
        and move corrupted ones into the folder `torn`. A reader finds the intact ones too.
      workdir: of the run that the store belongs to; required to write to a bucket.
    Raises:
      StoreError: not a store, of another format, or opened for writing by another process.
    """
    self.directory = parse_path("the folder of rollouts", directory)
    self.local = path_within(workdir.local, self.directory.name) if workdir else self.directory
    self._workdir = workdir
    self._files = open_files(self.directory, workdir)
    self._index = _Index((self.local if writable else self.directory) / INDEX, writable)
    self._entries: dict[int, dict[str, Any]] = {}  # the last line of each batch
    self._reading, self._writing = threading.RLock(), threading.RLock()
    with report_full_disk(self.local):
      if writable and not self.local.exists():
        self.local.mkdir(parents=True)
        sync_folder(self.local.parent)
      self._check_is_store(writable)
      if writable:
        self._index.claim(self.directory)
        self._repair()
      elif not self._index_is_behind:
        self._add_unlisted()

  def append(
    self,
    number: int,
    arrays: Mapping[str, np.ndarray],
    info: Mapping[str, Any],
    samples: Sequence[Any] = (),
  ) -> None:
    """Writes one batch; it is on disk when this returns.

    Args:
      number: of the batch, ≥ 0.
      arrays: by name, with axes and dtypes as in `shards.ARRAYS` after a first axis of P groups.
      info: JSON values, finite; the names "bytes" and "removed" are reserved.
      samples: one JSON value per rollout, in order; or none.
    Raises:
      ValueError, TypeError: the number exists already, or arrays or info are not as above.
      DiskFullError: no space is left; earlier batches are untouched.
    """
    check_integer("RolloutStore.append", "number", number, low=0)
    shard = make_shard(number, arrays, info, samples)
    with self._writing:
      self._check_writable()
      path = self._path(number)
      if number in self.numbers() or self._files.exists(path.name):
        raise ValueError(
          f"batch {number} is in {self.directory} already and is not overwritten; `set_aside` it"
          " first"
        )
      needed_bytes = sum(map(len, shard.groups)) + _SPARE_BYTES
      if detail := shortage(self.local, needed_bytes):
        raise disk_full_error(path, detail)
      with self._files.open_to_write(path.name) as temporary:
        write_shard(temporary, shard)
        entry = make_entry(temporary, number)  # detects failures that the library did not report
        if entry is None:
          raise OSError(errno.EIO, f"{path} does not read back as written; check the disk")
      self._index.append([entry | {"file": path.name}])

  def read(self, number: int) -> Stored:
    """Reads arrays, info and samples of a batch, bit for bit as they were given to `append`.

    Arrays of a later version, which `shards.ARRAYS` lacks, are returned by their names.

    Raises:
      TornShardError: the batch is missing or not as it was written.
    """
    entry = self._stored_entry(number)
    shard = self._path(number)  # the index may be of another author, and name any file
    try:
      with self._files.open_to_read(shard.name) as path:
        size, checksum = path.stat().st_size, file_crc32(path)
        if size != entry.get("bytes", size):
          raise ValueError(f"it has {size} bytes and was written with {entry['bytes']}")
        if checksum != entry.get("file_crc32", checksum):
          raise ValueError(f"its bytes have checksum {checksum}, not {entry['file_crc32']}")
        return read_shard(path, number)
    except (StoreError, UnreachableError, DiskFullError):
      raise
    except Exception as error:
      raise _torn_error(shard, number, str(error)) from error

  def is_intact(self, number: int) -> bool:
    """Whether `read` succeeds; reads the complete batch."""
    try:
      self.read(number)
    except TornShardError:
      return False
    return True

  def find_damaged(self, numbers: Iterable[int]) -> Iterator[int]:
    """Yields the numbers of batches that are missing or damaged, but not removed.

    On a disk every file is read; in a bucket only the sizes of objects are compared.
    """
    sizes = self._files.sizes()
    for number in numbers:
      if sizes is None:
        intact = self.is_intact(number)
      else:
        size = sizes.get(self._path(number).name)
        intact = number in self._entries and size == self._entries[number]["bytes"]
      if not intact and not self.is_removed(number):
        yield number

  def is_removed(self, number: int) -> bool:
    """Whether `remove` has deleted the batch."""
    self._refresh()
    return self._state(number) == "removed"

  def numbers(self) -> list[int]:
    """Numbers of the batches that the index lists now, ascending."""
    with self._reading:
      self._refresh()
      return sorted(n for n, entry in self._entries.items() if entry["state"] == "stored")

  def info(self, number: int) -> dict[str, Any]:
    """The info of a batch, with its shard's size as "bytes"; does not open the shard.

    A batch that has been removed or set aside also has "removed": True.

    Raises:
      KeyError: no batch of this number was ever written.
    """
    self._refresh()
    if number not in self._entries:
      raise KeyError(f"batch {number} was never written to {self.directory}")
    if "info" not in self._entries[number]:
      self._entries[number] = self._make_entry(number) or self._entries[number] | {"info": {}}
    entry = copy.deepcopy(self._entries[number])
    removed = {} if entry["state"] == "stored" else {"removed": True}
    return entry["info"] | {"bytes": entry["bytes"]} | removed

  def set_aside(self, number: int) -> pathlib.Path | None:
    """Moves a batch's shard into the folder `torn`; the number may be appended again.

    Returns:
      The shard's new path; None if there was no shard.
    """
    with self._writing:
      self._check_writable()
      new_path = self._move_to_torn(self._path(number))
      self._retire([number], "set aside")
    return new_path

  def remove(self, *numbers: int) -> None:
    """Deletes the shards of batches; `info` still returns their info.

    Raises:
      KeyError: the store does not have one of them.
    """
    with self._writing:
      self._check_writable()
      if missing := set(numbers).difference(self.numbers()):
        raise KeyError(f"batch {min(missing)} is not in {self.directory}")
      # The index line first: a kill in between leaves a file to delete, not a missing batch.
      self._retire(numbers, "removed")
      for number in numbers:
        self._files.delete(self._path(number).name)

  def journal(self) -> GroupJournal:
    """The journal of finished groups of unfinished batches."""
    from rlvr_jax.rollouts.journal import GroupJournal  # it loads jax, which reading does not need

    follow = [self._workdir.follow] if self._workdir else []
    return GroupJournal(self.local / GROUPS_FOLDER, *follow)

  def close(self) -> None:
    """Stops writing, so that another process may open the store for writing; reads still work."""
    with self._writing:
      self._index.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def _index_is_behind(self) -> bool:
    """Whether the index may lack recent shards, as for a reader of a bucket."""
    return in_bucket(self.directory) and not self._index.writable

  def _path(self, number: int) -> pathlib.Path:
    return self.directory / f"{number:08d}.array_record"

  def _shards(self) -> dict[int, pathlib.Path]:
    """Paths of the files with names of shards, by number."""
    matches = (_SHARD.fullmatch(name) for name in self._files.names())
    return {(n := int(match[1])): self._path(n) for match in matches if match}

  def _make_entry(self, number: int) -> dict[str, Any] | None:
    """Makes the index entry of a batch from its shard; None if the shard is corrupted."""
    with self._files.open_to_read(self._path(number).name) as path:
      return make_entry(path, number)

  # --- opening --------------------------------------------------------------------------------

  def _check_is_store(self, writable: bool) -> None:
    """Raises StoreError unless the folder is a store, or empty and about to become one."""
    if self._index_is_behind and self._workdir is not None:
      return  # the run's first process has opened the store, and may not have written to it yet
    folder = self.local if writable else self.directory
    if not folder.is_dir():
      what = "is a file" if folder.exists() else "does not exist"
      raise StoreError(
        f"{self.directory} {what}; give the folder of a store, WORKDIR/rollouts of a run"
      )
    names = {name.removesuffix(TEMPORARY) for name in self._files.names()}
    indexed = (folder / INDEX).exists()
    if indexed:
      self._refresh()
      is_store = self._index.is_empty() or self._entries or self._shards()
    else:
      only_shards = all(_SHARD.fullmatch(name) for name in names - {TORN_FOLDER, GROUPS_FOLDER})
      is_store = only_shards and (writable or self._index_is_behind)
    if not is_store:
      raise StoreError(
        f"{self.directory} is not a rollout store ({INDEX} "
        f"{'has other contents' if indexed else 'is missing'}). Choose another folder."
      )

  def _repair(self) -> None:
    """Lists shards that the index lacks, and moves or deletes other files; see `__init__`."""
    self._refresh()  # first, since it rejects a store of another format
    for path in self.local.glob("*" + TEMPORARY):
      path.unlink()
    last_number = max(self._entries, default=-1)
    listed: list[int] = []
    damaged: list[int] = []
    for number, path in self._unlisted_shards().items():
      if self._state(number) == "removed":
        self._files.delete(path.name)
      elif entry := self._make_entry(number):
        self._index.append([entry])
        listed.append(number)
      else:
        self._move_to_torn(path)
        damaged.append(number)
    if in_bucket(self.directory):  # its index lacks the batches since the last checkpoint
      listed = [number for number in listed if number < last_number]
    self._warn(listed, "listed again")
    self._warn(damaged, f"damaged, moved into {TORN_FOLDER}")

  def _add_unlisted(self) -> None:
    """Adds the shards that the index lacks, like `_repair`, but changes no file."""
    entries = {
      n: self._make_entry(n) for n in self._unlisted_shards() if self._state(n) != "removed"
    }
    self._refresh()  # a writer may just have listed its last batch
    unlisted = {n: entry for n, entry in entries.items() if self._state(n) != "stored"}
    self._entries.update((n, entry) for n, entry in unlisted.items() if entry)
    self._warn([n for n in unlisted if unlisted[n]], "found by their shards")
    self._warn([n for n in unlisted if not unlisted[n]], "damaged, left out")

  def _warn(self, numbers: list[int], remedy: str) -> None:
    """Logs which batches the index lacks, and what was done about them."""
    if numbers:
      logging.warning(
        "%s does not list the batches %s: %s", self.directory / INDEX, numbers, remedy
      )

  # --- the index ------------------------------------------------------------------------------

  def _refresh(self) -> None:
    """Reads the lines appended to the index since the last call."""
    with self._reading:
      entries = self._index.read_new_entries(self.directory)
      self._entries.update((entry["number"], entry) for entry in entries if entry is not None)
      if self._index_is_behind:
        for number, path in self._unlisted_shards().items():
          if self._state(number) != "removed":  # `info` reads the rest of the entry
            self._entries[number] = {"number": number, "state": "stored", "file": path.name}
      # After a damaged line; a writer lists the shards again when it opens the store.
      elif None in entries and not self._index.writable:
        self._add_unlisted()

  def _state(self, number: int) -> str:
    return self._entries[number]["state"] if number in self._entries else "not listed"

  def _unlisted_shards(self) -> dict[int, pathlib.Path]:
    """Shards that the index does not list, after a kill or because of a damaged line."""
    return {n: path for n, path in self._shards().items() if self._state(n) != "stored"}

  def _stored_entry(self, number: int) -> dict[str, Any]:
    """The index entry of a stored batch; raises TornShardError for any other."""
    self._refresh()
    if (state := self._state(number)) != "stored":
      raise _torn_error(self._path(number), number, f"the index says it is {state}")
    return self._entries[number]

  def _retire(self, numbers: Sequence[int], state: str) -> None:
    """Appends index lines with the new state of batches; skips those that are not listed."""
    listed = set(self.numbers()).intersection(numbers)
    if entries := [self._entries[number] | {"state": state} for number in sorted(listed)]:
      self._index.append(entries)
      if self._workdir is not None:
        self._workdir.publish(f"{self.directory.name}/{INDEX}")

  def _check_writable(self) -> None:
    if not self._index.is_open():
      raise StoreError(f"{self.directory} is not open for writing; open it with writable=True")

  def _move_to_torn(self, path: pathlib.Path) -> pathlib.Path | None:
    """Moves a shard into the folder `torn`, under an unused name; None if there is no shard."""
    return self._files.move(path.name, TORN_FOLDER) if self._files.exists(path.name) else None


class _Index:
  """The lines of a store's index.

  Attributes:
    writable: whether it was opened for writing.
  """

  def __init__(self, path: pathlib.Path, writable: bool):
    """Opens nothing for writing yet; `path` comes from `places.parse_path`."""
    self.writable = writable
    self._path = path
    self._tail = open_tail(path)
    self._lines: JsonLines | None = None

  def claim(self, directory: pathlib.Path) -> None:
    """Opens the index for appending and locks it until `close` or the end of the process.

    Args:
      directory: of the store, for the message.
    Raises:
      StoreError: another process has the lock.
    """
    try:
      lines = JsonLines(self._path, fsync=True, exclusive=True)
    except BlockingIOError:
      raise StoreError(
        f"another process writes to {directory}. Wait for it, stop it, or choose another folder."
      ) from None
    sync_folder(self._path.parent)
    self._lines = lines

  def is_open(self) -> bool:
    """Whether `append` is possible."""
    return self._lines is not None

  def is_empty(self) -> bool:
    """Whether the index has no bytes."""
    return self._tail.is_empty()

  def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines; they are on disk when this returns."""
    assert self._lines is not None  # checked by the store
    self._lines.append(map(with_crc32, entries))

  def read_new_entries(self, directory: pathlib.Path) -> list[dict[str, Any] | None]:
    """Reads the entries appended since the last call; None for a damaged line."""
    entries = [read_line(line, directory) for line in self._tail.read_new().splitlines()]
    return [e if e and type(e.get("number")) is int and "state" in e else None for e in entries]

  def close(self) -> None:
    """Closes the index for appending and unlocks it."""
    if self._lines is not None:
      self._lines.close()
      self._lines = None


def _torn_error(path: pathlib.Path, number: int, reason: str) -> TornShardError:
  return TornShardError(
    f"batch {number}, {path}, is missing or not as it was written: {reason}. Rerun its run, which"
    " samples the batch again if it is still needed, or put back a copy of the file."
  )
