"""Placement of a network on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from rlvr_jax.types import Array, Params


def same(x: Array) -> Array:
  return x


class Residual(NamedTuple):
  """Placement of the residual stream [R, L, D] in training; by default on one device."""

  keep: Callable[[Array], Array] = same  # of the stream between blocks
  gather: Callable[[Array], Array] = same  # of all its tokens, before kernels multiply them
  scatter: Callable[[Array], Array] = same  # of a product that is to be added to it


class Layout(NamedTuple):
  """Placement of a network on devices; by default on one device.

  `train.cluster.sharding.layout` makes one.
  """

  mesh: Mesh | None = None  # with axes (data, fsdp, tensor); batches are split over the first two
  constrain: Callable[[Array], Array] = same  # keeps activations sharded on their first axis
  residual: Residual = Residual()  # in training
  # Applied to the parameters before a decoding loop: gathers them once, not at every token.
  gather: Callable[[Params], Params] = lambda params: params


ONE_DEVICE = Layout()
