"""Measures held-out accuracy while a run trains."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import ml_collections
import numpy as np

from rlvr_jax.data import Task
from rlvr_jax.evaluate.held_out import Sample, accuracy, evaluate_problems
from rlvr_jax.rollouts.group import Policy
from rlvr_jax.rollouts.sampler import LocalSampler
from rlvr_jax.train.cluster.process import restart_deadline
from rlvr_jax.types import Params


class Evaluated(NamedTuple):
  """The results of an evaluation."""

  values: dict[str, float]  # see `evaluate.held_out.accuracy`
  samples: list[list[Sample]]  # [problems][samples]
  lengths: tuple[np.ndarray, np.ndarray, np.ndarray]  # see `RunLog.write_evaluation`


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Evaluates the policies of a run on the task's held-out problems.

  Attributes:
    sampler: a sampler that only evaluations use.
    task: the task of the run.
    settings: `config.evaluation`.
    max_turns: `config.environment.max_turns`.
  """

  sampler: LocalSampler
  task: Task
  settings: ml_collections.ConfigDict
  max_turns: int

  @property
  def metric(self) -> str:
    """The metric by which checkpoints are compared."""
    return f"eval/pass@{self.settings.ks[0]}"

  def is_due(self, step: int, num_updates: int) -> bool:
    """Whether an evaluation follows update `step`, in a run of `num_updates` updates."""
    return step == num_updates or step % self.settings.every == 0

  def measure(self, params: Params, step: int) -> Evaluated:
    """Samples and grades responses to all held-out problems.

    Args:
      params: the trained parameters.
      step: number of updates that the parameters have had.
    """
    batches = []
    for batch in evaluate_problems(
      self.sampler,
      Policy(step, params, lambda: ""),
      self.task.held_out,
      batch_size=self.settings.batch_prompts,
      seed=self.settings.seed,
    ):
      batches.append(batch)
      restart_deadline()
    samples = [row for batch in batches for row in batch.samples]
    values = accuracy(
      samples,
      ks=self.settings.ks,
      seed=self.settings.seed,
      max_turns=self.max_turns,
      best_play=self.task.best_play,
    )
    prompts = np.concatenate([batch.prompt_lengths for batch in batches])
    responses = np.concatenate([batch.response_lengths for batch in batches])
    sampled = np.concatenate([batch.sampled_lengths for batch in batches])
    return Evaluated(values, samples, (prompts, responses, sampled))
