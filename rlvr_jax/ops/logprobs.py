"""Logits, the sampling distribution, and token log-probabilities without a [B, T, V] array."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlvr_jax.ops.divergence import Divergence, less_rounding
from rlvr_jax.sampling import LEAST_TEMPERATURE
from rlvr_jax.types import Array, Head, Sampling

_PLAIN = Sampling()
# Bins of a token's probability, with their lower bounds; a bin ends where the one before begins.
PROBABILITY_BINS = {
  "from_0.1": 0.1,
  "from_0.01": 0.01,
  "from_0.001": 1e-3,
  "from_0.0001": 1e-4,
  "rarer": 0.0,
}


def check_sampling(owner: str, sampling: Sampling, vocab_size: int) -> None:
  """Raises ValueError if the settings define no distribution.

  The message begins with `owner`, the name of the section that holds the settings.
  """
  temperature = sampling.temperature
  if temperature != 0 and not LEAST_TEMPERATURE <= temperature < float("inf"):
    raise ValueError(
      f"{owner}.temperature={temperature}; it must be 0, which decodes greedily, or finite and"
      f" ≥ {LEAST_TEMPERATURE}, since float32 logits divided by less lose all their digits"
    )
  if not 0 <= sampling.top_k <= vocab_size:
    raise ValueError(f"{owner}.top_k={sampling.top_k}; allowed: 0 (off) … {vocab_size}")
  if not 0 < sampling.top_p <= 1:
    raise ValueError(f"{owner}.top_p={sampling.top_p}; allowed: 0 < top_p ≤ 1 (1: off)")
  if not 0 <= sampling.min_p <= 1:
    raise ValueError(f"{owner}.min_p={sampling.min_p}; allowed: 0 (off) ≤ min_p ≤ 1")


def is_truncated(sampling: Sampling) -> bool:
  """Whether settings such as top-k exclude tokens; such sampling makes ratios biased."""
  return dataclasses.replace(sampling, temperature=1.0) != _PLAIN


def head_logits(hidden: Array, head: Head) -> Array:
  """The logits soft_cap(hidden @ kernel · scale), [..., V] from [..., D], at least float32."""
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  flat = hidden.reshape(-1, hidden.shape[-1])
  logits = jnp.dot(flat, head.kernel.astype(hidden.dtype), preferred_element_type=dtype)
  logits = logits.reshape(*hidden.shape[:-1], -1) * head.scale
  if head.soft_cap is not None:
    logits = head.soft_cap * jnp.tanh(logits / head.soft_cap)
  return logits


def product_gradient(gradient: Array, logits: Array, head: Head, temperature: float) -> Array:
  """Gradient with respect to hidden @ kernel: `gradient` · scale/temperature · (1 − (z/c)²).

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

  Temperature is applied first. Then the k most probable tokens are kept. Of these tokens, the
  smallest set whose renormalized mass reaches top_p is kept. Of this set, the tokens with at least
  min_p times the largest probability are kept. Tokens tied with the least probable kept token are
  also kept. `token_logprobs` and the sampler's `ops.draw` follow the same rules.

  Args:
    logits: f32[..., V].
    sampling: temperature 0 puts all mass on the first token with the largest logit.
  Returns:
    f32[..., V], −inf for a token that is never sampled.
  """
  if sampling.temperature == 0:
    first = jnp.argmax(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.arange(logits.shape[-1]) == first, 0.0, -jnp.inf)
  logits = logits / sampling.temperature
  return _log_softmax(logits, _softmax_terms(logits, sampling))


class _SoftmaxTerms(NamedTuple):
  """Terms of log-probabilities z − largest − log_sum, where z = logit/temperature."""

  largest: Array  # [...], max_v z_v
  log_sum: Array  # [...], log Σ_v exp(z_v − largest) over the tokens that are kept
  smallest_kept: Array | None  # [...], the smallest z_v that is kept; None: all are kept


def _softmax_terms(logits: Array, sampling: Sampling) -> _SoftmaxTerms:
  """The terms of logits/temperature, [..., V]."""
  smallest = smallest_kept(logits, sampling)
  if smallest is not None:
    logits = jnp.where(logits >= smallest[..., None], logits, -jnp.inf)
  largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
  log_sum = jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
  return _SoftmaxTerms(largest, log_sum, smallest)


def _log_softmax(logits: Array, terms: _SoftmaxTerms) -> Array:
  """Log-probabilities [..., V]; −inf for a token that is not kept."""
  logprobs = (logits - terms.largest[..., None]) - terms.log_sum[..., None]
  if terms.smallest_kept is None:
    return logprobs
  return jnp.where(logits >= terms.smallest_kept[..., None], logprobs, -jnp.inf)


def smallest_kept(logits: Array, sampling: Sampling) -> Array | None:
  """The smallest logit/temperature, [...], that top-k, top-p and min-p keep; None: all are kept."""
  smallest = None
  if sampling.top_k:
    smallest = jax.lax.top_k(logits, sampling.top_k)[0][..., -1:]
    logits = jnp.where(logits >= smallest, logits, -jnp.inf)
  if sampling.top_p < 1:
    descending = -jnp.sort(-logits, axis=-1)
    mass = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)
    # A token stays if the mass before it is below top_p; the first always stays.
    before = jnp.concatenate([jnp.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
    by_mass = jnp.min(jnp.where(before < sampling.top_p, descending, jnp.inf), -1, keepdims=True)
    smallest = by_mass if smallest is None else jnp.maximum(smallest, by_mass)
  if sampling.min_p:
    by_share = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
    smallest = by_share if smallest is None else jnp.maximum(smallest, by_share)
  return None if smallest is None else jax.lax.stop_gradient(smallest[..., 0])


class TeacherHead(NamedTuple):
  """A teacher's hidden states and head for the student's tokens, and the divergence to compute."""

  hidden: Array  # [P, ..., D'], constant for differentiation
  head: Head  # kernel [D', V]
  temperature: float  # temperature of the teacher's distribution, which is never truncated
  divergence: Divergence


class Taught(NamedTuple):
  """For each token, the student's divergence from a teacher, and the teacher's statistics."""

  divergence: Array  # [..., T], nats; its gradient goes through the student
  logprobs: Array  # [..., T], the token's log-probability under the teacher; a constant
  entropy: Array  # [..., T], the teacher's entropy, nats; a constant


class TokenStatistics(NamedTuple):
  """Statistics of the distribution from which each token was sampled, in at least float32."""

  logprobs: Array  # [..., T], the token's log-probability
  entropy: Array  # [..., T], nats
  log_normalizers: Array  # [..., T], log Σ_v exp(z_v/temperature); a constant
  projected: Array | None  # [..., T, R], Σ_v R_v·∂(−log p[token])/∂z_v; a constant
  # [..., T] each, the total probability in each of `PROBABILITY_BINS`; constants
  masses: tuple[Array, ...] | None = None
  squared_probabilities: Array | None = None  # [..., T], Σ_v p_v² in [1/V, 1]; a constant
  taught: Taught | None = None  # None without a teacher


def token_logprobs(
  hidden: Array,
  head: Head,
  tokens: Array,
  sampling: Sampling = _PLAIN,
  *,
  mesh: Mesh | None = None,
  chunk_rows: int | None = None,
) -> tuple[Array, Array]:
  """The log-probability of each token and the entropy of its sampling distribution.

  Tokens are processed in chunks, and a custom backward pass computes their logits again. So no
  array [B, T, V] exists in the forward or backward pass. The set of tokens that top-k, top-p and
  min-p keep is constant for differentiation.

  On a mesh every device works through its own rows. It gathers the kernel over `fsdp` once for all
  of its chunks, in the dtype of `hidden`. It adds up the kernel's gradient over its chunks in
  float32. The devices' gradients are added once, after all chunks.

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
  wanted: Array | None = None,
  masses: bool = False,
  squares: bool = False,
  teacher: TeacherHead | None = None,
  mesh: Mesh | None = None,
  chunk_rows: int | None = None,
) -> TokenStatistics:
  """The results of `token_logprobs`, and the terms for the Gram matrix of the head's gradients.

  The other arguments are those of `token_logprobs`.

  Args:
    projection: [V, R], rows R_v; None omits `projected`. Allowed only if sampling excludes no
      token.
    wanted: bool[P, ...], the tokens to compute; None: all tokens. Other tokens get the value 0.
      Each device moves its wanted tokens to its first chunks, and skips the head for chunks without
      a wanted token. So the kernel's gradient sums over tokens in this order.
    masses: whether to compute the total probability of each probability bin.
    squares: whether to compute the sums of squared probabilities.
    teacher: the teacher whose logits are computed beside the student's, by chunks; None omits
      `taught`.
  """
  chex.assert_shape(hidden, (*tokens.shape, None))
  if sampling.temperature == 0:
    raise ValueError(
      "token_logprobs: temperature=0 is greedy decoding, which has no density; set temperature > 0"
    )
  rows = chunk_rows or default_chunk_rows(head.kernel.shape[1])
  compared = teacher and _Compared(
    teacher.divergence, teacher.temperature, float(teacher.head.scale), teacher.head.soft_cap
  )
  setting = _Setting(
    sampling, float(head.scale), head.soft_cap, rows, mesh, masses, squares, compared
  )
  taught = None if teacher is None else (teacher.hidden, teacher.head.kernel)
  statistics = _statistics(setting, hidden, head.kernel, tokens, projection, wanted, taught)
  if wanted is None:
    return statistics
  ahead = lambda x: wanted.reshape(*wanted.shape, *[1] * (x.ndim - wanted.ndim))
  return jax.tree.map(lambda x: jnp.where(ahead(x), x, 0.0), statistics)


def wanted_loop(places: int) -> str:
  """The name, for `jax.named_scope`, of the loop over a device's wanted tokens.

  `token_statistics` explains which tokens are wanted.

  Args:
    places: number of tokens on the device, wanted or not.
  """
  return f"wanted_of_{places}"


def wanted_chunks(places: int, wanted: int, chunk_rows: int) -> int:
  """The number of chunks that a device computes if only some of its tokens are wanted.

  Args:
    places: number of tokens on the device, wanted or not.
    wanted: number of wanted tokens among these tokens.
    chunk_rows: tokens whose logits a device holds at once.
  """
  if places <= chunk_rows:
    return 1
  return -(-wanted // _chunk_length(places, chunk_rows))


def default_chunk_rows(vocab_size: int) -> int:
  """Tokens per chunk: as many as have 64 MiB of float32 logits, but at least 2048.

  With fewer tokens, reading the kernel and adding to its gradient take longer than the products.
  """
  return max(2048, 2**24 // vocab_size)


class _Compared(NamedTuple):
  """The static settings of a teacher's head and of its comparison with the student."""

  divergence: Divergence
  temperature: float
  scale: float
  soft_cap: float | None


class _Setting(NamedTuple):
  """Settings that are fixed at compile time."""

  sampling: Sampling
  scale: float
  soft_cap: float | None
  chunk_rows: int
  mesh: Mesh | None
  masses: bool = False
  squares: bool = False
  compared: _Compared | None = None  # None without a teacher


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(setting, hidden, kernel, tokens, projection, wanted, taught):
  """The `TokenStatistics` [P, ...] of `tokens`; for arguments see `token_statistics`."""
  return _statistics_and_terms(setting, hidden, kernel, tokens, projection, wanted, taught)[0]


@jax.named_scope("head")
def _statistics_and_terms(setting, hidden, kernel, tokens, projection, wanted, taught):
  """The statistics, and the `_SoftmaxTerms` [P, ...], which the backward pass uses again."""

  def on_device(hidden, tokens, of_teacher, wanted, kernel, projection, teacher_kernel):
    def chunk(carry, args):
      rows, tokens, of_teacher = args
      teacher = (of_teacher, teacher_kernel)
      return carry, _chunk_forward(setting, rows, kernel, tokens, projection, teacher)

    rows = (_flat_rows(hidden), tokens.reshape(-1), _flat_rows(of_teacher))
    _, results = _fold_rows(setting, chunk, None, rows, wanted)
    return jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), results)

  kernel = _constrain_kernel(setting, kernel.astype(hidden.dtype), None)
  of_teacher, teacher_kernel = _constrain_teacher(setting, taught)
  specs = (_ROWS,) * 4 + (_REPLICATED,) * 3
  run = _on_devices(setting, on_device, specs)
  return run(hidden, tokens, of_teacher, wanted, kernel, projection, teacher_kernel)


def _flat_rows(hidden):
  return None if hidden is None else hidden.reshape(-1, hidden.shape[-1])


def _constrain_teacher(setting, taught):
  """A teacher's hidden states and its kernel, replicated; (None, None) without a teacher."""
  if taught is None:
    return None, None
  hidden, kernel = jax.lax.stop_gradient(taught)
  return hidden, _constrain_kernel(setting, kernel.astype(hidden.dtype), None)


def _statistics_forward(setting, hidden, kernel, tokens, projection, wanted, taught):
  statistics, terms = _statistics_and_terms(
    setting, hidden, kernel, tokens, projection, wanted, taught
  )
  return statistics, (hidden, kernel, tokens, terms, statistics.entropy, wanted, taught)


@jax.named_scope("head")
def _statistics_backward(setting, saved, cotangents):
  hidden, kernel, tokens, terms, entropy, wanted, taught = saved
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)

  def on_device(hidden, per_token, of_teacher, wanted, kernel, teacher_kernel):
    def chunk(total, args):
      rows, per_row, of_teacher = args
      teacher = (of_teacher, teacher_kernel)
      into_hidden, into_kernel = _chunk_backward(setting, kernel, rows, teacher, *per_row)
      return total + into_kernel, into_hidden

    per_row = jax.tree.map(jnp.ravel, per_token)
    rows = (_flat_rows(hidden), per_row, _flat_rows(of_teacher))
    start = jnp.zeros(kernel.shape, dtype)
    total, into_hidden = _fold_rows(setting, chunk, start, rows, wanted)
    return into_hidden.reshape(hidden.shape), total[None]

  gathered = _constrain_kernel(setting, kernel.astype(hidden.dtype), None)
  of_teacher, teacher_kernel = _constrain_teacher(setting, taught)
  run = _on_devices(setting, on_device, (_ROWS,) * 4 + (_REPLICATED,) * 2)
  of_divergence = cotangents.taught and cotangents.taught.divergence
  per_token = (tokens, terms, entropy, cotangents.logprobs, cotangents.entropy, of_divergence)
  into_hidden, totals = run(hidden, per_token, of_teacher, wanted, gathered, teacher_kernel)
  into_kernel = _constrain_kernel(setting, totals.sum(0), "fsdp").astype(kernel.dtype)
  return into_hidden, into_kernel, None, None, None, None


_statistics.defvjp(_statistics_forward, _statistics_backward)


# --- one chunk ------------------------------------------------------------------------------------


def _chunk_forward(setting, hidden, kernel, tokens, projection, teacher):
  """The `TokenStatistics` and `_SoftmaxTerms` of a chunk of n tokens.

  Args:
    hidden, kernel, tokens, projection: [n, D], [D, V], [n] and [V, R].
    teacher: the teacher's hidden states [n, D'] and kernel [D', V].
  """
  sampling = setting.sampling
  head = Head(kernel, setting.scale, setting.soft_cap)
  logits = head_logits(hidden, head)
  scaled = logits / sampling.temperature
  terms = _softmax_terms(scaled, sampling)
  logprobs = _log_softmax(scaled, terms)
  projected = None
  if projection is not None:
    one_hot = jnp.arange(logits.shape[-1]) == tokens[..., None]
    gradient = product_gradient(jnp.exp(logprobs) - one_hot, logits, head, sampling.temperature)
    projected = jnp.dot(
      gradient.astype(hidden.dtype),
      projection.astype(hidden.dtype),
      preferred_element_type=logits.dtype,
    )
  statistics = TokenStatistics(
    logprobs=_select(logprobs, tokens),
    entropy=_entropy(logprobs),
    log_normalizers=terms.largest + terms.log_sum,
    projected=projected,
    masses=_bin_masses(logprobs) if setting.masses else None,
    squared_probabilities=jnp.sum(jnp.exp(2 * logprobs), axis=-1) if setting.squares else None,
    taught=_compare(setting, logprobs, tokens, teacher),
  )
  return statistics, terms


def _compare(setting, logprobs, tokens, teacher):
  """`Taught` of a chunk [n], from log-probabilities [n, V]; None without a teacher."""
  if setting.compared is None:
    return None
  of_teacher = _teacher_logprobs(setting, teacher)
  between = setting.compared.divergence(logprobs, of_teacher)
  return Taught(between, _select(of_teacher, tokens), _entropy(of_teacher))


def _teacher_logprobs(setting, teacher):
  """The teacher's log-probabilities for a chunk, [n, V]."""
  compared, (hidden, kernel) = setting.compared, teacher
  logits = head_logits(hidden, Head(kernel, compared.scale, compared.soft_cap))
  return jax.nn.log_softmax(logits / compared.temperature)


def _chunk_backward(
  setting, kernel, hidden, teacher, tokens, terms, entropy, of_logprob, of_entropy, of_divergence
):
  """Gradients of Σ of_logprob·log p[token] + of_entropy·entropy + of_divergence·divergence.

  Returns:
    The gradients of the hidden states [n, D] and of the kernel [D, V].
  """
  head = Head(kernel, setting.scale, setting.soft_cap)
  logits = head_logits(hidden, head)
  if terms.smallest_kept is not None:
    # The compiler may round these logits differently from the forward pass's logits.
    terms = terms._replace(smallest_kept=less_rounding(terms.smallest_kept))
  logprobs = _log_softmax(logits / setting.sampling.temperature, terms)
  probabilities = jnp.exp(logprobs)
  one_hot = jnp.arange(logits.shape[-1]) == tokens[..., None]
  # ∂ log p[y] = onehot − p;  ∂ entropy = −p (log p + entropy)
  surprise = jnp.where(logprobs == -jnp.inf, 0.0, logprobs) + entropy[..., None]
  gradient = of_logprob[..., None] * (one_hot - probabilities)
  gradient -= of_entropy[..., None] * probabilities * surprise
  if setting.compared is not None:
    of_teacher = _teacher_logprobs(setting, teacher)
    compare = lambda logprobs: setting.compared.divergence(logprobs, of_teacher)
    (into_logprobs,) = jax.vjp(compare, logprobs)[1](of_divergence)
    gradient += into_logprobs - probabilities * jnp.sum(into_logprobs, axis=-1, keepdims=True)
  gradient = product_gradient(gradient, logits, head, setting.sampling.temperature)
  gradient = gradient.astype(hidden.dtype)
  into_kernel = jnp.dot(hidden.T, gradient, preferred_element_type=logits.dtype)
  return jnp.dot(gradient, kernel.T), into_kernel


def _select(values, tokens):
  """values[..., tokens]; as a masked sum it stays local when V is sharded."""
  one_hot = jnp.arange(values.shape[-1]) == tokens[..., None]
  return jnp.sum(jnp.where(one_hot, values, 0.0), axis=-1)


def probability_bins(logprobs: Array) -> Array:
  """The index in `PROBABILITY_BINS` of each probability's bin."""
  bounds = jnp.log(jnp.asarray([*PROBABILITY_BINS.values()][:-1], logprobs.dtype))
  return jnp.sum(logprobs[..., None] < bounds, axis=-1)


def _bin_masses(logprobs: Array) -> tuple[Array, ...]:
  """The sum of the probabilities [..., V] that are in each bin."""
  bins, probabilities = probability_bins(logprobs), jnp.exp(logprobs)
  numbers = range(len(PROBABILITY_BINS))
  return tuple(jnp.sum(jnp.where(bins == n, probabilities, 0.0), axis=-1) for n in numbers)


def _entropy(logprobs):
  return -jnp.sum(jnp.where(logprobs == -jnp.inf, 0.0, jnp.exp(logprobs) * logprobs), axis=-1)


# --- chunks of a device's rows --------------------------------------------------------------------


def _fold_rows(setting, function, start, rows, wanted):
  """Scans `function` over chunks of rows [N, ...]; returns the carry and the outputs [N, ...].

  `wanted`, bool of N entries, moves wanted rows to the first chunks. Chunks without a wanted row
  are skipped, and skipped rows have the output 0. If all rows fit into one chunk, none is skipped.
  """
  N = jax.tree.leaves(rows)[0].shape[0]
  join = lambda x: x.reshape(-1, *x.shape[2:])[:N]
  if wanted is None or N <= setting.chunk_rows:
    carry, outputs = _scan(function, start, _split(setting, rows))
    return carry, jax.tree.map(join, outputs)
  order = jnp.argsort(~wanted.reshape(-1), stable=True)
  chunks = _split(setting, jax.tree.map(lambda x: x[order], rows))
  select = lambda index: jax.tree.map(lambda x: x[index], chunks)
  num_chunks, length = jax.tree.leaves(chunks)[0].shape[:2]
  count = -(-jnp.sum(wanted) // length)
  if setting.mesh is not None and setting.mesh.size > 1:
    # Devices that share a vocabulary exchange sums in every step, so all take equally many steps.
    count = jax.lax.pmax(count, ("data", "fsdp"))

  def step(index, state):
    carry, outputs = state
    carry, output = function(carry, select(index))
    put = lambda x, part: jax.lax.dynamic_update_index_in_dim(x, part, index, 0)
    return carry, jax.tree.map(put, outputs, output)

  _, shapes = jax.eval_shape(function, start, select(0))
  outputs = jax.tree.map(lambda x: jnp.zeros((num_chunks, *x.shape), x.dtype), shapes)
  with jax.named_scope(wanted_loop(N)):
    carry, outputs = jax.lax.fori_loop(0, count, step, (start, outputs))
  put_back = lambda x: jnp.zeros_like(x).at[order].set(x, unique_indices=True)
  return carry, jax.tree.map(lambda x: put_back(join(x)), outputs)


def _split(setting, rows):
  """Splits arrays [N, ...] into [C, n, ...] with n ≤ chunk_rows and the least padding."""
  N = rows[0].shape[0]
  chunks, length = -(-N // setting.chunk_rows), _chunk_length(N, setting.chunk_rows)
  pad = lambda x: jnp.pad(x, [(0, chunks * length - N)] + [(0, 0)] * (x.ndim - 1))
  return jax.tree.map(lambda x: pad(x).reshape(chunks, length, *x.shape[1:]), rows)


def _chunk_length(N: int, chunk_rows: int) -> int:
  """The rows per chunk, if N rows are split into as few chunks as possible."""
  return -(-N // -(-N // chunk_rows))


def _scan(function, start, chunks):
  """The result of lax.scan; a single chunk is computed without a loop."""
  if jax.tree.leaves(chunks)[0].shape[0] > 1:
    return jax.lax.scan(function, start, chunks)
  carry, output = function(start, jax.tree.map(lambda x: x[0], chunks))
  return carry, jax.tree.map(lambda x: x[None], output)


# --- devices --------------------------------------------------------------------------------------

_ROWS = PartitionSpec(("data", "fsdp"))
_REPLICATED = PartitionSpec()


def _on_devices(setting, function, in_specs):
  """Maps `function` over each device's own rows; XLA splits the vocabulary along `tensor`."""
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


def _constrain_kernel(setting, kernel, rows_axis):
  """Shards the rows of a kernel [D, V] over an axis; replicates the kernel if the axis is None."""
  if setting.mesh is None or setting.mesh.size == 1:
    return kernel
  fits = lambda size, axis: axis if axis and size % setting.mesh.shape[axis] == 0 else None
  spec = PartitionSpec(fits(kernel.shape[0], rows_axis), fits(kernel.shape[1], "tensor"))
  return jax.lax.with_sharding_constraint(kernel, NamedSharding(setting.mesh, spec))
