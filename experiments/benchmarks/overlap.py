"""Gain from overlapping generation and updates; cost of weight syncs and compilation over a run.

  python experiments/benchmarks/overlap.py
  python experiments/benchmarks/overlap.py --updates=12 --repeats=1 --run_updates=8 --run_repeats=1

The model is the quickstart's, from scratch: 8 prompts × 8 rollouts of at most 32 tokens in the
first section, the quickstart's own shapes in the second. Two tables, printed and written to
results/overlap_BACKEND.md, with every repeat in a .json next to it:

  overlap  seconds per update, on-policy and asynchronous, in turn. Grading sleeps --stretch times
           as long as generation and update together in an on-policy run without sleep
  run      weight syncs, agreement checks and compilation over complete runs: ordinary GRPO and
           μ-GRPO, each built anew with jax's caches cleared

Seconds of phases are from the runs' own metrics.jsonl, as means over the updates except the last
and the first `_SKIPPED`, which compile. In an on-policy run phases and idle time add up to the
total; in an asynchronous run generation and grading overlap the trainer's phases, and the recorded
grading time is the trainer's wait. Ratios are taken within each repeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from rlvr_jax.train.cluster.process import keep_freed_memory

keep_freed_memory()

import jax
import ml_collections

from experiments.benchmarks import slow_grader
from experiments.benchmarks.tables import Row, hardware, table
from rlvr_jax.commands import train as runs
from rlvr_jax.configs import mu_grpo, quickstart
from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.rollouts import staleness
from rlvr_jax.train.generation.policies import make_sync
from rlvr_jax.train.setup.build import Parts, build

PHASES = ("generate", "grade", "sync_weights", "optimise", "idle")
SEQUENTIAL = "on-policy"
SCHEDULES = {
  SEQUENTIAL: staleness.on_policy(),
  "asynchronous, max_lag 1": staleness.asynchronous(max_lag=1),
  "asynchronous, max_lag 2": staleness.asynchronous(max_lag=2),
}
RUNS = {
  "GRPO, on-policy": (quickstart, "on_policy"),
  "GRPO, 4 updates per refresh": (
    quickstart,
    "updates_per_refresh(batches=4)",
  ),
  "μ-GRPO, 4 stages": (mu_grpo, "stages(count=4)"),
}
_SKIPPED = 4  # updates
_COMPILATION = "/jax/core/compile/backend_compile_duration"
_TIMED_SYNCS = 20

_NOTES = {
  "overlap": """Seconds per update. `of sequential`: ratio to the on-policy schedule in the same
repeat. `longest phase alone`: that ratio if the on-policy run's longest phase hid all others. `of
the saving`: (1 − of sequential) / (1 − longest phase alone). `lag`: mean, updates.""",
  "run": """Seconds. `weight syncs, in all`: from the runs' records, dispatched and not waited
for; the first compiles. `one weight sync`: waited for on idle devices, with the fingerprint.
`agreement checks`: from the call to its result, including pending work of the devices; the first
compiles. `compiling`: within XLA. `first update`: until it has ended, including all that was
sampled for it.""",
}

_REPEATS = flags.DEFINE_integer(
  "repeats", 3, "Repeats of `overlap`; medians are shown.", lower_bound=1
)
_UPDATES = flags.DEFINE_integer(
  "updates", 20, "Updates of each run of `overlap`.", lower_bound=_SKIPPED + 3
)
_RUN_UPDATES = flags.DEFINE_integer(
  "run_updates", 32, "Updates of each run of `run`; a multiple of 4.", lower_bound=4
)
_RUN_REPEATS = flags.DEFINE_integer("run_repeats", 2, "Repeats of `run`.", lower_bound=1)
_STRETCH = flags.DEFINE_float("stretch", 1.5, "Sleep of grading, see above.", lower_bound=0.0)
_OWN_DEVICE = flags.DEFINE_bool(
  "own_device", False, "Sample rollouts on a separate device, the second one."
)
_FOLDER = flags.DEFINE_string(
  "folder", str(pathlib.Path(__file__).parent / "results"), "Folder for the tables."
)


def make_config(
  recipe: Any, schedule: str, num_updates: int, *, own_device: bool
) -> ml_collections.ConfigDict:
  """Makes a recipe from scratch with only the work that every update needs."""
  c = recipe.get_config()
  c.schedule = schedule
  c.num_updates = num_updates
  c.warm_start.num_steps = 0
  c.task.kwargs.held_out_size = c.evaluation.batch_prompts = 8
  c.evaluation.every = c.checkpoint.every = num_updates
  c.logging.print_every = num_updates
  c.generation_mesh.data = int(own_device)
  c.grading.num_workers = 1
  return c


def train(parts: Parts) -> list[dict[str, Any]]:
  """Trains, and returns the records of the updates."""
  with tempfile.TemporaryDirectory() as workdir, contextlib.redirect_stdout(sys.stderr):
    runs.train(parts, workdir)
    return [record for record in read_metrics(workdir) if record["phase"] == "train"]


def mean_seconds(records: Sequence[Mapping[str, Any]]) -> Row:
  """Mean seconds per update, in total and by phase, and mean lag; omits first and last updates."""
  # A record is written when the next update begins; the last one would count as too short.
  first, *rest = records[_SKIPPED - 1 : -1]

  def mean(name: str) -> float:
    return statistics.mean(record.get(name, 0.0) for record in rest)

  elapsed = rest[-1]["time/elapsed_seconds"] - first["time/elapsed_seconds"]
  by_phase = {phase: mean(f"time/{phase}_seconds") for phase in PHASES}
  return {"s per update": elapsed / len(rest)} | by_phase | {"lag": mean("staleness/mean")}


def add_ratios(row: Row, sequential: Row) -> Row:
  """Adds the ratio to the sequential schedule, and the same if only its longest phase counted."""
  phase_seconds = [sequential[phase] for phase in PHASES]
  longest_share = max(phase_seconds) / sum(phase_seconds)
  ratio = row["s per update"] / sequential["s per update"]
  saving = None if row is sequential else (1 - ratio) / (1 - longest_share)
  ratios = {"of sequential": ratio, "longest phase alone": longest_share}
  return row | ratios | {"of the saving": saving}


def overlap_section(
  num_updates: int, repeats: int, stretch: float, own_device: bool
) -> dict[str, list[Row]]:
  """Measures each schedule; returns a row per repeat."""
  config = make_config(quickstart, "on_policy", num_updates, own_device=own_device)
  config.batch.prompts, config.max_response_length = 8, 32
  parts = build(config)
  grader = f"{slow_grader.__name__}:slow"
  parts = dataclasses.replace(parts, task=dataclasses.replace(parts.task, grader=grader))
  os.environ[slow_grader.SECONDS] = "0"
  without_sleep = mean_seconds(train(parts))
  items = config.batch.prompts * config.batch.group_size
  grading_seconds = stretch * (without_sleep["generate"] + without_sleep["optimise"])
  os.environ[slow_grader.SECONDS] = str(grading_seconds / items)

  def measure(name: str) -> Row:
    return mean_seconds(train(dataclasses.replace(parts, schedule=SCHEDULES[name])))

  rows_by_schedule = measure_in_turn(SCHEDULES, measure, repeats)
  return {
    name: [add_ratios(*pair) for pair in zip(rows, rows_by_schedule[SEQUENTIAL], strict=True)]
    for name, rows in rows_by_schedule.items()
  }


def run_section(num_updates: int, repeats: int, own_device: bool) -> dict[str, list[Row]]:
  """Measures each kind of run; returns a row per repeat."""

  def measure(name: str) -> Row:
    return measure_costs(make_config(*RUNS[name], num_updates, own_device=own_device))

  return measure_in_turn(RUNS, measure, repeats)


def measure_in_turn(
  names: Iterable[str], measure: Callable[[str], Row], repeats: int
) -> dict[str, list[Row]]:
  """Measures all names in each repeat, reversing the order every time; returns a row per repeat."""
  rows: dict[str, list[Row]] = {name: [] for name in names}
  for repeat in range(repeats):
    for name in list(rows)[:: -1 if repeat % 2 else 1]:
      print(f"# {name}, repeat {repeat}", file=sys.stderr, flush=True)
      rows[name].append(measure(name))
  return rows


def measure_costs(config: ml_collections.ConfigDict) -> Row:
  """Measures weight syncs, agreement checks and compilation of one run, with empty caches."""
  jax.clear_caches()
  start = time.perf_counter()
  with record_compilations() as compile_seconds:
    parts = build(config)
    check = Timed(parts.programs.behavior_gap)
    programs = parts.programs._replace(behavior_gap=check)
    records = train(dataclasses.replace(parts, programs=programs))
  total_seconds = time.perf_counter() - start
  sync_seconds = [record.get("time/sync_weights_seconds") for record in records]
  sync_seconds = [seconds for seconds in sync_seconds if seconds is not None]
  return {
    "updates": len(records),
    "weight syncs": len(sync_seconds),
    "weight syncs, in all": sum(sync_seconds),
    "one weight sync": measure_weight_sync(parts),
    "agreement checks": len(check.seconds),
    "the first": check.seconds[0],
    "the others, in all": sum(check.seconds[1:]),
    "compilations": len(compile_seconds),
    "compiling": sum(compile_seconds),
    "first update": records[0]["time/elapsed_seconds"],
    "whole run": total_seconds,
  }


def measure_weight_sync(parts: Parts) -> float:
  """Measures the median seconds of one weight sync with its fingerprint, on idle devices."""
  params = jax.block_until_ready(parts.initial.trained())

  sync = make_sync(parts.placement, parts.schedule)

  def sync_weights() -> Any:
    synced = sync(params)
    return synced, parts.programs.checksums(synced)

  timed = Timed(sync_weights)
  for _ in range(_TIMED_SYNCS + 1):
    timed()
  return statistics.median(timed.seconds[1:])


class Timed:
  """Wraps a function: waits for its results, and records the `seconds` of each call."""

  def __init__(self, function: Callable):
    self.function = function
    self.seconds: list[float] = []

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    start = time.perf_counter()
    result = jax.block_until_ready(self.function(*args, **kwargs))
    self.seconds.append(time.perf_counter() - start)
    return result


@contextlib.contextmanager
def record_compilations() -> Iterator[list[float]]:
  """Yields a list to which the seconds of every compilation in the context are appended."""
  seconds: list[float] = []
  is_recording = True  # jax 0.7 has no public way to remove a listener

  def listen(event: str, duration: float, **_: Any) -> None:
    if is_recording and event == _COMPILATION:
      seconds.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seconds
  finally:
    is_recording = False


def median_rows(repeats: Mapping[str, Sequence[Row]], label: str) -> list[Row]:
  """Returns one row per name, with the median of every column over repeats."""

  def median(values: list) -> Any:
    return values[0] if len(set(values)) == 1 else statistics.median(values)

  return [
    {label: name} | {column: median([row[column] for row in rows]) for column in rows[0]}
    for name, rows in repeats.items()
  ]


def write_report(
  folder: pathlib.Path, sections: Mapping[str, Mapping[str, list[Row]]], command: str
) -> str:
  """Writes every repeat and the tables of medians; returns the tables."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"overlap_{jax.default_backend()}"
  conditions = {"hardware": hardware(), "jax": jax.__version__, "command": command}
  results = {"conditions": conditions, "repeats": sections}
  path.with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
  description = "; ".join(f"{name}: {value}" for name, value in conditions.items())
  parts = ["# Overlap of generation and updates; weight syncs and compilation over a run"]
  parts += [f"Conditions: {description}."]
  for section, rows in sections.items():
    label = "schedule" if section == "overlap" else "run"
    parts += [f"## {section}", _NOTES[section], table(median_rows(rows, label))]
  text = "\n\n".join(parts) + "\n"
  path.with_suffix(".md").write_text(text)
  return text


def main(argv: list[str]) -> None:
  del argv
  own_device = _OWN_DEVICE.value
  sections = {
    "overlap": overlap_section(_UPDATES.value, _REPEATS.value, _STRETCH.value, own_device),
    "run": run_section(_RUN_UPDATES.value, _RUN_REPEATS.value, own_device),
  }
  command = " ".join(["python experiments/benchmarks/overlap.py", *sys.argv[1:]])
  print(write_report(pathlib.Path(_FOLDER.value), sections, command))


if __name__ == "__main__":
  app.run(main)
