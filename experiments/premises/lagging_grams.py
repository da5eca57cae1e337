"""n_eff of the Gram matrices of a run with stale and hotter rollouts, against chance.

`expectation.py` writes its figures and tables into EXPECTATION.md, which has the run's command. Of
each batch the first half of the groups is sampled by the policy, the other at temperature 1.5.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.premises.scopes import scope_blocks
from experiments.premises.tiny_policies import Floats, ratio_and_error
from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.evaluate.paired import mean_and_half_width
from rlvr_jax.evaluate.run_files import GEOMETRY_FOLDER

STAGE = 16  # updates on the rollouts of one policy in the run
SIGNS = 200  # draws of random signs
LAGS: dict[str, Callable[[int], bool]] = {
  "lag 0": lambda lag: lag == 0,
  "lag 1 to 7": lambda lag: 1 <= lag <= 7,
  "lag 8 to 15": lambda lag: lag >= 8,
}
SOURCES = {"": slice(0, 32), ", temperature 1.5": slice(32, 64)}  # groups of a batch
SCOPES: dict[str, str | int] = {"group": "group", "batch": "batch", "8 rollouts": 8}

Arrays = Mapping[str, np.ndarray]


# --- a measured batch -----------------------------------------------------------------------------


def null_deviation(gram: Floats, A: Floats) -> float:
  """Standard deviation of n_eff if each gradient's sign is drawn at random; its mean is then 1.

  √(2 Σ_{i≠j} (A_i A_j K_ij)²)/Σ A_i² K_ii: how far n_eff is from 1 by chance, where no two rollouts
  have anything to do with each other.
  """
  weighted = A[:, None] * gram * A
  off_diagonal = np.sum(weighted**2) - np.sum(np.diag(weighted) ** 2)
  return float(np.sqrt(2 * off_diagonal) / np.trace(weighted))


def chance_rank(gram: Floats, A: Floats, seed: int) -> float:
  """The share of draws of random signs of the gradients whose n_eff is at most that of the block.

  Where no two rollouts have anything to do with each other, at most 5 % of blocks are at 0.05.
  """
  signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(SIGNS, len(A)))
  weighted = signs * A
  drawn = np.einsum("ni,ij,nj->n", weighted, gram, weighted, optimize=True)
  return float(np.mean(drawn <= (A @ gram @ A) * (1 + 1e-9)))


def pair_means(gram: Floats, rewards: Floats) -> dict[str, float]:
  """Mean inner products of pairs of one group, in units of the mean squared length.

  Args:
    gram: f64[P, G, P, G].
    rewards: f64[P, G], of 0 and 1.
  Returns:
    within: all pairs of two rollouts of one prompt; right, wrong, mixed: those of two successes, of
    two failures, of one each; between: pairs of two prompts.
  """
  P, G = rewards.shape
  own = gram[np.arange(P), :, np.arange(P)]
  distinct = ~np.eye(G, dtype=bool)
  unit = np.mean(own[:, ~distinct])
  right = rewards > 0
  kinds = {
    "within": np.ones_like(own, dtype=bool),
    "right": right[:, :, None] & right[:, None],
    "wrong": ~right[:, :, None] & ~right[:, None],
    "mixed": right[:, :, None] != right[:, None],
  }
  means = {name: np.mean(own[kind & distinct]) / unit for name, kind in kinds.items()}
  between = (gram.sum() - own.sum()) / (P * (P - 1) * G**2)
  return {name: float(x) for name, x in (means | {"between": between / unit}).items()}


def block_figures(
  gram: Floats, coefficients: Floats, scope: str | int, seed: int
) -> dict[str, Floats]:
  """Σ A²‖g‖², ‖Σ A g‖², n_eff, what it is by chance, and PR of a scope's blocks with a gradient.

  Args:
    gram: f64[B, B].
    coefficients: f64[P, G].
    scope, seed: as in `scope_blocks`.
  """
  ordered, A, count = scope_blocks(gram, coefficients, scope, seed)
  size = len(A) // count
  rows = []
  for block in range(count):
    own = slice(block * size, block * size + size)
    k, a = ordered[own, own], A[own]
    separate = float(np.sum(a**2 * np.diag(k)))
    if separate > 0:
      ratio = np.trace(k) ** 2 / np.sum(k**2)
      together = float(a @ k @ a)
      rows.append(
        (
          together,
          separate,
          together / separate,
          null_deviation(k, a),
          chance_rank(k, a, seed),
          ratio,
        )
      )
  names = ("together", "separate", "n_eff", "by_chance", "rank", "participation_ratio")
  columns = np.reshape(np.asarray(rows, np.float64), (-1, len(names))).T
  return dict(zip(names, columns, strict=True))


def measure(arrays: Sequence[tuple[int, Arrays]], groups: slice) -> dict[str, Any]:
  """Figures of some groups over several batches, each with its number of updates.

  Intervals are Student's, over batches; those of n_eff are of Σ‖Σ A g‖²/ΣΣ A²‖g‖², the ratio of
  expectations, by the delta method.
  """
  pairs: list[dict[str, float]] = []
  blocks: dict[str, list[dict[str, Floats]]] = {}
  for step, batch in arrays:
    rewards, A, lengths = (
      np.float64(batch[x][groups]) for x in ("rewards", "coefficients", "lengths")
    )
    P, G = batch["rewards"].shape
    gram = np.float64(batch["gram"]).reshape(P, G, P, G)[groups][:, :, groups]
    pairs.append(pair_means(gram, rewards))
    flat = gram.reshape(rewards.size, rewards.size)
    divisors = np.maximum(lengths.ravel(), 1)
    sampled = np.float64(batch["gram_sampled"]).reshape(P, G, P, G)[groups][:, :, groups]
    matrices = {name: (flat, scope) for name, scope in SCOPES.items()}
    matrices["group, mean over tokens"] = flat / divisors[:, None] / divisors, "group"
    matrices["group, sampled"] = sampled.reshape(flat.shape), "group"
    for name, (matrix, scope) in matrices.items():
      blocks.setdefault(name, []).append(block_figures(matrix, A, scope, step))
  return {
    "batches": len(arrays),
    "pairs": {name: _mean_and_interval([x[name] for x in pairs]) for name in pairs[0]},
    "n_eff": {name: _summary(found) for name, found in blocks.items()},
  }


def _summary(batches: Sequence[dict[str, Floats]]) -> dict[str, float]:
  """Over the blocks of several batches; the interval is over batches."""
  all_blocks = {name: np.concatenate([x[name] for x in batches]) for name in batches[0]}
  n_eff = all_blocks["n_eff"]
  sums = [[x[name].sum() for x in batches] for name in ("together", "separate")]
  ratio, error = ratio_and_error(*sums)
  quantile = float(stats.t.ppf(0.975, len(batches) - 1))
  return {
    "blocks": n_eff.size,
    "ratio": ratio,
    "half_width": quantile * error,
    "mean": float(n_eff.mean()),
    "below_1": float(np.mean(n_eff < 1)),
    "lowest": float(np.mean(all_blocks["rank"] <= 0.05)),
    "alpha": float(np.clip(1 - n_eff, 0, 1).mean()),
    "by_chance": float(all_blocks["by_chance"].mean()),
    "participation_ratio": float(all_blocks["participation_ratio"].mean()),
  }


def _mean_and_interval(values: Sequence[float]) -> list[float]:
  return [float(x) for x in mean_and_half_width(values)]


def measure_run(workdir: pathlib.Path) -> dict[str, Any]:
  """Figures of the run by lag and by what sampled the groups.

  Raises:
    ValueError: the workdir has no Gram matrices.
  """
  paths = sorted((workdir / GEOMETRY_FOLDER).glob("*.npz"))
  if not paths:
    raise ValueError(
      f"{str(workdir)!r} has no {GEOMETRY_FOLDER}/*.npz; run the page's command first"
    )
  found = {}
  for lag, is_in in LAGS.items():
    batches = []
    for path in paths:
      if is_in(int(path.stem) % STAGE):
        with np.load(path) as file:
          batches.append((int(path.stem), dict(file)))
    for source, groups in SOURCES.items():
      found[f"{lag}{source}"] = measure(batches, groups)
  return found


# --- tables ---


def _plus_minus(mean: float, half_width: float, digits: int = 3) -> str:
  return f"{mean:.{digits}f} ± {half_width:.{digits}f}"


def tables(run: Mapping[str, Any]) -> str:
  """Tables of `measure_run`'s figures, as Markdown; without those of lags 1 to 7."""
  shown = {name: figures for name, figures in run.items() if "lag 1 to 7" not in name}
  kinds = ("within", "right", "wrong", "mixed", "between")
  pairs = {
    name: [str(x["batches"]), *(_plus_minus(*x["pairs"][kind]) for kind in kinds)]
    for name, x in shown.items()
  }
  headings = ["batches", "one prompt", "two right", "two wrong", "one of each", "two prompts"]
  blocks = {
    f"{name}, {scope}": [
      str(x["blocks"]),
      _plus_minus(x["ratio"], x["half_width"], 2),
      f"{x['below_1']:.0%}",
      f"{x['lowest']:.1%}",
      f"{x['alpha']:.3f}",
      f"{x['by_chance']:.2f}",
    ]
    for name, figures in shown.items()
    for scope, x in figures["n_eff"].items()
    if scope != "batch"
  }
  columns = ["blocks", "n_eff", "below 1", "lowest", "α", "by chance"]
  return "\n\n".join(
    [
      "Mean inner products of two rollouts, `score`, over the mean squared length:",
      markdown_table(headings, pairs, "rollouts"),
      "n_eff of blocks, as a ratio of sums. By chance: its deviation under random signs of the"
      " gradients. Lowest: blocks below 95 % of such draws, at most 5 % if all is chance.",
      markdown_table(columns, blocks, "rollouts, scope"),
    ]
  )
