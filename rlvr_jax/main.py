"""Trains the policy that a configuration describes.

  python -m rlvr_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Any field can be set on the command line, --config.seed=1; a misspelt one is an error that names
the near ones. The same command on the same workdir goes on where it was stopped or killed.
"""

from __future__ import annotations

import sys

from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all that the run writes.")
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}; write --config.field=value")
  # Imported here, so that --help and a misspelt field answer at once.
  from rlvr_jax.train.host import keep_freed_memory

  keep_freed_memory()  # before jax allocates anything
  from rlvr_jax.rewards import GraderStartError, GradingStoppedError
  from rlvr_jax.train.checkpoint import CheckpointError, WorkdirError
  from rlvr_jax.train.components import build
  from rlvr_jax.train.loop import DynamicSamplingError, NonFiniteError, train
  from rlvr_jax.train.metrics import DiskFullError

  try:
    parts = build(_CONFIG.value)
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  try:
    train(parts, str(_WORKDIR.value))
  except (
    CheckpointError,
    DiskFullError,
    DynamicSamplingError,
    GraderStartError,
    GradingStoppedError,
    NonFiniteError,
    WorkdirError,
  ) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  app.run(main)
