"""From prompts to graded groups: generate, decode for grading only, grade, pack for training."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlvr_jax.ops.overlong import overlong_filter, overlong_penalty
from rlvr_jax.types import Prompts, Rollouts, TrainBatch


class Generation(NamedTuple):
  """Rollouts on their way: dispatched to the devices, not yet waited for."""

  problems: Sequence[Any]
  prompts: Prompts  # NumPy
  rollouts: Sequence[Rollouts]  # device arrays, of one source after the other
  versions: Sequence[int]  # of each prompt: updates behind the policy that generates; −1: unknown


class Graded(NamedTuple):
  """A batch ready for training and what there is to tell of it."""

  batch: TrainBatch  # NumPy
  tokens: int  # generated for it
  prompts: int  # drawn for it
  statistics: dict[str, float]  # outcome fractions, share of responses cut at the limit
  samples: list[dict[str, Any]]  # one JSON-able record per rollout, in order


@dataclasses.dataclass(frozen=True)
class Collector:
  """What collection needs; every part is given, so that this module imports none of them.

  Attributes:
    encode: problems → Prompts of NumPy arrays.
    decode: token ids → text.
    submit: (completions, references) → a future of grades.
    rewards_from_grades: grades → (rewards, keep, correct, counts).
    to_host: the way of arrays from the mesh.
    opening: prompt → what graders read before each of its completions, such as a "<think>" with
      which it ends.
    overlong_buffer: tokens before the limit over which the reward falls; 0 leaves it as it is.
    overlong_filter: whether responses without a stop token are left out of the loss.
  """

  encode: Callable[[Sequence[Any]], Prompts]
  decode: Callable[[Sequence[int]], str]
  submit: Callable[[list[str], list[dict[str, Any]]], Any]
  rewards_from_grades: Callable[[list[Any]], Any]
  to_host: Callable[[Any], Any]
  opening: Callable[[str], str] = lambda prompt: ""
  overlong_buffer: int = 0
  overlong_filter: bool = False

  def start(
    self,
    problems: Sequence[Any],
    generate: Callable[[Prompts], Sequence[Rollouts]],
    versions: Sequence[int],
  ) -> Generation:
    """Dispatches generation and returns at once.

    Args:
      problems: P of them.
      generate: dispatches; NumPy prompts → rollouts of consecutive prompts, P in all.
      versions: P numbers, see `Generation`.
    """
    prompts = self.encode(problems)
    return Generation(problems, prompts, generate(prompts), versions)

  def submit_grading(self, generation: Generation) -> tuple[Rollouts, list[str], Any]:
    """Waits for the rollouts and hands them to the graders; returns before they are graded."""
    parts = self.to_host(list(generation.rollouts))
    rollouts = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    completions = completion_texts(rollouts, self.decode)
    group_size = rollouts.tokens.shape[1]
    references = [p.reference for p in generation.problems for _ in range(group_size)]
    # Of the prompt that the policy reads: a chat template may have opened a thought.
    real = zip(generation.prompts.tokens, generation.prompts.lengths, strict=True)
    openings = [self.opening(self.decode(row[len(row) - n :].tolist())) for row, n in real]
    texts = [openings[i // group_size] + text for i, text in enumerate(completions)]
    return rollouts, completions, self.submit(texts, references)

  def finish(
    self, generation: Generation, rollouts: Rollouts, completions: list[str], grading: Any
  ) -> Graded:
    """Waits for the grades and packs the batch."""
    grades = grading.result()
    rewards, keep, correct, counts = self.rewards_from_grades(grades)
    P, G, T = rollouts.tokens.shape
    shape = (P, G)
    mask = np.arange(T) < rollouts.lengths[..., None]
    rewards, correct, kept = (np.reshape(x, shape) for x in (rewards, correct, keep))
    mask = (mask & kept[..., None]).astype(np.float32)
    if self.overlong_filter:
      mask = np.asarray(overlong_filter(mask, rollouts.stopped))
    rewards, correct = fill_left_out(rewards, kept), fill_left_out(correct, kept)
    shaped = rewards
    if self.overlong_buffer:
      shaped = shaped - np.asarray(
        overlong_penalty(
          rollouts.lengths, max_response_length=T, overlong_buffer=self.overlong_buffer
        )
      )
    batch = TrainBatch(
      prompts=generation.prompts,
      tokens=rollouts.tokens,
      mask=mask,
      behavior_logprobs=rollouts.behavior_logprobs,
      rewards=shaped,
      correct=correct,
      solve_rate=np.full(P, np.mean(correct), np.float32),
    )
    statistics = {f"outcome/{name}": count / (P * G) for name, count in counts.items()}
    statistics["response/truncated"] = float(1 - rollouts.stopped.mean())
    per_rollout = (rewards.flat, rollouts.lengths.flat, rollouts.stopped.flat)
    samples = [
      {
        "version": int(generation.versions[i // G]),
        "prompt": generation.problems[i // G].question,
        "completion": completion,
        "answer": generation.problems[i // G].answer,
        "outcome": grade.outcome.value,
        "extracted": grade.answer,
        "reward": float(reward),
        "tokens": int(length),
        "stopped": bool(stopped),
      }
      for i, (completion, grade, reward, length, stopped) in enumerate(
        zip(completions, grades, *per_rollout, strict=True)
      )
    ]
    return Graded(batch, int(rollouts.lengths.sum()), P, statistics, samples)


def fill_left_out(values: np.ndarray, keep: np.ndarray) -> np.ndarray:
  """Rollouts left out of the loss get the mean of their group's others, so that they say nothing.

  Args:
    values: f32[P, G], rewards or correctness.
    keep: bool[P, G]; a group without any is left as it is.
  """
  filled = values.copy()
  for row, kept in zip(filled, keep, strict=True):
    if kept.any() and not kept.all():
      others = row[kept]
      # The value itself where all agree: the mean of equal numbers need not equal them.
      row[~kept] = others[0] if (others == others[0]).all() else others.mean()
  return filled


def mean_statistics(parts: Sequence[Graded]) -> dict[str, float]:
  """The mean of what `Graded.statistics` holds, over the batches that have it."""
  names = dict.fromkeys(name for part in parts for name in part.statistics)
  having = lambda name: [p.statistics[name] for p in parts if name in p.statistics]
  return {name: float(np.mean(having(name))) for name in names}


def join(parts: Sequence[TrainBatch]) -> TrainBatch:
  """The groups of several batches as one."""
  return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def keep_mixed_groups(parts: Sequence[Graded], quotas: Sequence[int]) -> Graded | None:
  """DAPO's filter: a full batch of groups that are neither all right nor all wrong, or None.

  Whole groups, on correctness (not on a shaped reward), in the order drawn; what is left over once
  the batch is full is dropped. Tokens and prompts count what was spent, dropped groups included.

  Args:
    parts: batches drawn so far for one batch of training.
    quotas: groups of a full batch, by source; P in all.
  Source: arXiv 2503.14476, dynamic sampling.
  """
  batch = join([part.batch for part in parts])
  solved = batch.correct.mean(axis=1)
  mixed = (solved > 0) & (solved < 1)
  found = [
    np.flatnonzero(mixed & (batch.sources == source))[:quota]
    for source, quota in enumerate(quotas)
  ]
  if any(len(groups) < quota for groups, quota in zip(found, quotas, strict=True)):
    return None
  mixed, num_prompts = np.concatenate(found), sum(quotas)
  kept = jax.tree.map(lambda x: x[mixed], batch)
  group_size = batch.correct.shape[1]
  drawn = sum(part.prompts for part in parts)
  statistics = mean_statistics(parts)
  statistics["dynamic_sampling/prompts_per_group"] = drawn / num_prompts
  samples = [sample for part in parts for sample in part.samples]
  return Graded(
    dataclasses.replace(kept, solve_rate=np.full(num_prompts, solved.mean(), np.float32)),
    sum(part.tokens for part in parts),
    drawn,
    statistics,
    [samples[p * group_size + g] for p in mixed for g in range(group_size)],
  )


def completion_texts(rollouts: Rollouts, decode: Callable[[Sequence[int]], str]) -> list[str]:
  """The B responses as text, rollouts of a prompt adjacent; padding left out by length."""
  tokens = rollouts.tokens.reshape(-1, rollouts.tokens.shape[-1])
  return [
    decode(row[:length].tolist()) for row, length in zip(tokens, rollouts.lengths.flat, strict=True)
  ]


def batch_to_arrays(batch: TrainBatch) -> dict[str, Any]:
  """The arrays that are there by name; of the prompts, `prompts.tokens` and `prompts.lengths`."""
  prompts = {f"prompts.{name}": value for name, value in vars(batch.prompts).items()}
  return prompts | {k: v for k, v in vars(batch).items() if v is not None and k != "prompts"}


def batch_from_arrays(arrays: Mapping[str, Any]) -> TrainBatch:
  """The inverse of `batch_to_arrays`."""
  fields = dict(arrays)
  prompts = {name: fields.pop(f"prompts.{name}") for name in ("tokens", "lengths")}
  return TrainBatch(prompts=Prompts(**prompts), **fields)


def write_batch(path: str | os.PathLike[str], batch: TrainBatch) -> None:
  """One batch as .npz, an array per field."""
  np.savez(path, **batch_to_arrays(batch))


def read_batch(path: str | os.PathLike[str]) -> TrainBatch:
  """The inverse of `write_batch`."""
  with np.load(path) as file:
    return batch_from_arrays(dict(file))
