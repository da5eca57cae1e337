"""Model shapes by name: small shapes for a laptop, and the shapes of published models.

Source of the published shapes: the models' own `config.json` files.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rlvr_jax.models.huggingface_config import checkpoint_config
from rlvr_jax.models.rotary import PartialFrequencies, RopeScaling, YarnScaling
from rlvr_jax.models.transformer import OF_COMPUTING, TransformerConfig

_SMALL = dict(activation="silu", qk_norm=True, rope_theta=10_000.0, tied_head=True)
_QWEN2 = dict(qkv_bias=True, rope_theta=1_000_000.0, norm_epsilon=1e-6, head_dim=128)
_SHORT = dict(rope_theta=10_000.0)  # Qwen2.5-Math, and models distilled into it
_QWEN3 = dict(
  qk_norm=True, rope_theta=1_000_000.0, norm_epsilon=1e-6, head_dim=128, vocab_size=151_936
)
_QWEN3_5 = dict(
  qk_norm=True,
  zero_centered_norm=True,
  attention_gate=True,
  rope_theta=10_000_000.0,
  rotary_width=64,
  norm_epsilon=1e-6,
  delta_key_heads=16,
  delta_value_heads=32,
  delta_key_dim=128,
  delta_value_dim=128,
  delta_num_taps=4,
)
_LLAMA3 = dict(
  vocab_size=128_256,
  rope_theta=500_000.0,
  norm_epsilon=1e-5,
  rope_scaling=RopeScaling(
    factor=32.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
  ),
)
_OLMO = dict(
  joint_qk_norm=True,
  pre_norm=False,
  post_norm=True,
  norm_epsilon=1e-6,
  rope_theta=500_000.0,
  tied_head=False,
)
_GEMMA = dict(
  activation="gelu_tanh",
  norm_epsilon=1e-6,
  scaled_embedding=True,
  zero_centered_norm=True,
  post_norm=True,
  tied_head=True,
)

# For accelerators: computes in bfloat16 and saves matrix products only; parameters are float32.
_LARGE = dict(compute_dtype="bfloat16", remat="dots")


def _shape(vocab_size, width, num_layers, num_heads, num_kv_heads, mlp_width, **rest):
  return dict(
    vocab_size=vocab_size,
    width=width,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    mlp_width=mlp_width,
    **rest,
  )


def _mixture(num_experts, experts_per_token, expert_width):
  return dict(
    num_experts=num_experts, experts_per_token=experts_per_token, expert_width=expert_width
  )


_PRESETS: dict[str, dict[str, Any]] = {
  # From scratch over bytes; 264 = 256 bytes and the special tokens, rounded up.
  "tiny": dict(_shape(264, 128, 4, 4, 2, 384, head_dim=32, unroll_layers=4), **_SMALL),
  "small": dict(_shape(264, 256, 4, 4, 2, 768, head_dim=64, unroll_layers=4), **_SMALL),
  "base": dict(_shape(264, 512, 8, 8, 4, 1536, head_dim=64), **_SMALL),
  "qwen2.5_0.5b": dict(
    _QWEN2 | _LARGE | _shape(151_936, 896, 24, 14, 2, 4864, head_dim=64), tied_head=True
  ),
  "qwen2.5_1.5b": dict(_QWEN2 | _LARGE | _shape(151_936, 1536, 28, 12, 2, 8960), tied_head=True),
  "qwen2.5_7b": dict(_QWEN2 | _LARGE | _shape(152_064, 3584, 28, 28, 4, 18_944), tied_head=False),
  "qwen2.5_math_7b": dict(
    _QWEN2 | _LARGE | _shape(152_064, 3584, 28, 28, 4, 18_944) | _SHORT, tied_head=False
  ),
  "deepseek_r1_distill_qwen_7b": dict(
    _QWEN2 | _LARGE | _shape(152_064, 3584, 28, 28, 4, 18_944) | _SHORT, tied_head=False
  ),
  "qwen3_4b": dict(_QWEN3 | _LARGE | _shape(151_936, 2560, 36, 32, 8, 9728), tied_head=True),
  "qwen3_8b": dict(_QWEN3 | _LARGE | _shape(151_936, 4096, 36, 32, 8, 12_288), tied_head=False),
  "qwen3_30b_a3b": dict(
    _QWEN3 | _LARGE | _shape(151_936, 2048, 48, 32, 4, 6144) | _mixture(128, 8, 768),
    normalized_expert_weights=True,
    tied_head=False,
  ),
  "qwen3.5_4b": dict(
    _QWEN3_5 | _LARGE | _shape(248_320, 2560, 32, 16, 4, 9216, head_dim=256),
    delta_layers=(True, True, True, False) * 8,
    tied_head=True,
  ),
  "qwen3.5_35b_a3b": dict(
    _QWEN3_5 | _LARGE | _shape(248_320, 2048, 40, 16, 2, 512, head_dim=256) | _mixture(256, 8, 512),
    delta_layers=(True, True, True, False) * 10,
    shared_expert_width=512,
    normalized_expert_weights=True,
    tied_head=False,
  ),
  "olmoe_1b_7b": dict(
    _LARGE | _shape(50_304, 2048, 16, 16, 16, 1024, head_dim=128) | _mixture(64, 8, 1024),
    joint_qk_norm=True,
    norm_epsilon=1e-5,
    tied_head=False,
  ),
  "mixtral_8x7b": dict(
    _LARGE | _shape(32_000, 4096, 32, 32, 8, 14_336, head_dim=128) | _mixture(8, 2, 14_336),
    normalized_expert_weights=True,
    norm_epsilon=1e-5,
    rope_theta=1_000_000.0,
    tied_head=False,
  ),
  "llama3.2_1b": dict(
    _LLAMA3 | _LARGE | _shape(128_256, 2048, 16, 32, 8, 8192, head_dim=64), tied_head=True
  ),
  "llama3.2_3b": dict(
    _LLAMA3 | _LARGE | _shape(128_256, 3072, 28, 24, 8, 8192, head_dim=128), tied_head=True
  ),
  "mistral_7b": dict(  # v0.3
    _LARGE | _shape(32_768, 4096, 32, 32, 8, 14_336, head_dim=128),
    norm_epsilon=1e-5,
    rope_theta=1_000_000.0,
    tied_head=False,
  ),
  "olmo2_1b": _OLMO | _LARGE | _shape(100_352, 2048, 16, 16, 16, 8192, head_dim=128),
  "olmo3_7b": _OLMO
  | _LARGE
  | _shape(100_278, 4096, 32, 32, 32, 11_008, head_dim=128)
  | dict(
    rope_scaling=YarnScaling(factor=8.0, original_length=8192, attention_factor=1.2079441541679836),
    sliding_rope_theta=500_000.0,
    sliding_window=4096,
    sliding_layers=(True, True, True, False) * 8,
  ),
  "smollm3_3b": dict(
    _LARGE | _shape(128_256, 2048, 36, 16, 4, 11_008, head_dim=128),
    rope_theta=5_000_000.0,
    unrotated_layers=(False, False, False, True) * 9,
    tied_head=True,
  ),
  "glm_z1_9b": dict(
    _LARGE | _shape(151_552, 4096, 40, 32, 2, 13_696, head_dim=128),
    qkv_bias=True,
    post_norm=True,
    norm_epsilon=1e-5,
    rotary_width=64,
    tied_head=False,
  ),
  "gemma2_2b": _GEMMA
  | _LARGE
  | _shape(256_000, 2304, 26, 8, 4, 9216, head_dim=256)
  | dict(
    attention_soft_cap=50.0,
    final_soft_cap=30.0,
    sliding_window=4096,
    sliding_layers=(True, False) * 13,
    query_scale=256**-0.5,
  ),
  "gemma3_1b": _GEMMA
  | _LARGE
  | _shape(262_144, 1152, 26, 4, 1, 6912, head_dim=256)
  | dict(
    qk_norm=True,
    rope_theta=1_000_000.0,
    sliding_rope_theta=10_000.0,
    sliding_window=512,
    sliding_layers=((True,) * 5 + (False,)) * 4 + (True, True),
    query_scale=256**-0.5,
  ),
  "gemma4_31b": _GEMMA
  | _LARGE
  | _shape(262_144, 5376, 60, 32, 16, 21_504, head_dim=256)
  | dict(
    zero_centered_norm=False,
    qk_norm=True,
    value_norm=True,
    layer_scale=True,
    full_head_dim=512,
    full_kv_heads=4,
    full_keys_as_values=True,
    rope_theta=1_000_000.0,
    rope_scaling=PartialFrequencies(part=0.25),
    sliding_rope_theta=10_000.0,
    sliding_window=1024,
    sliding_layers=((True,) * 5 + (False,)) * 10,
    query_scale=1.0,
    final_soft_cap=30.0,
  ),
}


# Saving all results of a layer ("none") would take twice the memory, and reading them is no faster
# than computing them again.
_REMAT_OF_CHECKPOINTS = "dots"


def preset(name: str, **overrides: Any) -> TransformerConfig:
  """The settings of a named model, with some fields replaced.

  Raises:
    ValueError: the name or a field is unknown; the message suggests similar names.
  """
  if name not in _PRESETS:
    similar = difflib.get_close_matches(name, _PRESETS) or sorted(_PRESETS)
    raise ValueError(f"config.model.preset = {name!r} is unknown; did you mean one of {similar}?")
  check_overrides(overrides)
  return TransformerConfig(**{**_PRESETS[name], **overrides})


def check_overrides(overrides: Iterable[str]) -> None:
  """Checks the names of the fields that overrides replace.

  Raises:
    ValueError: a network has no such field; the message suggests similar names.
  """
  fields = [field.name for field in dataclasses.fields(TransformerConfig)]
  for field in overrides:
    if field not in fields:
      similar = difflib.get_close_matches(field, fields) or fields
      raise ValueError(
        f"config.model.overrides.{field} is not a field; did you mean one of {similar}?"
      )


def given_overrides(model: Mapping[str, Any]) -> dict[str, Any]:
  """The fields that `model["overrides"]` sets, without fields of `OF_COMPUTING` that are None."""
  overrides = dict(model["overrides"])
  return {k: v for k, v in overrides.items() if v is not None or k not in OF_COMPUTING}


def model_settings(model: Mapping[str, Any]) -> TransformerConfig:
  """The settings of the network that a configuration's `model` section describes.

  Args:
    model: `preset` names a shape; "" takes the checkpoint's shape. `checkpoint` is a folder in
      Hugging Face's layout; "" is none. `overrides` replaces fields of the preset or checkpoint.
  Raises:
    ValueError: a name or field is unknown, a field's value is not allowed, the checkpoint cannot be
      read, preset and checkpoint have different shapes, or `overrides` without a preset would
      change what the checkpoint computes.
  """
  name, checkpoint, overrides = model["preset"], model["checkpoint"], given_overrides(model)
  if not checkpoint:
    return preset(name, **overrides)
  check_overrides(overrides)
  of_computing = {field: value for field, value in overrides.items() if field in OF_COMPUTING}
  if not name and len(of_computing) < len(overrides):
    raise ValueError(
      f"config.model.overrides = {overrides} would change what config.model.checkpoint ="
      f" {checkpoint!r} computes; with a checkpoint only {list(OF_COMPUTING)} may be set"
    )
  try:
    of_checkpoint = checkpoint_config(checkpoint, **{"remat": _REMAT_OF_CHECKPOINTS} | of_computing)
  except (OSError, ValueError) as error:
    raise ValueError(f"config.model.checkpoint = {checkpoint!r}: {error}") from error
  if not name:
    return of_checkpoint
  of_preset = preset(name, **overrides)
  fields = [field.name for field in dataclasses.fields(TransformerConfig)]
  differing = {
    field: (getattr(of_preset, field), getattr(of_checkpoint, field))
    for field in fields
    if field not in OF_COMPUTING and getattr(of_preset, field) != getattr(of_checkpoint, field)
  }
  if differing:
    raise ValueError(
      f"config.model.preset = {name!r} has another shape than config.model.checkpoint ="
      f" {checkpoint!r}: {differing} (preset, checkpoint). Set config.model.preset = '' to take the"
      " checkpoint's shape, or name another preset or checkpoint"
    )
  return of_preset
