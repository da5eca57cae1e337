"""Figures of colabs/fade.ipynb: gradient masses, FADE's controller, and the rank of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from rlvr_jax.advantages import Advantage, asym, fade, grpo, grpo_mean, maxrl, power_asym
from rlvr_jax.advantages.fade import FadeState, adaptive_exponents
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.colab import toy as toys
from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.toy import Recipe, Runs
from rlvr_jax.losses import reinforce
from rlvr_jax.ops import reductions
from rlvr_jax.parts import advantages_of
from rlvr_jax.rollouts.staleness import on_policy
from rlvr_jax.types import Array

ALPHA_MAX, DELTA_MIN = 3.0, 0.3
SUCCESSES, EVEN = "mass on successes, δ = 3", "even masses, δ = 1"
FAILURES, FADE = "mass on failures, δ = 0.3", "FADE"
STYLES: dict[str, dict[str, Any]] = {
  SUCCESSES: dict(color=COLORS["success"]),
  EVEN: dict(color=COLORS["plain"]),
  FAILURES: dict(color=COLORS["failure"]),
  FADE: dict(color=COLORS["result"]),
}


# --- masses ---------------------------------------------------------------------------------------


class Masses(NamedTuple):
  """Gradient masses of one prompt, by the number of its correct rollouts; f32[G + 1] each."""

  solve_rate: Array  # 0, 1/G, …, 1
  success: Array  # mS
  failure: Array  # mF


def masses(advantage: Advantage, *, group_size: int = 64) -> Masses:
  """mS and mF of a stateless estimator for groups with 0 … G successes."""
  G = group_size
  rewards = (jnp.arange(G) < jnp.arange(G + 1)[:, None]).astype(jnp.float32)

  def group_masses(rewards: Array) -> tuple[Array, Array]:
    group = rewards[None]
    valid = jnp.ones(group.shape, bool)
    A = advantages_of(advantage, group)
    metrics = reductions.values(gradient_masses(A, group, group, valid))
    return metrics["advantage/mass_success"], metrics["advantage/mass_failure"]

  return Masses(jnp.arange(G + 1) / G, *jax.vmap(group_masses)(rewards))


def plot_masses(axes: Any, advantage: Advantage) -> None:
  """Plots mS and mF of an estimator against the solve rate."""
  by_rate = masses(advantage)
  axes.plot(by_rate.solve_rate, by_rate.success, color=COLORS["success"], label="successes, $m_S$")
  axes.plot(
    by_rate.solve_rate, by_rate.failure, color=COLORS["failure"], linestyle="--",
    label="failures, $m_F$",
  )  # fmt: skip
  axes.set_xlabel("solve rate of the prompt")


def draw_masses(alpha: float = 2.0, delta: float = 0.5) -> None:
  """Draws the masses of three known estimators, and of FADE's form at α and δ."""
  estimators = {
    "GRPO": grpo(),
    "Dr. GRPO": grpo_mean(),
    "MaxRL": maxrl(),
    rf"FADE at $\alpha$ = {alpha:g}, $\delta$ = {delta:g}": power_asym(alpha=alpha, delta=delta),
  }
  _, panels = plt.subplots(1, 4, figsize=(11, 3.2))
  for axes, (name, advantage) in zip(panels, estimators.items(), strict=True):
    plot_masses(axes, advantage)
    axes.set(title=name, ylim=(0, None))
  panels[0].set_ylabel("gradient mass")
  legend_outside(panels[-1])


# --- controller -----------------------------------------------------------------------------------


def state_at(solve_rate: Array, entropy: Array, target_entropy: float) -> FadeState:
  """FADE's state at p̂, Ĥ and H*, of any shape."""
  p, H = jnp.broadcast_arrays(jnp.float32(solve_rate), jnp.float32(entropy))
  target = jnp.full_like(H, target_entropy)
  return FadeState(p, H, initial_entropy=H, target_entropy=target, updates=jnp.zeros((), jnp.int32))


def draw_controller(
  solve_rate: float = 0.4, entropy: float = 0.8, target_entropy: float = 1.2
) -> None:
  """Draws α over the solve rate, δ over the entropy, and the resulting masses."""

  def exponents(p: Any, H: Any) -> Any:
    state = state_at(p, H, target_entropy)
    return adaptive_exponents(state, alpha_max=ALPHA_MAX, delta_min=DELTA_MIN)

  rates = np.linspace(0, 1, 201)
  entropies = np.linspace(0, 2.5, 201)
  current = exponents(solve_rate, entropy)
  alpha = float(current.alpha)
  delta = float(current.delta)
  _, panels = plt.subplots(1, 3, figsize=(11, 3.4))
  panels[0].plot(rates, exponents(rates, entropy).alpha, color=COLORS["result"])
  panels[0].plot([solve_rate], [alpha], "o", color=COLORS["result"])
  panels[0].set(xlabel=r"moving solve rate, $\hat p$", ylabel=r"$\alpha$", ylim=(0.9, 3.1))
  panels[1].plot(entropies, exponents(solve_rate, entropies).delta, color=COLORS["entropy"])
  panels[1].plot([entropy], [delta], "o", color=COLORS["entropy"])
  panels[1].axvline(target_entropy, color=COLORS["reference"], linestyle=":", label="$H^*$")
  panels[1].set(xlabel=r"moving entropy, $\hat H$, nats", ylabel=r"$\delta$", ylim=(0, 1.05))
  panels[1].legend(loc="lower right")
  plot_masses(panels[2], power_asym(alpha=alpha, delta=delta))
  panels[2].set(title=rf"$\alpha$ = {alpha:.2f}, $\delta$ = {delta:.2f}", ylim=(0, None))
  panels[2].set_ylabel("gradient mass")
  legend_outside(panels[2])


# --- runs -----------------------------------------------------------------------------------------


def train_estimators(
  *, num_updates: int = 320, learning_rate: float = 60.0, seed: int = 0
) -> Mapping[str, Runs]:
  """Trains the tiny policy on-policy with three static estimators and with FADE, on four seeds."""
  toy = toys.make_toy(seed=seed)
  estimators = {SUCCESSES: asym(delta=3.0), EVEN: grpo_mean(), FAILURES: asym(delta=0.3)}
  estimators[FADE] = fade(alpha_max=ALPHA_MAX, delta_min=DELTA_MIN)
  return {
    name: toys.train(
      toy,
      Recipe(reinforce(), advantage=advantage, learning_rate=learning_rate),
      on_policy(),
      num_updates=num_updates,
    )
    for name, advantage in estimators.items()
  }


def draw_runs(runs: Mapping[str, Runs]) -> None:
  """Draws solve rate, entropy and mass difference over the updates."""
  labels = {
    "solve_rate": "solve rate of the policy",
    "policy/entropy": "entropy, nats per token",
    "advantage/mass_difference": "$m_S - m_F$ of the batch",
  }
  panels = toys.draw_runs(runs, STYLES, labels)
  panels[0].set_ylim(0, 1)
  panels[1].set_ylim(bottom=0)


def draw_funnel(runs: Mapping[str, Runs]) -> None:
  """Draws the rank-one fraction of the head's change, over updates and against the entropy."""
  _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
  toys.plot_runs(left, runs, STYLES, "head/rank_one_fraction", start=1)  # undefined at update 0
  for name, seed_runs in runs.items():
    entropy = seed_runs.metrics["policy/entropy"].mean(axis=0)[1:]
    fraction = seed_runs.metrics["head/rank_one_fraction"].mean(axis=0)[1:]
    right.plot(entropy, fraction, label=name, **STYLES[name])
    right.plot(entropy[-1], fraction[-1], "o", **STYLES[name])
  left.set(ylabel=r"$\sigma_1^2/\sum_i\sigma_i^2$ of $W_t - W_0$", ylim=(0, 1))
  right.set(xlabel="entropy, nats per token; training goes left")
  legend_outside(right)


def draw_controller_run(runs: Mapping[str, Runs]) -> None:
  """Draws FADE's state and its exponents over the updates of its runs."""
  fade_runs = runs[FADE]
  _, panels = plt.subplots(1, 3, figsize=(11, 3.4))
  curves: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("solve_rate", r"$\hat p$", "solve rate", dict(color=COLORS["result"])),
    ("entropy", r"$\hat H$", "entropy, nats per token", dict(color=COLORS["entropy"])),
    ("alpha", r"$\alpha$", "exponents", dict(color=COLORS["result"])),
  )
  for axes, (name, symbol, label, style) in zip(panels, curves, strict=True):
    toys.plot_runs(axes, {symbol: fade_runs}, {symbol: style}, f"advantage/fade_{name}")
    axes.set_ylabel(label)
  target = {"$H^*$": dict(color=COLORS["reference"], linestyle=":")}
  toys.plot_runs(panels[1], {"$H^*$": fade_runs}, target, "advantage/fade_target_entropy")
  delta = dict(color=COLORS["entropy"])
  toys.plot_runs(panels[2], {r"$\delta$": fade_runs}, {r"$\delta$": delta}, "advantage/fade_delta")
  batch = dict(color=COLORS["reference"], linewidth=0.8)
  toys.plot_runs(panels[0], {"the batch's": fade_runs}, {"the batch's": batch}, "reward/pass_rate")
  for axes in panels:
    axes.set_ylim(bottom=0)
    legend_outside(axes, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=2)
