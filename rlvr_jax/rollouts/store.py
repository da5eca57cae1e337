"""A durable store of graded groups: one file per batch, and one per group in progress.

The folder is the index:

  NUMBER.safetensors             a batch, see `rollouts.group`
  NUMBER.json                    the info of a batch that was removed
  groups/DRAW.INDEX.safetensors  a finished group of a batch in progress
  torn/                          damaged batches that were set aside
  lock                           locked by the process that writes; a bucket has no lock, but a run
                                 claims its workdir

A file is written under a temporary name, read back and renamed. So it is complete or absent: a
process that reads while another writes sees only whole batches. No batch is ever overwritten. A
batch is on disk, or in the bucket, when `write` returns. Groups in progress survive a kill of the
process; on a disk they do not survive a crash of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from absl import logging

from rlvr_jax.ops.checks import check_integer
from rlvr_jax.rollouts.group import DamagedError, FormatError, Group, decode, encode, read_info
from rlvr_jax.storage.bucket import MAX_CONCURRENT_REQUESTS, UnreachableError
from rlvr_jax.storage.files import (
  JSON,
  TEMPORARY,
  DiskFullError,
  JsonObject,
  locked,
  parse_checked_line,
  path_within,
  report_full_disk,
  sync_folder,
  with_crc32,
)
from rlvr_jax.storage.objects import open_objects
from rlvr_jax.storage.places import Workdir, in_bucket, parse_path

TORN_FOLDER = "torn"
GROUPS_FOLDER = "groups"
LOCK = "lock"
_BATCH = re.compile(r"(\d{8,})\.safetensors")
_GROUP = re.compile(rf"{GROUPS_FOLDER}/(\d{{8,}})\.(\d{{6,}})\.safetensors")
_OWN = re.compile(rf"\d{{8,}}\.(safetensors|json)|{TORN_FOLDER}|{GROUPS_FOLDER}|{LOCK}")
_FORMER = re.compile(r"index\.jsonl|\d{8,}\.array_record")
_RESERVED = ("number", "bytes", "removed")  # names in info


class StoreError(RuntimeError):
  """A folder that is not a store, has another format, or is in use by another writer."""


class TornShardError(RuntimeError):
  """A batch whose file is missing, truncated or changed."""


class RolloutStore:
  """A folder with batches of groups by number; safe to use from several threads.

  One process at a time may open it for writing; any number of processes may read concurrently.

  Attributes:
    directory: the directory of the store.
  """

  def __init__(
    self, directory: str | os.PathLike[str], *, writable: bool, workdir: Workdir | None = None
  ):
    """Opens `directory`.

    Args:
      directory: a folder with the store and nothing else, or gs://BUCKET/FOLDER.
      writable: whether to create the folder if needed, lock it, and remove the temporary files of a
        killed writer.
      workdir: the workdir of the run that the store belongs to; the run's claim to the workdir
        guards writes into a bucket.
    Raises:
      StoreError: the folder is not a store, has another format, or another process writes to it.
    """
    self.directory = parse_path("the folder of rollouts", directory)
    self._writable, self._lock = writable, contextlib.ExitStack()
    self._writing = threading.RLock()
    if in_bucket(self.directory):
      guard = workdir.guard if workdir else None
      self._objects = open_objects(self.directory, guard, unreachable_s=0.0)
      if not self._check_is_store() and not writable and workdir is None:
        raise StoreError(
          f"{self.directory} does not exist; give the folder of a store, WORKDIR/rollouts of a run"
        )
      return
    with report_full_disk(self.directory):
      if writable and not self.directory.exists():
        self.directory.mkdir(parents=True)
        sync_folder(self.directory.parent)
      if not self.directory.is_dir():
        what = "is a file" if self.directory.exists() else "does not exist"
        raise StoreError(
          f"{self.directory} {what}; give the folder of a store, WORKDIR/rollouts of a run"
        )
      self._objects = open_objects(self.directory)
      self._check_is_store()
      if writable:
        self._lock_and_repair()

  # --- batches ----------------------------------------------------------------------------------

  def write(self, number: int, groups: Sequence[Group], info: Mapping[str, JSON]) -> None:
    """Writes one batch, which is on disk, or in the bucket, when this call returns.

    Args:
      number: the number of the batch, ≥ 0.
      groups: the groups of the batch, in order.
      info: JSON values, finite; the names "number", "bytes" and "removed" are reserved.
    Raises:
      ValueError, TypeError: the number exists already, or groups or info cannot be stored.
      DiskFullError: no space is left; earlier batches are untouched.
    """
    check_integer("RolloutStore.write", "number", number, low=0)
    if reserved := info.keys() & _RESERVED:
      raise ValueError(
        f"batch {number}: info has the fields {sorted(reserved)}, whose names the store reserves;"
        " rename these fields"
      )
    try:
      data = encode(groups, {"number": number, **info})
    except (ValueError, TypeError) as error:
      raise type(error)(f"batch {number}: {error}") from error
    with self._writing:
      self._check_writable()
      is_new = number not in self
      if is_new and in_bucket(self.directory):
        if not self._objects.put(_name(number), data):
          raise StoreError(
            f"another process has just written batch {number} into {self.directory}. This process"
            " has lost its claim on the workdir: let the other process go on"
          )
      elif is_new:
        self._objects.replace(_name(number), data)
      else:
        raise ValueError(
          f"batch {number} is in {self.directory} already and is not overwritten; `set_aside` it"
          " first"
        )
      if self._objects.find(_info_name(number)):  # a batch with this number was removed before
        self._objects.remove(_info_name(number))

  def read(self, number: int) -> tuple[list[Group], JsonObject]:
    """Reads the groups and info that were given to `write`, bit for bit.

    Raises:
      TornShardError: the batch is missing or not as it was written.
      StoreError: the batch has a format that this version of the package does not read.
    """
    with self._explain_damage(number):
      groups, info = decode(self._get(_name(number)))
    return groups, self._check_number(number, info)

  def __contains__(self, number: int) -> bool:
    """Whether the store has a batch of this number, damaged or not."""
    return self._objects.find(_name(number)) is not None

  def numbers(self) -> list[int]:
    """Numbers of the batches, ascending."""
    matches = map(_BATCH.fullmatch, self._objects.list())
    return sorted(int(match[1]) for match in matches if match)

  def info(self, number: int) -> JsonObject:
    """The info of a batch, with the size of the batch's file as "bytes"; does not read arrays.

    The info of a removed batch also has "removed": True.

    Raises:
      KeyError: the store has no batch of this number, and no batch of this number was removed.
      TornShardError: the info is not as it was written.
    """
    if entry := self._objects.find(_name(number)):
      with self._explain_damage(number):
        info = read_info(lambda size: self._get(_name(number), size))
        return self._check_number(number, info) | {"bytes": entry.size}
    if not self.is_removed(number):
      raise KeyError(f"batch {number} is not in {self.directory}")
    with self._explain_damage(number):
      if (info := parse_checked_line(self._get(_info_name(number)))) is None:
        raise DamagedError(f"{_info_name(number)} is damaged")
    return self._check_number(number, info)

  def is_intact(self, number: int) -> bool:
    """Whether `read` succeeds; reads the complete batch."""
    try:
      self.read(number)
    except TornShardError:
      return False
    return True

  def find_damaged(self, numbers: Iterable[int]) -> Iterator[int]:
    """Yields each of these numbers whose batch is missing or damaged.

    A batch that `remove` has deleted does not count as missing. On a disk every file is read. In a
    bucket no object is read: an object that exists is complete.
    """
    names = self._objects.list()
    for number in numbers:
      is_there = _name(number) in names
      if is_there and (in_bucket(self.directory) or self.is_intact(number)):
        continue
      if is_there or _info_name(number) not in names:
        yield number

  def is_removed(self, number: int) -> bool:
    """Whether `remove` has deleted the batch."""
    return number not in self and self._objects.find(_info_name(number)) is not None

  def set_aside(self, number: int) -> pathlib.Path | None:
    """Moves a batch's file into the folder `torn`; the number may be written again.

    Returns:
      The file's new path; None if there was no file.
    """
    with self._writing:
      self._check_writable()
      if (data := self._objects.get(_name(number))) is None:
        return None
      names = (f"{TORN_FOLDER}/{_name(number)}.{k:d}" for k in itertools.count())
      name = next(name for name in names if not self._objects.find(name))
      self._objects.replace(name, data)
      self._objects.remove(_name(number))
      return path_within(self.directory, name)

  def remove(self, *numbers: int) -> None:
    """Deletes batches; `info` still returns their info.

    Raises:
      KeyError: the store lacks at least one of the batches; then no batch is deleted.
    """
    with self._writing:
      self._check_writable()
      if missing := {*numbers}.difference(self.numbers()):
        raise KeyError(f"batch {min(missing)} is not in {self.directory}")
      for number in numbers:
        info = {"number": number, **self.info(number), "removed": True}
        self._objects.replace(_info_name(number), f"{json.dumps(with_crc32(info))}\n".encode())
        self._objects.remove(_name(number))

  # --- groups of batches in progress ------------------------------------------------------------

  def write_groups(self, groups: Sequence[Group]) -> None:
    """Writes groups of batches in progress, which then survive a kill of the process."""
    self._check_writable()

    def write(group: Group) -> None:
      name = _group_name(group.draw, group.index)
      self._objects.replace(name, encode([group], {}), durable=False)

    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      list(pool.map(write, groups))

  def read_groups(self, draw: int) -> dict[int, Group]:
    """The stored groups of a draw in progress, by index; skips damaged groups."""
    found = {}
    for name in self._groups().get(draw, []):
      try:
        (group,), _ = decode(self._get(name))
      except UnreachableError:
        raise
      except (ValueError, OSError) as error:
        path = f"{self.directory}/{name}"
        logging.warning("%s is left out, its group is sampled again: %s", path, error)
        continue
      if name == _group_name(draw, group.index) and group.draw == draw:
        found[group.index] = group
    return found

  def forget_groups(self, before: int) -> None:
    """Deletes the stored groups of draws below `before`; these draws' batches must be complete."""
    names = [name for draw, names in self._groups().items() if draw < before for name in names]
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
      list(pool.map(self._objects.remove, names))

  def _groups(self) -> dict[int, list[str]]:
    """The names of the groups in progress by draw, in order."""
    found: dict[int, list[str]] = {}
    for match in filter(None, map(_GROUP.fullmatch, self._objects.list(f"{GROUPS_FOLDER}/"))):
      found.setdefault(int(match[1]), []).append(match[0])
    return found

  # --- opening and closing ----------------------------------------------------------------------

  def close(self) -> None:
    """Stops writing, so that another process may open the store for writing; reads still work."""
    with self._writing:
      self._writable = False
      self._lock.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _check_is_store(self) -> bool:
    """Whether the folder has files; raises StoreError if they do not belong to a store."""
    names = sorted({name.partition("/")[0] for name in self._objects.list()})
    if former := next(filter(_FORMER.fullmatch, names), None):
      raise StoreError(
        f"{self.directory} has the former format of rollouts ({former}), which this version does"
        " not read. Use the version of rlvr_jax that wrote it, or another --workdir or folder."
      )
    if foreign := [name for name in names if not _OWN.fullmatch(name)]:
      raise StoreError(
        f"{self.directory} is not a rollout store: it contains {foreign[0]!r:.80}, which no store"
        " contains. Choose another folder."
      )
    return bool(names)

  def _lock_and_repair(self) -> None:
    """Locks the folder, and removes the temporary files of a killed writer."""
    try:
      self._lock.enter_context(locked(self.directory / LOCK))
    except BlockingIOError:
      raise StoreError(
        f"another process writes to {self.directory}. Wait for it, stop it, or choose another"
        " folder."
      ) from None
    for path in (*self.directory.glob(f"*{TEMPORARY}"), *self.directory.glob(f"*/*{TEMPORARY}")):
      name = path.relative_to(self.directory).as_posix().removesuffix(TEMPORARY)
      if _OWN.fullmatch(name) or _GROUP.fullmatch(name):
        path.unlink()

  def _get(self, name: str, size: int | None = None) -> bytes:
    """The bytes of a file, or its first `size` bytes; DamagedError if there is no such file."""
    data = self._objects.get(name, size)
    if data is None:
      raise DamagedError("there is no such file")
    return data

  def _check_writable(self) -> None:
    if not self._writable:
      raise StoreError(f"{self.directory} is not open for writing; open it with writable=True")

  def _check_number(self, number: int, info: JsonObject) -> JsonObject:
    """The info without the batch's number; raises if it is the info of another batch."""
    with self._explain_damage(number):
      if (found := info.pop("number", None)) != number:
        raise DamagedError(f"the number in its info is {found!r:.80}")
    return info

  @contextlib.contextmanager
  def _explain_damage(self, number: int) -> Iterator[None]:
    """Converts errors from reading a batch into errors that say what to do."""
    path = f"{self.directory}/{_name(number)}"
    try:
      yield
    except FormatError as error:
      raise StoreError(
        f"{path} is not what this version of rlvr_jax reads: {error}. Use the version that wrote"
        " it, or another folder."
      ) from error
    except (UnreachableError, DiskFullError):
      raise
    except (DamagedError, OSError) as error:
      if isinstance(error, OSError) and error.errno != errno.EIO:
        raise  # a limit of this process, such as on open files, does not mean a damaged file
      raise TornShardError(
        f"batch {number}, {path}, is missing or not as it was written: {error}. Rerun its run,"
        " which samples the batch again if it is still needed, or put back a copy of the file."
      ) from error


def _name(number: int) -> str:
  """Name of the file of a batch."""
  return f"{number:08d}.safetensors"


def _info_name(number: int) -> str:
  """Name of the file with the info of a removed batch."""
  return f"{number:08d}.json"


def _group_name(draw: int, index: int) -> str:
  """Name of the file of a group in progress."""
  return f"{GROUPS_FOLDER}/{draw:08d}.{index:06d}.safetensors"
