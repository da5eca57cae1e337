"""Every recipe builds, can be run as it says, and states a difference; the table of methods."""

import importlib
import json
import math
import pathlib
import re

import pytest
from jax.sharding import AbstractMesh, AxisType
from ml_collections import ConfigDict

from docs import tables
from experiments.recipes.sweep import RECIPES
from rlvr_jax.commands.tune import COMPILER_OPTIONS
from rlvr_jax.configs import base
from rlvr_jax.costs.programs import build_shapes_only
from rlvr_jax.models.presets import model_settings
from rlvr_jax.rollouts import staleness
from rlvr_jax.train.setup.build import build, make_schedule

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "configs"
# Below rlvr_jax.configs, such as "grpo" and "full_size.base".
NAMES = sorted(
  ".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in FOLDER.rglob("[!_]*.py")
)
CARDS = ROOT / "docs" / "methods"


def _module(name):
  return importlib.import_module(f"rlvr_jax.configs.{name}")


def _flat(config: ConfigDict) -> dict:
  """Leaves by dotted path."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      flat |= {f"{key}.{path}": leaf for path, leaf in _flat(value).items()}
    else:
      flat[key] = value
  return flat


def _changes(name):
  """Leaves that a recipe sets otherwise than the one it starts from, or in addition to it."""
  module = _module(name)
  parents = {getattr(v, "__name__", "") for v in vars(module).values()} & {
    f"rlvr_jax.configs.{other}" for other in NAMES if other != name
  }
  assert len(parents) == 1, f"configs/{name}.py starts from {sorted(parents)}, not from one recipe"
  before = _flat(importlib.import_module(parents.pop()).get_config())
  after = _flat(module.get_config())
  missing = object()
  return {path: v for path, v in after.items() if before.get(path, missing) != v}


def _is_full_size(name):
  return name.startswith("full_size.")


def _with_sample_data(config, folder):
  """Puts small ones in place of weights and of a data set that are not in the repository."""
  if config.model.checkpoint:
    config.model.checkpoint, config.model.preset = "", "tiny"
    config.tokenizer, config.prompts.format, config.prompts.system = "bytes", "plain", ""
  if config.task.name == "published":
    lines = [
      json.dumps({"question": f"1 and {n}?", "answer": f"1+{n}={n + 1}\n#### {n + 1}"})
      for n in range(3)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines[:2]) + "\n")
    (folder / "test.jsonl").write_text(lines[2] + "\n")
    config.task.kwargs.data_dir = str(folder)
    config.task.kwargs.prepared_dir = str(folder / "prepared")
    config.task.kwargs.held_out_size = 1
    config.task.kwargs.warm_start_size = min(config.task.kwargs.warm_start_size, 1)
  return config


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_builds_with_locked_fields(name, tmp_path):
  if _is_full_size(name):
    pytest.skip("has no checkpoint and no chips here; see commands/fits_test.py")
  config = _with_sample_data(_module(name).get_config(), tmp_path).lock()
  parts = build(config)
  assert parts.method.loss is not None and len(parts.task.held_out) > 0


def test_docstrings_have_the_command():
  command = lambda name: f"--config=configs/{name.replace('.', '/')}.py"
  assert not [name for name in NAMES if command(name) not in _module(name).__doc__]


def test_every_recipe_states_a_difference():
  fields = set(_flat(base.get_config()))
  free = ("model.over", "task.kwargs.")
  for name in NAMES:
    if name != "base":
      changes = _changes(name)
      assert changes, name
      unknown = {path for path in changes if path not in fields and not path.startswith(free)}
      assert not unknown, f"configs/{name}.py sets fields that base.py does not have: {unknown}"


def test_p3o_at_full_size_has_the_authors_settings():
  """1,024 rollouts of 256 problems and one update per refresh, 500 updates, a tenth to warm up."""
  config = _module("full_size.p3o_qwen3_4b").get_config()
  assert (config.batch.prompts, config.batch.group_size, config.num_updates) == (256, 4, 500)
  schedule = make_schedule(config.schedule, num_updates=config.num_updates, seed=config.seed)
  assert staleness.plan(schedule, 3) == [(0, 0), (1, 1), (2, 2)]
  assert config.learning_rate == "cosine(peak=1e-5, warmup=50)"


def test_salt_at_full_size_replaces_groups_as_the_authors_do():
  config = _module("full_size.salt_qwen25_math_7b").get_config()
  assert config.dynamic_sampling.to_dict() == dict(enabled=True, max_batches=30)


def test_named_cards_exist():
  named = {n: re.findall(r"docs/methods/(\w+\.md)", _module(n).__doc__) for n in NAMES}
  assert sum(map(len, named.values())) >= 17
  assert not {n: c for n, cards in named.items() for c in cards if not (CARDS / c).exists()}


def test_the_experiments_run_every_method_on_the_cards():
  """A method is tied to its card from both sides; `--config.advantage=…` needs neither."""
  on_cards = {name: card.name for card in CARDS.glob("*.md") for name in tables.recipes_of(card)}
  named = {n: re.findall(r"Card: docs/methods/(\w+\.md)", _module(n).__doc__)[0] for n in RECIPES}
  assert on_cards == named and RECIPES[0] == "grpo"


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=str)
def test_the_table_of_methods_is_what_docstrings_and_cards_say(document):
  assert document.read_text(encoding="utf-8") == tables.written(document), (
    f"{document.name} is not up to date; write it by: {tables.COMMAND}"
  )


def test_fields_of_computing_can_be_set_where_a_recipe_says_nothing():
  c = _module("grpo").get_config().lock()
  unset = model_settings(c.model)
  c.update_from_flattened_dict({"model.overrides.remat": "full"})
  assert (unset.remat, model_settings(c.model).remat) == ("none", "full")


def _slices():
  """(recipe, slice) of all settings that recipes have for slices."""
  names = (name for name in NAMES if hasattr(_module(name), "SLICES"))
  return [(name, topology) for name in names for topology in _module(name).SLICES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "topology"), _slices())
def test_settings_for_a_slice_are_those_of_its_chips(name, topology):
  module = _module(name)
  config, plain = module.get_config(topology), module.get_config()
  changed = {key for key, value in _flat(config).items() if _flat(plain).get(key) != value}
  assert changed <= module.SLICES[topology].keys()
  devices = math.prod(map(int, topology.partition(":")[2].split("x")))
  sizes = {axis: abs(size) for axis, size in config.mesh.items()}
  assert math.prod(sizes.values()) == devices
  generation = config.generation_mesh
  assert generation.data * generation.fsdp * generation.tensor in (0, devices)
  assert config.compiler_options.training in COMPILER_OPTIONS.values()
  with config.unlocked():  # a CPU does not know a TPU's options
    config.compiler_options.training = ""
  types = (AxisType.Auto,) * 3
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
  assert build_shapes_only(config, mesh).placement.mesh.size == devices


def test_another_slice_is_refused():
  message = (
    r"no settings for the slice 'v9', only for \['v5e:8x8', 'v5p:2x2x4'\]: leave the slice out"
  )
  with pytest.raises(ValueError, match=message):
    _module("full_size.fade_qwen25_7b").get_config("v9")
  with pytest.raises(ValueError, match=r"no settings for the slice 'v5e:8x8', only for"):
    _module("full_size.gsm8k_qwen25_05b").get_config("v5e:8x8")


def test_a_schedule_that_samples_too_late_is_refused():
  with pytest.raises(
    ValueError, match=r"'train\.sums:too_late': update 0 trains on batch 0, but no batch is sampled"
  ):
    make_schedule("train.sums:too_late", num_updates=3, seed=0)
