"""Trains a byte-level byte-pair encoding on text files, for runs from scratch.

  python -m rlvr_jax.data.byte_pairs --input train.jsonl --field question --field answer \\
    --vocab_size 1024 --output tokenizers/gsm8k

The output folder has Hugging Face's layout, with a chat template: `HuggingFaceTokenizer` and
`transformers` load it. The same input gives byte-identical files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import fsspec

from rlvr_jax.data.published.files import PublishedFiles, file_format
from rlvr_jax.data.task_utils import as_text
from rlvr_jax.storage.folders import locate, write_bytes

if TYPE_CHECKING:
  import tokenizers

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN, END_OF_TURN)  # ids 0, 1, 2
SMALLEST = -(-(256 + len(SPECIAL)) // 8) * 8
# Pairs are merged only within one of these pieces: a word with its leading space, a single digit,
# punctuation with its leading space, or white space. Since every digit is a token, all numbers are
# split alike.
_PIECES = r" ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
# ChatML, the format of the Qwen models.
_TEMPLATE = (
  "{% for message in messages %}"
  f"{{{{ '{TURN}' + message.role + '\\n' + message.content + '{END_OF_TURN}\\n' }}}}"
  "{% endfor %}"
  f"{{% if add_generation_prompt %}}{{{{ '{TURN}assistant\\n' }}}}{{% endif %}}"
)
_BLOCK = 2**20  # characters per read


def train_byte_pairs(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
  """Trains an encoding with `vocab_size` tokens: special tokens, the 256 bytes, and frequent pairs.

  Any text can be encoded and decodes to itself; texts are not normalized.

  Args:
    texts: training texts, read once; no pair spans two texts.
    vocab_size: exact number of tokens; a multiple of 8, so that it can be sharded.
  Raises:
    ValueError: the size is not a multiple of 8, is below 264, or exceeds the number of
      tokens that the texts yield.
    ImportError: tokenizers is not installed.
  Source: "Neural Machine Translation of Rare Words with Subword Units" (arXiv:1508.07909);
    bytes as the alphabet: "Language Models are Unsupervised Multitask Learners" (Radford et al.
    2019).
  """
  tokenizers = _import_tokenizers()
  if vocab_size % 8 or vocab_size < SMALLEST:
    raise ValueError(
      f"vocab_size = {vocab_size} is not a multiple of 8, or is below {SMALLEST} (256 bytes and"
      f" {len(SPECIAL)} special tokens, rounded up to a multiple of 8); set it to"
      f" {max(SMALLEST, -(-vocab_size // 8) * 8)}"
    )
  byte_level = tokenizers.pre_tokenizers.ByteLevel
  pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated")
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [pieces, byte_level(add_prefix_space=False, use_regex=False)]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(SPECIAL),
    initial_alphabet=sorted(byte_level.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  if tokenizer.get_vocab_size() < vocab_size:
    raise ValueError(
      f"the texts give only {tokenizer.get_vocab_size()} tokens, but vocab_size is {vocab_size};"
      " give more text, or lower vocab_size"
    )
  return tokenizer


def save(tokenizer: tokenizers.Tokenizer, directory: str | os.PathLike[str]) -> None:
  """Writes tokenizer.json, tokenizer_config.json and generation_config.json.

  Args:
    tokenizer: result of `train_byte_pairs`.
    directory: local folder or URL; created if needed.
  Raises:
    ValueError: the directory contains a tokenizer already.
  """
  system, folder = _locate_new_folder(directory)
  # We do not use save_pretrained: in transformers 5 it names a class that version 4 cannot load,
  # writes the library's version into the files, and supports local folders only.
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END_OF_TURN,
    "pad_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "chat_template": _TEMPLATE,
  }
  generation = {
    "eos_token_id": [tokenizer.token_to_id(token) for token in (END_OF_TURN, END_OF_TEXT)],
    "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
  }
  files = {
    "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    "generation_config.json": json.dumps(generation, indent=2) + "\n",
    "tokenizer.json": tokenizer.to_str(pretty=True),
  }
  system.makedirs(folder, exist_ok=True)
  for name, text in files.items():
    write_bytes(system, f"{folder}/{name}", text.encode())


def read_texts(paths: Iterable[str | os.PathLike[str]], fields: Sequence[str]) -> Iterator[str]:
  """Yields the texts of files; for a folder, of all its files in the order of their names.

  Args:
    paths: local paths or URLs.
    fields: fields to read from files of problems, in the formats that the task `jsonl` reads. If
      `fields` is empty, the files are UTF-8 text, and may be compressed (.gz).
  Raises:
    ValueError: a file is not UTF-8 text, or a problem lacks a text in one of the fields.
    OSError: a file does not exist or cannot be read.
  """
  for path in paths:
    yield from _read_fields(path, fields) if fields else _read_blocks(path)


def _read_fields(path: str | os.PathLike[str], fields: Sequence[str]) -> Iterator[str]:
  files = PublishedFiles(path, user_written=True)
  for row in files.rows(files.paths()):
    for field in fields:
      try:
        yield as_text(field, row.get(field))
      except TypeError as error:
        raise row.error(f"does not fit: {error}") from error


def _read_blocks(path: str | os.PathLike[str]) -> Iterator[str]:
  system, name = locate(path)
  for file in sorted(system.find(name)) if system.isdir(name) else [name]:
    if file_format(file):
      raise ValueError(
        f"{file} is a file of problems, not of plain text: name the fields to read, such as"
        " `--field question`"
      )
    try:
      with system.open(file, "rt", encoding="utf-8", newline="", compression="infer") as text:
        while block := text.read(_BLOCK):
          yield block
    except UnicodeDecodeError as error:
      raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _locate_new_folder(
  directory: str | os.PathLike[str],
) -> tuple[fsspec.AbstractFileSystem, str]:
  """Locates the output folder; raises ValueError if it already contains a tokenizer."""
  system, folder = locate(directory)
  if system.exists(f"{folder}/tokenizer.json"):
    raise ValueError(f"{os.fspath(directory)} already contains a tokenizer; choose another folder")
  return system, folder


def _import_tokenizers() -> Any:
  try:
    import tokenizers
  except ImportError as error:
    raise ImportError(
      'training a tokenizer needs the package tokenizers: pip install "rlvr_jax[hf]"'
    ) from error
  return tokenizers


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m rlvr_jax.data.byte_pairs", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--input", nargs="+", required=True, help="files or folders")
  parser.add_argument("--field", action="append", default=[], help="of problems; may be repeated")
  parser.add_argument("--vocab_size", type=int, default=1024)
  parser.add_argument("--output", required=True, help="folder to write")
  arguments = parser.parse_args(argv)
  try:
    _locate_new_folder(arguments.output)  # fails before the long computation
    texts = read_texts(arguments.input, arguments.field)
    save(train_byte_pairs(texts, arguments.vocab_size), arguments.output)
  except (ValueError, OSError, ImportError) as error:
    sys.exit(f"error: {error}")
  print(f"{arguments.output}: {arguments.vocab_size} tokens")


if __name__ == "__main__":
  main()
