"""Learning curves over any axis (updates, tokens, model FLOPs, seconds), and the time by phase.

The curves are read from metrics.jsonl. Every record of the phases "train" and "eval" has the totals
of tokens, FLOPs and seconds since the run first began. Resuming the run does not reset the totals.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from rlvr_jax.evaluate.figures import legend_outside, method_style
from rlvr_jax.evaluate.run_files import TIMINGS, read_metrics
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.storage.files import replace_file

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]

ELAPSED = f"{TIMINGS}elapsed_seconds"  # wall-clock time of the run so far
# Axis → its label, and the fields that add up to it. Only seconds count evaluations too.
AXES: dict[str, tuple[str, tuple[str, ...]]] = {
  "updates": ("updates", ("step",)),
  "generated_tokens": ("generated tokens", ("counter/tokens_generated",)),
  "trained_tokens": ("trained tokens", ("counter/tokens_trained",)),
  "flops": (
    "model FLOPs of generation, scoring and updates",
    ("counter/flops_generate", "counter/flops_score", "counter/flops_optimise"),
  ),
  "seconds": ("wall-clock seconds", (ELAPSED,)),
}
UNBOUNDED = (-math.inf, math.inf)
# With two seeds, Student's interval extends 12.7 standard errors to each side and hides the data.
SEEDS_FOR_BAND = 3
# Metric, as a regular expression → the range of its values.
_RANGES = {
  r"eval/gap_to_best_play": UNBOUNDED,  # best play less a sampled rate: below 0 by luck
  r"eval/.*|groups/.*|outcome/.*|.*/ess|response/truncated": (0.0, 1.0),
  r".*(pass_rate|_fraction\w*|trigger_rate|_share)": (0.0, 1.0),
  r".*(entropy|norm|participation_ratio|ratio_\w+)|(response|time|counter)/.*": (0.0, math.inf),
}


def metric_range(metric: str) -> tuple[float, float]:
  """The range of the values of a metric; `UNBOUNDED` if unknown."""
  matches = (limits for pattern, limits in _RANGES.items() if re.fullmatch(pattern, metric))
  return next(matches, UNBOUNDED)


def curve(
  records: Iterable[Record], metric: str, over: str = "updates", phase: str = "eval"
) -> tuple[Floats, Floats]:
  """The curve of a metric: its values, and the position of each value on an axis.

  Args:
    records: the result of `read_metrics`.
    metric: for example "eval/pass@1"; records without it are skipped.
    over: one of `AXES`.
    phase: phase of the records to use, "train" or "eval".
  Returns:
    x, y: both f64[records].
  Raises:
    ValueError: the axis is unknown, no record has the metric, or a record with the metric lacks the
      axis.
  """
  check_choice("curve", "over", over, AXES)
  phase_records = [record for record in records if record["phase"] == phase]
  points = [record for record in phase_records if metric in record]
  if not points:
    names = sorted({name for record in phase_records for name in record})
    is_of_updates = phase == "eval" and not metric.startswith("eval/")
    hint = "; metrics of updates need --phase=train" if is_of_updates else ""
    raise ValueError(
      f"curve: none of the {len(phase_records)} records of phase {phase!r} has the metric"
      f" {metric!r}{hint}; these records have {names}"
    )
  return _axis_positions(points, over), np.array([record[metric] for record in points], np.float64)


def _axis_positions(records: Sequence[Record], over: str) -> Floats:
  """The position of each record on the axis, f64[records]."""
  for record in records:
    missing = [field for field in AXES[over][1] if field not in record]
    if missing:
      available = [axis for axis, (_, fields) in AXES.items() if all(f in record for f in fields)]
      raise ValueError(
        f"curve: over = {over!r} needs {missing}, which the {record['phase']} record of step"
        f" {record['step']} lacks: the run was made before this axis existed. Choose one of"
        f" {available}, or repeat the run in another --workdir"
      )
  return np.array([[r[field] for field in AXES[over][1]] for r in records], np.float64).sum(axis=1)


class MeanCurve(NamedTuple):
  """A mean over seeds with its 95 % interval by Student's t; f64[num] each."""

  x: Floats
  mean: Floats
  low: Floats
  high: Floats


def mean_curve(
  curves: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
  num: int = 200,
  *,
  within: tuple[float, float] = UNBOUNDED,
) -> MeanCurve:
  """Mean over seeds of curves that are interpolated linearly on one grid of x.

  The grid spans the range of x that all curves share.

  Args:
    curves: (x, y) of each seed, x ascending; if several points have the same x, the last point is
      used.
    num: number of points of the grid.
    within: range of y, to which the interval is clipped.
  Raises:
    ValueError: there are fewer than two curves, or they share no range of x.
  """
  checked = [_check_curve(x, y) for x, y in curves]
  if len(checked) < 2:
    raise ValueError(
      f"mean_curve: an interval needs the curves of two seeds or more, got {len(checked)}; run more"
      " seeds"
    )
  first = max(x[0] for x, _ in checked)
  last = min(x[-1] for x, _ in checked)
  if first > last:
    ranges = ", ".join(f"{x[0]:g} to {x[-1]:g}" for x, _ in checked)
    raise ValueError(
      f"mean_curve: the curves share no range of x: {ranges}; train the runs for longer"
    )
  grid = np.linspace(first, last, num)
  values = np.stack([np.interp(grid, x, y) for x, y in checked])
  n = len(values)
  mean = values.mean(axis=0)
  half_width = special.stdtrit(n - 1, 0.975) * values.std(axis=0, ddof=1) / np.sqrt(n)
  low, high = (np.clip(edge, *within) for edge in (mean - half_width, mean + half_width))
  return MeanCurve(grid, mean, low, high)


def first_crossing(x: npt.ArrayLike, y: npt.ArrayLike, level: float) -> float:
  """The first x at which y reaches the level, by linear interpolation; NaN if it never does.

  Args:
    x: f[points], ascending.
    y: f[points]; values that are not finite are skipped.
    level: in y's unit.
  """
  x, y = _check_curve(x, y)
  x, y = x[np.isfinite(y)], y[np.isfinite(y)]
  reached = np.flatnonzero(y >= level)
  if not reached.size:
    return float("nan")
  i = reached[0]
  if i == 0:
    return float(x[0])
  share = (level - y[i - 1]) / (y[i] - y[i - 1])
  return float(x[i - 1] + share * (x[i] - x[i - 1]))


def _check_curve(x: npt.ArrayLike, y: npt.ArrayLike) -> tuple[Floats, Floats]:
  """Returns x and y as f64[points]; raises ValueError if they are not a curve."""
  x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
  if x.ndim != 1 or x.shape != y.shape or not x.size:
    raise ValueError(
      f"x and y of a curve must be arrays [points] of the same length ≥ 1; got the shapes {x.shape}"
      f" and {y.shape}"
    )
  if np.any(np.diff(x) < 0) or not np.isfinite(x).all():
    raise ValueError(
      "a curve's x is not finite or does not ascend; leave out points whose x is not finite, and"
      " sort the others by x"
    )
  return x, y


# --- the time ------------------------------------------------------------------------------------


def phase_seconds(records: Iterable[Record]) -> dict[str, float]:
  """Seconds by phase of a run's work, such as "generate", from the fields "time/<phase>_seconds".

  Phases may overlap.
  """
  seconds: dict[str, float] = {}
  for record in records:
    for name, value in record.items():
      if name.startswith(TIMINGS) and name.endswith("_seconds") and name != ELAPSED:
        phase = name.removeprefix(TIMINGS).removesuffix("_seconds")
        seconds[phase] = seconds.get(phase, 0.0) + value
  return seconds


def time_table(records: Iterable[Record]) -> dict[str, tuple[float, float]]:
  """The seconds of each phase, and their share of the run's wall-clock time, by phase.

  Shares add up to more than 1 if phases overlap, and to less if some time belongs to no phase.

  Raises:
    ValueError: no record has the wall-clock time.
  """
  records = list(records)
  elapsed = max((record[ELAPSED] for record in records if ELAPSED in record), default=0.0)
  if elapsed <= 0:
    raise ValueError(
      f"time_table: none of the {len(records)} records has {ELAPSED}: the run was made"
      " before this field existed; repeat the run in another --workdir"
    )
  return {phase: (seconds, seconds / elapsed) for phase, seconds in phase_seconds(records).items()}


# --- drawing --------------------------------------------------------------------------------------


def plot(
  axes: Any,
  runs: Mapping[str, Sequence[str | os.PathLike[str]]],
  metric: str,
  over: str,
  *,
  phase: str = "eval",
) -> None:
  """Plots, for each label, the curves of its seeds, and their mean with its interval.

  Args:
    axes: axes of matplotlib.
    runs: label → the workdirs of its seeds.
    metric, over, phase: as for `curve`.
  Raises:
    ValueError: see `curve`; the message begins with the workdir.
  """
  curves = {
    label: [_read_curve(workdir, metric, over, phase) for workdir in workdirs]
    for label, workdirs in runs.items()
  }
  plot_curves(axes, curves, metric, over)


def plot_curves(
  axes: Any,
  curves: Mapping[str, Sequence[tuple[Floats, Floats]]],
  metric: str,
  over: str,
  *,
  colors: Sequence[Any] | None = None,
) -> None:
  """Plots curves by label, as `plot` does; intervals are clipped to the metric's range.

  Labels with fewer than `SEEDS_FOR_BAND` seeds have no interval.

  Args:
    axes, metric, over: as for `plot`.
    curves: label → (x, y) of its seeds, f64[N] each.
    colors: a color per label; None for the colors of `figures.method_style`.
  """
  for index, (label, seeds) in enumerate(curves.items()):
    style = method_style(index) if colors is None else {"color": colors[index]}
    if len(seeds) == 1:
      axes.plot(*seeds[0], label=label, **style)
      continue
    for x, y in seeds:
      axes.plot(x, y, color=style["color"], alpha=0.3, linewidth=0.8)
    x, mean, low, high = mean_curve(seeds, within=metric_range(metric))
    axes.plot(x, mean, label=f"{label}, {len(seeds)} seeds", **style)
    if len(seeds) >= SEEDS_FOR_BAND:
      axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
  axes.set(xlabel=AXES[over][0], ylabel=metric)
  axes.grid(alpha=0.3)
  legend_outside(axes, fontsize="small")


@contextlib.contextmanager
def save_figure(
  path: str | os.PathLike[str],
  rows: int = 1,
  columns: int = 1,
  *,
  size: tuple[float, float] = (6.4, 4),
  dpi: int = 120,
) -> Iterator[Any]:
  """Context with the axes of a figure. On exit it saves the figure in the format of the extension.

  Args:
    path: path of the file.
    rows, columns: numbers of panels; with several panels, the axes are an array as from
      `pyplot.subplots`.
    size: width and height, inches.
    dpi: dots per inch.
  Raises:
    ImportError: matplotlib, the extra `plot`, is missing.
  """
  # A figure without pyplot has no window and no global state. Imported here, since matplotlib is an
  # extra.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=size, layout="constrained")
  FigureCanvasAgg(figure)
  yield figure.subplots(rows, columns)
  path = pathlib.Path(path)
  with replace_file(path) as file:  # which follows no link
    figure.savefig(file, dpi=dpi, format=path.suffix.removeprefix(".") or "png")


def draw(
  runs: Mapping[str, Sequence[str | os.PathLike[str]]],
  metric: str,
  over: str,
  path: str | os.PathLike[str],
  *,
  phase: str = "eval",
) -> None:
  """Saves the figure of `plot`; raises the ImportError of `save_figure`."""
  with save_figure(path, size=(8, 4)) as axes:
    plot(axes, runs, metric, over, phase=phase)


def _read_curve(
  workdir: str | os.PathLike[str], metric: str, over: str, phase: str
) -> tuple[Floats, Floats]:
  """The curve of the run in a workdir, see `curve`; errors begin with the workdir."""
  try:
    return curve(read_metrics(workdir), metric, over, phase)
  except ValueError as error:
    raise ValueError(f"{workdir}: {error}") from error
