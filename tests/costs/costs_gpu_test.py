"""Budgets of what compiled programs cost on GPUs, for which jax's CUDA plugin compiles without one.

A decoding step must be launched as a whole, and no program may wait for its device within a step.
Numbers are those of launches, kernels, bytes and memory: seconds are printed by the benchmarks.
"""

import json
import re

import jax
import numpy as np
import pytest
from train import tiny

from experiments.benchmarks import grpo_step
from rlvr_jax.commands import ahead_of_time, tune
from rlvr_jax.configs import quickstart
from rlvr_jax.configs.full_size import fade_qwen25_7b
from rlvr_jax.costs import memory, programs, report
from rlvr_jax.costs.chips import find_chip

pytest.importorskip("jax_cuda13_plugin", reason='the compiler: pip install "rlvr_jax[cuda13]"')

ONE = "h100:1"


def workload(name):
  config = grpo_step.make_config(name, 0)
  with config.unlocked():
    config.model.overrides["compute_dtype"] = "float32" if name == "w1" else "bfloat16"
  return config


def half_a_billion():
  """The shape of Qwen2.5 0.5B, 64 slots, 128 + 256 tokens."""
  config = workload("w5")
  config.batch.prompts, config.batch.group_size = 8, 8
  config.max_prompt_length, config.max_response_length = 128, 256
  return config


CONFIGS = {
  "w1": lambda: workload("w1"),
  "w4": lambda: workload("w4"),
  "quickstart": quickstart.get_config,
  "0.5B": half_a_billion,
}
# name → kernels of a layer in a decoding step, with the head's and the draw's shared among layers;
# launches of an update
LAYERS = {"w1": 33, "w4": 26.5, "quickstart": 30, "0.5B": 28.5}
LAUNCHES = {"w1": 1500, "w4": 6000, "quickstart": 550, "0.5B": 13_500}


@pytest.fixture(scope="module")
def costs():
  """Costs of the programs of a configuration, compiled once."""
  found = {}

  def of(name):
    if name not in found:
      config = CONFIGS[name]()
      parts = programs.build_for(config, ONE)
      lowered = ahead_of_time.lowerings(parts)
      found[name] = (
        parts,
        {program: report.program_cost(program, lower, ONE) for program, lower in lowered.items()},
      )
    return found[name]

  return of


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoding_step_is_launched_as_a_whole(name, costs):
  parts, found = costs(name)
  launches = found["generation"]["launches"]
  step = max((x for x in launches["bodies"] if x["depth"]), key=lambda body: body["kernels"])
  # The loop on the token alone asks whether a slot is still running; inside it there is no loop.
  assert launches["loops_that_wait"] == 1 and step["waits"]
  assert max(body["depth"] for body in launches["bodies"]) == 1
  assert launches["copies_to_host"] == 0
  assert step["launches"] + step["command_buffers"] <= 4
  assert step["kernels"] / parts.model.config.num_layers <= LAYERS[name]
  # A burst of 16 steps, with what comes before and after them.
  assert launches["launches"] <= 16 * 4 + 8


@pytest.mark.parametrize("name", CONFIGS)
def test_an_update_never_waits(name, costs):
  _, found = costs(name)
  launches = found["update"]["launches"]
  assert launches["loops_that_wait"] == launches["copies_to_host"] == 0
  assert launches["launches"] <= LAUNCHES[name]


@pytest.mark.parametrize("program", ["update", "generation"])
def test_no_scatter_adds_in_an_order_of_its_own(program):
  """Atomics would add equal tokens' gradients in the order in which threads come."""
  config = quickstart.get_config()
  parts = programs.build_for(config, ONE)
  lower = ahead_of_time.lowerings(parts)[program]
  wanted = re.findall(r"stablehlo.scatter.*unique_indices = false", lower().as_text())
  assert bool(wanted) == (program == "update")
  compiled = re.findall(r" scatter\(.*", programs.compile_with_text(program, lower).text)
  assert len(compiled) >= len(wanted)
  assert all("unique_indices=true" in scatter for scatter in compiled)


def test_products_of_libraries_count(costs):
  """cuBLAS's and cuDNN's: all FLOPs of an update, as many as the places of its rows need."""
  parts, found = costs("w4")
  layout = parts.placement.row_layout
  places = layout.max_micro_batches * layout.device_places
  parameters = sum(x.size for x in jax.tree.leaves(parts.placement.state.params))
  of_weights = 6 * parameters * places
  assert 0.9 * of_weights < found["update"]["executed_flops"] < 1.35 * of_weights
  calls = {row["target"] for row in found["update"]["custom_calls"] if row["flops"]}
  assert {x.split("$")[0] for x in calls} == {"__cublas", "__cudnn"}


def test_an_update_fits_beside_what_is_generated(costs):
  for name in CONFIGS:
    _, found = costs(name)
    for cost in found.values():
      assert sum(cost["memory_bytes"].values()) < find_chip(ONE).hbm_gib * 2**30


def test_a_mesh_of_eight():
  """One layer of 7B on one machine: the update and the burst compile, and no loop waits."""
  config = fade_qwen25_7b.get_config()
  with config.unlocked():
    config.model.overrides.num_layers = 1
  config.mesh.fsdp, config.mesh.tensor, config.mesh.data = 8, 1, 1
  config.batch.prompts = 16
  parts = programs.build_for(config, "h100:8")
  lowerings = ahead_of_time.lowerings(parts)
  tables = memory.compiled_bytes(lowerings, parts.placement, parts.programs.engine)
  assert {*tables} == {"update, compiled", "generation, compiled"}
  assert all(np.isfinite(sum(table.values())) for table in tables.values())


def test_settings_are_compared(tmp_path, monkeypatch):
  """By what FLOPs and bytes need; options of TPUs' compiler are not tried."""
  for name in ("_MAX_MESHES", "_MAX_ROWS"):
    monkeypatch.setattr(tune, name, 1)
  overrides = tune.tune(tiny.config(), ONE, tmp_path, lengths="lognormal(mean=3)")
  assert overrides["compiler_options.training"] == "" and overrides["sampling.slots"] > 0
  result = json.loads((tmp_path / "tune_h100_1.json").read_text())
  assert 0 < result["step_seconds"]["overlapped"] < result["step_seconds"]["in_turn"]


@pytest.mark.parametrize("topology", ["h100:0", "h100:12", "h100:2x2", "h100"])
def test_an_impossible_number_is_refused(topology):
  with pytest.raises(ValueError, match="give a number of GPUs, 1 to 8 or a multiple of 8"):
    programs.make_topology_mesh(tiny.config().mesh, topology)


@pytest.mark.parametrize(("topology", "number"), [("a100:2", 2), ("h200:8", 8), ("b200:16", 16)])
def test_other_gpus_are_known(topology, number):
  assert len(programs.topology_devices(topology)) == number
