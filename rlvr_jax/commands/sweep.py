"""The command `sweep`: runs from a list of overrides, one after another, each in its own process.

The workdir of a sweep has a folder for each run, named by the run's label and seed. The folder has
all files of the run, the run's output and, once the run has finished, `result.json`. A finished run
is never repeated, and a killed run resumes. The sweep's process uses no device, so each run has all
devices and frees them when it ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlvr_jax.evaluate.compare import RESULT_FILE, evaluations
from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.storage.files import open_own, replace_file
from rlvr_jax.storage.places import Workdir, in_bucket
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.checkpointing.workdir import (
  LAYOUT_FILE,
  WorkdirLock,
  claim_workdir,
)
from rlvr_jax.train.cluster import process
from rlvr_jax.train.reporting.progress import duration, say, warn
from rlvr_jax.train.setup import config_file

LOG_FILE = "output.log"
WORKDIR = "{workdir}"  # stands for the workdir of the sweep in an override
UNFINISHED_STATUS = 3  # exit status of a sweep whose time limit ended it before its runs finished
_STOPPED_STATUS = 143  # exit status of a run that ended because shutdown was requested
_GRACE_S = 300.0  # seconds for a run to save and end
_TAIL_LINES = 12  # lines that are shown of a failed run's output


class SweepError(RuntimeError):
  """Some runs of a sweep failed."""


class TimeLimitError(process.EndRequestedError):
  """The time limit of the sweep was reached before all runs finished."""


class Run(NamedTuple):
  """One run of a sweep."""

  label: str  # shared by runs that differ only by seed
  seed: int
  flags: tuple[str, ...]  # flags of rlvr_jax.main, without --workdir

  @property
  def name(self) -> str:
    """Name of the run's folder: the label's letters and digits, of any alphabet, and the seed."""
    label = unicodedata.normalize("NFC", self.label.lower())
    return re.sub(r"(?:[^\w.]|_)+", "_", f"{label}_{self.seed}").lstrip("._")

  def command(self, workdir: pathlib.Path) -> str:
    """The command line that repeats the run; `workdir` is the workdir of the sweep."""
    program = ("python", "-m", "rlvr_jax.main", *self.flags, f"--workdir={workdir / self.name}")
    return shlex.join(program)


# --- the list of runs -----------------------------------------------------------------------------


def read_runs(
  sweep: str,
  recipe: str,
  overrides: Mapping[str, str],
  workdir: str,
  *,
  trusting: bool = False,
) -> list[Run]:
  """Reads the runs of a sweep's file, and checks the fields of every run's configuration.

  Args:
    sweep: a Python file whose `get_sweep()` returns a list of dicts, one per run: path of a field →
      value, such as {"seed": 1, "batch.group_size": 8}. Two keys are not fields: "config" is a
      recipe, "label" names the method. In a string, {workdir} stands for the sweep's workdir.
    recipe: the configuration file of runs without the key "config".
    overrides: path → text, for each field that the command line sets for all runs.
    workdir: workdir of the sweep.
    trusting: see `config_file.read`.
  Raises:
    ValueError: the file or a run's override is wrong.
  """
  owner = f"--sweep={sweep}"
  entries = _load_entries(sweep)
  for path in overrides:
    if len({repr(fields.get(path)) for fields in entries}) > 1:
      raise ValueError(
        f"--config.{path} applies to all runs, but {owner} sets the field to several values; omit"
        " the flag"
      )
  runs = [_make_run(owner, fields, recipe, overrides, workdir, trusting) for fields in entries]
  first: dict[str, Run] = {}
  for run in runs:
    if (other := first.setdefault(run.name, run)) is not run:
      labels = " and ".join(map(repr, dict.fromkeys([other.label, run.label])))
      raise ValueError(
        f"{owner}: several runs have the name {run.name!r}, from the label {labels}; give"
        ' them different seeds, or labels with other letters or digits, such as {"label": "…"}'
      )
  _check_labels(owner, runs)
  return runs


def _check_labels(owner: str, runs: Sequence[Run]) -> None:
  """Checks that runs of one label differ only by the seed, and by their seeds in folders' names.

  Raises:
    ValueError: runs of one label differ by other fields.
  """
  first: dict[str, Run] = {}
  for run in runs:
    other = first.setdefault(run.label, run)
    own, others = (dict(flag.split("=", 1) for flag in r.flags) for r in (run, other))
    differing = [
      field
      for field in sorted((own.keys() | others.keys()) - {"--config.seed"})
      if not _are_alike(own.get(field), others.get(field), (run.seed, other.seed))
    ]
    if differing:
      mixed = [f"{f}={v[f]}" for f in differing for v in (others, own) if f in v]
      raise ValueError(
        f"{owner}: the runs with the label {run.label!r} and seeds {other.seed} and {run.seed}"
        f" differ by more than the seed: {' '.join(mixed)}; give each method its own label"
      )


def _are_alike(value: str | None, other: str | None, seeds: tuple[int, int]) -> bool:
  """Whether two runs have equal values, or folders that differ only where each has its seed."""
  if value is None or other is None or "/" not in value:
    return value == other
  pieces, others = (re.split(r"(\d+)", text) for text in (value, other))
  as_text = tuple(map(str, seeds))
  return len(pieces) == len(others) and all(
    piece == of_other or (piece, of_other) == as_text
    for piece, of_other in zip(pieces, others, strict=True)
  )


def _load_entries(path: str) -> list[Mapping[str, Any]]:
  """Loads the list of dicts that a file's `get_sweep()` returns."""
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--sweep={path} does not exist; give a Python file that has get_sweep()")
  spec = importlib.util.spec_from_file_location("sweep_file", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"--sweep={path} is not a Python file; give one that has get_sweep()")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    entries = module.get_sweep()
  except Exception as error:  # the user's file may raise any error
    raise ValueError(f"--sweep={path}: {type(error).__name__}: {error}") from error
  are_dicts = isinstance(entries, list) and all(isinstance(fields, Mapping) for fields in entries)
  if not are_dicts or not entries:
    raise ValueError(
      f"--sweep={path}: get_sweep() returned {entries!r:.100}; it must be a list of dicts, one per"
      ' run, such as [{"seed": 0}, {"seed": 1}]'
    )
  return entries


def _make_run(
  owner: str,
  entry: Mapping[str, Any],
  recipe: str,
  overrides: Mapping[str, str],
  workdir: str,
  trusting: bool,
) -> Run:
  """A run from its entry in the sweep's file; for arguments see `read_runs`."""
  fields = {name: value for name, value in entry.items() if name not in ("config", "label")}
  recipe = entry.get("config", recipe)
  if nested := [path for path, value in fields.items() if isinstance(value, Mapping)]:
    raise ValueError(
      f"{owner}: {nested[0]!r} is a dict; set its fields one by one, such as"
      f' {{"{nested[0]}.field": value}}'
    )
  label = entry.get("label") or _default_label(recipe, fields)
  if not isinstance(label, str):
    raise ValueError(f'{owner}: the label {label!r} is not text; write {{"label": "{label}"}}')
  texts = {path: str(value) for path, value in fields.items()} | dict(overrides)
  texts = {path: text.replace(WORKDIR, workdir) for path, text in texts.items()}
  flags = (f"--config={recipe}", *(f"--config.{path}={text}" for path, text in texts.items()))
  try:
    config = config_file.read(flags, trusting=trusting)
  except ValueError as error:
    raise ValueError(f"{owner}, {dict(entry)}: {error}") from error
  return Run(label, config.seed, flags)


def _default_label(recipe: str, fields: Mapping[str, Any]) -> str:
  """A label: the recipe's name and argument, and the entry's fields without the seed."""
  name, _, argument = recipe.partition(":")
  parts = [pathlib.PurePath(name).stem, *([argument] if argument else [])]
  return ", ".join(parts + [f"{path}={v}" for path, v in fields.items() if path != "seed"])


# --- running --------------------------------------------------------------------------------------


def sweep(
  runs: Sequence[Run], workdir: str, *, more: Sequence[str] = (), minutes: float | None = None
) -> None:
  """Executes the runs that have not finished, in order.

  Args:
    runs: the result of `read_runs`.
    workdir: workdir of the sweep; local, or gs://BUCKET/FOLDER.
    more: further flags for every run, which do not affect its results.
    minutes: time limit, at which the current run saves and ends; None: no limit.
  Raises:
    TimeLimitError: the time limit was reached before all runs had finished.
    EndRequestedError: a signal requested shutdown; the current run has been saved.
    SweepError: some runs failed; the other runs were still executed.
    WorkdirError: another sweep uses the workdir, or a run has finished with other flags.
  """
  with contextlib.ExitStack() as stack:
    folder = Workdir(workdir)
    stack.enter_context(contextlib.closing(claim_workdir(folder)))
    stack.enter_context(contextlib.closing(folder))
    finished = _read_finished(runs, folder)
    results = [finished[run.name] for run in runs if run.name in finished]
    status = _format_status(results, len(runs) - len(results))
    say(f"sweep of {len(runs)} runs in {folder.path}: {status}")
    stack.enter_context(process.handle_shutdown_signals(lambda: None))
    sweep_limit = _SweepLimit(minutes)
    failures = []
    for number, run in enumerate(runs):
      if run.name in finished:
        continue
      if sweep_limit.is_over():
        raise sweep_limit.error(run)
      title = f"run {number + 1} of {len(runs)}, {run.label}, seed {run.seed}"
      say(f"{title}: started, its output is in {folder.path / run.name / LOG_FILE}")
      if failure := _execute(run, number, folder, more, sweep_limit):
        failures.append(failure)
        warn(f"{title}: {failure.partition(';')[0]}")
      else:
        results.append(_read_result(run, folder))
        left = len(runs) - len(results) - len(failures)
        status = _format_status(results, left)
        say(f"{title}: finished in {duration(results[-1]['seconds'])}; {status}")
      folder.publish()
  if failures:
    raise SweepError(
      f"{_count_runs(len(failures))} of {len(runs)} failed; the same command retries them\n"
      + "\n".join(failures)
    )
  say(f"all runs have finished; compare them: python -m rlvr_jax.evaluate.compare {folder.path}")


def _count_runs(count: int) -> str:
  return f"{count} run{'s' * (count != 1)}"


def _format_status(results: Sequence[Mapping[str, Any]], left: int) -> str:
  """The latest result of a sweep, and the expected time of the runs that are left.

  Args:
    results: results of the finished runs, in order.
    left: number of runs that have not been tried.
  """
  parts = [_format_accuracy(results[-1])] if results else []
  seconds = sum(r["seconds"] for r in results) * left / len(results) if results else 0.0
  parts.append(f"{_count_runs(left)} left" + (f", about {duration(seconds)}" if seconds else ""))
  return "; ".join(filter(None, parts))


def _format_accuracy(result: Mapping[str, Any]) -> str:
  """The last held-out accuracy of a run, such as "held-out pass@1 0.431"; "" if it has none."""
  for name, values in result["evaluations"].items():
    if re.fullmatch(r"eval/pass@\d+", name):
      return f"held-out {name.removeprefix('eval/')} {values[-1]:.3f}"
  return ""


class _SweepLimit:
  """Ends a sweep early: when shutdown is requested, or at its time limit."""

  def __init__(self, minutes: float | None):
    self._minutes = math.inf if minutes is None else minutes
    self._deadline = time.monotonic() + 60 * self._minutes

  def is_over(self) -> bool:
    """Whether the current run must save and end, and no other run may begin."""
    return process.shutdown_requested() or time.monotonic() >= self._deadline

  def error(self, run: Run) -> process.EndRequestedError:
    """The error to raise if the sweep ends before a run has finished; prints why the sweep ends."""
    requested = process.shutdown_requested()
    why = "shutdown requested" if requested else f"{self._minutes:g} minutes are over"
    message = f"{why} before {run.name} finished"
    say(f"{message}; rerun the same command to continue")
    return (process.EndRequestedError if requested else TimeLimitError)(message)


def _read_finished(runs: Sequence[Run], folder: Workdir) -> dict[str, dict[str, Any]]:
  """Results of the finished runs, by name.

  Raises:
    WorkdirError: a run finished with other flags.
  """
  finished = {}
  for run in runs:
    if not (folder.path / run.name / RESULT_FILE).exists():
      continue
    finished[run.name] = _read_result(run, folder)
    flags = shlex.split(finished[run.name]["command"])[3:-1]
    if differing := set(flags) ^ set(run.flags):
      raise WorkdirError(
        f"{folder.path / run.name} finished with other flags; these differ:"
        f" {' '.join(sorted(differing))}. Use another --workdir, or another label"
      )
  return finished


def _read_result(run: Run, folder: Workdir) -> dict[str, Any]:
  return json.loads((folder.path / run.name / RESULT_FILE).read_text(encoding="utf-8"))


def _execute(
  run: Run, number: int, folder: Workdir, more: Sequence[str], sweep_limit: _SweepLimit
) -> str:
  """Executes a run and writes its result; returns a message if it failed, else ""."""
  home = folder.local / run.name
  home.mkdir(exist_ok=True)
  start = time.perf_counter()
  log_size = (home / LOG_FILE).stat().st_size if (home / LOG_FILE).exists() else 0
  try:
    status = _run_process(run, folder, more, sweep_limit)
  except WorkdirError as error:
    return f"{run.name} failed: {error}"
  if status == 0:
    _write_result(run, number, folder, seconds=time.perf_counter() - start)
    return ""
  if sweep_limit.is_over():
    folder.publish()
    raise sweep_limit.error(run)
  how = f"exit status {status}" if status > 0 else f"signal {-status}"
  with open(home / LOG_FILE, encoding="utf-8", errors="replace") as log:
    log.seek(log_size)
    lines = [line.rstrip() for line in log.read().replace("\r", "\n").split("\n") if line.strip()]
  tail = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
  return f"{run.name} failed with {how}; {folder.path / run.name / LOG_FILE} ends with\n{tail}"


def _run_process(run: Run, folder: Workdir, more: Sequence[str], sweep_limit: _SweepLimit) -> int:
  """Starts the process of a run and waits for its end; returns its exit status.

  A process that makes no progress ends by itself, see `process.deadline`.
  """
  workdir = folder.path / run.name
  if not in_bucket(workdir):
    _wait_until_free(workdir)
  program = [sys.executable, "-m", "rlvr_jax.main", *run.flags, f"--workdir={workdir}", *more]
  # If this process is killed, the run saves and ends too, since nothing would wait for it.
  program += [f"--stopped_status={_STOPPED_STATUS}", f"--parent={os.getpid()}"]
  with open_own(folder.local / run.name / LOG_FILE, "ab") as log:
    child = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
  terminated_at = 0.0
  while (status := child.poll()) is None:
    if sweep_limit.is_over() and not terminated_at:
      terminated_at = time.monotonic()
      child.terminate()
    if terminated_at and time.monotonic() - terminated_at > _GRACE_S:
      child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
      child.wait(timeout=0.5)
  return status


def _wait_until_free(workdir: pathlib.Path) -> None:
  """Waits until no process uses a run's workdir: a killed sweep's run may still be saving."""
  deadline = time.monotonic() + _GRACE_S
  while True:
    try:
      return WorkdirLock(workdir).close()
    except WorkdirError:
      if time.monotonic() > deadline or process.shutdown_requested():
        raise
    time.sleep(0.2)


# --- results --------------------------------------------------------------------------------------


def _write_result(run: Run, number: int, folder: Workdir, *, seconds: float) -> None:
  """Writes the result of a run, from which `evaluate.compare` makes tables.

  The field "seconds" covers only the process that finished the run, but the seconds in
  "evaluations" cover all its processes.
  """
  workdir = folder.path / run.name
  layout = workdir / LAYOUT_FILE
  result = {
    "label": run.label,
    "seed": run.seed,
    "number": number,
    "commit": process.current_commit(),
    "command": run.command(folder.path),
    "seconds": round(seconds, 1),
    "layout": json.loads(layout.read_text(encoding="utf-8")) if layout.exists() else None,
    "evaluations": evaluations(read_metrics(workdir)),
  }
  with replace_file(folder.local / run.name / RESULT_FILE) as file:
    file.write((json.dumps(result) + "\n").encode())
