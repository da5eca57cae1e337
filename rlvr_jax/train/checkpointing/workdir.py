"""Protects a workdir: one process at a time can claim it, always with the same configuration."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol, TypeVar

from rlvr_jax.storage.files import JSON, JsonObject, open_own, replace_file, report_unwritable
from rlvr_jax.storage.places import Workdir, in_bucket
from rlvr_jax.train.checkpointing import claim
from rlvr_jax.train.checkpointing.claim import BucketClaim, WorkdirError
from rlvr_jax.train.cluster import multihost

LAYOUT_FILE = "layout.json"  # the machine of the process that last started or resumed a run
# Fields that configurations of earlier versions lack, with the values that those runs used; JSON.
_NEWER = {"prompts.tools": '""'}
_RENAMED_TASK = "experiments.pretrained.task:sums"
# Files that a run writes after its configuration. The folder warm_start is not listed: users may
# copy it into a new workdir.
_RUN_FILES = ("checkpoints", "rollouts", "metrics.jsonl", "problems.jsonl")


class Closable(Protocol):
  def close(self) -> None: ...


Resource = TypeVar("Resource", bound=Closable)


class Enter(Protocol):
  """Registers a resource to be closed when the run ends; returns it."""

  def __call__(self, resource: Resource, /) -> Resource: ...


class WorkdirLock:
  """Locks a workdir until `close`; the kernel releases the lock when the process ends."""

  def __init__(self, workdir: str | os.PathLike[str]):
    """Raises WorkdirError if another process has the lock."""
    path = pathlib.Path(workdir) / ".lock"
    if path.parent.exists() and not path.parent.is_dir():
      raise WorkdirError(f"--workdir={path.parent} is a file; choose a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = open_own(path, "a+")
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._file.seek(0)
      holder = self._file.read().strip() or "unknown"
      self._file.close()
      raise WorkdirError(
        f"{path.parent} is in use by process {holder}. Wait for it, stop it, or use another "
        "--workdir."
      ) from None
    self._file.truncate(0)
    self._file.write(f"{os.getpid()}\n")
    self._file.flush()

  def close(self) -> None:
    """Releases the lock."""
    self._file.close()


class StartFiles:
  """The files that the start of a run writes; `close` removes these files if the start failed.

  `close` keeps earlier files, and keeps everything in the workdir of a resumed run.
  """

  def __init__(self, workdir: Workdir):
    """Lists the earlier files; call it before the workdir is claimed."""
    self._workdir = workdir
    on_disk = not in_bucket(workdir.path)
    path = pathlib.Path(workdir.path).absolute() if on_disk else workdir.local
    self._missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    self._earlier = {entry.name for entry in path.iterdir()} if path.is_dir() else set[str]()
    self._remove_on_close = False

  def check_config(self, config_json: str, may_differ: Collection[str]) -> None:
    """Calls the function `check_config` in the process that has claimed the workdir."""
    self._remove_on_close = not (self._workdir.local / "config.json").exists()
    check_config(self._workdir, config_json, may_differ=may_differ)

  def keep(self) -> None:
    """Keeps the files, and copies them to the bucket, if any; call this if the start succeeded."""
    self._remove_on_close = False
    self._workdir.publish()

  def close(self) -> None:
    """Removes the files of a failed start, and the empty folders that the start has made."""
    if not self._remove_on_close:
      return
    for entry in self._workdir.local.iterdir():
      if entry.name not in self._earlier:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with contextlib.suppress(OSError):  # not empty
      for folder in self._missing:
        folder.rmdir()


def open_workdir(workdir: str | os.PathLike[str], enter: Enter) -> tuple[Workdir, StartFiles]:
  """Opens a workdir and claims it for this run.

  Args:
    workdir: folder of the run, or gs://BUCKET/FOLDER.
    enter: registers an object to be closed when the run ends; returns it.
  Returns:
    The workdir, and the files of this start, which are removed if the start fails.
  Raises:
    WorkdirError: another process has claimed the workdir, or the workdir cannot be written.
  """
  folder = Workdir(workdir)
  with report_unwritable(f"--workdir={workdir}", WorkdirError):
    files = StartFiles(folder)
    multihost.run_on_first(lambda: enter(claim_workdir(folder)), None)
  enter(folder)
  enter(files)
  return folder, files


def claim_workdir(workdir: Workdir) -> WorkdirLock | BucketClaim:
  """Claims a workdir until `close`; only the first process of a run calls this.

  Raises:
    WorkdirError: another process has claimed the workdir.
  """
  if not in_bucket(workdir.path):
    return WorkdirLock(workdir.path)
  bucket_claim = BucketClaim(workdir.bucket(), beat_s=claim.BEAT_S, limit_s=claim.LIMIT_S)
  workdir.set_guard(bucket_claim.check)
  return bucket_claim


def check_config(workdir: Workdir, config_json: str, *, may_differ: Collection[str] = ()) -> None:
  """Writes `workdir`/config.json on the first run; later runs must have the same configuration.

  Samplers read this file. So if the run has samplers, every later start rewrites the file, with the
  present values of the `may_differ` fields.

  Args:
    workdir: a workdir after `fetch`; a missing folder is created.
    config_json: the complete configuration, a JSON object.
    may_differ: dotted names of fields (or of groups of fields) that a resumed run may change.
  Raises:
    WorkdirError: fields differ, and the message lists them with both values; or the workdir has
      files of a run, but no config.json.
  """
  path = workdir.local / "config.json"
  folder = workdir.path
  new = json.loads(config_json)
  if not path.exists():
    if names := run_file_names(path.parent):
      raise WorkdirError(
        f"{folder}/config.json is missing, but {folder} has {', '.join(names)} of a run."
        " Put config.json back, or use another --workdir."
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_config(path, new)
    return
  old = read_config(path, f"{folder}/config.json")
  lines = [
    f"  {name}: {before} in the workdir, {now} now"
    for name, before, now in differing_fields(old, new, may_differ)
  ]
  if lines:
    renamed = ""
    if _RENAMED_TASK in json.dumps(old.get("task")):
      renamed = (
        f"\n{_RENAMED_TASK} is called sums now: write sums in its place in {folder}/config.json."
      )
    raise WorkdirError(
      f"{folder} belongs to a run with another configuration:\n" + "\n".join(lines) + "\n"
      "Use another --workdir, or the configuration of that run. A field that is absent in the"
      " workdir is newer than that run: resume the run with the version of rlvr_jax that began it."
      f"{renamed}"
    )
  if new != old and any(config.get("fleet", {}).get("samplers", False) for config in (old, new)):
    _write_config(path, new)


def _write_config(path: pathlib.Path, config: Mapping[str, JSON]) -> None:
  with replace_file(path) as file:
    file.write((json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def differing_fields(
  old: Mapping[str, JSON], new: Mapping[str, JSON], may_differ: Collection[str]
) -> list[tuple[str, str, str]]:
  """(dotted name, old value, new value) of the fields of a configuration that differ.

  Args:
    old, new: JSON objects; a configuration of an earlier version lacks the fields in `_NEWER`.
    may_differ: dotted names of fields, or of groups of fields, that are left out.
  """
  old_fields, new_fields = ({**_NEWER, **dict(_flatten(fields))} for fields in (old, new))
  return [
    (name, old_fields.get(name, "absent"), new_fields.get(name, "absent"))
    for name in sorted(old_fields.keys() | new_fields.keys())
    if old_fields.get(name) != new_fields.get(name)
    and not any(name == field or name.startswith(f"{field}.") for field in may_differ)
  ]


def read_config(path: pathlib.Path, shown: str = "") -> JsonObject:
  """Reads the configuration of a run, as JSON values.

  Args:
    path: path of config.json.
    shown: the path to show in messages, if it differs from `path`.
  Raises:
    WorkdirError: the file is not a JSON object.
  """
  try:
    config = json.loads(path.read_text())
    problem = f"is a JSON {type(config).__name__}, not an object with the fields of a configuration"
  except ValueError as error:
    config = None
    problem = f"is not JSON ({error})"
  if not isinstance(config, dict):
    raise WorkdirError(f"{shown or path} {problem}. Put back a copy, or choose another folder.")
  return config


def run_file_names(folder: pathlib.Path) -> list[str]:
  """Names of the files and folders that a run has written after its configuration."""
  return [name for name in _RUN_FILES if (folder / name).exists()]


def _flatten(node: JSON, prefix: str = "") -> Iterator[tuple[str, str]]:
  """Yields (dotted name, JSON text) of every field; an empty group counts as a field."""
  if isinstance(node, dict) and node:
    for key, child in node.items():
      yield from _flatten(child, f"{prefix}.{key}" if prefix else key)
  else:
    yield prefix, json.dumps(node)
