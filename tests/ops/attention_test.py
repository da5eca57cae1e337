"""Attention over shared and own keys against a direct NumPy softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.ops import attention as module
from rlvr_jax.ops.attention import Keys, attention

P, G, S, T, N, K, H = 2, 3, 5, 4, 4, 2, 6
attend = jax.jit(attention, static_argnames=("scale", "window", "soft_cap"))


def _oracle(q, q_positions, segments, scale, window, soft_cap):
  """One query and head at a time, over the concatenated keys."""
  out = np.zeros(q.shape)
  for p, g, t, n in np.ndindex(*q.shape[:4]):
    keys, values = [], []
    for segment in segments:
      shared = 0 if segment.keys.shape[1] == 1 else g
      for j in range(segment.keys.shape[-1]):
        position = int(segment.positions[p, shared, j])
        distance = int(q_positions[p, g, t]) - position
        if position >= 0 and 0 <= distance < window:
          head = n // (q.shape[3] // segment.keys.shape[2])
          keys.append(np.asarray(segment.keys)[p, shared, head, :, j])
          values.append(np.asarray(segment.values)[p, shared, head, j])
    score = np.stack(keys) @ np.asarray(q)[p, g, t, n] * scale
    if soft_cap is not None:
      score = soft_cap * np.tanh(score / soft_cap)
    weight = np.exp(score - score.max())
    out[p, g, t, n] = (weight / weight.sum()) @ np.stack(values)
  return out


def _inputs(length=T, dtype=np.float64):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))
  lengths = np.array([5, 2])
  prompt_positions = np.arange(S) - (S - lengths[:, None])
  response = np.broadcast_to(lengths[:, None, None] + np.arange(length), (P, G, length))
  prompt_positions = jnp.asarray(prompt_positions[:, None])
  prompt = Keys.of(normal(P, 1, S, K, H), normal(P, 1, S, K, H), prompt_positions)
  own = Keys.of(normal(P, G, length, K, H), normal(P, G, length, K, H), jnp.asarray(response))
  return normal(P, G, length, N, H), jnp.asarray(response), (prompt, own)


@pytest.mark.parametrize(("window", "soft_cap"), [(2**30, 0.5), (3, None)])
def test_equals_a_direct_softmax(x64, window, soft_cap):
  queries, positions, segments = _inputs()
  settings = dict(scale=0.4, window=window, soft_cap=soft_cap)
  ours = attend(queries, positions, segments, **settings)
  np.testing.assert_allclose(
    ours, _oracle(queries, positions, segments, **settings), rtol=1e-10, atol=1e-12
  )


@pytest.mark.slow
def test_blocks_of_queries_change_neither_value_nor_gradient(x64, monkeypatch):
  queries, positions, segments = _inputs(length=11)

  def loss(queries, segments):
    out = attention(queries, positions, segments, scale=0.4, window=2**30)
    return jnp.sum(jnp.sin(out))

  whole = jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)(queries, segments)
  monkeypatch.setattr(module, "_QUERY_BLOCK", 4)
  blocks = jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)(queries, segments)
  floats = lambda tree: [x for x in jax.tree.leaves(tree) if x.dtype == jnp.float64]
  for a, b in zip(floats(whole), floats(blocks), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_query_that_sees_no_key_is_finite():
  queries, positions, (prompt, _) = _inputs(dtype=np.float32)
  nothing = prompt._replace(positions=jnp.full_like(prompt.positions, -1))
  out = attend(queries, positions, (nothing,), scale=1.0, window=2**30)
  assert bool(jnp.all(jnp.isfinite(out)))


@pytest.mark.usefixtures("no_compilation_cache")
def test_long_responses_keep_no_square_of_scores():
  """At 4,096 tokens neither direction holds a [T, T] array of scores for all heads."""
  length = 4096
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
  integer = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
  own = Keys(shape(1, 1, K, H, length), shape(1, 1, K, length, H), integer(1, 1, length))

  def loss(queries, positions, own):
    return jnp.sum(attention(queries, positions, (own,), scale=1.0, window=2**30))

  compiled = (
    jax.jit(jax.grad(loss, argnums=0))
    .lower(shape(1, 1, length, N, H), integer(1, 1, length), own)
    .compile()
  )
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * N * length * length / 1.5
