"""The mapping between published tensors and parameters, for checkpoints of all families.

*Published* tensors and modules are those in Hugging Face's checkpoints.
A tensor's *usual name* is its name in most families, such as
"model.layers.0.self_attn.q_proj.weight".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from rlvr_jax.models.huggingface_families import FAMILIES
from rlvr_jax.models.safetensors import Tensor
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.layers import layers_in, stack_of
from rlvr_jax.types import Params


class Leaf(NamedTuple):
  """A parameter and the names of its published tensors."""

  path: tuple[str, ...]
  names: npt.NDArray[
    np.str_
  ]  # its axes are those on which tensors are stacked: [], [layers] or [layers, E]
  transposed: bool  # kernels are [in, out] here, [out, in] in published tensors

  @property
  def stacked(self) -> int:
    """Number of leading axes on which published tensors are stacked, for layers and experts."""
    return self.names.ndim

  def published(self, index: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits a parameter's shape or index into stacked axes and a published tensor's axes."""
    stacked, rest = index[: self.stacked], index[self.stacked :]
    return stacked, rest[::-1] if self.transposed else rest


KERNELS = {  # our name → the published module's name, the same in every family
  "query": "self_attn.q_proj",
  "key": "self_attn.k_proj",
  "value": "self_attn.v_proj",
  "output": "self_attn.o_proj",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}
# The module of the gate on attention's output, which is published as one tensor with the queries:
# see `row_tables`.
_OUTPUT_GATE = "self_attn.q_gate"
_DELTA_KERNELS = {  # of a gated DeltaNet
  "query": "linear_attn.q",
  "key": "linear_attn.k",
  "value": "linear_attn.v",
  "gate": "linear_attn.in_proj_z",
  "strength": "linear_attn.in_proj_b",
  "decay": "linear_attn.in_proj_a",
  "output": "linear_attn.out_proj",
}
_DELTA_TENSORS = {
  "query_taps": "linear_attn.q_conv.weight",
  "key_taps": "linear_attn.k_conv.weight",
  "value_taps": "linear_attn.v_conv.weight",
  "log_rate": "linear_attn.A_log",
  "decay_bias": "linear_attn.dt_bias",
  "scale": "linear_attn.norm.weight",
}
_CONVOLUTION = re.compile(r"linear_attn\.conv1d\.weight$")  # [C, 1, T], here [C, T]
_ROUTER = "mlp.gate"
_SHARED_EXPERT = {
  "shared_gate": "mlp.shared_expert.gate_proj",
  "shared_up": "mlp.shared_expert.up_proj",
  "shared_down": "mlp.shared_expert.down_proj",
  "shared_weight": "mlp.shared_expert_gate",
}
_EXPERTS = {  # of an expert by its number
  "gate": "mlp.experts.{}.gate_proj",
  "up": "mlp.experts.{}.up_proj",
  "down": "mlp.experts.{}.down_proj",
}
# Usual names of experts' modules → their names in Mixtral.
_MIXTRAL = {
  "mlp.": "block_sparse_moe.",
  ".gate_proj.": ".w1.",
  ".down_proj.": ".w2.",
  ".up_proj.": ".w3.",
}
_TRANSPOSED = {"router", "output_gate", *KERNELS, *_DELTA_KERNELS, *_SHARED_EXPERT}
_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def kernel_modules(config: TransformerConfig) -> dict[str, str]:
  """Kernel's name (as in `models.lora`) → name of its published module within a layer."""
  names = {
    **KERNELS,
    "output_gate": _OUTPUT_GATE,
    **{f"delta/{name}": theirs for name, theirs in _DELTA_KERNELS.items()},
    **{f"full/{name}": KERNELS[name] for name in ("query", "key", "value", "output")},
  }
  if not config.attention_gate:
    del names["output_gate"]
  if config.full_keys_as_values:
    del names["full/value"]
  exists = lambda name: layers_in(stack_of(name.split("/")[0]), config.kinds)
  return {name: theirs for name, theirs in names.items() if exists(name)}


def find_leaves(params: Params, config: TransformerConfig, family: str) -> list[Leaf]:
  """The leaves of all parameters, in the order in which they are written.

  Here every kernel has its own tensor, even if checkpoints store several kernels in one tensor;
  `find_published` joins these kernels.

  Args:
    config: settings of the network.
    family: the checkpoint's family, one of `FAMILIES`.
  Raises:
    ValueError: Hugging Face's layout has no tensor for one of the parameters.
  """
  norms = {**_HEAD_NORMS, **FAMILIES[family].norms}
  of_experts: dict[tuple[str, ...], str] = {
    ("experts", name): f"{theirs}.weight" for name, theirs in _EXPERTS.items()
  }
  layer_tensors: dict[tuple[str, ...], str] = {
    **{(name,): f"{theirs}.weight" for name, theirs in KERNELS.items()},
    **{(f"{name}_bias",): f"{theirs}.bias" for name, theirs in KERNELS.items()},
    **{(name, "scale"): f"{theirs}.weight" for name, theirs in norms.items()},
    ("experts", "router"): f"{_ROUTER}.weight",
    **{("experts", name): f"{theirs}.weight" for name, theirs in _SHARED_EXPERT.items()},
    **of_experts,
    ("output_gate",): f"{_OUTPUT_GATE}.weight",
    ("layer_scale",): "layer_scalar",
    **{("delta", name): f"{theirs}.weight" for name, theirs in _DELTA_KERNELS.items()},
    **{("delta", name): theirs for name, theirs in _DELTA_TENSORS.items()},
  }
  # Full layers with heads of their own have the same modules, of other sizes.
  layer_tensors |= {("full", *path): name for path, name in layer_tensors.items()}
  tensors: dict[tuple[str, ...], str] = {
    ("embedding",): EMBEDDING,
    ("final_norm", "scale"): "model.norm.weight",
    ("head_kernel",): HEAD,
  }
  leaves = []
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = tuple(key.key for key in keys)
    if path in tensors:
      leaves.append(Leaf(path, np.array(tensors[path]), path == ("head_kernel",)))
      continue
    theirs = layer_tensors.get(path[1:]) if path[0] == "blocks" else None
    if theirs is None:
      raise ValueError(
        f"parameter {'/'.join(path)} is in no checkpoint in Hugging Face's layout; pass a network's"
        " parameters, with adapters merged into the kernels"
      )
    layers = layers_in(stack_of(path[1]), config.kinds)
    names = np.array([f"model.layers.{i}.{theirs}" for i in layers])
    if path[1:] in of_experts:
      names = np.array([[name.format(e) for e in range(leaf.shape[1])] for name in names])
    leaves.append(Leaf(path, names, path[-1] in _TRANSPOSED))
  return sorted(leaves, key=lambda leaf: (leaf.stacked > 0, leaf.path))


class Part(NamedTuple):
  """The tensor of one kernel or bias: a published tensor, or some rows of a published tensor."""

  name: str  # the usual name that the tensor would have if it were published alone
  shape: tuple[int, ...]
  rows: npt.NDArray[np.int64] | None  # rows of the published tensor, in order; None: all


class Published(NamedTuple):
  """A published tensor and the meaning of its rows."""

  shape: tuple[int, ...]
  parts: tuple[Part, ...]


def find_published(params: Params, config: TransformerConfig, family: str) -> dict[str, Published]:
  """Usual name → tensor, for a checkpoint with these parameters, in the order of writing.

  Args:
    config: settings of the network.
    family: the checkpoint's family, one of `FAMILIES`.
  Raises:
    ValueError: Hugging Face's layout has no tensor for one of the parameters.
  """
  places = {  # module within a layer → (the published module that contains it, its rows there)
    module: (whole, rows)
    for whole, parts in row_tables(config, family).items()
    for module, rows in parts.items()
  }
  found: dict[str, list[Part]] = {}
  for leaf in find_leaves(params, config, family):
    shape = leaf.published(leaf_value(params, leaf).shape)[1]
    for name in leaf.names.ravel().tolist():
      match = _IN_LAYER.fullmatch(name)
      whole, rows = places.get(match[2], (match[2], None)) if match else ("", None)
      published = f"{match[1]}{whole}{match[3]}" if match else name
      found.setdefault(published, []).append(Part(name, shape, rows))
  return {name: Published(_joined_shape(parts), tuple(parts)) for name, parts in found.items()}


_IN_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)(\.weight|\.bias)")


def _joined_shape(parts: Sequence[Part]) -> tuple[int, ...]:
  return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


RowTables = Mapping[str, Mapping[str, npt.NDArray[np.int64]]]


def row_tables(c: TransformerConfig, family: str) -> RowTables:
  """The published modules of a layer that combine modules of this package, or reorder their rows.

  Returns:
    Name of a published module → name of each of this package's modules in it → indices: row i of
    this package's module is row indices[i] of the published tensor. Every row of a published module
    is used.
  """
  tables: dict[str, Mapping[str, npt.NDArray[np.int64]]] = {}
  if FAMILIES[family].has_fused_gate:
    gate, up = np.split(np.arange(2 * c.mlp_width), 2)
    tables["mlp.gate_up_proj"] = {KERNELS["gate"]: gate, KERNELS["up"]: up}
  if FAMILIES[family].has_output_gate:
    of_heads = np.arange(2 * c.num_heads * c.head_dim).reshape(c.num_heads, 2, c.head_dim)
    query, gate = (of_heads[:, part].ravel() for part in range(2))
    tables[KERNELS["query"]] = {KERNELS["query"]: query, _OUTPUT_GATE: gate}
  if c.delta is not None:
    ends = np.cumsum(c.delta.channels)
    rows = np.split(np.arange(ends[-1]), ends[:-1])
    names = ("query", "key", "value")
    kernels = zip(names, rows, strict=True)
    tables["linear_attn.in_proj_qkv"] = {_DELTA_KERNELS[name]: part for name, part in kernels}
    tables["linear_attn.conv1d"] = {
      f"{_DELTA_KERNELS[name]}_conv": part for name, part in zip(names, rows, strict=True)
    }
  if FAMILIES[family].has_rotary_pairs:
    for name, heads in (("query", c.num_heads), ("key", c.num_kv_heads)):
      tables[KERNELS[name]] = {KERNELS[name]: _rows_of_pairs(c, heads)}
  return tables


def _rows_of_pairs(c: TransformerConfig, heads: int) -> npt.NDArray[np.int64]:
  """Indices that reorder rows of heads from rotated pairs (2i, 2i + 1) to (i, i + width/2)."""
  width = c.rotary_width or c.head_dim
  pairs = np.arange(width).reshape(-1, 2)
  in_head = np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(width, c.head_dim)])
  return (np.arange(heads)[:, None] * c.head_dim + in_head).ravel()


def split_parts(
  tensors: Mapping[str, Tensor], published: Mapping[str, Published]
) -> dict[str, Tensor]:
  """The tensors of single kernels and biases, by name, as views of published tensors."""
  return {
    part.name: tensors[name] if part.rows is None else _select(tensors[name], part)
    for name, (_, parts) in published.items()
    for part in parts
  }


def _select(tensor: Tensor, part: Part) -> Tensor:
  return dataclasses.replace(tensor, shape=part.shape, selected=part.rows)


def leaf_value(params: Params, leaf: Leaf) -> Any:
  """The value at a leaf of a tree with the structure of the parameters."""
  return functools.reduce(lambda tree, key: tree[key], leaf.path, params)


_OLD_TABLES = re.compile(r"(^|\.)rotary_emb\.")  # tensors that old releases of transformers saved
# Tensors outside of the text model: vision, audio, and layers that predict further tokens.
_OUTSIDE = re.compile(
  r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual)\."
  r"|^mtp\."
)
_PREFIXES = (  # prefixes of a text model within another model, or saved without its head
  (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
  (re.compile(r"^language_model\.lm_head\."), "lm_head."),
  (re.compile(r"^(?=(embed_tokens|layers|norm)\.)"), "model."),
)


def published_name(name: str, family: str) -> str:
  """Converts a tensor's usual name to its name in a family's checkpoints."""
  for ours, theirs in _MIXTRAL.items() if family == "mixtral" else ():
    name = name.replace(ours, theirs)
  return name


def published_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """Converts the shape of the tensor with this usual name to its shape in checkpoints."""
  return (shape[0], 1, *shape[1:]) if _CONVOLUTION.search(name) else shape


def rename_tensors(tensors: Mapping[str, Tensor], directory: Any) -> dict[str, Tensor]:
  """The tensors by their usual names, without unused tensors.

  If all experts of a layer are saved as one tensor, each expert gets a tensor of its own.

  Raises:
    ValueError: two tensors have the same usual name.
  """
  renamed: dict[str, Tensor] = {}
  for name, tensor in _split_experts(tensors):
    if _OLD_TABLES.search(name) or _OUTSIDE.search(name):
      continue
    usual_name = name
    for pattern, prefix in _PREFIXES:
      usual_name = pattern.sub(prefix, usual_name)
    if usual_name in renamed:
      other = renamed[usual_name].name
      raise ValueError(
        f"{directory}: {name!r} and {other!r} are names of the same tensor; keep one of the two"
      )
    if _CONVOLUTION.search(usual_name) and tensor.shape[1:2] == (1,):
      tensor = dataclasses.replace(tensor, shape=(tensor.shape[0], *tensor.shape[2:]))
    renamed[usual_name] = tensor
  return renamed


def outside_tensors(names: Iterable[str]) -> list[str]:
  """The names of tensors outside a checkpoint's text model; these tensors are not read."""
  return [name for name in names if _OUTSIDE.search(name)]


# Names of fused experts in transformers 5; save_pretrained(save_original_format=False) keeps them.
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def _split_experts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
  """Yields (usual name, tensor), with one tensor per expert of a mixture."""
  for name, tensor in tensors.items():
    match = _FUSED.fullmatch(name)
    if match is None or len(tensor.shape) != 3:
      yield _usual_expert(name), tensor
      continue
    experts, kernels = match[1], match[2].removesuffix("_proj").split("_")
    count, rows, columns = tensor.shape
    rows //= len(kernels)  # the gate's rows, then those of up
    for expert, (place, kernel) in itertools.product(range(count), enumerate(kernels)):
      part = dataclasses.replace(
        tensor, shape=(rows, columns), before=(expert,), first=place * rows
      )
      yield f"{experts}.{expert}.{kernel}_proj.weight", part


def _usual_expert(name: str) -> str:
  """Converts a name of Mixtral's form to the usual name; other names are unchanged."""
  for ours, theirs in _MIXTRAL.items() if _MIXTRAL["mlp."] in name else ():
    name = name.replace(theirs, ours)
  return name
