"""The names of metrics that the pages have: docs/metrics.md, and pages of one subject."""

import functools
import pathlib
import re

from rlvr_jax.evaluate.run_files import read_metrics

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SUBJECTS = {  # page → what its metrics begin with; all other metrics are in docs/metrics.md
  "reading_geometry.md": ("geometry/", "reweighting/", "gram/"),
  "distillation.md": ("teacher/",),
  "experts.md": ("routing/", "loss/expert_balance"),
}


def _rows(page):
  """Names in the first cells of a page's tables."""
  lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
  cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
  return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


@functools.cache
def documented():
  """Names of the pages; capital letters stand for a name, K for a number."""
  general = _rows("metrics.md")
  assert not [n for n in general if n.startswith(sum(SUBJECTS.values(), ()))], "on another page"
  return general + [
    name
    for page, beginnings in SUBJECTS.items()
    for name in _rows(page)
    if name.startswith(beginnings)
  ]


@functools.cache
def _patterns():
  wild = lambda name: re.sub(r"(?<=[@_])K", r"\\d+", re.sub(r"[A-Z]{2,}", "[^/]+", name))
  return [re.compile(wild(re.escape(name))) for name in documented()]


def has(name):
  """Whether a page has this metric."""
  name = re.sub(r"_(sampled|score)$", "", name) if name.startswith("geometry/") else name
  return any(pattern.fullmatch(name) for pattern in _patterns())


def missing(workdir):
  """Metrics in a run's records that no page has."""
  names = {name for record in read_metrics(workdir) for name in record}
  assert len(names) > 70
  return sorted(name for name in names - {"step", "phase"} if not has(name))
