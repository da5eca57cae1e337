"""Many samplers in random schedules: each group is written once, and a lost lease is noticed."""

import random

from rlvr_jax.fleet.leases import BEATS, Lease, LeaseBook
from rlvr_jax.fleet.records import group_name, lease_name
from rlvr_jax.storage.bucket import ChangedError
from rlvr_jax.storage.shared import DiskFiles

LIMIT_S = 60.0
LEASES = [Lease(0, number) for number in range(8)]


class Sampler:
  """A program that takes leases, beats, and writes one group for each; its clock is wrong."""

  def __init__(self, files, name, world, rng):
    self.name, self.files, self.beats = name, files, 0.0
    self.offset, self.world = rng.uniform(-1e6, 1e6), world
    self.book = LeaseBook(files, name, limit_s=LIMIT_S, clock=lambda: world["now"] + self.offset)
    self.frozen_until = 0.0

  def beat(self, holders):
    """Renews the leases; what it has lost is no longer its own."""
    self.beats = self.world["now"]
    for lease in self.book.beat():
      assert holders.get(lease) != self.name, "it lost a lease that nobody took"
    assert all(holders.get(lease) == self.name for lease in self.book.own())

  def finish(self, lease):
    """Writes the lease's group; returns whether it was the first."""
    try:
      self.files.put(group_name(*lease), self.name.encode(), generation=0)
      return True
    except ChangedError:
      return False
    finally:
      self.book.forget(lease)


def run_schedule(seed, folder):
  """Numbers of leases that were retaken, and of late writers."""
  rng, world, files = random.Random(seed), {"now": 0.0}, DiskFiles(folder)
  samplers = [Sampler(files, f"sampler {number}", world, rng) for number in range(8)]
  holders, alive_at, winners, retaken, late = {}, {}, {}, 0, 0
  for _ in range(2000):
    if len(winners) == len(LEASES) and not any(sampler.book.own() for sampler in samplers):
      break
    world["now"] += rng.expovariate(1 / 2)
    now = world["now"]
    awake = [sampler for sampler in samplers if sampler.frozen_until <= now]
    for sampler in awake:  # soon, but one that was frozen may do something else first
      if now - sampler.beats >= LIMIT_S / BEATS and rng.random() < 0.1:
        sampler.beat(holders)
        alive_at |= dict.fromkeys(sampler.book.own(), now)
    if not awake:
      continue
    sampler, choice = rng.choice(awake), rng.random()
    own = sampler.book.own()
    if choice < 0.1:
      sampler.frozen_until = now + rng.uniform(0, 4 * LIMIT_S)
    elif choice < 0.15 and own:
      sampler.book.release(lease := rng.choice(own))
      if holders[lease] == sampler.name:
        del holders[lease]
    elif choice < 0.2 and own:
      won = sampler.finish(lease := rng.choice(own))
      assert won == (lease not in winners)
      winners.setdefault(lease, sampler.name)
      late += not won
    else:
      wanted = [lease for lease in LEASES if lease not in winners]
      listed = files.generations("leases/")
      taken = {lease: listed[n] for lease in LEASES if (n := lease_name(*lease)) in listed}
      if (lease := sampler.book.take(wanted, taken)) is not None:
        if lease in holders:  # only of a sampler that gave no sign of life for the limit
          assert now - alive_at[lease] > LIMIT_S
          retaken += 1
        holders[lease], alive_at[lease] = sampler.name, now
  assert set(winners) == set(LEASES)
  for lease, name in winners.items():
    assert files.read_generation(group_name(*lease))[0].decode() == name
  return retaken, late


def test_every_group_has_one_writer(tmp_path):
  counts = [run_schedule(seed, tmp_path / f"{seed}") for seed in range(4)]
  retaken, late = map(sum, zip(*counts, strict=True))
  assert retaken > 3 and late > 0  # the schedules had what they test
