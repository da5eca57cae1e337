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

import os
import pathlib
import sys
from collections.abc import Sequence

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

import jax
import numpy as np

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset
from rlvr_jax.rollouts.engine import Usage
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.serve import Answer, Group, make_requests, serve
from rlvr_jax.types import Prompts, Sampling

VOCABULARY, SLOTS, GROUP, REPLY = 512, 16, 4, 16


class Replies:
  """Answers turns after a share of the time that they took; see `serve.Dialogues`.

  Its clock counts decoding steps, those in which all slots wait included. `idle_steps` are those
  outside the drain.
  """

  def __init__(self, usage: Usage, share: float):
    self._usage, self._share = usage, share
    self.idle_steps = self._waited = 0
    self._asked: list[tuple[float, Group, int]] = []  # with the time of the answer

  def _now(self) -> float:
    return self._usage.slot_steps / SLOTS + self._waited

  def find_stop(self, group: Group, rollout: int, start: int) -> None:
    del group, rollout, start

  def ask(self, group: Group, rollout: int) -> None:
    turns = group.turns[rollout, : group.lengths[rollout]]
    took = int((turns == turns[-1]).sum())
    self._asked.append((self._now() + self._share * took, group, rollout))

  def add_costs(self, *, idle_slot_steps: int = 0, rebuilt_tokens: int = 0) -> None:
    del idle_slot_steps, rebuilt_tokens

  def take(self, *, patience_s: float, until_one: bool) -> list[Answer]:
    del patience_s  # of a wall clock
    if until_one and self._asked:
      first = min(at for at, *_ in self._asked)
      steps = max(0, int(np.ceil(first - self._now())))
      self._waited += steps
      self.idle_steps += steps * (len(self._asked) >= SLOTS)
    ready = [entry for entry in self._asked if entry[0] <= self._now()]
    self._asked = [entry for entry in self._asked if entry[0] > self._now()]
    return [self._answer(group, rollout) for _, group, rollout in ready]

  def _answer(self, group: Group, rollout: int) -> Answer:
    length = int(group.lengths[rollout])
    turns = int(group.turns[rollout, length - 1]) // 2 + 1
    is_last = turns == 4 + group.prompt_index % 5 or length + REPLY >= group.tokens.shape[1]
    return Answer(group, rollout, np.zeros(0 if is_last else REPLY, np.int32), is_last)


def make_engine(turn: int) -> EnginePrograms:
  """An engine whose turns have about so many tokens, with random weights."""
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


def measure(engine: EnginePrograms, share: float, per_slot: int) -> tuple[Usage, int]:
  """The counts of a stream of dialogues, and the steps in which all slots waited.

  Args:
    engine: decodes.
    share: of the time of a turn that its reply takes.
    per_slot: dialogues by slots.
  """
  number = SLOTS * per_slot // GROUP
  tokens = np.random.default_rng(0).integers(1, VOCABULARY, (number, 16)).astype(np.int32)
  prompts = Prompts(tokens=tokens, lengths=np.full(number, 16, np.int32))
  usage = Usage()
  replies = Replies(usage, share)
  params = engine.load(engine.settings.model.init(jax.random.key(0)), {})
  requests = make_requests(prompts, jax.random.key(1), GROUP, None)
  for _ in serve(engine, params, requests, usage, replies):
    pass
  return usage, replies.idle_steps


def busy(usage: Usage, idle_steps: int) -> float:
  """Sampled tokens by slots and steps, outside the drain."""
  steps = usage.slot_steps - usage.drain_slot_steps + idle_steps * SLOTS
  return (usage.slot_tokens - usage.drain_tokens) / steps


def main(cases: Sequence[tuple[int, int]] = ((32, 4), (64, 4), (128, 4), (256, 4), (128, 16))):
  print("| a turn, tokens about | dialogues by slots | busy | lost to bursts | to waits | drain |")
  print("|---|---|---|---|---|---|")
  for turn, per_slot in cases:
    engine = make_engine(turn)
    at_once, slow = busy(*measure(engine, 0.0, per_slot)), measure(engine, 1.0, per_slot)
    usage = slow[0]
    print(
      f"| {turn} | {per_slot} | {busy(*slow):.1%} | {1 - at_once:.1%}"
      f" | {at_once - busy(*slow):.1%} | {usage.drain_slot_steps / usage.slot_steps:.0%} |",
      flush=True,
    )


if __name__ == "__main__":
  main()
