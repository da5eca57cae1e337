"""Draws what the geometry program has written: n_eff against G, Gram matrices, and spectra.

  python -m experiments.language_model.geometry.pictures runs/geometry/base geometry.png

The first argument is that program's workdir, the second the picture to write.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

from rlvr_jax.evaluate.curves import save_figure
from rlvr_jax.geometry import FEATURES
from rlvr_jax.geometry.diagnostics import cosine_gram

SCOPES = {"group": "one prompt", "fixed budget": "256 rollouts", "fixed prompts": "64 prompts"}
SHOWN = 16  # G of the Gram matrices, of 16 prompts


def draw_effective_rollouts(axes: Any, rows: list[dict[str, Any]], feature: str) -> None:
  """n_eff with its intervals against G, a line for each scope; dashed, with permuted rewards."""
  sizes = [row["G"] for row in rows]
  for color, (scope, label) in zip(("#0072b2", "#d55e00", "#009e73"), SCOPES.items(), strict=True):
    value, low, high = np.array([row[scope] for row in rows]).T
    axes.errorbar(sizes, value, (value - low, high - value), color=color, label=label, capsize=3)
    axes.plot(sizes, [row[f"{scope}, null"] for row in rows], "--", color=color)
  axes.axhline(1, color="gray", linewidth=0.8)
  axes.set(xscale="log", yscale="log", xticks=sizes, xlabel="G", ylabel="n_eff", title=feature)
  axes.set_xticks(sizes, map(str, sizes))
  axes.set_xticks([], minor=True)
  axes.legend()


def draw(workdir: pathlib.Path, path: pathlib.Path) -> None:
  results = json.loads((workdir / "geometry.json").read_text(encoding="utf-8"))
  with np.load(workdir / "geometry.npz") as file:
    grams = {feature: file[f"gram_{feature}_{SHOWN}"] for feature in FEATURES}
  with save_figure(path, 2, 3, size=(15, 9), dpi=80) as axes:
    for (counts, cosines, spectrum), feature in zip(axes, FEATURES, strict=True):
      draw_effective_rollouts(counts, results[feature]["groups"], feature)
      matrix = np.asarray(cosine_gram(grams[feature]))
      image = cosines.imshow(matrix, cmap="RdBu", vmin=-1, vmax=1)
      cosines.set_title(f"cosines of 16 prompts × {SHOWN} rollouts, {feature}")
      cosines.figure.colorbar(image, ax=cosines, shrink=0.8)
      eigenvalues = np.linalg.eigvalsh(np.float64(grams[feature]))[::-1]
      spectrum.semilogy(1 + np.arange(64), eigenvalues[:64] / eigenvalues.sum())
      spectrum.set(title=f"spectrum, {feature}", xlabel="eigenvalue", ylabel="share of the trace")


if __name__ == "__main__":
  draw(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
