"""Figures of colabs/staleness.ipynb: lags of schedules, the veto, and who sampled what."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.patches import Patch

from rlvr_jax import parts
from rlvr_jax.colab import toy as toys
from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.toy import Recipe, Runs, Toy
from rlvr_jax.evaluate.figures import METHODS
from rlvr_jax.losses import ppo_clip
from rlvr_jax.ops import reductions
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.veto import SCOPES, negative_advantage_veto, trigger_tokens, vetoed_tokens
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.batches import token_versions
from rlvr_jax.rollouts.grading import FOREIGN
from rlvr_jax.rollouts.group import join
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.places import parse_path
from rlvr_jax.types import Array

FRESH, TIGHT = "on-policy, clip 0.2", "stages, clip 0.2"
RELAXED, VETOED = "stages, clip to [0, 5]", "stages, clip to [0, 5], veto"
STYLES: dict[str, dict[str, Any]] = {
  FRESH: dict(color=COLORS["reference"], linestyle=":"),
  TIGHT: dict(color=COLORS["plain"]),
  RELAXED: dict(color=COLORS["behavior"]),
  VETOED: dict(color=COLORS["result"]),
}
TRAINED, TRIGGER, EXCLUDED, EXCLUDED_TRIGGER = range(4)
STATES = {  # label and color of each state, in the order of `veto_states`
  "trained on": "#E8E8E8",
  "trigger, trained on": COLORS["behavior"],
  "vetoed: out of the loss": COLORS["plain"],
  "trigger, vetoed": COLORS["failure"],
}
THRESHOLDS = (1e-3, 1e-2, 1e-1, 0.3)


# --- schedules ------------------------------------------------------------------------------------


def lags(schedule: Schedule, num_updates: int) -> np.ndarray:
  """Number of updates between the sampling policy and the updated policy, i64[U]."""
  plan = np.array(staleness.plan(schedule, num_updates), int).reshape(-1, 2)
  return np.arange(num_updates) - plan[:, 1]


def named_schedules(num_updates: int, refresh: int, stages: int, lag: int) -> dict[str, Schedule]:
  """Schedules with a plan, by their spec in a configuration."""
  return {
    f"updates_per_refresh(batches={refresh})": staleness.updates_per_refresh(batches=refresh),
    f"stages(count={stages})": staleness.stages(count=stages, num_updates=num_updates),
    f"fixed_lag(lag={lag})": staleness.fixed_lag(lag=lag, num_updates=num_updates),
    f"simulated_asynchronous(max_lag={lag})": staleness.simulated_asynchronous(
      max_lag=lag, num_updates=num_updates, seed=0
    ),
  }


def draw_lags(num_updates: int = 64, refresh: int = 4, stages: int = 4, lag: int = 4) -> None:
  """Draws the lag of every update under four schedules."""
  _, panels = plt.subplots(2, 2, figsize=(11, 4.6), sharex=True)
  schedules = named_schedules(num_updates, refresh, stages, lag)
  for axes, (name, schedule) in zip(panels.flat, schedules.items(), strict=True):
    values = lags(schedule, num_updates)
    axes.step(range(num_updates), values, where="mid", color=COLORS["behavior"])
    axes.axhline(values.mean(), color=COLORS["reference"], linestyle=":", label="mean")
    axes.set_title(f"{name}: mean {values.mean():.1f}, largest {values.max()}")
    axes.set_ylim(bottom=0)
  for axes in panels[:, 0]:
    axes.set_ylabel("lag, updates")
  for axes in panels[1]:
    axes.set_xlabel("update")
  legend_outside(panels[0, 1])


# --- runs -----------------------------------------------------------------------------------------


class Stages(NamedTuple):
  """Runs with stages of stale rollouts, and an on-policy run."""

  toy: Toy
  runs: Mapping[str, Runs]
  length: int  # μ, updates per stage
  threshold: float  # κ of the run with the veto

  @property
  def ages(self) -> list[int]:
    """Selected ages of the last stage's rollouts, from 0 to the largest."""
    return sorted({round(age) for age in np.linspace(0, self.length - 1, 6)})


def train_stages(
  *,
  num_updates: int = 128,
  stages: int = 4,
  threshold: float = 0.1,
  learning_rate: float = 300.0,
  seed: int = 0,
) -> Stages:
  """Trains the tiny policy on-policy, and in stages with three losses, on four seeds."""
  toy = toys.make_toy(length=12, allowed=(0.6, 0.9), seed=seed)
  tight = ppo_clip()
  relaxed = ppo_clip(epsilon_low=1.0, epsilon_high=4.0)
  veto = parts.negative_advantage_veto(threshold=threshold)
  schedule = staleness.stages(count=stages, num_updates=num_updates)
  settings = {
    FRESH: (Recipe(tight, learning_rate=learning_rate), staleness.on_policy()),
    TIGHT: (Recipe(tight, learning_rate=learning_rate), schedule),
    RELAXED: (Recipe(relaxed, learning_rate=learning_rate), schedule),
    VETOED: (Recipe(relaxed, veto=veto, learning_rate=learning_rate), schedule),
  }
  runs = {
    name: toys.train(toy, recipe, schedule, num_updates=num_updates)
    for name, (recipe, schedule) in settings.items()
  }
  return Stages(toy, runs, num_updates // stages, threshold)


def draw_stages(stages: Stages) -> None:
  """Draws solve rate, effective sample size, and the share of tokens clipped or vetoed."""
  _, panels = plt.subplots(1, 3, figsize=(11, 3.8))
  toys.plot_runs(panels[0], stages.runs, STYLES, "solve_rate")
  toys.plot_runs(panels[1], stages.runs, STYLES, "behavior/ess")
  dropped = {name: stages.runs[name] for name in (FRESH, TIGHT, RELAXED)}
  toys.plot_runs(panels[2], dropped, STYLES, "loss/clip_fraction")
  toys.plot_runs(panels[2], {VETOED: stages.runs[VETOED]}, STYLES, "veto/token_fraction")
  labels = ("solve rate of the policy", "effective sample size", "tokens clipped or vetoed")
  for axes, label in zip(panels, labels, strict=True):
    axes.set(ylabel=label)
    for start in range(stages.length, stages.runs[TIGHT].kernels.shape[1] - 1, stages.length):
      axes.axvline(start, color=COLORS["reference"], linewidth=0.6)
  panels[0].set_ylim(0, 1)
  panels[1].set_ylim(0, 1.03)
  panels[2].set_ylim(bottom=0)
  legend_outside(panels[2])


# --- veto -----------------------------------------------------------------------------------------


def veto_states(
  ratios: Array, mask: Array, coefficients: Array, *, threshold: float, scope: str
) -> np.ndarray:
  """Effect of the veto on every token: TRAINED, TRIGGER, EXCLUDED or EXCLUDED_TRIGGER.

  Args:
    ratios: f32[P, G, T], ρ.
    mask: f32[P, G, T], 1 for response tokens.
    coefficients: f32[P, G], A.
    threshold: κ > 0.
    scope: scope of the veto, one of `ops.veto.SCOPES`.
  Returns:
    i64[P, G, T].
  """
  triggers = trigger_tokens(ratios, mask, coefficients, threshold=threshold, trigger="below")
  vetoed = vetoed_tokens(triggers, mask * (coefficients < 0)[..., None], scope=scope)
  return np.asarray(triggers, int) * TRIGGER + np.asarray(vetoed, int) * EXCLUDED


def draw_scopes(stages: Stages, age: int = 31, threshold: float = 0.1, rows: int = 24) -> None:
  """Draws ratios of failed rollouts of the last stage, and the tokens that each scope excludes.

  Args:
    stages: result of `train_stages`.
    age: updates since the rollouts were sampled, less than the length of a stage.
    threshold: κ.
    rows: number of rollouts; those with the smallest ratios are drawn.
  """
  check_between("draw_scopes", "age", age, low=0, high=stages.length - 1)
  runs = stages.runs[RELAXED]
  start = len(runs.batches) - stages.length
  batch, logprobs = toys.batch_at(stages.toy, runs, start, policy=start + age)
  ratios = jnp.exp(parts.log_ratios(logprobs, batch.behavior_logprobs, batch.mask))
  A = parts.advantages_of(runs.recipe.advantage, batch.rewards)
  smallest = np.where(np.asarray(A) < 0, np.asarray(ratios).min(axis=-1), np.inf).ravel()
  indices = np.argsort(smallest)[: min(rows, int(np.isfinite(smallest).sum()))]

  def select_rows(values: Any) -> np.ndarray:
    return np.asarray(values).reshape(smallest.size, -1)[indices]

  figure, panels = plt.subplots(1, 1 + len(SCOPES), figsize=(11, 4), sharey=True)
  norm = LogNorm(1e-2, 1e2)
  image = panels[0].imshow(select_rows(ratios), norm=norm, cmap="PuOr", aspect="auto")
  figure.suptitle("Tokens that the veto excludes from the loss, by scope", fontsize="medium")
  figure.colorbar(image, ax=panels[0], label=r"$\rho = \pi/\beta$ of a token", location="left")
  panels[0].set_title("ratios")
  panels[0].set_ylabel("failed rollouts, smallest ratio on top")
  colors = ListedColormap(list(STATES.values()))
  for axes, scope in zip(panels[1:], SCOPES, strict=True):
    states = veto_states(ratios, batch.mask, A, threshold=threshold, scope=scope)
    axes.imshow(select_rows(states), cmap=colors, vmin=-0.5, vmax=3.5, aspect="auto")
    axes.set_title(scope)
  for axes in panels:
    axes.set(xlabel="token", yticks=[])
    axes.grid(False)
  patches = [Patch(color=color, label=label) for label, color in STATES.items()]
  title = rf"trigger: $A < 0$, $\rho < {threshold:g}$"
  legend_outside(panels[-1], handles=patches, title=title)


def shares_by_age(
  stages: Stages, thresholds: Sequence[float] = THRESHOLDS
) -> tuple[np.ndarray, np.ndarray]:
  """Shares of vetoed tokens and of triggers among failures' tokens, by age in the last stage.

  Returns:
    (vetoed share of the loss tokens, trigger share of failures' tokens), f64[thresholds, μ] each.
  """
  runs = stages.runs[RELAXED]
  start = len(runs.batches) - stages.length
  batch, _ = toys.batch_at(stages.toy, runs, start)
  A = parts.advantages_of(runs.recipe.advantage, batch.rewards)
  kernels = jnp.asarray(runs.kernels[0, start : start + stages.length])

  def veto_metrics(kernel: Array) -> list[dict[str, Array]]:
    logprobs = toys.statistics(stages.toy, kernel, batch.tokens).logprobs
    vetoes = [negative_advantage_veto(threshold=threshold) for threshold in thresholds]
    metrics = [veto(logprobs, logprobs, batch, A)[2] for veto in vetoes]
    return [reductions.values(records) for records in metrics]

  by_threshold = jax.jit(jax.vmap(veto_metrics))(kernels)
  vetoed = np.array([row["veto/token_fraction"] for row in by_threshold], float)
  triggers = np.array([row["veto/trigger_rate"] for row in by_threshold], float)
  return vetoed, triggers


def draw_ages(stages: Stages) -> None:
  """Draws `shares_by_age`, with one line per threshold."""
  _, panels = plt.subplots(1, 2, figsize=(11, 3.6))
  labels = ("vetoed share of the loss tokens", "triggers, of failures' tokens")
  strengths = np.linspace(0.25, 1, len(THRESHOLDS))
  for axes, rows, label in zip(panels, shares_by_age(stages), labels, strict=True):
    for threshold, values, strength in zip(THRESHOLDS, rows, strengths, strict=True):
      name = rf"$\kappa$ = {threshold:g}"
      axes.plot(values, color=COLORS["behavior"], alpha=strength, label=name)
    axes.set(xlabel="age of the rollouts, updates", ylabel=label, ylim=(0, None))
  legend_outside(panels[1])


# --- fleets ---------------------------------------------------------------------------------------


class Sampled(NamedTuple):
  """What the store of a run says of who sampled its batches. Batch b is that of update b."""

  versions: list[np.ndarray]  # by batch: i32[R, T], version of each token; `FOREIGN` elsewhere
  samplers: list[list[str]]  # by batch: who sampled each of its R rollouts

  def lags(self, batch: int) -> np.ndarray:
    """i32[tokens], the updates between each token's policy and the update on the batch."""
    versions = self.versions[batch]
    return batch - versions[versions != FOREIGN]


def load_sampled(workdir: str | os.PathLike[str]) -> Sampled:
  """Reads who sampled the batches of an asynchronous run, in one program or in a fleet.

  Raises:
    StoreError: the workdir has no rollouts.
  """
  store = RolloutStore(parse_path("the workdir", workdir) / "rollouts", writable=False)
  found = Sampled([], [])
  for number in store.numbers():
    groups, _ = store.read(number)
    samples = [sample for group in groups for sample in group.samples]
    *rows, T = join(groups)["tokens"].shape
    lengths = np.reshape([sample["tokens"] for sample in samples], (*rows, 1))
    of_tokens = token_versions(groups)
    of_tokens = of_tokens if of_tokens.ndim == 3 else of_tokens[:, None, None]
    versions = np.where(np.arange(T) < lengths, of_tokens, FOREIGN)
    found.versions.append(versions.reshape(-1, T))
    found.samplers.append([sample.get("sampler", "this program") for sample in samples])
  return found


def draw_sampled(sampled: Sampled, batch: int | None = None) -> None:
  """Draws a batch's versions by token, the lags of all updates, and who sampled which batch.

  Args:
    sampled: of `load_sampled`.
    batch: whose tokens are drawn; None for the one that has most versions.
  """
  lags = [sampled.lags(number) for number in range(len(sampled.versions))]
  if batch is None:
    batch = int(np.argmax([len(np.unique(values)) for values in lags]))
  _, panels = plt.subplots(1, 3, figsize=(12, 4))
  _draw_versions(panels[0], sampled, batch)
  updates = np.arange(len(lags))
  for values, label, style in [
    ([x.max() for x in lags], "oldest token", dict(color=COLORS["behavior"])),
    ([x.mean() for x in lags], "mean over tokens", dict(color=COLORS["plain"])),
    ([x.min() for x in lags], "newest token", dict(color=COLORS["effective"])),
  ]:
    panels[1].step(updates, values, where="mid", label=label, **style)
  panels[1].set(title="lags", xlabel="update", ylabel="lag, updates", ylim=(0, None))
  panels[1].legend(loc="lower right")
  below = np.zeros(len(lags))
  for index, name in enumerate(sorted({x for names in sampled.samplers for x in names})):
    shares = np.array([names.count(name) / len(names) for names in sampled.samplers])
    color = METHODS[(index + 1) % len(METHODS)]
    panels[2].bar(updates, shares, bottom=below, width=1, color=color, label=name)
    below += shares
  panels[2].set(title="who sampled it", xlabel="batch", ylabel="share of rollouts", ylim=(0, 1))
  legend_outside(panels[2])


def _draw_versions(axes: Any, sampled: Sampled, batch: int) -> None:
  """Draws the version of each token of a batch, oldest rollouts on top."""
  versions = np.ma.masked_equal(sampled.versions[batch], FOREIGN)
  order = np.lexsort((versions.mean(axis=1), versions.min(axis=1)))
  low, high = int(versions.min()), int(versions.max())
  image = axes.imshow(
    versions[order], aspect="auto", cmap=plt.get_cmap("viridis", high - low + 1),
    vmin=low - 0.5, vmax=high + 0.5, interpolation="nearest",
  )  # fmt: skip
  axes.figure.colorbar(image, ax=axes, ticks=range(low, high + 1), label="version")
  axes.set(title=f"batch {batch}", xlabel="token", ylabel="rollouts", yticks=[])
  axes.grid(False)
