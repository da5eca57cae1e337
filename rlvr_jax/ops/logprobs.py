"""Logits, the sampled distribution, and token log-probabilities without a [B, T, V] array."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlvr_jax.types import Array, Head, Sampling

_PLAIN = Sampling()


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
  if not 0 <= sampling.min_p <= 1:
    raise ValueError(f"sampling.min_p={sampling.min_p}; allowed: 0 (off) ≤ min_p ≤ 1")


def is_truncated(sampling: Sampling) -> bool:
  """Returns whether settings such as top-k exclude tokens, which biases ratios."""
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

  The one place where temperature, top-k, top-p and min-p act, for the sampler and the trainer
  alike: temperature first, then the k most probable tokens, then the smallest set of those whose
  renormalized mass reaches top_p, of these the tokens with at least min_p times the largest
  probability. Tokens tied with the last one kept are kept too.

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
  if sampling.min_p:
    smallest = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
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
  mesh: Mesh | None = None,
  chunk_rows: int | None = None,
) -> tuple[Array, Array]:
  """Log-probability of each token and entropy of the distribution that it was sampled from.

  Works through the tokens in chunks and recomputes their logits in its own backward pass, so that
  no [B, T, V] array exists in either direction. What top-k, top-p and min-p keep is a constant for
  differentiation.

  On a mesh every device works through its own rows. It gathers the kernel over `fsdp` once for all
  of its chunks, in the dtype of `hidden`, and adds to a float32 gradient that is reduced once.

  Args:
    hidden: [P, ..., D], any float dtype; on a mesh, P is split over (data, fsdp).
    head: the output head, kernel [D, V].
    tokens: i32[P, ...].
    sampling: the distribution; not greedy.
    mesh: None or a mesh with axes (data, fsdp, tensor).
    chunk_rows: tokens whose logits a device holds at once; default `default_chunk_rows`.
  Returns:
    log-probabilities and entropies (nats), each [P, ...], float32 (float64 for float64 inputs).
  """
  statistics = token_statistics(hidden, head, tokens, sampling, mesh=mesh, chunk_rows=chunk_rows)
  return statistics.logprobs, statistics.entropy


def token_statistics(
  hidden: Array,
  head: Head,
  tokens: Array,
  sampling: Sampling = _PLAIN,
  *,
  projection: Array | None = None,
  mesh: Mesh | None = None,
  chunk_rows: int | None = None,
) -> TokenStatistics:
  """Computes `token_logprobs`, with the terms that the Gram matrix of the head's gradients needs.

  Args:
    projection: [V, R], rows R_v; None omits `projected`. Only where none is excluded.
  """
  chex.assert_shape(hidden, (*tokens.shape, None))
  if sampling.temperature == 0:
    raise ValueError("token_logprobs of greedy decoding (temperature=0): it has no density")
  rows = chunk_rows or default_chunk_rows(head.kernel.shape[1])
  setting = _Setting(sampling, float(head.scale), head.soft_cap, rows, mesh)
  return _statistics(setting, hidden, head.kernel, tokens, projection)


def default_chunk_rows(vocab_size: int) -> int:
  """Tokens per chunk: 64 MiB of float32 logits, but 2048 rows at least.

  With fewer rows, reading the kernel and adding to its gradient take longer than the products.
  """
  return max(2048, 2**24 // vocab_size)


class _Setting(NamedTuple):
  """Settings that are fixed when the pass is compiled."""

  sampling: Sampling
  scale: float
  soft_cap: float | None
  chunk_rows: int
  mesh: Mesh | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@jax.named_scope("head")
def _statistics(setting, hidden, kernel, tokens, projection):
  """([P, ..., D], [D, V], [P, ...], [V, R]) → statistics [P, ...]."""

  def on_device(hidden, tokens, kernel, projection):
    chunk = lambda args: _chunk_forward(setting, args[0], kernel, args[1], projection)
    rows = (hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1))
    found = _map(chunk, _split(setting, rows))
    join = lambda x: x.reshape(-1, *x.shape[2:])[: tokens.size].reshape(*tokens.shape, *x.shape[2:])
    return jax.tree.map(join, found)

  kernel = _placed(setting, kernel.astype(hidden.dtype), None)
  run = _over_devices(setting, on_device, (_ROWS, _ROWS, _WHOLE, _WHOLE))
  return run(hidden, tokens, kernel, projection)


def _statistics_forward(setting, hidden, kernel, tokens, projection):
  return _statistics(setting, hidden, kernel, tokens, projection), (hidden, kernel, tokens)


@jax.named_scope("head")
def _statistics_backward(setting, saved, cotangents):
  hidden, kernel, tokens = saved
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)

  def on_device(hidden, tokens, of_logprobs, of_entropy, kernel):
    def chunk(total, args):
      into_hidden, into_kernel = _chunk_backward(setting, kernel, *args)
      return total + into_kernel, into_hidden

    rows = (
      hidden.reshape(-1, hidden.shape[-1]),
      *map(jnp.ravel, (tokens, of_logprobs, of_entropy)),
    )
    total, into_hidden = _scan(chunk, jnp.zeros(kernel.shape, dtype), _split(setting, rows))
    into_hidden = into_hidden.reshape(-1, hidden.shape[-1])[: tokens.size]
    return into_hidden.reshape(hidden.shape), total[None]

  full = _placed(setting, kernel.astype(hidden.dtype), None)
  run = _over_devices(setting, on_device, (_ROWS, _ROWS, _ROWS, _ROWS, _WHOLE))
  into_hidden, totals = run(hidden, tokens, cotangents.logprobs, cotangents.entropy, full)
  into_kernel = _placed(setting, totals.sum(0), "fsdp").astype(kernel.dtype)
  return into_hidden, into_kernel, None, None


_statistics.defvjp(_statistics_forward, _statistics_backward)


# --- one chunk ------------------------------------------------------------------------------------


def _chunk_forward(setting, hidden, kernel, tokens, projection):
  """([n, D], [D, V], [n], [V, R]) → statistics [n]."""
  sampling = setting.sampling
  head = Head(kernel, setting.scale, setting.soft_cap)
  logits = head_logits(hidden, head)
  logprobs = distribution(logits, sampling)
  chosen = _select(logprobs, tokens)
  normalizers = _select(logits, tokens) / sampling.temperature - chosen
  projected = None
  if projection is not None:
    hit = jnp.arange(logits.shape[-1]) == tokens[..., None]
    towards = through_head(jnp.exp(logprobs) - hit, logits, head, sampling.temperature)
    projected = jnp.dot(
      towards.astype(hidden.dtype),
      projection.astype(hidden.dtype),
      preferred_element_type=logits.dtype,
    )
  return TokenStatistics(chosen, _entropy(logprobs), normalizers, projected)


def _chunk_backward(setting, kernel, hidden, tokens, of_logprob, of_entropy):
  """Gradients of Σ of_logprob·log p[token] + of_entropy·entropy: [n, D] and [D, V]."""
  head = Head(kernel, setting.scale, setting.soft_cap)
  logits = head_logits(hidden, head)
  logprobs = distribution(logits, setting.sampling)
  probabilities = jnp.exp(logprobs)
  hit = jnp.arange(logits.shape[-1]) == tokens[..., None]
  # ∂ log p[y] = onehot − p;  ∂ entropy = −p (log p + entropy)
  surprise = jnp.where(logprobs == -jnp.inf, 0.0, logprobs) + _entropy(logprobs)[..., None]
  gradient = of_logprob[..., None] * (hit - probabilities)
  gradient -= of_entropy[..., None] * probabilities * surprise
  gradient = through_head(gradient, logits, head, setting.sampling.temperature)
  gradient = gradient.astype(hidden.dtype)
  into_kernel = jnp.dot(hidden.T, gradient, preferred_element_type=logits.dtype)
  return jnp.dot(gradient, kernel.T), into_kernel


def _select(values, tokens):
  """values[..., tokens]; as a masked sum it stays local when V is sharded."""
  hit = jnp.arange(values.shape[-1]) == tokens[..., None]
  return jnp.sum(jnp.where(hit, values, 0.0), axis=-1)


def _entropy(logprobs):
  return -jnp.sum(jnp.where(logprobs == -jnp.inf, 0.0, jnp.exp(logprobs) * logprobs), axis=-1)


# --- chunks of a device's rows --------------------------------------------------------------------


def _split(setting, rows):
  """Arrays [N, ...] → [C, n, ...] with n ≤ chunk_rows, padded with as few rows as can be."""
  N = rows[0].shape[0]
  chunks = -(-N // setting.chunk_rows)
  length = -(-N // chunks)
  pad = lambda x: jnp.pad(x, [(0, chunks * length - N)] + [(0, 0)] * (x.ndim - 1))
  return jax.tree.map(lambda x: pad(x).reshape(chunks, length, *x.shape[1:]), rows)


def _scan(function, start, chunks):
  """lax.scan, without its loop where there is one chunk."""
  if jax.tree.leaves(chunks)[0].shape[0] > 1:
    return jax.lax.scan(function, start, chunks)
  carry, found = function(start, jax.tree.map(lambda x: x[0], chunks))
  return carry, jax.tree.map(lambda x: x[None], found)


def _map(function, chunks):
  return _scan(lambda carry, chunk: (carry, function(chunk)), None, chunks)[1]


# --- devices --------------------------------------------------------------------------------------

_ROWS = PartitionSpec(("data", "fsdp"))
_WHOLE = PartitionSpec()


def _over_devices(setting, function, in_specs):
  """Runs each device on its own rows; along `tensor` the compiler splits a chunk's vocabulary."""
  if setting.mesh is None or setting.mesh.size == 1:
    return function
  return jax.shard_map(
    function,
    mesh=setting.mesh,
    in_specs=in_specs,
    out_specs=_ROWS,
    axis_names={"data", "fsdp"},
    check_vma=False,  # a loop that starts from zeros on every device counts as replicated
  )


def _placed(setting, kernel, rows_axis):
  """A kernel [D, V] whose rows are split over an axis, or replicated if the axis is None."""
  if setting.mesh is None or setting.mesh.size == 1:
    return kernel
  fits = lambda size, axis: axis if axis and size % setting.mesh.shape[axis] == 0 else None
  spec = PartitionSpec(fits(kernel.shape[0], rows_axis), fits(kernel.shape[1], "tensor"))
  return jax.lax.with_sharding_constraint(kernel, NamedSharding(setting.mesh, spec))
