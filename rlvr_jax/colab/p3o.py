"""Figures of colabs/p3o.ipynb: effective sample size, P3O's weights, and higher temperatures."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from rlvr_jax import parts
from rlvr_jax.advantages import reinforce_signed
from rlvr_jax.colab import toy as toys
from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.toy import Recipe, Runs, Toy
from rlvr_jax.losses import Loss, p3o, ppo_clip, reinforce
from rlvr_jax.rollouts.staleness import on_policy, updates_per_refresh
from rlvr_jax.types import Array, TrainBatch

DRIFTS: Any = np.linspace(0.0, 2.0, 11)
FRESH = Recipe(reinforce())
P3O, CAP, CLIP = "P3O", "P3O without its KL term", "GRPO, clip 0.2"
WEIGHTED = "weights ρ, no bound"
LOSSES: dict[str, Loss] = {
  P3O: p3o(),
  CAP: p3o(kl_term=False),
  CLIP: ppo_clip(),
  WEIGHTED: p3o(cap="none", kl_term=False),
}
STYLES: dict[str, dict[str, Any]] = {
  P3O: dict(color=COLORS["result"]),
  CAP: dict(color=COLORS["result"], linestyle="--"),
  CLIP: dict(color=COLORS["plain"]),
  WEIGHTED: dict(color=COLORS["reference"], linestyle=":"),
}


class Case(NamedTuple):
  """A policy β, and a direction in which the policy π drifts away from β."""

  toy: Toy
  kernel: Array  # f32[D, V], of β
  direction: Array  # f32[D, V]; drift 1 changes a logit by about 1 nat


def make_case(*, num_updates: int = 80, seed: int = 0) -> Case:
  """Makes a case: β after some on-policy updates by GRPO, and a random direction."""
  toy = toys.make_toy(seed=seed)
  runs = toys.train(toy, Recipe(ppo_clip()), on_policy(), num_updates=num_updates, seeds=(seed,))
  kernel = jnp.asarray(runs.kernels[0, -1])
  return Case(toy, kernel, jax.random.normal(jax.random.key(seed), kernel.shape))


def rollouts(case: Case, policy: Array, *, group_size: int = 16, seed: int = 0) -> TrainBatch:
  """Graded rollouts of the policy with kernel `policy`, f32[D, V], with their log-probabilities."""
  random = jnp.asarray(toys.uniform_numbers(case.toy, seed, 0, group_size))
  return toys.make_batch(case.toy, Recipe(ppo_clip()), policy, random)


def drifted_logprobs(case: Case, drift: float | Array, batch: TrainBatch) -> Array:
  """log π of β's rollouts, f32[P, G, T], nats, for π at a distance `drift` from β."""
  return toys.statistics(case.toy, case.kernel + drift * case.direction, batch.tokens).logprobs


# --- quantities -----------------------------------------------------------------------------------


class Ess(NamedTuple):
  """e at each drift, f32[N]."""

  batch: Array  # over all tokens
  sequence: Array  # the mean over responses of e of a response's tokens


def ess(case: Case, drifts: Array) -> Ess:
  """Normalized effective sample sizes of the token ratios."""
  batch = rollouts(case, case.kernel)

  def ess_at(drift: Array) -> Ess:
    logprobs = drifted_logprobs(case, drift, batch)
    log_ratios = parts.log_ratios(logprobs, batch.behavior_logprobs, batch.mask)
    by_response = parts.normalized_ess(log_ratios, batch.mask, axis=-1)
    return Ess(parts.normalized_ess(log_ratios, batch.mask), jnp.mean(by_response))

  return jax.jit(jax.vmap(ess_at))(jnp.asarray(drifts))


class Forces(NamedTuple):
  """Force of a loss on the log-probability of each token; f32[tokens] each."""

  ratios: Array  # ρ
  forces: Array  # −n·∂L/∂log π for n tokens; > 0 makes a token more likely
  coefficients: Array  # A, ±1


def forces(case: Case, drift: float, loss: Loss) -> Forces:
  """Computes `Forces` on rollouts of β, with A = 1 for a success and −1 for a failure."""
  batch = rollouts(case, case.kernel)
  A = parts.advantages_of(reinforce_signed(), batch.rewards)
  logprobs = drifted_logprobs(case, drift, batch)
  behavior = batch.behavior_logprobs

  def loss_value(logprobs: Array) -> Array:
    return parts.loss_of(loss, logprobs, behavior, A, batch.mask)[0]

  gradient = jax.grad(loss_value)(logprobs)
  ratios = jnp.exp(parts.log_ratios(logprobs, behavior, batch.mask))
  token_coefficients = jnp.broadcast_to(A[..., None], ratios.shape)
  return Forces(ratios.ravel(), -gradient.ravel() * batch.mask.sum(), token_coefficients.ravel())


class Directions(NamedTuple):
  """A loss's update from rollouts of β, against that from fresh rollouts of π; f32[seeds, N]."""

  cosine: Array
  length: Array  # relative to the fresh update


def directions(case: Case, loss: Loss, drifts: Array, *, seeds: int = 8) -> Directions:
  """Computes `Directions` by drift; stale batches have 64 rollouts per prompt, fresh ones 512.

  Args:
    case: policy β and direction of the drift.
    loss: policy loss.
    drifts: f32[N].
    seeds: number of batches of β.
  """
  stale = [rollouts(case, case.kernel, group_size=64, seed=seed) for seed in range(seeds)]
  stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *stale)
  random = jnp.asarray(toys.uniform_numbers(case.toy, seeds, 0, 512))

  def compare_updates(case: Case, random: Array, drift: Array, batches: TrainBatch) -> Directions:
    policy = case.kernel + drift * case.direction
    fresh = _gradient(case.toy, FRESH, policy, toys.make_batch(case.toy, FRESH, policy, random))
    stale = jax.vmap(lambda batch: _gradient(case.toy, Recipe(loss), policy, batch))(batches)
    stale_norms = jnp.linalg.norm(stale, axis=-1)
    fresh_norm = jnp.linalg.norm(fresh)
    return Directions(stale @ fresh / (stale_norms * fresh_norm), stale_norms / fresh_norm)

  jitted = jax.jit(compare_updates)
  by_drift = [jitted(case, random, drift, stacked) for drift in jnp.asarray(drifts)]
  return jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=-1), *by_drift)


def _gradient(toy: Toy, recipe: Recipe, kernel: Array, batch: TrainBatch) -> Array:
  """Gradient of the recipe's loss with respect to the kernel, f32[D·V]."""
  A = parts.advantages_of(recipe.advantage, batch.rewards)

  def loss_value(kernel: Array) -> Array:
    logprobs = toys.statistics(toy, kernel, batch.tokens).logprobs
    return parts.loss_of(recipe.loss, logprobs, batch.behavior_logprobs, A, batch.mask)[0]

  return jax.grad(loss_value)(kernel).ravel()


def train_heated(
  case: Case, *, temperature: float = 1.5, num_updates: int = 120
) -> Mapping[str, Runs]:
  """Trains from β on rollouts sampled at another temperature, with four updates per refresh."""
  recipes = {
    "P3O, exact": Recipe(p3o(), temperature=temperature),
    "P3O, exact, no KL term": Recipe(p3o(kl_term=False), temperature=temperature),
    "P3O, raw": Recipe(p3o(), temperature=temperature, recorded="raw"),
    "GRPO, exact": Recipe(ppo_clip(), temperature=temperature),
  }
  train = functools.partial(
    toys.train, case.toy, schedule=updates_per_refresh(batches=4), num_updates=num_updates
  )
  return {label: train(recipe, first=case.kernel) for label, recipe in recipes.items()}


# --- drawing --------------------------------------------------------------------------------------


def draw_ratios(case: Case, drift: float = 0.6) -> None:
  """Draws the ratios of tokens of β at a drift, and e over all drifts."""
  _, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
  batch = rollouts(case, case.kernel)
  logprobs = drifted_logprobs(case, drift, batch)
  log_ratios = parts.log_ratios(logprobs, batch.behavior_logprobs, batch.mask)
  e = float(parts.normalized_ess(log_ratios, batch.mask))
  ratios = np.exp(np.asarray(log_ratios).ravel())
  bins = np.geomspace(0.02, 50, 61)
  clipped = np.clip(ratios, bins[0], bins[-1])
  capped = ratios > e
  left.hist(
    [clipped[~capped], clipped[capped]], bins=bins, stacked=True,
    color=[COLORS["behavior"], COLORS["plain"]],
    label=[r"weight $\rho$: $\rho \leq e$", r"capped, weight $e$: $\rho > e$"],
  )  # fmt: skip
  left.axvline(1, color=COLORS["reference"], linestyle=":", label=r"$\rho = 1$")
  left.axvline(e, color=COLORS["effective"], linewidth=2, label=f"cap $e$ = {e:.2f}")
  left.set(xscale="log", xlabel=r"$\rho = \pi/\beta$ of a token", ylabel="tokens")
  left.set_title(f"{capped.mean():.0%} of the tokens are capped")
  left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize="small")
  curves = ess(case, jnp.asarray(DRIFTS))
  right.plot(DRIFTS, curves.batch, color=COLORS["effective"], label="$e$ of the batch")
  label = "$e$ of one response, mean"
  right.plot(DRIFTS, curves.sequence, color=COLORS["effective"], linestyle="--", label=label)
  right.plot([drift], [e], "o", color=COLORS["effective"])
  right.set(xlabel="drift of the policy", ylabel="effective share of the tokens", ylim=(0, 1.03))
  legend_outside(right)


def draw_forces(case: Case, drift: float = 0.6) -> None:
  """Draws the forces of three losses on each token, against its ratio."""
  _, panels = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
  for axes, name in zip(panels, (CLIP, CAP, P3O), strict=True):
    by_token = jax.tree.map(np.asarray, forces(case, drift, LOSSES[name]))
    for sign, outcome in ((1, "success"), (-1, "failure")):
      selected = by_token.coefficients == sign
      axes.plot(
        by_token.ratios[selected], by_token.forces[selected], ".", markersize=3,
        color=COLORS[outcome], label=f"{outcome}, A = {sign}".replace("-", "−"),
      )  # fmt: skip
    axes.axhline(0, color=COLORS["reference"], linewidth=0.8)
    axes.set(xscale="log", yscale="symlog", xlim=(0.02, 50), title=name)
    axes.set_xlabel(r"$\rho = \pi/\beta$ of a token")
  panels[0].set_ylabel(r"$-n\,\partial L/\partial \log\pi$")
  legend_outside(panels[-1], markerscale=4)


def draw_directions(case: Case) -> None:
  """Draws the agreement of updates on stale and on fresh rollouts, over the drift."""
  _, panels = plt.subplots(1, 2, figsize=(11, 3.6))
  for name, loss in LOSSES.items():
    by_drift = directions(case, loss, jnp.asarray(DRIFTS))
    for axes, values in zip(panels, by_drift, strict=True):
      axes.plot(DRIFTS, np.mean(values, axis=0), label=name, **STYLES[name])
  panels[0].set(ylabel="cosine to the update of fresh rollouts", ylim=(-0.2, 1.02))
  panels[1].set(ylabel="length, over that of fresh rollouts", yscale="log")
  for axes in panels:
    axes.set_xlabel("drift of the policy")
  legend_outside(panels[1])


def draw_heat(runs: Mapping[str, Runs]) -> None:
  """Draws solve rate, entropy and e over the updates of runs with heated rollouts."""
  styles = dict(zip(runs, (STYLES[name] for name in (P3O, CAP, P3O, CLIP)), strict=True))
  styles["P3O, raw"] = dict(color=COLORS["behavior"])
  labels = {
    "solve_rate": "solve rate of the policy",
    "policy/entropy": "entropy, nats per token",
    "behavior/ess": "effective sample size, $e$",
  }
  panels = toys.draw_runs(runs, styles, labels)
  panels[0].set_ylim(0, 1)
  panels[2].set_ylim(0, 1.03)
