"""Forward passes other than updates: log-probabilities of a batch, entropy, diagnostics."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from rlvr_jax.data import problem_batches
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.batch import RolloutBatch, permute_rewards, without_scores
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.rollouts.engine import requests
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.run_log import RunLog
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.types import Params, TrainBatch, TrainState


class Scorer:
  """Computes log-probabilities of batches under the current and the initial policy."""

  def __init__(self, parts: Parts, frozen: Params, initial: Params, log: RunLog):
    """Keeps `initial` only if it is needed.

    Args:
      parts: of the run.
      frozen: the parameters that are not trained.
      initial: the trained parameters before the first update.
      log: counts the forward passes.
    """
    c = self.config = parts.config
    self.parts, self.frozen, self.log = parts, frozen, log
    # Kept only if they are used: they take as much memory as the policy.
    keep = c.reference.kl_coefficient or c.diagnostics.every
    self.initial = initial if keep else None

  def initial_entropy(self, params: Params, collector: Collector) -> float:
    """`measure_entropy` of the initial policy; 0, without measuring, if nothing uses it."""
    stateful = jax.tree.leaves(self.parts.abstract_state.advantage_state)
    return self.measure_entropy(params, collector) if stateful else 0.0

  def measure_entropy(self, params: Params, collector: Collector) -> float:
    """Mean entropy, in nats per token, on responses to the first training prompts.

    They are sampled with separate keys, so that measuring does not affect the run.
    """
    c, parts = self.config, self.parts
    problems = next(problem_batches(parts.task.train, batch_size=c.batch.prompts, seed=c.seed))
    key = key_for(c.seed, "initial_entropy")
    flight, engine = collector.begin(problems), parts.programs.engine
    asked = requests(flight.prompts, key, c.batch.group_size)
    for groups in engine.serve(engine.load(params, self.frozen), asked):
      for group in groups:
        collector.add(flight, group.tag, group)
    batch = collector.finish(flight, [0] * len(problems)).train
    _, entropy = parts.programs.score(
      params, self.frozen, parts.batch_to_devices(without_scores(batch))
    )
    return float(np.sum(sharding.to_host(entropy) * batch.mask) / max(batch.mask.sum(), 1))

  def prepared(self, rollouts: RolloutBatch, state: TrainState, step: int) -> TrainBatch:
    """The batch for an update: with log-probabilities and lags, rewards permuted in a control run.

    Args:
      rollouts: a graded batch; new log-probabilities are stored in it.
      state: before the update.
      step: number of updates so far.
    """
    c, graded, versions = self.config, rollouts.graded, rollouts.versions
    assert graded is not None and versions is not None
    batch = graded.train
    if c.permute_rewards:
      batch = permute_rewards(batch, np.random.default_rng([c.seed, rollouts.number]))
    if c.reference.kl_coefficient and rollouts.reference_logprobs is None:
      rollouts.reference_logprobs = self.score(self.initial, batch)
    if self.parts.method.loss.needs_proximal:
      every, scored_at = c.proximal_every, rollouts.scored_at
      # At the batch's first update, and again after `every` updates.
      if scored_at is None or (every and step - scored_at >= every):
        rollouts.proximal_logprobs, rollouts.scored_at = self.score(state.params, batch), step
    group_lags = np.where(versions >= 0, step - versions, -1)
    lags: Any = np.broadcast_to(group_lags[:, None], batch.rewards.shape).astype(np.int32)
    reference: Any = rollouts.reference_logprobs
    proximal: Any = rollouts.proximal_logprobs
    return dataclasses.replace(
      batch,
      lags=lags,
      reference_logprobs=reference,
      proximal_logprobs=proximal,
      sampled_logprobs=None,
    )

  def score(self, params: Params, batch: TrainBatch) -> Any:
    """f32[P, G, T], the responses' log-probabilities at the policy's temperature."""
    self.log.count_scored(batch)
    scored = self.parts.batch_to_devices(without_scores(batch))
    return sharding.to_host(self.parts.programs.score(params, self.frozen, scored)[0])

  def measure(
    self, state: TrainState, batch: TrainBatch, step: int
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(scalars, arrays) of the gradient geometry, every `config.diagnostics.every` updates."""
    every = self.config.diagnostics.every
    if not every or step % every:
      return {}, {}
    # What is computed after the update is compiled before it, while a request to end may stop it.
    self.parts.programs.mean_entropy.compile(state.params, self.frozen, batch)
    return self.parts.programs.measure(state, self.frozen, self.initial, batch)
