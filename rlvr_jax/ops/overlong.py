"""DAPO's two treatments of responses that reach the length limit.

Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476).
"""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np

from rlvr_jax.ops.masked import upcast
from rlvr_jax.types import Array


def overlong_penalty(
  lengths: Array | np.ndarray, *, max_response_length: int, overlong_buffer: int
) -> Array:
  """Penalty to subtract from the reward: 0 up to the buffer, then linear to 1 at the limit.

  Args:
    lengths: [P, G], response tokens.
    max_response_length: tokens, the sampler's limit.
    overlong_buffer: the number of tokens before the limit over which the penalty rises from 0 to
      1; at least 1, and at most `max_response_length`.
  Returns:
    f32[P, G], in [0, 1], in units of reward.
  Raises:
    ValueError: the buffer is below 1 or above the limit.
  Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv:2503.14476),
    soft overlong punishment.
  """
  if not 1 <= overlong_buffer <= max_response_length:
    raise ValueError(
      f"overlong_buffer = {overlong_buffer} tokens is not between 1 and the maximum response"
      f" length, {max_response_length}; set it within this range, or turn overlong shaping off"
    )
  over = upcast(lengths) - (max_response_length - overlong_buffer)
  return jnp.clip(over / overlong_buffer, 0.0, 1.0)


def overlong_filter(mask: Array, stopped: Array) -> Array:
  """The loss mask, set to 0 in responses that were cut off by the length limit.

  Args:
    mask: [P, G, T], the loss mask.
    stopped: bool[P, G], True if a stop token ended the response.
  Returns:
    [P, G, T], in the mask's dtype.
  """
  chex.assert_rank([mask, stopped], [3, 2])
  return mask * stopped[..., None].astype(mask.dtype)
