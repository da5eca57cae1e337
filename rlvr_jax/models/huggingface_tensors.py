"""The mapping between published tensors and parameters, for checkpoints of all families."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from rlvr_jax.models.safetensors import Tensor
from rlvr_jax.types import Params


class Leaf(NamedTuple):
  """A parameter and the names of its published tensors."""

  path: tuple[str, ...]
  names: list[str]  # one per layer if layers are stacked on the first axis
  stacked: bool
  transposed: bool  # kernels are [in, out] here, [out, in] in published tensors

  def published(self, index: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Splits a parameter's shape or index into its layers and that of each published tensor."""
    layers, rest = (index[0], index[1:]) if self.stacked else (None, index)
    return layers, rest[::-1] if self.transposed else rest


KERNELS = {  # our name → the published module's, the same in every family
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
# Gemma also has a norm after attention, and another name for the norm before the MLP.
_TWO_NORMS = {"mlp_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
  "post_attention_norm": "post_attention_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
  "post_mlp_norm": "post_feedforward_layernorm",
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def find_leaves(params: Params) -> list[Leaf]:
  """Finds the leaves of all parameters, in the order in which they are written.

  Raises:
    ValueError: a parameter that no published checkpoint has.
  """
  blocks = params["blocks"]
  norms = _NORMS | (_FOUR_NORMS if "post_mlp_norm" in blocks else _TWO_NORMS)
  layer_tensors: dict[tuple[str, ...], str] = {
    **{(name,): f"{theirs}.weight" for name, theirs in KERNELS.items()},
    **{(f"{name}_bias",): f"{theirs}.bias" for name, theirs in KERNELS.items()},
    **{(name, "scale"): f"{theirs}.weight" for name, theirs in norms.items()},
  }
  tensors: dict[tuple[str, ...], str] = {
    ("embedding",): EMBEDDING,
    ("final_norm", "scale"): "model.norm.weight",
    ("head_kernel",): HEAD,
  }
  leaves = []
  for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = tuple(key.key for key in keys)
    if path in tensors:
      leaves.append(Leaf(path, [tensors[path]], False, path == ("head_kernel",)))
      continue
    theirs = layer_tensors.get(path[1:]) if path[0] == "blocks" else None
    if theirs is None:
      raise ValueError(f"parameter {'/'.join(path)} is in no published checkpoint")
    names = [f"model.layers.{i}.{theirs}" for i in range(leaf.shape[0])]
    leaves.append(Leaf(path, names, True, path[1] in KERNELS))
  return sorted(leaves, key=lambda leaf: (leaf.stacked, leaf.path))


def published_shapes(params: Params) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor of these parameters' checkpoint, in the order of writing.

  Raises:
    ValueError: a parameter that no published checkpoint has.
  """
  return tensor_shapes(find_leaves(params), params)


def tensor_shapes(leaves: Iterable[Leaf], params: Params) -> dict[str, tuple[int, ...]]:
  """Name and shape of every published tensor of these leaves."""
  return {
    name: leaf.published(leaf_value(params, leaf).shape)[1]
    for leaf in leaves
    for name in leaf.names
  }


def leaf_value(params: Params, leaf: Leaf) -> Any:
  """The value at a leaf of a tree with the structure of the parameters."""
  return functools.reduce(lambda tree, key: tree[key], leaf.path, params)


# Tables that old releases of transformers saved, and tensors outside of the text model.
_UNUSED = re.compile(r"(^|\.)rotary_emb\.|^(model\.)?(vision_tower|multi_modal_projector)\.")
_PREFIXES = (  # of a text model within another model, and of one saved without its head
  (re.compile(r"^(language_model\.model|model\.language_model)\."), "model."),
  (re.compile(r"^language_model\.lm_head\."), "lm_head."),
  (re.compile(r"^(?=(embed_tokens|layers|norm)\.)"), "model."),
)


def rename_tensors(tensors: Mapping[str, Tensor], directory: Any) -> dict[str, Tensor]:
  """Gives tensors the names that they have in most checkpoints, and drops unused ones.

  Raises:
    ValueError: two names are those of the same tensor.
  """
  renamed: dict[str, Tensor] = {}
  for name, tensor in tensors.items():
    if _UNUSED.search(name):
      continue
    usual_name = name
    for pattern, prefix in _PREFIXES:
      usual_name = pattern.sub(prefix, usual_name)
    if usual_name in renamed:
      other = renamed[usual_name].name
      raise ValueError(f"{directory}: {name!r} and {other!r} name the same tensor")
    renamed[usual_name] = tensor
  return renamed
