"""Visibility of keys in a row of packed sequences: token by token, and block by block."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.types import Array, Rows

TILE = 128  # for the kernel, prompts end and rollouts start at its multiples
LONGEST_ROW = 2**15  # tokens, for the kernel that packs indices into bits
NO_WINDOW = 2**30


def sees(
  query: Array, starts: Array, prompt_ends: Array, key: Array, window: Array | int | None
) -> Array:
  """Returns whether a query sees a key of its own prompt; all arguments broadcast.

  Args:
    query, key: i32, indices in the row.
    starts, prompt_ends: i32, of the query, as in `Rows`.
    window: tokens of its own sequence a query looks back, itself included; None: all.
  Returns:
    bool; that the key belongs to the query's prompt, and is not padding, is for the caller to ask.
  """
  of_prompt = key < prompt_ends
  seen = (key <= query) & (of_prompt | (key >= starts))
  if window is None:
    return seen
  between = jnp.where(of_prompt, starts - prompt_ends, 0)  # other rollouts of the prompt
  return seen & (query - key - between < window)


def visible_blocks(
  rows: Rows, query_block: int, key_block: int, window: Array | int | None
) -> Array:
  """Finds the blocks of keys with a key that some query of a block of queries sees.

  Args:
    rows: arrays [..., L].
    query_block, key_block: tokens per block, which divide L.
    window: as for `sees`.
  Returns:
    bool[..., L/query_block, L/key_block].
  """
  L = rows.prompts.shape[-1]
  index = jnp.arange(L)
  # A query sees two intervals: of its prompt and of its own rollout, each from `first` to `last`.
  of_prompt = rows.positions - (index - rows.starts)  # tokens
  nearest = 0 if window is None else jnp.maximum(rows.positions - window + 1, 0)
  first = rows.prompt_ends - of_prompt + nearest
  last = jnp.minimum(rows.prompt_ends - 1, index)
  own = jnp.maximum(rows.starts, rows.starts + nearest - of_prompt)
  blocks = jnp.arange(0, L, key_block)
  column = lambda x: x[..., None]
  meets = lambda first, last: (
    (column(jnp.maximum(first, 0)) < blocks + key_block)
    & (column(last) >= blocks)
    & column(first <= last)
  )
  seen = (meets(first, last) | meets(own, index)) & column(rows.prompts >= 0)
  return jnp.any(seen.reshape(*seen.shape[:-2], -1, query_block, L // key_block), axis=-2)
