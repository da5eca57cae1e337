"""Lengths of prompts and responses that costs are estimated for, as components: --lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.rollouts.packing import RowLayout, assign_micro_batches, pack
from rlvr_jax.types import BatchShape, Packed

__all__ = ["longest", "lognormal"]

_DRAWS = 9  # batches, of which the typical one is taken


class Workload(NamedTuple):
  """Lengths of the sequences of a batch, in tokens."""

  prompts: np.ndarray  # i64[P]
  responses: np.ndarray  # i64[P, G]


class Lengths(NamedTuple):
  """A distribution of lengths."""

  draw: Callable[[BatchShape, int], Workload]  # (shape of a batch, its number) → its lengths


def longest() -> Lengths:
  """Every prompt and every response has the greatest length."""

  def draw(shape: BatchShape, number: int) -> Workload:
    return Workload(
      np.full(shape.prompts, shape.max_prompt_length),
      np.full((shape.prompts, shape.group_size), shape.max_response_length),
    )

  return Lengths(draw)


def lognormal(*, mean: float, sigma: float = 0.8, prompt: int = 0) -> Lengths:
  """Responses have lognormal lengths, cut at the greatest length; batches differ.

  Args:
    mean: tokens, before the cut.
    sigma: standard deviation of the logarithm.
    prompt: tokens of every prompt; 0: the greatest length.
  """
  check_between("lognormal", "mean", mean, low=1.0)
  check_between("lognormal", "sigma", sigma, low=0.0)
  check_integer("lognormal", "prompt", prompt, low=0)

  def draw(shape: BatchShape, number: int) -> Workload:
    if prompt > shape.max_prompt_length:
      raise ValueError(
        f"lognormal: prompt = {prompt} is more than config.max_prompt_length ="
        f" {shape.max_prompt_length}; lower it"
      )
    size = (shape.prompts, shape.group_size)
    drawn = np.random.default_rng(number).lognormal(math.log(mean) - sigma**2 / 2, sigma, size)
    return Workload(
      np.full(shape.prompts, prompt or shape.max_prompt_length),
      np.minimum(np.ceil(drawn), shape.max_response_length).astype(np.int64),
    )

  return Lengths(draw)


def pack_workload(workload: Workload, shape: BatchShape, layout: RowLayout) -> Packed:
  """Packs a batch of these lengths, as NumPy arrays; its tokens are zeros."""
  P, G, S, T = shape
  return pack(
    np.zeros((P, S), np.int32),
    workload.prompts,
    np.zeros((P, G, T), np.int32),
    workload.responses,
    layout,
  )


class Packing(NamedTuple):
  """What an update computes of a batch."""

  micro_batches: int
  places: int  # of rows, over all devices, empty rows too
  tokens: int  # of the responses, and of each prompt once

  @property
  def places_per_token(self) -> float:
    """1 if no place were in vain."""
    return self.places / self.tokens


def count_packing(batch: Workload, layout: RowLayout) -> Packing:
  """Counts the micro-batches, the places and the tokens of a packed batch.

  Raises:
    ValueError: a rollout and its prompt do not fit in a row.
  """
  found = assign_micro_batches(batch.prompts, batch.responses, layout)
  count, tokens = len(found.dealt), int(batch.prompts.sum() + batch.responses.sum())
  return Packing(count, layout.count_places(count, found.num_short), tokens)


def typical_batch(lengths: Lengths, shape: BatchShape, layout: RowLayout) -> Workload:
  """Of several batches the one with the median number of places."""
  batches = [lengths.draw(shape, number) for number in range(_DRAWS)]
  if all(np.array_equal(batches[0].responses, batch.responses) for batch in batches):
    return batches[0]
  places = [count_packing(batch, layout).places for batch in batches]
  return batches[int(np.argsort(places, kind="stable")[_DRAWS // 2])]
