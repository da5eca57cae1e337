"""Chooses the rows and micro-batches that suit a run's devices and the lengths of its rollouts.

Rows always have room for the longest rollout that the configuration allows, so that every batch
fits. The best row length depends on the actual lengths of rollouts and on the device: on the fixed
cost of a micro-batch, and on how many positions the device computes at once.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jax.sharding import AbstractMesh, Mesh

from rlvr_jax.ops.row_attention import longest_row, row_length
from rlvr_jax.rollouts.packing import Row, RowLayout, assign_micro_batches, assign_rows
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.programs import (
  RowTokens,
  least_row_length,
  make_row_layout,
  most_places,
)
from rlvr_jax.types import BatchShape

_LEAST_PLACES = 64  # positions of the shortest row that is tried; shorter rows save nothing
_MOST_WHOLE = 4096  # positions of a micro-batch that may hold a whole batch
_MOST_PADDING = 1.25  # computed positions per used position, if some layout needs so few
_LENGTHS_PER_OCTAVE = 8  # row lengths that are tried between a length and its double
_ROWS = (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128)  # rows per device that are tried
# A layout is also tried with longer responses, since later batches may have them.
_GROWTHS = (1.0, 1.06, 1.12, 1.18, 1.24, 1.3, 1.4, 1.5)  # factors of response lengths
_BATCHES, _TRIED_ROLLOUTS = 4, 1024  # tried for each growth, at most
_DENSE = 512  # row length up to which attention computes all scores; beyond, it skips blocks


def choose_row_layout(
  shape: BatchShape,
  kind: str,
  mesh: Mesh,
  prompt_lengths: npt.ArrayLike,
  response_lengths: npt.ArrayLike,
  *,
  width: int,
  has_first_phase: bool,
) -> RowLayout:
  """The layout in which batches with lengths such as these are computed fastest.

  The function packs the batch of these lengths, and batches drawn from its groups, some with longer
  responses. Among layouts with little padding, it takes the layout with the least cost. A position
  costs 1, or more in long rows whose attention computes all scores; a micro-batch adds the cost of
  a fixed number of positions.

  Args:
    shape, kind, mesh: as in `make_row_layout`.
    prompt_lengths: i[P], tokens.
    response_lengths: i[P, G], tokens, up to the last loss token.
    width: the width of the network.
    has_first_phase: whether the method needs a separate forward pass if a batch may have several
      micro-batches, see `update.accumulate`.
  """
  batches = list(_similar_batches(prompt_lengths, response_lengths, shape))
  overhead = _overhead(mesh, width)

  @functools.cache
  def count_rows(length: int, alignment: int) -> list[tuple[int, int]]:
    """(number of rows, used positions) of each of `batches`."""
    sizes = dict(length=length, alignment=alignment)
    return [_used(assign_rows(*batch, **sizes)) for batch in batches]

  def count(layout: RowLayout) -> list[_Count]:
    if layout.has_short_rows:
      dealt = [assign_micro_batches(*batch, layout) for batch in batches]
      return [_Count(len(x.dealt), x.num_short, _used(x.rows)[1]) for x in dealt]
    step = layout.devices * layout.rows_per_device
    rows = count_rows(layout.length, layout.alignment)
    return [_Count(-(-number // step), 0, used) for number, used in rows]

  def judge(layout: RowLayout) -> tuple[float, float]:
    """(computed positions per used position, at the worst of `_GROWTHS`; cost of an update)."""
    counts = count(layout)
    places = np.array([layout.count_places(x.micro_batches, x.short) for x in counts])
    padding = (places / [x.used for x in counts]).reshape(len(_GROWTHS), -1).mean(1)
    micro_batches = np.mean([x.micro_batches for x in counts])
    scores = 0.0 if kind == "splash" else min(layout.length, _DENSE) / (4 * width)
    passes = 4 if has_first_phase and layout.max_micro_batches > 1 else 3
    cost = passes * (places.mean() * (1 + scores) + overhead * layout.devices * micro_batches)
    return float(np.max(padding)), float(cost)

  judged = {layout: judge(layout) for layout in _candidates(shape, kind, mesh)}
  allowed = max(_MOST_PADDING, 1.05 * min(padding for padding, _ in judged.values()))
  costs = {x: cost for x, (padding, cost) in judged.items() if padding <= allowed}
  if has_first_phase:  # padding a single micro-batch may cost less than another pass
    whole = make_row_layout(RowTokens(0, _MOST_WHOLE), shape, kind, mesh)
    if whole.max_micro_batches == 1:
      costs[whole] = judge(whole)[1]
  return min(costs, key=lambda layout: costs[layout])


def _candidates(shape: BatchShape, kind: str, mesh: Mesh) -> Iterator[RowLayout]:
  """Layouts that hold every batch."""
  least = row_length(kind, max(least_row_length(kind, shape), _LEAST_PLACES))
  most = max(most_places(mesh), least)
  lengths = {
    row_length(kind, int(least * 2 ** (step / _LENGTHS_PER_OCTAVE)))
    for step in range(int(_LENGTHS_PER_OCTAVE * math.log2(most / least)) + 1)
  }
  longest = max(min(most, longest_row(kind)), min(lengths))
  for length in sorted(x for x in lengths if x <= longest):
    for number in (x for x in _ROWS if x * length <= most):
      with contextlib.suppress(ValueError):  # fewer rows than devices
        layout = make_row_layout(RowTokens(length, number * length), shape, kind, mesh)
        if layout.max_micro_batches == 1 or layout.rows_per_device == number:
          yield layout


class _Count(NamedTuple):
  """The size of a batch that is packed in a layout."""

  micro_batches: int
  short: int  # number of micro-batches with short rows
  used: int  # positions that hold a token


def _used(rows: Sequence[Row]) -> tuple[int, int]:
  """(number of rows, number of their positions that hold a token)."""
  return len(rows), sum(row.used for row in rows)


def _similar_batches(
  prompt_lengths: npt.ArrayLike, response_lengths: npt.ArrayLike, shape: BatchShape
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields (prompt lengths, response lengths) of the batch itself and of batches resampled from it.

  Resampled batches draw their groups with replacement, and lengthen responses by `_GROWTHS`.
  """
  prompts = np.maximum(prompt_lengths, 1)
  responses = np.maximum(response_lengths, 1)
  random = np.random.default_rng(0)
  groups = np.arange(len(prompts))
  number = min(max(_TRIED_ROLLOUTS // responses.size, 1), _BATCHES)
  for growth in np.repeat(_GROWTHS, number):
    more = (growth - 1) * responses[groups] + random.random(responses.shape)  # rounds at random
    longer = responses[groups] + more.astype(np.int64)
    yield prompts[groups], np.minimum(longer, shape.max_response_length)
    groups = random.integers(0, len(prompts), len(prompts))


def _overhead(mesh: Mesh | AbstractMesh, width: int) -> float:
  """The fixed cost of a micro-batch, as the number of positions that take the same time.

  Each micro-batch reads the weights and adds its gradient to the sum. A CPU of two cores computes
  some 50 positions in that time, for any network. The term with `width` is added since small matrix
  products use only one core. An H100 or a TPU v5p takes as long to move 28 bytes per parameter as
  to compute 300 to 500 positions, at 6 FLOPs per parameter and position.
  """
  return 48 + 2**14 / width if sharding.is_on_cpu(mesh) else 512
