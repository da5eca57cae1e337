"""Finds the strings that end a turn of the policy, in its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr_jax.data.tokenizer import Tokenizer


def find_stop(
  tokenizer: Tokenizer, ids: Sequence[int], stop_strings: Sequence[str], *, searched: int = 0
) -> int | None:
  """Finds the first token with which the text of a turn contains a stop string.

  The string may begin in one token and end within another. The token that completes it is kept.

  Args:
    tokenizer: of the run.
    ids: of the turn so far.
    stop_strings: not empty.
    searched: how many of the ids were searched before, without a result.
  Returns:
    The number of ids to keep; None if no stop string is complete.
  """
  contains = lambda count: any(text in tokenizer.decode(ids[:count]) for text in stop_strings)
  if len(ids) <= searched or not contains(len(ids)):
    return None
  return next(count for count in range(searched + 1, len(ids) + 1) if contains(count))
