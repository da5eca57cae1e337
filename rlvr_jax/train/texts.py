"""The text side of a run: tokenizer, problems that fit, and the graders of its completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
from absl import logging

from rlvr_jax.codejudge import cgroups
from rlvr_jax.codejudge.sandbox import ACCEPTED, UNSANDBOXED
from rlvr_jax.data import (
  ByteTokenizer,
  Problem,
  ProblemSource,
  Task,
  Tokenizer,
  encode_demonstrations,
  encode_prompts,
)
from rlvr_jax.data.huggingface_tokenizer import HuggingFaceTokenizer
from rlvr_jax.models.huggingface_config import longest_text
from rlvr_jax.ops.checks import check_between, check_choice
from rlvr_jax.rewards.combined import weighted_reference
from rlvr_jax.rewards.outcome import OutcomePolicy, outcome_policy
from rlvr_jax.rewards.pool import GraderPool, default_workers
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.train import multihost, sharding
from rlvr_jax.train.host import alive

WEIGHTED = "rlvr_jax.rewards.combined:weighted"
BY_REFERENCE = "rlvr_jax.rewards.combined:by_reference"
_GRADERS_SHOW_IN = 100  # problems of a source, whose references name the graders of them all
_MOST_MEASURED = 1_000_000  # problems whose length may have to be known before a run begins


def make_tokenizer(config: ml_collections.ConfigDict) -> Tokenizer:
  """The tokenizer that `config.tokenizer` names.

  Raises:
    ValueError: it is not there, or has no chat template where one is asked for.
  """
  settings, name = config.prompts, config.tokenizer
  check_choice("config.prompts", "format", settings.format, ("plain", "chat"))
  if name == "bytes":
    for field, plain in (("format", "plain"), ("system", ""), ("template", "")):
      if settings[field] != plain:
        raise ValueError(
          f"config.prompts.{field} = {settings[field]!r} needs a chat template, which"
          f" config.tokenizer = 'bytes' has not; set it to {plain!r}, or choose another tokenizer"
        )
    return ByteTokenizer()
  if name == "checkpoint" and not config.model.checkpoint:
    raise ValueError(
      "config.tokenizer = 'checkpoint', but config.model.checkpoint is empty; set it to a folder"
      " of Hugging Face's layout, or config.tokenizer = 'bytes'"
    )
  try:
    return HuggingFaceTokenizer(
      config.model.checkpoint if name == "checkpoint" else name,
      prompt_format=settings.format,
      system_prompt=settings.system,
      chat_template=settings.template,
    )
  except (ImportError, OSError, ValueError) as error:
    raise ValueError(
      f"config.tokenizer = {name!r} is none of 'bytes', 'checkpoint' and the folder of a tokenizer"
      f" that can be used with config.prompts = {settings.to_dict()}: {error}"
    ) from error


def warn_of_long_texts(config: ml_collections.ConfigDict) -> None:
  """Says it where prompts and responses may be longer than what the checkpoint was made for."""
  longest = longest_text(config.model.checkpoint) if config.model.checkpoint else None
  wanted = config.max_prompt_length + config.max_response_length
  if longest is not None and wanted > longest:
    logging.warning(
      "config.model.checkpoint = %r was made for %d tokens (max_position_embeddings), but"
      " config.max_prompt_length + config.max_response_length = %d. Lower them, or have its"
      " config.json say otherwise, with the rotary settings to go with it",
      config.model.checkpoint,
      longest,
      wanted,
    )


# --- problems -------------------------------------------------------------------------------------


class _Chosen:
  """Some problems of a source, by their indices."""

  def __init__(self, source: ProblemSource, indices: Sequence[int]):
    self._source, self._indices = source, indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Problem:
    return self._source[self._indices[index]]


def fitting(config: ml_collections.ConfigDict, task: Task, tokenizer: Tokenizer) -> Task:
  """The task without training prompts beyond the limit, if the configuration says to drop them.

  Held-out problems are never dropped: a benchmark is all of it.

  Raises:
    ValueError: a prompt or a demonstration is too long and is not to be dropped, or none fits.
      Of training problems that may be dropped by nobody, the first ones stand for all: they may be
      generated when drawn.
  """
  choice, limit = config.prompts.too_long, config.max_prompt_length
  check_choice("config.prompts", "too_long", choice, ("error", "drop"))
  if choice == "drop":
    fits = lambda problem: 0 < len(tokenizer.encode_prompt(problem.question)) <= limit
    kept = lambda name: _kept(name, getattr(task, name), fits, limit)
    task = dataclasses.replace(task, train=kept("train"), warm_start=kept("warm_start"))
  encode_prompts(_all(task.held_out), tokenizer, limit)
  encode_prompts(_first(task.train, 100), tokenizer, limit)
  if config.warm_start.num_steps:
    if not len(task.warm_start):
      raise ValueError(
        "config.warm_start.num_steps > 0 but the task has no demonstrations; set the task's"
        " warm_start_size, or config.warm_start.num_steps = 0"
      )
    encode_prompts(_all(task.warm_start), tokenizer, limit)
    encode_demonstrations(_all(task.warm_start), tokenizer, config.max_response_length)
  return task


def _all(source: ProblemSource) -> list[Problem]:
  return [source[index] for index in range(len(source))]


def _first(source: ProblemSource, count: int) -> list[Problem]:
  return [source[index] for index in range(min(len(source), count))]


def _kept(
  name: str, source: ProblemSource, fits: Callable[[Problem], bool], limit: int
) -> ProblemSource:
  if len(source) > _MOST_MEASURED:
    raise ValueError(
      f"config.prompts.too_long = 'drop' would have to measure {len(source)} problems of {name}"
      f" before the run; at most {_MOST_MEASURED} are; set it to 'error'"
    )
  indices = [index for index in range(len(source)) if fits(source[index])]
  if len(source) and not indices:
    raise ValueError(
      f"none of the {len(source)} prompts of {name} has at most config.max_prompt_length = {limit}"
      " tokens; raise it"
    )
  if len(indices) < len(source):
    logging.info(
      "%d of %d problems of %s are left out: their prompts have more than %d tokens",
      len(source) - len(indices), len(source), name, limit,
    )  # fmt: skip
    return _Chosen(source, indices)
  return source


# --- graders --------------------------------------------------------------------------------------


class _Regraded:
  """A source whose problems carry the references of another grader."""

  def __init__(self, source: ProblemSource, change: Callable[[Mapping[str, Any]], Any]):
    self._source, self._change = source, change

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Problem:
    problem = self._source[index]
    return dataclasses.replace(problem, reference=self._change(problem.reference))


class _Graders(NamedTuple):
  """What grades the problems of a phase."""

  main: str
  extra: tuple[tuple[str, float], ...] = ()

  @property
  def path(self) -> str:
    return WEIGHTED if self.extra else self.main

  def reference(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the grader at `path` gets in place of the task's reference."""
    # A task's own wrapping, if it is a mixture, is for the grader that asked for it.
    reference = given if self.main == BY_REFERENCE else _unwrapped(given)
    if self.extra:
      reference = weighted_reference(self.main, reference, self.extra)
      for part in reference["parts"][1:]:
        part["reference"] = _unwrapped(part["reference"])
    return reference

  def named(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, for a pool whose grader is `BY_REFERENCE`."""
    reference = self.reference(given)
    if self.path == BY_REFERENCE:
      return reference
    return {"grader": self.path, "reference": reference}


def _unwrapped(reference: Mapping[str, Any]) -> Mapping[str, Any]:
  """What the grader of a mixture's part gets; any other reference as it is."""
  return reference["reference"] if reference.keys() >= {"grader", "reference"} else reference


def with_graders(config: ml_collections.ConfigDict, task: Task) -> Task:
  """The task with the graders that the configuration names.

  Those of `config.grading` are for training, that of `config.evaluation` for held-out problems.
  Where the two differ the references name them, so that one pool serves both.

  Raises:
    ValueError: an import path or a weight that is none.
  """
  said = config.grading.unsandboxed_code
  if said not in ("", ACCEPTED):
    raise ValueError(
      f"config.grading.unsandboxed_code = {said!r}: leave it empty, or say {ACCEPTED!r} to have"
      " generated programs run without a sandbox"
    )
  for field in ("grading", "evaluation"):
    check_grader(f"config.{field}.grader", config[field].grader or task.grader)
  extra = tuple(_checked(pair) for pair in config.grading.extra)
  training = _Graders(config.grading.grader or task.grader, extra)
  held_out = _Graders(config.evaluation.grader or task.grader)
  if training == held_out == _Graders(task.grader):
    return task
  alike = training == held_out
  change = lambda graders: graders.reference if alike else graders.named
  return dataclasses.replace(
    task,
    grader=training.path if alike else BY_REFERENCE,
    train=_Regraded(task.train, change(training)),
    warm_start=_Regraded(task.warm_start, change(training)),
    held_out=_Regraded(task.held_out, change(held_out)),
  )


def _checked(pair) -> tuple[str, float]:
  try:
    path, weight = pair
    weight = float(weight)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"config.grading.extra has {pair!r}, expected pairs such as"
      " ('rlvr_jax.rewards.formats:boxed', 0.1)"
    ) from error
  check_grader("config.grading.extra", str(path))
  check_between("config.grading.extra", str(path), weight)
  return str(path), weight


def check_grader(field: str, path: str) -> None:
  """Raises unless the path has the form of a grader's."""
  module, colon, function = path.partition(":")
  if not (module and colon and function):
    raise ValueError(
      f"{field} names {path!r}, expected 'package.module:function', such as"
      " 'rlvr_jax.rewards.mathematics:mathematics'"
    )


_CODE = "rlvr_jax.rewards.code:code"


def grader_pool(config: ml_collections.ConfigDict, task: Task) -> GraderPool:
  """The processes that grade; each tries all of the task's graders before the first completion.

  Raises:
    GraderStartError: a grader cannot work here.
  """
  settings = config.grading
  said = settings.unsandboxed_code
  sources = (task.train, task.held_out)
  some = [problem for source in sources for problem in _first(source, _GRADERS_SHOW_IN)]
  inner = [path for problem in some for path in _graders_in(problem.reference)]
  if _CODE in (task.grader, *inner) and (reason := cgroups.why_none()):
    logging.warning(
      "no control group is to be had for generated programs (%s): what memory and processor time"
      " they take is only polled. For limits by the kernel start the run where cgroup v2 is"
      " delegated, such as with systemd-run --user --scope",
      reason,
    )
  return GraderPool(
    task.grader,
    num_workers=settings.num_workers or default_workers(),
    timeout_s=settings.timeout_s,
    memory_mib=settings.memory_mib,
    environment={UNSANDBOXED: said} if said else {},
    preload=[*dict.fromkeys(inner)],
    on_grade=alive,
  )


def _graders_in(reference: Mapping[str, Any]) -> list[str]:
  """The graders that a reference names, of a combined grader's parts or of a mixture's."""
  found = [str(reference["grader"])] if reference.keys() >= {"grader", "reference"} else []
  parts = [*reference.get("parts", ()), *([reference["reference"]] if found else ())]
  return found + [path for part in parts for path in _graders_in(part)]


def make_outcome_policy(config: ml_collections.ConfigDict) -> OutcomePolicy:
  """What `config.grading.outcomes` says of every outcome."""
  return outcome_policy({k: _as_number(v) for k, v in config.grading.outcomes.items()})


def _as_number(text: str) -> float | str:
  """A locked configuration field has one type, so numbers beside names are written as text."""
  try:
    return float(text)
  except ValueError:
    return text


def make_collector(parts: Any, pool: GraderPool) -> Collector:
  """Encodes, decodes and grades as the configuration of a run's `build.Parts` says."""
  c = parts.config
  return Collector(
    tokenizer=parts.tokenizer,
    max_prompt_length=c.max_prompt_length,
    submit=pool.submit if jax.process_count() == 1 else multihost.SharedGrader(pool).submit,
    to_host=sharding.to_host,
    outcome_policy=make_outcome_policy(c),
    overlong_buffer=c.overlong.buffer,
    overlong_filter=c.overlong.filter,
  )
