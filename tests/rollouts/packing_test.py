"""Where rollouts lie in rows: nothing lost, nothing twice, little padding, the same every time."""

import numpy as np
import pytest

from rlvr_jax.costs.workload import Workload, count_packing
from rlvr_jax.rollouts import packing
from rlvr_jax.types import BatchShape


def _layout(**changes):
  sizes = dict(prompts=5, group_size=4, max_prompt_length=9, max_response_length=30, length=40)
  rows = dict(alignment=1, devices=2, tokens_per_micro_batch=80)
  return packing.row_layout(**sizes | rows | changes)


def _batch(seed, P=5, G=4, S=9, T=30):
  rng = np.random.default_rng(seed)
  prompt_lengths = rng.integers(1, S + 1, P).astype(np.int32)
  lengths = np.minimum(rng.geometric(0.1, (P, G)), T).astype(np.int32)
  prompts = rng.integers(10, 99, (P, S)).astype(np.int32)
  prompts[np.arange(S) < S - prompt_lengths[:, None]] = 0
  tokens = rng.integers(100, 999, (P, G, T)).astype(np.int32)
  tokens[np.arange(T) >= lengths[..., None]] = 0
  return prompts, prompt_lengths, tokens, lengths


@pytest.mark.parametrize(("seed", "alignment"), [(0, 1), (1, 8)])
def test_every_token_is_predicted_once_from_its_own_past(seed, alignment):
  """What a place sees, by the rule of `Rows`, is its prompt and its rollout so far, and no more."""
  prompts, prompt_lengths, tokens, lengths = _batch(seed)
  packed = packing.pack(
    prompts, prompt_lengths, tokens, lengths, _layout(alignment=alignment)
  )  # fmt: skip
  M, R, L = packed.tokens.shape
  assert L == 40 and R == 4 and 1 < packed.num_micro_batches <= M
  fields = [np.reshape(x, (M * R, L)) for x in (*packed.rows, packed.tokens, packed.targets)]
  owner, positions, starts, prompt_ends, inputs, targets = fields
  index = np.arange(L)
  seen = set()
  for p, g, t in np.argwhere(np.arange(30) < lengths[..., None]):
    place = packed.places[p, g, t]
    assert place not in seen
    seen.add(place)
    r, i = divmod(place, L)
    assert targets[r, i] == tokens[p, g, t]
    visible = (owner[r] == owner[r, i]) & (index <= i)
    visible &= (index >= starts[r, i]) | (index < prompt_ends[r, i])
    whole = np.concatenate([prompts[p, 9 - prompt_lengths[p] :], tokens[p, g, :t]])
    np.testing.assert_array_equal(inputs[r, visible], whole)
    np.testing.assert_array_equal(positions[r, visible], np.arange(len(whole)))
    assert starts[r, i] % alignment == 0 and prompt_ends[r, i] % alignment == 0
  assert (packed.places[np.arange(30) >= lengths[..., None]] == -1).all()
  assert len(seen) == lengths.sum()


@pytest.mark.parametrize("seed", range(4))
def test_short_rows_hold_what_a_nearly_empty_micro_batch_would(seed):
  """Nothing is lost, nothing lies beyond a short row's places, and fewer are computed."""
  prompts, prompt_lengths, tokens, lengths = _batch(seed)
  layouts = [_layout(devices=1, alignment=2, has_short_rows=x, length=48) for x in (False, True)]
  whole, mixed = (
    packing.pack(prompts, prompt_lengths, tokens, lengths, layout) for layout in layouts
  )
  assert whole.num_short is None and mixed.num_short <= 2
  assert mixed.num_micro_batches <= mixed.tokens.shape[0]
  batch = Workload(prompt_lengths, lengths[..., None])
  fewer, more = (count_packing(batch, layout).places for layout in layouts[::-1])
  assert fewer < more if mixed.num_short else fewer == more
  present = np.arange(30) < lengths[..., None]
  assert ((mixed.places >= 0) == present).all()
  assert len(np.unique(mixed.places[present])) == lengths.sum()
  np.testing.assert_array_equal(mixed.targets.reshape(-1)[mixed.places[present]], tokens[present])
  short = slice(mixed.num_micro_batches - mixed.num_short, mixed.num_micro_batches)
  assert (mixed.rows.prompts[short, :, 16:] == -1).all()
  if not mixed.num_short:
    np.testing.assert_array_equal(mixed.places, whole.places)


def test_short_rows_are_taken_where_they_compute_less():
  """A row of 48 and half of another, in whole rows: 2 · 48; the half needs two short rows of 16."""
  layout = _layout(length=48, devices=1, tokens_per_micro_batch=48, has_short_rows=True)
  count = lambda *lengths: packing.assign_micro_batches([1], [lengths], layout)
  found = count(12, 12, 12, 12, 12, 12)
  assert found.num_short == 2 and len(found.dealt) == 3
  assert [(row.used, row.is_short) for row in found.rows] == [(48, False), (12, True), (12, True)]
  assert count(12, 12, 12, 12, 12, 12, 12).num_short == 0  # three would compute as much
  assert count(17, 17, 17, 17).num_short == 0  # none fits in a short row
  assert count(16, 2).num_short == 2 and len(count(16, 2).dealt) == 2  # not even one whole row


def test_a_batch_of_one_micro_batch_has_no_short_rows():
  """They would cost it a second forward pass."""
  assert not _layout(tokens_per_micro_batch=10_000, has_short_rows=True).has_short_rows
  assert _layout(tokens_per_micro_batch=80, has_short_rows=True).has_short_rows


def test_a_prompt_is_paid_once_per_row_and_rows_are_well_filled():
  """Lengths of a long-tailed distribution: at most 15 % of the places stay empty or repeat."""
  rng = np.random.default_rng(0)
  lengths = np.minimum(rng.lognormal(np.log(1500) - 0.32, 0.8, (64, 16)), 8192).astype(int)
  prompts = rng.integers(100, 300, 64)
  length = packing.min_row_length(1024, 8192, alignment=128)
  rows = packing.assign_rows(prompts, lengths, length=length, alignment=128)
  assert sorted((p, g) for row in rows for p, gs in row.blocks.items() for g in gs) == [
    (p, g) for p in range(64) for g in range(16)
  ]
  useful = prompts.sum() + lengths.sum()
  assert len(rows) * length <= 1.15 * useful


def test_the_layout_does_not_depend_on_the_order_of_unequal_groups():
  _, prompt_lengths, _, lengths = _batch(7)
  lengths[:, 0] += 3 * np.arange(5)  # no two groups of the same number of tokens
  order = np.random.default_rng(1).permutation(5)
  straight = packing.assign_rows(prompt_lengths, lengths, length=64, alignment=1)
  shuffled = packing.assign_rows(prompt_lengths[order], lengths[order], length=64, alignment=1)
  named = [{int(order[p]): gs for p, gs in row.blocks.items()} for row in shuffled]
  assert named == [row.blocks for row in straight]


def test_rows_that_run_together_cost_about_the_same():
  costs = [5.0, 1.0, 4.0, 2.0, 3.0]
  dealt = packing.deal(costs, devices=2, rows_per_device=2)
  # Devices 0 and 1 hold rows (0, 4) and (2, 3) of the first micro-batch, then row 1 and none.
  np.testing.assert_array_equal(dealt, [[0, 4, 2, 3], [1, -1, -1, -1]])


def test_rollouts_without_tokens_take_no_place():
  rows = packing.assign_rows([4, 4], [[0, 3], [0, 0]], length=8, alignment=1)
  assert rows == [packing.Row({0: [1]}, 6)]


def test_a_rollout_that_fits_no_row_is_refused():
  with pytest.raises(ValueError, match="takes 17 positions, but a row has 16"):
    packing.assign_rows([4], [[14]], length=16, alignment=1)


def test_the_bound_on_rows_holds_for_the_worst_lengths():
  """Rollouts of a little over half a row share none; of a third, two of a group share one."""
  sizes = dict(prompts=3, group_size=4, max_prompt_length=1, length=32, devices=1)
  for length, most in ((17, 12), (11, 6), (16, 6)):
    rows = packing.assign_rows([1, 1, 1], np.full((3, 4), length), length=32, alignment=1)
    layout = _layout(**sizes, max_response_length=length, tokens_per_micro_batch=32)
    assert len(rows) == most == layout.max_micro_batches


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_on_rows_holds_for_random_lengths(seed):
  rng = np.random.default_rng(seed)
  S, T, G = rng.integers(1, 20), rng.integers(1, 40), rng.integers(1, 9)
  sizes = dict(prompts=6, group_size=int(G), max_prompt_length=int(S), max_response_length=int(T))
  length = packing.min_row_length(S, T, alignment=4) + int(rng.integers(0, 60))
  layout = _layout(**sizes, length=length, alignment=4, devices=1, tokens_per_micro_batch=length)
  prompts, lengths = rng.integers(1, S + 1, 6), rng.integers(0, T + 1, (6, G))
  rows = packing.assign_rows(prompts, lengths, length=length, alignment=4)
  assert len(rows) <= layout.max_micro_batches


@pytest.mark.parametrize("seed", range(4))
def test_a_group_per_device_fits_the_layout_of_few(seed):
  """Whatever the lengths and the devices: shapes never change, so nothing compiles again."""
  rng = np.random.default_rng(seed)
  S, T, G, devices = (int(rng.integers(1, most)) for most in (20, 40, 9, 5))
  shape = BatchShape(6, G, S, T)
  length = packing.min_row_length(S, T, alignment=4) + int(rng.integers(0, 60))
  tokens = length * int(rng.integers(1, 4))
  whole = _layout(
    **shape._asdict(),
    length=length,
    alignment=4,
    devices=1,
    tokens_per_micro_batch=tokens,
  )
  few = packing.layout_of_few(whole, shape, devices)
  assert few.length * few.rows_per_device <= tokens
  for P in range(1, devices + 1):
    prompts, lengths = rng.integers(1, S + 1, P), rng.integers(0, T + 1, (P, G))
    dealt = packing.assign_micro_batches(prompts, lengths, few).dealt
    assert len(dealt) <= few.max_micro_batches


def test_fewer_rows_than_devices_are_an_error_with_its_remedy():
  with pytest.raises(ValueError, match=r"most 5 rows of 500 .* the 8 devices .*tokens_per_row"):
    _layout(length=500, devices=8)
