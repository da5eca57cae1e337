"""The byte tokenizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.data import ByteTokenizer, HuggingFaceTokenizer

TOKENIZER = ByteTokenizer()


@settings(max_examples=40, deadline=None)
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


@pytest.fixture(name="exported", scope="module")
def _exported(tmp_path_factory):
  """The folder that an export writes, without the policy."""
  folder = tmp_path_factory.mktemp("tokenizer")
  for name, content in TOKENIZER.huggingface_files().items():
    (folder / name).write_bytes(content)
  return folder


def test_transformers_loads_its_files_with_the_same_ids_and_texts(exported):
  theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(exported)
  every_byte = bytes(range(256)).decode("latin-1")
  for text in ("", "2 + 2 =", " a\n\t b ", "é 漢字 👋🏽", every_byte, "a . , 's"):
    ids = TOKENIZER.encode(text)
    assert theirs.encode(text) == ids == theirs.encode(text, add_special_tokens=False)
    assert theirs.decode(ids) == text
  broken = [0xC3, 97, 0xE6, 0xBC, 32, 0xFF, 0x80]
  assert theirs.decode(broken) == TOKENIZER.decode(broken)
  for ids in ([97, 257, 256, 256], [97, 257], [97]):
    assert theirs.decode(ids, skip_special_tokens=True) == TOKENIZER.decode(ids) == "a"
  assert (theirs.pad_token_id, theirs.eos_token_id) == (TOKENIZER.pad_id, TOKENIZER.stop_ids[0])
  assert len(theirs) == 258 and theirs.padding_side == "left"
  assert theirs(["a", "abc"], padding=True)["input_ids"] == [[256, 256, 97], [97, 98, 99]]


def test_a_run_from_an_exported_policy_has_the_same_tokenizer(exported):
  pytest.importorskip("transformers")
  again = HuggingFaceTokenizer(exported)
  assert (again.pad_id, again.stop_ids) == (TOKENIZER.pad_id, TOKENIZER.stop_ids)
  for text in ("1 + 1 = ", "<|end|> é"):  # also of a text that spells a special token
    assert again.encode(text) == again.encode_prompt(text) == TOKENIZER.encode(text)
    assert again.decode(TOKENIZER.encode(text)) == text
  assert again.decode([97, 256, 257]) == "a"
