"""Layers of several kinds: how their parameters are stacked, and the loops that compute layers.

A layer's kind is a pair: the name of its mixer, and the name of the part after the mixer. The mixer
is "attention", "full" (attention whose heads differ from the sliding layers' heads) or "delta" (a
gated DeltaNet). The part after the mixer is "dense" (an MLP) or "sparse" (experts). A parameter
under "blocks" is stacked over the layers that have it, in their order. Layers are computed in loops
over a repeating pattern, so that each layer of a pattern is compiled once. If all layers are alike,
there is one loop, and its pattern is one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from rlvr_jax.types import Array, Params

Kind: TypeAlias = tuple[str, str]

ALL = "all"
ATTENTION, FULL, DELTA = "attention", "full", "delta"
DENSE, SPARSE = "dense", "sparse"
STACKS = (ALL, ATTENTION, FULL, DELTA, DENSE, SPARSE)
# Stack → names of its parameters and other per-layer values; all other names are in the stack
# `ALL`.
_NAMES = {
  ATTENTION: (
    *("query", "key", "value", "output", "query_norm", "key_norm", "output_gate"),
    *("query_bias", "key_bias", "value_bias", "output_bias"),
  ),
  FULL: ("full",),
  DELTA: ("delta",),
  DENSE: ("gate", "up", "down"),
  SPARSE: ("experts", "routes"),
}
_STACKS = {name: stack for stack, names in _NAMES.items() for name in names}


class Heads(NamedTuple):
  """The heads of a layer's attention."""

  queries: int  # N, the number of query heads
  keys: int  # K, the number of key/value heads
  width: int  # H, the width of a head


def stack_of(name: str) -> str:
  """The stack, one of `STACKS`, whose layers have the parameters blocks/`name`."""
  return _STACKS.get(name, ALL)


def layers_in(stack: str, kinds: Sequence[Kind]) -> list[int]:
  """The indices of the layers that are in a stack; `kinds` are the kinds of all layers."""
  return [i for i, kind in enumerate(kinds) if stack in (ALL, *kind)]


def rows_of(layer: int, kinds: Sequence[Kind]) -> dict[str, np.int32]:
  """Stack → index of the layer in this stack, for each stack that contains the layer."""
  return {s: np.int32(layers_in(s, kinds).index(layer)) for s in (ALL, *kinds[layer])}


def take_rows(
  stacks: Params,
  rows: Mapping[str, Any],
  take: Callable[[Array, Any], Array] = lambda stacked, row: stacked[row],
) -> Params:
  """The parameters of one layer: `rows` gives its row in each stack, `take` selects the row."""
  in_rows = {name: part for name, part in stacks.items() if stack_of(name) in rows}
  of_stack = lambda name: lambda stacked: take(stacked, rows[stack_of(name)])
  return {name: jax.tree.map(of_stack(name), part) for name, part in in_rows.items()}


def split_into_loops(kinds: Sequence[Kind]) -> list[tuple[tuple[Kind, ...], int]]:
  """Splits the layers into loops; each is a pattern of kinds and the number of its repetitions.

  The patterns together have as few layers as possible, since every layer of a pattern is compiled.
  """
  kinds = tuple(kinds)

  @functools.cache
  def split(first: int) -> list[tuple[tuple[Kind, ...], int]]:
    splits = []
    for period in range(1, len(kinds) - first + 1):
      pattern, count = kinds[first : first + period], 1
      while kinds[first + count * period :][:period] == pattern:
        count += 1
      splits.append([(pattern, count), *split(first + count * period)])
    return min(splits, key=lambda loops: sum(len(pattern) for pattern, _ in loops), default=[])

  return split(0)
