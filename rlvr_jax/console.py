"""The command `rlvr_jax` of an installed package: `python -m rlvr_jax.main` from any folder."""

from __future__ import annotations

import os
import runpy
import sys


def run() -> None:
  """Runs `rlvr_jax.main` with this process's arguments, and ends the process."""
  if not sys.flags.safe_path:  # as python -m does, so that the user's modules are found
    sys.path.insert(0, os.getcwd())
  runpy.run_module("rlvr_jax.main", run_name="__main__", alter_sys=True)
