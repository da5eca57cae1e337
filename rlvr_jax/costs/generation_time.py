"""Seconds of generation by roofline: responses of given lengths, decoded in slots.

A simulation of `rollouts.engine`: which rollout is in which slot in every burst, and
which dialogues wait for a reply.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from rlvr_jax.costs.chips import Chip
from rlvr_jax.costs.workload import Workload
from rlvr_jax.models import memory
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.functional import Model
from rlvr_jax.ops.caches import CacheShape
from rlvr_jax.rollouts.decoder import token_bytes
from rlvr_jax.rollouts.engine import SlotUsage
from rlvr_jax.rollouts.sampler import PATIENCE_S
from rlvr_jax.types import Params

_LAYER_SUMS = 2  # per layer, of activations over `tensor`: after attention and after the MLP


class Seconds(NamedTuple):
  """Between which bounds the seconds of a program lie, by the peaks of a chip."""

  overlapped: float  # computation, HBM and links at the same time
  in_turn: float  # one after the other


class Refresh(NamedTuple):
  """What sampling the responses of a refresh takes, by roofline."""

  seconds: Seconds
  # With computation, HBM and links at the same time:
  slots_busy: float  # tokens sampled per slot and decoding step
  waiting_share: float  # of slot-steps, without a rollout while dialogues wait for replies
  waiting_s: float  # in which the devices wait for replies
  rebuilt_per_token: float  # tokens whose cache is computed anew after replies, per token sampled


def refresh(
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
) -> Refresh:
  """Estimates the sampling of all responses of a refresh, its weights and its prompts included.

  Every slot of a device is computed, also an idle one. All devices wait for the slowest in every
  burst. The host takes no time, and prefilled batches are full.

  Args:
    batches: lengths of the refresh, in the order in which it samples.
    model: of the policy.
    base: shapes of all parameters, with shardings on `mesh`.
    mesh: that generates.
    cache: of a slot.
    chip: its peaks.
    slots: over all devices of the mesh.
    pages: whether a slot reads the blocks of its own cache, or all read as the longest needs.
    cache_format: `config.sampling.cache_format`.
  """
  network, tensor = model.config, mesh.shape["tensor"]
  devices = mesh.shape["data"] * mesh.shape["fsdp"]
  of_embedding = () if network.tied_head else ("embedding",)  # otherwise the head reads it
  read = {name: leaf for name, leaf in base.items() if name not in of_embedding}
  weight_bytes = memory.decoding_copy_bytes(read, network.compute_dtype)
  of_token = token_bytes(network, tensor, cache_format)
  width_bytes = network.width * np.dtype(network.compute_dtype).itemsize
  sums = 2 * _LAYER_SUMS * network.num_layers * width_bytes * (tensor - 1) / tensor
  per_device = -(-slots // devices)
  one_token = forward_flops(network, [1], [[1]])  # products with weights, mostly

  def needed(cached: np.ndarray) -> tuple[float, float, float]:
    """Seconds of a decoding step, by resource, that reads so many tokens in every slot."""
    tokens = cached.reshape(devices, per_device).sum(1).max()
    return (
      per_device * one_token / tensor / chip.flops,
      (weight_bytes + tokens * of_token) / chip.hbm_bytes_per_s,
      per_device * sums / chip.interconnect_bytes_per_s,
    )

  def prefill_s(lengths: np.ndarray) -> float:
    nothing = np.zeros((len(lengths), 1), np.int64)
    return forward_flops(network, lengths, nothing) / (devices * tensor) / chip.flops

  def sampled(of_resources: Callable[[tuple[float, float, float]], float]) -> Sampled:
    step_s = lambda cached: of_resources(needed(cached))
    return sample_in_slots(batches, cache, per_device * devices, step_s, prefill_s, pages=pages)

  prompts = prefill_s(np.concatenate([batch.prompts for batch in batches]))
  sync = memory.decoding_copy_bytes(base, network.compute_dtype) / chip.interconnect_bytes_per_s
  overlapped, in_turn = sampled(max), sampled(sum)
  usage = overlapped.usage
  return Refresh(
    Seconds(overlapped.seconds + prompts + sync, in_turn.seconds + prompts + sync),
    slots_busy=usage.slot_tokens / usage.slot_steps,
    waiting_share=usage.idle_slot_steps / usage.slot_steps,
    waiting_s=overlapped.waits_s,
    rebuilt_per_token=usage.rebuilt_tokens / usage.slot_tokens,
  )


class _Rollout(NamedTuple):
  """A rollout that samples a turn next."""

  prompt: int  # tokens
  response: int  # tokens so far
  turns: tuple[int, ...]  # tokens of the turns to come, of the policy and the environment in turn
  reply_s: float


class Sampled(NamedTuple):
  """Sums over the bursts of a simulation."""

  seconds: float
  usage: SlotUsage  # of the slots, as the engine counts it
  waits_s: float  # for replies, with idle slots


def sample_in_slots(
  batches: Sequence[Workload],
  cache: CacheShape,
  slots: int,
  step_s: Callable[[np.ndarray], float] = lambda cached: 0.0,
  prefill_s: Callable[[np.ndarray], float] = lambda lengths: 0.0,
  *,
  pages: bool = True,
) -> Sampled:
  """Decodes all rollouts in slots; those that have a reply come before those that have not begun.

  Args:
    batches, cache, slots, pages: as for `refresh`.
    step_s: seconds of a decoding step, from the cached tokens i64[slots] that it reads.
    prefill_s: seconds of computing caches of these lengths, after replies.
  """
  coming = collections.deque(
    _Rollout(int(prompt), 0, tuple(turns[turns > 0].tolist()), batch.reply_s)
    for batch in batches
    for prompt, group in zip(batch.prompts, batch.turns, strict=True)
    for turns in group
  )
  waiting: collections.deque[tuple[float, _Rollout]] = collections.deque()  # (reply's time, …)
  blocks = lambda tokens, part: -(-tokens // part.size) * part.size
  running: list[_Rollout | None] = [None] * slots
  prompt, left, repeated, generated = (np.zeros(slots, np.int64) for _ in range(4))
  usage = SlotUsage()
  now = burst_s = waits_s = 0.0
  has_more = True  # rollouts than slots, at the last burst
  while True:
    free = np.flatnonzero(left == 0)
    if waiting and not has_more:
      first, last = waiting[0][0], waiting[-1][0]  # in the order of their replies
      # Idle slots wait for replies up to their share of a burst's time; without any work, for one.
      begins = first if len(free) == slots else now
      patience = min(burst_s, PATIENCE_S) * len(free) / slots
      until = max(now, min(begins + patience, last))
      waits_s += until - now
      now = until
    rebuilt = []
    for slot in free:
      if waiting and waiting[0][0] <= now:
        rollout = waiting.popleft()[1]
      elif coming:
        rollout = coming.popleft()
      else:
        break
      running[slot], prompt[slot] = rollout, rollout.prompt
      # The burst repeats what stands behind the cache, and then samples.
      generated[slot] = rollout.response // cache.steps * cache.steps
      repeated[slot] = rollout.response - generated[slot]
      left[slot] = repeated[slot] + rollout.turns[0]
      if rollout.response:
        rebuilt.append(rollout.prompt + generated[slot])
    if rebuilt:
      now += prefill_s(np.asarray(rebuilt))
      usage.add_costs(rebuilt_tokens=int(sum(rebuilt)))
    is_busy = left > 0
    has_more = bool(is_busy.all())
    if not is_busy.any():
      if waiting:
        continue
      return Sampled(now, usage, waits_s)
    steps = min(cache.steps, int(left.max()))
    if pages:
      cached = blocks(prompt, cache.prompt) + blocks(generated, cache.response)
      read = np.where(is_busy, cached + cache.steps, 0)
    else:
      read = np.full(slots, _longest_read(cache, prompt[is_busy], generated[is_busy]))
    burst_s = steps * step_s(read)
    now += burst_s
    advanced = np.minimum(left, steps)
    tokens = int((advanced - repeated).sum())
    usage.add(steps * slots, tokens, drain=int(is_busy.sum()) + len(waiting) < slots)
    if waiting:
      usage.add_costs(idle_slot_steps=steps * int(np.sum(~is_busy)))
    generated += advanced
    left -= advanced
    repeated[:] = 0
    for slot in np.flatnonzero(is_busy & (left == 0)):
      rollout = running[slot]
      assert rollout is not None
      _, *reply = rollout.turns
      if reply:
        response = int(generated[slot]) + reply[0]
        rollout = rollout._replace(response=response, turns=tuple(reply[1:]))
        waiting.append((now + rollout.reply_s, rollout))


def _longest_read(cache: CacheShape, prompts: np.ndarray, responses: np.ndarray) -> int:
  """Tokens that every slot reads of a `Cache` that has so many tokens of the running slots."""
  parts = (cache.prompt, int(prompts.max())), (cache.response, int(responses.max()))
  return sum(part.read_for(tokens) * part.size for part, tokens in parts) + cache.steps
