"""Rotary position embeddings, with the context extensions that published models use."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from rlvr_jax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Context extension of the rotary frequencies.

  With `factor` alone, all frequencies are divided by it (Gemma 3). With `low_frequency_factor`,
  Llama 3's rule applies: it divides low frequencies by `factor`, keeps high frequencies, and
  interpolates between them.
  """

  factor: float
  low_frequency_factor: float | None = None
  high_frequency_factor: float = 4.0
  original_length: int = 8192  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
  """Context extension by YaRN.

  Frequencies with more than `fast_rotations` rotations within the original context are kept.
  Frequencies with fewer than `slow_rotations` are divided by `factor`. The frequencies between
  these limits are interpolated by index.

  Source: "YaRN: Efficient Context Window Extension of Large Language Models" (arXiv:2309.00071).
  """

  factor: float
  original_length: int  # tokens
  fast_rotations: float = 32.0
  slow_rotations: float = 1.0
  integer_indices: bool = True  # rounds the range of interpolated indices outwards to integers
  attention_factor: float | None = None  # multiplies cosines and sines; None: 0.1·ln(factor) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialFrequencies:
  """Rotation of only the first pairs (i, i + W/2) of a head with W entries.

  These pairs have the same frequencies as in a full rotation. The other pairs have frequency 0, so
  that they do not rotate (Gemma 4).
  """

  part: float  # the fraction of the pairs that rotate, in (0, 1]


Scaling: TypeAlias = RopeScaling | YarnScaling | PartialFrequencies


def inverse_frequencies(
  width: int, theta: float, scaling: Scaling | None, dtype=jnp.float32
) -> Array:
  """Rotary angular frequencies θ^(−2i/W), [W/2], with context extension applied.

  W is the number of rotated entries of a head.
  """
  frequencies = theta ** (-jnp.arange(0, width, 2, dtype=dtype) / width)
  if scaling is None:
    return frequencies
  if isinstance(scaling, PartialFrequencies):
    rotated = int(scaling.part * width // 2)
    return jnp.where(jnp.arange(width // 2) < rotated, frequencies, 0)
  if isinstance(scaling, YarnScaling):
    low, high = _yarn_indices(width, theta, scaling)
    keep = 1 - jnp.clip((jnp.arange(width // 2, dtype=dtype) - low) / (high - low), 0.0, 1.0)
  elif scaling.low_frequency_factor is None:
    return frequencies / scaling.factor
  else:
    rotations = scaling.original_length * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
  return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_indices(width: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
  """Indices of the first and the last interpolated frequency."""

  def index(rotations: float) -> float:
    wavelength = scaling.original_length / (2 * math.pi * rotations)
    return width * math.log(wavelength) / (2 * math.log(theta))

  low, high = index(scaling.fast_rotations), index(scaling.slow_rotations)
  if scaling.integer_indices:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, width - 1)
  return low, high if high != low else low + 1e-3


def rotary_tables(
  positions: Array, frequencies: Array, scaling: Scaling | None = None
) -> tuple[Array, Array]:
  """Cosine and sine of position times frequency, each [..., L, 1, W/2]."""
  angles = positions[..., None, None].astype(frequencies.dtype) * frequencies
  if not isinstance(scaling, YarnScaling):
    return jnp.cos(angles), jnp.sin(angles)
  factor = scaling.attention_factor
  if factor is None:
    factor = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
  return factor * jnp.cos(angles), factor * jnp.sin(angles)


class RotaryTables(NamedTuple):
  """Cosines and sines of positions, [..., L, 1, W/2]; full and sliding layers may differ in W."""

  full: tuple[Array, Array]
  sliding: tuple[Array, Array] | None  # for sliding layers; None: the same as `full`

  def of_layer(self, slides: Array | bool, unrotated: Array | bool = False) -> tuple[Array, Array]:
    """The tables of a layer; both arguments may be traced, and angles are 0 if `unrotated`."""
    cosine, sine = self.full
    if self.sliding is not None and isinstance(slides, bool):
      cosine, sine = self.sliding if slides else self.full
    elif self.sliding is not None:
      cosine, sine = (
        jnp.where(slides, *pair) for pair in zip(self.sliding, self.full, strict=True)
      )
    if unrotated is False:
      return cosine, sine
    return jnp.where(unrotated, 1.0, cosine), jnp.where(unrotated, 0.0, sine)

  def at(self, index: Array) -> RotaryTables:
    """Selects the tables' entries at `index`, i32[...], along the first axis."""
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="clip"), self)


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
  """Rotates the pairs (i, i + W/2) of the first W entries of each head by the tables' angles.

  Args:
    x: [..., L, N, H].
    tables: cosines and sines, each [..., L, 1, W/2].
  """
  cosine, sine = tables
  width = 2 * cosine.shape[-1]
  first, second = jnp.split(x[..., :width].astype(cosine.dtype), 2, axis=-1)
  out = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
  out = out.astype(x.dtype)
  return out if width == x.shape[-1] else jnp.concatenate([out, x[..., width:]], axis=-1)
