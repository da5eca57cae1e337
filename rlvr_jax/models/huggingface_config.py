"""Reads the network's settings from config.json of Hugging Face checkpoint directories.

The settings are not read with `AutoConfig` of the `transformers` library, for three reasons. A core
install must read checkpoints without this library; its version 4 ignores the field rope_parameters
in files of version 5; and no version rejects settings that are not implemented here.
"""

from __future__ import annotations

import dataclasses
import math
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr_jax.models.huggingface_families import (
  ACTIVATIONS,
  FAMILIES,
  MIXTURES,
  MULTIMODAL,
  Family,
)
from rlvr_jax.models.rotary import PartialFrequencies, RopeScaling, Scaling, YarnScaling
from rlvr_jax.models.transformer import OF_COMPUTING, TransformerConfig
from rlvr_jax.ops.checks import check_between, check_choice, check_integer
from rlvr_jax.storage.folders import list_files, locate, read_json

CONFIG = "config.json"

# Fields that a multimodal model's config.json has outside of its text_config.
_OF_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# Fields of mixtures that are refused if they are set: shared experts without a gate, routing within
# groups of experts, other scores than a softmax, noise, and clipping.
_NOT_OF_MIXTURES = (
  *("shared_expert_intermediate_size", "num_shared_experts", "n_shared_experts"),
  *("n_group", "topk_group", "topk_method", "num_expert_group", "moe_layer_freq"),
  *("first_k_dense_replace", "routed_scaling_factor", "scoring_func", "router_bias"),
  *("moe_router_enable_expert_bias", "attention_sinks", "router_jitter_noise", "clip_qkv"),
)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
# Fields that some families' config.json lacks have their defaults there.
_PLAIN = {
  field.name: field.default
  for field in dataclasses.fields(TransformerConfig)
  if field.default is not dataclasses.MISSING and field.name not in OF_COMPUTING
}


def checkpoint_config(directory: str | os.PathLike[str], **overrides: Any) -> TransformerConfig:
  """The settings of the network that a directory's config.json describes.

  Args:
    directory: local or a URL such as gs://bucket/folder.
    overrides: fields of `TransformerConfig` that replace the values from the file, or the defaults
      of fields that are not read from the file, such as the dtypes.
  Raises:
    FileNotFoundError: the directory has no config.json.
    ValueError: the family, rotary embedding or activation is not implemented, weights are
      quantized, or values contradict one another.
  """
  if CONFIG not in list_files(directory):
    raise FileNotFoundError(
      f"{directory} has no {CONFIG}; name the folder of a checkpoint (to make the checkpoint of"
      " configs/pretrained.py, run: python -m rlvr_jax.models.pretrained)"
    )
  return TransformerConfig(**(config_fields(*read_config(directory)) | overrides))


def read_config(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
  """Reads config.json; returns its content, and its path for error messages."""
  system, folder = locate(directory)
  path = posixpath.join(folder, CONFIG)
  return read_json(system, path), path


def longest_text(directory: str | os.PathLike[str]) -> int | None:
  """The maximum length in tokens that config.json states, or None if it states none.

  Longer sequences can be computed, but the network was not trained on them.
  """
  published, path = read_config(directory)
  length = family_settings(published, path)[1].get("max_position_embeddings")
  scaling = config_fields(published, path)["rope_scaling"]
  if length is None or not isinstance(scaling, YarnScaling):
    return length
  return max(length, round(scaling.factor * scaling.original_length))


def config_fields(published: Mapping[str, Any], owner: str) -> dict[str, Any]:
  """Converts config.json's content to `TransformerConfig` fields; errors begin with `owner`."""
  name, settings = family_settings(published, owner)
  family = FAMILIES[name]
  c = {**family.defaults, **settings}
  if family.has_partial_rotation and c["partial_rotary_factor"] is None:
    c["partial_rotary_factor"] = family.defaults["partial_rotary_factor"]
  if c.get("num_key_value_heads") is None:
    c["num_key_value_heads"] = c["num_attention_heads"]
  if c.get("head_dim") is None:
    heads = _check_size(owner, "num_attention_heads", c["num_attention_heads"])
    c["head_dim"] = _check_size(owner, "hidden_size", c["hidden_size"]) // heads
  activation = c[family.activation]
  if family.has_query_scale and activation is None:
    activation = "gelu_pytorch_tanh"  # early files set only hidden_act; their models ignored it
  check_choice(owner, "hidden activation", activation, tuple(ACTIVATIONS))
  _check_implemented(family, c, owner)
  unrotated = _unrotated_layers(c, owner) if family.has_unrotated_layers else None
  layers = _sliding_layers(family, c, owner, unrotated)
  full, sliding = _ropes(family, c, owner)
  theta, scaling = _rope(full, c, owner)
  fields = {
    **_PLAIN,
    **family.fixed,
    **{ours: _check_size(owner, theirs, c[theirs]) for ours, theirs in family.sizes.items()},
    **{ours: bool(c.get(theirs)) for ours, theirs in family.flags.items()},
    **{ours: _soft_cap(c, theirs, owner) for ours, theirs in family.soft_caps.items()},
    "activation": ACTIVATIONS[activation],
    "norm_epsilon": _check_positive(owner, "rms_norm_eps", c["rms_norm_eps"]),
    "tied_head": bool(c["tie_word_embeddings"]),
    "rope_theta": theta,
    "rope_scaling": scaling,
    "sliding_window": _check_size(owner, "sliding_window", c["sliding_window"]) if layers else None,
    "sliding_layers": layers,
    "unrotated_layers": unrotated,
    "rotary_width": _rotary_width(family, full, c, owner),
  }
  if family.has_full_heads:
    fields["full_head_dim"], fields["full_kv_heads"] = _full_heads(c, layers, owner)
  if family.has_query_scale:
    scalar = _check_positive(owner, "query_pre_attn_scalar", c["query_pre_attn_scalar"])
    fields["query_scale"] = scalar**-0.5
  if layers and sliding is not None:
    near_theta = _sliding_theta(family, sliding, c, owner)
    same = family.sliding_theta == "" and near_theta == theta and scaling is None
    fields["sliding_rope_theta"] = None if same else near_theta
  if family.sliding == "delta":
    fields["delta_layers"] = _delta_layers(c, owner)
    if fields["delta_layers"] is None:
      raise ValueError(
        f"{owner}: no layer has the type linear_attention; a network without such layers is not"
        " supported"
      )
  if "decoder_sparse_step" in family.defaults:
    fields["sparse_layers"] = _sparse_layers(c, owner)
  return fields


def _check_implemented(family: Family, c: Mapping[str, Any], owner: str) -> None:
  """Raises ValueError if a setting has a value that this package does not implement."""
  # "vision" makes attention bidirectional only among the tokens of an image (Gemma 4).
  if c.get("use_bidirectional_attention") not in (None, False, "vision"):
    raise ValueError(
      f"{owner}: use_bidirectional_attention is set; only causal models are supported"
    )
  own = family.sizes.values()
  unread = [name for name in _NOT_OF_MIXTURES if name not in own and c.get(name)]
  if family.is_mixture and unread:
    raise ValueError(
      f"{owner}: {unread[0]} = {c[unread[0]]!r} is not implemented; the implemented mixtures"
      f" of experts route tokens by a plain softmax: {', '.join(MIXTURES)}"
    )
  for name, values in family.allowed.items():
    if c.get(name) is not None and c[name] not in values:
      raise ValueError(
        f"{owner}: {name} = {c[name]!r} is not implemented; networks of this family may only have"
        f" {' or '.join(map(repr, values))}"
      )


def _sparse_layers(c: Mapping[str, Any], owner: str) -> tuple[bool, ...] | None:
  """For each layer of a Qwen3-MoE, whether it has experts; None if all layers have them."""
  count = _check_size(owner, "num_hidden_layers", c["num_hidden_layers"])
  step = _check_size(owner, "decoder_sparse_step", c["decoder_sparse_step"])
  dense = c.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(i) is not int for i in dense):
    raise ValueError(f"{owner}: mlp_only_layers = {dense!r} is not a list of layer indices")
  layers = tuple((i + 1) % step == 0 and i not in dense for i in range(count))
  if not any(layers):
    raise ValueError(
      f"{owner}: with decoder_sparse_step = {step} and mlp_only_layers = {dense!r}, none of the"
      f" {count} layers has experts; for such a network, set model_type to 'qwen3'"
    )
  return None if all(layers) else layers


def family_settings(published: Mapping[str, Any], owner: str) -> tuple[str, dict[str, Any]]:
  """The family's name and the text model's settings; error messages begin with `owner`."""
  kind: Any = published.get("model_type")
  check_choice(owner, "model_type", kind, (*FAMILIES, *MULTIMODAL))
  family, known = MULTIMODAL.get(kind) or (kind, FAMILIES[kind].architectures)
  for architecture in published.get("architectures") or ():
    check_choice(owner, "architectures", architecture, known)
  quantized = [f for f in ("quantization_config", "compression_config") if published.get(f)]
  if quantized:
    raise ValueError(
      f"{owner}: {quantized[0]} is set; quantized weights are not supported. Load the original"
      " checkpoint, or convert this one to bfloat16"
    )
  if kind not in MULTIMODAL:
    return kind, _with_usual_number(kind, published, owner)
  text = published.get("text_config") or {}
  if not isinstance(text, Mapping) or text.get("model_type", family) != family:
    raise ValueError(f"{owner}: text_config = {text!r} is not the configuration of a {family}")
  outer = {name: published[name] for name in _OF_OUTER if published.get(name) is not None}
  tied = {"tie_word_embeddings": FAMILIES[family].defaults["tie_word_embeddings"]}
  return family, _with_usual_number(family, dict(text) | tied | outer, owner)


def _with_usual_number(family: str, published: Mapping[str, Any], owner: str) -> dict[str, Any]:
  """The settings, with the number of experts under the name that this family uses.

  Files have num_experts or num_local_experts.
  """
  if not FAMILIES[family].is_mixture:
    return dict(published)
  names = ("num_experts", "num_local_experts")
  numbers = {name: published[name] for name in names if published.get(name) is not None}
  if len(set(numbers.values())) > 1:
    given = ", but ".join(f"{n} = {v}" for n, v in numbers.items())
    raise ValueError(f"{owner}: {given}; both mean the number of experts, so remove the wrong one")
  settings = {name: value for name, value in published.items() if name not in names}
  if numbers:
    settings[FAMILIES[family].sizes["num_experts"]] = next(iter(numbers.values()))
  return settings


def _check_size(owner: str, name: str, value: Any) -> int:
  """Returns the value; raises ValueError unless it is an integer of at least 1."""
  check_integer(owner, name, value, low=1)
  return value


def _check_length(owner: str, name: str, values: Sequence[Any], count: int) -> None:
  """Raises ValueError unless `values`, a list with an entry per layer, has `count` entries."""
  if len(values) != count:
    raise ValueError(f"{owner}: {name} has {len(values)} entries, but num_hidden_layers = {count}")


def _check_positive(owner: str, name: str, value: Any) -> float:
  """Returns the value; raises ValueError unless it is a number above 0."""
  check_between(owner, name, value, low=0.0, open_low=True)
  return value


def _soft_cap(c: Mapping[str, Any], name: str, owner: str) -> float | None:
  return None if c.get(name) is None else _check_positive(owner, name, c[name])


def _unrotated_layers(c: Mapping[str, Any], owner: str) -> tuple[bool, ...] | None:
  """For each layer, whether it lacks a rotary embedding; None if no layer does."""
  count = _check_size(owner, "num_hidden_layers", c["num_hidden_layers"])
  rotates = c.get("no_rope_layers")
  if rotates is None:
    name = "no_rope_layer_interval"
    interval = _check_size(owner, name, c[name])
    rotates = [int((i + 1) % interval != 0) for i in range(count)]
  if not isinstance(rotates, list) or any(value not in (0, 1) for value in rotates):
    raise ValueError(
      f"{owner}: no_rope_layers = {rotates!r} is not a list of numbers: 0 for each layer"
      " without rotation, 1 for each other layer"
    )
  _check_length(owner, "no_rope_layers", rotates, count)
  return None if all(rotates) else tuple(not value for value in rotates)


def _sliding_layers(
  family: Family, c: Mapping[str, Any], owner: str, unrotated: tuple[bool, ...] | None
) -> tuple[bool, ...] | None:
  """For each layer, whether it uses sliding-window attention; None if no layer does."""
  count = _check_size(owner, "num_hidden_layers", c["num_hidden_layers"])
  if family.sliding in ("none", "delta"):
    return None
  is_used = c["use_sliding_window"] if "use_sliding_window" in family.defaults else True
  window = c["sliding_window"] if is_used else None
  if family.sliding == "all":
    return None if window is None else (True,) * count
  if c.get("layer_types") is not None:
    layers = _layers_of_type("sliding_attention", c["layer_types"], count, owner)
  elif family.has_unrotated_layers:
    layers = (window is not None and unrotated) or (False,) * count
  elif "max_window_layers" in family.defaults:
    layers = tuple(window is not None and i >= c["max_window_layers"] for i in range(count))
  else:
    period = _check_size(owner, "sliding_window_pattern", c["sliding_window_pattern"])
    layers = tuple((i + 1) % period != 0 for i in range(count))
  if family.has_full_heads:
    layers = (*layers[:-1], False)  # the last layer never slides, whatever its type
  if not any(layers):
    return None
  if window is None:
    raise ValueError(
      f"{owner}: some layers use a sliding window, but sliding_window is null or"
      " use_sliding_window is false"
    )
  return layers


def _full_heads(
  c: Mapping[str, Any], sliding: Sequence[bool] | None, owner: str
) -> tuple[int, int]:
  """Width of heads, and number of key/value heads, in the layers without a sliding window."""
  names = ("head_dim", "num_key_value_heads")
  by_layer = c.get("per_layer_config")
  found: Any
  if by_layer is None:
    own = c["num_global_key_value_heads"] if c["attention_k_eq_v"] else None
    found = {"head_dim": c["global_head_dim"], "num_key_value_heads": own}
  else:  # transformers 5.24 writes the sizes of each layer
    count = c["num_hidden_layers"]
    slides = sliding or (False,) * count
    found = by_layer.get(str(count - 1), {}) if isinstance(by_layer, Mapping) else None
    if by_layer != {str(i): found for i in range(count) if found and not slides[i]} or any(
      name not in names for name in found or ()
    ):
      raise ValueError(
        f"{owner}: per_layer_config = {by_layer!r}; it must give the same {' and '.join(names)} for"
        " every layer of full attention, and nothing for the other layers"
      )
  sizes = {name: c[name] if found.get(name) is None else found[name] for name in names}
  width, heads = (_check_size(owner, f"{name} of full layers", sizes[name]) for name in names)
  return width, heads


def _delta_layers(c: Mapping[str, Any], owner: str) -> tuple[bool, ...] | None:
  """For each layer, whether a gated DeltaNet replaces attention; None if no layer has one."""
  count = _check_size(owner, "num_hidden_layers", c["num_hidden_layers"])
  if c.get("layer_types") is not None:
    layers = _layers_of_type("linear_attention", c["layer_types"], count, owner)
  else:
    interval = _check_size(owner, "full_attention_interval", c["full_attention_interval"])
    layers = tuple((i + 1) % interval != 0 for i in range(count))
  return layers if any(layers) else None


def _layers_of_type(name: str, types: Sequence[Any], count: int, owner: str) -> tuple[bool, ...]:
  """For each layer, whether its type is `name`; the other layers must be of full attention."""
  for kind in types:
    check_choice(owner, "layer_types", kind, ("full_attention", name))
  _check_length(owner, "layer_types", types, count)
  return tuple(kind == name for kind in types)


def _ropes(
  family: Family, c: Mapping[str, Any], owner: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
  """Rotary settings of full layers and of sliding layers, in the form of rope_parameters.

  The second settings are None if all layers of this family share one rotary embedding.
  """
  new = c.get("rope_parameters") or family.defaults.get("rope_parameters") or {}
  old = c.get("rope_scaling") or {}
  for name, value in (("rope_parameters", new), ("rope_scaling", old)):
    if not isinstance(value, Mapping):
      raise ValueError(f"{owner}: {name} = {value!r} is not a JSON object")
  if family.sliding_theta is None:
    return {"rope_theta": c["rope_theta"]} | dict(new) | dict(old), None
  # rope_parameters without kinds, as transformers 5.12 writes an OLMo 3's, are those of full
  # layers.
  kinds = ("full_attention", "sliding_attention")
  by_default = family.defaults.get("rope_parameters")
  if by_default and (missing := [kind for kind in kinds if kind not in new]):
    raise ValueError(
      f"{owner}: rope_parameters has no {missing[0]}; in this family it must have settings for"
      f" {' and '.join(kinds)}"
    )
  per_kind = any(kind in new for kind in kinds) or family.sliding_theta != ""
  full, sliding = (new.get(kind) or {} for kind in kinds) if per_kind else (new, {})
  full = {"rope_theta": c["rope_theta"]} | dict(full) | dict(old)
  near_theta = c[family.sliding_theta] if family.sliding_theta else full["rope_theta"]
  return full, {"rope_theta": near_theta} | sliding


def _rotary_width(
  family: Family, rope: Mapping[str, Any], c: Mapping[str, Any], owner: str
) -> int | None:
  """Number of rotated entries of each head; None if all entries are rotated."""
  factor = _partial_factor(rope, c)
  if factor in (None, 1.0) or rope.get("rope_type") == "proportional":
    return None
  if not family.has_partial_rotation:
    raise ValueError(
      f"{owner}: partial_rotary_factor is set; in this family only the rotation of all entries of a"
      " head is supported"
    )
  check_between(owner, "partial_rotary_factor", factor, low=0.0, high=1.0, open_low=True)
  width = int(c["head_dim"] * factor)
  if width < 2 or width % 2:
    raise ValueError(
      f"{owner}: partial_rotary_factor = {factor!r} rotates {width} of head_dim = {c['head_dim']}"
      " entries; the number of rotated entries must be even and at least 2"
    )
  return width


def _partial_factor(rope: Mapping[str, Any], c: Mapping[str, Any]) -> Any:
  of_rope = rope.get("partial_rotary_factor")
  return c.get("partial_rotary_factor") if of_rope is None else of_rope


def _rope(
  rope: Mapping[str, Any], c: Mapping[str, Any], owner: str
) -> tuple[float, Scaling | None]:
  """θ and the scaling of the rotary embedding for one kind of layer."""
  number = lambda name: _check_positive(owner, f"rotary {name}", rope.get(name))
  kind = rope.get("rope_type", rope.get("type", "default"))
  check_choice(owner, "rope_type", kind, _ROPE_TYPES)
  theta = number("rope_theta")
  if kind == "default":
    return theta, None
  if kind == "proportional":
    part = _partial_factor(rope, c)
    check_between(owner, "partial_rotary_factor", part, low=0.0, high=1.0, open_low=True)
    check_choice(owner, "factor of proportional rotation", rope.get("factor", 1.0), (1.0,))
    return theta, PartialFrequencies(part=part)
  original = rope.get("original_max_position_embeddings", c["max_position_embeddings"])
  if kind == "yarn":
    original = _check_size(owner, "original_max_position_embeddings", original)
    factor = number("factor") if rope.get("factor") else c["max_position_embeddings"] / original
    return theta, YarnScaling(
      factor=factor,
      original_length=original,
      fast_rotations=rope.get("beta_fast") or 32,
      slow_rotations=rope.get("beta_slow") or 1,
      integer_indices=bool(rope.get("truncate", True)),
      attention_factor=_yarn_attention_factor(rope, factor),
    )
  if kind == "linear":
    return theta, RopeScaling(factor=number("factor"))
  return theta, RopeScaling(
    factor=number("factor"),
    low_frequency_factor=number("low_freq_factor"),
    high_frequency_factor=number("high_freq_factor"),
    original_length=_check_size(owner, "original_max_position_embeddings", original),
  )


def _sliding_theta(
  family: Family, rope: Mapping[str, Any], c: Mapping[str, Any], owner: str
) -> float:
  """θ of the rotary embedding of sliding layers."""
  _rotary_width(family, rope, c, owner)  # refuses a part of a head
  theta, scaling = _rope(rope, c, owner)
  if scaling is not None:
    raise ValueError(
      f"{owner}: rotary embeddings of sliding layers are scaled, which is not implemented; only"
      " rotary embeddings of full_attention may be scaled"
    )
  return theta


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
  mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
  if rope.get("attention_factor") is not None or not (mscale and mscale_all_dim) or factor <= 1:
    return rope.get("attention_factor")
  magnitude = lambda scale: 0.1 * scale * math.log(factor) + 1.0
  return magnitude(mscale) / magnitude(mscale_all_dim)
