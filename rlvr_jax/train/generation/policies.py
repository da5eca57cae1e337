"""The policies of a run: the trainer's parameters by version, on the devices for generation."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.rollouts.batches import Batch, FingerprintError
from rlvr_jax.rollouts.group import Policy
from rlvr_jax.rollouts.sources import Source, Sources
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.cluster.placement import Placement
from rlvr_jax.types import Array, Params


class Policies:
  """Makes policies and keeps each policy until its samples are compared with the trainer.

  Attributes:
    frozen: the parameters that are not trained, on the devices for generation.
  """

  def __init__(
    self,
    sources: Sources,
    schedule: Schedule,
    frozen: Params,
    *,
    checksums: Callable[[Params], Array],
    sync: Callable[[Params], Params] | None,
  ):
    """Starts without a policy.

    Args:
      sources: the sources of the run, which sample with the policies.
      schedule: the schedule of the run.
      frozen: the parameters that are not trained, on the devices for generation.
      checksums: the function of this name in `Programs`.
      sync: the result of `make_sync`. None for a fleet, whose samplers are other processes: `make`
        then returns a policy with the trainer's own parameters.
    """
    self.frozen = frozen
    self._sources, self._schedule = sources, schedule
    self._checksums, self._sync = checksums, sync
    self._trained: dict[int, Callable[[], str]] = {}  # the trainer's fingerprints, by version
    self._used: dict[int, Policy] = {}  # policies that sample, by version
    self._compared: set[int] = set()  # versions that were compared with the trainer

  def make(self, params: Params, version: int) -> Policy:
    """Copies the trainer's parameters to the devices for generation.

    Args:
      params: the trainer's parameters.
      version: number of updates that the parameters have had.
    """
    # The policy that samples must have this fingerprint.
    self._trained[version] = lazy_fingerprint(self._checksums(params))
    if self._sync is None:
      return Policy(version, params, self._trained[version])
    synced = self._sync(params)
    policy = Policy(version, synced, lazy_fingerprint(self._checksums(synced)))
    # `load` is not called if the store has all groups, or if another run has recorded them.
    if not self._schedule.threaded or not self._sources.live:
      self._use(policy)
    return policy

  def load(self, source: Source, policy: Policy) -> Params:
    """The weights with which `source` samples under `policy`, as the source's engine takes them."""
    self._use(policy)
    return source.programs.load(*source.params_of(policy.params, self.frozen))

  def _use(self, policy: Policy) -> None:
    """Keeps a policy that samples, and drops earlier policies that are no longer needed."""
    oldest = self._schedule.oldest_sampling(policy.version)
    is_raw = any(source.raw for source in self._sources)
    self._used = {
      version: used
      for version, used in self._used.items()
      if version >= oldest and (is_raw or version not in self._compared)
    } | {policy.version: policy}

  def rest(self) -> None:
    """Drops the kept policies, unless `keeps_several`; call this while no policy samples."""
    if not keeps_several(self._schedule):
      self._used = {}

  def used(self, versions: Collection[int]) -> list[Policy]:
    """The kept policies that have sampled and are among these versions, by ascending version."""
    return [policy for version, policy in sorted(self._used.items()) if version in versions]

  def newest_used(self) -> list[Policy]:
    """The newest kept policy that has sampled, in a list; [] if no kept policy has sampled."""
    return [policy for _, policy in sorted(self._used.items())][-1:]

  def repeat_from(self, version: int) -> None:
    """Forgets this version and later versions, which a restarted trainer makes again."""
    self._used = {v: policy for v, policy in self._used.items() if v < version}
    self._compared = {v for v in self._compared if v < version}

  def mark_compared(self, versions: Collection[int]) -> None:
    """Notes that these versions have been compared."""
    self._compared |= {*versions}

  def fingerprint(self, version: int) -> str | None:
    """The trainer's fingerprint of a version; None if it is unknown or forgotten."""
    compute = self._trained.get(version)
    return compute() if compute else None

  def forget(self, before: int) -> None:
    """Forgets the fingerprints of versions lower than `before`."""
    self._trained = {v: compute for v, compute in self._trained.items() if v >= before}

  def check(self, batch: Batch, directory: object) -> None:
    """Raises FingerprintError unless this trainer's policies have sampled this batch.

    Args:
      batch: the batch that is to be trained on.
      directory: the directory of the store, for the message.
    """
    for version, fingerprint in batch.fingerprints.items():
      expected = self.fingerprint(version)
      if expected == fingerprint:
        continue
      raise FingerprintError(
        f"rollouts of batch {batch.number} under version {version} were sampled by parameters with"
        f" fingerprint {fingerprint}; the trainer's parameters of that version have {expected}."
        f" These rollouts have not been trained on; they are in {directory}. Either parameters"
        " changed without a weight sync, or the rollouts are another run's. If the run was resumed"
        " on another kind of machine, move this batch and later batches elsewhere and rerun: the"
        " run then samples them again"
      )

  def state(self) -> dict[str, str]:
    """The fingerprints by version; JSON, for `restore`."""
    return {str(version): compute() for version, compute in self._trained.items()}

  def restore(self, state: Mapping[str, str]) -> None:
    """Restores the state that `state` returned."""
    self._trained = {int(v): functools.partial(str, x) for v, x in state.items()}


def keeps_several(schedule: Schedule) -> bool:
  """Whether the run repeats a recorded run in which several versions sampled one batch."""
  return schedule.recorded is not None and schedule.recorded.has_several


def make_sync(placement: Placement, schedule: Schedule) -> Callable[[Params], Params]:
  """The function that brings the trainer's parameters to the devices for generation.

  An update donates the trainer's parameters, so sampling during an update needs a copy. Engines on
  the same devices move the parameters into a layout of their own, once per refresh.
  """
  if not sharding.has_same_devices(placement.mesh, placement.generation_mesh):
    moved = sharding.state_shardings(placement.state.params, placement.generation_mesh)
    return functools.partial(jax.device_put, device=moved)
  if schedule.threaded or keeps_several(schedule):
    return jax.jit(functools.partial(jax.tree.map, jnp.copy))
  return as_they_are


def as_they_are(params: Params) -> Params:
  """Returns the parameters unchanged."""
  return params


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
