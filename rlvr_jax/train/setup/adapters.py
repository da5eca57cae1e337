"""Training adapters on a frozen base.

The train state's parameters are the adapters alone, so that checkpoints, optimizer state and weight
syncs are small. The base is an argument of every program, never a compiled-in constant.
"""

from __future__ import annotations

import jax
import ml_collections
from jax.sharding import Mesh

from rlvr_jax.models import lora, peft
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.keys import key_for
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Params


def make_lora(settings: ml_collections.ConfigDict) -> lora.LoraSettings | None:
  """The settings of `config.lora`; None if all parameters are trained."""
  check_between("config.lora", "rank", settings.rank, low=0)
  if not settings.rank:
    if settings.adapters:
      raise ValueError(
        f"config.lora.adapters = {settings.adapters!r} but config.lora.rank = 0; set rank and alpha"
        " to those of the adapters"
      )
    return None
  try:
    return lora.LoraSettings(rank=settings.rank, alpha=settings.alpha, targets=settings.targets)
  except ValueError as error:
    raise ValueError(f"config.lora: {error}; rank = 0 trains all parameters") from error


def first_adapters(
  settings: lora.LoraSettings,
  folder: str,
  network: TransformerConfig,
  base: Params,
  mesh: Mesh,
  *,
  seed: int,
) -> Params:
  """The adapters of `config.lora.adapters`, or new ones with no effect yet; sharded.

  Args:
    settings: from `make_lora`.
    folder: of the adapters; "" for new ones.
    network: settings of the base network.
    base: shapes of the base's parameters.
    mesh: of the trainer.
    seed: of the run.
  Raises:
    ValueError: the adapters do not match `config.lora` or this network.
    FileNotFoundError: the folder has no adapters.
  """
  make = lambda key: lora.init(key, base, settings)
  shardings = sharding.state_shardings(jax.eval_shape(make, jax.random.key(0)), mesh)
  if not folder:
    # Index 1: index 0 of this purpose initializes the base.
    return jax.jit(make, out_shardings=shardings)(key_for(seed, "init", 1))
  adapters, loaded = peft.load_adapters(folder, network)
  if (loaded.rank, loaded.alpha) != (settings.rank, settings.alpha):
    raise ValueError(
      f"config.lora.adapters = {folder!r} have rank {loaded.rank} and alpha {loaded.alpha}, not"
      f" those of config.lora, {settings.rank} and {settings.alpha}; set these to the former"
    )
  try:
    peft.check_adapters(adapters, settings, network)
  except ValueError as error:
    raise ValueError(f"config.lora.adapters = {folder!r}: {error}") from error
  place = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])
  return jax.tree.map(place, adapters, shardings)
