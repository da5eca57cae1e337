"""From rollouts and grades to groups and their statistics: masks, shaping, solve rates, samples."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax import advantages
from rlvr_jax.data import ByteTokenizer, Problem
from rlvr_jax.rewards import Grade, Outcome, outcome_policy, rewards_from_grades
from rlvr_jax.rollouts.batch import train_batch
from rlvr_jax.rollouts.batches import is_mixed
from rlvr_jax.rollouts.engine import Rollout
from rlvr_jax.rollouts.grading import (
  FOREIGN,
  Grading,
  draw_statistics,
  mean_solve_rate,
  solve_rates,
)
from rlvr_jax.rollouts.group import Group, decode, encode, join

G, S, T = 2, 6, 5
TOKENIZER = ByteTokenizer()
PROBLEMS = [Problem(q, a, "", {"answer": a}) for q, a in (("5+7=", "12"), ("3+4=", "7"))]
GRADES = [
  Grade(Outcome.CORRECT, 1.0),
  Grade(Outcome.WRONG, 0.2),
  Grade(Outcome.CRASHED, 0.0, "boom"),
  Grade(Outcome.UNPARSEABLE),
]


def rollout(prompt, text, length, stopped, limit=T):
  """A rollout of one turn; the stop token counts."""
  tokens = np.full(limit, TOKENIZER.pad_id, np.int32)
  tokens[: len(text)] = [*text.encode()]
  arrays = {
    "tokens": tokens,
    "behavior_logprobs": np.where(np.arange(limit) < length, -1.0, 0.0).astype(np.float32),
    "versions": np.where(np.arange(limit) < length, 3, -1).astype(np.int32),
  }
  prompt = np.asarray(TOKENIZER.encode(prompt), np.int32)
  return Rollout(None, prompt, np.zeros(2, np.uint32), arrays, length=length, stopped=stopped)


def group_of(index, rollouts, grades, **settings):
  grading = Grading(TOKENIZER, S, outcome_policy(), **settings)
  arrays = grading.arrays(rollouts, grades)
  samples = grading.samples(PROBLEMS[index], 3, arrays, grades)
  return Group(0, index, 0, {3: "ab"}, arrays, samples, {})


def graded(grades=GRADES, **settings):
  """Two groups of two rollouts."""
  first = [rollout("5+7=", "12", 3, True), rollout("5+7=", "abcde", 5, False)]
  second = [rollout("3+4=", "7", 2, True), rollout("3+4=", "", 1, True)]
  pairs = (first, grades[:G]), (second, grades[G:])
  return [group_of(index, *pair, **settings) for index, pair in enumerate(pairs)]


def test_rewards_by_name_are_the_scores_of_each_grader():
  """0 where not valid, or where a grader gave none; beside groups that have none recorded."""
  grades = [
    Grade(Outcome.CORRECT, 1.25, parts=(1.0, 0.5)),
    Grade(Outcome.WRONG, 0.5, parts=(0.0, 1.0)),
    Grade(Outcome.CRASHED, parts=(1.0, 1.0)),
    Grade(Outcome.TIMEOUT),
  ]
  groups = graded(grades, num_rewards=2)
  expected = np.array([[[1, 0.5], [0, 1]], [[0, 0], [0, 0]]], np.float32)
  batch = train_batch(decode(encode(groups, {}))[0])
  np.testing.assert_array_equal(batch.rewards_by_name, expected)
  np.testing.assert_array_equal(batch.rewards, [[1.25, 0], [0, 0]])
  mixed = train_batch([graded()[0], groups[0]])
  np.testing.assert_array_equal(mixed.rewards_by_name, [np.zeros((2, 2)), expected[0]])
  assert train_batch(graded(grades)).rewards_by_name is None


def test_groups_hold_what_was_generated_and_graded():
  groups = graded()
  batch = train_batch(groups)
  np.testing.assert_array_equal(batch.rewards, [[1, 0], [0, 0]])
  np.testing.assert_array_equal(batch.correct, [[1, 0], [0, 0]])
  # The crashed grader's rollout is left out of the loss; the others count to their stop token.
  np.testing.assert_array_equal(batch.mask.sum(-1), [[3, 5], [0, 1]])
  np.testing.assert_array_equal(batch.prompts.tokens[0], [256, 256, *b"5+7="])
  np.testing.assert_array_equal(batch.prompts.lengths, [4, 4])
  samples = [sample for group in groups for sample in group.samples]
  statistics = draw_statistics(join(groups), samples)
  assert statistics["outcome/crashed"] == statistics["response/truncated"] == 0.25
  assert statistics["response/length_max"] == 5
  assert samples[1] == {
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
  # Texts end where the lengths say; a sample has the exception of its grader.
  assert [sample["completion"] for sample in samples] == ["12", "abcde", "7", ""]
  assert [sample.get("detail") for sample in samples] == [None, None, "boom", None]


def test_a_rollout_without_a_grade_is_not_valid_and_has_no_reward():
  grades = [Grade(Outcome.CORRECT, 1.0), Grade(Outcome.CRASHED), *GRADES[1:2], GRADES[2]]
  groups = graded(grades, overlong_buffer=4)
  batch = train_batch(groups)
  np.testing.assert_array_equal(batch.valid, [[True, False], [True, False]])
  np.testing.assert_array_equal(batch.rewards, [[0.5, 0], [-0.25, 0]])
  np.testing.assert_array_equal(batch.correct, [[1, 0], [0, 0]])
  np.testing.assert_array_equal(batch.mask.sum(-1), [[3, 0], [2, 0]])
  assert mean_solve_rate(join(groups), np.array([3, 3])) == 0.5
  samples = [sample for group in groups for sample in group.samples]
  named = [(s["reward"], s["shaped_reward"]) for s in samples]
  assert named == [(1.0, 0.5), (None, None), (0.0, -0.25), (None, None)]
  json.dumps(samples)  # plain values


def test_the_length_of_a_crashed_rollout_does_not_move_the_baseline():
  """Seven wrong answers, none overlong, and one at the limit whose grader crashed: A = 0."""
  limit, size = 40, 8
  rollouts = [rollout("5+7=", "", 2, True, limit)] * (size - 1)
  rollouts.append(rollout("5+7=", "", limit, True, limit))
  grades = [Grade(Outcome.WRONG)] * (size - 1) + [Grade(Outcome.CRASHED)]
  group = group_of(0, rollouts, grades, overlong_buffer=20)
  group.arrays["solve_rate"] = np.array(0, np.float32)
  batch = jax.tree.map(jnp.asarray, train_batch([group]))
  for estimator in (advantages.grpo(), advantages.rloo(), advantages.log_mean_exp()):
    assert not np.any(estimator.apply((), batch))


def test_overlong_responses_are_shaped_in_tokens_and_filtered():
  batch = train_batch(graded(overlong_buffer=4, overlong_filter=True))
  # T = 5: the penalty is (length − 1)/4.
  np.testing.assert_allclose(batch.rewards, [[1 - 0.5, -1.0], [0.0, 0.0]])
  np.testing.assert_array_equal(batch.valid, [[True, True], [False, True]])
  np.testing.assert_array_equal(batch.correct, [[1, 0], [0, 0]])
  np.testing.assert_array_equal(batch.mask.sum(-1), [[3, 0], [0, 1]])


def mixed(correct, valid=None, rewards=None):
  correct = np.array(correct, np.float32)
  valid = np.ones(len(correct), bool) if valid is None else np.array(valid)
  arrays = {"correct": correct, "valid": valid, "rewards": np.array(rewards or correct)}
  return is_mixed(Group(0, 0, 0, {}, arrays, [], {}))


def test_mixed_groups_are_neither_all_right_nor_all_wrong():
  assert [mixed(x) for x in ([1, 1], [1, 0], [0, 0])] == [False, True, False]
  # By correctness, not by the shaped reward.
  assert not mixed([1, 1], rewards=[0.9, 0.3]) and not mixed([0, 0], rewards=[0.0, -0.5])
  # By valid rollouts alone: the only right, or only wrong, answer may have no grade.
  assert not mixed([1, 0], valid=[True, False]) and not mixed([1, 0], valid=[False, True])
  assert mixed([1, 0, 1], valid=[True, True, False]) and not mixed([1, 0], valid=[False, False])


def test_the_solve_rate_is_a_mean_of_groups_that_this_run_sampled():
  correct = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], np.float32)
  valid = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
  arrays = {"correct": correct, "valid": valid}
  np.testing.assert_array_equal(solve_rates(arrays), [0.5, 0.5, np.nan, 1.0])
  rate = lambda *versions: mean_solve_rate(arrays, np.array(versions))
  assert rate(3, 3, 3, FOREIGN) == 0.5
  assert rate(3, 3, 3, 3) == pytest.approx(2 / 3)
  assert rate(*[FOREIGN] * 4) == pytest.approx(2 / 3)  # no other is known
  assert np.isnan(rate(FOREIGN, FOREIGN, 3, FOREIGN))  # none of this run's has a grade


def test_a_stop_policy_ends_the_run():
  with pytest.raises(RuntimeError, match="stop"):
    rewards_from_grades(GRADES, outcome_policy({"crashed": "stop"}))
  grading = Grading(TOKENIZER, S, outcome_policy({"crashed": "stop"}))
  with pytest.raises(RuntimeError, match="stop"):
    grading.arrays([rollout("3+4=", "7", 2, True)], [Grade(Outcome.CRASHED)])


def test_groups_of_one_turn_go_with_dialogues():
  dialogue, one_turn = graded()
  turns = np.full((G, T), 2, np.int32)
  scores = np.full((G, T), 0.5, np.float32)
  dialogue.arrays.update(turns=turns, turn_scores=scores)
  joined = train_batch([dialogue, one_turn])
  np.testing.assert_array_equal(joined.turns, [turns, np.zeros((G, T))])
  np.testing.assert_array_equal(joined.turn_scores, [scores, np.full((G, T), np.nan)])
  assert "turns" not in one_turn.arrays and train_batch([one_turn]).turns is None


def test_a_dialogue_s_sample_has_its_turns():
  said = rollout("5+7=", "ab?cd", 5, True)
  said.arrays["turns"] = np.array([0, 0, 1, 2, 2], np.int32)
  said.arrays["turn_scores"] = np.array([np.nan, 0.5, np.nan, np.nan, np.nan], np.float32)
  group = group_of(0, [said], [Grade(Outcome.ENVIRONMENT_REFUSED, detail="no")])
  (sample,) = group.samples
  assert sample["turns"] == ["ab", "?", "cd"] and sample["turn_scores"] == [0.5, None, None]
  assert sample["detail"] == "no"
  np.testing.assert_array_equal(group.arrays["mask"], [[1, 1, 0, 1, 1]])  # the policy's alone
  statistics = draw_statistics(join([group]), group.samples)
  assert statistics["dialogue/turns"] == 2 and statistics["dialogue/environment_tokens"] == 1
  assert statistics["dialogue/policy_tokens"] == 4 and statistics["dialogue/turn_score"] == 0.5
  assert statistics["outcome/environment_refused"] == 1
