"""A run's files of JSON lines: what a checkpoint knows of them, and their repair."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlvr_jax.files import JsonLines, replacing


class Records:
  """Appends records of steps to a file and to a hidden copy of it.

  The names of the records, such as "train 12 1c291ca3" (phase, step, checksum of the line), go into
  the checkpoints. A resumed run has exactly the records that its checkpoint names: what the file
  has lost since comes from the copy, and `damage` says what was found.

  Attributes:
    names: of the records that are there, in their order.
    damage: messages on what was not as it was named; none where all was.
  """

  def __init__(self, path: pathlib.Path, names: Sequence[str]):
    """Opens the file, created if needed, with the records named; later ones are dropped."""
    copy = path.with_name(f".{path.name}")
    found, spare = _lines(path), _lines(copy)
    lines = {_name(line): line for line in spare + found}
    self.names = [name for name in names if name in lines]
    self.damage: list[str] = []
    if [_name(line) for line in found[: len(names)]] != list(names):
      self.damage.append(_set_aside(path, names, [*map(_name, found)], lines.keys()))
    text = b"".join(lines[name] for name in self.names)
    for file, before in ((path, found), (copy, spare)):
      if not file.exists() or b"".join(before) != text:
        with replacing(file) as new:
          new.write(text)
    self._files = [JsonLines(path), JsonLines(copy)]

  def append(self, records: Iterable[Mapping[str, Any]]) -> None:
    """One line per record; with "step" and "phase" in each.

    Raises:
      DiskFullError: no space is left.
    """
    records = list(records)
    for file in self._files:
      lines = file.append(records)
    self.names += map(_name, lines)

  def sync(self) -> None:
    """Brings the records to the disk, before a checkpoint that names them."""
    for file in self._files:
      os.fsync(file.fileno())

  def close(self) -> None:
    """Closes the files."""
    for file in self._files:
      file.close()


def names_until(path: pathlib.Path, step: int) -> list[str]:
  """Names of a file's records up to a step, for a checkpoint that does not say them."""
  names = [name for name in map(_name, _lines(path)) if name]
  warm_start = "warm_start "  # has a counter of its own
  return [n for n in names if n.startswith(warm_start) or int(n.split()[1]) <= step]


def _lines(path: pathlib.Path) -> list[bytes]:
  return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _name(line: bytes) -> str:
  """ "phase step checksum" of a record's line; empty for a line that is none."""
  try:
    record = json.loads(line)
    phase, step = record["phase"], record["step"]
  except (ValueError, KeyError, TypeError):
    return ""
  whole = line.endswith(b"\n") and isinstance(phase, str) and type(step) is int
  return f"{phase} {step} {zlib.crc32(line):08x}" if whole else ""


def _set_aside(
  path: pathlib.Path, names: Sequence[str], found: Sequence[str], there: Iterable[str]
) -> str:
  """Keeps a damaged file under another name; returns what to say of it."""
  lacking = list((Counter(names) - Counter(found)).elements())
  lost = [name for name in names if name not in set(there)]
  known, labels = set(names), {_label(name) for name in names}
  doubled = [name for name in (Counter(found) - Counter(names)).elements() if name in known]
  # Records of later steps are none of them: they are about to be written again.
  strange = [name for name in found if name not in known and (not name or _label(name) in labels)]
  parts = {
    f"records missing or changed: {_listed(lacking)}": lacking,
    f"records doubled: {_listed(doubled)}": doubled,
    f"lines that are none of its records: {len(strange)}": strange,
  }
  what = "; ".join(text for text, those in parts.items() if those) or "records in another order"
  done = f"lost for good: {_listed(lost)}" if lost else "all were put back from a copy"
  if not path.exists():
    return f"{path} was removed ({what}); {done}"
  asides = (path.with_name(f"{path.name}.damaged-{k}") for k in itertools.count(1))
  aside = path.rename(next(aside for aside in asides if not aside.exists()))
  return f"{path} was not as the checkpoint knows it ({what}); {done}; what was found is {aside}"


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
