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
from rlvr_jax.train.setup.teachers import INITIAL, Teacher, TeacherPrompts
from rlvr_jax.train.start.rows import RunRows
from rlvr_jax.types import RECORDED, Params, TrainBatch, TrainState


class ScorerSettings(NamedTuple):
  """The facts about a run that its scorer needs.

  Attributes:
    seed: the seed of the run.
    permutes_rewards: whether this is a control run, whose rewards are permuted.
    has_reference: whether the loss has a term of the reference policy, which is the initial policy.
    has_proximal: whether the loss has a proximal policy.
    proximal_every: number of updates after which the proximal log-probabilities are computed again;
      0: never.
    needs: fields of the batch that the advantage takes, see `Advantage.needs`.
    compares: see `Method`.
    diagnose_every: updates between measurements of the gradient geometry; 0: never.
  """

  seed: int
  permutes_rewards: bool
  has_reference: bool
  has_proximal: bool
  proximal_every: int
  needs: tuple[str, ...]
  compares: bool
  diagnose_every: int


@dataclasses.dataclass(frozen=True)
class _OtherPolicies:
  """The parameters, besides the current ones, with which batches are scored.

  Attributes:
    frozen: the parameters that are not trained.
    initial: the trained parameters before the first update; None if nothing needs them.
    teachers: pairs (teacher, its own parameters); {} for a teacher with parameters of the policy.
    prompts: the prompts of the teachers; None if the teachers read the policy's prompts.
  """

  frozen: Params
  initial: Params | None
  teachers: Sequence[tuple[Teacher, Params]]
  prompts: TeacherPrompts | None

  def teacher(self, number: int, current: Params | None) -> tuple[Params, Params]:
    """(trained, frozen) parameters of a teacher; `current`: the policy's trained parameters."""
    teacher, own = self.teachers[number]
    return teacher.policy(own, self.initial, self.frozen, current)


class Scorer:
  """Computes log-probabilities of batches under the current and initial policies and teachers."""

  def __init__(
    self,
    settings: ScorerSettings,
    rows: RunRows,
    frozen: Params,
    initial: Params,
    programs: Programs,
    log: RunLog,
    teachers: Sequence[Teacher] = (),
    teacher_prompts: TeacherPrompts | None = None,
  ):
    """Reads the teachers' parameters. Keeps `initial` only if it is needed.

    Args:
      settings, rows, programs: settings, rows and programs of the run.
      frozen: the parameters that are not trained.
      initial: the trained parameters before the first update.
      log: counts the forward passes.
      teachers, teacher_prompts: teachers and teacher prompts of the run.
    """
    self._settings, self._rows = settings, rows
    self._programs, self._log = programs, log
    # Kept only if they are used: they take as much memory as the policy.
    keep = settings.has_reference or settings.diagnose_every
    keep = keep or any(teacher.checkpoint == INITIAL for teacher in teachers)
    own = [(teacher, teacher.read() if teacher.read else {}) for teacher in teachers]
    self._others = _OtherPolicies(frozen, initial if keep else None, own, teacher_prompts)
    self._scored_at: dict[int, int] = {}  # update at which π_prox was computed, by batch
    self._scores: dict[int, dict[str, np.ndarray]] = {}  # scores by name, by batch

  @property
  def teacher(self) -> tuple[Params, Params] | None:
    """(trained, frozen) parameters of the teacher whose distributions every update needs.

    None if there is no teacher, or if its log-probabilities of sampled tokens suffice.
    """
    return self._others.teacher(0, None) if self._settings.compares else None

  def prepare(self, sampled: Batch, state: TrainState, step: int) -> TrainBatch:
    """The batch of an update, with all log-probabilities that the update needs.

    In a control run rewards are permuted.

    Args:
      sampled: a graded batch.
      state: the state before the update.
      step: number of updates so far.
    """
    settings, number, batch = self._settings, sampled.number, sampled.train
    if settings.permutes_rewards:
      batch = permute_rewards(batch, np.random.default_rng([settings.seed, number]))
    scores: dict[str, Any] = self._scores.setdefault(number, {})
    if settings.has_reference and "reference_logprobs" not in scores:
      scores["reference_logprobs"] = self.score(self._others.initial, batch)
    if self._others.teachers and not settings.compares and "teacher_logprobs" not in scores:
      scores |= self.teach(batch, sampled.groups, state.params)
    if settings.has_proximal:
      every, scored_at = settings.proximal_every, self._scored_at.get(number)
      # At the batch's first update, and again after `every` updates.
      if scored_at is None or (every and step - scored_at >= every):
        scores["proximal_logprobs"] = self.score(state.params, batch)
        self._scored_at[number] = step
    unread: dict[str, Any] = dict.fromkeys({*RECORDED} - {*settings.needs})
    batch = dataclasses.replace(batch, **unread)
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
      teachers=scores.get("teachers"),
      sampled_logprobs=None,
      token_versions=None,
    )

  def forget(self, before: int) -> None:
    """Forgets scores of batches with a lower number."""
    self._scores = {n: scores for n, scores in self._scores.items() if n >= before}
    self._scored_at = {n: step for n, step in self._scored_at.items() if n >= before}

  def state(self) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """(JSON values, arrays by name) for `restore`."""
    arrays = {f"{n}-{name}": x for n, scores in self._scores.items() for name, x in scores.items()}
    return {str(number): step for number, step in sorted(self._scored_at.items())}, arrays

  def restore(self, scored_at: Mapping[str, int], arrays: Mapping[str, np.ndarray]) -> None:
    """Restores the state that `state` returned."""
    self._scored_at = {int(number): step for number, step in scored_at.items()}
    for name, array in arrays.items():
      number, _, score = name.partition("-")
      self._scores.setdefault(int(number), {})[score] = array

  def score(self, params: Params, batch: TrainBatch) -> Any:
    """f32[P, G, T], the responses' log-probabilities at the policy's temperature."""
    return self._run(self._programs.score, (params, self._others.frozen), batch)[0]

  def teach(
    self, batch: TrainBatch, groups: Sequence[Group], current: Params
  ) -> dict[str, np.ndarray]:
    """Log-probabilities and entropies of the teachers at each response token.

    The teachers' logits are divided by the teachers' temperature.

    Args:
      batch: the batch of these groups.
      groups: the groups of the batch; the problem of a group may name its teacher and have a text
        for the teacher.
      current: the policy's trained parameters at present.
    Returns:
      Arrays f32[P, G, T] by field of the batch; with several teachers also i32[P], the index of
      each group's teacher.
    """
    # The recorded routes name experts of the policy, not of the teacher.
    batch = dataclasses.replace(batch, routes=None, prompt_routes=None)
    numbers = np.zeros(len(groups), np.int32)
    others = self._others
    if len(others.teachers) > 1:
      names = [teacher.name for teacher, _ in others.teachers]
      numbers[:] = [names.index(group.samples[0]["teacher"]) for group in groups]
    if others.prompts is not None:
      batch = dataclasses.replace(batch, prompts=others.prompts.of_groups(groups))
    sums = [np.zeros(batch.mask.shape, np.float32) for _ in range(2)]
    for number in np.unique(numbers).tolist():
      # Rollouts of other teachers are not packed into rows; their scores are 0.
      mask: Any = np.where((numbers == number)[:, None, None], batch.mask, 0)
      own = dataclasses.replace(batch, mask=mask)
      found = self._run(self._programs.teach[number], others.teacher(number, current), own)
      sums = [total + part for total, part in zip(sums, found, strict=True)]
    scores = dict(zip(("teacher_logprobs", "teacher_entropy"), sums, strict=True))
    return scores | ({"teachers": numbers} if len(others.teachers) > 1 else {})

  def _run(
    self,
    program: Callable[..., tuple[jax.Array, jax.Array]],
    policy: tuple[Params, Params],
    batch: TrainBatch,
  ) -> tuple[jax.Array, jax.Array]:
    """(log-probabilities, entropies) f32[P, G, T] of the responses, on the host.

    Args:
      program: `Programs.score` or one of `Programs.teach`.
      policy: (trained, frozen) parameters of the policy or teacher that scores.
      batch: the batch on the host.
    """
    self._log.count_scored(batch)
    placement = self._rows.placement(lambda: batch)
    prompts = self._others.prompts
    if prompts is not None and program is not self._programs.score:
      placement = dataclasses.replace(placement, row_layout=prompts.row_layout)
    scores = program(*policy, placement.pack_to_devices(drop_scores(batch)))
    return sharding.to_host(scores)

  def measure(
    self, state: TrainState, batch: TrainBatch, step: int
  ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(scalars, arrays) of the gradient geometry; both empty if no measurement is due."""
    every = self._settings.diagnose_every
    if not every or step % every:
      return {}, {}
    others = self._others
    return self._programs.measure(state, others.frozen, others.initial, batch, self.teacher)


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

  Sampled tokens that the loss excludes are included, since the loss may exclude all tokens. The
  responses are sampled with separate keys, so that measuring does not affect the run.

  Args:
    params: the trained parameters.
    source: the source of training problems.
    batch_size: number of prompts, P.
    seed, rows: seed and rows of the run.
    sampler: a sampler that only this measurement uses.
    frozen: the parameters that are not trained.
    score: the function `score` of `Programs`.
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
