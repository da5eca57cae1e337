"""The tiny run with few slots and rare checkpoints, whose update may take minutes to compile."""

import os

import jax
from train import tiny

from rlvr_jax import losses
from rlvr_jax.losses.base import Loss

SLOW = "COMPILES_FOR_MINUTES"  # environment variable


def get_config():
  """Four batches per refresh, sampled in two slots: a refresh is many bursts."""
  c = tiny.get_config()
  c.num_updates = 8
  c.schedule = "updates_per_refresh(batches=4)"
  c.sampling.slots = 2
  c.checkpoint.every = 100
  c.loss = "train.preempted:perhaps_slow()"
  return c


def perhaps_slow():
  """`ppo_clip`; where the environment says so, with a constant that XLA computes for minutes."""
  loss = losses.ppo_clip()
  if not os.environ.get(SLOW):
    return loss

  def per_token(*args):
    values, metrics = loss.per_token(*args)
    ones = jax.lax.full((2**17,), 1.0)
    sums = jax.lax.reduce_window(ones, 0.0, jax.lax.add, (64,), (1,), "SAME")
    return values + 0 * sums[3], metrics

  return Loss(per_token)
