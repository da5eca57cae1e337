"""Random models with rollouts, and what the update's forward pass leaves behind, in plain jnp."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from oracles import batches

from rlvr_jax.geometry import GramContext
from rlvr_jax.models.functional import take_trained, transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.packing import pack_batch, row_layout
from rlvr_jax.types import Forward, Head, Prompts

P, G, S, T, D, V = 4, 2, 3, 5, 8, 19


def make_batch(seed, *, prompts=P, group=G, length=T, vocabulary=V):
  """Masks with holes, and one rollout with nothing left of it."""
  rng = np.random.default_rng(seed)
  shape = (prompts, group, length)
  mask = (rng.random(shape) < 0.7).astype(np.float32)
  mask[1, 1] = 0
  return batches.make_batch(
    mask,
    rewards=np.zeros(shape[:2], np.float32),
    prompts=batches.random_prompts(rng, prompts, S, vocabulary),
    tokens=rng.integers(0, vocabulary, shape).astype(np.int32),
  )


def make_transformer(*, dtype="float64", scale=1.0, **config):
  """(model, params) of a small transformer with a scaled head; any parameter may be any number."""
  defaults = dict(
    vocab_size=V, width=D, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, mlp_width=8
  )
  config = TransformerConfig(**{**defaults, **config}, compute_dtype=dtype, param_dtype=dtype)
  model = transformer(config)
  rng = np.random.default_rng(1)
  draw = lambda leaf: jnp.asarray(0.5 * rng.standard_normal(leaf.shape), leaf.dtype)
  params = jax.tree.map(draw, jax.eval_shape(model.init, jax.random.key(0)))
  return model._replace(head=lambda params: model.head(params)._replace(scale=scale)), params


def make_lookup(*, dtype="float64", scale=1.0, soft_cap=None, vocab_size=V, width=D):
  """(model, params) of a network that looks its hidden states up by prompt and own token."""
  rng = np.random.default_rng(1)
  params = {
    "table": jnp.asarray(rng.standard_normal((vocab_size, vocab_size, width)), dtype),
    "kernel": jnp.asarray(0.5 * rng.standard_normal((width, vocab_size)), dtype),
  }
  model = SimpleNamespace(
    config=SimpleNamespace(tied_head=False, kinds=(("attention", "dense"),)),
    combine=take_trained,
    head=lambda params: Head(params["kernel"], scale, soft_cap),
    response_hidden=lambda params, prompts, tokens: params["table"][
      prompts.tokens[:, -1, None, None], tokens
    ],
  )
  return model, params


def logits_of(hidden, head):
  hidden = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
  logits = hidden @ head.kernel.astype(hidden.dtype) * head.scale
  return logits if head.soft_cap is None else head.soft_cap * jnp.tanh(logits / head.soft_cap)


def make_forward(params, batch, setting, projection=None):
  return jax.jit(lambda params, batch: _forward(params, batch, setting, projection))(params, batch)


def _forward(params, batch, setting, projection):
  hidden = setting.model.response_hidden(params, batch.prompts, batch.tokens)
  head = setting.model.head(params)
  logits = logits_of(hidden, head)
  log_normalizers = jax.nn.logsumexp(logits / setting.temperature, axis=-1)
  chosen = jnp.take_along_axis(logits, batch.tokens[..., None], axis=-1)[..., 0]
  logprobs = chosen / setting.temperature - log_normalizers
  projected = None
  if projection is not None:
    d = jax.nn.softmax(logits / setting.temperature)
    d = (d - jax.nn.one_hot(batch.tokens, logits.shape[-1])) * head.scale / setting.temperature
    if head.soft_cap is not None:
      d *= 1 - (logits / head.soft_cap) ** 2
    projected = d @ projection.astype(d.dtype)
  rows = lambda x: x.reshape(1, -1, *x.shape[2:])  # one rollout each
  return Forward(*jax.tree.map(rows, (hidden, log_normalizers, projected, logprobs)))


def in_rows(batch, forward, *, rows=1, length=12, devices=1):
  """The same case packed, in micro-batches of `rows` rows; NaN where no token of a rollout lies."""
  shape = dict(zip(("prompts", "group_size", "max_response_length"), batch.mask.shape, strict=True))
  layout = row_layout(
    **shape,
    max_prompt_length=S,
    length=length,
    alignment=1,
    devices=devices,
    tokens_per_micro_batch=rows * length,
  )
  packed = pack_batch(jax.device_get(batch), layout)
  places, shape = packed.packed.places, packed.packed.tokens.shape

  def lay(x):
    flat = np.full((np.prod(shape), *x.shape[3:]), np.nan, x.dtype)
    flat[places[places >= 0]] = x.reshape(-1, *x.shape[3:])[places.reshape(-1) >= 0]
    return jnp.asarray(flat.reshape(*shape, *x.shape[3:]))

  return packed, jax.tree.map(lay, jax.device_get(forward))


def make_case(make=make_lookup, *, temperature=1.0, batch=None, **model):
  """(params, batch, forward, setting)."""
  model, params = make(**model)
  setting = GramContext(model, temperature)
  batch = make_batch(0) if batch is None else batch
  return params, batch, make_forward(params, batch, setting), setting


def rollout_loss(params, batch, setting, i, *, head_params=None):
  """−Σ_t m log π of rollout i in the order of tokens.reshape(B, T), with plain log_softmax."""
  p, g = i // batch.tokens.shape[1], i % batch.tokens.shape[1]
  one = Prompts(tokens=batch.prompts.tokens[p][None], lengths=batch.prompts.lengths[p][None])
  tokens = batch.tokens[p, g]
  hidden = setting.model.response_hidden(params, one, tokens[None, None])[0, 0]
  head = setting.model.head(params if head_params is None else head_params)
  logprobs = jax.nn.log_softmax(logits_of(hidden, head) / setting.temperature)
  return -jnp.sum(batch.mask[p, g] * jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0])
