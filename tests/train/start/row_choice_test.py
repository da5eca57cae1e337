"""Rows chosen by lengths: little padding, whatever comes later fits, and devices differ."""

import functools

import jax
import numpy as np
import pytest

from rlvr_jax.ops.row_blocks import TILE
from rlvr_jax.rollouts.packing import assign_micro_batches
from rlvr_jax.train.cluster.sharding import AXES
from rlvr_jax.train.setup.programs import RowTokens, make_row_layout
from rlvr_jax.train.start.row_choice import choose_row_layout
from rlvr_jax.types import BatchShape

AUTO = (jax.sharding.AxisType.Auto,) * 3
# Name → shape, mean length of prompts, of responses.
BATCHES = {
  "ten tokens": (BatchShape(8, 8, 64, 48), 40, 10),
  "ten after a long prompt": (BatchShape(8, 8, 160, 48), 120, 10),
  "the quickstart's": (BatchShape(64, 8, 12, 4), 11, 3),
  "worked solutions": (BatchShape(32, 16, 512, 1024), 150, 200),
  "long": (BatchShape(64, 16, 1024, 8192), 200, 1500),
}


def mesh_of(platform, devices=1):
  if platform == "cpu":
    return jax.make_mesh((devices, 1, 1), AXES, axis_types=AUTO, devices=jax.devices()[:devices])
  return jax.sharding.AbstractMesh((devices, 1, 1), AXES, axis_types=AUTO)


def draw(name, seed):
  """Lengths of the prompts and the responses of a batch."""
  shape, prompt, response = BATCHES[name]
  rng = np.random.default_rng(seed)
  prompts = np.clip(rng.normal(prompt, prompt / 10, shape.prompts).round(), 1, shape[2])
  drawn = rng.lognormal(np.log(response) - 0.18, 0.6, (shape.prompts, shape.group_size))
  return prompts.astype(int), np.clip(drawn.round(), 1, shape[3]).astype(int)


@functools.cache
def choose(name, kind="reference", platform="cpu", *, devices=1, first=False, width=576, seed=0):
  return choose_row_layout(
    BATCHES[name][0], kind, mesh_of(platform, devices), *draw(name, seed),
    width=width, has_first_phase=first,
  )  # fmt: skip


def padding(lengths, layout):
  """Places for each that is used."""
  found = assign_micro_batches(*lengths, layout)
  used = sum(row.used for row in found.rows)
  return layout.count_places(len(found.dealt), found.num_short) / used


@pytest.mark.parametrize(
  "name, platform, kind",
  [
    ("ten after a long prompt", "cpu", "reference"),
    ("the quickstart's", "cpu", "reference"),
    ("long", "gpu", "cudnn"),
  ],
)
def test_other_batches_than_the_first_have_little_padding(name, platform, kind):
  layouts = [choose(name, kind, platform, seed=seed) for seed in range(2)]
  found = [
    padding(draw(name, 100 + seed), layout)
    for layout in layouts
    for seed in range(5 * len(layouts))
  ]
  assert np.mean(found) <= 1.25


def test_rows_by_the_maximum_lengths_are_mostly_padding():
  """What ten tokens had before: the test above would notice."""
  shape = BATCHES["ten tokens"][0]
  layout = make_row_layout(RowTokens(0, 4096), shape, "reference", mesh_of("cpu"))
  assert padding(draw("ten tokens", 100), layout) > 3


@pytest.mark.parametrize(
  "platform, kind, devices",
  [
    ("cpu", "reference", 1),
    pytest.param("tpu", "splash", 8, marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize("name", BATCHES)
def test_the_longest_batch_fits_into_the_same_arrays(name, platform, kind, devices):
  layout = choose(name, kind, platform, devices=devices)
  shape = BATCHES[name][0]
  longest = np.full(shape.prompts, shape[2]), np.full((shape.prompts, shape.group_size), shape[3])
  assert len(assign_micro_batches(*longest, layout).dealt) <= layout.max_micro_batches
  assert layout.devices == devices
  if kind == "splash":
    assert layout.length % TILE == 0 and layout.alignment >= 8
  # A record of two numbers is the layout, on every machine.
  tokens = RowTokens(layout.length, layout.length * layout.rows_per_device)
  assert make_row_layout(tokens, shape, kind, mesh_of(platform, devices)) == layout
  if name != "long":  # which takes most of a second
    assert choose.__wrapped__(name, kind, platform, devices=devices) == layout


@pytest.mark.slow
def test_devices_take_as_many_places_at_once_as_suits_them():
  places = lambda *args: (x := choose("worked solutions", *args)).length * x.rows_per_device
  assert places("cudnn", "gpu") > 2048 < places("splash", "tpu")
  assert places("reference", "cpu") == 1536  # its longest rollout alone needs more than 1024
  small = choose("the quickstart's")
  assert 400 < small.length * small.rows_per_device <= 1024


def test_narrow_networks_have_short_rows():
  """Their attention to all of a row is a larger share of the work."""
  narrow, wide = (choose("the quickstart's", width=width) for width in (128, 4096))
  assert narrow.length < wide.length


def test_a_second_forward_pass_is_avoided_where_that_costs_less():
  """Batches that are all one micro-batch need none, see `update.accumulate`."""
  assert choose("the quickstart's", first=True, width=128).max_micro_batches == 1
  assert choose("the quickstart's", first=False, width=128).max_micro_batches > 1
  assert choose("ten tokens", first=True) == choose("ten tokens", first=False)


def test_a_batch_without_a_token_in_the_loss_chooses_too():
  shape = BATCHES["ten tokens"][0]
  layout = choose_row_layout(
    shape, "reference", mesh_of("cpu"), np.full(8, 40), np.zeros((8, 8), int),
    width=576, has_first_phase=False,
  )  # fmt: skip
  assert layout.length >= 64 + 48 - 1
