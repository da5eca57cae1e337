"""Tokens per second of slots that are refilled, until they drain, against slots always busy.

  python experiments/benchmarks/full_slots.py

The model and the lengths are those of w3 in `grpo_step.py`: 64 prompts × 8 responses of up to 512
tokens, in one stream through 64 slots. Refilled slots lose what is left of a burst when a response
ends within it, and the time of prefilling and inserting. The slots that are always busy decode 8
prompts × 8 responses of 512 tokens. Both take turns in one process. The last line is one JSON
object; tokens per second are those of the fastest round, which other programs have disturbed least.
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

from rlvr_jax.train.host import keep_freed_memory

keep_freed_memory()

import jax
import numpy as np

from experiments.benchmarks import grpo_step
from rlvr_jax.data import encode_prompts
from rlvr_jax.rollouts.scheduler import Engine, Usage, requests
from rlvr_jax.train import parameters
from rlvr_jax.train.build import build

_SLOTS, _PROMPTS, _GROUP = 64, 64, 8

_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measured ones, after one to warm up.", lower_bound=1)


def until_drain(engine: Engine, params, asked) -> tuple[Usage, float]:
  """What the slots did while requests were waiting, and in how many seconds."""
  usage, began = Usage(), time.perf_counter()
  found = usage, 0.0
  for _ in engine.serve(params, asked, usage):
    if usage.drain_slot_steps:
      break
    found = Usage(**vars(usage)), time.perf_counter() - began
  return found


def endless(engine: Engine) -> Engine:
  """The same with responses that all have the greatest length."""
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
    usage, seconds = until_drain(refilled, params, requests(prompts, key, _GROUP))
    began = time.perf_counter()
    groups = [group for some in full.serve(params, requests(few, key, _GROUP)) for group in some]
    tokens = sum(int(np.sum(group.lengths)) for group in groups)
    of_full.append(tokens / (time.perf_counter() - began))
    rates.append(usage.slot_tokens / seconds)
    steps_per_token.append(usage.slot_steps / usage.slot_tokens)
  fastest, most = max(rates[1:]), max(of_full[1:])
  result = {
    "refilled_tokens_per_s": round(fastest),
    "full_tokens_per_s": round(most),
    "ratio": round(fastest / most, 3),
    "slot_steps_per_token": round(statistics.mean(steps_per_token[1:]), 3),
    "all_refilled_tokens_per_s": [round(rate) for rate in rates[1:]],
    "all_full_tokens_per_s": [round(rate) for rate in of_full[1:]],
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
