"""Figures of colabs/geometry.ipynb that `evaluate.geometry_plots` lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import ml_collections
import numpy as np

from rlvr_jax import advantages, reweighting
from rlvr_jax.advantages import Advantage
from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.runs import sums, trained
from rlvr_jax.evaluate import geometry_plots
from rlvr_jax.evaluate.geometry_plots import Measurement, load_geometry, ordered_cosines, salted
from rlvr_jax.ops.checks import check_between
from rlvr_jax.reweighting import Reweighting
from rlvr_jax.rollouts.batch import from_shard
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.specs import make
from rlvr_jax.storage.places import place
from rlvr_jax.train.setup.build import make_schedule

OWN = "its own"  # SALT's α or rank as it computes them
FIRST, OTHER = "first run", "other run"
STYLES: dict[str, dict[str, Any]] = {
  FIRST: dict(color=COLORS["plain"], marker="o", markersize=4),
  OTHER: dict(color=COLORS["result"], marker="s", markersize=4),
}


class Run(NamedTuple):
  """The measurements of a run, and its folder."""

  workdir: str
  measurements: list[Measurement]

  def at(self, update: int) -> Measurement:
    """The measurement before an update.

    Raises:
      ValueError: there is none.
    """
    for measurement in self.measurements:
      if measurement.update == update:
        return measurement
    raise ValueError(f"no measurement at update {update}; choose one of {self.updates}")

  @property
  def updates(self) -> list[int]:
    return [measurement.update for measurement in self.measurements]

  @property
  def prompts(self) -> range:
    return range(1, len(self.measurements[0].rewards) + 1)


def tiny(reweighted: str = "none") -> ml_collections.ConfigDict:
  """The quickstart with a smaller policy and 16 updates, measured before every second one.

  Args:
    reweighted: the reweighting, as `config.reweighting` names it.
  """
  c = sums(updates=16)
  c.warm_start.num_steps = 80
  c.batch.prompts, c.batch.group_size = 8, 16
  c.learning_rate = "linear(peak=1e-3)"
  c.evaluation.num_samples, c.evaluation.ks = 1, (1,)
  c.diagnostics.every = 2
  c.reweighting = reweighted
  return c


def load(workdir: str = "", other: str = "") -> dict[str, Run]:
  """The runs in two folders, by `FIRST` and `OTHER`; only the first where `other` is "".

  Without any folder, two tiny runs are trained in temporary ones: by GRPO, and by GRPO with SALT.

  Raises:
    FileNotFoundError: a folder does not exist, or has no measurements.
    ValueError: there is another run, but no first one.
  """
  if other and not workdir:
    raise ValueError(f"OTHER_WORKDIR = {other!r}, but WORKDIR is empty; set WORKDIR too")
  folders = [folder for folder in (workdir, other) if folder]
  if not folders:
    folders = [str(trained(tiny(rule))) for rule in ("none", "salt")]
  return {
    name: Run(folder, load_geometry(folder))
    for name, folder in zip((FIRST, OTHER), folders, strict=False)
  }


def components(advantage: str, salt: str) -> tuple[Advantage, Reweighting]:
  """The estimator and the reweighting that two strings name, such as "salt(alpha_min=0.5)".

  Raises:
    ValueError: a name or an argument is not known.
  """
  return (
    make("ADVANTAGE", advantages, advantage, Advantage),
    make("SALT", reweighting, salt, Reweighting),
  )


def salt_at(alpha: float | str = OWN, rank: int | str = OWN) -> Reweighting:
  """SALT with α and the rank k fixed, each where it is not `OWN`."""
  fixed: dict[str, Any] = {}
  if alpha != OWN:
    fixed |= dict(alpha_min=float(alpha), alpha_max=float(alpha))
  if rank != OWN:
    fixed |= dict(min_rank=rank, max_rank=rank)
  return reweighting.salt(**fixed)


def describe(run: Run) -> None:
  """Prints how many measurements there are, their shape, and the mean reward of two of them."""
  first, last = run.measurements[0], run.measurements[-1]
  shape = first.rewards.shape
  print(f"{len(run.measurements)} measurements; prompts and rollouts per prompt: {shape}")
  rewards = f"{first.rewards.mean():.2f}, {last.rewards.mean():.2f}"
  print(f"mean reward after {first.update} and after {last.update} updates: {rewards}")


# --- completions ----------------------------------------------------------------------------------


def completions(run: Run, update: int) -> list[dict[str, Any]]:
  """The records of an update's rollouts in the run's store, in the order of the Gram's rows.

  Returns:
    `prompt`, `completion`, `reward` and more of each; [] if the run does not have the batch any
    more, or was measured on another one.
  """
  folder = place("the workdir", run.workdir)
  if not (folder / "config.json").exists() or not (folder / "rollouts").exists():
    return []
  config = ml_collections.ConfigDict(json.loads((folder / "config.json").read_text()))
  if config.schedule.startswith("asynchronous"):
    number = update
  else:
    number = make_schedule(config).batch(update)
  store = RolloutStore(folder / "rollouts", writable=False)
  if number not in store.numbers():
    return []
  graded = from_shard(number, *store.read(number)).graded
  assert graded is not None  # a store has graded batches only
  samples = graded.samples
  # Stores of earlier versions have no shaped rewards; they are equal without an overlong penalty.
  rewards = [sample.get("shaped_reward", sample["reward"]) or 0.0 for sample in samples]
  return samples if np.array_equal(rewards, run.at(update).rewards.ravel()) else []


class Block(NamedTuple):
  """The cosines between the rollouts of two prompts, each with its best rewards first."""

  cosines: np.ndarray  # f32[G, G]
  rows: np.ndarray  # i64[G], indices of the rollouts in reshape(B)
  columns: np.ndarray  # i64[G]


def block(measurement: Measurement, prompt: int, other: int) -> Block:
  """The block of two prompts in the ordered cosine Gram; prompts count from 1.

  Raises:
    ValueError: the batch has no such prompt.
  """
  P, G = measurement.rewards.shape
  check_between("block", "prompt", prompt, low=1, high=P)
  check_between("block", "other", other, low=1, high=P)
  found = ordered_cosines(measurement)
  rows, columns = (slice((p - 1) * G, p * G) for p in (prompt, other))
  order = np.asarray(found.order)
  return Block(np.asarray(found.cosines)[rows, columns], order[rows], order[columns])


# --- drawing --------------------------------------------------------------------------------------


def draw_measurement(run: Run, salt: Reweighting, update: int) -> None:
  """The eigenvalues and the cosine Gram of one measurement."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
  geometry_plots.plot_eigenspectrum(left, run.at(update), salt)
  image = geometry_plots.plot_cosine_gram(right, run.at(update))
  right.grid(False)
  figure.colorbar(image, ax=right, label=r"$\cos(g_i, g_j)$", shrink=0.8)


def draw_salt(run: Run, update: int, alpha: float | str = OWN, rank: int | str = OWN) -> None:
  """A' against A, and where the update's energy lies, for SALT at an α and a rank."""
  salt = salt_at(alpha, rank)
  _, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
  geometry_plots.plot_coefficients(left, run.at(update), salt)
  geometry_plots.plot_energies(right, run.at(update), salt)


class OverTraining(NamedTuple):
  """Statistics of the measurements of a run; [M] each."""

  updates: np.ndarray
  participation_ratio: np.ndarray
  effective_rollouts: np.ndarray
  rewards: np.ndarray  # mean over the batch


def over_training(measurements: Sequence[Measurement]) -> OverTraining:
  """PR, n_eff under the run's A, and the mean reward, by update."""
  salt = reweighting.salt()
  rows = []
  for measurement in measurements:
    found = salted(measurement, salt)
    statistics = found.participation_ratio, found.effective_rollouts
    rows.append((measurement.update, *statistics, measurement.rewards.mean()))
  return OverTraining(*np.array(rows, float).T)


def draw_training(runs: Mapping[str, Run]) -> None:
  """Reward, PR and n_eff over the updates of one or two runs; labels are `FIRST` and `OTHER`."""
  _, panels = plt.subplots(1, 3, figsize=(11, 3.6))
  for name, run in runs.items():
    found = over_training(run.measurements)
    series = (found.rewards, found.participation_ratio, found.effective_rollouts)
    for axes, values in zip(panels, series, strict=True):
      axes.plot(found.updates, values, label=name, **STYLES[name])
  labels = ("mean reward of the batch", "PR", r"$n_\mathrm{eff}$ under $A$")
  for axes, label in zip(panels, labels, strict=True):
    axes.set(xlabel="updates before the measurement", ylabel=label, ylim=(0, None))
  panels[2].axhline(1, color=COLORS["reference"], linestyle=":", label="orthogonal: 1")
  legend_outside(panels[2])


def draw_side_by_side(runs: Mapping[str, Run], update: int) -> None:
  """The cosine Gram of each run before the same update."""
  figure, panels = plt.subplots(1, len(runs), figsize=(5.5 * len(runs), 5), squeeze=False)
  for axes, (name, run) in zip(panels[0], runs.items(), strict=True):
    image = geometry_plots.plot_cosine_gram(axes, run.at(update))
    axes.set_title(f"{name}, {axes.get_title()}")
    axes.grid(False)
  figure.colorbar(image, ax=panels, label=r"$\cos(g_i, g_j)$", shrink=0.8)


def draw_block(run: Run, update: int, prompt: int = 1, other: int = 1) -> None:
  """The cosines between the rollouts of two prompts, with their completions where they are kept."""
  measurement = run.at(update)
  found, samples = block(measurement, prompt, other), completions(run, update)
  figure, axes = plt.subplots(figsize=(9, 7))
  image = axes.imshow(found.cosines, vmin=-1, vmax=1, cmap="RdBu", interpolation="nearest")
  rewards = np.asarray(measurement.rewards).ravel()
  places = np.arange(len(found.rows))
  axes.set_yticks(places, [_label(samples, i) for i in found.rows])
  axes.set_xticks(places, [_label(samples, i) for i in found.columns], rotation=90)
  for ticks, indices in (
    (axes.get_yticklabels(), found.rows),
    (axes.get_xticklabels(), found.columns),
  ):
    for tick, index in zip(ticks, indices, strict=True):
      tick.set_color(COLORS["success"] if rewards[index] > 0 else COLORS["failure"])
      tick.set_fontfamily("monospace")
  axes.set(
    ylabel=_prompt_title(samples, found.rows[0], prompt),
    xlabel=_prompt_title(samples, found.columns[0], other),
  )
  axes.grid(False)
  figure.colorbar(image, ax=axes, label=r"$\cos(g_i, g_j)$", shrink=0.8)


def _label(samples: Sequence[Mapping[str, Any]], index: int) -> str:
  """A rollout's completion; its number where there are no samples."""
  return _short(samples[index]["completion"], 24) if samples else f"rollout {index}"


def _prompt_title(samples: Sequence[Mapping[str, Any]], index: int, prompt: int) -> str:
  """The prompt, after its number."""
  text = _short(samples[index]["prompt"], 48) if samples else "its rollouts were not kept"
  return f"prompt {prompt}: {text}"


def _short(text: str, length: int) -> str:
  """On one line, shortened, of characters that every font has; no $ starts a formula."""
  text = ascii(text)[1:-1]
  text = text if len(text) <= length else f"{text[: length - 3]}..."
  return text.replace("$", r"\$")
