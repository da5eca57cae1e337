"""Staleness as a setting: which policy draws which batch, and which batch each update trains on.

Updates t and batches b count from 0; the version v of a policy is the number of updates behind it.
The lag of an update is its own version less that of the policy its batch was drawn from, t − v.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlvr_jax.files import local_path
from rlvr_jax.ops.checks import check_integer
from rlvr_jax.rollouts.store import RolloutStore

__all__ = [
  "on_policy",
  "updates_per_refresh",
  "stages",
  "fixed_lag",
  "simulated_asynchronous",
  "asynchronous",
]


class Schedule(NamedTuple):
  """Which policy draws which batch, and which batch each update trains on; t counts from 0."""

  draws: Callable[[int], int]  # t → batches drawn from the policy of version t, before update t
  batch: Callable[[int], int]  # t → number of the batch that update t trains on
  first: Callable[[int], int]  # t → lowest number that update t or a later one trains on
  max_lag: int | None = None  # with real_time: bound on the lag
  real_time: bool = False  # draws is not asked: a worker draws on its own, within max_lag
  stage_length: int | None = None  # updates per stage, for the stage metrics
  open_ended: bool = False  # the first updates' plan is the same for any num_updates


def plan(schedule: Schedule, num_updates: int) -> list[tuple[int, int]]:
  """What updates 0 … num_updates − 1 train on: (number of the batch, version that drew it) each.

  Raises:
    ValueError: the schedule runs in real time, so that its plan is not known beforehand; or an
      update trains on a batch that is not drawn by then or no longer kept.
  """
  if schedule.real_time:
    raise ValueError("a schedule in real time has no plan: read the versions of its rollouts")
  drawn_by: list[int] = []
  kept_from = 0
  planned = []
  for t in range(num_updates):
    drawn_by += [t] * schedule.draws(t)
    kept_from = max(kept_from, schedule.first(t))
    batch = schedule.batch(t)
    if not kept_from <= batch < len(drawn_by):
      raise ValueError(
        f"update {t} trains on batch {batch}, but only batches {kept_from} to {len(drawn_by) - 1}"
        " are drawn and kept by then; mend the schedule's draws, batch or first"
      )
    planned.append((batch, drawn_by[batch]))
  return planned


def same(update: int) -> int:
  """Update t trains on batch t: every batch once, in the order drawn."""
  return update


def on_policy() -> Schedule:
  """Update t trains on batch t, drawn just before it: b(t) = v(t) = t."""
  return Schedule(draws=lambda t: 1, batch=same, first=same, open_ended=True)


def updates_per_refresh(*, batches: int = 1, epochs: int = 1) -> Schedule:
  """Every μ = batches·epochs updates, batches are drawn; the updates go over them epochs times.

  b(t) = r·batches + (t − r·μ) mod batches and v(t) = r·μ, with r = ⌊t/μ⌋ and μ = batches·epochs.
  Ordinary GRPO and PPO; a run that ends within a refresh has drawn the whole of it.

  Args:
    batches: ≥ 1, drawn at each refresh.
    epochs: ≥ 1.
  Source: PPO, arXiv 1707.06347, algorithm 1; GRPO, arXiv 2402.03300, algorithm 1.
  """
  check_integer("updates_per_refresh", "batches", batches, low=1)
  check_integer("updates_per_refresh", "epochs", epochs, low=1)
  length = batches * epochs

  def batch(update: int) -> int:
    return update // length * batches + update % length % batches

  def first(update: int) -> int:
    in_last_epoch = update % length >= length - batches
    return batch(update) if in_last_epoch else update // length * batches

  draws = lambda t: 0 if t % length else batches
  return Schedule(draws=draws, batch=batch, first=first, open_ended=True)


def stages(*, count: int = 4, num_updates: int) -> Schedule:
  """μ-GRPO's stages: all batches of μ = U/S updates are drawn at once, then trained on in order.

  b(t) = t and v(t) = μ·⌊t/μ⌋: within a stage the lag grows from 0 to μ − 1.

  Args:
    count: S ≥ 1, divides U; S = U is on_policy.
    num_updates: U, updates of the run.
  Source: arXiv 2605.17570 (4096 updates with μ = 1024, against GRPO's μ = 4).
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
  draws = lambda t: 0 if t % length else length
  return Schedule(draws=draws, batch=same, first=same, stage_length=length)


def fixed_lag(*, lag: int, num_updates: int) -> Schedule:
  """Update t trains on rollouts of the policy from L updates ago: b(t) = t, v(t) = max(0, t − L).

  L + 1 batches are drawn at the start and one before each update that follows, until every update
  has its own.

  Args:
    lag: L ≥ 0, updates; 0 is on_policy.
    num_updates: updates of the run.
  Source: one-step off-policy training, L = 1, is that of arXiv 2410.18252.
  """
  check_integer("fixed_lag", "lag", lag, low=0)
  check_integer("fixed_lag", "num_updates", num_updates, low=0)
  return once_each([max(0, b - lag) for b in range(num_updates)], open_ended=lag == 0)


def simulated_asynchronous(
  *, max_lag: int = 4, recorded: str = "", num_updates: int, seed: int
) -> Schedule:
  """The lags of an asynchronous run, without its clock: the same ones at every run.

  b(t) = t and v(t) = max(0, max_{s ≤ t} (s − l_s)), with l_s uniform on {0, …, L}: a first-in,
  first-out queue never hands over an older policy's batch after a newer one's. So an update's lag
  is min_{k ≥ 0} (l_{t−k} + k), which is j or more with probability Π_{i=1}^{j} (1 − i/(L+1)) for
  j ≤ L ≤ t: all lags occur, the longest seldom. `recorded` replays a run's own versions instead.

  Args:
    max_lag: L ≥ 0, updates; a record must keep to it.
    recorded: a run's --workdir, the versions of whose first batches become v; "" draws lags.
    num_updates: updates of the run.
    seed: ≥ 0, of the lags drawn; that of batch b depends on nothing but (seed, b).
  Raises:
    ValueError: a hyper-parameter out of range; a record that lacks a batch, or whose versions fall,
      come after the batch's own update, or lag by more than max_lag.
    StoreError: the run has no rollouts.
  """
  owner = "simulated_asynchronous"
  check_integer(owner, "max_lag", max_lag, low=0)
  check_integer(owner, "num_updates", num_updates, low=0)
  check_integer(owner, "seed", seed, low=0)
  if recorded:
    versions = recorded_versions(recorded, num_updates)
    check_versions(f"{owner}: recorded = {recorded!r}", versions, max_lag)
  else:
    oldest = (b - drawn_lag(seed, b, max_lag) for b in range(num_updates))
    versions = [max(0, v) for v in itertools.accumulate(oldest, max)]
  return once_each(versions, open_ended=max_lag == 0)


def asynchronous(*, max_lag: int = 4) -> Schedule:
  """Generation and updates overlapped in real time: b(t) = t, and v(t) ≥ t − L as it happens.

  A worker draws batch after batch from the newest policy there is, and waits where batch b would
  come from one older than version b − L. Its lags depend on the clock; the others' do not.

  Args:
    max_lag: L ≥ 0, updates; 0 leaves nothing to overlap.
  Source: AReaL's bound on staleness, arXiv 2505.24298.
  """
  check_integer("asynchronous", "max_lag", max_lag, low=0)

  def draws(update: int) -> int:
    raise RuntimeError(f"asynchronous: who draws before update {update} is up to the clock")

  return Schedule(
    draws=draws,
    batch=same,
    first=same,
    max_lag=max_lag,
    real_time=True,
    open_ended=True,
  )


def once_each(versions: Sequence[int], *, open_ended: bool) -> Schedule:
  """Update t trains on batch t, drawn by the policy of version `versions[t]`, which never falls."""
  counts = np.bincount(np.asarray(versions, int), minlength=1)
  draws = lambda t: int(counts[t]) if t < len(counts) else 0
  return Schedule(draws=draws, batch=same, first=same, open_ended=open_ended)


def drawn_lag(seed: int, batch: int, max_lag: int) -> int:
  """The lag drawn for a batch, uniform on 0 … max_lag."""
  # As a spawn key: NumPy takes the entropies [seed, b] and [seed, b, 0] for the same, and the loop
  # has generators of three numbers.
  entropy = np.random.SeedSequence(seed, spawn_key=(batch,))
  return int(np.random.default_rng(entropy).integers(max_lag + 1))


def recorded_versions(workdir: str, num_batches: int) -> list[int]:
  """The versions of a run's batches 0 … num_batches − 1, those deleted since included."""
  store = RolloutStore(
    local_path("simulated_asynchronous: recorded", workdir) / "rollouts", writable=False
  )
  infos = []
  for number in range(num_batches):
    try:
      infos.append(store.info(number))
    except KeyError:
      raise ValueError(
        f"simulated_asynchronous: recorded = {workdir!r} has no batch {number}, and as many are"
        f" needed as updates; lower num_updates = {num_batches} to {number} or choose a longer run"
      ) from None
  return [info["version"] for info in infos]


def check_versions(owner: str, versions: Sequence[int], max_lag: int) -> None:
  """Raises unless the versions never fall and 0 ≤ b − versions[b] ≤ max_lag for every batch b."""
  previous = 0
  for batch, version in enumerate(versions):
    told = f"{owner}: batch {batch} was drawn by version {version}"
    if version > batch:
      raise ValueError(
        f"{told}, which comes after update {batch}; choose a run that trains on every batch once,"
        " in the order drawn"
      )
    if version < previous:
      raise ValueError(
        f"{told} after one of version {previous}; choose a run whose versions never fall, one that"
        " was not interrupted"
      )
    if batch - version > max_lag:
      raise ValueError(
        f"{told}, a lag of {batch - version} updates, above max_lag = {max_lag}; raise max_lag"
      )
    previous = version
