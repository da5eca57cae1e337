"""Gated DeltaNet: mixes a layer's tokens by a state of constant size, in place of attention.

    q, k, v = silu(conv(x·W)) per head, q and k of unit norm;  g = −e^a·softplus(x·W_g + b);
    β = σ(x·W_β);  o from `ops.delta_rule`;  y = (rms(o) ⊙ silu(x·W_z))·W_o

There are N_k key heads of width d_k, and N value heads of width d_v. Head h reads key head
⌊h·N_k/N⌋. A convolution has C channels and reads T tokens.

Parameters of the stacked layers, under "blocks/delta": query, key [layers, D, N_k·d_k], value, gate
(W_z) [layers, D, N·d_v], output [layers, N·d_v, D], strength (W_β) and decay (W_g) [layers, D, N],
log_rate (a) and decay_bias (b) [layers, N], the norm's scale [layers, d_v], and the taps of the
convolutions, query_taps and so on [layers, C, T]. g, β and silu(x·W_z) are at least float32.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464); sizes and
initialization of the decays as in "Transformers are SSMs" (arXiv:2405.21060).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rlvr_jax.models.linear import dense, init_kernel
from rlvr_jax.ops.delta_rule import DeltaInputs
from rlvr_jax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaSettings:
  """Sizes of a gated DeltaNet, from the settings of its network."""

  key_heads: int  # N_k
  value_heads: int  # N
  key_dim: int  # d_k
  value_dim: int  # d_v
  num_taps: int  # T, tokens that a convolution reads

  @property
  def channels(self) -> tuple[int, int, int]:
    """The numbers of channels of queries, of keys and of values."""
    keys = self.key_heads * self.key_dim
    return keys, keys, self.value_heads * self.value_dim

  def find_mistakes(self) -> Iterator[str]:
    """Yields a message for each mistake in the settings, with its remedy."""
    for name, size in vars(self).items():
      if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
        yield f"delta_{name}={size!r} must be a whole number of at least 1 if delta_layers is set"
        return
    if self.value_heads % self.key_heads:
      yield (
        f"delta_value_heads={self.value_heads} is not a multiple of"
        f" delta_key_heads={self.key_heads}"
      )


class DeltaNet(nnx.Module):
  """A gated DeltaNet."""

  def __init__(
    self,
    settings: DeltaSettings,
    rngs: nnx.Rngs,
    *,
    width: int,
    dtype: str,
    residual_gain: float,
    norm_epsilon: float,
  ):
    self.settings, self.norm_epsilon = settings, norm_epsilon
    queries, keys, values = settings.channels
    heads, taps = settings.value_heads, settings.num_taps
    self.query = init_kernel(rngs, (width, queries), dtype)
    self.key = init_kernel(rngs, (width, keys), dtype)
    self.value = init_kernel(rngs, (width, values), dtype)
    self.gate = init_kernel(rngs, (width, values), dtype)
    self.strength = init_kernel(rngs, (width, heads), dtype)
    self.decay = init_kernel(rngs, (width, heads), dtype)
    self.output = init_kernel(rngs, (values, width), dtype, residual_gain)
    # With this scale the convolution, a sum over T taps, keeps the variance.
    init_taps = lambda channels: nnx.Param(
      (jax.random.normal(rngs.params(), (channels, taps)) * taps**-0.5).astype(dtype)
    )
    self.query_taps, self.key_taps, self.value_taps = map(init_taps, settings.channels)
    uniform = lambda low, high: jax.random.uniform(rngs.params(), (heads,), minval=low, maxval=high)
    self.log_rate = nnx.Param(jnp.log(uniform(1.0, 16.0)).astype(dtype))
    step = jnp.exp(uniform(math.log(1e-3), math.log(0.1)))
    self.decay_bias = nnx.Param(jnp.log(jnp.expm1(step)).astype(dtype))
    self.scale = nnx.Param(jnp.ones((settings.value_dim,), dtype))

  def __call__(
    self, x: Array, mix: Callable[[DeltaInputs], tuple[Array, Any]]
  ) -> tuple[Array, Any]:
    """Mixes tokens x[R, L, D].

    Args:
      mix: a function of `ops.delta_rule`: inputs → (results [R, L, N, d_v], carry).
    Returns:
      y [R, L, D], and the carry that `mix` returned.
    """
    at_least_single = jnp.promote_types(x.dtype, jnp.float32)
    wide = lambda y: y.astype(at_least_single)
    taps = lambda parameter: parameter[...].astype(x.dtype)
    steps = jax.nn.softplus(wide(dense(x, self.decay)) + wide(self.decay_bias[...]))
    inputs = DeltaInputs(
      channels=(dense(x, self.query), dense(x, self.key), dense(x, self.value)),
      taps=(taps(self.query_taps), taps(self.key_taps), taps(self.value_taps)),
      decay=-jnp.exp(wide(self.log_rate[...])) * steps,
      strength=jax.nn.sigmoid(wide(dense(x, self.strength))),
      key_dim=self.settings.key_dim,
      value_dim=self.settings.value_dim,
    )
    with jax.named_scope("delta"):
      mixed, carry = mix(inputs)
    mean_square = jnp.mean(mixed * mixed, axis=-1, keepdims=True)
    normed = mixed * jax.lax.rsqrt(mean_square + self.norm_epsilon) * wide(self.scale[...])
    gate = jax.nn.silu(wide(dense(x, self.gate)))
    gated = normed.reshape(gate.shape) * gate
    return dense(gated.astype(x.dtype), self.output), carry
