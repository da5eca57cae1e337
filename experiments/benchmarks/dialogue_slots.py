"""Slots that are busy where an environment takes as long as the policy.

  python experiments/benchmarks/dialogue_slots.py

Dialogues of 4 to 8 turns run through the engine, 4 or 16 times as many as slots. A turn of the
policy has about 32 to 256 tokens, of geometric distribution; a reply has 16. It comes at once, or
after as many decoding steps as the turn took. So the counts do not depend on the machine.

"busy" are the tokens that were sampled, by slots and decoding steps, outside the drain: where fewer
dialogues than slots have not ended. Steps that repeat tokens after a reply, or lie behind a turn's
end in its burst, are not busy, nor are those in which all slots wait. "lost to bursts" is what is
lost if replies come at once.
"""

from __future__ import annotations

import collections
import math
import os
import pathlib
import sys
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import jax
import numpy as np

from experiments import bursts
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset
from rlvr_jax.rollouts.engine import Rollout, Usage
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import Prompts, Sampling

VOCABULARY, SLOTS, GROUP, REPLY = 512, 16, 4, 16


def make_programs(turn: int) -> EnginePrograms:
  """Programs whose turns have about so many tokens, with random weights."""
  config = preset(
    "tiny", vocab_size=VOCABULARY, num_layers=1, width=32, mlp_width=64, unroll_layers=1
  )
  return EnginePrograms(
    transformer(config),
    Sampling(),
    slots=SLOTS,
    prefill_rows=SLOTS,
    max_prompt_length=16,
    max_new_tokens=16 * turn,  # about twice what eight turns take
    stop_tokens=tuple(range(VOCABULARY - VOCABULARY // turn, VOCABULARY)),
    pad_token=0,
    has_replies=True,
  )


def measure(programs: EnginePrograms, share: float, per_slot: int) -> tuple[Usage, int]:
  """The counts of dialogues, and the steps outside the drain in which all slots waited.

  The clock counts decoding steps, those in which all slots wait included.

  Args:
    programs: decode.
    share: of the time of a turn that its reply takes.
    per_slot: dialogues by slots.
  """
  number = SLOTS * per_slot // GROUP
  tokens = np.random.default_rng(0).integers(1, VOCABULARY, (number, 16)).astype(np.int32)
  prompts = Prompts(tokens=tokens, lengths=np.full(number, 16, np.int32))
  engine = bursts.begin(
    programs, programs.load(programs.settings.model.init(jax.random.key(0)), {})
  )
  left = collections.deque(bursts.groups(engine, prompts, jax.random.key(1), GROUP))
  asked: list[tuple[float, Rollout]] = []  # with the time of the answer
  waited = idle = 0  # steps
  now = lambda: engine.usage.slot_steps / SLOTS + waited
  while left or engine.busy or asked:
    answered = [rollout for at, rollout in asked if at <= now()]
    asked = [(at, rollout) for at, rollout in asked if at > now()]
    for rollout in answered:
      if not is_last(rollout):
        engine.resume(rollout, np.zeros(REPLY, np.int32))
    while left and engine.free:
      engine.begin(left.popleft())
    if engine.busy:
      for rollout in engine.burst(waiting=len(asked)):
        asked.append((now() + share * turn_length(rollout), rollout))
    elif asked:
      steps = math.ceil(min(at for at, _ in asked) - now())
      waited, idle = waited + steps, idle + steps * (len(asked) >= SLOTS)
  return engine.usage, idle


def turn_length(rollout: Rollout) -> int:
  """Tokens of the last turn."""
  turns = rollout.arrays["turns"][: rollout.length]
  return int((turns == turns[-1]).sum())


def is_last(rollout: Rollout) -> bool:
  """Whether the dialogue ends with this turn: the fourth to eighth, or there is no room."""
  turns = int(rollout.arrays["turns"][rollout.length - 1]) // 2 + 1
  is_full = rollout.length + REPLY >= len(rollout.arrays["tokens"])
  return turns == 4 + rollout.place[0] % 5 or is_full


def busy(usage: Usage, idle_steps: int) -> float:
  """Sampled tokens by slots and steps, outside the drain."""
  steps = usage.slot_steps - usage.drain_slot_steps + idle_steps * SLOTS
  return (usage.slot_tokens - usage.drain_tokens) / steps


def main(cases: Sequence[tuple[int, int]] = ((32, 4), (64, 4), (128, 4), (256, 4), (128, 16))):
  print("| a turn, tokens about | dialogues by slots | busy | lost to bursts | to waits | drain |")
  print("|---|---|---|---|---|---|")
  for turn, per_slot in cases:
    programs = make_programs(turn)
    at_once, slow = busy(*measure(programs, 0.0, per_slot)), measure(programs, 1.0, per_slot)
    usage = slow[0]
    print(
      f"| {turn} | {per_slot} | {busy(*slow):.1%} | {1 - at_once:.1%}"
      f" | {at_once - busy(*slow):.1%} | {usage.drain_slot_steps / usage.slot_steps:.0%} |",
      flush=True,
    )


if __name__ == "__main__":
  main()
