"""The stages of `python -m experiments.gpu`: each prints one JSON object, its last line."""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
_COMPILED = re.compile(r"Finished XLA compilation of jit\(([^)]+)\)")
# Programs of a run that are compiled for several shapes: kinds of prefill, and sizes of an insert.
_SEVERAL = {"burst": 4, "prefill": 4, "insert": 4}
_SYSTEMS = {
  "salt": {"reweighting": "salt"},
  "p3o": {"loss": "p3o", "schedule": "updates_per_refresh(batches=4)"},
  "fade": {"advantage": "fade"},
  "mu_grpo": {
    "loss": "ppo_clip(epsilon_low=1.0, epsilon_high=4.0)",
    "veto.enabled": True,
    "schedule": "stages(count=2)",
  },
}


class Skipped(Exception):
  """A stage that cannot run here, and why."""


class Failed(Exception):
  """A stage whose result is not what it must be."""


def run(command: Sequence[str], **variables: str) -> str:
  """Runs a program from the repository root; returns what it printed."""
  environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
  done = subprocess.run(
    [sys.executable, *command], env=environment | variables, cwd=ROOT, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip
  print(done.stdout, file=sys.stderr)
  if done.returncode:
    raise Failed(f"{' '.join(command)}: status {done.returncode}: {done.stdout[-500:]}")
  return done.stdout


def last_json(printed: str) -> dict[str, Any]:
  return json.loads(printed.strip().splitlines()[-1])


# --- the stages -----------------------------------------------------------------------------------


def device(args: argparse.Namespace) -> dict[str, Any]:
  """The device, and its rates: products in TFLOP/s, a copy in TB/s read and written."""
  import jax
  import jax.numpy as jnp

  gpu = jax.devices()[0]
  size, repeats = (256, 2) if args.tiny else (8192, 20)

  def seconds(function: Callable[..., Any], *operands: Any) -> float:
    jax.block_until_ready(function(*operands))
    began = time.perf_counter()
    for _ in range(repeats):
      out = function(*operands)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / repeats

  found: dict[str, Any] = {"kind": gpu.device_kind, "jax": jax.__version__}
  found["memory_gib"] = round((gpu.memory_stats() or {}).get("bytes_limit", 0) / 2**30, 1)
  for name, dtype, precision in (
    ("bfloat16", jnp.bfloat16, "default"),
    ("float32", jnp.float32, "highest"),
    ("float32 by default", jnp.float32, "default"),
  ):
    square = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision))
    flops = 2 * size**3 / seconds(product, square, square)
    found[f"{name}, TFLOP/s"] = float(f"{flops / 1e12:.3g}")
  copied = jnp.ones(size * size, jnp.float32)
  rate = 2 * copied.nbytes / seconds(jax.jit(lambda x: x + 1), copied)
  return found | {"copy, TB/s": float(f"{rate / 1e12:.3g}")}


def numerics(args: argparse.Namespace) -> dict[str, Any]:
  """Losses, gradients, Grams and recorded log-probabilities, against float64 on the host."""
  compute = ["-m", "experiments.gpu.numerics", f"--out={args.out}"]
  kinds = [("float32", "auto"), ("float32", "reference"), ("bfloat16", "auto")]
  if args.tiny:
    compute.append("--methods=grpo,salt_streaming")
    kinds.remove(("float32", "reference"))  # which auto is on a CPU
  run([*compute, "--dtype=float64"], JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")
  found = {}
  for dtype, kind in kinds:
    printed = run([*compute, f"--dtype={dtype}", f"--attention={kind}"])
    found[f"{dtype}, attention {kind}"] = last_json(printed)
  for name, errors in found.items():
    for what, error in errors.items():
      # The signs of a sketch are others in float64.
      allowed = 0.3 if "sketch" in what or "bfloat16" in name else 3e-4
      allowed = 0 if "differ" in what else allowed
      if not error <= allowed:
        raise Failed(f"{name}: {what} has an error of {error}, above {allowed}: {found}")
  return found


def quickstart(args: argparse.Namespace) -> dict[str, Any]:
  """The quickstart twice: it learns, and the second run has the bits of the first."""
  fields = ["--config.num_updates=2", "--config.warm_start.num_steps=5"] if args.tiny else []
  rises, records, seconds = [], [], []
  for number in (1, 2):
    workdir = args.out / f"quickstart_{number}"
    began = time.monotonic()
    run(["-m", "rlvr_jax.main", "--config=configs/quickstart.py", f"--workdir={workdir}", *fields])
    seconds.append(round(time.monotonic() - began, 1))
    of_run = read_records(workdir)
    passes = [x["eval/pass@1"] for x in of_run if "eval/pass@1" in x]
    rises.append(round(passes[-1] - passes[0], 4))
    records.append([without_timings(x) for x in of_run])
  found = {"rise": rises, "seconds_of_runs": seconds, "equal": records[0] == records[1]}
  if not found["equal"] or (min(rises) < 0.43 and not args.tiny):
    raise Failed(f"the rise must be 0.43 at least, and both runs equal: {found}")
  return found


def step(args: argparse.Namespace, workload: str, dtype: str, *more: str) -> dict[str, Any]:
  """A workload of `grpo_step.py`, with a trace of its last step."""
  trace = args.out / f"trace_{workload}{''.join(more)}"
  steps = "1" if args.tiny else "8"
  flags = [f"--workload={workload}", f"--steps={steps}", f"--trace={trace}", *more]
  command = ["experiments/benchmarks/grpo_step.py", f"--compute_dtype={dtype}", *flags]
  found = last_json(run(command))
  kept = (
    *("step_s_median", "rollout_s_median", "update_s_median", "first_step_s", "import_s"),
    *("update_sequence_tokens_per_s", "rollout_new_tokens_per_s", "peak_device_mib"),
  )
  return {name: found[name] for name in kept} | {"trace": sum_kernels(trace)}


def half_a_billion(args: argparse.Namespace) -> dict[str, Any]:
  """The 0.5B shape at 64 and 256 slots."""
  if args.tiny:
    raise Skipped("--tiny: it takes a GPU's memory")
  return {slots: step(args, "w6", "bfloat16", f"--slots={slots}") for slots in (64, 256)}


def trl(args: argparse.Namespace) -> dict[str, Any]:
  """TRL's steps on the same device, in the same precision."""
  if importlib.util.find_spec("trl") is None:
    raise Skipped("trl is not installed")
  found = {}
  for workload, more in (("w4", ["--bf16"]), ("w1", []), ("w2", [])):
    command = ["experiments/benchmarks/peers.py", "--peer=trl", f"--workload={workload}"]
    where = ["--device=cpu"] if args.tiny else ["--device=cuda"]
    found[workload] = last_json(run([*command, "--steps=3", *where, *more]))
  return found


def model(args: argparse.Namespace) -> dict[str, Any]:
  """GRPO on a real model: the curve, seconds, and compilations."""
  return learn(args, "grpo", {}, num_updates=200)


def systems(args: argparse.Namespace) -> dict[str, Any]:
  """Each of the four systems on a real model."""
  return {name: learn(args, name, fields, num_updates=60) for name, fields in _SYSTEMS.items()}


def learn(
  args: argparse.Namespace, name: str, fields: Mapping[str, Any], *, num_updates: int
) -> dict[str, Any]:
  """Trains the model on sums, 16 × 16; tiny: 2 updates of 2 × 4."""
  if not args.model:
    raise Skipped("no --model is given")
  size = (2, 2, 4) if args.tiny else (num_updates, 16, 16)
  settings = {
    "model.checkpoint": str(checkpoint(args)),
    "model.overrides.compute_dtype": "float32" if args.tiny else "bfloat16",
    "num_updates": size[0],
    "batch.prompts": size[1],
    "batch.group_size": size[2],
    "max_response_length": 24,
    "evaluation.every": size[0] if args.tiny else 25,
    "checkpoint.every": size[0],
  }
  workdir = args.out / f"model_{name}"
  began = time.monotonic()
  flags = [f"--config.{field}={value}" for field, value in (settings | dict(fields)).items()]
  command = ["-m", "rlvr_jax.main", "--config=configs/pretrained.py", f"--workdir={workdir}"]
  printed = run([*command, *flags], JAX_LOG_COMPILES="1")
  seconds = round(time.monotonic() - began, 1)
  records = read_records(workdir)
  curve = [(x["step"], round(x["eval/pass@1"], 4)) for x in records if "eval/pass@1" in x]
  counts = collections.Counter(_COMPILED.findall(printed))
  again = {x: n for x, n in counts.items() if n > _SEVERAL.get(x.removeprefix("jit_"), 1)}
  sums = {k: round(sum(x.get(k, 0) for x in records), 1) for k in records[-1] if "seconds" in k}
  return {"curve": curve, "seconds_of_run": seconds, "compiled_again": again, "phases": sums}


def checkpoint(args: argparse.Namespace) -> pathlib.Path:
  """The folder of --model; a GGUF file is converted once."""
  given = pathlib.Path(args.model)
  if given.is_dir():
    return given
  folder = args.out / "converted_model"
  if not folder.exists():
    run(["-m", "rlvr_jax.models.gguf", str(given), str(folder)])
  return folder


# --- records and traces ---------------------------------------------------------------------------


def read_records(workdir: pathlib.Path) -> list[dict[str, Any]]:
  lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  return [json.loads(line) for line in lines]


def without_timings(record: Mapping[str, Any]) -> dict[str, Any]:
  timed = re.compile(r"time/|seconds|per_s|memory|elapsed")
  return {name: value for name, value in record.items() if not timed.search(name)}


def sum_kernels(folder: pathlib.Path, most: int = 12) -> dict[str, Any]:
  """Sums the device's events of a trace by kernel: launches, and the share of time it was busy."""
  import gzip

  paths = sorted(folder.glob("**/*.trace.json.gz"))
  if not paths:
    return {}
  with gzip.open(paths[-1]) as file:
    events = json.load(file)["traceEvents"]
  named = lambda kind: {
    (e["pid"], e.get("tid")): e["args"]["name"]
    for e in events
    if e.get("ph") == "M" and e["name"] == kind
  }
  gpus = {pid for (pid, _), name in named("process_name").items() if "GPU" in name}
  streams = {key for key, name in named("thread_name").items() if key[0] in gpus and "Str" in name}
  spent: collections.Counter[str] = collections.Counter()
  times: collections.Counter[str] = collections.Counter()
  begins, ends = [], []
  for event in events:
    if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
      spent[event["name"]] += event.get("dur", 0)
      times[event["name"]] += 1
      begins.append(event["ts"])
      ends.append(event["ts"] + event.get("dur", 0))
  if not begins:
    return {}
  return {
    "launches": times.total(),
    "busy": round(spent.total() / (max(ends) - min(begins)), 3),
    "ms": {name[:80]: round(us / 1e3, 2) for name, us in spent.most_common(most)},
  }


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
  "device": device,
  "numerics": numerics,
  "w1": lambda args: step(args, "w1", "float32"),
  "w2": lambda args: step(args, "w2", "float32"),
  "w4": lambda args: step(args, "w1" if args.tiny else "w4", "bfloat16"),
  "quickstart": quickstart,
  "half_a_billion": half_a_billion,
  "trl": trl,
  "model": model,
  "systems": systems,
}


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("stage", choices=list(STAGES))
  parser.add_argument("--out", required=True, type=pathlib.Path)
  parser.add_argument("--model", default="")
  parser.add_argument("--tiny", action="store_true")
  args = parser.parse_args()
  args.out = args.out.resolve()
  os.environ.setdefault("JAX_PLATFORMS", "cpu" if args.tiny else "cuda,cpu")
  try:
    print(json.dumps(STAGES[args.stage](args)))
  except Skipped as why:
    print(json.dumps({"status": "skipped", "why": str(why)}))
  except Failed as why:
    print(json.dumps({"why": str(why)}))
    return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
