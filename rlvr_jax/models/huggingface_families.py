"""The families of networks in Hugging Face checkpoints, one entry each.

A family's entry serves both to read and to write checkpoints.
Facts about the families, including defaults, come from the configuration classes of the
`transformers` library; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# Fields of `TransformerConfig` → fields of config.json. All are integers ≥ 1.
_SIZES = {
  "vocab_size": "vocab_size",
  "width": "hidden_size",
  "num_layers": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "num_kv_heads": "num_key_value_heads",
  "head_dim": "head_dim",
  "mlp_width": "intermediate_size",
}
_EXPERT_SIZES = {
  "num_experts": "num_experts",
  "experts_per_token": "num_experts_per_tok",
  "expert_width": "intermediate_size",
}
_DELTA_SIZES = {
  "delta_key_heads": "linear_num_key_heads",
  "delta_value_heads": "linear_num_value_heads",
  "delta_key_dim": "linear_key_head_dim",
  "delta_value_dim": "linear_value_head_dim",
  "delta_num_taps": "linear_conv_kernel_dim",
}
# Fields of `TransformerConfig` that are true or false → fields of config.json.
_BIASES = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}

_TWO_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_BEHIND = {
  "post_attention_norm": "post_attention_layernorm",
  "post_mlp_norm": "post_feedforward_layernorm",
}
_FOUR_NORMS = _NORMS_BEHIND | {
  "attention_norm": "input_layernorm",
  "mlp_norm": "pre_feedforward_layernorm",
}


class Family(NamedTuple):
  """The settings that a family's networks share, and the config.json fields of other settings."""

  architectures: tuple[str, ...]  # names of the family's classes; exports name the first
  defaults: Mapping[str, Any]  # the values of fields that a config.json may omit
  fixed: Mapping[str, Any] = {}  # fields of `TransformerConfig` that all networks share
  allowed: Mapping[str, tuple[Any, ...]] = {}  # field → the values implemented here, besides null
  sizes: Mapping[str, str] = _SIZES
  flags: Mapping[str, str] = _BIASES
  soft_caps: Mapping[str, str] = {}  # fields with a number above 0, or null
  # Which layers have a sliding window. "none": no layer. "all": all layers, if a window is set.
  # "layer_types": as the field layer_types of config.json says. "delta": no layer; layer_types says
  # which layers have a gated DeltaNet and which have full attention.
  sliding: str = "layer_types"
  # The field of config.json with θ of sliding layers, which have another rotary embedding than full
  # layers. "": sliding layers have the θ of full layers, unscaled. None: all layers have the same
  # rotary embedding.
  sliding_theta: str | None = None
  norms: Mapping[str, str] = _TWO_NORMS  # our names → published names within a layer
  has_fused_gate: bool = False  # one tensor has the rows of gate, then the rows of up
  has_rotary_pairs: bool = False  # the rotation's pairs are (2i, 2i + 1), not (i, i + width/2)

  @property
  def is_mixture(self) -> bool:
    """Whether the networks have experts."""
    return "num_experts" in self.sizes

  @property
  def has_output_gate(self) -> bool:
    """Whether each head's query and the gate on its output are stored in one tensor."""
    return bool(self.fixed.get("attention_gate"))

  @property
  def has_full_heads(self) -> bool:
    """Whether heads of full layers may differ in number or size from those of sliding layers."""
    return "global_head_dim" in self.defaults

  @property
  def has_query_scale(self) -> bool:
    """Whether config.json states the factor on attention scores."""
    return "query_pre_attn_scalar" in self.defaults

  @property
  def has_partial_rotation(self) -> bool:
    """Whether config.json states the fraction of a head that is rotated."""
    return "partial_rotary_factor" in self.defaults

  @property
  def has_unrotated_layers(self) -> bool:
    """Whether config.json says which layers have rotary embeddings."""
    return "no_rope_layer_interval" in self.defaults

  @property
  def activation(self) -> str:
    """The field of config.json that names the gate's activation."""
    return "hidden_activation" if "hidden_activation" in self.defaults else "hidden_act"


_COMMON: dict[str, Any] = dict(rope_theta=10_000.0, rms_norm_eps=1e-6, tie_word_embeddings=False)
_LLAMA: dict[str, Any] = _COMMON | dict(
  vocab_size=32_000,
  hidden_size=4096,
  intermediate_size=11_008,
  num_hidden_layers=32,
  num_attention_heads=32,
  hidden_act="silu",
  max_position_embeddings=2048,
)
_QWEN: dict[str, Any] = _LLAMA | dict(
  vocab_size=151_936,
  intermediate_size=22_016,
  num_key_value_heads=32,
  max_position_embeddings=32_768,
  use_sliding_window=False,
  sliding_window=4096,
  max_window_layers=28,
)
_QWEN3_5: dict[str, Any] = _COMMON | dict(
  vocab_size=248_320,
  hidden_size=4096,
  intermediate_size=12_288,
  num_hidden_layers=32,
  num_attention_heads=16,
  num_key_value_heads=4,
  head_dim=256,
  hidden_act="silu",
  max_position_embeddings=32_768,
  partial_rotary_factor=0.25,
  full_attention_interval=4,
  linear_num_key_heads=16,
  linear_num_value_heads=32,
  linear_key_head_dim=128,
  linear_value_head_dim=128,
  linear_conv_kernel_dim=4,
)
_QWEN3_5_NETWORK = dict(qk_norm=True, zero_centered_norm=True, attention_gate=True)
_QWEN3_5_ALLOWED: dict[str, tuple[Any, ...]] = dict(
  attention_bias=(False,),
  attn_output_gate=(True,),
  output_gate_type=("swish", "silu"),
  mamba_ssm_dtype=("float32",),
)
_GEMMA: dict[str, Any] = _COMMON | dict(
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
_GEMMA4_ROPES = dict(
  full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1_000_000.0),
  sliding_attention=dict(rope_type="default", rope_theta=10_000.0),
)
_GEMMA_NETWORK = dict(scaled_embedding=True, zero_centered_norm=True, post_norm=True)
_OLMO: dict[str, Any] = _LLAMA | dict(vocab_size=50_304, rms_norm_eps=1e-5)
_OLMO_NETWORK = dict(joint_qk_norm=True, pre_norm=False, post_norm=True)

FAMILIES: dict[str, Family] = {
  "qwen2": Family(("Qwen2ForCausalLM", "Qwen2Model"), _QWEN, fixed=dict(qkv_bias=True), flags={}),
  "qwen3": Family(
    ("Qwen3ForCausalLM", "Qwen3Model"), _QWEN | dict(head_dim=128), fixed=dict(qk_norm=True)
  ),
  "llama": Family(
    ("LlamaForCausalLM", "LlamaModel"),
    _LLAMA,
    flags=_BIASES | {"mlp_bias": "mlp_bias"},
    sliding="none",
  ),
  "mistral": Family(
    ("MistralForCausalLM", "MistralModel"),
    _LLAMA
    | dict(
      intermediate_size=14_336,
      num_key_value_heads=8,
      max_position_embeddings=131_072,
      sliding_window=4096,
    ),
    flags={},
    sliding="all",
  ),
  "smollm3": Family(
    ("SmolLM3ForCausalLM", "SmolLM3Model"),
    _LLAMA
    | dict(
      vocab_size=128_256,
      hidden_size=2048,
      num_hidden_layers=36,
      num_attention_heads=16,
      num_key_value_heads=4,
      max_position_embeddings=32_768,
      rope_theta=2_000_000.0,
      tie_word_embeddings=True,
      use_sliding_window=False,
      sliding_window=None,
      no_rope_layer_interval=4,
    ),
    flags=_BIASES | {"mlp_bias": "mlp_bias"},
  ),
  "olmo2": Family(
    ("Olmo2ForCausalLM", "Olmo2Model"),
    _OLMO,
    fixed=_OLMO_NETWORK,
    norms=_NORMS_BEHIND,
    sliding="none",
  ),
  "olmo3": Family(
    ("Olmo3ForCausalLM", "Olmo3Model"),
    _OLMO | dict(rope_theta=500_000.0, sliding_window=4096, sliding_window_pattern=4),
    fixed=_OLMO_NETWORK,
    norms=_NORMS_BEHIND,
    sliding_theta="",
  ),
  "glm4": Family(
    ("Glm4ForCausalLM", "Glm4Model"),
    _LLAMA
    | dict(
      vocab_size=151_552,
      intermediate_size=13_696,
      num_hidden_layers=40,
      num_key_value_heads=2,
      head_dim=128,
      max_position_embeddings=131_072,
      rms_norm_eps=1.5625e-7,
      attention_bias=True,
      partial_rotary_factor=0.5,
    ),
    fixed=dict(post_norm=True),
    flags={"qkv_bias": "attention_bias"},
    sliding="none",
    norms={
      "attention_norm": "input_layernorm",
      "post_attention_norm": "post_self_attn_layernorm",
      "mlp_norm": "post_attention_layernorm",
      "post_mlp_norm": "post_mlp_layernorm",
    },
    has_fused_gate=True,
    has_rotary_pairs=True,
  ),
  "gemma2": Family(
    ("Gemma2ForCausalLM", "Gemma2Model"),
    _GEMMA
    | dict(
      vocab_size=256_000,
      max_position_embeddings=8192,
      attn_logit_softcapping=50.0,
      final_logit_softcapping=30.0,
      sliding_window_pattern=2,
    ),
    fixed=_GEMMA_NETWORK,
    norms=_FOUR_NORMS,
    soft_caps={
      "attention_soft_cap": "attn_logit_softcapping",
      "final_soft_cap": "final_logit_softcapping",
    },
  ),
  "gemma3_text": Family(
    ("Gemma3ForCausalLM", "Gemma3TextModel"),
    _GEMMA
    | dict(
      vocab_size=262_208,
      max_position_embeddings=131_072,
      rope_theta=1_000_000.0,
      rope_local_base_freq=10_000.0,
      sliding_window_pattern=6,
    ),
    fixed=_GEMMA_NETWORK | dict(qk_norm=True),
    norms=_FOUR_NORMS,
    sliding_theta="rope_local_base_freq",
    # Its config.json also has a cap on attention scores, which its networks do not apply.
    soft_caps={"final_soft_cap": "final_logit_softcapping"},
  ),
  "gemma4_text": Family(
    ("Gemma4ForCausalLM", "Gemma4TextModel"),
    {name: value for name, value in _GEMMA.items() if name != "query_pre_attn_scalar"}
    | dict(
      vocab_size=262_144,
      num_hidden_layers=30,
      max_position_embeddings=131_072,
      rope_parameters=_GEMMA4_ROPES,
      sliding_window=512,
      sliding_window_pattern=6,
      global_head_dim=512,
      num_global_key_value_heads=None,
      attention_k_eq_v=False,
      hidden_size_per_layer_input=256,
    ),
    fixed=dict(
      scaled_embedding=True,
      post_norm=True,
      qk_norm=True,
      value_norm=True,
      layer_scale=True,
      query_scale=1.0,
    ),
    # Not implemented: embeddings per layer, keys and values shared with earlier layers, and experts
    # beside the MLP.
    allowed=dict(
      hidden_size_per_layer_input=(0,), num_kv_shared_layers=(0,), enable_moe_block=(False,)
    ),
    flags=_BIASES | {"full_keys_as_values": "attention_k_eq_v"},
    norms=_FOUR_NORMS,
    sliding_theta="",
    soft_caps={"final_soft_cap": "final_logit_softcapping"},
  ),
  "qwen3_moe": Family(
    ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    _QWEN
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
    fixed=dict(qk_norm=True),
    sizes=_SIZES | _EXPERT_SIZES | {"expert_width": "moe_intermediate_size"},
    flags=_BIASES | {"normalized_expert_weights": "norm_topk_prob"},
    sliding="all",
  ),
  "qwen3_5_text": Family(
    ("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    _QWEN3_5,
    fixed=_QWEN3_5_NETWORK,
    allowed=_QWEN3_5_ALLOWED,
    sizes=_SIZES | _DELTA_SIZES,
    flags={},
    sliding="delta",
  ),
  "qwen3_5_moe_text": Family(
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
    _QWEN3_5
    | dict(
      hidden_size=2048,
      num_hidden_layers=40,
      num_key_value_heads=2,
      moe_intermediate_size=512,
      shared_expert_intermediate_size=512,
      num_experts=256,
      num_experts_per_tok=8,
    ),
    fixed=_QWEN3_5_NETWORK | dict(normalized_expert_weights=True),
    allowed=_QWEN3_5_ALLOWED
    | dict(norm_topk_prob=(True,), mlp_only_layers=([],), decoder_sparse_step=(1,)),
    flags={},
    sizes=_SIZES
    | _DELTA_SIZES
    | _EXPERT_SIZES
    | {
      "mlp_width": "moe_intermediate_size",  # no layer has such an MLP
      "expert_width": "moe_intermediate_size",
      "shared_expert_width": "shared_expert_intermediate_size",
    },
    sliding="delta",
  ),
  "olmoe": Family(
    ("OlmoeForCausalLM", "OlmoeModel"),
    _LLAMA
    | dict(
      vocab_size=50_304,
      hidden_size=2048,
      intermediate_size=2048,
      num_hidden_layers=16,
      num_attention_heads=16,
      max_position_embeddings=4096,
      rms_norm_eps=1e-5,
      num_experts=64,
      num_experts_per_tok=8,
      norm_topk_prob=False,
    ),
    fixed=dict(joint_qk_norm=True),
    sizes=_SIZES | _EXPERT_SIZES,
    flags=_BIASES | {"normalized_expert_weights": "norm_topk_prob"},
    sliding="none",
  ),
  "mixtral": Family(
    ("MixtralForCausalLM", "MixtralModel"),
    _LLAMA
    | dict(
      intermediate_size=14_336,
      num_key_value_heads=8,
      max_position_embeddings=131_072,
      rms_norm_eps=1e-5,
      rope_theta=1_000_000.0,
      sliding_window=None,
      num_local_experts=8,
      num_experts_per_tok=2,
    ),
    fixed=dict(normalized_expert_weights=True),
    sizes=_SIZES | _EXPERT_SIZES | {"num_experts": "num_local_experts"},
    flags={},
    sliding="all",
  ),
}
# Multimodal model → the family of its text model, and the names of its classes.
MULTIMODAL: dict[str, tuple[str, tuple[str, ...]]] = {
  "gemma4": ("gemma4_text", ("Gemma4ForConditionalGeneration", "Gemma4Model")),
  "gemma3": ("gemma3_text", ("Gemma3ForConditionalGeneration", "Gemma3Model")),
  "qwen3_5": ("qwen3_5_text", ("Qwen3_5ForConditionalGeneration", "Qwen3_5Model")),
  "qwen3_5_moe": ("qwen3_5_moe_text", ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeModel")),
}
MIXTURES = tuple(name for name, family in FAMILIES.items() if family.is_mixture)
ACTIVATIONS = {
  "silu": "silu",
  "swish": "silu",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_new": "gelu_tanh",
  "gelu_fast": "gelu_tanh",
  "gelu": "gelu",
}
