"""Hugging Face checkpoint directories in and out, tensor by tensor, never through remote code.

`config.json` says which function the network is, safetensors files hold its weights. Facts about
the families, defaults included, are those of the `transformers` library's configuration classes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from rlvr_jax.files import listing, located
from rlvr_jax.models import safetensors
from rlvr_jax.models.safetensors import Tensor
from rlvr_jax.models.transformer import RopeScaling, TransformerConfig, YarnScaling
from rlvr_jax.ops.checks import check_between, check_choice, check_whole
from rlvr_jax.types import Array, Params

CONFIG = "config.json"
BLOCK_BYTES = 32 * 2**20  # of one tensor, on the host at a time
COPIED = (  # from the source of an export
  "generation_config.json",
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
)

_QWEN: dict[str, Any] = dict(
  vocab_size=151_936,
  hidden_size=4096,
  intermediate_size=22_016,
  num_hidden_layers=32,
  num_attention_heads=32,
  num_key_value_heads=32,
  hidden_act="silu",
  max_position_embeddings=32_768,
  tie_word_embeddings=False,
  use_sliding_window=False,
  sliding_window=4096,
  max_window_layers=28,
)
_GEMMA: dict[str, Any] = dict(
  hidden_size=2304,
  intermediate_size=9216,
  num_hidden_layers=26,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=256,
  hidden_activation="gelu_pytorch_tanh",
  tie_word_embeddings=True,
  query_pre_attn_scalar=256,
  sliding_window=4096,
)
# What a config.json may leave out; what no family's says has its default where it is read.
_DEFAULTS: dict[str, dict[str, Any]] = {
  "qwen2": _QWEN,
  "qwen3": _QWEN | dict(head_dim=128),
  "llama": dict(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    hidden_act="silu",
    max_position_embeddings=2048,
    tie_word_embeddings=False,
  ),
  "gemma2": _GEMMA
  | dict(
    vocab_size=256_000,
    max_position_embeddings=8192,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
  ),
  "gemma3_text": _GEMMA | dict(vocab_size=262_208, max_position_embeddings=131_072),
}
_ARCHITECTURES = {
  "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
  "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
  "llama": ("LlamaForCausalLM", "LlamaModel"),
  "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
  "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
  "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Model"),  # around a gemma3_text
}
_ACTIVATIONS = {
  "silu": "silu",
  "swish": "silu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "gelu_fast": "gelu_tanh",
  "gelu": "gelu",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# --- config.json ----------------------------------------------------------------------------------


def checkpoint_config(directory: str | os.PathLike[str], **overrides: Any) -> TransformerConfig:
  """The network that a directory's config.json describes.

  Args:
    directory: local or a URL such as gs://bucket/folder.
    overrides: fields of `TransformerConfig` that replace what was found, such as the dtypes, which
      are ours to choose and not taken from the file.
  Raises:
    FileNotFoundError: no config.json.
    ValueError: a family, rotary embedding or activation that is not implemented, quantized
      weights, or values that contradict one another.
  """
  system, folder = located(directory)
  if CONFIG not in listing(directory):
    raise FileNotFoundError(f"{directory} has no {CONFIG}; name a checkpoint's own folder")
  path = posixpath.join(folder, CONFIG)
  return TransformerConfig(**(config_fields(safetensors.read_json(system, path), path) | overrides))


def config_fields(published: Mapping[str, Any], owner: str) -> dict[str, Any]:
  """Fields of `TransformerConfig` from a config.json's content; `owner` names it in messages."""
  family, given = _family(published, owner)
  c = _DEFAULTS[family] | given
  gemma = family.startswith("gemma")
  size = lambda name: _size(owner, name, c[name])
  heads = size("num_attention_heads")
  if c.get("num_key_value_heads") is None:
    c["num_key_value_heads"] = heads
  if c.get("head_dim") is None:
    c["head_dim"] = size("hidden_size") // heads
  activation = c["hidden_activation" if gemma else "hidden_act"]
  if gemma and activation is None:  # early files say it in hidden_act, of which nothing was used
    activation = "gelu_pytorch_tanh"
  check_choice(owner, "hidden activation", activation, tuple(_ACTIVATIONS))
  if gemma and c.get("use_bidirectional_attention"):
    raise ValueError(f"{owner}: use_bidirectional_attention is set; only causal models are read")
  layers = _sliding_layers(family, c, owner)
  ropes = _ropes(family, c, owner)
  theta, scaling = _rope(ropes[0], c, owner)
  near_theta = None
  if family == "gemma3_text" and layers:
    near_theta, near_scaling = _rope(ropes[1], c, owner)
    if near_scaling is not None:
      raise ValueError(
        f"{owner}: rotary embeddings of sliding layers are scaled, which is not implemented; only"
        " those of full_attention can be"
      )
  biased = family == "qwen2" or bool(c.get("attention_bias"))
  return dict(
    vocab_size=size("vocab_size"),
    width=size("hidden_size"),
    num_layers=size("num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=size("num_key_value_heads"),
    head_dim=size("head_dim"),
    mlp_width=size("intermediate_size"),
    activation=_ACTIVATIONS[activation],
    norm_epsilon=_number(owner, "rms_norm_eps", c.get("rms_norm_eps", 1e-6)),
    rope_theta=theta,
    rope_scaling=scaling,
    tied_head=bool(c["tie_word_embeddings"]),
    qk_norm=family in ("qwen3", "gemma3_text"),
    qkv_bias=biased,
    output_bias=biased and family != "qwen2",
    mlp_bias=family == "llama" and bool(c.get("mlp_bias")),
    query_scale=_number(owner, "query_pre_attn_scalar", c["query_pre_attn_scalar"]) ** -0.5
    if gemma
    else None,
    # Gemma 3 configurations have the field, its attention does not look at it.
    attention_soft_cap=_soft_cap(c, "attn_logit_softcapping", owner)
    if family == "gemma2"
    else None,
    final_soft_cap=_soft_cap(c, "final_logit_softcapping", owner) if gemma else None,
    sliding_window=size("sliding_window") if layers else None,
    sliding_layers=layers,
    sliding_rope_theta=near_theta,
    scaled_embedding=gemma,
    zero_centered_norm=gemma,
    post_norm=gemma,
  )


def _family(published: Mapping[str, Any], owner: str) -> tuple[str, dict[str, Any]]:
  """The family's name, and the text model's own settings."""
  kind: Any = published.get("model_type")
  check_choice(owner, "model_type", kind, tuple(_ARCHITECTURES))
  for architecture in published.get("architectures") or ():
    check_choice(owner, "architectures", architecture, _ARCHITECTURES[kind])
  quantized = [f for f in ("quantization_config", "compression_config") if published.get(f)]
  if quantized:
    raise ValueError(
      f"{owner}: {quantized[0]} is set; quantized weights are not read. Load the checkpoint"
      " that it was made from, or write it back as bfloat16"
    )
  if kind != "gemma3":
    return kind, dict(published)
  text = published.get("text_config") or {}
  if not isinstance(text, Mapping) or text.get("model_type", "gemma3_text") != "gemma3_text":
    raise ValueError(f"{owner}: text_config = {text!r} is not that of a gemma3_text")
  tied = published.get("tie_word_embeddings", True)
  return "gemma3_text", dict(text) | {"tie_word_embeddings": tied}


def _size(owner: str, name: str, value: Any) -> int:
  check_whole(owner, name, value, low=1)
  return value


def _number(owner: str, name: str, value: Any) -> float:
  check_between(owner, name, value, low=0.0, open_low=True)
  return value


def _soft_cap(c: Mapping[str, Any], name: str, owner: str) -> float | None:
  return None if c.get(name) is None else _number(owner, name, c[name])


def _sliding_layers(family: str, c: Mapping[str, Any], owner: str) -> tuple[bool, ...] | None:
  """Which layers slide; None if none does."""
  count = _size(owner, "num_hidden_layers", c["num_hidden_layers"])
  if family == "llama":
    return None
  window = c["sliding_window"]
  if family.startswith("qwen") and not c["use_sliding_window"]:
    window = None
  kinds = c.get("layer_types")
  if kinds is None:
    slides: Callable[[int], bool]
    if family.startswith("qwen"):
      slides = lambda i: window is not None and i >= c["max_window_layers"]
    else:
      period = 2 if family == "gemma2" else c.get("sliding_window_pattern", 6)
      _size(owner, "sliding_window_pattern", period)
      slides = lambda i: (i + 1) % period != 0
    layers = tuple(slides(i) for i in range(count))
  else:
    for kind in kinds:
      check_choice(owner, "layer_types", kind, ("full_attention", "sliding_attention"))
    if len(kinds) != count:
      raise ValueError(f"{owner}: {len(kinds)} layer_types for num_hidden_layers = {count}")
    layers = tuple(kind == "sliding_attention" for kind in kinds)
  if not any(layers):
    return None
  if window is None:
    raise ValueError(f"{owner}: layers slide, but sliding_window is null or use_sliding_window off")
  return layers


def _ropes(family: str, c: Mapping[str, Any], owner: str) -> list[dict[str, Any]]:
  """Rotary settings of full layers and, of Gemma 3, of sliding ones, old style as new style."""
  new, old = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
  for name, value in (("rope_parameters", new), ("rope_scaling", old)):
    if not isinstance(value, Mapping):
      raise ValueError(f"{owner}: {name} = {value!r} is no JSON object")
  if family != "gemma3_text":
    return [{"rope_theta": c.get("rope_theta", 10_000.0)} | dict(new) | dict(old)]
  full, sliding = new.get("full_attention") or {}, new.get("sliding_attention") or {}
  return [
    {"rope_theta": c.get("rope_theta", 1_000_000.0)} | full | dict(old),
    {"rope_theta": c.get("rope_local_base_freq", 10_000.0)} | sliding,
  ]


def _rope(
  rope: Mapping[str, Any], c: Mapping[str, Any], owner: str
) -> tuple[float, RopeScaling | YarnScaling | None]:
  """θ and the scaling of one kind of layer."""
  number = lambda name: _number(owner, f"rotary {name}", rope.get(name))
  kind = rope.get("rope_type", rope.get("type", "default"))
  check_choice(owner, "rope_type", kind, _ROPE_TYPES)
  if rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
    raise ValueError(f"{owner}: partial_rotary_factor is set; heads are rotated as a whole only")
  theta = number("rope_theta")
  if kind == "default":
    return theta, None
  original = rope.get("original_max_position_embeddings", c["max_position_embeddings"])
  if kind == "yarn":
    original = _size(owner, "original_max_position_embeddings", original)
    factor = number("factor") if rope.get("factor") else c["max_position_embeddings"] / original
    return theta, YarnScaling(
      factor=factor,
      original_length=original,
      fast_rotations=rope.get("beta_fast") or 32,
      slow_rotations=rope.get("beta_slow") or 1,
      whole_indices=bool(rope.get("truncate", True)),
      attention_factor=_yarn_attention_factor(rope, factor),
    )
  if kind == "linear":
    return theta, RopeScaling(factor=number("factor"))
  return theta, RopeScaling(
    factor=number("factor"),
    low_frequency_factor=number("low_freq_factor"),
    high_frequency_factor=number("high_freq_factor"),
    original_length=_size(owner, "original_max_position_embeddings", original),
  )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
  above, below = rope.get("mscale"), rope.get("mscale_all_dim")
  if rope.get("attention_factor") is not None or not (above and below) or factor <= 1:
    return rope.get("attention_factor")
  grown = lambda scale: 0.1 * scale * math.log(factor) + 1.0
  return grown(above) / grown(below)


# --- which tensor is which parameter --------------------------------------------------------------


class _Leaf(NamedTuple):
  """A parameter of ours, and the published tensors that it is made of."""

  path: tuple[str, ...]
  names: list[str]  # one per layer where layers are stacked on the first axis
  stacked: bool
  transposed: bool  # kernels are [in, out] here, [out, in] there

  def published(self, index: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A shape or index of ours as the layers it covers, and what it is of each published tensor."""
    layers, own = (index[0], index[1:]) if self.stacked else (None, index)
    return layers, own[::-1] if self.transposed else own


KERNELS = {  # ours: the published module's name, the same in every family
  "query": "self_attn.q_proj",
  "key": "self_attn.k_proj",
  "value": "self_attn.v_proj",
  "output": "self_attn.o_proj",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}
_NORMS = {
  "attention_norm": "input_layernorm",
  "query_norm": "self_attn.q_norm",
  "key_norm": "self_attn.k_norm",
}
# Gemma has a norm after attention, and calls the one before the MLP by another name.
_TWO_NORMS = {"mlp_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
  "post_attention_norm": "post_attention_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  "post_mlp_norm": "post_feedforward_layernorm",
}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _leaves(params: Params) -> list[_Leaf]:
  """One for each parameter, in the order in which they are written."""
  blocks = params["blocks"]
  norms = _NORMS | (_FOUR_NORMS if "post_mlp_norm" in blocks else _TWO_NORMS)
  layer_tensors: dict[tuple[str, ...], str] = {
    **{(name,): f"{theirs}.weight" for name, theirs in KERNELS.items()},
    **{(f"{name}_bias",): f"{theirs}.bias" for name, theirs in KERNELS.items()},
    **{(name, "scale"): f"{theirs}.weight" for name, theirs in norms.items()},
  }
  tensors: dict[tuple[str, ...], str] = {
    ("embedding",): _EMBEDDING,
    ("final_norm", "scale"): "model.norm.weight",
    ("head_kernel",): _HEAD,
  }
  found = []
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = tuple(key.key for key in keys)
    if path in tensors:
      found.append(_Leaf(path, [tensors[path]], False, path == ("head_kernel",)))
      continue
    theirs = layer_tensors.get(path[1:]) if path[0] == "blocks" else None
    if theirs is None:
      raise ValueError(f"parameter {'/'.join(path)} is in no published checkpoint")
    names = [f"model.layers.{i}.{theirs}" for i in range(leaf.shape[0])]
    found.append(_Leaf(path, names, True, path[1] in KERNELS))
  return sorted(found, key=lambda leaf: (leaf.stacked, leaf.path))


def published_shapes(params: Params) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor of these parameters' checkpoint, in the order of writing.

  Raises:
    ValueError: a parameter that no published checkpoint has.
  """
  return _shapes(_leaves(params), params)


def _shapes(leaves: Iterable[_Leaf], params: Params) -> dict[str, tuple[int, ...]]:
  return {
    name: leaf.published(_value(params, leaf).shape)[1] for leaf in leaves for name in leaf.names
  }


def _value(params: Params, leaf: _Leaf) -> Any:
  return functools.reduce(lambda tree, key: tree[key], leaf.path, params)


_UNUSED = re.compile(  # tables that older versions saved; what is not the text model's
  r"(^|\.)rotary_emb\.|^(model\.)?(vision_tower|multi_modal_projector)\."
)
_PREFIXES = (  # of a text model within another, and of one saved without its head
  (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
  (re.compile(r"^language_model\.lm_head\."), "lm_head."),
  (re.compile(r"^(?=(embed_tokens|layers|norm)\.)"), "model."),
)


def _usual_names(tensors: Mapping[str, Tensor], directory: Any) -> dict[str, Tensor]:
  found: dict[str, Tensor] = {}
  for name, tensor in tensors.items():
    if _UNUSED.search(name):
      continue
    usual = name
    for pattern, prefix in _PREFIXES:
      usual = pattern.sub(prefix, usual)
    if usual in found:
      raise ValueError(f"{directory}: {name!r} and {found[usual].name!r} are one tensor's names")
    found[usual] = tensor
  return found


# --- in -------------------------------------------------------------------------------------------


def load_params(
  directory: str | os.PathLike[str], abstract_params: Params, *, block_bytes: int = BLOCK_BYTES
) -> Params:
  """A checkpoint directory's weights as sharded parameters.

  Every process reads what its own devices hold, once, whichever of them share it. Blocks of one
  tensor's rows go to the devices, where they are transposed, cast and put in place: beside the
  parameters the host holds about one block.

  Args:
    directory: local or a URL such as gs://bucket/folder.
    abstract_params: nested dict of `jax.ShapeDtypeStruct`s with shardings.
    block_bytes: of a tensor, on the host at a time; at least a row is.
  Raises:
    FileNotFoundError: no weights there, or a shard is missing.
    ValueError: pickled or quantized weights, a damaged file, tensors that are missing, unknown or
      of another shape than the parameters, before the weights are read; weights that are NaN or
      infinite, after it.
  """
  tensors = _usual_names(safetensors.open_checkpoint(directory), directory)
  leaves = _leaves(abstract_params)
  _settle_tied_head(tensors, leaves, directory)
  _check_tensors(tensors, leaves, abstract_params, directory)
  params = jax.tree.map(lambda _: None, abstract_params)
  for leaf in leaves:
    inner = functools.reduce(lambda tree, key: tree[key], leaf.path[:-1], params)
    wanted = _value(abstract_params, leaf)
    inner[leaf.path[-1]] = _load_leaf(leaf, wanted, tensors, block_bytes)
  _check_finite(params, leaves, directory)
  return params


def _settle_tied_head(tensors: dict[str, Tensor], leaves: list[_Leaf], directory: Any) -> None:
  """Drops a tied head that was saved beside the embedding, or in its place."""
  if any(leaf.path == ("head_kernel",) for leaf in leaves) or _HEAD not in tensors:
    return
  head = tensors.pop(_HEAD)
  embedding = tensors.setdefault(_EMBEDDING, head)
  rows = min(head.shape[0], embedding.shape[0])
  for row in range(0, rows, max(1, rows // 16)):  # training moves every row of a head
    if not np.array_equal(head.rows(row, row + 1), embedding.rows(row, row + 1)):
      raise ValueError(
        f"{directory}: {head.name!r} is not {embedding.name!r}, though {CONFIG} says that they are"
        " tied; set tie_word_embeddings to false there, or override tied_head=False"
      )


def _check_tensors(
  tensors: Mapping[str, Tensor], leaves: list[_Leaf], params: Params, directory: Any
) -> None:
  """Raises, before anything is read, unless the tensors are exactly those of the parameters."""
  shapes = _shapes(leaves, params)
  problems = []
  if missing := [name for name in shapes if name not in tensors]:
    untied = " (tied embeddings have none: tie_word_embeddings)" if _HEAD in missing else ""
    problems.append(f"{len(missing)} missing: {_some(missing)}{untied}")
  if unknown := [tensors[name].name for name in tensors if name not in shapes]:
    problems.append(f"{len(unknown)} unknown: {_some(unknown)}")
  for name, shape in shapes.items():
    if name in tensors and tensors[name].shape != shape:
      tensor = tensors[name]
      problems.append(
        f"{tensor.name!r} in {tensor.path} has shape {tensor.shape}, the model's {shape}"
      )
  if problems:
    raise ValueError(
      f"{directory}: its tensors are not those of the model. {'; '.join(problems[:5])}. Is the"
      f" configuration this checkpoint's own {CONFIG}?"
    )
  for name in shapes:
    _ = tensors[name].dtype  # raises if it cannot be read


@jax.jit
def _are_finite(params: Params) -> Params:
  # Of the sum, which NaN and infinities spread to: isfinite(x) would be as large as all of them.
  return jax.tree.map(lambda x: jnp.isfinite(jnp.sum(x)), params)


def _check_finite(params: Params, leaves: list[_Leaf], directory: Any) -> None:
  """Raises for a checkpoint that its training has ruined."""
  finite = jax.device_get(_are_finite(params))
  if ruined := [leaf for leaf in leaves if not _value(finite, leaf)]:
    raise ValueError(
      f"{directory}: NaN or infinite weights in {len(ruined)} of {len(leaves)} parameters:"
      f" {_some(['/'.join(leaf.path) for leaf in ruined])}. It is spoilt; take an earlier one"
    )


def _some(names: list[str]) -> str:
  return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


def _load_leaf(
  leaf: _Leaf, wanted: jax.ShapeDtypeStruct, tensors: Mapping[str, Tensor], block_bytes: int
) -> Array:
  shape, sharding = wanted.shape, wanted.sharding
  indices = sharding.addressable_devices_indices_map(shape)
  shards = {device: _bounds(index, shape) for device, index in indices.items()}
  held_bytes = len(shards) * math.prod(sharding.shard_shape(shape)) * wanted.dtype.itemsize
  # What is small in all is put together on the host: no program to compile for shape and device.
  on_host = held_bytes <= block_bytes
  buffers: dict[jax.Device, Any] = {}
  for device, bounds in shards.items():
    lengths = [stop - start for start, stop in bounds]
    zeros = functools.partial(np.zeros if on_host else jnp.zeros, lengths, wanted.dtype)
    buffers[device] = zeros() if on_host else zeros(device=device)
  for pieces in _pieces(leaf, shards, tensors, block_bytes):
    for device, (at, piece) in pieces.items():
      if on_host:
        _put_on_host(buffers[device], piece, at, leaf.transposed)
      else:
        piece, at = jax.device_put(piece, device), np.asarray(at, np.int32)
        buffers[device] = _put(buffers[device], piece, at, leaf.transposed)
    jax.block_until_ready([buffers[device] for device in pieces])  # blocks must not pile up
  arrays = [jax.device_put(buffer, device) for device, buffer in buffers.items()]
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _pieces(
  leaf: _Leaf,
  shards: Mapping[jax.Device, tuple[tuple[int, int], ...]],
  tensors: Mapping[str, Tensor],
  block_bytes: int,
) -> Iterator[dict[jax.Device, tuple[tuple[int, ...], np.ndarray]]]:
  """For every block that is read: device → where in its shard which part of the block belongs."""
  # Devices that hold the same rows of a published tensor share their reading.
  by_rows: dict[Any, list[jax.Device]] = {}
  for device, bounds in shards.items():
    layers, (rows, *_) = leaf.published(bounds)
    by_rows.setdefault((layers or (0, 1), rows), []).append(device)
  for (layers, rows), devices in by_rows.items():
    for layer in range(*layers):
      for first, block in _blocks(tensors[leaf.names[layer]], rows, block_bytes):
        pieces = {}
        for device in devices:
          _, (_, *columns) = leaf.published(shards[device])
          at = (first - rows[0], *(0 for _ in columns))
          at = at[::-1] if leaf.transposed else at
          at = (layer - layers[0], *at) if leaf.stacked else at
          pieces[device] = at, block[:, slice(*columns[0])] if columns else block
        yield pieces


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _blocks(
  tensor: Tensor, rows: tuple[int, int], block_bytes: int
) -> Iterator[tuple[int, np.ndarray]]:
  """First row and rows, all blocks of one size: the last overlaps, so that one program serves."""
  first, last = rows
  size = _block_rows(tensor.shape, tensor.dtype, last - first, block_bytes)
  for start in range(first, last, size):
    start = min(start, last - size)
    yield start, tensor.rows(start, start + size)


def _block_rows(shape: tuple[int, ...], dtype: np.dtype, rows: int, block_bytes: int) -> int:
  row_bytes = math.prod(shape[1:]) * dtype.itemsize
  return min(rows, max(1, block_bytes // row_bytes))


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(buffer: Array, block: Array, at: Array, transposed: bool) -> Array:
  block = _turned(block, buffer.ndim, transposed).astype(buffer.dtype)
  return jax.lax.dynamic_update_slice(buffer, block, tuple(at))


def _put_on_host(
  buffer: np.ndarray, block: np.ndarray, at: Iterable[int], transposed: bool
) -> None:
  block = _turned(block, buffer.ndim, transposed)
  buffer[tuple(slice(i, i + n) for i, n in zip(at, block.shape, strict=True))] = block


def _turned(block: Any, rank: int, transposed: bool) -> Any:
  """Rows of a published tensor as they lie in a parameter."""
  block = block.T if transposed else block
  return block.reshape((1,) * (rank - block.ndim) + block.shape)


# --- out ------------------------------------------------------------------------------------------


def save_checkpoint(
  directory: str | os.PathLike[str],
  params: Params,
  config: TransformerConfig,
  *,
  dtype: str = "bfloat16",
  source: str | os.PathLike[str] | None = None,
  max_shard_bytes: int = safetensors.MAX_SHARD_BYTES,
  block_bytes: int = BLOCK_BYTES,
) -> None:
  """Writes a directory that `transformers` loads; all processes call it, the first one writes.

  Rows of one tensor at a time leave the devices. A local directory is there whole or not at all;
  behind a URL config.json comes last.

  Args:
    directory: absent or empty; local or a URL such as gs://bucket/folder.
    params: nested dict of arrays, sharded or not.
    config: of the network.
    dtype: of the written weights: bfloat16, float16 or float32.
    source: a checkpoint directory of the same family whose tokenizer, generation_config.json and
      further settings, such as the stop tokens, are taken over.
    max_shard_bytes: of a file.
    block_bytes: of a tensor, on the host at a time.
  Raises:
    FileExistsError: there is something in `directory`.
    ValueError: parameters or settings that no family of `transformers` has.
  """
  check_choice("save_checkpoint", "dtype", dtype, ("bfloat16", "float16", "float32"))
  safetensors.check_vacant(directory)
  leaves = _leaves(params)
  published = published_config(config, dtype, source)
  file_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
  blocks = (
    block
    for leaf in leaves
    for layer in range(len(leaf.names))
    for block in _fetched(_value(params, leaf), leaf, layer, file_dtype, block_bytes)
  )
  if jax.process_index() == 0:
    with safetensors.new_directory(directory) as (system, folder):
      safetensors.write_checkpoint(
        system,
        folder,
        _shapes(leaves, params),
        file_dtype,
        blocks,
        max_shard_bytes=max_shard_bytes,
      )
      if source is not None:
        _copy(source, system, folder)
      text = json.dumps(published, indent=2, allow_nan=False).encode()
      safetensors.write_bytes(system, posixpath.join(folder, CONFIG), text)
  else:
    for _ in blocks:  # the other processes take part in gathering
      pass
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(f"save_checkpoint {directory}")


def _fetched(
  value: Array, leaf: _Leaf, layer: int, dtype: np.dtype, block_bytes: int
) -> Iterator[np.ndarray]:
  """Blocks of the rows of a published tensor, on the host."""
  shape = leaf.published(value.shape)[1]
  size = _block_rows(shape, dtype, shape[0], block_bytes)
  replicated = None
  if isinstance(value, jax.Array) and isinstance(value.sharding, jax.sharding.NamedSharding):
    replicated = jax.sharding.NamedSharding(value.sharding.mesh, PartitionSpec())
  take = _taking(leaf.stacked, leaf.transposed, dtype, replicated)
  for start in range(0, shape[0], size):
    first = min(start, shape[0] - size)
    block = take(value, layer, first, size)
    yield np.asarray(block.addressable_data(0))[start - first :]


@functools.cache
def _taking(stacked: bool, transposed: bool, dtype: np.dtype, replicated: Any):
  """A program: (parameter, layer, first row, number of rows) → those rows of the tensor."""

  @functools.partial(jax.jit, static_argnums=3, out_shardings=replicated)
  def take(value, layer, first, size):
    if stacked:
      value = jax.lax.dynamic_index_in_dim(value, layer, keepdims=False)
    axis = value.ndim - 1 if transposed else 0
    block = jax.lax.dynamic_slice_in_dim(value, first, size, axis)
    return (block.T if transposed else block).astype(dtype)

  return take


def _copy(source: str | os.PathLike[str], system: Any, folder: str) -> None:
  origin, origin_folder = located(source)
  for name in sorted(set(COPIED) & set(listing(source))):
    content = origin.cat_file(posixpath.join(origin_folder, name))
    safetensors.write_bytes(system, posixpath.join(folder, name), content)


def published_config(
  config: TransformerConfig, dtype: str, source: str | os.PathLike[str] | None
) -> dict[str, Any]:
  """The content of config.json, for transformers 5 and, with the older names beside them, 4.

  Raises:
    ValueError: no family computes what `config` says.
  """
  family = _family_of(config)
  defaults = _DEFAULTS[family]
  base: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
  base |= {"use_cache": True, "max_position_embeddings": defaults["max_position_embeddings"]}
  if source is not None:
    system, path = located(source)
    path = posixpath.join(path, CONFIG)
    source_family, settings = _family(safetensors.read_json(system, path), path)
    check_choice(path, "model_type", source_family, (family,))
    base |= {name: value for name, value in settings.items() if name not in _NOT_TAKEN_OVER}
  elif config.rope_scaling is not None:
    extended = round(config.rope_scaling.factor * config.rope_scaling.original_length)
    base["max_position_embeddings"] = max(base["max_position_embeddings"], extended)
  gemma = family.startswith("gemma")
  sliding = config.sliding_layers or (False,) * config.num_layers
  activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
  published = base | _published_ropes(family, config) | {
    "architectures": [_ARCHITECTURES[family][0]],
    "model_type": family,
    "dtype": dtype,
    "torch_dtype": dtype,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp_width,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_activation" if gemma else "hidden_act": activations[config.activation],
    "rms_norm_eps": config.norm_epsilon,
    "tie_word_embeddings": config.tied_head,
  }
  if family != "qwen2":
    published["attention_bias"] = config.qkv_bias
  if family == "llama":
    published["mlp_bias"] = config.mlp_bias
  else:
    published["layer_types"] = [
      "sliding_attention" if slides else "full_attention" for slides in sliding
    ]
    published["sliding_window"] = config.sliding_window
  if family.startswith("qwen"):
    published["use_sliding_window"] = any(sliding)
    published["max_window_layers"] = sliding.index(True) if any(sliding) else config.num_layers
  if gemma:
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    published["query_pre_attn_scalar"] = round(scale**-2)
    published["attn_logit_softcapping"] = config.attention_soft_cap if family == "gemma2" else None
    published["final_logit_softcapping"] = config.final_soft_cap
  _check_reads_back(published, config)
  return published


_NOT_TAKEN_OVER = (  # of the source's config.json
  "auto_map",
  "rope_theta",
  "rope_scaling",
  "rope_local_base_freq",
  "sliding_window_pattern",
  "_sliding_window_pattern",
  "transformers_version",
  "_name_or_path",
)


def _family_of(config: TransformerConfig) -> str:
  if config.post_norm:
    return "gemma3_text" if config.qk_norm else "gemma2"
  if config.qk_norm:
    return "qwen3"
  return "qwen2" if config.qkv_bias and not config.output_bias else "llama"


def _published_ropes(family: str, config: TransformerConfig) -> dict[str, Any]:
  full = {"rope_theta": config.rope_theta} | _published_scaling(config.rope_scaling)
  found: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": full}
  if config.rope_scaling is not None:
    found["rope_scaling"] = _published_scaling(config.rope_scaling)
  if family == "gemma3_text":
    near = config.sliding_rope_theta or 10_000.0  # without sliding layers none is used
    found["rope_local_base_freq"] = near
    found["rope_parameters"] = {
      "full_attention": full,
      "sliding_attention": {"rope_theta": near, "rope_type": "default"},
    }
  return found


def _published_scaling(scaling: RopeScaling | YarnScaling | None) -> dict[str, Any]:
  if scaling is None:
    return {"rope_type": "default"}
  if isinstance(scaling, YarnScaling):
    found = {
      "rope_type": "yarn",
      "factor": scaling.factor,
      "original_max_position_embeddings": scaling.original_length,
      "beta_fast": scaling.fast_rotations,
      "beta_slow": scaling.slow_rotations,
      "truncate": scaling.whole_indices,
    }
    if scaling.attention_factor is not None:
      found["attention_factor"] = scaling.attention_factor
    return found
  if scaling.low_frequency_factor is None:
    return {"rope_type": "linear", "factor": scaling.factor}
  return {
    "rope_type": "llama3",
    "factor": scaling.factor,
    "low_freq_factor": scaling.low_frequency_factor,
    "high_freq_factor": scaling.high_frequency_factor,
    "original_max_position_embeddings": scaling.original_length,
  }


def _check_reads_back(published: Mapping[str, Any], config: TransformerConfig) -> None:
  """Raises where the family's fields cannot say what `config` says."""
  sliding = any(config.sliding_layers or ())
  said = dataclasses.asdict(config) | dict(
    rope_scaling=config.rope_scaling,
    sliding_layers=config.sliding_layers if sliding else None,
    sliding_window=config.sliding_window if sliding else None,
    sliding_rope_theta=config.sliding_rope_theta if sliding else None,
  )
  found = config_fields(published, "the exported config.json")
  for fields in (said, found):
    fields["query_scale"] = fields["query_scale"] or config.head_dim**-0.5
  differing = {
    name: (said[name], value) for name, value in found.items() if value != said[name]
  }
  if differing:
    raise ValueError(
      f"no family among {', '.join(_DEFAULTS)} computes this network, so transformers cannot load"
      f" it; the nearest, {published['model_type']}, differs in {differing} (ours, its)"
    )
