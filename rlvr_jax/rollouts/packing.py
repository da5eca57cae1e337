"""Lays the rollouts of a batch into rows of a fixed number of tokens, so that padding costs little.

A row holds the prompts of its rollouts, each once, and the rollouts behind their prompt. The last
token of a prompt predicts the first token of each of its rollouts, so each rollout begins with a
copy of it: a prompt of s tokens takes s − 1 places, a rollout of t tokens takes t, and each place
of a rollout predicts one of its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rlvr_jax.types import Packed, Rows, TrainBatch


class RowLayout(NamedTuple):
  """How rows are cut; the same for every batch of a run."""

  length: int  # places of a row
  alignment: int  # a prompt ends, and a rollout begins, at a multiple of this
  devices: int  # that the rows of a micro-batch are split over
  rows_per_device: int  # of a micro-batch
  max_micro_batches: int  # that arrays have room for


class Row(NamedTuple):
  """The rollouts of a row, by prompt in the order in which they lie; (prompt, rollout indices)."""

  blocks: dict[int, list[int]]
  used: int  # places, alignment included


def row_layout(
  *,
  prompts: int,
  group_size: int,
  max_prompt_length: int,
  max_response_length: int,
  length: int,
  alignment: int,
  devices: int,
  tokens_per_micro_batch: int,
) -> RowLayout:
  """The layout in which every batch of these sizes has room.

  Args:
    length: places of a row, at least `least_row`.
    alignment: see `RowLayout`.
    devices: that rows are split over.
    tokens_per_micro_batch: places on each device, rounded down to whole rows, but one row at least.
  Raises:
    ValueError: no batch of these sizes has a row for every device.
  """
  prompt, rollout = _up(max_prompt_length - 1, alignment), _up(max_response_length, alignment)
  # Only rows that hold this many rollouts of a group are too full for another one of it, and no
  # two rows have room for each other's contents.
  beside = -(-group_size // ((length - prompt) // rollout))
  total = prompts * group_size * (prompt + rollout)
  most = prompts * min(beside, group_size)
  most = min(most, 2 * -(-total // length) + 1)
  if most < devices:
    raise ValueError(
      f"config.batch: {prompts} prompts with {group_size} rollouts each fill at most {most} rows of"
      f" {length} tokens, fewer than the {devices} devices (config.mesh.data · config.mesh.fsdp);"
      " raise batch.prompts or batch.group_size, or lower batch.tokens_per_row"
    )
  fitting = max(1, tokens_per_micro_batch // length)
  rows_per_device = min(fitting, -(-most // devices))
  return RowLayout(
    length=length,
    alignment=alignment,
    devices=devices,
    rows_per_device=rows_per_device,
    max_micro_batches=-(-most // (devices * rows_per_device)),
  )


def least_row(max_prompt_length: int, max_response_length: int, *, alignment: int) -> int:
  """Places that the longest prompt and one rollout of it take."""
  return _up(max_prompt_length - 1, alignment) + _up(max_response_length, alignment)


def assign(
  prompt_lengths: npt.ArrayLike, response_lengths: npt.ArrayLike, *, length: int, alignment: int
) -> list[Row]:
  """Which rollouts share a row; deterministic, and the same whatever the order of equal ones.

  Groups come by descending tokens, the rollouts of each by descending length, ties by index. A
  rollout goes where its prompt lies already, there into the fullest row that has room; else into
  the fullest row that has room for the prompt too; else into a new row.

  Args:
    prompt_lengths: i[P], tokens, at least 1.
    response_lengths: i[P, G], tokens; a rollout of none takes no place.
    length: places of a row.
    alignment: a prompt ends, and a rollout begins, at a multiple of this.
  Raises:
    ValueError: a rollout and its prompt do not fit in a row.
  """
  prompts, responses = np.asarray(prompt_lengths), np.asarray(response_lengths)
  of_prompt = _up(prompts - 1, alignment)
  of_rollout = _up(responses, alignment)
  if (most := int((of_prompt[:, None] + of_rollout).max())) > length:
    raise ValueError(f"a rollout with its prompt takes {most} places, a row has {length}")
  tokens = prompts + responses.sum(1)
  rows: list[dict[int, list[int]]] = []
  used: list[int] = []
  for p in sorted(range(len(prompts)), key=lambda p: (-tokens[p], p)):
    for g in sorted(range(responses.shape[1]), key=lambda g: (-responses[p, g], g)):
      if responses[p, g] == 0:
        continue
      places, prompt = int(of_rollout[p, g]), int(of_prompt[p])
      holding = [r for r, row in enumerate(rows) if p in row and used[r] + places <= length]
      roomy = holding or [r for r in range(len(rows)) if used[r] + prompt + places <= length]
      if roomy:
        row = max(roomy, key=lambda r: (used[r], -r))
      else:
        row = len(rows)
        rows.append({})
        used.append(0)
      used[row] += places + (0 if p in rows[row] else prompt)
      rows[row].setdefault(p, []).append(g)
  return [Row(blocks, places) for blocks, places in zip(rows, used, strict=True)]


def attention_cost(
  row: Row, prompt_lengths: npt.ArrayLike, response_lengths: npt.ArrayLike
) -> float:
  """Pairs of a query and a key it sees, of a row."""
  prompts, responses = np.asarray(prompt_lengths), np.asarray(response_lengths)
  pairs = 0.0
  for p, rollouts in row.blocks.items():
    s, t = float(prompts[p] - 1), responses[p, rollouts].astype(float)
    pairs += s * s / 2 + float((t * (s + t / 2)).sum())
  return pairs


def deal(costs: Sequence[float], *, devices: int, rows_per_device: int) -> np.ndarray:
  """Rows → i32[M, devices · rows_per_device], row numbers of each micro-batch, −1 for an empty row.

  Rows that devices compute at the same time cost about the same. A device's rows of a micro-batch
  lie together, as a leading axis split over devices has them.
  """
  order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
  step = devices * rows_per_device
  micro_batches = max(1, -(-len(order) // step))
  dealt = np.full(micro_batches * step, -1, np.int32)
  dealt[: len(order)] = order
  dealt = dealt.reshape(micro_batches, rows_per_device, devices)
  return np.ascontiguousarray(dealt.swapaxes(1, 2)).reshape(micro_batches, step)


def with_rows(batch: TrainBatch, layout: RowLayout) -> TrainBatch:
  """The batch with its rows; tokens that do not count in the loss have no place.

  Args:
    batch: NumPy arrays.
  """
  counts = np.asarray(batch.mask) > 0
  lengths = np.where(counts.any(-1), counts.shape[-1] - np.argmax(counts[..., ::-1], axis=-1), 0)
  prompts = batch.prompts
  packed = pack(
    np.asarray(prompts.tokens),
    np.asarray(prompts.lengths),
    np.asarray(batch.tokens),
    lengths,
    layout,
  )
  return dataclasses.replace(batch, packed=packed)


def pack(
  prompt_tokens: np.ndarray,
  prompt_lengths: np.ndarray,
  tokens: np.ndarray,
  response_lengths: np.ndarray,
  layout: RowLayout,
) -> Packed:
  """The rows of a batch, in micro-batches of equal shape.

  Args:
    prompt_tokens: i32[P, S], left-padded.
    prompt_lengths: i32[P].
    tokens: i32[P, G, T], right-padded.
    response_lengths: i32[P, G].
  """
  P, G, T = tokens.shape
  length, alignment, devices, rows_per_device, max_micro_batches = layout
  rows = assign(prompt_lengths, response_lengths, length=length, alignment=alignment)
  costs = [attention_cost(row, prompt_lengths, response_lengths) for row in rows]
  dealt = deal(costs, devices=devices, rows_per_device=rows_per_device)
  shape = (max(max_micro_batches, len(dealt)), dealt.shape[1], length)
  empty = lambda value: np.full((shape[0] * shape[1], length), value, np.int32)
  inputs, targets, prompts, positions = empty(0), empty(0), empty(-1), empty(0)
  starts, prompt_ends = empty(0), empty(0)
  places = np.full((P, G, T), -1, np.int32)
  for number, row in enumerate(dealt.reshape(-1)):
    at = 0
    for p, rollouts in rows[row].blocks.items() if row >= 0 else ():
      s = int(prompt_lengths[p]) - 1
      end = at + int(_up(s, alignment))
      here = slice(end - s, end)
      known = prompt_tokens[p, prompt_tokens.shape[1] - s - 1 :]  # with its last token
      inputs[number, here] = known[:-1]
      positions[number, here] = np.arange(s)
      prompts[number, here], starts[number, here], prompt_ends[number, here] = p, end, end
      at = end
      for g in rollouts:
        t = int(response_lengths[p, g])
        here = slice(at, at + t)
        inputs[number, here] = np.concatenate([known[-1:], tokens[p, g, : t - 1]])
        targets[number, here] = tokens[p, g, :t]
        positions[number, here] = s + np.arange(t)
        prompts[number, here], starts[number, here], prompt_ends[number, here] = p, at, end
        places[p, g, :t] = number * length + np.arange(at, at + t)
        at += int(_up(t, alignment))
  fold = lambda x: x.reshape(shape)
  return Packed(
    tokens=fold(inputs),
    targets=fold(targets),
    rows=Rows(*map(fold, (prompts, positions, starts, prompt_ends))),
    places=places,  # type: ignore[arg-type]  # on the host
    num_micro_batches=np.int32(len(dealt)),  # type: ignore[arg-type]
  )


def _up(size, multiple):
  """The next multiple."""
  return -(-size // multiple) * multiple
