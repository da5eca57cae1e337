"""Which keys of a row of packed sequences a query sees: token by token, and block by block."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.types import Array, Rows

TILE = 128  # prompts end and rollouts start at its multiples, so a tile holds one sequence
LONGEST_ROW = 2**15  # tokens, for the kernel that packs indices into bits
NO_WINDOW = 2**30


def sees(
  query: Array, starts: Array, prompt_ends: Array, key: Array, window: Array | int | None
) -> Array:
  """Whether a query sees a key of its own prompt; all arguments broadcast.

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
  """Which blocks of keys hold a key that some query of a block of queries sees.

  Args:
    rows: arrays [..., L].
    query_block, key_block: tokens per block, multiples of 128 that divide L.
    window: as for `sees`.
  Returns:
    bool[..., L/query_block, L/key_block]; with a window also a few blocks just beyond it.
  """
  tiles = lambda x: x.reshape(*x.shape[:-1], -1, TILE)
  real = tiles(rows.prompts) >= 0
  of_tile = lambda x: jnp.max(jnp.where(real, tiles(x), -1), axis=-1)
  prompts, starts, ends = map(of_tile, (rows.prompts, rows.starts, rows.prompt_ends))
  first = jnp.arange(prompts.shape[-1]) * TILE
  column = lambda x: x[..., :, None]
  # The nearest query and key of two tiles are 127 closer than the tiles' first ones.
  nearest = None if window is None else window + TILE - 1
  seen = sees(column(first), column(starts), column(ends), first, nearest)
  seen &= (column(prompts) == prompts[..., None, :]) & (column(prompts) >= 0)
  L = rows.prompts.shape[-1]
  seen = seen.reshape(
    *seen.shape[:-2], L // query_block, query_block // TILE, L // key_block, key_block // TILE
  )
  return jnp.any(seen, axis=(-3, -1))
