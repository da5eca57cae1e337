"""docs/reproduction.md: every claim once, tables of committed runs, no result written by hand."""

import collections
import functools
import re
import statistics
import subprocess

import pytest
from scipy import stats

from docs import claims, deciding, reproduction
from docs.claims import CLAIMS, DECIDED_BY
from experiments.large_ratios.sweep import LOWER, SUFFIX, longer
from experiments.low_precision import sweep as low_precision

PAGE = reproduction.PAGE.read_text(encoding="utf-8")
EXPLAINED = re.findall(r"^\* \*\*([SPFM]\d[^*]*)\.\*\*(.*(?:\n  .*)*)", PAGE, re.MULTILINE)


def test_the_page_is_up_to_date():
  remedy = f"write it by: {reproduction.COMMAND}"
  assert reproduction.written() == PAGE, remedy
  others = reproduction.OTHERS.read_text(encoding="utf-8")
  assert reproduction.other_comparisons() == others, remedy
  assert others.count("\n| ") == len(claims.MORE) + len(claims.PAPERS)
  assert all(reproduction.figure(paper).exists() for paper in claims.PAPERS)


def test_every_claim_is_on_the_page_once_and_explained():
  rows = re.findall(r"^\| ([SPFM]\d+[a-z]?) \|.*\*\*", PAGE, re.MULTILINE)
  assert rows == list(CLAIMS)
  names = [name for names, _ in EXPLAINED for name in names.split(", ")]
  assert names == list(dict.fromkeys(name.rstrip("abc") for name in CLAIMS)) and len(names) == 26
  assert {row.claim.partition(",")[0] for row in claims.MORE} <= set(names)
  for paper in claims.PAPERS.values():
    assert f"\n## {paper}\n" in PAGE


def test_the_first_lines_count_the_verdicts():
  blocks = PAGE.split("\n\n")
  assert blocks[1].startswith("**On a language model**")
  (summary,) = [block for block in blocks if "44 parts of 26 claims" in block]
  assert len(summary.splitlines()) == 10
  (counts,) = re.findall(r"44 parts of 26 claims\*\*: (.*)\.", summary)
  shown = {verdict: int(n) for n, verdict in (x.split(" ", 1) for x in counts.split(", "))}
  assert shown == collections.Counter(map(reproduction.verdict_of, CLAIMS))
  assert list(shown) == list(claims.VERDICTS) and sum(shown.values()) == 44
  for verdict in claims.VERDICTS:
    assert f"\n| {verdict} | " in PAGE


# --- what decides ---------------------------------------------------------------------------------


def gaps_of(comparison):
  """Arm less control by seed, computed on its own."""
  arm, control = comparison.arm, comparison.control
  return [
    arm.by_seed.get(seed, arm.number) - control.by_seed.get(seed, control.number)
    for seed in (arm.by_seed or control.by_seed)
    if seed in (control.by_seed or arm.by_seed)
  ]


@pytest.mark.parametrize("name", DECIDED_BY)
def test_a_row_and_its_verdict_are_of_the_committed_runs(name):
  """Its cells and its verdict are those of an independent computation."""
  comparison = DECIDED_BY[name]
  (row,) = [x for x in PAGE.splitlines() if x.startswith(f"| {name} | ") and "**" in x]
  _, verdict, compared, number, _, margin, task = row.strip("| ").split(" | ")[1:]
  assert f"*{comparison.arm.name}* minus *{comparison.control.name}*" in compared
  assert float(margin.partition(",")[0]) == comparison.margin and comparison.task.name in task
  gaps = gaps_of(comparison)
  mean, half = statistics.mean(gaps), stats.t.ppf(0.975, len(gaps) - 1) * stats.sem(gaps)
  low, high = mean - half, mean + half
  shown = [float(x) for x in re.findall(r"[+-]\d+\.\d+", number)]
  digits = 0.0006 if comparison.margin < 1 else 0.06
  assert shown == pytest.approx([mean, low, high], abs=digits) and f"{len(gaps)} seeds" in number
  if comparison.claimed == "more":
    expected = "found" if low > 0 else "reversed" if high < 0 else "undecided"
    if -comparison.margin < low and high < comparison.margin:
      expected = "excluded beyond the margin"
  elif comparison.claimed == "not less":
    below = -comparison.margin
    expected = "found" if low > below else "reversed" if high < below else "undecided"
  else:
    assert comparison.claimed == "equal" and low < -comparison.margin < 0 < comparison.margin < high
    expected = "undecided"
  assert verdict.strip(" *") == expected


def test_the_adjusted_p_is_of_all_comparisons_that_decide():
  """An independent computation: the k-th smallest of m times m − k + 1, and never falling.

  S3b and S4a are decided by one comparison, which counts once.
  """
  distinct = {name: x for name, x in DECIDED_BY.items() if name != "S4a"}
  assert DECIDED_BY["S4a"] is DECIDED_BY["S3b"]
  p = {name: stats.ttest_1samp(gaps_of(x), 0.0).pvalue for name, x in distinct.items()}
  least = 0.0
  for rank, name in enumerate(sorted(p, key=p.get)):
    least = max(least, min(1.0, p[name] * (len(p) - rank)))
    (row,) = [x for x in PAGE.splitlines() if x.startswith(f"| {name} | ") and "**" in x]
    assert f" seeds | {least:.2g} | " in row
  first = DECIDED_BY["S2c"]
  two = first._replace(arm=deciding.Side("two", {0: 0.5, 1: 0.5}))  # without an interval
  alone = deciding.holm_p({"S2c": first})
  assert alone == {"S2c": deciding.interval_of(first).p}
  assert deciding.holm_p({"S2c": first, "two": two}) == alone


TASK = deciding.Task("a task", "a_task/README.md", {})
FIRST = deciding.Side("a", {0: 0.50, 1: 0.55, 2: 0.63})
SECOND = deciding.Side("b", {0: 0.40, 1: 0.45, 2: 0.50, 7: 0.9})


def test_a_comparison_of_three_seeds_has_an_interval_and_a_verdict():
  comparison = deciding.Comparison("pass@1", FIRST, SECOND, TASK, 0.03)
  cell = lambda *sides: deciding.difference_cell(deciding.differences(*sides))
  assert cell(FIRST, SECOND) == "+0.110 [+0.067, +0.153], 3 seeds"
  assert deciding.verdict(comparison) == "found"
  assert deciding.verdict(comparison._replace(arm=SECOND, control=FIRST)) == "reversed"
  two = deciding.Side("a", {0: 0.5, 1: 0.55})
  assert cell(two, SECOND) == "+0.100 and +0.100, 2 seeds"
  assert deciding.verdict(comparison._replace(arm=two)) == "undecided"
  constant = deciding.differences(FIRST, deciding.Side("0.5", {}, 0.5))
  assert list(constant.values()) == pytest.approx([0, 0.05, 0.13])


# --- plans ----------------------------------------------------------------------------------------

PLANNED = {  # row of a plan → labels of the runs that it came before, if not those of the two arms
  "S5": tuple(f"{method}, G = {size}" for method in ("SALT", "GRPO") for size in (64, 4)),
  "P4": ("P3O, float32", *map(low_precision.clip, low_precision.CLIPS)),
  "M1, vetoed": (longer(SUFFIX),),  # what it is compared with had run before, as the plan says
}


def test_margins_were_committed_before_the_runs():
  """The plan, at the commit of each of the runs, has the row, its arms, direction and margin."""
  planned = [comparison for comparison in DECIDED_BY.values() if comparison.plan]
  assert len(planned) == 21
  for comparison in planned:
    runs = deciding.results(comparison.task.experiment)
    arm, control = comparison.arm.name, comparison.control.name
    labels = PLANNED.get(comparison.plan, (arm, control))
    for commit in {run["commit"] for label in labels for run in runs[label]}:
      page = page_at(commit, f"experiments/{comparison.task.page}")
      plan = page.partition("written before any run")[2].partition("## Results")[0]
      (row,) = [line for line in plan.splitlines() if line.startswith(f"| {comparison.plan} |")]
      of_arm, of_control = (side.removesuffix(f", rate {LOWER}") for side in (arm, control))
      assert any(
        re.search(rf"\b{re.escape(x)} less {re.escape(y)}( is |, in )", row)
        for x, y in ((of_arm, of_control), (of_arm, "static"), ("static", of_control))
      )
      margin = f"{comparison.margin:g}"
      bound = "above 0" if comparison.claimed == "more" else f"above −{margin}"
      assert bound in row
      assert re.search(rf"\| {margin} .*\|$|\| {margin} \|$", row) or (
        f"The difference that would matter is {margin}" in plan
      )


@functools.cache
def page_at(commit, path):
  """A file at a commit; skips the test where the checkout has no such commit."""
  command = ["git", "show", f"{commit}:{path}"]
  found = subprocess.run(
    command, cwd=reproduction.ROOT, capture_output=True, text=True, check=False
  )
  if found.returncode:
    pytest.skip(f"this checkout has no commit {commit[:8]}")
  return found.stdout
