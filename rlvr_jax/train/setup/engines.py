"""The engines that sample a run's rollouts, one per policy and distribution."""

from __future__ import annotations

import math
from typing import Any

import jax
import ml_collections
from jax.sharding import AbstractMesh, Mesh

from rlvr_jax.data import Tokenizer
from rlvr_jax.models import memory
from rlvr_jax.models.functional import Model
from rlvr_jax.ops.caches import CacheShape, choose_cache
from rlvr_jax.rollouts.decoder import slot_bytes
from rlvr_jax.rollouts.engine import Engine
from rlvr_jax.train.cluster import multihost, sharding
from rlvr_jax.train.cluster.process import ends_after
from rlvr_jax.types import Params, Sampling

_USABLE = 0.85  # of a device's memory; the rest is for temporary buffers
_TRAINED_BYTES = 12  # per parameter: the float32 master and two moments, as the trainer has them


def make_engine(
  config: ml_collections.ConfigDict,
  tokenizer: Tokenizer,
  model: Model,
  sampling: Sampling,
  *,
  prompts: int,
  group_size: int,
) -> Engine:
  """The engine for batches of `prompts` prompts; `model`: on the mesh that generates.

  Raises:
    ValueError: the devices have no memory for a slot.
  """
  limit_s = config.generation_deadline_s

  def to_host(tree: Any) -> Any:
    multihost.end_if_asked()  # meanwhile the devices compute the burst
    with ends_after(
      limit_s,
      f"error: sampling has made no progress for {limit_s:g} s, so a device or another process"
      " hangs. What was sampled is kept: rerun the same command to continue, with a larger"
      " config.generation_deadline_s if the devices are that slow",
    ):
      return sharding.to_host(tree)

  return Engine(
    model,
    sampling,
    slots=choose_slots(config, model, prompts * group_size),
    prefill_rows=prompts,
    max_prompt_length=config.max_prompt_length,
    max_new_tokens=config.max_response_length,
    stop_tokens=tokenizer.stop_ids,
    pad_token=tokenizer.pad_id,
    cache=_cache(config.sampling.cache, model),
    to_host=to_host,
  )


def _cache(wanted: str, model: Model) -> str:
  """The kind of cache, for the devices that generate."""
  network = model.config
  devices = model.mesh.devices.flat if isinstance(model.mesh, Mesh) else jax.devices()
  slides = network.sliding_window is not None and any(network.sliding_layers or ())
  return choose_cache(
    wanted,
    platform=devices[0].platform,
    head_dim=network.head_dim,
    dtype=network.compute_dtype,
    plain=not slides and network.attention_soft_cap is None,
  )


def choose_slots(
  config: ml_collections.ConfigDict, model: Model, responses: int, limit: int | None = None
) -> int:
  """config.sampling.slots; where that is 0, one per response, or fewer if the memory is too small.

  Args:
    config: of the run, with the sizes of its mesh.
    model: on the mesh that generates.
    responses: of a batch.
    limit: bytes of a device; None: as the device says, without a limit if it does not.
  Raises:
    ValueError: the devices have no memory for a slot, or for as many as are configured.
  """
  limit, given = limit or _memory(model.mesh), config.sampling.slots
  if limit is None:
    return given or responses
  mesh = sharding.make_mesh() if model.mesh is None else model.mesh
  base = sharding.placed(jax.eval_shape(model.init, jax.random.key(0)), mesh)
  shape = CacheShape.of(config.max_prompt_length, config.max_response_length)
  decoded = memory.decoding_copy_bytes(base, model.config.compute_dtype)
  # A number that the user has chosen need not leave room for temporary buffers.
  usable = limit if given else _USABLE * limit
  free = max(0, usable - decoded - _resident_bytes(config, model, base))
  of_slot = slot_bytes(model.config, shape, mesh.shape["tensor"])
  slots = int(free // of_slot) * mesh.shape["data"] * mesh.shape["fsdp"]
  if slots < (given or 1):
    wanted = f"config.sampling.slots = {given}: {slots} of them fit" if given else ""
    too_long = f"config.max_response_length = {config.max_response_length}: none fits"
    raise ValueError(
      f"{wanted or too_long}. A response takes {of_slot / 2**30:.2f} GiB of keys and values, a"
      f" device has {free / 2**30:.2f} of {limit / 2**30:.0f} GiB free beside the parameters. Lower"
      " the field, or raise config.mesh.fsdp or config.mesh.tensor; --mode=fits shows what a"
      " configuration takes"
    )
  return given or min(slots, responses)


def _resident_bytes(config: ml_collections.ConfigDict, model: Model, base: Params) -> float:
  """Bytes on a device that generates, besides the copy to decode with and the KV cache.

  Args:
    config, model: as for `choose_slots`.
    base: all parameters on the mesh that generates.
  """
  other = config.generation_mesh
  apart = max(other.data, other.fsdp, other.tensor) and not other.same_devices
  training_sizes = config.mesh.to_dict()
  if apart and model.mesh is not None and dict(model.mesh.shape) != training_sizes:
    return memory.shard_bytes(base)  # the weights that were synced, without an optimizer
  frozen = config.lora.rank > 0  # adapters are small
  size = jax.numpy.dtype(model.config.param_dtype).itemsize if frozen else _TRAINED_BYTES
  parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(base))
  return parameters * size / (training_sizes["fsdp"] * training_sizes["tensor"])


def _memory(mesh: Any) -> int | None:
  """Bytes of this process's devices, if they generate and say so."""
  device = jax.local_devices()[0]
  if isinstance(mesh, AbstractMesh) or (mesh is not None and device not in mesh.devices.flat):
    return None  # the devices need not exist
  return (device.memory_stats() or {}).get("bytes_limit")
