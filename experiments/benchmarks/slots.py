"""Slot-steps per token of refilled slots, simulated for responses of many lengths.

  python experiments/benchmarks/slots.py

A decoding step costs about the same however few of its slots still decode a response. So what
counts is slot-steps per sampled token: 1 is ideal, and rows in lockstep take as many steps as the
longest response. The simulation follows `rollouts.scheduler`: a slot takes the next response at the
first burst after its own has ended. A test compares it with what the engine itself counts.

Lengths: lognormal, mean 1500, σ 0.8, and bimodal, 7 of 8 of about 300 tokens, the others of about
6000; both end at 8192. And geometric, mean 126, up to 512: those of w3 in `grpo_step.py`. Once no
response waits, slots drain; that part is reported apart.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import numpy as np

from rlvr_jax.rollouts.scheduler import Usage

CAP = 8192  # tokens
STEPS = 16  # of a burst
GROUP = 16  # rollouts per prompt, for lockstep: 32 prompts at a time


def simulated(lengths: np.ndarray, slots: int, steps: int = STEPS) -> Usage:
  """What the slots do with responses of these lengths, in this order."""
  usage, left, waiting = Usage(), np.zeros(slots, int), list(lengths[::-1])
  while True:
    for slot in np.flatnonzero(left == 0):
      left[slot] = waiting.pop() if waiting else 0
    if not left.any():
      return usage
    taken = np.minimum(left, steps)
    usage.add(int(taken.max()) * slots, int(taken.sum()), drain=bool((left == 0).any()))
    left -= taken


def lockstep(lengths: np.ndarray, rows: int) -> int:
  """Row-steps of batches in which every row goes on until the longest response has ended."""
  batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
  return sum(len(batch) * int(batch.max()) for batch in batches)


def lognormal(count: int, rng: np.random.Generator) -> np.ndarray:
  sigma = 0.8
  lengths = rng.lognormal(np.log(1500) - sigma**2 / 2, sigma, count)
  return np.minimum(np.ceil(lengths), CAP).astype(int)


def bimodal(count: int, rng: np.random.Generator) -> np.ndarray:
  short, long = rng.normal(300, 60, count), rng.normal(6000, 800, count)
  return np.clip(np.where(rng.random(count) < 7 / 8, short, long), 1, CAP).astype(int)


def geometric(count: int, rng: np.random.Generator) -> np.ndarray:
  return np.minimum(rng.geometric(1 / 128, count), 512)


def main() -> None:
  print("| lengths | slots | responses | slot-steps per token | drain: share | whole | lockstep |")
  print("|---|---|---|---|---|---|---|")
  for draw in (lognormal, bimodal, geometric):
    for slots, times in ((64, 4), (64, 16), (512, 4), (512, 16), (2048, 4)):
      lengths = draw(slots * times, np.random.default_rng(0))
      usage = simulated(lengths, slots)
      outside = usage.slot_steps - usage.drain_slot_steps
      tokens = usage.slot_tokens - usage.drain_tokens
      print(
        f"| {draw.__name__} | {slots} | {len(lengths)} | {outside / tokens:.3f}"
        f" | {usage.drain_slot_steps / usage.slot_steps:.1%}"
        f" | {usage.slot_steps / usage.slot_tokens:.2f}"
        f" | {lockstep(lengths, 32 * GROUP) / lengths.sum():.2f} |"
      )


if __name__ == "__main__":
  main()
