"""Where rollouts lie in rows: nothing lost, nothing twice, little padding, the same every time."""

import numpy as np
import pytest

from rlvr_jax.rollouts import packing


def _batch(seed, P=5, G=4, S=9, T=30):
  rng = np.random.default_rng(seed)
  prompt_lengths = rng.integers(1, S + 1, P).astype(np.int32)
  lengths = np.minimum(rng.geometric(0.1, (P, G)), T).astype(np.int32)
  prompts = rng.integers(10, 99, (P, S)).astype(np.int32)
  prompts[np.arange(S) < S - prompt_lengths[:, None]] = 0
  tokens = rng.integers(100, 999, (P, G, T)).astype(np.int32)
  tokens[np.arange(T) >= lengths[..., None]] = 0
  return prompts, prompt_lengths, tokens, lengths


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alignment", [1, 8])
def test_every_token_is_predicted_once_from_its_own_past(seed, alignment):
  """What a place sees, by the rule of `Rows`, is its prompt and its rollout so far, and no more."""
  prompts, prompt_lengths, tokens, lengths = _batch(seed)
  packed = packing.pack(
    prompts, prompt_lengths, tokens, lengths,
    length=packing.row_length(9, 30, 0, 8), alignment=alignment, devices=2, rows_per_device=2,
  )  # fmt: skip
  M, R, L = packed.tokens.shape
  assert L == 40 and R == 4 and packed.num_micro_batches == M
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


def test_a_prompt_is_paid_once_per_row_and_rows_are_well_filled():
  """Lengths of a long-tailed distribution: at most 15 % of the places stay empty or repeat."""
  rng = np.random.default_rng(0)
  lengths = np.minimum(rng.lognormal(np.log(1500) - 0.32, 0.8, (64, 16)), 8192).astype(int)
  prompts = rng.integers(100, 300, 64)
  length = packing.row_length(1024, 8192, 0, 128)
  rows = packing.assign(prompts, lengths, length=length, alignment=128)
  assert sorted((p, g) for row in rows for p, gs in row.blocks.items() for g in gs) == [
    (p, g) for p in range(64) for g in range(16)
  ]
  useful = prompts.sum() + lengths.sum()
  assert len(rows) * length <= 1.15 * useful
  limit = packing.max_rows(64, 16, places_of_one=length, length=length)
  assert len(rows) <= limit


def test_the_layout_does_not_depend_on_the_order_of_unequal_groups():
  _, prompt_lengths, _, lengths = _batch(7)
  lengths[:, 0] += 3 * np.arange(5)  # no two groups of the same number of tokens
  order = np.random.default_rng(1).permutation(5)
  straight = packing.assign(prompt_lengths, lengths, length=64, alignment=1)
  shuffled = packing.assign(prompt_lengths[order], lengths[order], length=64, alignment=1)
  named = [{int(order[p]): gs for p, gs in row.blocks.items()} for row in shuffled]
  assert named == [row.blocks for row in straight]


def test_rows_that_run_together_cost_about_the_same():
  costs = [5.0, 1.0, 4.0, 2.0, 3.0]
  dealt = packing.deal(costs, devices=2, rows_per_device=2)
  # Devices 0 and 1 hold rows (0, 4) and (2, 3) of the first micro-batch, then row 1 and none.
  np.testing.assert_array_equal(dealt, [[0, 4, 2, 3], [1, -1, -1, -1]])


def test_rollouts_without_tokens_take_no_place():
  rows = packing.assign([4, 4], [[0, 3], [0, 0]], length=8, alignment=1)
  assert rows == [packing.Row({0: [1]}, 6)]


def test_a_rollout_that_fits_no_row_is_refused():
  with pytest.raises(ValueError, match="takes 17 places, a row has 16"):
    packing.assign([4], [[14]], length=16, alignment=1)


def test_the_bound_on_rows_holds_for_the_worst_lengths():
  """Rollouts of a little over half a row: no two share one."""
  lengths = np.full((3, 4), 17)
  rows = packing.assign([1, 1, 1], lengths, length=32, alignment=1)
  assert len(rows) == 12 <= packing.max_rows(3, 4, places_of_one=17, length=32)
