"""The policies that sample: the trainer's parameters on the devices that generate."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import numpy as np

from rlvr_jax.rollouts.batch import PolicySnapshot
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.types import Array, Params


def sync_weights(parts: Parts, frozen: Params, params: Params, version: int) -> PolicySnapshot:
  """Syncs the trainer's parameters to the devices that generate.

  Args:
    parts: the run's parts.
    frozen: the parameters that are not trained, on the devices that generate.
    params: the trainer's parameters.
    version: number of updates that they have had.
  Returns:
    The policy; of a fleet, whose samplers are other programs, with the trainer's own parameters.
  """
  if parts.config.fleet.samplers:
    return PolicySnapshot(params, version, lazy_fingerprint(parts.programs.checksums(params)), ())
  recorded = parts.schedule.recorded
  kept = parts.schedule.threaded or (recorded is not None and recorded.has_several)
  synced = parts.programs.sync_weights(params, kept)
  by_source = tuple(source.params_of(synced, frozen) for source in parts.sources.live)
  fingerprint = lazy_fingerprint(parts.programs.checksums(synced))
  return PolicySnapshot(synced, version, fingerprint, by_source)


def lazy_fingerprint(checksums: Array) -> Callable[[], str]:
  """A function that returns 16 hexadecimal digits, which identify parameters.

  Args:
    checksums: u32[leaves], from `Programs.checksums`; the function waits for them once.
  """

  @functools.cache
  def fingerprint() -> str:
    data = np.asarray(sharding.to_host(checksums)).astype("<u4").tobytes()
    return hashlib.sha256(data).hexdigest()[:16]

  return fingerprint
