"""Selects the problems of a task that fit a run's limits on length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from absl import logging

from rlvr_jax.data import (
  Problem,
  ProblemSource,
  Task,
  Tokenizer,
  encode_demonstrations,
)
from rlvr_jax.data.curriculum import Curriculum
from rlvr_jax.data.sources import Chosen, listed_sources
from rlvr_jax.data.tokenizer import check_prompt, encode_prompt
from rlvr_jax.models.huggingface_config import longest_text
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.types import BatchShape

_OF_TRAINING = ("train", "warm_start")
_MAX_MEASURED = 1_000_000  # problems whose length is measured before a run begins


def describe_long_texts(
  checkpoint: str,
  shape: BatchShape,
  *,
  network: str | None = None,
  prompts: str = "config.max_prompt_length",
) -> str:
  """A warning if prompts and responses may be longer than the checkpoint supports; else "".

  Args:
    checkpoint: a folder in Hugging Face's layout, which states the supported length; "" for none.
    shape: sizes of the largest batch; its `max_prompt_length` limits this network's prompts.
    network: a text "field = value" that names the network in the warning; None:
      `config.model.checkpoint` and its value.
    prompts: the field that limits the prompts.
  """
  longest = longest_text(checkpoint) if checkpoint else None
  needed = shape.max_prompt_length + shape.max_response_length
  if longest is None or needed <= longest:
    return ""
  return (
    f"{network or f'config.model.checkpoint = {checkpoint!r}'} was made for {longest} tokens"
    f" (max_position_embeddings), but {prompts} + config.max_response_length ="
    f" {needed}. Lower these limits, or change its config.json, including the rotary settings"
  )


def limit_lengths(
  task: Task, tokenizer: Tokenizer, shape: BatchShape, *, too_long: str, warm_starts: bool
) -> Task:
  """The task without problems whose prompts are too long, if the configuration drops such problems.

  Held-out problems are dropped only by "drop_everywhere", since dropping them changes the
  benchmark.

  Args:
    task, tokenizer: task and tokenizer of the run.
    shape: the shape of a batch, with the limits on length.
    too_long: `config.prompts.too_long`.
    warm_starts: whether the run trains on demonstrations.
  Raises:
    ValueError: a prompt or a demonstration is too long and is not to be dropped, or no prompt fits.
      If training problems are generated when sampled, only the first 100 are checked here.
  """
  limit = shape.max_prompt_length
  phases = {"error": (), "drop": _OF_TRAINING, "drop_everywhere": (*_OF_TRAINING, "held_out")}
  check_choice("config.prompts", "too_long", too_long, phases)
  if phases[too_long]:
    fits = lambda problem: 0 < len(encode_prompt(problem, tokenizer)) <= limit
    sources = {phase: getattr(task, phase) for phase in phases[too_long]}
    short: Any = {phase: _drop(phase, source, fits, limit) for phase, source in sources.items()}
    task = dataclasses.replace(task, **short)
  check = functools.partial(_check_prompts, tokenizer=tokenizer, limit=limit)
  check("held-out", task.held_out)
  # Unless too_long is "error", all prompts have been measured above.
  for source in listed_sources(task.train) if too_long == "error" else []:
    check("training", source)
  check("training", task.train, most=100)
  if warm_starts:
    if not len(task.warm_start):
      raise ValueError(
        "config.warm_start.num_steps > 0 needs demonstrations, but the task has no demonstrations;"
        " set the task's warm_start_size, or config.warm_start.num_steps = 0"
      )
    check("warm-start", task.warm_start)
    encode_demonstrations(_all(task.warm_start), tokenizer, shape.max_response_length)
  return task


def _all(source: ProblemSource) -> list[Problem]:
  return [source[index] for index in range(len(source))]


def _check_prompts(
  phase: str, source: ProblemSource, tokenizer: Tokenizer, limit: int, most: int = _MAX_MEASURED
) -> None:
  """Raises PromptError for the first of at most `most` prompts that does not fit."""
  for index in range(min(len(source), most)):
    problem = source[index]
    length = len(encode_prompt(problem, tokenizer))
    check_prompt(problem, length, limit, f"{phase} problem {index}")


def _drop(
  name: str, source: ProblemSource, fits: Callable[[Problem], bool], limit: int
) -> ProblemSource:
  """The problems of a source whose prompts fit the limit."""
  if len(source) > _MAX_MEASURED:
    raise ValueError(
      f"config.prompts.too_long needs the lengths of all {len(source)} problems of {name} before"
      f" the run, but at most {_MAX_MEASURED} are measured; set config.prompts.too_long = 'error'"
    )
  short: ProblemSource
  short = source.where(fits) if isinstance(source, Curriculum) else Chosen.where(fits, source)
  if len(source) and not len(short):
    raise ValueError(
      f"none of the {len(source)} prompts of {name} has at most config.max_prompt_length = {limit}"
      " tokens; raise this limit"
    )
  if len(short) < len(source):
    logging.info(
      "%d of %d problems of %s are left out: their prompts have more than %d tokens",
      len(source) - len(short), len(source), name, limit,
    )  # fmt: skip
    return short
  return source
