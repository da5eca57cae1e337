"""Trains a byte-level byte-pair encoding on text files, for runs from scratch.

  python -m rlvr_jax.data.byte_pairs --input train.jsonl --field question --field answer \\
    --vocab_size 1024 --output tokenizers/gsm8k

The output folder has Hugging Face's layout, with a chat template: `HuggingFaceTokenizer` and
`transformers` load it. Equal texts give byte-identical files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlvr_jax.storage.folders import locate

if TYPE_CHECKING:
  import tokenizers

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN, END_OF_TURN)  # ids 0, 1, 2
SMALLEST = -(-(256 + len(SPECIAL)) // 8) * 8
# Pairs are merged only within these pieces: a word with its leading space, one digit, punctuation
# with its leading space, white space. Every digit is a token, so that numbers split uniformly.
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
  """Trains an encoding of `vocab_size` tokens: special tokens, the 256 bytes, and frequent pairs.

  Any text can be encoded and decodes to itself; texts are not normalized.

  Args:
    texts: training texts, read once; no pair spans two of them.
    vocab_size: exact number of tokens; a multiple of 8, so that it can be sharded.
  Raises:
    ValueError: the size is not a multiple of 8, is below 264, or is more than the texts support.
    ImportError: tokenizers is not installed.
  Source: "Neural Machine Translation of Rare Words with Subword Units" (arXiv:1508.07909);
    bytes as the alphabet: "Language Models are Unsupervised Multitask Learners" (Radford et al.
    2019).
  """
  tokenizers = _import_tokenizers()
  if vocab_size % 8 or vocab_size < SMALLEST:
    raise ValueError(
      f"vocab_size = {vocab_size} is not a multiple of 8 ≥ {SMALLEST} (256 bytes and"
      f" {len(SPECIAL)} special tokens); set it to {max(SMALLEST, -(-vocab_size // 8) * 8)}"
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
  filesystem, folder = _locate_new_folder(directory)
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
  filesystem.makedirs(folder, exist_ok=True)
  _write_json(filesystem, f"{folder}/tokenizer_config.json", config)
  _write_json(filesystem, f"{folder}/generation_config.json", generation)
  filesystem.write_text(f"{folder}/tokenizer.json", tokenizer.to_str(pretty=True), encoding="utf-8")


def read_texts(paths: Iterable[str | os.PathLike[str]], fields: Sequence[str]) -> Iterator[str]:
  """Yields the texts of files, and of all files in folders, ordered by name.

  Args:
    paths: local paths or URLs of UTF-8 text or .jsonl files, which may be compressed (.gz).
    fields: fields whose texts are read from each line of a .jsonl file.
  Raises:
    ValueError: a file is not UTF-8 text, or a line of .jsonl lacks a text in one of the fields.
    OSError: a file does not exist or cannot be read.
  """
  for path in paths:
    filesystem, name = locate(path)
    for file in sorted(filesystem.find(name)) if filesystem.isdir(name) else [name]:
      try:
        with filesystem.open(file, "rt", encoding="utf-8", newline="", compression="infer") as text:
          if file.removesuffix(".gz").endswith(".jsonl"):
            yield from _read_fields(text, fields, file)
          else:
            while block := text.read(_BLOCK):
              yield block
      except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _read_fields(lines: Iterable[str], fields: Sequence[str], file: str) -> Iterator[str]:
  if not fields:
    raise ValueError(f"{file} is .jsonl: name the fields to read, such as --field question")
  for number, line in enumerate(lines, start=1):
    try:
      texts = [json.loads(line)[field] for field in fields]
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f"{file}, line {number} is not a JSON object with {list(fields)} ({error!r}): {line[:80]!r}"
      ) from error
    for text in texts:
      if not isinstance(text, str):
        raise ValueError(f"{file}, line {number} has {text!r} where a text is expected")
      yield text


def _locate_new_folder(directory: str | os.PathLike[str]) -> tuple[Any, str]:
  """Locates the output folder; raises ValueError if it already contains a tokenizer."""
  filesystem, folder = locate(directory)
  if filesystem.exists(f"{folder}/tokenizer.json"):
    raise ValueError(f"{os.fspath(directory)} already contains a tokenizer; choose another folder")
  return filesystem, folder


def _write_json(filesystem: Any, path: str, value: dict[str, Any]) -> None:
  filesystem.write_text(path, json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _import_tokenizers() -> Any:
  try:
    import tokenizers
  except ImportError as error:
    raise ImportError('training a tokenizer needs tokenizers: pip install -e ".[hf]"') from error
  return tokenizers


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m rlvr_jax.data.byte_pairs", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--input", nargs="+", required=True, help="files or folders")
  parser.add_argument("--field", action="append", default=[], help="of .jsonl; may be repeated")
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
