"""Verdicts of claims that were written down before their runs: a comparison and a margin each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.testbed.report import Result
from rlvr_jax.evaluate import compare
from rlvr_jax.evaluate.compare import METRIC, markdown_table

MATTERS = 0.03  # of pass@1


class Claim(NamedTuple):
  """What a paper claims of two arms of an experiment.

  Attributes:
    name: such as P1.
    arm, control: labels; the difference is arm less control.
    claimed: "more", "equal", or "not less" (matches or beats).
  """

  name: str
  arm: str
  control: str
  claimed: str


def late_mean(count: int) -> Callable[[Result], float]:
  """The mean of the last `count` evaluations of pass@1."""
  return lambda result: statistics.mean(result["evaluations"][METRIC][-count:])


def verdict(claimed: str, low: float, high: float, matters: float = MATTERS) -> str:
  """What an interval of a difference says about a claim.

  Args:
    claimed: see `Claim`.
    low, high: of the interval.
    matters: the difference that would matter.
  Returns:
    "found", "excluded beyond the margin", "reversed" (the other sign), "excluded: they differ" (of
    "equal"), or "undecided".
  """
  if claimed == "not less":
    if low > -matters:
      return "found"
    return "excluded beyond the margin" if high < -matters else _sign(claimed, low, high)
  if -matters < low and high < matters:
    return "found" if claimed == "equal" else "excluded beyond the margin"
  return _sign(claimed, low, high)


def _sign(claimed: str, low: float, high: float) -> str:
  """The verdict of an interval that reaches beyond the margin."""
  if claimed == "more" and low > 0:
    return "found"
  if claimed in ("more", "not less") and high < 0:
    return "reversed"
  if claimed == "equal" and (low > 0 or high < 0):
    return "excluded: they differ"
  return "undecided"


def claim_table(
  claims: Sequence[Claim], results: Sequence[Result], value: Callable[[Result], float]
) -> str:
  """The differences that claims are about, paired by seed, with their verdicts."""
  said = {"more": "more", "equal": f"within ±{MATTERS}", "not less": f"above −{MATTERS}"}
  rows = {}
  for claim in claims:
    of_both = [r for r in results if r["label"] in (claim.arm, claim.control)]
    d = compare.differences(of_both, claim.control, value)[claim.arm]
    rows[claim.name] = [
      claim.arm,
      claim.control,
      f"{d.mean:+.3f}",
      f"[{d.low:+.3f}, {d.high:+.3f}]",
      str(d.num_seeds),
      said[claim.claimed],
      verdict(claim.claimed, d.low, d.high),
    ]
  headings = ["arm", "less", "difference", "95 %, t", "seeds", "claimed", "verdict"]
  return markdown_table(headings, rows, "claim")
