"""A grader that may never end; a separate file, because grading processes do not load jax."""

from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards import Grade
from rlvr_jax.rewards import mathematics as real

ENDLESS = "no end"  # the completion that `mathematics` grades indefinitely


def mathematics(completion: str, reference: Mapping[str, Any]) -> Grade:
  """Grades like the grader of this name, except for `ENDLESS`."""
  while completion == ENDLESS:
    pass
  return real.mathematics(completion, reference)


mathematics_self_test = real.mathematics_self_test
