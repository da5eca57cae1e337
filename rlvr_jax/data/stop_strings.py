"""Stop strings end a policy's turn; the sampler searches for them between bursts.

A burst decodes at most 16 tokens of each response.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlvr_jax.data.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # decoded from bytes that are no character
_SLACK = 8  # characters that may be broken or trimmed at both ends of decoded ids


def find_stop(
  tokenizer: Tokenizer, ids: Sequence[int], stop_strings: Sequence[str], searched: int = 0
) -> int | None:
  """Finds the smallest n for which the text of the first n ids contains a stop string.

  The string may begin within one token and end within another token; this last token is kept whole.
  As long as no stop string is found, the function decodes only the new ids, and the earlier ids in
  which a stop string can begin.

  Args:
    tokenizer: `decode` is used.
    ids: token ids of a policy's turn so far.
    stop_strings: strings that `check_stop_strings` accepts; any of them ends the turn.
    searched: length of the prefix of `ids` in which earlier calls found no stop string.
  Returns:
    n > searched, the number of ids to keep; None if the text contains no stop string.
  """
  if not stop_strings or len(ids) <= searched:
    return None
  start = _window(tokenizer, ids, max(map(len, stop_strings)) + _SLACK, searched)
  stop = _scan(tokenizer, ids, stop_strings, start, searched)
  # Some decoders decode a run of bytes as a whole, so the end alone may give another text.
  if start and stop is not None and not _contains(tokenizer.decode(ids[:stop]), stop_strings):
    return _scan(tokenizer, ids, stop_strings, 0, searched)
  return stop


def _window(tokenizer: Tokenizer, ids: Sequence[int], characters: int, searched: int) -> int:
  """An index i such that ids[i:searched] decode to at least `characters` characters, or 0."""
  size = characters
  more = 1  # the step doubles: even ids without characters are decoded about twice at most
  while size < searched:
    text = tokenizer.decode(ids[searched - size : searched])
    # The text must start neither within a character nor within bytes that decode as a whole.
    if len(text) >= characters and text[0] != _BROKEN:
      return searched - size
    size += more if len(text) >= characters else size
    more *= 2
  return 0


def _scan(
  tokenizer: Tokenizer, ids: Sequence[int], stop_strings: Sequence[str], start: int, searched: int
) -> int | None:
  text = tokenizer.decode(ids[start:])
  # Without broken characters, more ids only add text, so the longest text contains all the others.
  if not _contains(text, stop_strings) and _BROKEN not in text:
    return None
  ends = range(searched + 1, len(ids) + 1)
  return next((n for n in ends if _contains(tokenizer.decode(ids[start:n]), stop_strings)), None)


def _contains(text: str, stop_strings: Sequence[str]) -> bool:
  return any(stop in text for stop in stop_strings)
