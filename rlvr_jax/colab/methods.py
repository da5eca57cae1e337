"""Figures that compare methods on the same rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax import advantages, losses, parts
from rlvr_jax.advantages import Advantage
from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.evaluate.figures import plot_cosines
from rlvr_jax.losses import Loss
from rlvr_jax.train.same_rollouts import Comparison
from rlvr_jax.types import TrainBatch

# --- quantities -----------------------------------------------------------------------------------


class Coefficients(NamedTuple):
  """A of a success and of a failure by the number of successes; NaN if the group has none."""

  success: np.ndarray  # f32[G + 1], for 0 … G successes
  failure: np.ndarray  # f32[G + 1]


def coefficients(advantage: Advantage, group_size: int) -> Coefficients:
  """Coefficients of an estimator in groups with 0 … G successes; rewards are 0 and 1.

  A stateful estimator is in its initial state, with an initial entropy of 1 nat per token.
  """
  G = group_size
  rewards = (np.arange(G)[None] < np.arange(G + 1)[:, None]).astype(np.float32)
  state = advantage.init(jnp.float32(1.0))
  A = np.asarray(parts.advantages_of(advantage, jnp.asarray(rewards), state=state))
  nan = np.float32("nan")
  success = np.where(rewards[:, 0] == 1, A[:, 0], nan)
  failure = np.where(rewards[:, -1] == 0, A[:, -1], nan)
  return Coefficients(success, failure)


def token_weights(loss: Loss, ratios: np.ndarray, coefficient: float) -> np.ndarray:
  """Weights −∂ℓ/∂log π of the gradients of one-token responses' log-probabilities.

  Args:
    loss: policy loss; its batch statistics, if any, are of all N tokens.
    ratios: f32[N], ρ = π/β of each token.
    coefficient: A of all tokens.
  Returns:
    f32[N].
  """
  policy = jnp.log(jnp.asarray(ratios, jnp.float32))[None, :, None]
  A = jnp.full(policy.shape[:2], coefficient, jnp.float32)
  behavior = jnp.zeros(policy.shape)
  mask = jnp.ones(policy.shape)

  def mean_loss(logprobs: Any) -> Any:
    return parts.loss_of(loss, logprobs, behavior, A, mask)[0]

  return -len(ratios) * np.asarray(jax.grad(mean_loss)(policy)).reshape(-1)


# --- drawing --------------------------------------------------------------------------------------


def draw_cosines(comparison: Comparison, lag: int) -> None:
  """Draws all pairwise cosines at a lag."""
  from matplotlib import pyplot

  size = 2.5 + 0.45 * len(comparison.names)
  figure, axes = pyplot.subplots(figsize=(size + 1, size))
  image = plot_cosines(axes, comparison.names, comparison.cosines[lag])
  axes.set_title(f"{lag} updates after recording")
  figure.colorbar(image, ax=axes, shrink=0.8, label="cosine of update directions")


def plot_by_lag(axes: Any, comparison: Comparison, metric: str, label: str) -> None:
  """Plots a metric of every recipe, one per row; darker points have larger lags."""
  rows = np.arange(len(comparison.names))[::-1]
  shades = np.linspace(0.75, 0.0, len(comparison.lags))
  for lag, shade in zip(comparison.lags, shades, strict=True):
    values = [comparison.numbers[lag][name].get(metric, np.nan) for name in comparison.names]
    axes.plot(values, rows, "o", color=str(shade), markeredgecolor="0.3", label=f"lag {lag}")
  axes.set_yticks(rows, comparison.names)
  axes.set_xlabel(label)


def plot_recorded(axes: Any, batch: TrainBatch) -> None:
  """Plots the number of groups by their number of successes."""
  solved = np.asarray(batch.correct).sum(axis=1).astype(int)
  size = batch.correct.shape[1]
  counts = np.bincount(solved, minlength=size + 1)
  colors = [COLORS["failure"], *[COLORS["effective"]] * (size - 1), COLORS["success"]]
  axes.bar(np.arange(size + 1), counts, color=colors)
  axes.set(xlabel=f"successes among the {size} rollouts of a prompt", ylabel="prompts")
  axes.set_xticks(np.arange(size + 1))


def plot_coefficients(axes: Any, advantage: Advantage, group_size: int, title: str) -> None:
  """Plots A of successes and of failures against the number of successes in the group."""
  A = coefficients(advantage, group_size)
  counts = np.arange(group_size + 1)
  style = dict(marker="o", markersize=4)
  axes.plot(counts, A.success, color=COLORS["success"], label="success", **style)
  axes.plot(counts, A.failure, color=COLORS["failure"], label="failure", **style)
  axes.axhline(0, color=COLORS["reference"], linewidth=1, zorder=0)
  axes.set(title=title, xlabel="successes in the group")


def draw_coefficients(specs: Sequence[str], group_size: int) -> None:
  """Draws a panel for each estimator of `rlvr_jax.advantages`, by name."""
  by_name = {name: getattr(advantages, name)() for name in specs}
  figure, panels = _make_panels(len(by_name))
  for axes, (name, advantage) in zip(panels, by_name.items(), strict=True):
    plot_coefficients(axes, advantage, group_size, name)
  panels[0].set_ylabel("coefficient $A$")
  _add_shared_legend(figure, panels[0])


def plot_token_weights(axes: Any, loss: Loss, title: str, highest: float = 3.0) -> None:
  """Plots the weight of a token's gradient against its ratio, for A = 1 and A = −1."""
  ratios = np.linspace(0.02, highest, 400)
  for sign, meaning in ((1.0, "success"), (-1.0, "failure")):
    label = f"$A = {sign:+.0f}$"
    axes.plot(ratios, token_weights(loss, ratios, sign), color=COLORS[meaning], label=label)
  axes.axvline(1, color=COLORS["reference"], linestyle=":", linewidth=1, zorder=0)
  axes.axhline(0, color=COLORS["reference"], linewidth=1, zorder=0)
  axes.set(title=title, xlabel=r"ratio $\rho = \pi/\beta$")


def draw_token_weights(by_name: Mapping[str, Loss]) -> None:
  """Draws a panel for each loss."""
  figure, panels = _make_panels(len(by_name))
  for axes, (name, loss) in zip(panels, by_name.items(), strict=True):
    plot_token_weights(axes, loss, name)
  panels[0].set_ylabel(r"$-\partial\ell/\partial\log\pi$")
  _add_shared_legend(figure, panels[0])


def draw_clip(epsilon_low: float, epsilon_high: float) -> None:
  """Draws the token weights of `ppo_clip` at these two bounds."""
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(6, 3.2))
  loss = losses.ppo_clip(epsilon_low=epsilon_low, epsilon_high=epsilon_high)
  plot_token_weights(axes, loss, f"ppo_clip, interval [{1 - epsilon_low:g}, {1 + epsilon_high:g}]")
  axes.set(ylabel=r"$-\partial\ell/\partial\log\pi$", ylim=(-3.2, 3.2))
  legend_outside(axes)


def _make_panels(count: int) -> tuple[Any, list[Any]]:
  """Makes a figure with `count` panels in rows of three, with a common y axis."""
  from matplotlib import pyplot

  rows = -(-count // 3)
  size = (11, 0.6 + 2.5 * rows)
  figure, grid = pyplot.subplots(rows, 3, figsize=size, sharey=True, squeeze=False)
  for axes in grid.flat[count:]:
    axes.remove()
  return figure, list(grid.flat[:count])


def _add_shared_legend(figure: Any, axes: Any) -> None:
  figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
