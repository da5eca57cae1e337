"""Accuracy on held-out problems: sampling, grading, and pass@k with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from rlvr_jax.data import ProblemSource
from rlvr_jax.evaluate.pass_at_k import summarize
from rlvr_jax.rewards.outcome import DIALOGUE_OUTCOMES, Outcome
from rlvr_jax.rollouts.grading import sampled_places
from rlvr_jax.rollouts.group import Draw, Group, Policy, join
from rlvr_jax.rollouts.sampler import LocalSampler

Sample = Mapping[str, Any]  # a record of `rollouts.group.Group.samples`
GAP = "eval/gap_to_best_play"
_MAX_TURNS = 16  # the most that a metric counts


class EvaluatedBatch(NamedTuple):
  """A batch of problems with its graded samples."""

  samples: list[list[Sample]]  # [problems][samples]
  prompt_lengths: np.ndarray  # i32[problems]
  response_lengths: np.ndarray  # i32[problems, samples]
  sampled_lengths: np.ndarray  # i32[problems, samples], without the environment's tokens


def evaluate_problems(
  sampler: LocalSampler,
  policy: Policy,
  problems: ProblemSource,
  *,
  batch_size: int,
  seed: int,
  first_batch: int = 0,
) -> Iterator[EvaluatedBatch]:
  """Evaluates problems in order; grading runs while the devices generate further responses.

  Every evaluation samples with the same random keys: two evaluations differ only by the policy's
  parameters, and a resumed evaluation samples the same responses.

  Args:
    sampler: a sampler with the purpose "evaluation".
    policy: the policy to evaluate.
    problems: the problems, all of which are evaluated.
    batch_size: number of problems that are drawn and yielded together.
    seed: seed of sampling.
    first_batch: index of the first batch to evaluate.
  """
  sampler.offer(policy)
  sizes: dict[int, int] = {}  # the batch's number → its number of problems
  for start in range(0, len(problems), batch_size)[first_batch:]:
    indices = range(start, min(start + batch_size, len(problems)))
    number = start // batch_size
    drawn = [problems[index] for index in indices]
    sampler.want(Draw(number, drawn, seed, policy.version, [0] * len(drawn)), range(len(drawn)))
    sizes[number] = len(drawn)
  groups: dict[int, dict[int, Group]] = {number: {} for number in sizes}
  for number, size in sizes.items():
    while len(groups[number]) < size:
      for group in sampler.take():
        groups[group.draw][group.index] = group
    yield _evaluated([groups[number][index] for index in range(size)])
    del groups[number]
  sampler.rest()


def _evaluated(groups: Sequence[Group]) -> EvaluatedBatch:
  arrays = join(groups)
  sampled = sampled_places(arrays).sum(-1)
  samples = [list(group.samples) for group in groups]
  return EvaluatedBatch(samples, arrays["prompts.lengths"], arrays["lengths"], sampled)


def accuracy(
  samples: Sequence[Sequence[Sample]],
  *,
  ks: Sequence[int],
  seed: int,
  max_turns: int = 1,
  best_play: Callable[[int], float] | None = None,
) -> dict[str, float]:
  """pass@k, mean and, if n ≥ 3, majority, with 95 % intervals over problems.

  The intervals come from `pass_at_k.interval_over_problems`. A sample whose grading failed
  counts as incorrect. Majorities are omitted if the graders extract no answers. They are omitted
  with a warning if a grader grades equal answers to one problem differently.

  Args:
    samples: [problems][n], n samples of each problem.
    ks: the values of k of pass@k.
    seed: seed of the bootstrap.
    max_turns: the largest number of turns that the policy may take in a dialogue.
    best_play: `Task.best_play`.
  Returns:
    {"eval/pass@1": …, "eval/pass@1_low": …, …}, the fraction of samples with each outcome, and the
    fraction of responses that were truncated at the length limit. For dialogues, the result also
    has the fractions that were correct after at most 1, 2, … turns. For dialogues with
    `best_play`, it has the best possible policy's pass@1 minus this policy's pass@1.
  """
  flat = [sample for row in samples for sample in row]
  correct = [[sample["outcome"] == "correct" for sample in row] for row in samples]
  summary = summarize(correct, ks=ks, seed=seed, answers=_votes(samples))
  for outcome in Outcome:
    if outcome in DIALOGUE_OUTCOMES and "turns" not in flat[0]:
      continue
    summary[f"outcome/{outcome}"] = np.mean([s["outcome"] == outcome for s in flat]).item()
  summary["response/truncated"] = np.mean([not s["stopped"] for s in flat]).item()
  metrics = {f"eval/{name}": value for name, value in summary.items()}
  if "turns" in flat[0]:
    turns = np.array([(len(sample["turns"]) + 1) // 2 for sample in flat])
    solved = np.ravel(correct)
    for most in range(1, min(max_turns, _MAX_TURNS) + 1):
      metrics[f"eval/solved_in_turns/{most}"] = np.mean(solved & (turns <= most)).item()
    if best_play is not None:
      metrics[GAP] = best_play(max_turns) - np.mean(solved).item()
  return metrics


def _votes(samples: Sequence[Sequence[Sample]]) -> list[list[str | None]] | None:
  """The answers of [problems][n], None for a missing answer; None if majorities are undefined."""
  for number, row in enumerate(samples):
    verdicts: dict[str, str] = {}
    for sample in row:
      answer, outcome = sample["extracted"], sample["outcome"]
      if answer and verdicts.setdefault(answer, outcome) != outcome:
        logging.warning(
          "no metrics of majorities: the grader grades answer %r of problem %d as both %s and %s",
          answer[:100], number, verdicts[answer], outcome,
        )  # fmt: skip
        return None
  answers = [[sample["extracted"] or None for sample in row] for row in samples]
  return answers if any(answer for row in answers for answer in row) else None
