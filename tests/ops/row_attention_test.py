"""Attention within packed rows: the reference against a direct softmax, and the choice."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import rows as oracle
from oracles.rows import lay_rows

from rlvr_jax.ops import row_attention as module
from rlvr_jax.ops.row_attention import choose_attention, row_attention, row_length
from rlvr_jax.ops.row_blocks import visible_blocks
from rlvr_jax.types import Rows

L, N, K, H = 1024, 4, 2, 6  # long enough for blocks; `SHORT` is not
# Several prompts in a row, one of them longer than a tile; rollouts beside padding, and a full one.
ROWS = lay_rows(L, [(9, [128, 3]), (130, [5])], [(20, [200, 1, 100])])
SETTINGS = dict(scale=0.4, window=None, soft_cap=None)


def _inputs(dtype=np.float64, rows=ROWS):
  rng = np.random.default_rng(0)
  R, length = rows.prompts.shape
  normal = lambda heads: jnp.asarray(rng.normal(size=(R, length, heads, H)).astype(dtype))
  return normal(N), normal(K), normal(K), jax.tree.map(jnp.asarray, rows)


def _value_and_gradients(*inputs, **settings):
  """The output, and the gradients of a sum whose weights differ from entry to entry."""
  *operands, rows = inputs

  @jax.jit
  def run(*operands):
    out, backward = jax.vjp(lambda *x: row_attention(*x, rows, **settings), *operands)
    return out, *backward(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

  return run(*operands)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (150, 0.5)])
def test_the_reference_equals_a_direct_softmax(x64, window, soft_cap):
  inputs = _inputs()
  settings = dict(scale=0.4, window=window, soft_cap=soft_cap)
  expected = oracle.attention(*map(np.asarray, inputs[:3]), ROWS, **settings)
  np.testing.assert_allclose(row_attention(*inputs, **settings), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
  "window, soft_cap", [pytest.param(None, None, marks=pytest.mark.slow), (150, 0.5)]
)
def test_gradients_equal_those_of_a_dense_softmax(x64, window, soft_cap):
  queries, keys, values, rows = _inputs()

  def dense(queries, keys, values):
    distance = rows.positions[:, :, None] - rows.positions[:, None]
    index = np.arange(L)
    column = lambda x: x[:, :, None]
    seen = (index < column(rows.prompt_ends)) | (index >= column(rows.starts))
    seen &= (index <= index[:, None]) & (distance < (window or L))
    seen &= (column(rows.prompts) == rows.prompts[:, None]) & (column(rows.prompts) >= 0)
    scores = jnp.einsum("rikgh,rjkh->rkgij", queries.reshape(2, L, K, N // K, H), keys) * 0.4
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    out = jnp.einsum("rkgij,rjkh->rikgh", weights, values).reshape(queries.shape)
    return jnp.where(rows.prompts[:, :, None, None] < 0, 0, out)

  settings = dict(scale=0.4, window=window, soft_cap=soft_cap)
  found = _value_and_gradients(queries, keys, values, rows, **settings)
  out, backward = jax.vjp(dense, queries, keys, values)
  gradients = backward(jnp.cos(jnp.arange(out.size)).reshape(out.shape))
  for mine, expected in zip(found, (out, *gradients), strict=True):
    np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-11)


def test_bfloat16_is_near_float32():
  settings = dict(scale=0.4, window=150, soft_cap=0.5)
  *operands, rows = _inputs(np.float32)
  rounded = [x.astype(jnp.bfloat16) for x in operands]
  expected = _value_and_gradients(*(x.astype(jnp.float32) for x in rounded), rows, **settings)
  for mine, exact in zip(_value_and_gradients(*rounded, rows, **settings), expected, strict=True):
    assert mine.dtype == jnp.bfloat16
    np.testing.assert_allclose(
      mine.astype(jnp.float32), exact, rtol=0, atol=0.02 * np.max(np.abs(exact))
    )


def test_whether_a_layer_slides_may_be_traced(x64):
  inputs = _inputs()
  settings = dict(scale=0.4, soft_cap=None)
  sliding = jax.jit(lambda slides: row_attention(*inputs, window=9, slides=slides, **settings))
  np.testing.assert_array_equal(sliding(True), row_attention(*inputs, window=9, **settings))
  np.testing.assert_array_equal(sliding(False), row_attention(*inputs, window=None, **settings))


def test_blocks_that_share_nothing_are_skipped():
  """One prompt and eight rollouts, a tile each: every rollout visits itself and its prompt."""
  rows = lay_rows(9 * 128, [(100, [128] * 8)])
  row = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
  visible = np.asarray(visible_blocks(row, 128, 128, None))
  assert visible.sum() == 1 + 8 * 2  # of 81
  assert visible[:, 0].all() and np.diag(visible).all()
  assert np.asarray(visible_blocks(row, 384, 384, None)).sum() == 3 + 2  # the diagonal, the prompt
  visits, count = module._visits(row, jnp.asarray(2**30))
  assert [sorted(v[:c].tolist()) for v, c in zip(visits, count, strict=True)][4] == [0, 4]


def test_blocks_beyond_a_window_are_skipped():
  rows = lay_rows(1024, [(100, [896])])
  row = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
  visible = np.asarray(visible_blocks(row, 128, 128, 130))
  assert visible.sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
  exact = np.asarray(visible_blocks(row, 128, 128, 129))  # the 129 reach back to two tiles at most
  assert exact.sum(axis=1).tolist() == [1, 2, 2, 2, 2, 2, 2, 2]


def test_no_direction_holds_a_square_of_scores():
  length = 4096
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
  rows = Rows(*[jax.ShapeDtypeStruct((1, length), jnp.int32)] * 4)
  operands = shape(1, length, N, H), shape(1, length, K, H), shape(1, length, K, H)
  loss = lambda *inputs: jnp.sum(row_attention(*inputs, **SETTINGS))
  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*operands, rows).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * N * length * length / 20


def test_a_mesh_splits_rows_and_heads(x64):
  rows = lay_rows(L, [(9, [128, 3])], [(20, [200, 1])], [(1, [1])], [(300, [5, 5])])
  inputs = _inputs(rows=rows)
  expected = _value_and_gradients(*inputs, **SETTINGS)
  mesh = jax.make_mesh(
    (2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  for mine, theirs in zip(
    _value_and_gradients(*inputs, mesh=mesh, **SETTINGS), expected, strict=True
  ):
    np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-13)
  wide = jax.make_mesh(
    (1, 1, 8), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  with pytest.raises(ValueError, match=r"mesh.tensor=8 does not divide num_kv_heads=2; choose a"):
    row_attention(*inputs, mesh=wide, **SETTINGS)


# --- cuDNN ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 150])
def test_masked_attention_of_the_library_equals_the_reference(monkeypatch, window):
  """What cuDNN is told, by XLA's implementation of the same function; padding sees itself alone."""
  # Of the second row: padding, a prompt and two of its rollouts.
  *operands, rows = jax.tree.map(lambda x: x[1:, :640], _inputs(np.float32))
  settings = dict(scale=0.4, window=window, soft_cap=None)
  real = rows.prompts[:, :, None, None] >= 0

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_gradients(kind):
    def attend(*x):
      out = row_attention(*x, rows, kind=kind, **settings)
      return jnp.where(real, out, 0), out

    out, backward, whole = jax.vjp(attend, *operands, has_aux=True)
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return (out, *backward(weights)), whole

  monkeypatch.setitem(
    module._BY_KIND, "cudnn", functools.partial(module._cudnn, implementation="xla")
  )
  expected, _ = value_and_gradients("reference")
  found, whole = value_and_gradients("cudnn")
  for mine, theirs in zip(found, expected, strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
  own = jnp.repeat(operands[2], N // K, axis=2)
  np.testing.assert_allclose(jnp.where(real, 0, whole), jnp.where(real, 0, own), rtol=1e-6)


def test_rows_for_cudnn_are_a_multiple_of_128():
  """It knows no odd lengths."""
  assert [row_length("cudnn", n) for n in (1, 128, 287, 1025)] == [128, 128, 384, 1152]
  assert row_length("reference", 287) == 287


def test_cudnn_has_no_soft_cap():
  with pytest.raises(
    ValueError, match=r"soft_cap=0\.5: cuDNN has no soft cap; choose kind = 'reference'"
  ):
    row_attention(*_inputs(np.float32), scale=0.4, soft_cap=0.5, kind="cudnn")


@pytest.mark.parametrize("axes", [(1, 1, 1), (1, 2, 2)])
def test_a_gradient_is_lowered_to_cudnns_kernels(axes):
  """Needs the wheels of the extra cuda13, but no GPU. Whether a layer slides is traced."""
  pytest.importorskip("jax_cuda13_plugin", reason="needs pip install 'rlvr_jax[cuda13]'")
  *_, rows = _inputs(np.float32)
  of = lambda heads: jax.ShapeDtypeStruct((*rows.prompts.shape, heads, 64), jnp.bfloat16)
  mesh = jax.make_mesh(
    axes, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )

  def loss(slides, *operands):
    settings = dict(scale=0.125, window=150, kind="cudnn", mesh=mesh)
    return row_attention(*operands, rows, slides=slides, **settings).astype(jnp.float32).sum()

  slides = jax.ShapeDtypeStruct((), bool)
  traced = jax.jit(jax.grad(loss, argnums=(1, 2, 3))).trace(slides, of(N), of(K), of(K))
  program = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "__cudnn$fmhaScaleBiasSoftmax(" in program
  assert "__cudnn$fmhaScaleBiasSoftmaxBackward(" in program


# --- the choice -----------------------------------------------------------------------------------

POSSIBLE = dict(platform="tpu", row_length=9216, head_dims=(128,), dtype="bfloat16")


def test_auto_takes_the_kernel_of_the_platform(caplog):
  assert choose_attention("auto", **POSSIBLE) == "splash"
  assert choose_attention("auto", **POSSIBLE | dict(head_dims=(256, 512))) == "splash"
  assert choose_attention("auto", **POSSIBLE | dict(platform="cpu")) == "reference"
  assert not caplog.records


def test_a_gpu_gets_cudnn_or_few_products(caplog):
  on_gpu = POSSIBLE | dict(platform="gpu")
  assert choose_attention("auto", **on_gpu) == "cudnn"
  short = on_gpu | dict(row_length=2048)
  assert choose_attention("auto", **short | dict(dtype="float32")) == "whole"
  assert choose_attention("auto", **short | dict(head_dims=(64, 256))) == "whole"
  assert not caplog.records
  assert choose_attention("auto", **on_gpu | dict(dtype="float32")) == "reference"
  assert "slower reference: cudnn needs compute_dtype bfloat16" in caplog.text


@pytest.mark.parametrize(
  ("window", "soft_cap"),
  [(150, 0.5), *(pytest.param(x, None, marks=pytest.mark.slow) for x in (None, 150))],
)
def test_whole_rows_equal_the_reference(window, soft_cap):
  *operands, rows = jax.tree.map(lambda x: x[:, :640], _inputs(np.float32))

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_gradients(kind):
    attend = lambda *x: row_attention(
      *x, rows, kind=kind, scale=0.4, window=window, soft_cap=soft_cap
    )
    out, backward = jax.vjp(attend, *operands)
    weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    real = rows.prompts[:, :, None, None] >= 0
    return jnp.where(real, out, 0), *backward(jnp.where(real, weights, 0))

  results = zip(value_and_gradients("whole"), value_and_gradients("reference"), strict=True)
  for mine, theirs in results:
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
  "changed, named",
  [
    (dict(platform="tpu"), "platform='tpu'"),
    (dict(dtype="float32"), "compute_dtype='float32'"),
    (dict(head_dims=(64, 100)), "head_dim=100"),
    (dict(head_dims=(64, 256)), "head_dim=256"),
    (dict(soft_cap=50.0), "attention_soft_cap=50.0"),
    (dict(row_length=2**14 + 128), "row length 16512"),
  ],
)
def test_what_cudnn_does_not_support_is_named(changed, named):
  with pytest.raises(ValueError, match=re.escape(named)):
    choose_attention("cudnn", **POSSIBLE | dict(platform="gpu") | changed)


@pytest.mark.parametrize(
  "changed, named",
  [
    (dict(head_dims=(64, 640)), "head_dim=640"),
    (dict(head_dims=(256, 512), dtype="float32"), "(here: head_dim=512, compute_dtype='float32'"),
    (dict(head_dims=(256, 512), row_length=2**15 + 1024), "row length 33792)"),
    (dict(dtype="float64"), "compute_dtype='float64'"),
    (dict(row_length=9000), "row length 9000"),
    (dict(row_length=2**18), "row length 262144"),
    (dict(platform="cpu"), "platform='cpu'"),
  ],
)
def test_what_splash_does_not_support_is_named(changed, named, caplog):
  with pytest.raises(ValueError, match=re.escape(named)) as raised:
    choose_attention("splash", **POSSIBLE | changed)
  assert "choose one of ['auto', 'reference', 'whole']" in str(raised.value)
  assert choose_attention("auto", **POSSIBLE | changed) == "reference"
  if changed != dict(platform="cpu"):
    assert named in caplog.text


def test_an_unknown_kind_lists_the_known():
  with pytest.raises(ValueError, match=r"attention='flash'; allowed: \['auto', 'reference'"):
    choose_attention("flash", **POSSIBLE)
