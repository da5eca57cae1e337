"""Seconds of generation by roofline, against sums by hand."""

import jax
import numpy as np
import pytest

from rlvr_jax.costs.chips import Chip
from rlvr_jax.costs.generation_time import refresh
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
CACHE = CacheShape.of(129, 1024, pages=True)  # in blocks of 64 tokens, bursts of 16
TOKEN = 2 * 2 * 2 * 16 * 2  # bytes: layers, keys and values, heads, width of a head, bfloat16
FAST = Chip(1e30, 1e30, 1e30, 1.0, 1.0)
MODEL = transformer(NETWORK)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0))


def estimate(turns, chip, *, slots, pages=True, tensor=1, data=1, reply_s=0.0, cache_format=""):
  mesh = sharding.make_mesh(data=data, tensor=tensor)
  base = sharding.add_shardings(SHAPES, mesh)
  batch = Workload(np.full(len(turns), 129), np.asarray(turns), reply_s)
  kind = dict(slots=slots, pages=pages, cache_format=cache_format)
  cache = CACHE if pages else CacheShape.of(129, 1024)
  return refresh([batch], MODEL, base, mesh, cache, chip, **kind)


def seconds(lengths, chip, **settings):
  """Of responses of one turn, [P, G] tokens."""
  return estimate(np.asarray(lengths)[..., None], chip, **settings).seconds


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
  longest = [2 * (128 + 256 + steps)] * 2  # all blocks of prompts, the first of responses
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


def test_dialogues_are_decoded_behind_a_cache_that_is_computed_anew():
  """One slot, 20 + 30 + 20 tokens: the second turn begins 2 tokens behind a cache of 48."""
  steps, chip = CACHE.steps, FAST._replace(flops=1.0)
  assert steps == 16
  found = estimate([[[20, 30, 20]]], chip, slots=1)
  one, prefill = (forward_flops(NETWORK, [tokens], [[t]]) for tokens, t in ((1, 1), (129, 0)))
  rebuilt = forward_flops(NETWORK, [129 + 48], [[0]])
  # 16 + 4 steps of the first turn, 16 + 6 of the second, of which 2 repeat what is known.
  assert found.seconds.overlapped == pytest.approx((20 + 22) * one + prefill + rebuilt)
  assert found.slots_busy == 40 / 42 and found.waiting_share == found.waiting_s == 0
  assert found.rebuilt_per_token == (129 + 48) / 40
  # Its steps read the cache of the prompt and of 48 tokens, then of 64.
  read = [(16, 0), (4, 16), (16, 48), (6, 64)]
  expected = sum(n * (read_bytes() + cached(129, tokens) * TOKEN) for n, tokens in read)
  chip = FAST._replace(hbm_bytes_per_s=1.0)
  assert estimate([[[20, 30, 20]]], chip, slots=1).seconds.overlapped == pytest.approx(expected)


def test_without_other_rollouts_the_devices_wait_for_replies():
  chip = FAST._replace(flops=1.0)
  at_once = estimate([[[16, 8, 16]]], chip, slots=1)
  late = estimate([[[16, 8, 16]]], chip, slots=1, reply_s=1e9)
  assert late.waiting_s == pytest.approx(1e9) and late.slots_busy == at_once.slots_busy
  assert late.seconds.overlapped - at_once.seconds.overlapped == pytest.approx(1e9, rel=1e-6)


def test_other_rollouts_have_the_slots_while_dialogues_wait():
  """A reply that takes a burst costs nothing with two rollouts, and idle steps with two slots."""
  chip = FAST._replace(flops=1.0)
  burst = 16 * forward_flops(NETWORK, [1], [[1]])
  of = lambda slots, reply_s: estimate(
    [[[16, 8, 16], [32, 0, 0]]], chip, slots=slots, reply_s=reply_s
  )
  assert of(1, 0.0).seconds == of(1, burst).seconds and of(1, burst).waiting_s == 0
  late = of(2, 10 * burst)
  # The second burst has an idle slot, of the dialogue; the rest of its wait has no burst. Then it
  # takes two bursts with 24 steps, of which 8 repeat the reply, beside an idle slot.
  slot_steps = 2 * (16 + 16 + 24)
  assert late.waiting_share == 16 / slot_steps and late.slots_busy == 64 / slot_steps
  assert late.waiting_s == pytest.approx(8 * burst)  # a burst of two slots takes two
