"""A run's files of records: a resumed run keeps those up to its checkpoint, and checks them."""

from __future__ import annotations

import itertools
import os
import pathlib
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlvr_jax.storage.files import JsonLines, parse_line, read_lines, replace_lines

WARM_START = "warm_start"  # a phase with its own counter of steps
BEFORE_FIRST_STEP = -1  # keeps the records of the warm start


class Records:
  """Appends records to a file.

  A checkpoint stores how many records of each phase there are up to its step, and their checksum.
  A resumed run keeps the records up to that step. It drops later ones, since it writes them again.

  Attributes:
    damage: says how the file differs from what the checkpoint stores; "" if it does not.
  """

  def __init__(self, path: pathlib.Path, step: int | None, written: Mapping[str, Any] | None):
    """Opens or creates the file.

    Args:
      path: of the file.
      step: the last one whose records are kept; None to keep no record.
      written: what `written` returned when the checkpoint was saved; None not to compare.
    """
    lines = [line for line in read_lines(path) if line.endswith(b"\n")]  # others are torn
    parsed = [(line, _parse(line)) for line in lines]
    valid = [(line, r) for line, r in parsed if r is not None and _is_until(r, step)]
    self._records = [record for _, record in valid]
    self.damage = ""
    if written is not None:
      strangers = sum(record is None for _, record in parsed)
      self.damage = _compare(path, _summary(self._records), written, strangers)
    replace_lines(path, [line for line, _ in valid])
    self._lines = JsonLines(path)

  def append(self, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends one line per record; each has "step" and "phase".

    Raises:
      DiskFullError: no space is left.
    """
    records = list(records)
    for record, line in zip(records, self._lines.append(records), strict=True):
      self._records.append(_Record(record["phase"], record["step"], zlib.crc32(line)))

  def written(self, step: int) -> dict[str, Any]:
    """Syncs the file to disk; returns what a checkpoint stores of records up to a step; JSON."""
    os.fsync(self._lines.fileno())
    return _summary([record for record in self._records if _is_until(record, step)])

  def close(self) -> None:
    """Closes the file."""
    self._lines.close()


class _Record(NamedTuple):
  phase: str
  step: int
  checksum: int  # of its line


def _parse(line: bytes) -> _Record | None:
  """The record in a line; None if it has none."""
  record = parse_line(line) or {}
  phase, step = record.get("phase"), record.get("step")
  if not isinstance(phase, str) or type(step) is not int:
    return None
  return _Record(phase, step, zlib.crc32(line))


def _is_until(record: _Record, step: int | None) -> bool:
  return step is not None and (record.phase == WARM_START or record.step <= step)


def _summary(records: Sequence[_Record]) -> dict[str, Any]:
  """Number of records by phase, and a checksum of all of them in their order."""
  sums = b"".join(record.checksum.to_bytes(4, "little") for record in records)
  return {"records": dict(Counter(r.phase for r in records)), "crc32": zlib.crc32(sums)}


def _compare(
  path: pathlib.Path, present: Mapping[str, Any], written: Mapping[str, Any], strangers: int
) -> str:
  """A message if a file is damaged, which is then renamed; "" if it is not.

  Args:
    path: of the file.
    present: `_summary` of its records up to the checkpoint's step.
    written: the same when the checkpoint was saved.
    strangers: number of its lines that are not records.
  """
  if present == written and not strangers:
    return ""
  counts, expected = present["records"], written["records"]
  problems = [
    f"{counts.get(phase, 0)} of {expected.get(phase, 0)} {phase} records"
    for phase in dict.fromkeys((*expected, *counts))
    if counts.get(phase, 0) != expected.get(phase, 0)
  ]
  if strangers:
    problems.append(f"{strangers} lines that are not records")
  what = f"it has {', '.join(problems)}" if problems else "records were changed or moved"
  if not path.exists():
    return f"{path} was removed: {what}. The run goes on without them"
  candidates = (path.with_name(f"{path.name}.damaged-{k}") for k in itertools.count(1))
  moved = path.rename(next(candidate for candidate in candidates if not candidate.exists()))
  return (
    f"{path} differs from what the checkpoint recorded: {what}. The run goes on with the records"
    f" that are left; the old file is {moved}"
  )
