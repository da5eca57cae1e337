"""Measurements, tables, figures and pages of the experiments on the testbed.

  python -m experiments.fade.tables --workdir=runs/evidence

adds the finished runs of the experiment's arms to `testbed.json`, writes its tables into the
experiment's page, and its figure. Without --workdir the tables are those of `testbed.json`.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.testbed.arms import GRPO, Arms
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.run_files import GEOMETRY_FOLDER, read_metrics
from rlvr_jax.geometry.diagnostics import cosine_gram
from rlvr_jax.ops.groups import group_mean
from rlvr_jax.storage.files import replacing

SPANS = 12  # of the updates of a run, over each of which a metric of training is averaged
LATE = 3  # evaluations at the end, whose mean is compared: single ones are noisier
HEAD = ("geometry/head_rank_one_fraction", "geometry/head_share")
DRIFT = ("geometry/advantage_logprob_covariance", "policy/entropy_change")
RATES = (0.0, 0.25, 0.5, 0.75, 1.0)  # edges of the solve rates of groups, for their masses
TRAIN = (
  *("policy/entropy", "loss/clip_fraction", "loss/ess", "behavior/ess", "behavior/ratio_max"),
  *("behavior/kl_k3", "behavior/ratio_max_negative", "reward/pass_rate", "response/length"),
  *("advantage/mass_success", "advantage/mass_failure", "advantage/fade_alpha"),
  *("advantage/fade_delta", "advantage/fade_solve_rate", "reweighting/alpha"),
  *("reweighting/shared_share", "veto/token_fraction", "veto/trigger_rate", "update/skipped"),
)
BEGIN, END = "<!-- tables: written by the command above -->", "<!-- end of tables -->"

Result = Mapping[str, Any]
OfRun = Callable[[Result], float | None]


# --- what is kept of a run ------------------------------------------------------------------------


def measured(workdir: str) -> dict[str, Any]:
  """Measurements that are added to a run's result.

  Returns:
    train: metric → means over `SPANS` equal spans of the updates; geometry: metric → mean over the
    measurements; last: the head's metrics at the last one; drift: pairs of −Cov(A, log π) and the
    change of entropy by the same update; masses: a row (groups, m_S, m_F) for each bin of solve
    rates; signs, signs_by_chance: see `sign_agreement`; seconds: of each phase; refreshes: of the
    rollouts.
  """
  records = list(read_metrics(workdir))
  train = [record for record in records if record["phase"] == "train"]
  names = [name for name in TRAIN if name in train[0]]
  geometry = [record for record in train if "geometry/participation_ratio" in record]
  of_geometry = [n for n in (geometry[0] if geometry else {}) if n.startswith("geometry/")]
  arrays = [_load(path) for path in sorted(pathlib.Path(workdir).glob(f"{GEOMETRY_FOLDER}/*.npz"))]
  signs, by_chance = sign_agreement(arrays)
  return {
    "train": {name: in_spans([record[name] for record in train]) for name in names},
    "geometry": {n: _rounded(np.mean([r[n] for r in geometry if n in r])) for n in of_geometry},
    "last": {n: _rounded(geometry[-1][n]) for n in of_geometry if n in HEAD},
    "drift": [[_rounded(r[n]) for n in DRIFT] for r in geometry if all(n in r for n in DRIFT)],
    "masses": masses(arrays),
    "signs": signs,
    "signs_by_chance": by_chance,
    "seconds": {name: round(x, 2) for name, x in curves.phase_seconds(records).items()},
    "refreshes": sum("time/sync_weights_seconds" in record for record in train),
  }


def _load(path: pathlib.Path) -> dict[str, np.ndarray]:
  with np.load(path) as file:
    return dict(file)


def _rounded(value: float) -> float:
  return float(f"{value:.6g}")


def in_spans(values: Sequence[float]) -> list[float]:
  """Means over `SPANS` spans of nearly equal length, fewer where there are fewer values."""
  spans = np.array_split(np.asarray(values, np.float64), min(SPANS, len(values)))
  return [_rounded(span.mean()) for span in spans]


def masses(measurements: Sequence[Mapping[str, np.ndarray]]) -> list[tuple[int, float, float]]:
  """Gradient masses m_S and m_F of groups, by their solve rate.

  m_S is the mean over a group of max(A, 0) of its correct rollouts, m_F that of max(−A, 0) of the
  others; A is the estimator's, before any reweighting.

  Args:
    measurements: each with coefficients f32[P, G] and rewards f32[P, G], of 0 and 1.
  Returns:
    For each bin of `RATES`, groups that are all right or all wrong left out: number of groups, mean
    m_S, mean m_F (0 without a group).
  """
  found: list[list[tuple[float, float]]] = [[] for _ in RATES[1:]]
  for arrays in measurements:
    A, rewards = np.asarray(arrays["coefficients"]), np.asarray(arrays["rewards"])
    valid = np.asarray(arrays.get("valid", np.ones(rewards.shape, bool)))
    rates = np.asarray(group_mean(rewards, valid))[:, 0]
    of_group = lambda a, r, v: gradient_masses(a[None], r[None], r[None], v[None])
    by_name = jax.vmap(of_group)(*map(jnp.asarray, (A, rewards, valid)))
    mean = lambda metric: np.asarray(metric.total / metric.weight, np.float64)
    success = mean(by_name["advantage/mass_success"])
    failure = mean(by_name["advantage/mass_failure"])
    bins = np.clip(np.searchsorted(RATES, rates, side="left") - 1, 0, len(found) - 1)
    for group in np.flatnonzero((rates > 0) & (rates < 1)):
      found[bins[group]].append((success[group], failure[group]))
  return [
    (len(rows), *(_rounded(x) for x in np.mean(rows, axis=0))) if rows else (0, 0.0, 0.0)
    for rows in found
  ]


def sign_agreement(
  measurements: Sequence[Mapping[str, np.ndarray]],
) -> tuple[float, float] | tuple[None, None]:
  """Share of the large off-diagonal cosines of two Gram matrices whose signs agree; and by chance.

  Large: the tenth of the entries whose absolute cosines under `gram` are largest. By chance: if the
  signs were independent, with the shares of positive ones that the two matrices have. Means over
  the measurements with `gram` and `gram_compared`, f32[B, B] both; None without one.
  """
  shares = []
  for arrays in measurements:
    if "gram_compared" in arrays:
      above = np.triu_indices(len(arrays["gram"]), k=1)
      first, second = (
        np.asarray(cosine_gram(jnp.asarray(arrays[name])))[above]
        for name in ("gram", "gram_compared")
      )
      large = np.abs(first) >= np.quantile(np.abs(first), 0.9)
      agree = np.mean(np.sign(first[large]) == np.sign(second[large]))
      a, b = np.mean(first[large] > 0), np.mean(second[large] > 0)
      shares.append((agree, a * b + (1 - a) * (1 - b)))
  if not shares:
    return None, None
  agreeing, chance = np.mean(shares, axis=0)
  return _rounded(agreeing), _rounded(chance)


# --- values of a run ------------------------------------------------------------------------------


def late(metric: str = compare.METRIC) -> OfRun:
  """Mean of the last `LATE` evaluations."""
  return lambda result: float(np.mean(result["evaluations"][metric][-LATE:]))


def peak(metric: str = compare.METRIC) -> OfRun:
  """The highest evaluation."""
  return lambda result: float(np.max(result["evaluations"][metric]))


def end(metric: str) -> OfRun:
  """Mean of a metric of training over its last span; None where the run has no such metric."""
  return lambda result: result["train"].get(metric, [None])[-1]


def over_training(metric: str) -> OfRun:
  """Mean of a metric of training over the run."""
  return lambda result: (
    float(np.mean(result["train"][metric])) if metric in result["train"] else None
  )


def of_geometry(metric: str, feature: str = "score", when: str = "geometry") -> OfRun:
  """A metric of the gradient geometry by a feature, `score` or `sampled`.

  A run's own feature has no ending in its metrics, the other one has its name.
  """
  own = f"geometry/{metric}"

  def value(result: Result) -> float | None:
    found = result[when]
    return found[f"{own}_{feature}"] if f"{own}_{feature}" in found else found.get(own)

  return value


def drift_correlation(result: Result) -> float | None:
  """Correlation over measurements of −Cov(A, log π) with the change of entropy; None below 3."""
  pairs = np.array(result["drift"], np.float64)
  if len(pairs) < 3 or not pairs.std(axis=0).all():
    return None
  return float(np.corrcoef(pairs.T)[0, 1])


# --- tables ---------------------------------------------------------------------------------------


def cell(values: Sequence[float | None]) -> str:
  """Mean with half of its 95 % interval, over the runs that have the value."""
  numbers = [value for value in values if value is not None]
  if not numbers:
    return "–"
  return compare.cell(numbers) if len(numbers) > 1 else f"{numbers[0]:.3g}"


def table(
  results: Sequence[Result],
  labels: Sequence[str],
  columns: Mapping[str, OfRun],
  *,
  compared: OfRun | None = None,
  baseline: str = GRPO,
  digits: int = 3,
) -> str:
  """Markdown: a row for each label that has runs, with its paired difference to the baseline.

  Args:
    columns: heading → value of a run; cells are means over seeds.
    compared: the value whose difference is taken, by seed; p is adjusted by Holm's procedure for
      the rows of this table.
    digits: decimal ones of the difference.
  """
  found = {label: runs for label, runs in compare.by_label(results).items() if label in labels}
  found = {label: found[label] for label in labels if label in found}
  if not found:
    return "No run of these arms has finished."
  rows = {label: [str(len(runs))] for label, runs in found.items()}
  for of_run in columns.values():
    for label, runs in found.items():
      rows[label].append(cell([of_run(run) for run in runs]))
  header = ["seeds", *columns]
  if compared is not None and baseline in found:
    flat = [run for runs in found.values() for run in runs]
    differences = compare.differences(flat, baseline, compared)  # type: ignore[arg-type]
    adjusted = compare.adjusted_p(differences)
    header += [f"less {baseline}'s, paired", "p, Holm"]
    for label in rows:
      d = differences.get(label)
      p = f"{adjusted[label]:.2g}" if label in adjusted else "–"
      rows[label] += [compare.difference_cell(d, digits) if d else "–", p]
  return compare.markdown(header, rows)


# --- figures --------------------------------------------------------------------------------------


class Panel(NamedTuple):
  """Curves over updates of some labels: a held-out metric, or one of training by spans."""

  title: str
  metric: str
  labels: Sequence[str]


def figure(results: Sequence[Result], panels: Sequence[Panel], path: pathlib.Path) -> None:
  """Saves a panel for each metric: single seeds, and their means with 95 % intervals."""
  by_label = compare.by_label(results)
  size = (5.0 * len(panels), 3.6)
  with curves.figure_of(path, 1, len(panels), size=size, dpi=90) as row:
    for axes, panel in zip(np.ravel(row), panels, strict=True):
      found = {label: _curves(by_label.get(label, []), panel.metric) for label in panel.labels}
      found = {label: of_label for label, of_label in found.items() if of_label}
      curves.plot_curves(axes, found, panel.metric, "updates")
      axes.set_title(panel.title)


def _curves(runs: Sequence[Result], metric: str) -> list[tuple[curves.Floats, curves.Floats]]:
  """The curves of the runs that have the metric."""
  having = [r for r in runs if metric in r["evaluations"] or metric in r["train"]]
  return [compare.curve_of(run, metric) for run in having]


# --- the program ----------------------------------------------------------------------------------


def results_of(
  path: pathlib.Path,
  measure: Callable[[str], dict[str, Any]],
  labels: Sequence[str] | None = None,
  argv: Sequence[str] | None = None,
) -> tuple[list[dict[str, Any]], bool]:
  """Reads the results of an experiment, and says whether they are new; parses its command line.

  With --workdir of a sweep its finished runs are written to the file first.

  Args:
    path: file of results.
    measure: workdir of a run → what is added to its result.
    labels: of the experiment's arms: runs of the sweep join those of the file, or replace them, by
      label and seed, and other labels are ignored. None: the sweep replaces the file.
    argv: the command line; None for that of the process.
  """
  parser = argparse.ArgumentParser()
  parser.add_argument("--workdir", help=f"of a sweep, whose runs are written to {path}")
  workdir = parser.parse_args(argv).workdir
  results = compare.read_results(path) if path.exists() else []
  if workdir is None:
    return results, False
  new = [
    result | measure(result["workdir"])
    for result in compare.read_results(workdir)
    if labels is None or result["label"] in labels
  ]
  if labels is not None:
    by_run = {(r["label"], r["seed"]): r for r in [*results, *new]}
    new = [by_run[run] for run in sorted(by_run, key=lambda run: (labels.index(run[0]), run[1]))]
  compare.write_results(path, new)
  return compare.read_results(path), True


def show(
  home: pathlib.Path,
  tables: Callable[[Sequence[Result]], str],
  measure: Callable[[str], dict[str, Any]] = lambda workdir: {},
  draw: Callable[[Sequence[Result], pathlib.Path], None] | None = None,
) -> None:
  """Prints the tables of an experiment's results.json; see `results_of` for the command line.

  Args:
    home: folder of the experiment.
    tables: results → text.
    measure: see `results_of`.
    draw: saves figures of new results in the folder.
  """
  results, are_new = results_of(home / "results.json", measure)
  if are_new and draw is not None:
    draw(results, home)
  print(tables(results))


def written_into(page: str, text: str) -> str:
  """Inserts `text` between the two marks of a page.

  Raises:
    ValueError: the page lacks the marks.
  """
  if page.count(BEGIN) != 1 or page.count(END) != 1:
    raise ValueError(f"the page must have the lines {BEGIN!r} and {END!r} once; add them")
  pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
  return re.sub(pattern, lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL)


def write(
  page: pathlib.Path,
  arms: Arms,
  tables: Callable[[Sequence[Result]], str],
  panels: Sequence[Panel],
  argv: Sequence[str] | None = None,
) -> None:
  """Prints the tables of an experiment, and writes them and the figure into its page."""
  results, _ = results_of(page.parent / "testbed.json", measured, list(arms), argv)
  text = tables(results) if results else "No run has finished."
  if results:
    figure(results, panels, page.parent / "testbed.png")
    text += f"\n\n![{'; '.join(panel.title for panel in panels)}](testbed.png)"
    text += "\n\n" + compare.provenance(results).replace("\n", "; ")
  with replacing(page) as file:
    file.write(written_into(page.read_text(encoding="utf-8"), text).encode())
  print(text)
