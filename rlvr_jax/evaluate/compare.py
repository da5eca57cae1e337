"""Compares the runs of a sweep: tables with differences paired by seed, and learning curves.

  python -m rlvr_jax.evaluate.compare runs/my_sweep --metric=eval/pass@1 --baseline=grpo
  python -m rlvr_jax.evaluate.compare runs/my_sweep --figure=curves.png --over=flops
  python -m rlvr_jax.evaluate.compare runs/my_sweep --differences=differences.png

A sweep writes one result per run, WORKDIR/RUN/result.json. A result has label, seed, commit,
command, seconds, layout, and `evaluations`, which has a list of values for each axis of
`curves.AXES` and each held-out metric. Experiments commit these results as one file, with a line
per run; the program reads such a file, too.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax.evaluate import curves
from rlvr_jax.evaluate.figures import COLORS, legend_outside, plot_difference
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
from rlvr_jax.storage.files import replace_file
from rlvr_jax.storage.places import parse_path

RESULT_FILE = "result.json"
METRIC = "eval/pass@1"
Result = Mapping[str, Any]

# --- results --------------------------------------------------------------------------------------


def evaluations(records: Iterable[curves.Record]) -> dict[str, list[float]]:
  """Axis or held-out metric → its values in a run's evaluations, in order.

  Args:
    records: the result of `read_metrics`.
  """
  held_out = [record for record in records if record["phase"] == "eval"]
  if not held_out:
    return {}
  axes = {axis: fields for axis, (_, fields) in curves.AXES.items()}
  columns = {axis: [sum(r[f] for f in fields) for r in held_out] for axis, fields in axes.items()}
  columns["seconds"] = [round(x, 2) for x in columns["seconds"]]
  names = [name for name in held_out[-1] if name.startswith("eval/")]
  in_all = [name for name in names if all(name in record for record in held_out)]
  return columns | {name: [record[name] for record in held_out] for name in in_all}


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads the results in a sweep's workdir, or in a file of results, in the order of the sweep.

  Results from a workdir have one more field, `workdir`: the folder of the run.

  Raises:
    ValueError: there are no results.
  """
  folder = parse_path("the path", path)
  none = ValueError(
    f"{path} has no results: give the --workdir of a sweep that has finished a run, or a file of"
    " results"
  )
  if folder.is_file():
    results = json.loads(folder.read_text(encoding="utf-8"))
    fields = {"label", "seed", "evaluations"}
    are_results = isinstance(results, list) and all(
      isinstance(result, dict) and fields <= result.keys() for result in results
    )
    if not results or not are_results:
      raise none
    return results
  results = []
  for file in folder.glob(f"*/{RESULT_FILE}"):
    result = json.loads(file.read_text(encoding="utf-8"))
    results.append(result | {"workdir": os.fspath(file.parent)})
  if not results:
    raise none
  return sorted(results, key=lambda result: (result["number"], result["workdir"]))


def write_results(path: pathlib.Path, results: Iterable[Result]) -> None:
  """Writes results to a file, one per line, without their field `workdir`."""
  rows = [{k: v for k, v in result.items() if k != "workdir"} for result in results]
  with replace_file(path) as file:
    file.write("\n".join(["[", ",\n".join(map(json.dumps, rows)), "]\n"]).encode())


def check_distinct(results: Iterable[Result]) -> None:
  """Raises ValueError if two results have the same label and seed, as of two sweeps."""
  seen = set()
  for result in results:
    run = result["label"], result["seed"]
    if run in seen:
      raise ValueError(
        f"two results have the label {run[0]!r} and the seed {run[1]}: compare sweeps whose labels"
        " differ, or give one of them"
      )
    seen.add(run)


def group_by_label(results: Iterable[Result]) -> dict[str, list[Result]]:
  """Groups results by label, in the order of the results."""
  groups: dict[str, list[Result]] = {}
  for result in results:
    groups.setdefault(result["label"], []).append(result)
  return groups


def values_by_seed(
  results: Iterable[Result], value_of: Callable[[Result], float]
) -> dict[str, dict[int, float]]:
  """The value of each run, as label → seed → value."""
  return {
    label: {result["seed"]: value_of(result) for result in group}
    for label, group in group_by_label(results).items()
  }


def result_curve(
  result: Result, metric: str = METRIC, over: str = "updates", phase: str = "eval"
) -> tuple[curves.Floats, curves.Floats]:
  """The curve of a metric in one run, like `curves.curve`: positions and values, f64[N] each.

  Every result has its run's evaluations. Metrics of training are read from the run's workdir. A
  file of results may also have metrics of training over updates, in the fields `curves` and
  `train`. `curves` maps a metric to pairs (update, value). `train` maps a metric to its means over
  equally long spans of updates; the curve has each mean at the middle of its span.

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
      return curves.curve(_to_records(result["evaluations"]), metric, over)
    if "workdir" not in result:
      raise ValueError(
        f"the file of results has no curve of {metric!r} over {over!r}; give the workdir of the"
        " sweep instead"
      )
    return curves.curve(read_metrics(result["workdir"]), metric, over, phase)
  except ValueError as error:
    raise ValueError(f"{result['label']}, seed {result['seed']}: {error}") from error


def _to_records(columns: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
  """Converts evaluations to records.

  The first field of each axis has the axis's value; the axis's other fields are 0.
  """
  axes = {axis: fields for axis, (_, fields) in curves.AXES.items() if axis in columns}
  records = []
  for values in zip(*columns.values(), strict=True):
    record: dict[str, Any] = dict(zip(columns, values, strict=True)) | {"phase": "eval"}
    for axis, (first, *rest) in axes.items():
      record |= {first: record[axis], **dict.fromkeys(rest, 0)}
    records.append(record)
  return records


def final_value(result: Result, metric: str = METRIC, phase: str = "eval") -> float:
  """The last value of a metric."""
  return float(result_curve(result, metric, phase=phase)[1][-1])


def rise(result: Result, metric: str = METRIC) -> float:
  """The last value of a held-out metric minus the first."""
  values = result["evaluations"][metric]
  return values[-1] - values[0]


# --- tables ---------------------------------------------------------------------------------------


def markdown_table(
  header: Sequence[str],
  rows: Mapping[str, Sequence[str]] | Iterable[tuple[str, Sequence[str]]],
  first: str = "run",
) -> str:
  """A Markdown table of rows, label → cells, or pairs of them where rows share a label.

  `first` is the heading of the labels.
  """
  pairs = rows.items() if isinstance(rows, Mapping) else rows
  lines = [f"| {first} | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
  return "\n".join(lines + [f"| {label} | {' | '.join(cells)} |" for label, cells in pairs])


def mean_cell(values: Sequence[float]) -> str:
  """A table cell: mean over seeds ± half-width of its 95 % interval.

  The half-width is omitted if all values are equal.
  """
  mean, half = mean_and_half_width(values)
  return f"{mean:.3g} ± {half:.1g}" if half else f"{mean:.3g}"


def difference_cell(difference: Difference, digits: int = 3) -> str:
  """A table cell: the mean difference paired by seed, with its 95 % interval.

  The interval is omitted if both its ends are equal at this number of digits. The differences may
  then be equal by chance. They do not show how much the differences of other seeds would vary.
  """
  edges = (difference.mean, difference.low, difference.high)
  mean, low, high = (f"{x:+.{digits}f}" for x in edges)
  return mean if low == high else f"{mean} [{low}, {high}]"


def interval_cell(result: Result, index: int, metric: str = METRIC) -> str:
  """A table cell: a held-out metric in evaluation `index`, with its 95 % interval over problems."""
  value, low, high = (result["evaluations"][f"{metric}{x}"][index] for x in ("", "_low", "_high"))
  return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def error_over_problems(results: Sequence[Result], metric: str = METRIC) -> float | None:
  """Standard error over problems of a metric's last value, averaged over runs; None if unknown.

  All runs have the same problems, so more seeds do not reduce this error.
  """
  names = [f"{metric}_low", f"{metric}_high"]
  with_interval = [
    r["evaluations"] for r in results if all(name in r["evaluations"] for name in names)
  ]
  if len(with_interval) < len(results):
    return None
  return statistics.mean(
    standard_error_of_interval(*(columns[name][-1] for name in names)) for columns in with_interval
  )


def differences(
  results: Iterable[Result], baseline: str, value_of: Callable[[Result], float] = final_value
) -> dict[str, Difference | None]:
  """Each label's difference to the baseline, paired by seed; None with fewer than two shared seeds.

  Args:
    results: the result of `read_results`.
    baseline: a label.
    value_of: result → the value to compare.
  Raises:
    ValueError: no run has the baseline's label.
  """
  values = values_by_seed(results, value_of)
  if baseline not in values:
    raise ValueError(f"no run has the label {baseline!r}; choose one of {list(values)}")
  reference = values.pop(baseline)
  return {
    label: paired_difference(by_seed, reference) if len(by_seed.keys() & reference) > 1 else None
    for label, by_seed in values.items()
  }


def other_labels(results: Iterable[Result], baseline: str) -> list[str]:
  """The labels of the results, without the baseline's.

  Raises:
    ValueError: no run has the baseline's label, or all runs have it.
  """
  labels = list(group_by_label(results))
  if baseline not in labels:
    raise ValueError(f"no run has the label {baseline!r}; choose one of {labels}")
  if len(labels) == 1:
    raise ValueError(f"all runs have the label {baseline!r}: add runs of another method")
  return [label for label in labels if label != baseline]


def adjusted_p(by_label: Mapping[str, Difference | None]) -> dict[str, float]:
  """Each label's p-value, adjusted by Holm's procedure.

  Labels whose difference does not vary between seeds, or is not finite, are left out.
  """
  p = {label: x.p for label, x in by_label.items() if x and 0 < x.deviation < math.inf}
  return dict(zip(p, holm(list(p.values())).tolist(), strict=True))


HEADER = (
  *("seeds", "last value", "s.e. over seeds", "s.e. over problems"),
  *("difference", "95 %, t", "95 %, bootstrap", "p", "p, Holm"),
)


DASHES = (
  "A dash stands for a missing value. The baseline has no difference to itself. A label"
  " that shares fewer than two seeds with the baseline has no difference either. A difference that"
  " is the same for every seed, or not finite, has only a mean. One seed has no error over seeds. A"
  " metric without an interval has no error over problems."
)


def comparison_table(
  results: Sequence[Result],
  *,
  metric: str = METRIC,
  baseline: str | None = None,
  difference: float = 0.02,
  phase: str = "eval",
) -> str:
  """A Markdown table with a row per label and its difference to the baseline, paired by seed.

  Args:
    results: the result of `read_results`.
    metric: the metric whose last value is compared.
    baseline: a label; None for the first result's label.
    difference: a true difference; the last column has the number of seeds that would detect it.
    phase: phase of the records with the metric; "train" needs the workdirs of the runs.
  Raises:
    ValueError: a run lacks the metric, or no run has the baseline's label.
  """
  baseline = results[0]["label"] if baseline is None else baseline
  by_label = differences(results, baseline, lambda result: final_value(result, metric, phase))
  adjusted = adjusted_p(by_label)
  rows = {}
  for label, group in group_by_label(results).items():
    values = [final_value(result, metric, phase) for result in group]
    over_problems = error_over_problems(group, metric)
    rows[label] = [str(len(values)), f"{statistics.mean(values):.4g}"]
    rows[label] += [f"{standard_error_over_seeds(values):.2g}" if len(values) > 1 else "–"]
    rows[label] += ["–" if over_problems is None else f"{over_problems:.2g}"]
    rows[label] += _difference_cells(by_label.get(label), adjusted.get(label), difference)
  return markdown_table([*HEADER, f"seeds for {difference:g}"], rows)


def _difference_cells(
  measured: Difference | None, adjusted: float | None, difference: float
) -> list[str]:
  """Table cells on the difference to the baseline; only its mean if it is equal for all seeds."""
  if measured is None:
    return ["–"] * 6
  if adjusted is None:
    return [f"{measured.mean:+.4f}", *["–"] * 5]
  num_seeds = seeds_needed(measured.deviation, difference)
  return [
    f"{measured.mean:+.4f}",
    f"[{measured.low:+.4f}, {measured.high:+.4f}]",
    f"[{measured.bootstrap_low:+.4f}, {measured.bootstrap_high:+.4f}]",
    f"{measured.p:.2g}",
    f"{adjusted:.2g}",
    f"{num_seeds}",
  ]


def provenance(results: Iterable[Result]) -> str:
  """One line with the commits of the results, and one line with their devices."""
  results = list(results)
  lines = []
  for field in ("commit", "device"):
    counts = collections.Counter(_provenance_value(result, field) for result in results)
    runs = ", ".join(f"{value} ({count} runs)" for value, count in counts.items())
    lines.append(f"{field}: {runs}")
  return "\n".join(lines)


def _provenance_value(result: Result, name: str) -> str:
  value = (result.get("layout") or {}).get(name) if name == "device" else result.get(name)
  return str(value or "not recorded")


# --- figures --------------------------------------------------------------------------------------


def plot_differences(
  axes: Any,
  results: Sequence[Result],
  baseline: str,
  value_of: Callable[[Result], float] = final_value,
  *,
  name: str = METRIC,
) -> None:
  """Plots differences to the baseline, paired by seed: a row per label, in the given order.

  A row has a dot for each shared seed. A row of two shared seeds or more also has the dots' mean. A
  row of `curves.SEEDS_FOR_BAND` shared seeds or more also has the mean's 95 % interval by Student's
  t.

  Args:
    axes: axes of matplotlib.
    results: the result of `read_results`.
    baseline: a label.
    value_of: result → the value to compare.
    name: name of the value, for the axis.
  Raises:
    ValueError: see `other_labels`.
  """
  labels = other_labels(results, baseline)
  values = values_by_seed(results, value_of)
  names = []
  for row, label in enumerate(labels):
    shared = sorted(values[label].keys() & values[baseline].keys())
    dots = [values[label][seed] - values[baseline][seed] for seed in shared]
    enough = len(shared) >= curves.SEEDS_FOR_BAND
    difference = paired_difference(values[label], values[baseline]) if enough else None
    plot_difference(axes, row, dots, difference)
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
  """Saves the figure of `plot_differences` for the last values of a metric.

  For arguments see `comparison_table`.

  Raises:
    ImportError: matplotlib, the extra `plot`, is missing.
  """
  baseline = results[0]["label"] if baseline is None else baseline
  height = 1.2 + 0.35 * len(other_labels(results, baseline))
  with curves.save_figure(path, size=(8, height)) as axes:
    plot_differences(
      axes, results, baseline, lambda result: final_value(result, metric, phase), name=metric
    )


def draw_curves(
  results: Sequence[Result], metric: str, over: str, path: str, *, phase: str = "eval"
) -> None:
  """Saves a figure of a metric's curves by label, with means over seeds and intervals.

  Raises:
    ImportError: matplotlib, the extra `plot`, is missing.
  """
  by_label = {
    label: [result_curve(result, metric, over, phase) for result in group]
    for label, group in group_by_label(results).items()
  }
  with curves.save_figure(path, size=(8, 4)) as axes:
    curves.plot_curves(axes, by_label, metric, over)


# --- the program ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
  """Prints a table and saves figures; see the module's docstring."""
  raw = argparse.RawDescriptionHelpFormatter
  parser = argparse.ArgumentParser(
    "rlvr_jax.evaluate.compare", description=__doc__, formatter_class=raw
  )
  parser.add_argument("paths", nargs="+", help="workdirs of sweeps, or files of results")
  parser.add_argument("--metric", default=METRIC, help=f"default: {METRIC}")
  parser.add_argument("--baseline", help="label to compare with; default: the first")
  parser.add_argument(
    "--difference",
    type=float,
    default=0.02,
    help="a true difference; the last column has the number of seeds that would detect it",
  )
  parser.add_argument(
    "--phase", choices=("eval", "train"), default="eval", help="phase of the metric"
  )
  parser.add_argument("--figure", help="file for the curves, such as curves.png")
  parser.add_argument("--differences", help="file for a figure of the differences to the baseline")
  parser.add_argument("--over", choices=list(curves.AXES), default="updates", help="axis of curves")
  args = parser.parse_args(argv)
  try:
    results = [result for path in args.paths for result in read_results(path)]
    check_distinct(results)
    options = dict(metric=args.metric, phase=args.phase, baseline=args.baseline)
    print(comparison_table(results, difference=args.difference, **options))
    print(f"\n{DASHES}")
    print(f"\n{provenance(results)}")
    if args.figure:
      draw_curves(results, args.metric, args.over, args.figure, phase=args.phase)
      print(f"curves: {args.figure}")
    if args.differences:
      draw_differences(results, args.differences, **options)
      print(f"differences: {args.differences}")
  except (ValueError, OSError, ImportError) as error:
    parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
  main()
