"""Accuracy on the held-out problems: sample, grade, pass@k with intervals over problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlvr_jax.data import ProblemSource
from rlvr_jax.evaluate.pass_at_k import summarize
from rlvr_jax.ops.keys import key_for
from rlvr_jax.rollouts.collect import Collector
from rlvr_jax.types import Array, Prompts, Rollouts


def evaluate(
  generate: Callable[[Prompts, Array], Rollouts],
  problems: ProblemSource,
  *,
  collector: Collector,
  to_devices: Callable[[Any], Any],
  batch_size: int,
  ks: Sequence[int],
  seed: int,
  version: int,
) -> tuple[dict[str, float], list[dict[str, Any]], tuple[np.ndarray, np.ndarray]]:
  """pass@k and mean accuracy with 95 % bootstrap intervals over problems.

  Every evaluation draws with the same keys, so that two of them differ by the parameters alone.

  Args:
    generate: the policy, (prompts on devices, key) → rollouts of each, as many samples.
    problems: all of them are used; the last batch is filled up with repeats, which do not count.
    collector: encodes, decodes and grades.
    to_devices: the way of arrays to the policy.
    batch_size: problems per generated batch.
    ks: the k of pass@k.
    seed: of sampling and of the bootstrap.
    version: updates behind the parameters, for the sample records.
  Returns:
    {"eval/pass@1": …, "eval/pass@1_low": …, …} with outcome fractions; one record per sample; and
    the lengths of prompts and responses, i32[problems] and i32[problems, samples], repeats counted.
  """
  correct: list[np.ndarray] = []
  samples: list[dict[str, Any]] = []
  outcomes: list[str] = []
  lengths: list[tuple[np.ndarray, np.ndarray]] = []
  starts = range(0, len(problems), batch_size)
  generation = None
  for index, start in enumerate([*starts, None]):
    previous, generation = generation, None
    if start is not None:
      indices = [i % len(problems) for i in range(start, start + batch_size)]
      batch = [problems[i] for i in indices]
      key = key_for(seed, "evaluation", index)
      draw = lambda prompts, key=key: [generate(to_devices(prompts), key)]
      generation = collector.start(batch, draw, [version] * len(batch))
    if previous is not None:  # graded while the devices generate the next batch
      rollouts, *grading = collector.submit_grading(previous)
      graded = collector.finish(previous, rollouts, *grading)
      lengths.append((previous.prompts.lengths, rollouts.lengths))
      correct.append(graded.batch.correct)
      samples += graded.samples
      outcomes = [name for name in graded.statistics if name.startswith("outcome/")]
  verdicts = np.concatenate(correct)[: len(problems)]
  summary = summarize(verdicts, ks=ks, seed=seed)
  samples = samples[: verdicts.size]
  for outcome in outcomes:
    summary[outcome] = np.mean([f"outcome/{s['outcome']}" == outcome for s in samples]).item()
  summary["response/truncated"] = np.mean([not s["stopped"] for s in samples]).item()
  prompt_lengths, response_lengths = map(np.concatenate, zip(*lengths, strict=True))
  values = {f"eval/{name}": value for name, value in summary.items()}
  return values, samples, (prompt_lengths, response_lengths)
