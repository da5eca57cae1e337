"""Candidates of a search, and how they rank; no TPU is compiled for."""

import jax
import numpy as np
import pytest
from train import tiny

from rlvr_jax.costs import programs, tuning, workload
from rlvr_jax.costs.chips import Chip
from rlvr_jax.costs.generation_time import Seconds
from rlvr_jax.rollouts import staleness
from rlvr_jax.train.cluster import sharding

CHIP = Chip(
  flops=1e12, hbm_bytes_per_s=1e10, interconnect_bytes_per_s=1e9, hbm_gib=1.0, flops_per_cycle=1e3
)
HEADS = dict(num_heads=4, num_kv_heads=2)
FIELDS = {f"model__overrides__{name}": size for name, size in HEADS.items()}


@pytest.fixture(scope="module")
def parts():
  config = tiny.config(mesh__fsdp=8, evaluation__batch_prompts=8, **FIELDS)
  return programs.build_shapes_only(config, sharding.make_mesh(fsdp=8))


def updates_on(parts, devices):
  return tuning.update_candidates(parts, devices, workload.longest(), CHIP)


def updates(parts):
  return updates_on(parts, jax.devices())


def test_updates_have_every_mesh_that_keeps_a_head_whole(parts):
  found = updates(parts)
  meshes = {tuple(c.overrides[f"mesh.{axis}"] for axis in sharding.AXES) for c in found}
  assert meshes == {
    *((1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1)),
    *((1, 4, 2), (2, 2, 2), (4, 1, 2)),
  }
  fastest = tuning.best_of_each_mesh(found)
  assert len(fastest) == 7 and fastest[0] == found[0]
  assert sum(found[0].seconds) <= 1.01 * min(sum(c.seconds) for c in found)
  assert {c.overrides["model.overrides.remat"] for c in found} == {*tuning.REMATS}


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


def test_generation_is_in_layouts_of_the_heads_with_slots_of_a_refresh(parts):
  found = tuning.generation_candidates(parts, workload.longest(), CHIP)
  layouts = {}
  for candidate in found:
    sizes = tuple(candidate.overrides[f"generation_mesh.{axis}"] for axis in sharding.AXES)
    layouts.setdefault(sizes, []).append(candidate.overrides["sampling.slots"])
    assert candidate.overrides["generation_mesh.same_devices"] == any(sizes)
  # Of four heads, each with a copy of its key/value head; the mesh of updates has no other name.
  assert layouts.keys() == {(0, 0, 0), (4, 1, 2), (2, 1, 4)}
  assert sorted(layouts[4, 1, 2]) == [4, 8, 16, 32, 64]
  assert max(layouts[0, 0, 0]) == 2 * 8 * 4  # batches of a refresh, prompts, responses


def test_every_candidate_can_be_built():
  """Six prompts split over neither eight nor four devices."""
  config = tiny.config(mesh__fsdp=2, mesh__tensor=1, batch__prompts=6, evaluation__batch_prompts=6,
                       **FIELDS)  # fmt: skip
  parts = programs.build_shapes_only(config, sharding.make_mesh(fsdp=2, devices=jax.devices()[:2]))
  found = updates_on(parts, jax.devices())
  meshes = {(c.overrides["mesh.data"] * c.overrides["mesh.fsdp"]) for c in found}
  assert meshes == set()
  found = updates_on(parts, jax.devices()[:2])
  for candidate in tuning.best_of_each_mesh(found):
    changed = tuning.apply_overrides(config, candidate.overrides)
    mesh = sharding.make_mesh(**changed.mesh, devices=jax.devices()[:2])
    programs.build_shapes_only(changed, mesh)


def test_refreshes_are_counted_over_a_schedule():
  assert tuning.refreshes_per_update(staleness.on_policy(), 100) == 1.0
  several = staleness.updates_per_refresh(batches=3, epochs=2)
  assert tuning.refreshes_per_update(several, 60) == 1 / 6
  assert tuning.refreshes_per_update(staleness.asynchronous(max_lag=2), 100) == 1.0


def test_seconds_of_a_program_add_its_kernels_to_the_cycles():
  """A kernel needs the larger of its computation and its bytes."""
  calls = [dict(flops=3e12, hbm_bytes=1e10), dict(flops=1e12, hbm_bytes=4e10)]
  cost = dict(cycles=2e9, custom_calls=calls, seconds={"HBM": 10.0, "interconnect": 1.0})
  assert tuning.compiled_seconds(cost, CHIP) == Seconds(10.0, 10.0 + 1.0 + 2.0 + 3.0 + 4.0)
  cost["seconds"]["HBM"] = 5.0
  assert tuning.compiled_seconds(cost, CHIP).overlapped == 9.0


def test_overrides_change_a_copy():
  config = tiny.config()
  changed = tuning.apply_overrides(config, {"mesh.fsdp": 4, "model.overrides.remat": "dots"})
  assert (changed.mesh.fsdp, changed.model.overrides.remat) == (4, "dots")
  assert (config.mesh.fsdp, config.model.overrides.get("remat")) == (1, None)


def test_the_pareto_set_has_what_nothing_beats():
  rows = [dict(s=1, gib=3), dict(s=2, gib=2), dict(s=2, gib=3), dict(s=3, gib=1), dict(s=1, gib=3)]
  assert tuning.pareto(rows, ("s", "gib")) == [True, True, False, True, True]
