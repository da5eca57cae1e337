"""Collection: masks, shaping, DAPO's filter, and the way into a checkpoint."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import make_host_batch

from rlvr_jax import advantages
from rlvr_jax.data import ByteTokenizer, Problem
from rlvr_jax.rewards import Grade, Outcome, outcome_policy, rewards_from_grades
from rlvr_jax.rollouts.batch import (
  FOREIGN,
  Graded,
  Position,
  RolloutBatch,
  append_recorded,
  from_groups,
  mean_solve_rate,
  solve_rates,
  split,
  to_groups,
  to_train_batch,
)
from rlvr_jax.rollouts.collect import Collector, keep_mixed_groups
from rlvr_jax.rollouts.serve import Group
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.types import Prompts, TrainBatch

P, G, T = 2, 2, 5


def _groups():
  text = lambda s: [*s.encode(), *[256] * (T - len(s))]
  tokens = np.array([[text("12"), text("abcde")], [text("7"), text("")]], np.int32)
  lengths = np.array([[3, 5], [2, 1]], np.int32)  # the stop token is counted
  stopped = np.array([[True, False], [True, True]])
  logprobs = np.full((P, G, T), -1.0, np.float32)
  return [Group(None, p, tokens[p], lengths[p], stopped[p], logprobs[p]) for p in range(P)]


def _collect(grades, **settings):
  tokenizer = ByteTokenizer()
  problems = [Problem(q, a, "", {"answer": a}) for q, a in (("5+7=", "12"), ("3+4=", "7"))]
  seen = {}

  def submit(completions, references):
    seen.setdefault("completions", []).extend(completions)
    seen.setdefault("references", []).extend(references)
    start = 0 if references[0]["answer"] == "12" else G
    return grades[start : start + len(completions)]

  collector = Collector(
    tokenizer=tokenizer,
    max_prompt_length=6,
    submit=submit,
    results=lambda parts: [grade for part in parts for grade in part],
    outcome_policy=outcome_policy(),
    **settings,
  )
  flight = collector.begin(problems)
  for group in reversed(_groups()):  # the second is finished first
    collector.add(group._replace(owner=flight))
  return collector.finish(flight, [3, 5]), seen


GRADES = [
  Grade(Outcome.CORRECT, 1.0),
  Grade(Outcome.WRONG, 0.2),
  Grade(Outcome.CRASHED, 0.0, "boom"),
  Grade(Outcome.UNPARSEABLE),
]


def test_a_sample_has_the_exception_of_its_grader():
  graded, _ = _collect(GRADES)
  assert [sample.get("detail") for sample in graded.samples] == [None, None, "boom", None]


def test_a_batch_holds_what_was_generated_and_graded():
  graded, seen = _collect(GRADES)
  assert seen["completions"] == ["7", "", "12", "abcde"]
  assert seen["references"] == [{"answer": "7"}] * 2 + [{"answer": "12"}] * 2
  batch = graded.train
  np.testing.assert_array_equal(batch.rewards, [[1, 0], [0, 0]])
  np.testing.assert_array_equal(batch.correct, [[1, 0], [0, 0]])
  # The crashed grader's rollout is left out of the loss; the others count to their stop token.
  np.testing.assert_array_equal(batch.mask.sum(-1), [[3, 5], [0, 1]])
  np.testing.assert_array_equal(batch.solve_rate, [0.25, 0.25])
  assert graded.tokens == 11 and graded.prompts == 2
  assert graded.statistics["outcome/crashed"] == 0.25
  assert graded.statistics["response/truncated"] == 0.25
  assert graded.samples[1] == {
    "version": 3,
    "prompt": "5+7=",
    "completion": "abcde",
    "answer": "12",
    "outcome": "wrong",
    "extracted": "",
    "reward": 0.0,
    "shaped_reward": 0.0,
    "tokens": 5,
    "stopped": False,
  }


def test_a_rollout_without_a_grade_is_not_valid_and_has_no_reward():
  grades = [Grade(Outcome.CORRECT, 1.0), Grade(Outcome.CRASHED), *GRADES[1:2], GRADES[2]]
  graded, _ = _collect(grades, overlong_buffer=4)
  np.testing.assert_array_equal(graded.train.valid, [[True, False], [True, False]])
  np.testing.assert_array_equal(graded.train.rewards, [[0.5, 0], [-0.25, 0]])
  np.testing.assert_array_equal(graded.train.correct, [[1, 0], [0, 0]])
  np.testing.assert_array_equal(graded.train.mask.sum(-1), [[3, 0], [2, 0]])
  np.testing.assert_array_equal(graded.train.solve_rate, [0.5, 0.5])
  named = [(s["reward"], s["shaped_reward"]) for s in graded.samples]
  assert named == [(1.0, 0.5), (None, None), (0.0, -0.25), (None, None)]
  json.dumps(graded.samples)  # plain values


def test_the_length_of_a_crashed_rollout_does_not_move_the_baseline():
  """Seven wrong answers, none overlong, and one at the limit whose grader crashed: A = 0."""
  limit, size = 40, 8
  lengths = np.array([[2] * (size - 1) + [limit]], np.int32)
  zeros = np.zeros((1, size, limit))
  group = Group(None, 0, zeros[0].astype(int), lengths[0], np.ones(size, bool), zeros[0])
  grades = [Grade(Outcome.WRONG)] * (size - 1) + [Grade(Outcome.CRASHED)]
  collector = Collector(
    tokenizer=ByteTokenizer(),
    max_prompt_length=6,
    submit=lambda completions, references: grades,
    results=lambda parts: [grade for part in parts for grade in part],
    outcome_policy=outcome_policy(),
    overlong_buffer=20,
  )
  flight = collector.begin([Problem("5+7=", "12", "", {})])
  collector.add(group._replace(owner=flight))
  batch = jax.tree.map(jnp.asarray, collector.finish(flight, [0]).train)
  for estimator in (advantages.grpo(), advantages.rloo(), advantages.log_mean_exp()):
    assert not np.any(estimator.apply((), batch))


def test_overlong_responses_are_shaped_in_tokens_and_filtered():
  graded, _ = _collect(GRADES, overlong_buffer=4, overlong_filter=True)
  # T = 5: the penalty is (length − 1)/4.
  np.testing.assert_allclose(graded.train.rewards, [[1 - 0.5, -1.0], [0.0, 0.0]])
  np.testing.assert_array_equal(graded.train.valid, [[True, True], [False, True]])
  np.testing.assert_array_equal(graded.train.correct, [[1, 0], [0, 0]])
  np.testing.assert_array_equal(graded.train.mask.sum(-1), [[3, 0], [0, 1]])


def _sampled(correct, first, sources=None):
  correct = np.array(correct, np.float32)
  groups, size = correct.shape
  ids = np.arange(first, first + groups)
  return Graded(
    make_host_batch(
      np.ones((groups, size, 1), np.float32),
      rewards=correct - 0.5,
      correct=correct,
      prompts=Prompts(tokens=ids[:, None], lengths=np.ones(groups, np.int32)),
      solve_rate=np.full(groups, correct.mean(), np.float32),
      sources=np.array(sources or [0] * groups, np.int32),
    ),
    tokens=groups * size,
    prompts=groups,
    statistics={"outcome/correct": float(correct.mean())},
    samples=[{"prompt": int(i), "rollout": g} for i in ids for g in range(size)],
  )


def test_dynamic_sampling_keeps_whole_mixed_groups_in_order():
  first = _sampled([[1, 1], [1, 0], [0, 0]], first=10)
  assert keep_mixed_groups([first], [2]) is None
  second = _sampled([[0, 1], [1, 1], [1, 0]], first=20)
  kept = keep_mixed_groups([first, second], [2])
  np.testing.assert_array_equal(kept.train.prompts.tokens[:, 0], [11, 20])
  np.testing.assert_array_equal(kept.train.correct, [[1, 0], [0, 1]])
  np.testing.assert_allclose(kept.train.solve_rate, 7 / 12)  # before the filter
  assert (kept.tokens, kept.prompts) == (12, 6)
  assert kept.statistics["dynamic_sampling/prompts_per_group"] == 3.0
  assert [s["prompt"] for s in kept.samples] == [11, 11, 20, 20]


def test_dynamic_sampling_looks_at_correctness_not_at_the_shaped_reward():
  shaped = _sampled([[1, 1], [0, 0]], first=0)
  shaped = shaped._replace(
    train=dataclasses.replace(shaped.train, rewards=np.array([[0.9, 0.3], [0.0, -0.5]]))
  )
  assert keep_mixed_groups([shaped], [1]) is None


def test_dynamic_sampling_looks_at_valid_rollouts_alone():
  """A group whose only right, or only wrong, answer has no grade is not mixed."""
  first = _sampled([[1, 0], [1, 0], [0, 1]], first=10)
  valid = np.array([[True, False], [False, True], [True, True]])
  train = dataclasses.replace(first.train, valid=valid)
  kept = keep_mixed_groups([first._replace(train=train)], [1])
  np.testing.assert_array_equal(kept.train.prompts.tokens[:, 0], [12])
  np.testing.assert_array_equal(kept.train.valid, [[True, True]])


def test_the_solve_rate_is_a_mean_of_groups_that_this_run_sampled():
  correct = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], np.float32)
  valid = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
  batch = make_host_batch(np.ones((4, 4, 1)), correct=correct, valid=valid)
  np.testing.assert_array_equal(solve_rates(batch), [0.5, 0.5, np.nan, 1.0])
  rate = lambda *versions: mean_solve_rate(batch, np.array(versions)).tolist()
  assert rate(3, 3, 3, FOREIGN) == [0.5] * 4
  assert rate(3, 3, 3, 3) == [np.float32(2 / 3)] * 4
  assert rate(*[FOREIGN] * 4) == [np.float32(2 / 3)] * 4  # no other is known
  assert np.isnan(rate(FOREIGN, FOREIGN, 3, FOREIGN)).all()  # none of this run's has a grade


def test_valid_rollouts_survive_a_store(tmp_path):
  graded, _ = _collect(GRADES)
  versions, position = np.zeros(P, np.int32), Position(8, 8, -1, {})
  batch = RolloutBatch(number=7, version=0, versions=versions, position=position, graded=graded)
  with contextlib.closing(RolloutStore(tmp_path / "rollouts", writable=True)) as store:
    store.write(7, *to_groups(batch))
    again = from_groups(7, *store.read(7)).graded.train
  assert not again.valid.all()
  np.testing.assert_array_equal(again.valid, graded.train.valid)


def test_dynamic_sampling_keeps_the_sources_shares():
  first = _sampled([[1, 0], [1, 0], [0, 0]], first=10, sources=[0, 0, 1])
  assert keep_mixed_groups([first], [1, 1]) is None
  second = _sampled([[0, 1], [1, 1], [1, 0]], first=20, sources=[0, 0, 1])
  kept = keep_mixed_groups([first, second], [1, 1])
  np.testing.assert_array_equal(kept.train.prompts.tokens[:, 0], [10, 22])
  np.testing.assert_array_equal(kept.train.sources, [0, 1])


def test_a_batch_survives_its_way_through_groups():
  graded, _ = _collect(GRADES)
  assert not graded.train.valid.all()
  again = to_train_batch(split(graded.train))
  assert again.reference_logprobs is None
  for field in ("tokens", "mask", "behavior_logprobs", "rewards", "correct", "valid", "solve_rate"):
    np.testing.assert_array_equal(getattr(again, field), getattr(graded.train, field))
  np.testing.assert_array_equal(again.prompts.tokens, graded.train.prompts.tokens)


def test_texts_end_where_the_lengths_say():
  graded, _ = _collect(GRADES)
  assert [sample["completion"] for sample in graded.samples] == ["12", "abcde", "7", ""]


def test_a_stop_policy_ends_the_run():
  with pytest.raises(RuntimeError, match="stop"):
    rewards_from_grades(GRADES, outcome_policy({"crashed": "stop"}))


def test_recorded_groups_of_one_turn_go_with_dialogues():
  prompts = Prompts(tokens=np.ones((2, 3), np.int32), lengths=np.full(2, 3, np.int32))
  places = np.ones((2, 2, 4), np.float32)
  one_turn = TrainBatch(
    prompts=prompts,
    tokens=np.ones((2, 2, 4), np.int32),
    mask=places,
    behavior_logprobs=-places,
    rewards=places[..., 0],
    correct=places[..., 0],
    valid=places[..., 0] > 0,
  )
  turns = np.full((2, 2, 4), 2, np.int32)
  graded = lambda train: Graded(train, 0, 0, {}, [])
  joined = append_recorded(
    graded(dataclasses.replace(one_turn, turns=turns)), graded(one_turn)
  ).train
  np.testing.assert_array_equal(joined.turns[:2], turns)
  np.testing.assert_array_equal(joined.turns[2:], 0)
  assert append_recorded(graded(one_turn), graded(one_turn)).train.turns is None
