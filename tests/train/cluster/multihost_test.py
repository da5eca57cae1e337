"""Messages name what the thread that they are about is doing."""

import threading

import pytest

from rlvr_jax.train.cluster import multihost, process


def test_each_thread_has_a_phase_of_its_own():
  entered, ending = threading.Event(), threading.Event()

  def generate():
    with multihost.phase("generation"):
      entered.set()
      ending.wait(60)

  thread = threading.Thread(target=generate)
  with multihost.share_shutdown_signals():
    process.request_shutdown()
    with multihost.phase("an update"):
      thread.start()
      entered.wait(60)
      with pytest.raises(process.EndRequestedError, match=r"^shutdown requested during an update$"):
        multihost.raise_if_shutdown_requested()
      ending.set()
      thread.join(60)
