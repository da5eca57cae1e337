"""The gated delta rule: a linear recurrence that takes the place of attention.

A head has a state S [d_k, d_v], at first 0. Every token has a query q and a key k [d_k], a value
v [d_v], a log-decay g ≤ 0 and a strength β in [0, 1]:

    S ← e^g·S;  S ← S + k ⊗ β·(v − Sᵀk);  o = Sᵀq

`delta_step` is one token. `delta_rows` computes packed rows, chunk by chunk, with the same result
up to rounding. There, a rollout goes on from the state behind its prompt, and nothing else passes
from one sequence to another. A token without effect has g = 0 and β = 0.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464), §3.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.ops.precision import EXACT
from rlvr_jax.ops.row_blocks import is_visible
from rlvr_jax.types import Array, Rows

CHUNK = 64  # tokens, at most; a power of two


class Tokens(NamedTuple):
  """What the rule reads of tokens, at least float32; heads N are before the tokens L of a row."""

  query: Array  # [R, N, L, d_k]
  key: Array  # [R, N, L, d_k]
  value: Array  # [R, N, L, d_v]
  decay: Array  # g [R, N, L]
  strength: Array  # β [R, N, L]


def delta_step(
  state: Array, query: Array, key: Array, value: Array, decay: Array, strength: Array
) -> tuple[Array, Array]:
  """One token of every sequence.

  Args:
    state: S [..., d_k, d_v].
    query, key: [..., d_k].
    value: [..., d_v].
    decay, strength: g and β [...].
  Returns:
    o [..., d_v], and the next state.
  """
  # As sums of products, since the state is read and written once and the rest is small.
  read = lambda vector: jnp.sum(state * vector[..., None], axis=-2)
  kept = jnp.exp(decay)[..., None]
  change = strength[..., None] * (value - kept * read(key))
  along = jnp.sum(query * key, axis=-1, keepdims=True)
  out = kept * read(query) + along * change
  return out, kept[..., None] * state + key[..., :, None] * change[..., None, :]


def delta_rows(tokens: Tokens, rows: Rows) -> tuple[Array, Array]:
  """All tokens of packed rows.

  Args:
    tokens: of R rows of L tokens.
    rows: their sequences. In each row a prompt comes before its rollouts, and these before the next
      prompt.
  Returns:
    o [R, N, L, d_v], without meaning at padding; and the states [R, N, d_k, d_v] behind the
    sequences of the last tokens.
  """
  length = rows.prompts.shape[1]
  size = min(CHUNK, 1 << max(length - 1, 0).bit_length())
  pad = -length % size
  fill = lambda x, axis, value=0: jnp.pad(
    x, [(0, pad if i == axis else 0) for i in range(x.ndim)], constant_values=value
  )
  chunks = _split_rows(Rows(*(fill(x, 1, -1 if x is rows.prompts else 0) for x in rows)), size)
  of_chunk = lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)
  parts = jax.tree.map(lambda x: of_chunk(fill(x, 2)), tokens)
  links = jax.lax.map(functools.partial(_link, length=length), chunks)
  R, N, _, d_k = tokens.query.shape
  start = jnp.zeros((2, R, N, d_k, tokens.value.shape[-1]), tokens.value.dtype)
  # Only the states between chunks are kept for the backward pass.
  states, out = jax.lax.scan(jax.checkpoint(_chunk), start, (parts, links))
  out = jnp.moveaxis(out, 0, 2).reshape(R, N, length + pad, -1)
  return out[:, :, :length], states[0]


def conv_rows(x: Array, taps: Array, rows: Rows) -> Array:
  """A causal convolution over each sequence: Σ_j taps[:, T − 1 − j]·x[t − j], [R, L, C].

  Args:
    x: [R, L, C]; channels are independent.
    taps: [C, T], the last one for the current token. Before a rollout lies its prompt, before a
      prompt 0.
    rows: as in `delta_rows`.
  """
  index = jnp.arange(x.shape[1])
  in_prompt = index < rows.prompt_ends
  first = jnp.where(in_prompt, index - rows.positions, rows.starts)
  prompt_length = jnp.where(in_prompt, 0, rows.positions - (index - rows.starts))
  out = x * taps[:, -1]
  for back in range(1, taps.shape[1]):
    before = first - (index - back)  # how far the input lies before the token's own sequence
    place = jnp.where(before <= 0, index - back, rows.prompt_ends - before)
    exists = (before <= prompt_length) & (rows.prompts >= 0)
    earlier = jnp.take_along_axis(x, jnp.where(exists, place, 0)[..., None], axis=1)
    out += jnp.where(exists[..., None], earlier, 0) * taps[:, -1 - back]
  return out


def conv_step(x: Array, window: Array, taps: Array) -> tuple[Array, Array]:
  """One token of every sequence: `conv_rows` of x[..., C], and the next window.

  Args:
    window: the sequence's last inputs [..., T − 1, C], 0 before its first token.
    taps: [C, T].
  """
  inputs = jnp.concatenate([window, x[..., None, :]], axis=-2)
  return jnp.sum(inputs * taps.T, axis=-2), inputs[..., 1:, :]


class _Links(NamedTuple):
  """How the tokens of a chunk hang together, for each row."""

  visible: Array  # bool[R, C, C], whether a token's sequence has the other up to it, itself included
  from_last: Array  # bool[R, C], whether the token goes on from the last token of the chunk before
  from_prompt: Array  # bool[R, C], whether it goes on from the prompt that ended before
  last: Array  # bool[R, C], of one token: the last one
  ends: Array  # bool[R, C], of at most one token: the last one of a prompt


def _split_rows(rows: Rows, size: int) -> tuple[Rows, Array]:
  """Rows [chunks, R, C], and the indices of their tokens [chunks, C]."""
  split = lambda x: jnp.moveaxis(x.reshape(len(x), -1, size), 1, 0)
  length = rows.prompts.shape[1]
  return Rows(*map(split, rows)), jnp.arange(length).reshape(-1, size)


def _link(chunk: tuple[Rows, Array], length: int) -> _Links:
  """The links of a chunk, from `_split_rows`, in rows of so many tokens without padding to chunks."""
  rows, index = chunk
  first, is_token = index[0], rows.prompts >= 0
  field = lambda x: x[..., :, None]
  visible = is_visible(index[:, None], field(rows.starts), field(rows.prompt_ends), index, None)
  visible &= (field(rows.prompts) == rows.prompts[:, None]) & field(is_token)
  in_prompt = index < rows.prompt_ends
  own = jnp.where(in_prompt, index - rows.positions, rows.starts)  # where the sequence begins
  prompt_length = jnp.where(in_prompt, 0, rows.positions - (index - rows.starts))
  prompt_start = jnp.where(in_prompt, own, rows.prompt_ends - prompt_length)
  begins = own >= first  # in this chunk
  follows = begins & (prompt_length > 0)  # as a rollout, its prompt
  from_prompt = is_token & follows & (rows.prompt_ends <= first)
  from_last = is_token & (~begins | (follows & ~from_prompt & (prompt_start < first)))
  end = jnp.max(jnp.where(is_token, rows.prompt_ends, 0) * (rows.prompt_ends <= index[-1] + 1), 1)
  last = jnp.broadcast_to(index == jnp.minimum(index[-1], length - 1), is_token.shape)
  return _Links(visible, from_last, from_prompt, last, index == end[:, None] - 1)


def _chunk(states: Array, chunk: tuple[Tokens, _Links]) -> tuple[Array, Array]:
  """Computes a chunk from the states [2, R, N, d_k, d_v] of the last token and the last prompt."""
  (query, key, value, decay, strength), links = chunk
  by_head = lambda x: x[:, None].astype(decay.dtype)
  visible = by_head(links.visible)
  size = decay.shape[-1]
  # Sums of g from behind token j up to token i, along i's sequence: no large numbers cancel.
  behind = jnp.arange(size)[:, None] > jnp.arange(size)
  sums = jnp.matmul(visible, jnp.where(behind, decay[..., None], 0), precision=EXACT)
  decays = visible * jnp.exp(sums)
  # And from the sequence's start in the chunk: what is left of the state before.
  kept = jnp.exp(jnp.einsum("rnij,rnj->rni", visible, decay, precision=EXACT))
  kept = jnp.stack([kept * by_head(links.from_last), kept * by_head(links.from_prompt)])[..., None]

  products = jnp.where(behind, key @ key.mT * decays, 0) * strength[..., None]
  inverse = _invert(products)
  earlier = jnp.sum((kept * strength[..., None] * key) @ states, axis=0)
  changes = inverse @ (strength[..., None] * value - earlier)
  out = jnp.sum((kept * query) @ states, axis=0) + (query @ key.mT * decays) @ changes

  def state_at(token: Array) -> Array:
    """The state behind one token of each row, which `token` bool[R, C] marks; 0 without one."""
    token = by_head(token)
    before = jnp.einsum("rnc,krnc->krn", token, kept[..., 0])[..., None, None]
    weights = jnp.einsum("rnc,rncj->rnj", token, decays)
    return jnp.sum(before * states, axis=0) + (key * weights[..., None]).mT @ changes

  has_end = jnp.any(links.ends, axis=1)[:, None, None, None]
  prompt = jnp.where(has_end, state_at(links.ends), states[1])
  return jnp.stack([state_at(links.last), prompt]), out


def _invert(x: Array) -> Array:
  """(I + x)⁻¹ of strictly lower triangular matrices [..., C, C], C a power of two.

  By substitution over blocks whose size doubles: stable, and products alone.
  """
  size = x.shape[-1]
  index = jnp.arange(size)
  product = functools.partial(jnp.matmul, precision=EXACT)
  inverse = jnp.broadcast_to(jnp.eye(size, dtype=x.dtype), x.shape)
  block = 1
  while block < size:
    number = index // block
    below = (number[:, None] // 2 == number // 2) & (number[:, None] > number)
    inverse -= product(product(inverse, jnp.where(below, x, 0)), inverse)
    block *= 2
  return inverse
