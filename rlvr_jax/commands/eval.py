"""The command eval: evaluates any checkpoint on any data set, and can be resumed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr_jax.evaluate.held_out import Sample, accuracy, evaluated
from rlvr_jax.storage.files import (
  DamagedFileError,
  JsonLines,
  is_as_written,
  read_lines,
  read_records,
  replace_lines,
  replacing,
  with_crc32,
)
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.workdir import StartFiles, opened
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.reporting.progress import progress, say, warn
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.grading import grader_pool, make_collector
from rlvr_jax.train.start.parameters import chosen_params, load_frozen

PROBLEMS_FILE = "problems.jsonl"
RESULT_FILE = "evaluation.json"
# Fields that may change when an evaluation is resumed, because they do not affect its results.
_MAY_DIFFER = ("grading.num_workers", "evaluation.ks")


def evaluate_checkpoint(parts: Parts, workdir: str | Path, folder: Path | None) -> dict[str, float]:
  """Samples, grades and summarizes; batches that are complete in the workdir are not repeated.

  Writes `problems.jsonl`, one line per problem with all its samples, and `evaluation.json`.

  Args:
    parts: result of `build(config)`; `config.evaluation` has the number of samples and how to
      sample.
    workdir: workdir of the evaluation, or gs://BUCKET/FOLDER.
    folder: see `train.start.parameters.chosen_params`.
  Returns:
    Accuracies with intervals, see `accuracy`; on the first of several processes only.
  """
  c, num_problems = parts.config.evaluation, len(parts.task.held_out)
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.only_first_prints())
    whole, files = opened(workdir, enter)
    workdir = whole.local
    multihost.on_first(lambda: _check_config(whole, files, parts, folder), None)
    count = lambda: _complete_problems(workdir, num_problems, c.batch_prompts, whole.kept)
    done = multihost.exchange(multihost.on_first(count, 0))[0]
    if done < num_problems:
      pool = multihost.together(lambda: enter(grader_pool(parts.config, parts.task)))
      lines = multihost.on_first(lambda: enter(_continued(workdir, done)), None)
      frozen = load_frozen(parts).trainer
      params, step = chosen_params(parts, folder)
      multihost.on_first(files.begin, None)
      engine = parts.programs.held_out_engine
      batches = evaluated(
        engine,
        engine.load(params, frozen),
        parts.task.held_out,
        collector=make_collector(parts, pool),
        batch_size=c.batch_prompts,
        num_samples=c.num_samples,
        seed=c.seed,
        version=step,
        first_batch=done // c.batch_prompts,
      )
      with progress(num_problems, "evaluation", unit="problems", initial=done) as bar:
        for batch in batches:
          if lines is not None:
            lines.append(_record(done + i, row) for i, row in enumerate(batch.samples))
            whole.publish()
          done += len(batch.samples)
          bar.update(len(batch.samples))
    if not multihost.is_first():
      return {}
    samples = [record["samples"] for record in _as_written(workdir / PROBLEMS_FILE)]
    values = accuracy(samples, ks=c.ks, seed=c.seed)
    with replacing(workdir / RESULT_FILE) as file:
      file.write((json.dumps(values, indent=2) + "\n").encode())
    say(_table(values, num_problems, c.num_samples, whole.kept))
    return values


def _check_config(workdir: Workdir, files: StartFiles, parts: Parts, folder: Path | None) -> None:
  """Raises WorkdirError unless the workdir is new or belongs to the same evaluation."""
  workdir.fetch()
  about = json.loads(parts.config.to_json_best_effort()) | {"evaluated": str(folder or "")}
  files.check_config(json.dumps(about), _MAY_DIFFER)


def _complete_problems(workdir: Path, num_problems: int, batch_size: int, kept: Path) -> int:
  """The number of problems in complete batches; an incomplete batch is sampled again.

  So are a line that was changed and those behind it, which is printed; `kept` is the workdir there.
  """
  lines = read_lines(workdir / PROBLEMS_FILE)
  found = sum(1 for _ in _as_written(workdir / PROBLEMS_FILE))
  done = found if found == num_problems else found // batch_size * batch_size
  if found < len([line for line in lines if line.endswith(b"\n")]):
    warn(
      f"{kept / PROBLEMS_FILE}, line {found + 1} is not as it was written, or not the one that"
      f" belongs there: problems from {done} on are sampled again, to the same answers"
    )
  return done


def _continued(workdir: Path, done: int) -> JsonLines:
  """Opens the file of problems, truncated to the first `done` problems."""
  path = workdir / PROBLEMS_FILE
  replace_lines(path, read_lines(path)[:done])
  return JsonLines(path)


def _as_written(path: Path) -> Iterator[dict[str, Any]]:
  """The records of a file of problems, up to the first that is not as it was written."""
  with contextlib.suppress(FileNotFoundError, DamagedFileError):
    for number, record in enumerate(read_records(path)):
      if record.get("problem") != number or not is_as_written(record):
        return
      yield record


def _record(number: int, samples: list[Sample]) -> dict[str, Any]:
  """The record of a problem in problems.jsonl; fields that differ by sample are lists."""
  first = samples[0]
  of_each = ("completion", "outcome", "extracted", "reward", "tokens", "stopped")
  record = {
    "problem": number,
    "prompt": first["prompt"],
    "answer": first["answer"],
    "samples": [{name: sample[name] for name in of_each} for sample in samples],
  }
  return with_crc32(record)


def _table(values: dict[str, float], num_problems: int, num_samples: int, workdir: Path) -> str:
  names = [name for name in values if f"{name}_low" in values]
  rows = [
    f"{name.removeprefix('eval/'):<12} {values[name]:.4f}"
    f"  [{values[f'{name}_low']:.4f}, {values[f'{name}_high']:.4f}]"
    for name in names
  ]
  outcomes = [
    f"{name.removeprefix('eval/outcome/')} {value:.1%}"
    for name, value in values.items()
    if name.startswith("eval/outcome/")
  ]
  rows.append("graded       " + ", ".join(outcomes))
  title = f"{num_problems} problems, {num_samples} samples each; 95 % intervals over problems"
  files = f"{workdir / RESULT_FILE}, {workdir / PROBLEMS_FILE}"
  return "\n".join([title, *rows, files])
