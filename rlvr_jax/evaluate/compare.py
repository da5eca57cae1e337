"""Compares the runs of a sweep: tables with differences paired by seed, and learning curves.

  python -m rlvr_jax.evaluate.compare runs/my_sweep --metric=eval/pass@1 --baseline=grpo
  python -m rlvr_jax.evaluate.compare runs/my_sweep --figure=curves.png --over=flops
  python -m rlvr_jax.evaluate.compare runs/my_sweep --differences=differences.png

A sweep leaves one result per run, WORKDIR/RUN/result.json: label, seed, commit, command, seconds,
layout, and `evaluations`, a list per axis of `curves.AXES` and per held-out metric. Experiments
commit these results as one file, a run per line, which is read as well.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.figures import COLORS, legend_outside
from rlvr_jax.evaluate.paired import (
  Difference,
  holm,
  mean_and_half_width,
  paired_difference,
  seeds_needed,
  standard_error_of_interval,
  standard_error_over_seeds,
)
from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.storage.files import replacing
from rlvr_jax.storage.places import place

RESULT_FILE = "result.json"
METRIC = "eval/pass@1"
Result = Mapping[str, Any]

# --- results --------------------------------------------------------------------------------------


def evaluations(records: Iterable[curves.Record]) -> dict[str, list[float]]:
  """The evaluations of a run: for every axis and held-out metric the values, in order.

  Args:
    records: from `read_metrics`.
  """
  held_out = [record for record in records if record["phase"] == "eval"]
  if not held_out:
    return {}
  axes = {axis: fields for axis, (_, fields) in curves.AXES.items()}
  found = {axis: [sum(r[f] for f in fields) for r in held_out] for axis, fields in axes.items()}
  found["seconds"] = [round(x, 2) for x in found["seconds"]]
  names = [name for name in held_out[-1] if name.startswith("eval/")]
  return found | {name: [r[name] for r in held_out] for name in names if name in held_out[0]}


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The results of a sweep's workdir, or of a file of results, in the order of the sweep.

  Those of a workdir have one more field, `workdir`, the folder of the run.

  Raises:
    ValueError: there are none.
  """
  folder = place("the path", path)
  if folder.is_file():
    return json.loads(folder.read_text(encoding="utf-8"))
  results = []
  for file in folder.glob(f"*/{RESULT_FILE}"):
    result = json.loads(file.read_text(encoding="utf-8"))
    results.append(result | {"workdir": os.fspath(file.parent)})
  if not results:
    raise ValueError(
      f"{path} has no results: give the --workdir of a sweep that has finished a run, or a file of"
      " results"
    )
  return sorted(results, key=lambda result: (result["number"], result["workdir"]))


def write_results(path: pathlib.Path, results: Iterable[Result]) -> None:
  """Writes results to a file, one per line, without the folders of the runs."""
  kept = [{k: v for k, v in result.items() if k != "workdir"} for result in results]
  with replacing(path) as file:
    file.write("\n".join(["[", ",\n".join(map(json.dumps, kept)), "]\n"]).encode())


def by_label(results: Iterable[Result]) -> dict[str, list[Result]]:
  """The results of every label, in the order of the results."""
  found: dict[str, list[Result]] = {}
  for result in results:
    found.setdefault(result["label"], []).append(result)
  return found


def curve_of(
  result: Result, metric: str = METRIC, over: str = "updates", phase: str = "eval"
) -> tuple[curves.Floats, curves.Floats]:
  """The positions of a run's values of a metric, and the values; f64[N] both, as `curves.curve`.

  Evaluations are in every result, metrics of training in the run's workdir. Results of experiments
  may also have metrics of training over updates: `curves`, metric → pairs (update, value), and
  `train`, metric → means over equal spans of the updates, each at the middle of its span.

  Raises:
    ValueError: see `curves.curve`; the message begins with the run.
  """
  if over == "updates" and metric in result.get("curves", {}):
    x, y = np.array(result["curves"][metric], np.float64).T
    return x, y
  if over == "updates" and metric in result.get("train", {}):
    means = np.array(result["train"][metric], np.float64)
    middles = (np.arange(means.size) + 0.5) / means.size
    return middles * result["evaluations"]["updates"][-1], means
  try:
    if phase == "eval":
      return curves.curve(_records(result["evaluations"]), metric, over)
    if "workdir" not in result:
      raise ValueError("a file of results has evaluations alone; give the workdir of the sweep")
    return curves.curve(read_metrics(result["workdir"]), metric, over, phase)
  except ValueError as error:
    raise ValueError(f"{result['label']}, seed {result['seed']}: {error}") from error


def _records(columns: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
  """Evaluations as records, whose first field of an axis has all of it."""
  renamed = {axis: fields for axis, (_, fields) in curves.AXES.items() if axis in columns}
  records = []
  for values in zip(*columns.values(), strict=True):
    record: dict[str, Any] = dict(zip(columns, values, strict=True)) | {"phase": "eval"}
    for axis, (first, *rest) in renamed.items():
      record |= {first: record[axis], **dict.fromkeys(rest, 0)}
    records.append(record)
  return records


def final(result: Result, metric: str = METRIC, phase: str = "eval") -> float:
  """The last value of a metric."""
  return float(curve_of(result, metric, phase=phase)[1][-1])


def rise(result: Result, metric: str = METRIC) -> float:
  """The last value of a held-out metric less the first."""
  values = result["evaluations"][metric]
  return values[-1] - values[0]


# --- tables ---------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Mapping[str, Sequence[str]], first: str = "run") -> str:
  """A table with one row per label; `first` is the heading of the labels."""
  lines = [f"| {first} | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
  return "\n".join(lines + [f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items()])


def cell(values: Sequence[float]) -> str:
  """Mean over seeds with half of its 95 % interval; the mean alone where all seeds are equal."""
  mean, half = mean_and_half_width(values)
  return f"{mean:.3g} ± {half:.1g}" if half else f"{mean:.3g}"


def difference_cell(found: Difference, digits: int = 3) -> str:
  """Mean difference by seed with its 95 % interval.

  The mean alone where the interval has no width at these decimal digits: seeds that are equal by
  chance, two of them for instance, say nothing of how much others would differ.
  """
  mean, low, high = (f"{x:+.{digits}f}" for x in (found.mean, found.low, found.high))
  return mean if low == high else f"{mean} [{low}, {high}]"


def interval(result: Result, index: int, metric: str = METRIC) -> str:
  """A held-out metric of one evaluation, with its interval over problems."""
  value, low, high = (result["evaluations"][f"{metric}{x}"][index] for x in ("", "_low", "_high"))
  return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def error_over_problems(results: Sequence[Result], metric: str = METRIC) -> float | None:
  """Standard error over problems of a metric's last value, the mean over the runs; None if unknown.

  All runs have the same problems, so that more seeds make it no smaller.
  """
  names = [f"{metric}_low", f"{metric}_high"]
  found = [r["evaluations"] for r in results if all(name in r["evaluations"] for name in names)]
  if len(found) < len(results):
    return None
  return statistics.mean(standard_error_of_interval(*(e[n][-1] for n in names)) for e in found)


def differences(
  results: Iterable[Result], baseline: str, of_run: Callable[[Result], float] = final
) -> dict[str, Difference | None]:
  """Label → its difference to the baseline, paired by seed; None with fewer than two seeds shared.

  Raises:
    ValueError: no run has the baseline's label.
  """
  found = {
    label: {r["seed"]: of_run(r) for r in of_label} for label, of_label in by_label(results).items()
  }
  if baseline not in found:
    raise ValueError(f"no run has the label {baseline!r}; choose one of {list(found)}")
  reference = found.pop(baseline)
  return {
    label: paired_difference(values, reference) if len(values.keys() & reference) > 1 else None
    for label, values in found.items()
  }


def others(results: Iterable[Result], baseline: str) -> list[str]:
  """The labels of the results, without the baseline's.

  Raises:
    ValueError: there is no such baseline, or no other label.
  """
  labels = list(by_label(results))
  if baseline not in labels:
    raise ValueError(f"no run has the label {baseline!r}; choose one of {labels}")
  if len(labels) == 1:
    raise ValueError(f"all runs have the label {baseline!r}: there is nothing to compare it with")
  return [label for label in labels if label != baseline]


def adjusted_p(found: Mapping[str, Difference | None]) -> dict[str, float]:
  """Label → p, by Holm's procedure for all differences that vary between seeds."""
  p = {label: value.p for label, value in found.items() if value and value.deviation}
  return dict(zip(p, holm(list(p.values())).tolist(), strict=True))


HEADER = (
  *("seeds", "last value", "s.e. over seeds", "s.e. over problems"),
  *("difference", "95 %, t", "95 %, bootstrap", "p", "p, Holm"),
)


def table(
  results: Sequence[Result],
  *,
  metric: str = METRIC,
  baseline: str | None = None,
  difference: float = 0.02,
  phase: str = "eval",
) -> str:
  """Markdown: a row per label, with its difference to the baseline's, paired by seed.

  Args:
    results: from `read_results`.
    metric: whose last value is compared.
    baseline: a label; None for that of the first result.
    difference: the one for which the last column has the number of seeds.
    phase: of the records with the metric; "train" needs the workdirs of the runs.
  Raises:
    ValueError: a run lacks the metric, or no run has the baseline's label.
  """
  baseline = results[0]["label"] if baseline is None else baseline
  found = differences(results, baseline, lambda result: final(result, metric, phase))
  adjusted = adjusted_p(found)
  rows = {}
  for label, of_label in by_label(results).items():
    values = [final(result, metric, phase) for result in of_label]
    over_problems = error_over_problems(of_label, metric)
    rows[label] = [str(len(values)), f"{statistics.mean(values):.4g}"]
    rows[label] += [f"{standard_error_over_seeds(values):.2g}" if len(values) > 1 else "–"]
    rows[label] += ["–" if over_problems is None else f"{over_problems:.2g}"]
    rows[label] += _cells(found.get(label), adjusted.get(label), difference)
  return markdown([*HEADER, f"seeds for {difference:g}"], rows)


def _cells(found: Difference | None, adjusted: float | None, difference: float) -> list[str]:
  """Cells of a row on the difference to the baseline; dashes if it does not vary."""
  if found is None:
    return ["–"] * 6
  if adjusted is None:
    return [f"{found.mean:+.4f}", *["–"] * 5]
  needed = seeds_needed(found.deviation, difference)
  return [
    f"{found.mean:+.4f}",
    f"[{found.low:+.4f}, {found.high:+.4f}]",
    f"[{found.bootstrap_low:+.4f}, {found.bootstrap_high:+.4f}]",
    f"{found.p:.2g}",
    f"{adjusted:.2g}",
    f"{needed}",
  ]


def notes(
  results: Sequence[Result],
  *,
  metric: str = METRIC,
  baseline: str | None = None,
  phase: str = "eval",
) -> str:
  """What the dashes of `table` mean, one line per reason; arguments as there."""
  baseline = results[0]["label"] if baseline is None else baseline
  found = differences(results, baseline, lambda result: final(result, metric, phase))
  labels = by_label(results)
  reasons = {
    "the baseline, to which the other rows are compared": [baseline],
    "no difference, as fewer than two seeds are shared with the baseline": [
      label for label, value in found.items() if value is None
    ],
    "no interval, as the difference is the same for every seed": [
      label for label, value in found.items() if value and not value.deviation
    ],
    "no standard error over seeds, as there is one seed": [
      label for label, of_label in labels.items() if len(of_label) == 1
    ],
    "no standard error over problems, as the metric has no interval over problems": [
      label for label, of_label in labels.items() if error_over_problems(of_label, metric) is None
    ],
  }
  return "\n".join(
    f"– {', '.join(chosen)}: {reason}" for reason, chosen in reasons.items() if chosen
  )


def provenance(results: Iterable[Result]) -> str:
  """Commits and devices of the results, one line each."""
  results = list(results)
  lines = []
  for field in ("commit", "device"):
    counts = collections.Counter(_known(result, field) for result in results)
    runs = ", ".join(f"{value} ({count} runs)" for value, count in counts.items())
    lines.append(f"{field}: {runs}")
  return "\n".join(lines)


def _known(result: Result, name: str) -> str:
  value = (result.get("layout") or {}).get(name) if name == "device" else result.get(name)
  return str(value or "not recorded")


# --- figures --------------------------------------------------------------------------------------


def plot_differences(
  axes: Any,
  results: Sequence[Result],
  baseline: str,
  of_run: Callable[[Result], float] = final,
  *,
  name: str = METRIC,
) -> None:
  """Differences to the baseline, paired by seed: a row for each label, in the order of the results.

  A row has a dot for each seed that both have, and with two seeds or more their mean, with
  `curves.SEEDS_FOR_BAND` seeds also its 95 % interval by Student's t.

  Args:
    axes: of matplotlib.
    results: from `read_results`.
    baseline: a label.
    of_run: what is compared.
    name: of that, for the axis.
  Raises:
    ValueError: see `others`.
  """
  labels = others(results, baseline)
  values = {
    label: {r["seed"]: of_run(r) for r in of_label} for label, of_label in by_label(results).items()
  }
  names = []
  for row, label in enumerate(labels):
    shared = sorted(values[label].keys() & values[baseline].keys())
    dots = [values[label][seed] - values[baseline][seed] for seed in shared]
    below = [row + 0.28] * len(dots)  # off the interval, which would hide them
    axes.plot(dots, below, "o", markersize=3, color=COLORS["reference"], label="seed")
    if len(shared) >= curves.SEEDS_FOR_BAND:
      difference = paired_difference(values[label], values[baseline])
      axes.errorbar(
        difference.mean, row, fmt="D", markersize=5, capsize=3, color=COLORS["result"],
        xerr=[[difference.mean - difference.low], [difference.high - difference.mean]],
        label="mean, 95 % (t)",
      )  # fmt: skip
    elif len(shared) > 1:
      mean = statistics.mean(dots)
      axes.plot(mean, row, "D", markersize=5, color=COLORS["result"], label="mean of two seeds")
    names.append(f"{label} ({len(shared)} seed{'s' * (len(shared) != 1)})")
  axes.axvline(0, color=COLORS["plain"], linewidth=1, zorder=0, label=baseline)
  axes.set_yticks(range(len(labels)), names)
  axes.set(ylim=(len(labels) - 0.5, -0.5), xlabel=f"{name}, less that of {baseline}")
  axes.grid(axis="x", alpha=0.3)
  handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # each once
  legend_outside(axes, handles=list(handles.values()), labels=list(handles), fontsize="small")


def draw_differences(
  results: Sequence[Result],
  path: str,
  *,
  metric: str = METRIC,
  baseline: str | None = None,
  phase: str = "eval",
) -> None:
  """Saves the figure of `plot_differences` of the metric's last values; arguments as of `table`.

  Raises:
    ImportError: matplotlib, the extra `plot`, is missing.
  """
  baseline = results[0]["label"] if baseline is None else baseline
  height = 1.2 + 0.35 * len(others(results, baseline))
  with curves.figure_of(path, size=(8, height)) as axes:
    plot_differences(
      axes, results, baseline, lambda result: final(result, metric, phase), name=metric
    )


def draw_curves(
  results: Sequence[Result], metric: str, over: str, path: str, *, phase: str = "eval"
) -> None:
  """Saves a figure of the metric's curves by label, with means over seeds and intervals.

  Raises:
    ImportError: matplotlib, the extra `plot`, is missing.
  """
  found = {
    label: [curve_of(result, metric, over, phase) for result in of_label]
    for label, of_label in by_label(results).items()
  }
  with curves.figure_of(path, size=(8, 4)) as axes:
    curves.plot_curves(axes, found, metric, over)


# --- the program ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
  """Prints a table; see the module's docstring."""
  raw = argparse.RawDescriptionHelpFormatter
  parser = argparse.ArgumentParser(
    "rlvr_jax.evaluate.compare", description=__doc__, formatter_class=raw
  )
  parser.add_argument("paths", nargs="+", help="workdirs of sweeps, or files of results")
  parser.add_argument("--metric", default=METRIC, help=f"by default {METRIC}")
  parser.add_argument("--baseline", help="label to compare with; by default the first")
  parser.add_argument("--difference", type=float, default=0.02, help="to find with enough seeds")
  parser.add_argument("--phase", choices=("eval", "train"), default="eval", help="of the metric")
  parser.add_argument("--figure", help="file for the curves, such as curves.png")
  parser.add_argument("--differences", help="file for a figure of the differences to the baseline")
  parser.add_argument("--over", choices=list(curves.AXES), default="updates", help="axis of curves")
  args = parser.parse_args(argv)
  try:
    results = [result for path in args.paths for result in read_results(path)]
    of_metric = dict(metric=args.metric, phase=args.phase)
    print(table(results, baseline=args.baseline, difference=args.difference, **of_metric))
    print(f"\n{notes(results, baseline=args.baseline, **of_metric)}")
    print(f"\n{provenance(results)}")
    if args.figure:
      draw_curves(results, args.metric, args.over, args.figure, phase=args.phase)
      print(f"curves: {args.figure}")
    if args.differences:
      draw_differences(results, args.differences, baseline=args.baseline, **of_metric)
      print(f"differences: {args.differences}")
  except (ValueError, OSError, ImportError) as error:
    parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
  main()
