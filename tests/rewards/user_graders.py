"""What a user might bring: functions by import path."""

import os
import time

from rlvr_jax.rewards.graders import gsm8k

SECONDS = "GRADER_SECONDS"  # environment variable


def digits(completion, reference):
  """Half the share of digits, in [0, 0.5]."""
  return 0.5 * sum(c.isdigit() for c in completion) / max(len(completion), 1)


def unhurried(completion, reference):
  """Compares the final number, and takes its time about it where the environment says so."""
  time.sleep(float(os.environ.get(SECONDS, 0)))
  return gsm8k(completion, reference)
