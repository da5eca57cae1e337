"""Forward passes other than updates: log-probabilities of a batch, entropy, diagnostics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.data import ProblemSource, problem_batches
from rlvr_jax.rollouts.batch import drop_scores, permute_rewards, train_batch
from rlvr_jax.rollouts.batches import Batch
from rlvr_jax.rollouts.grading import sampled_places
from rlvr_jax.rollouts.group import Draw, Group, Policy, join
from rlvr_jax.rollouts.sampler import LocalSampler
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.reporting.log import RunLog
from rlvr_jax.train.setup.programs import Programs
from rlvr_jax.train.setup.teachers import INITIAL, Teacher
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import Params, TrainBatch, TrainState


class ScorerSettings(NamedTuple):
  """What the updates of a run need.

  Attributes:
    seed: of the run.
    permutes_rewards: whether this is a control run, whose rewards are permuted.
    has_reference: whether the loss has a term of the reference policy, the initial one.
    has_proximal: whether the loss has a proximal policy.
    proximal_every: updates after which its log-probabilities are computed again; 0: never.
    has_turn_scores: whether the advantage takes the scores of turns.
    compares: see `Method`.
    diagnose_every: updates between measurements of the gradient geometry; 0: never.
  """

  seed: int
  permutes_rewards: bool
  has_reference: bool
  has_proximal: bool
  proximal_every: int
  has_turn_scores: bool
  compares: bool
  diagnose_every: int


class Scorer:
  """Computes log-probabilities of batches under the current and the initial policy.

  Attributes:
    teacher: (trained, frozen) parameters of the teacher that every update compares the policy's
      distributions with; None if there is none, or its log-probabilities are enough.
  """

  def __init__(
    self,
    settings: ScorerSettings,
    rows: RunRows,
    frozen: Params,
    initial: Params,
    programs: Programs,
    log: RunLog,
    teachers: Sequence[Teacher] = (),
  ):
    """Reads the teachers' parameters. Keeps `initial` only if it is needed.

    Args:
      settings, rows, programs: of the run.
      frozen: the parameters that are not trained.
      initial: the trained parameters before the first update.
      log: counts the forward passes.
      teachers: of the run.
    """
    self._settings, self._rows, self._frozen = settings, rows, frozen
    self._programs, self._log = programs, log
    # Kept only if they are used: they take as much memory as the policy.
    keep = settings.has_reference or settings.diagnose_every
    keep = keep or any(teacher.checkpoint == INITIAL for teacher in teachers)
    self._initial = initial if keep else None
    self._teachers = [
      teacher.policy(teacher.read() if teacher.read else {}, initial, frozen)
      for teacher in teachers
    ]
    self.teacher = self._teachers[0] if settings.compares else None
    self._scored_at: dict[int, int] = {}  # update at which π_prox was computed, by batch
    self._scores: dict[int, dict[str, np.ndarray]] = {}  # f32[P, G, T] by name, by batch

  def prepare(self, sampled: Batch, state: TrainState, step: int) -> TrainBatch:
    """The batch of an update, with the log-probabilities that it needs.

    In a control run rewards are permuted.

    Args:
      sampled: a graded batch.
      state: before the update.
      step: number of updates so far.
    """
    settings, number, batch = self._settings, sampled.number, sampled.train
    if settings.permutes_rewards:
      batch = permute_rewards(batch, np.random.default_rng([settings.seed, number]))
    scores: dict[str, Any] = self._scores.setdefault(number, {})
    if settings.has_reference and "reference_logprobs" not in scores:
      scores["reference_logprobs"] = self.score(self._initial, batch)
    if self._teachers and self.teacher is None and "teacher_logprobs" not in scores:
      scores |= self.teach(batch)
    if settings.has_proximal:
      every, scored_at = settings.proximal_every, self._scored_at.get(number)
      # At the batch's first update, and again after `every` updates.
      if scored_at is None or (every and step - scored_at >= every):
        scores["proximal_logprobs"] = self.score(state.params, batch)
        self._scored_at[number] = step
    if not settings.has_turn_scores:
      batch = dataclasses.replace(batch, turn_scores=None)
    of_tokens: Any = batch.token_versions
    if of_tokens is None:
      of_tokens = np.broadcast_to(sampled.versions[:, None, None], batch.mask.shape)
    lags: Any = np.where(of_tokens >= 0, step - of_tokens, -1).astype(np.int32)
    return dataclasses.replace(
      batch,
      lags=lags,
      reference_logprobs=scores.get("reference_logprobs"),
      proximal_logprobs=scores.get("proximal_logprobs"),
      teacher_logprobs=scores.get("teacher_logprobs"),
      teacher_entropy=scores.get("teacher_entropy"),
      sampled_logprobs=None,
      token_versions=None,
    )

  def forget(self, before: int) -> None:
    """Forgets what was computed of batches with a lower number."""
    self._scores = {n: scores for n, scores in self._scores.items() if n >= before}
    self._scored_at = {n: step for n, step in self._scored_at.items() if n >= before}

  def state(self) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """(JSON values, arrays by name) for `restore`."""
    arrays = {f"{n}-{name}": x for n, scores in self._scores.items() for name, x in scores.items()}
    return {str(number): step for number, step in sorted(self._scored_at.items())}, arrays

  def restore(self, scored_at: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> None:
    """Restores what `state` returned."""
    self._scored_at = {int(number): step for number, step in scored_at.items()}
    for name, array in arrays.items():
      number, _, score = name.partition("-")
      self._scores.setdefault(int(number), {})[score] = array

  def score(self, params: Params, batch: TrainBatch) -> Any:
    """f32[P, G, T], the responses' log-probabilities at the policy's temperature."""
    return self._run(self._programs.score, (params, self._frozen), batch)[0]

  def teach(self, batch: TrainBatch) -> dict[str, np.ndarray]:
    """The teacher's log-probabilities of the responses, and its entropies, at its temperature."""
    # Routes are of the policy's experts.
    batch = dataclasses.replace(batch, routes=None, prompt_routes=None)
    ((program, policy),) = zip(self._programs.teach, self._teachers, strict=True)
    logprobs, entropy = self._run(program, policy, batch)
    return {"teacher_logprobs": logprobs, "teacher_entropy": entropy}

  def _run(
    self, program: Callable[..., Any], policy: tuple[Params, Params], batch: TrainBatch
  ) -> tuple[Any, Any]:
    """(log-probabilities, entropies) f32[P, G, T] of the responses, on the host.

    Args:
      program: `Programs.score` or one of `Programs.teach`.
      policy: its trained and frozen parameters.
      batch: of the host.
    """
    self._log.count_scored(batch)
    scored = self._rows.placement(lambda: batch).pack_to_devices(drop_scores(batch))
    return sharding.to_host(program(*policy, scored))

  def measure(
    self, state: TrainState, batch: TrainBatch, step: int
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(scalars, arrays) of the gradient geometry, on every so many updates."""
    every = self._settings.diagnose_every
    if not every or step % every:
      return {}, {}
    return self._programs.measure(state, self._frozen, self._initial, batch, self.teacher)


def measure_entropy(
  params: Params,
  *,
  source: ProblemSource,
  batch_size: int,
  seed: int,
  sampler: LocalSampler,
  rows: RunRows,
  frozen: Params,
  score: Callable[..., tuple[jax.Array, jax.Array]],
) -> float:
  """Mean entropy, in nats per token, on responses to the first training prompts.

  All sampled tokens count, also those that the loss would leave out: it may leave out all. They
  are sampled with separate keys, so that measuring does not affect the run.

  Args:
    params: the trained parameters.
    source: of training problems.
    batch_size: number of prompts, P.
    seed, rows: of the run.
    sampler: for this alone.
    frozen: the parameters that are not trained.
    score: that function of `Programs`.
  """
  problems = next(problem_batches(source, batch_size=batch_size, seed=seed))
  P = len(problems)
  sampler.offer(Policy(0, params, lambda: ""))
  sampler.want(Draw(0, problems, seed, 0, [0] * P), range(P))
  groups: dict[int, Group] = {}
  while len(groups) < P:
    groups |= {group.index: group for group in sampler.take()}
  sampler.rest()
  in_order = [groups[index] for index in range(P)]
  sampled: Any = sampled_places(join(in_order)).astype(np.float32)
  batch = dataclasses.replace(train_batch(in_order), mask=sampled)
  packed = rows.placement(lambda: batch).pack_to_devices(drop_scores(batch))
  _, entropy = score(params, frozen, packed)
  return float(np.sum(sharding.to_host(entropy) * sampled) / sampled.sum())
