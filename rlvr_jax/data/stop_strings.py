"""Stop strings: where a policy's turn ends by its text, found between bursts of decoding."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr_jax.data.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # what bytes that are no character decode to
_SLACK = 8  # characters that may be broken or trimmed at both ends of decoded ids


def find_stop(
  tokenizer: Tokenizer, ids: Sequence[int], stop_strings: Sequence[str], searched: int = 0
) -> int | None:
  """Finds the smallest n for which the text of the first n ids contains a stop string.

  The string may begin in one token and end within another, which is kept complete. Only the end of
  `ids` is decoded: the new ids and those before them that a stop string can begin in.

  Args:
    tokenizer: `decode` is used.
    ids: token ids of a policy's turn so far.
    stop_strings: any of them ends the turn; `check_stop_strings` accepts them.
    searched: how many of the first ids contain no stop string, by earlier calls.
  Returns:
    n > searched, the number of ids to keep; None if the text contains no stop string.
  """
  if not stop_strings or len(ids) <= searched:
    return None
  start = _window(tokenizer, ids, max(map(len, stop_strings)) + _SLACK, searched)
  stop = _scan(tokenizer, ids, stop_strings, start, searched)
  # Some decoders treat a run of bytes as a whole, so that the end alone may read otherwise.
  if start and stop is not None and not _contains(tokenizer.decode(ids[:stop]), stop_strings):
    return _scan(tokenizer, ids, stop_strings, 0, searched)
  return stop


def _window(tokenizer: Tokenizer, ids: Sequence[int], characters: int, searched: int) -> int:
  """Largest of some starts from which ids up to `searched` decode to enough characters."""
  size = characters
  more = 1  # doubled, so that ids without any character cost no more than decoding them twice
  while size < searched:
    text = tokenizer.decode(ids[searched - size : searched])
    # Neither within a character, nor within a run of bytes that decodes as a whole.
    if len(text) >= characters and text[0] != _BROKEN:
      return searched - size
    size += more if len(text) >= characters else size
    more *= 2
  return 0


def _scan(
  tokenizer: Tokenizer, ids: Sequence[int], stop_strings: Sequence[str], start: int, searched: int
) -> int | None:
  text = tokenizer.decode(ids[start:])
  # Without broken characters, text only grows with the ids: the last one tells of all.
  if not _contains(text, stop_strings) and _BROKEN not in text:
    return None
  ends = range(searched + 1, len(ids) + 1)
  return next((n for n in ends if _contains(tokenizer.decode(ids[start:n]), stop_strings)), None)


def _contains(text: str, stop_strings: Sequence[str]) -> bool:
  return any(stop in text for stop in stop_strings)
