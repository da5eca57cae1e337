"""The network's structure: causality, padding, the shared prompt, options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import networks
from oracles.rows import lay_rows

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.linear import dense
from rlvr_jax.models.presets import preset
from rlvr_jax.models.rotary import RopeScaling, inverse_frequencies
from rlvr_jax.models.transformer import Transformer, TransformerConfig
from rlvr_jax.types import Prompts

SMALL = TransformerConfig(
  vocab_size=40, width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=24
)
P, G, S, T = 2, 3, 6, 5


@functools.cache
def _setup():
  model = transformer(SMALL)
  model = model._replace(response_hidden=jax.jit(model.response_hidden))
  params = jax.jit(model.init)(jax.random.key(0))
  rng = np.random.default_rng(0)
  prompts = Prompts(
    tokens=jnp.asarray(rng.integers(0, 40, (P, S))), lengths=jnp.asarray([S, 3], jnp.int32)
  )
  return model, params, prompts, jnp.asarray(rng.integers(0, 40, (P, G, T)))


def test_a_hidden_state_depends_on_earlier_tokens_only():
  model, params, prompts, tokens = _setup()
  hidden = model.response_hidden
  base = np.asarray(hidden(params, prompts, tokens))
  for t in range(T):
    others = np.array(tokens)
    others[:, 1, t] = (others[:, 1, t] + 1) % 40
    same = np.all(base == hidden(params, prompts, others), axis=-1)  # [P, G, T]
    assert same[:, [0, 2]].all()  # other rollouts never see it
    assert same[:, 1, : t + 1].all()
    assert not same[:, 1, t + 1 :].any()


def test_gradients_of_kernels_are_not_rounded_to_the_compute_dtype():
  """Of products in bfloat16 they are float32: rounded, they would be off by 4e-3 of their size."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
  x, kernel, cotangent = draw(3, 40, 16), draw(16, 24).astype(jnp.float32), draw(3, 40, 24)
  out, pullback = jax.vjp(lambda x, w: dense(x, nnx.Param(w)), x, kernel)
  into_x, into_kernel = pullback(cotangent)
  assert (out.dtype, into_x.dtype, into_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
  wide = lambda x: np.asarray(x, np.float64)
  expected = np.einsum("pld,ple->de", wide(x), wide(cotangent))
  np.testing.assert_allclose(into_kernel, expected, atol=1e-5)
  np.testing.assert_allclose(wide(into_x), wide(cotangent) @ wide(kernel).T, rtol=1e-2, atol=5e-2)


def test_left_padding_changes_nothing():
  model, params, prompts, tokens = _setup()
  wider = Prompts(
    tokens=jnp.pad(prompts.tokens, [(0, 0), (4, 0)], constant_values=7), lengths=prompts.lengths
  )
  other = Prompts(tokens=prompts.tokens.at[1, :3].set(9), lengths=prompts.lengths)  # padding only
  base = model.response_hidden(params, prompts, tokens)
  np.testing.assert_allclose(model.response_hidden(params, wider, tokens), base, atol=2e-6)
  np.testing.assert_array_equal(model.response_hidden(params, other, tokens), base)


def test_bfloat16_compute_is_near_float32():
  model, params, prompts, tokens = _setup()
  low = transformer(dataclasses.replace(SMALL, compute_dtype="bfloat16"))
  hidden = jax.jit(low.response_hidden)(params, prompts, tokens)
  assert hidden.dtype == jnp.bfloat16
  exact = model.response_hidden(params, prompts, tokens)
  np.testing.assert_allclose(hidden.astype(jnp.float32), exact, atol=0.15)


# Norms behind alone, jointly over heads; half of a head rotates, in the first of two layers.
UNUSUAL = dataclasses.replace(
  SMALL,
  joint_qk_norm=True,
  pre_norm=False,
  post_norm=True,
  rotary_width=4,
  unrotated_layers=(False, True),
)


def plain_hidden(params, tokens):
  """Final states [L, D] of one sequence under `UNUSUAL`, layer by layer and head by head."""
  norm = lambda x, scale: x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale
  position = jnp.arange(len(tokens))
  x = params["embedding"][tokens]
  for layer in range(2):
    w = jax.tree.map(lambda stacked, layer=layer: stacked[layer], params["blocks"])

    def rotated(head, layer=layer):
      if layer == 1:
        return head
      pairs = head[:, 0:2] + 1j * head[:, 2:4]
      turned = pairs * jnp.exp(1j * position[:, None] * jnp.asarray([1.0, 0.01]))
      return jnp.concatenate([turned.real, turned.imag, head[:, 4:]], axis=-1)

    queries = norm(x @ w["query"], w["query_norm"]["scale"])
    keys = norm(x @ w["key"], w["key_norm"]["scale"])
    values, heads = x @ w["value"], []
    for n in range(4):
      query, head = queries[:, 8 * n : 8 * n + 8], slice(8 * (n // 2), 8 * (n // 2) + 8)
      scores = rotated(query) @ rotated(keys[:, head]).T / 8**0.5
      scores = jnp.where(position[:, None] >= position, scores, -jnp.inf)
      heads.append(jax.nn.softmax(scores, axis=-1) @ values[:, head])
    x = x + norm(jnp.concatenate(heads, axis=-1) @ w["output"], w["post_attention_norm"]["scale"])
    mlp = (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    x = x + norm(mlp, w["post_mlp_norm"]["scale"])
  return norm(x, params["final_norm"]["scale"])


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_rows_and_their_gradients_are_those_of_the_plain_formulas(x64, remat):
  wide = dict(compute_dtype="float64", param_dtype="float64")
  model = transformer(dataclasses.replace(UNUSUAL, remat=remat, **wide))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.5 + (x.ndim < 3)),
    jax.eval_shape(model.init, jax.random.key(0)),
  )
  tokens = rng.integers(0, 40, 7)
  rows = lay_rows(7, [(2, [5])], [], alignment=1)  # the second row is padding

  def of_rows(params):
    return model.row_hidden(params, jnp.stack([tokens, tokens * 0]), rows)[0]

  def gradient(hidden):
    return jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(hidden(p)))))(params)

  found, expected = gradient(of_rows), gradient(lambda p: plain_hidden(p, tokens))
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9)
  assert all(np.any(x != 0) for x in jax.tree.leaves(found))


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths():
  scaling = RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8192
  )
  plain = inverse_frequencies(128, 500_000.0, None)
  scaled = inverse_frequencies(128, 500_000.0, scaling)
  wavelength = 2 * np.pi / plain
  np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
  np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
  between = (wavelength > 8192 / 4) & (wavelength < 8192)
  assert between.any() and bool(((scaled < plain) & (scaled > plain / 8))[between].all())


def test_presets_have_the_published_sizes():
  published = {  # millions of parameters, from the models' cards and their checkpoints
    "qwen2.5_0.5b": 494.0,
    "qwen2.5_1.5b": 1543.7,
    "qwen2.5_7b": 7615.6,
    "qwen3_4b": 4022.5,
    "qwen3_8b": 8190.7,
    "qwen3_30b_a3b": 30532.1,
    "olmoe_1b_7b": 6919.2,
    "mixtral_8x7b": 46702.8,
    "llama3.2_1b": 1235.8,
    "llama3.2_3b": 3212.7,
    "mistral_7b": 7248.0,
    "olmo2_1b": 1484.9,
    "olmo3_7b": 7298.0,
    "smollm3_3b": 3075.1,
    "glm_z1_9b": 9400.3,
    "gemma2_2b": 2614.3,
    "gemma3_1b": 999.9,
    "gemma4_31b": 30697.3,
  }
  for name, expected in published.items():
    shapes = jax.eval_shape(lambda name=name: Transformer(preset(name), nnx.Rngs(0)))
    millions = sum(np.prod(x.shape) for x in jax.tree.leaves(shapes)) / 1e6
    assert millions == pytest.approx(expected, abs=0.06), name


TINY, DELTA, SPARSE, HEADS = (
  preset("tiny"), networks.DELTA, networks.SOME_EXPERTS, networks.FULL_HEADS
)  # fmt: skip


@pytest.mark.parametrize(
  ("config", "changes", "word"),
  [
    (TINY, dict(activation="relu"), "activation='relu'"),
    (TINY, dict(remat="some"), "remat"),
    (TINY, dict(num_heads=5), "num_heads=5"),
    (TINY, dict(head_dim=7), "even"),
    (TINY, dict(compute_dtype="float16"), "float16"),
    (TINY, dict(sliding_layers=(True,), sliding_window=4), "has 1 entries"),
    (TINY, dict(sliding_layers=(True,) * 4), "sliding_window is None"),
    (TINY, dict(sliding_layers=3), "sliding_layers=3 must have a truth value"),
    (TINY, dict(sliding_window=4), "sliding_window is set, but no layer"),
    (TINY, dict(sliding_rope_theta=1e4), "sliding_rope_theta is set, but no layer"),
    (TINY, dict(sliding_layers=(True,) * 4, sliding_window=0), "sliding_window=0 must be"),
    (TINY, dict(attention_soft_cap=0.0), "attention_soft_cap=0.0 must be a number above 0"),
    (TINY, dict(final_soft_cap=-1), "final_soft_cap=-1"),
    (TINY, dict(rope_theta="x"), "rope_theta='x'"),
    (TINY, dict(norm_epsilon=None), "norm_epsilon=None must be a number above 0"),
    (TINY, dict(query_scale=True), "query_scale=True"),
    (TINY, dict(unrotated_layers=(True,)), "unrotated_layers has 1 entries"),
    (TINY, dict(rotary_width=5), "rotary_width=5"),
    (TINY, dict(rotary_width=34), "rotary_width=34"),
    (TINY, dict(pre_norm=False), "pre_norm and post_norm"),
    (TINY, dict(num_experts=4, experts_per_token=5, expert_width=8), "exceeds num_experts"),
    (TINY, dict(num_experts=4, expert_width=8), "experts_per_token=0"),
    (TINY, dict(expert_width=8), "expert_width=8 is set"),
    (TINY, dict(expert_products="cutlass"), "expert_products"),
    (TINY, dict(joint_qk_norm=True, qk_norm=True), "qk_norm and joint_qk_norm"),
    (DELTA, dict(delta_layers=(True,)), "delta_layers has 1 entries"),
    (DELTA, dict(delta_layers=(True,) * 3), "one layer must have attention"),
    (DELTA, dict(delta_layers=None), "delta_key_heads is set"),
    (DELTA, dict(delta_layers=(False,) * 3), "delta_key_heads is set"),
    (DELTA, dict(delta_num_taps=0), "delta_num_taps=0"),
    (DELTA, dict(delta_key_dim=4.0), "delta_key_dim=4.0"),
    (DELTA, dict(delta_value_heads=3), "delta_value_heads=3"),
    (DELTA, dict(shared_expert_width=8), "shared_expert_width=8"),
    (SPARSE, dict(sparse_layers=(True,)), "sparse_layers has 1 entries"),
    (SPARSE, dict(sparse_layers=(False,) * 5), "experts in at least one layer"),
    (SPARSE, dict(num_experts=0, experts_per_token=0, expert_width=0), "with num_experts=0"),
    (HEADS, dict(full_kv_heads=None), "full_kv_heads=None"),
    (HEADS, dict(full_kv_heads=3), "full_kv_heads=3"),
    (HEADS, dict(full_head_dim=7), "full_head_dim=7 must be even"),
    (HEADS, dict(rotary_width=2), "rotary_width=2 and full_head_dim"),
    (HEADS, dict(sliding_layers=(True,) * 4), "full_head_dim=12 is set"),
    (HEADS, dict(full_head_dim=None, full_kv_heads=None), "full_keys_as_values is set"),
  ],
)
def test_impossible_settings_are_refused(config, changes, word):
  with pytest.raises(ValueError, match=word):
    dataclasses.replace(config, **changes)


def test_unknown_names_are_told_the_near_ones():
  with pytest.raises(ValueError, match="'width'"):
    preset("tiny", widht=3)
  with pytest.raises(ValueError, match="qwen3_8b"):
    preset("qwen3_8")
