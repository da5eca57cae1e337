"""Counts how many of a mixture's choices of experts differ between sampling and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from rlvr_jax.types import Array, Mean, Metrics


class RouteChanges(NamedTuple):
  """Counts over tokens of prompts and responses; counts over disjoint tokens can be added."""

  choices: Array  # f32[layers], the sampler's choices that the router now does not choose
  tokens: Array  # f32[], tokens with a changed choice in at least one layer
  num_choices: Array  # f32[], all choices in a layer
  num_tokens: Array  # f32[], all tokens


def count_changes(recorded: Array, chosen: Array) -> RouteChanges:
  """Compares routes as sets, without regard to the order of a token's experts.

  Args:
    recorded: int[..., layers, k], the sampler's routes.
    chosen: i32[..., layers, k], the router's present choice; negative at positions without a token.
  """
  # A token's experts are distinct, so it has as many new experts as missing ones.
  is_chosen = jnp.any(recorded[..., :, None] == chosen[..., None, :], axis=-1)
  is_token = chosen[..., 0, 0] >= 0
  changed = ~is_chosen & is_token[..., None, None]
  by_token = jnp.any(changed, axis=(-2, -1))
  num_tokens = jnp.sum(is_token, dtype=jnp.float32)
  return RouteChanges(
    choices=jnp.sum(changed, axis=(*range(changed.ndim - 2), -1), dtype=jnp.float32),
    tokens=jnp.sum(by_token, dtype=jnp.float32),
    num_choices=num_tokens * recorded.shape[-1],
    num_tokens=num_tokens,
  )


def change_metrics(changes: RouteChanges) -> Metrics:
  """Metrics: the fraction of changed choices, and of tokens with a changed choice in any layer."""
  return {
    "routing/changed": Mean(jnp.mean(changes.choices), changes.num_choices),
    "routing/changed_tokens": Mean(changes.tokens, changes.num_tokens),
  }


def changes_by_layer(changes: RouteChanges, layers: Sequence[int]) -> dict[str, Array]:
  """The metric `routing/changed_layer_K`, f32[], of each layer K in `layers`, by name."""
  shares = changes.choices / jnp.maximum(changes.num_choices, 1)
  return {
    f"routing/changed_layer_{layer}": share for layer, share in zip(layers, shares, strict=True)
  }
