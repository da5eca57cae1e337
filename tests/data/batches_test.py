"""Batches of problems: order, position, token arrays."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.data import (
  ByteTokenizer,
  Problem,
  encode_demonstrations,
  encode_prompts,
  problem_batches,
)

TOKENIZER = ByteTokenizer()


class CountedSource:
  """Problems named after their index; counts how often it is read."""

  def __init__(self, size):
    self.size = size
    self.reads = 0

  def __len__(self):
    return self.size

  def __getitem__(self, index):
    self.reads += 1
    return _problem(str(index))


def _problem(question, solution="s"):
  return Problem(question=question, answer="", solution=solution, reference={})


def _names(batch):
  return [problem.question for problem in batch]


def test_every_epoch_is_a_new_permutation():
  batches = problem_batches(CountedSource(30), batch_size=4, seed=1)
  drawn = [name for _ in range(15) for name in _names(next(batches))]
  epochs = [drawn[:30], drawn[30:]]
  everything = {str(index) for index in range(30)}
  assert set(epochs[0]) == set(epochs[1]) == everything
  assert epochs[0] != epochs[1]
  assert epochs[0] != sorted(epochs[0], key=int)


def test_the_seed_decides_the_order():
  first, same, other = (
    _names(next(problem_batches(CountedSource(100), batch_size=10, seed=seed)))
    for seed in (1, 1, 2)
  )
  assert first == same != other


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
  size=st.integers(1, 20),
  batch_size=st.integers(1, 12),
  before=st.integers(0, 12),
  seed=st.integers(0, 2**32 - 1),
)
def test_a_restored_position_continues_identically(size, batch_size, before, seed):
  batches = problem_batches(CountedSource(size), batch_size=batch_size, seed=seed)
  for _ in range(before):
    next(batches)
  state = json.dumps(batches.get_state())
  expected = [_names(next(batches)) for _ in range(5)]
  assert all(len(names) == batch_size for names in expected)

  source = CountedSource(size)
  restored = problem_batches(source, batch_size=batch_size, seed=seed)
  restored.set_state(json.loads(state))
  assert [_names(next(restored)) for _ in range(5)] == expected
  assert source.reads == 5 * batch_size  # nothing was replayed


def test_restoring_a_far_position_is_immediate():
  source = CountedSource(1_000_000)
  batches = problem_batches(source, batch_size=8, seed=0)
  next(batches)
  state = batches.get_state()
  batches.set_state({name: value + 10**9 for name, value in state.items()})
  assert len(next(batches)) == 8
  assert source.reads == 16


@pytest.mark.parametrize(("size", "batch_size"), [(0, 1), (1, 0)])
def test_bad_sizes(size, batch_size):
  with pytest.raises(ValueError, match="at least"):
    problem_batches(CountedSource(size), batch_size=batch_size, seed=0)


def test_encode_prompts():
  prompts = encode_prompts([_problem("ab"), _problem("cdef")], TOKENIZER, 4)
  np.testing.assert_array_equal(prompts.tokens, [[256, 256, 97, 98], [99, 100, 101, 102]])
  np.testing.assert_array_equal(prompts.lengths, [2, 4])
  assert prompts.tokens.dtype == prompts.lengths.dtype == np.int32


class AskingTokenizer(ByteTokenizer):
  """Asks in another form than it answers."""

  def encode_prompt(self, text):
    return self.encode(f"Q: {text}\nA:")


def test_prompts_and_solutions_have_their_own_form():
  problem = _problem("a", "b")
  prompts = encode_prompts([problem], AskingTokenizer(), 10)
  np.testing.assert_array_equal(prompts.tokens, [[256, 256, 256, *b"Q: a\nA:"]])
  np.testing.assert_array_equal(prompts.lengths, [7])
  tokens, _ = encode_demonstrations([problem], AskingTokenizer(), 2)
  np.testing.assert_array_equal(tokens, [[98, 257]])


def test_encode_demonstrations():
  problems = [_problem("q", "ab"), _problem("q", "abc")]
  tokens, is_policys = encode_demonstrations(problems, TOKENIZER, 4)
  np.testing.assert_array_equal(tokens, [[97, 98, 257, 256], [97, 98, 99, 257]])
  np.testing.assert_array_equal(is_policys, [[True, True, True, False], [True] * 4])
  assert tokens.dtype == np.int32


def test_demonstrations_of_dialogues_teach_every_turn_of_the_policy():
  problem = dataclasses.replace(_problem("q", "c"), history=("a", "<>", "b", ">"))
  tokens, is_policys = encode_demonstrations([problem], TOKENIZER, 10)
  end, pad = TOKENIZER.stop_ids[0], TOKENIZER.pad_id
  np.testing.assert_array_equal(tokens, [[*b"a", end, *b"<>", *b"b", end, *b">c", end, pad]])
  np.testing.assert_array_equal(is_policys[0], [c == "p" for c in "ppeeppepp."])
  prompts = encode_prompts([problem], TOKENIZER, 4)
  np.testing.assert_array_equal(prompts.tokens[0, -1:], [*b"q"])  # the turns are no prompt
  np.testing.assert_array_equal(prompts.lengths, [1])


def test_too_long_texts_name_lengths_and_remedy():
  with pytest.raises(ValueError, match=r"5 tokens but config\.max_prompt_length is 4: raise"):
    encode_prompts([_problem("a"), _problem("abcde")], TOKENIZER, 4)
  with pytest.raises(
    ValueError, match="5 tokens, stop token included, but max_response_length is 4"
  ):
    encode_demonstrations([_problem("q", "abcd")], TOKENIZER, 4)


def test_empty_texts():
  with pytest.raises(ValueError, match="a prompt is empty"):
    encode_prompts([_problem("")], TOKENIZER, 4)
  with pytest.raises(ValueError, match="a prompt is empty"):
    encode_prompts([_problem("")], AskingTokenizer(), 10)
  with pytest.raises(ValueError, match="no demonstration"):
    encode_demonstrations([_problem("q", "")], TOKENIZER, 4)
