"""Accuracy on held-out problems: sampling, grading, and pass@k with intervals."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from rlvr_jax.data import ProblemSource
from rlvr_jax.evaluate.pass_at_k import summarize
from rlvr_jax.ops.keys import key_for, seeds_for
from rlvr_jax.rewards.outcome import DIALOGUE_OUTCOMES, Outcome
from rlvr_jax.rollouts.batch import Flight, sampled_places
from rlvr_jax.rollouts.collect import Collector, serve_graded
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.serve import Request, make_requests
from rlvr_jax.types import Params

Sample = Mapping[str, Any]  # a record of `rollouts.batch.Graded.samples`
GAP = "eval/gap_to_best_play"
_MAX_TURNS = 16  # the most that a metric counts


class EvaluatedBatch(NamedTuple):
  """A batch of problems with its graded samples."""

  samples: list[list[Sample]]  # [problems][samples]
  prompt_lengths: np.ndarray  # i32[problems]
  response_lengths: np.ndarray  # i32[problems, samples]
  sampled_lengths: np.ndarray  # i32[problems, samples], of these the policy's tokens


def evaluate_problems(
  engine: EnginePrograms,
  params: Params,
  problems: ProblemSource,
  *,
  collector: Collector,
  batch_size: int,
  num_samples: int,
  seed: int,
  version: int,
  first_batch: int = 0,
) -> Iterator[EvaluatedBatch]:
  """Evaluates problems in order; responses are graded while the devices generate others.

  Every evaluation samples with the same keys: two evaluations differ only by the parameters, and a
  resumed evaluation samples the same responses.

  Args:
    engine: samples from the policy.
    params: from `EnginePrograms.load`.
    problems: the problems, all used, as one stream of requests.
    collector: encodes, decodes and grades.
    batch_size: number of problems that are encoded, and yielded, together.
    num_samples: number of responses to each problem.
    seed: seed of sampling.
    version: number of updates of the parameters, for the sample records.
    first_batch: index of the first batch to evaluate.
  """
  flights: collections.deque[Flight] = collections.deque()

  def stream() -> Iterator[Request[Flight]]:
    for start in range(0, len(problems), batch_size)[first_batch:]:
      indices = range(start, min(start + batch_size, len(problems)))
      number = start // batch_size
      seeds = seeds_for(seed, "evaluation", number, len(indices))
      flight = collector.begin([problems[index] for index in indices], seeds)
      flights.append(flight)
      key = key_for(seed, "evaluation", number)
      yield from make_requests(flight.prompts, key, num_samples, owner=flight)

  def finish(flight: Flight) -> EvaluatedBatch:
    samples = collector.finish(flight, [version] * len(flight.problems)).samples
    rows = [samples[start : start + num_samples] for start in range(0, len(samples), num_samples)]
    rollouts = flight.rollouts
    sampled = sampled_places(rollouts).sum(-1)
    return EvaluatedBatch(rows, flight.prompts.lengths, rollouts.lengths, sampled)

  for _ in serve_graded(engine, params, stream(), collector):
    # By the time that the second batch is sampled, the first one has its grades.
    while len(flights) > 1 and flights[0].sampled and flights[1].sampled:
      yield finish(flights.popleft())
  yield from map(finish, flights)


def accuracy(
  samples: Sequence[Sequence[Sample]],
  *,
  ks: Sequence[int],
  seed: int,
  max_turns: int = 1,
  best_play: Callable[[int], float] | None = None,
) -> dict[str, float]:
  """pass@k, mean and, of three samples or more, majority, with 95 % intervals over problems.

  The intervals are those of `pass_at_k.interval_over_problems`. A sample whose grading failed
  counts as incorrect. Majorities are omitted where graders extract no answers, and, with a
  warning, if a grader gives the same answer different grades.

  Args:
    samples: [problems][n].
    ks: the values of k of pass@k.
    seed: seed of the bootstrap.
    max_turns: of the policy, in dialogues.
    best_play: `Task.best_play`.
  Returns:
    {"eval/pass@1": …, "eval/pass@1_low": …, …}, the fractions of outcomes, and the fraction of
    responses that were truncated at the length limit. Of dialogues, also the fractions that were
    correct after at most 1, 2, … turns, and what the best play has more than this policy.
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
          "no majorities: the grader grades the answer %r of problem %d as both %s and %s",
          answer[:100], number, verdicts[answer], outcome,
        )  # fmt: skip
        return None
  answers = [[sample["extracted"] or None for sample in row] for row in samples]
  return answers if any(answer for row in answers for answer in row) else None
