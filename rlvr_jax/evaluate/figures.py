"""Colors, legends, plots of differences and heat-maps that figures share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr_jax.evaluate.paired import Difference

# One meaning per color, in all figures: the color-blind-safe palette of Okabe and Ito.
COLORS = {
  "success": "#0072B2",
  "failure": "#D55E00",
  "result": "#009E73",  # the result of a method: held-out accuracy, A', its loss
  "plain": "#000000",  # the same without the method, or an unsigned quantity
  "behavior": "#E69F00",  # the behavior policy, and the distance from it
  "effective": "#56B4E9",  # effective counts: ESS, n_eff, PR, effective groups
  "entropy": "#CC79A7",
  "reference": "#8C8C8C",  # bounds, limits, reference levels
}

DPI = 72  # of a notebook's page; pictures have twice this resolution

# Colors of several methods in one figure, in order, if no meaning above applies; after the
# last one they repeat with another line style.
METHODS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
LINES = ("-", "--", ":", "-.")


def set_style() -> None:
  """Sets the style of a notebook's figures: twice the resolution of the page, legible text."""
  from cycler import cycler
  from matplotlib import rcParams

  rcParams.update(
    {
      "figure.dpi": DPI,
      "savefig.dpi": 2 * DPI,
      "figure.constrained_layout.use": True,
      "axes.prop_cycle": cycler(color=list(COLORS.values())),
      "axes.grid": True,
      "axes.spines.top": False,
      "axes.spines.right": False,
      "grid.alpha": 0.3,
      "font.size": 11.0,
      "axes.titlesize": 11.0,
      "legend.frameon": False,
      "mathtext.fontset": "cm",  # formulas look as in the text
    }
  )
  if "IPython" in sys.modules:
    from matplotlib_inline import backend_inline

    backend_inline.set_matplotlib_formats("retina")  # double resolution, displayed at normal size


def method_style(index: int) -> dict[str, Any]:
  """Options of `plot` for the curve of a method, by its index in the figure."""
  cycle, color = divmod(index, len(METHODS))
  return {"color": METHODS[color], "linestyle": LINES[cycle % len(LINES)]}


def legend_outside(axes: Any, **options: Any) -> None:
  """Puts the legend to the right of `axes`, outside the data; `options` go to `axes.legend`."""
  axes.legend(
    **{
      "loc": "upper left", "bbox_to_anchor": (1.02, 1), "borderaxespad": 0, "frameon": False,
      **options,
    }
  )  # fmt: skip


def plot_difference(
  axes: Any, row: int, seeds: Sequence[float], difference: Difference | None
) -> None:
  """Plots the difference of each seed as a dot, and their mean with its 95 % interval.

  Args:
    axes: axes of matplotlib.
    row: position on the y axis.
    seeds: differences of single seeds.
    difference: mean and interval; None if there are too few seeds for an interval. With two seeds,
      their mean is then plotted without an interval.
  """
  # The dots are beside the interval, which would hide them.
  axes.plot(
    seeds, [row + 0.28] * len(seeds), "o", markersize=3, color=COLORS["reference"], label="seed"
  )
  style = dict(markersize=5, color=COLORS["result"])
  if difference is not None:
    error = [[difference.mean - difference.low], [difference.high - difference.mean]]
    axes.errorbar(
      difference.mean, row, xerr=error, fmt="D", capsize=3, label="mean, 95 % (t)", **style
    )
  elif len(seeds) > 1:
    axes.plot(np.mean(seeds), row, "D", label="mean of two seeds", **style)


def plot_cosines(
  axes: Any, names: Sequence[str], matrix: np.ndarray, columns: Sequence[str] | None = None
) -> Any:
  """Plots a heat-map of cosines with their numbers; returns the image, for a color bar.

  Args:
    axes: axes of matplotlib.
    names: names of the M rows.
    matrix: f[M, N], in [−1, 1].
    columns: names of the N columns; None if rows and columns are the same vectors.
  """
  columns = names if columns is None else columns
  image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu")
  axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
  axes.set_yticks(range(len(names)), names)
  axes.grid(visible=False)
  for (i, j), value in np.ndenumerate(matrix):
    color = "white" if abs(value) > 0.6 else "black"
    axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
  return image
