"""The network against `transformers`: every checkpoint folder under golden/hf."""

from __future__ import annotations

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import RopeScaling, TransformerConfig
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.rollouts.sampler import generate
from rlvr_jax.types import Prompts, Sampling

_SHARED = os.environ.get("RLVR_SHARED")
_FOLDERS = sorted(pathlib.Path(_SHARED, "golden", "hf").iterdir()) if _SHARED else []

pytestmark = pytest.mark.skipif(not _SHARED, reason="RLVR_SHARED is not set")


def _rope(config: dict, kind: str) -> dict:
  parameters = config["rope_parameters"]
  return parameters.get(kind, parameters)


def _scaling(rope: dict) -> RopeScaling | None:
  if rope["rope_type"] == "default":
    return None
  if rope["rope_type"] == "linear":
    return RopeScaling(factor=rope["factor"])
  return RopeScaling(
    factor=rope["factor"],
    low_frequency_factor=rope["low_freq_factor"],
    high_frequency_factor=rope["high_freq_factor"],
    original_length=rope["original_max_position_embeddings"],
  )


def settings(config: dict) -> TransformerConfig:
  kind = config["model_type"]
  gemma = kind.startswith("gemma")
  full = _rope(config, "full_attention")
  layers = config.get("layer_types") or []
  return TransformerConfig(
    vocab_size=config["vocab_size"],
    width=config["hidden_size"],
    num_layers=config["num_hidden_layers"],
    num_heads=config["num_attention_heads"],
    num_kv_heads=config["num_key_value_heads"],
    head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    mlp_width=config["intermediate_size"],
    activation="gelu_tanh" if gemma else "silu",
    norm_epsilon=config["rms_norm_eps"],
    rope_theta=full["rope_theta"],
    rope_scaling=_scaling(full),
    tied_head=config["tie_word_embeddings"],
    qk_norm=kind in ("qwen3", "gemma3_text"),
    qkv_bias=kind == "qwen2",
    query_scale=config["query_pre_attn_scalar"] ** -0.5 if gemma else None,
    attention_soft_cap=config.get("attn_logit_softcapping"),
    final_soft_cap=config.get("final_logit_softcapping"),
    sliding_window=config.get("sliding_window"),
    sliding_layers=tuple(layer == "sliding_attention" for layer in layers) or None,
    sliding_rope_theta=_rope(config, "sliding_attention")["rope_theta"]
    if kind == "gemma3_text"
    else None,
    scaled_embedding=gemma,
    zero_centered_norm=gemma,
    post_norm=gemma,
  )


def parameters(tensors: dict[str, np.ndarray], c: TransformerConfig) -> dict:
  def stacked(name: str) -> np.ndarray:
    layers = [tensors[f"model.layers.{i}.{name}"] for i in range(c.num_layers)]
    return np.stack([w.T for w in layers])

  norm = lambda name: {"scale": stacked(f"{name}.weight")}
  blocks = {
    "attention_norm": norm("input_layernorm"),
    "mlp_norm": norm("pre_feedforward_layernorm" if c.post_norm else "post_attention_layernorm"),
  }
  for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
    blocks[ours] = stacked(f"self_attn.{theirs}_proj.weight")
    if c.qkv_bias and ours != "output":
      blocks[f"{ours}_bias"] = stacked(f"self_attn.{theirs}_proj.bias")
  for name in ("gate", "up", "down"):
    blocks[name] = stacked(f"mlp.{name}_proj.weight")
  if c.qk_norm:
    blocks["query_norm"], blocks["key_norm"] = norm("self_attn.q_norm"), norm("self_attn.k_norm")
  if c.post_norm:
    blocks["post_attention_norm"] = norm("post_attention_layernorm")
    blocks["post_mlp_norm"] = norm("post_feedforward_layernorm")
  params = {
    "embedding": tensors["model.embed_tokens.weight"],
    "blocks": blocks,
    "final_norm": {"scale": tensors["model.norm.weight"]},
  }
  if not c.tied_head:
    params["head_kernel"] = tensors["lm_head.weight"].T
  return jax.tree.map(jnp.asarray, params)


@pytest.fixture(params=_FOLDERS, ids=lambda folder: folder.name)
def case(request):
  safetensors = pytest.importorskip("safetensors.numpy")
  config = json.loads((request.param / "config.json").read_text())
  tensors = {}
  for file in request.param.glob("*.safetensors"):
    tensors |= safetensors.load_file(file)
  c = settings(config)
  params = parameters(tensors, c)
  model = transformer(c)
  expected = jax.eval_shape(model.init, jax.random.key(0))
  assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, expected)
  return model, params, np.load(request.param / "expected.npz")


def test_logits_of_a_prompt_and_its_response_equal_the_published_models(case):
  model, params, expected = case
  ids, mask = expected["input_ids"], expected["attention_mask"]
  longest_padding = int((mask == 0).sum(axis=1).max())
  for split in (longest_padding + 1, (longest_padding + ids.shape[1]) // 2):
    prompts = Prompts(
      tokens=jnp.asarray(ids[:, :split], jnp.int32),
      lengths=jnp.asarray(mask[:, :split].sum(axis=1), jnp.int32),
    )
    responses = jnp.asarray(np.pad(ids[:, split:], [(0, 0), (0, 1)]), jnp.int32)[:, None]
    hidden = model.response_hidden(params, prompts, responses)[:, 0]
    logits = head_logits(hidden, model.head(params))
    np.testing.assert_allclose(logits, expected["logits"][:, split - 1 :], atol=1e-4, rtol=1e-4)


def test_greedy_cached_decoding_gives_the_published_models_tokens(case):
  model, params, expected = case
  ids, mask, greedy = (expected[k] for k in ("input_ids", "attention_mask", "greedy_tokens"))
  new = greedy[:, ids.shape[1] :] if greedy.shape[1] > ids.shape[1] else greedy
  rollouts = generate(
    params,
    Prompts(tokens=jnp.asarray(ids, jnp.int32), lengths=jnp.asarray(mask.sum(1), jnp.int32)),
    jax.random.key(0),
    model=model,
    group_size=1,
    max_new_tokens=new.shape[1],
    sampling=Sampling(temperature=0.0),
    stop_tokens=(),
    pad_token=0,
  )
  np.testing.assert_array_equal(rollouts.tokens[:, 0], new)
