"""What trainer and samplers read of one another's objects."""

import errno
import threading
import time

import pytest

from rlvr_jax.fleet.leases import LeaseBook
from rlvr_jax.fleet.records import (
  TRAINER,
  DamagedError,
  Plan,
  SamplerRecord,
  TrainerRecord,
  plan_name,
)
from rlvr_jax.storage.shared import DiskFiles
from rlvr_jax.train.fleet import board, desk
from rlvr_jax.train.fleet.desk import Taker, Watcher

TRAINED = TrainerRecord("a", "code", "config", "data", "settings", [], [0, 0], False, 0)
PLAN = Plan(0, 0, 0, [1, 2], {"position": 3}, 0, [[0, 2]])
SAMPLED = SamplerRecord("host", 0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, "", 0)


def wait_for(condition):
  deadline = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def open_board(files):
  return board.Board(files, TRAINED, lambda: [], beat_s=0.02, poll_s=0.01)


def test_records_of_killed_samplers_are_removed(tmp_path, monkeypatch):
  monkeypatch.setattr(board, "GONE_S", 0.5)
  files = DiskFiles(tmp_path)
  for name in ("killed", "other"):
    files.put(f"samplers/{name}", SAMPLED.encode())
  opened = open_board(files)
  wait_for(lambda: len(opened.samplers(within_s=60)) == 2)

  def beats():
    files.put("samplers/alive", SAMPLED._replace(beat=time.monotonic_ns()).encode())
    return files.names("samplers/") == ["samplers/alive"]

  wait_for(beats)
  wait_for(lambda: [*opened.samplers(within_s=60)] == ["alive"])
  opened.close(ended=False)


def test_a_damaged_plan_is_written_anew(tmp_path, monkeypatch):
  files = DiskFiles(tmp_path)
  files.put(plan_name(PLAN), PLAN.encode()[:-20] + b"x" * 20)
  files.put(TRAINER, TRAINED.encode())
  watcher = Watcher(files)
  watcher.look()
  assert watcher.view.trainer == TRAINED and not watcher.view.plans
  monkeypatch.setattr(desk, "DAMAGED_S", 0.0)
  files.put(TRAINER, TRAINED._replace(beat=1).encode())
  with pytest.raises(DamagedError, match="is damaged; start the trainer again, which writes it"):
    watcher.look()
  opened = open_board(files)
  opened.publish_plan(PLAN)
  opened.close(ended=False)
  watcher = Watcher(files)
  watcher.look()
  assert [*watcher.view.plans.values()] == [PLAN]


def test_a_trainer_was_alive_when_its_record_has_changed(tmp_path):
  files, watcher = DiskFiles(tmp_path), None
  files.put(TRAINER, TRAINED._replace(ended=True).encode())
  watcher = Watcher(files)
  for _ in range(2):
    watcher.look()
    assert watcher.view.trainer.ended and not watcher.view.was_alive
  files.put(TRAINER, b"half of a rec")  # it is written again soon
  watcher.look()
  assert watcher.view.trainer.ended and not watcher.view.was_alive
  files.put(TRAINER, TRAINED.encode())
  watcher.look()
  assert watcher.view.trainer == TRAINED and watcher.view.was_alive


def test_leases_are_not_waited_for_when_the_thread_has_failed(tmp_path):
  class Stale(DiskFiles):
    """A file system whose folder has gone."""

    def names(self, prefix=""):
      raise OSError(errno.ESTALE, "stale file handle")

  files = DiskFiles(tmp_path)
  files.put(plan_name(PLAN), PLAN.encode())
  files.put(TRAINER, TRAINED.encode())
  watcher = Watcher(files)
  watcher.look()
  stale = Stale(tmp_path)
  taker = Taker(stale, LeaseBook(stale, "one", limit_s=3), watcher)
  taker.want(0)
  with pytest.raises(OSError, match="stale"):
    taker.run(1, 0.01, 3.0, threading.Event())
  assert taker.take() is None
