"""The row layout of a run: chosen for its first batch, recorded, and used by every later start."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.batch import response_lengths
from rlvr_jax.rollouts.packing import layout_of_few
from rlvr_jax.storage.files import is_as_written, replace_file, with_crc32
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.checkpointing.workdir import read_config
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.reporting.progress import say
from rlvr_jax.train.setup.programs import RowTokens, make_row_layout
from rlvr_jax.train.start.row_choice import choose_row_layout
from rlvr_jax.types import BatchShape, TrainBatch

ROWS_FILE = "rows.json"


def read_rows(workdir: Path) -> RowTokens | None:
  """The rows with which a run began; None if no rows have been chosen for it yet.

  Older versions recorded the rows in config.json: its fields apply if there is no rows.json.

  Raises:
    WorkdirError: the record is damaged.
  """
  path = workdir / ROWS_FILE
  if path.exists():
    try:
      record = json.loads(path.read_text())
      if not isinstance(record, dict) or not is_as_written(record):
        raise ValueError("it does not match its checksum")
      return RowTokens(**{name: record[name] for name in RowTokens._fields})
    except (OSError, ValueError) as error:
      raise WorkdirError(
        f"{path}, which records the rows of this run, cannot be read: {error}. Put back a copy of"
        " this file, or remove it: then rows are chosen for the next batch, and results"
        " differ by rounding"
      ) from error
  if not (workdir / "config.json").exists():
    return None
  batch = read_config(workdir / "config.json").get("batch", {})
  given = RowTokens(*(int(batch.get(name, 0)) for name in RowTokens._fields))
  return given if any(given) else None


def write_rows(workdir: Path, tokens: RowTokens) -> None:
  """Records the rows that were chosen for a run; the file survives a crash of the machine."""
  with replace_file(workdir / ROWS_FILE) as file:
    file.write((json.dumps(with_crc32(tokens._asdict())) + "\n").encode())


def row_fields(tokens: RowTokens | None) -> dict[str, int | None]:
  """The configuration fields that give these rows, by name; all None if rows are not chosen."""
  values = tokens._asdict() if tokens else dict.fromkeys(RowTokens._fields)
  return {f"batch.{name}": value for name, value in values.items()}


class RunRows:
  """The row layout of a run's rollouts, from its first batch on."""

  def __init__(
    self,
    placement: Placement,
    shape: BatchShape,
    network: TransformerConfig,
    *,
    has_first_phase: bool,
    configured: RowTokens,
    recorded: RowTokens | None,
    record: Callable[[RowTokens], None],
  ):
    """Takes the configured rows, or else the recorded rows.

    Args:
      placement: the placement of the run, with the configured rows, or with rows that fit any
        batch.
      shape: the shape of a training batch.
      network: settings of the policy's network.
      has_first_phase: see `Method`.
      configured: the fields of `config.batch`.
      recorded: the result of `read_rows`.
      record: called on the first process with the rows chosen for the first batch, before these
        rows are used.
    """
    self._planned, self._shape, self._network = placement, shape, network
    self._has_first_phase, self._record = has_first_phase, record
    self._tokens: RowTokens | None = None
    self._placement: Placement | None = None
    if any(configured):
      self._tokens, self._placement = configured, placement
    elif recorded is not None:
      # If this machine has too many devices for the recorded rows, rows are chosen again.
      with contextlib.suppress(ValueError):
        self._tokens, self._placement = recorded, self._place(recorded)

  @property
  def fields(self) -> dict[str, int | None]:
    """The configuration fields that give these rows; all None before rows are chosen."""
    return row_fields(self._tokens)

  def placement(self, batch: Callable[[], TrainBatch]) -> Placement:
    """The run's placement, with rows that are chosen for the first batch.

    With several processes, all of them make the first call together.

    Args:
      batch: makes a batch of NumPy arrays; called if there are no rows yet.
    """
    if self._placement is None:
      # The arrays on the devices must have the same shapes on all processes.
      chosen = RowTokens(*multihost.exchange(self._choose(batch()))[0])
      multihost.run_on_first(lambda: self._record(chosen), None)
      self._tokens, self._placement = chosen, self._place(chosen)
    return self._placement

  def _choose(self, batch: TrainBatch) -> RowTokens:
    lengths = response_lengths(batch)
    layout = choose_row_layout(
      self._shape,
      self._network.attention,
      self._planned.mesh,
      np.asarray(batch.prompts.lengths),
      lengths,
      width=self._network.width,
      has_first_phase=self._has_first_phase,
    )
    say(
      f"rows of {layout.length} tokens, {layout.rows_per_device} to a micro-batch"
      f"{' on each device' if layout.devices > 1 else ''}, for responses of"
      f" {lengths.mean():.0f} tokens on average; config.batch.tokens_per_row and"
      " tokens_per_micro_batch set them"
    )
    return RowTokens(layout.length, layout.device_places)

  def _place(self, tokens: RowTokens) -> Placement:
    placement, shape = self._planned, self._shape
    layout = make_row_layout(tokens, shape, self._network.attention, placement.mesh)
    few = layout_of_few(layout, shape, placement.compared_layout.devices)
    return dataclasses.replace(placement, row_layout=layout, compared_layout=few)
