"""Tokens per second of refilled slots, until they drain, against slots that are always busy.

  python experiments/benchmarks/full_slots.py

The model and the lengths are those of w3 in `grpo_step.py`: 64 prompts × 8 responses of up to 512
tokens, through 64 slots. Refilled slots lose the rest of a burst when a response ends
within it, and the time of prefill and insertion. Always-busy slots decode 8 prompts × 8 responses
of 512 tokens, of which the last quarter counts: a step reads up to the length of the longest slot,
which is that long among refilled slots too. Both are measured in turn in one process.

The last line is one JSON object; tokens per second are those of the fastest round, the one least
disturbed by other programs. `processor_ratio` compares tokens per processor second over all rounds,
for machines that are never quiet.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from absl import app, flags

from rlvr_jax.train.cluster.process import keep_freed_memory

keep_freed_memory()

import jax
import numpy as np

from experiments import bursts
from experiments.benchmarks import grpo_step
from rlvr_jax.data import encode_prompts
from rlvr_jax.rollouts.engine import Engine, Usage
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start import parameters

_SLOTS, _PROMPTS, _GROUP = 64, 64, 8

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measured rounds, after one warm-up.", lower_bound=1)


def measure_until_drain(engine: Engine, groups) -> tuple[Usage, np.ndarray]:
  """Measures slot usage while groups wait, with wall-clock and processor seconds."""
  start = read_clocks()
  measured = copy.copy(engine.usage), read_clocks() - start
  for _ in bursts.bursts(engine, groups):
    if engine.usage.drain_slot_steps:
      break
    measured = copy.copy(engine.usage), read_clocks() - start
  return measured


def read_clocks() -> np.ndarray:
  """Reads the wall clock and the processor clock, seconds f64[2]."""
  return np.array([time.perf_counter(), time.process_time()])


def make_endless(engine: EnginePrograms) -> EnginePrograms:
  """Makes an engine like `engine` whose responses all have maximum length."""
  settings = engine.settings
  return EnginePrograms(
    settings.model,
    settings.sampling,
    slots=settings.slots,
    prefill_rows=_SLOTS // _GROUP,
    max_prompt_length=grpo_step.PROMPT_LENGTH,
    max_new_tokens=settings.max_new_tokens,
    stop_tokens=(settings.model.config.vocab_size,),
    pad_token=0,
  )


def main(argv: list[str]) -> None:
  del argv
  config = grpo_step.make_config("w3")
  config.sampling.slots = _SLOTS
  task = grpo_step.make_task()
  tokenizer = grpo_step.make_tokenizer("w3")
  parts = build(config, task=task, tokenizer=tokenizer)
  refilled = parts.programs.engine
  full = make_endless(refilled)
  params = refilled.load(parameters.initial_params(parts), {})
  prompts = encode_prompts(task.train[:_PROMPTS], tokenizer, grpo_step.PROMPT_LENGTH)
  few = jax.tree.map(lambda x: x[: _SLOTS // _GROUP], prompts)
  refilled_rates = []
  full_rates = []
  steps_per_token = []
  for number in range(1 + _ROUNDS.value):
    key = jax.random.key(number)
    engine, endless = bursts.begin(refilled, params), bursts.begin(full, params)
    usage, seconds = measure_until_drain(engine, bursts.groups(engine, prompts, key, _GROUP))
    groups = bursts.groups(endless, few, key, _GROUP)
    ends = [read_clocks() for _ in bursts.bursts(endless, groups)]
    last = len(ends) // 4
    full_rates.append(_SLOTS * full.settings.shape.steps * last / (ends[-1] - ends[-1 - last]))
    refilled_rates.append(usage.slot_tokens / seconds)
    steps_per_token.append(usage.slot_steps / usage.slot_tokens)
  best_refilled = np.max(refilled_rates[1:], axis=0)[0]
  best_full = np.max(full_rates[1:], axis=0)[0]
  processor_ratio = np.mean(refilled_rates[1:], axis=0)[1] / np.mean(full_rates[1:], axis=0)[1]
  result = {
    "refilled_tokens_per_s": round(best_refilled),
    "full_tokens_per_s": round(best_full),
    "ratio": round(best_refilled / best_full, 3),
    "processor_ratio": round(processor_ratio, 3),
    "slot_steps_per_token": round(statistics.mean(steps_per_token[1:]), 3),
    "all_refilled_tokens_per_s": [round(rate[0]) for rate in refilled_rates[1:]],
    "all_full_tokens_per_s": [round(rate[0]) for rate in full_rates[1:]],
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
