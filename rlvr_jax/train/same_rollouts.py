"""Gradients of several recipes on the same recorded rollouts, at parameters of several updates."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from rlvr_jax.ops import reductions
from rlvr_jax.ops.keys import key_for
from rlvr_jax.ops.precision import with_matmul_precision
from rlvr_jax.rollouts.batch import read_batch, train_batch
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.loop import next_batch, update
from rlvr_jax.train.reporting.progress import progress
from rlvr_jax.train.session import open_session
from rlvr_jax.train.setup.build import Parts, build, make_method
from rlvr_jax.types import Params, TrainBatch
from rlvr_jax.update.accumulate import policy_logprobs, update_gradient
from rlvr_jax.update.objective import Method, estimate_coefficients

_PART = 2**20  # entries of each vector that are multiplied at once


def load_recipe(name: str) -> ConfigDict:
  """The configuration of the recipe of this name, such as "grpo"; ImportError if there is none."""
  config: ConfigDict = importlib.import_module(f"rlvr_jax.configs.{name}").get_config()
  return config


def train_and_record(
  base: ConfigDict, workdir: pathlib.Path, *, before: int, lags: Sequence[int]
) -> tuple[Parts, TrainBatch, dict[int, Params], Params, float]:
  """Trains, records one batch of rollouts, and keeps parameters of later updates.

  Args:
    base: configuration of the run.
    workdir: folder of the run's files.
    before: number of updates before the batch is recorded.
    lags: numbers of updates after the recording, at which the parameters are kept.
  Returns:
    The parts; the batch; parameters by lag; the first parameters, for recipes with a reference
    policy; and the entropy of the first policy (nats per token), for FADE's state.
  """
  copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
  params: dict[int, Params] = {}
  parts = build(base)
  with open_session(parts, workdir / "training") as run:
    now, run = run.now, run.run
    first = copy(now.state.params)
    entropy = run.first_entropy(first)
    for step in progress(range(before + max(lags) + 1), "training", unit="updates"):
      batch = next_batch(run, now)
      lag = step - before
      if lag == 0:
        recorded = batch.train
      if lag in lags:
        params[lag] = copy(now.state.params)
      now = update(run, now, batch)
    run.log.finish_update()
  return parts, recorded, params, first, entropy


def read_recorded_batch(place: str) -> TrainBatch:
  """Reads a batch from FILE.safetensors, or from a run's store by number, STORE:NUMBER.

  Raises:
    ValueError: `place` has neither form.
  """
  if place.endswith(".safetensors"):
    return read_batch(pathlib.Path(place))
  directory, _, number = place.rpartition(":")
  if not number.isdigit():
    raise ValueError(
      f"rollouts = {place!r}: give FILE.safetensors, or a store and the number of a batch,"
      " STORE:NUMBER"
    )
  store = RolloutStore(directory, writable=False)
  groups, _ = store.read(int(number))
  return dataclasses.replace(train_batch(groups), sources=None)


def sample_batches(
  config: ConfigDict, workdir: pathlib.Path, params: Params, *, count: int
) -> list[TrainBatch]:
  """Fresh batches sampled by one policy.

  Args:
    config: a configuration with the policy's problems and sampler; no update is made.
    workdir: folder of the run's files, empty.
    params: the parameters of the policy.
    count: number of batches.
  """
  copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
  parts = build(config)
  with open_session(parts, workdir) as run:
    now, run = run.now, run.run
    now = now._replace(state=dataclasses.replace(now.state, params=copy(params)))
    return [next_batch(run, now._replace(step=step)).train for step in range(count)]


def gradient_function(
  config: ConfigDict, trained: Method, mesh: Mesh, reference: Params, entropy: float
) -> Callable[[TrainBatch, Params], tuple[dict[str, float], np.ndarray]]:
  """A function from (batch, parameters) to a recipe's metrics and gradient f32[parameters].

  The proximal policy has the same parameters, as in the first update that trains on a batch.

  Args:
    config: the configuration of the recipe.
    trained: the `Method` of the run that recorded the batches.
    mesh: the mesh on which that run made updates.
    reference: parameters of the reference policy, for recipes that have one.
    entropy: the entropy of the first policy, nats per token, for FADE's state.
  """
  method = make_method(config, trained.model, mesh)
  method = method._replace(  # the batch decides what is recorded, not the recipe
    max_response_length=trained.max_response_length,
    records_routes=trained.records_routes,
    replays_routes=trained.replays_routes,
  )
  # As precise as the products of the run itself.
  exactly = functools.partial(with_matmul_precision, precision=trained.model.config.precision)
  logprobs = jax.jit(exactly(lambda p, b: policy_logprobs(p, {}, b, method=method)[0]))
  state = method.advantage.init(jnp.float32(entropy))
  estimate = functools.partial(estimate_coefficients, state, method=method)
  gradient_of = jax.jit(
    exactly(functools.partial(update_gradient, estimate=estimate, method=method))
  )
  key = key_for(trained.seed, "reweighting")

  def gradient(batch: TrainBatch, params: Params) -> tuple[dict[str, float], np.ndarray]:
    batch = dataclasses.replace(batch, reference_logprobs=None, proximal_logprobs=None)
    reference_logprobs = logprobs(reference, batch) if method.reference_kl else None
    proximal = logprobs(params, batch) if method.loss.needs_proximal else None
    batch = dataclasses.replace(
      batch, reference_logprobs=reference_logprobs, proximal_logprobs=proximal
    )
    (value, metrics), tree = gradient_of(params, {}, batch, key=key)
    vector = np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])
    numbers = {k: float(v) for k, v in reductions.values(metrics).items()}
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    return {**numbers, "loss": float(value), "gradient_norm": norm}, vector

  return gradient


def _check_recipe(name: str, config: ConfigDict) -> None:
  """Raises ValueError if a recipe's updates need what a recorded batch lacks."""
  lacks = {
    "a teacher's log-probabilities": config.distillation != "none",
    "the scores of several graders": bool(config.grading.extra),
  }
  for what, is_needed in lacks.items():
    if is_needed:
      raise ValueError(f"the recipe {name} needs {what}, which these rollouts lack; leave it out")


def cosines(vectors: Sequence[np.ndarray]) -> np.ndarray:
  """The cosine of each pair of M vectors, f64[M, M]; 0 if a vector is zero."""
  products = np.zeros((len(vectors), len(vectors)))
  # In parts: in float64, the gradients of a language model would not fit into memory.
  for first in range(0, len(vectors[0]), _PART):
    part = np.stack([vector[first : first + _PART] for vector in vectors]).astype(np.float64)
    products += part @ part.T
  norms = np.sqrt(np.diag(products))
  norms = np.where(norms > 0, norms, 1.0)
  matrix: np.ndarray = products / np.outer(norms, norms)
  return matrix


class Comparison(NamedTuple):
  """Metrics of several recipes, each applied to the same batch of rollouts."""

  names: list[str]  # names of the recipes, grpo first
  lags: list[int]  # updates between recording and gradient, ascending
  numbers: dict[int, dict[str, dict[str, float]]]  # lag → recipe → metric → value
  cosines: dict[int, np.ndarray]  # lag → f64[M, M], cosines between the M recipes' gradients
  batch: TrainBatch


def compare_gradients(
  workdir: str | os.PathLike[str],
  *,
  base: ConfigDict,
  recipes: Sequence[str],
  before: int,
  lags: Sequence[int],
  rollouts: str | None = None,
) -> Comparison:
  """Trains, records a batch, and takes every recipe's gradient on the batch, at every lag.

  Args:
    workdir: folder of the run's files.
    base: configuration of the policy that is trained.
    recipes: names of recipes; grpo is always added.
    before, lags: see `train_and_record`.
    rollouts: a batch to use instead of the newly recorded batch, see `read_recorded_batch`.
  Raises:
    ValueError: `rollouts` does not name a batch, a lag is negative, or a recipe needs what a
      recorded batch lacks.
    ImportError: there is no recipe of a name.
  """
  names = ["grpo", *(name for name in recipes if name != "grpo")]
  configs = {name: load_recipe(name) for name in names}
  for name, config in configs.items():
    _check_recipe(name, config)
  if min(lags) < 0:
    raise ValueError(f"lags = {list(lags)}: a lag is a number of updates, 0 or more")
  if rollouts is not None:
    batch = read_recorded_batch(rollouts)
  parts, recorded, params, reference, entropy = train_and_record(
    base, pathlib.Path(workdir), before=before, lags=lags
  )
  batch = recorded if rollouts is None else batch
  results = {}
  for name in progress(names, "gradients", unit="recipes"):
    gradient = gradient_function(
      configs[name], parts.method, parts.placement.mesh, reference, entropy
    )
    results[name] = {lag: gradient(batch, at) for lag, at in params.items()}
  numbers, matrices = {}, {}
  for lag in sorted(params):
    matrices[lag] = cosines([results[name][lag][1] for name in names])
    to_grpo = zip(names, matrices[lag][0].tolist(), strict=True)
    numbers[lag] = {name: {**results[name][lag][0], "cosine": cosine} for name, cosine in to_grpo}
  return Comparison(names, sorted(params), numbers, matrices, batch)
