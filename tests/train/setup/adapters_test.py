"""LoRA in a run: only adapters are trained, saved, resumed; the merged policy draws rollouts."""

import json
import shutil

import jax
import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands.export import export
from rlvr_jax.commands.train import train
from rlvr_jax.data import HuggingFaceTokenizer
from rlvr_jax.models.huggingface import load_params
from rlvr_jax.models.peft import load_adapters
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start.parameters import load_policy

LORA = dict(
  lora__rank=2,
  lora__targets="blocks/(query|up)$",
  num_updates=4,
  warm_start__num_steps=0,
  entropy_bonus=0.1,  # moves a policy that is never right, too
  reweighting="salt",
  sources__quantized__fraction=0.25,
  diagnostics__every=3,
)


@pytest.fixture(scope="module")
def parts():
  pytest.importorskip("qwix", reason="the extra `quantized` needs flax 0.12")
  return build(tiny.config(**LORA))


@pytest.fixture(scope="module")
def run(parts, tmp_path_factory):
  """A finished run."""
  workdir = tmp_path_factory.mktemp("lora")
  train(parts, workdir)
  return workdir


@pytest.mark.slow
def test_adapters_alone_are_trained_and_the_sampler_agrees(run, parts):
  first = parts.initial.trained()
  last, step = load_policy(parts.initial, run / "checkpoints" / "4")
  assert step == 4
  paths = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(last)}
  assert paths == {f"['blocks']['{k}']['{x}']" for k in ("query", "up") for x in "ab"}
  changed = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), first, last)
  assert all(jax.tree.leaves(changed))
  train_records = [r for r in tiny.records(run) if r["phase"] == "train"]
  gaps = [r["agreement/policy_mean"] for r in train_records if "agreement/policy_mean" in r]
  assert gaps and max(gaps) < 1e-5
  rounded = [r.get("agreement/quantized_mean", 0.0) for r in train_records]
  assert max(rounded) > 1e-5  # the copy is one of the merged policy


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_numbers(run, parts, tmp_path):
  workdir = tmp_path / "again"
  shutil.copytree(run, workdir)
  shutil.rmtree(workdir / "checkpoints" / "4")
  train(parts, workdir)
  assert tiny.records(workdir) == tiny.records(run)
  here, there = (load_policy(parts.initial, w / "checkpoints" / "4")[0] for w in (workdir, run))
  jax.tree.map(np.testing.assert_array_equal, here, there)


@pytest.mark.slow
def test_export_writes_the_merged_policy_and_the_adapters(run, parts, tmp_path):
  folder = tmp_path / "out"
  export(parts, str(folder), run / "checkpoints" / "4")
  params, _ = load_policy(parts.initial, run / "checkpoints" / "4")
  whole = parts.programs.merge(params, parts.initial.frozen().trainer)
  loaded = load_params(folder, parts.placement.base, parts.model.config)
  jax.tree.map(np.testing.assert_array_equal, loaded, whole)
  adapters, settings = load_adapters(folder / "adapter", parts.model.config)
  jax.tree.map(np.testing.assert_array_equal, adapters, jax.device_get(params))
  assert (settings.rank, settings.alpha) == (2, 32.0)
  assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["r"] == 2
  tokenizer = HuggingFaceTokenizer(folder)  # the policy reads bytes
  assert tokenizer.encode("1+2") == [49, 43, 50] and tokenizer.stop_ids == (257,)
  # And a run begins with them.
  again = tiny.config(**LORA | dict(lora__adapters=str(folder / "adapter")))
  first = build(again).initial.trained()
  jax.tree.map(np.testing.assert_array_equal, first, params)
