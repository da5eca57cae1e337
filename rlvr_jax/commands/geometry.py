"""A temporary run for measurements of the gradient geometry."""

from __future__ import annotations

import contextlib
import io
import tempfile

import ml_collections

from rlvr_jax.commands.train import train
from rlvr_jax.evaluate.geometry_plots import Measurement, load_geometry
from rlvr_jax.train.build import build


def fresh_geometry(config: ml_collections.ConfigDict) -> list[Measurement]:
  """Runs silently in a temporary folder, and returns the measurements.

  Args:
    config: see `configs/base.py`, with `config.diagnostics.every` set.
  Raises:
    ValueError: `config.diagnostics.every` is 0, or what `train.build.build` raises.
  """
  if not config.diagnostics.every:
    raise ValueError("config.diagnostics.every = 0: the run would not measure; set 1 or more")
  silent = io.StringIO()
  with (
    tempfile.TemporaryDirectory() as workdir,
    contextlib.redirect_stdout(silent),
    contextlib.redirect_stderr(silent),
  ):
    train(build(config), workdir)
    return load_geometry(workdir)
