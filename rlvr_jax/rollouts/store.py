"""A durable store of sampled batches: one ArrayRecord shard each, and an append-only index.

A shard is written under a temporary name, synced to disk, read back and renamed; then a line is
appended to index.jsonl. So a kill loses at most the batch being written, and a concurrent reader
sees complete batches only. No stored batch is ever overwritten.

In a bucket a shard is read back before it is put, and is in the bucket when `append` returns. The
index is in the run's staging folder. The bucket has its lines up to the last checkpoint.

A shard is NUMBER.array_record, see `shards`. Index line: {"format", "number", "state", "file",
"bytes", "file_crc32", "info", "crc32"}; the last line of a batch counts. A damaged or lost line
loses no batch, since the shards have the same information.
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
  entry_of,
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
  disk_full,
  file_crc32,
  reporting_full_disk,
  shortage,
  sync_folder,
  with_crc32,
)
from rlvr_jax.storage.places import Workdir, files_in, in_bucket, place, tail_of

if TYPE_CHECKING:
  from rlvr_jax.rollouts.journal import GroupJournal

INDEX = "index.jsonl"
TORN_FOLDER = "torn"
GROUPS_FOLDER = "groups"  # of `rollouts.journal`
_SHARD = re.compile(r"(\d{8,})\.array_record")
_SPARE_BYTES = 2**20  # for the header, ArrayRecord's blocks and the index


class TornShardError(RuntimeError):
  """A batch's shard is missing, truncated or changed."""


class RolloutStore:
  """Batches of rollouts by number, in a folder; safe to use from several threads.

  One process at a time may open it for writing; any number may read concurrently.

  Attributes:
    directory: of the store.
    local: the same folder if it is on a disk; for a bucket, of this name in the staging folder.
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
      workdir: of the run whose store it is; a writable one in a bucket needs it.
    Raises:
      StoreError: not a store, of another format, or opened for writing by another process.
    """
    self.directory = place("the folder of rollouts", directory)
    self.local = workdir.local / self.directory.name if workdir else self.directory
    self._workdir = workdir
    self._files = files_in(self.directory, workdir)
    self._index = _Index((self.local if writable else self.directory) / INDEX, writable)
    self._entries: dict[int, dict[str, Any]] = {}  # the last line of each batch
    self._reading, self._writing = threading.RLock(), threading.RLock()
    with reporting_full_disk(self.local):
      if writable and not self.local.exists():
        self.local.mkdir(parents=True)
        sync_folder(self.local.parent)
      self._check_is_store(writable)
      if writable:
        self._index.claim(self.directory)
        self._repair()
      elif not self._runs_ahead:
        self._find_unlisted()

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
      arrays: by name, with axes and dtypes as in `shards.ARRAYS` behind a first axis of P groups.
      info: JSON values, finite; without the names "bytes" and "removed".
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
      need = sum(map(len, shard.groups)) + _SPARE_BYTES
      if lacking := shortage(self.local, need):
        raise disk_full(path, lacking)
      with self._files.writing(path.name) as temporary:
        write_shard(temporary, shard)
        entry = entry_of(temporary, number)  # finds failures that the library did not report
        if entry is None:
          raise OSError(errno.EIO, f"{path} does not read back as written; check the disk")
      self._index.append([entry | {"file": path.name}])

  def read(self, number: int) -> Stored:
    """Arrays, info and samples of a batch, bit for bit as they were given to `append`.

    Arrays that a later version has written, which `shards.ARRAYS` lacks, come by their names.

    Raises:
      TornShardError: the batch is missing or not as it was written.
    """
    entry = self._stored(number)
    try:
      with self._files.reading(entry["file"]) as path:
        size, checksum = path.stat().st_size, file_crc32(path)
        if size != entry.get("bytes", size):
          raise ValueError(f"it has {size} bytes and was written with {entry['bytes']}")
        if checksum != entry.get("file_crc32", checksum):
          raise ValueError(f"its bytes have checksum {checksum}, not {entry['file_crc32']}")
        return read_shard(path, number)
    except (StoreError, UnreachableError, DiskFullError):
      raise
    except Exception as error:
      raise _torn(self.directory / entry["file"], number, str(error)) from error

  def is_intact(self, number: int) -> bool:
    """Whether `read` succeeds; reads the full batch."""
    try:
      self.read(number)
    except TornShardError:
      return False
    return True

  def damaged(self, numbers: Iterable[int]) -> Iterator[int]:
    """Numbers of those batches that are missing or damaged, without removed ones.

    On a disk every file is read. In a bucket only the sizes of objects are compared.
    """
    sizes = self._files.sizes()
    for number in numbers:
      if sizes is None:
        intact = self.is_intact(number)
      else:
        size = sizes.get(self._path(number).name)
        intact = number in self._entries and size == self._entries[number]["bytes"]
      if not intact and not self.removed(number):
        yield number

  def removed(self, number: int) -> bool:
    """Whether `remove` has deleted the batch."""
    self._refresh()
    return self._state(number) == "removed"

  def numbers(self) -> list[int]:
    """Numbers of the batches that the index lists now, ascending."""
    with self._reading:
      self._refresh()
      return sorted(n for n, entry in self._entries.items() if entry["state"] == "stored")

  def info(self, number: int) -> dict[str, Any]:
    """The info of a batch and "bytes", the shard's size; does not open the shard.

    A batch that has been removed or set aside also has "removed": True.

    Raises:
      KeyError: no batch of this number was ever written.
    """
    self._refresh()
    if number not in self._entries:
      raise KeyError(f"batch {number} was never written to {self.directory}")
    if "info" not in self._entries[number]:
      self._entries[number] = self._entry_of(number) or self._entries[number] | {"info": {}}
    entry = copy.deepcopy(self._entries[number])
    gone = {} if entry["state"] == "stored" else {"removed": True}
    return entry["info"] | {"bytes": entry["bytes"]} | gone

  def set_aside(self, number: int) -> pathlib.Path | None:
    """Moves a batch's shard into the folder `torn`; the number may be appended again.

    Returns:
      The shard's new path; None if there was no shard.
    """
    with self._writing:
      self._check_writable()
      moved = self._move_away(self._path(number))
      self._retire([number], "set aside")
    return moved

  def remove(self, *numbers: int) -> None:
    """Deletes the shards of batches; `info` still returns their info.

    Raises:
      KeyError: the store does not have one of them.
    """
    with self._writing:
      self._check_writable()
      if missing := set(numbers).difference(self.numbers()):
        raise KeyError(f"batch {min(missing)} is not in {self.directory}")
      # The line first: a kill in between leaves a file to delete, not a missing batch.
      self._retire(numbers, "removed")
      for number in numbers:
        self._files.delete(self._path(number).name)

  def journal(self) -> GroupJournal:
    """The journal of finished groups of unfinished batches."""
    from rlvr_jax.rollouts.journal import GroupJournal  # it loads jax, which reading does not need

    follow = [self._workdir.follow] if self._workdir else []
    return GroupJournal(self.local / GROUPS_FOLDER, *follow)

  def close(self) -> None:
    """Ends writing, so that another process may open the store for writing. Reading still works."""
    with self._writing:
      self._index.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def _runs_ahead(self) -> bool:
    """Whether there are shards that the index does not list yet: for a reader of a bucket."""
    return in_bucket(self.directory) and not self._index.writable

  def _path(self, number: int) -> pathlib.Path:
    return self.directory / f"{number:08d}.array_record"

  def _shards(self) -> dict[int, pathlib.Path]:
    """The files whose names are those of shards, by number."""
    found = (_SHARD.fullmatch(name) for name in self._files.names())
    return {int(match[1]): self.directory / match[0] for match in found if match}

  def _entry_of(self, number: int) -> dict[str, Any] | None:
    """The index entry of a batch, made from its shard; None if the shard is corrupted."""
    with self._files.reading(self._path(number).name) as path:
      return entry_of(path, number)

  # --- opening --------------------------------------------------------------------------------

  def _check_is_store(self, writable: bool) -> None:
    """Raises StoreError unless the folder is a store, or empty and about to become one."""
    if self._runs_ahead and self._workdir is not None:
      return  # the run's first process has opened it, and may not have written anything
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
      ours = self._index.is_empty() or self._entries or self._shards()
    else:
      shards = all(_SHARD.fullmatch(name) for name in names - {TORN_FOLDER, GROUPS_FOLDER})
      ours = shards and (writable or self._runs_ahead)
    if not ours:
      raise StoreError(
        f"{self.directory} is not a rollout store ({INDEX} "
        f"{'has other contents' if indexed else 'is missing'}). Choose another folder."
      )

  def _repair(self) -> None:
    self._refresh()  # first, since it rejects a store of another format
    for path in self.local.glob("*" + TEMPORARY):
      path.unlink()
    last, listed, damaged = max(self._entries, default=-1), list[int](), list[int]()
    for number, path in self._unlisted().items():
      if self._state(number) == "removed":
        self._files.delete(path.name)
      elif entry := self._entry_of(number):
        self._index.append([entry])
        listed.append(number)
      else:
        self._move_away(path)
        damaged.append(number)
    if in_bucket(self.directory):  # whose index is as old as the last checkpoint
      listed = [number for number in listed if number < last]
    self._warn(listed, "listed again")
    self._warn(damaged, f"damaged, moved into {TORN_FOLDER}")

  def _find_unlisted(self) -> None:
    """Adds the shards that the index lacks, as `_repair` does, and changes no file."""
    found = {n: self._entry_of(n) for n in self._unlisted() if self._state(n) != "removed"}
    self._refresh()  # a writer may just have listed its last batch
    lost = {n: entry for n, entry in found.items() if self._state(n) != "stored"}
    self._entries.update((n, entry) for n, entry in lost.items() if entry)
    self._warn([n for n in lost if lost[n]], "found by their shards")
    self._warn([n for n in lost if not lost[n]], "damaged, left out")

  def _warn(self, numbers: list[int], what: str) -> None:
    """Logs which batches the index lacks, and what was done about them."""
    if numbers:
      logging.warning("%s does not list the batches %s: %s", self.directory / INDEX, numbers, what)

  # --- the index ------------------------------------------------------------------------------

  def _refresh(self) -> None:
    """Reads the lines appended to the index since the last call."""
    with self._reading:
      entries = self._index.new_entries(self.directory)
      self._entries.update((entry["number"], entry) for entry in entries if entry is not None)
      if self._runs_ahead:
        for number, path in self._unlisted().items():
          if self._state(number) != "removed":  # the rest of its entry is read when it is asked for
            self._entries[number] = {"number": number, "state": "stored", "file": path.name}
      elif (
        None in entries and not self._index.writable
      ):  # a writer lists them when it opens the store
        self._find_unlisted()

  def _state(self, number: int) -> str:
    return self._entries[number]["state"] if number in self._entries else "not listed"

  def _unlisted(self) -> dict[int, pathlib.Path]:
    """Shards that the index does not list, after a kill or because of a damaged line."""
    return {n: path for n, path in self._shards().items() if self._state(n) != "stored"}

  def _stored(self, number: int) -> dict[str, Any]:
    self._refresh()
    if (state := self._state(number)) != "stored":
      raise _torn(self._path(number), number, f"the index says it is {state}")
    return self._entries[number]

  def _retire(self, numbers: Sequence[int], state: str) -> None:
    """Appends lines with the new state of batches, without those that are not listed."""
    listed = set(self.numbers()).intersection(numbers)
    if retired := [self._entries[number] | {"state": state} for number in sorted(listed)]:
      self._index.append(retired)
      if self._workdir is not None:
        self._workdir.publish(f"{self.directory.name}/{INDEX}")

  def _check_writable(self) -> None:
    if not self._index.is_open():
      raise StoreError(f"{self.directory} is not open for writing; open it with writable=True")

  def _move_away(self, path: pathlib.Path) -> pathlib.Path | None:
    """Moves a shard into the folder `torn`, under an unused name."""
    return self._files.move(path.name, TORN_FOLDER) if self._files.exists(path.name) else None


class _Index:
  """The lines of a store's index.

  Attributes:
    writable: whether it was opened for writing.
  """

  def __init__(self, path: pathlib.Path, writable: bool):
    """Opens nothing yet; `path`: of `place`."""
    self.writable = writable
    self._path, self._tail = path, tail_of(path)
    self._lines: JsonLines | None = None

  def claim(self, directory: pathlib.Path) -> None:
    """Opens it for appending, and locks it until the process ends or closes it.

    Args:
      directory: of the store, for the message.
    Raises:
      StoreError: another process has it.
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
    """Whether it has no bytes."""
    return self._tail.is_empty()

  def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines; they are on disk when this returns."""
    assert self._lines is not None  # the store has checked
    self._lines.append(map(with_crc32, entries))

  def new_entries(self, directory: pathlib.Path) -> list[dict[str, Any] | None]:
    """The entries appended since the last call; None for a damaged line."""
    return [read_line(line, directory) for line in self._tail.new().splitlines()]

  def close(self) -> None:
    """Ends writing."""
    if self._lines is not None:
      self._lines.close()
      self._lines = None


def _torn(path: pathlib.Path, number: int, what: str) -> TornShardError:
  return TornShardError(
    f"batch {number}, {path}, is missing or not as it was written: {what}. Rerun the run that it "
    "belongs to, which samples it again if it is still needed, or put back a copy of the file."
  )
