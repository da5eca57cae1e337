"""Packs the rollouts of a batch into rows of a fixed number of tokens, to reduce padding.

A row has one or more prompts, each followed by rollouts of the prompt. The last token of a prompt
predicts the first token of every rollout. So this token is left out of the prompt, and each rollout
begins with a copy of it. A prompt of s tokens takes s − 1 positions. A rollout of t tokens takes t
positions, and each position predicts one token of the rollout. Tokens that are not in the loss,
such as an environment's tokens, also take positions, but no position predicts these tokens. Tokens
after a rollout's last loss token take no positions.

The number of rows in a micro-batch is a multiple of the number of devices. The last micro-batch may
be nearly empty, so up to two micro-batches of short rows may replace it. A short row has tokens
only in about its first third, and an update computes only this part.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
from collections.abc import Container, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rlvr_jax.ops.row_blocks import short_row
from rlvr_jax.rollouts.batch import response_lengths
from rlvr_jax.types import BatchShape, Packed, Rows, TrainBatch

Size = TypeVar("Size", int, np.ndarray)

_MAX_INT32 = 2**31 - 1  # the largest index of a position
_MOST_SHORT = 2  # micro-batches of short rows; three would cost nearly a whole micro-batch


class RowLayout(NamedTuple):
  """Sizes of rows and micro-batches; the same for every batch of a run."""

  length: int  # positions of a row
  alignment: int  # a prompt ends, and a rollout begins, at a multiple of `alignment`
  devices: int  # number of devices that the rows of a micro-batch are split over
  rows_per_device: int  # rows of a micro-batch on each device
  max_micro_batches: int  # micro-batches that arrays have room for
  has_short_rows: bool = False  # whether the last micro-batches may have short rows

  @property
  def device_places(self) -> int:
    """Number of positions of a micro-batch on each device."""
    return self.rows_per_device * self.length

  def count_places(self, micro_batches: int, short: int) -> int:
    """Number of positions that an update computes; `short` of the micro-batches have short rows."""
    lengths = (micro_batches - short) * self.length + short * short_row(self.length)
    return self.devices * self.rows_per_device * lengths


class Row(NamedTuple):
  """A row with its rollouts."""

  blocks: dict[int, list[int]]  # prompt → indices of its rollouts, in their order in the row
  used: int  # positions, including alignment
  is_short: bool = False


class MicroBatches(NamedTuple):
  """The rows of a batch, dealt to micro-batches."""

  rows: list[Row]
  dealt: np.ndarray  # i32[M, R], numbers of rows, −1 for an empty row, as from `deal`
  num_short: int  # number of micro-batches with short rows, which are the last


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
  has_short_rows: bool = False,
) -> RowLayout:
  """The row layout that has room for every batch of these sizes.

  Args:
    length: positions of a row, at least `min_row_length`.
    alignment: see `RowLayout`.
    devices: number of devices over which rows are split.
    tokens_per_micro_batch: the most positions of a micro-batch on each device; but each device gets
      at least one row.
    has_short_rows: whether the last micro-batches may have short rows; no effect if every batch is
      one micro-batch.
  Raises:
    ValueError: batches of these sizes have fewer rows than there are devices, or a batch may need
      too many positions.
  """
  prompt = _round_up(max_prompt_length - 1, alignment)
  rollout = _round_up(max_response_length, alignment)
  # There are at most 2 · total / length + 1 rows, since no two rows' contents fit into one row.
  total = prompts * group_size * (prompt + rollout)
  max_rows = prompts * _rows_per_group(group_size, length - prompt, rollout)
  max_rows = min(max_rows, 2 * -(-total // length) + 1)
  if max_rows < devices:
    raise ValueError(
      f"config.batch: {prompts} prompts with {group_size} rollouts each fill at most {max_rows}"
      f" rows of {length} tokens, fewer than the {devices} devices (config.mesh.data ·"
      " config.mesh.fsdp); raise batch.prompts or batch.group_size, or lower batch.tokens_per_row"
    )
  fitting_rows = max(1, tokens_per_micro_batch // length)
  rows_per_device = min(fitting_rows, -(-max_rows // devices))
  has_short_rows = has_short_rows and max_rows > devices * rows_per_device
  max_micro_batches = -(-max_rows // (devices * rows_per_device))
  places = max_micro_batches * devices * rows_per_device * length
  if places > _MAX_INT32:
    raise ValueError(
      f"config.batch: {prompts} prompts with {group_size} rollouts each may need {places} positions"
      f" in rows of {length} tokens, but at most {_MAX_INT32} are possible; lower batch.prompts,"
      " batch.group_size or batch.tokens_per_row"
    )
  return RowLayout(
    length=length,
    alignment=alignment,
    devices=devices,
    rows_per_device=rows_per_device,
    max_micro_batches=max_micro_batches + (_MOST_SHORT - 1) * has_short_rows,
    has_short_rows=has_short_rows,
  )


def layout_of_few(layout: RowLayout, shape: BatchShape, devices: int) -> RowLayout:
  """The row layout for one group per device, with rows as long as in `layout` but no short rows.

  Args:
    layout: the layout of a batch, which gives the length of a row.
    shape: the shape of the batch; the number of prompts P is not used.
    devices: number of devices over which rows are split.
  """
  prompt = _round_up(shape.max_prompt_length - 1, layout.alignment)
  rollout = _round_up(shape.max_response_length, layout.alignment)
  rows = _rows_per_group(shape.group_size, layout.length - prompt, rollout)
  rows_per_device = min(layout.rows_per_device, rows)
  return RowLayout(
    length=layout.length,
    alignment=layout.alignment,
    devices=devices,
    rows_per_device=rows_per_device,
    max_micro_batches=-(-rows // rows_per_device),
  )


def _rows_per_group(group_size: int, free: int, rollout: int) -> int:
  """The most rows that a group fills.

  Every row but the last has at least as many rollouts as rollouts of the longest length fit.

  Args:
    group_size: G.
    free: positions of a row after the prompt.
    rollout: positions of the longest rollout.
  """
  return min(-(-group_size // (free // rollout)), group_size)


def min_row_length(max_prompt_length: int, max_response_length: int, *, alignment: int) -> int:
  """Positions in a row that the longest prompt and a rollout of maximum length take."""
  return _round_up(max_prompt_length - 1, alignment) + _round_up(max_response_length, alignment)


def assign_rows(
  prompt_lengths: npt.ArrayLike, response_lengths: npt.ArrayLike, *, length: int, alignment: int
) -> list[Row]:
  """Assigns rollouts to rows, deterministically; the order of prompts and rollouts breaks ties.

  Groups are taken by descending number of tokens, and the rollouts of a group by descending length;
  ties are broken by index. A rollout goes into the fullest row that has its prompt and room for the
  rollout; else into the fullest row that has room for rollout and prompt; else into a new row.

  Args:
    prompt_lengths: i[P], tokens, at least 1.
    response_lengths: i[P, G], tokens; an empty rollout takes no position.
    length: positions of a row.
    alignment: a prompt ends, and a rollout begins, at a multiple of `alignment`.
  Raises:
    ValueError: a rollout and its prompt do not fit in a row.
  """
  rows = _assign(prompt_lengths, response_lengths, length=length, alignment=alignment)
  assert rows is not None  # without `most_whole` it never fails
  return rows


def _assign(
  prompt_lengths: npt.ArrayLike,
  response_lengths: npt.ArrayLike,
  *,
  length: int,
  alignment: int,
  most_whole: int | None = None,
) -> list[Row] | None:
  """The result of `assign_rows`, with at most `most_whole` whole rows; all further rows are short.

  Rollouts that fit in no short row are assigned first. Returns None if no whole row has room for
  one of these rollouts.
  """
  prompts, responses = np.asarray(prompt_lengths), np.asarray(response_lengths)
  prompt_places = _round_up(prompts - 1, alignment)
  rollout_places = _round_up(responses, alignment)
  if (most := int((prompt_places[:, None] + rollout_places).max())) > length:
    raise ValueError(
      f"a rollout with its prompt takes {most} positions, but a row has {length}; make rows longer,"
      " see `min_row_length`"
    )
  groups = np.argsort(-(prompts + responses.sum(1)), kind="stable")
  of_group = np.argsort(-responses, axis=1, kind="stable")
  order = [(p, g) for p in groups.tolist() for g in of_group[p].tolist() if responses[p, g] > 0]
  if most_whole is not None:
    fits_short = prompt_places[:, None] + rollout_places <= short_row(length)
    order.sort(key=lambda rollout: bool(fits_short[rollout]))
  of_prompt, of_rollout = prompt_places.tolist(), rollout_places.tolist()
  rows: list[dict[int, list[int]]] = []
  sizes: list[int] = []
  free: list[int] = []
  by_room: list[tuple[int, int]] = []  # (free positions, row) of all rows, ascending
  rows_of: dict[int, list[int]] = collections.defaultdict(list)  # by prompt
  for p, g in order:
    places, prompt = of_rollout[p][g], of_prompt[p]
    with_prompt = [(free[r], r) for r in rows_of[p] if places <= free[r]]
    fullest = bisect.bisect_left(by_room, (prompt + places, -1))
    if with_prompt:
      row = min(with_prompt)[1]
    elif fullest < len(by_room):
      row = by_room[fullest][1]
    else:
      row, is_short = len(rows), most_whole is not None and sizes.count(length) == most_whole
      if is_short and not fits_short[p, g]:
        return None
      rows.append({})
      sizes.append(short_row(length) if is_short else length)
      free.append(sizes[row])
      bisect.insort(by_room, (free[row], row))
    del by_room[bisect.bisect_left(by_room, (free[row], row))]
    if p not in rows[row]:
      rows_of[p].append(row)
      rows[row][p] = []
      free[row] -= prompt
    rows[row][p].append(g)
    free[row] -= places
    bisect.insort(by_room, (free[row], row))
  return [
    Row(blocks, size - left, is_short=size < length)
    for blocks, size, left in zip(rows, sizes, free, strict=True)
  ]


def assign_micro_batches(
  prompt_lengths: npt.ArrayLike, response_lengths: npt.ArrayLike, layout: RowLayout
) -> MicroBatches:
  """Assigns rollouts to the rows of micro-batches, with short rows if these save computation.

  Args:
    prompt_lengths, response_lengths: as for `assign_rows`.
  Raises:
    ValueError: a rollout and its prompt do not fit in a row.
  """
  step = layout.devices * layout.rows_per_device
  assign = functools.partial(
    _assign, prompt_lengths, response_lengths, length=layout.length, alignment=layout.alignment
  )
  rows = assign()
  assert rows is not None  # without `most_whole` it never fails
  found = _deal_rows(rows, prompt_lengths, response_lengths, layout)
  if not layout.has_short_rows:
    return found
  rows = assign(most_whole=(len(found.dealt) - 1) * step)
  if rows is None:
    return found
  mixed = _deal_rows(rows, prompt_lengths, response_lengths, layout)
  cost = lambda x: layout.count_places(len(x.dealt), x.num_short)
  return mixed if mixed.num_short <= _MOST_SHORT and cost(mixed) < cost(found) else found


def _deal_rows(
  rows: list[Row],
  prompt_lengths: npt.ArrayLike,
  response_lengths: npt.ArrayLike,
  layout: RowLayout,
) -> MicroBatches:
  """Deals whole rows to the first micro-batches, and short rows to the last micro-batches."""
  costs = np.array([attention_cost(row, prompt_lengths, response_lengths) for row in rows])
  is_short = np.array([row.is_short for row in rows], bool)
  sizes = dict(devices=layout.devices, rows_per_device=layout.rows_per_device)
  parts = []
  for numbers in (np.flatnonzero(~is_short), np.flatnonzero(is_short)):
    dealt = deal(costs[numbers].tolist(), **sizes)
    parts.append(np.append(numbers, -1)[dealt].astype(np.int32))  # −1 stays −1
  whole, short = parts
  if not is_short.any():
    return MicroBatches(rows, whole, 0)
  dealt = short if is_short.all() else np.concatenate([whole, short])
  return MicroBatches(rows, dealt, len(short))


def attention_cost(
  row: Row, prompt_lengths: npt.ArrayLike, response_lengths: npt.ArrayLike
) -> float:
  """Number of pairs of a query and a visible key in a row."""
  prompts, responses = np.asarray(prompt_lengths), np.asarray(response_lengths)
  pairs = 0.0
  for p, rollouts in row.blocks.items():
    s, t = float(prompts[p] - 1), responses[p, rollouts].astype(float)
    pairs += s * s / 2 + float((t * (s + t / 2)).sum())
  return pairs


def deal(costs: Sequence[float], *, devices: int, rows_per_device: int) -> np.ndarray:
  """Deals rows to micro-batches and devices; rows computed together have similar costs.

  Args:
    costs: the costs of each row.
  Returns:
    i32[M, devices · rows_per_device], row numbers of each micro-batch, −1 for an empty row. A
    device's rows of a micro-batch are adjacent, as when a leading axis is split over devices.
  """
  order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
  step = devices * rows_per_device
  micro_batches = max(1, -(-len(order) // step))
  dealt = np.full(micro_batches * step, -1, np.int32)
  dealt[: len(order)] = order
  dealt = dealt.reshape(micro_batches, rows_per_device, devices)
  return np.ascontiguousarray(dealt.swapaxes(1, 2)).reshape(micro_batches, step)


def pack_batch(
  batch: TrainBatch, layout: RowLayout, own_rows: Container[int] | None = None
) -> TrainBatch:
  """Adds the packed rows to a batch; responses are packed up to their last loss token.

  Args:
    batch: NumPy arrays.
    own_rows: see `pack`.
  """
  prompts = batch.prompts
  routes = None
  if batch.routes is not None:
    routes = np.asarray(batch.prompt_routes), np.asarray(batch.routes)
  packed = pack(
    np.asarray(prompts.tokens),
    np.asarray(prompts.lengths),
    np.asarray(batch.tokens),
    response_lengths(batch),
    layout,
    mask=np.asarray(batch.mask) > 0,
    routes=routes,
    own_rows=own_rows,
  )
  return dataclasses.replace(batch, packed=packed, routes=None, prompt_routes=None)


def pack(
  prompt_tokens: np.ndarray,
  prompt_lengths: np.ndarray,
  tokens: np.ndarray,
  response_lengths: np.ndarray,
  layout: RowLayout,
  *,
  mask: np.ndarray | None = None,
  routes: tuple[np.ndarray, np.ndarray] | None = None,
  own_rows: Container[int] | None = None,
) -> Packed:
  """Packs a batch into rows, in micro-batches of equal shape.

  Args:
    prompt_tokens: i32[P, S], left-padded.
    prompt_lengths: i32[P].
    tokens: i32[P, G, T], right-padded.
    response_lengths: i32[P, G].
    mask: bool[P, G, T], the tokens to predict; None: all tokens.
    routes: the routes of prompts [P, S, layers, k] and responses [P, G, T, layers, k]; None: not
      recorded.
    own_rows: the rows of a micro-batch that this process feeds. Routes are large, so only these
      rows get routes; None: all rows.
  """
  P, G, T = tokens.shape
  length, alignment = layout.length, layout.alignment
  rows, dealt, num_short = assign_micro_batches(prompt_lengths, response_lengths, layout)
  shape = (max(layout.max_micro_batches, len(dealt)), dealt.shape[1], length)
  # Zeros take no memory until they are written, and many rows stay empty.
  zeros = lambda: np.zeros((shape[0] * shape[1], length), np.int32)
  inputs, targets, positions, starts, prompt_ends = (zeros() for _ in range(5))
  prompts = np.full_like(inputs, -1)
  places = np.full((P, G, T), -1, np.int32)
  is_predicted = np.ones((P, G, T), bool) if mask is None else mask
  if routes is not None:
    of_prompts, of_responses = routes
    routes_in_rows = np.zeros((*inputs.shape, *of_prompts.shape[2:]), of_prompts.dtype)
  for number, row in enumerate(dealt.reshape(-1)):
    at = 0
    has_routes = routes is not None and (own_rows is None or number % shape[1] in own_rows)
    for p, rollouts in rows[row].blocks.items() if row >= 0 else ():
      s = int(prompt_lengths[p]) - 1
      end = at + int(_round_up(s, alignment))
      here = slice(end - s, end)
      prompt = prompt_tokens[p, prompt_tokens.shape[1] - s - 1 :]  # the last token included
      inputs[number, here] = prompt[:-1]
      positions[number, here] = np.arange(s)
      prompts[number, here], starts[number, here], prompt_ends[number, here] = p, end, end
      if has_routes:
        last = of_prompts.shape[1] - 1
        routes_in_rows[number, here] = of_prompts[p, last - s : last]
      at = end
      for g in rollouts:
        t = int(response_lengths[p, g])
        here = slice(at, at + t)
        inputs[number, here] = np.concatenate([prompt[-1:], tokens[p, g, : t - 1]])
        targets[number, here] = np.where(is_predicted[p, g, :t], tokens[p, g, :t], 0)
        positions[number, here] = s + np.arange(t)
        prompts[number, here], starts[number, here], prompt_ends[number, here] = p, at, end
        own_places = number * length + np.arange(at, at + t)
        places[p, g, :t] = np.where(is_predicted[p, g, :t], own_places, -1)
        if has_routes:
          routes_in_rows[number, here] = of_responses[p, g, :t]
        at += int(_round_up(t, alignment))
  fold = lambda x: x.reshape(*shape, *x.shape[2:])
  return Packed(
    tokens=fold(inputs),
    targets=fold(targets),
    rows=Rows(*map(fold, (prompts, positions, starts, prompt_ends))),
    places=places,  # type: ignore[arg-type]  # NumPy, on the host
    num_micro_batches=np.int32(len(dealt)),  # type: ignore[arg-type]
    num_short=np.int32(num_short) if layout.has_short_rows else None,  # type: ignore[arg-type]
    routes=None if routes is None else fold(routes_in_rows),
  )


def computed_rows(packed: Packed) -> list[Rows]:
  """The rows that an update computes, empty rows included, as arrays [R, positions].

  Whole rows and short rows are two elements of the result. If one kind has no rows, its element is
  left out.

  Args:
    packed: NumPy arrays.
  """
  short = int(packed.num_short or 0)
  whole, L = int(packed.num_micro_batches) - short, packed.tokens.shape[-1]
  select = lambda first, last, length: Rows(
    *(x[first:last, :, :length].reshape(-1, length) for x in packed.rows)
  )
  parts = [select(0, whole, L), select(whole, whole + short, short_row(L))]
  return [rows for rows in parts if len(rows.prompts)]


def _round_up(size: Size, multiple: int) -> Size:
  """`size`, rounded up to a multiple."""
  rounded: Size = -(-size // multiple) * multiple
  return rounded
