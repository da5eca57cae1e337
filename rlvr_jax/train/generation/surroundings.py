"""What the batches of a run need of the run: comparisons with the trainer, counts, processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.batch import train_batch
from rlvr_jax.rollouts.batches import Batch, Measured, token_versions
from rlvr_jax.rollouts.grading import sampled_places
from rlvr_jax.rollouts.group import Group
from rlvr_jax.rollouts.sources import Sources
from rlvr_jax.rollouts.staleness import RecordedRun
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.generation import agreement, raw_logprobs
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.reporting import progress
from rlvr_jax.train.reporting.log import RunLog
from rlvr_jax.train.setup.programs import Programs
from rlvr_jax.train.start.rows import RunRows


@dataclasses.dataclass(frozen=True)
class RunSurroundings:
  """Implements `rollouts.batches.Surroundings` for a run.

  Attributes:
    network: settings of the policy's network.
    sources, programs: of the run.
    recorded: the run that this one repeats; None if it repeats none.
    replays_routes: see `Method`.
    mixes_caches: whether a token's cache may be of several versions.
    samplers_compare: whether the programs that sample compare themselves with the trainer.
    rows, policies, log: of the run.
  """

  network: TransformerConfig
  sources: Sources
  programs: Programs
  recorded: RecordedRun | None
  replays_routes: bool
  mixes_caches: bool
  samplers_compare: bool
  rows: RunRows
  policies: Policies
  log: RunLog

  def fingerprint(self, version: int) -> str | None:
    """The fingerprint of a version's parameters in this trainer; None if it is not known."""
    return self.policies.fingerprint(version)

  def on_first(self, action: Callable[[], Any]) -> Any:
    """Runs an action on the first process; returns its result, JSON, on all."""
    return multihost.exchange(multihost.run_on_first(action, None))[0]

  def flops(self, arrays: Mapping[str, np.ndarray]) -> float:
    """Model FLOPs of sampling groups with these arrays."""
    # Every sampled token, whether or not it is in the loss.
    predicted = sampled_places(arrays).sum(-1)
    return forward_flops(
      self.network, arrays["prompts.lengths"], arrays["lengths"], predicted=predicted
    )

  def measure(self, groups: Sequence[Group], version: int, checked_version: int) -> Measured:
    """Compares log-probabilities of sampler and trainer, on the first draw of every policy.

    Args:
      groups: of a draw, in order.
      version: of the policy that the draw began with.
      checked_version: of the policy that was compared last.
    Raises:
      AgreementError: a gap is too large.
    """
    policies, sources, programs = self.policies, self.sources, self.programs
    placement = self.rows.placement(lambda: train_batch(groups))
    if self.samplers_compare:
      return Measured(groups, {}, version)
    statistics: dict[str, float] = {}
    versions, of_tokens = sampled_by(groups, version)
    if uncompared := policies.used({v for v in versions if v > checked_version}):
      compared = agreement.behavior_gaps(
        groups,
        sampled_mask(groups, sources.num_recorded),
        of_tokens,
        uncompared,
        policies.frozen,
        sources=sources,
        placement=placement,
        programs=programs,
        mixes_caches=self.mixes_caches,
      )
      statistics |= compared.gaps
      checked_version = max([checked_version, *compared.versions])
      policies.mark_compared(compared.versions)
    found, gaps = list(groups), dict[str, float]()
    if any(source.raw for source in sources):
      (policy,) = policies.used({version})
      found, gaps = raw_logprobs.replace_with_raw(
        groups,
        policy.params,
        policies.frozen,
        sources=sources,
        placement=placement,
        replays_routes=self.replays_routes,
        logprobs_at_temperature_1=programs.logprobs_at_temperature_1,
      )
    return Measured(found, statistics | gaps, checked_version)

  def count(self, batch: Batch, step: int) -> None:
    """Takes note of a new batch; `step`: number of updates so far."""
    repeated = self.recorded
    if repeated is not None and (
      why := repeated.first_difference(batch.number, batch.fingerprints)
    ):
      self.warn(
        f"from batch {batch.number} on this run has the plan and the versions of {repeated.name},"
        f" not its rollouts: {why}. The seed, the configuration, a version or the devices differ"
      )
    self.log.count_sampled(batch, step)

  def warn(self, text: str) -> None:
    """Warns people."""
    progress.warn(text)


def sampled_by(groups: Sequence[Group], version: int) -> tuple[set[int], np.ndarray | None]:
  """(versions that have sampled groups, that of each token or group; None: one has sampled all).

  In real time all may be later than the version that their draw began with.

  Args:
    groups: of a draw.
    version: that the draw began with, for groups without versions of this run.
  """
  versions = {v for group in groups for v in group.versions} or {version}
  has_several = len(versions) > 1 or any("token_versions" in group.arrays for group in groups)
  return versions, token_versions(groups) if has_several else None


def sampled_mask(groups: Sequence[Group], num_recorded: int) -> np.ndarray:
  """f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.

  Args:
    groups: P groups.
    num_recorded: groups at the end that another run has recorded, whose mask of the loss is all
      that is known.
  """
  first_recorded = len(groups) - num_recorded
  sampled = [sampled_places(group.arrays) for group in groups[:first_recorded]]
  recorded = [group.arrays["mask"] for group in groups[first_recorded:]]
  return np.stack([*sampled, *recorded]).astype(np.float32)
