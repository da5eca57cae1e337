"""Small networks of every kind that is not a plain transformer, and what is sampled of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from oracles import updates

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.rotary import PartialFrequencies
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.logprobs import token_logprobs
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Prompts, Sampling

V, S = 32, 6  # tokens of the vocabulary, and places of a prompt
FLOAT64 = dict(compute_dtype="float64", param_dtype="float64")  # under x64
_PLAIN = TransformerConfig(
  vocab_size=V, width=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=20
)
_EXPERTS = dict(
  num_experts=5, experts_per_token=2, expert_width=12, normalized_expert_weights=True
)  # fmt: skip

# As Qwen 3.5: gated DeltaNets around a layer of gated attention.
DELTA = dataclasses.replace(
  _PLAIN,
  qk_norm=True,
  zero_centered_norm=True,
  attention_gate=True,
  rotary_width=2,
  delta_layers=(True, False, True),
  delta_key_heads=2,
  delta_value_heads=4,
  delta_key_dim=8,
  delta_value_dim=12,
  delta_num_taps=4,
)
DELTA_MIXTURE = dataclasses.replace(DELTA, **_EXPERTS, shared_expert_width=10)
# As Qwen 3 with experts: in every layer, and in some of them.
EXPERTS = dataclasses.replace(_PLAIN, qk_norm=True, num_layers=2, mlp_width=1, **_EXPERTS)
SOME_EXPERTS = dataclasses.replace(
  _PLAIN,
  qk_norm=True,
  num_layers=5,
  sparse_layers=(False, True, False, True, True),
  **_EXPERTS,
)
# As Gemma 4: full layers have other heads than sliding ones.
FULL_HEADS = dataclasses.replace(
  _PLAIN,
  num_layers=4,
  num_heads=8,
  num_kv_heads=4,
  head_dim=4,
  activation="gelu_tanh",
  rope_theta=100.0,
  rope_scaling=PartialFrequencies(part=0.5),
  sliding_rope_theta=10.0,
  sliding_layers=(True, False) * 2,
  sliding_window=3,
  full_head_dim=12,
  full_kv_heads=2,
  full_keys_as_values=True,
  value_norm=True,
  qk_norm=True,
  post_norm=True,
  layer_scale=True,
  scaled_embedding=True,
  query_scale=1.0,
  final_soft_cap=5.0,
)
NETWORKS = {
  "plain": dataclasses.replace(_PLAIN, qkv_bias=True, tied_head=False, final_soft_cap=15.0),
  "delta": DELTA,
  "delta mixture": DELTA_MIXTURE,
  # Of three key heads, which two devices do not divide.
  "odd delta": dataclasses.replace(DELTA, delta_key_heads=3, delta_value_heads=3),
  "experts": EXPERTS,
  "some experts": SOME_EXPERTS,
  "experts at last": dataclasses.replace(
    SOME_EXPERTS, num_layers=3, sparse_layers=(False, True, True)
  ),
  "experts at first": dataclasses.replace(
    SOME_EXPERTS, num_layers=3, sparse_layers=(True, True, False)
  ),
  "full heads": FULL_HEADS,
  # In a loop whose layers are two in one stack and one in the other.
  "longer full heads": dataclasses.replace(
    FULL_HEADS, sliding_layers=(True, True, False) * 2, num_layers=6
  ),
}


@functools.cache
def params_of(config, seed=0):
  """Parameters under which tokens differ; of a Gemma 4 no factor, norm or kernel is 1."""
  if config.full_head_dim:
    return random_params(config, seed)
  params = updates.small_model(config).init(jax.random.key(seed))
  return {**params, "embedding": params["embedding"] * 1.5}


def random_params(config, seed=0):
  """Of the parameters' shapes; vectors are around 1."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(transformer(config).init, jax.random.key(0))
  draw = lambda x: rng.normal(size=x.shape) * 0.3 + (x.ndim < 3)
  params = jax.tree.map(lambda x: jnp.asarray(draw(x), x.dtype), shapes)
  params["embedding"] = params["embedding"] - 1
  return params


def random_prompts(number, lengths=S):
  """Prompts of tokens that end no response."""
  tokens = np.random.default_rng(0).integers(4, V, (number, S)).astype(np.int32)
  return Prompts(tokens, np.broadcast_to(lengths, number).astype(np.int32))


def make_engine(model, *, slots=8, prefill_rows=8, max_new_tokens=5, **settings):
  """Programs that sample up to five tokens after a prompt; token 3 ends a response."""
  return EnginePrograms(
    model,
    Sampling(),
    slots=slots,
    prefill_rows=prefill_rows,
    max_prompt_length=S,
    max_new_tokens=max_new_tokens,
    stop_tokens=(3,),
    pad_token=0,
    **settings,
  )


@functools.cache
def _scores(config):
  model = updates.small_model(config)

  @jax.jit
  def run(params, prompts, tokens):
    hidden = model.response_hidden(params, prompts, tokens)
    return token_logprobs(hidden, model.head(params), tokens)[0]

  return run


def sampled_and_scored(config, params, prompts, rollouts):
  """Log-probabilities of the sampled tokens, as recorded and as the trainer computes them."""
  sampled = np.arange(rollouts.tokens.shape[-1]) < rollouts.lengths[..., None]
  found = _scores(config)(params, jax.tree.map(jnp.asarray, prompts), rollouts.tokens)
  return rollouts.behavior_logprobs[sampled], np.asarray(found)[sampled]


@functools.cache
def make_method(config, mesh=None, **changes):
  """An update of this network in float64."""
  config = dataclasses.replace(config, **FLOAT64)
  method = updates.make_method("float64", mesh, **changes)
  return method._replace(model=updates.small_model(config, mesh))


def on_mesh(params, mesh):
  """Parameters as training places them."""
  return jax.device_put(params, sharding.state_shardings(params, mesh))
