"""Visibility of keys in a row of packed sequences: per token and per block."""

from __future__ import annotations

import jax.numpy as jnp

from rlvr_jax.types import Array, Rows

TILE = 128  # tokens; blocks of queries and keys are multiples of it
LONGEST_ROW = 2**17  # tokens, for the splash kernel, which packs indices into bits
NO_WINDOW = 2**30

_BLOCKS = (384, 512)  # tokens; smaller ones are slower
_LONG, _BLOCK_OF_LONG = 2**15, 1024  # in longer rows smaller ones would take too much memory


def splash_alignment(length: int) -> int:
  """The alignment of prompts' ends and rollouts' starts in rows for the splash kernel, in tokens.

  The kernel's mask has 32 bits for a token's index, its rollout's start and its prompt's end. In
  rows of at most 2^b tokens, aligned to 2^a, these three numbers take b + 2(b − a) bits. So the
  alignment is 8 tokens (the height of a TPU's tile) in rows of up to 4096 tokens. It is 16 up to
  8192, 32 up to 16,384, 128 up to 32,768, 256 up to 65,536 and 1024 up to 131,072.

  Args:
    length: the length of the row, tokens, at most `LONGEST_ROW`.
  """
  bits = (length - 1).bit_length()
  return 2 ** max(3, -(-(3 * bits - 32) // 2))


def round_to_blocks(length: int) -> int:
  """Rounds `length` up to a multiple of the splash kernel's blocks.

  Blocks have 384 or 512 tokens. In rows of more than 32,768 tokens, blocks have 1024 tokens to
  save memory: the backward pass writes a gradient of the queries for each block of keys.
  """
  blocks = _BLOCKS if length <= _LONG else (_BLOCK_OF_LONG,)
  return min(-(-length // block) * block for block in blocks)


def short_row(length: int) -> int:
  """The length, in tokens, of a short row, to which a mostly empty row is cut.

  It is a third of the row, rounded down to a multiple of 384 or 512 tokens, whichever multiple is
  larger. The splash kernel's blocks may have these lengths. A third below 384 tokens is not
  rounded.
  """
  third = length // 3
  return max(third // block * block for block in _BLOCKS) or third


def is_visible(
  query: Array, starts: Array, prompt_ends: Array, key: Array, window: Array | int | None
) -> Array:
  """Whether a query sees a key of the same prompt or of its rollouts; all arguments broadcast.

  Args:
    query, key: i32, indices in the row.
    starts, prompt_ends: i32, the query's fields in `Rows`.
    window: how many tokens of its sequence a query may attend to, including its own; None: all.
  Returns:
    bool; the caller must check that query and key have the same prompt, and that the key is not
    padding.
  """
  in_prompt = key < prompt_ends
  visible = (key <= query) & (in_prompt | (key >= starts))
  if window is None:
    return visible
  between = jnp.where(in_prompt, starts - prompt_ends, 0)  # tokens of the prompt's other rollouts
  return visible & (query - key - between < window)


def sequence_starts(rows: Rows, index: Array) -> tuple[Array, Array]:
  """The start of each token's sequence, and the prompt's length if the token is in a rollout.

  Args:
    rows: arrays [..., L].
    index: i32[L], indices of the tokens in their row.
  Returns:
    Starts, as indices in the row, and lengths, 0 for a prompt's tokens; i32[..., L] each.
  """
  in_prompt = index < rows.prompt_ends
  before = rows.positions - (index - rows.starts)
  starts = jnp.where(in_prompt, index - rows.positions, rows.starts)
  return starts, jnp.where(in_prompt, 0, before)


def visible_blocks(
  rows: Rows, query_block: int, key_block: int, window: Array | int | None
) -> Array:
  """For each block of queries and each block of keys, whether some query sees some key.

  Args:
    rows: arrays [..., L].
    query_block, key_block: tokens per block, which divide L.
    window: as for `is_visible`.
  Returns:
    bool[..., L/query_block, L/key_block].
  """
  L = rows.prompts.shape[-1]
  index = jnp.arange(L)
  # A query sees two intervals of keys: in its prompt, and in its own rollout up to itself.
  prompt_length = rows.positions - (index - rows.starts)  # tokens
  oldest = 0 if window is None else jnp.maximum(rows.positions - window + 1, 0)  # position
  prompt_first = rows.prompt_ends - prompt_length + oldest
  prompt_last = jnp.minimum(rows.prompt_ends - 1, index)
  rollout_first = jnp.maximum(rows.starts, rows.starts + oldest - prompt_length)
  blocks = jnp.arange(0, L, key_block)
  column = lambda x: x[..., None]
  overlaps = lambda first, last: (
    (column(jnp.maximum(first, 0)) < blocks + key_block)
    & (column(last) >= blocks)
    & column(first <= last)
  )
  visible = overlaps(prompt_first, prompt_last) | overlaps(rollout_first, index)
  visible &= column(rows.prompts >= 0)
  return jnp.any(visible.reshape(*visible.shape[:-2], -1, query_block, L // key_block), axis=-2)
