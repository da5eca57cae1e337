"""Steps that the processes of a run take together while they wait for rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlvr_jax.storage.files import JSON
from rlvr_jax.train.cluster import multihost, sharding
from rlvr_jax.train.cluster.process import exit_after
from rlvr_jax.types import Tree


def burst_to_host(tree: Tree, *, deadline_s: float) -> Tree:
  """Waits for the devices and returns the tokens of a burst of decoding steps, as NumPy arrays.

  Ends the process if the wait takes longer than `deadline_s` seconds.

  Raises:
    EndRequestedError: shutdown was requested.
  """
  multihost.raise_if_shutdown_requested()  # meanwhile the devices compute the burst
  with exit_after(
    deadline_s,
    f"error: sampling has made no progress for {deadline_s:g} s, so a device or another process"
    " hangs. What was sampled is kept: rerun the same command to continue, with a larger"
    " config.generation_deadline_s if the devices are that slow",
  ):
    return sharding.to_host(tree)


def gather_answers(action: Callable[[], JSON]) -> list[Any]:
  """The results of an action in all processes, in order; an error in one process ends the others.

  Raises:
    EndRequestedError: shutdown was requested. While nothing is sampled, only this call notices the
      request.
  """
  multihost.raise_if_shutdown_requested()
  return multihost.exchange(multihost.run_together(action))
