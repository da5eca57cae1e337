"""Prints the tables of README.md, of results.json or of the workdir of a sweep.

  python -m experiments.p3o_mismatch.tables --workdir=runs/experiment_p3o

Run it from the repository root. With a workdir it writes results.json and the plot anew.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

from experiments.p3o_mismatch.sweep import CAP_ONLY, METHODS, OTHER, SETTINGS
from experiments.testbed import report
from experiments.testbed.report import Result
from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.compare import METRIC, by_label, cell, curve_of, final, markdown
from rlvr_jax.evaluate.run_files import read_metrics


def measured(workdir: str) -> dict:
  """Measurements of a finished run for the tables, besides its held-out curve."""
  train = [r for r in read_metrics(workdir) if r["phase"] == "train"]
  names = dict(ess="behavior/ess", clip="loss/clip_fraction", kl="behavior/kl_k3")
  found = {name: statistics.mean(r[metric] for r in train) for name, metric in names.items()}
  return found | {
    "entropy": train[-1]["policy/entropy"],
    "largest_ratio": max(r["behavior/ratio_max"] for r in train),
    "skipped": train[-1]["update/skipped"],
  }


def by_setting(results: Mapping[str, Sequence[Result]], of_run: Callable[[Result], float]) -> str:
  """Markdown: settings down, methods across."""
  values = lambda setting, label: [of_run(r) for r in results[f"{setting}: {label}"]]
  rows = {setting: [cell(values(setting, label)) for label in METHODS] for setting in SETTINGS}
  return markdown(list(METHODS), rows, "setting")


def learning_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Final held-out pass@1, and P3O's less the best clip's, which is chosen by its mean."""
  rows = {}
  for setting in SETTINGS:
    of_method = {label: [final(r) for r in results[f"{setting}: {label}"]] for label in METHODS}
    best = max(
      (label for label in METHODS if label != "P3O"),
      key=lambda label, found=of_method: statistics.mean(found[label]),
    )
    pairs = zip(of_method["P3O"], of_method[best], strict=True)
    rows[setting] = [cell(values) for values in of_method.values()]
    rows[setting] += [cell([ours - theirs for ours, theirs in pairs]), best.split()[-1]]
  return markdown([*METHODS, "P3O less the best", "the best's ε"], rows, "setting")


def cost_table(results: Mapping[str, Sequence[Result]]) -> str:
  """Final held-out pass@1 less that of the matched run with the same method and seed."""
  ends = lambda setting, label: [final(r) for r in results[f"{setting}: {label}"]]
  rows = {}
  for setting in list(SETTINGS)[1:]:
    pairs = {
      label: zip(ends(setting, label), ends("matched", label), strict=True) for label in METHODS
    }
    rows[setting] = [cell([end - matched for end, matched in pairs[label]]) for label in METHODS]
  return markdown(list(METHODS), rows, "setting")


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves held-out pass@1 over updates, a panel per setting."""
  runs = by_label(results)
  columns = len(SETTINGS) // 2
  with curves.figure_of(home / "curves.png", 2, columns, size=(14, 7.5), dpi=90) as grid:
    for axes, setting in zip(grid.flat, SETTINGS, strict=True):
      found = {
        label: [curve_of(result) for result in runs[f"{setting}: {label}"]] for label in METHODS
      }
      curves.plot_curves(axes, found, METRIC, "updates")
      axes.sharey(grid.flat[0])
      axes.set_title(setting)


def tables(results: Sequence[Result]) -> str:
  """All tables as Markdown, and the means of the ablation."""
  found = by_label(result for result in results if result["label"] != OTHER)
  metrics = ("ess", "clip", "entropy")
  sections = [learning_table(found), cost_table(found)]
  for name in metrics:
    sections.append(f"{name}:\n\n{by_setting(found, lambda r, name=name: r[name])}")
  ablated = found[CAP_ONLY]
  means = {name: cell([r[name] for r in ablated]) for name in metrics}
  sections.append(f"{CAP_ONLY}: final {cell([final(r) for r in ablated])}, {means}")
  return "\n\n".join(sections)


if __name__ == "__main__":
  report.show(pathlib.Path(__file__).parent, tables, measured, draw)
