"""Staleness schedules: which policy samples each batch, and which batch each update uses.

Updates and batches are numbered from 0. The version of a policy is the number of updates that the
policy has had. If update t trains on a batch that version v has sampled, the lag of update t is
t − v.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rlvr_jax.ops.checks import check_integer
from rlvr_jax.rollouts.batch import with_equal_names
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.files import JSON
from rlvr_jax.storage.places import parse_path

__all__ = [
  "on_policy",
  "updates_per_refresh",
  "stages",
  "fixed_lag",
  "simulated_asynchronous",
  "asynchronous",
]

EncodedVersions: TypeAlias = list[int] | list[list[list[int]]]  # see `encode_versions`


class Drawn(NamedTuple):
  """Facts that are needed to repeat a draw, but that its batch does not contain; JSON."""

  draw: int  # number of the draw
  problems: dict[str, JSON]  # state of the iterator over problems before the draw
  version: int  # version of the policy when the draw began
  burst_steps: int  # the most decoding steps in one burst, a call of the engine's program
  slots: int
  new_weights: str  # `config.fleet.new_weights`
  # The result of `encode_versions` if dynamic sampling has dropped groups of the draw, else None.
  token_versions: EncodedVersions | None = None


class RecordedRun:
  """The record of a run's batches: which versions sampled them, and how their problems were drawn.

  Attributes:
    name: the name of the run, for messages.
    versions: the versions that sampled each batch, ascending; most batches have one version. The
      versions of groups that dynamic sampling dropped are included.
  """

  def __init__(self, name: str, num_batches: int):
    """Reads the info of the run's batches, removed batches included.

    Raises:
      ValueError: the run lacks a batch; or a batch with several versions was removed, or has no
        record of how it was drawn.
      StoreError: the run has no rollouts.
    """
    self.name, owner = name, f"simulated_asynchronous: recorded = {name!r}"
    folder = parse_path("simulated_asynchronous: recorded", name) / "rollouts"
    self._store = RolloutStore(folder, writable=False)
    self._infos = []
    for number in range(num_batches):
      try:
        self._infos.append(self._store.info(number))
      except KeyError:
        raise ValueError(
          f"{owner} has no batch {number}, but every update"
          f" needs one; lower num_updates = {num_batches} to {number} or choose a longer run"
        ) from None
    self._differs = False
    self.versions = [sorted(map(int, info["versions"])) for info in self._infos]
    self._draws: dict[int, tuple[int, Drawn]] = {}  # (number of the batch, `Drawn`), by draw
    for number, info in enumerate(self._infos):
      for one in (Drawn(**fields) for fields in info["drawn"]):
        self._draws[one.draw] = number, one
        if one.token_versions is not None:
          of_draw = _versions_in(one.token_versions) - {-1}
          self.versions[number] = sorted({*self.versions[number], *of_draw})
    for number, info in enumerate(self._infos):
      if not self.versions[number]:
        raise ValueError(
          f"{owner} has no lags to repeat: no policy of that run has sampled batch {number}; choose"
          " another run"
        )
      lacks = "was removed" if info.get("removed") else ""
      lacks = lacks or ("" if info.get("drawn") else "has no record of how it was drawn")
      if len(self.versions[number]) > 1 and lacks:
        raise ValueError(
          f"{owner} cannot be replayed: several versions have sampled batch {number}, which"
          f" {lacks}; choose a run of this version of rlvr_jax, with config.store.keep_used = True"
        )

  @property
  def has_several(self) -> bool:
    """Whether at least one batch was sampled by several versions."""
    return any(len(versions) > 1 for versions in self.versions)

  def newest(self) -> list[int]:
    """For every batch, the newest version that sampled this batch or an earlier batch."""
    return [*itertools.accumulate(map(max, self.versions), max)]

  def oldest_needed(self, update: int) -> int:
    """The oldest version needed by any batch that is sampled at this update or later."""
    needed = [
      versions[0]
      for versions, newest in zip(self.versions, self.newest(), strict=True)
      if newest >= update
    ]
    return min(needed, default=update)

  def first_difference(self, number: int, sampled_by: Mapping[int, str | None]) -> str:
    """Describes how a batch differs from the recorded batch.

    The result is "" if the batch does not differ, or if an earlier call has found a difference.

    Args:
      number: the number of the batch.
      sampled_by: the fingerprints of the versions that have sampled the batch in this run.
    """
    recorded = {int(version): x for version, x in self._infos[number]["versions"].items()}
    for version, fingerprint in sorted(sampled_by.items()):
      known = recorded.get(version)
      if not self._differs and known is not None and known != fingerprint:
        self._differs = True
        return f"version {version} has fingerprint {fingerprint} here, but {known} there"
    return ""

  def drawn(self, draw: int) -> Drawn | None:
    """How a draw of prompts was made; None if the recorded run did not store this."""
    return self._draws[draw][1] if draw in self._draws else None

  def token_versions(self, draw: int) -> np.ndarray:
    """The version of each token of a draw, i32[P, G, T], −1 where no token was sampled.

    If the run recorded only a version for each group, the result is these versions, i32[P, 1, 1].
    """
    number, drawn = self._draws[draw]
    if drawn.token_versions is not None:
      return decode_versions(drawn.token_versions)
    groups, _ = self._store.read(number)
    if "token_versions" in groups[0].arrays:  # recorded groups of another run have none
      return np.stack([group.arrays["token_versions"] for group in with_equal_names(groups)])
    return np.array([[[min(group.versions, default=-1)]] for group in groups], np.int32)


def encode_versions(versions: np.ndarray) -> EncodedVersions:
  """Versions as JSON: one per group for i32[P], or run-length encoded rollouts for i32[P, G, T].

  A rollout becomes [version, number of tokens, version, number of tokens, …] up to its last sampled
  token.
  """
  if versions.ndim == 1:
    of_groups: list[int] = versions.tolist()
    return of_groups
  return [[_runs(rollout) for rollout in group] for group in versions]


def _runs(values: np.ndarray) -> list[int]:
  values = values[: np.max(np.flatnonzero(values != -1), initial=-1) + 1]
  starts = np.flatnonzero(np.diff(values, prepend=-2))
  return np.stack([values[starts], np.diff(starts, append=len(values))], axis=-1).ravel().tolist()


def _versions_in(encoded: Sequence[Any]) -> set[int]:
  """The versions that `encode_versions` has encoded, −1 included."""
  if isinstance(encoded[0], int):
    return set(encoded)
  return {version for group in encoded for runs in group for version in runs[::2]}


def decode_versions(encoded: Sequence[Any]) -> np.ndarray:
  """Decodes the result of `encode_versions` to i32[P, 1, 1], or to i32[P, G, T] padded with −1."""
  if isinstance(encoded[0], int):
    return np.array(encoded, np.int32)[:, None, None]
  rollouts = [np.repeat(runs[::2], runs[1::2]) for group in encoded for runs in group]
  versions = np.full((len(rollouts), max(map(len, rollouts)) + 1), -1, np.int32)
  for row, values in zip(versions, rollouts, strict=True):
    row[: len(values)] = values
  return versions.reshape(len(encoded), -1, versions.shape[1])


class Schedule(NamedTuple):
  """When batches may begin to be sampled, and which batch each update trains on.

  Updates t, batches and versions v of the policy are numbered from 0.
  """

  limit: Callable[[int], int]  # v → total number of batches that may begin with versions up to v
  batch: Callable[[int], int]  # t → number of the batch that update t trains on
  first: Callable[[int], int]  # t → lowest number of a batch that update t or a later update needs
  threaded: bool = False  # whether sampling goes on during updates: the clock then decides the lags
  stage_length: int | None = None  # updates per stage, for the stage metrics
  open_ended: bool = False  # whether the plan of early updates is the same for a larger num_updates
  recorded: RecordedRun | None = None  # the run whose batches are sampled again

  def samples(self, version: int) -> int:
    """The number of batches that may begin once this version is offered, but not before."""
    return self.limit(version) - (self.limit(version - 1) if version else 0)

  def refreshes(self, update: int) -> bool:
    """Whether the policy before this update may sample batches."""
    recorded = () if self.recorded is None else self.recorded.versions
    return self.threaded or self.samples(update) > 0 or any(update in v for v in recorded)

  def oldest_version(self, batch: int, update: int | None = None) -> int:
    """The oldest version with which a batch may begin.

    Args:
      batch: number of the batch.
      update: number of an update before which the sampling of the batch has begun; None: the
        update with the number `batch`, which trains on this batch.
    """
    last = batch if update is None else update
    for version in range(last + 1):
      if self.limit(version) > batch:
        return version
    raise ValueError(
      f"the schedule's function `limit` lets no version sample batch {batch} before update {last};"
      " return larger numbers"
    )

  def oldest_trained(self, update: int) -> int:
    """The oldest version that sampled a token for this update or a later update."""
    first = self.first(update)
    if self.recorded is not None:  # a later batch may have older versions
      return min((versions[0] for versions in self.recorded.versions[first:]), default=update)
    return self.oldest_version(first, update=update)

  def oldest_sampling(self, update: int) -> int:
    """The oldest version that may sample before this update or a later update."""
    if self.recorded is not None:
      return self.recorded.oldest_needed(update)
    return self.oldest_version(self.batch(update)) if self.threaded else update

  def batches_per_refresh(self, num_updates: int) -> int:
    """The median number of batches that a policy samples per refresh; 1 for sampling in real time.

    A refresh gives the sampler a new policy, which samples the batches that begin before the next
    refresh.
    """
    counts = [count for count in map(self.samples, range(num_updates)) if count]
    return statistics.median_high(counts) if counts and not self.threaded else 1


class PlanError(ValueError):
  """A schedule uses a batch that has not been sampled yet or is no longer kept."""


def plan(schedule: Schedule, num_updates: int) -> list[tuple[int, int]]:
  """Plans each update: (number of the batch it trains on, version that samples that batch).

  Raises:
    ValueError: sampling continues during updates, so that the plan is not known in advance.
    PlanError: an update trains on a batch that has not been sampled yet or is no longer kept.
  """
  if schedule.threaded:
    raise ValueError(
      "a real-time schedule has no plan, since its lags depend on the clock; read the versions that"
      " its rollouts record"
    )
  sampled_by: list[int] = []
  oldest_batch = 0
  batches = []
  for t in range(num_updates):
    sampled_by += [t] * schedule.samples(t)
    oldest_batch = max(oldest_batch, schedule.first(t))
    batch = schedule.batch(t)
    if not oldest_batch <= batch < len(sampled_by):
      there = (
        f"only batches {oldest_batch} to {len(sampled_by) - 1} are available before this update"
      )
      if oldest_batch >= len(sampled_by):
        there = "no batch is sampled and kept before this update"
      raise PlanError(
        f"update {t} trains on batch {batch}, but {there}; fix the schedule's function `limit`,"
        " `batch` or `first`"
      )
    batches.append((batch, sampled_by[batch]))
  return batches


def same_number(update: int) -> int:
  """The batch with the same number as the update, so that every batch is used once, in order."""
  return update


def on_policy() -> Schedule:
  """Update t trains on batch t, which version t of the policy samples just before the update."""
  return Schedule(limit=lambda v: v + 1, batch=same_number, first=same_number, open_ended=True)


def updates_per_refresh(*, batches: int = 1, epochs: int = 1) -> Schedule:
  """Samples `batches` batches every μ = batches·epochs updates and uses each batch `epochs` times.

  Update t trains on batch b(t) = r·batches + (t − r·μ) mod batches, which version v(t) = r·μ of the
  policy samples. Here μ = batches·epochs, and r = ⌊t/μ⌋ is the number of the refresh. This is the
  schedule of GRPO and PPO. At a refresh all `batches` batches are sampled, even if the run ends
  before an update has trained on each of them.

  Args:
    batches: ≥ 1, number of batches sampled at each refresh.
    epochs: ≥ 1, number of updates on each batch.
  Source: Algorithm 1 of "Proximal Policy Optimization Algorithms" (arXiv:1707.06347); Algorithm 1
    of "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models"
    (arXiv:2402.03300), for GRPO.
  """
  check_integer("updates_per_refresh", "batches", batches, low=1)
  check_integer("updates_per_refresh", "epochs", epochs, low=1)
  length = batches * epochs

  def batch(update: int) -> int:
    return update // length * batches + update % length % batches

  def first(update: int) -> int:
    in_last_epoch = update % length >= length - batches
    return batch(update) if in_last_epoch else update // length * batches

  limit = lambda v: (v // length + 1) * batches
  return Schedule(limit=limit, batch=batch, first=first, open_ended=True)


def stages(*, count: int = 4, num_updates: int) -> Schedule:
  """μ-GRPO's stages: all batches of a stage are sampled first, then trained on in order.

  Each of the S stages has μ = U/S of the run's U updates. Update t trains on batch t, which version
  μ·⌊t/μ⌋ of the policy samples. So the lag grows from 0 to μ − 1 within a stage.

  Args:
    count: S ≥ 1, divides U; S = U is on_policy.
    num_updates: U, updates of the run.
  Source: "How Off-Policy Can GRPO Be? Mu-GRPO for Efficient LLM Reinforcement Learning"
    (arXiv:2605.17570), with 4096 updates and μ = 1024, compared with GRPO's μ = 4.
  """
  check_integer("stages", "count", count, low=1)
  check_integer("stages", "num_updates", num_updates, low=0)
  if num_updates % count:
    divisors = [s for s in range(1, num_updates + 1) if num_updates % s == 0]
    below = max(s for s in divisors if s < count)
    above = min((s for s in divisors if s > count), default=None)
    raise ValueError(
      f"stages: count = {count} does not divide num_updates = {num_updates}; set count to {below}"
      f"{f' or {above}' if above else ''}, or num_updates to a multiple of {count} such as"
      f" {num_updates + count - num_updates % count}"
    )
  length = max(num_updates // count, 1)  # a run without updates has no stage
  limit = lambda v: (v // length + 1) * length
  return Schedule(limit=limit, batch=same_number, first=same_number, stage_length=length)


def fixed_lag(*, lag: int, num_updates: int) -> Schedule:
  """Update t trains on batch t, which the policy from L updates ago samples: version max(0, t − L).

  L + 1 batches are sampled before the first update, and one batch before each later update, until
  every update has a batch.

  Args:
    lag: L ≥ 0, updates; 0 is on_policy.
    num_updates: updates of the run.
  Source: L = 1 is the one-step off-policy training of "Asynchronous RLHF: Faster and More Efficient
    Off-Policy RL for Language Models" (arXiv:2410.18252).
  """
  check_integer("fixed_lag", "lag", lag, low=0)
  check_integer("fixed_lag", "num_updates", num_updates, low=0)
  limit = lambda v: min(v + lag + 1, num_updates)
  return Schedule(limit=limit, batch=same_number, first=same_number, open_ended=lag == 0)


def simulated_asynchronous(
  *, max_lag: int = 4, recorded: str = "", num_updates: int, seed: int
) -> Schedule:
  """Simulates the lags of an asynchronous run reproducibly, without dependence on the clock.

  Update t trains on batch t, which version v(t) = max(0, max_{s ≤ t} (s − l_s)) of the policy
  samples, with l_s uniform on {0, …, L}. The inner maximum models a first-in, first-out queue, in
  which versions never decrease. So the lag of update t is min_{k ≥ 0} (l_{t−k} + k). For j ≤ L ≤ t,
  the lag is at least j with probability Π_{i=1}^{j} (1 − i/(L+1)): all lags occur, but the longest
  lag is rare. With `recorded`, the problems, the random keys and the version of each token are
  instead the same as in a recorded run. Then a batch is sampled when the run has the newest version
  that the batch needs.

  Args:
    max_lag: L ≥ 0, updates; also a bound on recorded lags.
    recorded: --workdir of a run, whose batches are sampled again; "" samples random lags.
    num_updates: updates of the run.
    seed: ≥ 0, the seed of the random lags; the lag of batch b depends only on (seed, b).
  Raises:
    ValueError: a hyper-parameter is out of range. Or the recorded run lacks a batch; or one of its
      batches has a lag above max_lag, or was sampled by a version above the batch's number. Or each
      batch has one version, but the versions decrease.
    StoreError: the run has no rollouts.
  """
  owner = "simulated_asynchronous"
  check_integer(owner, "max_lag", max_lag, low=0)
  check_integer(owner, "num_updates", num_updates, low=0)
  check_integer(owner, "seed", seed, low=0)
  if recorded:
    run = RecordedRun(recorded, num_updates)
    check_versions(f"{owner}: recorded = {recorded!r}", run.versions, max_lag)
    replayed = schedule_from_versions(run.newest(), open_ended=max_lag == 0)
    return replayed._replace(recorded=run)
  independent = (b - sample_lag(seed, b, max_lag) for b in range(num_updates))
  versions = [max(0, v) for v in itertools.accumulate(independent, max)]
  return schedule_from_versions(versions, open_ended=max_lag == 0)


def asynchronous(*, max_lag: int = 4) -> Schedule:
  """Generation and updates overlap in real time; the lag of an update is at most L.

  Update t trains on batch t. A thread samples batch after batch from the newest policy. The thread
  waits while the version of this policy is below b − L, where b is the number of the next batch.
  Unlike with other schedules, lags depend on the clock.

  Args:
    max_lag: L ≥ 0, updates; 0 means no overlap.
  Source: the staleness bound of "AReaL: A Large-Scale Asynchronous Reinforcement Learning System
    for Language Reasoning" (arXiv:2505.24298).
  """
  check_integer("asynchronous", "max_lag", max_lag, low=0)
  return Schedule(
    limit=lambda v: v + max_lag + 1,
    batch=same_number,
    first=same_number,
    threaded=True,
    open_ended=True,
  )


def schedule_from_versions(versions: Sequence[int], *, open_ended: bool) -> Schedule:
  """The schedule in which update t trains on batch t, which version `versions[t]` samples.

  Args:
    versions: must not decrease.
    open_ended: see `Schedule`.
  """
  limit = lambda v: bisect.bisect_right(versions, v)
  return Schedule(limit=limit, batch=same_number, first=same_number, open_ended=open_ended)


def sample_lag(seed: int, batch: int, max_lag: int) -> int:
  """Samples the lag of a batch, uniform on 0 … max_lag; depends only on (seed, batch)."""
  # A spawn key, because NumPy treats the entropies [seed, b] and [seed, b, 0] as equal, and the
  # loop seeds other generators with such lists.
  entropy = np.random.SeedSequence(seed, spawn_key=(batch,))
  return int(np.random.default_rng(entropy).integers(max_lag + 1))


def check_versions(owner: str, versions: Sequence[Sequence[int]], max_lag: int) -> None:
  """Raises ValueError unless 0 ≤ b − v ≤ max_lag for each version v that has sampled a batch b.

  If every batch has one version, the versions must also not decrease.
  """
  previous = 0
  for batch, of_batch in enumerate(versions):
    prefix = f"{owner}: batch {batch} was sampled by version {of_batch[0]}"
    if of_batch[-1] > batch:
      raise ValueError(
        f"{owner}: batch {batch} was sampled by version {of_batch[-1]}, which comes after update"
        f" {batch}; choose a run that trains on every batch once, in the order sampled"
      )
    if of_batch[0] < previous and max(map(len, versions)) == 1:
      raise ValueError(
        f"{prefix} after a batch of version {previous}; choose a run whose versions never decrease"
        " (where a run was interrupted, they may decrease)"
      )
    if batch - of_batch[0] > max_lag:
      raise ValueError(
        f"{prefix}, a lag of {batch - of_batch[0]} updates, above max_lag = {max_lag}; raise"
        " max_lag"
      )
    previous = of_batch[0]
