"""Tokenizers: text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
  """Protocol of a tokenizer.

  A prompt is encoded once. The ids of a completion are decoded for graders and readers, and that
  text is never encoded again.
  """

  vocab_size: int  # ids are below it; the model's V is at least this
  pad_id: int
  stop_ids: tuple[int, ...]  # generation ends at any of them; the first ends a demonstration

  def encode(self, text: str) -> list[int]:
    """Encodes a text, such as a demonstration, without adding special tokens."""
    ...

  def encode_prompt(self, text: str) -> list[int]:
    """Encodes a text as a prompt, in the form that the policy expects."""
    ...

  def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
  """UTF-8 bytes as ids 0..255, then padding (256) and end of text (257).

  The vocabulary is rounded up to a multiple of 8, so that it can be sharded; the ids beyond end of
  text are never produced by `encode`.
  """

  vocab_size = 264
  pad_id = 256
  stop_ids: tuple[int, ...] = (257,)

  def encode(self, text: str) -> list[int]:
    """Returns the bytes of the text; no special token is added."""
    return list(text.encode("utf-8"))

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the bytes of the text, as `encode`."""
    return self.encode(text)

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of the byte ids; other ids are dropped, invalid UTF-8 becomes U+FFFD."""
    return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")
