"""What a batch of long responses costs the host: memory, bytes in the store, seconds of each step.

  python experiments/benchmarks/long_responses.py

The same responses in runs that allow more and more tokens. What grows between the rows of the table
grows with the limit, not with the tokens.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import jax
import numpy as np

from experiments.benchmarks.tables import hardware, write_results
from rlvr_jax.data.problems import Problem
from rlvr_jax.data.tokenizer import ByteTokenizer
from rlvr_jax.rewards import Grade, Outcome, outcome_policy
from rlvr_jax.rollouts.batch import loss_tokens, train_batch
from rlvr_jax.rollouts.engine import Rollout
from rlvr_jax.rollouts.grading import Grading
from rlvr_jax.rollouts.group import Group
from rlvr_jax.rollouts.packing import min_row_length, pack_batch, row_layout
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.types import TrainBatch

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "benchmarks" / "results" / "long_responses"
PROMPTS, GROUP_SIZE, PROMPT = 32, 16, 1024
MEDIAN, SIGMA = 3000, 0.6  # of the lengths, lognormal; the longest has 8192 tokens


def draw_rollouts(limit: int) -> Iterator[list[Rollout]]:
  """The rollouts of each prompt, with random tokens."""
  rng = np.random.default_rng(0)
  prompt = np.full(PROMPT, ord("x"), np.int32)
  for index in range(PROMPTS):
    rollouts = []
    for g, drawn in enumerate(rng.lognormal(np.log(MEDIAN), SIGMA, GROUP_SIZE).astype(np.int32)):
      length = int(np.clip(drawn, 1, min(limit, 8192)))
      tokens, logprobs = np.zeros(limit, np.int32), np.zeros(limit, np.float32)
      tokens[:length] = rng.integers(32, 127, length)
      logprobs[:length] = -rng.exponential(0.3, length)
      arrays = {"tokens": tokens, "behavior_logprobs": logprobs}
      rollouts.append(
        Rollout((0, index, g), prompt, np.zeros(2, np.uint32), arrays, length=length, stopped=True)
      )
    yield rollouts


def measure(limit: int) -> dict[str, float]:
  """Seconds by step, bytes in the store and GiB of arrays, of one batch."""
  problem = Problem("x" * (PROMPT - 1), "1", solution="1", reference={"answer": "1"})
  grading = Grading(ByteTokenizer(), PROMPT, outcome_policy())
  grades = [Grade(Outcome.CORRECT, 1.0)] * GROUP_SIZE
  length = min_row_length(PROMPT, limit, alignment=1024)
  layout = row_layout(
    prompts=PROMPTS, group_size=GROUP_SIZE, max_prompt_length=PROMPT, max_response_length=limit,
    length=length, alignment=1024, devices=1, tokens_per_micro_batch=length,
  )  # fmt: skip
  sampled = list(draw_rollouts(limit))
  clock = [time.perf_counter()]
  lap = lambda: clock.append(time.perf_counter()) or clock[-1] - clock[-2]
  groups = []
  for index, rollouts in enumerate(sampled):
    arrays = grading.arrays(rollouts, grades)
    arrays["solve_rate"] = np.array(1, np.float32)
    samples = grading.samples(problem, 0, arrays, grades)
    groups.append(Group(0, index, 0, {0: "0" * 16}, arrays, samples, {}))
  row: dict[str, float] = {"limit": limit, "groups with their texts, s": lap()}
  batch = train_batch(groups)
  row["making the batch, s"] = lap()
  packed = pack_batch(batch, layout)
  row["packing, s"] = lap()
  with tempfile.TemporaryDirectory() as folder, RolloutStore(folder, writable=True) as store:
    lap()
    store.write(0, groups, {"groups": PROMPTS})
    row["writing to the store, s"] = lap()
    store.read(0)
    row["reading, s"] = lap()
    row["store, MB"] = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir()) / 1e6
  row["arrays of the batch, MB"] = sum(x.nbytes for g in groups for x in g.arrays.values()) / 1e6
  row["its packed rows, MB"] = sum(np.asarray(x).nbytes for x in packed_leaves(packed)) / 1e6
  row["tokens"] = int(loss_tokens(batch).sum())
  return row


def packed_leaves(batch: TrainBatch) -> list[np.ndarray]:
  return jax.tree.leaves(batch.packed)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--limits", default="8192,65536,129024", help="tokens of a response")
  limits = [int(limit) for limit in parser.parse_args().limits.split(",")]
  measure(1024)  # imports, and the first use of libraries
  conditions = {
    "batch": f"{PROMPTS} prompts of {PROMPT} tokens with {GROUP_SIZE} responses",
    "lengths": f"lognormal, median {MEDIAN}, at most 8192",
    "hardware": hardware(),
  }
  rows = [measure(limit) for limit in limits]
  print(write_results(RESULTS, "The host's cost of long responses", rows, conditions))


if __name__ == "__main__":
  main()
