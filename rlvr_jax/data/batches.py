"""Iterates over batches of problems from a restorable position, and encodes problems as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np

from rlvr_jax.data.problems import Problem, ProblemSource
from rlvr_jax.data.tokenizer import Tokenizer, encode_first_turn
from rlvr_jax.types import Prompts


def problem_batches(
  source: ProblemSource, *, batch_size: int, seed: int
) -> grain.DatasetIterator[list[Problem]]:
  """An endless iterator of batches; each epoch is a new permutation. A batch may span two epochs.

  The iterator works in this process, without threads. Its state is a counter: `get_state()` returns
  a small JSON-serializable dict, and `set_state()` on a new iterator continues from that state
  without replaying.

  Args:
    source: problems; must not be empty.
    batch_size: problems per batch.
    seed: seed of the order.
  """
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}, must be at least 1")
  if not len(source):
    raise ValueError("the source of problems is empty: give it at least one problem")
  dataset = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
  # An endless stream has no remainder. `drop_remainder` only keeps grain's count of batches below
  # its largest allowed length if batch_size is 1.
  batches = dataset.batch(batch_size, drop_remainder=True, batch_fn=list)
  in_process = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  return iter(batches.to_iter_dataset(in_process))


def encode_prompts(
  problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt_length: int
) -> Prompts:
  """Encodes the questions as left-padded prompts.

  Args:
    problems: P problems.
    tokenizer: `encode_prompt`, `encode_messages` and `pad_id` are used.
    max_prompt_length: S, in tokens.
  Returns:
    Prompts of NumPy arrays: tokens i32[P, S], lengths i32[P].
  Raises:
    PromptError: see `encode_first_turn`.
  """
  rows = [encode_first_turn(problem, tokenizer, max_prompt_length) for problem in problems]
  return pad_prompts(rows, max_prompt_length, tokenizer.pad_id)


def pad_prompts(rows: Sequence[Sequence[int]], max_prompt_length: int, pad_id: int) -> Prompts:
  """Pads the tokens of prompts on the left.

  Args:
    rows: P prompts, of at most S tokens each.
    max_prompt_length: S.
    pad_id: the padding token.
  Returns:
    Prompts of NumPy arrays: tokens i32[P, S], lengths i32[P].
  """
  tokens = np.full((len(rows), max_prompt_length), pad_id, np.int32)
  for target, row in zip(tokens, rows, strict=True):
    target[max_prompt_length - len(row) :] = row
  lengths = np.array([len(row) for row in rows], np.int32)
  # NumPy arrays stand for jax arrays until they are placed on devices.
  return Prompts(tokens=tokens, lengths=lengths)  # type: ignore[call-arg,arg-type,unused-ignore]


def encode_demonstrations(
  problems: Sequence[Problem], tokenizer: Tokenizer, max_response_length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Encodes the demonstrations, right-padded; each turn of the policy ends with the stop token.

  Args:
    problems: P problems.
    tokenizer: `encode`, `encode_reply`, `pad_id` and `stop_ids` are used; the first stop token ends
      a turn.
    max_response_length: T, in tokens of all turns, stop tokens included.
  Returns:
    Token ids i32[P, T], and a mask bool[P, T] that is True at the policy's tokens.
  Raises:
    ValueError: a problem has no demonstration, or its demonstration has more than T tokens.
  """
  for problem in problems:
    if not problem.solution:
      raise ValueError(f"the problem {problem.question[:80]!r} has no demonstration to train on")
  tokens = np.full((len(problems), max_response_length), tokenizer.pad_id, np.int32)
  mask = np.zeros(tokens.shape, bool)
  for i, problem in enumerate(problems):
    row, by_policy = _encode_dialogue(problem, tokenizer)
    if len(row) > max_response_length:
      raise ValueError(
        f"a demonstration has {len(row)} tokens, stop token included, but max_response_length is "
        f"{max_response_length}: raise max_response_length in the config, or make demonstrations "
        "shorter through config.task.kwargs, such as `solution` or `settings`. The demonstration "
        f"begins {problem.solution[:80]!r}"
      )
    tokens[i, : len(row)] = row
    mask[i, : len(row)] = by_policy
  return tokens, mask


def _encode_dialogue(problem: Problem, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
  """The tokens of a demonstration's turns, and for each token whether it is the policy's."""
  end = tokenizer.stop_ids[0]
  tokens: list[int] = []
  by_policy: list[bool] = []
  for number, text in enumerate((*problem.history, problem.solution)):
    is_reply = number % 2 == 1
    ids = tokenizer.encode_reply(text, "user", end) if is_reply else [*tokenizer.encode(text), end]
    tokens += ids
    by_policy += [not is_reply] * len(ids)
  return tokens, by_policy
