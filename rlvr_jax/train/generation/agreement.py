"""Checks that sampler and trainer compute the same log-probabilities from the same parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.ops.logprobs import PROBABILITY_BINS
from rlvr_jax.rollouts.batch import drop_scores, train_batch, with_equal_names
from rlvr_jax.rollouts.batches import Measured, join_measurements, token_versions
from rlvr_jax.rollouts.grading import FOREIGN, sampled_places
from rlvr_jax.rollouts.group import Group, Policy
from rlvr_jax.rollouts.sources import Source, Sources
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.train.generation import raw_logprobs
from rlvr_jax.train.generation.policies import Policies
from rlvr_jax.train.setup.programs import Programs
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params
from rlvr_jax.update.agreement import Gap, draw_z


class AgreementError(RuntimeError):
  """Sampler and trainer compute different log-probabilities from the same parameters."""


class Compared(NamedTuple):
  """The result of a comparison."""

  gaps: dict[str, float]  # metrics
  versions: list[int]  # versions that have been checked on tokens of every source


@dataclasses.dataclass(frozen=True)
class Agreement:
  """Compares log-probabilities of sampler and trainer on the first draw of every policy.

  Attributes:
    sources, programs, rows, policies: sources, programs, rows and policies of the run.
    replays_routes: see `Method`.
    mixes_caches: whether the cached keys and values before a token may come from several versions
      of the policy.
    samplers_compare: whether the samplers of a fleet make this comparison, in place of `measure`.
  """

  sources: Sources
  programs: Programs
  rows: RunRows
  policies: Policies
  replays_routes: bool
  mixes_caches: bool
  samplers_compare: bool

  def measure(self, groups: Sequence[Group], version: int, checked_version: int) -> Measured:
    """Compares a draw's log-probabilities with the trainer's, for policies not yet compared.

    Args:
      groups: the groups of the draw, in order.
      version: the version of the policy that the draw began with.
      checked_version: the version of the policy that was compared last.
    Returns:
      The groups, with raw log-probabilities (at temperature 1) if their source records these;
      metrics of the gaps; and the version that was compared last.
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
      compared = behavior_gaps(
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


def behavior_gaps(
  groups: Sequence[Group],
  mask: np.ndarray,
  of_tokens: np.ndarray | None,
  policies: Sequence[Policy],
  frozen: Params,
  *,
  sources: Sources,
  placement: Placement,
  programs: Programs,
  mixes_caches: bool = False,
) -> Compared:
  """Gaps of log-probabilities between sampler and trainer, nats per token, by source.

  The trainer's log-probabilities come from the forward pass of updates, over packed rows, see
  `update.agreement.behavior_gap`. Each token is compared under the version that sampled the token.
  In a group of several versions, recorded routes of a mixture of experts are not replayed, since
  each version had its own routes for the preceding tokens.

  Args:
    groups: P groups; only a few groups of every source are compared.
    mask: f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.
    of_tokens: i32[P, G, T], the version of each token, or i32[P], of each group; None: one version
      has sampled all tokens.
    policies: the policies whose tokens are compared; if `of_tokens` is None, the policy that
      sampled all tokens.
    frozen: the parameters that are not trained, on the devices for generation.
    sources, placement, programs: sources, placement and programs of the run.
    mixes_caches: whether the cached keys and values before a token may come from several versions.
      The gap of a token with mixed caches is more than rounding: it has a separate metric and is
      not checked.
  Returns:
    The metrics, and the versions that were checked on every source whose parameters derive from
    this run's policy (`of_this_run`).
    agreement/SOURCE_mean and agreement/SOURCE_max are the mean and the largest gap.
    agreement/SOURCE_draws/BIN is the number of drawn tokens with a probability in the bin, and
    …_draws_expected/BIN its expected value. …_draws_z_max is the largest deviation from an expected
    value, in standard deviations. Metrics named SOURCE_mixed measure tokens with mixed caches.
    Metrics of several versions are joined by the mean of means, the maximum of maxima and the sum
    of draws.
  Raises:
    AgreementError: the gap of a source that samples with the policy's own parameters is too large.
  """
  found: dict[str, list[float]] = {}
  versions = []
  groups = with_equal_names(groups)
  if of_tokens is not None and of_tokens.ndim == 1:
    of_tokens = np.broadcast_to(of_tokens[:, None, None], mask.shape)
  for policy in policies:
    places = {"": mask}
    if of_tokens is not None:
      # Tokens of other runs' policies have no version; they are compared once.
      foreign = (of_tokens == FOREIGN) & (policy is policies[-1])
      own = mask * ((of_tokens == policy.version) | foreign)
      mixed = own * (of_tokens != of_tokens[..., :1]) * mixes_caches
      places = {"": own - mixed, "_mixed": mixed}
    unchecked = {source.name for source in sources if source.of_this_run}
    for kind, of_kind in places.items():
      start = 0
      for source in sources:
        of_source = slice(start, start + source.prompts)
        start = of_source.stop
        has_tokens = (of_kind[of_source] > 0).any(axis=(1, 2))
        if of_tokens is not None and not has_tokens.any():
          continue
        few = np.argsort(~has_tokens, kind="stable")[: placement.compared_groups] + of_source.start
        others = None if of_tokens is None else {*np.unique(of_tokens[few]).tolist()}
        several = others is not None and not others <= {policy.version, FOREIGN}
        gap = programs.rerouted_gap if several else programs.behavior_gap
        compared_mask: Any = of_kind[few]
        batch = drop_scores(train_batch([groups[index] for index in few]))
        rollouts = placement.pack_to_compare(dataclasses.replace(batch, mask=compared_mask))
        result = jax.device_get(gap(policy.params, frozen, rollouts, sampling=source.sampling))
        for name, value in _gap_metrics(result).items():
          found.setdefault(f"agreement/{source.name}{kind}_{name}", []).append(value)
        if not kind:
          _check_gap(source, float(result.mean), policy.version)
          unchecked.discard(source.name)
    if not unchecked:
      versions.append(policy.version)
  return Compared(join_measurements(found), versions)


def _gap_metrics(gap: Gap) -> dict[str, float]:
  """The metrics of a comparison, by name without the prefix agreement/SOURCE_."""
  metrics = {"mean": gap.mean, "max": gap.largest, "draws_z_max": draw_z(gap.draws)}
  for name, drawn, expected in zip(PROBABILITY_BINS, *gap.draws[:2], strict=True):
    metrics |= {f"draws/{name}": drawn, f"draws_expected/{name}": expected}
  return {name: float(value) for name, value in metrics.items()}


def _check_gap(source: Source, gap: float, version: int) -> None:
  """Raises AgreementError if the gap is larger than rounding of matrix products explains."""
  if not gap <= source.max_gap:
    raise AgreementError(
      f"sampler and trainer disagree: the log-probabilities that the {source.name} source"
      f" recorded under version {version} of the policy differ by {gap:.2g} nats per token on"
      f" average; the limit is {source.max_gap:.2g}. One of the two does not compute the model's"
      " distribution; if the difference is rounding, raise config.max_behavior_gap"
    )


def sampled_by(groups: Sequence[Group], version: int) -> tuple[set[int], np.ndarray | None]:
  """(versions that sampled the groups, version of each token or group).

  The second is None if one version sampled all groups. With sampling in real time, as with the
  schedule `asynchronous`, all versions may be later than the version with which the draw began.

  Args:
    groups: the groups of a draw.
    version: the version with which the draw began; used if no group has a version of this run.
  """
  versions = {v for group in groups for v in group.versions} or {version}
  has_several = len(versions) > 1 or any("token_versions" in group.arrays for group in groups)
  return versions, token_versions(groups) if has_several else None


def sampled_mask(groups: Sequence[Group], num_recorded: int) -> np.ndarray:
  """f32[P, G, T], 1 for every sampled token, whether or not it is in the loss.

  Args:
    groups: P groups.
    num_recorded: the last `num_recorded` groups were recorded by another run; for these groups only
      the loss's mask is known.
  """
  first_recorded = len(groups) - num_recorded
  sampled = [sampled_places(group.arrays) for group in groups[:first_recorded]]
  recorded = [group.arrays["mask"] for group in groups[first_recorded:]]
  return np.stack([*sampled, *recorded]).astype(np.float32)
