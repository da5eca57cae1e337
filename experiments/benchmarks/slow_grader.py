"""Graders that sleep or never end; a separate file, because grading processes do not load jax."""

import os
import time
from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards import Grade, graders
from rlvr_jax.rewards import mathematics as real

SECONDS = "SLOW_GRADER_SECONDS"  # environment variable: seconds per completion
ENDLESS = "no end"  # the completion that `mathematics` grades indefinitely


def slow(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Grades like `graders.reasoning_gym`, after a sleep."""
  time.sleep(float(os.environ[SECONDS]))
  return graders.reasoning_gym(completion, reference)


def mathematics(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Grades like the grader of this name, except for `ENDLESS`."""
  while completion == ENDLESS:
    pass
  return real.mathematics(completion, reference)


slow_self_test = graders.reasoning_gym_self_test
mathematics_self_test = real.mathematics_self_test
