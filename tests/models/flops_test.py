"""Model FLOPs against the programs' own products, a mask counted key by key, and the 6·N rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.flops import product_flops as count_products

from rlvr_jax.models import lora
from rlvr_jax.models.flops import forward_flops, update_flops
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.caches import Blocks, Cache, CacheShape, Reach
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.rollouts import decoder
from rlvr_jax.types import Prompts, Sampling

FULL = TransformerConfig(
  vocab_size=40, width=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, mlp_width=28
)
SLIDING = dataclasses.replace(FULL, sliding_layers=(True, True, False), sliding_window=3)
CONFIGS = pytest.mark.parametrize("config", [FULL, SLIDING], ids=["full", "sliding"])
P, G, S, T = 2, 3, 6, 5
PER_KEY = 2 * 2 * FULL.num_heads * FULL.head_dim  # two products with each key and value


def product_flops(function, *args):
  return count_products(jax.make_jaxpr(function)(*args))


def setup(config):
  model = transformer(config)
  params = jax.eval_shape(model.init, jax.random.key(0))
  prompts = Prompts(tokens=jnp.ones((P, S), jnp.int32), lengths=jnp.full(P, S))
  return model, params, prompts, jnp.ones((P, G, T), jnp.int32)


def visible(config, length):
  """bool[layers, length, length], by the rule of attention: not later, not too far back."""
  distance = np.arange(length)[:, None] - np.arange(length)
  windows = [
    config.sliding_window if slides else length + 1
    for slides in config.sliding_layers or [False] * config.num_layers
  ]
  return np.stack([(distance >= 0) & (distance < window) for window in windows])


@CONFIGS
def test_a_training_pass_differs_by_the_masked_scores_that_it_computes(config):
  model, params, prompts, tokens = setup(config)

  def logits(params):
    hidden = model.response_hidden(params, prompts, tokens)
    return head_logits(hidden, model.head(params))

  seen = visible(config, S + T - 1)
  masked = np.sum(~seen[:, :S, :S]) + G * np.sum(~seen[:, S:])
  assert masked > 50
  lengths = np.full(P, S), np.full((P, G), T)
  wasted = P * PER_KEY * masked
  assert product_flops(logits, params) == forward_flops(config, *lengths) + wasted
  gradient = jax.grad(lambda params: jnp.sum(logits(params)))
  assert product_flops(gradient, params) == update_flops(config, *lengths) + 3 * wasted


@pytest.mark.parametrize("targets", ["blocks", "(query|down)$"])
def test_frozen_kernels_have_no_gradients(targets):
  model, base, prompts, tokens = setup(FULL)
  settings = lora.LoraSettings(rank=2, alpha=1.0, targets=targets)
  adapters = jax.eval_shape(lambda base: lora.init(jax.random.key(0), base, settings), base)

  def loss(adapters, base):
    params = lora.combine(adapters, base, settings)
    hidden = model.response_hidden(params, prompts, tokens)
    return jnp.sum(head_logits(hidden, model.head(params)))

  seen = visible(FULL, S + T - 1)
  wasted = P * PER_KEY * (np.sum(~seen[:, :S, :S]) + G * np.sum(~seen[:, S:]))
  expected = update_flops(FULL, np.full(P, S), np.full((P, G), T), adapters=adapters) + 3 * wasted
  assert product_flops(jax.grad(loss), adapters, base) == expected
  assert expected < update_flops(FULL, np.full(P, S), np.full((P, G), T))


@CONFIGS
def test_generation_with_a_cache_costs_the_same(config):
  """But for the last token of a prompt, which is decoded in every slot."""
  model, params, prompts, _ = setup(config)
  shape = CacheShape(Blocks(S - 1, 1), Blocks(S - 1, 0), steps=T)
  settings = decoder.Settings(model, Sampling(), P * G, shape, T, ())

  def generate(params):
    params = model.decoding_params(params)
    prompt = decoder.prefill(params, prompts.tokens[:, 1:], settings=settings).prompts
    prompt = jax.tree.map(lambda x: jnp.repeat(x, G, axis=2), prompt)
    zeros = lambda: Cache.zeros((config.num_kv_heads, P * G), T, config.head_dim, jnp.float32)
    empty = Cache.zeros((config.num_kv_heads, 0, P * G), S - 1, config.head_dim, jnp.float32)
    caches = [(layer, empty) for layer in prompt]
    staged = tuple(zeros() for _ in caches)
    reach = Reach(jnp.full(P * G, S - 1), jnp.zeros(P * G, jnp.int32))
    tables = decoder.rotary_tables(reach, settings=settings)
    token, logits = jnp.ones(P * G, jnp.int32), []
    for t in range(T):
      hidden, staged, *_ = decoder.decode(
        params, caches, staged, (), reach, tables, token, t, reach.prompt > 0, settings=settings
      )
      logits.append(head_logits(hidden, model.head(params)))
    return logits

  seen = visible(config, S + T - 1)
  masked = np.sum(~seen[:, : S - 1, : S - 1]) + G * np.sum(~seen[:, S - 1 :])
  # As a response of T + 1 tokens to a shorter prompt, without the logits of its first token.
  lengths = np.full(P, S - 1), np.full((P, G), T + 1)
  first = P * G * 2 * config.width * config.vocab_size
  expected = forward_flops(config, *lengths) - first + P * PER_KEY * masked
  assert product_flops(generate, params) == expected


@CONFIGS
def test_lengths_count_as_they_are(config):
  """Token by token, key by key."""
  prompt_lengths, response_lengths = [4, 1], [[5, 1, 2], [7, 3, 0]]
  weights = 2 * 16 * (4 * 6) + 2 * 16 * (2 * 6) + 3 * 16 * 28  # of a layer
  of_prompts = of_responses = 0
  for s, group in zip(prompt_lengths, response_lengths, strict=True):
    of_prompts += 3 * 2 * weights * s + PER_KEY * np.sum(visible(config, s))
    for t in group:
      inside = max(t - 1, 0)
      of_responses += 3 * 2 * weights * inside + 2 * 16 * 40 * t
      of_responses += PER_KEY * np.sum(visible(config, s + inside)[:, s:])
  lengths = prompt_lengths, response_lengths
  assert forward_flops(config, *lengths) == of_prompts + of_responses
  assert forward_flops(config, *lengths, shared_prompt=False) == G * of_prompts + of_responses


@pytest.mark.parametrize("name", ["qwen2.5_7b", "gemma3_1b", "qwen3_30b_a3b"])
def test_a_large_model_at_short_context_follows_six_n(name):
  config = preset(name)
  params = jax.eval_shape(transformer(config).init, jax.random.key(0))
  num_params = sum(x.size for x in jax.tree.leaves(params))
  if not config.tied_head:  # rows of the embedding are looked up, not multiplied
    num_params -= params["embedding"].size
  if config.experts is not None:  # a token multiplies those of the experts that it chooses
    of_experts = sum(params["blocks"]["experts"][name].size for name in ("gate", "up", "down"))
    num_params -= of_experts * (1 - config.experts_per_token / config.num_experts)
  lengths = np.full(2, 8), np.full((2, 16), 128)
  tokens = lengths[0].sum() + lengths[1].sum()
  assert update_flops(config, *lengths) == pytest.approx(6 * num_params * tokens, rel=0.03)


def test_lengths_that_are_none():
  message = r"shape \[3\] and response_lengths has shape \[2, 2\]; the shapes must be \[P\] and"
  with pytest.raises(ValueError, match=message):
    forward_flops(FULL, [1, 2, 3], [[1, 2], [3, 4]])
  message = r"shortest prompt has 0 .* shortest response 0; a prompt must have at least 1 token"
  with pytest.raises(ValueError, match=message):
    forward_flops(FULL, [0], [[1, 2]])
  message = r"predicted has shape \[1, 2\]; it must .*no value above the length of its response"
  with pytest.raises(ValueError, match=message):
    forward_flops(FULL, [1], [[1, 2]], predicted=[[2, 2]])
  with pytest.raises(ValueError, match="shortest response -1"):
    forward_flops(FULL, [1], [[1, -1]])
