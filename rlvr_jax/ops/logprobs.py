"""Logits, the sampled distribution, and token log-probabilities without a [B, T, V] array."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.types import Array, Head, Sampling

_PLAIN = Sampling()
CHUNK_ELEMENTS = 2**24  # logits alive at once: 64 MiB of float32


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
  """Raises ValueError if the settings do not define a distribution."""
  if not 0 <= sampling.temperature < float("inf"):
    raise ValueError(
      f"sampling.temperature={sampling.temperature}; it must be finite and ≥ 0 (0: greedy)"
    )
  if not 0 <= sampling.top_k <= vocab_size:
    raise ValueError(f"sampling.top_k={sampling.top_k}; allowed: 0 (off) … {vocab_size}")
  if not 0 < sampling.top_p <= 1:
    raise ValueError(f"sampling.top_p={sampling.top_p}; allowed: 0 < top_p ≤ 1 (1: off)")


def is_truncated(sampling: Sampling) -> bool:
  """Whether settings such as top-k exclude tokens, which biases ratios to this distribution."""
  return dataclasses.replace(sampling, temperature=1.0) != _PLAIN


def head_logits(hidden: Array, head: Head) -> Array:
  """soft_cap(hidden @ kernel · scale), at least float32, [..., V] from [..., D]."""
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  flat = hidden.reshape(-1, hidden.shape[-1])
  logits = jnp.dot(flat, head.kernel.astype(hidden.dtype), preferred_element_type=dtype)
  logits = logits.reshape(*hidden.shape[:-1], -1) * head.scale
  if head.soft_cap is not None:
    logits = head.soft_cap * jnp.tanh(logits / head.soft_cap)
  return logits


def through_head(gradient: Array, logits: Array, head: Head, temperature: float) -> Array:
  """∂/∂(logits/temperature) → ∂/∂(hidden @ kernel): times scale/temperature · (1 − (z/c)²).

  Args:
    gradient: f32[..., V], with respect to logits/temperature.
    logits: f32[..., V], z, from `head_logits`.
    head: only its scale and soft cap c are used.
    temperature: temperature of the distribution, > 0.
  Returns:
    f32[..., V], with respect to hidden @ kernel.
  """
  gradient = gradient * (head.scale / temperature)
  if head.soft_cap is not None:
    gradient *= 1 - (logits / head.soft_cap) ** 2
  return gradient


def distribution(logits: Array, sampling: Sampling) -> Array:
  """Log-probabilities of the distribution that `sampling` describes.

  The one place where temperature, top-k and top-p act, for the sampler and the trainer alike:
  temperature first, then the k most probable tokens, then the smallest set of those whose
  renormalized mass reaches top_p; tokens tied with the last one kept are kept too.

  Args:
    logits: f32[..., V].
    sampling: temperature 0 puts all mass on the first largest logit.
  Returns:
    f32[..., V], −inf for a token that is never sampled.
  """
  if sampling.temperature == 0:
    first = jnp.argmax(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.arange(logits.shape[-1]) == first, 0.0, -jnp.inf)
  logits = logits / sampling.temperature
  if sampling.top_k:
    smallest = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
    logits = jnp.where(logits >= smallest, logits, -jnp.inf)
  if sampling.top_p < 1:
    descending = -jnp.sort(-logits, axis=-1)
    mass = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)
    # A token stays while the mass before it is below top_p; the first always does.
    before = jnp.concatenate([jnp.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
    smallest = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), -1, keepdims=True)
    logits = jnp.where(logits >= smallest, logits, -jnp.inf)
  return jax.nn.log_softmax(logits, axis=-1)


class TokenStatistics(NamedTuple):
  """Statistics of the distribution that each token was sampled from; all at least float32."""

  logprobs: Array  # [..., T], of the token
  entropy: Array  # [..., T], nats
  log_normalizers: Array  # [..., T], log Σ_v exp(z_v/temperature); a constant
  projected: Array | None  # [..., T, R], Σ_v R_v·∂(−log p[token])/∂z_v; a constant


def token_logprobs(
  hidden: Array,
  head: Head,
  tokens: Array,
  sampling: Sampling = _PLAIN,
  *,
  chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Array, Array]:
  """Log-probability of each token and entropy of the distribution that it was sampled from.

  Works through T in chunks whose logits hold at most `chunk_elements` numbers (one position of all
  rows at least) and recomputes them in its own backward pass, so that no [B, T, V] array exists in
  either direction. What top-k and top-p keep is a constant for differentiation.

  Args:
    hidden: [..., T, D], any float dtype.
    head: the output head, kernel [D, V].
    tokens: i32[..., T].
    sampling: the distribution; not greedy.
  Returns:
    log-probabilities and entropies (nats), each [..., T], float32 (float64 for float64 inputs).
  """
  statistics = token_statistics(hidden, head, tokens, sampling, chunk_elements=chunk_elements)
  return statistics.logprobs, statistics.entropy


def token_statistics(
  hidden: Array,
  head: Head,
  tokens: Array,
  sampling: Sampling = _PLAIN,
  *,
  projection: Array | None = None,
  chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenStatistics:
  """`token_logprobs`, with the terms that the Gram matrix of the head's gradients needs.

  Args:
    projection: [V, R], rows R_v; None omits `projected`. Only without top-k and top-p.
  """
  chex.assert_shape(hidden, (*tokens.shape, None))
  if sampling.temperature == 0:
    raise ValueError("token_logprobs of greedy decoding (temperature=0): it has no density")
  *lead, T, D = hidden.shape
  hidden, tokens = hidden.reshape(-1, T, D), tokens.reshape(-1, T)
  length = max(1, min(T, chunk_elements // (hidden.shape[0] * head.kernel.shape[1])))
  padding = -T % length
  chunks = (T + padding) // length

  def split(x):
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], chunks, length, *x.shape[2:]), 1, 0)

  def join(x):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T].reshape(*lead, T, *x.shape[3:])

  static = (sampling, float(head.scale), head.soft_cap)
  found = _chunked(static, split(hidden), head.kernel, split(tokens), projection)
  return jax.tree.map(join, found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static, hidden, kernel, tokens, projection):
  """([C, B, c, D], [D, V], [C, B, c], [V, R]) → statistics [C, B, c]."""
  return _map(
    lambda args: _chunk_forward(static, args[0], kernel, args[1], projection), (hidden, tokens)
  )


def _chunk_forward(static, hidden, kernel, tokens, projection):
  sampling, scale, soft_cap = static
  head = Head(kernel, scale, soft_cap)
  logits = head_logits(hidden, head)
  logprobs = distribution(logits, sampling)
  chosen = _select(logprobs, tokens)
  normalizers = _select(logits, tokens) / sampling.temperature - chosen
  projected = None
  if projection is not None:
    hit = jnp.arange(logits.shape[-1]) == tokens[..., None]
    towards = through_head(jnp.exp(logprobs) - hit, logits, head, sampling.temperature)
    flat = towards.astype(hidden.dtype).reshape(-1, logits.shape[-1])
    rows = jnp.dot(flat, projection.astype(hidden.dtype), preferred_element_type=logits.dtype)
    projected = rows.reshape(*tokens.shape, -1)
  return TokenStatistics(chosen, _entropy(logprobs), normalizers, projected)


def _select(values, tokens):
  """values[..., tokens]; as a masked sum it stays local when V is sharded."""
  hit = jnp.arange(values.shape[-1]) == tokens[..., None]
  return jnp.sum(jnp.where(hit, values, 0.0), axis=-1)


def _entropy(logprobs):
  return -jnp.sum(jnp.where(logprobs == -jnp.inf, 0.0, jnp.exp(logprobs) * logprobs), axis=-1)


def _map(function, chunks):
  """lax.map, without its loop if there is only one chunk."""
  if jax.tree.leaves(chunks)[0].shape[0] == 1:
    return jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda x: x[0], chunks)))
  return jax.lax.map(function, chunks)


def _chunked_forward(static, hidden, kernel, tokens, projection):
  return _chunked(static, hidden, kernel, tokens, projection), (hidden, kernel, tokens)


def _chunked_backward(static, saved, cotangents):
  hidden, kernel, tokens = saved
  sampling, scale, soft_cap = static
  head = Head(kernel, scale, soft_cap)
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)

  def chunk(kernel_gradient, args):
    hidden, tokens, of_logprob, of_entropy = args
    logits = head_logits(hidden, head)
    logprobs = distribution(logits, sampling)
    probabilities = jnp.exp(logprobs)
    hit = jnp.arange(logits.shape[-1]) == tokens[..., None]
    # ∂ log p[y] = onehot − p;  ∂ entropy = −p (log p + entropy)
    surprise = jnp.where(logprobs == -jnp.inf, 0.0, logprobs) + _entropy(logprobs)[..., None]
    gradient = of_logprob[..., None] * (hit - probabilities)
    gradient -= of_entropy[..., None] * probabilities * surprise
    gradient = through_head(gradient, logits, head, sampling.temperature)
    flat = gradient.astype(hidden.dtype).reshape(-1, logits.shape[-1])
    into_hidden = jnp.dot(flat, kernel.astype(hidden.dtype).T).reshape(hidden.shape)
    rows = hidden.reshape(-1, hidden.shape[-1])
    return kernel_gradient + jnp.dot(rows.T, flat, preferred_element_type=dtype), into_hidden

  start = jnp.zeros(kernel.shape, dtype)
  args = (hidden, tokens, cotangents.logprobs, cotangents.entropy)
  if hidden.shape[0] == 1:
    kernel_gradient, into_hidden = chunk(start, jax.tree.map(lambda x: x[0], args))
    into_hidden = into_hidden[None]
  else:
    kernel_gradient, into_hidden = jax.lax.scan(chunk, start, args)
  return into_hidden, kernel_gradient.astype(kernel.dtype), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
