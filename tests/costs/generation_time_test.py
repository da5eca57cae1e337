"""Seconds of generation by roofline, against sums by hand."""

import jax
import numpy as np
import pytest

from rlvr_jax.costs.chips import Chip
from rlvr_jax.costs.generation_time import refresh_seconds
from rlvr_jax.costs.workload import Workload
from rlvr_jax.models.flops import forward_flops
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.caches import CacheShape
from rlvr_jax.train.cluster import sharding

NETWORK = TransformerConfig(
  vocab_size=512, width=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128,
  compute_dtype="bfloat16", tied_head=False,
)  # fmt: skip
CACHE = CacheShape.of(129, 1024)  # in blocks of 64 tokens, bursts of 16
TOKEN = 2 * 2 * 2 * 16 * 2  # bytes: layers, keys and values, heads, width of a head, bfloat16
FAST = Chip(1e30, 1e30, 1e30, 1.0, 1.0)
MODEL = transformer(NETWORK)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0))


def seconds(lengths, chip, *, slots, pages=True, tensor=1, data=1, cache_format=""):
  mesh = sharding.make_mesh(data=data, tensor=tensor)
  base = sharding.add_shardings(SHAPES, mesh)
  batch = Workload(np.full(len(lengths), 129), np.asarray(lengths))
  kind = dict(slots=slots, pages=pages, cache_format=cache_format)
  return refresh_seconds([batch], MODEL, base, mesh, CACHE, chip, **kind)


def read_bytes():
  """Weights that a step reads: all but the embedding."""
  read = [tree for name, tree in SHAPES.items() if name != "embedding"]
  return 2 * sum(x.size for x in jax.tree.leaves(read))


def cached(prompt, response):
  blocks = lambda tokens, part: -(-tokens // part.size) * part.size
  return blocks(prompt, CACHE.prompt) + blocks(response, CACHE.response) + CACHE.steps


def test_a_step_reads_the_weights_and_the_caches_of_its_slots():
  """Two slots; the shorter response is followed by a third, whose burst begins with the next."""
  steps = CACHE.steps
  lengths = [[2 * steps, steps, steps]]
  found = seconds(lengths, FAST._replace(hbm_bytes_per_s=1.0), slots=2)
  bursts = [2 * cached(129, 0), cached(129, steps) + cached(129, 0)]
  expected = sum(steps * (read_bytes() + tokens * TOKEN) for tokens in bursts)
  assert found.overlapped == pytest.approx(expected, rel=1e-9)
  longest = [2 * cached(129, 0), 2 * cached(129, steps)]
  rounded = TOKEN // 2 + 2 * 2 * 2 * 4  # 8 bits, and a scale for each head's keys and values
  for cache_format, token in (("", TOKEN), ("int8", rounded)):
    expected = sum(steps * (read_bytes() + tokens * token) for tokens in longest)
    found = seconds(
      lengths, FAST._replace(hbm_bytes_per_s=1.0), slots=2, pages=False, cache_format=cache_format
    )
    assert found.overlapped == pytest.approx(expected, rel=1e-9)


def test_the_slowest_device_counts_and_idle_slots_are_computed():
  chip = FAST._replace(flops=1.0)
  one = forward_flops(NETWORK, [1], [[1]])
  prefill = forward_flops(NETWORK, [129], [[0]])
  lengths = [[40, 8, 8, 8]]
  expected = 40 * 2 * one + prefill / 2
  assert seconds(lengths, chip, slots=4, data=2).overlapped == pytest.approx(expected)
  assert seconds(lengths, chip, slots=4).overlapped == pytest.approx(40 * 4 * one + prefill)


def test_a_layout_over_tensor_reads_a_part_and_sums_over_links():
  hbm = FAST._replace(hbm_bytes_per_s=1.0)
  lengths = [[160, 160]]
  whole, half = (seconds(lengths, hbm, slots=2, tensor=n).overlapped for n in (1, 2))
  assert half == pytest.approx(whole / 2, rel=0.02)  # but for the norms
  links = seconds(lengths, FAST._replace(interconnect_bytes_per_s=1.0), slots=2, tensor=2)
  sums = 160 * 2 * (2 * 2 * 2) * 64 * 2 / 2  # steps, slots, two sums per layer both ways, width
  copy = 2 * sum(x.size for x in jax.tree.leaves(SHAPES)) / 2  # the weights arrive once
  assert links.overlapped == pytest.approx(sums + copy, rel=0.02)


def test_in_turn_is_the_sum():
  chip = FAST._replace(flops=1e9, hbm_bytes_per_s=1e6)
  found = seconds([[160] * 4], chip, slots=4)
  compute = seconds([[160] * 4], FAST._replace(flops=1e9), slots=4).overlapped
  hbm = seconds([[160] * 4], FAST._replace(hbm_bytes_per_s=1e6), slots=4).overlapped
  assert found.in_turn == pytest.approx(compute + hbm) and found.overlapped < found.in_turn
