"""Joins several tasks into one task."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping
from typing import Any

from rlvr_jax import specs
from rlvr_jax.data import plain_tasks
from rlvr_jax.data.problems import Task
from rlvr_jax.data.sources import Chosen, Concatenated, Generated, Mixed, QuestionKeys
from rlvr_jax.data.task_utils import unify_graders, warn_of_common_answer
from rlvr_jax.ops.checks import check_between, check_integer

# Tasks that are no parts: `guess` trains on the question that it holds out.
_NO_PARTS = ("mixture", "curriculum", "guess")


def mixture(
  *,
  parts: Mapping[str, Mapping[str, Any]],
  weights: Mapping[str, float],
  size: int = 0,
  seed: int,
) -> Task:
  """Mixes tasks; every stretch of `train` has the tasks' problems in proportion to the weights.

  Each part is read in a random order without repetition until it is exhausted, then again in
  another order. Warm starts and held-out problems are concatenated in the order of the parts. No
  part trains on a question that another part holds out. If the parts' graders differ, a
  problem's reference names its grader.

  Args:
    parts: label → {"name": name of a task, as in `config.task.name`, "kwargs": its arguments}.
    weights: label → relative frequency, > 0; rounded by at most 1 % of the smallest weight.
    size: problems in an epoch of training; 0: about the smallest number with which every part is
      read at least once.
    seed: seed of the parts' orders; a part's order depends on its label, not on the other parts.
  Raises:
    ValueError: the labels of parts and weights differ, a weight is not a positive number, a part is
      not a task or has no problem left to train on, or the factory of a part raises ValueError.
  """
  if not parts or set(parts) != set(weights):
    raise ValueError(
      "parts and weights need the same labels, at least one, but weights has the labels"
      f" {sorted(weights)}, and parts has the labels {sorted(parts)}"
    )
  for label, weight in weights.items():
    check_between("mixture", f"weights[{label!r}]", weight, low=0.0, open_low=True)
  check_integer("mixture", "size", size, low=0)
  task, train = join_parts("mixture", parts)
  shares = [weights[label] / sum(weights.values()) for label in parts]
  epoch_size = max(math.ceil(len(s) / share) for s, share in zip(train, shares, strict=True))
  seeds = [order_seed(seed, label) for label in parts]
  return dataclasses.replace(task, train=Mixed(train, shares, seeds, size or epoch_size))


def order_seed(seed: int, label: str) -> int:
  """The seed of a part's order, which does not depend on the other parts."""
  return zlib.crc32(f"{seed} {label}".encode())


def join_parts(kind: str, parts: Mapping[str, Mapping[str, Any]]) -> tuple[Task, list[Any]]:
  """Joins several tasks into one; also returns the training problems of each.

  Train, warm-start and held-out problems are concatenated in the order of the parts. No part trains
  on a question that another part holds out. If the parts' graders differ, a problem's reference
  names its grader.

  Args:
    kind: what the joined task is, "mixture" or "curriculum", for messages.
    parts: see `mixture`.
  Raises:
    ValueError: a part is not a task or has no problem left to train on, or its factory raises
      ValueError.
  """
  tasks = {label: _make_part(kind, label, part) for label, part in parts.items()}
  grader, changes = unify_graders([task.grader for task in tasks.values()])

  def phase_sources(phase: str) -> list[Any]:
    sources = (getattr(task, phase) for task in tasks.values())
    return [source.map(change) for source, change in zip(sources, changes, strict=True)]

  held_out = phase_sources("held_out")
  held_out_questions = QuestionKeys(frozenset().union(*(source.keys() for source in held_out)))
  train, warm_start = (
    [source.without(held_out_questions) for source in phase_sources(phase)]
    for phase in ("train", "warm_start")
  )
  for label, source in zip(tasks, train, strict=True):
    if not len(source):
      raise ValueError(f"part {label!r} of the {kind} has no problem to train on")
  task = Task(
    name="+".join(tasks),
    train=Concatenated(train),
    warm_start=Concatenated(warm_start),
    held_out=Concatenated(held_out),
    grader=grader,
  )
  return warn_of_common_answer(task), train


def _make_part(kind: str, label: str, part: Mapping[str, Any]) -> Task:
  owner = f"part {label!r} of the {kind}"
  if set(part) != {"name", "kwargs"} or part["name"] in _NO_PARTS:
    raise ValueError(
      f"{owner} is {dict(part)}, expected the keys name and kwargs, and a name other than"
      f" {', '.join(_NO_PARTS)}"
    )
  task = specs.make_from_spec(owner, plain_tasks, specs.Spec(part["name"], part["kwargs"]), Task)
  if not all(
    isinstance(s, Chosen | Generated) for s in (task.train, task.warm_start, task.held_out)
  ):
    raise ValueError(
      f"{owner}: a source of {part['name']} is neither a Chosen nor a Generated; make it one of"
      " these classes of rlvr_jax.data.sources, for example by Chosen.of(problems)"
    )
  return task
