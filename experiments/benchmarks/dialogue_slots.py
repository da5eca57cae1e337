"""Slots that are busy while an environment takes as long as the policy.

  python experiments/benchmarks/dialogue_slots.py --turn=128

Dialogues of 4 to 8 turns run through 32 slots, 4 times as many dialogues as slots, with a real
environment in a process of its own. A turn of the policy has about `--turn` tokens, of geometric
distribution; a reply has 16. First the environment replies at once: that gives the seconds of a
turn in its slot. Then each reply takes these seconds.

Busy slots are tokens that were sampled, by slots and decoding steps: not those that a burst
repeats after a reply, and not the steps behind a turn's end. The drain is left out, where requests
have run out and some slots are idle. Without the engine's waits, what is lost is the burst: a turn
begins and ends within one. `of a burst's bound` compares with that.

The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from rlvr_jax.train.cluster.process import collect_garbage_less_often, keep_freed_memory

keep_freed_memory()
collect_garbage_less_often()

import jax

from experiments.benchmarks import slow_environment
from rlvr_jax.configs import base
from rlvr_jax.data import ByteTokenizer, Problem, Task
from rlvr_jax.rollouts.collect import Collector, serve_graded
from rlvr_jax.rollouts.dialogues import DialogueUsage
from rlvr_jax.rollouts.engine import make_requests
from rlvr_jax.train.setup.build import Parts, build
from rlvr_jax.train.setup.grading import start_pools
from rlvr_jax.train.start import parameters

_VOCABULARY = 512

_TURN = flags.DEFINE_integer("turn", 128, "Tokens of a turn of the policy, about.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 32, "Dialogues that are decoded at a time.", lower_bound=1)
_PER_SLOT = flags.DEFINE_integer("per_slot", 4, "Dialogues by slots.", lower_bound=1)


class _StoppingTokenizer(ByteTokenizer):
  """Has so many stop tokens that turns have about `--turn` tokens with random weights."""

  vocab_size = _VOCABULARY

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return tuple(range(_VOCABULARY - max(_VOCABULARY // _TURN.value, 1), _VOCABULARY))


def make_config(seconds: float) -> Any:
  c = base.get_config()
  c.model.overrides = dict(vocab_size=_VOCABULARY)
  c.environment.name = f"{slow_environment.__name__}:slow(seconds={seconds})"
  c.environment.processes = 1
  c.max_prompt_length = 16
  c.max_response_length = 16 * _TURN.value  # twice as much as eight turns take on average
  c.batch.prompts = _PER_SLOT.value * _SLOTS.value // 4
  c.batch.group_size = 4
  c.sampling.slots = _SLOTS.value
  c.grading.num_workers = 1
  c.warm_start.num_steps = 0
  return c


def make_task() -> Task:
  problem = Problem(question="Talk.", answer="", solution="", reference={})
  grader = "pattern(regex='(?!)')"  # the environment gives the score
  return Task(name="talk", train=(problem,), warm_start=(), held_out=(problem,), grader=grader)


def measure(parts: Parts, seed: int) -> tuple[DialogueUsage, float]:
  """The counts of a stream of dialogues, and its seconds."""
  engine, c = parts.programs.engine, parts.config
  with contextlib.ExitStack() as stack:
    enter = lambda pool: stack.enter_context(contextlib.closing(pool))
    collector: Collector = parts.make_collector(*start_pools(c, parts.task, enter))
    params = engine.load(parameters.initial_params(parts), {})
    problems = [parts.task.train[0]] * c.batch.prompts
    flight = collector.begin(problems, range(c.batch.prompts))
    requests = make_requests(flight.prompts, jax.random.key(seed), c.batch.group_size, flight)
    usage = collector.usage()
    assert isinstance(usage, DialogueUsage)
    began = time.perf_counter()
    for _ in serve_graded(engine, params, requests, collector, usage):
      pass
    return usage, time.perf_counter() - began


def main(argv: list[str]) -> None:
  del argv
  build_parts = lambda seconds: build(
    make_config(seconds), task=make_task(), tokenizer=_StoppingTokenizer()
  )
  at_once = build_parts(0.0)
  measure(at_once, seed=0)  # compiles
  usage, seconds = measure(at_once, seed=1)
  turn_s = seconds * _SLOTS.value / usage.replies
  slow, slow_s = measure(build_parts(round(turn_s, 4)), seed=1)
  result = {
    "slots": _SLOTS.value,
    "dialogues": _SLOTS.value * _PER_SLOT.value,
    "tokens_per_turn": round(slow.slot_tokens / slow.replies, 1),
    "turn_s": round(turn_s, 3),
    "reply_s": round(slow.reply_waits_s / slow.replies, 3),
    "busy_if_replies_come_at_once": round(busy(usage), 3),
    "busy": round(busy(slow), 3),
    "drain": round(slow.drain_slot_steps / slow.slot_steps, 3),
    "waited_for_replies": round(slow.environment_wait_seconds / slow_s, 3),
    "seconds_over_those_at_once": round(slow_s / seconds, 3),
  }
  print(json.dumps(result))


def busy(usage: DialogueUsage) -> float:
  """Sampled tokens by slots and steps, outside the drain."""
  steps = usage.slot_steps - usage.drain_slot_steps
  return (usage.slot_tokens - usage.drain_tokens) / steps


if __name__ == "__main__":
  app.run(main)
