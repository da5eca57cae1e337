"""A run's JSON-lines files: the names of records that checkpoints store, and repair."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlvr_jax.storage.files import JsonLines, replacing


class Records:
  """Appends records to a file and to a hidden copy of it.

  Checkpoints store the names of the records, such as "train 12 1c291ca3" (phase, step, checksum of
  the line). A resumed run has exactly the records that its checkpoint names: records that the file
  has lost are restored from the copy, and `damage` reports them.

  Attributes:
    names: of the records in the file, in order.
    damage: messages on differences between the file and `names`; empty if there are none.
  """

  def __init__(self, path: pathlib.Path, names: Sequence[str]):
    """Opens or creates the file and keeps the records in `names`; later ones are dropped."""
    copy = path.with_name(f".{path.name}")
    found, spare = _lines(path), _lines(copy)
    lines = {_name(line): line for line in spare + found}
    self.names = [name for name in names if name in lines]
    self.damage: list[str] = []
    if [_name(line) for line in found[: len(names)]] != list(names):
      self.damage.append(_keep_damaged(path, names, [*map(_name, found)], lines.keys()))
    text = b"".join(lines[name] for name in self.names)
    for file, before in ((path, found), (copy, spare)):
      if not file.exists() or b"".join(before) != text:
        with replacing(file) as new:
          new.write(text)
    self._files = [JsonLines(path), JsonLines(copy)]

  def append(self, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends one line per record; each has "step" and "phase".

    Raises:
      DiskFullError: no space is left.
    """
    records = list(records)
    for file in self._files:
      lines = file.append(records)
    self.names += map(_name, lines)

  def sync(self) -> None:
    """Syncs the files to disk; call it before saving a checkpoint that names the records."""
    for file in self._files:
      os.fsync(file.fileno())

  def close(self) -> None:
    """Closes the files."""
    for file in self._files:
      file.close()


def names_until(path: pathlib.Path, step: int) -> list[str]:
  """Names of a file's records up to a step, for a checkpoint that does not have them."""
  return until([name for name in map(_name, _lines(path)) if name], step)


def until(names: Iterable[str], step: int) -> list[str]:
  """Those of the names that are of no later step."""
  warm_start = "warm_start "  # has its own step counter
  return [n for n in names if n.startswith(warm_start) or int(n.split()[1]) <= step]


def _lines(path: pathlib.Path) -> list[bytes]:
  return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _name(line: bytes) -> str:
  """ "phase step checksum" of a record's line; "" for a line that is not a record."""
  try:
    record = json.loads(line)
    phase, step = record["phase"], record["step"]
  except (ValueError, KeyError, TypeError):
    return ""
  complete = line.endswith(b"\n") and isinstance(phase, str) and type(step) is int
  return f"{phase} {step} {zlib.crc32(line):08x}" if complete else ""


def _keep_damaged(
  path: pathlib.Path, names: Sequence[str], found: Sequence[str], available: Iterable[str]
) -> str:
  """Renames a damaged file, and returns a message about it.

  Args:
    names: of the records that the checkpoint has.
    found: names of the file's lines.
    available: names of the records in the file or its copy.
  """
  missing = list((Counter(names) - Counter(found)).elements())
  lost = [name for name in names if name not in set(available)]
  known, labels = set(names), {_label(name) for name in names}
  repeated = [name for name in (Counter(found) - Counter(names)).elements() if name in known]
  # Records of later steps are expected: the resumed run writes them again.
  unknown = [name for name in found if name not in known and (not name or _label(name) in labels)]
  parts = {
    f"records missing or changed: {_listed(missing)}": missing,
    f"records repeated: {_listed(repeated)}": repeated,
    f"lines that are not its records: {len(unknown)}": unknown,
  }
  what = "; ".join(text for text, some in parts.items() if some) or "records in another order"
  done = f"lost permanently: {_listed(lost)}" if lost else "all were restored from a copy"
  if not path.exists():
    return f"{path} was removed ({what}); {done}"
  candidates = (path.with_name(f"{path.name}.damaged-{k}") for k in itertools.count(1))
  kept = path.rename(next(candidate for candidate in candidates if not candidate.exists()))
  return f"{path} differs from the checkpoint's records ({what}); {done}; the old file is {kept}"


def _label(name: str) -> str:
  return name.rpartition(" ")[0]


def _listed(names: Sequence[str]) -> str:
  """ "train 3-5, 8; eval 5": steps by phase."""
  steps: dict[str, set[int]] = {}
  for phase, step, _ in (name.rsplit(" ", 2) for name in names):
    steps.setdefault(phase, set()).add(int(step))
  parts = []
  for phase, of_phase in steps.items():
    runs = itertools.groupby(enumerate(sorted(of_phase)), lambda pair: pair[1] - pair[0])
    spans = [[step for _, step in run] for _, run in runs]
    texts = [f"{s[0]}-{s[-1]}" if len(s) > 1 else f"{s[0]}" for s in spans]
    parts.append(f"{phase} {', '.join(texts)}")
  return f"{len(names)} ({'; '.join(parts)})"
