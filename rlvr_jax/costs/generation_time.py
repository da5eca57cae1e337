"""Seconds of generation by roofline: responses of given lengths, decoded in slots."""

from __future__ import annotations

import collections
from collections.abc import Sequence
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

  overlapped = in_turn = 0.0
  for cached, steps in _bursts(batches, cache, slots=per_device * devices):
    if not pages:
      cached = np.full_like(cached, cached.max())
    tokens = cached.reshape(devices, per_device).sum(1).max()
    needed = (
      per_device * one_token / tensor / chip.flops,
      (weight_bytes + tokens * token_bytes) / chip.hbm_bytes_per_s,
      per_device * sums / chip.interconnect_bytes_per_s,
    )
    overlapped += steps * max(needed)
    in_turn += steps * sum(needed)
  prompts = np.concatenate([batch.prompts for batch in batches])
  nothing = np.zeros((len(prompts), 1), np.int64)
  prefill = forward_flops(network, prompts, nothing) / (devices * tensor) / chip.flops
  sync = memory.decoding_copy_bytes(base, network.compute_dtype) / chip.interconnect_bytes_per_s
  return Seconds(overlapped + prefill + sync, in_turn + prefill + sync)


def _bursts(batches: Sequence[Workload], cache: CacheShape, *, slots: int):
  """Yields for each burst (i64[slots] cached tokens that a step reads, its number of steps)."""
  waiting = collections.deque(
    (int(prompt), int(response))
    for batch in batches
    for prompt, row in zip(batch.prompts, batch.responses, strict=True)
    for response in row
  )
  blocks = lambda tokens, part: -(-tokens // part.size) * part.size
  prompt, left, generated = (np.zeros(slots, np.int64) for _ in range(3))
  while True:
    for slot in np.flatnonzero(left == 0)[: len(waiting)]:
      prompt[slot], left[slot] = waiting.popleft()
      generated[slot] = 0
    running = left > 0
    if not running.any():
      return
    steps = min(cache.steps, int(left.max()))
    read = blocks(prompt, cache.prompt) + blocks(generated, cache.response) + cache.steps
    yield np.where(running, read, 0), steps
    advanced = np.minimum(left, steps)
    generated += advanced
    left -= advanced
