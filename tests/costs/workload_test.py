"""Lengths that costs are estimated for."""

import ml_collections
import numpy as np
import pytest

from rlvr_jax.costs import workload
from rlvr_jax.rollouts.packing import computed_rows, row_layout
from rlvr_jax.types import BatchShape

SHAPE = BatchShape(64, 16, 100, 2000)
LAYOUT = row_layout(
  prompts=64, group_size=16, max_prompt_length=100, max_response_length=2000, length=4096,
  alignment=1, devices=2, tokens_per_micro_batch=4096,
)  # fmt: skip


ENVIRONMENT = ml_collections.ConfigDict(dict(name="guess", max_turns=4))


def make(text, **environment):
  settings = ml_collections.ConfigDict(ENVIRONMENT.to_dict() | environment)
  return workload.parse_lengths(text, settings)


def test_lognormal_lengths_have_the_mean_and_the_spread_that_are_named():
  batch = make("lognormal(mean=400, sigma=0.5, prompt=30)").draw(SHAPE, 0)
  assert batch.prompts.tolist() == [30] * 64 and batch.responses.shape == (64, 16)
  assert batch.responses.mean() == pytest.approx(400, rel=0.05)
  assert np.log(batch.responses).std() == pytest.approx(0.5, rel=0.05)


def test_they_end_at_the_greatest_length_and_repeat_by_number():
  lengths = make("lognormal(mean=1500, sigma=1.0)")
  first, again, other = (lengths.draw(SHAPE, number) for number in (0, 0, 1))
  assert first.responses.max() == 2000 and first.responses.min() >= 1
  assert first.prompts.tolist() == [100] * 64
  assert np.array_equal(first.responses, again.responses)
  assert not np.array_equal(first.responses, other.responses)


def test_the_typical_batch_has_the_median_of_micro_batches():
  lengths = make("lognormal(mean=600)")
  typical = workload.typical_batch(lengths, SHAPE, LAYOUT)
  count = lambda batch: int(workload.pack_workload(batch, SHAPE, LAYOUT).num_micro_batches)
  counts = [count(lengths.draw(SHAPE, number)) for number in range(9)]
  assert count(typical) == np.median(counts) and len(set(counts)) > 1
  longest = workload.typical_batch(make("longest"), SHAPE, LAYOUT)
  assert (longest.responses == 2000).all() and count(longest) == 512  # one in a row


def test_places_are_those_of_the_rows_that_are_computed():
  """A third of the places of short rows."""
  sizes = dict(length=4096, alignment=8, devices=8, tokens_per_micro_batch=4096)
  shape = BatchShape(32, 8, 256, 512)
  layout = row_layout(**shape._asdict(), **sizes, has_short_rows=True)
  batches = [make("lognormal(mean=150)").draw(shape, number) for number in range(5)]
  packed = [workload.pack_workload(batch, shape, layout) for batch in batches]
  assert any(batch.num_short > 0 for batch in packed)
  for batch, rows in zip(batches, packed, strict=True):
    places = sum(part.prompts.size for part in computed_rows(rows))
    tokens = batch.prompts.sum() + batch.responses.sum()
    assert workload.count_packing(batch, layout) == (rows.num_micro_batches, places, tokens)


def test_places_over_tokens_count_empty_rows_and_each_prompt_once():
  """A row for each of two devices, though one would do; then three rows, and an empty one."""
  sizes = dict(max_prompt_length=5, max_response_length=30, length=40, alignment=1, devices=2)
  layout = row_layout(prompts=2, group_size=2, **sizes, tokens_per_micro_batch=40)
  count = lambda prompts, responses: workload.count_packing(
    workload.Workload(np.asarray(prompts), np.asarray(responses)[..., None]), layout
  )
  assert count([3], [[6, 2]]).places_per_token == 80 / 11
  assert count([3, 3], [[30, 2], [30, 30]]).places_per_token == 160 / 98


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("lognormal", "--lengths = 'lognormal': lognormal needs a value of mean"),
    ("lognormal(mean=0)", r"mean = 0 is not a number in \[1"),
    ("normal(mean=5)", "'normal' is unknown; did you mean 'lognormal'"),
    ("dialogue(turns=0, policy=5, reply=5)", r"turns = 0 is not an integer ≥ 1"),
    ("dialogue(turns=2, policy=0, reply=5)", r"policy = 0 is not a number in \[1"),
    ("dialogue(turns=2, policy=5, reply=0.5)", r"reply = 0\.5 is not a number in \[1"),
    (
      "dialogue(turns=5, policy=5, reply=5)",
      r"5 turns, more than config\.environment\.max_turns = 4;",
    ),
  ],
)
def test_what_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    make(text)
  with pytest.raises(
    ValueError, match=r"prompt = 101 is more than config\.max_prompt_length = 100"
  ):
    make("lognormal(mean=5, prompt=101)").draw(SHAPE, 0)


def test_dialogues_need_an_environment_and_places_for_another_turn():
  told = r"2 turns, but a rollout has one turn because config\.environment\.name is empty"
  with pytest.raises(ValueError, match=told):
    make("dialogue(turns=2, policy=5, reply=5)", name="")
  assert make("dialogue(turns=1, policy=5, reply=5)", name="").max_turns == 1
  text = "dialogue(turns=2, policy=1500, reply=500)"
  with pytest.raises(
    ValueError, match=r"2000 tokens leave no room .*config\.max_response_length = 2000"
  ):
    make(text).draw(SHAPE, 0)


def test_turns_of_dialogues_follow_one_another_up_to_the_greatest_length():
  """Without a spread: turns of 30 tokens and replies of 50 end where 200 places are full."""
  shape = BatchShape(2, 3, 100, 200)
  of = lambda turns, **sizes: make(
    f"dialogue(turns={turns}, policy=30, reply=50, sigma=0, prompt=7)"
  ).draw(shape._replace(**sizes), 0)
  three = of(3)
  assert three.prompts.tolist() == [7, 7] and three.turns.shape == (2, 3, 5)
  assert three.turns[1, 2].tolist() == [30, 50, 30, 50, 30]
  assert three.responses[0, 0] == 190 and three.sampled[0, 0] == 90
  cut = of(3, max_response_length=170)  # the last turn has ten places
  assert cut.turns[0, 0].tolist() == [30, 50, 30, 50, 10]
  # A reply needs its places and another one.
  assert of(3, max_response_length=160).turns[0, 0].tolist() == [30, 50, 30, 0, 0]
  assert of(3, max_response_length=161).turns[0, 0].tolist() == [30, 50, 30, 50, 1]


def test_lognormal_turns_have_their_means():
  long = SHAPE._replace(max_response_length=10**6)
  batch = make("dialogue(turns=4, policy=100, reply=400, sigma=0.5)").draw(long, 0)
  assert (batch.turns > 0).all()
  assert batch.turns[..., ::2].mean() == pytest.approx(100.5, rel=0.03)
  assert batch.turns[..., 1::2].mean() == pytest.approx(400.5, rel=0.03)
  assert (batch.responses == batch.turns.sum(-1)).all() and batch.responses.max() > 2000


def test_rows_of_dialogues_have_places_for_all_tokens_and_predict_the_policys():
  shape = BatchShape(2, 3, 100, 200)
  batch = make("dialogue(turns=3, policy=30, reply=50, sigma=0, prompt=7)").draw(shape, 0)
  layout = row_layout(
    **shape._asdict(), length=400, alignment=1, devices=1, tokens_per_micro_batch=400
  )
  packed = workload.pack_workload(batch, shape, layout)
  assert np.sum(packed.places >= 0) == 2 * 3 * 90
  first = packed.places[0, 0]
  assert (first[:30] >= 0).all() and (first[30:80] == -1).all() and first[80] == first[0] + 80
  assert (first[190:] == -1).all()
  # Two rollouts of 190 tokens fill a row, behind the six of one prompt or of two.
  assert int(packed.num_micro_batches) == 3
  assert np.sum(packed.rows.prompts >= 0) == 4 * 6 + 6 * 190
