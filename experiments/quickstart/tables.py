"""Prints the table of README.md, from results.json or from the workdir of a sweep.

  python -m experiments.quickstart.tables --workdir=runs/experiment_quickstart

Run it from the repository root. With a workdir it rewrites results.json and curves.png.
"""

import functools
import pathlib

from experiments.quickstart.sweep import RUNS
from experiments.testbed import report

tables = functools.partial(report.table_of_rises, labels=list(RUNS), starts="quickstart")

if __name__ == "__main__":
  # The longer warm starts have the same first 150 steps as the quickstart of the same seed.
  report.print_rises(pathlib.Path(__file__).parent, list(RUNS), starts="quickstart")
