"""Names of a run's files, and reading of its metrics."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rlvr_jax.files import DamagedFileError, read_records

TIMINGS = "time/"  # prefix of values measured with a clock
MEASURED = (
  TIMINGS,
  "memory/",
  "hosts/",
)  # prefixes of what machines do: only these differ in a rerun
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
GEOMETRY_FOLDER = "geometry"  # one .npz per measurement, by the number of updates before it


def read_metrics(workdir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """The records of metrics.jsonl, floats exactly as written.

  Raises:
    DamagedFileError: a complete line is not a record.
  """
  path = pathlib.Path(workdir) / METRICS_FILE
  for number, record in enumerate(read_records(path), start=1):
    if type(record.get("step")) is not int or not isinstance(record.get("phase"), str):
      raise DamagedFileError(f"{path}, line {number} has no step and phase; remove that line.")
    yield {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in record.items()}


def without_timings(record: Mapping[str, Any]) -> dict[str, Any]:
  """The record without what was measured on the machine: identical in every rerun."""
  return {name: value for name, value in record.items() if not name.startswith(MEASURED)}
