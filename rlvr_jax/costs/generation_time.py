"""Seconds of generation by roofline: responses of given lengths, decoded in slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from rlvr_jax.costs.chips import Chip
from rlvr_jax.costs.workload import Workload
from rlvr_jax.models import memory
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.functional import Model
from rlvr_jax.ops.caches import CacheShape
from rlvr_jax.rollouts.decoder import slot_bytes
from rlvr_jax.types import Params

_LAYER_SUMS = 2  # per layer, of activations over `tensor`: after attention and after the MLP


class Seconds(NamedTuple):
  """Between which bounds the seconds of a program lie, by the peaks of a chip."""

  overlapped: float  # computation, HBM and links at the same time
  in_turn: float  # one after the other


def refresh_seconds(
  batches: Sequence[Workload],
  model: Model,
  base: Params,
  mesh: Mesh | AbstractMesh,
  cache: CacheShape,
  chip: Chip,
  *,
  slots: int,
  pages: bool,
  cache_format: str = "",
) -> Seconds:
  """Seconds of sampling all responses of a refresh, its weights and its prompts included.

  Every slot of a device is computed, also an idle one. All devices wait for the slowest in every
  burst. The host takes no time.

  Args:
    batches: lengths of the refresh, in the order in which it samples.
    model: of the policy.
    base: shapes of all parameters, with shardings on `mesh`.
    mesh: that generates.
    cache: of a slot.
    chip: its peaks.
    slots: over all devices of the mesh.
    pages: whether a slot reads the blocks of its own cache, or all read as far as the longest.
    cache_format: `config.sampling.cache_format`.
  """
  network, tensor = model.config, mesh.shape["tensor"]
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  of_embedding = () if network.tied_head else ("embedding",)  # otherwise the head reads it
  read = {name: leaf for name, leaf in base.items() if name not in of_embedding}
  weight_bytes = memory.decoding_copy_bytes(read, network.compute_dtype)
  token_bytes = slot_bytes(network, cache, tensor, cache_format) / cache.tokens
  width_bytes = network.width * np.dtype(network.compute_dtype).itemsize
  sums = 2 * _LAYER_SUMS * network.num_layers * width_bytes * (tensor - 1) / tensor
  per_device = -(-slots // devices)
  one_token = forward_flops(network, [1], [[1]])  # products with weights, mostly
  prompts = np.concatenate([batch.prompts for batch in batches])
  of_responses = np.concatenate(
    [np.repeat(batch.prompts, batch.responses.shape[1]) for batch in batches]
  )
  lengths = np.concatenate([batch.responses.ravel() for batch in batches])
  blocks = lambda tokens, part: -(-tokens // part.size) * part.size

  overlapped = in_turn = 0.0
  for burst in bursts(lengths, per_device * devices, cache.steps):
    read = blocks(of_responses[burst.response], cache.prompt) + cache.steps
    read = read + blocks(burst.generated, cache.response)
    cached = np.where(burst.tokens > 0, read, 0)
    if not pages:
      cached = np.full_like(cached, cached.max())
    tokens, steps = cached.reshape(devices, per_device).sum(1).max(), burst.tokens.max()
    needed = (
      per_device * one_token / tensor / chip.flops,
      (weight_bytes + tokens * token_bytes) / chip.hbm_bytes_per_s,
      per_device * sums / chip.interconnect_bytes_per_s,
    )
    overlapped += steps * max(needed)
    in_turn += steps * sum(needed)
  nothing = np.zeros((len(prompts), 1), np.int64)
  prefill = forward_flops(network, prompts, nothing) / (devices * tensor) / chip.flops
  sync = memory.decoding_copy_bytes(base, network.compute_dtype) / chip.interconnect_bytes_per_s
  return Seconds(overlapped + prefill + sync, in_turn + prefill + sync)


class Burst(NamedTuple):
  """What the slots decode before the next may take responses."""

  response: np.ndarray  # i64[slots], number of the response; −1 in a slot that had none yet
  generated: np.ndarray  # i64[slots], its tokens before this burst
  tokens: np.ndarray  # i64[slots], its tokens of this burst; 0 in an idle slot


def bursts(lengths: np.ndarray, slots: int, steps: int) -> Iterator[Burst]:
  """Yields the bursts of responses in slots, as `rollouts.engine` runs them.

  A slot takes the next response at the first burst after its own has ended.

  Args:
    lengths: i[N], tokens of the responses, at least 1, in the order in which they are sampled.
    slots: responses that are decoded at a time.
    steps: tokens of a burst.
  """
  response, left, generated = np.full(slots, -1), *np.zeros((2, slots), np.int64)
  taken = 0
  while True:
    free = np.flatnonzero(left == 0)[: len(lengths) - taken]
    response[free] = np.arange(taken, taken + len(free))
    left[free], generated[free] = lengths[response[free]], 0
    taken += len(free)
    if not left.any():
      return
    tokens = np.minimum(left, steps)
    yield Burst(response.copy(), generated.copy(), tokens)
    generated += tokens
    left -= tokens
