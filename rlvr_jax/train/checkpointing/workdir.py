"""Protects a workdir: one process at a time, and always the same configuration."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator
from typing import Any

from rlvr_jax.storage.files import replacing, writing_to
from rlvr_jax.storage.places import Workdir, in_bucket
from rlvr_jax.train.checkpointing import claim
from rlvr_jax.train.checkpointing.claim import BucketClaim, WorkdirError
from rlvr_jax.train.cluster import multihost

LAYOUT_FILE = "layout.json"  # the machine of the process that began or resumed a run last
# What a run writes after its configuration. Without warm_start, which users may copy there.
_OF_A_RUN = ("checkpoints", "rollouts", "metrics.jsonl", "problems.jsonl")


class WorkdirLock:
  """Locks a workdir until `close`; the kernel frees the lock when the process ends."""

  def __init__(self, workdir: str | os.PathLike[str]):
    """Raises WorkdirError if another process has the lock."""
    path = pathlib.Path(workdir) / ".lock"
    if path.parent.exists() and not path.parent.is_dir():
      raise WorkdirError(f"--workdir={path.parent} is a file; choose a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = open(path, "a+")
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
    """Frees the lock."""
    self._file.close()


class StartFiles:
  """The files of a start; `close` removes them unless the run began, so that it can start anew.

  Files that were there before are kept, and so is everything where a run had begun before.
  """

  def __init__(self, workdir: Workdir):
    """Lists what is there; call it before the workdir is claimed."""
    self._workdir = workdir
    on_disk = not in_bucket(workdir.kept)
    path = pathlib.Path(workdir.kept).absolute() if on_disk else workdir.local
    self._missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    self._before = {entry.name for entry in path.iterdir()} if path.is_dir() else set[str]()
    self._removed_unless_begun = False

  def check_config(self, config_json: str, may_differ: Collection[str]) -> None:
    """Calls `check_config`, in the process that has the claim."""
    self._removed_unless_begun = not (self._workdir.local / "config.json").exists()
    check_config(self._workdir, config_json, may_differ=may_differ)

  def begin(self) -> None:
    """The start has succeeded: the files stay."""
    self._removed_unless_begun = False
    self._workdir.publish()

  def close(self) -> None:
    """Removes the files of a start that has failed; folders that it made, if they are empty."""
    if not self._removed_unless_begun:
      return
    for entry in self._workdir.local.iterdir():
      if entry.name not in self._before:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with contextlib.suppress(OSError):  # not empty any more
      for folder in self._missing:
        folder.rmdir()


def opened(
  workdir: str | os.PathLike[str], enter: Callable[[Any], Any]
) -> tuple[Workdir, StartFiles]:
  """A workdir, claimed by this run, and what becomes of its files if the start fails.

  `enter` closes what it gets when the run ends.

  Raises:
    WorkdirError: another process has it, or nothing can be written there.
  """
  folder = Workdir(workdir)
  with writing_to(f"--workdir={workdir}", WorkdirError):
    files = StartFiles(folder)
    multihost.on_first(lambda: enter(claimed(folder)), None)
  enter(folder)
  enter(files)
  return folder, files


def claimed(workdir: Workdir) -> WorkdirLock | BucketClaim:
  """Claims a workdir until `close`; raises WorkdirError if another process has it.

  Call it in one process per run (on several hosts: the first).
  """
  if not in_bucket(workdir.kept):
    return WorkdirLock(workdir.kept)
  owner = BucketClaim(workdir.bucket(), beat_s=claim.BEAT_S, limit_s=claim.LIMIT_S)
  workdir.guard_by(owner.check)
  return owner


def check_config(workdir: Workdir, config_json: str, *, may_differ: Collection[str] = ()) -> None:
  """Writes `workdir`/config.json on the first run; later runs must have the same configuration.

  Args:
    workdir: fetched; created if needed.
    config_json: the complete configuration, a JSON object.
    may_differ: dotted names of fields (or of groups of fields) that a resumed run may change.
  Raises:
    WorkdirError: fields differ, which the message lists with both values; or the workdir has a run
      without config.json.
  """
  path, kept = workdir.local / "config.json", workdir.kept
  new = json.loads(config_json)
  if not path.exists():
    if left := left_by_a_run(path.parent):
      raise WorkdirError(
        f"{kept}/config.json is missing, but {kept} has {', '.join(left)} of a run, whose"
        " configuration is unknown without it. Put it back, or use another --workdir."
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
      file.write((json.dumps(new, indent=2, sort_keys=True) + "\n").encode())
    return
  old = read_config(path, f"{kept}/config.json")
  then, now = dict(_flatten(old)), dict(_flatten(new))
  lines = [
    f"  {name}: {then.get(name, 'absent')} in the workdir, {now.get(name, 'absent')} now"
    for name in sorted(then.keys() | now.keys())
    if then.get(name) != now.get(name)
    and not any(name == field or name.startswith(f"{field}.") for field in may_differ)
  ]
  if lines:
    raise WorkdirError(
      f"{kept} belongs to a run with another configuration:\n" + "\n".join(lines) + "\n"
      "Use another --workdir, or the configuration of the run that is there."
    )


def read_config(path: pathlib.Path, shown: str = "") -> dict[str, Any]:
  """The configuration of a run, as JSON values.

  Args:
    path: of its config.json; `shown` in messages, if that is another one.
  Raises:
    WorkdirError: it is not a JSON object.
  """
  try:
    found = json.loads(path.read_text())
    problem = f"has {type(found).__name__} in place of the fields of a configuration"
  except ValueError as error:
    found, problem = None, f"is not JSON ({error})"
  if not isinstance(found, dict):
    raise WorkdirError(f"{shown or path} {problem}. Put back a copy, or choose another folder.")
  return found


def left_by_a_run(folder: pathlib.Path) -> list[str]:
  """Names of what a run has written into its folder after its configuration."""
  return [name for name in _OF_A_RUN if (folder / name).exists()]


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
  """Dotted name and JSON text of every field; an empty group counts as a field."""
  if isinstance(node, dict) and node:
    for key, child in node.items():
      yield from _flatten(child, f"{prefix}.{key}" if prefix else key)
  else:
    yield prefix, json.dumps(node)
