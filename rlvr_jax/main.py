"""Trains, evaluates or exports a policy; checks or reports what a configuration needs.

  python -m rlvr_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Any field can be set on the command line, such as --config.seed=1. The same command on the same
workdir resumes a run that was stopped or killed. For --mode=eval, export, fits and costs see
docs/models.md, for --mode=check and Cloud TPUs docs/tpu.md, for --mode=sweep docs/sweeps.md.

On several hosts, run it on each with --distributed and a workdir that all of them can access. If
the cluster does not identify the processes, use --coordinator, --num_processes and --process_id.
"""

from __future__ import annotations

import signal
import sys

from absl import app, flags
from ml_collections import config_flags

from rlvr_jax.train.cluster import process
from rlvr_jax.train.setup import config_file

_MODE = flags.DEFINE_enum(
  "mode", "train", ["train", "check", "eval", "export", "fits", "costs", "sweep"], "What to do."
)
_CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all output files.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run, or RUN/checkpoints/STEP.")
_SWEEP = flags.DEFINE_string("sweep", None, "Python file whose get_sweep() lists the runs.")
_MINUTES = flags.DEFINE_float(
  "minutes", None, "Limit of a sweep; it then exits with status 3.", 0.0
)
_TOPOLOGY = flags.DEFINE_string("topology", None, "TPU slice to compile for, such as v5e:4x4.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Run in several processes (TPU pod, SLURM).")
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "host:port, a free port of process 0's host."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes of the run.", 1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process.", 0)
_PROFILE = flags.DEFINE_string("profile", "", "Updates to trace with jax.profiler, such as 10:13.")
_TRACKERS = flags.DEFINE_list("trackers", [], "Where to copy the metrics: wandb, trackio.")
_STOPPED_STATUS = flags.DEFINE_integer(
  "stopped_status", 0, "Exit status of a training run that a signal stopped early.", 0
)
_PARENT = flags.DEFINE_integer("parent", None, "Process with whose end this one ends.")

_HELP = """rlvr_jax trains, evaluates and exports policies, for instance by

  rlvr_jax --config=configs/quickstart.py --workdir=runs/quickstart

  --config=FILE        the recipe; any field can be set, such as --config.seed=1
  --workdir=FOLDER     for all output files; the same command resumes a run
  --mode=MODE          train (without it), check, eval, export, fits, costs or sweep
  --checkpoint=RUN     the run to evaluate or to export

All flags: rlvr_jax --help. A first run, explained: docs/first_run.md"""


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    sys.exit(f"error: unexpected arguments: {argv[1:]}; write --config.field=value")
  if not _WORKDIR.value and _MODE.value not in ("fits", "costs"):
    sys.exit("error: --workdir is missing; add --workdir=FOLDER, such as runs/mine")
  if _STOPPED_STATUS.value:  # started by launch, which outlives the terminal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
  if _PARENT.value:
    process.end_with(_PARENT.value)
  process.keep_freed_memory()  # before jax allocates anything
  # Imported here, so that --help and a misspelled field answer immediately.
  from rlvr_jax.train.cluster import multihost

  coordinates = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  if _DISTRIBUTED.value or coordinates != (None, None, None):
    if _MODE.value == "sweep":
      sys.exit(
        "error: a run of a sweep has one process: leave out --distributed and the flags of"
        " processes"
      )
    try:
      multihost.initialize(*coordinates)
    except (ValueError, RuntimeError) as error:
      process.exit_immediately(f"error: {error}")  # jax would wait for the others to end
  with multihost.exit_on_error():
    return run()


def run() -> int:
  """Runs the chosen mode; returns the exit status. Errors end the process with a message."""
  try:
    from rlvr_jax.commands import choose
    from rlvr_jax.commands.check import PreflightError
    from rlvr_jax.commands.sweep import TO_DO, SittingOverError, SweepError
    from rlvr_jax.commands.train import FAILURES
    from rlvr_jax.train.cluster import multihost

    given = (_WORKDIR.value, _CHECKPOINT.value, _TOPOLOGY.value, _PROFILE.value, _TRACKERS.value)
    of_sweep = (_SWEEP.value, sys.argv, _MINUTES.value)
    action = choose.prepared(_MODE.value, _CONFIG.value, *given, *of_sweep)
  except (ImportError, ValueError, OSError) as error:
    sys.exit(f"error: {process.described(error)}")
  except (AttributeError, KeyError) as error:
    if message := config_file.missing_field(error):
      sys.exit(f"error: {message}")
    raise
  if _MODE.value in ("train", "check", "eval"):  # an export is read by other programs
    process.keep_compiled(str(_WORKDIR.value))
  try:
    action()
  except SittingOverError:
    multihost.end_in_order(TO_DO)
  except process.EndRequestedError:
    multihost.end_in_order(_STOPPED_STATUS.value)
  except (*FAILURES, PreflightError, SweepError) as error:
    multihost.leave(f"failed ({error})")
    process.exit_immediately(f"error: {process.described(error)}")
  except KeyboardInterrupt:
    sys.exit("interrupted; rerun the same command to resume")
  return 0


def parse_flags(argv: list[str]) -> list[str]:
  """As `config_file.parse_flags`; a command without any flag prints the few that one needs."""
  return config_file.parse_flags(argv) if len(argv) > 1 else sys.exit(_HELP)


if __name__ == "__main__":
  process.open_closed_streams()
  app.run(main, flags_parser=parse_flags)
