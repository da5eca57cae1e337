"""Slot-steps per token of refilled slots, simulated for responses of many lengths.

  python experiments/benchmarks/slots.py

A decoding step costs about the same however many of its slots still decode a response. The cost is
therefore slot-steps per sampled token: 1 is ideal, and rows in lockstep take as many steps as the
longest response. The simulation follows `rollouts.engine`: a slot takes the next response at the
first burst after its own has ended. A test compares it with the engine's own counts.

A second table gives the number of distinct prompts in the slots of a device, per slot: a device
that stored each prompt once, instead of once per slot, would need room for that many.

A third table gives the seconds of decoding a refresh of Qwen2.5 7B on 16 chips of v5p, by their
peaks: a step reads the weights and the live cache, or multiplies, whichever takes longer. It
compares one stream of requests with a stream for each draw of prompts, as dynamic sampling once had
them, and a second, smaller number of slots for the drain.

Lengths are lognormal, mean 1500, σ 0.8; bimodal, 7 of 8 about 300 tokens, the others about 6000,
both up to 8192; and geometric, mean 126, up to 512, as for w3 in `grpo_step.py`. When no response
waits, slots drain; that part is reported separately.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import numpy as np

from rlvr_jax.costs.chips import CHIPS
from rlvr_jax.rollouts.engine import Usage

CAP = 8192  # tokens
STEPS = 16  # steps of a burst
GROUP = 16  # rollouts per prompt, for lockstep: 32 prompts at a time
PARAMETERS = 7.6e9  # of Qwen2.5 7B, in bfloat16
CACHE_BYTES = 28 * 4 * 128 * 2 * 2  # of a token
LOGITS_BYTES = 152_064 * 4 * 4  # of a slot: float32, written and read twice


def bursts(
  lengths: np.ndarray, slots: int, steps: int = STEPS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Yields each burst of responses of these lengths: (tokens, tokens before it) by slot."""
  remaining, generated = np.zeros((2, slots), int)
  waiting = list(lengths[::-1])
  while True:
    for slot in np.flatnonzero(remaining == 0):
      remaining[slot] = waiting.pop() if waiting else 0
      generated[slot] = 0
    if not remaining.any():
      return
    tokens = np.minimum(remaining, steps)
    yield tokens, generated
    remaining -= tokens
    generated += tokens


def simulate(lengths: np.ndarray, slots: int, steps: int = STEPS) -> Usage:
  """Simulates the usage of slots for responses of these lengths, in this order."""
  usage = Usage()
  for tokens, _ in bursts(lengths, slots, steps):
    usage.add(int(tokens.max()) * slots, int(tokens.sum()), drain=bool((tokens == 0).any()))
  return usage


def refresh_seconds(
  lengths: np.ndarray, slots: int, *, tensor: int, prompt: int, drain_slots: int = 0
) -> np.ndarray:
  """Seconds of decoding on 16 chips of v5p, and those of them in the drain, by the chips' peaks.

  Args:
    lengths: lengths of the responses of a stream.
    slots: over all chips.
    tensor: chips that share a layer.
    prompt: tokens of each prompt.
    drain_slots: slots of a second program, when no more are busy; 0: there is none.
  """
  groups, rows, seconds = 16 // tensor, slots, np.zeros(2)
  for tokens, generated in bursts(lengths, slots):
    running = tokens > 0
    if running.sum() <= drain_slots:
      rows = drain_slots
    cached = CACHE_BYTES * (generated + prompt)[running].sum() / groups
    hbm = (2 * PARAMETERS + cached + rows / groups * LOGITS_BYTES) / tensor
    flops = 2 * PARAMETERS * rows / groups / tensor
    step = max(hbm / CHIPS["v5p"].hbm_bytes_per_s, flops / CHIPS["v5p"].flops)
    seconds += tokens.max() * step * np.array([1, not running.all()])
  return seconds


def lockstep_row_steps(lengths: np.ndarray, rows: int) -> int:
  """Row-steps of batches whose rows all decode until the longest response has ended."""
  batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
  return sum(len(batch) * int(batch.max()) for batch in batches)


def prompts_per_slot(
  lengths: np.ndarray, slots: int, devices: int, *, queues: bool, steps: int = STEPS
) -> tuple[float, float]:
  """Distinct prompts in the slots of one device, per slot: (mean over bursts, largest).

  Args:
    lengths: lengths of the responses, group by group.
    slots, devices: total number of slots, split evenly over the devices.
    queues: whether a group's responses all go to one device, the first with an empty queue; else
      each goes to the next free slot, as in the engine.
    steps: steps of a burst.
  """
  remaining = np.zeros((devices, slots // devices), int)
  group = np.full((devices, slots // devices), -1)
  waiting = [list(range(len(lengths)))[::-1]]
  groups = [list(range(i, i + GROUP))[::-1] for i in range(0, len(lengths), GROUP)][::-1]
  device_queues = [[] for _ in range(devices)] if queues else waiting * devices
  counts = []
  while True:
    for device, slot in np.argwhere(remaining == 0):
      queue = device_queues[device]
      if queues and not queue and groups:
        queue += groups.pop()
      response = queue.pop() if queue else None
      remaining[device, slot] = 0 if response is None else lengths[response]
      group[device, slot] = -1 if response is None else response // GROUP
    if not remaining.any():
      return float(np.mean(counts)), float(np.max(counts))
    counts.append([len({*prompts} - {-1}) / len(prompts) for prompts in group.tolist()])
    remaining -= np.minimum(remaining, steps)


def lognormal(
  count: int, rng: np.random.Generator, mean: float = 1500, cap: int = CAP
) -> np.ndarray:
  sigma = 0.8
  lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
  return np.minimum(np.ceil(lengths), cap).astype(int)


def bimodal(count: int, rng: np.random.Generator) -> np.ndarray:
  short = rng.normal(300, 60, count)
  long = rng.normal(6000, 800, count)
  return np.clip(np.where(rng.random(count) < 7 / 8, short, long), 1, CAP).astype(int)


def geometric(count: int, rng: np.random.Generator) -> np.ndarray:
  return np.minimum(rng.geometric(1 / 128, count), 512)


def print_steps() -> None:
  print("| lengths | slots | responses | slot-steps per token | drain: share | whole | lockstep |")
  print("|---|---|---|---|---|---|---|")
  for draw in (lognormal, bimodal, geometric):
    for slots, times in ((16, 4), (64, 4), (64, 16), (512, 4), (512, 16), (2048, 4)):
      lengths = draw(slots * times, np.random.default_rng(0))
      usage = simulate(lengths, slots)
      outside = usage.slot_steps - usage.drain_slot_steps
      tokens = usage.slot_tokens - usage.drain_tokens
      print(
        f"| {draw.__name__} | {slots} | {len(lengths)} | {outside / tokens:.3f}"
        f" | {usage.drain_slot_steps / usage.slot_steps:.1%}"
        f" | {usage.slot_steps / usage.slot_tokens:.2f}"
        f" | {lockstep_row_steps(lengths, 32 * GROUP) / lengths.sum():.2f} |"
      )


def print_prompts() -> None:
  print("| lengths | slots | devices | prompts per slot: mean | most | a queue per device | most |")
  print("|---|---|---|---|---|---|---|")
  for draw in (lognormal, bimodal):
    for slots, devices in ((128, 1), (512, 4), (512, 16), (2048, 16)):
      lengths = draw(slots * 8, np.random.default_rng(0))
      results = [prompts_per_slot(lengths, slots, devices, queues=q) for q in (False, True)]
      cells = " | ".join(f"{x:.2f}" for pair in results for x in pair)
      print(f"| {draw.__name__} | {slots} | {devices} | {cells} |")


def print_seconds() -> None:
  print("| refresh | streams | slots | slots of the drain | seconds | in the drain |")
  print("|---|---|---|---|---|---|")
  rng = np.random.default_rng(0)
  salt = lognormal(16 * 512, rng)
  fade = lognormal(512, rng, mean=630, cap=2048)
  for name, lengths, tensor, prompt, cases in (
    ("SALT: 16 draws × 512", salt, 2, 300, ((16, 512, 0), (16, 512, 128), (1, 512, 0),
      (1, 512, 128), (1, 1536, 0), (1, 1536, 384))),
    ("FADE: 512", fade, 1, 200, ((1, 512, 0), (1, 512, 128), (1, 512, 16))),
  ):  # fmt: skip
    for streams, slots, drain_slots in cases:
      seconds, drain = sum(
        refresh_seconds(part, slots, tensor=tensor, prompt=prompt, drain_slots=drain_slots)
        for part in np.split(lengths, streams)
      )
      print(
        f"| {name} | {streams} | {slots} | {drain_slots or 'none'} | {seconds:.1f}"
        f" | {drain / seconds:.0%} |"
      )


def lockstep_ratios(draws: int = 50) -> np.ndarray:
  """Slot-steps of w3, 64 responses in 16 slots, divided by those of 64 rows in lockstep."""
  lengths = [geometric(64, np.random.default_rng(seed)) for seed in range(draws)]
  return np.array([simulate(x, 16).slot_steps / lockstep_row_steps(x, 64) for x in lengths])


def main() -> None:
  print_steps()
  ratios = lockstep_ratios()
  print(f"\nw3 in 16 slots: {ratios.mean():.2f} of lockstep's row-steps", end="")
  print(f" ({ratios.min():.2f} to {ratios.max():.2f} over {len(ratios)} draws of lengths)")
  print()
  print_prompts()
  print()
  print_seconds()


if __name__ == "__main__":
  main()
