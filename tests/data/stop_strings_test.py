"""The first stop string in a turn's tokens, whatever the bursts in which they come."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlvr_jax.data import ByteTokenizer, HuggingFaceTokenizer, find_stop
from rlvr_jax.data.byte_pairs import save, train_byte_pairs

TEXTS = ["so <b>7</b> and </answer> é 漢 stop\n"] * 30
STOPS = ("</answer>", "</b>", "\n\n", "é", "漢字", "👋", " stop", "a")


def pieces_of_text():
  """A tokenizer as Llama 2's: "▁" for spaces, rare characters as runs of bytes."""
  words = [
    "▁",
    "▁stop",
    "</",
    "answer",
    ">",
    "<b",
    "b",
    "a",
    "/",
    "<",
    "s",
    "t",
    "o",
    "p",
    "ab",
    "é",
  ]
  names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
  vocabulary = {name: i for i, name in enumerate(names)}
  backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
  backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
  backend.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(content=" ", left=1, right=0),
    ]
  )
  backend.add_special_tokens(["</s>"])
  return backend


@pytest.fixture(name="tokenizers", scope="module")
def _tokenizers(tmp_path_factory):
  pairs, runs = (tmp_path_factory.mktemp(name) for name in ("pairs", "runs"))
  save(train_byte_pairs(TEXTS, 272), pairs)
  pieces_of_text().save(str(runs / "tokenizer.json"))
  (runs / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
  return {
    "bytes": ByteTokenizer(),
    "byte pairs": HuggingFaceTokenizer(pairs),
    "runs of bytes": HuggingFaceTokenizer(runs),
  }


def first_stop(tokenizer, ids, stops):
  """By the definition: each prefix is decoded."""
  for n in range(1, len(ids) + 1):
    if any(stop in tokenizer.decode(ids[:n]) for stop in stops):
      return n
  return None


def in_bursts(tokenizer, ids, stops, bursts):
  searched = 0
  for end in sorted({min(b, len(ids)) for b in bursts} | {len(ids)}):
    found = find_stop(tokenizer, ids[:end], stops, searched=searched)
    if found is not None:
      return found
    searched = end
  return None


PARTS = st.sampled_from([*STOPS, "</ans", "wer>", "x", " ", "ab", "👋🏽", "<b>", "zz", "12"])
# Ids that no text has: bytes of broken characters, special ids, ids beyond the vocabulary.
STRANGE = st.lists(st.integers(0, 330), max_size=4)


@pytest.mark.parametrize("name", ["bytes", "byte pairs", "runs of bytes"])
@settings(max_examples=60, deadline=None)
@given(
  parts=st.lists(st.tuples(PARTS, STRANGE, st.booleans()), max_size=12),
  stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True),
  bursts=st.lists(st.integers(1, 80), max_size=8),
)
@example(parts=[("👋", [], False), ("zz", [], False)], stops=["👋"], bursts=[1, 2, 3])
def test_any_bursts(tokenizers, name, parts, stops, bursts):
  tokenizer = tokenizers[name]
  ids = []
  for text, strange, is_strange in parts:
    ids += strange if is_strange else tokenizer.encode(text)
  expected = first_stop(tokenizer, ids, stops)
  assert in_bursts(tokenizer, ids, stops, bursts) == expected
  assert find_stop(tokenizer, ids, stops) == expected
  assert find_stop(tokenizer, np.array(ids, np.int32), stops) == expected


def test_the_token_that_completes_it_is_kept(tokenizers):
  tokenizer = tokenizers["runs of bytes"]
  backend = tokenizer._tokenizer
  id_of = backend.convert_tokens_to_ids
  ids = [id_of(token) for token in ("s", "</s>", "</", "answer", "</s>", ">", "ab", "s")]
  assert find_stop(tokenizer, ids, ["</answer>"]) == 6
  assert find_stop(tokenizer, ids, ["</answer>a"]) == 7  # "ab" is kept complete
  assert find_stop(tokenizer, ids, ["</answer>", "swer>", "s"]) == 1
  assert find_stop(tokenizer, ids[:5], ["</answer>"]) is None
  assert find_stop(tokenizer, [], ["a"]) is find_stop(tokenizer, ids, []) is None


@pytest.mark.parametrize("broken", [False, True])
def test_runs_of_bytes_that_decode_as_a_whole(tokenizers, broken):
  """One byte that is no character breaks all characters of its run, also those after it."""
  tokenizer = tokenizers["runs of bytes"]
  run = tokenizer.encode("漢" * 40 + "字" + "漢" * 3)[1:]  # without the space of a beginning
  assert len(run) == 3 * 44
  ids = [tokenizer._tokenizer.convert_tokens_to_ids("<0xFF>")] * broken + run
  expected = None if broken else 3 * 41
  assert first_stop(tokenizer, ids, ["字"]) == expected
  for searched in range(60, 120, 5):  # wherever in a character's bytes
    assert find_stop(tokenizer, ids, ["字"], searched=searched) == expected


class Counting(ByteTokenizer):
  """Counts what is decoded."""

  def __init__(self):
    self.decoded = 0

  def decode(self, ids):
    ids = list(ids)
    self.decoded += len(ids)
    return super().decode(ids)


def test_only_the_end_is_decoded():
  tokenizer = Counting()
  ids = tokenizer.encode("x" * 10_000)
  for searched in range(0, len(ids), 50):
    assert find_stop(tokenizer, ids[: searched + 50], ["</answer>"], searched=searched) is None
  assert tokenizer.decoded < 3 * len(ids)
