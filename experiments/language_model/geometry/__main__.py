"""SALT's geometry on a real language model: how far do the gradients of its rollouts cancel?

  python -m experiments.language_model.geometry --workdir=runs/geometry/base
  python -m experiments.language_model.geometry --workdir=runs/geometry/grpo \\
    --checkpoint=runs/grpo/checkpoints/50

Samples 64 rollouts of each of 64 prompts from a policy, the published one or a checkpoint's, and
trains nothing. g_i is the gradient of rollout i at the output head (the features `score` and
`sampled` of docs/methods/salt.md). A_i is its GRPO advantage among the first G rollouts of its
prompt, G = 4, …, 64. With u_x = Σ_i A_i g_i over the rollouts of prompt x, P prompts have

  n_eff = (mean_x ‖u_x‖² + (P − 1) mean_{x≠y} u_x·u_y) / mean_x Σ_i A_i²‖g_i‖²

as the ratio of two expectations over prompts; P = 1 is a group alone. Its interval is of a
bootstrap over prompts. As null, rewards are permuted within each prompt, `PERMUTATIONS` times.
Writes geometry.json, and geometry.npz with Gram matrices for pictures. Source of n_eff: "SALT: When
More Rollouts Don't Help in Group-Based Policy Optimization and How to Make Them Matter"
(arXiv:2606.05800).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from absl import app, flags
from ml_collections import ConfigDict

from experiments.language_model.config import get_config
from experiments.testbed.report import sign_agreement
from rlvr_jax.advantages.grpo import grpo_advantages
from rlvr_jax.evaluate.compare import markdown_table
from rlvr_jax.evaluate.pass_at_k import bootstrap_interval
from rlvr_jax.geometry import (
  FEATURES,
  GramContext,
  diagnostics,
  num_selected,
  per_rollout,
  streaming,
)
from rlvr_jax.geometry.agreement import gram_agreement
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.ops.spectral import participation_ratio
from rlvr_jax.train.loop import next_batch
from rlvr_jax.train.reporting.progress import progress, say
from rlvr_jax.train.session import open_session
from rlvr_jax.train.setup.build import build, gram_context
from rlvr_jax.types import Array, Forward, Head, Params, TrainBatch
from rlvr_jax.update.accumulate import batch_forward
from rlvr_jax.update.objective import Method

Floats = npt.NDArray[np.float64]

PROMPTS, ROLLOUTS = 64, 64
SIZES = (4, 8, 16, 32, 64)  # G
BUDGET = 256  # rollouts of the batches with a fixed budget
# Prompts and rollouts of each, compared with the last block: a gradient of one takes that of all
# layers in memory, 0.4 GB, for each prompt.
COMPARED = (8, 16)
PERMUTATIONS = 4  # of the rewards, as null
RESAMPLES = 2000  # of the bootstrap over prompts
COLUMNS = 128  # of the output head at a time
SLOTS = 256  # rollouts that are sampled at a time

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_CHECKPOINT = flags.DEFINE_string("checkpoint", "", "WORKDIR/checkpoints/STEP; '': as published.")
_SEED = flags.DEFINE_integer("seed", 0, "Of prompts, rollouts, permutations and resampling.")


class Rollouts(NamedTuple):
  """Rollouts of a policy, and its forward pass on them."""

  hidden: Array  # f32[P, G, T, D], 0 where no token counts in the loss
  log_normalizers: Array  # f32[P, G, T]
  batch: TrainBatch


class Products(NamedTuple):
  """Inner products of the gradients of P prompts with G rollouts each, of M coefficients."""

  within: Floats  # [P, G, G], g_i · g_j of each prompt
  between: Floats  # [M, P, P], u_x · u_y


# --- rollouts -------------------------------------------------------------------------------------


def sample(
  config: ConfigDict, workdir: pathlib.Path
) -> tuple[Rollouts, Params, Method, GramContext]:
  """One batch of rollouts of the policy that the configuration starts from."""
  parts = build(config)
  with open_session(parts, workdir) as session:
    batch = next_batch(session.run, session.now).train
    params = session.now.state.params
    method = parts.method
    context = gram_context(method.model, None, method.temperature)
    return _with_forward(batch, params, method, context), params, method, context


def _with_forward(
  batch: TrainBatch, params: Params, method: Method, context: GramContext
) -> Rollouts:
  """The forward pass on all rollouts of one prompt after another, which bounds the memory."""
  with_hidden = method._replace(gram=streaming(), gram_context=context)
  forward = jax.jit(functools.partial(batch_forward, method=with_hidden))
  P, G, T = batch.tokens.shape
  hidden, log_normalizers = [], []
  for prompt in progress(range(P), "forward passes", unit="prompts"):
    _, found = forward(params, {}, _rows(batch, slice(prompt, prompt + 1), slice(None)))
    hidden.append(found.hidden.reshape(G, T, -1))
    log_normalizers.append(found.log_normalizers.reshape(G, T))
  in_loss = batch.mask[..., None] > 0
  hidden = jnp.where(in_loss, jnp.stack(hidden), 0.0)
  return Rollouts(hidden, jnp.stack(log_normalizers), batch)


def _rows(batch: TrainBatch, prompts: slice, rollouts: slice) -> TrainBatch:
  """Some rollouts of some prompts."""
  part = lambda x: x[prompts, rollouts] if x.ndim > 1 else x[prompts]
  of_prompts = jax.tree.map(lambda x: x[prompts], batch.prompts)
  arrays = jax.tree.map(part, dataclasses.replace(batch, prompts=None))
  return dataclasses.replace(arrays, prompts=of_prompts)


def part_of(rollouts: Rollouts, prompts: int, size: int) -> tuple[TrainBatch, Forward]:
  """The first rollouts of the first prompts, as a batch whose rows are rollouts."""
  first = slice(prompts), slice(size)
  rows = lambda x: x[first].reshape(1, prompts * size, *x.shape[2:])
  forward = Forward(rows(rollouts.hidden), rows(rollouts.log_normalizers), None)
  return _rows(rollouts.batch, *first), forward


# --- inner products -------------------------------------------------------------------------------


def products(
  rollouts: Rollouts,
  head: Head,
  coefficients: Array,
  feature: str,
  temperature: float,
  columns: int = COLUMNS,
) -> Products:
  """Inner products at the output head, `columns` of its kernel at a time, summed in float64.

  Args:
    head: its soft cap must be None and its scale 1.
    coefficients: f32[M, P, G], A.
    feature: "score" or "sampled".
    temperature: of the policy, as in the forward pass.
  """
  if head.soft_cap is not None or head.scale != 1.0:
    raise ValueError("the head has a soft cap or a scale; these products are of a plain one")
  P, G = rollouts.batch.rewards.shape
  within, between = np.zeros((P, G, G)), np.zeros((len(coefficients), P, P))
  indices = np.arange(head.kernel.shape[1])
  if feature == "sampled":  # all other columns are 0
    indices = np.unique(np.asarray(rollouts.batch.tokens)[np.asarray(rollouts.batch.mask) > 0])
  blocks = [indices[first : first + columns] for first in range(0, len(indices), columns)]
  for block in progress(blocks, f"products, {feature}", unit="blocks"):
    kernel = head.kernel[:, block]
    parts = _products_of_columns(
      rollouts, coefficients, kernel, block, temperature, feature=feature
    )
    within += np.asarray(parts[0], np.float64)
    between += np.asarray(parts[1], np.float64)
  return Products(within, between)


@functools.partial(jax.jit, static_argnames="feature")
def _products_of_columns(
  rollouts: Rollouts,
  coefficients: Array,
  kernel: Array,
  indices: Array,
  temperature: Array,
  *,
  feature: str,
) -> tuple[Array, Array]:
  """`Products` of the entries of g for some columns [D, v] of the kernel, with their indices."""

  def of_prompt(arguments: tuple[Array, ...]) -> tuple[Array, Array]:
    hidden, log_normalizers, tokens, A = arguments  # [G, T, D], [G, T], [G, T], [M, G]
    d = -(tokens[..., None] == indices).astype(hidden.dtype)
    if feature == "score":
      logits = head_logits(hidden, Head(kernel))
      d += jnp.exp(logits / temperature - log_normalizers[..., None])
    g = jnp.einsum("gtd,gtv->gdv", hidden, d / temperature)
    return jnp.einsum("gdv,hdv->gh", g, g), jnp.einsum("mg,gdv->mdv", A, g)

  arrays = rollouts.hidden, rollouts.log_normalizers, rollouts.batch.tokens
  within, u = jax.lax.map(of_prompt, (*arrays, coefficients.swapaxes(0, 1)))
  return within, jnp.einsum("pmdv,qmdv->mpq", u, u)


# --- effective rollouts ---------------------------------------------------------------------------


def nested_advantages(rewards: npt.ArrayLike, size: int) -> Floats:
  """[P, G], GRPO's advantages among the first `size` rollouts of each prompt; 0 for the others."""
  rewards = np.asarray(rewards, np.float32)
  A = np.zeros(rewards.shape)
  first = jnp.asarray(rewards[:, :size])
  A[:, :size] = grpo_advantages(first, jnp.ones(first.shape, bool), epsilon=1e-6)
  return A


def effective_rollouts(
  between: Floats, separate: Floats, num_prompts: int, counts: npt.ArrayLike | None = None
) -> float:
  """n_eff of a batch of `num_prompts` prompts, see the module; NaN where no prompt has a signal.

  Args:
    between: [N, N], u_x · u_y.
    separate: [N], Σ_i A_i²‖g_i‖² of each prompt.
    counts: [N], how often the resampling drew each prompt; None: once. Two draws of one prompt are
      no pair of different prompts.
  """
  w = np.ones(len(separate)) if counts is None else np.asarray(counts, np.float64)
  own = np.diagonal(between)
  pairs = w.sum() ** 2 - np.sum(w**2)
  cross = (w @ between @ w - np.sum(w**2 * own)) / pairs
  energy = w @ own / w.sum() + (num_prompts - 1) * cross
  alone = w @ separate / w.sum()
  return float(energy / alone) if alone > 0 else float("nan")


def with_interval(
  between: Floats, separate: Floats, num_prompts: int, seed: int
) -> tuple[float, float, float]:
  """(n_eff, low, high), 95 % by a bootstrap over prompts."""
  N = len(separate)
  rng = np.random.default_rng(seed)
  found = [
    effective_rollouts(between, separate, num_prompts, np.bincount(draw, minlength=N))
    for draw in rng.integers(N, size=(RESAMPLES, N))
  ]
  low, high = np.nanpercentile(found, [2.5, 97.5])
  return effective_rollouts(between, separate, num_prompts), float(low), float(high)


def mean_with_interval(values: npt.ArrayLike, seed: int) -> tuple[float, float, float]:
  """(mean, low, high) over prompts, 95 % by a bootstrap."""
  low, high = bootstrap_interval(values, num_resamples=RESAMPLES, seed=seed)
  return float(np.mean(values)), low, high


def verdict(low: float, high: float) -> str:
  """What an interval of n_eff says about S1, that gradients cancel: the rule of README.md."""
  return "found" if high < 0.9 else "reversed" if low > 1 else "undecided"


# --- all figures ----------------------------------------------------------------------------------


def sets_of_coefficients(rewards: Floats, seed: int) -> dict[tuple[int, int], Floats]:
  """(G, permutation) → A [P, 64]; permutation 0 has the rewards as they are."""
  rng = np.random.default_rng(seed)
  permuted = [rewards, *(rng.permuted(rewards, axis=1) for _ in range(PERMUTATIONS))]
  return {
    (size, number): nested_advantages(r, size)
    for size in SIZES
    for number, r in enumerate(permuted)
  }


def group_figures(found: Products, rewards: Floats, seed: int) -> list[dict[str, Any]]:
  """A row for each G: n_eff of a group, of 64 prompts and of the budget, PR, and the null."""
  sets = sets_of_coefficients(rewards, seed)
  squares = np.diagonal(found.within, axis1=1, axis2=2)
  scopes = {"group": lambda size: 1, "fixed prompts": lambda size: PROMPTS}
  scopes["fixed budget"] = lambda size: BUDGET // size
  rows = []
  for size in SIZES:
    row: dict[str, Any] = {"G": size}
    at = {number: i for i, (G, number) in enumerate(sets) if G == size}
    separate = {n: np.sum(sets[size, n] ** 2 * squares, axis=1) for n in at}
    for name, prompts in scopes.items():
      row[name] = with_interval(found.between[at[0]], separate[0], prompts(size), seed)
      null = [effective_rollouts(found.between[at[n]], separate[n], prompts(size)) for n in at if n]
      row[f"{name}, null"] = float(np.mean(null))
    ratios = jax.vmap(participation_ratio)(jnp.asarray(found.within[:, :size, :size]))
    row["PR of a group"] = mean_with_interval(ratios, seed)
    rows.append(row)
  return rows


def batch_figures(
  rollouts: Rollouts,
  params: Params,
  context: GramContext,
  feature: str,
  sizes: Sequence[int],
  budget: int,
) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
  """Diagnostics of a batch of the budget for each G, and their Gram matrices."""
  rows, grams = [], {}
  gram = jax.jit(lambda b, f: streaming(feature=feature).gram(params, {}, b, f, context))
  for size in sizes:
    prompts = budget // size
    batch, forward = part_of(rollouts, prompts, size)
    K = gram(batch, forward)
    A = jnp.asarray(nested_advantages(batch.rewards, size), jnp.float32)
    figures = diagnostics.diagnose(K, A, A, prompts)
    rows.append({name.removeprefix("geometry/"): float(x) for name, x in figures.items()})
    grams[f"gram_{feature}_{size}"] = np.asarray(K)
  return rows, grams


def agreement_figures(
  rollouts: Rollouts, params: Params, context: GramContext, seed: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
  """The head's geometry (`score`) against that of the last block, and the two Gram matrices."""
  batch, forward = part_of(rollouts, *COMPARED)
  of_head, of_block = streaming(), per_rollout(parameters="last_block")
  gram = jax.jit(lambda b, f: of_head.gram(params, {}, b, f, context))(batch, forward)
  compared = jax.jit(lambda b: of_block.gram(params, {}, b, None, context))(batch)
  dim = num_selected(params, {}, context, parameters="last_block")
  found = gram_agreement(gram, compared, jax.random.key(seed), feature_dim=dim)
  grams = {"gram": np.asarray(gram), "gram_compared": np.asarray(compared)}
  signs, by_chance = sign_agreement([grams])
  figures = {name: float(x) for name, x in found._asdict().items()}
  return figures | {"signs": signs, "signs_by_chance": by_chance}, grams


def measure(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
  """All figures of a policy; writes geometry.json and geometry.npz into `workdir`."""
  rollouts, params, method, context = sample(config, workdir / "sampled")
  rewards = np.asarray(rollouts.batch.rewards, np.float64)
  sets = jnp.asarray(np.stack([*sets_of_coefficients(rewards, config.seed).values()]), jnp.float32)
  head = method.model.head(method.model.combine(params, {}))
  results: dict[str, Any] = {
    "pass@1": mean_with_interval(rewards.mean(axis=1), config.seed),
    "mixed groups": float(np.mean(rewards.std(axis=1) > 0)),
    "tokens": float(rollouts.batch.mask.sum(axis=-1).mean()),
  }
  arrays: dict[str, np.ndarray] = {"rewards": rewards}
  for feature in reversed(FEATURES):  # the quick one first
    found = products(rollouts, head, sets, feature, context.temperature)
    rows, grams = batch_figures(rollouts, params, context, feature, SIZES, BUDGET)
    results[feature] = {"groups": group_figures(found, rewards, config.seed), "batches": rows}
    arrays |= {**grams, f"within_{feature}": found.within, f"between_{feature}": found.between}
    write(workdir, results, arrays)
  results["last block"], grams = agreement_figures(rollouts, params, context, config.seed)
  arrays |= grams
  write(workdir, results, arrays)
  return results


def write(
  workdir: pathlib.Path, results: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  np.savez_compressed(workdir / "geometry.npz", **{k: np.float32(x) for k, x in arrays.items()})
  (workdir / "geometry.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(groups: Sequence[Mapping[str, Any]]) -> str:
  """Markdown: a row for each G, intervals in brackets, the null's value in parentheses."""
  scopes = ("group", "fixed prompts", "fixed budget")
  rows = {}
  for row in groups:
    cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*row[s]) for s in scopes]
    cells = [f"{cell} ({row[f'{s}, null']:.2f})" for cell, s in zip(cells, scopes, strict=True)]
    ratio = "{:.1f} [{:.1f}, {:.1f}]".format(*row["PR of a group"])
    decided = verdict(*row["fixed budget"][1:])
    rows[str(row["G"])] = [*cells, decided, ratio]
  header = [*(f"n_eff, {scope}" for scope in scopes), "verdict", "PR of a group"]
  return markdown_table(header, rows, "G")


def main(argv: list[str]) -> None:
  del argv
  workdir = pathlib.Path(_WORKDIR.value)
  workdir.mkdir(parents=True, exist_ok=True)
  config = get_config()
  config.seed = _SEED.value
  config.batch.prompts, config.batch.group_size = PROMPTS, ROLLOUTS
  config.start.checkpoint = _CHECKPOINT.value
  config.optimizer = "sgd"  # nothing is trained: no moments
  config.sampling.slots = SLOTS
  results = measure(config, workdir)
  for feature in FEATURES:
    say(f"{feature}\n\n{table(results[feature]['groups'])}")


if __name__ == "__main__":
  app.run(main)
