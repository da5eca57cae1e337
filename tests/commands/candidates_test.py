"""Candidates of a search for fast settings, and how they rank; no TPU is compiled for."""

import dataclasses

import jax
import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands import tune
from rlvr_jax.commands.tune import Seconds
from rlvr_jax.costs import programs, workload
from rlvr_jax.costs.chips import Chip
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.rollouts.decoder import token_bytes
from rlvr_jax.train.cluster import sharding

CHIP = Chip(
  flops=1e12, hbm_bytes_per_s=1e10, interconnect_bytes_per_s=1e9, hbm_gib=1.0, flops_per_cycle=1e3
)
FAST = Chip(1e30, 1e30, 1e30, 1.0, 1.0)
HEADS = dict(num_heads=4, num_kv_heads=2)
FIELDS = {f"model__overrides__{name}": size for name, size in HEADS.items()}


@pytest.fixture(scope="module")
def parts():
  config = tiny.config(mesh__fsdp=8, evaluation__batch_prompts=8, **FIELDS)
  return programs.build_shapes_only(config, sharding.make_mesh(fsdp=8))


def updates(parts):
  of_run = parts.model.config, parts.shape, parts.placement
  return tune.update_candidates(parts.config, *of_run, workload.longest(), CHIP)


def test_updates_have_every_mesh_that_keeps_a_head_whole(parts):
  found = updates(parts)
  meshes = {tuple(c.overrides[f"mesh.{axis}"] for axis in sharding.AXES) for c in found}
  assert meshes == {
    *((1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1)),
    *((1, 4, 2), (2, 2, 2), (4, 1, 2)),
  }
  assert sum(found[0].seconds) <= 1.01 * min(sum(c.seconds) for c in found)
  assert {c.overrides["model.overrides.remat"] for c in found} == {*tune.REMATS}


def test_an_estimate_pays_for_recomputing_padding_and_links(parts):
  of = {tuple(c.overrides.values()): c for c in updates(parts)}
  length = min(key[3] for key in of)
  one = of[1, 8, 1, length, length, "none"]
  assert of[1, 8, 1, length, length, "full"].seconds > one.seconds
  assert of[1, 8, 1, length, length, "full"].gib < one.gib
  copied = of[8, 1, 1, length, length, "none"]  # parameters on every device
  assert copied.gib > one.gib
  # Two gathers in the network's dtype and a sum in float32, of all but a device's own eighth.
  count = sum(x.size for x in jax.tree.leaves(parts.placement.base))
  itemsize = np.dtype(parts.model.config.compute_dtype).itemsize
  layout = parts.placement.row_layout._replace(length=length, rows_per_device=1)
  packed = workload.pack_workload(workload.longest().draw(parts.shape, 0), parts.shape, layout)
  received = int(packed.num_micro_batches) * count * (2 * itemsize + 4) * 7 / 8
  compute, links = one.seconds.in_turn - received / 1e9, received / 1e9
  assert one.seconds.overlapped == pytest.approx(max(compute, links)) and compute > 0


def generations(parts, batches=2):
  drawn = [workload.longest().draw(parts.shape, number) for number in range(batches)]
  settings = parts.programs.engine.settings
  return tune.generation_candidates(
    parts.model.config, drawn, [parts.shape.prompts], parts.placement, settings, CHIP
  )


def test_generation_is_in_layouts_of_the_heads_with_slots_of_a_refresh(parts):
  layouts = {}
  for candidate in generations(parts):
    sizes = tuple(candidate.overrides[f"generation_mesh.{axis}"] for axis in sharding.AXES)
    layouts.setdefault(sizes, []).append(candidate.overrides["sampling.slots"])
    assert candidate.overrides["generation_mesh.same_devices"] == any(sizes)
  # Of four heads, each with a copy of its key/value head; the mesh of updates has no other name.
  assert layouts.keys() == {(0, 0, 0), (4, 1, 2), (2, 1, 4)}
  assert sorted(layouts[4, 1, 2]) == [4, 8, 16, 32, 64]
  assert max(layouts[0, 0, 0]) == 2 * 8 * 4  # batches of a refresh, prompts, responses


def seconds_of(parts, turns, slots, chip, cache="blocks"):
  """Seconds of generation of one prompt's rollouts on one device, without what comes before it."""
  settings = parts.programs.engine.settings._replace(cache=cache)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  base = sharding.add_shardings(jax.eval_shape(parts.model.init, jax.random.key(0)), mesh)
  batch = workload.Workload(np.asarray([8]), np.asarray([turns]))
  of = parts.model.config, [batch], base, mesh, settings, slots
  return tune.generation_seconds(*of, chip).overlapped


def test_slots_that_are_free_take_the_next_response(parts):
  """Three in two slots, 40 and 8 + 24 tokens: 40 steps, whose idle slots are computed too."""
  network, chip = parts.model.config, FAST._replace(flops=1.0)
  one, prompt = (forward_flops(network, [n], [[t]]) for n, t in ((1, 1), (8, 0)))
  assert seconds_of(parts, [[40], [8], [24]], 2, chip) == pytest.approx(40 * 2 * one + prompt)


def test_a_step_reads_the_weights_and_the_caches_of_its_slots(parts):
  network, chip = parts.model.config, FAST._replace(hbm_bytes_per_s=1.0)
  shape = parts.programs.engine.settings.shape
  token, params = token_bytes(network, 1), jax.eval_shape(parts.model.init, jax.random.key(0))
  weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))  # the head's are tied
  found = seconds_of(parts, [[40], [40]], 2, chip)
  assert network.tied_head and found == pytest.approx(40 * (weights + 2 * shape.tokens * token))
  # A kernel for pages reads what each slot has: the prompt, and half of the response in the mean.
  found = seconds_of(parts, [[40], [40]], 2, chip, cache="pages")
  assert found == pytest.approx(40 * (weights + 2 * (8 + 20) * token))


def test_a_reply_adds_the_cache_that_is_computed_anew(parts):
  """20 + 30 + 20 tokens: 40 steps; the second turn begins behind 8 + 50 tokens."""
  network, chip = parts.model.config, FAST._replace(flops=1.0)
  one, *caches = (forward_flops(network, [n], [[t]]) for n, t in ((1, 1), (8, 0), (58, 0)))
  found = seconds_of(parts, [[20, 30, 20]], 1, chip)
  assert found == pytest.approx(40 * one + sum(caches))


def test_every_candidate_can_be_built(parts):
  """Six prompts split over neither eight nor four devices."""
  prompts = dict(batch__prompts=6, evaluation__batch_prompts=6)
  config = tiny.config(mesh__fsdp=2, mesh__tensor=1, **prompts, **FIELDS)
  shape = parts.shape._replace(prompts=6)
  candidates = lambda mesh: tune.update_candidates(
    config, parts.model.config, shape, dataclasses.replace(parts.placement, mesh=mesh),
    workload.longest(), CHIP,
  )  # fmt: skip
  assert candidates(sharding.make_mesh(fsdp=8)) == []
  two = jax.devices()[:2]
  found = candidates(sharding.make_mesh(fsdp=2, devices=two))
  for candidate in (found[0], found[-1]):
    changed = tune.apply_overrides(config, candidate.overrides)
    mesh = sharding.make_mesh(**changed.mesh, devices=two)
    programs.build_shapes_only(changed, mesh)


def test_seconds_of_a_program_add_its_kernels_to_the_cycles():
  """A kernel needs the larger of its computation and its bytes."""
  calls = [dict(flops=3e12, hbm_bytes=1e10), dict(flops=1e12, hbm_bytes=4e10)]
  needed = {"compute": 7.0, "HBM": 10.0, "interconnect": 1.0}
  cost = dict(cycles=2e9, custom_calls=calls, seconds=needed)
  assert tune.compiled_seconds(cost, CHIP) == Seconds(10.0, 10.0 + 1.0 + 2.0 + 3.0 + 4.0)
  needed["HBM"] = 5.0
  assert tune.compiled_seconds(cost, CHIP).overlapped == 9.0
  no_cycles = CHIP._replace(flops_per_cycle=None)
  assert tune.compiled_seconds(cost, no_cycles) == Seconds(7.0, 13.0)


def test_overrides_change_a_copy():
  config = tiny.config()
  changed = tune.apply_overrides(config, {"mesh.fsdp": 4, "model.overrides.remat": "dots"})
  assert (changed.mesh.fsdp, changed.model.overrides.remat) == (4, "dots")
  assert (config.mesh.fsdp, config.model.overrides.get("remat")) == (1, None)
