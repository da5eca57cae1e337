"""Turns sampled groups into graded ones: decodes their text, grades it, assembles batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlvr_jax.data import Problem, Tokenizer, encode_prompts
from rlvr_jax.ops.overlong import overlong_filter, overlong_penalty
from rlvr_jax.rewards.graders import thought_prefix
from rlvr_jax.rewards.outcome import (
  DIALOGUE_OUTCOMES,
  Grade,
  Outcome,
  OutcomePolicy,
  rewards_from_grades,
)
from rlvr_jax.rollouts.batch import (
  Flight,
  Graded,
  Submission,
  join_batches,
  mean_solve_rate,
  sampled_places,
)
from rlvr_jax.rollouts.dialogues import DialogueUsage, End, EnvironmentDialogues, Environments
from rlvr_jax.rollouts.engine import Usage
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.serve import ChangingWeights, Group, Request, serve
from rlvr_jax.types import Params, Prompts, Rollouts, TrainBatch

# Outcomes of which a sample tells why.
_WITH_DETAIL = {
  Outcome.CRASHED, Outcome.ENVIRONMENT_FAILED, Outcome.ENVIRONMENT_REFUSED,
  Outcome.ENVIRONMENT_LIMIT,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collector:
  """Turns prompts into graded rollouts, for training and for evaluation.

  Attributes:
    tokenizer: of the run.
    max_prompt_length: S, tokens.
    submit: (completions, references) → a future of grades.
    results: futures → their grades, in one list; waits for them.
    outcome_policy: the reward of each outcome of grading.
    overlong_buffer: tokens before the limit over which the reward decreases; 0 turns this off.
    overlong_filter: whether the loss excludes responses without a stop token.
    environments: answer the policy's turns; None: a rollout is one turn.
  """

  tokenizer: Tokenizer
  max_prompt_length: int
  submit: Callable[[list[str], list[Mapping[str, Any]]], Submission]
  results: Callable[[Sequence[Submission]], list[Grade]]
  outcome_policy: OutcomePolicy
  overlong_buffer: int = 0
  overlong_filter: bool = False
  environments: Environments | None = None

  def begin(self, problems: Sequence[Problem], seeds: Sequence[int] = ()) -> Flight:
    """Makes a flight for problems, none of them sampled yet.

    Args:
      problems: P problems.
      seeds: P seeds, of their environments; all rollouts of a problem have the same. () without
        dialogues.
    """
    first = None
    failed_resets: Mapping[int, str] = {}
    if self.environments is not None:
      first, failed_resets = self.environments.begin(problems, seeds)
    prompts = encode_prompts(problems, self.tokenizer, self.max_prompt_length, first)
    return Flight(problems, prompts, seeds, failed_resets)

  def usage(self) -> Usage:
    """Counts of the streams that this collector grades, all 0."""
    return Usage() if self.environments is None else DialogueUsage()

  def add(self, group: Group[Flight]) -> None:
    """Adds a sampled group to its flight and submits it to the graders; does not wait for them."""
    flight, index = group.owner, group.prompt_index
    # The prompt that the policy reads: a chat template may end with "<think>".
    prompt_length = flight.prompts.lengths[index]
    prompt = self.tokenizer.decode(flight.prompts.tokens[index][-prompt_length:].tolist())
    rows = zip(group.tokens, group.lengths, strict=True)
    texts = [self.tokenizer.decode(row[:length].tolist()) for row, length in rows]
    completions = self._graded_texts(group, [thought_prefix(prompt) + text for text in texts])
    references = [flight.problems[index].reference] * len(completions)
    flight.add(group, texts, self.submit(completions, references))

  def _graded_texts(self, group: Group[Flight], texts: list[str]) -> list[str]:
    """Those texts that a grader judges; of dialogues without an outcome the last turn, or all."""
    if self.environments is None or group.ends is None:
      return texts
    judged = np.flatnonzero(group.ends == End.TO_BE_GRADED)
    if self.environments.settings.grade_all_turns:
      return [texts[g] for g in judged]
    return [self.environments.last_turn(group, g) for g in judged]

  def finish(self, flight: Flight, versions: Sequence[int]) -> Graded:
    """Waits for the grades and makes the batch.

    Args:
      flight: with all groups sampled.
      versions: P versions, see `RolloutBatch`; recorded in the samples.
    """
    rollouts = flight.rollouts
    judged = self.results([flight.grades[index] for index in range(len(flight.problems))])
    grades = _with_outcomes_of_dialogues(judged, flight)
    rewards, keep, correct, counts = rewards_from_grades(grades, self.outcome_policy)
    P, G, _ = rollouts.tokens.shape
    mask = sampled_places(rollouts)
    rewards, correct, valid = (np.reshape(x, (P, G)) for x in (rewards, correct, keep))
    mask = (mask & valid[..., None]).astype(np.float32)
    if self.overlong_filter:  # excluded responses have a grade: they stay valid
      mask = np.asarray(overlong_filter(mask, rollouts.stopped))
    shaped = self._shape_rewards(rewards, rollouts)
    batch = TrainBatch(
      prompts=flight.prompts,
      tokens=rollouts.tokens,
      mask=mask,
      behavior_logprobs=rollouts.behavior_logprobs,
      rewards=np.where(valid, shaped, np.float32(0)),
      correct=np.where(valid, correct, np.float32(0)),
      valid=valid,
      turns=rollouts.turns,
      turn_scores=rollouts.turn_scores,
      routes=rollouts.routes,
      prompt_routes=rollouts.prompt_routes,
      token_versions=rollouts.token_versions,
    )
    batch = dataclasses.replace(batch, solve_rate=mean_solve_rate(batch, np.asarray(versions)))
    statistics = {
      f"outcome/{name}": count / (P * G)
      for name, count in counts.items()
      if rollouts.turns is not None or name not in DIALOGUE_OUTCOMES
    }
    statistics |= length_statistics(rollouts)
    if rollouts.routes is not None:
      statistics |= route_statistics(rollouts, flight.prompts)
    samples = _samples(flight, grades, rewards, shaped, valid, versions)
    if rollouts.turns is not None:
      statistics |= turn_statistics(rollouts)
      samples = self._with_turns(samples, rollouts)
    return Graded(batch, int(sampled_places(rollouts).sum()), P, statistics, samples)

  def _with_turns(self, samples: list[dict[str, Any]], rollouts: Rollouts) -> list[dict[str, Any]]:
    """Adds the texts of turns, the policy's and the environment's in turn, and scores if any."""
    T = rollouts.tokens.shape[-1]
    fields = rollouts.tokens, rollouts.turns, rollouts.turn_scores
    rows = zip(*(np.reshape(x, (-1, T)) for x in fields), strict=True)
    found = []
    for sample, row, length in zip(samples, rows, rollouts.lengths.flat, strict=True):
      tokens, turns, scores = (x[:length] for x in row)
      starts = np.flatnonzero(np.diff(turns, prepend=-1))
      parts = np.split(tokens, starts[1:])
      of_turns: dict[str, Any] = {"turns": [self.tokenizer.decode(x.tolist()) for x in parts]}
      if not np.isnan(scores).all():
        ends = scores[[*(starts[1:] - 1), length - 1]]
        of_turns["turn_scores"] = np.where(np.isnan(ends), np.array(None), ends).tolist()
      found.append(sample | of_turns)
    return found

  def _shape_rewards(self, rewards: np.ndarray, rollouts: Rollouts) -> np.ndarray:
    if not self.overlong_buffer:
      return rewards
    return rewards - np.asarray(
      overlong_penalty(
        sampled_places(rollouts).sum(-1),
        max_response_length=rollouts.tokens.shape[-1],
        overlong_buffer=self.overlong_buffer,
      )
    )


def serve_graded(
  engine: EnginePrograms,
  params: Params | None,
  requests: Iterable[Request[Flight] | None],
  collector: Collector,
  usage: Usage | None = None,
  record: Callable[[list[Group[Flight]]], None] = lambda groups: None,
  new_weights: ChangingWeights | None = None,
) -> Iterator[int]:
  """Samples requests; submits each group to the graders as soon as it is finished.

  Args:
    engine: samples from the policy.
    params: from `EnginePrograms.load`; None with `new_weights`.
    requests: consumed as slots become free; see `serve`.
    collector: decodes and grades.
    usage: counts the steps and tokens of the slots, from `Collector.usage`.
    record: called after every burst, with the groups that it has finished; they are graded then.
    new_weights: see `serve`.
  Yields:
    After every burst, the number of groups that it has finished.
  """
  dialogues = None
  if collector.environments is not None:
    usage = usage or collector.usage()
    assert isinstance(usage, DialogueUsage)  # the collector's
    dialogues = EnvironmentDialogues(collector.environments, usage)
  for groups in serve(engine, params, requests, usage, dialogues, new_weights):
    record(groups)
    for group in groups:
      collector.add(group)
    yield len(groups)


def _with_outcomes_of_dialogues(judged: Sequence[Grade], flight: Flight) -> list[Grade]:
  """The grades of all rollouts: of dialogues that have an outcome, that outcome."""
  grades = iter(judged)
  found: list[Grade] = []
  for index in range(len(flight.problems)):
    group = flight.groups[index]
    ends = [End.TO_BE_GRADED] * len(group.lengths) if group.ends is None else group.ends
    for g, end in enumerate(map(End, ends)):
      if end.outcome is None:
        found.append(next(grades))
      else:
        score = 0.0 if group.scores is None else float(np.nan_to_num(group.scores[g]))
        found.append(Grade(end.outcome, score, group.details[g] if group.details else ""))
  return found


def _samples(
  flight: Flight,
  grades: Sequence[Grade],
  rewards: np.ndarray,
  shaped: np.ndarray,
  valid: np.ndarray,
  versions: Sequence[int],
) -> list[dict[str, Any]]:
  """A human-readable record of every rollout; rewards are None for a rollout without a grade."""
  rollouts = flight.rollouts
  group_size = rewards.shape[1]
  completions = [text for index in range(len(rewards)) for text in flight.texts[index]]
  valid_rewards = (np.where(valid, x, np.array(None)).flat for x in (rewards, shaped))
  per_rollout = (*valid_rewards, rollouts.lengths.flat, rollouts.stopped.flat)
  return [
    {
      "version": int(versions[i // group_size]),
      "prompt": flight.problems[i // group_size].question,
      "completion": completion,
      "answer": flight.problems[i // group_size].answer,
      "outcome": grade.outcome.value,
      "extracted": grade.answer,
      "reward": reward,  # of the outcome
      "shaped_reward": shaped_reward,  # after the penalty for length, used in training
      "tokens": int(length),
      "stopped": bool(stopped),
      **({"detail": grade.detail} if grade.outcome in _WITH_DETAIL else {}),
    }
    for i, (completion, grade, reward, shaped_reward, length, stopped) in enumerate(
      zip(completions, grades, *per_rollout, strict=True)
    )
  ]


def length_statistics(rollouts: Rollouts) -> dict[str, float]:
  """Percentiles of the response lengths, in tokens, and the share cut off by the length limit."""
  points = {"p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
  lengths = np.percentile(sampled_places(rollouts).sum(-1), list(points.values()))
  statistics = {
    f"response/length_{name}": x for name, x in zip(points, lengths.tolist(), strict=True)
  }
  return statistics | {"response/truncated": float(1 - rollouts.stopped.mean())}


def turn_statistics(rollouts: Rollouts) -> dict[str, float]:
  """Of dialogues, per rollout: the policy's turns, tokens of both sides, and scores of turns."""
  sampled = sampled_places(rollouts)
  turns = np.max(np.asarray(rollouts.turns), axis=-1) // 2 + 1
  replies = np.asarray(rollouts.lengths) - sampled.sum(-1)
  scores = np.asarray(rollouts.turn_scores)
  scores = scores[~np.isnan(scores)]
  return {
    "dialogue/turns": float(turns.mean()),
    "dialogue/turns_max": float(turns.max()),
    "dialogue/policy_tokens": float(sampled.sum(-1).mean()),
    "dialogue/environment_tokens": float(replies.mean()),
    **({"dialogue/turn_score": float(scores.mean(dtype=np.float64))} if scores.size else {}),
  }


def route_statistics(rollouts: Rollouts, prompts: Prompts) -> dict[str, float]:
  """Bytes of recorded routes over tokens of responses; a prompt's are recorded once."""
  routes: Any = rollouts.routes
  places = int(np.sum(rollouts.lengths)) + int(np.sum(np.asarray(prompts.lengths) - 1))
  of_place = routes[0, 0, 0].nbytes
  return {"routing/bytes_per_token": places * of_place / int(np.sum(rollouts.lengths))}


def mean_statistics(parts: Sequence[Graded]) -> dict[str, float]:
  """The mean of each of `Graded.statistics`, over the batches that have it."""
  names = dict.fromkeys(name for part in parts for name in part.statistics)
  return {
    name: float(np.mean([p.statistics[name] for p in parts if name in p.statistics]))
    for name in names
  }


def keep_mixed_groups(parts: Sequence[Graded], quotas: Sequence[int]) -> Graded | None:
  """Keeps the groups that are neither all right nor all wrong, until they fill a batch (DAPO).

  The filter reads the correctness of valid rollouts, not a shaped reward, and takes groups in the
  order sampled; groups beyond a full batch are dropped. Tokens, prompts and the solve rate, the
  mean of the parts', include dropped groups.

  Args:
    parts: batches sampled so far for one training batch.
    quotas: groups of a full batch by source, P in total.
  Returns:
    The full batch, or None if there are not enough such groups yet.
  Source: dynamic sampling in "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"
    (arXiv:2503.14476).
  """
  batch = join_batches([part.train for part in parts])
  has_correct = np.any((batch.correct == 1) & batch.valid, axis=1)
  has_wrong = np.any((batch.correct != 1) & batch.valid, axis=1)
  is_mixed = has_correct & has_wrong
  by_source = [
    np.flatnonzero(is_mixed & (batch.sources == source))[:quota]
    for source, quota in enumerate(quotas)
  ]
  if any(len(groups) < quota for groups, quota in zip(by_source, quotas, strict=True)):
    return None
  groups = np.concatenate(by_source)
  num_prompts = sum(quotas)
  full_batch = jax.tree.map(lambda x: x[groups], batch)
  group_size = batch.correct.shape[1]
  num_sampled = sum(part.prompts for part in parts)
  rates: Any = batch.solve_rate
  defined_rates = rates[~np.isnan(rates)]
  mean_rate = defined_rates.mean(dtype=np.float64) if defined_rates.size else np.nan
  statistics = mean_statistics(parts)
  statistics["dynamic_sampling/prompts_per_group"] = num_sampled / num_prompts
  samples = [sample for part in parts for sample in part.samples]
  return Graded(
    dataclasses.replace(full_batch, solve_rate=np.full(num_prompts, mean_rate, np.float32)),
    sum(part.tokens for part in parts),
    num_sampled,
    statistics,
    [samples[p * group_size + g] for p in groups for g in range(group_size)],
  )
