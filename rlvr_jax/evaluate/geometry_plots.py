"""Plots of a run's gradient geometry, and the quantities that they show.

A run writes a measurement every `config.diagnostics.every` updates. Functions without `axes`
compute arrays; functions with matplotlib's `axes` plot them. A denotes a measurement's
coefficients, and A' the coefficients that SALT computes from A, whether or not the run used SALT.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.advantages import Advantage
from rlvr_jax.evaluate.figures import COLORS
from rlvr_jax.evaluate.run_files import GEOMETRY_FOLDER
from rlvr_jax.geometry import diagnostics
from rlvr_jax.ops import reductions, spectral
from rlvr_jax.reweighting import Reweighting
from rlvr_jax.storage.places import parse_path
from rlvr_jax.types import Array, TrainBatch

_spectrum = jax.jit(spectral.spectrum)
_cosine_gram = jax.jit(diagnostics.cosine_gram)
_energies = jax.jit(diagnostics.energies)
_update_norms = jax.jit(diagnostics.update_norms)

REWARD_COLORS = "coolwarm_r"  # failures red, successes blue
PLAIN, RESULT, EFFECTIVE, REFERENCE = (
  COLORS[meaning] for meaning in ("plain", "result", "effective", "reference")
)


class Measurement(NamedTuple):
  """A measurement of one batch of a run, before the update on this batch; NumPy arrays."""

  update: int  # number of updates before the measurement
  gram: Array  # f32[B, B], g_i · g_j, not divided by B; rollouts of a prompt are adjacent
  coefficients: Array  # f32[P, G], A
  reweighted: Array  # f32[P, G], the coefficients used in training; A if none are reweighted
  rewards: Array  # f32[P, G]
  lengths: Array  # f32[P, G], loss tokens
  valid: Array  # bool[P, G], whether the rollout has a grade
  gram_compared: Array | None = None  # f32[B, B], of the parameters config.diagnostics.compared
  gram_sampled: Array | None = None  # f32[B, B], feature "sampled", if config.gram has "score"
  gram_score: Array | None = None  # f32[B, B], feature "score", if config.gram has "sampled"
  expert_load: Array | None = None  # f32[sparse layers, E], tokens that chose each expert
  # The next arrays have an entry for each loss token, one rollout after another, see
  # `update.diagnostics.of_tokens`. None: the method has no such value, or the file is older.
  token_log_ratio: Array | None = None  # f32, log π/β, nats
  token_log_ratio_proximal: Array | None = None  # f32, log π/π_prox, nats
  token_entropy: Array | None = None  # f32, nats
  token_clipped: Array | None = None  # bool, or f32 in [0, 1]
  token_dropped: Array | None = None  # bool
  token_vetoed: Array | None = None  # bool


def load_geometry(workdir: str | os.PathLike[str]) -> list[Measurement]:
  """Loads the measurements of a run, in the order of its updates.

  Raises:
    FileNotFoundError: the workdir does not exist, or has no measurements.
  """
  workdir = parse_path("the workdir", workdir)
  if not workdir.is_dir():
    raise FileNotFoundError(f"the workdir {str(workdir)!r} does not exist")
  paths = sorted((workdir / GEOMETRY_FOLDER).glob("*.npz"))
  if not paths:
    raise FileNotFoundError(
      f"{str(workdir)!r} has no {GEOMETRY_FOLDER}/*.npz: the run did not measure its gradient"
      " geometry. Train in another --workdir with --config.diagnostics.every=10 (updates; the"
      " default 0 means never)"
    )
  return [_read(path) for path in paths]


def _read(path: pathlib.Path) -> Measurement:
  with path.open("rb") as stream, np.load(stream) as file:
    arrays = dict(file)
  # Older files lack `valid`; in them a rollout without a grade has its group's mean reward.
  arrays.setdefault("valid", np.ones(arrays["rewards"].shape, bool))
  return Measurement(update=int(path.stem), **arrays)


# --- quantities -----------------------------------------------------------------------------------


class SaltResult(NamedTuple):
  """SALT's result for one batch."""

  coefficients: Array  # f32[P, G], A'
  participation_ratio: float  # in [1, B]
  rank: int  # k, the rank of the shared subspace; 0 if the Gram matrix is zero or not finite
  effective_rollouts: float  # n_eff under A, in [0, B]
  alpha: float  # α, the weight of the residual


def apply_salt(measurement: Measurement, salt: Reweighting) -> SaltResult:
  """SALT's A' over the full batch, P_k A + α (I − P_k) A⁺ with A⁺ = max(A, 0).

  P_k projects onto the top k eigenvectors of the Gram matrix. `salt` is `reweighting.salt(...)`,
  whose arguments can change this formula.
  """
  A = measurement.coefficients
  # Only an ablation uses the key: the random subspace.
  key = jax.random.key(measurement.update)
  blocks = A.reshape(1, -1), measurement.gram[None], measurement.valid.reshape(1, -1)
  reweighted, metrics = jax.jit(salt.apply)(*blocks, key)
  # Without a usable Gram matrix, all of these values are 0.
  values = {n: np.nan_to_num(value).item() for n, value in reductions.values(metrics).items()}
  return SaltResult(
    reweighted.reshape(A.shape),
    values["reweighting/participation_ratio"],
    round(values["reweighting/rank"]),
    values["reweighting/effective_rollouts"],
    values["reweighting/alpha"],
  )


def eigenvalue_shares(gram: Array) -> Array:
  """λ_i/Σλ of a Gram matrix f32[B, B]: f32[B], descending.

  All shares are 1/B if the matrix or its trace is not finite, or if the trace is 0.
  """
  eigenvalues = _spectrum(gram).eigenvalues
  return eigenvalues / eigenvalues.sum()


class OrderedCosines(NamedTuple):
  """cos(g_i, g_j); rollouts of a group are adjacent, in order of decreasing reward."""

  cosines: Array  # f32[B, B] in [−1, 1]
  rewards: Array  # f32[B], in the same order
  order: Array  # i32[B], indices into the batch's rollouts, [P, G] reshaped to [B]


def ordered_cosines(measurement: Measurement) -> OrderedCosines:
  """The `OrderedCosines` of a measurement; rollouts of equal reward keep their order."""
  P, G = measurement.rewards.shape
  within = jnp.argsort(-measurement.rewards, axis=1)
  order = (within + G * jnp.arange(P)[:, None]).reshape(-1)
  cosines = _cosine_gram(measurement.gram)
  return OrderedCosines(cosines[order][:, order], measurement.rewards.reshape(-1)[order], order)


class Band(NamedTuple):
  """The mean and the 95 % range of a statistic over samples, for each size; NaN if undefined."""

  mean: np.ndarray  # f64[S]
  low: np.ndarray  # f64[S]
  high: np.ndarray  # f64[S]


class GroupSizes(NamedTuple):
  """Statistics of a batch as functions of the number of rollouts that are kept per prompt."""

  sizes: np.ndarray  # i64[S], rollouts per prompt; the last size is G
  participation_ratio: Band
  effective_rollouts: Band


def group_sizes(
  measurement: Measurement, advantage: Advantage, *, num_samples: int = 100, seed: int = 0
) -> GroupSizes:
  """The batch's participation ratio and n_eff for groups cut to sizes 2, 4, 8, … and G.

  For each sample of size g, g rollouts of every prompt are drawn without replacement, and
  `advantage` computes their coefficients. At size G every sample is the full batch. A `Band`
  shows the variation over the choice of rollouts; the variation between batches is larger.

  Args:
    measurement: a batch of P groups of G ≥ 2.
    advantage: the run's estimator; its state, if any, is initialized with entropy 0.
    num_samples: number of samples per size.
    seed: seed of the samples.
  """
  G = measurement.rewards.shape[1]
  sizes = np.array([*(2**n for n in range(1, 64) if 2**n < G), G])
  bands = [_subsample_bands(measurement, advantage, g, num_samples, seed) for g in sizes]
  ratios, n_effs = (Band(*np.transpose(rows)) for rows in zip(*bands, strict=True))
  return GroupSizes(sizes, ratios, n_effs)


def _subsample_bands(
  measurement: Measurement, advantage: Advantage, size: int, num_samples: int, seed: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Mean and ends of the 95 % range of PR, and of n_eff, over the samples where each is defined."""
  P, G = measurement.rewards.shape
  rng = np.random.default_rng([seed, size])
  all_rollouts = np.broadcast_to(np.arange(G), (num_samples, P, G))
  samples = rng.permuted(all_rollouts, axis=-1)[..., :size] + G * np.arange(P)[:, None]
  gram = jnp.asarray(measurement.gram)
  columns = (measurement.rewards, measurement.lengths, measurement.valid)
  rewards, lengths, valid = (jnp.ravel(x) for x in columns)
  positions = jnp.arange(int(measurement.lengths.max()))
  unused: Any = None  # no estimator reads these fields

  def measure_sample(indices):
    mask = (positions < lengths[indices][..., None]).astype(jnp.float32)
    r = rewards[indices]
    batch = TrainBatch(unused, unused, mask, unused, rewards=r, correct=r, valid=valid[indices])
    A = advantage.apply(advantage.init(jnp.zeros(())), batch).reshape(-1)
    K = gram[indices.reshape(-1)][:, indices.reshape(-1)]
    ratio, n_eff = spectral.participation_ratio(K), spectral.effective_rollouts(A, K)
    return ratio, spectral.is_usable(K), n_eff, spectral.carries_gradient(A, K)

  ratio, usable, n_eff, defined = map(np.asarray, jax.jit(jax.vmap(measure_sample))(samples))
  return _band(ratio[usable]), _band(n_eff[defined])


def _band(values: np.ndarray) -> tuple[float, ...]:
  """The mean of the values and the ends of their 95 % range; NaN if there are no values."""
  if not values.size:
    return (np.nan,) * 3
  return (values.mean(dtype=np.float64), *np.quantile(values, [0.025, 0.975]))


class Energies(NamedTuple):
  """Share of ‖Σ A_i g_i‖² in the span of the top k eigenvectors, for k = 0 … B; f32[B + 1] each."""

  even: Array  # for coefficients without a preferred direction: (λ_1 + … + λ_k)/Σλ
  coefficients: Array  # for the coefficients A
  reweighted: Array  # for the coefficients A'
  rank: int  # SALT's k, where the share is the shared energy; 1 − share is the residual energy


def energies(measurement: Measurement, salt: Reweighting) -> Energies:
  """The `Energies` of a measurement; all 0 if the coefficients give no gradient."""
  result = apply_salt(measurement, salt)
  spectrum = _spectrum(measurement.gram)
  ranks = jnp.arange(measurement.gram.shape[0] + 1)
  shared = jax.vmap(lambda A, k: _energies(A, spectrum, k)[0], (None, 0))
  return Energies(
    jnp.cumsum(jnp.pad(eigenvalue_shares(measurement.gram), (1, 0))),
    shared(measurement.coefficients.reshape(-1), ranks),
    shared(result.coefficients.reshape(-1), ranks),
    result.rank,
  )


class UpdateNorms(NamedTuple):
  """Norms for the M measurements of a run, in the unit of a gradient's norm; f64[M] each."""

  updates: np.ndarray
  norm: np.ndarray  # ‖Σ A_i g_i‖/B, for B valid rollouts
  reweighted: np.ndarray  # ‖Σ A'_i g_i‖/B
  residual: np.ndarray  # norm of the part of Σ A_i g_i/B outside the top k eigenvectors
  bound: np.ndarray  # √(λ_{k+1}/B)·‖(I − P_k)A‖ ≥ residual


def update_norms(measurements: Sequence[Measurement], salt: Reweighting) -> UpdateNorms:
  """The norms of the updates in `measurements`, and of their residual parts; see `UpdateNorms`."""
  rows = []
  for measurement in measurements:
    A = measurement.coefficients.reshape(-1)
    result = apply_salt(measurement, salt)
    spectrum = _spectrum(measurement.gram)
    rank = jnp.int32(result.rank)
    count = jnp.sum(measurement.valid).astype(A.dtype)
    norm, bound = _update_norms(A, spectrum, rank, count)
    reweighted, _ = _update_norms(result.coefficients.reshape(-1), spectrum, rank, count)
    _, residual = _energies(A, spectrum, rank)
    rows.append((measurement.update, norm, reweighted, norm * residual**0.5, bound))
  return UpdateNorms(*np.array(rows, float).T)


# --- drawing --------------------------------------------------------------------------------------


def plot_eigenspectrum(axes: Any, measurement: Measurement, salt: Reweighting) -> None:
  """Plots λ_i/Σλ on a logarithmic scale, with the participation ratio (PR) and SALT's k.

  A horizontal line shows the level of B orthogonal gradients, 1/B.
  """
  result = apply_salt(measurement, salt)
  size = measurement.gram.shape[0]
  grams = {
    "per-rollout gradients": (measurement.gram, PLAIN),
    "compared parameters": (measurement.gram_compared, REFERENCE),
  }
  for label, (gram, color) in grams.items():
    if gram is not None:
      shares = eigenvalue_shares(gram)
      axes.plot(np.arange(size) + 1, shares, ".-", markersize=4, label=label, color=color)
  axes.axvline(
    result.participation_ratio, color=EFFECTIVE, label=f"PR = {result.participation_ratio:.1f}"
  )
  axes.axvline(result.rank + 0.5, color="0.4", linestyle="--", label=f"shared: i ≤ {result.rank}")
  axes.axhline(1 / size, color="0.7", linestyle=":", label="B orthogonal gradients")
  axes.set(
    title=_title(measurement),
    xlabel="eigenvalue i",
    ylabel=r"share of the trace, $\lambda_i/\sum\lambda$",
  )
  axes.set(yscale="log", ylim=(1e-6, 1))
  _legend_below(axes)


def plot_cosine_gram(axes: Any, measurement: Measurement) -> Any:
  """Plots cos(g_i, g_j), with the rewards on the left; returns the image, for a color bar."""
  P, G = measurement.rewards.shape
  cosines, rewards, _ = ordered_cosines(measurement)
  image = axes.imshow(cosines, vmin=-1, vmax=1, cmap="RdBu", interpolation="nearest")
  for border in np.arange(1, P) * G - 0.5:
    axes.axhline(border, color="k", linewidth=0.5)
    axes.axvline(border, color="k", linewidth=0.5)
  reward_axes = axes.inset_axes((-0.05, 0, 0.03, 1), sharey=axes)
  reward_axes.imshow(rewards[:, None], vmin=0, vmax=1, cmap=REWARD_COLORS, aspect="auto")
  middles = np.arange(P) * G + (G - 1) / 2
  reward_axes.set_xticks([])
  reward_axes.set_yticks(middles, [f"prompt {p + 1}" for p in range(P)])
  reward_axes.tick_params(axis="y", length=0)
  axes.set_xticks([])
  axes.tick_params(axis="y", left=False, labelleft=False)
  axes.set_title(_title(measurement))
  return image


def plot_group_sizes(axes: Any, measurement: Measurement, advantage: Advantage) -> None:
  """Plots participation ratio (PR) and n_eff by group size, with the subsamples' 95 % range."""
  result = group_sizes(measurement, advantage)
  prompts = measurement.rewards.shape[0]
  axes.plot(result.sizes, prompts * result.sizes, ":", color="0.5", label="rollouts, P·G")
  bands = ("PR", "o-", result.participation_ratio), ("n_eff", "o--", result.effective_rollouts)
  for name, style, band in bands:
    label = f"{name}, mean of subsamples"
    axes.plot(result.sizes, band.mean, style, color=EFFECTIVE, label=label)
    axes.fill_between(result.sizes, band.low, band.high, color=EFFECTIVE, alpha=0.2)
  axes.axhline(1, color="0.7", linewidth=1)
  axes.set_xscale("log", base=2)
  axes.set_yscale("log", base=2)
  axes.set_xticks(result.sizes, map(str, result.sizes))
  axes.set(title=_title(measurement), xlabel="rollouts per prompt, G", ylabel="rollouts")
  _legend_below(axes)


def plot_energies(axes: Any, measurement: Measurement, salt: Reweighting) -> None:
  """Plots the share of the update's energy in the top k eigenvectors against k, for A and A'."""
  result = energies(measurement, salt)
  ranks = np.arange(result.even.size)
  axes.plot(ranks, result.even, ":", color="0.5", label="no preference")
  lines = ("A", PLAIN, result.coefficients), ("A'", RESULT, result.reweighted)
  for label, color, shares in lines:
    shared = float(shares[result.rank])
    axes.plot(
      ranks, shares, label=f"{label}: shared {shared:.2f}, residual {1 - shared:.2f}", color=color
    )
  axes.axvline(result.rank, color="0.4", linestyle="--", label=f"SALT's k = {result.rank}")
  axes.set(
    title=_title(measurement),
    xlabel="k",
    ylabel=r"share of $\Vert\sum A_i g_i\Vert^2$ in the top $k$",
  )
  axes.set(ylim=(0, 1.02))
  _legend_below(axes)


def plot_update_norms(axes: Any, measurements: Sequence[Measurement], salt: Reweighting) -> None:
  """Plots ‖Σ A_i g_i‖/B over a run for A and A', and for A also the residual part and its bound."""
  norms = update_norms(measurements, salt)
  axes.plot(norms.updates, norms.norm, "o-", color=PLAIN, label="update norm, A")
  axes.plot(norms.updates, norms.reweighted, "o-", color=RESULT, label="update norm, A'")
  axes.plot(norms.updates, norms.residual, "s-", color=REFERENCE, label="residual part of A's")
  axes.plot(norms.updates, norms.bound, "--", color=REFERENCE, label="bound on the residual part")
  axes.set(xlabel="updates before the measurement", ylabel=r"$\Vert\sum A_i g_i\Vert/B$")
  axes.set_ylim(bottom=0)
  _legend_below(axes)


def plot_coefficients(axes: Any, measurement: Measurement, salt: Reweighting) -> None:
  """Plots A' against A, one point per rollout, colored by reward."""
  result = apply_salt(measurement, salt)
  A = measurement.coefficients
  axes.axline((0, 0), slope=1, color="0.6", linestyle="--", linewidth=1, label="A' = A")
  axes.axhline(0, color="0.8", linewidth=1, zorder=0)
  points = axes.scatter(
    A, result.coefficients, c=measurement.rewards, cmap=REWARD_COLORS, vmin=0, vmax=1,
    s=20, edgecolors="k", linewidths=0.3, zorder=2,
  )  # fmt: skip
  axes.figure.colorbar(points, ax=axes, label="reward", ticks=[0, 1])
  axes.set(xlabel="$A$", ylabel="$A'$", title=f"{_title(measurement)}: k = {result.rank}, "
    f"n_eff = {result.effective_rollouts:.2f}, α = {result.alpha:.2f}")  # fmt: skip
  _legend_below(axes)


def plot_expert_load(axes: Any, measurement: Measurement) -> Any:
  """Plots each expert's load by layer, largest loads first; an even load is 1.

  Returns the image, for a color bar.

  Raises:
    ValueError: the measurement has no load of experts: the run's policy is not a mixture of
      experts, or the run is older than this field.
  """
  choices = measurement.expert_load
  if choices is None:
    raise ValueError(
      f"the measurement after update {measurement.update} has no load of experts: the policy has"
      " no experts, or the run was made by a version that did not record it"
    )
  total = np.maximum(choices.sum(axis=1, keepdims=True), 1)
  load = choices.shape[1] * np.sort(choices / total, axis=1)[:, ::-1]
  image = axes.imshow(load, vmin=0, vmax=max(2.0, load.max()), cmap="viridis", aspect="auto")
  axes.set(xlabel="experts, by falling load", ylabel="layer with experts")
  axes.set_title(_title(measurement))
  return image


def _legend_below(axes: Any) -> None:
  """Puts the legend below the label of the x-axis, outside the data."""
  axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _title(measurement: Measurement) -> str:
  usable = bool(_spectrum(measurement.gram).usable)
  return f"before update {measurement.update + 1}" + ("" if usable else " (Gram not usable)")
