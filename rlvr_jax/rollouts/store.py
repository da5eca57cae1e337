"""A durable store of drawn batches: one closed ArrayRecord shard each, and an append-only index.

A shard is written under a temporary name, brought to the disk, read back and renamed; then a line
in index.jsonl tells of it. So a kill loses at most the batch in flight, and whoever reads while
another process writes sees whole batches only. Nothing that was written is ever overwritten.

A shard is NUMBER.array_record, see `shards`. Index line: {"crc32", "content": {"format", "number",
"state", "file", "bytes", "crc32", "info"}}; the last line of a batch counts. Damage of a line loses
nothing: the shards say the same.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import itertools
import os
import pathlib
import re
import threading
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from rlvr_jax.files import (
  TEMPORARY,
  JsonLines,
  disk_full,
  file_crc32,
  replacing_path,
  reporting_full_disk,
  shortage,
  sync_folder,
)
from rlvr_jax.ops.checks import check_whole
from rlvr_jax.rollouts.shards import (
  StoreError,
  entry_of,
  header_of,
  read_shard,
  sealed,
  unsealed,
  write_shard,
)

INDEX = "index.jsonl"
TORN_FOLDER = "torn"
_SHARD = re.compile(r"(\d{8,})\.array_record")
_SPARE_BYTES = 2**20  # for the header, ArrayRecord's blocks and the index


class TornShardError(RuntimeError):
  """A batch's shard is missing, cut or changed."""


class RolloutStore:
  """Batches of rollouts by number, in a folder; safe to use from several threads.

  One process at a time may open it writable, any number may read meanwhile.
  """

  def __init__(self, directory: str | os.PathLike[str], *, writable: bool):
    """Opens `directory`.

    Args:
      directory: holds the store and nothing else.
      writable: create the folder if needed, and repair what a killed writer left: remove temporary
        files and a torn last line of the index, list whole shards that it does not list, put
        others into the folder `torn`.
    Raises:
      StoreError: not a store, of another format, or opened writable by another process.
    """
    self.directory, self._writable = pathlib.Path(directory), writable
    self._entries: dict[int, dict[str, Any]] = {}  # of each batch the last line
    self._read_bytes = 0  # of the index
    self._reading, self._writing = threading.RLock(), threading.RLock()
    self._index: JsonLines | None = None
    with reporting_full_disk(self.directory):
      if writable and not self.directory.exists():
        self.directory.mkdir(parents=True)
        sync_folder(self.directory.parent)
      self._check_is_store(writable)
      if writable:
        self._index = self._claim()
        self._repair()

  def append(self, number: int, arrays: Mapping[str, np.ndarray], info: Mapping[str, Any]) -> None:
    """Writes one batch; when this returns it is on the disk.

    Args:
      number: of the batch, ≥ 0.
      arrays: by name; booleans, integers, floats or complex numbers of NumPy's own types.
      info: JSON values, finite; without the names "bytes" and "removed".
    Raises:
      ValueError, TypeError: the number is there already, or arrays or info are not as above.
      DiskFullError: no space is left; what was written before is untouched.
    """
    check_whole("RolloutStore.append", "number", number, low=0)
    header = header_of(number, arrays, info)
    with self._writing:
      index, path = self._writer(), self._path(number)
      if number in self.numbers() or path.exists():
        raise ValueError(f"batch {number} is in {self.directory} already; nothing is overwritten")
      need = sum(array.nbytes for array in arrays.values()) + _SPARE_BYTES
      if lacking := shortage(self.directory, need):
        raise disk_full(path, lacking)
      with replacing_path(path) as temporary:
        write_shard(temporary, header, arrays)
        entry = entry_of(temporary, number)  # what the library did not report shows here
        if entry is None:
          raise OSError(errno.EIO, f"{path} does not read back as written; is the disk failing?")
      index.append([sealed(entry | {"file": path.name})])

  def read(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the info of a batch, bit for bit as they were given to `append`.

    Raises:
      TornShardError: the batch is not there as it was written.
    """
    entry = self._stored(number)
    path = self.directory / entry["file"]
    try:
      size, checksum = path.stat().st_size, file_crc32(path)
      if size != entry["bytes"]:
        raise ValueError(f"it has {size} bytes and was written with {entry['bytes']}")
      if checksum != entry["crc32"]:
        raise ValueError(f"its bytes have checksum {checksum}, written with {entry['crc32']}")
      header, arrays = read_shard(path, number)
    except StoreError:
      raise
    except Exception as error:
      raise _torn(path, number, str(error)) from error
    return arrays, header["info"]

  def whole(self, number: int) -> bool:
    """Whether `read` would succeed; it is what this does."""
    try:
      self.read(number)
    except TornShardError:
      return False
    return True

  def removed(self, number: int) -> bool:
    """Whether `remove` has deleted the batch."""
    self._refresh()
    return self._state(number) == "removed"

  def numbers(self) -> list[int]:
    """Numbers of the batches that the index lists at this moment, ascending."""
    with self._reading:
      self._refresh()
      return sorted(n for n, entry in self._entries.items() if entry["state"] == "stored")

  def info(self, number: int) -> dict[str, Any]:
    """What `append` was told of a batch and "bytes", the shard's size, without opening the shard.

    A batch that was removed or set aside since has "removed": True too.

    Raises:
      KeyError: no batch of this number was ever written.
    """
    self._refresh()
    if number not in self._entries:
      raise KeyError(f"batch {number} was never written to {self.directory}")
    entry = copy.deepcopy(self._entries[number])
    gone = {} if entry["state"] == "stored" else {"removed": True}
    return entry["info"] | {"bytes": entry["bytes"]} | gone

  def set_aside(self, number: int) -> pathlib.Path | None:
    """Moves a batch's shard into the folder `torn`; the number may be appended again.

    Returns:
      Where the shard is now, None if there was none.
    """
    with self._writing:
      self._writer()
      moved = self._move_away(self._path(number))
      self._retire(number, "set aside")
    return moved

  def remove(self, number: int) -> None:
    """Deletes a batch's shard; `info` still knows it.

    Raises:
      KeyError: the batch is not there.
    """
    with self._writing:
      self._writer()
      if number not in self.numbers():
        raise KeyError(f"batch {number} is not in {self.directory}")
      # The line first: a kill in between leaves a file to delete, not a batch that is missing.
      self._retire(number, "removed")
      self._path(number).unlink(missing_ok=True)

  def close(self) -> None:
    """Ends writing; another process may open the store writable then. Reading goes on."""
    with self._writing:
      if self._index is not None:
        self._index.close()
        self._index = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _path(self, number: int) -> pathlib.Path:
    return self.directory / f"{number:08d}.array_record"

  def _shards(self) -> dict[int, pathlib.Path]:
    """The files that are named as shards, by number."""
    found = ((_SHARD.fullmatch(path.name), path) for path in sorted(self.directory.iterdir()))
    return {int(match[1]): path for match, path in found if match}

  # --- opening --------------------------------------------------------------------------------

  def _check_is_store(self, writable: bool) -> None:
    """Raises StoreError unless the folder is a store, or empty and about to become one."""
    folder, index = self.directory, self.directory / INDEX
    if not folder.is_dir():
      what = "is a file" if folder.exists() else "is not there"
      raise StoreError(f"{folder} {what}: give the folder of a store, as WORKDIR/rollouts of a run")
    if index.exists():
      self._refresh()
      ours = not index.stat().st_size or self._entries or self._shards()
    else:
      names = {path.name.removesuffix(TEMPORARY) for path in folder.iterdir()} - {TORN_FOLDER}
      ours = writable and all(_SHARD.fullmatch(name) for name in names)
    if not ours:
      raise StoreError(
        f"{folder} is no store of rollouts ({INDEX} is "
        f"{'of another kind' if index.exists() else 'not there'}). Choose another folder."
      )

  def _claim(self) -> JsonLines:
    """The index, opened for appending by this process alone; the kernel frees it when we die."""
    index = JsonLines(self.directory / INDEX, fsync=True)
    try:
      fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      index.close()
      raise StoreError(
        f"another process writes to {self.directory}. Wait for it, stop it, or choose another "
        "folder."
      ) from None
    sync_folder(self.directory)
    return index

  def _repair(self) -> None:
    self._refresh()  # first: it refuses a store of another format
    for path in self.directory.glob("*" + TEMPORARY):
      path.unlink()
    os.truncate(self.directory / INDEX, self._read_bytes)
    for number, path in self._unlisted().items():
      if self._state(number) == "removed":
        path.unlink()
      elif entry := entry_of(path, number):
        self._writer().append([sealed(entry)])
      else:
        self._move_away(path)

  # --- the index ------------------------------------------------------------------------------

  def _refresh(self) -> None:
    """Reads what was appended to the index since the last time."""
    with self._reading:
      with open(self.directory / INDEX, "rb") as file:
        file.seek(self._read_bytes)
        data = file.read()
      data = data[: data.rfind(b"\n") + 1]  # the rest is being written, or torn
      self._read_bytes += len(data)
      entries = [unsealed(line, self.directory) for line in data.splitlines()]
      self._entries.update((entry["number"], entry) for entry in entries if entry is not None)
      if None in entries and not self._writable:  # a writer lists them when it opens the store
        for number, path in self._unlisted().items():
          if self._state(number) != "removed" and (found := entry_of(path, number)):
            self._entries[number] = found

  def _state(self, number: int) -> str:
    return self._entries[number]["state"] if number in self._entries else "not listed"

  def _unlisted(self) -> dict[int, pathlib.Path]:
    """Shards that the index does not list: of a kill, or of a damaged line."""
    return {n: path for n, path in self._shards().items() if self._state(n) != "stored"}

  def _stored(self, number: int) -> dict[str, Any]:
    self._refresh()
    if (state := self._state(number)) != "stored":
      raise _torn(self._path(number), number, f"the index says it is {state}")
    return self._entries[number]

  def _retire(self, number: int, state: str) -> None:
    """A line that the batch is not there any more; none for a batch that was not."""
    if number in self.numbers():
      self._writer().append([sealed(self._entries[number] | {"state": state})])

  def _writer(self) -> JsonLines:
    if self._index is None:
      raise StoreError(f"{self.directory} is not open for writing; open it with writable=True")
    return self._index

  def _move_away(self, path: pathlib.Path) -> pathlib.Path | None:
    """Moves a shard into the folder `torn`, under a name that is free there."""
    if not path.exists():
      return None
    folder = self.directory / TORN_FOLDER
    folder.mkdir(exist_ok=True)
    names = (folder / f"{path.name}.{k}" for k in itertools.count())
    target = path.rename(next(name for name in names if not name.exists()))
    sync_folder(folder)
    sync_folder(self.directory)
    return target


def _torn(path: pathlib.Path, number: int, what: str) -> TornShardError:
  return TornShardError(
    f"batch {number}, {path}, is not there as it was written: {what}. Rerun the run that it "
    "belongs to, which draws it again if it is still needed, or put back a copy of the file."
  )
