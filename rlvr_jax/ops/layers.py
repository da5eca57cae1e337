"""Layers of two kinds, with an MLP or with experts: where their parameters lie, and their loops.

A parameter under "blocks" is stacked over the layers that have it, in their order: those with
experts, those with an MLP, or all. Layers are computed in loops over a pattern that repeats, so
that a program has each layer of a pattern once. Where all layers are alike, that is one loop over
one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlvr_jax.types import Array, Params

_OF_MLP = ("gate", "up", "down")
_OF_EXPERTS = ("experts", "routes")


def stack_of(name: str) -> str:
  """The layers that have the parameters blocks/`name`, or such routes: "all", "sparse" or "dense".

  Sparse layers have experts, dense ones an MLP.
  """
  return "sparse" if name in _OF_EXPERTS else "dense" if name in _OF_MLP else "all"


def layers_in(stack: str, sparse: Sequence[bool]) -> list[int]:
  """The numbers of the layers in a stack; `sparse` says which layers have experts."""
  return [i for i, kind in enumerate(sparse) if stack in ("all", "sparse" if kind else "dense")]


def rows_of(layer: int, sparse: Sequence[bool]) -> dict[str, np.int32]:
  """A layer's row in each stack that it is in."""
  stacks = "all", "sparse" if sparse[layer] else "dense"
  return {stack: np.int32(layers_in(stack, sparse).index(layer)) for stack in stacks}


def take_rows(
  stacks: Params,
  rows: Mapping[str, Any],
  take: Callable[[Array, Any], Array] = lambda stacked, row: stacked[row],
) -> Params:
  """The parameters of the layer with these rows, by `take`."""
  in_rows = {name: part for name, part in stacks.items() if stack_of(name) in rows}
  of_stack = lambda name: lambda stacked: take(stacked, rows[stack_of(name)])
  return {name: jax.tree.map(of_stack(name), part) for name, part in in_rows.items()}


def split_into_loops(sparse: Sequence[bool]) -> list[tuple[tuple[bool, ...], int]]:
  """Splits the layers into loops, each of a pattern of layers and its number of repetitions.

  The patterns have as few layers together as possible, since these are compiled.
  """
  kinds = tuple(sparse)

  @functools.cache
  def split(first: int) -> list[tuple[tuple[bool, ...], int]]:
    splits = []
    for period in range(1, len(kinds) - first + 1):
      pattern, count = kinds[first : first + period], 1
      while kinds[first + count * period :][:period] == pattern:
        count += 1
      splits.append([(pattern, count), *split(first + count * period)])
    return min(splits, key=lambda loops: sum(len(pattern) for pattern, _ in loops), default=[])

  return split(0)
