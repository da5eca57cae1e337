"""Checkpoint directories: their settings, their weights onto meshes, and back out."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import checkpoints
from oracles.checkpoints import golden_folders, old_style
from safetensors.numpy import load_file, save_file

from rlvr_jax.models.huggingface import load_params, save_checkpoint
from rlvr_jax.models.huggingface_config import checkpoint_config, config_fields
from rlvr_jax.models.huggingface_export import published_config
from rlvr_jax.models.huggingface_families import MIXTURES
from rlvr_jax.models.huggingface_tensors import outside_tensors
from rlvr_jax.models.presets import model_settings
from rlvr_jax.models.rotary import PartialFrequencies, RopeScaling, YarnScaling
from rlvr_jax.models.safetensors import SINGLE, Tensor, tensor_names
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.storage.folders import locate
from rlvr_jax.train.cluster.sharding import add_shardings, make_mesh

_ROOT = pathlib.Path(__file__).parents[2]
_SHARED = os.environ.get("RLVR_SHARED")
_FOLDERS, _ = golden_folders("hf")
_OLDER = [
  path
  for folder in golden_folders("hf_families")[0]
  if (path := folder / "config_4x.json").exists()  # transformers 4 does not know the newest ones
]

# Of the smallest shapes in which no two lengths of a tensor are the same.
SETTINGS = dict(
  model_type="llama",
  architectures=["LlamaForCausalLM"],
  vocab_size=24,
  hidden_size=16,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  attention_bias=True,
  mlp_bias=True,
)


def published_tensors(settings, seed=0, dtype=np.float32):
  """Random tensors of a llama as a checkpoint has them."""
  rng = np.random.default_rng(seed)
  width, mlp = settings["hidden_size"], settings["intermediate_size"]
  queries = settings["num_attention_heads"] * settings["head_dim"]
  keys = settings["num_key_value_heads"] * settings["head_dim"]
  shapes = {"model.embed_tokens.weight": (settings["vocab_size"], width)}
  for i in range(settings["num_hidden_layers"]):
    layer = f"model.layers.{i}."
    for name, fan_out, fan_in in (
      ("self_attn.q_proj", queries, width),
      ("self_attn.k_proj", keys, width),
      ("self_attn.v_proj", keys, width),
      ("self_attn.o_proj", width, queries),
      ("mlp.gate_proj", mlp, width),
      ("mlp.up_proj", mlp, width),
      ("mlp.down_proj", width, mlp),
    ):
      shapes[f"{layer}{name}.weight"] = (fan_out, fan_in)
      shapes[f"{layer}{name}.bias"] = (fan_out,)
    shapes[f"{layer}input_layernorm.weight"] = (width,)
    shapes[f"{layer}post_attention_layernorm.weight"] = (width,)
  shapes["model.norm.weight"] = (width,)
  shapes["lm_head.weight"] = (settings["vocab_size"], width)
  return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write(folder, tensors, settings=SETTINGS):
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(settings))
  save_file(tensors, folder / SINGLE)
  return folder


def load(*args, **options):
  return checkpoints.load(*args, **options)[1]


def assert_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.skipif(not _SHARED, reason="RLVR_SHARED is not set")
@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda folder: folder.name)
def test_old_style_settings_are_the_same_network(folder, tmp_path):
  published = json.loads((folder / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(old_style(published)))
  assert checkpoint_config(tmp_path) == checkpoint_config(folder)


@pytest.mark.skipif(not _SHARED, reason="RLVR_SHARED is not set")
@pytest.mark.parametrize("path", _OLDER, ids=lambda path: path.parent.name)
def test_settings_in_the_names_of_transformers_4_are_the_same_network(path, tmp_path):
  (tmp_path / "config.json").write_text(path.read_text())
  assert checkpoint_config(tmp_path) == checkpoint_config(path.parent)


def transformers_view(config):
  """Fields of ours from a configuration object of transformers, whatever its file left out."""
  rope = config.rope_parameters
  full = rope.get("full_attention", rope)
  gemma = config.model_type.startswith("gemma")
  layers = tuple(kind == "sliding_attention" for kind in getattr(config, "layer_types", []))
  mixture, delta = {}, {}
  hybrid = config.model_type.startswith("qwen3_5")
  if hybrid:
    delta = dict(
      delta_layers=tuple(kind == "linear_attention" for kind in config.layer_types),
      delta_key_heads=config.linear_num_key_heads,
      delta_value_heads=config.linear_num_value_heads,
      delta_key_dim=config.linear_key_head_dim,
      delta_value_dim=config.linear_value_head_dim,
      delta_num_taps=config.linear_conv_kernel_dim,
      shared_expert_width=getattr(config, "shared_expert_intermediate_size", 0),
    )
  if config.model_type in (*MIXTURES, "mistral"):
    if getattr(config, "sliding_window", None) is not None:
      layers = (True,) * config.num_hidden_layers
  if config.model_type in MIXTURES:
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    mixture = dict(
      num_experts=config.num_experts,
      experts_per_token=config.num_experts_per_tok,
      expert_width=width,
      normalized_expert_weights=getattr(config, "norm_topk_prob", True),
    )
  head_dim = getattr(config, "head_dim", None)
  head_dim = head_dim or config.hidden_size // config.num_attention_heads
  part = full.get("partial_rotary_factor", 1.0)
  unrotated = tuple(not rotates for rotates in getattr(config, "no_rope_layers", []))
  near_theta = rope["sliding_attention"]["rope_theta"] if "sliding_attention" in rope else None
  if not any(layers) or (not gemma and near_theta == full["rope_theta"]):
    near_theta = None
  scalar = getattr(config, "query_pre_attn_scalar", None)
  fields = dict(
    vocab_size=config.vocab_size,
    width=config.hidden_size,
    num_layers=config.num_hidden_layers,
    num_heads=config.num_attention_heads,
    num_kv_heads=config.num_key_value_heads,
    head_dim=head_dim,
    rotary_width=None if part == 1.0 else int(head_dim * part),
    unrotated_layers=unrotated if any(unrotated) else None,
    mlp_width=width if hybrid and mixture else config.intermediate_size,
    norm_epsilon=config.rms_norm_eps,
    tied_head=config.tie_word_embeddings,
    rope_theta=full["rope_theta"],
    qkv_bias=config.model_type == "qwen2"
    or (config.model_type not in ("mixtral", "mistral") and config.attention_bias),
    output_bias=config.model_type not in ("qwen2", "mixtral", "mistral", "glm4")
    and config.attention_bias,
    attention_gate=hybrid,
    mlp_bias=getattr(config, "mlp_bias", False),
    query_scale=scalar and scalar**-0.5,
    attention_soft_cap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
    final_soft_cap=getattr(config, "final_logit_softcapping", None),
    sliding_layers=layers if any(layers) else None,
    sliding_window=config.sliding_window if any(layers) else None,
    sliding_rope_theta=near_theta,
    **mixture,
    **delta,
  )
  return fields | view_of_full_heads(config)


def view_of_full_heads(config):
  """Those of a Gemma 4, with what all of its networks have."""
  if config.model_type != "gemma4_text":
    return {}
  last = config.per_layer_config[config.num_hidden_layers - 1]
  rope = config.rope_parameters["full_attention"]
  return dict(
    full_head_dim=last.head_dim,
    full_kv_heads=last.num_key_value_heads,
    full_keys_as_values=config.attention_k_eq_v,
    rotary_width=None,
    rope_scaling=PartialFrequencies(part=rope["partial_rotary_factor"]),
    query_scale=1.0,
  )


_OPTIONAL = {  # of every family
  "vocab_size": st.integers(8, 99),
  "hidden_size": st.sampled_from([320, 640]),
  "intermediate_size": st.integers(8, 99),
  "num_hidden_layers": st.integers(1, 9),
  "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
  "tie_word_embeddings": st.booleans(),
  "rope_theta": st.sampled_from([1e4, 5e5]),
  "attention_bias": st.booleans(),
}
_HEADS = {"num_attention_heads": st.sampled_from([32, 64])}
_KEY_HEADS = {"num_key_value_heads": st.sampled_from([4, None])}
_WIDTH, _ANY_WIDTH = ({"head_dim": st.sampled_from(x)} for x in ([8, 12], [8, None]))
_WINDOW, _ANY_WINDOW = ({"sliding_window": st.sampled_from(x)} for x in ([3, 5], [3, None]))
_SLIDES = {"use_sliding_window": st.booleans()}
_EXPERTS = {
  "num_experts": st.sampled_from([16, 24]),
  "num_experts_per_tok": st.integers(1, 9),
}
_NORMALIZED = {"norm_topk_prob": st.booleans()}
_HYBRID = {
  "attention_bias": st.just(False),
  "num_attention_heads": st.sampled_from([32, 16]),
  "head_dim": st.sampled_from([16, 32]),
  "full_attention_interval": st.integers(2, 5),
  "linear_num_key_heads": st.sampled_from([2, 4]),
  "linear_num_value_heads": st.sampled_from([8, 12]),
  "linear_key_head_dim": st.sampled_from([8, 12]),
  "linear_value_head_dim": st.sampled_from([8, 12]),
  "linear_conv_kernel_dim": st.integers(1, 5),
}
_ROPE = st.fixed_dictionaries(
  {"rope_type": st.just("default"), "rope_theta": st.sampled_from([1e3, 5e5])}
)
_OF_FAMILY = {
  "qwen2": _HEADS | _SLIDES | _WINDOW | {"max_window_layers": st.integers(0, 9)},
  "qwen3": _HEADS | _WIDTH | _SLIDES | _WINDOW | {"max_window_layers": st.integers(0, 9)},
  "llama": _KEY_HEADS
  | _ANY_WIDTH
  | {"num_attention_heads": st.sampled_from([32, 16]), "mlp_bias": st.booleans()},
  "gemma2": _WIDTH
  | _WINDOW
  | {
    "query_pre_attn_scalar": st.sampled_from([100, 144]),
    "attn_logit_softcapping": st.sampled_from([20.0, None]),
    "final_logit_softcapping": st.sampled_from([20.0, None]),
  },
  "gemma3_text": _WIDTH
  | _WINDOW
  | {
    "query_pre_attn_scalar": st.sampled_from([100, 168]),
    "sliding_window_pattern": st.integers(1, 6),
    "rope_local_base_freq": st.sampled_from([1e3, 1e4]),
  },
  "qwen3_moe": _WIDTH
  | _SLIDES
  | _WINDOW
  | _EXPERTS
  | _NORMALIZED
  | {"moe_intermediate_size": st.integers(8, 99)},
  "olmoe": _KEY_HEADS | _EXPERTS | _NORMALIZED,
  "mixtral": _ANY_WIDTH
  | _ANY_WINDOW
  | {"num_local_experts": st.sampled_from([4, 9]), "num_experts_per_tok": st.integers(1, 4)},
  "olmo2": _KEY_HEADS,
  "olmo3": _KEY_HEADS
  | _WINDOW
  | {
    "rope_theta": st.just(5e5),  # of sliding layers, to transformers 5.24, whatever it is
    "rope_parameters": st.fixed_dictionaries(
      {kind: _ROPE for kind in ("full_attention", "sliding_attention")}
    ),
  },
  "smollm3": _SLIDES
  | _ANY_WINDOW
  | {"no_rope_layer_interval": st.integers(1, 6), "mlp_bias": st.booleans()},
  "mistral": _ANY_WIDTH | _ANY_WINDOW,
  "gemma4_text": _WINDOW
  | {
    "head_dim": st.sampled_from([8, 16]),
    "num_key_value_heads": st.sampled_from([4, 8]),
    "global_head_dim": st.sampled_from([8, 24]),
    "num_global_key_value_heads": st.sampled_from([1, 2, None]),
    "attention_k_eq_v": st.booleans(),
    "final_logit_softcapping": st.sampled_from([2.0, None]),
  },
  "glm4": {
    "head_dim": st.sampled_from([8, 16]),
    "partial_rotary_factor": st.sampled_from([0.5, 0.25, 1.0]),
  },
  "qwen3_5_text": _HYBRID,
  "qwen3_5_moe_text": _HYBRID
  | _EXPERTS
  | {
    "moe_intermediate_size": st.integers(8, 99),
    "shared_expert_intermediate_size": st.integers(8, 99),
  },
}


@pytest.mark.parametrize("family", _OF_FAMILY)
def test_settings_are_as_transformers_reads_them_whatever_is_left_out(family):
  transformers = pytest.importorskip("transformers")
  optional = _OPTIONAL | _OF_FAMILY[family]
  needed = {"hidden_size_per_layer_input": st.just(0)} if family == "gemma4_text" else {}

  @hypothesis.settings(max_examples=10, deadline=None, derandomize=True, database=None)
  @hypothesis.given(st.fixed_dictionaries(needed, optional=optional))
  def check(given):
    config = transformers.AutoConfig.for_model(family, **given)
    config.allow_global_per_layer_attribute_access = True  # those of sliding layers
    view = transformers_view(config)
    found = config_fields({"model_type": family, **given}, "config.json")
    assert {name: found[name] for name in view} == view

  check()


def test_rotary_settings_per_kind_of_layer_are_read():
  fields = config_fields(
    {
      "model_type": "gemma3_text",
      "max_position_embeddings": 64,
      "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
      },
    },
    "",
  )
  assert fields["rope_theta"] == 5e5 and fields["rope_scaling"] == RopeScaling(factor=8.0)
  assert fields["sliding_rope_theta"] == 3e3


def test_flat_rotary_settings_of_an_olmo3_are_those_of_full_layers():
  """As transformers 5.0 to 5.12 write them, which scale sliding layers as well, wrongly."""
  rope = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, rope_theta=3e5)
  settings = dict(model_type="olmo3", num_hidden_layers=4)
  flat = config_fields(settings | dict(rope_parameters=rope), "")
  assert flat["rope_scaling"] == YarnScaling(factor=8.0, original_length=32)
  assert (flat["rope_theta"], flat["sliding_rope_theta"]) == (3e5, 3e5)
  near = dict(rope_type="default", rope_theta=3e5)
  nested = dict(full_attention=rope, sliding_attention=near)
  assert config_fields(settings | dict(rope_parameters=nested), "") == flat
  older = dict(rope_theta=3e5, rope_scaling=rope)
  assert config_fields(settings | older, "") == flat


_GEMMA4 = dict(model_type="gemma4_text", num_hidden_layers=4, hidden_size_per_layer_input=0)


def test_heads_of_full_layers_are_read_in_both_forms():
  """As 5.12 writes them, and by layer as 5.24 does; with tokens of images that see one another."""
  types = [*["sliding_attention"] * 3, "full_attention"]
  older = dict(global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True)
  newer = dict(per_layer_config={"3": dict(head_dim=32, num_key_value_heads=1)})
  found = config_fields(_GEMMA4 | dict(layer_types=types, **older), "")
  assert (found["full_head_dim"], found["full_kv_heads"]) == (32, 1)
  newer |= dict(attention_k_eq_v=True, use_bidirectional_attention="vision")
  assert config_fields(_GEMMA4 | newer, "") == found
  of_all = ["sliding_attention"] * 4  # the last one is of full attention all the same
  assert config_fields(_GEMMA4 | older | dict(layer_types=of_all), "") == found
  alike = config_fields(_GEMMA4 | dict(per_layer_config={}), "")
  assert (alike["full_head_dim"], alike["full_kv_heads"]) == (256, 4)


def test_a_cap_on_scores_that_transformers_ignores_is_ignored():
  capped = dict(attn_logit_softcapping=20.0)
  cap = lambda family: config_fields({"model_type": family, **capped}, "")["attention_soft_cap"]
  assert (cap("gemma2"), cap("gemma3_text")) == (20.0, None)


def test_the_text_model_of_a_gemma3_is_read():
  text = dict(model_type="gemma3_text", hidden_size=64, num_hidden_layers=2, head_dim=16)
  scaling = {"rope_type": "linear", "factor": 8.0}
  fields = config_fields(
    {"model_type": "gemma3", "text_config": text | {"rope_scaling": scaling}}, ""
  )
  assert (fields["width"], fields["num_layers"], fields["num_heads"]) == (64, 2, 8)
  assert fields["tied_head"] and fields["rope_scaling"] == RopeScaling(factor=8.0)


def test_the_text_model_of_a_gemma3_is_exported_with_the_stop_tokens_of_the_whole(tmp_path):
  text = dict(model_type="gemma3_text", vocab_size=40, hidden_size=8, num_hidden_layers=2)
  text |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=12)
  whole = dict(model_type="gemma3", text_config=text, eos_token_id=[1, 106], bos_token_id=2)
  (tmp_path / "config.json").write_text(json.dumps(whole))
  published = published_config(checkpoint_config(tmp_path), "bfloat16", tmp_path)
  assert (published["eos_token_id"], published["bos_token_id"]) == ([1, 106], 2)
  assert published["pad_token_id"] is None and published["model_type"] == "gemma3_text"


def of_family(model_type, **changes):
  """Settings of the smallest shapes in the names of another family."""
  return SETTINGS | dict(model_type=model_type, architectures=None) | changes


def of_gemma4(**changes):
  return _GEMMA4 | changes


def of_qwen3_5(**changes):
  return of_family("qwen3_5_text", attention_bias=False, **changes)


def of_mixture(model_type, **changes):
  return of_family(model_type, num_experts=4, attention_bias=False, **changes)


def of_rope(**changes):
  return of_gemma4(rope_parameters=changes)


SCALED = dict(sliding_attention=dict(rope_type="linear", factor=2.0))
PROPORTIONAL = dict(rope_type="proportional", factor=2.0)


@pytest.mark.parametrize(
  ("settings", "word"),
  [
    (SETTINGS | dict(model_type="gpt_oss"), "gpt_oss"),
    (SETTINGS | dict(model_type=None), "model_type = None"),
    (SETTINGS | dict(architectures=["LlamaForSequenceClassification"]), "architectures"),
    (SETTINGS | dict(hidden_act="relu2"), "hidden activation"),
    (SETTINGS | dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type = 'dynamic'"),
    (SETTINGS | dict(rope_scaling=dict(rope_type="longrope")), "rope_type = 'longrope'"),
    (SETTINGS | dict(rope_scaling=dict(rope_type="linear")), "rotary factor = None"),
    (SETTINGS | dict(rope_scaling=[1]), "rope_scaling"),
    (SETTINGS | dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (SETTINGS | dict(hidden_size="64"), "hidden_size = '64'"),
    (SETTINGS | dict(num_hidden_layers=0), "num_hidden_layers = 0"),
    (SETTINGS | dict(num_key_value_heads=3), "num_kv_heads=3"),
    (SETTINGS | dict(quantization_config=dict(quant_method="fp8")), "quantized weights"),
    (
      of_family("gemma2", hidden_act=None, layer_types=["full_attention"]),
      "layer_types has 1 entries",
    ),
    (of_family("qwen3", layer_types=["chunked_attention"] * 2), "'chunked_attention'"),
    (of_family("qwen3", layer_types=["sliding_attention"] * 2), "use_sliding_window"),
    (of_family("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention"),
    (of_family("gemma3_text", rope_parameters=SCALED), "sliding layers are scaled"),
    (of_family("glm4", partial_rotary_factor=0.4), "partial_rotary_factor = 0.4"),
    (of_family("glm4", partial_rotary_factor=1.5), "partial_rotary_factor = 1.5"),
    (of_family("smollm3", no_rope_layers=[1, 0, 1]), "no_rope_layers has 3 entries"),
    (of_family("smollm3", no_rope_layers=[1, 2]), "no_rope_layers = "),
    (of_family("smollm3", no_rope_layer_interval=0), "no_rope_layer_interval = 0"),
    (of_family("olmo3", sliding_window=None), "sliding_window is null"),
    (of_qwen3_5(attn_output_gate=False), "attn_output_gate"),
    (of_qwen3_5() | dict(attention_bias=True), "attention_bias"),
    (of_qwen3_5(output_gate_type="sigmoid"), "output_gate_type"),
    (of_qwen3_5(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype"),
    (of_qwen3_5(layer_types=["linear_attention", "sliding_attention"]), "'sliding_attention'"),
    (of_qwen3_5(layer_types=["full_attention"] * 2), "no layer has the type linear_attention"),
    (of_qwen3_5(full_attention_interval=1), "no layer has the type linear_attention"),
    (of_qwen3_5(full_attention_interval=0), "full_attention_interval = 0"),
    (of_qwen3_5(layer_types=["linear_attention"]), "layer_types has 1 entries"),
    (of_qwen3_5(linear_num_key_heads=5), "delta_value_heads=32"),
    (of_mixture("qwen3_5_moe_text", norm_topk_prob=False), "norm_topk_prob = False"),
    (of_mixture("qwen3_moe", shared_expert_intermediate_size=8), "shared_expert_intermediate_size"),
    (of_mixture("qwen3_moe", n_group=4), "n_group = 4"),
    (of_mixture("qwen3_moe", num_local_experts=7), "num_local_experts = 7"),
    (of_mixture("qwen3_moe", num_experts_per_tok=0), "num_experts_per_tok = 0"),
    (of_mixture("qwen3_moe", decoder_sparse_step=0), "decoder_sparse_step = 0"),
    (of_mixture("qwen3_moe", decoder_sparse_step=6), "decoder_sparse_step|layers with experts"),
    (of_mixture("qwen3_moe", mlp_only_layers=["0"]), "mlp_only_layers"),
    (of_mixture("olmoe", clip_qkv=8.0), "clip_qkv"),
    (of_mixture("mixtral", router_jitter_noise=0.1), "router_jitter_noise"),
    (of_mixture("qwen2_moe"), "'qwen2_moe' is unknown"),
    (of_gemma4(hidden_size_per_layer_input=None, num_kv_shared_layers=2), "num_kv_shared_layers"),
    (of_gemma4(hidden_size_per_layer_input=256), "hidden_size_per_layer_input = 256"),
    (of_gemma4(enable_moe_block=True), "enable_moe_block"),
    (of_gemma4(use_bidirectional_attention="all"), "use_bidirectional_attention"),
    (of_gemma4(per_layer_config={"0": dict(head_dim=8)}), "per_layer_config"),
    (of_gemma4(per_layer_config={"3": dict(hidden_size=8)}), "per_layer_config"),
    (of_gemma4(global_head_dim="512"), "head_dim of full layers"),
    (of_rope(full_attention=PROPORTIONAL, sliding_attention={}), "partial_rotary_factor = None"),
    (of_rope(full_attention={}), "no sliding_attention"),
    (of_rope(rope_type="default"), "no full_attention"),
  ],
)
def test_settings_that_are_not_implemented_are_refused(tmp_path, settings, word):
  (tmp_path / "config.json").write_text(json.dumps(settings))
  with pytest.raises(ValueError, match=word):
    checkpoint_config(tmp_path)


def test_a_null_part_of_a_head_that_rotates_is_that_of_the_family():
  rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=None)
  for nulls in (dict(partial_rotary_factor=None), dict(rope_parameters=rope)):
    settings = SETTINGS | dict(model_type="glm4", architectures=None) | nulls
    assert config_fields(settings, "config.json")["rotary_width"] == 4  # half of 8


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(ValueError, match=r"config\.json"):
    checkpoint_config(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no config\.json"):
    checkpoint_config(tmp_path)


def test_a_checkpoint_is_read_and_written_without_transformers(tmp_path, monkeypatch):
  """As in a core install: only the tokenizers of such folders need the extra [hf]."""
  for library in ("transformers", "tokenizers"):
    monkeypatch.setitem(sys.modules, library, None)
  folder = write(tmp_path / "in", published_tensors(SETTINGS))
  save_checkpoint(tmp_path / "out", load(folder), checkpoint_config(folder), source=folder)
  assert checkpoint_config(tmp_path / "out") == checkpoint_config(folder)


def test_remote_code_that_a_config_names_is_never_run(tmp_path):
  auto_map = {"AutoModelForCausalLM": "modeling_x.X"}
  (tmp_path / "config.json").write_text(json.dumps(SETTINGS | {"auto_map": auto_map}))
  (tmp_path / "modeling_x.py").write_text("raise SystemExit('run')")
  assert checkpoint_config(tmp_path).width == 16


def test_overrides_replace_what_was_found(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
  found = checkpoint_config(tmp_path, compute_dtype="bfloat16", remat="full")
  assert (found.compute_dtype, found.remat) == ("bfloat16", "full")


def test_a_checkpoint_trains_with_its_products_kept_only_unless_it_is_said_otherwise(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
  model = dict(preset="", checkpoint=str(tmp_path))
  assert model_settings({**model, "overrides": {"remat": None}}).remat == "dots"
  assert model_settings({**model, "overrides": {"remat": "none"}}).remat == "none"


# --- in -------------------------------------------------------------------------------------------


def expected_params(tensors):
  """By hand: layers stacked, kernels transposed."""
  stack = lambda name: np.stack([tensors[f"model.layers.{i}.{name}"] for i in range(2)])
  kernels = dict(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
  )
  blocks = {name: stack(f"{theirs}.weight").swapaxes(1, 2) for name, theirs in kernels.items()}
  blocks |= {f"{name}_bias": stack(f"{theirs}.bias") for name, theirs in kernels.items()}
  blocks["attention_norm"] = {"scale": stack("input_layernorm.weight")}
  blocks["mlp_norm"] = {"scale": stack("post_attention_layernorm.weight")}
  return {
    "embedding": tensors["model.embed_tokens.weight"],
    "blocks": blocks,
    "final_norm": {"scale": tensors["model.norm.weight"]},
    "head_kernel": tensors["lm_head.weight"].T,
  }


@pytest.mark.parametrize("block_bytes", [1, 500, 2**20])  # 500: the last block overlaps
def test_weights_are_stacked_and_transposed_whatever_the_block(tmp_path, block_bytes):
  tensors = published_tensors(SETTINGS)
  assert_equal(load(write(tmp_path, tensors), block_bytes=block_bytes), expected_params(tensors))


@pytest.mark.parametrize(
  ("sizes", "block_bytes"),
  [
    (dict(data=2, fsdp=2, tensor=2), 2**20),
    (dict(data=2, fsdp=4), 2**20),
    (dict(data=2, tensor=2), 3000),  # below what kernels take: they are put together on devices
  ],
)
def test_a_mesh_holds_the_same_bits_in_the_wanted_shardings(tmp_path, sizes, block_bytes):
  tensors = published_tensors(SETTINGS)
  write(tmp_path, tensors)
  mesh = make_mesh(**sizes)
  params = load(tmp_path, mesh, block_bytes=block_bytes)
  assert_equal(params, expected_params(tensors))
  shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
  assert shardings(params) == shardings(add_shardings(params, mesh))
  assert not params["blocks"]["gate"].is_fully_replicated


@pytest.mark.parametrize(
  ("file_dtype", "param_dtype"),
  [(ml_dtypes.bfloat16, "float32"), (np.float16, "float32"), (np.float64, "bfloat16")],
)
def test_weights_are_cast_to_the_parameters_dtype(tmp_path, file_dtype, param_dtype):
  tensors = published_tensors(SETTINGS, dtype=file_dtype)
  params = load(write(tmp_path, tensors), param_dtype=param_dtype)
  cast = jax.tree.map(lambda x: x.astype(np.float32).astype(param_dtype), expected_params(tensors))
  assert_equal(params, cast)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}


@pytest.mark.parametrize(
  "rename",
  [
    lambda name: name.removeprefix("model."),
    lambda name: f"language_model.{name}",
    lambda name: name.replace("model.", "model.language_model.", 1),
  ],
)
def test_other_names_of_the_same_tensors_are_understood(tmp_path, rename):
  tensors = published_tensors(SETTINGS)
  found = load(write(tmp_path, {rename(name): value for name, value in tensors.items()}))
  assert_equal(found, expected_params(tensors))


def test_tables_that_old_versions_saved_are_left_out(tmp_path):
  tensors = published_tensors(SETTINGS)
  tables = {
    f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)
  }
  outside = ["model.visual.x", "mtp.layers.0.x", "vision_tower.x"]
  write(tmp_path, tensors | tables | {name: np.ones(3, np.int64) for name in outside})
  assert_equal(load(tmp_path), expected_params(tensors))
  assert sorted(outside_tensors(tensor_names(tmp_path))) == sorted(outside)


@pytest.mark.parametrize("kept", ["both", "embedding", "head"])
def test_a_tied_head_is_the_embedding_under_either_name(tmp_path, kept):
  tensors = published_tensors(SETTINGS)
  expected = expected_params(tensors)
  del expected["head_kernel"]
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  dropped = {"both": [], "embedding": ["lm_head.weight"], "head": ["model.embed_tokens.weight"]}
  for name in dropped[kept]:
    del tensors[name]
  write(tmp_path, tensors, SETTINGS | {"tie_word_embeddings": True})
  assert_equal(load(tmp_path), expected)


def test_a_head_of_its_own_is_not_taken_for_a_tied_one(tmp_path):
  write(tmp_path, published_tensors(SETTINGS), SETTINGS | {"tie_word_embeddings": True})
  with pytest.raises(ValueError, match=r"'lm_head.weight' differs from.*tie_word_embeddings"):
    load(tmp_path)
  assert "head_kernel" in load(tmp_path, tied_head=False)


def test_a_tied_head_may_not_differ_even_in_the_row_of_an_added_token(tmp_path):
  tensors = published_tensors(SETTINGS)
  head = tensors["model.embed_tokens.weight"].copy()
  head[-1, 3] += 1
  tied = SETTINGS | {"tie_word_embeddings": True}
  write(tmp_path, tensors | {"lm_head.weight": head}, tied)
  with pytest.raises(ValueError, match=r"differs from .* first in row 23 of 24.*tie_word_emb"):
    load(tmp_path)
  write(tmp_path, tensors | {"lm_head.weight": head[:-1]}, tied)
  with pytest.raises(ValueError, match=r"differs from .* in shape, \(23, 16\) and \(24, 16\)"):
    load(tmp_path)


def changed(**tensors):
  return lambda original: original | tensors


def without(*names):
  return lambda original: {k: v for k, v in original.items() if k not in names}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (without("model.norm.weight"), "1 missing: model.norm.weight"),
    (without("lm_head.weight"), r"1 missing: lm_head.weight \(if it is tied to the embedding"),
    (changed(**{"model.layers.2.mlp.up_proj.weight": np.ones((40, 16), np.float32)}),
     "1 unknown: model.layers.2.mlp.up_proj.weight"),
    (changed(**{"model.layers.1.mlp.up_proj.weight": np.ones((16, 40), np.float32)}),
     r"layers.1.mlp.up_proj.weight' in .*model.safetensors has shape \(16, 40\), .*\(40, 16\)"),
    (changed(**{"model.embed_tokens.weight": np.ones((32, 16), np.float32)}),
     r"embed_tokens.weight' in .* has shape \(32, 16\), but the model needs \(24, 16\)"),
    (changed(**{"model.norm.weight": np.ones(16, np.int8)}), "'model.norm.weight' has dtype I8"),
    (changed(**{"norm.weight": np.ones(16, np.float32)}), "are names of the same tensor; keep one"),
  ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_named_before_reading(
  tmp_path, monkeypatch, change, message
):
  monkeypatch.setattr(Tensor, "rows", lambda *args: pytest.fail("weights were read"))
  with pytest.raises(ValueError, match=message):
    load(write(tmp_path, change(published_tensors(SETTINGS))))


def test_of_many_missing_tensors_a_few_are_named(tmp_path):
  write(tmp_path, {"model.norm.weight": np.ones(16, np.float32)})
  with pytest.raises(ValueError, match=r"34 missing: model.embed_tokens.weight, .*…") as error:
    load(tmp_path)
  assert len(str(error.value)) < 600


@pytest.mark.parametrize(("value", "mesh"), [(np.nan, dict()), (-np.inf, dict(fsdp=2, tensor=2))])
def test_weights_that_are_not_finite_are_named(tmp_path, value, mesh):
  tensors = published_tensors(SETTINGS)
  name = "model.layers.1.mlp.up_proj.weight"
  tensors[name][39, 15] = value
  folder = write(tmp_path / "model", tensors)
  with pytest.raises(ValueError, match=r"weights in 1 of \d+ parameters: blocks/up; "):
    load(folder, make_mesh(**mesh))


def test_parameters_that_no_checkpoint_has_are_refused(tmp_path):
  write(tmp_path, published_tensors(SETTINGS))
  with pytest.raises(ValueError, match=r"blocks/query/a is in no checkpoint in Hugging.*; pass a"):
    adapted = {"blocks": {"query": {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32)}}}
    load_params(tmp_path, adapted, checkpoint_config(tmp_path))


# --- out ------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tmp_path):
  folder = write(tmp_path / "source", published_tensors(SETTINGS))
  return folder, load(folder, make_mesh(fsdp=2, tensor=2)), checkpoint_config(folder)


@pytest.mark.parametrize(
  ("max_shard_bytes", "remote"), [(2**30, False), (3000, False), (3000, True)]
)
def test_exported_weights_load_with_the_same_bits(tmp_path, loaded, max_shard_bytes, remote):
  _, params, config = loaded
  target = f"memory://{tmp_path}/out" if remote else tmp_path / "out"
  save_checkpoint(
    target, params, config, dtype="float32", max_shard_bytes=max_shard_bytes, block_bytes=200
  )
  assert checkpoint_config(target) == config
  assert_equal(load(target), params)
  system, folder = locate(target)
  shards = [name for name in system.ls(folder, detail=False) if name.endswith(".safetensors")]
  assert (len(shards) > 1) == (max_shard_bytes == 3000)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exported_tensors_are_the_published_ones(tmp_path, loaded, dtype):
  folder, params, config = loaded
  save_checkpoint(tmp_path / "out", params, config, dtype=dtype)
  found = load_file(tmp_path / "out" / SINGLE)
  expected = load_file(folder / SINGLE)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value.astype(jnp.dtype(dtype)))
  assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_settings_and_tokenizer_of_the_source_are_taken_over(tmp_path, loaded):
  folder, params, config = loaded
  settings = SETTINGS | dict(eos_token_id=[3, 4], max_position_embeddings=99, auto_map={"A": "b.C"})
  (folder / "config.json").write_text(json.dumps(settings))
  for name in ("tokenizer.json", "generation_config.json", "modeling_b.py", "README.md"):
    (folder / name).write_text(f'{{"name": "{name}"}}')
  save_checkpoint(tmp_path / "out", params, config, source=folder)
  published = json.loads((tmp_path / "out" / "config.json").read_text())
  assert published["eos_token_id"] == [3, 4] and published["max_position_embeddings"] == 99
  assert "auto_map" not in published
  assert {file.name for file in (tmp_path / "out").iterdir()} == {
    "config.json", SINGLE, "tokenizer.json", "generation_config.json"
  }  # fmt: skip
  assert "tokenizer.json" in (tmp_path / "out" / "tokenizer.json").read_text()


def test_a_directory_with_a_model_is_not_overwritten(tmp_path, loaded):
  folder, params, config = loaded
  before = (folder / SINGLE).read_bytes()
  with pytest.raises(FileExistsError, match="not empty"):
    save_checkpoint(folder, params, config)
  assert (folder / SINGLE).read_bytes() == before


_BASE = TransformerConfig(
  vocab_size=24, width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=40
)
_GEMMA = dict(
  activation="gelu_tanh", scaled_embedding=True, zero_centered_norm=True, post_norm=True,
  query_scale=144**-0.5,
)  # fmt: skip
_MIXTURE = dict(num_experts=4, experts_per_token=2, expert_width=40)
_SLIDING = dict(sliding_layers=(False, True), sliding_window=3)
_OLMO = dict(joint_qk_norm=True, pre_norm=False, post_norm=True)
_YARN = YarnScaling(factor=4.0, original_length=64)
_HYBRID_NETWORK = dict(
  qk_norm=True, zero_centered_norm=True, attention_gate=True, rotary_width=2,
  delta_layers=(True, False), delta_key_heads=2, delta_value_heads=4, delta_key_dim=6,
  delta_value_dim=10, delta_num_taps=3,
)  # fmt: skip


@pytest.mark.parametrize(
  ("family", "changes"),
  [
    ("llama", dict(qkv_bias=True, output_bias=True, mlp_bias=True, tied_head=False)),
    ("llama", dict(rope_scaling=RopeScaling(factor=4.0))),
    ("llama", dict(rope_scaling=RopeScaling(factor=8.0, low_frequency_factor=1.0))),
    ("llama", dict(activation="gelu", query_scale=8**-0.5)),
    ("qwen2", dict(qkv_bias=True, **_SLIDING)),
    ("qwen3", dict(qk_norm=True, rope_scaling=YarnScaling(factor=4.0, original_length=64))),
    ("qwen3", dict(qk_norm=True, qkv_bias=True, output_bias=True, **_SLIDING)),
    ("gemma2", dict(**_GEMMA, **_SLIDING, attention_soft_cap=20.0)),
    ("gemma3_text", dict(**_GEMMA, **_SLIDING, qk_norm=True, sliding_rope_theta=1e3)),
    ("gemma3_text", dict(**_GEMMA, qk_norm=True, tied_head=False)),
    (
      "gemma4_text",
      dict(
        activation="gelu_tanh",
        scaled_embedding=True,
        post_norm=True,
        qk_norm=True,
        query_scale=1.0,
        value_norm=True,
        layer_scale=True,
        full_head_dim=12,
        full_kv_heads=1,
        full_keys_as_values=True,
        sliding_layers=(True, False),
        sliding_window=3,
        rope_scaling=PartialFrequencies(part=0.5),
        sliding_rope_theta=1e3,
      ),
    ),
    ("olmo2", dict(**_OLMO, rope_scaling=_YARN)),
    ("olmo3", dict(**_OLMO, **_SLIDING, rope_scaling=_YARN, sliding_rope_theta=1e4)),
    ("olmo3", dict(**_OLMO, **_SLIDING, qkv_bias=True, output_bias=True)),
    ("smollm3", dict(unrotated_layers=(False, True))),
    ("smollm3", dict(unrotated_layers=(True, False), **_SLIDING)),
    ("mistral", dict(sliding_window=3, sliding_layers=(True, True), tied_head=False)),
    ("glm4", dict(post_norm=True, qkv_bias=True, rotary_width=4, rope_scaling=_YARN)),
    ("qwen3_moe", dict(**_MIXTURE, qk_norm=True, qkv_bias=True, output_bias=True)),
    ("olmoe", dict(**_MIXTURE, joint_qk_norm=True, tied_head=False)),
    ("qwen3_5_text", _HYBRID_NETWORK | dict(tied_head=False)),
    (
      "qwen3_5_moe_text",
      _HYBRID_NETWORK
      | _MIXTURE
      | dict(mlp_width=40, normalized_expert_weights=True, shared_expert_width=24),
    ),
    (
      "mixtral",
      dict(
        **_MIXTURE, normalized_expert_weights=True, sliding_window=3, sliding_layers=(True, True)
      ),
    ),
  ],
)
def test_exported_settings_read_back(family, changes):
  config = dataclasses.replace(_BASE, **changes)
  published = published_config(config, "bfloat16", None)
  assert published["model_type"] == family
  # JSON has one kind of number; query_scale None is what 1/√head_dim comes to.
  found = TransformerConfig(**config_fields(json.loads(json.dumps(published)), ""))
  same = lambda c: dataclasses.replace(c, query_scale=c.query_scale or c.head_dim**-0.5)
  assert same(found) == same(config)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (_SLIDING, "nearest family, llama, differs in .*sliding_layers"),
    (dict(scaled_embedding=True), "scaled_embedding"),
    (dict(qkv_bias=True, mlp_bias=True), "nearest family, qwen2, differs in .*mlp_bias"),
    (_GEMMA | dict(query_scale=0.3), "query_scale"),
    (_MIXTURE | dict(qk_norm=True, **_SLIDING), "qwen3_moe, differs in .*sliding_layers"),
    (_MIXTURE, "nearest family, mixtral, differs in .*normalized_expert_weights"),
    (_GEMMA | _SLIDING | dict(qk_norm=True), "sliding_rope_theta"),
    (_GEMMA | dict(qk_norm=True, attention_soft_cap=9.0), "attention_soft_cap"),
    (_OLMO | dict(joint_qk_norm=False), "nearest family, olmo2, differs in .*joint_qk_norm"),
    (
      _OLMO | _SLIDING | dict(rope_scaling=_YARN),
      "nearest family, olmo3, differs in .*sliding_rope_th",
    ),
    (dict(unrotated_layers=(False, True), qk_norm=True), "qwen3, differs in .*unrotated_layers"),
    (dict(rotary_width=4), "nearest family, llama, differs in .*rotary_width"),
    (dict(post_norm=True, mlp_bias=True), "nearest family, glm4, differs in .*mlp_bias"),
    (_HYBRID_NETWORK | dict(attention_gate=False), "qwen3_5_text, differs in .*attention_gate"),
    (
      _HYBRID_NETWORK | _MIXTURE | dict(shared_expert_width=8),
      "qwen3_5_moe_text, differs in .*normalized_expert_weights",
    ),
  ],
)
def test_networks_of_no_family_are_not_exported(changes, message):
  with pytest.raises(ValueError, match=message):
    published_config(dataclasses.replace(_BASE, **changes), "bfloat16", None)


def test_a_source_of_another_family_is_refused(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
  with pytest.raises(ValueError, match=r"model_type = 'gemma2'.*'llama'"):
    published_config(_BASE, "float32", tmp_path)


# --- processes and memory -------------------------------------------------------------------------

_TWO_PROCESSES = """
  import sys
  import jax
  import numpy as np
  from jax.experimental import multihost_utils
  from rlvr_jax.models.functional import transformer
  from rlvr_jax.models.huggingface import load_params, save_checkpoint
  from rlvr_jax.models.huggingface_config import checkpoint_config
  from rlvr_jax.train.cluster.sharding import add_shardings, make_mesh, to_host

  coordinator, process, source, out = sys.argv[1:]
  jax.distributed.initialize(coordinator, 2, int(process))
  model = transformer(checkpoint_config(source))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  placed = add_shardings(shapes, make_mesh(fsdp=2, tensor=2))
  params = load_params(source, placed, model.config, block_bytes=3000)
  assert not params["blocks"]["gate"].is_fully_addressable
  save_checkpoint(out, params, model.config, dtype="float32", source=source, block_bytes=200)
  again = load_params(out, add_shardings(shapes, make_mesh(fsdp=4)), model.config)
  jax.tree.map(np.testing.assert_array_equal, to_host(params), to_host(again))
"""


@pytest.mark.slow
def test_two_processes_load_their_shards_and_write_one_checkpoint(tmp_path):
  source = write(tmp_path / "source", published_tensors(SETTINGS))
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
  flags = "--xla_force_host_platform_device_count=2"
  environment = os.environ | dict(XLA_FLAGS=flags, PYTHONPATH=str(_ROOT))
  code = textwrap.dedent(_TWO_PROCESSES)
  command = [sys.executable, "-c", code, coordinator]
  processes = [
    subprocess.Popen(
      [*command, str(i), str(source), str(tmp_path / "out")],
      env=environment,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  try:
    errors = [process.communicate(timeout=900)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-4000:]
  assert_equal(load_file(tmp_path / "out" / SINGLE), load_file(source / SINGLE))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_beyond_the_parameters_loading_takes_at_most_two_of_the_largest_tensor(tmp_path):
  overrides = dict(num_layers=6, width=512, num_heads=4, mlp_width=1408)  # 10⁸ parameters
  program = _ROOT / "experiments" / "benchmarks" / "load_checkpoint.py"
  flags = [f"--overrides={json.dumps(overrides)}", f"--folder={tmp_path}", f"--scratch={tmp_path}"]
  subprocess.run([sys.executable, program, *flags, "--shard_mib=64"], check=True)
  (result,) = tmp_path.glob("load_checkpoint_*.json")
  rows = json.loads(result.read_text())["rows"]
  assert {row["layout"] for row in rows} == {"one file", "shards of 64 MiB"}
  for row in rows:
    assert row["parameters GB"] > 0.37
    assert row["in largest tensors"] <= 2.0, row
