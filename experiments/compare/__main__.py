"""Same rollouts, many methods: what each would do with one recorded batch, fresh and stale.

  python -m experiments.compare --workdir=runs/compare

Trains the quickstart's policy for `--before` updates, records one batch of rollouts to
WORKDIR/rollouts.npz, and trains on for the largest of `--lags`. For every recipe and lag it takes
the gradient of the recipe's loss on the recorded batch at the parameters of that lag: loss,
gradient norm, cosine of the update direction (the negative gradient, before the optimizer) to
GRPO's, share of clipped or capped tokens, ESS, ratio of the gradient masses mS/mF. Writes
compare.md, compare.json and one heat-map of all pairwise cosines per lag.

With `--rollouts=FILE.npz` (as this program or a non-finite stop writes it), or with a run's store
and the number of a batch, `--rollouts=RUN/rollouts:NUMBER`, the batch is taken from there instead,
and its lag is measured from the trained policy as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.recipes.sweep import RECIPES
from rlvr_jax.commands.train import warm_started
from rlvr_jax.ops import reductions
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.batch import from_shard, read_batch, write_batch
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train import loop, parameters
from rlvr_jax.train.accumulate import policy_logprobs, update_gradient
from rlvr_jax.train.build import Parts, build, make_method
from rlvr_jax.train.checkpoint import Checkpointer
from rlvr_jax.train.grading import grader_pool
from rlvr_jax.train.metrics import MetricWriter, progress, say
from rlvr_jax.train.objective import Method
from rlvr_jax.types import Params, TrainBatch

COLUMNS = {  # heading → metric
  "loss": "loss",
  "gradient norm": "gradient_norm",
  "cosine to GRPO": "cosine",
  "clipped": "loss/clip_fraction",
  "ESS": "behavior/ess",
  "mS/mF": "advantage/mass_ratio",
}

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_BASE = flags.DEFINE_string("base", "quickstart", "Recipe that the policy is trained by.")
_RECIPES = flags.DEFINE_list("recipes", list(RECIPES), "Recipes to compare; grpo is always there.")
_BEFORE = flags.DEFINE_integer("before", 50, "Updates before the batch is recorded.", lower_bound=0)
_LAGS = flags.DEFINE_list("lags", ["0", "8", "32"], "Updates between recording and gradient.")
_ROLLOUTS = flags.DEFINE_string("rollouts", None, "A recorded batch, .npz, to take instead.")


def recipe(name: str) -> Any:
  """The configuration of a recipe by name."""
  return importlib.import_module(f"rlvr_jax.configs.{name}").get_config()


def train_and_record(
  base: Any, workdir: pathlib.Path, *, before: int, lags: Sequence[int]
) -> tuple[Parts, TrainBatch, dict[int, Params], Params, float]:
  """Trains, and returns the parts, the batch, parameters by lag, the first ones and their entropy.

  The first parameters serve the recipes with a reference policy, their entropy FADE's state.
  """
  parts = build(base)
  copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    pool = enter(grader_pool(base, parts.task))
    writer = enter(MetricWriter(workdir / "training", None))
    warm_starts = enter(Checkpointer(workdir / "training" / "warm_start", keep=1))
    unused = enter(Checkpointer(workdir / "training" / "checkpoints", keep=1))
    restored = warm_starts.restore(parts.abstract_state.params)
    frozen = parameters.load_frozen(parts)
    start = (
      restored.state
      if restored
      else warm_started(
        parts, parameters.supervised_state(parts), frozen.trainer, writer, warm_starts
      )
    )
    first = copy(start)
    store = enter(RolloutStore(workdir / "training" / "rollouts", writable=True))
    trainer = loop.Trainer(parts, frozen, writer, unused, pool, store, initial=first)
    entropy = trainer.scorer.measure_entropy(start, trainer.collector)
    trainer.start(parameters.first_state(parts, start, entropy))
    params: dict[int, Params] = {}
    for update in progress(range(before + max(lags) + 1), "training"):
      trainer.collect()
      lag = update - before
      if lag == 0:
        recorded = trainer.queue.load(update).graded.train
      if lag in lags:
        params[lag] = copy(trainer.state.params)
      trainer.update()
    trainer.read_metrics()
  return parts, recorded, params, first, entropy


def recorded_batch(place: str) -> TrainBatch:
  """A batch of FILE.npz, or of STORE:NUMBER."""
  if place.endswith(".npz"):
    return read_batch(place)
  directory, _, number = place.rpartition(":")
  if not number.isdigit():
    raise app.UsageError(f"--rollouts={place}: give FILE.npz, or a store and a batch, STORE:NUMBER")
  store = RolloutStore(directory, writable=False)
  batch = from_shard(int(number), *store.read(int(number))).graded.train
  return dataclasses.replace(batch, sources=None)


def directions(
  name: str,
  parts: Parts,
  batch: TrainBatch,
  params: dict[int, Params],
  reference: Params,
  entropy: float,
) -> dict[int, tuple[dict[str, float], np.ndarray]]:
  """By lag, a recipe's metrics on the batch and its gradient as one vector."""
  method: Method = make_method(recipe(name), parts.model, parts.mesh)
  limit = parts.config.max_response_length
  method = method._replace(max_response_length=limit)
  logprobs = jax.jit(lambda p, b: policy_logprobs(p, {}, b, method=method)[0])
  batch = dataclasses.replace(batch, reference_logprobs=None, proximal_logprobs=None)
  if method.reference_kl:
    batch = dataclasses.replace(batch, reference_logprobs=logprobs(reference, batch))
  state = method.advantage.init(jnp.float32(entropy))
  coefficients = method.advantage.apply(state, batch)
  masses = method.coefficient_metrics(coefficients, batch.rewards, batch.correct)
  key = key_for(parts.config.seed, "reweighting")
  gradient_of = jax.jit(functools.partial(update_gradient, method=method))
  found = {}
  for lag, at in params.items():
    # π_prox is the policy when the batch is first trained on, which is now.
    proximal = logprobs(at, batch) if method.loss.needs_proximal else None
    now = dataclasses.replace(batch, proximal_logprobs=proximal)
    (value, metrics), gradient = gradient_of(at, {}, now, coefficients, key)
    vector = np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(gradient))])
    numbers = {k: float(v) for k, v in reductions.values({**masses, **metrics}).items()}
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    found[lag] = ({**numbers, "loss": float(value), "gradient_norm": norm}, vector)
  return found


def cosines(vectors: Sequence[np.ndarray]) -> np.ndarray:
  """f64[M, M], pairwise; 0 where a vector is zero."""
  stacked = np.stack(vectors).astype(np.float64)
  norms = np.linalg.norm(stacked, axis=1, keepdims=True)
  unit = stacked / np.where(norms > 0, norms, 1.0)
  return unit @ unit.T


def table(names: Sequence[str], rows: dict[str, dict[str, float]]) -> str:
  """Markdown, one row per recipe."""
  cell = lambda row, metric: f"{row[metric]:.3g}" if metric in row else "–"
  lines = [f"| recipe | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
  lines += [
    f"| {name} | {' | '.join(cell(rows[name], m) for m in COLUMNS.values())} |" for name in names
  ]
  return "\n".join(lines)


def draw(path: pathlib.Path, names: Sequence[str], matrix: np.ndarray, title: str) -> None:
  """A heat-map of pairwise cosines with its numbers."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  size = 2.5 + 0.5 * len(names)
  figure, axes = pyplot.subplots(figsize=(size, size))
  image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu")
  axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
  axes.set_yticks(range(len(names)), names)
  for (i, j), value in np.ndenumerate(matrix):
    color = "white" if abs(value) > 0.6 else "black"
    axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
  axes.set_title(title)
  figure.colorbar(image, shrink=0.7, label="cosine of update directions")
  figure.tight_layout()
  figure.savefig(path, dpi=80)
  pyplot.close(figure)


def compare(
  workdir: pathlib.Path,
  *,
  base: Any,
  recipes: Sequence[str],
  before: int,
  lags: Sequence[int],
  rollouts: str | None = None,
) -> dict[int, dict[str, dict[str, float]]]:
  """Everything that the module's docstring says; returns the numbers by lag and recipe."""
  workdir.mkdir(parents=True, exist_ok=True)
  parts, batch, params, reference, entropy = train_and_record(
    base, workdir, before=before, lags=lags
  )
  if rollouts is not None:
    batch = recorded_batch(rollouts)
  write_batch(workdir / "rollouts.npz", batch)
  names = ["grpo", *(name for name in recipes if name != "grpo")]
  found = {
    name: directions(name, parts, batch, params, reference, entropy)
    for name in progress(names, "recipes")
  }
  numbers: dict[int, dict[str, dict[str, float]]] = {}
  sections = []
  for lag in sorted(params):
    matrix = cosines([found[name][lag][1] for name in names])
    rows = {
      name: {**found[name][lag][0], "cosine": float(matrix[0, i])} for i, name in enumerate(names)
    }
    numbers[lag] = rows
    draw(workdir / f"cosines_lag_{lag}.png", names, matrix, f"{lag} updates after recording")
    sections.append(f"### {lag} updates after recording\n\n{table(names, rows)}")
  (workdir / "compare.md").write_text("\n\n".join(sections) + "\n")
  (workdir / "compare.json").write_text(json.dumps(numbers, indent=1))
  return numbers


def main(argv: list[str]) -> None:
  del argv
  workdir = pathlib.Path(_WORKDIR.value)
  compare(
    workdir,
    base=recipe(_BASE.value),
    recipes=_RECIPES.value,
    before=_BEFORE.value,
    lags=sorted({int(lag) for lag in _LAGS.value}),
    rollouts=_ROLLOUTS.value,
  )
  say((workdir / "compare.md").read_text())
  say(f"heat-maps and numbers lie in {workdir}")


if __name__ == "__main__":
  app.run(main)
