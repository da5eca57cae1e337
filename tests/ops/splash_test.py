"""The flash kernel for TPUs: interpreted it equals the reference, and it compiles for chips."""

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.rows import lay_rows

from rlvr_jax.ops import splash
from rlvr_jax.ops.row_attention import RESIDUALS, row_attention
from rlvr_jax.ops.row_blocks import (
  TILE,
  is_visible,
  round_to_blocks,
  splash_alignment,
  visible_blocks,
)
from rlvr_jax.types import Rows

L, N, K, H = 768, 4, 2, 8
# Rollouts that begin and end within a block; in the second row the last place is not padding.
ROWS = lay_rows(
  L, [(9, [128, 3]), (130, [5, 90])], [(20, [200, 1, 100, 384])], alignment=splash_alignment(L)
)


@pytest.fixture
def interpreted(monkeypatch):
  """Without a TPU, with blocks small enough that some of a short row are skipped."""
  monkeypatch.setattr(
    splash, "splash_attention", functools.partial(splash.splash_attention, interpret=True)
  )
  monkeypatch.setattr(splash, "_FORWARD", (128, 256))
  monkeypatch.setattr(splash, "_BACKWARD", {2**17: (256, 384)})


def _value_and_gradients(kind, rows, **settings):
  rng = np.random.default_rng(0)
  R, length = rows.prompts.shape
  normal = lambda heads: jnp.asarray(rng.normal(size=(R, length, heads, H)), jnp.float32)
  operands, weights = (normal(N), normal(K), normal(K)), normal(N)

  @jax.jit
  def run(rows, *operands):
    attend = lambda *x: row_attention(*x, rows, scale=0.4, kind=kind, **settings)
    real = rows.prompts[:, :, None, None] >= 0
    out, backward = jax.vjp(attend, *operands)
    return jnp.where(real, out, 0), *backward(jnp.where(real, weights, 0))

  return run(jax.tree.map(jnp.asarray, rows), *operands)


def _equals_the_reference(rows, **settings):
  found, expected = (
    _value_and_gradients(kind, rows, **settings) for kind in ("splash", "reference")
  )
  for mine, reference in zip(found, expected, strict=True):
    np.testing.assert_allclose(mine, reference, rtol=0, atol=1e-5 * np.max(np.abs(reference)))


@pytest.mark.soak
@pytest.mark.parametrize("rollouts", [[33_000], [9000, 500, 700, 3] * 3], ids=["one", "many"])
def test_equals_the_reference_in_rows_above_32768_tokens(monkeypatch, rollouts):
  """With the blocks that TPUs get."""
  emulated = functools.partial(splash.splash_attention, interpret=True)
  monkeypatch.setattr(splash, "splash_attention", emulated)
  length = 33_792 if len(rollouts) == 1 else 38_400
  rows = lay_rows(length, [(300, rollouts)], alignment=splash_alignment(length))
  _equals_the_reference(rows, window=None, soft_cap=None)


def test_equals_the_reference(interpreted):
  """Grouped heads, several prompts in a row, padding of all kinds."""
  _equals_the_reference(ROWS, window=None, soft_cap=None)


@pytest.mark.parametrize(
  "slides, soft_cap",
  [
    pytest.param(True, 0.5, marks=pytest.mark.slow),
    pytest.param(True, None, marks=pytest.mark.slow),
    pytest.param(False, 0.5, marks=pytest.mark.slow),
  ],
)
def test_equals_the_reference_in_sliding_layers(interpreted, slides, soft_cap):
  _equals_the_reference(ROWS, window=150, slides=jnp.asarray(slides), soft_cap=soft_cap)


@pytest.mark.slow
def test_equals_the_reference_on_a_mesh(interpreted):
  mesh = jax.make_mesh(
    (1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  _equals_the_reference(ROWS, window=None, soft_cap=None, mesh=mesh)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 150])
@pytest.mark.parametrize("kind, calls", [("splash", "pallas_call["), ("reference", "while[")])
def test_remat_can_keep_what_the_backward_pass_needs(window, kind, calls):
  """With the residuals' name in its policy no second forward pass is made."""
  array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
  length = 1024  # shorter rows have no blocks in the reference
  rows = Rows(*[array(1, length, dtype=jnp.int32)] * 4)
  operands = array(1, length, N, H), array(1, length, K, H), array(1, length, K, H)

  def passes(policy):
    def loss(operands, rows, slides):
      attend = lambda *x: row_attention(
        *x, rows, scale=0.4, window=window, slides=slides, kind=kind
      )
      return jnp.sum(jnp.sin(jax.checkpoint(attend, policy=policy)(*operands)))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(operands, rows, array(dtype=jnp.bool_))
    return str(jaxpr).count(calls)

  kernels = 2 if window and kind == "splash" else 1  # of layers that slide and of others
  assert passes(None) == 3 * kernels
  assert passes(jax.checkpoint_policies.save_only_these_names(RESIDUALS)) == 2 * kernels


def test_a_block_that_does_not_run_fetches_nothing_of_its_own():
  """Nine tiles, a prompt and eight rollouts: each block of queries meets itself and the prompt."""
  rows = lay_rows(9 * 512, [(500, [512] * 8)])
  row = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
  forward, backward = splash._plan_forward(row, None), splash._plan_backward(row, None)
  assert (forward.q, forward.kv, backward.q, backward.kv) == (512, 512, 512, 512)
  runs = np.asarray(forward.runs)
  assert runs.sum() == 1 + 8 * 2
  for plan, axis in ((forward, 1), (backward, 0)):
    fetched, runs = np.asarray(plan.fetched), np.asarray(plan.runs)
    own = np.arange(runs.shape[axis])
    np.testing.assert_array_equal(
      fetched[runs], np.broadcast_to(own if axis else own[:, None], runs.shape)[runs]
    )
    order = fetched if axis else fetched.T
    visited = (runs if axis else runs.T).ravel()
    changed = np.flatnonzero(np.diff(order.ravel())) + 1
    assert len(changed) < visited.sum()  # never fetched without a visit that needs it


def test_the_backward_pass_of_long_rows_has_larger_blocks_of_keys():
  sizes = {6144: 512, 8192: 512, 9216: 768, 30_720: 768, 33_792: 1536, 66_560: 1664, 2**17: 2048}
  for length, size in sizes.items():
    row, plans = Rows(*[jax.ShapeDtypeStruct((length,), jnp.int32)] * 4), []
    jax.eval_shape(lambda row, plans=plans: plans.append(splash._plan_backward(row, None)), row)
    assert plans[0].kv == size


def test_no_long_row_has_small_blocks_of_keys():
  """One partial gradient for each: a row of 57,216 tokens had 149 of them, one of 57,344 has 28."""
  lengths = {round_to_blocks(least) for least in range(2**15 + 1, 2**17 + 1, 97)}
  assert max(lengths) == 2**17 and all(length % TILE == 0 for length in lengths)
  assert min(splash._block_size(length, 2048) for length in lengths) >= 1024
  assert round_to_blocks(2**15) == 2**15 and round_to_blocks(9000) == 9216


def random_row(length, alignment, seed=0):
  """A row of groups, as int32 arrays [length], that has a token in its last place."""
  rng = np.random.default_rng(seed)
  groups, room = [], length // alignment * alignment
  while room:
    places = min(room, alignment * int(rng.integers(2, max(3, length // alignment // 3))))
    places = places if room - places > 2 * alignment else room
    prompt = alignment * int(rng.integers(1, places // alignment)) - int(rng.integers(alignment))
    rollouts = places - -(-prompt // alignment) * alignment
    first = alignment * int(rng.integers(1, rollouts // alignment + 1))
    lengths = [first] + [rollouts - first] * (first < rollouts)
    room -= places
    lengths[-1] += 0 if room else length % alignment
    groups.append((prompt, lengths))
  return jax.tree.map(lambda x: x[0], lay_rows(length, groups, alignment=alignment))


@pytest.mark.parametrize(
  ("length", "alignment"),
  [
    *[(768, 8), (4096, 8), (8192, 16), (9216, 32), (2**14, 32), (2**15, 128), (2**16, 256)],
    *[(384 * 87, 256), (129 * 512, 1024), (2**17, 1024)],  # not all are multiples of the alignment
  ],
)
def test_the_mask_reads_every_field_from_its_32_bits(length, alignment):
  """Of every token of full rows, for keys at the ends of its rollout, of its prompt and around."""
  assert splash_alignment(length) == splash_alignment(length - 100) == alignment
  sequence, query = jax.jit(splash._q_sequence), np.arange(length)
  for seed in range(3):
    row = random_row(length, alignment, seed)
    assert row.prompts[-1] >= 0
    edges = [query, row.starts, row.prompt_ends, query - query % alignment]
    keys = np.stack([edge + step for edge in edges for step in (-1, 0, 1)], axis=1)
    seen = splash._Mask(None, length)(np.asarray(sequence(row))[:, None], keys)
    fields = row.starts[:, None], row.prompt_ends[:, None]
    expected = is_visible(query[:, None], *fields, keys, None)
    real = row.prompts >= 0
    np.testing.assert_array_equal(seen[real], expected[real])


def test_blocks_run_if_and_only_if_a_key_is_visible():
  """Also where rollouts begin and end within blocks."""
  length, block = 2048, 256
  for seed in range(3):
    row, index = random_row(length, splash_alignment(length), seed), np.arange(length)
    fields = (x[:, None] for x in (index, row.starts, row.prompt_ends))
    visible = is_visible(*fields, index, None)
    visible &= (row.prompts[:, None] == row.prompts) & (row.prompts >= 0)
    blocks = visible.reshape(length // block, block, length // block, block).any((1, 3))
    found = jax.jit(visible_blocks, static_argnums=(1, 2, 3))(row, block, block, None)
    np.testing.assert_array_equal(found, blocks)


def test_padding_sees_padding_and_itself():
  row = jax.tree.map(lambda x: x[0], lay_rows(768, [(9, [3])], alignment=8))
  sequence = np.asarray(jax.jit(splash._q_sequence)(row))
  seen = splash._Mask(None, 768)(sequence[:, None], np.arange(768))
  seen &= row.prompts[:, None] == row.prompts
  assert np.diagonal(seen).all()
  assert not np.any(seen & (row.prompts[:, None] < 0) & (row.prompts >= 0))


def test_cost_of_full_causal_rows():
  """One rollout of 7 · 1024 tokens after a prompt of 1024: half of the square, by blocks."""
  rows = jax.tree.map(jnp.asarray, lay_rows(8192, [(1024, [7168])], [(1024, [7168])]))
  cost = splash.splash_cost(rows, num_heads=28, num_kv_heads=4, head_dim=128)
  causal = 2 * 28 * 128 * 8192**2 / 2  # multiply-adds of one product, over both rows
  assert 1.0 < cost.forward_flops / (2 * 2 * causal) < 1.07
  assert 1.0 < cost.backward_flops / (2 * 5 * causal) < 1.13
  operand = 2 * 8192 * 128 * 2
  assert cost.operand_bytes == operand * (4 * 28 + 4 * 4)
  visits = 2 * 28 * 16 * 17 / 2
  fetched = visits * 512 * (2 * 128 * 2 + 32)  # keys and values, and their segments
  once = 2 * 28 * 8192 * (2 * 128 * 2 + 4 * 512)  # queries, output; normalisers, segments, indices
  assert 0.98 < cost.forward_bytes / (fetched + once) < 1
  twice = splash.splash_cost(rows, num_heads=56, num_kv_heads=8, head_dim=128)
  assert twice.forward_flops == 2 * cost.forward_flops


_COMPILE = """
  import sys
  import jax, jax.numpy as jnp
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding
  from rlvr_jax.ops.row_attention import row_attention
  from rlvr_jax.types import Rows

  topology, window = sys.argv[1], int(sys.argv[2]) or None
  L, N, K, H = 9216, 28, 4, 128
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  sharding = SingleDeviceSharding(devices[0])
  array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def run(queries, keys, values, rows, slides, gradient):
    attend = lambda *x: row_attention(
      *x, rows, scale=H**-0.5, window=window, slides=slides, kind="splash"
    )
    out, backward = jax.vjp(attend, queries, keys, values)
    return out, backward(gradient)

  heads, keys = array(1, L, N, H), array(1, L, K, H)
  rows = Rows(*[array(1, L, dtype=jnp.int32)] * 4)
  compiled = jax.jit(run).lower(heads, keys, keys, rows, array(dtype=jnp.bool_), heads).compile()
  kernels = compiled.as_text().count('custom_call_target="tpu_custom_call"')
  print("kernels", kernels, "temp", compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("window", [0, 4096])
def test_compiles_for_a_tpu(topology, window):
  """Forward and backward, at the heads of a 7B model; needs libtpu and no TPU."""
  pytest.importorskip("libtpu", reason="libtpu is not installed: pip install libtpu")
  environment = os.environ | {
    "TPU_SKIP_MDS_QUERY": "1",  # of a cloud machine's metadata, which elsewhere waits for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs on a TPU
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",  # those of the tests are a CPU's, which libtpu refuses
  }
  command = [sys.executable, "-c", textwrap.dedent(_COMPILE), topology, str(window)]
  result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
  assert result.returncode == 0, result.stderr[-2000:]
  _, kernels, _, temporary = result.stdout.split()
  assert int(kernels) == (4 if window else 2)
  # The largest array is that of the queries' partial gradients, one for each block of keys.
  assert int(temporary) < 1.6 * (9216 // 1024) * 9216 * 28 * 128 * 2
