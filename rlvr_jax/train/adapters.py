"""Training adapters beside a frozen base: where the base lives, and programs that take it.

The train state's parameters are the adapters alone, so that checkpoints, the optimizer and what is
handed over are as small as they are. The base is an argument of every program, never compiled in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from rlvr_jax.models import lora, peft
from rlvr_jax.models.functional import Model
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.keys import key_for
from rlvr_jax.train import sharding
from rlvr_jax.types import Params


def make_lora(config: ml_collections.ConfigDict) -> lora.LoraSettings | None:
  """What `config.lora` describes; None where all parameters are trained."""
  settings = config.lora
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
  config: ml_collections.ConfigDict, network: TransformerConfig, base: Params, mesh: Mesh
) -> Params:
  """Those of `config.lora.adapters`, or new ones that change nothing yet; sharded.

  Args:
    network: settings of the base.
    base: its parameters' shapes.
  Raises:
    ValueError: the adapters are not those of `config.lora` on this network.
    FileNotFoundError: there are none.
  """
  settings, folder = make_lora(config), config.lora.adapters
  assert settings is not None
  make = lambda key: lora.init(key, base, settings)
  shardings = sharding.state_shardings(jax.eval_shape(make, jax.random.key(0)), mesh)
  if not folder:
    # Counted 1: the first key of this purpose is that of a base drawn at random.
    return jax.jit(make, out_shardings=shardings)(key_for(config.seed, "init", 1))
  adapters, found = peft.load_adapters(folder, network)
  if (found.rank, found.alpha) != (settings.rank, settings.alpha):
    raise ValueError(
      f"config.lora.adapters = {folder!r} have rank {found.rank} and alpha {found.alpha}, not those"
      f" of config.lora, {settings.rank} and {settings.alpha}; set these to the former"
    )
  try:
    peft.check_adapters(adapters, settings, network)
  except ValueError as error:
    raise ValueError(f"config.lora.adapters = {folder!r}: {error}") from error
  place = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])
  return jax.tree.map(place, adapters, shardings)


class Base:
  """The frozen parameters; empty until a run begins."""

  def __init__(self) -> None:
    self._by_mesh: dict[Any, Params] = {}

  def put(self, mesh: Mesh, params: Params) -> None:
    """Takes what programs on the mesh get."""
    self._by_mesh[mesh] = params

  def on(self, mesh: Mesh) -> Params:
    """What was put there."""
    return self._by_mesh[mesh]


class OverBase:
  """A jitted function of adapters whose further argument, the base, is filled in when called."""

  def __init__(
    self, base: Base, mesh: Mesh, make: Callable[[Params], Callable], **options: Any
  ) -> None:
    """Jits it.

    Args:
      base: where the frozen parameters will be.
      mesh: that the program runs on.
      make: base → the function; called while tracing.
      options: of `jax.jit`.
    """
    self._base, self._mesh = base, mesh

    def adapted(*args: Any, base: Params, **kwargs: Any) -> Any:
      return make(base)(*args, **kwargs)

    self._jitted = jax.jit(adapted, **options)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._jitted(*args, base=self._base.on(self._mesh), **kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> Any:
    """As of a jitted function."""
    return self._jitted.lower(*args, base=self._base.on(self._mesh), **kwargs)


class Programs:
  """Jits functions of the policy's parameters, whether these are all or adapters."""

  def __init__(self, settings: lora.LoraSettings | None):
    self.settings = settings
    self.base = Base()

  def jit(
    self, mesh: Mesh, make: Callable[[Callable[[Model], Model]], Callable], **options: Any
  ) -> Any:
    """A jitted function.

    Args:
      mesh: that it runs on.
      make: (a model of all parameters → the model of those that are trained) → the function.
      options: of `jax.jit`.
    """
    if self.settings is None:
      return jax.jit(make(lambda model: model), **options)
    return OverBase(self.base, mesh, lambda base: make(self.adapting(base)), **options)

  def adapting(self, base: Params) -> Callable[[Model], Model]:
    """The way from a model of all parameters to that of the adapters beside `base`."""
    settings = self.settings
    if settings is None:
      return lambda model: model
    return lambda model: lora.with_base(model, base, settings)

  def whole(self, mesh: Mesh) -> Callable[[Params], Params]:
    """Jitted: trained parameters → all parameters, adapters merged."""
    settings = self.settings
    if settings is None:
      return lambda params: params
    merge = lambda base: lambda adapters: lora.merged(base, adapters, settings)
    return OverBase(self.base, mesh, merge)
