"""A durable store of graded groups: one file a batch, one a group in progress.

The folder is the index:

  NUMBER.safetensors             a batch, see `rollouts.group`
  NUMBER.json                    the info of a batch that was removed
  groups/DRAW.INDEX.safetensors  a finished group of a batch in progress
  torn/                          damaged batches that were set aside
  lock                           locked by the process that writes; a bucket is claimed by its run

A file is written under a temporary name, read back and renamed: it is complete or absent, so that a
reader beside the writer sees whole batches only, and no batch is ever overwritten. A batch is on
disk, or in the bucket, when `write` returns. Groups in progress survive a kill of the process, not
a crash of the machine; they reach a bucket some seconds later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Self

from absl import logging

from rlvr_jax.ops.checks import check_integer
from rlvr_jax.rollouts.group import DamagedError, FormatError, Group, decode, encode, read_info
from rlvr_jax.storage.bucket import UnreachableError
from rlvr_jax.storage.files import (
  TEMPORARY,
  DiskFullError,
  open_own,
  parse_checked_line,
  path_within,
  replace_path,
  report_full_disk,
  sync_folder,
  with_crc32,
)
from rlvr_jax.storage.places import Workdir, in_bucket, open_files, parse_path

TORN_FOLDER = "torn"
GROUPS_FOLDER = "groups"
LOCK = "lock"
_BATCH = re.compile(r"(\d{8,})\.safetensors")
_GROUP = re.compile(r"(\d{8,})\.(\d{6,})\.safetensors")
_OWN = re.compile(rf"\d{{8,}}\.(safetensors|json)|{TORN_FOLDER}|{GROUPS_FOLDER}|{LOCK}")
_FORMER = re.compile(r"index\.jsonl|\d{8,}\.array_record")
_RESERVED = ("number", "bytes", "removed")  # names in info


class StoreError(RuntimeError):
  """A folder that is not a store, has another format, or is in use by another writer."""


class TornShardError(RuntimeError):
  """A batch whose file is missing, truncated or changed."""


class RolloutStore:
  """Batches of groups by number, in a folder; safe to use from several threads.

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
      writable: whether to create the folder if needed, lock it, and remove the temporary files of a
        killed writer.
      workdir: of the run that the store belongs to; required to write to a bucket.
    Raises:
      StoreError: not a store, of another format, or opened for writing by another process.
    """
    self.directory = parse_path("the folder of rollouts", directory)
    self.local = path_within(workdir.local, self.directory.name) if workdir else self.directory
    self._workdir = workdir
    self._files = open_files(self.directory, workdir)
    self._writable, self._lock = writable, contextlib.ExitStack()
    self._writing = threading.RLock()
    with report_full_disk(self.local):
      if writable and not self.local.exists():
        self.local.mkdir(parents=True)
        sync_folder(self.local.parent)
      self._check_is_store()
      if writable and not in_bucket(self.directory):
        self._lock.enter_context(_locked(self.local / LOCK, self.directory))
      if writable:
        self._repair()

  # --- batches ----------------------------------------------------------------------------------

  def write(self, number: int, groups: Sequence[Group], info: Mapping[str, Any]) -> None:
    """Writes one batch; it is on disk when this returns.

    Args:
      number: of the batch, ≥ 0.
      groups: of the batch, in order.
      info: JSON values, finite; the names "number", "bytes" and "removed" are reserved.
    Raises:
      ValueError, TypeError: the number exists already, or groups or info cannot be stored.
      DiskFullError: no space is left; earlier batches are untouched.
    """
    check_integer("RolloutStore.write", "number", number, low=0)
    if reserved := info.keys() & _RESERVED:
      raise ValueError(
        f"batch {number}: info has {sorted(reserved)}, which the store reserves; rename it"
      )
    try:
      data = encode(groups, {"number": number, **info})
    except (ValueError, TypeError) as error:
      raise type(error)(f"batch {number}: {error}") from error
    path = self._path(number)
    with self._writing:
      self._check_writable()
      if number in self:
        raise ValueError(
          f"batch {number} is in {self.directory} already and is not overwritten; `set_aside` it"
          " first"
        )
      with report_full_disk(path), self._files.open_to_write(path.name) as temporary:
        temporary.write_bytes(data)
        if temporary.read_bytes() != data:
          raise OSError(errno.EIO, f"{path} does not read back as written; check the disk")
      if self._files.exists(_info_name(number)):  # of a batch of this number, removed before
        self._files.delete(_info_name(number))

  def read(self, number: int) -> tuple[list[Group], dict[str, Any]]:
    """Reads groups and info of a batch, bit for bit as they were given to `write`.

    Raises:
      TornShardError: the batch is missing or not as it was written.
      StoreError: another version wrote it.
    """
    with (
      self._explain_damage(number),
      self._files.open_to_read(self._path(number).name) as path,
    ):
      groups, info = decode(path.read_bytes())
    return groups, self._check_number(number, info)

  def __contains__(self, number: int) -> bool:
    """Whether the store has a batch of this number, damaged or not."""
    return self._files.exists(self._path(number).name)

  def numbers(self) -> list[int]:
    """Numbers of the batches, ascending."""
    matches = map(_BATCH.fullmatch, self._files.names())
    return sorted(int(match[1]) for match in matches if match)

  def info(self, number: int) -> dict[str, Any]:
    """The info of a batch, with its file's size as "bytes"; does not read its arrays.

    That of a batch that has been removed also has "removed": True.

    Raises:
      KeyError: the store has no batch of this number, and has removed none.
      TornShardError: the info is not as it was written.
    """
    if number in self:
      name = self._path(number).name
      with self._explain_damage(number):
        info = read_info(functools.partial(self._files.read_start, name))
        return self._check_number(number, info) | {"bytes": self._files.size(name)}
    if not self.is_removed(number):
      raise KeyError(f"batch {number} is not in {self.directory}")
    with self._explain_damage(number), self._files.open_to_read(_info_name(number)) as path:
      if (info := parse_checked_line(path.read_bytes())) is None:
        raise DamagedError(f"{path.name} is damaged")
    return self._check_number(number, info)

  def is_intact(self, number: int) -> bool:
    """Whether `read` succeeds; reads the complete batch."""
    try:
      self.read(number)
    except TornShardError:
      return False
    return True

  def find_damaged(self, numbers: Iterable[int]) -> Iterator[int]:
    """Yields the numbers of batches that are missing or damaged, but not removed.

    On a disk every file is read; an object of a bucket is complete if it is there.
    """
    names = {*self._files.names()}
    for number in numbers:
      is_there = self._path(number).name in names
      if is_there and (in_bucket(self.directory) or self.is_intact(number)):
        continue
      if is_there or _info_name(number) not in names:
        yield number

  def is_removed(self, number: int) -> bool:
    """Whether `remove` has deleted the batch."""
    return number not in self and self._files.exists(_info_name(number))

  def set_aside(self, number: int) -> pathlib.Path | None:
    """Moves a batch's file into the folder `torn`; the number may be written again.

    Returns:
      The file's new path; None if there was no file.
    """
    with self._writing:
      self._check_writable()
      return self._files.move(self._path(number).name, TORN_FOLDER) if number in self else None

  def remove(self, *numbers: int) -> None:
    """Deletes batches; `info` still returns their info.

    Raises:
      KeyError: the store does not have one of them.
    """
    with self._writing:
      self._check_writable()
      if missing := {*numbers}.difference(self.numbers()):
        raise KeyError(f"batch {min(missing)} is not in {self.directory}")
      for number in numbers:
        info = {"number": number, **self.info(number), "removed": True}
        self._files.delete(_info_name(number))  # of an earlier batch of this number, if any
        with self._files.open_to_write(_info_name(number)) as path:
          path.write_text(json.dumps(with_crc32(info)) + "\n")
        self._files.delete(self._path(number).name)

  # --- groups of batches in progress ------------------------------------------------------------

  def write_group(self, group: Group) -> None:
    """Writes a group of a batch in progress; it survives a kill of the process from now on."""
    self._check_writable()
    folder = self.local / GROUPS_FOLDER
    with report_full_disk(folder):
      folder.mkdir(exist_ok=True)
    path = folder / f"{group.draw:08d}.{group.index:06d}.safetensors"
    with report_full_disk(path), replace_path(path, durable=False) as temporary:
      temporary.write_bytes(encode([group], {}))
    self._follow(path)

  def read_groups(self, draw: int) -> dict[int, Group]:
    """The groups of a draw of a batch in progress, by index; without damaged ones."""
    found = {}
    for path in self._group_paths(draw):
      try:
        (group,), _ = decode(path.read_bytes())
      except (ValueError, OSError) as error:
        logging.warning("%s is left out, its group is sampled again: %s", path, error)
        continue
      if path.name == f"{draw:08d}.{group.index:06d}.safetensors" and group.draw == draw:
        found[group.index] = group
    return found

  def forget_groups(self, before: int) -> None:
    """Deletes the groups of draws with a number below `before`: their batches are complete."""
    for path in self._group_paths():
      if int(path.name.partition(".")[0]) < before:
        path.unlink()
        self._follow(path)

  def _group_paths(self, draw: int | None = None) -> list[pathlib.Path]:
    """The files of groups, or those of one draw, in order."""
    paths = sorted((self.local / GROUPS_FOLDER).glob("*.safetensors"))
    matches = [(path, _GROUP.fullmatch(path.name)) for path in paths]
    return [path for path, match in matches if match and draw in (None, int(match[1]))]

  def _follow(self, path: pathlib.Path) -> None:
    if self._workdir is not None:
      self._workdir.follow(path)

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

  def _check_is_store(self) -> None:
    """Raises StoreError unless the folder is a store, or empty and about to become one."""
    if not in_bucket(self.directory) and not self.local.is_dir():
      what = "is a file" if self.local.exists() else "does not exist"
      raise StoreError(
        f"{self.directory} {what}; give the folder of a store, WORKDIR/rollouts of a run"
      )
    names = [name.removesuffix(TEMPORARY) for name in self._files.names()]
    if former := next(filter(_FORMER.fullmatch, names), None):
      raise StoreError(
        f"{self.directory} has the former format of rollouts ({former}), which this version does"
        " not read. Use the version of rlvr_jax that wrote it, or another --workdir or folder."
      )
    if foreign := [name for name in names if not _OWN.fullmatch(name)]:
      raise StoreError(
        f"{self.directory} is not a rollout store: it has {foreign[0]!r:.80}. Choose another"
        " folder."
      )
    if not names and in_bucket(self.directory) and self._workdir is None:
      raise StoreError(
        f"{self.directory} does not exist; give the folder of a store, WORKDIR/rollouts of a run"
      )

  def _repair(self) -> None:
    """Removes the temporary files of a killed writer; fetches groups in progress from a bucket."""
    for folder in (self.local, self.local / GROUPS_FOLDER):
      for path in folder.glob("*" + TEMPORARY):
        path.unlink()
    if in_bucket(self.directory):
      (self.local / GROUPS_FOLDER).mkdir(exist_ok=True)
      groups = open_files(self.directory / GROUPS_FOLDER, self._workdir)
      for name in filter(_GROUP.fullmatch, groups.names()):
        with groups.open_to_read(name) as path:
          path_within(self.local / GROUPS_FOLDER, name).write_bytes(path.read_bytes())

  def _path(self, number: int) -> pathlib.Path:
    return self.directory / f"{number:08d}.safetensors"

  def _check_writable(self) -> None:
    if not self._writable:
      raise StoreError(f"{self.directory} is not open for writing; open it with writable=True")

  def _check_number(self, number: int, info: dict[str, Any]) -> dict[str, Any]:
    """The info without the batch's number, which must be this one."""
    with self._explain_damage(number):
      if (found := info.pop("number", None)) != number:
        raise DamagedError(f"it has batch {found!r:.80}")
    return info

  @contextlib.contextmanager
  def _explain_damage(self, number: int) -> Iterator[None]:
    """Converts errors from reading a batch into those that say what to do."""
    path = self._path(number)
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
      raise TornShardError(
        f"batch {number}, {path}, is missing or not as it was written: {error}. Rerun its run,"
        " which samples the batch again if it is still needed, or put back a copy of the file."
      ) from error


def _info_name(number: int) -> str:
  """Name of the file with the info of a removed batch."""
  return f"{number:08d}.json"


@contextlib.contextmanager
def _locked(path: pathlib.Path, directory: pathlib.Path) -> Iterator[IO[bytes]]:
  """Context with a locked file; raises StoreError if another process has locked it."""
  with open_own(path, "ab") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise StoreError(
        f"another process writes to {directory}. Wait for it, stop it, or choose another folder."
      ) from None
    yield file
