"""Distributions of prompt and response lengths for estimates of costs; --lengths selects one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import ml_collections
import numpy as np
import numpy.typing as npt

from rlvr_jax import specs
from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.rollouts.packing import RowLayout, assign_micro_batches, pack
from rlvr_jax.types import BatchShape, Packed

__all__ = ["longest", "lognormal", "dialogue"]

_DRAWS = 9  # batches, of which the typical one is taken


class Workload(NamedTuple):
  """Lengths of the sequences of a batch, in tokens."""

  prompts: np.ndarray  # i64[P]
  # i64[P, G, N], turns of the policy and replies of the environment alternately; 0 after the end.
  turns: np.ndarray

  @property
  def responses(self) -> np.ndarray:
    """i64[P, G], tokens of all turns."""
    return self.turns.sum(-1)

  @property
  def sampled(self) -> np.ndarray:
    """i64[P, G], tokens of the policy."""
    return self.turns[..., ::2].sum(-1)


class Lengths(NamedTuple):
  """A distribution of lengths."""

  draw: Callable[[BatchShape, int], Workload]  # (shape and number of a batch) → its lengths
  max_turns: int = 1  # the most turns of the policy in a rollout


def parse_lengths(text: str, environment: ml_collections.ConfigDict) -> Lengths:
  """The distribution that `--lengths` names.

  Args:
    text: a distribution of this module, such as "lognormal(mean=600)".
    environment: `config.environment`.
  Raises:
    ValueError: the distribution is unknown, or has more turns than the configuration allows.
  """
  lengths = specs.make("--lengths", sys.modules[__name__], text, Lengths)
  if lengths.max_turns > 1 and not environment.name:
    raise ValueError(
      f"--lengths = {text!r} has {lengths.max_turns} turns, but a rollout has one turn because"
      " config.environment.name is empty; set that name, or choose a distribution with one turn"
    )
  if environment.name and lengths.max_turns > environment.max_turns:
    raise ValueError(
      f"--lengths = {text!r} has {lengths.max_turns} turns, more than config.environment.max_turns"
      f" = {environment.max_turns}; raise max_turns, or lower turns in --lengths"
    )
  return lengths


def longest() -> Lengths:
  """All prompts and responses have the greatest length."""

  def draw(shape: BatchShape, number: int) -> Workload:
    return Workload(
      np.full(shape.prompts, shape.max_prompt_length),
      np.full((shape.prompts, shape.group_size, 1), shape.max_response_length),
    )

  return Lengths(draw)


def lognormal(*, mean: float, sigma: float = 0.8, prompt: int = 0) -> Lengths:
  """Responses have lognormal lengths, cut at the greatest length; each batch has its own lengths.

  Args:
    mean: mean length before the cut, tokens.
    sigma: standard deviation of the logarithm.
    prompt: tokens of every prompt; 0 for the greatest length.
  """
  check_between("lognormal", "mean", mean, low=1.0)
  return _lognormal("lognormal", [mean], sigma, prompt)


def dialogue(
  *, turns: int, policy: float, reply: float, sigma: float = 0.8, prompt: int = 0
) -> Lengths:
  """Dialogues, in which turns of the policy and replies have lognormal lengths.

  Each batch has its own lengths. As in `rollouts.dialogues`, a dialogue ends early if a turn of
  the policy is cut at the greatest length, or if a reply and another token do not fit.

  Args:
    turns: number of the policy's turns in every rollout, at least 1.
    policy: mean tokens of a turn of the policy, before the cut.
    reply: mean tokens of a reply, with the template's tokens around it.
    sigma: standard deviation of the logarithm.
    prompt: tokens of every prompt; 0 for the greatest length.
  """
  check_integer("dialogue", "turns", turns, low=1)
  for name, mean in (("policy", policy), ("reply", reply)):
    check_between("dialogue", name, mean, low=1.0)
  return _lognormal("dialogue", np.resize([policy, reply], 2 * turns - 1), sigma, prompt)


def _lognormal(owner: str, means: npt.ArrayLike, sigma: float, prompt: int) -> Lengths:
  """Lognormal lengths of turns and replies, cut at the maximum; `means` [N] are in tokens."""
  check_between(owner, "sigma", sigma, low=0.0)
  check_integer(owner, "prompt", prompt, low=0)
  means = np.asarray(means, np.float64)
  is_policys = np.arange(len(means)) % 2 == 0

  def draw(shape: BatchShape, number: int) -> Workload:
    P, G, S, limit = shape
    if prompt > S:
      raise ValueError(
        f"{owner}: prompt = {prompt} is more than config.max_prompt_length = {S}; lower prompt"
      )
    if len(means) > 1 and sum(means[:2]) >= limit:
      raise ValueError(
        f"{owner}: policy + reply = {sum(means[:2]):g} tokens leave no room for another turn in"
        f" config.max_response_length = {limit}; lower policy or reply, or set turns=1"
      )
    random = np.random.default_rng(number)
    drawn = random.lognormal(np.log(means) - sigma**2 / 2, sigma, (P, G, len(means)))
    # Rounded up, less a margin for the rounding of exponentials.
    drawn = np.ceil(drawn - 1e-9 * drawn).astype(np.int64)
    ends = np.cumsum(drawn, axis=-1)
    of_policy = np.clip(limit - (ends - drawn), 0, drawn)
    replies = np.where(ends < limit, drawn, 0)
    return Workload(np.full(P, prompt or S), np.where(is_policys, of_policy, replies))

  return Lengths(draw, max_turns=-(-len(means) // 2))


def pack_workload(workload: Workload, shape: BatchShape, layout: RowLayout) -> Packed:
  """Packs a batch with the lengths of `workload`, as NumPy arrays; its tokens are zeros."""
  P, G, S, T = shape
  ends = np.cumsum(workload.turns, axis=-1)[..., None]  # [P, G, N, 1], ends of turns
  # The number of turns that end before a token is the index of its turn.
  turn = np.sum(np.arange(T) >= ends, axis=-2)
  return pack(
    np.zeros((P, S), np.int32),
    workload.prompts,
    np.zeros((P, G, T), np.int32),
    workload.responses,
    layout,
    mask=turn % 2 == 0,
  )


class Packing(NamedTuple):
  """The numbers of row positions and of tokens that an update computes for one batch."""

  micro_batches: int
  places: int  # positions in rows on all devices, including empty rows
  tokens: int  # tokens of the responses, and of each prompt once

  @property
  def places_per_token(self) -> float:
    """Computed row positions per token, empty ones included; at best 1."""
    return self.places / self.tokens


def count_packing(batch: Workload, layout: RowLayout) -> Packing:
  """Counts the micro-batches, the row positions and the tokens of a packed batch.

  Raises:
    ValueError: a rollout and its prompt do not fit in a row.
  """
  found = assign_micro_batches(batch.prompts, batch.responses, layout)
  count, tokens = len(found.dealt), int(batch.prompts.sum() + batch.responses.sum())
  return Packing(count, layout.count_places(count, found.num_short), tokens)


def typical_batch(lengths: Lengths, shape: BatchShape, layout: RowLayout) -> Workload:
  """The batch with the median number of row positions among several drawn batches."""
  batches = [lengths.draw(shape, number) for number in range(_DRAWS)]
  if all(np.array_equal(batches[0].turns, batch.turns) for batch in batches):
    return batches[0]
  places = [count_packing(batch, layout).places for batch in batches]
  return batches[int(np.argsort(places, kind="stable")[_DRAWS // 2])]
