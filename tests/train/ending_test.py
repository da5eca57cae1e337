"""A run whose shutdown is requested, at any point, is saved at once and resumes as if undisturbed.

The program of its own, with SIGTERM and with two processes, is in `preemption_test`.
"""

import contextlib
import threading
import time

import pytest
from rewards.user_graders import SECONDS
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.train.cluster import multihost, process
from rlvr_jax.train.setup.build import build


@pytest.fixture(scope="module")
def parts():
  """Checkpoints are rare, so that what is saved is saved for the end; slots are few."""
  return build(tiny.config(checkpoint__every=100, sampling__slots=8))


@pytest.fixture(scope="module")
def undisturbed(parts, tmp_path_factory):
  """The outcome of the run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("undisturbed") / "run"
  train(parts, workdir)
  return tiny.outcome(workdir)


def ended(parts, workdir, capsys):
  """Trains until shutdown is requested; returns the output."""
  capsys.readouterr()
  with pytest.raises(process.EndRequestedError, match="saved after update"):
    train(parts, workdir)
  return capsys.readouterr().out


@contextlib.contextmanager
def asked_when(moment):
  """A thread that watches, and asks the run within to end."""

  def ask():
    while not moment():
      time.sleep(0.001)
    process.request_shutdown()

  thread = threading.Thread(target=ask)
  thread.start()
  yield
  thread.join()


@pytest.mark.slow
def test_wherever_it_is_it_ends_and_goes_on_as_if_it_had_not(
  parts, undisturbed, tmp_path, monkeypatch, capsys
):
  workdir = tmp_path / "run"
  after = lambda update: tiny.has_record(workdir, update, "train")
  monkeypatch.setenv(SECONDS, "0.05")

  # Between two bursts of the second refresh, which begins after update 4.
  with asked_when(lambda: after(3)() and 0 < tiny.unfinished_groups(workdir)):
    output = ended(parts, workdir, capsys)
  assert "shutdown requested during generation; saving" in output
  assert tiny.last_checkpoint(workdir)[0] == 4
  kept = tiny.unfinished_groups(workdir)
  assert 0 < kept < 16

  # The kept ones are not sampled again, and graders take their time over the others.
  monkeypatch.setenv(SECONDS, "0.5")
  with asked_when(lambda: tiny.unfinished_groups(workdir) > kept):
    output = ended(parts, workdir, capsys)
  assert "shutdown requested during generation; saving" in output
  assert tiny.last_checkpoint(workdir)[0] == 4 and kept < tiny.unfinished_groups(workdir) < 16
  monkeypatch.setenv(SECONDS, "0.05")

  # Update 5 is made; its evaluation is not finished.
  with asked_when(after(5)):
    output = ended(parts, workdir, capsys)
  assert "shutdown requested during an evaluation; saving" in output
  step, state, _ = tiny.last_checkpoint(workdir)
  assert (step, state["evaluated"]) == (5, 0)
  assert not tiny.has_record(workdir, 5, "eval")()

  # The last update is made and saved; its evaluation is not finished, and then no update follows.
  with asked_when(after(12)):
    output = ended(parts, workdir, capsys)
  assert "shutdown requested during an evaluation; saving" in output
  assert tiny.last_checkpoint(workdir)[0] == 12

  train(parts, workdir)
  found = tiny.outcome(workdir)
  assert found["metrics"] == undisturbed["metrics"]
  assert found["rollouts"] == undisturbed["rollouts"]
  assert found["checkpoint"] == undisturbed["checkpoint"]


def test_nothing_ends_what_does_not_end_in_order():
  process.request_shutdown()
  try:
    multihost.raise_if_shutdown_requested()
    with (
      multihost.share_shutdown_signals(),
      pytest.raises(process.EndRequestedError, match="shutdown requested"),
    ):
      multihost.raise_if_shutdown_requested()
  finally:
    process._shutdown_requested.clear()
  assert not process.shutdown_requested()
