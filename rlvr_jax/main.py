"""Trains the policy that a configuration describes.

  python -m rlvr_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Any field can be set on the command line, --config.seed=1; a misspelt one is an error that names
the near ones. The same command on the same workdir goes on where it was stopped or killed.

On several hosts, with a workdir that all of them see, run it on each with --distributed; where the
cluster does not tell who is who, with --coordinator, --num_processes and --process_id instead.
"""

from __future__ import annotations

import os
import sys

from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all that the run writes.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "One of several processes (TPU pod, SLURM).")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port, a free port of process 0.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes of the run.", 1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this is.", 0)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}; write --config.field=value")
  # Imported here, so that --help and a misspelt field answer at once.
  from rlvr_jax.train.host import keep_freed_memory
  keep_freed_memory()  # before jax allocates anything
  from rlvr_jax.train import multihost

  place = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  if _DISTRIBUTED.value or place != (None, None, None):
    try:
      multihost.initialize(*place)
    except (ValueError, RuntimeError) as error:
      sys.exit(f"error: {error}")
  with multihost.failing_at_once():
    run()


def run() -> None:
  """Builds and trains; a mistake ends the process with a message."""
  from rlvr_jax.train import components, loop

  try:
    parts = components.build(_CONFIG.value)
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  try:
    loop.train(parts, str(_WORKDIR.value))
  except loop.FAILURES as error:
    # Libraries' complaints would bury the message; all that was open is closed by now.
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w", encoding="utf-8")
    print(f"error: {error}", file=stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
  except KeyboardInterrupt:
    sys.exit("interrupted; rerun the same command to go on")


def parse_flags(argv: list[str]) -> list[str]:
  """Parses all flags; a field that the configuration lacks ends the process with a message."""
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError) as error:
    cause = error.args[0]
    text = str(cause.args[0] if isinstance(cause, KeyError) else cause)
    near = text.replace("\nDid", "; did")
    sys.exit(f"error: the configuration has no field {near} (configs/base.py lists them)")


if __name__ == "__main__":
  app.run(main, flags_parser=parse_flags)
