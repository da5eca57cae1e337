"""The benchmark of an update's parts: operations against counts by hand, rates, and a tiny run."""

import jax
import numpy as np
import pytest

from experiments.benchmarks import grpo_step, update_parts
from rlvr_jax.train.setup.build import build

WIDTH, MLP, LAYERS, VOCABULARY, HEAD_DIM = 16, 24, 3, 300, 8
ROWS, LENGTH = 4, 31 + 4 * 6  # of a micro-batch: a prompt, its last token aside, and four responses
TOKENS = ROWS * LENGTH


@pytest.fixture(scope="module")
def case():
  config = grpo_step.make_config("w1", tokens_per_micro_batch=TOKENS)
  config.model.overrides.update(
    dict(width=WIDTH, mlp_width=MLP, num_layers=LAYERS, vocab_size=VOCABULARY, remat="dots"),
    num_heads=2,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
  )
  config.max_response_length = 6
  config.batch.prompts, config.batch.group_size = 2 * ROWS, 4
  tokenizer = grpo_step.EndlessTokenizer(VOCABULARY)
  parts = build(config, task=grpo_step.make_task(), tokenizer=tokenizer)
  return parts, update_parts.full_batch(parts)


def test_operations_are_those_of_a_micro_batch(case):
  assert case[1].packed.tokens.shape == (2, ROWS, LENGTH)
  flops = {
    name: update_parts.PARTS[name](*case)["forward"].flops
    for name in ("layers", "attention", "head")
  }
  kernels = WIDTH * HEAD_DIM * (2 + 1 + 1 + 2) + 3 * WIDTH * MLP
  assert flops["head"] == 2 * TOKENS * WIDTH * VOCABULARY
  assert flops["layers"] == 2 * TOKENS * kernels * LAYERS + flops["attention"]
  assert (
    flops["attention"] == LAYERS * 2 * 2 * TOKENS * LENGTH * 2 * HEAD_DIM
  )  # one block of queries


def test_backward_is_both_passes_less_the_forward_one():
  seconds = dict(forward=1.0, both=5.0, product=2.0)
  found = update_parts.rates(seconds, dict(forward=2e9, both=6e9, product=8e9))
  assert found["backward"] == {"s": 4.0, "gflop_per_s": 1.0, "share": 0.25}
  assert found["forward"]["share"] == 0.5 and found["product"]["share"] == 1
  without = update_parts.rates(dict(forward=1.0, product=2.0), dict(forward=0, product=8e9))
  assert without["forward"] == {"s": 1.0} and "backward" not in without


@pytest.mark.slow
def test_every_part_runs_more_than_once(case):
  for name, make in update_parts.PARTS.items():
    for call in make(*case).values():
      run = update_parts.jitted(call, "highest")
      for _ in range(2):  # the second on what the first one donated
        leaves = [x for x in jax.tree.leaves(run()) if np.issubdtype(x.dtype, np.floating)]
        assert leaves and all(np.isfinite(x).all() for x in leaves), name
