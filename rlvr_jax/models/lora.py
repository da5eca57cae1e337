"""LoRA: trained low-rank changes of frozen kernels, W + (α/R)·A·B.

The trained parameters are the adapters only, a nested dict that mirrors the adapted kernels,
{"blocks": {"query": {"a": [L, D, R], "b": [L, R, E]}}}. The frozen base is a separate argument.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.models.functional import Model
from rlvr_jax.models.linear import LowRank
from rlvr_jax.ops.checks import check_between, check_integer
from rlvr_jax.types import Array, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraSettings:
  """Settings of LoRA.

  Attributes:
    rank: R.
    alpha: α; a change is multiplied by α/R.
    targets: regular expression that is searched for in the paths of the layers' kernels, such as
      "blocks/(query|value)$".
  Raises:
    ValueError: the rank is below 1, α is not positive, or `targets` is not a regular expression.
  """

  rank: int
  alpha: float
  targets: str = r"blocks/(query|key|value|output|gate|up|down)$"

  def __post_init__(self):
    check_integer("LoraSettings", "rank", self.rank, low=1)
    check_between("LoraSettings", "alpha", self.alpha, low=0.0, open_low=True)
    try:
      re.compile(self.targets)
    except (re.error, TypeError) as error:
      raise ValueError(
        f"LoraSettings: targets = {self.targets!r} is not a regular expression ({error}); give one"
        ' such as "blocks/(query|value)$"'
      ) from error

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


def init(key: Array, base: Params, settings: LoraSettings) -> Params:
  """Initializes adapters to no change: A uniform within ±1/√D, B zero.

  Args:
    key: one PRNG key.
    base: the parameters to be adapted, or their shapes.
    settings: rank and targets.
  Returns:
    {"blocks": {name: {"a": [L, D, R], "b": [L, R, E]}}}, at least float32.
  Raises:
    ValueError: no kernel is targeted, or a targeted kernel is too small for the rank.
  Source: "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), §4.1; A as in the
    PEFT library.
  """

  def init_pair(key, kernel):
    L, D, E = kernel.shape
    dtype = jnp.promote_types(kernel.dtype, jnp.float32)
    a = jax.random.uniform(key, (L, D, settings.rank), dtype, -(D**-0.5), D**-0.5)
    return {"a": a, "b": jnp.zeros((L, settings.rank, E), dtype)}

  kernels = target_kernels(base, settings)
  keys = jax.random.split(key, len(kernels))
  pairs = map(init_pair, keys, kernels.values())
  return {"blocks": dict(zip(kernels, pairs, strict=True))}


def target_kernels(base: Params, settings: LoraSettings) -> dict[str, Any]:
  """The kernels [L, D, E] of the layers that `settings` names, by name, in alphabetical order.

  Args:
    base: parameters, or their shapes.
  Raises:
    ValueError: no kernel is targeted, or a targeted kernel is too small for the rank.
  """
  blocks = base["blocks"]
  experts = [f"blocks/experts/{name}" for name in blocks.get("experts", ())]
  if targeted := [path for path in experts if re.search(settings.targets, path)]:
    raise ValueError(
      f"LoraSettings: targets = {settings.targets!r} matches {targeted[0]}, but adapters of experts"
      ' and their routers are not supported; target attention alone, as by "blocks/(query|value)$"'
    )
  kernels = {name: blocks[name] for name in sorted(blocks) if getattr(blocks[name], "ndim", 0) == 3}
  targets = {k: w for k, w in kernels.items() if re.search(settings.targets, f"blocks/{k}")}
  if not targets:
    raise ValueError(
      f"LoraSettings: targets = {settings.targets!r} matches no kernel of the layers; they are"
      f" {[f'blocks/{name}' for name in kernels]}"
    )
  for name, kernel in targets.items():
    if settings.rank > min(kernel.shape[1:]):
      raise ValueError(
        f"LoraSettings: rank = {settings.rank} exceeds the rank of blocks/{name}, a"
        f" {kernel.shape[1]}×{kernel.shape[2]} kernel; set rank to at most"
        f" {min(kernel.shape[1:])}, or leave that kernel out of targets"
      )
  return targets


def combine(adapters: Params, base: Params, settings: LoraSettings) -> Params:
  """Combines the network's parameters: those of the base, with `LowRank`s for adapted kernels.

  Scoring adds (α/R)·(x·A)·B to each targeted product and never forms a merged kernel, so that
  gradients are as small as the adapters. Decoding merges once, see `Model.decoding_params`.

  Args:
    adapters: the trained parameters.
    base: the frozen parameters. In a jitted function they must be one of its arguments; otherwise
      they are compiled in as constants.
    settings: the settings that the adapters were made with.
  """
  blocks = base["blocks"]
  kernels = {
    name: LowRank(blocks[name], pair["a"], pair["b"] * settings.scale)
    for name, pair in adapters["blocks"].items()
  }
  return {**base, "blocks": {**blocks, **kernels}}


def adapt(model: Model, settings: LoraSettings | None) -> Model:
  """Makes adapters the trained parameters of `model`; unchanged if `settings` is None."""
  if settings is None:
    return model
  return model._replace(combine=functools.partial(combine, settings=settings))
