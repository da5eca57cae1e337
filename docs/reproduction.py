"""Writes the tables and figures of docs/reproduction.md from the committed results.

Run it in the root of the repository:

python -m docs.reproduction

The text between the tables is written by hand and contains no number from a result. Comparisons
that decide no claim are written into experiments/COMPARISONS.md.
"""

from __future__ import annotations

import pathlib

from docs.claims import CLAIMS, DECIDED_BY, MORE, PAPERS
from docs.deciding import Comparison, Task, difference_cell, differences, draw, holm_p, verdict
from docs.tables import between_marks
from rlvr_jax.evaluate.compare import markdown_table

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
OTHERS = ROOT / "experiments" / "COMPARISONS.md"
FIGURES = ROOT / "docs" / "images"
COMMAND = "python -m docs.reproduction"
_OTHERS_INTRODUCTION = f"""# Comparisons that decide no claim

The text of [docs/reproduction.md](../docs/reproduction.md) speaks of them, and explains tasks,
symbols and intervals. "matched" is the setting of `mismatch` with an exact sampler and four updates
per refresh. `{COMMAND}` writes this page from the committed results.
"""


def verdict_of(name: str) -> str:
  """The verdict on a claim, or on a part of a claim: one of `claims.VERDICTS`."""
  decided = CLAIMS[name].decided
  return verdict(decided) if isinstance(decided, Comparison) else decided


def _link(task: Task, to_experiments: str) -> str:
  return f"[{task.name}]({to_experiments}{task.page})"


def claim_table(paper: str) -> str:
  """A Markdown table of a paper's claims, their verdicts, and the comparisons that decide them.

  Args:
    paper: a key of `PAPERS`.
  """
  rows, adjusted = {}, holm_p(DECIDED_BY)
  for name, claim in CLAIMS.items():
    if not name.startswith(paper):
      continue
    cells = 5 * [""]
    if name in DECIDED_BY:
      found = DECIDED_BY[name]
      digits = 3 if found.margin < 1 else 1
      cells = [
        f"{found.quantity}: *{found.arm.name}* minus *{found.control.name}*",
        difference_cell(differences(found.arm, found.control), digits),
        f"{adjusted[name]:.2g}" if name in adjusted else "–",
        f"{found.margin:g}" + ("" if found.plan else ", set later"),
        _link(found.task, "../experiments/"),
      ]
    rows[name] = [claim.text, f"**{verdict_of(name)}**", *cells]
  header = ["claim", "verdict", "compared", "difference, 95 %", "p, Holm", "margin", "task"]
  return markdown_table(header, rows, "id")


def more_table(paper: str) -> str:
  """A Markdown table of the comparisons that concern a paper's claims but decide no claim."""
  lines = ["| id | compared | difference, 95 % | task |", "|---|---|---|---|"]
  for row in MORE:
    if row.claim.startswith(paper):
      control = f" minus *{row.control}*" if row.control else ""
      number = difference_cell(row.differences())
      lines.append(
        f"| {row.claim} | {row.quantity}: *{row.arm}*{control} | {number} | {_link(row.task, '')} |"
      )
  return "\n".join(lines)


def figure(paper: str) -> pathlib.Path:
  """The path of the figure of a paper's comparisons."""
  return FIGURES / f"reproduction_{paper}.png"


def written() -> str:
  """The text of docs/reproduction.md with updated tables."""
  text = PAGE.read_text(encoding="utf-8")
  for paper in PAPERS:
    text = between_marks(text, f"claims {paper}", f"\n{claim_table(paper)}\n\n")
  return text


def other_comparisons() -> str:
  """The text of experiments/COMPARISONS.md, with the comparisons that decide no claim."""
  tables = "\n\n".join(f"## {title}\n\n{more_table(paper)}" for paper, title in PAPERS.items())
  return f"{_OTHERS_INTRODUCTION}\n{tables}\n"


def main() -> None:
  PAGE.write_text(written(), encoding="utf-8")
  OTHERS.write_text(other_comparisons(), encoding="utf-8")
  for paper in PAPERS:
    draw(figure(paper), {n: found for n, found in DECIDED_BY.items() if n.startswith(paper)})


if __name__ == "__main__":
  main()
