"""A grader that sleeps, for overlap.py; in a file of its own: the grading process loads no jax."""

import os
import time
from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards import Grade, graders

SECONDS = "SLOW_GRADER_SECONDS"  # environment variable: how long one completion takes


def slow(completion: str, reference: Mapping[str, Any]) -> Grade:
  """As `graders.reasoning_gym`, after a sleep."""
  time.sleep(float(os.environ[SECONDS]))
  return graders.reasoning_gym(completion, reference)


slow_self_test = graders.reasoning_gym_self_test
