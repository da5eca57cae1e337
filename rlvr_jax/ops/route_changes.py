"""Counts how many of a mixture's choices of experts differ between sampling and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from rlvr_jax.types import Array, Mean, Metrics


class RouteChanges(NamedTuple):
  """Sums over tokens, prompts included; sums over disjoint tokens add up."""

  choices: Array  # f32[layers], of the sampler's experts, those that the router does not choose
  tokens: Array  # f32[], tokens with such a choice in at least one layer
  num_choices: Array  # f32[], in each layer
  num_tokens: Array  # f32[]


def count_changes(recorded: Array, chosen: Array) -> RouteChanges:
  """Compares routes as sets: the order of a token's experts does not matter.

  Args:
    recorded: int[..., layers, k], the sampler's routes.
    chosen: i32[..., layers, k], the router's present choice; negative at places without a token.
  """
  # Experts are distinct, so as many are new as are missing.
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
  """Metrics: the shares of changed choices, and of tokens with a change in any layer."""
  return {
    "routing/changed": Mean(jnp.mean(changes.choices), changes.num_choices),
    "routing/changed_tokens": Mean(changes.tokens, changes.num_tokens),
  }


def changes_by_layer(changes: RouteChanges, layers: Sequence[int]) -> dict[str, Array]:
  """The share of choices that changed, f32[] by name, for each of the layers with these numbers."""
  shares = changes.choices / jnp.maximum(changes.num_choices, 1)
  return {
    f"routing/changed_layer_{layer}": share for layer, share in zip(layers, shares, strict=True)
  }
