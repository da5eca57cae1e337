"""Colors, legends and heat-maps that figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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

# Colors of several methods in one figure, in order, if no meaning above applies; after the
# last one they repeat with another line style.
METHODS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
LINES = ("-", "--", ":", "-.")


def method_style(index: int) -> dict[str, Any]:
  """Options of `plot` for the curve of a method, by its index in the figure."""
  cycle, color = divmod(index, len(METHODS))
  return {"color": METHODS[color], "linestyle": LINES[cycle % len(LINES)]}


def legend_outside(axes: Any, **options: Any) -> None:
  """Puts the legend of `axes` to its right, off the data; `options` are those of `legend`."""
  axes.legend(
    **{
      "loc": "upper left", "bbox_to_anchor": (1.02, 1), "borderaxespad": 0, "frameon": False,
      **options,
    }
  )  # fmt: skip


def plot_cosines(axes: Any, names: Sequence[str], matrix: np.ndarray) -> Any:
  """Plots a heat-map of pairwise cosines with their numbers; returns the image, for a color bar.

  Args:
    axes: axes of matplotlib.
    names: names of the M vectors.
    matrix: f[M, M], in [−1, 1].
  """
  image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu")
  axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
  axes.set_yticks(range(len(names)), names)
  axes.grid(visible=False)
  for (i, j), value in np.ndenumerate(matrix):
    color = "white" if abs(value) > 0.6 else "black"
    axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
  return image
