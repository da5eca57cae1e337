"""Compares the gradient of every loss on rollouts that are off with the on-policy gradient.

  python -m experiments.mismatch --workdir=runs/mismatch

Trains a policy for `--before` updates, and samples a batch of it under every condition of
`CONDITIONS`: exactly, by an fp8 copy, and from the 95 % most probable tokens. The exact batch is
also taken at the policies of `--lags` updates later. The gradient of every loss of `LOSSES` on
these rollouts is compared with the *on-policy gradient*: that of GRPO's advantage and plain policy
gradient on `--fresh` exact batches of the policy at which it is taken. Columns of the table:

* cosine: of the two gradients. The row `fresh` has that of one fresh on-policy batch: what sampling
  noise leaves of 1.
* norm: of the loss's gradient, over its norm where sampler and policy agree.
* bounded: share of loss tokens that the loss clips, or the correction drops.
* ESS: effective sample size of π/β, the policy over the policy that sampled.

`--base=quickstart_experts` trains a mixture, and `--routing` says whether its gradients replay the
sampler's routes or recompute them. Writes WORKDIR/mismatch.md, mismatch.json and mismatch.png.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.evaluate.curves import save_figure
from rlvr_jax.evaluate.figures import plot_cosines
from rlvr_jax.train.reporting.progress import progress, say
from rlvr_jax.train.same_rollouts import (
  cosines,
  gradient_function,
  load_recipe,
  sample_batches,
  train_and_record,
)
from rlvr_jax.types import TrainBatch

EXACT = "exact"
CONDITIONS: dict[str, dict[str, Any]] = {  # of sampling → fields
  EXACT: {},
  "fp8 copy": {"sources.quantized": dict(fraction=1.0, format="float8_e4m3fn")},
  "top-p 0.95": {"sampling.top_p": 0.95, "allow_truncated_behavior": True},
}
FRESH = "fresh"
LOSSES: dict[str, dict[str, Any]] = {  # row → fields
  "policy gradient": {"loss": "reinforce"},
  "ppo_clip": {},
  "cispo": {"loss": "cispo"},
  "gspo": {"loss": "gspo"},
  "gmpo": {"loss": "gmpo"},
  "sapo": {"loss": "sapo"},
  "topr": {"loss": "topr"},
  "m2po": {"loss": "m2po"},
  "decoupled_ppo": {"loss": "decoupled_ppo"},
  "p3o": {"loss": "p3o"},
  "dppo": {"loss": "dppo"},
  "vespo": {"loss": "vespo"},
  "clip_cov": {"loss": "clip_cov"},
  "kl_cov": {"loss": "kl_cov"},
  "ppo_clip, tis": {"correction": "tis"},
  "ppo_clip, sequence tis": {"correction": "tis(level='sequence')"},
  "ppo_clip, mis": {"correction": "mis"},
  "ppo_clip, icepop": {"correction": "icepop"},
  "ppo_clip, k3_rejection": {"correction": "k3_rejection"},
  "ppo_clip, geometric_rejection": {"correction": "geometric_rejection"},
  "ppo_clip, opsm": {"correction": "opsm"},
  "ppo_clip, tv_mask": {"correction": "tv_mask"},
}
COLUMNS = ("cosine", "norm", "bounded", "ESS")
Row = dict[str, float]

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_BASE = flags.DEFINE_string("base", "quickstart", "Recipe by which the policy is trained.")
_BEFORE = flags.DEFINE_integer("before", 50, "Updates before the batches are sampled.")
_LAGS = flags.DEFINE_list("lags", ["1", "8", "32"], "Updates from the exact batch to its gradient.")
_ROUTING = flags.DEFINE_enum(
  "routing", "recomputed", ["recomputed", "replayed"], "Routes of a mixture's gradients."
)
_FRESH = flags.DEFINE_integer("fresh", 8, "On-policy batches of a policy.", lower_bound=2)


def with_fields(base: Any, fields: Mapping[str, Any]) -> Any:
  """A copy of a configuration with other fields, by the dotted names of the fields."""
  c = base.copy_and_resolve_references()
  with c.unlocked():
    for name, value in fields.items():
      c.update_from_flattened_dict({name: value})
  return c


def sampling_only(base: Any, fields: Mapping[str, Any], *, seed: int) -> Any:
  """The configuration of a run that samples on-policy batches of a policy, and trains nothing."""
  c = with_fields(base, {"schedule": "on_policy", "seed": seed, **fields})
  c.warm_start.num_steps = 0
  c.evaluation.num_samples, c.evaluation.ks = 1, (1,)
  return c


def bounded(metrics: Mapping[str, float]) -> float:
  """The share of loss tokens that the loss clips or the correction drops."""
  return max(metrics.get("loss/clip_fraction", 0.0), metrics.get("correction/dropped", 0.0))


def measure(
  base: Any,
  workdir: pathlib.Path,
  *,
  before: int,
  lags: Sequence[int],
  fresh: int,
  conditions: Mapping[str, Mapping[str, Any]] = CONDITIONS,
  losses: Mapping[str, Mapping[str, Any]] = LOSSES,
) -> dict[str, dict[str, Row]]:
  """Condition → row → the columns of the table.

  Args:
    base: configuration by which the policy is trained.
    workdir: folder for the runs.
    before: updates before the batches are sampled.
    lags: updates from the exact batch to its gradient, each above 0.
    fresh: number of on-policy batches of a policy.
    conditions: of sampling; the first one is `EXACT`.
    losses: rows of the table.
  """
  base = with_fields(base, {"schedule": "on_policy", "aggregation": "token_mean"})
  base.reference.kl_coefficient = 0.0
  parts, _, params, *_ = train_and_record(base, workdir, before=before, lags=[0, *lags])
  trained, mesh = parts.method, parts.placement.mesh
  batches: dict[str, tuple[TrainBatch, int]] = {}  # condition → (batch, lag)
  for name, fields in progress(conditions.items(), "batches", unit="conditions"):
    config = sampling_only(base, fields, seed=base.seed + 1)
    (batch,) = sample_batches(config, workdir / "sampled" / name, params[0], count=1)
    batches[name] = batch, 0
  batches |= {f"lag {lag}": (batches[EXACT][0], lag) for lag in lags}
  make_gradient = lambda fields: gradient_function(
    with_fields(base, fields), trained, mesh, params[0], 0.0
  )
  plain = make_gradient(LOSSES["policy gradient"])
  on_policy: dict[int, np.ndarray] = {}
  ceilings: dict[int, float] = {}
  for lag in progress([0, *lags], "on-policy gradients", unit="policies"):
    config = sampling_only(base, {}, seed=base.seed + 2)
    folder = workdir / "on_policy" / str(lag)
    found = sample_batches(config, folder, params[lag], count=fresh)
    gradients = [plain(batch, params[lag])[1] for batch in found]
    ceilings[lag], on_policy[lag] = ceiling(gradients), np.mean(gradients, axis=0)
  rows: dict[str, dict[str, Row]] = {name: {} for name in batches}
  for condition, (_, lag) in batches.items():
    rows[condition][FRESH] = {"cosine": ceilings[lag]}
  for label, fields in progress(losses.items(), "gradients", unit="losses"):
    gradient_at = make_gradient(fields)
    norm_on_policy = 0.0
    for condition, (batch, lag) in batches.items():
      metrics, gradient = gradient_at(batch, params[lag])
      norm = metrics["gradient_norm"]
      norm_on_policy = norm_on_policy or norm  # the first condition is the exact one
      rows[condition][label] = {
        "cosine": float(cosines([gradient, on_policy[lag]])[0, 1]),
        "norm": norm / norm_on_policy,
        "bounded": bounded(metrics),
        "ESS": metrics["behavior/ess"],
      }
  return rows


def ceiling(vectors: Sequence[np.ndarray]) -> float:
  """The mean cosine of each of several gradients with the mean of the others."""
  total = np.sum(vectors, axis=0)
  pairs = [cosines([vector, total - vector])[0, 1] for vector in vectors]
  return float(np.mean(pairs))


def table(rows: Mapping[str, Mapping[str, Row]]) -> str:
  """A Markdown table with a row for each loss, and the columns of each condition."""
  conditions = list(rows)
  head = [f"{condition}: {column}" for condition in conditions for column in COLUMNS]
  cells = {}
  for label in rows[conditions[0]]:
    found = [rows[condition][label].get(column) for condition in conditions for column in COLUMNS]
    cells[label] = ["–" if value is None else f"{value:.2f}" for value in found]
  return markdown_table(head, cells, "loss")


def draw(path: pathlib.Path, rows: Mapping[str, Mapping[str, Row]]) -> None:
  """Saves a picture of the cosines: a row for each loss, a column for each condition."""
  conditions, labels = list(rows), list(rows[next(iter(rows))])
  matrix = np.array([[rows[c][label]["cosine"] for c in conditions] for label in labels])
  size = 2 + 0.9 * len(conditions), 1 + 0.32 * len(labels)
  with save_figure(path, size=size, dpi=100) as axes:
    image = plot_cosines(axes, labels, matrix, conditions)
    axes.set_aspect("auto")
    axes.set_title("cosine with the on-policy gradient")
    axes.figure.colorbar(image, ax=axes, shrink=0.7)


def run(workdir: pathlib.Path, base: Any, **arguments: Any) -> dict[str, dict[str, Row]]:
  """Runs the comparison and writes all files.

  Args:
    workdir: folder for the results.
    base, arguments: see `measure`.
  Returns:
    The numbers by condition and loss.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  rows = measure(base, workdir, **arguments)
  (workdir / "mismatch.json").write_text(json.dumps(rows, indent=1))
  (workdir / "mismatch.md").write_text(table(rows) + "\n")
  draw(workdir / "mismatch.png", rows)
  return rows


def main(argv: list[str]) -> None:
  del argv
  workdir = pathlib.Path(_WORKDIR.value)
  lags = sorted({int(lag) for lag in _LAGS.value} - {0})
  base = with_fields(load_recipe(_BASE.value), {"model.routing": _ROUTING.value})
  run(workdir, base, before=_BEFORE.value, lags=lags, fresh=_FRESH.value)
  say((workdir / "mismatch.md").read_text())


if __name__ == "__main__":
  app.run(main)
