"""The gated delta rule in packed rows equals its recurrence, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops import delta_rule
from rlvr_jax.ops.delta_rule import Tokens, conv_rows, conv_step, delta_rows, delta_step
from rlvr_jax.types import Rows

# Of each row: (places of padding before it, tokens of a prompt, tokens of its rollouts).
ROWS = (
  ((3, 5, (4, 9)), (0, 0, (6,)), (2, 19, (1, 7, 3))),
  ((0, 33, (8,)), (1, 1, (2, 2))),
)


def make_rows(layout, length):
  """Rows of a layout, and every sequence's indices in its row with those of its prompt before."""
  fields = np.full((4, len(layout), length), 0, np.int32)
  fields[0] = -1
  sequences = []
  for r, blocks in enumerate(layout):
    at = 0
    for p, (padding, prompt, rollouts) in enumerate(blocks):
      start = at + padding
      end = at = start + prompt
      of_prompt = np.arange(start, end)
      fields[:, r, start:end] = np.stack(np.broadcast_arrays(p, of_prompt - start, end, end))
      sequences.append((r, of_prompt, 0))
      for count in rollouts:
        index = np.arange(at, at + count)
        fields[:, r, at : at + count] = np.stack(
          np.broadcast_arrays(p, prompt + index - at, at, end)
        )
        sequences.append((r, np.concatenate([of_prompt, index]), prompt))
        at += count
  return Rows(*map(jnp.asarray, fields)), [s for s in sequences if len(s[1]) > s[2]]


def make_tokens(length, heads=2, d_k=4, d_v=3):
  shape = (len(ROWS), length, heads)
  keys = jax.random.split(jax.random.key(0), 5)
  unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
  return Tokens(
    jax.random.normal(keys[0], (*shape, d_k)),
    unit(jax.random.normal(keys[1], (*shape, d_k))),
    jax.random.normal(keys[2], (*shape, d_v)),
    -jnp.exp(2 * jax.random.normal(keys[3], shape)),
    jax.nn.sigmoid(jax.random.normal(keys[4], shape)),
  )


def packed(tokens, rows):
  return delta_rows(tokens, rows, lambda tokens: tokens)


def one_by_one(tokens, sequences):
  """o [R, L, N, d_v] by the recurrence, 0 at padding."""
  longest = max(len(index) for _, index, _ in sequences)
  row = jnp.array([row for row, _, _ in sequences])
  padded = [np.pad(index, (0, longest - len(index))) for _, index, _ in sequences]
  index = jnp.array(padded)
  of_sequences = lambda x: jax.vmap(lambda x, i: x[i])(x[row], index)
  parts = jax.tree.map(lambda x: jnp.moveaxis(of_sequences(x), 1, 0), tuple(tokens))
  state = jnp.zeros((*parts[1].shape[1:], tokens.value.shape[-1]), tokens.value.dtype)
  _, found = jax.lax.scan(lambda s, t: delta_step(s, *t)[::-1], state, parts)
  out = jnp.zeros_like(tokens.value)
  for number, (row, index, first) in enumerate(sequences):
    out = out.at[row, index[first:]].set(found[first : len(index), number])
  return out


@pytest.mark.parametrize(
  ("length", "chunk"), [(80, 8), pytest.param(128, 64, marks=pytest.mark.slow)]
)
def test_rows_equal_the_recurrence_in_value_and_gradient(x64, length, chunk, monkeypatch):
  rows, sequences = make_rows(ROWS, length)
  monkeypatch.setattr(delta_rule, "CHUNK", chunk)
  tokens = make_tokens(length)
  real = (rows.prompts >= 0)[:, :, None, None]
  weights = jax.random.normal(jax.random.key(1), tokens.value.shape) * real

  def value_and_gradient(compute):
    loss = lambda t: (lambda out: (jnp.sum(weights * jnp.sin(out)), out))(compute(t))
    gradient, out = jax.jit(jax.grad(loss, has_aux=True))(tokens)
    return jnp.where(real, out, 0), gradient

  found, gradient = value_and_gradient(lambda t: packed(t, rows)[0])
  expected, by_steps = value_and_gradient(lambda t: one_by_one(t, sequences))
  np.testing.assert_allclose(found, expected, atol=1e-12)
  for name in Tokens._fields:
    np.testing.assert_allclose(getattr(gradient, name), getattr(by_steps, name), atol=1e-11)


def test_a_last_state_is_that_of_the_last_token_with_an_effect(x64):
  rows, _ = make_rows((((0, 37, ()),), ((0, 37, ()),)), 37)
  lengths = jnp.array([37, 21])
  real = (jnp.arange(37) < lengths[:, None])[..., None]
  tokens = make_tokens(37)
  tokens = tokens._replace(
    decay=jnp.where(real, tokens.decay, 0), strength=jnp.where(real, tokens.strength, 0)
  )
  _, states = jax.jit(lambda tokens: packed(tokens, rows))(tokens)
  step = jax.jit(delta_step)
  for row, length in enumerate(lengths.tolist()):
    state = jnp.zeros_like(states[row])
    for t in range(length):
      _, state = step(state, *(x[row, t] for x in tokens))
    np.testing.assert_allclose(states[row], state, atol=1e-12)


def test_convolution_of_rows_equals_that_of_steps(x64):
  rows, sequences = make_rows(ROWS, 80)
  x = jax.random.normal(jax.random.key(0), (len(ROWS), 80, 6))
  taps = jax.random.normal(jax.random.key(1), (6, 4))
  found = np.asarray(jax.jit(conv_rows)(x, taps, rows))
  step = jax.jit(conv_step)
  for row, index, first in sequences:
    window = jnp.zeros((3, 6))
    for t, place in enumerate(index):
      out, window = step(x[row, place], window, taps)
      if t >= first:
        np.testing.assert_allclose(found[row, place], out, atol=1e-12)


def test_equal_keys_of_full_strength_keep_their_digits():
  """The inverse of a matrix of ones, whose powers have entries up to 10^18."""
  length = 64
  rows, _ = make_rows((((0, length, ()),),), length)
  ones = jnp.ones((1, length, 1))
  key = jnp.ones((1, length, 1, 1))
  value = jnp.arange(length, dtype=jnp.float32).reshape(1, length, 1, 1)
  out, _ = packed(Tokens(key, key, value, 0 * ones, ones), rows)
  np.testing.assert_allclose(out, value, atol=1e-4)  # each value takes the place of the one before
