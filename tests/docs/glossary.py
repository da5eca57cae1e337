"""The names of metrics that docs/metrics.md has."""

import functools
import pathlib
import re

from rlvr_jax.evaluate.run_files import read_metrics

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "metrics.md"


@functools.cache
def documented():
  """Names of the page; capital letters stand for a name, K for a number."""
  lines = PAGE.read_text(encoding="utf-8").splitlines()
  cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
  return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@functools.cache
def _patterns():
  wild = lambda name: re.sub(r"(?<=[@_])K", r"\\d+", re.sub(r"[A-Z]{2,}", "[^/]+", name))
  return [re.compile(wild(re.escape(name))) for name in documented()]


def has(name):
  """Whether the page has this metric."""
  name = re.sub(r"_(sampled|score)$", "", name) if name.startswith("geometry/") else name
  return any(pattern.fullmatch(name) for pattern in _patterns())


def missing(workdir):
  """Metrics in a run's records that the page does not have."""
  names = {name for record in read_metrics(workdir) for name in record}
  assert len(names) > 70
  return sorted(name for name in names - {"step", "phase"} if not has(name))
