"""Advice that a run prints: how often the run sees its data, and which settings look wrong.

Most functions return a text, or texts by name; a text is "" if there is no advice. Their callers
print the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ml_collections

from rlvr_jax.data import Task
from rlvr_jax.rollouts.batches import Batch
from rlvr_jax.rollouts.staleness import RecordedRun, Schedule
from rlvr_jax.storage.files import JSON

MANY_PASSES = 20  # passes over the demonstrations after which a warm start has memorized them
_FEW_GROUPS = 0.1  # lowest share of groups with different rewards that needs no advice
_LOW_ENTROPY = 0.02  # nats per token; a sound policy with long, regular answers has 0.05
_MOST = 0.5  # share of responses, dialogues or positions above which a text names the cause


# --- data -----------------------------------------------------------------------------------------


class WarmStart(NamedTuple):
  """The supervised phase before the first update, see `plan_warm_start`."""

  num_steps: int
  batch_size: int  # demonstrations per step
  demonstrations: int  # number of demonstrations of the task

  @property
  def passes(self) -> float:
    """The number of passes over the demonstrations; 0 without demonstrations."""
    if not self.demonstrations:
      return 0.0
    return self.num_steps * self.batch_size / self.demonstrations


def plan_warm_start(
  settings: ml_collections.ConfigDict, task: Task, *, checkpoint: str
) -> WarmStart:
  """The supervised phase of a run; it has 0 steps if the run has no warm start.

  Args:
    settings: `config.warm_start`.
    task: the task of the run.
    checkpoint: `config.start.checkpoint`, a policy that needs no warm start.
  """
  num_steps = 0 if checkpoint else settings.num_steps
  return WarmStart(num_steps, settings.batch_size, len(task.warm_start))


def planned_passes(
  schedule: Schedule, *, num_updates: int, groups: int, problems: int, dynamic_sampling: bool
) -> str:
  """A line on how often the updates see each training problem.

  Args:
    schedule, num_updates: schedule and number of updates of the run.
    groups: number of groups sampled for a batch.
    problems: number of training problems.
    dynamic_sampling: whether dynamic sampling drops some groups and samples more in their place.
  """
  # A thread samples one batch for each update; otherwise the last refresh is sampled as a whole.
  by_limit = 0 if schedule.threaded or not num_updates else schedule.limit(num_updates - 1)
  batches = by_limit or num_updates
  prompts = batches * groups
  least = "at least " if dynamic_sampling else ""
  return (
    f"{num_updates} updates sample {least}{prompts:,} prompts from {problems:,} training problems,"
    f" {least}{prompts / problems:.3g} passes over them"
  )


def on_demonstrations(warm_start: WarmStart) -> str:
  """A warning if the warm start passes over its demonstrations more than `MANY_PASSES` times."""
  if warm_start.passes <= MANY_PASSES:
    return ""
  few = MANY_PASSES * warm_start.demonstrations // warm_start.batch_size
  return (
    f"the warm start makes {warm_start.passes:.0f} passes over {warm_start.demonstrations}"
    f" demonstrations; from about {MANY_PASSES} passes on, the policy memorizes them. Lower"
    f" config.warm_start.num_steps = {warm_start.num_steps} to at most {max(few, 1)}, or give more"
    " demonstrations (for most tasks, config.task.kwargs.warm_start_size)"
  )


def on_first_update(warm_start: WarmStart, values: Mapping[str, float]) -> str:
  """A warning if the warm start has left few groups with different rewards, or a low entropy.

  Args:
    warm_start: the warm start of the run.
    values: metrics of the first update, whose rollouts were sampled after the warm start.
  """
  passes = warm_start.passes
  if "groups/effective" not in values or "policy/entropy" not in values:
    return ""  # no rollout has a grade, or none is in the loss: the warm start is not to blame
  # Dynamic sampling has replaced groups with equal rewards: count them, too.
  effective = values["groups/effective"] / values.get("dynamic_sampling/prompts_per_group", 1.0)
  entropy = values["policy/entropy"]
  if not passes or (effective >= _FEW_GROUPS and entropy >= _LOW_ENTROPY):
    return ""
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


# --- batches --------------------------------------------------------------------------------------


def on_responses(statistics: Mapping[str, float], update: int, limit: int) -> dict[str, str]:
  """Warnings by cause if most responses are truncated, or most dialogues hit limits or are refused.

  Args:
    statistics: the statistics of the batch.
    update: the first update that trains on the batch.
    limit: `config.max_response_length`, tokens.
  """
  if "dialogue/turns" in statistics:
    return _on_dialogues(statistics, update)
  share = statistics.get("response/truncated", 0.0)
  text = (
    f"{share:.0%} of the responses sampled for update {update} were truncated at"
    f" config.max_response_length = {limit} tokens, most likely before their answer. Raise it,"
    " or reward shorter responses with config.overlong.buffer"
  )
  return {"truncation": text if share > _MOST else ""}


def _on_dialogues(statistics: Mapping[str, float], update: int) -> dict[str, str]:
  """Warnings by cause, if most dialogues end at limits or the environment refuses most of them."""
  remedies = {
    "turn_limit": "raise config.environment.max_turns",
    "length_limit": "raise config.max_response_length",
    "environment_limit": "raise config.environment.deadline_s or memory_mib",
    "environment_refused": "look at the turns in rollouts.jsonl",
  }
  shares = {outcome: statistics.get(f"outcome/{outcome}", 0.0) for outcome in remedies}
  *limits, refused = remedies
  texts = {}
  for name, outcomes in (("limits", limits), (refused, [refused])):
    share = sum(shares[outcome] for outcome in outcomes)
    most = max(outcomes, key=lambda outcome: shares[outcome])
    parts = ", ".join(f"{outcome} {shares[outcome]:.0%}" for outcome in outcomes)
    text = (
      f"{share:.0%} of the dialogues sampled for update {update} ended so: {parts}. That may"
      f" be right; otherwise {remedies[most]}"
    )
    texts[name] = text if share > _MOST else ""
  return texts


def on_repetition(recorded: RecordedRun | None, batch: Batch) -> dict[str, str]:
  """A warning if this run repeats a recorded run, but this batch is the first that differs.

  Args:
    recorded: the recorded run that is repeated, or None.
    batch: the new batch of this run.
  """
  why = recorded.first_difference(batch.number, batch.fingerprints) if recorded else ""
  text = (
    f"from batch {batch.number} on this run has the plan and the versions of"
    f" {recorded.name if recorded else ''}, but not its rollouts: {why}. The seed, the"
    " configuration, a version of the code or of a library, or the devices differ"
  )
  return {"repetition": text if why else ""}


def on_faults(
  samples: Sequence[Mapping[str, JSON]], which: str, consequence: str
) -> dict[str, str]:
  """Warnings by cause, if the grader or the environment has failed; a text names the first error.

  Args:
    samples: records of rollouts.
    which: the name of these rollouts in the text.
    consequence: a text that says what happens to these rollouts, with {} in place of the outcome.
  """
  texts = {}
  for outcome, what in (
    ("crashed", "the grader crashed on"),
    ("environment_failed", "the environment failed in"),
  ):
    details = [sample["detail"] for sample in samples if sample["outcome"] == outcome]
    text = ""
    if details:
      text = (
        f"{what} {len(details) / len(samples):.0%} of the {which}; the first error is:"
        f" {details[0]}. {consequence.format(outcome)}"
      )
    texts[f"{outcome}: {consequence}"] = text
  return texts


def on_padding(filled: float, update: int, batch: ml_collections.ConfigDict) -> dict[str, str]:
  """A warning, named "padding", if most positions of an update are padding.

  Args:
    filled: share of the computed positions that hold a token.
    update: number of the update.
    batch: `config.batch`.
  """
  text = (
    f"{1 - filled:.0%} of the positions in update {update} are padding: its rollouts do not fill"
    " a micro-batch on every device. Set a lower"
    f" config.batch.tokens_per_micro_batch (now {batch.tokens_per_micro_batch}) or"
    f" config.batch.tokens_per_row (now {batch.tokens_per_row}; if both are 0, the run"
    f" chose values for its first batch), or raise config.batch.prompts = {batch.prompts}"
  )
  return {"padding": text if filled < _MOST else ""}
