"""Mixtures in which some layers have an MLP: their loops, and numbers of layers in files."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from oracles import updates
from oracles.checkpoints import load
from oracles.networks import SOME_EXPERTS as CONFIG

from rlvr_jax.models import flops, peft
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.huggingface import save_checkpoint
from rlvr_jax.models.huggingface_config import checkpoint_config, config_fields
from rlvr_jax.models.safetensors import open_checkpoint
from rlvr_jax.ops.layers import layers_in, rows_of, split_into_loops, take_rows
from rlvr_jax.train.cluster import sharding

V, S, T, G = 32, 6, 5, 3
DENSE, SPARSE = False, True


def with_layers(pattern, **changes):
  return dataclasses.replace(CONFIG, sparse_layers=pattern, num_layers=len(pattern), **changes)


def test_loops_are_the_layers_in_order_and_as_few_as_can_be():
  for length in range(1, 8):
    for pattern in itertools.product((DENSE, SPARSE), repeat=length):
      loops = split_into_loops(pattern)
      assert sum((kinds * count for kinds, count in loops), ()) == pattern
      if len(set(pattern)) == 1:
        assert loops == [(pattern[:1], length)]
  assert split_into_loops((DENSE, *[SPARSE] * 40)) == [((DENSE,), 1), ((SPARSE,), 40)]
  assert split_into_loops((DENSE, SPARSE) * 9) == [((DENSE, SPARSE), 9)]


def test_a_layer_has_its_row_in_each_stack():
  kinds = CONFIG.kinds
  assert [layers_in(stack, kinds) for stack in ("all", "sparse", "dense")] == [
    [0, 1, 2, 3, 4], [1, 3, 4], [0, 2]
  ]  # fmt: skip
  stacks = dict(query=np.arange(5), gate=np.asarray([0, 2]), experts={"up": np.asarray([1, 3, 4])})
  for layer in range(5):
    rows = take_rows(stacks, rows_of(layer, kinds))
    assert rows == dict(query=layer) | (
      dict(experts={"up": layer}) if kinds[layer][1] == "sparse" else dict(gate=layer)
    )


# --- numbers of layers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("fields", "layers"),
  [
    (dict(decoder_sparse_step=2), (DENSE, SPARSE, DENSE, SPARSE, DENSE)),
    (dict(mlp_only_layers=[0, 2]), CONFIG.sparse_layers),
    (dict(decoder_sparse_step=2, mlp_only_layers=[1, 9]), (DENSE, DENSE, DENSE, SPARSE, DENSE)),
    (dict(decoder_sparse_step=1, mlp_only_layers=None), None),
  ],
)
def test_layers_are_read_as_transformers_reads_them(fields, layers):
  published = dict(model_type="qwen3_moe", num_hidden_layers=5, num_experts=4)
  assert config_fields(published | fields, "config.json")["sparse_layers"] == layers


def test_a_checkpoint_has_the_numbers_of_the_layers(tmp_path):
  pattern = (SPARSE, DENSE, DENSE)
  config = with_layers(pattern, tied_head=True)
  params = updates.small_model(config).init(jax.random.key(0))
  save_checkpoint(tmp_path / "out", params, config, dtype="float32")
  assert checkpoint_config(tmp_path / "out") == config
  names = open_checkpoint(tmp_path / "out").keys()
  for layer, sparse in enumerate(pattern):
    assert (f"model.layers.{layer}.mlp.gate_proj.weight" in names) == (not sparse)
    assert (f"model.layers.{layer}.mlp.experts.4.down_proj.weight" in names) == sparse
  for mesh in (None, sharding.make_mesh(fsdp=4, tensor=2)):
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out", mesh)[1], params)
  # Other numbers are named before anything is read.
  path = tmp_path / "out" / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | dict(mlp_only_layers=[0, 2])))
  with pytest.raises(ValueError, match=r"missing: model.layers.0.mlp.down_proj.weight"):
    load(tmp_path / "out")


def test_a_family_without_such_layers_is_not_written(tmp_path):
  config = dataclasses.replace(CONFIG, qk_norm=False)
  params = jax.eval_shape(transformer(config).init, jax.random.key(0))
  with pytest.raises(ValueError, match=r"nearest family, mixtral, differs in .*sparse_layers"):
    save_checkpoint(tmp_path / "out", params, config)
  assert not (tmp_path / "out").exists()


def test_adapters_of_experts_are_refused(tmp_path):
  name = "base_model.model.model.layers.1.mlp.experts.0.down_proj.lora_{}.weight"
  safetensors = pytest.importorskip("safetensors.numpy")
  description = dict(peft_type="LORA", r=2, lora_alpha=4, target_modules=["down_proj"])
  (tmp_path / peft.CONFIG_FILE).write_text(json.dumps(description))
  pair = {name.format("A"): np.zeros((2, 12)), name.format("B"): np.zeros((16, 2))}
  safetensors.save_file(pair, tmp_path / peft.WEIGHTS_FILE)
  with pytest.raises(ValueError, match=r"experts.0.down_proj.* must have adapters of layers"):
    peft.load_adapters(tmp_path, CONFIG)


def test_flops_are_those_of_each_layer():
  count = lambda pattern: flops.forward_flops(with_layers(pattern), [4], [[3]])
  dense, sparse, both = map(
    count, ((DENSE,) * 2 + (SPARSE,), (SPARSE,) * 3, (DENSE, SPARSE, SPARSE))
  )
  np.testing.assert_allclose(both - dense, sparse - both)
  assert both != dense


def test_routes_of_other_layers_do_not_fit():
  one, other = (with_layers(x).mixture for x in ((DENSE, SPARSE, SPARSE), (SPARSE, DENSE, SPARSE)))
  assert one != other and one[:3] == other[:3] == (2, 5, 2)
  assert dataclasses.replace(CONFIG, sparse_layers=None).mixture == (5, 5, 2)
