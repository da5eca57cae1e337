"""Passes of a run over its training problems and demonstrations, and warnings about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ml_collections

from rlvr_jax.data import Task
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.reporting.progress import say, warn

MANY_PASSES = 20  # of a warm start over its demonstrations: from there on it memorizes them
_FEW_GROUPS = 0.1  # share of the groups whose rewards differ
_LOW_ENTROPY = 0.02  # nats per token; a sound policy with long, regular answers has 0.05


class WarmStart(NamedTuple):
  """The supervised phase before the first update, see `plan_warm_start`."""

  num_steps: int
  batch_size: int  # demonstrations per step
  demonstrations: int  # of the task

  @property
  def passes(self) -> float:
    """How often it sees each demonstration; 0 without any."""
    if not self.demonstrations:
      return 0.0
    return self.num_steps * self.batch_size / self.demonstrations


def plan_warm_start(
  settings: ml_collections.ConfigDict, task: Task, *, checkpoint: str
) -> WarmStart:
  """The supervised phase of a run; without steps if there is none.

  Args:
    settings: `config.warm_start`.
    task: of the run.
    checkpoint: `config.start.checkpoint`, a policy that needs no warm start.
  """
  num_steps = 0 if checkpoint else settings.num_steps
  return WarmStart(num_steps, settings.batch_size, len(task.warm_start))


def announce(
  schedule: Schedule,
  warm_start: WarmStart,
  *,
  num_updates: int,
  groups: int,
  problems: int,
  dynamic_sampling: bool,
) -> None:
  """Prints how often a run will see its problems; warns if it sees its demonstrations too often.

  Args:
    schedule, warm_start, num_updates: of the run.
    groups: sampled per batch.
    problems: number of training problems.
    dynamic_sampling: whether more groups are sampled where groups do not count.
  """
  say(
    planned_passes(
      schedule,
      num_updates=num_updates,
      groups=groups,
      problems=problems,
      dynamic_sampling=dynamic_sampling,
    )
  )
  if warning := warm_start_warning(warm_start):
    warn(warning)


def planned_passes(
  schedule: Schedule, *, num_updates: int, groups: int, problems: int, dynamic_sampling: bool
) -> str:
  """A line on how often the updates see each training problem; arguments as of `announce`."""
  # In a thread, a batch for each update; otherwise refreshes are sampled as a whole.
  by_limit = 0 if schedule.threaded or not num_updates else schedule.limit(num_updates - 1)
  batches = by_limit or num_updates
  prompts = batches * groups
  least = "at least " if dynamic_sampling else ""
  return (
    f"{num_updates} updates sample {least}{prompts:,} prompts from {problems:,} training problems,"
    f" {least}{prompts / problems:.3g} passes over them"
  )


def warm_start_warning(warm_start: WarmStart) -> str | None:
  """A line where the warm start sees its demonstrations too often, else None."""
  if warm_start.passes <= MANY_PASSES:
    return None
  few = MANY_PASSES * warm_start.demonstrations // warm_start.batch_size
  return (
    f"the warm start makes {warm_start.passes:.0f} passes over {warm_start.demonstrations}"
    f" demonstrations; from about {MANY_PASSES} on the policy memorizes them. Lower"
    f" config.warm_start.num_steps = {warm_start.num_steps} to at most {max(few, 1)}, or give more"
    " demonstrations (for most tasks, config.task.kwargs.warm_start_size)"
  )


def first_update_warning(warm_start: WarmStart, values: Mapping[str, float]) -> str | None:
  """A line where the warm start has left little to learn from, else None.

  Args:
    warm_start: of the run.
    values: metrics of the first update, whose rollouts are of the policy after the warm start.
  """
  passes = warm_start.passes
  if "groups/effective" not in values or "policy/entropy" not in values:
    return None  # no rollout has a grade, or none is in the loss: the warm start is not to blame
  # Dynamic sampling has replaced the other groups.
  effective = values["groups/effective"] / values.get("dynamic_sampling/prompts_per_group", 1.0)
  entropy = values["policy/entropy"]
  if not passes or (effective >= _FEW_GROUPS and entropy >= _LOW_ENTROPY):
    return None
  steps = f"config.warm_start.num_steps = {warm_start.num_steps}"
  if passes > MANY_PASSES or entropy < _LOW_ENTROPY:
    remedy = (
      f"It repeats what it memorized in {passes:.0f} passes over {warm_start.demonstrations}"
      f" demonstrations. Lower {steps}, or give more demonstrations"
    )
  elif values["groups/all_correct"] > values["groups/all_wrong"]:
    remedy = f"It solves most problems already. Choose harder ones, or lower {steps}"
  else:
    remedy = f"It seldom succeeds. Raise {steps}, or choose easier problems"
  return (
    f"after the warm start the policy has an entropy of {entropy:.3f} nats per token, and"
    f" {effective:.0%} of its groups have rewards that differ; it learns from these alone. {remedy}"
  )
