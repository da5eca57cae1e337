"""Tasks from published data sets."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from rlvr_jax.data.problems import Problem, Task
from rlvr_jax.data.sources import Chosen
from rlvr_jax.data.task_utils import (
  check_available,
  fill_template,
  unify_graders,
  warn_of_common_answer,
)
from rlvr_jax.ops.checks import check_integer

if TYPE_CHECKING:
  from rlvr_jax.data.published.builder import Records


def published(
  *,
  dataset: str,
  data_dir: str | os.PathLike[str],
  split: str = "train",
  held_out_dataset: str = "",
  held_out_data_dir: str | os.PathLike[str] = "",
  held_out_split: str = "test",
  warm_start_size: int = 0,
  held_out_size: int = 0,
  min_difficulty: float = -math.inf,
  max_difficulty: float = math.inf,
  max_question_characters: int = 0,
  prompt: str = "",
  grader: str = "",
  prepared_dir: str | os.PathLike[str] = "~/.cache/rlvr_jax/published",
) -> Task:
  """Makes a task from the files of a published data set, in the published order.

  Problems of the split are chosen by difficulty and length. Of the chosen problems with a published
  solution, the first `warm_start_size` are the warm start. All other chosen problems are trained
  on. The first `held_out_size` problems of the held-out split are held out. Train and warm start
  exclude held-out questions, even if white space differs. Records are read on access.

  Args:
    dataset: name of the data set, one of `rlvr_jax.data.published.builder.DATASETS`.
    data_dir: folder or file as published, local or a URL such as gs://bucket/folder.
    split: split of the data set to train on; "" for a task of held-out problems only.
    held_out_dataset: name of the held-out data set; "" if it is the same as `dataset`.
    held_out_data_dir: folder or file of the held-out data set; "" if it is the same as `data_dir`.
    held_out_split: split of the held-out data set.
    warm_start_size: number of warm-start problems; may be 0.
    held_out_size: number of held-out problems; 0 for all.
    min_difficulty: lower bound for train and warm start, on the data set's own scale (MATH: levels
      1 to 5, LiveCodeBench: 1 easy to 3 hard). If this or `max_difficulty` is given, problems of
      unknown difficulty are excluded.
    max_difficulty: upper bound for train and warm start, on the same scale.
    max_question_characters: the most characters of a question in train and warm start, without the
      prompt template; 0 for no limit.
    prompt: template over {question}, {interface} (how a program will be called; "" for
      mathematics), {subject}, {difficulty} and {id}; "" for the data set's own template.
    grader: spec of the grader, such as "code(reward='fraction')"; "" for the data set's own grader.
    prepared_dir: local folder for the records prepared from the files; created if missing.
  Raises:
    OSError: a file is missing or cannot be read, or the prepared records cannot be written.
    ValueError: a file is not as published (the message names it, and the line or record), the
      prepared records are damaged, a name or template field is unknown, a size is out of range, or
      no problem is left.
  """
  held_out_dataset = held_out_dataset or dataset
  held_out_data_dir = held_out_data_dir or data_dir
  check_integer("published", "warm_start_size", warm_start_size, low=0)
  check_integer("published", "held_out_size", held_out_size, low=0)
  check_integer("published", "max_question_characters", max_question_characters, low=0)
  if (dataset, str(data_dir), split) == (held_out_dataset, str(held_out_data_dir), held_out_split):
    raise ValueError(
      f"split and held_out_split are both {split!r} of {dataset}: nothing would be left to train "
      'on; set them to two different splits, or set split = "" for a task of held-out problems only'
    )
  # Imported here because tensorflow-datasets loads slowly and other tasks do not need it.
  from rlvr_jax.data.published.builder import prepare

  def choose_problems(records: Records, indices: np.ndarray) -> Chosen:
    return Chosen(
      lambda index: _make_problem(records, index, prompt), indices, records.keys[indices]
    )

  held_out_set = prepare(held_out_dataset, held_out_data_dir, prepared_dir)
  records = held_out_set.records(held_out_split)
  check_available("published", "held_out_size", held_out_size, len(records))
  held_out = choose_problems(records, np.arange(held_out_size or len(records)))
  held_out[0]  # checks the template
  train = warm_start = Chosen.of(())
  train_grader = held_out_grader = grader or records.dataset.grader
  if split:
    is_same_set = (held_out_dataset, held_out_data_dir) == (dataset, data_dir)
    train_set = held_out_set if is_same_set else prepare(dataset, data_dir, prepared_dir)
    records = train_set.records(split)
    indices = _choose_train_indices(
      records, min_difficulty, max_difficulty, max_question_characters, held_out.keys()
    )
    with_solution = indices[records.has_solution[indices]]
    available = min(len(with_solution), len(indices) - 1)
    check_available("published", "warm_start_size", warm_start_size, available)
    warm_start_indices = with_solution[:warm_start_size]
    warm_start = choose_problems(records, warm_start_indices)
    train = choose_problems(records, indices[~np.isin(indices, warm_start_indices)])
    train_grader = grader or records.dataset.grader
  elif warm_start_size:
    raise ValueError('warm_start_size is given but split is "": there is nothing to train on')
  graders = [train_grader, train_grader, held_out_grader]
  grader, changes = unify_graders(graders)
  train, warm_start, held_out = (
    source.map(change)
    for source, change in zip((train, warm_start, held_out), changes, strict=True)
  )
  task = Task(dataset, train=train, warm_start=warm_start, held_out=held_out, grader=grader)
  return warn_of_common_answer(task)


def _choose_train_indices(
  records: Records,
  min_difficulty: float,
  max_difficulty: float,
  max_characters: int,
  held_out_keys: Collection[str],
) -> np.ndarray:
  """Indices of the records to train on, i64[n], n ≥ 1."""
  name = f"{records.dataset.name}/{records.split}"
  excluded_by_reason = {}
  if (min_difficulty, max_difficulty) != (-math.inf, math.inf):
    in_range = (records.difficulty >= min_difficulty) & (records.difficulty <= max_difficulty)
    reason = f"with a difficulty unknown or outside [{min_difficulty:g}, {max_difficulty:g}]"
    excluded_by_reason[reason] = ~in_range
  if max_characters:
    reason = f"of more than {max_characters} characters"
    excluded_by_reason[reason] = records.characters > max_characters
  excluded_by_reason["held out"] = np.isin(records.keys, list(held_out_keys))
  indices = np.flatnonzero(~np.any(list(excluded_by_reason.values()), axis=0))
  reasons = ", ".join(
    f"{np.sum(excluded)} {reason}"
    for reason, excluded in excluded_by_reason.items()
    if np.any(excluded)
  )
  if reasons:
    logging.info("%s: %d of %d problems; not %s", name, len(indices), len(records), reasons)
  if not len(indices):
    raise ValueError(
      f"none of the {len(records)} problems of {name} is left to train on ({reasons}): widen the "
      "limits of difficulty or length"
    )
  return indices


def _make_problem(records: Records, index: int, prompt: str) -> Problem:
  from rlvr_jax.data.published.programs import describe_interface

  record = records[index]
  fields = {
    "question": record.question,
    "interface": describe_interface(record.reference),
    "subject": record.subject,
    "difficulty": f"{record.difficulty:g}",
    "id": record.id,
  }
  reference = {**record.reference, "dataset": records.dataset.name}
  return Problem(
    question=fill_template("prompt", prompt or records.dataset.prompt, fields),
    answer=record.answer,
    solution=record.solution,
    reference=reference,
    where=f"{records.dataset.name}, problem {record.id!r}",
  )
