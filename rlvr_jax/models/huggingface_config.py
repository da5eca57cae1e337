"""Reads the network's settings from config.json of Hugging Face checkpoint directories.

Facts about the families, including defaults, are those of the configuration classes of the
`transformers` library; a test compares them. They are not read with `AutoConfig`: a core install
must read checkpoints without it, version 4 ignores the rope_parameters of a file of version 5, and
neither version rejects settings that are not implemented here.
"""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_jax.models.rotary import RopeScaling, YarnScaling
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between, check_choice, check_integer
from rlvr_jax.storage.folders import list_files, locate, read_json

CONFIG = "config.json"

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
# Defaults by family of fields that a config.json may omit. Defaults that all families share are
# stated where the field is read.
DEFAULTS: dict[str, dict[str, Any]] = {
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
  "qwen3_moe": _QWEN
  | dict(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_key_value_heads=4,
    decoder_sparse_step=1,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=False,
  ),
  "olmoe": dict(
    vocab_size=50_304,
    hidden_size=2048,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=16,
    hidden_act="silu",
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=False,
  ),
  "mixtral": dict(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    hidden_act="silu",
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    tie_word_embeddings=False,
    sliding_window=None,
    num_experts=8,
    num_experts_per_tok=2,
  ),
}
ARCHITECTURES = {
  "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
  "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
  "llama": ("LlamaForCausalLM", "LlamaModel"),
  "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
  "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
  "gemma3": ("Gemma3ForConditionalGeneration", "Gemma3Model"),  # around a gemma3_text
  "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
  "olmoe": ("OlmoeForCausalLM", "OlmoeModel"),
  "mixtral": ("MixtralForCausalLM", "MixtralModel"),
}
MIXTURES = ("qwen3_moe", "olmoe", "mixtral")
ACTIVATIONS = {
  "silu": "silu",
  "swish": "silu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "gelu_fast": "gelu_tanh",
  "gelu": "gelu",
}
# Fields that a multimodal model's config.json has outside of its text_config.
_OF_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
# What a mixture may have that is not computed here, if the field is set: shared experts, routing
# within groups of experts, other scores than a softmax, noise, and clipping.
_NOT_OF_MIXTURES = (
  *("shared_expert_intermediate_size", "num_shared_experts", "n_shared_experts"),
  *("n_group", "topk_group", "topk_method", "num_expert_group", "moe_layer_freq"),
  *("first_k_dense_replace", "routed_scaling_factor", "scoring_func", "router_bias"),
  *("moe_router_enable_expert_bias", "attention_sinks", "router_jitter_noise", "clip_qkv"),
)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def checkpoint_config(directory: str | os.PathLike[str], **overrides: Any) -> TransformerConfig:
  """The settings of the network that a directory's config.json describes.

  Args:
    directory: local or a URL such as gs://bucket/folder.
    overrides: fields of `TransformerConfig` that replace those of the file, such as the dtypes,
      which are not read from the file.
  Raises:
    FileNotFoundError: the directory has no config.json.
    ValueError: the family, rotary embedding or activation is not implemented, weights are
      quantized, or values contradict one another.
  """
  if CONFIG not in list_files(directory):
    raise FileNotFoundError(f"{directory} has no {CONFIG}; name the folder of a checkpoint")
  return TransformerConfig(**(config_fields(*read_config(directory)) | overrides))


def read_config(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
  """Reads config.json; returns its content, and its path for messages."""
  system, folder = locate(directory)
  path = posixpath.join(folder, CONFIG)
  return read_json(system, path), path


def longest_text(directory: str | os.PathLike[str]) -> int | None:
  """The maximum length in tokens that config.json states; None if it states none.

  Longer sequences can be computed, but the network was not trained on them.
  """
  published, path = read_config(directory)
  length = family_settings(published, path)[1].get("max_position_embeddings")
  scaling = config_fields(published, path)["rope_scaling"]
  if length is None or not isinstance(scaling, YarnScaling):
    return length
  return max(length, round(scaling.factor * scaling.original_length))


def config_fields(published: Mapping[str, Any], owner: str) -> dict[str, Any]:
  """Converts config.json's content to `TransformerConfig` fields; messages begin with `owner`."""
  family, settings = family_settings(published, owner)
  c = DEFAULTS[family] | settings
  gemma = family.startswith("gemma")
  size = lambda name: _check_size(owner, name, c[name])
  heads = size("num_attention_heads")
  if c.get("num_key_value_heads") is None:
    c["num_key_value_heads"] = heads
  if c.get("head_dim") is None:
    c["head_dim"] = size("hidden_size") // heads
  activation = c["hidden_activation" if gemma else "hidden_act"]
  if gemma and activation is None:  # early files have only hidden_act, which models ignored
    activation = "gelu_pytorch_tanh"
  check_choice(owner, "hidden activation", activation, tuple(ACTIVATIONS))
  if gemma and c.get("use_bidirectional_attention"):
    raise ValueError(
      f"{owner}: use_bidirectional_attention is set; only causal models are supported"
    )
  layers = _sliding_layers(family, c, owner)
  ropes = _ropes(family, c, owner)
  theta, scaling = _rope(ropes[0], c, owner)
  has_sliding_theta = family == "gemma3_text" and layers
  sliding_theta = _sliding_theta(ropes[1], c, owner) if has_sliding_theta else None
  biased = family == "qwen2" or (family != "mixtral" and bool(c.get("attention_bias")))
  return _expert_fields(family, c, owner) | dict(
    vocab_size=size("vocab_size"),
    width=size("hidden_size"),
    num_layers=size("num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=size("num_key_value_heads"),
    head_dim=size("head_dim"),
    mlp_width=size("intermediate_size"),
    activation=ACTIVATIONS[activation],
    norm_epsilon=_check_positive(owner, "rms_norm_eps", c.get("rms_norm_eps", 1e-6)),
    rope_theta=theta,
    rope_scaling=scaling,
    tied_head=bool(c["tie_word_embeddings"]),
    qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
    joint_qk_norm=family == "olmoe",
    qkv_bias=biased,
    output_bias=biased and family != "qwen2",
    mlp_bias=family == "llama" and bool(c.get("mlp_bias")),
    query_scale=_check_positive(owner, "query_pre_attn_scalar", c["query_pre_attn_scalar"]) ** -0.5
    if gemma
    else None,
    # Gemma 3 configurations have the field, but its attention does not use it.
    attention_soft_cap=_soft_cap(c, "attn_logit_softcapping", owner)
    if family == "gemma2"
    else None,
    final_soft_cap=_soft_cap(c, "final_logit_softcapping", owner) if gemma else None,
    sliding_window=size("sliding_window") if layers else None,
    sliding_layers=layers,
    sliding_rope_theta=sliding_theta,
    scaled_embedding=gemma,
    zero_centered_norm=gemma,
    post_norm=gemma,
  )


def _expert_fields(family: str, c: Mapping[str, Any], owner: str) -> dict[str, Any]:
  """The fields of a mixture of experts."""
  if family not in MIXTURES:
    return dict(
      num_experts=0,
      experts_per_token=0,
      expert_width=0,
      sparse_layers=None,
      normalized_expert_weights=False,
    )
  if unread := [name for name in _NOT_OF_MIXTURES if c.get(name)]:
    raise ValueError(
      f"{owner}: {unread[0]} = {c[unread[0]]!r} is not implemented; mixtures are those of"
      f" {', '.join(MIXTURES)}, whose layers have routed experts alone, chosen by a plain softmax"
    )
  width = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
  return dict(
    num_experts=_check_size(owner, "num_experts", c["num_experts"]),
    experts_per_token=_check_size(owner, "num_experts_per_tok", c["num_experts_per_tok"]),
    expert_width=_check_size(owner, width, c[width]),
    sparse_layers=_sparse_layers(c, owner) if family == "qwen3_moe" else None,
    normalized_expert_weights=family == "mixtral" or bool(c["norm_topk_prob"]),
  )


def _sparse_layers(c: Mapping[str, Any], owner: str) -> tuple[bool, ...] | None:
  """Whether each layer of a Qwen3-MoE has experts; None if all have."""
  count = _check_size(owner, "num_hidden_layers", c["num_hidden_layers"])
  step = _check_size(owner, "decoder_sparse_step", c["decoder_sparse_step"])
  dense = c.get("mlp_only_layers") or []
  if not isinstance(dense, list) or any(type(i) is not int for i in dense):
    raise ValueError(f"{owner}: mlp_only_layers = {dense!r} is not a list of numbers of layers")
  layers = tuple((i + 1) % step == 0 and i not in dense for i in range(count))
  if not any(layers):
    raise ValueError(
      f"{owner}: decoder_sparse_step = {step} and mlp_only_layers = {dense!r} leave none of"
      f" {count} layers with experts; a network without them is a qwen3"
    )
  return None if all(layers) else layers


def family_settings(published: Mapping[str, Any], owner: str) -> tuple[str, dict[str, Any]]:
  """The family's name and the text model's settings; messages begin with `owner`."""
  kind: Any = published.get("model_type")
  check_choice(owner, "model_type", kind, tuple(ARCHITECTURES))
  for architecture in published.get("architectures") or ():
    check_choice(owner, "architectures", architecture, ARCHITECTURES[kind])
  quantized = [f for f in ("quantization_config", "compression_config") if published.get(f)]
  if quantized:
    raise ValueError(
      f"{owner}: {quantized[0]} is set; quantized weights are not supported. Load the original"
      " checkpoint, or convert this one to bfloat16"
    )
  if kind in MIXTURES:
    return kind, _with_usual_number(published, owner)
  if kind != "gemma3":
    return kind, dict(published)
  text = published.get("text_config") or {}
  if not isinstance(text, Mapping) or text.get("model_type", "gemma3_text") != "gemma3_text":
    raise ValueError(f"{owner}: text_config = {text!r} is not that of a gemma3_text")
  outer = {name: published[name] for name in _OF_OUTER if published.get(name) is not None}
  return "gemma3_text", dict(text) | {"tie_word_embeddings": True} | outer


def _with_usual_number(published: Mapping[str, Any], owner: str) -> dict[str, Any]:
  """A mixture's settings with the usual name of the number of experts, which has two."""
  settings = dict(published)
  other = settings.pop("num_local_experts", None)
  number = settings.setdefault("num_experts", other)
  if number is None:
    del settings["num_experts"]
  elif other not in (None, number):
    raise ValueError(f"{owner}: num_experts = {number}, but num_local_experts = {other}")
  return settings


def _check_size(owner: str, name: str, value: Any) -> int:
  """Returns the value; raises ValueError unless it is an integer of at least 1."""
  check_integer(owner, name, value, low=1)
  return value


def _check_positive(owner: str, name: str, value: Any) -> float:
  """Returns the value; raises ValueError unless it is a number above 0."""
  check_between(owner, name, value, low=0.0, open_low=True)
  return value


def _soft_cap(c: Mapping[str, Any], name: str, owner: str) -> float | None:
  return None if c.get(name) is None else _check_positive(owner, name, c[name])


def _sliding_layers(family: str, c: Mapping[str, Any], owner: str) -> tuple[bool, ...] | None:
  """Whether each layer uses sliding-window attention; None if none does."""
  count = _check_size(owner, "num_hidden_layers", c["num_hidden_layers"])
  if family in ("llama", "olmoe"):
    return None
  window = c["sliding_window"]
  if family.startswith("qwen") and not c["use_sliding_window"]:
    window = None
  if family in MIXTURES:  # their models know one kind of layer
    return None if window is None else (True,) * count
  kinds = c.get("layer_types")
  if kinds is None:
    slides: Callable[[int], bool]
    if family.startswith("qwen"):
      slides = lambda i: window is not None and i >= c["max_window_layers"]
    else:
      period = 2 if family == "gemma2" else c.get("sliding_window_pattern", 6)
      _check_size(owner, "sliding_window_pattern", period)
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
    raise ValueError(
      f"{owner}: some layers use a sliding window, but sliding_window is null or"
      " use_sliding_window is false"
    )
  return layers


def _ropes(family: str, c: Mapping[str, Any], owner: str) -> list[dict[str, Any]]:
  """Rotary settings, in the new style: of full layers and, for Gemma 3, of sliding layers."""
  new, old = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
  for name, value in (("rope_parameters", new), ("rope_scaling", old)):
    if not isinstance(value, Mapping):
      raise ValueError(f"{owner}: {name} = {value!r} is not a JSON object")
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
  """θ and the scaling of the rotary embedding for one kind of layer."""
  number = lambda name: _check_positive(owner, f"rotary {name}", rope.get(name))
  kind = rope.get("rope_type", rope.get("type", "default"))
  check_choice(owner, "rope_type", kind, _ROPE_TYPES)
  if rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
    raise ValueError(
      f"{owner}: partial_rotary_factor is set; only the rotation of full heads is supported"
    )
  theta = number("rope_theta")
  if kind == "default":
    return theta, None
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


def _sliding_theta(rope: Mapping[str, Any], c: Mapping[str, Any], owner: str) -> float:
  """θ of the rotary embedding of Gemma 3's sliding layers."""
  theta, scaling = _rope(rope, c, owner)
  if scaling is not None:
    raise ValueError(
      f"{owner}: rotary embeddings of sliding layers are scaled, which is not implemented; only"
      " those of full_attention can be"
    )
  return theta


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
  mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
  if rope.get("attention_factor") is not None or not (mscale and mscale_all_dim) or factor <= 1:
    return rope.get("attention_factor")
  magnitude = lambda scale: 0.1 * scale * math.log(factor) + 1.0
  return magnitude(mscale) / magnitude(mscale_all_dim)
