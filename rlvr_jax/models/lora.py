"""LoRA: trained low-rank changes of frozen kernels, W + (α/R)·A·B.

The trained parameters are the adapters only, a nested dict that mirrors the adapted kernels,
{"blocks": {"query": {"a": [L, D, R], "b": [L, R, E]}}}. The frozen base is a separate argument.
Kernels have names such as "query"; in gated DeltaNets, such as "delta/query". In full layers whose
heads differ from sliding layers' heads, kernels have names such as "full/query".
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
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
  targets: str = r"blocks/(delta/|full/)?(query|key|value|output_gate|output|gate|up|down)$"

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
  """Initializes adapters that change nothing yet: A is uniform within ±1/√D, B is 0.

  Args:
    key: one PRNG key.
    base: the parameters to be adapted, or their shapes.
    settings: rank and targets.
  Returns:
    {"blocks": {name: {"a": [L, D, R], "b": [L, R, E]}}}, at least float32, nested like the
    kernels of `base`.
  Raises:
    ValueError: no kernel is targeted, or a targeted kernel is too small for the rank.
  Source: "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685), §4.1; A is
    initialized as in the PEFT library.
  """

  def init_pair(key, kernel):
    L, D, E = kernel.shape
    dtype = jnp.promote_types(kernel.dtype, jnp.float32)
    a = jax.random.uniform(key, (L, D, settings.rank), dtype, -(D**-0.5), D**-0.5)
    return {"a": a, "b": jnp.zeros((L, settings.rank, E), dtype)}

  kernels = target_kernels(base, settings)
  keys = jax.random.split(key, len(kernels))
  pairs = map(init_pair, keys, kernels.values())
  return {"blocks": nest(dict(zip(kernels, pairs, strict=True)))}


def target_kernels(base: Params, settings: LoraSettings) -> dict[str, Any]:
  """The layers' kernels [L, D, E] that `settings` targets, by name in alphabetical order.

  Args:
    base: parameters, or their shapes.
  Raises:
    ValueError: no kernel is targeted, or a targeted kernel is too small for the rank.
  """
  leaves = jax.tree_util.tree_leaves_with_path(base["blocks"])
  by_name = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
  is_targeted = lambda name: re.search(settings.targets, f"blocks/{name}")
  if targeted := [f"blocks/{x}" for x in by_name if x.startswith("experts/") and is_targeted(x)]:
    raise ValueError(
      f"LoraSettings: targets = {settings.targets!r} matches {targeted[0]}, but adapters of experts"
      " and their routers are not supported; target attention alone, for instance with targets ="
      ' "blocks/(query|value)$"'
    )
  is_kernel = lambda name: not name.startswith("experts/") and not name.endswith("_taps")
  kernels = {name: w for name, w in by_name.items() if w.ndim == 3 and is_kernel(name)}
  targets = {name: w for name, w in kernels.items() if is_targeted(name)}
  if not targets:
    raise ValueError(
      f"LoraSettings: targets = {settings.targets!r} matches no kernel of the layers; the kernels"
      f" are {[f'blocks/{name}' for name in kernels]}"
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
  """Combines base parameters and adapters into the network's parameters, with `LowRank` kernels.

  Scoring adds (α/R)·(x·A)·B to each targeted product and never forms a merged kernel, so that
  gradients are as small as the adapters. `Model.decoding_params` merges the kernels once before
  decoding.

  Args:
    adapters: the trained parameters.
    base: the frozen parameters. In a jitted function they must be an argument; otherwise they are
      compiled in as constants.
    settings: the settings that the adapters were made with.
  """

  def adapted(kernels, pairs):
    if _is_pair(pairs):
      return LowRank(kernels, pairs["a"], pairs["b"] * settings.scale)
    return {**kernels, **{name: adapted(kernels[name], pair) for name, pair in pairs.items()}}

  return {**base, "blocks": adapted(base["blocks"], adapters["blocks"])}


def nest(pairs: Mapping[str, Any]) -> Params:
  """Converts a dict kernel name → adapter to nested dicts with the structure of the kernels."""
  nested: Params = {}
  for name, pair in pairs.items():
    *folders, last = name.split("/")
    functools.reduce(lambda tree, folder: tree.setdefault(folder, {}), folders, nested)[last] = pair
  return nested


def flatten(blocks: Params) -> dict[str, Any]:
  """Converts nested adapters to a dict kernel name → adapter; the inverse of `nest`."""
  leaves = jax.tree_util.tree_leaves_with_path(blocks, is_leaf=_is_pair)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): pair for path, pair in leaves}


def _is_pair(tree: Any) -> bool:
  return isinstance(tree, Mapping) and tree.keys() == {"a", "b"}


def adapt(model: Model, settings: LoraSettings | None) -> Model:
  """`model` with adapters as its trained parameters; unchanged if `settings` is None."""
  if settings is None:
    return model
  return model._replace(combine=functools.partial(combine, settings=settings))
