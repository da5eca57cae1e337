"""The byte tokenizer."""

from hypothesis import given
from hypothesis import strategies as st

from rlvr_jax.data import ByteTokenizer

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_round_trip(text):
  ids = TOKENIZER.encode(text)
  assert TOKENIZER.decode(ids) == text
  assert all(0 <= i < 256 for i in ids)
  assert len(ids) == len(text.encode())


def test_values():
  assert TOKENIZER.encode("aé") == TOKENIZER.encode_prompt("aé") == [97, 0xC3, 0xA9]
  assert TOKENIZER.decode([256, 97, 257, 263, 98]) == "ab"
  assert TOKENIZER.decode([0xC3, 97]) == "\ufffda"


def test_special_ids_are_in_the_vocabulary_and_no_bytes():
  special = {TOKENIZER.pad_id, *TOKENIZER.stop_ids}
  assert len(special) == 2 and all(256 <= i < TOKENIZER.vocab_size for i in special)
  assert TOKENIZER.vocab_size % 8 == 0
