"""Prints the table of README.md, from results.json or from the workdir of a sweep.

  python -m experiments.pretrained.tables --workdir=runs/experiment_pretrained

Run it from the repository root. With a workdir it rewrites results.json and curves.png.
"""

import functools
import pathlib

from experiments.pretrained.sweep import RUNS
from experiments.testbed import report

tables = functools.partial(report.table_of_rises, labels=list(RUNS), starts="pretrained")

if __name__ == "__main__":
  report.print_rises(pathlib.Path(__file__).parent, list(RUNS), starts="pretrained")
