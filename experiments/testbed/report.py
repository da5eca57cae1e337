"""Measurements, tables, figures and pages that several experiments share.

  python -m experiments.steps.tables --workdir=runs/experiment_steps

adds the finished runs of a sweep to the `results.json` of an experiment, and writes the tables and
the figure of its page. Without --workdir it uses `results.json` as it is.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.paired import mean_and_half_width
from rlvr_jax.evaluate.run_files import GEOMETRY_FOLDER, read_metrics
from rlvr_jax.geometry.diagnostics import cosine_gram
from rlvr_jax.storage.files import replace_file

SPANS = 12  # spans of a run's updates, over each of which a training metric is averaged
LATE = 3  # last evaluations, whose mean is compared because single ones are noisy
GRPO = "GRPO"  # label of the baseline
HEAD = ("geometry/head_rank_one_fraction", "geometry/head_share")
TRAIN = (
  *("policy/entropy", "loss/clip_fraction", "loss/ess", "behavior/ess", "behavior/ratio_max"),
  *("behavior/kl_k3", "behavior/ratio_max_negative", "reward/pass_rate", "response/length"),
  *("advantage/mass_success", "advantage/mass_failure", "advantage/fade_alpha"),
  *("advantage/fade_delta", "advantage/fade_solve_rate", "reweighting/alpha"),
  *("reweighting/shared_share", "veto/token_fraction", "veto/trigger_rate", "update/skipped"),
)
BEGIN, END = "<!-- tables: written by the command above -->", "<!-- end of tables -->"

Result = Mapping[str, Any]
RunValue = Callable[[Result], float | None]


# --- measurements of a run ------------------------------------------------------------------------


def measure_run(workdir: str) -> dict[str, Any]:
  """Measures a finished run; the measurements are added to its result.

  Returns:
    train: metric → means over `SPANS` equal spans of the updates; geometry: metric → mean over the
    measurements; last: the head's metrics at the last measurement; signs, signs_by_chance: see
    `sign_agreement`.
  """
  records = list(read_metrics(workdir))
  train = [record for record in records if record["phase"] == "train"]
  of_updates = {name: [r[name] for r in train if name in r] for name in TRAIN}
  geometry = [record for record in train if "geometry/participation_ratio" in record]
  geometry_names = [n for n in (geometry[0] if geometry else {}) if n.startswith("geometry/")]
  paths = sorted(pathlib.Path(workdir).glob(f"{GEOMETRY_FOLDER}/*.npz"))
  arrays = [_load_arrays(path) for path in paths]
  signs, by_chance = sign_agreement(arrays)
  return {
    "train": {name: span_means(values) for name, values in of_updates.items() if values},
    "geometry": {n: _rounded(np.mean([r[n] for r in geometry if n in r])) for n in geometry_names},
    "last": {n: _rounded(geometry[-1][n]) for n in geometry_names if n in HEAD},
    "signs": signs,
    "signs_by_chance": by_chance,
  }


def _load_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  with np.load(path) as file:
    return dict(file)


def _rounded(value: float) -> float:
  return float(f"{value:.6g}")


def span_means(values: Sequence[float]) -> list[float]:
  """Means over `SPANS` spans of nearly equal length; over single values if there are fewer."""
  spans = np.array_split(np.asarray(values, np.float64), min(SPANS, len(values)))
  return [_rounded(span.mean()) for span in spans]


def sign_agreement(
  measurements: Sequence[Mapping[str, np.ndarray]],
) -> tuple[float, float] | tuple[None, None]:
  """Share of the large off-diagonal cosines of two Gram matrices whose signs agree; and by chance.

  Large cosines are the tenth of the entries with the largest absolute cosines under `gram`. The
  share by chance assumes independent signs, with each matrix's own share of positive cosines. Both
  are means over the measurements with `gram` and `gram_compared`, f32[B, B]; None without any.
  """
  shares = []
  for arrays in measurements:
    if "gram_compared" in arrays:
      upper = np.triu_indices(len(arrays["gram"]), k=1)
      first, second = (
        np.asarray(cosine_gram(jnp.asarray(arrays[name])))[upper]
        for name in ("gram", "gram_compared")
      )
      large = np.abs(first) >= np.quantile(np.abs(first), 0.9)
      agreement = np.mean(np.sign(first[large]) == np.sign(second[large]))
      a = np.mean(first[large] > 0)
      b = np.mean(second[large] > 0)
      shares.append((agreement, a * b + (1 - a) * (1 - b)))
  if not shares:
    return None, None
  agreement, chance = np.mean(shares, axis=0)
  return _rounded(agreement), _rounded(chance)


# --- values of a run ------------------------------------------------------------------------------


def late_mean(metric: str = compare.METRIC, last: int = LATE) -> RunValue:
  """Mean of the last evaluations, `LATE` of them on the testbed."""
  return lambda result: float(np.mean(result["evaluations"][metric][-last:]))


def peak_value(metric: str = compare.METRIC) -> RunValue:
  """Highest value over the evaluations."""
  return lambda result: float(np.max(result["evaluations"][metric]))


def fall_from_peak(result: Result) -> float:
  """Highest held-out pass@1 less the last."""
  return peak_value()(result) - compare.final_value(result)


def training_mean(metric: str) -> RunValue:
  """Mean of a training metric over the run; None if the run lacks the metric."""
  return lambda result: (
    float(np.mean(result["train"][metric])) if metric in result["train"] else None
  )


def geometry_value(metric: str, feature: str = "score", when: str = "geometry") -> RunValue:
  """A metric of the gradient geometry by a feature, `score` or `sampled`.

  In a run's metrics, the run's own feature has no suffix; the other feature's suffix is its name.
  """
  name = f"geometry/{metric}"

  def value(result: Result) -> float | None:
    values = result[when]
    return values[f"{name}_{feature}"] if f"{name}_{feature}" in values else values.get(name)

  return value


def peak_update(result: Result) -> float:
  """Update of the highest held-out pass@1."""
  evaluations = result["evaluations"]
  return float(evaluations["updates"][int(np.argmax(evaluations[compare.METRIC]))])


# --- runs of a sweep that may have only begun -----------------------------------------------------


def runs_of(results: Sequence[Result], labels: Iterable[str]) -> dict[str, list[Result]]:
  """Label → its results, in the order of the labels; an arm that has not run has none."""
  by_label = compare.group_by_label(results)
  return {label: by_label.get(label, []) for label in labels}


def final_differences(runs: Sequence[Result], others: Sequence[Result]) -> list[float]:
  """Held-out pass@1 at the end of runs, less that of the others' runs of the same seeds."""
  ends = {other["seed"]: compare.final_value(other) for other in others}
  return [compare.final_value(run) - ends[run["seed"]] for run in runs if run["seed"] in ends]


def name_missing(axes: Any, names: Iterable[str]) -> None:
  """Names what has not run in the legend of the axes."""
  for name in names:
    axes.plot([], [], " ", label=f"{name}: no run")


# --- tables ---------------------------------------------------------------------------------------


def cell(values: Sequence[float | None]) -> str:
  """Text of the mean and half of its 95 % interval, over the runs that have the value."""
  numbers = [value for value in values if value is not None]
  if not numbers:
    return "–"
  return compare.mean_cell(numbers) if len(numbers) > 1 else f"{numbers[0]:.3g}"


def table(
  results: Sequence[Result],
  labels: Sequence[str],
  columns: Mapping[str, RunValue],
  *,
  compared: RunValue | None = None,
  baseline: str = GRPO,
  digits: int = 3,
) -> str:
  """Makes a Markdown table with a row per label, with its paired difference to the baseline.

  Args:
    results: results of runs; labels without runs have no row and are named below the table.
    labels: labels of the rows, in order.
    columns: heading → value of a run; cells are means over seeds.
    compared: value whose difference is taken, by seed. None for no differences.
    baseline: label of the baseline.
    digits: decimal places of the difference.
  """
  by_label = compare.group_by_label(results)
  runs_by_label = {label: by_label[label] for label in labels if label in by_label}
  missing = ", ".join(label for label in labels if label not in by_label)
  note = f"No run of these arms has finished: {missing}."
  if not runs_by_label:
    return note
  rows = {label: [str(len(runs))] for label, runs in runs_by_label.items()}
  for run_value in columns.values():
    for label, runs in runs_by_label.items():
      rows[label].append(cell([run_value(run) for run in runs]))
  header = ["seeds", *columns]
  if compared is not None and baseline in runs_by_label:
    all_runs = [run for runs in runs_by_label.values() for run in runs]
    differences = compare.differences(all_runs, baseline, compared)  # type: ignore[arg-type]
    header += [f"less {baseline}'s, paired"]
    for label in rows:
      d = differences.get(label)
      rows[label] += [compare.difference_cell(d, digits) if d else "–"]
  text = compare.markdown_table(header, rows)
  return f"{text}\n\n{note}" if missing else text


# --- figures --------------------------------------------------------------------------------------


class Panel(NamedTuple):
  """Curves of some labels over updates, of a held-out metric or of a training metric by spans."""

  title: str
  metric: str
  labels: Sequence[str]


def draw_panels(results: Sequence[Result], panels: Sequence[Panel], path: pathlib.Path) -> None:
  """Saves a figure of the panels: single seeds, and their means with 95 % intervals.

  Up to three panels stand side by side.
  """
  columns = min(len(panels), 3)
  rows = -(-len(panels) // columns)
  with curves.save_figure(path, rows, columns, size=(5.0 * columns, 3.6 * rows), dpi=90) as found:
    of_all = np.ravel(found)
    for axes, panel in zip(of_all, panels, strict=False):
      plot_panel(axes, panel, results)
    for axes in of_all[len(panels) :]:
      axes.set_axis_off()


def plot_panel(axes: Any, panel: Panel, results: Sequence[Result]) -> None:
  """Plots the curves of a panel's labels over updates."""
  plot_runs(axes, runs_of(results, panel.labels), panel.metric)
  axes.set_title(panel.title)


def plot_runs(axes: Any, runs: Mapping[str, Sequence[Result]], metric: str) -> None:
  """Plots the curves of arms that have run; the legend names the others, too.

  Args:
    axes: matplotlib's.
    runs: name in the legend → results.
    metric: of the curves.
  """
  metric_curves = {name: _metric_curves(of_name, metric) for name, of_name in runs.items()}
  present = {name: pairs for name, pairs in metric_curves.items() if pairs}
  name_missing(axes, (name for name in metric_curves if name not in present))
  curves.plot_curves(axes, present, metric, "updates")


def _metric_curves(
  runs: Sequence[Result], metric: str
) -> list[tuple[curves.Floats, curves.Floats]]:
  """Curves of the runs that have the metric."""
  with_metric = [r for r in runs if metric in r["evaluations"] or metric in r["train"]]
  return [compare.result_curve(run, metric) for run in with_metric]


# --- the program ----------------------------------------------------------------------------------


def load_results(
  path: pathlib.Path,
  measure: Callable[[str], dict[str, Any]],
  labels: Sequence[str] | None = None,
  argv: Sequence[str] | None = None,
) -> tuple[list[dict[str, Any]], bool]:
  """Parses the command line, loads the results of an experiment, and returns whether they are new.

  Given the --workdir of a sweep, writes its finished runs to the file first.

  Args:
    path: file of results.
    measure: workdir of a run → fields that are added to its result.
    labels: labels of the experiment's arms; runs of the sweep are added to the file or replace runs
      with the same label and seed, and other labels are ignored. None: the sweep replaces the file.
    argv: command line; None for that of the process.
  """
  parser = argparse.ArgumentParser()
  parser.add_argument("--workdir", help=f"of a sweep, whose runs are written to {path}")
  workdir = parser.parse_args(argv).workdir
  results = compare.read_results(path) if path.exists() else []
  if workdir is None:
    return results, False
  sweep_results = [
    result | measure(result["workdir"])
    for result in compare.read_results(workdir)
    if labels is None or result["label"] in labels
  ]
  if labels is not None:
    by_run = {(r["label"], r["seed"]): r for r in [*results, *sweep_results]}
    order = sorted(by_run, key=lambda run: (labels.index(run[0]), run[1]))
    sweep_results = [by_run[run] for run in order]
  compare.write_results(path, sweep_results)
  return compare.read_results(path), True


def write_page(
  home: pathlib.Path,
  tables: Callable[[Sequence[Result]], str],
  measure: Callable[[str], dict[str, Any]] = lambda workdir: {},
  draw: Callable[[Sequence[Result], pathlib.Path], None] | None = None,
  labels: Sequence[str] | None = None,
  argv: Sequence[str] | None = None,
) -> None:
  """Writes and prints the tables of an experiment's README.md; see `load_results` for the flag.

  Args:
    home: folder of the experiment.
    tables: results → Markdown.
    measure: see `load_results`.
    draw: saves the figures of new results in the folder.
    labels: see `load_results`.
    argv: command line; None for that of the process.
  """
  results, are_new = load_results(home / "results.json", measure, labels, argv)
  if are_new and draw is not None:
    draw(results, home)
  write_tables(home / "README.md", tables(results), results)


def table_of_rises(results: Sequence[Result], labels: Sequence[str], *, starts: str) -> str:
  """Makes a Markdown table of held-out pass@1, with a row per run and a mean row per label.

  The mean rise of a label with several seeds has its t interval.

  Args:
    results: results of runs.
    labels: of its runs, in the order of the rows.
    starts: label of the runs whose first evaluations are the starts of all runs of their seeds.
  """
  first = {r["seed"]: r for r in results if r["label"] == starts}
  rows = []
  for label, runs in runs_of(results, labels).items():
    rises = []
    for result in runs:
      start, rise = "–", "–"
      if result["seed"] in first:
        begun = first[result["seed"]]
        rises.append(compare.final_value(result) - begun["evaluations"][compare.METRIC][0])
        start, rise = compare.interval_cell(begun, 0), f"{rises[-1]:+.3f}"
      end, seconds = compare.interval_cell(result, -1), f"{result['seconds']:.0f}"
      rows.append((label, [str(result["seed"]), start, end, rise, seconds]))
    if len(rises) > 1:
      mean, half = mean_and_half_width(rises)
      interval = f"**{mean:+.3f}** [{mean - half:+.3f}, {mean + half:+.3f}]"
      rows.append((f"**{label}**", ["mean", "", "", interval, ""]))
    if not runs:
      rows.append((label, ["–"] * 5))
  return compare.markdown_table(["seed", "start", "end", "rise", "seconds"], rows)


def draw_rises(results: Sequence[Result], home: pathlib.Path, labels: Sequence[str]) -> None:
  """Saves a figure of held-out pass@1 over updates, a curve per run."""
  with curves.save_figure(home / "curves.png", size=(6, 3.6), dpi=100) as axes:
    for color, (label, runs) in enumerate(runs_of(results, labels).items()):
      style = dict(color=f"C{color}")
      evaluations = [r["evaluations"] for r in runs]
      if evaluations and len(evaluations[0]["updates"]) == 1:  # a level, since nothing is trained
        end = np.mean([e[compare.METRIC][-1] for e in evaluations])
        axes.axhline(end, linestyle="--", label=f"{label} (mean)", **style)
        continue
      for index, columns in enumerate(evaluations):
        name = label if index == 0 else None  # once in the legend
        axes.plot(columns["updates"], columns[compare.METRIC], label=name, alpha=0.8, **style)
      name_missing(axes, [] if runs else [label])
    axes.set(xlabel="update", ylabel="held-out pass@1", ylim=(0, 1))
    axes.legend(fontsize="small")


def insert_text(page: str, text: str) -> str:
  """Returns the page with `text` between its two marks.

  Raises:
    ValueError: the page lacks the marks.
  """
  if page.count(BEGIN) != 1 or page.count(END) != 1:
    raise ValueError(f"the page must have the lines {BEGIN!r} and {END!r} once; add them")
  pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
  return re.sub(pattern, lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL)


def write_tables(page: pathlib.Path, text: str, results: Sequence[Result] = ()) -> None:
  """Prints the tables of a page, and writes them into it.

  Args:
    page: with the two comments between which they stand.
    text: the tables, as Markdown.
    results: whose commits and devices stand below them, where they were recorded.
  """
  if any(result.get("commit") for result in results):
    text += "\n\n" + compare.provenance(results).replace("\n", "; ")
  with replace_file(page) as file:
    file.write(insert_text(page.read_text(encoding="utf-8"), text).encode())
  print(text)
