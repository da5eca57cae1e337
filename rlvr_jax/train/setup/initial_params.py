"""The parameters of a run before its first update: initialized, or read from a published model.

If adapters are trained on a frozen base, the train state's parameters are the adapters alone, so
that checkpoints, optimizer state and weight syncs are small. The base is an argument of every
compiled program, never a constant in a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import ml_collections

from rlvr_jax.models import lora, peft
from rlvr_jax.models.functional import Model
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.models.lora import LoraSettings
from rlvr_jax.models.presets import given_overrides
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.keys import key_for
from rlvr_jax.storage.files import JSON, JsonObject
from rlvr_jax.train.checkpointing.checkpoint_files import CheckpointError
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.types import Params


def make_lora(settings: ml_collections.ConfigDict) -> LoraSettings | None:
  """The settings of `config.lora`; None if all parameters are trained."""
  check_between("config.lora", "rank", settings.rank, low=0)
  if not settings.rank:
    if settings.adapters:
      raise ValueError(
        f"config.lora.adapters = {settings.adapters!r} needs config.lora.rank > 0; set"
        " config.lora.rank and config.lora.alpha to the values of these adapters"
      )
    return None
  try:
    return LoraSettings(rank=settings.rank, alpha=settings.alpha, targets=settings.targets)
  except ValueError as error:
    raise ValueError(f"config.lora: {error}; rank = 0 trains all parameters") from error


class Frozen(NamedTuple):
  """The parameters that are not trained, on the devices; {} if all are trained."""

  trainer: Params  # on the devices for updates
  sampler: Params  # on the devices for generation


@dataclasses.dataclass(frozen=True)
class InitialParams:
  """Makes the parameters before the first update, sharded.

  Attributes:
    model: the policy's functions on the mesh of updates.
    lora: settings of the trained adapters; None if all parameters are trained.
    placement: the placement of the run.
    checkpoint: `config.model.checkpoint`; "" for random parameters.
    adapters: `config.lora.adapters`; "" for new adapters.
    seed: the seed of the run.
    identity: the result of `network_identity` for this run's configuration.
  """

  model: Model
  lora: LoraSettings | None
  placement: Placement
  checkpoint: str
  adapters: str
  seed: int
  identity: Mapping[str, JSON]

  def of_network(self) -> Params:
    """All parameters, from the published model or else randomly initialized.

    Raises:
      CheckpointError: the published model does not fit this network.
    """
    base = self.placement.base
    if self.checkpoint:
      try:
        return load_params(self.checkpoint, base, self.model.config)
      except ValueError as error:
        raise CheckpointError(f"config.model.checkpoint = {self.checkpoint!r}: {error}") from error
    shardings = jax.tree.map(lambda x: x.sharding, base)
    return jax.jit(self.model.init, out_shardings=shardings)(key_for(self.seed, "init"))

  def frozen(self) -> Frozen:
    """The parameters that are not trained; call it once per run."""
    if self.lora is None:
      return Frozen({}, {})
    base, placement = self.of_network(), self.placement
    if sharding.has_same_devices(placement.generation_mesh, placement.mesh):
      return Frozen(base, base)
    placed = sharding.add_shardings(base, placement.generation_mesh)
    return Frozen(base, jax.device_put(base, jax.tree.map(lambda x: x.sharding, placed)))

  def trained(self) -> Params:
    """The trained parameters: all of them, or the adapters only.

    Raises:
      CheckpointError: the published model or adapters do not fit this network.
    """
    if self.lora is None:
      return self.of_network()
    try:
      return self._first_adapters(self.lora)
    except ValueError as error:
      raise CheckpointError(str(error)) from error

  def _first_adapters(self, settings: LoraSettings) -> Params:
    """The adapters of `config.lora.adapters`, or new adapters with no effect yet; sharded.

    Args:
      settings: the settings of this run's adapters.
    Raises:
      ValueError: the adapters do not match `config.lora` or this network.
      FileNotFoundError: the folder has no adapters.
    """
    folder, network = self.adapters, self.model.config
    make = lambda key: lora.init(key, self.placement.base, settings)
    shapes = jax.eval_shape(make, jax.random.key(0))
    shardings = sharding.state_shardings(shapes, self.placement.mesh)
    if not folder:
      # Index 1: index 0 of this purpose initializes the base.
      return jax.jit(make, out_shardings=shardings)(key_for(self.seed, "init", 1))
    adapters, loaded = peft.load_adapters(folder, network)
    if (loaded.rank, loaded.alpha) != (settings.rank, settings.alpha):
      raise ValueError(
        f"config.lora.adapters = {folder!r} have rank {loaded.rank} and alpha {loaded.alpha}, but"
        f" config.lora has rank {settings.rank} and alpha {settings.alpha}; set config.lora.rank"
        " and config.lora.alpha to the adapters' values"
      )
    try:
      peft.check_adapters(adapters, settings, network)
    except ValueError as error:
      raise ValueError(f"config.lora.adapters = {folder!r}: {error}") from error
    place = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])
    return jax.tree.map(place, adapters, shardings)


def network_identity(config: JsonObject) -> dict[str, JSON]:
  """The configuration fields that determine what the parameters compute, by name.

  Args:
    config: a run's configuration, read from JSON.
  Raises:
    AttributeError, KeyError, TypeError, ValueError: `config` is not the configuration of a run.
  """
  fields = [("model", name) for name in ("preset", "checkpoint")]
  fields += [("lora", name) for name in ("rank", "alpha", "targets")]
  return {
    **{f"{section}.{name}": config.get(section, {}).get(name) for section, name in fields},
    "tokenizer": config["tokenizer"],
    "model.overrides": given_overrides(config["model"]),
  }
