"""Rows laid out by hand, and attention within them by its definition, in NumPy."""

import numpy as np

from rlvr_jax.types import Rows


def lay_rows(length, *rows, alignment=128):
  """Rows of prompts [(prompt length, [rollout lengths]), ...], as int32 arrays [R, length]."""
  return Rows(*np.stack([_lay_row(length, prompts, alignment) for prompts in rows], axis=1))


def _lay_row(length, prompts, alignment):
  aligned = lambda n: -(-n // alignment) * alignment
  fields = np.zeros((4, length), np.int32)
  fields[0] = -1
  at = 0
  for number, (prompt, rollouts) in enumerate(prompts):
    end = at = at + aligned(prompt)
    fields[:, end - prompt : end] = np.stack(
      [np.full(prompt, number), np.arange(prompt), np.full(prompt, end), np.full(prompt, end)]
    )
    for rollout in rollouts:
      fields[:, at : at + rollout] = np.stack(
        [
          np.full(rollout, number),
          prompt + np.arange(rollout),
          np.full(rollout, at),
          np.full(rollout, end),
        ]
      )
      assert at + rollout <= length, (at, rollout, length)
      at += aligned(rollout)
  return fields


def attention(queries, keys, values, rows, *, scale, window, soft_cap):
  """One query at a time, over the tokens of its own sequence, found by their positions."""
  out = np.zeros(queries.shape)
  R, L, N, _ = queries.shape
  K = keys.shape[2]
  for r, i in np.ndindex(R, L):
    prompts, positions, starts, _ = (field[r] for field in rows)
    if prompts[i] < 0:
      continue
    own = (prompts == prompts[i]) & (starts == starts[i])
    earlier = (prompts == prompts[i]) & (positions < positions[own].min())  # a rollout's prompt
    distance = positions[i] - positions
    seen = (own | earlier) & (distance >= 0) & (distance < (window or L))
    for n in range(N):
      k = n // (N // K)
      score = keys[r, seen, k] @ queries[r, i, n] * scale
      if soft_cap is not None:
        score = soft_cap * np.tanh(score / soft_cap)
      weights = np.exp(score - score.max())
      out[r, i, n] = weights / weights.sum() @ values[r, seen, k]
  return out
