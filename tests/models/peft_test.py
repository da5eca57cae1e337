"""Adapters in PEFT's files: round trips, what is refused, and the library on golden models."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.checkpoints import load, logits_after

from rlvr_jax.models.functional import transformer
from rlvr_jax.models.lora import LoraSettings, combine, init
from rlvr_jax.models.peft import CONFIG_FILE, WEIGHTS_FILE, load_adapters, save_adapters
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.storage.folders import locate

CONFIG = TransformerConfig(
  vocab_size=8, width=6, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, mlp_width=10
)
SETTINGS = LoraSettings(rank=2, alpha=5.0, targets="blocks/(query|output|down)$")

_SHARED = os.environ.get("RLVR_SHARED")
_FOLDERS = sorted(pathlib.Path(_SHARED, "golden", "hf").iterdir()) if _SHARED else []


@functools.cache
def random_adapters(config=CONFIG, settings=SETTINGS):
  key = jax.random.key(0)
  base = jax.eval_shape(transformer(config).init, key)
  shapes = jax.eval_shape(lambda key: init(key, base, settings), key)
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.2, shapes)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
  """A folder of adapters, to be copied."""
  folder = tmp_path_factory.mktemp("once") / "run"
  save_adapters(folder, random_adapters(), SETTINGS, CONFIG)
  return folder


@pytest.fixture
def saved(tmp_path, once):
  """(fields) → a folder of adapters whose configuration has these fields changed."""

  def make(**description):
    folder = shutil.copytree(once, tmp_path / "run")
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | description))
    return folder

  return make


def rewrite(folder, change):
  """Changes the tensors of a folder by the safetensors library."""
  numpy = pytest.importorskip("safetensors.numpy")
  numpy.save_file(change(numpy.load_file(folder / WEIGHTS_FILE)), folder / WEIGHTS_FILE)


# --- round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["", "memory://adapters/of/a run"])
def test_what_is_saved_is_loaded(tmp_path, url):
  """Settings too, to the function: the pattern may be written in another way."""
  folder, adapters = url or tmp_path / "new" / "run", random_adapters()
  save_adapters(folder, adapters, SETTINGS, CONFIG, base_model="some/base")
  found, settings = load_adapters(folder, CONFIG)
  jax.tree.map(np.testing.assert_array_equal, found, adapters)
  assert (settings.rank, settings.alpha) == (2, 5.0)
  base = jax.eval_shape(transformer(CONFIG).init, jax.random.key(0))
  again = jax.eval_shape(lambda key: init(key, base, settings), jax.random.key(0))
  assert jax.tree.structure(again) == jax.tree.structure(adapters)
  system, path = locate(folder)
  assert json.loads(system.cat_file(f"{path}/{CONFIG_FILE}"))["base_model_name_or_path"] == (
    "some/base"
  )
  with pytest.raises(FileExistsError, match="not empty"):
    save_adapters(folder, adapters, SETTINGS, CONFIG)


# As GLM-4's: rows of queries and keys have another order in files, and gate and up are one tensor.
FUSED = dataclasses.replace(CONFIG, head_dim=6, post_norm=True, rotary_width=4)


def test_an_adapter_of_a_whole_fused_tensor_is_one_of_each_of_its_kernels(tmp_path):
  settings = LoraSettings(rank=2, alpha=5.0, targets="blocks/(gate|up)$")
  adapters = random_adapters(FUSED, settings)
  save_adapters(tmp_path, adapters, settings, FUSED)

  def rewrite_as(a, b, **description):
    names = "base_model.model.model.layers.{}.mlp.gate_up_proj.lora_{}.weight"
    rewrite(
      tmp_path, lambda _: {names.format(i, k): x for i in (0, 1) for k, x in (("A", a), ("B", b))}
    )
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | description))

  rng = np.random.default_rng(0)
  a, b = rng.normal(size=(2, 6)).astype(np.float32), rng.normal(size=(20, 2)).astype(np.float32)
  rewrite_as(a, b, rank_pattern={}, alpha_pattern={})
  found, _ = load_adapters(tmp_path, FUSED)
  assert sorted(found["blocks"]) == ["gate", "up"]
  for name, rows in (("gate", b[:10]), ("up", b[10:])):
    np.testing.assert_array_equal(found["blocks"][name]["a"][1], a.T)
    np.testing.assert_array_equal(found["blocks"][name]["b"][1], rows.T)
  joined = dict(rank_pattern=dict(gate_up_proj=4), alpha_pattern=dict(gate_up_proj=10.0))
  rewrite_as(np.ones((4, 6), np.float32), np.ones((20, 4), np.float32), **joined)
  with pytest.raises(ValueError, match=r"not 2 adapters of rank 2, one for each of \['gate'"):
    load_adapters(tmp_path, FUSED)
  with pytest.raises(ValueError, match=r"rank_pattern.*is not supported"):
    load_adapters(tmp_path, CONFIG)
  # PEFT's α over rank of the module would be another than that of the others.
  rewrite_as(a, b, **joined | dict(alpha_pattern={}))
  with pytest.raises(ValueError, match=r"alpha_pattern.*is not supported"):
    load_adapters(tmp_path, FUSED)
  rewrite_as(a, b, **joined)
  with pytest.raises(ValueError, match=r"an adapter of rank 2, but r and rank_pattern of .* say 4"):
    load_adapters(tmp_path, FUSED)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_adapters_that_are_not_finite_are_named(saved, value):
  folder = saved()

  def spoil(tensors):
    name = sorted(tensors)[-1]
    matrix = tensors[name].copy()
    matrix[0, 0] = value
    return tensors | {name: matrix}

  rewrite(folder, spoil)
  with pytest.raises(ValueError, match=r"run: NaN or infinite weights in 1 of 6 parameters: b"):
    load_adapters(folder, CONFIG)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_half_precision_is_read_as_float32(saved, dtype):
  folder = saved()
  rewrite(folder, lambda tensors: {name: x.astype(dtype) for name, x in tensors.items()})
  found, _ = load_adapters(folder, CONFIG)
  for loaded, exact in zip(jax.tree.leaves(found), jax.tree.leaves(random_adapters()), strict=True):
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, exact.astype(dtype).astype(np.float32))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "description",
  [
    dict(peft_type="IA3"),
    dict(use_rslora=True),
    dict(use_dora=True),
    dict(bias="all"),
    dict(lora_bias=True),
    dict(modules_to_save=["lm_head"]),
    dict(rank_pattern={"q_proj": 4}),
    dict(alpha_pattern={"q_proj": 4}),
    dict(layer_replication=[[0, 2]]),
    dict(fan_in_fan_out=True),
    dict(init_lora_weights="pissa_niter_16"),
    dict(an_option_of_tomorrow=0.5),
  ],
  ids=lambda description: next(iter(description)),
)
def test_other_kinds_of_adapters_are_refused(saved, description):
  ((field, value),) = description.items()
  with pytest.raises(ValueError, match=rf"'{field}': .*not supported.*merge_and_unload") as error:
    load_adapters(saved(**description), CONFIG)
  assert repr(value) in str(error.value)


@pytest.mark.parametrize(
  "description",
  [
    dict(lora_dropout=0.1),
    dict(init_lora_weights="gaussian"),
    dict(use_dora=None),
    dict(revision="x"),
  ],
  ids=lambda description: next(iter(description)),
)
def test_what_does_not_change_the_function_is_accepted(saved, description):
  found, _ = load_adapters(saved(**description), CONFIG)
  jax.tree.map(np.testing.assert_array_equal, found, random_adapters())


@pytest.mark.parametrize(
  ("description", "message"),
  [
    (dict(r=3), r"rank = 3 .*'blocks/down/a': \(\(2, 10, 2\), \(2, 10, 3\)\).*trained with"),
    (dict(r="two"), "rank = 'two' is not an integer"),
    (dict(lora_alpha=0), "alpha = 0 is not a number"),
  ],
)
def test_settings_that_do_not_fit_are_refused(saved, description, message):
  with pytest.raises(ValueError, match=message):
    load_adapters(saved(**description), CONFIG)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(num_layers=3), r"3 layers .* missing are \['base_model.model.model.layers.2"),
    (dict(num_layers=1), r"extra are \['base_model.model.model.layers.1"),
    (dict(width=8, head_dim=4), r"'blocks/query/a': \(\(2, 6, 2\), \(2, 8, 2\)\)"),
  ],
)
def test_another_base_is_refused(tmp_path, saved, change, message):
  with pytest.raises(ValueError, match=message):
    load_adapters(saved(), dataclasses.replace(CONFIG, **change))
  with pytest.raises(ValueError, match="do not fit the model"):
    save_adapters(
      tmp_path / "x", random_adapters(), SETTINGS, dataclasses.replace(CONFIG, **change)
    )
  assert not (tmp_path / "x").exists()


def test_tensors_of_other_modules_are_refused(saved):
  folder = saved()
  extra = {"base_model.model.lm_head.lora_A.weight": np.zeros((2, 6), np.float32)}
  rewrite(folder, lambda tensors: tensors | extra)
  message = r"\['base_model.model.lm_head.lora_A.weight'\]; it must have adapters"
  with pytest.raises(ValueError, match=message):
    load_adapters(folder, CONFIG)


def test_pickled_and_missing_files_are_refused(tmp_path, saved):
  folder = saved()
  (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
  with pytest.raises(
    FileNotFoundError, match=r"adapter_model\.safetensors is missing.*pickled adapters are not read"
  ):
    load_adapters(folder, CONFIG)
  with pytest.raises(FileNotFoundError, match=r"adapter_config\.json is missing"):
    load_adapters(tmp_path, CONFIG)


# --- the library itself ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not _SHARED, reason="RLVR_SHARED is not set")
@pytest.mark.parametrize("folder", _FOLDERS, ids=lambda folder: folder.name)
def test_the_peft_library_computes_the_same_logits(tmp_path, folder):
  """With adapters that we wrote, and with those that the library writes."""
  torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  model, base = load(folder, compute_dtype="float32", remat="none")
  config = model.config
  ids = np.load(folder / "expected.npz")["input_ids"]
  load_base = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

  def theirs(network):
    with torch.no_grad():
      return network(torch.tensor(ids)).logits.numpy()

  def ours(adapters, settings):
    return logits_after(model, combine(adapters, base, settings), ids, 1)

  settings = LoraSettings(rank=3, alpha=7.5)
  adapters = random_adapters(config, settings)
  save_adapters(tmp_path / "ours", adapters, settings, config, base_model=str(folder))
  loaded = peft.PeftModel.from_pretrained(load_base(), str(tmp_path / "ours"))
  logits = theirs(loaded)
  np.testing.assert_allclose(ours(adapters, settings), logits, atol=1e-4, rtol=1e-4)
  assert np.abs(logits - theirs(load_base())).max() > 0.1

  torch.manual_seed(0)
  choice = peft.LoraConfig(
    r=4,
    lora_alpha=6,
    target_modules=["q_proj", "up_proj"],
    init_lora_weights=False,
    task_type="CAUSAL_LM",
  )
  made = peft.get_peft_model(load_base(), choice)
  made.save_pretrained(tmp_path / "theirs")
  adapters, settings = load_adapters(tmp_path / "theirs", config)
  assert settings == LoraSettings(rank=4, alpha=6, targets="blocks/(query|up)$")
  np.testing.assert_allclose(ours(adapters, settings), theirs(made), atol=1e-4, rtol=1e-4)
