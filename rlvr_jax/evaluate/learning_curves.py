"""Figures of one run over its updates: the curves to watch during training.

Every function plots records from `read_metrics` into matplotlib's `axes`. Quantities that a run
does not have are omitted.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr_jax.evaluate.curves import save_figure
from rlvr_jax.evaluate.figures import COLORS, legend_outside

Record = Mapping[str, Any]

# Smallest upper limits of axes; lower curves are rounding noise and should look like 0.
SMALLEST_KL = 1e-3  # nats per token
SMALLEST_FRACTION = 0.02
ROUNDING_KL = 1e-6  # nats per token; below this, the behavior policy is the trained policy
OF_K = ("result", "success", "behavior", "entropy")  # colors of pass@k, by ascending k


def plot_accuracy(axes: Any, records: Sequence[Record]) -> None:
  """Plots the pass rate of the training rollouts, and held-out pass@k with 95 % intervals."""
  color = COLORS["reference"]
  _plot(axes, records, "train", "reward/pass_rate", "training rollouts", color=color, linewidth=1)
  for k, marker, meaning in zip(
    _evaluated_ks(records), itertools.cycle("os^v"), itertools.cycle(OF_K)
  ):
    color = COLORS[meaning]
    name = f"eval/pass@{k}"
    style = {"marker": marker, "markersize": 4, "color": color}
    _plot(axes, records, "eval", name, f"held-out pass@{k}", **style)
    _band(axes, records, "eval", f"{name}_low", f"{name}_high", color=color)
  _finish(axes, "Accuracy, 95 % intervals", "fraction solved", (0, 1))


def plot_groups(axes: Any, records: Sequence[Record]) -> None:
  """Plots the shares of groups with both outcomes, only failures, and only successes."""
  names = ("groups/all_wrong", "groups/effective", "groups/all_correct")
  if not all(_series(records, "train", name)[0] for name in names):
    return
  steps, _ = _series(records, "train", names[0])
  shares = [_series(records, "train", name)[1] for name in names]
  colors = [COLORS[meaning] for meaning in ("failure", "effective", "success")]
  labels = ["all wrong", "effective: both", "all right"]
  axes.stackplot(steps, *shares, colors=colors, labels=labels, alpha=0.75, linewidth=0)
  axes.margins(x=0)
  _finish(
    axes, "Groups: only the effective ones teach", "share of the groups", (0, 1), reverse=True
  )


def plot_lengths(axes: Any, records: Sequence[Record]) -> None:
  """Plots the mean and the middle 80 % of response lengths.

  The title has the largest share of truncated responses.
  """
  color = COLORS["plain"]
  _plot(axes, records, "train", "response/length", "mean", color=color)
  label = "10th to 90th percentile"
  low, high = "response/length_p10", "response/length_p90"
  _band(axes, records, "train", low, high, color=color, label=label)
  _, truncated = _series(records, "train", "response/truncated")
  suffix = f"; truncated: at most {max(truncated):.1%}" if truncated else ""
  _finish(axes, f"Response length{suffix}", "tokens", (0, None))


def plot_entropy(axes: Any, records: Sequence[Record]) -> None:
  """Plots the entropy of the policy."""
  _plot(axes, records, "train", "policy/entropy", color=COLORS["entropy"])
  _finish(axes, "Policy entropy", "nats per token", (0, None))


def plot_shift(axes: Any, records: Sequence[Record]) -> None:
  """Plots the k3 estimate of KL(β‖π), and the fraction of clipped tokens.

  β is the behavior policy, and π is the policy.
  """
  color, clipped = COLORS["behavior"], COLORS["plain"]
  _plot(axes, records, "train", "behavior/kl_k3", color=color)
  _finish(axes, "Distance from the behavior policy", "k3, nats per token", (0, None))
  axes.yaxis.label.set_color(color)
  _set_minimum_range(axes, SMALLEST_KL)
  right_axes = axes.twinx()
  _plot(right_axes, records, "train", "loss/clip_fraction", color=clipped, linestyle="--")
  right_axes.set_ylabel("clipped or capped tokens (dashed)", color=clipped)
  right_axes.grid(visible=False)
  _set_minimum_range(right_axes, SMALLEST_FRACTION)


def plot_gradient_norm(axes: Any, records: Sequence[Record]) -> None:
  """Plots the norm of the gradient before clipping."""
  _plot(axes, records, "train", "update/gradient_norm", color=COLORS["plain"])
  _finish(axes, "Gradient norm before clipping", "global L2 norm", (0, None))


Panel = Callable[[Any, Sequence[Record]], None]
# Panel → metrics; the panel is empty if a run has none of them.
PANELS: dict[Panel, set[str]] = {
  plot_accuracy: {"reward/pass_rate", "eval/mean"},
  plot_groups: {"groups/effective"},
  plot_entropy: {"policy/entropy"},
  plot_lengths: {"response/length"},
  plot_shift: {"behavior/kl_k3"},
  plot_gradient_norm: {"update/gradient_norm"},
}


def panels_with_data(records: Sequence[Record]) -> list[Panel]:
  """The panels that have data in a run's records; rounding noise around 0 is no data."""
  names = {name for record in records for name in record}
  with_metrics = [panel for panel, metrics in PANELS.items() if metrics & names]
  return [panel for panel in with_metrics if panel is not plot_shift or _is_off_policy(records)]


def _is_off_policy(records: Sequence[Record]) -> bool:
  _, kl = _series(records, "train", "behavior/kl_k3")
  _, clipped = _series(records, "train", "loss/clip_fraction")
  return any(abs(value) > ROUNDING_KL for value in kl) or any(clipped)


def draw(records: Sequence[Record], path: str | os.PathLike[str]) -> bool:
  """Saves a figure of the panels that have data, in the format of the path's extension.

  Returns:
    Whether any panel has data; if not, nothing is saved.
  Raises:
    ImportError: matplotlib, the extra `plot`, is missing.
  """
  panels = panels_with_data(records)
  if not panels:
    return False
  rows = -(-len(panels) // 2)
  with save_figure(path, rows, 2, size=(12, 3 * rows), dpi=144) as grid:
    for axes, panel in zip(grid.flat, panels, strict=False):
      panel(axes, records)
    for axes in grid.flat[len(panels) :]:
      axes.remove()
  return True


def _evaluated_ks(records: Sequence[Record]) -> list[int]:
  names = {name.removeprefix("eval/pass@") for r in records if r["phase"] == "eval" for name in r}
  return sorted(int(name) for name in names if name.isdigit())


def _series(records: Sequence[Record], phase: str, key: str) -> tuple[list[int], list[float]]:
  """Steps and values of a metric, from the records that have it."""
  points = [record for record in records if record["phase"] == phase and key in record]
  return [record["step"] for record in points], [record[key] for record in points]


def _plot(
  axes: Any, records: Sequence[Record], phase: str, key: str, label: str = "", **style: Any
) -> None:
  steps, values = _series(records, phase, key)
  if steps:
    axes.plot(steps, values, label=label, **style)


def _band(
  axes: Any, records: Sequence[Record], phase: str, low: str, high: str, **style: Any
) -> None:
  (steps, lows), (_, highs) = _series(records, phase, low), _series(records, phase, high)
  if steps and len(lows) == len(highs):
    axes.fill_between(steps, lows, highs, alpha=0.2, linewidth=0, **style)


def _set_minimum_range(axes: Any, least: float) -> None:
  """Makes the y-axis end at `least` or above, and begin below 0, so that 0 is visible."""
  top = max(least, axes.get_ylim()[1])
  axes.set_ylim(-0.03 * top, top)


def _finish(
  axes: Any, title: str, ylabel: str, ylim: tuple[float, float | None], *, reverse: bool = False
) -> None:
  axes.set(title=title, xlabel="update", ylabel=ylabel)
  axes.set_ylim(*ylim)
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[1]:
    legend_outside(axes, reverse=reverse, fontsize="small")
