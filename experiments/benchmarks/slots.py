"""Slot-steps per token of refilled slots, simulated for responses of many lengths.

  python experiments/benchmarks/slots.py

A decoding step costs about the same however few of its slots still decode a response. So what
counts is slot-steps per sampled token: 1 is ideal, and rows in lockstep take as many steps as the
longest response. The simulation follows `rollouts.engine`: a slot takes the next response at the
first burst after its own has ended. A test compares it with what the engine itself counts.

A second table says how many prompts the slots of a device decode responses to at a time, by slot: a
device that kept each of them once, instead of once per slot, would need room for that many.

Lengths: lognormal, mean 1500, σ 0.8, and bimodal, 7 of 8 of about 300 tokens, the others of about
6000; both end at 8192. And geometric, mean 126, up to 512: those of w3 in `grpo_step.py`. Once no
response waits, slots drain; that part is reported apart.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import numpy as np

from rlvr_jax.rollouts.engine import Usage

CAP = 8192  # tokens
STEPS = 16  # of a burst
GROUP = 16  # rollouts per prompt, for lockstep: 32 prompts at a time


def simulated(lengths: np.ndarray, slots: int, steps: int = STEPS) -> Usage:
  """Usage of the slots for responses of these lengths, in this order."""
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


def prompts_per_slot(
  lengths: np.ndarray, slots: int, devices: int, *, queues: bool, steps: int = STEPS
) -> tuple[float, float]:
  """Prompts with a response in the slots of one device, by slot: (mean over bursts, the most).

  Args:
    lengths: of the responses, group by group.
    slots, devices: slots in all, split evenly over the devices.
    queues: whether a group's responses all go to one device, the first that has room for another
      group; else each goes to the next free slot, as in the engine.
  """
  left, group = np.zeros((devices, slots // devices), int), np.full((devices, slots // devices), -1)
  waiting = [list(range(len(lengths)))[::-1]]
  groups = [list(range(i, i + GROUP))[::-1] for i in range(0, len(lengths), GROUP)][::-1]
  of_device = [[] for _ in range(devices)] if queues else waiting * devices
  counts = []
  while True:
    for device, slot in np.argwhere(left == 0):
      queue = of_device[device]
      if queues and not queue and groups:
        queue += groups.pop()
      response = queue.pop() if queue else None
      left[device, slot] = 0 if response is None else lengths[response]
      group[device, slot] = -1 if response is None else response // GROUP
    if not left.any():
      return float(np.mean(counts)), float(np.max(counts))
    counts.append([len({*of} - {-1}) / len(of) for of in group.tolist()])
    left -= np.minimum(left, steps)


def lognormal(count: int, rng: np.random.Generator) -> np.ndarray:
  sigma = 0.8
  lengths = rng.lognormal(np.log(1500) - sigma**2 / 2, sigma, count)
  return np.minimum(np.ceil(lengths), CAP).astype(int)


def bimodal(count: int, rng: np.random.Generator) -> np.ndarray:
  short, long = rng.normal(300, 60, count), rng.normal(6000, 800, count)
  return np.clip(np.where(rng.random(count) < 7 / 8, short, long), 1, CAP).astype(int)


def geometric(count: int, rng: np.random.Generator) -> np.ndarray:
  return np.minimum(rng.geometric(1 / 128, count), 512)


def print_steps() -> None:
  print("| lengths | slots | responses | slot-steps per token | drain: share | whole | lockstep |")
  print("|---|---|---|---|---|---|---|")
  for draw in (lognormal, bimodal, geometric):
    for slots, times in ((16, 4), (64, 4), (64, 16), (512, 4), (512, 16), (2048, 4)):
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


def print_prompts() -> None:
  print("| lengths | slots | devices | prompts per slot: mean | most | a queue per device | most |")
  print("|---|---|---|---|---|---|---|")
  for draw in (lognormal, bimodal):
    for slots, devices in ((128, 1), (512, 4), (512, 16), (2048, 16)):
      lengths = draw(slots * 8, np.random.default_rng(0))
      each = [prompts_per_slot(lengths, slots, devices, queues=q) for q in (False, True)]
      found = " | ".join(f"{x:.2f}" for pair in each for x in pair)
      print(f"| {draw.__name__} | {slots} | {devices} | {found} |")


def of_lockstep(draws: int = 50) -> np.ndarray:
  """Slot-steps of w3, 64 responses in 16 slots, divided by those of 64 rows in lockstep."""
  lengths = [geometric(64, np.random.default_rng(seed)) for seed in range(draws)]
  return np.array([simulated(x, 16).slot_steps / lockstep(x, 64) for x in lengths])


def main() -> None:
  print_steps()
  found = of_lockstep()
  print(f"\nw3 in 16 slots: {found.mean():.2f} of lockstep's row-steps", end="")
  print(f" ({found.min():.2f} to {found.max():.2f} over {len(found)} draws of lengths)")
  print()
  print_prompts()


if __name__ == "__main__":
  main()
