"""The engines that sample a run's rollouts, one per policy and distribution."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import ml_collections
from jax.sharding import AbstractMesh, Mesh

from rlvr_jax.data import Tokenizer
from rlvr_jax.models import memory
from rlvr_jax.models.functional import Model
from rlvr_jax.ops.caches import CacheShape, choose_cache
from rlvr_jax.ops.checks import MAX_INT32, check_integer
from rlvr_jax.rollouts.decoder import slot_bytes
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.cluster import sharding, waiting
from rlvr_jax.train.setup.compiler_options import Options
from rlvr_jax.types import BatchShape, Params, Sampling, TrainState

ROUTINGS = ("recomputed", "replayed")  # how updates choose the experts of each token
_USABLE = 0.85  # usable share of a device's memory; the rest is for temporary buffers


class TrainerLayout(NamedTuple):
  """The facts that determine the trainer's memory on the devices for generation."""

  mesh: Mesh | AbstractMesh
  separate: bool  # whether rollouts are generated on other devices
  frozen: bool  # whether only adapters are trained, which are small
  bytes_per_trained: float  # bytes that the trainer keeps for each trained parameter


def bytes_per_trained_parameter(state: TrainState) -> float:
  """Bytes per trained parameter, including its optimizer state, such as moments."""
  leaves: list[jax.ShapeDtypeStruct] = jax.tree.leaves((state.params, state.opt_state))
  parameters: int = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
  num_bytes: int = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves if x.ndim)
  return num_bytes / parameters


def bytes_per_restored_parameter(published: Params) -> float:
  """Bytes per parameter while a sampler restores a policy beside its present policy.

  Args:
    published: shapes and dtypes of a policy, from `published_params`.
  """
  arrays: list[jax.ShapeDtypeStruct] = jax.tree.leaves(published)
  num_bytes: int = sum(x.size * x.dtype.itemsize for x in arrays)
  parameters: int = sum(x.size for x in arrays)
  return 2 * num_bytes / parameters


def records_routes(settings: ml_collections.ConfigDict) -> bool:
  """Whether rollouts contain the routes of a mixture of experts, according to `config.model`."""
  return routing_of(settings) == "replayed" or bool(settings.get("record_routes", False))


def routing_of(settings: ml_collections.ConfigDict) -> str:
  """The value of `config.model.routing`, or its default if a recipe's model section lacks it."""
  routing: str = settings.get("routing", ROUTINGS[0])
  return routing


@dataclasses.dataclass(frozen=True)
class Engines:
  """Makes the engines of a run.

  Attributes:
    settings: `config.sampling`, with the number of slots and the kind of cache.
    shape: the shape of the largest batch.
    tokenizer: the tokenizer of the run.
    trainer: the trainer of the run.
    batches: number of batches sampled in one refresh, that is, with one policy.
    deadline_s: seconds without progress after which the process ends.
    compiler_options: the compiler options of generation.
    has_replies: whether rollouts are dialogues.
    records_routes: whether rollouts contain the routes of a mixture of experts.
  """

  settings: ml_collections.ConfigDict
  shape: BatchShape
  tokenizer: Tokenizer
  trainer: TrainerLayout
  batches: int
  deadline_s: float
  compiler_options: Options | None
  has_replies: bool
  records_routes: bool

  def make(
    self, model: Model, sampling: Sampling, prompts: int | None = None, batches: int | None = None
  ) -> EnginePrograms:
    """Makes an engine.

    Args:
      model: the model on the mesh for generation.
      sampling: the distribution to sample from.
      prompts: the number of prompts in a batch; by default as many as in the largest batch.
      batches: number of batches that share the slots; by default as many as in a refresh.
    Raises:
      ValueError: the devices have no memory for a slot.
    """
    shape = self.shape if prompts is None else self.shape._replace(prompts=prompts)
    cache = _cache(self.settings, model)
    return EnginePrograms(
      model,
      sampling,
      slots=choose_slots(
        self.settings.slots,
        shape,
        model,
        self.trainer,
        batches=batches or self.batches,
        cache=cache,
        cache_format=self.settings.cache_format,
        has_replies=self.has_replies,
      ),
      prefill_rows=shape.prompts,
      max_prompt_length=shape.max_prompt_length,
      max_new_tokens=shape.max_response_length,
      stop_tokens=self.tokenizer.stop_ids,
      pad_token=self.tokenizer.pad_id,
      cache=cache,
      cache_format=self.settings.cache_format,
      to_host=functools.partial(waiting.burst_to_host, deadline_s=self.deadline_s),
      compiler_options=self.compiler_options,
      compiles_ahead=sharding.platform(model.mesh) != "cpu",
      has_replies=self.has_replies,
      records_routes=self.records_routes,
    )


def _cache(settings: ml_collections.ConfigDict, model: Model) -> str:
  """The kind of KV cache for the devices that generate."""
  network = model.config
  slides = network.sliding_window is not None and any(network.sliding_layers or ())
  return choose_cache(
    settings.cache,
    platform=sharding.platform(model.mesh),
    head_dims=network.head_dims,
    dtype=network.compute_dtype,
    plain=not slides and network.attention_soft_cap is None,
    cache_format=settings.cache_format,
  )


def choose_slots(
  configured: int,
  shape: BatchShape,
  model: Model,
  trainer: TrainerLayout,
  limit: int | None = None,
  *,
  batches: int = 1,
  cache: str = "blocks",
  cache_format: str = "",
  has_replies: bool = False,
) -> int:
  """The configured number of slots, or one slot per response, or fewer if memory is too small.

  With more slots, sampling takes fewer steps, and every step reads the weights once for all slots.
  Devices that do not report their memory get slots for one batch.

  Args:
    configured: `config.sampling.slots`; 0: not configured.
    shape: the shape of the largest batch.
    model: the model on the mesh for generation.
    trainer: the trainer of the run.
    limit: bytes of memory of a device; None: the memory that the device reports.
    batches: number of batches that share the slots.
    cache: "blocks" or "pages", the result of `caches.choose_cache`.
    cache_format: `config.sampling.cache_format`.
    has_replies: whether rollouts are dialogues.
  Raises:
    ValueError: the devices have no memory for a slot, or for the configured number of slots.
  """
  check_integer("config.sampling", "slots", configured, low=0, high=MAX_INT32)
  limit = limit or _memory(model.mesh)
  if limit is None:
    return configured or shape.responses
  mesh = sharding.make_mesh() if model.mesh is None else model.mesh
  base = sharding.abstract_params(model, mesh)
  lengths = shape.max_prompt_length, shape.max_response_length
  sizes = CacheShape.of(*lengths, has_replies=has_replies, pages=cache == "pages")
  decoded = memory.decoding_copy_bytes(base, model.config.compute_dtype)
  # A configured number of slots may also take the memory for temporary buffers.
  usable = limit if configured else _USABLE * limit
  free = max(0, usable - decoded - _resident_bytes(model, base, trainer))
  per_slot = slot_bytes(model.config, sizes, mesh.shape["tensor"], cache_format, cache)
  per_slot += memory.sampling_bytes(model.config, 1)
  slots = int(free // per_slot) * mesh.shape["data"] * mesh.shape["fsdp"]
  if slots < (configured or 1):
    too_many = f"config.sampling.slots = {configured}: only {slots} fit" if configured else ""
    too_long = f"config.max_response_length = {shape.max_response_length}: not even one slot fits"
    raise ValueError(
      f"{too_many or too_long} into memory. A response takes {per_slot / 2**30:.2f} GiB of keys,"
      f" values and logits, but a device has only {free / 2**30:.2f} of {limit / 2**30:.0f} GiB"
      " left for responses. Lower"
      f" config.{'sampling.slots' if configured else 'max_response_length'}, or raise"
      " config.mesh.fsdp or config.mesh.tensor; --mode=fits shows the memory that a configuration"
      " needs"
    )
  return configured or min(slots, batches * shape.responses)


def _resident_bytes(model: Model, base: Params, trainer: TrainerLayout) -> float:
  """Bytes on a device that generates, besides the copy to decode with and the KV cache.

  Args:
    model, trainer: as for `choose_slots`.
    base: all parameters on the mesh that generates.
  """
  sizes: dict[str, int] = dict(trainer.mesh.shape)
  dtype = jax.numpy.dtype(model.config.param_dtype)
  if trainer.separate and model.mesh is not None and dict(model.mesh.shape) != sizes:
    # Only the synced weights, without optimizer state; quantized weights are made from them.
    place = lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return memory.shard_bytes(jax.tree.map(place, base))
  size = dtype.itemsize if trainer.frozen else trainer.bytes_per_trained
  parameters: int = sum(math.prod(x.shape) for x in jax.tree.leaves(base))
  return parameters * size / (sizes["fsdp"] * sizes["tensor"])


def _memory(mesh: Mesh | AbstractMesh | None) -> int | None:
  """Bytes of memory of this process's first device; None if it does not generate or report them."""
  device = jax.local_devices()[0]
  if isinstance(mesh, AbstractMesh) or (mesh is not None and device not in mesh.devices.flat):
    return None  # the devices need not exist
  return (device.memory_stats() or {}).get("bytes_limit")
