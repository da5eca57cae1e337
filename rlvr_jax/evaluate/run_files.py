"""Names of the files of a run, and a reader of its metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rlvr_jax.storage.files import DamagedFileError, parse_records
from rlvr_jax.storage.places import open_lines, parse_path

TIMINGS = "time/"  # prefix of values measured with a clock
MEASURED = (
  TIMINGS,
  "memory/",
  "hosts/",
  "fleet/",
)  # prefixes of the values that may differ in a rerun
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
GEOMETRY_FOLDER = "geometry"  # one .npz per measurement, named by the number of updates before it


def read_metrics(workdir: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """Reads the records of metrics.jsonl, with floats exactly as written.

  Args:
    workdir: folder of a run, which may be in a bucket.
  Raises:
    DamagedFileError: a line is not a record; an incomplete last line is skipped instead.
  """
  path = parse_path("the workdir", workdir) / METRICS_FILE
  with open_lines(path) as lines:
    for number, record in enumerate(parse_records(lines, path), start=1):
      if type(record.get("step")) is not int or not isinstance(record.get("phase"), str):
        raise DamagedFileError(
          f"{path}, line {number} lacks an integer 'step' or a string 'phase'; remove that line."
        )
      yield {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in record.items()}
