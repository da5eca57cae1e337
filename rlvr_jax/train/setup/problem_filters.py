"""Which problems of a task fit a run's limits on length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import logging

from rlvr_jax.data import (
  Problem,
  ProblemSource,
  Task,
  Tokenizer,
  encode_demonstrations,
)
from rlvr_jax.data.batches import check_prompt
from rlvr_jax.data.curriculum import Curriculum
from rlvr_jax.data.sources import Chosen, listed
from rlvr_jax.models.huggingface_config import longest_text
from rlvr_jax.ops.checks import check_choice

_OF_TRAINING = ("train", "warm_start")
_MAX_MEASURED = 1_000_000  # problems whose length is measured before a run begins


def warn_of_long_texts(config: ml_collections.ConfigDict) -> None:
  """Logs a warning if prompts and responses may be longer than the checkpoint supports."""
  longest = longest_text(config.model.checkpoint) if config.model.checkpoint else None
  needed = config.max_prompt_length + config.max_response_length
  if longest is not None and needed > longest:
    logging.warning(
      "config.model.checkpoint = %r was made for %d tokens (max_position_embeddings), but"
      " config.max_prompt_length + config.max_response_length = %d. Lower them, or change its"
      " config.json, including the rotary settings",
      config.model.checkpoint,
      longest,
      needed,
    )


def fitting(config: ml_collections.ConfigDict, task: Task, tokenizer: Tokenizer) -> Task:
  """The task without prompts beyond the limit, if the configuration says to drop them.

  Held-out problems are dropped by "drop_everywhere" only, since that changes the benchmark.

  Raises:
    ValueError: a prompt or a demonstration is too long and is not to be dropped, or none fits.
      Of training problems that are generated when sampled only the first 100 are checked here.
  """
  choice, limit = config.prompts.too_long, config.max_prompt_length
  phases = {"error": (), "drop": _OF_TRAINING, "drop_everywhere": (*_OF_TRAINING, "held_out")}
  check_choice("config.prompts", "too_long", choice, phases)
  if phases[choice]:
    fits = lambda problem: 0 < len(tokenizer.encode_prompt(problem.question)) <= limit
    kept: dict[str, Any] = {p: _kept(p, getattr(task, p), fits, limit) for p in phases[choice]}
    task = dataclasses.replace(task, **kept)
  check = functools.partial(_check_prompts, tokenizer=tokenizer, limit=limit)
  check("held-out", task.held_out)
  for source in listed(task.train) if choice == "error" else []:  # what is kept has been measured
    check("training", source)
  check("training", task.train, most=100)
  if config.warm_start.num_steps:
    if not len(task.warm_start):
      raise ValueError(
        "config.warm_start.num_steps > 0 but the task has no demonstrations; set the task's"
        " warm_start_size, or config.warm_start.num_steps = 0"
      )
    check("warm-start", task.warm_start)
    encode_demonstrations(_all(task.warm_start), tokenizer, config.max_response_length)
  return task


def _all(source: ProblemSource) -> list[Problem]:
  return [source[index] for index in range(len(source))]


def _check_prompts(
  phase: str, source: ProblemSource, tokenizer: Tokenizer, limit: int, most: int = _MAX_MEASURED
) -> None:
  """Raises PromptError for the first of at most `most` prompts that does not fit."""
  for index in range(min(len(source), most)):
    problem = source[index]
    length = len(tokenizer.encode_prompt(problem.question))
    check_prompt(problem, length, limit, f"{phase} problem {index}")


def _kept(
  name: str, source: ProblemSource, fits: Callable[[Problem], bool], limit: int
) -> ProblemSource:
  if len(source) > _MAX_MEASURED:
    raise ValueError(
      f"config.prompts.too_long would have to measure {len(source)} problems of {name}"
      f" before the run; at most {_MAX_MEASURED} are allowed; set it to 'error'"
    )
  kept: Any = source.where(fits) if isinstance(source, Curriculum) else Chosen.where(fits, source)
  if len(source) and not len(kept):
    raise ValueError(
      f"none of the {len(source)} prompts of {name} has at most config.max_prompt_length = {limit}"
      " tokens; raise it"
    )
  if len(kept) < len(source):
    logging.info(
      "%d of %d problems of %s are left out: their prompts have more than %d tokens",
      len(source) - len(kept), len(source), name, limit,
    )  # fmt: skip
    return kept
  return source
