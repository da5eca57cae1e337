"""DAPO's dynamic sampling: batches without groups that carry no signal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax.rollouts.batch import FOREIGN, RolloutBatch, solve_rates
from rlvr_jax.rollouts.collect import keep_mixed_groups
from rlvr_jax.rollouts.staleness import encode_versions


class DynamicSamplingError(RuntimeError):
  """A batch could not be filled with groups that are neither all right nor all wrong."""


def fill_with_mixed_groups(
  batches: Iterable[RolloutBatch], quotas: Sequence[int], *, max_batches: int, number: int
) -> RolloutBatch:
  """One batch of groups that are neither all right nor all wrong; see `keep_mixed_groups`.

  Args:
    batches: graded, taken one after another until there are enough such groups.
    quotas: groups of a full batch by source.
    max_batches: that are taken at most.
    number: of the result.
  Returns:
    A batch with the position after the last one.
  Raises:
    DynamicSamplingError: there are not enough such groups in `max_batches` batches.
  """
  sampled: list[RolloutBatch] = []
  for batch in batches:
    sampled.append(batch)
    parts = [batch.graded for batch in sampled if batch.graded is not None]
    graded = keep_mixed_groups(parts, quotas)
    if graded is not None:
      break
    if len(sampled) == max_batches:
      solved = np.nanmean([solve_rates(part.train) for part in parts])
      raise DynamicSamplingError(
        f"dynamic sampling: {max_batches} batches of {sum(quotas)} prompts at update"
        f" {batch.version} have too few groups that are neither all right nor all wrong (solve"
        f" rate {solved:.3f}). Raise config.dynamic_sampling.max_batches, or choose, in another"
        " --workdir, a larger config.batch.group_size or problems that suit the policy better"
      )
  last = sampled[-1]
  assert last.position is not None  # every new batch has one
  phases = dict.fromkeys(phase for batch in sampled for phase in batch.timings)
  timings = {phase: sum(b.timings.get(phase, 0.0) for b in sampled) for phase in phases}
  timings |= {name: value for name, value in last.timings.items() if "memory/" in name}
  assert last.versions is not None and graded is not None
  # Several policies may have sampled the draws of a fleet; a batch is as old as its oldest group.
  of_groups = [sample["version"] for sample in graded.samples[:: graded.train.rewards.shape[1]]]
  versions = np.where(last.versions == FOREIGN, FOREIGN, of_groups).astype(np.int32)
  known = {version: x for batch in sampled for version, x in batch.fingerprints.items()}
  of_tokens = graded.train.token_versions
  used = sorted({*np.unique(versions if of_tokens is None else of_tokens).tolist()} & known.keys())
  used = used or [last.version]
  return dataclasses.replace(
    last,
    number=number,
    version=used[0],
    fingerprint=known[used[0]],
    others={str(version): str(known[version]) for version in used[1:]},
    versions=versions,
    graded=graded,
    draws=len(sampled),
    drawn=[_drawn(batch) for batch in sampled] if last.drawn is not None else None,
    flops=sum(batch.flops for batch in sampled),
    position=last.position._replace(number=number + 1),
    timings=timings,
  )


def _drawn(batch: RolloutBatch) -> dict[str, Any]:
  """How a draw was made, with the versions of all its groups: those that are dropped, too."""
  assert isinstance(batch.drawn, Mapping) and batch.graded is not None
  assert batch.versions is not None
  of_tokens: Any = batch.graded.train.token_versions
  versions = batch.versions if of_tokens is None else of_tokens
  return {**batch.drawn, "token_versions": encode_versions(versions)}
