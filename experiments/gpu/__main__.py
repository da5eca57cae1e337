"""Runs on one GPU what only a GPU can show, in stages, the most telling first.

  python -m experiments.gpu --out=runs/gpu
  python -m experiments.gpu --out=runs/gpu --model=SmolLM2-135M.gguf --stages=model

from the repository root. Every stage is a process with a time limit. When it ends, or is killed
with its children, a line of results.jsonl says what it found. The exit status is 1 if a stage
failed. With --tiny all sizes are tiny, to try the program on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

# name → seconds that it may take. Ten minutes give most of the answer.
LIMITS = {
  "device": 60,
  "numerics": 240,
  "w4": 90,
  "quickstart": 180,
  "w1": 75,
  "half_a_billion": 150,
  "model": 240,
  "w2": 75,
  "trl": 240,
  "systems": 400,
}
RESULTS = "results.jsonl"


def run_stage(name: str, limit_s: float, out: pathlib.Path, arguments: Sequence[str]) -> dict:
  """Runs one stage in a process of its own; returns its line of the results."""
  command = [sys.executable, "-m", "experiments.gpu.stages", name, f"--out={out}", *arguments]
  began = time.monotonic()
  log = out / f"{name}.log"
  with log.open("w", encoding="utf-8") as output:
    process = subprocess.Popen(
      command, stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True
    )
    try:
      printed, _ = process.communicate(timeout=limit_s)
      status = "ok" if process.returncode == 0 else f"failed with status {process.returncode}"
    except subprocess.TimeoutExpired:
      status, printed = f"killed after {limit_s:g} s", ""
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that it left, too
      process.wait()
  result: dict[str, Any] = {"stage": name, "status": status}
  lines = printed.strip().splitlines()
  with contextlib.suppress(ValueError, IndexError):
    result |= json.loads(lines[-1])
  return result | {"seconds": round(time.monotonic() - began, 1), "log": log.name}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the stages; returns 1 if one failed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the results")
  parser.add_argument("--stages", default=",".join(LIMITS), help="names, separated by commas")
  parser.add_argument("--model", default="", help="GGUF file or folder of a real model")
  parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a CPU")
  args = parser.parse_args(argv)
  names = args.stages.split(",")
  if unknown := sorted({*names} - {*LIMITS}):
    parser.error(f"--stages names {unknown}; allowed: {list(LIMITS)}")
  if args.model and not pathlib.Path(args.model).exists():
    parser.error(f"--model={args.model} does not exist; give a GGUF file, or a checkpoint's folder")
  args.out.mkdir(parents=True, exist_ok=True)
  arguments = [*([f"--model={args.model}"] if args.model else []), *(["--tiny"] * args.tiny)]
  failed = []
  with (args.out / RESULTS).open("a", encoding="utf-8") as file:
    for name in names:
      result = run_stage(name, LIMITS[name], args.out, arguments)
      line = json.dumps(result)
      print(line, flush=True)
      file.write(line + "\n")
      file.flush()
      if result["status"] not in ("ok", "skipped"):
        failed.append(name)
  if failed:
    print(f"failed: {', '.join(failed)}; see the logs in {args.out}", file=sys.stderr)
  return int(bool(failed))


if __name__ == "__main__":
  sys.exit(main())
