"""Names of a run's files, and reading of its metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlvr_jax.storage.files import DamagedFileError, records_of
from rlvr_jax.storage.places import opened_lines, place

TIMINGS = "time/"  # prefix of values measured with a clock
MEASURED = (
  TIMINGS,
  "memory/",
  "hosts/",
)  # prefixes of what depends on the machine: only these differ in a rerun
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
GEOMETRY_FOLDER = "geometry"  # one .npz per measurement, by the number of updates before it


def read_metrics(workdir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """The records of metrics.jsonl, floats exactly as written; `workdir` may be in a bucket.

  Raises:
    DamagedFileError: a complete line is not a record.
  """
  path = place("the workdir", workdir) / METRICS_FILE
  with opened_lines(path) as lines:
    for number, record in enumerate(records_of(lines, path), start=1):
      if type(record.get("step")) is not int or not isinstance(record.get("phase"), str):
        raise DamagedFileError(f"{path}, line {number} has no step and phase; remove that line.")
      yield {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in record.items()}
