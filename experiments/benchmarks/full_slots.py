"""Tokens per second of slots that are refilled, until they drain, against slots always busy.

  python experiments/benchmarks/full_slots.py

The model and the lengths are those of w3 in `grpo_step.py`: 64 prompts × 8 responses of up to 512
tokens, in one stream through 64 slots. Refilled slots lose what is left of a burst when a response
ends within it, and the time of prefilling and inserting. The slots that are always busy decode 8
prompts × 8 responses of 512 tokens, of which the last quarter counts: a step reads up to the
longest slot, which is that long among refilled ones too. Both take turns in one process.

The last line is one JSON object; tokens per second are those of the fastest round, which other
programs have disturbed least. `processor_ratio` compares tokens by the seconds of processors that
all rounds took, for a machine that is never quiet.
"""

from __future__ import annotations

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

from experiments.benchmarks import grpo_step
from rlvr_jax.data import encode_prompts
from rlvr_jax.rollouts.engine import Engine, Usage, requests
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start import parameters

_SLOTS, _PROMPTS, _GROUP = 64, 64, 8

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measured ones, after one to warm up.", lower_bound=1)


def until_drain(engine: Engine, params, asked) -> tuple[Usage, np.ndarray]:
  """Usage of the slots while requests were waiting, with wall-clock and processor seconds."""
  usage, began = Usage(), clocks()
  found = usage, clocks() - began
  for _ in engine.serve(params, asked, usage):
    if usage.drain_slot_steps:
      break
    found = Usage(**vars(usage)), clocks() - began
  return found


def clocks() -> np.ndarray:
  return np.array([time.perf_counter(), time.process_time()])


def endless(engine: Engine) -> Engine:
  """Measures as `until_drain`, with responses that all have maximum length."""
  settings = engine.settings
  return Engine(
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
  task, tokenizer = grpo_step.make_task(), grpo_step.make_tokenizer("w3")
  parts = build(config, task=task, tokenizer=tokenizer)
  refilled = parts.programs.engine
  full = endless(refilled)
  params = refilled.load(parameters.initial_params(parts), {})
  prompts = encode_prompts(task.train[:_PROMPTS], tokenizer, grpo_step.PROMPT_LENGTH)
  few = jax.tree.map(lambda x: x[: _SLOTS // _GROUP], prompts)
  rates, steps_per_token, of_full = [], [], []
  for number in range(1 + _ROUNDS.value):
    key = jax.random.key(number)
    usage, seconds = until_drain(refilled, params, requests(prompts, key, _GROUP, owner=None))
    ends = [clocks() for _ in full.serve(params, requests(few, key, _GROUP, owner=None))]
    last = len(ends) // 4
    of_full.append(_SLOTS * full.settings.shape.steps * last / (ends[-1] - ends[-1 - last]))
    rates.append(usage.slot_tokens / seconds)
    steps_per_token.append(usage.slot_steps / usage.slot_tokens)
  fastest, most = np.max(rates[1:], axis=0)[0], np.max(of_full[1:], axis=0)[0]
  processors = np.mean(rates[1:], axis=0)[1] / np.mean(of_full[1:], axis=0)[1]
  result = {
    "refilled_tokens_per_s": round(fastest),
    "full_tokens_per_s": round(most),
    "ratio": round(fastest / most, 3),
    "processor_ratio": round(processors, 3),
    "slot_steps_per_token": round(statistics.mean(steps_per_token[1:]), 3),
    "all_refilled_tokens_per_s": [round(rate[0]) for rate in rates[1:]],
    "all_full_tokens_per_s": [round(rate[0]) for rate in of_full[1:]],
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
