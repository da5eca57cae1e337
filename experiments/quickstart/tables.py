"""Writes the table of README.md: python -m experiments.quickstart.tables.

With --workdir, of a sweep, it replaces results.json by the sweep's runs first.
"""

import functools
import pathlib

from experiments.quickstart.sweep import RUNS
from experiments.testbed import report

tables = functools.partial(report.table_of_rises, labels=list(RUNS), starts="quickstart")

if __name__ == "__main__":
  # The longer warm starts have the same first 150 steps as the quickstart of the same seed.
  report.write_rises(pathlib.Path(__file__).parent, list(RUNS), starts="quickstart")
