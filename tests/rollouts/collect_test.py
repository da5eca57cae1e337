"""Collection: masks, shaping, DAPO's filter, and the way into a checkpoint."""

import dataclasses

import numpy as np
import pytest
from oracles.batches import make_host_batch

from rlvr_jax.data import ByteTokenizer, Problem
from rlvr_jax.rewards import Grade, Outcome, outcome_policy, rewards_from_grades
from rlvr_jax.rollouts.batch import Graded, batch_from_arrays, batch_to_arrays
from rlvr_jax.rollouts.collect import Collector, fill_masked, keep_mixed_groups
from rlvr_jax.rollouts.engine import Group
from rlvr_jax.types import Prompts

P, G, T = 2, 2, 5


def _groups():
  text = lambda s: [*s.encode(), *[256] * (T - len(s))]
  tokens = np.array([[text("12"), text("abcde")], [text("7"), text("")]], np.int32)
  lengths = np.array([[3, 5], [2, 1]], np.int32)  # the stop token is counted
  stopped = np.array([[True, False], [True, True]])
  logprobs = np.full((P, G, T), -1.0, np.float32)
  return [Group(p, tokens[p], lengths[p], stopped[p], logprobs[p]) for p in range(P)]


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
  for index, group in reversed([*enumerate(_groups())]):  # the second is finished first
    collector.add(flight, index, group)
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
    "tokens": 5,
    "stopped": False,
  }


def test_a_rollout_left_out_does_not_move_its_groups_baseline():
  grades = [Grade(Outcome.CORRECT, 1.0), Grade(Outcome.CRASHED), *GRADES[1:2], GRADES[2]]
  graded, _ = _collect(grades)
  np.testing.assert_array_equal(graded.train.rewards, [[1, 1], [0, 0]])
  np.testing.assert_array_equal(graded.train.correct, [[1, 1], [0, 0]])
  np.testing.assert_array_equal(graded.train.mask.sum(-1), [[3, 0], [2, 0]])
  values = np.array([[0.1, 0.1, 0.1, 0.0], [1.0, 0.0, 0.5, 0.9]], np.float32)
  keep = np.array([[True, True, True, False], [True, True, False, False]])
  filled = fill_masked(values, keep)
  assert (filled[0] == np.float32(0.1)).all()  # exactly constant still
  np.testing.assert_array_equal(filled[1], [1.0, 0.0, 0.5, 0.5])


def test_overlong_responses_are_shaped_in_tokens_and_filtered():
  graded, _ = _collect(GRADES, overlong_buffer=4, overlong_filter=True)
  # T = 5: the penalty is (length − 1)/4.
  np.testing.assert_allclose(graded.train.rewards, [[1 - 0.5, -1.0], [-0.25, 0.0]])
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


def test_dynamic_sampling_keeps_the_sources_shares():
  first = _sampled([[1, 0], [1, 0], [0, 0]], first=10, sources=[0, 0, 1])
  assert keep_mixed_groups([first], [1, 1]) is None
  second = _sampled([[0, 1], [1, 1], [1, 0]], first=20, sources=[0, 0, 1])
  kept = keep_mixed_groups([first, second], [1, 1])
  np.testing.assert_array_equal(kept.train.prompts.tokens[:, 0], [10, 22])
  np.testing.assert_array_equal(kept.train.sources, [0, 1])


def test_a_batch_survives_the_way_through_nested_dicts():
  graded, _ = _collect(GRADES)
  again = batch_from_arrays(batch_to_arrays(graded.train))
  assert again.reference_logprobs is None
  for field in ("tokens", "mask", "behavior_logprobs", "rewards", "correct", "solve_rate"):
    np.testing.assert_array_equal(getattr(again, field), getattr(graded.train, field))
  np.testing.assert_array_equal(again.prompts.tokens, graded.train.prompts.tokens)


def test_texts_end_where_the_lengths_say():
  graded, _ = _collect(GRADES)
  assert [sample["completion"] for sample in graded.samples] == ["12", "abcde", "7", ""]


def test_a_stop_policy_ends_the_run():
  with pytest.raises(RuntimeError, match="stop"):
    rewards_from_grades(GRADES, outcome_policy({"crashed": "stop"}))
