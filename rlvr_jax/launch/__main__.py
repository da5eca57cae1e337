"""Launches a run, and the samplers of its fleet if it has any.

  python -m rlvr_jax.launch local start --name=try \\
    -- --config=configs/quickstart.py --workdir=runs/try
  python -m rlvr_jax.launch tpu_vm start --name=fade --type=v5litepod-64 --zone=us-west4-a --spot \\
    -- --config=configs/full_size/fade_qwen25_7b.py --workdir=gs://BUCKET/runs/fade
  python -m rlvr_jax.launch tpu_vm status --name=fade --zone=us-west4-a
  python -m rlvr_jax.launch local start --name=fleet --processes=1 --samplers=2 -- …

The flags after -- are flags of rlvr_jax.main. --dry_run prints the commands without running them,
except that `tpu_vm stop --all` still lists the machines. The guide is docs/launch.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlvr_jax.launch import local, tpu_vm, xpk
from rlvr_jax.launch.run import (
  Run,
  at_least,
  parse_environment,
  parse_name,
  programs_of,
  sampler_name,
)
from rlvr_jax.launch.shell import LaunchError, Shell, warn

TARGETS = {"local": local, "tpu_vm": tpu_vm, "xpk": xpk}
VERBS = ("start", "status", "logs", "stop")


def make_parser() -> argparse.ArgumentParser:
  """The parser of the part of the command line before `--`."""
  raw = argparse.RawDescriptionHelpFormatter
  parser = argparse.ArgumentParser("rlvr_jax.launch", description=__doc__, formatter_class=raw)
  targets = parser.add_subparsers(dest="target", required=True)
  for name, module in TARGETS.items():
    summary = (module.__doc__ or "").partition("\n")[0]
    target = targets.add_parser(name, help=summary, description=module.__doc__, formatter_class=raw)
    add = target.add_argument
    add("verb", choices=VERBS)
    add("--name", type=parse_name, help="name of the run")
    add("--all", action="store_true", help="for stop, without --name: all runs (tpu_vm: in --zone)")
    add("--dry_run", action="store_true", help="print commands; run none, or only list machines")
    text = "restarts after failures or preemptions"
    add("--retries", type=at_least(0), default=20, help=text)
    add("--env", action="append", default=[], help="NAME=VALUE, set on every host")
    add("--samplers", type=int, help="number of programs that sample for this run; for start")
    text = "FIELD=VALUE of the configuration, for samplers only, such as mesh.tensor=4"
    add("--sampler_config", action="append", default=[], help=text)
    add("--sampler", type=at_least(0), help="for logs: number of a sampler; default: the trainer")
    module.add_flags(target)
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs one verb, such as start, for one target, such as tpu_vm.

  Raises:
    LaunchError: the launch cannot continue; the message says how to fix it.
  """
  separator = [*argv, "--"].index("--")
  args = make_parser().parse_args(argv[:separator])
  flags = tuple(argv[separator + 1 :])
  target, shell = TARGETS[args.target], Shell(dry_run=args.dry_run)
  if args.all != (args.name is None) or (args.all and args.verb != "stop"):
    raise LaunchError("give --name=NAME; or stop every run with `stop --all`, without --name")
  if args.sampler is not None and args.verb != "logs":
    raise LaunchError(
      f"--sampler={args.sampler} goes with `logs` alone; `{args.verb}` concerns the run and all of"
      " its samplers"
    )
  if args.verb == "start":
    run = Run(args.name, flags, parse_environment(args.env), args.retries)
    target.start(programs_of(run, args.samplers, args.sampler_config), args, shell)
    return
  if flags:
    raise LaunchError(f"`{args.verb}` takes no flags of rlvr_jax.main; leave out {' '.join(flags)}")
  if args.all:
    target.stop_all(args, shell)
  elif args.verb == "logs":
    name = args.name if args.sampler is None else sampler_name(args.name, args.sampler)
    target.logs(name, args, shell)
  else:
    {"status": target.status, "stop": target.stop}[args.verb](args.name, args, shell)


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except LaunchError as error:
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    warn("stopped following the run, which continues")
    sys.exit(130)
