"""Placement of a network on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from rlvr_jax.types import Array, Params


def identity(x: Array) -> Array:
  return x


class Residual(NamedTuple):
  """Placement of the residual stream [R, L, D] in training; by default on one device."""

  keep: Callable[[Array], Array] = identity  # shards the stream between blocks
  gather: Callable[[Array], Array] = identity  # gathers all tokens before a product with kernels
  scatter: Callable[[Array], Array] = identity  # shards a product that is added to the stream


class Layout(NamedTuple):
  """Placement of a network on devices; by default on one device.

  `train.cluster.sharding.make_layout` makes a layout.
  """

  mesh: Mesh | None = None  # with axes (data, fsdp, tensor); batches are split over the first two
  constrain: Callable[[Array], Array] = identity  # keeps activations sharded on their first axis
  residual: Residual = Residual()  # in training only
  # Gathers the parameters once before decoding, not at every token.
  gather: Callable[[Params], Params] = lambda params: params
  # Shapes of the parameters → shardings of the gathered parameters, with the shardings of one layer
  # under "blocks".
  decoding_shardings: Callable[[Params], Params] | None = None


ONE_DEVICE = Layout()
