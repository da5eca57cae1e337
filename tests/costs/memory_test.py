"""Full-size recipes as shapes on one chip, a slice and a pod, and what they take on each chip."""

import importlib
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from train import tiny

from rlvr_jax.commands import ahead_of_time
from rlvr_jax.configs import base
from rlvr_jax.costs import memory, programs
from rlvr_jax.models.memory import forward_bytes, output_head_bytes, shard_bytes
from rlvr_jax.models.presets import preset
from rlvr_jax.ops.layers import layers_in
from rlvr_jax.rollouts import decoder
from rlvr_jax.train.cluster import sharding

PARAMETERS = {  # of the published models, from their own index files
  "gspo_qwen3_30b_a3b": 30_532_122_624,
  "gsm8k_olmoe_1b_7b": 6_919_161_856,
  "salt_qwen25_math_7b": 7_615_616_512,
  "p3o_qwen3_4b": 4_022_468_096,
  "fade_qwen25_7b": 7_615_616_512,
  "mu_grpo_r1_distill_7b": 7_615_616_512,
  "gsm8k_qwen25_05b": 494_032_768,
  "gsm8k_qwen25_15b_lora": 1_543_714_304,
}
WITHOUT_INDEX = {"grpo_qwen35_4b", "gspo_qwen35_35b_a3b"}  # their index files have vision, too
FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "full_size"
RECIPES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"__init__", "base"})


@pytest.fixture(scope="module")
def plain():
  """The parts of a tiny run on one device, as shapes."""
  return programs.build_shapes_only(tiny.config(), sharding.make_mesh())


def estimated(parts):
  return ahead_of_time.memory_tables(parts, compiled=False)


def recipe(name):
  return importlib.import_module(f"rlvr_jax.configs.full_size.{name}").get_config()


def sizes(name):
  """(devices, tensor) that a recipe is for: one chip and v5e:2x4, or v5p:2x2x4 and a pod."""
  if name.startswith("gsm8k"):
    return [(1, 1), (8, 1)]
  model = recipe(name).model
  return [(16, recipe(name).mesh.tensor), (256, min(4, preset(model.preset).split_heads))]


QUICK = {("p3o_qwen3_4b", 256), ("gsm8k_qwen25_15b_lora", 8)}


@pytest.mark.parametrize(
  ("name", "chips", "tensor"),
  [
    pytest.param(name, *size, marks=() if (name, size[0]) in QUICK else pytest.mark.slow)
    for name in RECIPES
    for size in sizes(name)
  ],
)
def test_a_full_size_recipe_is_initialised_and_sharded_as_shapes(name, chips, tensor):
  config = recipe(name)
  config.mesh = dict(data=1, fsdp=chips // tensor, tensor=tensor)
  for batch, field in ((config.batch, "prompts"), (config.evaluation, "batch_prompts")):
    batch[field] = max(batch[field], config.mesh.fsdp)
  parts = programs.build_for(config, None)
  params = jax.tree_util.tree_leaves_with_path(parts.placement.base)
  total = sum(math.prod(x.shape) for _, x in params)
  assert name in WITHOUT_INDEX or total == PARAMETERS[name]
  # All but norms, biases and routers is split over every chip that its dimensions allow.
  is_router = lambda path: path[-1].key == "router"
  of_matrices = [
    x for path, x in params if x.ndim > 1 and math.prod(x.shape) > 1e6 and not is_router(path)
  ]
  for x in of_matrices:
    share = math.prod(x.sharding.shard_shape(x.shape)) / math.prod(x.shape)
    assert share == 1 / chips
  assert sum(math.prod(x.shape) for x in of_matrices) > 0.99 * total


@pytest.mark.parametrize("name", RECIPES)
def test_a_full_size_recipe_takes_all_chips(name):
  mesh = recipe(name).mesh
  assert (mesh.data, mesh.fsdp) == (1, -1)
  with pytest.raises(ValueError, match="without --topology the number of devices is not known"):
    programs.make_topology_mesh(recipe(name).mesh, None)


def test_a_run_has_the_sizes_that_its_devices_leave():
  """In its own configuration, so that it is not resumed on another mesh unseen."""
  config = tiny.config(mesh__fsdp=-1, mesh__tensor=2)
  parts = programs.build_shapes_only(config, sharding.make_mesh(**config.mesh))
  assert parts.config.mesh.to_dict() == dict(data=1, fsdp=4, tensor=2)
  assert config.mesh.fsdp == -1


HYBRID = dict(
  num_layers=3, delta_layers=(True, False, True), delta_num_taps=4, delta_key_heads=2,
  delta_value_heads=4, delta_key_dim=8, delta_value_dim=6,
)  # fmt: skip


@pytest.mark.parametrize(
  ("cache_format", "itemsize", "scale", "overrides"),
  [("", 4, 0, {}), ("int8", 1, 4, {}), pytest.param("", 4, 0, HYBRID, marks=pytest.mark.slow)],
)
def test_the_estimate_counts_what_is_there(cache_format, itemsize, scale, overrides):
  """Against arrays that exist: the parts of a tiny run, on one device."""
  config = tiny.config(batch__tokens_per_micro_batch=64, sampling__cache_format=cache_format)
  config.model.unlock().overrides.update(overrides)
  parts = programs.build_shapes_only(config, sharding.make_mesh())
  state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts.placement.state)
  size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  tables = estimated(parts)
  update, generation = tables["update, estimated"], tables["generation, estimated"]
  assert update["parameters"] == generation["parameters"] == size(state.params)
  assert update["optimizer"] == size(state.opt_state)
  assert update["gradients"] == 2 * size(state.params)
  assert generation["parameters to decode with"] == size(state.params)
  slots = parts.programs.engine.settings
  empty = jax.eval_shape(lambda: decoder.empty_slots(slots))
  caches = size((empty.prompts, empty.responses))
  c, steps = parts.model.config, slots.shape.steps
  layers = len(layers_in("attention", c.kinds))
  vectors = slots.slots * steps * layers * c.num_kv_heads * 2
  staged = vectors * (c.head_dim * itemsize + scale)
  assert generation["keys and values"] == caches + staged
  assert generation.get("states of gated DeltaNets", 0) == size(empty.states)


def test_a_host_has_the_largest_phase_of_a_run_and_its_processes():
  config = tiny.config(warm_start__batch_size=64, grading__num_workers=3)
  parts = programs.build_shapes_only(config, sharding.make_mesh())
  tables = ahead_of_time.host_memory_tables(parts)
  assert tables.keys() == {"update", "generation", "checkpoint"}  # no step of a warm start
  size = shard_bytes(parts.placement.state.params)
  of_update = estimated(parts)["update, estimated"]
  for table in tables.values():
    assert table["parameters"] == table["first policy"] == size  # of the KL
    assert table["graders and environments"] == 3 * 2**26
  assert {kind: tables["update"][kind] for kind in of_update} == of_update
  assert tables["checkpoint"]["copy that is written"] == size + of_update["optimizer"]


SMOLLM2 = dict(
  vocab_size=49_152, width=576, num_layers=30, num_heads=9, num_kv_heads=3, mlp_width=1536,
  head_dim=64, qk_norm=False, remat="dots",
)  # fmt: skip


@pytest.mark.parametrize(
  ("preset", "overrides", "prompts", "tokens", "measured"),
  [
    ("tiny", {}, 64, 4, {0: 1.10}),
    ("base", {}, 8, 64, {0: 2.08, 16: 2.91}),
    ("base", SMOLLM2, 8, 48, {0: 5.4}),
  ],
)
def test_the_estimate_of_a_host_is_near_what_runs_took(
  preset, overrides, prompts, tokens, measured
):
  """GiB of all processes of a run at their peak, on two cores, with rows that the run chose.

  By the batch size of the warm start, 0 without one. The constants were set by the runs without a
  warm start, of 0.8, 25 and 135 M parameters.
  """
  config = base.get_config()
  config.model.preset, config.grading.num_workers = preset, 2
  config.model.unlock().overrides.update(overrides)
  config.batch.prompts, config.max_response_length = prompts, tokens
  parts = programs.build_shapes_only(config, sharding.make_mesh())
  for warm, took in measured.items():
    parts.config.warm_start.update(num_steps=min(warm, 1), batch_size=max(warm, 1))
    tables = ahead_of_time.host_memory_tables(parts)
    peak = max(sum(table.values()) for table in tables.values()) / 2**30
    assert took / 1.3 <= peak <= 1.3 * took, warm
    assert ("warm start" in tables) == (warm > 0)


def test_caches_under_new_weights_are_counted():
  fields = dict(schedule="asynchronous()", max_response_length=40)
  build = lambda setting: programs.build_shapes_only(
    tiny.config(fleet__new_weights=setting, **fields), sharding.make_mesh()
  )
  parts, kind = build("recompute"), "prefill under new weights"
  table = estimated(parts)["generation, estimated"]
  rows, _ = parts.programs.engine.longest_prefill()
  assert table[kind] == table["keys and values"] * rows / parts.programs.engine.settings.slots
  assert kind not in estimated(build("switch"))["generation, estimated"]
  params = jax.tree.leaves(parts.placement.state.params)
  of_policy = sum(x.size * x.dtype.itemsize for x in params)
  assert table["policies to be compared"] == 5 * of_policy  # max_lag = 4
  finish = estimated(build("finish"))
  assert "policies to be compared" not in finish["generation, estimated"]
  # The sampler's, and an older one until it is compared; sampling goes on during updates.
  assert finish["generation, estimated"]["policies to sample with"] == 2 * of_policy
  assert finish["update, estimated"].items() >= finish["generation, estimated"].items()
  lowered = ahead_of_time.lowerings(parts)
  assert lowered.keys() == {"update", "generation", "prefill"}


def test_the_first_policy_is_counted_where_it_is_kept(plain):
  assert plain.config.reference.kl_coefficient > 0
  for title, table in estimated(plain).items():
    assert table["first policy"] == table["parameters"], title
  config = tiny.config(reference__kl_coefficient=0.0)
  without = estimated(programs.build_shapes_only(config, sharding.make_mesh()))
  assert all("first policy" not in table for table in without.values())


def test_routes_of_an_update_and_of_sampling_beside_it_add_up():
  def routes(schedule):
    config = tiny.get_config("experts")
    config.schedule = schedule
    tables = estimated(programs.build_shapes_only(config, sharding.make_mesh()))
    of = lambda table: sum(size for kind, size in table.items() if kind.startswith("routes"))
    return of(tables["update, estimated"]), of(tables["generation, estimated"])

  (update, _), (beside, generation) = routes("on_policy"), routes("asynchronous()")
  assert beside == update + generation > update > 0


def test_a_sampler_holds_two_policies_while_it_restores_one():
  fields = dict(schedule="asynchronous()", model__overrides__compute_dtype="bfloat16")
  config = tiny.config(fleet__samplers=True, **fields)
  parts = programs.build_shapes_only(config, sharding.make_mesh())
  table = estimated(parts)["a sampler, estimated"]
  params = jax.tree.leaves(parts.placement.state.params)
  policy = table["policy that samples"]
  assert policy == table["policy being restored"]
  assert 2 * sum(x.size for x in params) <= policy < 2.1 * sum(x.size for x in params)
  assert "optimizer" not in table and table["keys and values"] > 0
  config.fleet.new_weights = "switch"
  switching = programs.build_shapes_only(config, sharding.make_mesh())
  table = estimated(switching)["a sampler, estimated"]
  assert table["policies to be compared"] == 5 * policy
  of_trainer = estimated(switching)["generation, estimated"]  # which compares nothing
  assert "policies to be compared" not in of_trainer
  alone = programs.build_shapes_only(tiny.config(**fields), sharding.make_mesh())
  assert "a sampler, estimated" not in estimated(alone)


def test_a_teacher_that_scores_before_updates_takes_a_forward_pass_alone():
  """No gradient: its head has no float32 products of its own, its layers keep nothing."""
  config = tiny.config(teacher__checkpoint="initial", distillation="opd")
  parts = programs.build_shapes_only(config, sharding.make_mesh())
  (table,) = (table for name, table in estimated(parts).items() if programs.TEACHER in name)
  network, rows = parts.model.config, parts.placement.row_layout
  of_head = output_head_bytes(network, rows.device_places, 1, backward=False)
  assert table["output head"] == of_head
  assert table["activations"] == forward_bytes(network, rows.device_places, 1)
  assert table["optimizer"] > 0


def test_dialogues_add_the_prefill_after_a_reply(plain):
  """Against what the program returns, for the longest of them: prompt and response of every row."""
  config = tiny.config(environment__name="guess(low=1, high=7)", max_response_length=40)
  parts = programs.build_shapes_only(config, sharding.make_mesh())
  engine = parts.programs.engine
  rows, length = engine.longest_prefill()
  integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
  params = jax.eval_shape(parts.model.init, jax.random.key(0))
  loaded = jax.eval_shape(parts.model.decoding_params, params)
  prefilled = jax.eval_shape(
    engine.programs.prefill, loaded, integers(rows, length), integers(rows)
  )
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(prefilled))
  table = estimated(parts)["generation, estimated"]
  # A slot also has room for a burst's own keys and values.
  assert size <= table["prefill after a reply"] < 1.4 * size
  assert "prefill after a reply" not in estimated(plain)["generation, estimated"]
  lowered = ahead_of_time.lowerings(parts)
  assert lowered.keys() == {"update", "generation", "prefill"}
  arguments = jax.tree.leaves(lowered["prefill"]().in_avals)
  assert len(arguments) > len(jax.tree.leaves(params))


def test_heads_and_activations_are_split_over_tensor(plain):
  on_two = programs.build_shapes_only(tiny.config(), sharding.make_mesh(tensor=2))
  whole, halves = estimated(plain), estimated(on_two)
  for table, row in (("generation", "keys and values"), ("update", "activations")):
    assert whole[f"{table}, estimated"][row] == 2 * halves[f"{table}, estimated"][row] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_compilation_cache")
def test_the_compiler_s_figures_are_read(capsys):
  """On devices that are there; a topology of TPUs goes the same way."""
  parts = programs.build_shapes_only(tiny.config(mesh__data=2), sharding.make_mesh(data=2))
  tables = ahead_of_time.memory_tables(parts, compiled=True)
  state = parts.placement.state
  held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
  assert tables["update, compiled"]["arguments"] >= held
  assert tables["update, compiled"]["temporary"] > 0
  resident = tables["generation, compiled"]["optimizer, resident"]
  assert resident == pytest.approx(held * 2 / 3, rel=0.01)  # two moments of every parameter


@pytest.mark.parametrize(
  ("gib", "verdict"), [(2.0, "fits"), (1.2, "may fit"), (0.9, "DOES NOT FIT")]
)
def test_an_estimate_just_below_the_limit_is_no_promise(gib, verdict):
  text = memory.format_tables("a slice", {"update, estimated": {"parameters": 2.0**30}}, gib)
  (line,) = (x for x in text.splitlines() if x.startswith("update, estimated"))
  assert line == f"update, estimated: 1.00 GiB per chip of {gib}, {verdict}"


def test_a_topology_that_cannot_be_compiled_for_says_what_can():
  with pytest.raises(ValueError, match=r"cannot compile for --topology=v5e:0x0: .*\[tpu\]"):
    programs.topology_devices("v5e:0x0")


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path):
  """With adapters on a frozen base."""
  output = tiny.run(tmp_path, "--mode=fits", "--config.lora.rank=2")
  assert re.search(r"frozen base +0\.00 GiB", output)
  assert "update, estimated: " in output and "keys and values" in output
  assert not list(tmp_path.iterdir())
