"""config.json of an exported policy: the inverse of `huggingface_config`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from rlvr_jax.models.huggingface_config import (
  ACTIVATIONS,
  ARCHITECTURES,
  DEFAULTS,
  MIXTURES,
  config_fields,
  family_settings,
  read_config,
)
from rlvr_jax.models.rotary import RopeScaling, YarnScaling
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.layers import layers_in


def published_config(
  config: TransformerConfig, dtype: str, source: str | os.PathLike[str] | None
) -> dict[str, Any]:
  """The content of config.json, for transformers 5 and, under the older names as well, 4.

  Raises:
    ValueError: no family implements `config`.
  """
  family = _choose_family(config)
  gemma = family.startswith("gemma")
  sliding = config.sliding_layers or (False,) * config.num_layers
  activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
  published = (
    _inherited_fields(family, config, source)
    | _published_ropes(family, config)
    | {
      "architectures": [ARCHITECTURES[family][0]],
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
  )
  if family not in ("qwen2", "mixtral"):
    published["attention_bias"] = config.qkv_bias
  if family == "llama":
    published["mlp_bias"] = config.mlp_bias
  elif family in MIXTURES:
    published |= _published_experts(family, config)
  else:
    published["layer_types"] = [
      "sliding_attention" if slides else "full_attention" for slides in sliding
    ]
    published["sliding_window"] = config.sliding_window
  if family in ("qwen2", "qwen3", "qwen3_moe"):
    published["use_sliding_window"] = any(sliding)
  if family in ("qwen2", "qwen3"):
    published["max_window_layers"] = sliding.index(True) if any(sliding) else config.num_layers
  if gemma:
    scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
    published["query_pre_attn_scalar"] = round(scale**-2)
    published["attn_logit_softcapping"] = config.attention_soft_cap if family == "gemma2" else None
    published["final_logit_softcapping"] = config.final_soft_cap
  _check_reads_back(published, config)
  return published


def _inherited_fields(
  family: str, config: TransformerConfig, source: str | os.PathLike[str] | None
) -> dict[str, Any]:
  """Fields that do not describe the network: the source's, or the family's defaults."""
  base: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
  longest = DEFAULTS[family]["max_position_embeddings"]
  base |= {"use_cache": True, "max_position_embeddings": longest}
  if source is not None:
    content, path = read_config(source)
    source_family, settings = family_settings(content, path)
    check_choice(path, "model_type", source_family, (family,))
    base |= {name: value for name, value in settings.items() if name not in _NOT_COPIED}
  elif config.rope_scaling is not None:
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
  "transformers_version",
  "_name_or_path",
)


def _published_experts(family: str, config: TransformerConfig) -> dict[str, Any]:
  """Fields of a mixture, and the window of all its layers."""
  number = "num_local_experts" if family == "mixtral" else "num_experts"
  fields: dict[str, Any] = {
    number: config.num_experts,
    "num_experts_per_tok": config.experts_per_token,
    "intermediate_size": config.expert_width,
  }
  if family != "olmoe":
    fields["sliding_window"] = config.sliding_window
  if family != "mixtral":
    fields["norm_topk_prob"] = config.normalized_expert_weights
  if family == "qwen3_moe":
    fields["moe_intermediate_size"] = config.expert_width
    fields |= {"intermediate_size": config.mlp_width, "decoder_sparse_step": 1}
    fields["mlp_only_layers"] = layers_in("dense", config.sparse)
  return fields


def _choose_family(config: TransformerConfig) -> str:
  if config.experts is not None:
    return "qwen3_moe" if config.qk_norm else "olmoe" if config.joint_qk_norm else "mixtral"
  if config.post_norm:
    return "gemma3_text" if config.qk_norm else "gemma2"
  if config.qk_norm:
    return "qwen3"
  return "qwen2" if config.qkv_bias and not config.output_bias else "llama"


def _published_ropes(family: str, config: TransformerConfig) -> dict[str, Any]:
  """Fields for the rotary embeddings, in the new style and the old."""
  full = {"rope_theta": config.rope_theta} | _published_scaling(config.rope_scaling)
  fields: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": full}
  if config.rope_scaling is not None:
    fields["rope_scaling"] = _published_scaling(config.rope_scaling)
  if family == "gemma3_text":
    sliding_theta = config.sliding_rope_theta or 10_000.0  # unused without sliding layers
    fields["rope_local_base_freq"] = sliding_theta
    fields["rope_parameters"] = {
      "full_attention": full,
      "sliding_attention": {"rope_theta": sliding_theta, "rope_type": "default"},
    }
  return fields


def _published_scaling(scaling: RopeScaling | YarnScaling | None) -> dict[str, Any]:
  if scaling is None:
    return {"rope_type": "default"}
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
  )
  theirs = config_fields(published, "the exported config.json")
  if all(config.sparse):
    ours |= dict(mlp_width=theirs["mlp_width"], sparse_layers=None)  # no layer has such an MLP
  for fields in (ours, theirs):
    fields["query_scale"] = fields["query_scale"] or config.head_dim**-0.5
  differing = {name: (ours[name], value) for name, value in theirs.items() if value != ours[name]}
  if differing:
    raise ValueError(
      f"no family among {', '.join(DEFAULTS)} computes this network, so transformers cannot load"
      f" it; the nearest, {published['model_type']}, differs in {differing} (ours, its)"
    )
