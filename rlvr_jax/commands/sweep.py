"""The command sweep: runs of a list of overrides, one after another, each a process of its own.

The workdir of a sweep has a folder for each run, named by its label and seed, with all files of the
run, its output and, once it has finished, `result.json`. A finished run is never repeated, and one
that was killed continues. This process uses no device: a run has them to itself, and what it took
is free when it ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlvr_jax.evaluate.compare import RESULT_FILE, evaluations
from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.storage.files import replacing
from rlvr_jax.storage.places import Workdir, in_bucket
from rlvr_jax.train.checkpointing.workdir import LAYOUT_FILE, WorkdirError, WorkdirLock, claimed
from rlvr_jax.train.cluster import process
from rlvr_jax.train.reporting.progress import duration, say, warn
from rlvr_jax.train.setup import config_file

LOG_FILE = "output.log"
WARM_STARTS = "warm_starts"  # folder of a sweep's workdir; runs with the same one share it
WORKDIR = "{workdir}"  # stands in an override for the workdir of the sweep
COMMIT = "RLVR_JAX_COMMIT"  # environment variable: the commit of code that is in no checkout
TO_DO = 3  # exit status of a sitting that ends before the runs do
_STOPPED = 143  # exit status of a run that ended because it was asked to
_GRACE_S = 300.0  # for a run to save and end
_TAIL = 12  # lines of a failed run's output


class SweepError(RuntimeError):
  """Some runs of a sweep have failed."""


class SittingOverError(process.EndRequestedError):
  """The minutes of this sitting are over before all runs have finished."""


class Run(NamedTuple):
  """One run of a sweep."""

  label: str  # runs that differ only by seed share it
  seed: int
  flags: tuple[str, ...]  # of rlvr_jax.main; all but --workdir

  @property
  def name(self) -> str:
    """Of its folder."""
    return re.sub(r"[^a-z0-9.]+", "_", f"{self.label.lower()}_{self.seed}").lstrip("._")

  def command(self, workdir: pathlib.Path) -> str:
    """The command line with which one repeats it; `workdir` is that of the sweep."""
    program = ("python", "-m", "rlvr_jax.main", *self.flags, f"--workdir={workdir / self.name}")
    return shlex.join(program)


# --- the list of runs -----------------------------------------------------------------------------


def runs_of(sweep: str, recipe: str, given: Mapping[str, str], workdir: str) -> list[Run]:
  """The runs of a sweep's file, every configuration read.

  Args:
    sweep: a Python file whose `get_sweep()` returns a list of dicts, one per run: path of a field →
      value, such as {"seed": 1, "batch.group_size": 8}. Two keys are no fields: "config" is another
      recipe, "label" names the method. In a text, {workdir} is the sweep's workdir.
    recipe: the configuration file of runs that name none.
    given: path → text of the fields that the command line sets for all runs.
    workdir: of the sweep.
  Raises:
    ValueError: the file or a run's override is wrong.
  """
  owner, listed = f"--sweep={sweep}", _listed(sweep)
  for path in given:
    if len({repr(fields.get(path)) for fields in listed}) > 1:
      raise ValueError(
        f"--config.{path} applies to all runs, but {owner} sets it to several values; leave it out"
      )
  runs = [_run(owner, fields, recipe, given, workdir) for fields in listed]
  repeated = [name for name, count in Counter(run.name for run in runs).items() if count > 1]
  if repeated:
    raise ValueError(
      f"{owner}: several runs have the name {repeated[0]!r}; give them different seeds, or labels"
      ' such as {"label": "…"}'
    )
  _check_labels(owner, runs)
  return runs


def _check_labels(owner: str, runs: Sequence[Run]) -> None:
  """Runs of one label differ by the seed, and by folders, which may be those of that seed.

  Raises:
    ValueError: they differ by more, and a table would mix two methods.
  """
  first: dict[str, Run] = {}
  for run in runs:
    other = first.setdefault(run.label, run)
    changed = sorted(set(run.flags) ^ set(other.flags))
    of_seed = lambda flag: flag.startswith("--config.seed=")
    of_folder = lambda flag: "/" in flag and not flag.startswith("--config=")
    if mixed := [flag for flag in changed if not of_seed(flag) and not of_folder(flag)]:
      raise ValueError(
        f"{owner}: the runs with the label {run.label!r} and seeds {other.seed} and {run.seed}"
        f" differ by more than the seed: {' '.join(mixed)}; give each method its own label"
      )


def _listed(path: str) -> list[Mapping[str, Any]]:
  """What `get_sweep()` returns."""
  if not pathlib.Path(path).is_file():
    raise ValueError(f"--sweep={path} does not exist; give a Python file that has get_sweep()")
  spec = importlib.util.spec_from_file_location("sweep_file", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"--sweep={path} is not a Python file; give one that has get_sweep()")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    listed = module.get_sweep()
  except Exception as error:  # of a user's file
    raise ValueError(f"--sweep={path}: {type(error).__name__}: {error}") from error
  are_dicts = isinstance(listed, list) and all(isinstance(fields, Mapping) for fields in listed)
  if not are_dicts or not listed:
    raise ValueError(
      f"--sweep={path}: get_sweep() returned {listed!r:.100}; it must be a list of dicts, one per"
      ' run, such as [{"seed": 0}, {"seed": 1}]'
    )
  return listed


def _run(
  owner: str, fields: Mapping[str, Any], recipe: str, given: Mapping[str, str], workdir: str
) -> Run:
  own = {name: value for name, value in fields.items() if name not in ("config", "label")}
  recipe = fields.get("config", recipe)
  texts = {path: _text(owner, path, value) for path, value in own.items()} | dict(given)
  texts = {path: text.replace(WORKDIR, workdir) for path, text in texts.items()}
  flags = (f"--config={recipe}", *(f"--config.{path}={text}" for path, text in texts.items()))
  try:
    config = config_file.read(flags)
  except ValueError as error:
    raise ValueError(f"{owner}, {dict(fields)}: {error}") from error
  warm_start = config.warm_start
  if warm_start.num_steps and not warm_start.cache and not in_bucket(workdir):
    flags += (f"--config.warm_start.cache={workdir}/{WARM_STARTS}",)
  return Run(fields.get("label") or _label(recipe, own), config.seed, flags)


def _text(owner: str, path: str, value: Any) -> str:
  """A value as the command line takes it."""
  if isinstance(value, Mapping):
    raise ValueError(
      f'{owner}: {path!r} is a dict; set its fields one by one, such as {{"{path}.field": value}}'
    )
  return value if isinstance(value, str) else str(value)


def _label(recipe: str, fields: Mapping[str, Any]) -> str:
  """The recipe's name, and the fields that are set, but for the seed."""
  name, _, argument = recipe.partition(":")
  parts = [pathlib.PurePath(name).stem, *([argument] if argument else [])]
  return ", ".join(parts + [f"{path}={v}" for path, v in fields.items() if path != "seed"])


# --- running them ---------------------------------------------------------------------------------


def sweep(
  runs: Sequence[Run], workdir: str, *, more: Sequence[str] = (), minutes: float | None = None
) -> None:
  """Does the runs that have not finished, in order.

  Args:
    runs: from `runs_of`.
    workdir: of the sweep; local, or gs://BUCKET/FOLDER.
    more: flags for every run that do not change it.
    minutes: of this sitting; the run that is going on then saves and ends. None: no limit.
  Raises:
    SittingOverError: they are over, and there are runs left.
    EndRequestedError: this process was asked to end; the run that was going on has been saved.
    SweepError: some runs have failed, which does not stop the others.
    WorkdirError: another sweep uses the workdir, or a finished run was of another command.
  """
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    folder = Workdir(workdir)
    enter(claimed(folder))
    enter(folder)
    finished = _finished(runs, folder)
    done = [finished[run.name] for run in runs if run.name in finished]
    say(f"sweep of {len(runs)} runs in {folder.kept}: {_standing(done, len(runs) - len(done))}")
    stack.enter_context(process.ends_in_order(lambda: None))
    stack.enter_context(_sitting(minutes))
    failures = []
    for number, run in enumerate(runs):
      if run.name in finished:
        continue
      if process.asked():
        raise _ended(run)
      title = f"run {number + 1} of {len(runs)}, {run.label}, seed {run.seed}"
      say(f"{title}: started, its output is in {folder.kept / run.name / LOG_FILE}")
      if failure := _done(run, number, folder, more):
        failures.append(failure)
        warn(f"{title}: {failure.partition(';')[0]}")
      else:
        done.append(_result(run, folder))
        left = len(runs) - len(done) - len(failures)
        say(f"{title}: finished in {duration(done[-1]['seconds'])}; {_standing(done, left)}")
      folder.publish()
  if failures:
    raise SweepError(
      f"{_runs(len(failures))} of {len(runs)} failed; the same command tries again\n"
      + "\n".join(failures)
    )
  say(f"all runs have finished; compare them: python -m rlvr_jax.evaluate.compare {folder.kept}")


def _runs(count: int) -> str:
  return f"{count} run{'s' * (count != 1)}"


def _standing(done: Sequence[Mapping[str, Any]], left: int) -> str:
  """The last result of a sweep, and the time that its other runs will take.

  Args:
    done: results of the finished runs, the last one last.
    left: number of runs that have not been tried.
  """
  parts = [_held_out(done[-1])] if done else []
  seconds = sum(result["seconds"] for result in done) * left / len(done) if done else 0.0
  parts.append(f"{_runs(left)} left" + (f", about {duration(seconds)}" if seconds else ""))
  return "; ".join(filter(None, parts))


def _held_out(result: Mapping[str, Any]) -> str:
  """The last held-out accuracy of a run, such as "held-out pass@1 0.431"; "" without any."""
  for name, values in result["evaluations"].items():
    if re.fullmatch(r"eval/pass@\d+", name):
      return f"held-out {name.removeprefix('eval/')} {values[-1]:.3f}"
  return ""


@contextlib.contextmanager
def _sitting(minutes: float | None) -> Iterator[None]:
  """Requests shutdown after these minutes, as a signal does; raises SittingOverError then."""
  if minutes is None:
    yield
    return
  over = threading.Event()

  def end() -> None:
    over.set()
    process.ask()

  timer = threading.Timer(60 * minutes, end)
  timer.daemon = True
  timer.start()
  try:
    yield
  except process.EndRequestedError as error:
    if not over.is_set():
      raise
    raise SittingOverError(f"{minutes:g} minutes are over: {error}") from error
  finally:
    timer.cancel()
    timer.join()  # it asks nobody once this has ended


def _finished(runs: Sequence[Run], folder: Workdir) -> dict[str, dict[str, Any]]:
  """Name → result of the runs that have finished.

  Raises:
    WorkdirError: a run has finished with other flags.
  """
  finished = {
    run.name: _result(run, folder)
    for run in runs
    if (folder.kept / run.name / RESULT_FILE).exists()
  }
  for run in runs:
    if run.name not in finished:
      continue
    flags = shlex.split(finished[run.name]["command"])[3:-1]
    if differing := set(flags) ^ set(run.flags):
      raise WorkdirError(
        f"{folder.kept / run.name} has finished with other flags; these differ:"
        f" {' '.join(sorted(differing))}. Use another --workdir, or another label"
      )
  return finished


def _result(run: Run, folder: Workdir) -> dict[str, Any]:
  return json.loads((folder.kept / run.name / RESULT_FILE).read_text(encoding="utf-8"))


def _done(run: Run, number: int, folder: Workdir, more: Sequence[str]) -> str:
  """Does a run and writes its result; returns a message if it has failed, else ""."""
  home = folder.local / run.name
  home.mkdir(exist_ok=True)
  began = time.perf_counter()
  log_size = (home / LOG_FILE).stat().st_size if (home / LOG_FILE).exists() else 0
  try:
    status = _process(run, folder, more)
  except WorkdirError as error:
    return f"{run.name} failed: {error}"
  if status == 0:
    _write_result(run, number, folder, seconds=time.perf_counter() - began)
    return ""
  if process.asked():
    folder.publish()
    raise _ended(run)
  how = f"exit status {status}" if status > 0 else f"signal {-status}"
  with open(home / LOG_FILE, encoding="utf-8", errors="replace") as log:
    log.seek(log_size)
    lines = [line.rstrip() for line in log.read().replace("\r", "\n").split("\n") if line.strip()]
  tail = "\n".join(f"  {line}" for line in lines[-_TAIL:])
  return f"{run.name} failed with {how}; {folder.kept / run.name / LOG_FILE} ends with\n{tail}"


def _ended(run: Run) -> process.EndRequestedError:
  message = f"shutdown requested before {run.name} had finished"
  say(f"{message}; rerun the same command to continue")
  return process.EndRequestedError(message)


def _process(run: Run, folder: Workdir, more: Sequence[str]) -> int:
  """Starts the process of a run, and waits for its end; returns its exit status.

  A process that does not advance ends by itself, see `host.deadline`.
  """
  workdir = folder.kept / run.name
  if not in_bucket(workdir):
    _wait_until_free(workdir)
  program = [sys.executable, "-m", "rlvr_jax.main", *run.flags, f"--workdir={workdir}", *more]
  # If this process is killed, the run saves and ends too: nobody would wait for it.
  program += [f"--stopped_status={_STOPPED}", f"--parent={os.getpid()}"]
  with open(folder.local / run.name / LOG_FILE, "ab") as log:
    child = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
  told = 0.0
  while (status := child.poll()) is None:
    if process.asked() and not told:
      told = time.monotonic()
      child.terminate()
    if told and time.monotonic() - told > _GRACE_S:
      child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
      child.wait(timeout=0.5)
  return status


def _wait_until_free(workdir: pathlib.Path) -> None:
  """Waits until no process uses the workdir of a run: one of a killed sweep may be saving."""
  last = time.monotonic() + _GRACE_S
  while True:
    try:
      return WorkdirLock(workdir).close()
    except WorkdirError:
      if time.monotonic() > last or process.asked():
        raise
    time.sleep(0.2)


# --- results --------------------------------------------------------------------------------------


def _write_result(run: Run, number: int, folder: Workdir, *, seconds: float) -> None:
  """Writes a run's result, which is what a table needs of it; see `evaluate.compare`.

  Its seconds are those of the process that finished it; `evaluations.seconds` are of all.
  """
  workdir = folder.kept / run.name
  layout = workdir / LAYOUT_FILE
  result = {
    "label": run.label,
    "seed": run.seed,
    "number": number,
    "commit": commit(),
    "command": run.command(folder.kept),
    "seconds": round(seconds, 1),
    "layout": json.loads(layout.read_text(encoding="utf-8")) if layout.exists() else None,
    "evaluations": evaluations(read_metrics(workdir)),
  }
  with replacing(folder.local / run.name / RESULT_FILE) as file:
    file.write((json.dumps(result) + "\n").encode())


def commit() -> str | None:
  """The commit of this code, with -dirty where files differ from it; None if it is unknown."""
  if COMMIT in os.environ:
    return os.environ[COMMIT]
  root = pathlib.Path(__file__).parents[2]
  try:
    if pathlib.Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
      return None  # the code is inside another checkout
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return _git(root, "rev-parse", "HEAD") + ("-dirty" if changed else "")
  except (OSError, subprocess.CalledProcessError):
    return None


def _git(root: pathlib.Path, *arguments: str) -> str:
  command = ["git", "-C", str(root), *arguments]
  return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
