"""Writes the table of README.md: python -m experiments.quickstart.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

import functools
import pathlib

from experiments.quickstart.sweep import RUNS
from experiments.testbed import report

tables = functools.partial(report.table_of_rises, labels=list(RUNS), starts="quickstart")
draw = functools.partial(report.draw_rises, labels=list(RUNS))

if __name__ == "__main__":
  # The longer warm starts have the same first 150 steps as the quickstart of the same seed.
  report.write_page(pathlib.Path(__file__).parent, tables, draw=draw)
