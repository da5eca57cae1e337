"""Passes of a run over its training problems and demonstrations, and warnings about them."""

from __future__ import annotations

from collections.abc import Mapping

import ml_collections

from rlvr_jax.data import Task
from rlvr_jax.rollouts.staleness import Schedule
from rlvr_jax.train.reporting.progress import say, warn

MANY_PASSES = 20  # of a warm start over its demonstrations: from there on it memorizes them
_FEW_GROUPS = 0.1  # share of the groups whose rewards differ
_LOW_ENTROPY = 0.02  # nats per token; a sound policy with long, regular answers has 0.05


def announce(
  config: ml_collections.ConfigDict, task: Task, schedule: Schedule, groups: int
) -> None:
  """Prints how often a run will see its problems; warns if it sees its demonstrations too often.

  Args:
    config, task, schedule: of the run.
    groups: sampled per batch.
  """
  say(planned_passes(config, task, schedule, groups))
  if warning := warm_start_warning(config, task):
    warn(warning)


def planned_passes(
  config: ml_collections.ConfigDict, task: Task, schedule: Schedule, groups: int
) -> str:
  """A line on how often the updates see each training problem; `groups`: sampled per batch."""
  total, problems = config.num_updates, len(task.train)
  # In real time, a batch for each update.
  batches = total if schedule.real_time else sum(map(schedule.samples, range(total)))
  prompts, least = batches * groups, "at least " if config.dynamic_sampling.enabled else ""
  return (
    f"{total} updates sample {least}{prompts:,} prompts from {problems:,} training problems,"
    f" {least}{prompts / problems:.3g} passes over them"
  )


def warm_start_passes(config: ml_collections.ConfigDict, task: Task) -> float:
  """How often the warm start sees each demonstration; 0 where there is none."""
  settings, demonstrations = config.warm_start, len(task.warm_start)
  if not demonstrations or config.start.checkpoint:
    return 0.0
  return settings.num_steps * settings.batch_size / demonstrations


def warm_start_warning(config: ml_collections.ConfigDict, task: Task) -> str | None:
  """A line where the warm start sees its demonstrations too often, else None."""
  passes, settings = warm_start_passes(config, task), config.warm_start
  if passes <= MANY_PASSES:
    return None
  few = MANY_PASSES * len(task.warm_start) // settings.batch_size
  return (
    f"the warm start makes {passes:.0f} passes over {len(task.warm_start)} demonstrations; from"
    f" about {MANY_PASSES} on the policy memorizes them. Lower config.warm_start.num_steps ="
    f" {settings.num_steps} to at most {max(few, 1)}, or give more demonstrations (for most tasks,"
    " config.task.kwargs.warm_start_size)"
  )


def first_update_warning(
  config: ml_collections.ConfigDict, task: Task, values: Mapping[str, float]
) -> str | None:
  """A line where the warm start has left little to learn from, else None.

  Args:
    values: metrics of the first update, whose rollouts are of the policy after the warm start.
  """
  passes = warm_start_passes(config, task)
  # Dynamic sampling has replaced the other groups.
  effective = values["groups/effective"] / values.get("dynamic_sampling/prompts_per_group", 1.0)
  entropy = values["policy/entropy"]
  if not passes or (effective >= _FEW_GROUPS and entropy >= _LOW_ENTROPY):
    return None
  steps = f"config.warm_start.num_steps = {config.warm_start.num_steps}"
  if passes > MANY_PASSES or entropy < _LOW_ENTROPY:
    remedy = (
      f"It repeats what it memorized in {passes:.0f} passes over {len(task.warm_start)}"
      f" demonstrations. Lower {steps}, or give more demonstrations"
    )
  elif values["groups/all_correct"] > values["groups/all_wrong"]:
    remedy = f"It solves most problems already. Choose harder ones, or lower {steps}"
  else:
    remedy = f"It seldom succeeds. Raise {steps}, or choose easier problems"
  return (
    f"after the warm start the policy has an entropy of {entropy:.3f} nats per token, and"
    f" {effective:.0%} of its groups have different rewards; it learns from these alone. {remedy}"
  )
