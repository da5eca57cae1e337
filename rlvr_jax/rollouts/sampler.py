"""Generation: prefill once per prompt, then one cached decode loop for all its rollouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.ops.logprobs import distribution, head_logits
from rlvr_jax.types import Array, Params, Prompts, Rollouts, Sampling


def generate(
  trained: Params,
  frozen: Params,
  prompts: Prompts,
  key: Array,
  *,
  model: Any,
  group_size: int,
  max_new_tokens: int,
  sampling: Sampling,
  stop_tokens: tuple[int, ...],
  pad_token: int,
) -> Rollouts:
  """Samples G rollouts for every prompt; pure, to be jitted with all keyword arguments static.

  Ends as soon as every row has stopped. Row (p, g) samples with its own key, so its tokens depend
  on neither the mesh nor the batch's other rows.

  Args:
    trained, frozen: the behavior policy's parameters, see `Model.combine`.
    prompts: P left-padded prompts.
    key: one PRNG key for this call.
    model: provides `combine`, `decoding_params`, `start_decoding` and `head`.
    group_size: G.
    max_new_tokens: T.
    sampling: the distribution to sample from.
    stop_tokens: any of them ends a response; it is part of the response.
    pad_token: fills the response after its end.
  Returns:
    Rollouts [P, G, T], with exact log-probabilities under the distribution sampled from.
  """
  # Over 60 lines: the parts of one loop, which share the variables of the batch.
  P, G, T = prompts.tokens.shape[0], group_size, max_new_tokens
  params = model.decoding_params(model.combine(trained, frozen))
  lengths_of_cache = cache_lengths(T)
  hidden, cache, step = model.start_decoding(params, prompts, G, lengths_of_cache[0])
  head = model.head(params)
  stops = jnp.asarray(stop_tokens, jnp.int32)
  row_keys = jax.random.split(key, (P, G))

  def sample(hidden, t):
    """Tokens i32[P, G] and their log-probabilities f32[P, G] from hidden [P, G, D]."""
    with jax.named_scope("head"):
      logprobs = distribution(head_logits(hidden, head), sampling)
    if sampling.temperature == 0:
      tokens = jnp.argmax(logprobs, axis=-1)
    else:
      noise = lambda row: jax.random.gumbel(jax.random.fold_in(row, t), logprobs.shape[-1:])
      # A barrier before the argmax: fused with it, XLA on CPU computes the logarithms one by one.
      noise = jax.lax.optimization_barrier(jax.vmap(jax.vmap(noise))(row_keys))
      tokens = jnp.argmax(logprobs + noise, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    return tokens.astype(jnp.int32), chosen

  def write(state, sampled, t):
    """Records position t for the rows that have not stopped."""
    tokens, logprobs, lengths, running, cache = state
    token, logprob = sampled
    token = jnp.where(running, token, pad_token)
    tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[..., None], t, axis=2)
    logprob = jnp.where(running, logprob, 0.0)[..., None].astype(logprobs.dtype)
    logprobs = jax.lax.dynamic_update_slice_in_dim(logprobs, logprob, t, axis=2)
    lengths = lengths + running
    running = running & ~jnp.any(token[..., None] == stops, axis=-1)
    return tokens, logprobs, lengths, running, cache

  state = (
    jnp.full((P, G, T), pad_token, jnp.int32),
    jnp.zeros((P, G, T), jnp.promote_types(hidden.dtype, jnp.float32)),
    jnp.zeros((P, G), jnp.int32),
    jnp.ones((P, G), bool),
    cache,
  )
  # All rollouts of a prompt share its last hidden state, but each samples its own first token.
  first = sample(jnp.broadcast_to(hidden[:, None], (P, G, hidden.shape[-1])), 0)
  state = write(state, first, 0)

  def body(loop):
    t, (tokens, logprobs, lengths, running, cache) = loop
    last = jax.lax.dynamic_index_in_dim(tokens, t - 1, axis=2, keepdims=False)
    hidden, cache = step(cache, last, t - 1)
    return t + 1, write((tokens, logprobs, lengths, running, cache), sample(hidden, t), t)

  t = 1
  for limit in lengths_of_cache:
    *others, cache = state
    state = (*others, tuple(keys.grown(limit) for keys in cache))
    # Position t is decoded from token t − 1, whose keys are the cache's entry t − 1.
    unfinished = lambda loop, limit=limit: (loop[0] < min(limit + 1, T)) & jnp.any(loop[1][3])
    t, state = jax.lax.while_loop(unfinished, body, (t, state))
  tokens, logprobs, lengths, running, _ = state
  return Rollouts(tokens=tokens, lengths=lengths, stopped=~running, behavior_logprobs=logprobs)


def cache_lengths(max_new_tokens: int) -> list[int]:
  """The increasing lengths of the cache: a decoding step reads all of it, so it starts short.

  Each length compiles to a separate program. So there is one length for up to 31 tokens, two for up
  to 511, and four above, which read 100 %, 75 % and 62.5 % of what a full-length cache would.

  Returns:
    Lengths in tokens; the last one is `max_new_tokens`.
  """
  parts = 1 if max_new_tokens < 32 else 2 if max_new_tokens < 512 else 4
  return [-(-max_new_tokens * part // parts) for part in range(1, parts + 1)]
