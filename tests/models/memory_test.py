"""Bytes of a network on one device, against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from oracles import networks

from rlvr_jax.models import memory
from rlvr_jax.models.presets import preset
from rlvr_jax.train.cluster import sharding


@pytest.fixture
def base():
  """A kernel [16, 8] over fsdp = 2 and tensor = 4, and a norm that every device has."""
  mesh = sharding.make_mesh(fsdp=2, tensor=4)
  place = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
  )
  return {"kernel": place((16, 8), "fsdp", "tensor"), "norm": place((6,), None)}


def test_shards_are_counted_on_one_device(base):
  assert memory.shard_bytes(base) == 8 * 2 * 4 + 6 * 4


def test_the_copy_to_decode_with_is_gathered_over_fsdp_alone(base):
  assert memory.decoding_copy_bytes(base, "bfloat16") == 16 * 2 * 2 + 6 * 2


def test_activations_are_those_that_remat_saves():
  config = preset("tiny", compute_dtype="float32", remat="full")
  products = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
  products += 2 * config.width + 2 * config.mlp_width
  layer = config.width + products
  expected = 64 * (config.num_layers * config.width + 4 * layer) * 4
  assert memory.activation_bytes(config, tokens=64, tensor=1) == expected
  assert memory.activation_bytes(config, tokens=64, tensor=2) == expected / 2
  dots = preset("tiny", compute_dtype="float32", remat="dots")
  more = 64 * config.num_layers * products * 4
  assert memory.activation_bytes(dots, tokens=64, tensor=1) == expected + more


def test_where_nothing_is_recomputed_scores_and_further_operands_are_saved():
  config = preset("tiny", compute_dtype="float32", remat="none")
  products = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
  products += 2 * config.width + 2 * config.mlp_width
  short = 64 * config.num_layers * (products + config.num_heads * 100) * 4
  assert memory.unfused_bytes(config, tokens=64, row_length=100) == short
  long = 64 * config.num_layers * products * 4
  assert memory.unfused_bytes(config, tokens=64, row_length=1024) == long
  assert memory.unfused_bytes(preset("tiny", remat="dots"), tokens=64, row_length=100) == 0


def test_activations_of_experts_are_those_of_the_chosen_ones():
  mixture = dict(num_experts=8, experts_per_token=2, expert_width=48)
  config = preset("tiny", compute_dtype="float32", remat="dots", **mixture)
  layer = 2 * config.width + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
  layer += 8 + 2 * (48 + 48 + config.width)  # the router; gate, up and down of two experts
  expected = 64 * (config.num_layers + 4) * layer * 4
  assert memory.activation_bytes(config, tokens=64, tensor=1) == expected


def test_a_gated_delta_net_keeps_states_convolutions_and_inverses(monkeypatch):
  """Of one layer, or without remat of both: beside what other layers save, which has no chunks."""
  sizes = {}
  for chunk in (32, 64):
    monkeypatch.setattr(memory, "CHUNK", chunk)
    for remat in ("full", "none"):
      config = dataclasses.replace(networks.DELTA, remat=remat)
      sizes[remat, chunk] = memory.activation_bytes(config, tokens=10, tensor=1)
  # Per token in float32: two states [8, 12] of 4 heads a chunk, and of each head a chunk's inverse.
  change = 10 * 4 * (2 * 4 * 8 * 12 * (1 / 64 - 1 / 32) + 4 * 32)
  for remat, layers in (("full", 1), ("none", 2)):
    assert sizes[remat, 64] - sizes[remat, 32] == layers * change
  monkeypatch.setattr(memory, "_delta_bytes", lambda *_: 0)
  rest = memory.activation_bytes(networks.DELTA, tokens=10, tensor=1)
  channels = 2 * 8 + 2 * 8 + 4 * 12  # of queries, keys and values
  of_delta = 4 * (2 * 4 * 8 * 12 / 64 + channels + 4 * (64 + 12))
  layers = 2 if networks.DELTA.remat == "none" else 1
  assert sizes[networks.DELTA.remat, 64] - rest == 10 * layers * of_delta


def test_the_head_takes_a_chunk_of_logits_and_its_kernel():
  config = preset("tiny", compute_dtype="bfloat16")
  V, D = config.vocab_size, config.width
  assert memory.output_head_bytes(config, tokens=5, tensor=1) == 5 * V * 8 + D * V * (2 + 4)
  forward = memory.output_head_bytes(config, tokens=5, tensor=1, backward=False)
  assert forward == 5 * V * 4 + D * V * 2
  assert memory.sampling_bytes(config, slots=3) == 3 * V * 8
