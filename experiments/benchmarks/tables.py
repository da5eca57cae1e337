"""Markdown tables for the benchmarks, and a description of the hardware."""

from __future__ import annotations

import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
  """Returns a Markdown table with a column for every key of the rows."""
  columns = list(dict.fromkeys(column for row in rows for column in row))
  lines = [columns, ["---"] * len(columns)]
  lines += [[cell(row.get(column)) for column in columns] for row in rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(value: Any) -> str:
  """Returns the text of a value."""
  if value is None:
    return "–"
  if isinstance(value, str) or (isinstance(value, int) and value < 10**6):
    return str(value)
  return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def hardware() -> str:
  """Kind of the first device; on a CPU, the number of cores and the processor's name."""
  if jax.default_backend() != "cpu":
    return jax.devices()[0].device_kind
  return f"{os.cpu_count()} cores of {processor_name()}, no accelerator"


def write_results(
  path: pathlib.Path,
  title: str,
  rows: Sequence[Row],
  conditions: Mapping[str, Any],
  notes: str = "",
) -> str:
  """Writes a table to PATH.md and its numbers to PATH.json; returns the table with its title.

  Args:
    path: without an extension.
    title: of the table.
    rows: column → value, of each row.
    conditions: name → value, of the measurement.
    notes: what the columns mean, in Markdown.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  results = {"conditions": conditions, "rows": rows}
  path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
  description = "; ".join(f"{name}: {value}" for name, value in conditions.items())
  parts = [f"# {title}", f"Conditions: {description}.", notes, table(rows)]
  text = "\n\n".join(filter(None, parts)) + "\n"
  path.with_suffix(".md").write_text(text)
  return text


def processor_name() -> str:
  """Name of this machine's processor."""
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.machine()
