"""Accuracy on the held-out problems: sample, grade, pass@k with intervals over problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlvr_jax.data import ProblemSource
from rlvr_jax.evaluate.pass_at_k import summarize
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.types import Params


def evaluate(
  params: Params,
  problems: ProblemSource,
  *,
  collector: Collector,
  batch_size: int,
  ks: Sequence[int],
  seed: int,
  version: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
  """pass@k and mean accuracy with 95 % bootstrap intervals over problems.

  Every evaluation draws with the same keys, so that two of them differ by the parameters alone.

  Args:
    params: the policy's parameters.
    problems: all of them are used; the last batch is filled up with repeats, which do not count.
    collector: generates `num_samples` rollouts per problem and grades them.
    batch_size: problems per generated batch.
    ks: the k of pass@k.
    seed: of sampling and of the bootstrap.
    version: updates behind the parameters, for the sample records.
  Returns:
    {"eval/pass@1": …, "eval/pass@1_low": …, …} with outcome fractions, and one record per sample.
  """
  correct: list[np.ndarray] = []
  samples: list[dict[str, Any]] = []
  outcomes: list[str] = []
  starts = range(0, len(problems), batch_size)
  generation = None
  for index, start in enumerate([*starts, None]):
    previous, generation = generation, None
    if start is not None:
      indices = [i % len(problems) for i in range(start, start + batch_size)]
      batch = [problems[i] for i in indices]
      generation = collector.start(params, batch, key_for(seed, "evaluation", index), version)
    if previous is not None:  # graded while the devices generate the next batch
      graded = collector.finish(previous, *collector.submit_grading(previous))
      correct.append(graded.batch.correct)
      samples += graded.samples
      outcomes = [name for name in graded.statistics if name.startswith("outcome/")]
  verdicts = np.concatenate(correct)[: len(problems)]
  summary = summarize(verdicts, ks=ks, seed=seed)
  samples = samples[: verdicts.size]
  for outcome in outcomes:
    summary[outcome] = np.mean([f"outcome/{s['outcome']}" == outcome for s in samples]).item()
  summary["response/truncated"] = np.mean([not s["stopped"] for s in samples]).item()
  return {f"eval/{name}": value for name, value in summary.items()}, samples
