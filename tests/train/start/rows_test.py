"""The rows of a run: chosen once, recorded before they are used, and taken on every machine."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from oracles.batches import make_host_batch
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.storage.files import with_crc32
from rlvr_jax.train.checkpointing.workdir import WorkdirError
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.setup.programs import RowTokens
from rlvr_jax.train.start.rows import ROWS_FILE, read_rows, write_rows

FIELDS = ("batch.tokens_per_row", "batch.tokens_per_micro_batch")


@pytest.fixture(scope="module")
def parts():
  return build(tiny.config(num_updates=4, warm_start__num_steps=0, checkpoint__keep=5))


@pytest.fixture
def batch(parts):
  """One of the run's shapes: eight groups of four responses of two tokens."""
  P, G, _, T = parts.shape
  mask = np.zeros((P, G, T))
  mask[..., :2] = 1
  return make_host_batch(mask)


def test_the_first_batch_chooses_and_the_record_comes_before_the_first_use(parts, batch, capsys):
  recorded = []
  rows = tiny.run_rows(parts, None, recorded.append)
  assert rows.fields == dict.fromkeys(FIELDS)
  placement = rows.placement(lambda: batch)
  layout = placement.row_layout
  assert recorded == [(layout.length, layout.length * layout.rows_per_device)]
  assert rows.fields == dict(zip(FIELDS, recorded[0], strict=True))
  assert rows.placement(lambda: batch) is placement and len(recorded) == 1
  assert placement.compared_layout.length == layout.length
  assert "for responses of 2 tokens on average; config.batch.tokens_per_row" in "".join(
    capsys.readouterr()
  )
  fails = tiny.run_rows(parts, None, lambda _: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    fails.placement(lambda: batch)
  assert fails.fields == dict.fromkeys(FIELDS)


def test_what_is_recorded_is_taken_and_what_is_configured_wins(parts, batch):
  taken = tiny.run_rows(parts, RowTokens(24, 48))
  layout = taken.placement(lambda: batch).row_layout
  assert (layout.length, layout.rows_per_device) == (24, 2)
  config = parts.config.copy_and_resolve_references()
  config.batch.tokens_per_micro_batch = 30
  given = dataclasses.replace(parts, config=config)
  rows = tiny.run_rows(given, RowTokens(24, 48))
  assert rows.placement(lambda: batch) is given.placement
  assert [*rows.fields.values()] == [0, 30]


def test_rows_that_a_larger_mesh_cannot_fill_are_chosen_anew(batch):
  parts = build(tiny.config(mesh__data=8, evaluation__batch_prompts=8))
  recorded = []
  rows = tiny.run_rows(parts, RowTokens(1000, 1000), recorded.append)  # at most 3 such rows
  assert rows.placement(lambda: batch).row_layout.devices == 8
  assert recorded and recorded[0].tokens_per_row < 1000


def test_a_record_is_read_as_written_and_a_damaged_one_refused(tmp_path):
  assert read_rows(tmp_path) is None
  write_rows(tmp_path, RowTokens(24, 48))
  assert read_rows(tmp_path) == RowTokens(24, 48)
  path = tmp_path / ROWS_FILE
  for text in ("", "[]", path.read_text().replace("24", "25"), json.dumps(with_crc32({}))[:9]):
    path.write_text(text)
    with pytest.raises(WorkdirError, match=r"rows\.json, .* cannot be read: .* or remove it"):
      read_rows(tmp_path)


def test_a_run_of_an_earlier_version_keeps_what_its_configuration_says(tmp_path):
  before = dict(prompts=8, tokens_per_micro_batch=4096, tokens_per_row=0)
  (tmp_path / "config.json").write_text(json.dumps(dict(batch=before)))
  assert read_rows(tmp_path) == RowTokens(0, 4096)
  (tmp_path / "config.json").write_text(
    json.dumps(dict(batch=before | dict(tokens_per_micro_batch=0)))
  )
  assert read_rows(tmp_path) is None


@pytest.mark.slow
def test_a_resumed_run_takes_what_it_began_with(parts, tmp_path, capsys):
  """The record decides, not the batch that comes next; and it is not chosen a second time."""
  workdir, other = tmp_path / "run", tmp_path / "other"
  train(parts, workdir)
  assert "rows of" in "".join(capsys.readouterr())
  layout = json.loads((workdir / "layout.json").read_text())
  assert read_rows(workdir) == tuple(layout[name] for name in FIELDS)
  records = tiny.records(workdir, "train")
  assert len(records) == 4

  shutil.copytree(workdir, other)
  for folder in (workdir, other):
    for step in (2, 3, 4):
      shutil.rmtree(folder / "checkpoints" / str(step))
  write_rows(other, RowTokens(11, 11))
  train(parts, workdir)
  assert "rows of" not in "".join(capsys.readouterr())
  assert tiny.records(workdir, "train") == records
  train(parts, other)
  told = "".join(capsys.readouterr())
  assert f"tokens_per_row {layout[FIELDS[0]]} → 11" in told and "differ by rounding" in told
  count = lambda folder: [r["rows/micro_batches"] for r in tiny.records(folder, "train")]
  assert count(workdir)[0] == count(other)[0]
  assert all(
    one < several for one, several in zip(count(workdir)[1:], count(other)[1:], strict=True)
  )
