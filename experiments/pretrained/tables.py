"""Writes the table of README.md: python -m experiments.pretrained.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

import functools
import pathlib

from experiments.pretrained.sweep import RUNS
from experiments.testbed import report

tables = functools.partial(report.table_of_rises, labels=list(RUNS), starts="pretrained")
draw = functools.partial(report.draw_rises, labels=list(RUNS))

if __name__ == "__main__":
  report.write_page(pathlib.Path(__file__).parent, tables, draw=draw)
