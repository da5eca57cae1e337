"""Figures of colabs/geometry.ipynb that `evaluate.geometry_plots` lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import ml_collections
import numpy as np

from rlvr_jax import advantages, reweighting
from rlvr_jax.advantages import Advantage
from rlvr_jax.colab.display import COLORS, legend_outside
from rlvr_jax.colab.runs import read_schedule, sums_config, train
from rlvr_jax.evaluate import geometry_plots
from rlvr_jax.evaluate.geometry_plots import Measurement, apply_salt, load_geometry, ordered_cosines
from rlvr_jax.ops.checks import check_between
from rlvr_jax.reweighting import Reweighting
from rlvr_jax.rollouts.batches import read_batch
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.specs import make
from rlvr_jax.storage.places import parse_path

OWN = "its own"  # α or rank as SALT computes them
FIRST, OTHER = "first run", "other run"
STYLES: dict[str, dict[str, Any]] = {
  FIRST: dict(color=COLORS["plain"], marker="o", markersize=4),
  OTHER: dict(color=COLORS["result"], marker="s", markersize=4),
}


class Run(NamedTuple):
  """Folder and measurements of a run."""

  workdir: str
  measurements: list[Measurement]

  def at(self, update: int) -> Measurement:
    """The measurement before an update.

    Raises:
      ValueError: the update was not measured.
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


def tiny_config(reweighted: str = "none") -> ml_collections.ConfigDict:
  """Configuration of a smaller quickstart with 16 updates, measured before every second one.

  Args:
    reweighted: spec of the reweighting, as in `config.reweighting`.
  """
  c = sums_config(updates=16)
  c.warm_start.num_steps = 80
  c.batch.prompts, c.batch.group_size = 8, 16
  c.learning_rate = "linear(peak=1e-3)"
  c.evaluation.num_samples, c.evaluation.ks = 1, (1,)
  c.diagnostics.every = 2
  c.reweighting = reweighted
  return c


def load_runs(workdir: str = "", other: str = "") -> dict[str, Run]:
  """Loads the runs in two folders, by `FIRST` and `OTHER`; only the first if `other` is "".

  Without folders, trains two tiny runs in temporary folders: by GRPO, and by GRPO with SALT.

  Raises:
    FileNotFoundError: a folder does not exist, or has no measurements.
    ValueError: `other` is given without `workdir`.
  """
  if other and not workdir:
    raise ValueError(f"OTHER_WORKDIR = {other!r}, but WORKDIR is empty; set WORKDIR too")
  folders = [folder for folder in (workdir, other) if folder]
  if not folders:
    folders = [str(train(tiny_config(rule))) for rule in ("none", "salt")]
  return {
    name: Run(folder, load_geometry(folder))
    for name, folder in zip((FIRST, OTHER), folders, strict=False)
  }


def make_components(advantage: str, salt: str) -> tuple[Advantage, Reweighting]:
  """Makes an estimator and a reweighting from their specs, such as "salt(alpha_min=0.5)".

  Raises:
    ValueError: a name or an argument is unknown.
  """
  return (
    make("ADVANTAGE", advantages, advantage, Advantage),
    make("SALT", reweighting, salt, Reweighting),
  )


def fixed_salt(alpha: float | str = OWN, rank: int | str = OWN) -> Reweighting:
  """SALT with fixed α and rank k; `OWN` leaves a value to SALT."""
  settings: dict[str, Any] = {}
  if alpha != OWN:
    settings |= dict(alpha_min=float(alpha), alpha_max=float(alpha))
  if rank != OWN:
    settings |= dict(min_rank=rank, max_rank=rank)
  return reweighting.salt(**settings)


def describe(run: Run) -> None:
  """Prints the number and shape of the measurements, and the first and last mean reward."""
  first = run.measurements[0]
  last = run.measurements[-1]
  shape = first.rewards.shape
  print(f"{len(run.measurements)} measurements; prompts and rollouts per prompt: {shape}")
  rewards = f"{first.rewards.mean():.2f}, {last.rewards.mean():.2f}"
  print(f"mean reward after {first.update} and after {last.update} updates: {rewards}")


# --- completions ----------------------------------------------------------------------------------


def load_completions(run: Run, update: int, *, trust_run: bool = False) -> list[dict[str, Any]]:
  """Loads the records of an update's rollouts from the run's store, in the order of Gram rows.

  `trust_run`: see `runs.read_schedule`.

  Returns:
    Records with `prompt`, `completion`, `reward` and more; [] if the run no longer has the batch,
    or was measured on another batch.
  """
  folder = parse_path("the workdir", run.workdir)
  if not (folder / "config.json").exists() or not (folder / "rollouts").exists():
    return []
  schedule, _ = read_schedule(folder, trust_run=trust_run)
  number = update if schedule.threaded else schedule.batch(update)
  store = RolloutStore(folder / "rollouts", writable=False)
  if number not in store.numbers():
    return []
  samples = read_batch(store, number).samples
  # Older stores have no shaped rewards, which equal the rewards without an overlong penalty.
  rewards = [sample.get("shaped_reward", sample["reward"]) or 0.0 for sample in samples]
  return samples if np.array_equal(rewards, run.at(update).rewards.ravel()) else []


class Block(NamedTuple):
  """Cosines between the rollouts of two prompts, each ordered by descending reward."""

  cosines: np.ndarray  # f32[G, G]
  rows: np.ndarray  # i64[G], indices of the rollouts in reshape(B)
  columns: np.ndarray  # i64[G]


def cosine_block(measurement: Measurement, prompt: int, other: int) -> Block:
  """The block of two prompts in the ordered cosine Gram matrix; prompts count from 1.

  Raises:
    ValueError: a prompt is not in the batch.
  """
  P, G = measurement.rewards.shape
  check_between("block", "prompt", prompt, low=1, high=P)
  check_between("block", "other", other, low=1, high=P)
  ordered = ordered_cosines(measurement)
  rows, columns = (slice((p - 1) * G, p * G) for p in (prompt, other))
  order = np.asarray(ordered.order)
  return Block(np.asarray(ordered.cosines)[rows, columns], order[rows], order[columns])


# --- drawing --------------------------------------------------------------------------------------


def draw_measurement(run: Run, salt: Reweighting, update: int) -> None:
  """Draws the eigenvalues and the cosine Gram matrix of one measurement."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
  geometry_plots.plot_eigenspectrum(left, run.at(update), salt)
  image = geometry_plots.plot_cosine_gram(right, run.at(update))
  right.grid(False)
  figure.colorbar(image, ax=right, label=r"$\cos(g_i, g_j)$", shrink=0.8)


def draw_salt(run: Run, update: int, alpha: float | str = OWN, rank: int | str = OWN) -> None:
  """Draws A' against A, and the energy of the update by direction, for SALT at an α and a rank."""
  salt = fixed_salt(alpha, rank)
  _, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
  geometry_plots.plot_coefficients(left, run.at(update), salt)
  geometry_plots.plot_energies(right, run.at(update), salt)


class OverTraining(NamedTuple):
  """Statistics of the M measurements of a run; [M] each."""

  updates: np.ndarray
  participation_ratio: np.ndarray
  effective_rollouts: np.ndarray
  rewards: np.ndarray  # mean over the batch


def measure_training(measurements: Sequence[Measurement]) -> OverTraining:
  """Computes PR, n_eff under the run's A, and the mean reward of each measurement."""
  salt = reweighting.salt()
  rows = []
  for measurement in measurements:
    reweighted = apply_salt(measurement, salt)
    statistics = reweighted.participation_ratio, reweighted.effective_rollouts
    rows.append((measurement.update, *statistics, measurement.rewards.mean()))
  return OverTraining(*np.array(rows, float).T)


def draw_training(runs: Mapping[str, Run]) -> None:
  """Draws reward, PR and n_eff over the updates of one or two runs, by `FIRST` and `OTHER`."""
  _, panels = plt.subplots(1, 3, figsize=(11, 3.6))
  for name, run in runs.items():
    statistics = measure_training(run.measurements)
    series = (statistics.rewards, statistics.participation_ratio, statistics.effective_rollouts)
    for axes, values in zip(panels, series, strict=True):
      axes.plot(statistics.updates, values, label=name, **STYLES[name])
  labels = ("mean reward of the batch", "PR", r"$n_\mathrm{eff}$ under $A$")
  for axes, label in zip(panels, labels, strict=True):
    axes.set(xlabel="updates before the measurement", ylabel=label, ylim=(0, None))
  panels[2].axhline(1, color=COLORS["reference"], linestyle=":", label="orthogonal: 1")
  legend_outside(panels[2])


def draw_side_by_side(runs: Mapping[str, Run], update: int) -> None:
  """Draws the cosine Gram matrix of each run before the same update."""
  figure, panels = plt.subplots(1, len(runs), figsize=(5.5 * len(runs), 5), squeeze=False)
  for axes, (name, run) in zip(panels[0], runs.items(), strict=True):
    image = geometry_plots.plot_cosine_gram(axes, run.at(update))
    axes.set_title(f"{name}, {axes.get_title()}")
    axes.grid(False)
  figure.colorbar(image, ax=panels, label=r"$\cos(g_i, g_j)$", shrink=0.8)


def draw_block(run: Run, update: int, prompt: int = 1, other: int = 1) -> None:
  """Draws the cosines between the rollouts of two prompts, with completions if they are stored."""
  measurement = run.at(update)
  block = cosine_block(measurement, prompt, other)
  samples = load_completions(run, update)
  figure, axes = plt.subplots(figsize=(9, 7))
  image = axes.imshow(block.cosines, vmin=-1, vmax=1, cmap="RdBu", interpolation="nearest")
  rewards = np.asarray(measurement.rewards).ravel()
  positions = np.arange(len(block.rows))
  axes.set_yticks(positions, [_label(samples, i) for i in block.rows])
  axes.set_xticks(positions, [_label(samples, i) for i in block.columns], rotation=90)
  for ticks, indices in (
    (axes.get_yticklabels(), block.rows),
    (axes.get_xticklabels(), block.columns),
  ):
    for tick, index in zip(ticks, indices, strict=True):
      tick.set_color(COLORS["success"] if rewards[index] > 0 else COLORS["failure"])
      tick.set_fontfamily("monospace")
  axes.set(
    ylabel=_prompt_title(samples, block.rows[0], prompt),
    xlabel=_prompt_title(samples, block.columns[0], other),
  )
  axes.grid(False)
  figure.colorbar(image, ax=axes, label=r"$\cos(g_i, g_j)$", shrink=0.8)


def _label(samples: Sequence[Mapping[str, Any]], index: int) -> str:
  """Completion of a rollout; its number if there are no samples."""
  return _shorten(samples[index]["completion"], 24) if samples else f"rollout {index}"


def _prompt_title(samples: Sequence[Mapping[str, Any]], index: int, prompt: int) -> str:
  """Number and text of a prompt."""
  text = _shorten(samples[index]["prompt"], 48) if samples else "its rollouts were not stored"
  return f"prompt {prompt}: {text}"


def _shorten(text: str, length: int) -> str:
  """Shortens a text to one line of ASCII characters; escapes $, which would start a formula."""
  text = ascii(text)[1:-1]
  text = text if len(text) <= length else f"{text[: length - 3]}..."
  return text.replace("$", r"\$")
