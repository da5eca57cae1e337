"""Experiments whose claims were written down before their runs: a comparison and a margin each."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.testbed import report
from experiments.testbed.report import Result, RunValue
from rlvr_jax.evaluate import compare
from rlvr_jax.evaluate.compare import METRIC, markdown_table
from rlvr_jax.evaluate.paired import BySeed, paired_difference
from rlvr_jax.evaluate.run_files import read_metrics

MATTERS = 0.03  # of pass@1

# Heading of a column → (metric, what of its values over the updates of a run).
Measured = Mapping[str, tuple[str, Callable[[Sequence[float]], float]]]
MISMATCH: Measured = {  # of the policy and the one that sampled
  "ESS": ("behavior/ess", statistics.mean),
  "KL(β‖π)": ("behavior/kl_k3", statistics.mean),
  "largest ratio": ("behavior/ratio_max", max),
  "clipped": ("loss/clip_fraction", statistics.mean),
}


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


def verdict(claimed: str, low: float, high: float, matters: float = MATTERS) -> str:
  """What an interval of a difference says about a claim.

  Args:
    claimed: see `Claim`.
    low, high: of the interval.
    matters: the difference that would matter.
  Returns:
    "found": the interval lies where the claim says; "reversed": it lies on the other side, of 0 or,
    where "not less" is claimed, of −matters; "excluded beyond the margin": "more" is claimed and it
    lies within ± matters; "excluded: they differ", of "equal"; or "undecided".
  """
  if claimed == "not less":
    return "found" if low > -matters else "reversed" if high < -matters else "undecided"
  if -matters < low and high < matters:
    return "found" if claimed == "equal" else "excluded beyond the margin"
  if claimed == "equal":
    return "excluded: they differ" if low > 0 or high < 0 else "undecided"
  return "found" if low > 0 else "reversed" if high < 0 else "undecided"


HEADINGS = ["arm", "less", "difference, 95 %", "seeds", "claimed", "margin", "verdict"]


def measured(name: str) -> RunValue:
  """What `write_page` measured over a run; None where the run lacks the metric."""
  return lambda result: result["measured"].get(name)


def claim_row(
  claim: Claim,
  arm: BySeed,
  control: BySeed,
  matters: float = MATTERS,
  least_seeds: int = 2,
) -> list[str]:
  """Cells of a claim, for the columns of `HEADINGS`; a dash for the interval of one seed or none.

  Args:
    claim: what is claimed.
    arm, control: seed → value of the arm and of its control, of the runs that have finished.
    matters: the difference that would matter.
    least_seeds: a difference of fewer seeds decides nothing, whatever its interval is.
  """
  num_seeds = len(arm.keys() & control.keys())
  interval, decided = "–", "undecided"
  if num_seeds > 1:
    found = paired_difference(arm, control)
    interval = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
    if num_seeds >= least_seeds:
      decided = verdict(claim.claimed, found.low, found.high, matters)
  described = [claim.arm, claim.control, interval, str(num_seeds)]
  return [*described, claim.claimed, f"{matters:g}", decided]


def claim_table(
  claims: Sequence[Claim],
  results: Sequence[Result],
  value: RunValue,
  matters: float = MATTERS,
  least_seeds: int = 2,
) -> str:
  """The differences that claims are about, paired by seed, with their verdicts.

  Args:
    claims: all of one quantity; there are no rows as long as none of their arms has run.
    results: with the runs of their arms; the quantity is not asked of other runs.
    value: the quantity, of a result.
    matters: the difference of it that would matter.
    least_seeds: see `claim_row`. Arms that share fewer than two seeds have no interval.
  """
  labels = {label for claim in claims for label in (claim.arm, claim.control)}
  values = compare.values_by_seed((run for run in results if run["label"] in labels), value)
  by_seed = lambda label: {s: x for s, x in values.get(label, {}).items() if x is not None}
  rows = {}
  if any(claim.arm in values for claim in claims):
    for claim in claims:
      arm, control = by_seed(claim.arm), by_seed(claim.control)
      rows[claim.name] = claim_row(claim, arm, control, matters, least_seeds)
  return markdown_table(HEADINGS, rows, "claim")


class Quantity(NamedTuple):
  """What claims are about.

  Attributes:
    title: of its table.
    claims: about it.
    value: of a result.
    matters: the difference that would matter.
    least_seeds: number of seeds that decide a claim.
  """

  title: str
  claims: Sequence[Claim]
  value: RunValue
  matters: float = MATTERS
  least_seeds: int = 2


def quantity_tables(quantities: Sequence[Quantity], results: Sequence[Result]) -> list[str]:
  """A `claim_table` for each quantity, below its title."""
  return [
    f"{title}:\n\n{claim_table(claims, results, value, matters, least_seeds)}"
    for title, claims, value, matters, least_seeds in quantities
  ]


def arm_table(
  results: Sequence[Result],
  labels: Sequence[str],
  shown: Iterable[str],
  value: RunValue,
  more: Mapping[str, RunValue] = {},
) -> str:
  """A row for each arm: pass@1 and what was measured, as means over seeds.

  Args:
    results: with the field `measured`, which `write_page` adds.
    labels: of the arms, in order.
    shown: names of its columns, of what was measured.
    value: the late pass@1 of a result.
    more: heading → value of a result, of further columns.
  """
  columns: Mapping[str, RunValue] = {
    "pass@1 at the start": lambda result: result["evaluations"][METRIC][0],
    "late pass@1": value,
    **more,
    **{name: measured(name) for name in shown},
  }
  return report.table(results, labels, columns)


def write_page(
  home: pathlib.Path,
  labels: Sequence[str],
  metrics: Measured,
  tables: Callable[[Sequence[Result]], str],
  draw: Callable[[Sequence[Result], pathlib.Path], None],
) -> None:
  """Writes the tables of an experiment, and adds what was measured to its results.

  Args:
    home: folder of the experiment.
    labels: of all its arms.
    metrics: what is measured of each run, for results.json, where the run has the metric.
    tables: results → Markdown.
    draw: saves the figure of new results in the folder.
  """

  def measure(workdir: str) -> dict[str, Any]:
    train = [r for r in read_metrics(workdir) if r["phase"] == "train"]
    found = {}
    for name, (metric, of) in metrics.items():
      if values := [r[metric] for r in train if metric in r]:
        found[name] = float(f"{of(values):.6g}")
    return {"measured": found}

  report.write_page(home, tables, measure, draw, labels)
