"""Leases: each has one sampler, until that has shown no sign of life for too long."""

import threading

import pytest

from rlvr_jax.fleet.leases import Lease, LeaseBook
from rlvr_jax.fleet.records import lease_name
from rlvr_jax.storage.places import parse_path
from rlvr_jax.storage.shared import open_shared

LEASES = [Lease(0, number) for number in range(3)]


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture(params=["disk", "bucket"])
def files(request, tmp_path):
  bucket = request.param == "bucket"
  return open_shared(parse_path("", request.getfixturevalue("url")) if bucket else tmp_path)


def book(files, name, clock=None):
  return LeaseBook(files, name, limit_s=60, clock=clock or Clock())


def take(book, files, leases, unlisted=()):
  """Takes one of the leases, after a list of those that have an object; without some of them."""
  listed = files.generations("leases/")
  taken = {lease: listed[name] for lease in LEASES if (name := lease_name(*lease)) in listed}
  return book.take(leases, {lease: taken[lease] for lease in taken if lease not in unlisted})


def test_a_lease_has_one_sampler(files):
  one, two = book(files, "one"), book(files, "two")
  assert take(one, files, LEASES) == LEASES[0]
  assert take(two, files, LEASES, unlisted=LEASES) == LEASES[1]  # whatever the listing says
  assert take(one, files, LEASES) == LEASES[2]
  assert take(one, files, LEASES) is None and take(two, files, LEASES) is None
  one.release(LEASES[0])
  assert take(two, files, LEASES) == LEASES[0]
  assert one.beat() == [] and set(one.own()) == {LEASES[2]}
  two.forget(LEASES[0])  # it is finished, and nobody takes it
  assert set(two.own()) == {LEASES[1]} and take(one, files, LEASES) is None


def test_a_silent_lease_is_taken_over_by_the_observers_clock(files):
  clock, other = Clock(), Clock()
  other.now = 1e6  # clocks are never compared
  owner, observer = book(files, "owner", other), book(files, "observer", clock)
  assert take(owner, files, LEASES[:1]) == LEASES[0]
  for clock.now in (0, 50, 100, 150):  # it beats, so it is not silent
    assert take(observer, files, LEASES[:1]) is None
    assert owner.beat() == []
  clock.now = 160
  assert take(observer, files, LEASES[:1]) is None
  clock.now = 219
  assert take(observer, files, LEASES[:1]) is None
  clock.now = 230
  assert take(observer, files, LEASES[:1]) == LEASES[0]
  assert owner.beat() == [LEASES[0]] and not owner.own()  # it was frozen, and has lost it
  assert observer.beat() == [] and files.names("leases/") == [lease_name(0, 0)]


def test_of_many_samplers_one_takes_a_silent_lease(files):
  clock = Clock()
  assert take(book(files, "dead"), files, LEASES[:1]) == LEASES[0]
  books = [book(files, f"{number}", clock) for number in range(4)]
  for each in books:
    assert take(each, files, LEASES[:1]) is None
  clock.now = 61
  taken = []
  threads = [
    threading.Thread(target=lambda each=each: taken.append(take(each, files, LEASES[:1])))
    for each in books
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sorted(map(str, taken)) == ["Lease(draw=0, number=0)", "None", "None", "None"]
