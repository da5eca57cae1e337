"""Slot-steps per token of refilled slots, simulated for responses of many lengths.

  python experiments/benchmarks/slots.py

A decoding step costs about the same however many of its slots still decode a response. The cost is
therefore slot-steps per sampled token: 1 is ideal, and rows in lockstep take as many steps as the
longest response. The simulation is `costs.generation_time.sample_in_slots`. A test compares it with
the engine's own counts.

A second table gives the seconds of sampling a refresh of Qwen2.5 7B on 16 chips of v5p, with data 4
and tensor 4, by `costs.generation_time.refresh`. It compares one stream of requests with a
stream for each draw of prompts, as dynamic sampling once had them.

Lengths are lognormal, mean 1500, σ 0.8; bimodal, 7 of 8 about 300 tokens, the others about 6000,
both up to 8192; and geometric, mean 126, up to 512, as for w3 in `grpo_step.py`. When no response
waits, slots drain; that part is reported separately.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import jax
import numpy as np
from jax.sharding import AbstractMesh

from rlvr_jax.costs import workload
from rlvr_jax.costs.chips import CHIPS
from rlvr_jax.costs.generation_time import Seconds, refresh, sample_in_slots
from rlvr_jax.costs.workload import Workload
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset
from rlvr_jax.ops.caches import CacheShape
from rlvr_jax.rollouts.engine import Usage
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import BatchShape

CAP = 8192  # tokens
STEPS = 16  # steps of a burst
GROUP = 16  # rollouts per prompt: 32 prompts at a time


def simulate(lengths: np.ndarray, slots: int, steps: int = STEPS) -> Usage:
  """Simulates the usage of slots for responses of these lengths, in this order."""
  one_prompt = Workload(np.ones(1, np.int64), np.reshape(lengths, (1, -1, 1)))
  cache = CacheShape.of(1, CAP, pages=True)._replace(steps=steps)
  return sample_in_slots([one_prompt], cache, slots).usage


def stream_seconds(batches: Sequence[Workload], slots: int, *, cap: int) -> Seconds:
  """Seconds of sampling these batches of a 7B model on v5p:2x2x4, in one stream."""
  model = transformer(dataclasses.replace(preset("qwen2.5_7b"), compute_dtype="bfloat16"))
  mesh = AbstractMesh((4, 1, 4), sharding.AXES)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return refresh(
    batches,
    model,
    sharding.add_shardings(shapes, mesh),
    mesh,
    CacheShape.of(int(max(batch.prompts.max() for batch in batches)), cap, pages=True),
    CHIPS["v5p"],
    slots=slots,
    pages=True,
  ).seconds


def lockstep_row_steps(lengths: np.ndarray, rows: int) -> int:
  """Row-steps of batches whose rows all decode until the longest response has ended."""
  batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
  return sum(len(batch) * int(batch.max()) for batch in batches)


def lognormal(count: int, seed: int) -> np.ndarray:
  shape = BatchShape(count, 1, max_prompt_length=1, max_response_length=CAP)
  return workload.lognormal(mean=1500).draw(shape, seed).responses.ravel()


def bimodal(count: int, seed: int) -> np.ndarray:
  rng = np.random.default_rng(seed)
  short = rng.normal(300, 60, count)
  long = rng.normal(6000, 800, count)
  return np.clip(np.where(rng.random(count) < 7 / 8, short, long), 1, CAP).astype(int)


def geometric(count: int, seed: int) -> np.ndarray:
  return np.minimum(np.random.default_rng(seed).geometric(1 / 128, count), 512)


def print_steps() -> None:
  print("| lengths | slots | responses | slot-steps per token | drain: share | whole | lockstep |")
  print("|---|---|---|---|---|---|---|")
  for draw in (lognormal, bimodal, geometric):
    for slots, times in ((16, 4), (64, 4), (64, 16), (512, 4), (512, 16), (2048, 4)):
      lengths = draw(slots * times, 0)
      usage = simulate(lengths, slots)
      outside = usage.slot_steps - usage.drain_slot_steps
      tokens = usage.slot_tokens - usage.drain_tokens
      print(
        f"| {draw.__name__} | {slots} | {len(lengths)} | {outside / tokens:.3f}"
        f" | {usage.drain_slot_steps / usage.slot_steps:.1%}"
        f" | {usage.slot_steps / usage.slot_tokens:.2f}"
        f" | {lockstep_row_steps(lengths, 32 * GROUP) / lengths.sum():.2f} |"
      )


def print_seconds() -> None:
  print("| refresh | streams | slots | seconds | steps in the drain |")
  print("|---|---|---|---|---|")
  for name, mean, prompt, cap, draws, cases in (
    ("SALT: 16 draws × 512", 1500, 300, 8192, 16, ((16, 512), (1, 512), (1, 1536), (1, 2048))),
    ("FADE: 512", 630, 200, 2048, 1, ((1, 512), (1, 256))),
  ):
    lengths, shape = workload.lognormal(mean=mean), BatchShape(32, GROUP, prompt, cap)
    batches = [lengths.draw(shape, number) for number in range(draws)]
    for streams, slots in cases:
      size = draws // streams
      parts = [batches[start : start + size] for start in range(0, draws, size)]
      overlapped, in_turn = np.sum([stream_seconds(part, slots, cap=cap) for part in parts], axis=0)
      usages = [
        simulate(np.concatenate([b.responses.ravel() for b in part]), slots) for part in parts
      ]
      drain = sum(usage.drain_slot_steps for usage in usages)
      steps = sum(usage.slot_steps for usage in usages)
      seconds = f"{overlapped:.1f} to {in_turn:.1f}"
      print(f"| {name} | {streams} | {slots} | {seconds} | {drain / steps:.0%} |")


def lockstep_ratios(draws: int = 50) -> np.ndarray:
  """Slot-steps of w3, 64 responses in 16 slots, divided by those of 64 rows in lockstep."""
  lengths = [geometric(64, seed) for seed in range(draws)]
  return np.array([simulate(x, 16).slot_steps / lockstep_row_steps(x, 64) for x in lengths])


def main() -> None:
  print_steps()
  ratios = lockstep_ratios()
  print(f"\nw3 in 16 slots: {ratios.mean():.2f} of lockstep's row-steps", end="")
  print(f" ({ratios.min():.2f} to {ratios.max():.2f} over {len(ratios)} draws of lengths)")
  print()
  print_seconds()


if __name__ == "__main__":
  main()
