"""Checkpoints to and from `transformers` itself, which needs torch: pip install torch (CPU)."""

from __future__ import annotations

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.checkpoints import golden_folders, load, logits_after, old_style

from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.huggingface_config import config_fields
from rlvr_jax.models.rotary import inverse_frequencies, rotary_tables

torch = pytest.importorskip("torch", reason="transformers computes with torch, not installed")
transformers = pytest.importorskip("transformers")
ROPE_INIT_FUNCTIONS = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS

_SHARED = os.environ.get("RLVR_SHARED")
_FOLDERS, _ = golden_folders("hf", "hf_moe", "hf_families")
_MIXTURES = ("qwen3_moe", "olmoe", "mixtral")
_DENSE = ("olmo2", "olmo3", "smollm3", "mistral", "glm4")
_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
_LATER = (*_DENSE, *_HYBRIDS, "gemma4_text")
_FAMILIES = ("qwen2", "qwen3", "llama", "gemma2", "gemma3_text", *_MIXTURES, *_LATER)
_PROMPT, _LENGTH = 6, 20  # tokens


def their_logits(directory, ids, mask, **options):
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager", **options
  ).eval()
  ids, mask = torch.as_tensor(ids), torch.as_tensor(mask)
  positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
  with torch.no_grad():
    return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.numpy()


def batch(vocab_size):
  """Left-padded prompts and their responses."""
  ids = np.random.default_rng(1).integers(0, vocab_size, (3, _LENGTH))
  mask = np.ones_like(ids)
  mask[1, :3], mask[2, : _PROMPT - 1] = 0, 0
  return ids, mask


@pytest.mark.skipif(not _SHARED, reason="RLVR_SHARED is not set")
@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda folder: folder.name)
def test_exports_of_the_golden_checkpoints_reload_with_the_same_logits(folder, tmp_path):
  model, params = load(folder)
  save_checkpoint(tmp_path / "out", params, model.config, dtype="float32", source=folder)
  expected = np.load(folder / "expected.npz")
  found = their_logits(tmp_path / "out", expected["input_ids"], expected["attention_mask"])
  real = expected["attention_mask"] == 1
  # Expected logits of gated DeltaNets are themselves off by up to 4e-5.
  bound = 1e-5 if model.config.delta is None else 1e-4
  np.testing.assert_allclose(found[real], expected["logits"][real], atol=bound, rtol=bound)


@pytest.mark.parametrize(
  "settings",
  [
    dict(rope_type="linear", factor=3.0),
    dict(rope_type="proportional", partial_rotary_factor=0.4),
    dict(
      rope_type="llama3",
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=32,
    ),
    dict(rope_type="yarn", factor=4.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    dict(rope_type="yarn", factor=4.0, beta_fast=8, beta_slow=2),
    dict(rope_type="yarn", factor=1.0, original_max_position_embeddings=4096, beta_fast=1),
    dict(rope_type="yarn", factor=4.0, attention_factor=0.7),
    dict(rope_type="yarn", factor=4.0, mscale=0.5, mscale_all_dim=0.8),
    dict(rope_type="yarn", factor=None, original_max_position_embeddings=32),
  ],
  ids=str,
)
def test_rotary_tables_are_transformers(settings):
  published = dict(
    max_position_embeddings=128,
    head_dim=24,
    hidden_size=48,
    num_attention_heads=2,
    rope_parameters=settings | dict(rope_theta=5e3),
  )
  config = transformers.AutoConfig.for_model("qwen3", **published)
  theirs, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config)
  ours = config_fields(dict(model_type="qwen3", **published), "")
  scaling = ours["rope_scaling"]
  frequencies = inverse_frequencies(24, ours["rope_theta"], scaling)
  np.testing.assert_allclose(frequencies, theirs.numpy(), rtol=1e-5)
  cosine, sine = rotary_tables(jnp.arange(5), frequencies, scaling)
  angles = np.arange(5)[:, None] * theirs.numpy()
  np.testing.assert_allclose(cosine[:, 0], factor * np.cos(angles), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(sine[:, 0], factor * np.sin(angles), rtol=1e-5, atol=1e-6)


# --- random checkpoints as transformers makes them ------------------------------------------------


def random_settings(family, rng):
  pick = lambda *options: options[rng.integers(len(options))]
  heads = pick(2, 4, 6)
  layers = pick(2, 3, 4)
  c = dict(
    vocab_size=pick(40, 67),
    hidden_size=heads * pick(6, 10),
    intermediate_size=pick(20, 56),
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=pick(*(k for k in (1, 2, 3, 6) if heads % k == 0)),
    head_dim=pick(8, 12, 16),
    rms_norm_eps=pick(1e-5, 1e-6),
    tie_word_embeddings=pick(True, False),
    attention_bias=pick(True, False),
    max_position_embeddings=pick(32, 64),
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
  )
  scaling = pick(
    dict(rope_type="default"),
    dict(rope_type="linear", factor=pick(2.0, 5.0)),
    dict(
      rope_type="llama3",
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=pick(2.0, 4.0),
      original_max_position_embeddings=16,
    ),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=pick(4, 32)),
  )
  rope = dict(rope_theta=pick(100.0, 5e5)) | scaling
  window = pick(3, 7)  # shorter than the sequence
  if family == "llama":
    c |= dict(mlp_bias=pick(True, False), hidden_act=pick("silu", "gelu", "gelu_pytorch_tanh"))
  if family.startswith("qwen") and family not in _HYBRIDS:
    c |= dict(use_sliding_window=pick(True, False), sliding_window=window, max_window_layers=1)
  if family == "qwen2":
    del c["attention_bias"], c["head_dim"]
  if family.startswith("gemma"):
    c |= dict(query_pre_attn_scalar=pick(9, 30), sliding_window=window)
    c |= dict(final_logit_softcapping=pick(2.0, None), attn_logit_softcapping=pick(3.0, None))
    kinds = pick(None, ["full_attention", *["sliding_attention"] * (layers - 1)])
    c |= dict(layer_types=kinds)
  if family in _MIXTURES:
    experts = pick(3, 5)
    number = "num_local_experts" if family == "mixtral" else "num_experts"
    c |= {number: experts, "num_experts_per_tok": pick(1, 2, experts)}
    c |= dict(norm_topk_prob=pick(True, False))
  if family == "qwen3_moe":
    c |= dict(moe_intermediate_size=pick(12, 20))
    c |= dict(decoder_sparse_step=pick(1, 2), mlp_only_layers=pick([], [0]))
  if family in ("olmoe", "mixtral", "olmo2", "olmo3", "smollm3"):
    c |= dict(head_dim=c["hidden_size"] // heads)
  if family in ("mixtral", "mistral"):
    c |= dict(sliding_window=pick(None, window))
  if family == "mixtral":
    del c["attention_bias"], c["norm_topk_prob"]
  if family == "olmo3":
    kinds = pick(None, ["full_attention", *["sliding_attention"] * (layers - 1)])
    c |= dict(sliding_window=window, layer_types=kinds)
    # transformers 5.24 takes this θ for the sliding layers of older files, whatever they say.
    near = dict(rope_type="default", rope_theta=5e5)
    rope = dict(full_attention=rope | dict(rope_theta=5e5), sliding_attention=near)
  if family == "smollm3":
    slides = pick(True, False)
    c |= dict(use_sliding_window=slides, sliding_window=window if slides else None)
    c |= dict(no_rope_layers=pick(None, [0, *[1] * (layers - 1)]), no_rope_layer_interval=2)
    c |= dict(mlp_bias=pick(True, False))
  if family == "glm4":
    part = pick(0.5, 0.25) if c["head_dim"] % 8 == 0 else 0.5
    rope |= dict(partial_rotary_factor=part)
  if family in _HYBRIDS:
    rope |= dict(partial_rotary_factor=0.25 if c["head_dim"] % 8 == 0 else 0.5)
    keys = pick(1, 2, 3)
    c |= dict(attention_bias=False, full_attention_interval=pick(2, layers))
    c |= dict(linear_num_key_heads=keys, linear_num_value_heads=keys * pick(1, 2))
    # Of few numbers, a norm would divide by small ones, and tell rounding.
    c |= dict(linear_key_head_dim=pick(32, 48), linear_value_head_dim=pick(32, 64))
    c |= dict(linear_conv_kernel_dim=pick(2, 4))
  if family == "qwen3_5_moe_text":
    c |= dict(num_experts=5, num_experts_per_tok=pick(1, 2))
    c |= dict(moe_intermediate_size=pick(12, 20), shared_expert_intermediate_size=pick(12, 28))
  if family in ("gemma3_text", "gemma4_text"):
    near = dict(rope_type="default", rope_theta=pick(30.0, 1e4))
    rope = dict(full_attention=rope, sliding_attention=near)
  if family == "gemma4_text":
    kinds = pick(None, ["full_attention", *["sliding_attention"] * (layers - 2), "full_attention"])
    full = dict(rope_type="proportional", partial_rotary_factor=pick(0.25, 0.5), rope_theta=100.0)
    rope = pick(None, dict(full_attention=full, sliding_attention=near))
    c |= dict(layer_types=kinds, global_head_dim=pick(8, 20, 24), hidden_size_per_layer_input=0)
    c |= dict(attention_k_eq_v=pick(True, False), num_global_key_value_heads=pick(None, 1, heads))
    del c["query_pre_attn_scalar"], c["attn_logit_softcapping"]
  return c | dict(rope_parameters=rope)


def randomise(model, seed):
  """Weights under which every one of them moves the logits: fresh models have no biases."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, buffer in model.named_buffers():
      if name.endswith("layer_scalar"):
        buffer.uniform_(0.5, 2.0, generator=generator)
    for weight in model.parameters():
      noise = torch.randn(weight.shape, generator=generator)
      if weight.ndim == 1:
        weight.add_(0.3 * noise)
      else:
        weight.copy_(noise * weight.shape[1] ** -0.5)


def save_random(directory, family, rng, seed, *, older):
  config = transformers.AutoConfig.for_model(family, **random_settings(family, rng))
  torch.manual_seed(seed)  # some fresh parameters are random, to which `randomise` adds
  model = transformers.AutoModelForCausalLM.from_config(config)
  randomise(model, seed)
  model = model.to(torch.bfloat16 if rng.integers(2) else torch.float32)
  model.save_pretrained(directory, max_shard_size="20KB" if rng.integers(2) else "1GB")
  if older:
    path = directory / "config.json"
    published = json.loads(path.read_text())
    kinds = published.get("layer_types")
    rewritten = old_style(published)
    if kinds is not None:
      rewritten["layer_types"] = kinds
    path.write_text(json.dumps(rewritten))
  return config


def check_random(folder, family, seed):
  rng = np.random.default_rng([seed, _FAMILIES.index(family)])
  config = save_random(folder, family, rng, seed, older=bool(seed % 2) and family != "gemma4_text")
  ids, mask = batch(config.vocab_size)
  theirs = their_logits(folder, ids, mask)[:, _PROMPT - 1 :]
  assert theirs.std() > 0.3
  ours = logits_after(*load(folder), ids, _PROMPT, mask)
  np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_random_checkpoint_has_transformers_logits(tmp_path, family):
  check_random(tmp_path, family, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("family", _FAMILIES)
def test_random_checkpoints_have_transformers_logits(tmp_path, family, seed):
  check_random(tmp_path, family, seed)
