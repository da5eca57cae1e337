"""Accuracy on the held-out problems: sampling, grading, and pass@k with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from rlvr_jax.data import ProblemSource
from rlvr_jax.evaluate.pass_at_k import summarize
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.types import Array, Prompts, Rollouts

Sample = Mapping[str, Any]  # a record of `rollouts.batch.Graded.samples`


class Evaluated(NamedTuple):
  """A batch of problems with its graded samples."""

  samples: list[list[Sample]]  # [problems][samples], without the problems that pad the batch
  prompt_lengths: np.ndarray  # i32[batch_size], including the padding
  response_lengths: np.ndarray  # i32[batch_size, samples]


def evaluated(
  generate: Callable[[Prompts, Array], Rollouts],
  problems: ProblemSource,
  *,
  collector: Collector,
  to_devices: Callable[[Any], Any],
  batch_size: int,
  seed: int,
  version: int,
  first_batch: int = 0,
) -> Iterator[Evaluated]:
  """Evaluates batches of problems in order; each is graded while the devices generate the next.

  Every evaluation samples with the same keys, so that two evaluations differ only by the
  parameters, and a resumed evaluation samples the same responses.

  Args:
    generate: samples from the policy, (prompts on devices, key) → rollouts of each prompt.
    problems: all of them are used; the last batch is padded with repeats.
    collector: encodes, decodes and grades.
    to_devices: moves arrays to the policy's devices.
    batch_size: problems per generated batch.
    seed: seed of sampling.
    version: number of updates of the parameters, for the sample records.
    first_batch: index of the batch to begin with.
  """
  starts = range(0, len(problems), batch_size)[first_batch:]
  flight, size = None, 0
  for index, start in enumerate([*starts, None], start=first_batch):
    previous, previous_size, flight = flight, size, None
    if start is not None:
      batch = [problems[i % len(problems)] for i in range(start, start + batch_size)]
      size = min(batch_size, len(problems) - start)
      key = key_for(seed, "evaluation", index)
      draw = lambda prompts, key=key: [generate(to_devices(prompts), key)]
      flight = collector.dispatch(batch, draw)
    if previous is not None:
      previous = collector.submit_grading(previous)
      samples = collector.finish(previous, [version] * batch_size).samples
      each = len(samples) // batch_size
      by_problem = [samples[p * each : (p + 1) * each] for p in range(previous_size)]
      yield Evaluated(by_problem, previous.prompts.lengths, previous.rollouts.lengths)


def accuracy(
  samples: Sequence[Sequence[Sample]], *, ks: Sequence[int], seed: int
) -> dict[str, float]:
  """pass@k, mean and, if graders extract answers, majority, with 95 % bootstrap intervals.

  A sample is correct if its grade is correct; if grading failed, it is not. If a grader gives the
  same answer different grades, majorities are omitted, with a warning.

  Args:
    samples: [problems][n].
    ks: the k of pass@k.
    seed: of the bootstrap.
  Returns:
    {"eval/pass@1": …, "eval/pass@1_low": …, …}, the fractions of outcomes, and the fraction of
    responses that were truncated at the length limit.
  """
  every = [sample for row in samples for sample in row]
  correct = [[sample["outcome"] == "correct" for sample in row] for row in samples]
  summary = summarize(correct, ks=ks, seed=seed, answers=_votes(samples))
  for outcome in ("correct", "wrong", "unparseable", "timeout", "crashed"):
    summary[f"outcome/{outcome}"] = np.mean([s["outcome"] == outcome for s in every]).item()
  summary["response/truncated"] = np.mean([not s["stopped"] for s in every]).item()
  return {f"eval/{name}": value for name, value in summary.items()}


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
