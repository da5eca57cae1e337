"""Trains, evaluates or exports a policy; checks or reports what a configuration needs.

  rlvr_jax --config=quickstart --workdir=runs/quickstart

Any field can be set on the command line, such as --config.seed=1. The same command on the same
workdir resumes a run that was stopped or killed. Without --mode, the program trains. Pages in the
package explain the other modes:

  --mode=eval          docs/evaluation.md
  --mode=export        docs/checkpoints.md
  --mode=fits, costs   docs/costs.md
  --mode=tune          docs/tuning.md
  --mode=check         docs/install.md; docs/tpu.md for Cloud TPUs
  --mode=sample        docs/fleet.md
  --mode=sweep         docs/sweeps.md
  --mode=view          docs/view.md

On several hosts, run the same command on each host with --distributed and a workdir that all hosts
can access. If the cluster does not identify the processes, use --coordinator, --num_processes and
--process_id.
"""

from __future__ import annotations

import sys

from absl import app, flags
from ml_collections import config_flags

import rlvr_jax
from rlvr_jax.train.cluster import process
from rlvr_jax.train.setup import config_file

_MODE = flags.DEFINE_enum(
  "mode",
  "train",
  ["train", "sample", "check", "eval", "export", "fits", "costs", "tune", "sweep", "view"],
  "What to do.",
)
_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Recipe's name, or FILE.py.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for all output files.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Workdir of a run, or RUN/checkpoints/STEP.")
_SWEEP = flags.DEFINE_string("sweep", None, "Python file whose get_sweep() lists the runs.")
_MINUTES = flags.DEFINE_float(
  "minutes", None, "Time limit of a sweep, after which it exits with status 3.", 0.0
)
_LENGTHS = flags.DEFINE_string(
  "lengths", None, "Lengths of responses for costs and tune, such as lognormal(mean=600)."
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
  "stopped_status", 0, "Exit status of a training run that a signal stops early.", 0
)
_BESIDE = flags.DEFINE_string("beside", None, "Workdir of a second run to view beside the first.")
_BATCHES = flags.DEFINE_string(
  "batches", None, "Batches in the file: 0,10:20,-1 or all; default: first, last, 8 in between."
)
_SERVE = flags.DEFINE_bool(
  "serve", False, "Serve the page of --mode=view, with all batches, on 127.0.0.1."
)
_PORT = flags.DEFINE_integer("port", None, "Port for --serve; default: any free port.", 0, 65535)
_TRUST_RUN = flags.DEFINE_bool(
  "trust_run", False, "Run code outside of this package that a run's config.json names."
)
_PARENT = flags.DEFINE_integer("parent", None, "Id of the parent process; this one ends with it.")

_HELP = """rlvr_jax trains, evaluates and exports policies, for instance by

  rlvr_jax --config=quickstart --workdir=runs/quickstart

  --config=RECIPE      a recipe's name or your own FILE.py; any field can be set, --config.seed=1
  --workdir=FOLDER     for all output files; the same command resumes a run
  --mode=MODE          train (default), sample, check, eval, export, fits, costs, tune, sweep, view
  --checkpoint=RUN     the run to evaluate or to export

All flags: rlvr_jax --help. A first run, explained: {page}"""


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    sys.exit(f"error: unexpected arguments: {argv[1:]}; write --config.field=value")
  if not _WORKDIR.value and _MODE.value not in ("fits", "costs"):
    sys.exit("error: --workdir is missing; add --workdir=FOLDER, such as runs/mine")
  if _PARENT.value:
    process.end_with_parent(_PARENT.value)
  process.keep_freed_memory()  # before jax allocates anything
  process.collect_garbage_less_often()
  # Imported here, so that --help and a misspelled field answer immediately.
  from rlvr_jax.train.cluster import multihost

  coordinates = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  if _DISTRIBUTED.value or coordinates != (None, None, None):
    if _MODE.value == "sweep":
      sys.exit(
        "error: a run of a sweep has one process: leave out --distributed and the process flags"
      )
    try:
      multihost.initialize(*coordinates)
    except (ValueError, RuntimeError) as error:
      process.exit_immediately(f"error: {error}")  # jax would wait for the other processes
  with multihost.exit_on_error():
    return run()


def run() -> int:
  """Runs the chosen mode; returns the exit status. Errors end the process with a message."""
  try:
    from rlvr_jax.commands import choose
    from rlvr_jax.commands.check import PreflightError
    from rlvr_jax.commands.sweep import UNFINISHED_STATUS, SweepError, TimeLimitError
    from rlvr_jax.commands.train import FAILURES
    from rlvr_jax.train.cluster import multihost

    action = choose.prepare_command(
      _MODE.value,
      _CONFIG.value,
      _WORKDIR.value,
      _CHECKPOINT.value,
      _TOPOLOGY.value,
      profile=_PROFILE.value,
      tracked_by=_TRACKERS.value,
      sweep_file=_SWEEP.value,
      argv=sys.argv,
      minutes=_MINUTES.value,
      lengths=_LENGTHS.value,
      beside=_BESIDE.value,
      batches=_BATCHES.value,
      serve=_SERVE.value,
      port=_PORT.value,
    )
  except (ImportError, ValueError, OSError) as error:
    sys.exit(f"error: {process.describe_error(error)}")
  except (AttributeError, KeyError) as error:
    if message := config_file.missing_field(error):
      sys.exit(f"error: {message}")
    raise
  if _MODE.value in ("train", "sample", "check", "eval"):  # an export is read by other programs
    process.enable_compilation_cache(str(_WORKDIR.value))
    process.quiet_compiler()
  try:
    action()
  except TimeLimitError:
    multihost.exit_together(UNFINISHED_STATUS)
  except process.EndRequestedError:
    multihost.exit_together(_STOPPED_STATUS.value)
  except (*FAILURES, PreflightError, SweepError) as error:
    multihost.leave(f"failed ({error})")
    process.exit_immediately(f"error: {process.describe_error(error)}")
  except KeyboardInterrupt:
    sys.exit("interrupted; rerun the same command to resume")
  return 0


def parse_flags(argv: list[str]) -> list[str]:
  """Like `config_file.parse_flags`; without any flag, prints a short help and exits."""
  if len(argv) > 1:
    return config_file.parse_flags(argv)
  sys.exit(_HELP.format(page=rlvr_jax.page("first_run.md")))


if __name__ == "__main__":
  process.open_closed_streams()
  app.run(main, flags_parser=parse_flags)
