"""The simulation of slots against what the engine counts, and the claim it supports."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from experiments import bursts
from rlvr_jax.costs import workload
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.types import BatchShape, Prompts, Sampling

_FILE = pathlib.Path(__file__).parents[2] / "experiments" / "benchmarks" / "slots.py"
_spec = importlib.util.spec_from_file_location("slots", _FILE)
slots = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(slots)


def test_the_simulation_counts_what_the_engine_counts():
  network = TransformerConfig(
    vocab_size=24, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=16
  )
  programs = EnginePrograms(
    transformer(network),
    Sampling(),
    slots=3,
    prefill_rows=20,
    max_prompt_length=2,
    max_new_tokens=60,
    stop_tokens=(3,),
    pad_token=0,
  )
  params = programs.load(programs.settings.model.init(jax.random.key(0)), {})
  engine = bursts.begin(programs, params)
  prompts = Prompts(np.tile(np.asarray([1, 2], np.int32), (20, 1)), np.full(20, 2, np.int32))
  rollouts = bursts.sample(engine, bursts.groups(engine, prompts, jax.random.key(1), 1))
  lengths = np.array([rollout.length for rollout in rollouts])
  assert len(set(lengths)) > 8
  assert slots.simulate(lengths, 3) == engine.usage


def test_slots_of_short_responses_are_nearly_full_until_they_drain():
  """64 prompts × 8 in one refresh with 64 slots: at most a tenth of the steps is idle."""
  usage = slots.simulate(slots.geometric(64 * 8, 1), 64)
  outside = usage.slot_steps - usage.drain_slot_steps
  assert outside <= 1.1 * (usage.slot_tokens - usage.drain_tokens)


def test_w3_in_16_slots_takes_two_fifths_of_lockstep():
  assert slots.lockstep_ratios().mean() <= 0.4


def test_a_stream_of_all_draws_is_faster_than_a_stream_for_each():
  draw = workload.lognormal(mean=1500).draw
  batches = [draw(BatchShape(16, 16, 300, 8192), number) for number in range(4)]
  seconds = lambda part: slots.stream_seconds(part, 256, cap=8192)
  together, apart = seconds(batches), [seconds([batch]) for batch in batches]
  assert together.overlapped < 0.6 * sum(each.overlapped for each in apart)


@pytest.mark.parametrize("draw", [slots.lognormal, slots.bimodal])
def test_slots_are_busy_until_they_drain(draw):
  """With four responses per slot or more: at most 1.25 slot-steps per token."""
  for count, times in ((64, 4), (256, 4), (64, 16)):
    lengths = draw(count * times, 1)
    usage = slots.simulate(lengths, count)
    outside = usage.slot_steps - usage.drain_slot_steps
    assert outside <= 1.25 * (usage.slot_tokens - usage.drain_tokens)
    assert slots.lockstep_row_steps(lengths, 512) > 1.5 * usage.slot_steps
