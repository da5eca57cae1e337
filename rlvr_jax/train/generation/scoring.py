"""Forward passes other than updates: log-probabilities of a batch, entropy, diagnostics."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from rlvr_jax.data import problem_batches
from rlvr_jax.ops.keys import key_for, seeds_for
from rlvr_jax.rollouts.batch import RolloutBatch, drop_scores, permute_rewards, sampled_places
from rlvr_jax.rollouts.collect import Collector, serve_graded
from rlvr_jax.rollouts.serve import make_requests
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.run_log import RunLog
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params, TrainBatch, TrainState


class Scorer:
  """Computes log-probabilities of batches under the current and the initial policy."""

  def __init__(self, parts: Parts, rows: RunRows, frozen: Params, initial: Params, log: RunLog):
    """Keeps `initial` only if it is needed.

    Args:
      parts, rows: of the run.
      frozen: the parameters that are not trained.
      initial: the trained parameters before the first update.
      log: counts the forward passes.
    """
    c = parts.config
    self._parts, self._rows, self._frozen, self._log = parts, rows, frozen, log
    # Kept only if they are used: they take as much memory as the policy.
    keep = c.reference.kl_coefficient or c.diagnostics.every
    self._initial = initial if keep else None

  def initial_entropy(self, params: Params, collector: Collector) -> float:
    """`measure_entropy` of the initial policy; 0, without measuring, if nothing uses it."""
    stateful = jax.tree.leaves(self._parts.placement.state.advantage_state)
    return self.measure_entropy(params, collector) if stateful else 0.0

  def measure_entropy(self, params: Params, collector: Collector) -> float:
    """Mean entropy, in nats per token, on responses to the first training prompts.

    All sampled tokens count, also those that the loss would leave out: it may leave out all. They
    are sampled with separate keys, so that measuring does not affect the run.
    """
    c, parts = self._parts.config, self._parts
    problems = next(problem_batches(parts.task.train, batch_size=c.batch.prompts, seed=c.seed))
    key = key_for(c.seed, "initial_entropy")
    seeds = seeds_for(c.seed, "initial_entropy", 0, len(problems))
    flight, engine = collector.begin(problems, seeds), parts.programs.engine
    pending = make_requests(flight.prompts, key, c.batch.group_size, owner=flight)
    for _ in serve_graded(engine, engine.load(params, self._frozen), pending, collector):
      pass
    batch = collector.finish(flight, [0] * len(problems)).train
    sampled: Any = sampled_places(flight.rollouts).astype(np.float32)
    batch = dataclasses.replace(batch, mask=sampled)
    packed = self._rows.placement(batch).pack_to_devices(drop_scores(batch))
    _, entropy = parts.programs.score(params, self._frozen, packed)
    return float(np.sum(sharding.to_host(entropy) * sampled) / sampled.sum())

  def prepare(
    self, rollouts: RolloutBatch, state: TrainState, step: int
  ) -> tuple[RolloutBatch, TrainBatch]:
    """Adds the log-probabilities that an update needs.

    Args:
      rollouts: a graded batch.
      state: before the update.
      step: number of updates so far.
    Returns:
      The rollouts with new log-probabilities, for their later updates; and the batch for this one:
      with log-probabilities and lags, in a control run with permuted rewards.
    """
    c, graded, versions = self._parts.config, rollouts.graded, rollouts.versions
    assert graded is not None and versions is not None
    batch = graded.train
    if c.permute_rewards:
      batch = permute_rewards(batch, np.random.default_rng([c.seed, rollouts.number]))
    if c.reference.kl_coefficient and rollouts.reference_logprobs is None:
      rollouts = dataclasses.replace(rollouts, reference_logprobs=self.score(self._initial, batch))
    if self._parts.method.loss.needs_proximal:
      every, scored_at = c.proximal_every, rollouts.scored_at
      # At the batch's first update, and again after `every` updates.
      if scored_at is None or (every and step - scored_at >= every):
        rollouts = dataclasses.replace(
          rollouts, proximal_logprobs=self.score(state.params, batch), scored_at=step
        )
    if self._parts.method.advantage.per_token is None:
      batch = dataclasses.replace(batch, turn_scores=None)
    of_tokens: Any = batch.token_versions
    if of_tokens is None:
      of_tokens = np.broadcast_to(versions[:, None, None], batch.mask.shape)
    lags: Any = np.where(of_tokens >= 0, step - of_tokens, -1).astype(np.int32)
    reference: Any = rollouts.reference_logprobs
    proximal: Any = rollouts.proximal_logprobs
    return rollouts, dataclasses.replace(
      batch,
      lags=lags,
      reference_logprobs=reference,
      proximal_logprobs=proximal,
      sampled_logprobs=None,
      token_versions=None,
    )

  def score(self, params: Params, batch: TrainBatch) -> Any:
    """f32[P, G, T], the responses' log-probabilities at the policy's temperature."""
    self._log.count_scored(batch)
    scored = self._rows.placement(batch).pack_to_devices(drop_scores(batch))
    return sharding.to_host(self._parts.programs.score(params, self._frozen, scored)[0])

  def measure(
    self, state: TrainState, batch: TrainBatch, step: int
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(scalars, arrays) of the gradient geometry, every `config.diagnostics.every` updates."""
    every = self._parts.config.diagnostics.every
    if not every or step % every:
      return {}, {}
    return self._parts.programs.measure(state, self._frozen, self._initial, batch)
