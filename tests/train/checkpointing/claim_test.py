"""One process at a time has a workdir in a bucket."""

import contextlib
import json
import os
import subprocess
import time

import pytest

from rlvr_jax.storage.bucket import Bucket
from rlvr_jax.storage.places import OWNER, Workdir
from rlvr_jax.train.checkpointing import claim
from rlvr_jax.train.checkpointing.claim import BucketClaim, WorkdirError
from rlvr_jax.train.checkpointing.workdir import claim_workdir


def owner_of(url, *, beat_s=10.0, limit_s=3600.0, **options):
  """A claim that a machine which stands still for minutes does not lose."""
  return BucketClaim(Bucket(url), beat_s=beat_s, limit_s=limit_s, **options)


class Losses(list):
  """What an owner says when it has lost its claim."""

  def wait(self):
    deadline = time.monotonic() + 60
    while not self:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    return self[0]


def test_a_second_process_is_refused_at_the_first_heartbeat(url):
  with contextlib.closing(owner_of(url, beat_s=0.2)):
    began = time.monotonic()
    with pytest.raises(WorkdirError, match=f"{url} is in use by process {os.getpid()} on .* stop"):
      owner_of(url, machine="another")
    assert time.monotonic() - began < 60
  owner_of(url).close()  # it was given up


def test_a_silent_owner_is_replaced_and_stops_writing(url):
  losses = Losses()
  # It is silent for longer than it may be, as a process that was stopped.
  first = owner_of(url, beat_s=2.0, limit_s=1.0, on_loss=losses.append)
  with contextlib.closing(owner_of(url, machine="another")) as second:
    with pytest.raises(WorkdirError, match=r"had no heartbeat of this process for \d+ s"):
      first.check()
    second.check()
    assert "no heartbeat" in losses.wait()
    first.close()
    assert json.loads(Bucket(url).read(OWNER))["machine"] == "another"  # it is not the first's


def test_an_owner_whose_claim_is_another_s_notices(url, emulator):
  losses = Losses()
  first = owner_of(url, beat_s=0.05, on_loss=losses.append)
  Bucket(url).put(OWNER, b"{}")
  assert f"error: another process has taken over {url}" in losses.wait()
  first.close()
  with pytest.raises(WorkdirError, match=rf"{url}/{OWNER} is not a claim .*; remove it"):
    owner_of(url)


def test_an_owner_of_this_machine_that_has_died_is_replaced_at_once(url):
  gone = subprocess.Popen(["true"])
  gone.wait()
  first = owner_of(url, beat_s=1000)
  about = json.loads(Bucket(url).read(OWNER))
  Bucket(url).put(OWNER, json.dumps(about | {"process": gone.pid}).encode())
  began = time.monotonic()
  owner_of(url).close()
  assert time.monotonic() - began < 100
  assert first._thread.is_alive()
  # A later process of the same number is another one.
  Bucket(url).put(OWNER, json.dumps(about | {"began": "1"}).encode())
  owner_of(url).close()


def test_a_heartbeat_whose_answer_was_lost_is_no_other_process(url):
  owner = owner_of(url, beat_s=1000)
  about = json.loads(Bucket(url).read(OWNER))
  arrived = Bucket(url).put(OWNER, json.dumps(about | {"beats": 2}).encode())
  assert owner._send_heartbeat() > arrived
  owner.close()


def test_an_owner_whose_claim_was_removed_notices(url):
  losses = Losses()
  owner = owner_of(url, beat_s=0.05, on_loss=losses.append)
  Bucket(url).delete(OWNER)
  assert "another process has taken over" in losses.wait()
  owner.close()


def test_a_heartbeat_that_fails_is_repeated_until_the_limit(url, emulator, monkeypatch):
  losses = Losses()
  owner = owner_of(url, beat_s=0.1, on_loss=losses.append)
  monkeypatch.setattr(emulator, "refuses", 403)
  time.sleep(0.5)
  monkeypatch.setattr(emulator, "refuses", None)
  before = json.loads(Bucket(url).read(OWNER))["beats"]
  deadline = time.monotonic() + 60
  while json.loads(Bucket(url).read(OWNER))["beats"] == before:
    assert time.monotonic() < deadline
  assert not losses
  owner.close()


def test_a_workdir_writes_nothing_without_its_claim(url, folder, emulator, monkeypatch):
  workdir = Workdir(url)
  with contextlib.closing(claim_workdir(workdir)):
    (workdir.local / "config.json").write_bytes(b"{}")
    monkeypatch.setattr(claim, "_now", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + 100)
    with pytest.raises(WorkdirError, match="no heartbeat"):
      workdir.publish()
    assert emulator.names(folder) == [OWNER]
    monkeypatch.undo()
  workdir.close()
