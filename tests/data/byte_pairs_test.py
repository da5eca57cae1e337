"""Byte-pair encodings of the project's own training."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rlvr_jax.data import HuggingFaceTokenizer
from rlvr_jax.data.byte_pairs import main, read_texts, save, train_byte_pairs

TEXTS = [f"She has {i} eggs, sells {i + 1}, and counts: {i}*2={2 * i}.\n\n" for i in range(40)]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("byte_pairs")
  save(train_byte_pairs(TEXTS, 280), folder)
  return folder


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(folder):
  return HuggingFaceTokenizer(folder)


@settings(max_examples=25, deadline=None)
@given(text=st.text())
@example(text="<|im_end|> and <|endoftext|>")
@example(text="  two  spaces, \r\n\t\n\n lines ,  .\u00a0")
@example(text="e\u0301 = é? ﬁ ½ \U0001f469\u200d\U0001f680 \x00")
def test_round_trip_of_any_text(tokenizer, text):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert all(2 < i < tokenizer.vocab_size for i in ids)


def test_sizes_and_special_tokens(folder, tokenizer):
  assert tokenizer.vocab_size == 280
  assert (tokenizer.stop_ids, tokenizer.pad_id) == ((2, 0), 0)
  generation = json.loads((folder / "generation_config.json").read_text())
  assert generation == {"eos_token_id": [2, 0], "pad_token_id": 0}
  bytes_alone = sum(len(text.encode()) for text in TEXTS)
  assert sum(len(tokenizer.encode(text)) for text in TEXTS) < 0.65 * bytes_alone


def test_any_version_of_transformers_loads_it(folder, tokenizer):
  """By a class that versions 4 and 5 both have."""
  from transformers import AutoTokenizer  # a second, which few tests need

  config = json.loads((folder / "tokenizer_config.json").read_text())
  assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
  theirs = AutoTokenizer.from_pretrained(folder)
  text = "She sells 12 eggs.\n"
  assert theirs.encode(text) == tokenizer.encode(text)
  assert theirs.eos_token_id == 2 and theirs.pad_token_id == 0
  turn = [{"role": "user", "content": "1+1?"}]
  assert theirs.apply_chat_template(turn, tokenize=False) == "<|im_start|>user\n1+1?<|im_end|>\n"


def test_pieces(folder):
  """Words take the space before them, digits stay alone, white space is kept together."""
  backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
  text = "ab  cd 1234=x²\n\n  y"
  pieces = [text[slice(*span)] for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
  assert pieces == ["ab", " ", " cd", " ", "1", "2", "3", "4", "=", "x", "²", "\n\n ", " y"]
  digits = {backend.token_to_id(digit) for digit in "0123456789"}
  assert {backend.decode([i]) for i in backend.encode("20 987").ids if i in digits} == set("20987")
  assert not any(len(t) > 1 and any(c.isdigit() for c in t) for t in backend.get_vocab())


def test_the_same_texts_give_the_same_bytes(folder, tmp_path):
  """In another process too, with other hashes and another number of threads."""
  (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
  command = [sys.executable, "-m", "rlvr_jax.data.byte_pairs", "--input", tmp_path / "texts.jsonl"]
  command += ["--field", "text", "--vocab_size", "280", "--output", tmp_path / "again"]
  other = {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
  subprocess.run(command, check=True, env=os.environ | other)
  names = sorted(path.name for path in folder.iterdir())
  assert names == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
  for name in names:
    assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_read_texts(tmp_path):
  (tmp_path / "b.txt").write_bytes("é\r\n".encode())
  (tmp_path / "c").mkdir()
  with gzip.open(tmp_path / "c" / "text.gz", "wt") as file:
    file.write("c")
  (tmp_path / "a.txt").write_text("x" * (2**20 + 1))
  texts = list(read_texts([tmp_path, str(tmp_path / "b.txt")], []))
  assert texts == ["x" * 2**20, "x", "é\r\n", "c", "é\r\n"]
  with gzip.open(tmp_path / "c" / "rows.jsonl.gz", "wt") as file:
    file.write('{"q": "Q1", "a": ""}\n{"q": "Q2", "a": "A2", "id": 3}')
  assert list(read_texts([tmp_path / "c"], ["q", "a"])) == ["Q1", "", "Q2", "A2"]


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.jsonl", b'{"q": "Q"}\n{"q": [1]}', r"line 2 does not fit: q is \[1\]"),
    ("a.jsonl", b'{"q": "Q"}\n{"r": 1}', "line 2 has no field 'q'"),
    ("a.jsonl", b'{"q": "Q"', "line 1 is not JSON"),
    ("a.jsonl", b'["q"]', "line 1 is not a JSON object"),
    ("a.txt", b"\xff", "is not UTF-8 text"),
    ("a.txt", b"abab", "the texts give only 261 tokens, but vocab_size is 320; give more"),
    ("a.txt", b"", "the texts give only 259 tokens"),
  ],
)
def test_bad_texts(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    train_byte_pairs(read_texts([tmp_path], ["q"] if name == "a.jsonl" else []), 320)


def test_bad_arguments(folder, tmp_path):
  refused = r"vocab_size = 321 is not a multiple of 8, or is below 264 .* set it to 328"
  with pytest.raises(ValueError, match=refused):
    train_byte_pairs(TEXTS, 321)
  with pytest.raises(ValueError, match=r"vocab_size = 256 .*256 bytes and 3 special.* to 264"):
    train_byte_pairs(TEXTS, 256)
  (tmp_path / "a.jsonl").touch()
  with pytest.raises(ValueError, match=r"a file of problems, not of plain text: name the fields"):
    list(read_texts([tmp_path], []))
  with pytest.raises(FileNotFoundError):
    list(read_texts([tmp_path / "none"], []))
  before = (folder / "tokenizer.json").read_bytes()
  with pytest.raises(SystemExit, match="already contains a tokenizer; choose another folder"):
    main(["--input", str(tmp_path / "none"), "--output", str(folder)])
  assert (folder / "tokenizer.json").read_bytes() == before
