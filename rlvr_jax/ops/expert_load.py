"""The distribution of tokens over a mixture's experts: metrics, and the published balance loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.ops.reductions import value
from rlvr_jax.types import Array, ExpertChoices, Metrics


class Load(NamedTuple):
  """How much each expert of each layer is used: sums over the tokens of prompts and responses.

  The loads of disjoint sets of tokens can be added. A prompt counts once in each row that has
  rollouts of it, so that the load and the balance loss depend a little on how rollouts are packed.
  """

  choices: Array  # f32[layers, E], number of tokens that chose an expert
  probabilities: Array  # [layers, E], sums of the router's probabilities; differentiable


def expert_load(routes: Array, probabilities: Array) -> Load:
  """The load of a set of tokens.

  Args:
    routes: i32[..., layers, k], negative at positions without a token.
    probabilities: [layers, E], sums of the router's probabilities over the same tokens.
  """
  layers, k = routes.shape[-2:]
  chosen = routes.reshape(-1, layers, k, 1) == jnp.arange(probabilities.shape[-1])
  return Load(jnp.sum(chosen, axis=(0, 2), dtype=jnp.float32), probabilities)


def balance_weights(load: Load) -> Array:
  """Weights [layers, E]; the balance loss is Σ weights · `load.probabilities`.

    loss = mean over layers of E · Σ_e f_e · P_e

  f_e is the share of choices that go to expert e, constant for differentiation. P_e is the mean of
  the router's probability of expert e over the tokens that made these choices. The loss is 1 if f
  and P are uniform. Since f is computed over the full batch, the losses of micro-batches add up to
  the loss of the batch.

  Args:
    load: the load of the full batch.
  Source: "Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient
    Sparsity" (arXiv:2101.03961), §2.2, equations 4 to 6; with k choices per token, each choice
    counts 1/k.
  """
  layers, E = load.choices.shape
  positive = lambda x: jnp.where(x > 0, x, 1)
  choices = load.choices.astype(load.probabilities.dtype)
  shares = choices / positive(jnp.sum(choices, axis=-1, keepdims=True))
  tokens = jnp.sum(load.probabilities, axis=-1, keepdims=True)
  return jax.lax.stop_gradient(E * shares / (layers * positive(tokens)))


def load_metrics(load: Load) -> Metrics:
  """Metrics of how evenly tokens are distributed over experts, see `ExpertChoices`."""
  choices = jax.lax.stop_gradient(load.choices)
  return {
    "routing/load_entropy": ExpertChoices(choices, "entropy"),
    "routing/largest_load": ExpertChoices(choices, "largest"),
    "routing/unused_experts": ExpertChoices(choices, "unused"),
  }


def largest_loads(load: Load, layers: Sequence[int]) -> dict[str, Array]:
  """The metric `routing/largest_load_layer_K`, f32[], of each layer K in `layers`, by name."""
  of_layer = [ExpertChoices(choices[None], "largest") for choices in load.choices]
  return {
    f"routing/largest_load_layer_{layer}": value(choices)
    for layer, choices in zip(layers, of_layer, strict=True)
  }
