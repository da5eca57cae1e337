"""What n_eff, PR and α are in expectation: the formulae of README.md, simulated and measured.

  python -m experiments.premises.expectation --on_policy=WORKDIR --hotter=WORKDIR

from the repository root. The workdirs are of the runs on that page, whose policy does not move, so
that their measurements are independent draws. Without a workdir its figures stay. Writes
results.json and the tables of README.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.premises import tiny_policies
from experiments.premises.tiny_policies import Outcomes, expected_energies, moments
from experiments.testbed import report
from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.evaluate.paired import mean_and_half_width
from rlvr_jax.evaluate.run_files import GEOMETRY_FOLDER

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE / "README.md"


def sums(coefficients: np.ndarray, gram: np.ndarray) -> tuple[float, float]:
  """(‖Σ A g‖², Σ A²‖g‖²) of coefficients f[B] and a Gram matrix f[B, B]."""
  return float(coefficients @ gram @ coefficients), float(coefficients**2 @ np.diag(gram))


def n_eff_of_noise(directions: float) -> tuple[float, float]:
  """(E α, share below 1) where n_eff is χ²_k / k: no signal, k = PR directions of equal weight."""
  k = directions
  # E (1 − x/k)⁺ = P(χ²_k < k) − P(χ²_{k+2} < k).
  below = float(stats.chi2.cdf(k, k))
  return below - float(stats.chi2.cdf(k, k + 2)), below


# --- a policy whose expectations are known --------------------------------------------------------


def softmax_policy(num_actions: int, num_prompts: int, seed: int) -> tuple[np.ndarray, ...]:
  """(p f[P, V], score of each action f[P, V, V], reward of each action f[P, V])."""
  rng = np.random.default_rng(seed)
  logits = rng.normal(size=(num_prompts, num_actions))
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  scores = p[:, None, :] - np.eye(num_actions)  # ∇ −log p(y), for a head whose input is 1
  return p, scores, (rng.random((num_prompts, num_actions)) < 0.4).astype(float)


def simulate(
  group_size: int, num_prompts: int, tokens: int, *, draws: int, seed: int = 0
) -> dict[str, float]:
  """Draws batches of the softmax policy; n_eff as the ratio of two means, and the mean α.

  A response is `tokens` independent actions, of which the first decides the reward.
  """
  rng = np.random.default_rng(seed)
  p, scores, rewards = softmax_policy(12, num_prompts, seed=1)
  parts: dict[str, list[tuple[float, float]]] = {"score": [], "sampled": []}
  for _ in range(draws):
    actions = np.stack([rng.choice(len(q), (group_size, tokens), p=q) for q in p])
    r = np.take_along_axis(rewards, actions[..., 0], axis=1)
    A = (r - r.mean(1, keepdims=True)).reshape(-1)
    of_tokens = scores[np.arange(num_prompts)[:, None, None], actions]
    for name, g in (("score", of_tokens), ("sampled", of_tokens - p[:, None, None])):
      g = g.sum(2).reshape(A.size, -1)
      parts[name].append(sums(A, g @ g.T))
  found = {"score: by the formula": n_eff_by_formula(p, scores, rewards, group_size, tokens)}
  for name, rows in parts.items():
    numerators, denominators = np.array(rows).T
    counted = denominators > 0
    n_eff = numerators[counted] / denominators[counted]
    found[f"{name}: n_eff of the means"] = numerators.mean() / denominators.mean()
    found[f"{name}: mean α"] = float(np.clip(1 - n_eff, 0, 1).mean())
  return {name: round(float(value), 4) for name, value in found.items()}


def n_eff_by_formula(
  p: np.ndarray, scores: np.ndarray, rewards: np.ndarray, group_size: int, tokens: int
) -> float:
  """n_eff of the means with centred advantages and `score`, by README.md."""
  found = []
  for outcomes in map(Outcomes, p, scores, rewards):
    one, squares = moments(outcomes), float(outcomes.probs @ outcomes.rewards**2)
    more = (tokens - 1) * one.energy  # further tokens: uncorrelated, with nothing of the reward
    found.append(
      one._replace(
        energy=one.energy + more,
        centered_energy=one.centered_energy + more * one.variance,
        raw_energy=one.raw_energy + more * squares,
      )
    )
  return expected_energies(found, group_size).n_eff


# --- real Gram matrices ---------------------------------------------------------------------------


def measure(workdir: pathlib.Path) -> dict[str, dict[str, list[float]]]:
  """Feature → quantity → [mean, half of its 95 % interval] over a run's independent batches."""
  found: dict[str, dict[str, list[float]]] = {}
  for path in sorted((workdir / GEOMETRY_FOLDER).glob("*.npz")):
    with np.load(path) as file:
      arrays = {name: np.asarray(file[name], np.float64) for name in file if "gram" in name}
      A = np.asarray(file["coefficients"], np.float64)
    P, G = A.shape
    for feature, key in (("score", "gram"), ("sampled", "gram_sampled")):
      gram, rows = arrays[key], found.setdefault(feature, {})
      blocks = gram.reshape(P, G, P, G)
      within = np.stack([blocks[x, :, x, :] for x in range(P)])
      pairs = within.sum() - np.trace(gram)
      groups = np.array([sums(a, k) for a, k in zip(A, within, strict=True)])
      whole = sums(A.ravel(), gram)
      used = groups[:, 1] > 0
      n_eff = groups[used, 0] / groups[used, 1]
      values = {
        "cosine": pairs / (G - 1) / np.trace(gram),
        "group": groups[:, 0].sum() / groups[:, 1].sum(),
        "batch": whole[0] / whole[1],
        "pr": np.trace(gram) ** 2 / (gram**2).sum(),
        "group_pr": np.mean([np.trace(k) ** 2 / (k**2).sum() for k in within[used]]),
        "alpha": np.clip(1 - n_eff, 0, 1).mean(),
        "below": np.mean(n_eff < 1),
      }
      for name, value in values.items():
        rows.setdefault(name, []).append(float(value))
  return {
    feature: {
      name: [round(x, 4) for x in mean_and_half_width(values)] for name, values in rows.items()
    }
    for feature, rows in found.items()
  }


def tables(results: Mapping[str, Any]) -> str:
  """The tables of README.md."""
  simulated = {
    f"G = {row['group_size']}, P = {row['prompts']}, T = {row['tokens']}": [
      f"{row[name]:.2f}"
      for name in (
        *("score: by the formula", "score: n_eff of the means", "score: mean α"),
        *("sampled: n_eff of the means", "sampled: mean α"),
      )
    ]
    for row in results["simulated"]
  }
  headings = ["n_eff, by the formula", "simulated", "mean α", "`sampled`: n_eff", "mean α"]
  parts = [markdown_table(headings, simulated, "batches")]
  names = {
    "cosine": "mean ⟨g_i, g_j⟩ of a group, over ‖g‖²",
    "group": "n_eff of a group",
    "batch": "n_eff of the batch",
    "group_pr": "PR of a group",
    "pr": "PR of the batch",
    "alpha": "α of a group",
    "below": "groups with n_eff < 1",
  }
  columns = [(run, feature) for run in results["measured"] for feature in results["measured"][run]]
  rows = {
    said: [
      f"{results['measured'][run][feature][name][0]:.3g} ± "
      f"{results['measured'][run][feature][name][1]:.1g}"
      for run, feature in columns
    ]
    for name, said in names.items()
  }
  if columns:
    parts.append(markdown_table([f"{run}, `{feature}`" for run, feature in columns], rows, "mean"))
  return "\n\n".join([*parts, tiny_policies.tables(results["tiny"], results["search"])])


def rounded(value: Any) -> Any:
  """The value with six digits in every number."""
  if isinstance(value, dict):
    return {key: rounded(x) for key, x in value.items()}
  if isinstance(value, list):
    return [rounded(x) for x in value]
  return float(f"{value:.6g}") if isinstance(value, float) else value


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for run in ("on_policy", "hotter"):
    parser.add_argument(f"--{run}", type=pathlib.Path, help="workdir of this run")
  given = {name: path for name, path in vars(parser.parse_args(argv)).items() if path}
  results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"measured": {}}
  results["simulated"] = [
    {"group_size": G, "prompts": P, "tokens": T, **simulate(G, P, T, draws=4000)}
    for G, P, T in ((8, 1, 1), (64, 1, 1), (8, 16, 1), (8, 1, 40), (64, 1, 40), (8, 16, 40))
  ]
  results |= rounded({"tiny": tiny_policies.measure(), "search": tiny_policies.search()})
  results["measured"] |= {name.replace("_", "-"): measure(path) for name, path in given.items()}
  RESULTS.write_text(json.dumps(results, indent=1) + "\n")
  report.write_tables(PAGE, tables(results))


if __name__ == "__main__":
  main()
