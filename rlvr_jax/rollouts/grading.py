"""Makes graded groups from rollouts and their grades, and statistics from the groups of a draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr_jax.data import Problem, Tokenizer
from rlvr_jax.data.tokenizer import Message
from rlvr_jax.ops.overlong import overlong_filter, overlong_penalty
from rlvr_jax.rewards.outcome import (
  DIALOGUE_OUTCOMES,
  Grade,
  Outcome,
  OutcomePolicy,
  rewards_from_grades,
)
from rlvr_jax.rollouts.engine import Rollout
from rlvr_jax.storage.files import JSON, JsonObject

FOREIGN = -1  # version of rollouts that no policy of this run has sampled

# Outcomes whose reason is recorded in the sample.
_WITH_DETAIL = {
  Outcome.CRASHED, Outcome.ENVIRONMENT_FAILED, Outcome.ENVIRONMENT_REFUSED,
  Outcome.ENVIRONMENT_LIMIT,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Grading:
  """Settings that determine how grades become rewards.

  Attributes:
    tokenizer: the tokenizer of the run.
    max_prompt_length: S, tokens.
    outcome_policy: the reward of each outcome of grading.
    overlong_buffer: number of tokens before the length limit over which the reward decreases; 0:
      the reward does not depend on length.
    overlong_filter: whether the loss excludes responses without a stop token.
    num_rewards: K of `TrainBatch.rewards_by_name`, the number of graders whose scores are kept.
    more_of: problem → further fields of the records of its rollouts.
  """

  tokenizer: Tokenizer
  max_prompt_length: int
  outcome_policy: OutcomePolicy
  overlong_buffer: int = 0
  overlong_filter: bool = False
  num_rewards: int = 0
  more_of: Callable[[Problem], Mapping[str, str]] = lambda problem: {}

  def arrays(self, rollouts: Sequence[Rollout], grades: Sequence[Grade]) -> dict[str, np.ndarray]:
    """The arrays of a group, by the names of `group.ARRAYS`.

    Args:
      rollouts: G rollouts of one prompt.
      grades: the grade of each rollout.
    Raises:
      GradingStoppedError: the reward policy of an outcome is "stop".
    """
    first = rollouts[0]
    arrays = prompt_arrays(first.prompt, self.max_prompt_length, self.tokenizer.pad_id)
    for name in first.arrays.keys() - {"prompt_routes", "versions"}:
      arrays[name] = np.stack([rollout.arrays[name] for rollout in rollouts])
    if "prompt_routes" in first.arrays:
      arrays["prompt_routes"] = first.arrays["prompt_routes"]
    arrays["lengths"] = np.array([rollout.length for rollout in rollouts], np.int32)
    arrays["stopped"] = np.array([rollout.stopped for rollout in rollouts], bool)
    rewards, valid, correct = rewards_from_grades(grades, self.outcome_policy)
    mask = (sampled_places(arrays) & valid[:, None]).astype(np.float32)
    if self.overlong_filter:  # excluded responses have a grade: they stay valid
      stopped: Any = arrays["stopped"][None]
      mask = np.asarray(overlong_filter(mask[None], stopped))[0]
    shaped = self._shape_rewards(rewards, arrays)
    if self.num_rewards:
      arrays["rewards_by_name"] = self._rewards_by_name(grades, valid)
    return arrays | {
      "mask": mask,
      "rewards": np.where(valid, shaped, np.float32(0)),
      "correct": np.where(valid, correct, np.float32(0)),
      "valid": valid,
    }

  def _rewards_by_name(self, grades: Sequence[Grade], valid: np.ndarray) -> np.ndarray:
    """f32[G, K], each grader's own score; 0 if there is no score, as after a timeout."""
    found = np.zeros((len(grades), self.num_rewards), np.float32)
    for g, grade in enumerate(grades):
      if valid[g] and grade.parts:
        found[g] = grade.parts
    return found

  def samples(
    self,
    problem: Problem,
    version: int,
    arrays: Mapping[str, np.ndarray],
    grades: Sequence[Grade],
    first_messages: Sequence[Message] | None = None,
  ) -> list[JsonObject]:
    """A human-readable record of every rollout; rewards are None for a rollout without a grade.

    Args:
      problem: the problem of the group.
      version: the version of the oldest policy that has sampled the group.
      arrays: the result of `arrays`.
      grades: the grades of the rollouts.
      first_messages: the first messages of a dialogue, if the environment writes them.
    """
    rewards, valid, _ = rewards_from_grades(grades, self.outcome_policy)
    found: list[JsonObject] = []
    more: JsonObject = {**self.more_of(problem)}
    if asked := first_messages or problem.messages:
      more["messages"] = [dict(message) for message in asked]
    for g, grade in enumerate(grades):
      length = arrays["lengths"][g]
      reward = float(rewards[g]) if valid[g] else None
      sample: JsonObject = {
        "version": version,
        "prompt": problem.question,
        "completion": self.tokenizer.decode(arrays["tokens"][g, :length].tolist()),
        "answer": problem.answer,
        "outcome": grade.outcome.value,
        "extracted": grade.answer,
        "reward": reward,  # the reward of the outcome
        # the reward after the penalty for length, used in training
        "shaped_reward": float(arrays["rewards"][g]) if valid[g] else None,
        "tokens": int(length),
        "stopped": bool(arrays["stopped"][g]),
        **({"detail": grade.detail} if grade.outcome in _WITH_DETAIL else {}),
        **more,
      }
      if "turns" in arrays:
        fields = (arrays[name][g, :length] for name in ("tokens", "turns", "turn_scores"))
        sample |= self._turns(*fields)
      found.append(sample)
    return found

  def _turns(self, tokens: np.ndarray, turns: np.ndarray, scores: np.ndarray) -> dict[str, JSON]:
    """The texts of the turns, alternately of policy and environment; and turn scores, if any."""
    starts = np.flatnonzero(np.diff(turns, prepend=-1))
    parts = np.split(tokens, starts[1:])
    found: dict[str, JSON] = {"turns": [self.tokenizer.decode(part.tolist()) for part in parts]}
    if not np.isnan(scores).all():
      ends = scores[[*(starts[1:] - 1), len(tokens) - 1]]
      found["turn_scores"] = np.where(np.isnan(ends), np.array(None), ends).tolist()
    return found

  def _shape_rewards(self, rewards: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    if not self.overlong_buffer:
      return rewards
    penalty = np.asarray(
      overlong_penalty(
        np.sum(sampled_places(arrays), axis=-1)[None],
        max_response_length=arrays["tokens"].shape[-1],
        overlong_buffer=self.overlong_buffer,
      )[0]
    )
    return np.asarray(rewards - penalty)


def prompt_arrays(prompt: np.ndarray, length: int, pad_token: int) -> dict[str, np.ndarray]:
  """A prompt i32[n] as arrays of a group: i32[S], left-padded, and its length i32[]."""
  tokens = np.full(length, pad_token, np.int32)
  tokens[length - len(prompt) :] = prompt
  return {"prompts.tokens": tokens, "prompts.lengths": np.array(len(prompt), np.int32)}


def sampled_places(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """bool[..., T], True at the policy's tokens; False at an environment's tokens and at padding."""
  places = np.arange(arrays["tokens"].shape[-1]) < arrays["lengths"][..., None]
  return places & (arrays["turns"] % 2 == 0) if "turns" in arrays else places


# --- statistics of a draw -------------------------------------------------------------------------


def solve_rates(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """f64[P], the share of correct rollouts among a group's valid rollouts; NaN if none is valid."""
  correct, valid = arrays["correct"], arrays["valid"]
  num_correct, num_valid = (x.sum(axis=1) for x in (correct * valid, valid))
  return np.where(num_valid > 0, num_correct / np.maximum(num_valid, 1), np.nan)


def mean_solve_rate(arrays: Mapping[str, np.ndarray], versions: np.ndarray) -> float:
  """The policy's solve rate: the mean of `solve_rates` over groups.

  The mean is over the groups that this run sampled, or over all groups if it sampled none. Groups
  without a valid rollout do not count; the result is NaN if no group counts.

  Args:
    arrays: the arrays of P groups.
    versions: i32[P], `FOREIGN` for groups that this run did not sample.
  """
  from_this_run = versions != FOREIGN
  rates = solve_rates(arrays)[from_this_run if from_this_run.any() else slice(None)]
  defined_rates = rates[~np.isnan(rates)]
  return float(defined_rates.mean()) if defined_rates.size else float("nan")


def draw_statistics(
  arrays: Mapping[str, np.ndarray], samples: Sequence[JsonObject]
) -> dict[str, float]:
  """Metrics of the groups of a draw.

  Args:
    arrays: the arrays of P groups.
    samples: the records of all rollouts of the groups.
  """
  outcomes = [sample["outcome"] for sample in samples]
  statistics = {
    f"outcome/{outcome}": outcomes.count(outcome) / len(outcomes)
    for outcome in map(str, Outcome)
    if "turns" in arrays or outcome not in DIALOGUE_OUTCOMES
  }
  statistics |= length_statistics(arrays)
  if "routes" in arrays:
    statistics |= route_statistics(arrays)
  if "turns" in arrays:
    statistics |= turn_statistics(arrays)
  return statistics


def length_statistics(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Percentiles of response lengths in tokens, and the share of responses cut off by the limit."""
  points = {"p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}
  lengths = np.percentile(sampled_places(arrays).sum(-1), list(points.values()))
  statistics = {
    f"response/length_{name}": x for name, x in zip(points, lengths.tolist(), strict=True)
  }
  return statistics | {"response/truncated": float(1 - arrays["stopped"].mean())}


def turn_statistics(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Metrics of dialogues: turns per rollout, tokens of policy and environment, turn scores."""
  sampled = sampled_places(arrays)
  turns = np.max(arrays["turns"], axis=-1) // 2 + 1
  replies = arrays["lengths"] - sampled.sum(-1)
  scores = arrays["turn_scores"]
  scores = scores[~np.isnan(scores)]
  return {
    "dialogue/turns": float(turns.mean()),
    "dialogue/turns_max": float(turns.max()),
    "dialogue/policy_tokens": float(sampled.sum(-1).mean()),
    "dialogue/environment_tokens": float(replies.mean()),
    **({"dialogue/turn_score": float(scores.mean(dtype=np.float64))} if scores.size else {}),
  }


def route_statistics(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
  """The metric `routing/bytes_per_token`: bytes of recorded routes per token of a response.

  The routes of a prompt, which are recorded once for its group, are included.
  """
  responses = int(np.sum(arrays["lengths"]))
  places = responses + int(np.sum(arrays["prompts.lengths"] - 1))
  of_place = arrays["routes"][0, 0, 0].nbytes
  return {"routing/bytes_per_token": places * of_place / responses}
