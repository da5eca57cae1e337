"""Launches a run: ships the commit, starts one process per host, and supervises the run.

  python -m rlvr_jax.launch local start --name=try \\
    -- --config=configs/quickstart.py --workdir=runs/try
  python -m rlvr_jax.launch tpu_vm start --name=fade --type=v5litepod-64 --zone=us-west4-a --spot \\
    -- --config=configs/full_size/fade_qwen25_7b.py --workdir=gs://BUCKET/runs/fade
  python -m rlvr_jax.launch tpu_vm status --name=fade --zone=us-west4-a
  python -m rlvr_jax.launch local start --name=fleet --processes=1 --samplers=2 -- …
  python -m rlvr_jax.launch local scale --name=fleet --samplers=4

The flags after -- are those of rlvr_jax.main. --dry_run prints the commands without running them.
The guide is docs/tpu.md.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from rlvr_jax.launch import fleet, jobset, local, tpu_vm, xpk
from rlvr_jax.launch.package import make_package
from rlvr_jax.launch.run import Run, check_flags, check_sweep, parse_environment, parse_name
from rlvr_jax.launch.shell import LaunchError, Shell, warn
from rlvr_jax.launch.slices import find_slice

TARGETS = {"local": local, "tpu_vm": tpu_vm, "xpk": xpk, "jobset": jobset}
VERBS = ("start", "status", "logs", "scale", "stop")  # without samplers there is no scale


def make_parser() -> argparse.ArgumentParser:
  """Makes the parser of the command line before the program's flags."""
  raw = argparse.RawDescriptionHelpFormatter
  parser = argparse.ArgumentParser("rlvr_jax.launch", description=__doc__, formatter_class=raw)
  targets = parser.add_subparsers(dest="target", required=True)
  for name, module in TARGETS.items():
    summary = (module.__doc__ or "").partition("\n")[0]
    target = targets.add_parser(name, help=summary, description=module.__doc__, formatter_class=raw)
    target.add_argument("verb", choices=[verb for verb in VERBS if hasattr(module, verb)])
    target.add_argument("--name", type=parse_name, required=True, help="name of the run")
    target.add_argument("--dry_run", action="store_true", help="print the commands, run nothing")
    target.add_argument("--allow_dirty", action="store_true", help="ship uncommitted changes too")
    target.add_argument("--retries", type=int, default=20, help="after failures or preemptions")
    target.add_argument("--env", action="append", default=[], help="NAME=VALUE, set on every host")
    module.add_flags(target)
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs one verb of one target.

  Raises:
    LaunchError: the launch cannot continue; the message says how to fix it.
  """
  separator = [*argv, "--"].index("--")
  args = make_parser().parse_args(argv[:separator])
  flags = tuple(argv[separator + 1 :])
  target = TARGETS[args.target]
  package = None
  if args.verb == "start":
    package = make_package(pathlib.Path.cwd(), allow_dirty=args.allow_dirty)
    check_flags(flags, package, on_hosts=target.ON_HOSTS)
  elif flags:
    raise LaunchError(f"{args.verb} takes no flags of the program: {' '.join(flags)}")
  run = Run(args.name, flags, parse_environment(args.env), args.retries, package)
  if args.verb == "start" and "samplers" in args:
    run = fleet.trainer_of(run, args)
  elif args.verb == "scale":
    fleet.check_scale(args)
  if run.is_sweep and package:  # the shipped files are not a checkout that knows its commit
    run = run._replace(environment={"RLVR_JAX_COMMIT": package.version, **run.environment})
    if target.ON_HOSTS:
      check_sweep(run, find_slice(args.type).hosts * args.num_slices)
  getattr(target, args.verb)(run, args, Shell(dry_run=args.dry_run))


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except LaunchError as error:
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    warn("stopped following the run, which continues")
    sys.exit(130)
