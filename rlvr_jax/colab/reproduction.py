"""Figures of docs/reproduction.md: the verdict on each claim of the papers."""

from __future__ import annotations

import collections
import os
import pathlib
import re
import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlvr_jax.colab.display import COLORS, legend_outside

# Columns of the page's two kinds of tables.
VERDICTS = ("id", "claim", "verdict", "compared", "difference, 95 %", "p, Holm", "margin", "task")
EVIDENCE = ("id", "evidence", "conditions", "link", "queued")
# Verdict → style of its squares; gray and empty squares are no findings.
STYLES: dict[str, dict[str, Any]] = {
  "found": dict(facecolor=COLORS["success"], edgecolor=COLORS["success"]),
  "excluded beyond the margin": dict(facecolor="#F2C49B", edgecolor=COLORS["failure"]),
  "reversed": dict(facecolor=COLORS["failure"], edgecolor=COLORS["failure"]),
  "undecided": dict(facecolor="white", edgecolor=COLORS["reference"]),
  **{
    verdict: dict(facecolor=COLORS["reference"], edgecolor=COLORS["reference"])
    for verdict in ("not tested", "not testable", "description")
  },
}
_REMEDY = "rewrite the page with `python -m docs.reproduction`"


class Claim(NamedTuple):
  """What the page has of a claim."""

  name: str  # S1a … M5, with a letter where a claim has several parts
  paper: str
  claim: str
  verdict: str  # one of STYLES
  decided_by: str  # what is compared, the difference with its interval, and the margin
  evidence: str
  conditions: str
  queued: str


def read_claims(root: str | os.PathLike[str]) -> list[Claim]:
  """Reads the claims of docs/reproduction.md, in its order.

  Raises:
    FileNotFoundError: `root` is not a checkout.
    ValueError: there are no claims, or a row has wrong cells, an unknown verdict or a repeated id,
      or a claim has no evidence.
  """
  path = pathlib.Path(root) / "docs" / "reproduction.md"
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist; set root to the folder of a checkout")
  paper = ""
  verdicts: list[dict[str, str]] = []
  evidence: dict[str, dict[str, str]] = {}
  for block in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
    first, *lines = block.strip().splitlines() or [""]
    columns = tuple(_split_cells(first))
    if first.startswith("#"):
      paper = first.lstrip("# ")
    if columns == VERDICTS:  # lines[0] is the rule
      verdicts += [_parse(line, columns) | {"paper": paper} for line in lines[1:]]
    if columns == EVIDENCE:
      evidence |= {row["id"]: row for row in (_parse(line, columns) for line in lines[1:])}
  if not verdicts:
    raise ValueError(f"{path}: no table has the columns {list(VERDICTS)}; {_REMEDY}")
  repeated = [name for name, n in collections.Counter(r["id"] for r in verdicts).items() if n > 1]
  if repeated:
    raise ValueError(f"{path}: {repeated} occur more than once; {_REMEDY}")
  of_claim = {row["id"]: row["id"].rstrip(string.ascii_lowercase) for row in verdicts}
  if missing := [name for name, claim in of_claim.items() if claim not in evidence]:
    raise ValueError(f"{path}: {missing} have no evidence; {_REMEDY}")
  return [_claim(row, evidence[of_claim[row["id"]]]) for row in verdicts]


def _split_cells(line: str) -> list[str]:
  return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _parse(line: str, columns: Sequence[str]) -> dict[str, str]:
  """Column → cell of a row."""
  cells = _split_cells(line)
  if len(cells) != len(columns):
    raise ValueError(
      f"reproduction.md: {len(cells)} cells in {line!r}, which needs {len(columns)}; {_REMEDY}"
    )
  return dict(zip(columns, cells, strict=True))


def _claim(row: Mapping[str, str], evidence: Mapping[str, str]) -> Claim:
  verdict = row["verdict"].strip("*")
  if verdict not in STYLES:
    raise ValueError(
      f"reproduction.md: {row['id']} has the verdict {verdict!r}; known verdicts are"
      f" {list(STYLES)}: use one of them, or add a style in rlvr_jax/colab/reproduction.py"
    )
  difference = f"{row['difference, 95 %']}, Holm's p {row['p, Holm']}"
  decided_by = f"{row['compared']}, {difference}; margin {row['margin']}"
  return Claim(
    row["id"],
    row["paper"],
    row["claim"],
    verdict,
    "" if row["compared"] == "–" else decided_by.replace("*", ""),
    evidence["evidence"],
    evidence["conditions"],
    evidence["queued"],
  )


def summary(claims: Iterable[Claim]) -> str:
  """Text with one line per paper: the number of claims with each verdict."""
  counts_by_paper: dict[str, collections.Counter[str]] = {}
  for claim in claims:
    counts_by_paper.setdefault(claim.paper, collections.Counter())[claim.verdict] += 1
  lines = [
    f"{paper}: "
    + ", ".join(f"{counts[verdict]} {verdict}" for verdict in STYLES if counts[verdict])
    for paper, counts in counts_by_paper.items()
  ]
  return "\n".join(lines)


def names(claims: Iterable[Claim]) -> list[str]:
  """The ids of the claims."""
  return [claim.name for claim in claims]


def show_claim(claims: Iterable[Claim], claim: str) -> None:
  """Prints a claim by its id, with verdict, what decides it, evidence and conditions.

  Raises:
    ValueError: the claim does not exist.
  """
  by_name = {item.name: item for item in claims}
  if claim not in by_name:
    raise ValueError(f"show_claim: there is no claim {claim!r}; choose one of {list(by_name)}")
  row = by_name[claim]
  text = re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", row.evidence)  # replaces links by their text
  print(f"{claim} ({row.paper}): {row.claim}")
  print(textwrap.fill(f"{row.verdict.upper()}{row.decided_by and ': '}{row.decided_by}", 100))
  print(textwrap.fill(text, 100))
  print(f"Conditions: {row.conditions}. Queued: {row.queued}.")


def draw_claims(claims: Sequence[Claim]) -> None:
  """Draws one row per claim, in the colors of the verdicts."""
  from matplotlib import pyplot
  from matplotlib.patches import Patch, Rectangle

  papers = list(dict.fromkeys(claim.paper for claim in claims))
  height = 0.27 * (len(claims) + 1.6 * len(papers))
  _, axes = pyplot.subplots(figsize=(9.5, height))
  y = 0.0
  for paper in papers:
    axes.text(0, y + 1, paper, va="center", weight="bold")
    y += 1.6
    for claim in (claim for claim in claims if claim.paper == paper):
      axes.add_patch(Rectangle((0, y + 0.06), 1.6, 0.88, **STYLES[claim.verdict]))
      is_light = claim.verdict in ("excluded beyond the margin", "undecided")
      color = "black" if is_light else "white"
      axes.text(0.8, y + 0.5, claim.name, ha="center", va="center", fontsize=9, color=color)
      text = textwrap.shorten(claim.claim, 100).replace("n_eff", r"$n_\mathrm{eff}$")
      axes.text(1.9, y + 0.5, text, va="center", fontsize=10)
      y += 1
  axes.set(xlim=(-0.1, 24), ylim=(y + 0.2, 0))
  axes.set_axis_off()
  counts = collections.Counter(claim.verdict for claim in claims)
  handles = [
    Patch(label=f"{verdict} ({counts[verdict]})", **style)
    for verdict, style in STYLES.items()
    if counts[verdict]
  ]
  legend_outside(axes, handles=handles, title="verdict")
