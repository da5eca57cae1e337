"""A run with short rows, as TPUs have them: nothing about them is state, so that it resumes."""

import dataclasses
import shutil
from typing import ClassVar

import pytest
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.rollouts.packing import row_layout
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.setup.build import build


class RecordingPlacement(Placement):
  """Remembers how many micro-batches of short rows every update had."""

  counts: ClassVar[list[int]] = []

  def pack_to_devices(self, batch):
    placed = super().pack_to_devices(batch)
    self.counts.append(int(placed.packed.num_short))
    return placed


@pytest.mark.slow
def test_a_resumed_run_repeats_itself_and_compiles_one_update(tmp_path):
  parts = build(
    tiny.config(
      num_updates=4,
      warm_start__num_steps=0,
      evaluation__every=4,
      batch__tokens_per_micro_batch=36,
    )
  )
  names = [field.name for field in dataclasses.fields(Placement)]
  fields = {name: getattr(parts.placement, name) for name in names}
  layout = row_layout(
    **parts.shape._asdict(),
    length=36,
    alignment=1,
    devices=parts.placement.row_layout.devices,
    tokens_per_micro_batch=36,
    has_short_rows=True,
  )
  placement = RecordingPlacement(**fields | dict(row_layout=layout))
  parts = dataclasses.replace(parts, placement=placement)
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  train(parts, whole)
  trained = tiny.records(whole, "train")
  assert len(trained) == 4 and any(placement.counts)
  shutil.copytree(whole, cut)
  for later in (3, 4):
    shutil.rmtree(cut / "checkpoints" / str(later))
  train(parts, cut)
  assert tiny.records(cut, "train") == trained
  assert tiny.rollouts(cut) == tiny.rollouts(whole)
  assert parts.programs.train_step._cache_size() == 1
