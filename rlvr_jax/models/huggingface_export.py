"""config.json of an exported policy: the inverse of `huggingface_config`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from rlvr_jax.models.huggingface_config import config_fields, family_settings, read_config
from rlvr_jax.models.huggingface_families import ACTIVATIONS, FAMILIES, Family
from rlvr_jax.models.rotary import PartialFrequencies, RopeScaling, Scaling, YarnScaling
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.layers import DENSE, layers_in


def published_config(
  config: TransformerConfig, dtype: str, source: str | os.PathLike[str] | None
) -> dict[str, Any]:
  """The content of config.json, with the field names of transformers 5 and of transformers 4.

  Raises:
    ValueError: no family implements `config`.
  """
  name = _choose_family(config, source)
  family = FAMILIES[name]
  activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
  of_tables = {**family.sizes, **family.flags, **family.soft_caps}
  published = {
    **_inherited_fields(name, config, source),
    **_published_ropes(family, config),
    **{theirs: getattr(config, ours) for ours, theirs in of_tables.items()},
    "architectures": [family.architectures[0]],
    "model_type": name,
    "dtype": dtype,
    "torch_dtype": dtype,
    family.activation: activations[config.activation],
    "rms_norm_eps": config.norm_epsilon,
    "tie_word_embeddings": config.tied_head,
  }
  if family.has_full_heads:
    published["global_head_dim"] = config.full_head_dim
    published["num_global_key_value_heads"] = config.full_kv_heads
    published |= {name: values[0] for name, values in family.allowed.items()}
  if family.has_query_scale:
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    published["query_pre_attn_scalar"] = round(scale**-2)
  if "decoder_sparse_step" in family.defaults:
    published |= {
      "decoder_sparse_step": 1,
      "mlp_only_layers": layers_in(DENSE, config.kinds),
    }
  if family.has_partial_rotation:
    published["partial_rotary_factor"] = _rotated_part(config)
  if family.has_unrotated_layers:
    unrotated = config.unrotated_layers or (False,) * config.num_layers
    published["no_rope_layers"] = [int(not layer) for layer in unrotated]
  published |= _published_windows(family, config)
  _check_reads_back(published, config)
  return published


def _published_windows(family: Family, config: TransformerConfig) -> dict[str, Any]:
  """The fields of config.json on sliding windows, and on which layers have gated DeltaNets."""
  if family.sliding == "none":
    return {}
  if family.sliding == "delta":
    kinds = {"delta": "linear_attention", "attention": "full_attention"}
    return {"layer_types": [kinds[mixer] for mixer, _ in config.kinds]}
  sliding = config.sliding_layers or (False,) * config.num_layers
  fields: dict[str, Any] = {"sliding_window": config.sliding_window}
  if family.sliding == "layer_types":
    kinds = {True: "sliding_attention", False: "full_attention"}
    fields["layer_types"] = [kinds[slides] for slides in sliding]
    if "max_window_layers" in family.defaults:
      fields["max_window_layers"] = sliding.index(True) if any(sliding) else config.num_layers
  if "use_sliding_window" in family.defaults:
    fields["use_sliding_window"] = any(sliding)
  return fields


def _inherited_fields(
  family: str, config: TransformerConfig, source: str | os.PathLike[str] | None
) -> dict[str, Any]:
  """Fields that do not describe the network, copied from `source` or else the family's defaults."""
  base: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
  longest = FAMILIES[family].defaults["max_position_embeddings"]
  base |= {"use_cache": True, "max_position_embeddings": longest}
  if source is not None:
    content, path = read_config(source)
    settings = family_settings(content, path)[1]
    base |= {name: value for name, value in settings.items() if name not in _NOT_COPIED}
  elif isinstance(config.rope_scaling, RopeScaling | YarnScaling):
    extended = round(config.rope_scaling.factor * config.rope_scaling.original_length)
    base["max_position_embeddings"] = max(longest, extended)
  return base


_NOT_COPIED = (  # fields of the source's config.json
  "auto_map",
  "rope_theta",
  "rope_scaling",
  "rope_local_base_freq",
  "num_experts",
  "num_local_experts",
  "sliding_window_pattern",
  "_sliding_window_pattern",
  "no_rope_layer_interval",
  "per_layer_config",
  "transformers_version",
  "_name_or_path",
)


def _choose_family(config: TransformerConfig, source: str | os.PathLike[str] | None) -> str:
  """The source's family; without a source, the likeliest family for the network.

  Raises ValueError if the source's family cannot represent the network.
  """
  families = families_of(config)
  if source is None:
    return families[0]
  content, path = read_config(source)
  family = family_settings(content, path)[0]
  check_choice(path, "model_type", family, families)
  return family


def families_of(config: TransformerConfig) -> tuple[str, ...]:
  """The families that may implement `config`, likeliest first; not all settings are compared."""
  slides = config.sliding_layers or (False,)
  if config.full_head_dim is not None:
    return ("gemma4_text",)
  if config.delta is not None:
    return ("qwen3_5_text" if config.experts is None else "qwen3_5_moe_text",)
  if config.experts is not None:
    return ("qwen3_moe" if config.qk_norm else "olmoe" if config.joint_qk_norm else "mixtral",)
  if not config.pre_norm:
    return ("olmo3",) if any(slides) else ("olmo2", "olmo3")
  if config.post_norm and not config.zero_centered_norm:
    return ("glm4",)
  if config.post_norm:
    return ("gemma3_text" if config.qk_norm else "gemma2",)
  if config.qk_norm:
    return ("qwen3",)
  if any(config.unrotated_layers or ()):
    return ("smollm3",)
  if config.qkv_bias and not config.output_bias:
    return ("qwen2",)
  return ("mistral", "smollm3") if all(slides) else ("llama", "mistral", "smollm3")


def _rotated_part(config: TransformerConfig) -> float:
  """The fraction of a head's entries that are rotated."""
  return 1.0 if config.rotary_width is None else config.rotary_width / config.head_dim


def _published_ropes(family: Family, config: TransformerConfig) -> dict[str, Any]:
  """The fields of config.json for rotary embeddings, for transformers 5 and for transformers 4."""
  full = {"rope_theta": config.rope_theta} | _published_scaling(config.rope_scaling)
  if family.has_partial_rotation:
    full["partial_rotary_factor"] = _rotated_part(config)
  fields: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": full}
  # transformers 4 has no family with full heads.
  if config.rope_scaling is not None and not family.has_full_heads:
    fields["rope_scaling"] = _published_scaling(config.rope_scaling)
  if family.sliding_theta is not None:
    unset = 10_000.0 if family.sliding_theta else config.rope_theta
    sliding_theta = config.sliding_rope_theta or unset
    if family.sliding_theta:
      fields[family.sliding_theta] = sliding_theta
    fields["rope_parameters"] = {
      "full_attention": full,
      "sliding_attention": {"rope_theta": sliding_theta, "rope_type": "default"},
    }
  return fields


def _published_scaling(scaling: Scaling | None) -> dict[str, Any]:
  if scaling is None:
    return {"rope_type": "default"}
  if isinstance(scaling, PartialFrequencies):
    return {"rope_type": "proportional", "partial_rotary_factor": scaling.part}
  if isinstance(scaling, YarnScaling):
    fields = {
      "rope_type": "yarn",
      "factor": scaling.factor,
      "original_max_position_embeddings": scaling.original_length,
      "beta_fast": scaling.fast_rotations,
      "beta_slow": scaling.slow_rotations,
      "truncate": scaling.integer_indices,
    }
    if scaling.attention_factor is not None:
      fields["attention_factor"] = scaling.attention_factor
    return fields
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
  """Raises ValueError if the family's fields cannot represent `config`."""
  sliding = any(config.sliding_layers or ())
  ours = dataclasses.asdict(config) | dict(
    rope_scaling=config.rope_scaling,
    sliding_layers=config.sliding_layers if sliding else None,
    sliding_window=config.sliding_window if sliding else None,
    sliding_rope_theta=config.sliding_rope_theta if sliding else None,
    unrotated_layers=config.unrotated_layers if any(config.unrotated_layers or ()) else None,
    rotary_width=None if config.rotary_width == config.head_dim else config.rotary_width,
  )
  theirs = config_fields(published, "the exported config.json")
  if not layers_in(DENSE, config.kinds):
    ours |= dict(mlp_width=theirs["mlp_width"], sparse_layers=None)  # no layer has such an MLP
  for fields in (ours, theirs):
    fields["query_scale"] = fields["query_scale"] or config.head_dim**-0.5
  differing = {name: (ours[name], value) for name, value in theirs.items() if value != ours[name]}
  if differing:
    raise ValueError(
      f"no family among {', '.join(FAMILIES)} computes this network, so transformers cannot load"
      f" it; the nearest family, {published['model_type']}, differs in {differing} (this network's"
      " value, the family's value)"
    )
