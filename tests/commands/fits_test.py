"""Full-size recipes as shapes on 16 and 256 chips, and what they take on each."""

import importlib
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands import ahead_of_time, chips, fits
from rlvr_jax.train import sharding
from rlvr_jax.train.programs import abstract_batch

PARAMETERS = {  # of the published models, from their own index files
  "salt_qwen25_math_7b": 7_615_616_512,
  "p3o_qwen3_4b": 4_022_468_096,
  "fade_qwen25_7b": 7_615_616_512,
  "mu_grpo_r1_distill_7b": 7_615_616_512,
}
FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "full_size"
RECIPES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"__init__", "base"})


def shapes(name, **mesh):
  config = importlib.import_module(f"rlvr_jax.configs.full_size.{name}").get_config()
  if mesh:
    config.mesh = mesh
    for batch, field in ((config.batch, "prompts"), (config.evaluation, "batch_prompts")):
      batch[field] = max(batch[field], mesh["fsdp"])
  return ahead_of_time.shapes_only(config, ahead_of_time.mesh_of(config, None))


QUICK = {("salt_qwen25_math_7b", 16), ("p3o_qwen3_4b", 256)}


@pytest.mark.parametrize(
  ("name", "chips"),
  [
    pytest.param(name, chips, marks=() if (name, chips) in QUICK else pytest.mark.slow)
    for name in RECIPES
    for chips in (16, 256)
  ],
)
def test_a_full_size_recipe_is_initialised_and_sharded_as_shapes(name, chips):
  tensor = shapes(name).mesh.shape["tensor"] if chips == 16 else 4  # key heads that all have
  parts = shapes(name, data=1, fsdp=chips // tensor, tensor=tensor)
  params = jax.tree.leaves(parts.abstract_state.params)
  assert sum(math.prod(x.shape) for x in params) == PARAMETERS[name]
  # All but norms and biases is split over every chip that its dimensions allow.
  of_matrices = [x for x in params if x.ndim > 1 and math.prod(x.shape) > 1e7]
  for x in of_matrices:
    share = math.prod(x.sharding.shard_shape(x.shape)) / math.prod(x.shape)
    assert share == 1 / chips
  assert sum(math.prod(x.shape) for x in of_matrices) > 0.99 * PARAMETERS[name]


def test_the_estimate_counts_what_is_there():
  """Against arrays that exist: the parts of a tiny run, on one device."""
  config = tiny.config(batch__tokens_per_micro_batch=64)
  parts = ahead_of_time.shapes_only(config, sharding.make_mesh())
  state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parts.abstract_state)
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
  tables = fits.estimated(parts)
  update, generation = tables["update, estimated"], tables["generation, estimated"]
  assert update["parameters"] == generation["parameters"] == size(state.params)
  assert update["optimizer"] == size(state.opt_state)
  assert update["gradients"] == 2 * size(state.params)
  assert generation["parameters to decode with"] == size(state.params)
  c, P, G = parts.model.config, config.batch.prompts, config.batch.group_size
  prompts = abstract_batch(config, parts.row_layout, parts.mesh).prompts
  empty = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), prompts)
  _, cache, _ = parts.model.start_decoding(state.params, empty, G, config.max_response_length)
  own = sum(keys.keys.nbytes + keys.values.nbytes for keys in cache)
  of_prompts = P * config.max_prompt_length * c.num_layers * c.num_kv_heads * c.head_dim * 2 * 4
  assert generation["keys and values"] == own + of_prompts


def test_heads_are_split_over_tensor():
  def keys_and_values(tensor, num_kv_heads):
    overrides = dict(num_layers=1, num_heads=2, num_kv_heads=num_kv_heads)
    config = tiny.config(model__overrides=overrides)
    parts = ahead_of_time.shapes_only(config, sharding.make_mesh(tensor=tensor))
    return fits.estimated(parts)["generation, estimated"]["keys and values"]

  assert keys_and_values(1, 2) == 2 * keys_and_values(2, 2)
  with pytest.raises(ValueError, match=r"mesh.tensor=2 does not divide num_kv_heads=1"):
    keys_and_values(2, 1)


@pytest.mark.usefixtures("no_compilation_cache")
def test_the_compiler_s_figures_are_read(capsys):
  """On devices that are there; a topology of TPUs goes the same way."""
  parts = ahead_of_time.shapes_only(tiny.config(mesh__data=2), sharding.make_mesh(data=2))
  tables = fits.compiled(parts)
  state = parts.abstract_state
  held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
  assert tables["update, compiled"]["arguments"] >= held
  assert tables["update, compiled"]["temporary"] > 0
  resident = tables["generation, compiled"]["optimizer, resident"]
  assert resident == pytest.approx(held * 2 / 3, rel=0.01)  # two moments beside the parameters


def test_an_estimate_just_below_the_limit_is_no_promise(monkeypatch, capsys):
  parts = ahead_of_time.shapes_only(tiny.config(), sharding.make_mesh())
  gib = sum(fits.estimated(parts)["update, estimated"].values()) / 2**30
  for share, verdict in ((2.0, "fits"), (1.2, "may fit"), (0.9, "DOES NOT FIT")):
    monkeypatch.setitem(chips.CHIPS, "small", chips.CHIPS["v4"]._replace(hbm_gib=share * gib))
    monkeypatch.setattr(fits, "compiled", lambda parts: {})
    fits.report(parts, "small:1")
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("update, estimated")]
    assert line.endswith(f", {verdict}")


def test_a_topology_that_cannot_be_compiled_for_says_what_can():
  with pytest.raises(ValueError, match=r"cannot compile for --topology=v5e:0x0: .*\[tpu\]"):
    ahead_of_time.topology_devices("v5e:0x0")


def test_the_command_prints_a_table(tmp_path):
  """With adapters, whose base stands beside them."""
  output = tiny.run(tmp_path, "--mode=fits", "--config.lora.rank=2")
  assert re.search(r"frozen base +0\.00 GiB", output)
  assert "update, estimated: " in output and "keys and values" in output
  assert not list(tmp_path.iterdir())
