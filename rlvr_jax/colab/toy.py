"""A policy small enough to be trained many times in a notebook, with exact log-probabilities.

Task: an answer of T tokens is right if every token is in the set allowed at its position; sets
differ in size between prompts, so that some prompts are hard. Policy: the logits at a position are
fixed random features of the prompt, the position and the previous token, times the kernel of an
output head. Only the kernel is trained, by plain gradient descent. Advantages, losses, vetoes,
schedules and metrics come from the package.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax import parts
from rlvr_jax.advantages import Advantage, grpo_mean
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.evaluate.curves import mean_curve, metric_range
from rlvr_jax.evaluate.figures import legend_outside, method_style
from rlvr_jax.geometry.updates import rank_one_fraction
from rlvr_jax.losses import Loss
from rlvr_jax.ops import reductions
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.logprobs import TokenStatistics, distribution, head_logits, token_statistics
from rlvr_jax.ops.update_metrics import batch_metrics, policy_metrics
from rlvr_jax.ops.veto import Veto
from rlvr_jax.rollouts.staleness import Schedule, plan
from rlvr_jax.types import Array, Head, Sampling, TrainBatch

RECORDED = ("sampled", "raw")


class Toy(NamedTuple):
  """A task, and the features of its policies."""

  features: Array  # f32[P, T, D], features of prompt and position
  previous: Array  # f32[V + 1, D], features of the previous token; the last row: no previous token
  allowed: Array  # bool[P, T, V], the tokens that are right at each position


def make_toy(
  *,
  prompts: int = 8,
  length: int = 6,
  vocabulary: int = 12,
  width: int = 24,
  allowed: tuple[float, float] = (0.4, 0.8),
  seed: int = 0,
) -> Toy:
  """Makes a task and its features.

  Args:
    prompts, length, vocabulary, width: the sizes P, T, V and D of the arrays of `Toy`.
    allowed: share of the tokens allowed per position, for the hardest and the easiest prompt.
    seed: seed of the allowed sets and the features.
  """
  rng = np.random.default_rng(seed)
  P, T, V, D = prompts, length, vocabulary, width
  counts = np.round(np.linspace(*allowed, P) * V).astype(int)
  ranks = rng.permuted(np.broadcast_to(np.arange(V), (P, T, V)), axis=-1)

  def normal(*shape: int) -> Array:
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(D), jnp.float32)

  return Toy(normal(P, T, D), normal(V + 1, D) / 2, jnp.asarray(ranks < counts[:, None, None]))


def first_kernel(toy: Toy) -> Array:
  """The zero kernel f32[D, V], whose policy is uniform."""
  return jnp.zeros((toy.features.shape[-1], toy.allowed.shape[-1]))


def uniform_numbers(toy: Toy, seed: int, number: int, group_size: int) -> np.ndarray:
  """Uniform random numbers f32[P, G, T], with which a run samples the batch with this `number`."""
  P, T, _ = toy.features.shape
  return np.random.default_rng([seed, number]).random((P, group_size, T), np.float32)


def sample(toy: Toy, kernel: Array, random: Array, *, temperature: float = 1.0) -> Array:
  """Samples tokens i32[P, G, T] from a policy, given numbers f32[P, G, T] uniform on [0, 1).

  Equal policies with equal numbers give equal answers, so that policies can be compared.
  """
  V = toy.allowed.shape[-1]
  no_token = jnp.full(random.shape[:2], V, jnp.int32)

  def sample_position(last, inputs):
    features, uniform = inputs
    logits = head_logits(features[:, None] + toy.previous[last], Head(kernel))
    probabilities = jnp.exp(distribution(logits, Sampling(temperature=temperature)))
    passed = jnp.cumsum(probabilities, axis=-1) <= uniform[..., None]
    tokens = jnp.minimum(jnp.sum(passed, axis=-1), V - 1)
    return tokens, tokens

  by_position = toy.features.swapaxes(0, 1), jnp.moveaxis(random, -1, 0)
  return jnp.moveaxis(jax.lax.scan(sample_position, no_token, by_position)[1], 0, -1)


def statistics(
  toy: Toy, kernel: Array, tokens: Array, *, temperature: float = 1.0
) -> TokenStatistics:
  """Log-probabilities and entropies f32[P, G, T] of tokens i32[P, G, T] under a policy, nats."""
  no_token = jnp.full((*tokens.shape[:2], 1), toy.allowed.shape[-1], tokens.dtype)
  last = jnp.concatenate([no_token, tokens[..., :-1]], axis=-1)
  hidden = toy.features[:, None] + toy.previous[last]
  return token_statistics(hidden, Head(kernel), tokens, Sampling(temperature=temperature))


def rewards(toy: Toy, tokens: Array) -> Array:
  """Rewards f32[P, G]: 1 if all tokens of an answer are allowed, else 0."""
  allowed = jnp.take_along_axis(toy.allowed[:, None], tokens[..., None], axis=-1)
  return jnp.all(allowed[..., 0], axis=-1).astype(jnp.float32)


# --- runs -----------------------------------------------------------------------------------------


class Recipe(NamedTuple):
  """Components and settings of a method."""

  loss: Loss
  advantage: Advantage = grpo_mean()
  veto: Veto | None = None
  temperature: float = 1.0  # sampling temperature; the policy is trained at temperature 1
  recorded: str = "sampled"  # log β at `temperature`; "raw": log β at temperature 1
  learning_rate: float = 60.0  # large, since each token has a small weight in the batch mean


class Runs(NamedTuple):
  """N runs that differ in their seed; U updates each."""

  metrics: dict[str, np.ndarray]  # name → f32[N, U], before each update, on its batch
  kernels: np.ndarray  # f32[N, U + 1, D, V], after 0 … U updates
  batches: tuple[tuple[int, int], ...]  # for each update, its batch and the version that sampled it
  recipe: Recipe
  seeds: tuple[int, ...]
  group_size: int


def train(
  toy: Toy,
  recipe: Recipe,
  schedule: Schedule,
  *,
  num_updates: int,
  group_size: int = 16,
  seeds: Sequence[int] = (0, 1, 2, 3),
  first: Array | None = None,
) -> Runs:
  """Trains one policy per seed, from the kernel `first`, f32[D, V]; None for uniform policies.

  An update's metrics are the package's metrics and four more: `solve_rate`, `lag` in updates,
  `gradient_norm` and `head/rank_one_fraction`. The solve rate is of fresh rollouts of the policy
  before the update. The rank-one fraction is of the kernel's change from the start until before the
  update.

  Raises:
    ValueError: `recipe.recorded` is unknown, or the schedule runs in real time.
  """
  check_choice("train", "recorded", recipe.recorded, RECORDED)
  batches = tuple(plan(schedule, num_updates))
  random = np.array(
    [[uniform_numbers(toy, seed, n, group_size) for n in range(num_updates + 1)] for seed in seeds]
  )
  first = first_kernel(toy) if first is None else jnp.asarray(first)
  schedule_array = jnp.asarray(batches, jnp.int32).reshape(-1, 2)
  # The toy is an argument, because folding it as a constant slows down compilation.
  train_seeds = jax.vmap(functools.partial(_train_seed, recipe), (None, None, 0, None))
  kernels, metrics = jax.jit(train_seeds)(toy, first, random, schedule_array)
  arrays = {name: np.asarray(value) for name, value in metrics.items()}
  return Runs(arrays, np.asarray(kernels), batches, recipe, tuple(seeds), group_size)


def _train_seed(recipe: Recipe, toy: Toy, first: Array, random: Array, batches: Array) -> Any:
  """Trains one seed; returns kernels f32[U + 1, D, V] and metrics f32[U] by name."""
  tokens = sample(toy, first, random[0])
  state = recipe.advantage.init(jnp.mean(statistics(toy, first, tokens).entropy))
  num_updates = batches.shape[0]
  kernels = jnp.zeros((num_updates + 1, *first.shape)).at[0].set(first)

  def update(carry, inputs):
    kernels, state = carry
    t, (number, version) = inputs
    batch = make_batch(
      toy, kernels[version], random[number],
      temperature=recipe.temperature, recorded=recipe.recorded,
    )  # fmt: skip
    kernel, state, metrics = _update_kernel(toy, recipe, kernels[t], state, batch)
    # Uses the next batch's random numbers, since the policy was just trained on this batch's.
    fresh = sample(toy, kernels[t], random[t + 1])
    metrics |= {"solve_rate": jnp.mean(rewards(toy, fresh)), "lag": t - version}
    return (kernels.at[t + 1].set(kernel), state), metrics

  (kernels, _), metrics = jax.lax.scan(update, (kernels, state), (jnp.arange(num_updates), batches))
  metrics["head/rank_one_fraction"] = jax.vmap(rank_one_fraction)(kernels[:-1] - first)
  return kernels, metrics


def make_batch(
  toy: Toy, kernel: Array, random: Array, *, temperature: float = 1.0, recorded: str = "sampled"
) -> TrainBatch:
  """A batch of rollouts that a policy samples.

  Args:
    toy: task.
    kernel: f32[D, V], the policy's kernel.
    random: numbers f32[P, G, T], uniform on [0, 1).
    temperature, recorded: as in `Recipe`.
  """
  tokens = sample(toy, kernel, random, temperature=temperature)
  recorded_temperature = temperature if recorded == "sampled" else 1.0
  behavior = statistics(toy, kernel, tokens, temperature=recorded_temperature).logprobs
  return parts.batch_of(
    jnp.ones(tokens.shape), tokens=tokens, rewards=rewards(toy, tokens), behavior_logprobs=behavior
  )


def rollouts(toy: Toy, kernel: Array, *, group_size: int, seed: int = 0) -> TrainBatch:
  """A batch that the policy with kernel f32[D, V] samples at temperature 1."""
  return make_batch(toy, kernel, jnp.asarray(uniform_numbers(toy, seed, 0, group_size)))


def _update_kernel(toy: Toy, recipe: Recipe, kernel: Array, state: Any, batch: TrainBatch) -> Any:
  """Makes one update on a batch; returns the kernel, the advantage's state, and metrics."""
  coefficients = recipe.advantage.apply(state, batch)

  def loss(kernel):
    stats = statistics(toy, kernel, batch.tokens)
    value, metrics = parts.loss_of(
      recipe.loss, stats.logprobs, batch.behavior_logprobs, coefficients, batch.mask,
      proximal_logprobs=stats.logprobs if recipe.loss.needs_proximal else None,
      tokens=batch.tokens, veto=recipe.veto,
    )  # fmt: skip
    return value, (stats, metrics)

  gradient, (stats, metrics) = jax.grad(loss, has_aux=True)(kernel)
  records = policy_metrics(stats.logprobs, stats.entropy, batch, coefficients, ())
  records |= batch_metrics(batch) | recipe.advantage.metrics(state, batch)
  records |= gradient_masses(coefficients, batch.rewards, batch.correct, batch.valid)
  metrics = {**metrics, **reductions.values(records)}
  metrics["gradient_norm"] = jnp.linalg.norm(gradient)
  state = recipe.advantage.update(state, batch, metrics["policy/entropy"])
  return kernel - recipe.learning_rate * gradient, state, metrics


def gradient(toy: Toy, recipe: Recipe, kernel: Array, batch: TrainBatch) -> Array:
  """Gradient of a recipe's loss with respect to the kernel, f32[D, V]."""
  A = parts.advantages_of(recipe.advantage, batch.rewards)

  def loss(kernel: Array) -> Array:
    logprobs = statistics(toy, kernel, batch.tokens).logprobs
    given = logprobs, batch.behavior_logprobs, A, batch.mask
    return parts.loss_of(recipe.loss, *given, tokens=batch.tokens)[0]

  return jax.grad(loss)(kernel)


def batch_at(
  toy: Toy, runs: Runs, update: int, *, policy: int | None = None, run: int = 0
) -> tuple[TrainBatch, Array]:
  """The batch that an update of a run uses, and log π of its tokens, f32[P, G, T], nats.

  Args:
    toy: task of the runs.
    runs: result of `train`.
    update: number of the update.
    policy: π is the policy after this many updates; None for the policy that the update changes.
    run: index of the seed.
  Raises:
    ValueError: the update is out of range.
  """
  if not 0 <= update < len(runs.batches):
    raise ValueError(f"batch_at: update = {update}; choose one of 0 to {len(runs.batches) - 1}")
  number, version = runs.batches[update]
  random = jnp.asarray(uniform_numbers(toy, runs.seeds[run], number, runs.group_size))
  kernels = jnp.asarray(runs.kernels[run])
  recipe = runs.recipe
  batch = make_batch(
    toy, kernels[version], random, temperature=recipe.temperature, recorded=recipe.recorded
  )
  current = update if policy is None else policy
  return batch, statistics(toy, kernels[current], batch.tokens).logprobs


# --- drawing --------------------------------------------------------------------------------------


def plot_runs(axes: Any, runs: Mapping[str, Runs], metric: str, *, start: int = 0) -> None:
  """Plots a curve of a metric over updates for each label: the seeds' mean and its 95 % interval.

  Args:
    axes: matplotlib axes.
    runs: label → runs of two seeds or more.
    metric: name of the metric.
    start: first update to plot.
  """
  for index, (label, label_runs) in enumerate(runs.items()):
    values = label_runs.metrics[metric][:, start:]
    updates = start + np.arange(values.shape[1])
    band = mean_curve([(updates, row) for row in values], updates.size, within=metric_range(metric))
    style = method_style(index)
    axes.plot(band.x, band.mean, label=label, **style)
    axes.fill_between(band.x, band.low, band.high, color=style["color"], alpha=0.15, linewidth=0)
  axes.set_xlabel("updates")


def draw_runs(runs: Mapping[str, Runs], labels: Mapping[str, str]) -> Any:
  """Draws a panel for each metric, and returns the panels.

  Args:
    runs: as for `plot_runs`.
    labels: metric → label of its axis.
  """
  from matplotlib import pyplot

  _, panels = pyplot.subplots(1, len(labels), figsize=(11, 3.6))
  for axes, (metric, label) in zip(panels, labels.items(), strict=True):
    plot_runs(axes, runs, metric)
    axes.set_ylabel(label)
  legend_outside(panels[-1])
  return panels
