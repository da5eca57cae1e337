"""Writes the tables and the figure of README.md: python -m experiments.dialogues.tables.

With --workdir, of a sweep, it adds the sweep's runs to results.json first.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.dialogues.sweep import RUNS
from experiments.testbed import report
from experiments.testbed.report import Result, cell, plot_runs, runs_of
from rlvr_jax.configs import quickstart_dialogue
from rlvr_jax.data.guess import optimal_success
from rlvr_jax.evaluate import compare, curves
from rlvr_jax.evaluate.compare import METRIC, final_value, interval_cell
from rlvr_jax.evaluate.figures import method_style

HOME = pathlib.Path(__file__).parent
CONFIG = quickstart_dialogue.get_config()
TURNS = range(1, CONFIG.environment.max_turns + 1)


def best_play(turns: int) -> float:
  """Share of the numbers that bisection finds in so many turns."""
  game = CONFIG.task.kwargs
  return optimal_success(game.low, game.high, turns)


def solved(results: Sequence[Result], index: int) -> dict[int, list[float]]:
  """Shares of held-out dialogues that were correct in so many turns, by run, at an evaluation."""
  return {t: [r["evaluations"][f"eval/solved_in_turns/{t}"][index] for r in results] for t in TURNS}


def tables(results: Sequence[Result]) -> str:
  """Markdown tables: runs; and what is solved by number of turns, against best play."""
  by_label = runs_of(results, RUNS)
  runs = {
    f"{label}, seed {run['seed']}": [interval_cell(run, 0), interval_cell(run, -1)]
    for label, of_label in by_label.items()
    for run in of_label
  }
  for label, of_label in by_label.items():
    starts = [run["evaluations"][METRIC][0] for run in of_label]
    ends = [final_value(run) for run in of_label]
    runs[f"**{label}, mean**"] = [cell(starts), cell(ends)]
  by_turns = {"best play": [f"{best_play(t):.3f}" for t in TURNS]}
  by_turns["start"] = [cell(x) for x in solved(by_label["GRPO"], 0).values()]
  for label, of_label in by_label.items():
    by_turns[f"{label}, end"] = [cell(x) for x in solved(of_label, -1).values()]
  return "\n\n".join(
    [
      compare.markdown_table(["start", "end"], runs),
      compare.markdown_table([f"in {t} turn{'s' * (t > 1)}" for t in TURNS], by_turns),
      report.table(results, list(RUNS), {"pass@1 at the end": final_value}, compared=final_value),
    ]
  )


def draw(results: Sequence[Result], home: pathlib.Path) -> None:
  """Saves a figure: held-out pass@1 over updates, and by number of turns at the end."""
  by_label = runs_of(results, RUNS)
  with curves.save_figure(home / "curves.png", 1, 2, size=(9, 3.4), dpi=100) as (left, right):
    plot_runs(left, by_label, METRIC)
    left.axhline(best_play(max(TURNS)), color="black", linestyle="--")
    left.set_ylim(0, 1.05)
    right.plot(TURNS, [best_play(t) for t in TURNS], "k--", label="best play")
    present = [(label, of_label) for label, of_label in by_label.items() if of_label]
    for index, (label, of_label) in enumerate(present):
      ends = [np.mean(x) for x in solved(of_label, -1).values()]
      right.plot(TURNS, ends, label=label, **method_style(index))
    if results:
      start = [np.mean(x) for x in solved(results, 0).values()]
      right.plot(TURNS, start, color="gray", linestyle=":", label="warm start")
    right.set(xlabel="turns", ylabel="solved at the end", ylim=(0, 1.05), xticks=list(TURNS))
    right.legend(fontsize="small")


if __name__ == "__main__":
  report.write_page(HOME, tables, draw=draw, labels=list(RUNS))
