"""The tiny run with few slots and rare checkpoints."""

from train import tiny


def get_config():
  """Four batches per refresh, sampled in two slots: a refresh is many bursts."""
  c = tiny.get_config()
  c.num_updates = 8
  c.schedule = "updates_per_refresh(batches=4)"
  c.sampling.slots = 2
  c.checkpoint.every = 100
  return c
