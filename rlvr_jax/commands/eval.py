"""The command `eval`: evaluates any checkpoint on any data set; a killed evaluation resumes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr_jax.evaluate.held_out import GAP, Sample, accuracy, evaluate_problems
from rlvr_jax.rollouts.group import Policy
from rlvr_jax.rollouts.sampler import SamplerSettings
from rlvr_jax.storage.files import (
  DamagedFileError,
  JsonLines,
  is_as_written,
  read_lines,
  read_records,
  replace_file,
  replace_lines,
  with_crc32,
)
from rlvr_jax.storage.places import Workdir
from rlvr_jax.train.checkpointing.workdir import StartFiles, open_workdir
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.generation.samplers import sampler_of_policy
from rlvr_jax.train.reporting.progress import progress, say, warn
from rlvr_jax.train.setup.build import Parts
from rlvr_jax.train.setup.grading import check_first_messages
from rlvr_jax.train.start.parameters import load_policy

PROBLEMS_FILE = "problems.jsonl"
RESULT_FILE = "evaluation.json"
# Fields that may change when an evaluation is resumed, because they do not affect its results.
_MAY_DIFFER = ("grading.num_workers", "evaluation.ks")


def evaluate_checkpoint(parts: Parts, workdir: str | Path, folder: Path | None) -> dict[str, float]:
  """Evaluates a policy on the held-out problems; returns and writes its accuracies.

  Two files are written to the workdir: `problems.jsonl` has one line per problem, with all samples
  of the problem, and `evaluation.json` has the accuracies. A batch of problems whose samples
  are already in the workdir is not sampled again.

  Args:
    parts: result of `build(config)`; `config.evaluation` has the number of samples and the settings
      of sampling.
    workdir: folder of the evaluation, or gs://BUCKET/FOLDER.
    folder: checkpoint of the policy, see `train.start.parameters.load_policy`.
  Returns:
    Accuracies with intervals, see `accuracy`; {} on all processes but the first.
  """
  c = parts.config.evaluation
  num_problems = len(parts.task.held_out)
  with contextlib.ExitStack() as stack:
    enter = lambda resource: stack.enter_context(contextlib.closing(resource))
    stack.enter_context(multihost.silence_all_but_first())
    eval_folder, files = open_workdir(workdir, enter)
    local = eval_folder.local
    config = json.loads(parts.config.to_json_best_effort()) | {"evaluated": str(folder or "")}
    multihost.run_on_first(lambda: _check_config(eval_folder, files, json.dumps(config)), None)
    count = lambda: _count_complete_problems(local, num_problems, c.batch_prompts, eval_folder.path)
    done = multihost.result_of_first(count)
    if done < num_problems:
      pools = multihost.run_together(lambda: parts.start_pools(enter))
      answers = parts.make_answers(*pools)
      length = parts.shape.max_prompt_length
      check_first_messages(answers, parts.tokenizer, length, parts.task.held_out)
      lines = multihost.run_on_first(lambda: enter(_reopen_problems(local, done)), None)
      frozen = parts.initial.frozen().trainer
      params, step = load_policy(parts.initial, folder)
      multihost.run_on_first(files.keep, None)
      batches = evaluate_problems(
        sampler_of_policy(
          parts.programs.held_out_engine,
          frozen,
          parts.grading,
          answers,
          SamplerSettings(c.num_samples, purpose="evaluation"),
        ),
        Policy(step, params, lambda: ""),
        parts.task.held_out,
        batch_size=c.batch_prompts,
        seed=c.seed,
        first_batch=done // c.batch_prompts,
      )
      with progress(num_problems, "evaluation", unit="problems", initial=done) as bar:
        for batch in batches:
          if lines is not None:
            lines.append(_make_record(done + i, row) for i, row in enumerate(batch.samples))
            eval_folder.publish()
          done += len(batch.samples)
          bar.update(len(batch.samples))
    if not multihost.is_first():
      return {}
    samples = [record["samples"] for record in _read_intact_records(local / PROBLEMS_FILE)]
    max_turns, best_play = parts.config.environment.max_turns, parts.task.best_play
    values = accuracy(samples, ks=c.ks, seed=c.seed, max_turns=max_turns, best_play=best_play)
    with replace_file(local / RESULT_FILE) as file:
      file.write((json.dumps(values, indent=2) + "\n").encode())
    say(_format_table(values, num_problems, c.num_samples, eval_folder.path))
    return values


def _check_config(workdir: Workdir, files: StartFiles, config_json: str) -> None:
  """Raises WorkdirError unless the workdir is new or belongs to the same evaluation."""
  workdir.fetch()
  files.check_config(config_json, _MAY_DIFFER)


def _count_complete_problems(workdir: Path, num_problems: int, batch_size: int, shown: Path) -> int:
  """Counts the problems of complete batches; an incomplete batch is sampled again.

  A damaged line, and all lines after it, are sampled again too. A warning then names the file as a
  path in the folder `shown`.
  """
  lines = read_lines(workdir / PROBLEMS_FILE)
  num_intact = sum(1 for _ in _read_intact_records(workdir / PROBLEMS_FILE))
  done = num_intact if num_intact == num_problems else num_intact // batch_size * batch_size
  if num_intact < len([line for line in lines if line.endswith(b"\n")]):
    warn(
      f"{shown / PROBLEMS_FILE}, line {num_intact + 1} is damaged or out of order: problems from"
      f" {done} on are sampled again, with the same results"
    )
  return done


def _reopen_problems(workdir: Path, done: int) -> JsonLines:
  """Opens the file of problems, truncated to the first `done` problems."""
  path = workdir / PROBLEMS_FILE
  replace_lines(path, read_lines(path)[:done])
  return JsonLines(path)


def _read_intact_records(path: Path) -> Iterator[dict[str, Any]]:
  """Yields the records of a file of problems, up to the first that is damaged or out of order."""
  with contextlib.suppress(FileNotFoundError, DamagedFileError):
    for number, record in enumerate(read_records(path)):
      if record.get("problem") != number or not is_as_written(record):
        return
      yield record


def _make_record(number: int, samples: list[Sample]) -> dict[str, Any]:
  """The record of a problem in problems.jsonl; "samples" has the fields that differ by sample."""
  first = samples[0]
  sample_fields = ("completion", "turns", "outcome", "extracted", "reward", "tokens", "stopped")
  record = {
    "problem": number,
    "prompt": first["prompt"],
    **({"messages": first["messages"]} if "messages" in first else {}),
    "answer": first["answer"],
    "samples": [
      {name: sample[name] for name in sample_fields if name in sample} for sample in samples
    ],
  }
  return with_crc32(record)


def _format_table(
  values: dict[str, float], num_problems: int, num_samples: int, workdir: Path
) -> str:
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
  if GAP in values:
    rows.append(f"below best play {values[GAP]:.4f}")
  title = f"{num_problems} problems, {num_samples} samples each; 95 % intervals over problems"
  files = f"{workdir / RESULT_FILE}, {workdir / PROBLEMS_FILE}"
  return "\n".join([title, *rows, files])
