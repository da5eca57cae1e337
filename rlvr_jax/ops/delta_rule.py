"""The gated delta rule: a linear recurrence that takes the place of attention.

A head has a state S [d_k, d_v], at first 0. Every token has a query q and a key k [d_k], a value
v [d_v], a log-decay g ≤ 0 and a strength β in [0, 1]. The token changes S, and its output is o,
[d_v]:

    S ← e^g·S;  S ← S + k ⊗ β·(v − Sᵀk);  o = Sᵀq

In a gated DeltaNet, queries, keys and values come from causal convolutions over a few tokens. So a
sequence's state also has the last inputs of these convolutions.

`delta_step` computes one token. `delta_rows` computes packed rows, chunk by chunk, with the same
result up to rounding. In a packed row a rollout begins with the state after its prompt; no other
state passes from one sequence to another. A token with g = 0 and β = 0 does not change the state.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464), §3.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from rlvr_jax.ops.precision import EXACT
from rlvr_jax.ops.row_blocks import is_visible, sequence_starts
from rlvr_jax.types import Array, Rows

CHUNK = 128  # tokens, at most; a power of two
_EPSILON = 1e-6  # of the lengths of queries and keys
_INVERSE, _CHANGES = "inverse", "changes"  # names of what the backward pass does not compute again
Inputs = TypeVar("Inputs")


class Tokens(NamedTuple):
  """The inputs of the rule for R rows of L tokens with N heads, in at least float32."""

  query: Array  # [R, L, N, d_k]
  key: Array  # [R, L, N, d_k]
  value: Array  # [R, L, N, d_v]
  decay: Array  # g [R, L, N]
  strength: Array  # β [R, L, N]


def delta_step(
  state: Array, query: Array, key: Array, value: Array, decay: Array, strength: Array
) -> tuple[Array, Array]:
  """Applies the rule to one token of every sequence.

  Args:
    state: S [..., d_k, d_v].
    query, key: [..., d_k].
    value: [..., d_v].
    decay, strength: g and β [...].
  Returns:
    o [..., d_v], and the next state.
  """
  # Sums of products instead of matrix products: reading and writing the state once is most of the
  # time.
  read = lambda vector: jnp.sum(state * vector[..., None], axis=-2)
  kept = jnp.exp(decay)[..., None]
  change = strength[..., None] * (value - kept * read(key))
  along = jnp.sum(query * key, axis=-1, keepdims=True)
  out = kept * read(query) + along * change
  return out, kept[..., None] * state + key[..., :, None] * change[..., None, :]


def delta_rows(inputs: Inputs, rows: Rows, read: Callable[[Inputs], Tokens]) -> tuple[Array, Array]:
  """Applies the rule to all tokens of packed rows.

  Args:
    inputs: arrays [R, L, ...] of R rows of L tokens.
    rows: the sequences in the rows. In each row a prompt comes before its rollouts, and its
      rollouts before the next prompt.
    read: inputs of some tokens → their `Tokens`. It is called chunk by chunk, so that the `Tokens`
      of a whole row never exist at once.
  Returns:
    o [R, L, N, d_v], arbitrary at padding; and the state [R, N, d_k, d_v] after the last token of
    each row.
  """
  length = rows.prompts.shape[1]
  size = min(CHUNK, 1 << max(length - 1, 0).bit_length())
  pad = -length % size
  fill = lambda x: jnp.pad(x, [(0, pad if axis == 1 else 0) for axis in range(x.ndim)])
  padded = jax.tree.map(fill, rows)
  is_place = jnp.arange(length + pad) < length
  chunks = _split_rows(padded._replace(prompts=jnp.where(is_place, padded.prompts, -1)), size)
  of_chunk = lambda x: jnp.moveaxis(fill(x).reshape(len(x), -1, size, *x.shape[2:]), 1, 0)
  links = jax.lax.map(functools.partial(_link, length=length), chunks)
  shapes = jax.eval_shape(read, inputs)
  R, _, N, d_k = shapes.key.shape
  nothing = jnp.zeros((R, N, d_k, shapes.value.shape[-1]), shapes.value.dtype)

  # Kept for the backward pass: the states between chunks, and results of many successive products.
  keep = jax.checkpoint_policies.save_only_these_names(_INVERSE, _CHANGES)
  step = jax.checkpoint(functools.partial(_chunk, read=read), policy=keep)
  states, out = jax.lax.scan(step, (nothing, nothing), (jax.tree.map(of_chunk, inputs), links))
  out = jnp.moveaxis(out, 0, 1).reshape(R, length + pad, N, -1)
  return out[:, :length], states[0]


def conv_rows(x: Array, taps: Array, rows: Rows) -> Array:
  """A causal convolution over each sequence: Σ_j taps[:, T − 1 − j]·x[t − j], at least float32.

  Args:
    x: [R, L, C]; channels are independent.
    taps: [C, T], the last tap for the current token. A rollout's first tokens also read its
      prompt's last inputs. The inputs before a prompt are 0.
    rows: as in `delta_rows`.
  Returns:
    [R, L, C].
  """
  index = jnp.arange(x.shape[1])
  first, prompt_length = sequence_starts(rows, index)
  inputs = [x]
  for back in range(1, taps.shape[1]):
    before = first - (index - back)  # tokens from the input to the sequence's start
    place = jnp.where(before <= 0, index - back, rows.prompt_ends - before)
    exists = (before <= prompt_length) & (rows.prompts >= 0)
    earlier = jnp.take_along_axis(x, jnp.where(exists, place, 0)[..., None], axis=1)
    inputs.append(jnp.where(exists[..., None], earlier, 0))
  return _sum_taps(inputs, taps)


def conv_step(x: Array, window: Array, taps: Array) -> tuple[Array, Array]:
  """The results of `conv_rows` for one token x[..., C] of every sequence, and the next window.

  Args:
    window: the sequence's last inputs [..., T − 1, C], 0 before its first token.
    taps: [C, T].
  """
  inputs = jnp.concatenate([window, x[..., None, :]], axis=-2)
  newest_first = [inputs[..., -1 - back, :] for back in range(taps.shape[1])]
  return _sum_taps(newest_first, taps), inputs[..., 1:, :]


def _sum_taps(inputs: Sequence[Array], taps: Array) -> Array:
  """Σ_j taps[:, T − 1 − j]·inputs[j], at least float32, always added in this order."""
  wide = jnp.promote_types(taps.dtype, jnp.float32)
  pairs = zip(inputs, taps.T[::-1], strict=True)
  return functools.reduce(operator.add, (x.astype(wide) * tap.astype(wide) for x, tap in pairs))


class DeltaState(NamedTuple):
  """The state of a gated DeltaNet after the tokens of a sequence."""

  memory: Array  # S [R, N, d_k, d_v], at least float32
  windows: tuple[Array, Array, Array]  # the last T − 1 inputs of the convolutions, [R, T − 1, C]


class DeltaInputs(NamedTuple):
  """The inputs that a gated DeltaNet mixes over tokens.

  `channels` are the projections to queries, keys and values, before their convolutions.
  """

  channels: tuple[Array, Array, Array]  # [R, L, N_k·d_k] twice and [R, L, N·d_v]
  taps: tuple[Array, Array, Array]  # the taps of their convolutions, [C, T] each
  decay: Array  # g [R, L, N], at least float32
  strength: Array  # β [R, L, N], at least float32
  key_dim: int  # d_k
  value_dim: int  # d_v

  def heads(self, channels: Sequence[Array]) -> tuple[Array, Array, Array]:
    """Queries, keys [..., N, d_k] and values [..., N, d_v] of convolved channels [..., C].

    Keys have norm 1, queries have norm 1/√d_k. N/N_k heads share a query and a key.
    """
    dims = self.key_dim, self.key_dim, self.value_dim
    query, key, value = (
      jax.nn.silu(x).astype(self.decay.dtype).reshape(*x.shape[:-1], -1, dim)
      for x, dim in zip(channels, dims, strict=True)
    )
    unit = lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON)
    share = lambda x: jnp.repeat(x, value.shape[-2] // x.shape[-2], axis=-2)
    return share(unit(query) * self.key_dim**-0.5), share(unit(key)), value


def mix_rows(inputs: DeltaInputs, rows: Rows) -> Array:
  """The results of all heads in packed rows, [R, L, N, d_v]; see `delta_rows`."""
  real = (rows.prompts >= 0)[..., None]
  return _mix(inputs, rows, real)[0]


def mix_prompts(inputs: DeltaInputs, lengths: Array | None) -> tuple[Array, DeltaState]:
  """The results of right-padded sequences, [R, L, N, d_v], and the states after them.

  Args:
    inputs: the inputs of R sequences, one per row.
    lengths: i32[R], tokens of each sequence; None: every sequence has L tokens.
  """
  R, L = inputs.decay.shape[:2]
  zeros, index = jnp.zeros((R, L), jnp.int32), jnp.broadcast_to(jnp.arange(L), (R, L))
  lengths = jnp.full(R, L) if lengths is None else lengths
  real = (index < lengths[:, None])[..., None]
  out, memory = _mix(inputs, Rows(zeros, index, zeros + L, zeros + L), real)
  back = inputs.taps[0].shape[1] - 1
  places = lengths[:, None] - back + jnp.arange(back)

  def window(x: Array) -> Array:
    last = jnp.take_along_axis(x, jnp.maximum(places, 0)[..., None], axis=1)
    return jnp.where(places[..., None] < 0, 0, last)

  query, key, value = map(window, inputs.channels)
  return out, DeltaState(memory, (query, key, value))


def _mix(inputs: DeltaInputs, rows: Rows, real: Array) -> tuple[Array, Array]:
  """The results [R, L, N, d_v] and the last states; tokens that are not `real` change no state."""
  pairs = zip(inputs.channels, inputs.taps, strict=True)
  channels = tuple(conv_rows(x, taps, rows) for x, taps in pairs)
  decay, strength = (jnp.where(real, x, 0) for x in (inputs.decay, inputs.strength))

  def read(x: tuple[tuple[Array, ...], Array, Array]) -> Tokens:
    channels, decay, strength = x
    return Tokens(*inputs.heads(channels), decay, strength)

  return delta_rows((channels, decay, strength), rows, read)


def mix_token(inputs: DeltaInputs, state: DeltaState, running: Array) -> tuple[Array, DeltaState]:
  """The results of one token of every slot, [slots, 1, N, d_v], and the next states.

  Args:
    inputs: the inputs of one token per slot, L = 1.
    state: the state of the slots.
    running: bool[slots]; the states of other slots do not change.
  """
  first = lambda x: x[:, 0]
  triples = zip(map(first, inputs.channels), state.windows, inputs.taps, strict=True)
  channels, windows = zip(*(conv_step(*triple) for triple in triples), strict=True)
  heads = inputs.heads(channels)
  out, memory = delta_step(state.memory, *heads, first(inputs.decay), first(inputs.strength))
  new = DeltaState(memory, windows)
  keep = lambda x, y: jnp.where(running.reshape(-1, *[1] * (x.ndim - 1)), x, y)
  return out[:, None], jax.tree.map(keep, new, state)


class _Links(NamedTuple):
  """For each row of a chunk, which tokens continue which sequences."""

  visible: Array  # bool[R, C, C], whether token i's state includes token j: j = i, or j is earlier
  from_last: Array  # bool[R, C], whether the token continues the last sequence of the chunk before
  from_prompt: Array  # bool[R, C], whether the token continues a prompt of an earlier chunk
  last: Array  # bool[R, C], True at the last token only
  ends: Array  # bool[R, C], True only at the last token of a prompt, if a prompt ends here


def _split_rows(rows: Rows, size: int) -> tuple[Rows, Array]:
  """Splits rows into chunks, [chunks, R, C], with the indices of their tokens, [chunks, C]."""
  split = lambda x: jnp.moveaxis(x.reshape(len(x), -1, size), 1, 0)
  length = rows.prompts.shape[1]
  return Rows(*map(split, rows)), jnp.arange(length).reshape(-1, size)


def _link(chunk: tuple[Rows, Array], length: int) -> _Links:
  """The links of a chunk of `_split_rows`; `length` is the rows' length before padding."""
  rows, index = chunk
  first, is_token = index[0], rows.prompts >= 0
  field = lambda x: x[..., :, None]
  visible = is_visible(index[:, None], field(rows.starts), field(rows.prompt_ends), index, None)
  visible &= (field(rows.prompts) == rows.prompts[:, None]) & field(is_token)
  starts, prompt_length = sequence_starts(rows, index)
  begins = starts >= first  # whether the token's sequence begins in this chunk
  follows = begins & (prompt_length > 0)  # and is a rollout, which follows its prompt
  from_prompt = is_token & follows & (rows.prompt_ends <= first)
  is_prompt_cut = rows.prompt_ends - prompt_length < first  # the prompt begins in an earlier chunk
  from_last = is_token & (~begins | (follows & ~from_prompt & is_prompt_cut))
  end = jnp.max(jnp.where(is_token, rows.prompt_ends, 0) * (rows.prompt_ends <= index[-1] + 1), 1)
  last = jnp.broadcast_to(index == jnp.minimum(index[-1], length - 1), is_token.shape)
  return _Links(visible, from_last, from_prompt, last, index == end[:, None] - 1)


def _chunk(
  states: tuple[Array, Array],
  chunk: tuple[Inputs, _Links],
  read: Callable[[Inputs], Tokens],
) -> tuple[tuple[Array, Array], Array]:
  """Computes a chunk of tokens from the states before it.

  Args:
    states: [R, N, d_k, d_v] each, after the last earlier token and the last prompt that has ended.
  Returns:
    The same two states after the chunk, and o [R, C, N, d_v].
  """
  inputs, links = chunk
  # [R, N, C, …], so that each matrix product concerns one head.
  query, key, value, decay, strength = (jnp.moveaxis(x, 2, 1) for x in read(inputs))
  by_head = lambda x: x[:, None].astype(decay.dtype)
  visible = by_head(links.visible)
  size = decay.shape[-1]
  # Sums of g along a token's sequence: from its start in the chunk, and from after another token.
  behind = jnp.arange(size)[:, None] > jnp.arange(size)
  sums = jnp.einsum("rnij,rnj->rni", visible, decay, precision=EXACT)
  between = jnp.where(visible > 0, sums[..., :, None] - sums[..., None, :], -jnp.inf)
  decays, kept = jnp.exp(between), jnp.exp(sums)
  # The fraction of each earlier state that remains at a token, which continues at most one of them.
  of_last, of_prompt = (
    (kept * by_head(follows))[..., None] for follows in (links.from_last, links.from_prompt)
  )
  recall = lambda x: (of_last * x) @ states[0] + (of_prompt * x) @ states[1]

  products = jnp.where(behind, key @ key.mT * decays, 0) * strength[..., None]
  inverse = _invert(products)
  targets = strength[..., None] * (value - recall(key))
  changes = checkpoint_name(inverse @ targets, _CHANGES)
  out = recall(query) + (query @ key.mT * decays) @ changes

  def state_at(token: Array) -> Array:
    """The state after the token that `token`, bool[R, C], marks in each row; 0 if it marks none."""
    # Each sum selects one number exactly, as a matrix product might not: an error in a decay would
    # act on all later chunks.
    at = lambda x: jnp.sum(by_head(token) * x, axis=-1)[..., None]
    seen = jnp.any(token[..., None] & links.visible, axis=1)[:, None]  # by that token
    weights = jnp.exp(jnp.where(seen, at(sums) - sums, -jnp.inf))
    left = (at(x[..., 0])[..., None] for x in (of_last, of_prompt))
    earlier = sum(x * state for x, state in zip(left, states, strict=True))
    return earlier + (key * weights[..., None]).mT @ changes

  has_end = jnp.any(links.ends, axis=1)[:, None, None, None]
  prompt = jnp.where(has_end, state_at(links.ends), states[1])
  return (state_at(links.last), prompt), jnp.moveaxis(out, 1, 2)


@jax.custom_vjp
def _invert(x: Array) -> Array:
  """(I + x)⁻¹ of strictly lower triangular matrices [..., C, C], C a power of two.

  The method is substitution over blocks that double in size. It is stable and uses only matrix
  products.
  """
  x = jax.lax.optimization_barrier(x)  # else XLA computes x again in every product
  size = x.shape[-1]
  index = np.arange(size)
  product = functools.partial(jnp.matmul, precision=EXACT)
  below = lambda block: (
    (index[:, None] // block // 2 == index // block // 2)
    & (index[:, None] // block > index // block)
  )
  inverse = jnp.eye(size, dtype=x.dtype) - x * below(1).astype(x.dtype)
  block = 2
  while block < size:
    inverse -= product(product(inverse, x * below(block).astype(x.dtype)), inverse)
    block *= 2
  return inverse


def _invert_forward(x: Array) -> tuple[Array, Array]:
  inverse = checkpoint_name(_invert(x), _INVERSE)
  return inverse, inverse


def _invert_backward(inverse: Array, gradient: Array) -> tuple[Array]:
  product = functools.partial(jnp.matmul, precision=EXACT)
  return (-product(product(inverse.mT, gradient), inverse.mT),)


_invert.defvjp(_invert_forward, _invert_backward)
