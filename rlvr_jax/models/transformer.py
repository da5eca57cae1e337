"""The policy: one decoder-only transformer, with settings for all supported model families.

A layer mixes tokens by attention or by a gated DeltaNet (`models.delta_net`); then comes an MLP or
a mixture of experts (`models.experts`). `TransformerConfig.kinds` says which layer has what.

All other operations are per token, so prompts and responses can be packed into rows. A prompt is
computed once for all its responses in a row, and in the engine once for all its slots.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlvr_jax.models.delta_net import DeltaNet, DeltaSettings
from rlvr_jax.models.experts import NO_EXPERT, ROUTES, Experts, ExpertSettings, Routing
from rlvr_jax.models.layout import ONE_DEVICE, Layout
from rlvr_jax.models.linear import PRODUCT, LowRank, Rounded, dense, init_kernel, value_of
from rlvr_jax.models.rotary import (
  PartialFrequencies,
  RopeScaling,
  RotaryTables,
  YarnScaling,
  inverse_frequencies,
  rotary_tables,
  rotate,
)
from rlvr_jax.ops.attention import Keys, attention
from rlvr_jax.ops.delta_rule import DeltaInputs, DeltaState, mix_prompts, mix_rows
from rlvr_jax.ops.grouped import KINDS as GROUPED_KINDS
from rlvr_jax.ops.layers import (
  ATTENTION,
  DELTA,
  DENSE,
  FULL,
  SPARSE,
  STACKS,
  Heads,
  Kind,
  layers_in,
  rows_of,
  split_into_loops,
  stack_of,
  take_rows,
)
from rlvr_jax.ops.precision import PRECISIONS
from rlvr_jax.ops.row_attention import KINDS, RESIDUALS, row_attention
from rlvr_jax.ops.row_blocks import NO_WINDOW
from rlvr_jax.types import Array, Head, Params, Prompts, Routes, Rows

_ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
  "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}
# Names saved for the backward pass besides a layer's input. Attention's output is as small as the
# input but expensive to recompute. `none` saves everything.
_REMAT: dict[str, tuple[str, ...]] = {
  "none": (),
  "dots": (PRODUCT, RESIDUALS, ROUTES),
  "full": (RESIDUALS, ROUTES),
}
# Fields of `TransformerConfig` that change how a network is computed and stored, but not its
# function.
OF_COMPUTING = (
  *("compute_dtype", "matmul_precision", "param_dtype"),
  *("remat", "unroll_layers", "attention", "expert_products"),
)
_DELTA_SIZES = [field.name for field in dataclasses.fields(DeltaSettings)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int  # hidden width of the MLP; unused if all layers have experts
  activation: str = "silu"  # the gate's activation: silu (SwiGLU), gelu_tanh (GeGLU) or gelu
  norm_epsilon: float = 1e-6
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | YarnScaling | PartialFrequencies | None = None
  rotary_width: int | None = None  # a head's leading entries that rotate (GLM-4); None: all
  unrotated_layers: tuple[bool, ...] | None = None  # layers without rotation (SmolLM3); None: none
  tied_head: bool = True
  qk_norm: bool = False  # RMSNorm on each head's queries and keys (Qwen 3, Gemma 3)
  qkv_bias: bool = False  # biases of queries, keys and values (Qwen 2)
  output_bias: bool = False  # a bias of the projection after attention
  joint_qk_norm: bool = False  # RMSNorm on all heads' queries together, and on keys (OLMoE)
  mlp_bias: bool = False
  attention_gate: bool = False  # a sigmoid gate on attention's output (Qwen 3.5)
  value_norm: bool = False  # RMSNorm without weights on each head's values (Gemma 4)
  # Heads of full layers, if they differ from heads of sliding layers; None: all heads are alike.
  full_head_dim: int | None = None
  full_kv_heads: int | None = None
  full_keys_as_values: bool = False  # in full layers, values are keys before norm and rotation
  # Layers with a gated DeltaNet in place of attention, see `models.delta_net`; None: no layer.
  delta_layers: tuple[bool, ...] | None = None
  delta_key_heads: int = 0
  delta_value_heads: int = 0
  delta_key_dim: int = 0
  delta_value_dim: int = 0
  delta_num_taps: int = 0  # tokens that a DeltaNet's convolutions read
  num_experts: int = 0  # experts in a layer, see `models.experts`; 0: layers have an MLP
  experts_per_token: int = 0
  expert_width: int = 0
  sparse_layers: tuple[bool, ...] | None = None  # layers with experts; None: all layers
  shared_expert_width: int = 0  # width of an expert that all tokens use; 0: there is none
  normalized_expert_weights: bool = False  # weights of the chosen experts are divided by their sum
  query_scale: float | None = None  # factor on the attention scores; None: 1/√head_dim
  attention_soft_cap: float | None = None
  final_soft_cap: float | None = None
  sliding_window: int | None = None  # tokens that a sliding layer attends to
  sliding_layers: tuple[bool, ...] | None = None  # layers with a sliding window; None: none
  sliding_rope_theta: float | None = None  # θ of sliding layers, unscaled; None: as in full layers
  scaled_embedding: bool = False  # embeddings times √width (Gemma)
  zero_centered_norm: bool = False  # norm weights are stored as w, applied as 1 + w (Gemma)
  pre_norm: bool = True  # a norm before attention and before the MLP
  post_norm: bool = False  # norms after attention and after MLP: Gemma; without pre_norm, OLMo 2
  layer_scale: bool = False  # each layer's result times an untrained number (Gemma 4)
  compute_dtype: str = "float32"
  matmul_precision: str = "auto"  # float32 products: auto, highest, default
  param_dtype: str = "float32"
  # What the backward pass recomputes. none: nothing; dots: all but matmuls; full: whole layers.
  remat: str = "none"
  unroll_layers: int = 1  # layers per iteration of the layer scan; num_layers unrolls it fully
  attention: str = "auto"  # the kernel in training, one of `ops.row_attention.KINDS`
  expert_products: str = "auto"  # the grouped matmul, one of `ops.grouped.KINDS`

  def __post_init__(self):
    if mistake := next(self._find_mistakes(), None):
      raise ValueError(f"TransformerConfig: {mistake}")

  def _find_mistakes(self) -> Iterator[str]:
    """Yields a message for each mistake in the settings, with its remedy."""
    if self.activation not in _ACTIVATIONS:
      yield f"activation={self.activation!r}; allowed: {sorted(_ACTIVATIONS)}"
    if self.remat not in _REMAT:
      yield f"remat={self.remat!r}; allowed: {list(_REMAT)}"
    if self.attention not in KINDS:
      yield f"attention={self.attention!r}; allowed: {list(KINDS)}"
    if self.matmul_precision not in (allowed := ["auto", *PRECISIONS]):
      yield f"matmul_precision={self.matmul_precision!r}; allowed: {allowed}"
    if self.matmul_precision == "highest" and self.compute_dtype == "bfloat16":
      yield (
        "matmul_precision='highest' has no effect with compute_dtype='bfloat16': products of"
        " bfloat16 arrays are the same at every precision; choose 'auto', or"
        " compute_dtype='float32'"
      )
    sizes = "vocab_size width num_layers num_heads num_kv_heads head_dim mlp_width unroll_layers"
    for name in sizes.split():
      size = getattr(self, name)
      if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
        yield f"{name}={size!r} must be a whole number of at least 1 and below 2**31"
    if self.num_heads % self.num_kv_heads:
      yield f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
    if self.head_dim % 2:
      yield f"head_dim={self.head_dim} must be even for rotary embeddings"
    width = self.head_dim if self.rotary_width is None else self.rotary_width
    if not isinstance(width, int) or width % 2 or not 2 <= width <= self.head_dim:
      yield f"rotary_width={width!r} must be an even number from 2 to head_dim={self.head_dim}"
    yield from self._find_mistakes_of_full_layers()
    if not (self.pre_norm or self.post_norm):
      yield "pre_norm and post_norm are both false; set one or both, since a layer needs a norm"
    for name in ("compute_dtype", "param_dtype"):
      dtype = getattr(self, name)
      if dtype not in ("float32", "bfloat16", "float64"):
        yield f"{name}={dtype!r}; allowed: 'float32', 'bfloat16', 'float64'"
      wide = jnp.dtype(jax.dtypes.canonicalize_dtype("float64")) == jnp.dtype("float64")
      if dtype == "float64" and not wide:
        yield f"{name}=float64 needs jax_enable_x64; set the environment variable JAX_ENABLE_X64=1"
    for name in ("sliding_layers", "unrotated_layers", "delta_layers", "sparse_layers"):
      layers = getattr(self, name)
      if layers is not None and not isinstance(layers, tuple | list):
        yield f"{name}={layers!r} must have a truth value for each layer"
      elif layers is not None and len(layers) != self.num_layers:
        yield f"{name} has {len(layers)} entries, but num_layers={self.num_layers}"
    yield from self._find_mistakes_of_experts()
    if self.delta is not None:
      yield from self.delta.find_mistakes()
      if all(self.delta_layers or ()):
        yield f"delta_layers={self.delta_layers!r}: at least one layer must have attention"
    elif sizes := [name for name in _DELTA_SIZES if getattr(self, f"delta_{name}")]:
      yield (
        f"delta_{sizes[0]} is set, but no layer has a DeltaNet: delta_layers={self.delta_layers!r}"
      )
    yield from self._find_mistakes_of_numbers()

  def _find_mistakes_of_numbers(self) -> Iterator[str]:
    optional = ("sliding_rope_theta", "query_scale", "attention_soft_cap", "final_soft_cap")
    for name in ("norm_epsilon", "rope_theta", *optional):
      value = getattr(self, name)
      is_number = isinstance(value, int | float) and not isinstance(value, bool)
      is_unset = value is None and name in optional
      if not is_unset and not (is_number and 0 < value < math.inf):
        yield f"{name}={value!r} must be a number above 0{', or None' * (name in optional)}"
    window, slides = self.sliding_window, any(self.sliding_layers or ())
    if window is not None and (not isinstance(window, int) or window < 1):
      yield f"sliding_window={window!r} must be a whole number of at least 1"
    if window is None and slides:
      yield "sliding_layers are set, but sliding_window is None; set both, or neither"
    for name in ("sliding_window", "sliding_rope_theta"):
      if getattr(self, name) is not None and not slides:
        yield f"{name} is set, but no layer has a sliding window: set sliding_layers, or unset it"

  def _find_mistakes_of_full_layers(self) -> Iterator[str]:
    sizes = {name: getattr(self, name) for name in ("full_head_dim", "full_kv_heads")}
    if all(size is None for size in sizes.values()):
      if self.full_keys_as_values:
        yield (
          "full_keys_as_values is set, but full_head_dim is None; set full_head_dim and"
          " full_kv_heads, or unset full_keys_as_values"
        )
      return
    for name, size in sizes.items():
      if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < 2**31:
        yield f"{name}={size!r} must be at least 1; set full_head_dim and full_kv_heads, or neither"
    if self.num_heads % (self.full_kv_heads or 1):
      yield f"num_heads={self.num_heads} is not a multiple of full_kv_heads={self.full_kv_heads}"
    if (self.full_head_dim or 2) % 2:
      yield f"full_head_dim={self.full_head_dim} must be even for rotary embeddings"
    if self.rotary_width is not None:
      yield f"rotary_width={self.rotary_width} and full_head_dim are both set; set one of them"
    if all(self.sliding_layers or (False,)):
      yield (
        f"full_head_dim={self.full_head_dim} is set, but every layer has a sliding window:"
        f" sliding_layers={self.sliding_layers!r}"
      )

  def _find_mistakes_of_experts(self) -> Iterator[str]:
    if self.qk_norm and self.joint_qk_norm:
      yield "qk_norm and joint_qk_norm are both set; a network has one of them, or none"
    if self.expert_products not in GROUPED_KINDS:
      yield f"expert_products={self.expert_products!r}; allowed: {list(GROUPED_KINDS)}"
    if self.sparse_layers is not None and not (self.num_experts and any(self.sparse_layers)):
      yield (
        f"sparse_layers={self.sparse_layers!r} with num_experts={self.num_experts}: a mixture has"
        " num_experts > 0, and experts in at least one layer; without a mixture, set num_experts=0"
        " and sparse_layers=None"
      )
    for name in ("num_experts", "experts_per_token", "expert_width", "shared_expert_width"):
      size = getattr(self, name)
      if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**31:
        yield f"{name}={size!r} must be a whole number of at least 0 and below 2**31"
      elif size and not self.num_experts:
        yield f"{name}={size!r} is set, but num_experts=0, so that there are no experts"
    if self.experts is not None:
      yield from self.experts.find_mistakes()
      if self.mlp_bias:
        yield "mlp_bias is set, but experts have no biases"

  @property
  def experts(self) -> ExpertSettings | None:
    """The settings of the mixture; None: all layers have an MLP."""
    if not self.num_experts:
      return None
    # A run resolves "auto" for its platform before this; other callers get "blocks".
    products = "blocks" if self.expert_products == "auto" else self.expert_products
    return ExpertSettings(
      number=self.num_experts,
      per_token=self.experts_per_token,
      width=self.expert_width,
      shared_width=self.shared_expert_width,
      normalized_weights=self.normalized_expert_weights,
      products=products,
    )

  @property
  def delta(self) -> DeltaSettings | None:
    """The sizes of the gated DeltaNets; None: all layers have attention."""
    if not any(self.delta_layers or ()):
      return None
    return DeltaSettings(**{name: getattr(self, f"delta_{name}") for name in _DELTA_SIZES})

  @property
  def kinds(self) -> tuple[Kind, ...]:
    """The kind of each layer, see `ops.layers`."""
    none = (False,) * self.num_layers
    delta, slides = self.delta_layers or none, self.sliding_layers or none
    sparse = self.sparse_layers or (self.num_experts > 0,) * self.num_layers
    of_full = ATTENTION if self.full_head_dim is None else FULL
    mixers = (
      DELTA if has_delta else ATTENTION if is_near else of_full
      for has_delta, is_near in zip(delta, slides, strict=True)
    )
    return tuple(
      (mixer, SPARSE if has_experts else DENSE)
      for mixer, has_experts in zip(mixers, sparse, strict=True)
    )

  def heads_of(self, mixer: str) -> Heads:
    """The heads of a layer with this kind of attention."""
    if mixer == ATTENTION:
      return Heads(self.num_heads, self.num_kv_heads, self.head_dim)
    assert mixer == FULL and self.full_head_dim is not None and self.full_kv_heads is not None
    return Heads(self.num_heads, self.full_kv_heads, self.full_head_dim)

  @property
  def heads(self) -> tuple[Heads, ...]:
    """The heads of each layer with attention."""
    return tuple(self.heads_of(mixer) for mixer, _ in self.kinds if mixer != DELTA)

  @property
  def head_dims(self) -> tuple[int, ...]:
    """The distinct widths of heads."""
    return tuple({heads.width: None for heads in self.heads})

  @property
  def split_heads(self) -> int:
    """The largest number of devices that can share attention; a key/value head stays whole."""
    return math.gcd(self.num_kv_heads, self.full_kv_heads or 0)

  @property
  def mixture(self) -> tuple[int, ...]:
    """The sizes of the mixture of experts; routes that a sampler recorded must match these sizes.

    The sizes are the numbers of layers with experts, of experts, and of experts per token. If some
    layers have no experts, the indices of the layers with experts follow these numbers.
    """
    numbers = layers_in(SPARSE, self.kinds)
    sizes = len(numbers), self.num_experts, self.experts_per_token
    return sizes if len(numbers) == self.num_layers else (*sizes, *numbers)

  @property
  def routes(self) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of a token's routes: [sparse layers, k], unsigned; None without experts."""
    if not self.num_experts:
      return None
    dtype = jnp.uint8 if self.num_experts <= 2**8 else jnp.uint16
    layers = len(layers_in(SPARSE, self.kinds))
    return jax.ShapeDtypeStruct((layers, self.experts_per_token), dtype)

  @property
  def precision(self) -> str:
    """The precision of all products of the network: one of `ops.precision.PRECISIONS`."""
    default = "default" if self.compute_dtype == "bfloat16" else "highest"
    return default if self.matmul_precision == "auto" else self.matmul_precision


class RMSNorm(nnx.Module):
  def __init__(self, config: TransformerConfig, width: int):
    self.epsilon = config.norm_epsilon
    self.offset = 1.0 if config.zero_centered_norm else 0.0
    initial = jnp.zeros if config.zero_centered_norm else jnp.ones
    self.scale = nnx.Param(initial((width,), config.param_dtype))

  def __call__(self, x: Array) -> Array:
    normed = _normalize(x, self.epsilon)
    scale = self.scale[...].astype(normed.dtype) + self.offset
    return (normed * scale).astype(x.dtype)


def _normalize(x: Array, epsilon: float) -> Array:
  """x / √(mean x² + ε) over the last axis, at least float32."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return wide * jax.lax.rsqrt(mean_square + epsilon)


class Mixers(NamedTuple):
  """The functions that mix a layer's tokens: by attention, or by a gated DeltaNet.

  Each returns its results and a carry, such as attention's keys and values, or a DeltaNet's state.
  """

  attend: Callable[[Array, Array, Array], tuple[Array, Any]]  # takes queries, keys and values
  delta: Callable[[DeltaInputs], tuple[Array, Any]]


class _AttentionModule(nnx.Module):
  """The parameters of a layer's attention."""

  def _add_attention(
    self, c: TransformerConfig, heads: Heads, rngs: nnx.Rngs, *, has_value: bool = True
  ) -> None:
    queries, keys = heads.queries * heads.width, heads.keys * heads.width
    residual_gain = 1.0 / (2 * c.num_layers)  # the residual stream's variance stays near 1
    self.query = init_kernel(rngs, (c.width, queries), c.param_dtype)
    self.key = init_kernel(rngs, (c.width, keys), c.param_dtype)
    if has_value:
      self.value = init_kernel(rngs, (c.width, keys), c.param_dtype)
    self.output = init_kernel(rngs, (queries, c.width), c.param_dtype, residual_gain)
    if c.qkv_bias:
      self.query_bias = nnx.Param(jnp.zeros((queries,), c.param_dtype))
      self.key_bias = nnx.Param(jnp.zeros((keys,), c.param_dtype))
    if c.qkv_bias and has_value:
      self.value_bias = nnx.Param(jnp.zeros((keys,), c.param_dtype))
    if c.output_bias:
      self.output_bias = nnx.Param(jnp.zeros((c.width,), c.param_dtype))
    if c.qk_norm:
      self.query_norm = RMSNorm(c, heads.width)
      self.key_norm = RMSNorm(c, heads.width)
    if c.joint_qk_norm:
      self.query_norm = RMSNorm(c, queries)
      self.key_norm = RMSNorm(c, keys)
    if c.attention_gate:
      self.output_gate = init_kernel(rngs, (c.width, queries), c.param_dtype)


class FullAttention(_AttentionModule):
  """The parameters of attention in full layers whose heads differ from sliding layers' heads."""

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
    has_value = not config.full_keys_as_values
    self._add_attention(config, config.heads_of(FULL), rngs, has_value=has_value)


class Block(_AttentionModule):
  """One layer: attention or a gated DeltaNet, followed by a gated MLP or a mixture of MLPs.

  The results of both parts are added to the residual stream. Each part has norms before it, after
  it, or both.
  """

  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, *, stacks: Collection[str]):
    """Makes only the parameters in `stacks`, which may be those of several kinds of layers."""
    c = self.config = config
    self.is_delta, self.is_sparse = DELTA in stacks, SPARSE in stacks
    self.is_full = FULL in stacks
    residual_gain = 1.0 / (2 * c.num_layers)  # the residual stream's variance stays near 1
    sizes: Any = dict(width=c.width, dtype=c.param_dtype, residual_gain=residual_gain)
    if c.pre_norm:
      self.attention_norm = RMSNorm(c, c.width)
      self.mlp_norm = RMSNorm(c, c.width)
    if c.post_norm:
      self.post_attention_norm = RMSNorm(c, c.width)
      self.post_mlp_norm = RMSNorm(c, c.width)
    if c.layer_scale:
      self.layer_scale = nnx.Param(jnp.ones((1,), c.param_dtype))
    if ATTENTION in stacks:
      self._add_attention(c, c.heads_of(ATTENTION), rngs)
    if DENSE in stacks:
      self.gate = init_kernel(rngs, (c.width, c.mlp_width), c.param_dtype)
      self.up = init_kernel(rngs, (c.width, c.mlp_width), c.param_dtype)
      self.down = init_kernel(rngs, (c.mlp_width, c.width), c.param_dtype, residual_gain)
    if SPARSE in stacks:
      assert c.experts is not None  # the configuration has both
      self.experts = Experts(c.experts, rngs, **sizes)
    if DELTA in stacks:
      assert c.delta is not None
      self.delta = DeltaNet(c.delta, rngs, **sizes, norm_epsilon=c.norm_epsilon)
    if FULL in stacks:
      self.full = FullAttention(c, rngs)
    if c.mlp_bias:
      self.gate_bias = nnx.Param(jnp.zeros((c.mlp_width,), c.param_dtype))
      self.up_bias = nnx.Param(jnp.zeros((c.mlp_width,), c.param_dtype))
      self.down_bias = nnx.Param(jnp.zeros((c.width,), c.param_dtype))

  @property
  def heads(self) -> Heads:
    """The heads of the layer's attention."""
    return self.config.heads_of(FULL if self.is_full else ATTENTION)

  @jax.named_scope("layers")
  def __call__(
    self,
    x: Array,
    tables: tuple[Array, Array],
    mixers: Mixers,
    layout: Layout = ONE_DEVICE,
    *,
    routes: Array | None = None,
    real: Array | None = None,
  ) -> tuple[Array, Any, Routing | None]:
    """Applies the layer to x[R, L, D].

    Args:
      tables: the tables of the rotary embedding.
      mixers: the functions that mix tokens.
      layout: the layout of the residual stream, and the mesh of experts.
      routes, real: see `Experts`; ignored by an MLP.
    Returns:
      The next x, the mixer's carry, and the choice of experts, which is None for an MLP.
    """
    c = self.config
    residual = layout.residual
    normed = residual.gather(self.attention_norm(x) if c.pre_norm else x)
    if self.is_delta:
      mixed, carry = self.delta(normed, mixers.delta)
    else:
      mixed, carry = self._attention(normed, tables, mixers.attend)
    mixed = residual.scatter(mixed)
    x = x + (self.post_attention_norm(mixed) if c.post_norm else mixed)

    normed = residual.gather(self.mlp_norm(x) if c.pre_norm else x)
    routing = None
    if not self.is_sparse:
      gated = self._mlp(normed)
    else:
      gated, routing = self.experts(
        normed, _ACTIVATIONS[c.activation], routes=routes, real=real, mesh=layout.mesh
      )
    gated = residual.scatter(gated)
    x = x + (self.post_mlp_norm(gated) if c.post_norm else gated)
    if c.layer_scale:
      x = x * jax.lax.stop_gradient(self.layer_scale[...]).astype(x.dtype)
    return x, carry, routing

  def _attention(
    self, x: Array, tables: tuple[Array, Array], attend: Callable
  ) -> tuple[Array, Any]:
    """Attention's output, which is added to the residual stream, and attention's carry."""
    c = self.config
    w: Any = self.full if self.is_full else self  # this layer's kernels and norms
    bias = lambda name: getattr(w, name, None)
    heads = lambda y: y.reshape(*y.shape[:-1], -1, self.heads.width)
    query = dense(x, w.query, bias("query_bias"))
    key = value = dense(x, w.key, bias("key_bias"))
    if c.joint_qk_norm:
      query, key = w.query_norm(query), w.key_norm(key)
    query, key = heads(query), heads(key)
    if not (self.is_full and c.full_keys_as_values):
      value = dense(x, w.value, bias("value_bias"))
    value = heads(value)
    if c.qk_norm:
      query, key = w.query_norm(query), w.key_norm(key)
    if c.value_norm:
      value = _normalize(value, c.norm_epsilon).astype(value.dtype)
    with jax.named_scope("attention"):
      mixed, carry = attend(rotate(query, tables), rotate(key, tables), value)
    mixed = mixed.reshape(*mixed.shape[:-2], -1)
    if c.attention_gate:
      mixed = mixed * jax.nn.sigmoid(dense(x, w.output_gate))
    return dense(mixed, w.output, bias("output_bias")), carry

  def _mlp(self, x: Array) -> Array:
    bias = lambda name: getattr(self, name, None)
    gated = _ACTIVATIONS[self.config.activation](dense(x, self.gate, bias("gate_bias")))
    gated = gated * dense(x, self.up, bias("up_bias"))
    return dense(gated, self.down, bias("down_bias"))


def layer_graph(config: TransformerConfig, kind: Kind) -> Any:
  """The graph definition of a `Block`, which `nnx.merge` combines with a layer's parameters."""
  build = lambda: Block(config, nnx.Rngs(0), stacks=kind)
  return nnx.split(jax.eval_shape(build), nnx.Param)[0]


def _stack_layers(config: TransformerConfig, keys: Array) -> Block:
  """Initializes all layers, stacked as `ops.layers` says."""
  stacks = {stack for kind in config.kinds for stack in kind}
  stacked = jax.vmap(lambda key: Block(config, nnx.Rngs(key), stacks=stacks))(keys)
  if len(set(config.kinds)) == 1:
    return stacked
  graph, state = nnx.split(stacked, nnx.Param)
  of_layers = lambda name: np.asarray(layers_in(stack_of(name), config.kinds))
  taken = {
    name: jax.tree.map(operator.itemgetter(of_layers(name)), part)
    for name, part in nnx.to_pure_dict(state).items()
  }
  return nnx.merge(graph, taken)


class Transformer(nnx.Module):
  def __init__(self, config: TransformerConfig, rngs: nnx.Rngs, layout: Layout = ONE_DEVICE):
    c = self.config = config
    self.layout = layout
    if c.experts is not None:
      c.experts.check_mesh(layout.mesh)
    embedding = jax.random.normal(rngs.params(), (c.vocab_size, c.width), jnp.float32)
    # Rows of a tied embedding are also the head's, so they start with the head's fan-in variance.
    scale = c.width**-0.5 if c.tied_head else 1.0
    self.embedding = nnx.Param((embedding * scale).astype(c.param_dtype))
    keys = jax.random.split(rngs.params(), c.num_layers)
    self.blocks = _stack_layers(c, keys)
    self.final_norm = RMSNorm(c, c.width)
    if not c.tied_head:
      self.head_kernel = init_kernel(rngs, (c.width, c.vocab_size), c.param_dtype)

  def without_layers(self) -> Transformer:
    """The network without its layers; `prefill` and `decode` take the layers as an argument."""
    del self.blocks
    return self

  # The rest of the package calls these methods through functional.py.

  def head(self) -> Head:
    """The output head, kernel [D, V] in the parameters' dtype."""
    c = self.config
    weights = value_of(self.embedding if c.tied_head else self.head_kernel)
    assert not isinstance(weights, LowRank)  # layers alone are adapted
    kernel = weights.values if isinstance(weights, Rounded) else weights
    scale = weights.scale.reshape(-1) if isinstance(weights, Rounded) else 1.0
    return Head(kernel.T if c.tied_head else kernel, scale, c.final_soft_cap)

  def response_hidden(
    self,
    prompts: Prompts,
    tokens: Array,
    routes: Routes | None = None,
    lengths: Array | None = None,
  ) -> Array:
    """Final hidden states that predict each response token.

    Args:
      prompts: the P prompts, left-padded to S.
      tokens: i32[P, G, T], right-padded responses.
      routes: in a mixture, the experts to use in place of the routers' choice.
      lengths: i32[P, G], tokens of each response; None: T. In a mixture, the last token, which
        predicts nothing, and padding have no expert.
    Returns:
      [P, G, T, D] in the compute dtype; [..., t, :] predicts tokens[..., t].
    """
    return self._respond(prompts, tokens, routes, lengths)[0]

  def response_routed(
    self,
    prompts: Prompts,
    tokens: Array,
    routes: Routes | None = None,
    lengths: Array | None = None,
  ) -> tuple[Array, Routes, Array]:
    """Like `response_hidden`, for a mixture; also returns its routers' choice and probabilities.

    Returns:
      Hidden states; the routers' own routes, i32, even if `routes` replaces them; and each expert's
      probability, summed over the tokens, [sparse layers, E].
    """
    hidden, routing = self._respond(prompts, tokens, routes, lengths, routed=True)
    P, G, T = tokens.shape
    experts, sums = routing
    S = prompts.tokens.shape[1]
    responses = experts[:, S:].reshape(P, G, T - 1, *experts.shape[2:])
    # The last token is not computed, since it predicts nothing.
    last = ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))
    responses = jnp.pad(responses, last, constant_values=NO_EXPERT)
    return hidden, Routes(experts[:, :S], responses), sums

  def _respond(self, prompts, tokens, routes, lengths, routed=False):
    """The result of `response_hidden`, and the routing that `_scan_blocks` returns."""
    P, G, T = tokens.shape
    S = prompts.tokens.shape[1]
    inputs = tokens[:, :, :-1].reshape(P, -1)  # the last token predicts nothing
    positions = _prompt_positions(prompts)
    response_positions = prompts.lengths[:, None, None] + jnp.arange(T - 1)
    response_positions = jnp.broadcast_to(response_positions, (P, G, T - 1))
    pack = lambda x, y: jnp.concatenate([x, y.reshape(P, G * (T - 1), *y.shape[3:])], axis=1)
    x = self._embed(jnp.concatenate([prompts.tokens, inputs], axis=1))

    def mix(heads, slides):
      window = jnp.where(slides, self.config.sliding_window or NO_WINDOW, NO_WINDOW)

      def attend(query, key, value):
        in_response = lambda y: y[:, S:].reshape(P, G, T - 1, *y.shape[2:])
        in_prompt = lambda y: y[:, None, :S]
        prompt = Keys.of(in_prompt(key), in_prompt(value), positions[:, None])
        response = Keys.of(in_response(key), in_response(value), response_positions)
        settings = self._attention_settings(heads, window)
        prompt_out = attention(in_prompt(query), positions[:, None], (prompt,), **settings)[:, 0]
        response_out = attention(
          in_response(query), response_positions, (prompt, response), **settings
        ).reshape(P, -1, *query.shape[2:])
        return jnp.concatenate([prompt_out, response_out], axis=1), None

      return Mixers(attend, lambda inputs: (mix_rows(inputs, rows), None))

    exists = jnp.arange(1, T) < (T if lengths is None else lengths[..., None])
    real = pack(positions >= 0, jnp.broadcast_to(exists, response_positions.shape))
    starts = S + (T - 1) * jnp.arange(G)[:, None]
    rows = Rows(
      prompts=jnp.where(real, 0, -1),
      positions=pack(positions, response_positions),
      starts=pack(jnp.full_like(positions, S), jnp.broadcast_to(starts, response_positions.shape)),
      prompt_ends=jnp.full_like(real, S, jnp.int32),
    )
    x, routing = self._scan_blocks(
      x,
      rows.positions,
      mix,
      routes=None if routes is None else pack(routes.prompts, routes.responses[:, :, :-1]),
      real=real,
      routed=routed,
    )
    hidden = self.final_norm(jnp.concatenate([x[:, S - 1 : S], x[:, S:]], axis=1))
    first = jnp.broadcast_to(hidden[:, None, :1], (P, G, 1, hidden.shape[-1]))
    hidden = jnp.concatenate([first, hidden[:, 1:].reshape(P, G, T - 1, -1)], axis=2)
    return hidden, routing

  def row_hidden(self, tokens: Array, rows: Rows, routes: Array | None = None) -> Array:
    """Final hidden states of sequences that are packed into rows.

    Args:
      tokens: i32[R, L].
      rows: the sequences of the tokens; positions below L.
      routes: int[R, L, sparse layers, k]; in a mixture, the experts to use in place of the
        routers' choice.
    Returns:
      [R, L, D] in the compute dtype.
    """
    return self._run_rows(tokens, rows, routes)[0]

  def row_routed(
    self, tokens: Array, rows: Rows, routes: Array | None = None
  ) -> tuple[Array, Array, Array]:
    """Like `row_hidden`, for a mixture; also returns its routers' choice and probabilities.

    Returns:
      Hidden states; the routers' own routes i32[R, L, sparse layers, k], even if `routes` replaces
      them, with `NO_EXPERT` at padding; and each expert's probability, summed over the tokens,
      [sparse layers, E].
    """
    hidden, (routes, sums) = self._run_rows(tokens, rows, routes, routed=True)
    return hidden, routes, sums

  def _run_rows(self, tokens, rows, routes, routed=False):
    """The result of `row_hidden`, and the routing that `_scan_blocks` returns."""
    c = self.config
    window = c.sliding_window if any(c.sliding_layers or ()) else None
    kind = "reference" if c.attention == "auto" else c.attention  # a run resolves "auto" before

    def mix(heads, slides):
      settings = dict(self._attention_settings(heads, window), slides=slides, kind=kind)

      def attend(query, key, value):
        return row_attention(query, key, value, rows, **settings, mesh=self.layout.mesh), None

      return Mixers(attend, lambda inputs: (mix_rows(inputs, rows), None))

    x, routing = self._scan_blocks(
      self._embed(tokens),
      rows.positions,
      mix,
      routes=routes,
      real=rows.prompts >= 0,
      routed=routed,
    )
    return self.final_norm(x), routing

  def prefill(
    self,
    blocks: Sequence[Block],
    tokens: Array,
    lengths: Array | None = None,
    attended: Callable[[Array], Array] = lambda x: x,
  ) -> tuple[list[tuple[Array, Array]], list[DeltaState], Array | None]:
    """Computes the keys and values of prompts, and the states after the prompts.

    Args:
      blocks: the layers.
      tokens: i32[R, S], right-padded; results at padding have no meaning.
      lengths: i32[R], tokens of each prompt; None: S. Padding has no expert and no effect on a
        state.
      attended: maps keys or values [R, S, K, H] to those that attention reads, such as rounded
        ones.
    Returns:
      Per layer with attention, keys and values [R, S, K, H]; per gated DeltaNet, the states; and
      the routes of a mixture, i32[R, S, sparse layers, k].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    tables = self._look_up_tables(positions)
    real = None if lengths is None else positions < lengths[:, None]
    x = self._embed(tokens)
    cached: list[tuple[Array, Array]] = []
    states: list[DeltaState] = []
    routes: list[Routing | None] = []
    for block, window, *kind in zip(blocks, *self._layer_kinds(), strict=True):

      def attend(query, key, value, block=block, window=window):
        one = lambda y: y[:, None]
        keys = Keys.of(one(attended(key)), one(attended(value)), one(positions))
        settings = self._attention_settings(block.heads, window)
        out = attention(one(query), one(positions), (keys,), **settings)[:, 0]
        return out, (key, value)

      mixers = Mixers(attend, functools.partial(mix_prompts, lengths=lengths))
      x, kept, routing = block(x, tables.of_layer(*kind), mixers, self._whole_residual(), real=real)
      (states if block.is_delta else cached).append(kept)
      routes.append(routing)
    return cached, states, _stack_routes(routes)

  def decode(
    self,
    blocks: Sequence[Block],
    tokens: Array,
    tables: RotaryTables,
    attend: Callable,
    delta: Callable,
    running: Array | None = None,
  ) -> tuple[Array, list, list, Array | None]:
    """Runs the network on one token of every slot.

    Args:
      blocks: the layers, taken from their stacks once before the decoding loop.
      tokens: i32[slots].
      tables: rotary tables of these tokens' positions [slots, 1].
      attend: (index of a layer among those with attention, queries [slots, N, H], keys and values
        [slots, K, H], settings of attention) → (out [slots, N, H], carry).
      delta: (index of a layer among the gated DeltaNets, inputs) → (out [slots, 1, N, d_v], carry).
      running: bool[slots], the running slots; None: all slots. In a mixture, tokens of other slots
        have no expert.
    Returns:
      Final hidden states [slots, D], which predict the next tokens; the carries of the layers with
      attention and of the gated DeltaNets; and the routes of a mixture, i32[slots, sparse layers,
      k].
    """
    x = self._embed(tokens[:, None])  # [slots, 1, D]
    real = None if running is None else running[:, None]
    carries: list[Any] = []
    states: list[Any] = []
    routes: list[Routing | None] = []
    for block, window, *kind in zip(blocks, *self._layer_kinds(), strict=True):
      layer = len(carries)

      def mix(query, key, value, layer=layer, block=block, window=window):
        settings = self._attention_settings(block.heads, window)
        out, carry = attend(layer, query[:, 0], key[:, 0], value[:, 0], settings)
        return out[:, None], carry

      mixers = Mixers(mix, functools.partial(delta, len(states)))
      x, kept, routing = block(x, tables.of_layer(*kind), mixers, self._whole_residual(), real=real)
      (states if block.is_delta else carries).append(kept)
      routes.append(routing)
    chosen = _stack_routes(routes)
    hidden = self.final_norm(x[:, 0])
    return hidden, carries, states, None if chosen is None else chosen[:, 0]

  def _whole_residual(self) -> Layout:
    """The layout for inference, where each device has the complete residual stream."""
    return self.layout._replace(residual=ONE_DEVICE.residual)

  def _embed(self, tokens: Array) -> Array:
    with jax.named_scope("embedding"):
      weights = value_of(self.embedding)
      if isinstance(weights, Rounded):
        x = weights.values[tokens].astype(weights.scale.dtype) * weights.scale[tokens]
      else:
        x = weights[tokens]
      x = x.astype(self.config.compute_dtype)
    if self.config.scaled_embedding:
      # The factor itself is rounded to the compute dtype, as in the published models.
      x = x * jnp.asarray(self.config.width**0.5, x.dtype)
    return self.layout.constrain(x)

  def _attention_settings(self, heads, window):
    c = self.config
    scale = heads.width**-0.5 if c.query_scale is None else c.query_scale
    return dict(scale=scale, window=window, soft_cap=c.attention_soft_cap)

  def _look_up_tables(self, positions: Array) -> RotaryTables:
    """Looks up the rotary tables of positions i32[R, L] below L; negative positions count as 0.

    Without the lookup, XLA on CPU would compute cosines wherever they are used: for every head of
    every layer, forward and backward.
    """
    return make_rotary_tables(self.config, jnp.arange(positions.shape[1])).at(positions)

  def _layer_kinds(self) -> tuple[list[int], list[bool], list[bool]]:
    """For every layer: its window in tokens, whether it slides, and whether it lacks rotation."""
    c = self.config
    sliding = list(c.sliding_layers or [False] * c.num_layers)
    window = c.sliding_window or NO_WINDOW
    unrotated = list(c.unrotated_layers or [False] * c.num_layers)
    return [window if slides else NO_WINDOW for slides in sliding], sliding, unrotated

  def _scan_blocks(
    self,
    x: Array,
    positions: Array,
    mix: Callable[[Heads, Array | bool], Mixers],
    *,
    routes: Array | None,
    real: Array,
    routed: bool,
  ) -> tuple[Array, tuple[Array, Array] | None]:
    """Applies all layers to x[R, L, D].

    Args:
      positions: i32[R, L].
      mix: (heads of a layer, whether it has a sliding window) → functions that mix its tokens.
      routes: int[R, L, sparse layers, k]; None: the routers choose.
      real: bool[R, L], True at tokens, False at padding.
      routed: whether to return the routers' own routes i32[R, L, sparse layers, k], and the sum
        over the tokens of all experts' probabilities [sparse layers, E].
    """
    c = self.config
    tables = self._look_up_tables(positions)
    _, sliding, unrotated = self._layer_kinds()
    graphs = {kind: layer_graph(c, kind) for kind in set(c.kinds)}

    def apply(x, layer, kind):
      slides, routes = layer.pop("slides", kind[0] == ATTENTION), layer.pop(ROUTES, None)
      layer_tables = tables.of_layer(slides, layer.pop("unrotated", False))
      block = nnx.merge(graphs[kind], layer)
      mixers = mix(block.heads, slides)
      x, _, routing = block(x, layer_tables, mixers, self.layout, routes=routes, real=real)
      x = self.layout.residual.keep(x)
      if not routed or routing is None:
        return x, None
      probabilities = jnp.where(real[..., None], routing.probabilities, 0)
      return x, (routing.own, jnp.sum(probabilities, axis=(0, 1)))

    if c.remat != "none":
      policy = jax.checkpoint_policies.save_only_these_names(*_REMAT[c.remat])
      apply = jax.checkpoint(apply, policy=policy, static_argnums=2)
    stacks = nnx.to_pure_dict(nnx.split(self.blocks, nnx.Param)[1])
    if c.full_head_dim is None:  # else a layer's kind says whether it slides
      stacks["slides"] = jnp.asarray(sliding)
    if any(unrotated):
      stacks["unrotated"] = jnp.asarray(unrotated)
    if routes is not None:
      stacks[ROUTES] = jnp.moveaxis(routes, 2, 0)
    with jax.named_scope("layers"):  # including the operations of the loops themselves
      x = self.layout.residual.scatter(x)
      x, routing = _run_loops(apply, x, stacks, c.kinds, c.unroll_layers)
      x = self.layout.constrain(self.layout.residual.gather(x))
    if not routed:
      return x, None
    chosen, sums = routing
    return x, (jnp.moveaxis(chosen, 0, 2), sums)


def _run_loops(
  apply: Callable, x: Array, stacks: Params, kinds: Sequence[Kind], unroll: int
) -> tuple[Array, Any]:
  """Applies all layers to x, in the loops of `split_into_loops`.

  A stack whose layers are all in one loop is not copied. Other stacks are cut into one part per
  loop.

  Args:
    apply: (x, a layer's parts of the stacks, its kind) → (x, results or None).
    stacks: name → parameters or other values, stacked over the layers of `stack_of(name)`.
    kinds: the kinds of the layers.
    unroll: layers per iteration; a longer pattern is still one iteration.
  Returns:
    The last x, and the stacked results of the layers that returned some.
  """
  results = []
  first = dict.fromkeys(STACKS, 0)
  for pattern, count in split_into_loops(kinds):
    sizes = {stack: len(layers_in(stack, pattern)) for stack in first}
    parts = {}
    for name, stacked in stacks.items():
      stack = stack_of(name)
      cut = functools.partial(_cut, first=first[stack], count=count, size=sizes[stack])
      if sizes[stack]:
        parts[name] = jax.tree.map(cut, stacked)

    def body(x, parts, pattern=pattern, sizes=sizes):
      found = []
      for layer, kind in enumerate(pattern):
        rows = rows_of(layer, pattern)
        rows = {stack: row if sizes[stack] > 1 else None for stack, row in rows.items()}
        take = lambda part, row: part if row is None else part[row]
        x, result = apply(x, take_rows(parts, rows, take), kind)
        found += [] if result is None else [result]
      return x, jax.tree.map(lambda *y: jnp.stack(y), *found) if found else None

    x, result = jax.lax.scan(body, x, parts, unroll=min(count, max(1, unroll // len(pattern))))
    if result is not None:
      results.append(jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), result))
    first = {stack: row + count * sizes[stack] for stack, row in first.items()}
  return x, jax.tree.map(lambda *y: jnp.concatenate(y), *results) if results else None


def _cut(stacked: Array, *, first: int, count: int, size: int) -> Array:
  """Takes the layers of one loop from a stack: [count, size, …], or [count, …] if `size` is 1.

  If `size` is 1, nothing is reshaped: on a TPU, reshaping would need memory.
  """
  part = stacked if count * size == len(stacked) else stacked[first : first + count * size]
  return part if size == 1 else part.reshape(count, size, *part.shape[1:])


def _stack_routes(routing: Sequence[Routing | None]) -> Array | None:
  """The chosen experts of all layers, i32[R, L, sparse layers, k]; None if no layer has experts."""
  experts = [layer.experts for layer in routing if layer is not None]
  return jnp.stack(experts, axis=2) if experts else None


def make_rotary_tables(config: TransformerConfig, positions: Array) -> RotaryTables:
  """Makes the tables of positions i32[..., L], for full layers and for sliding layers."""
  c = config
  dtype = jnp.promote_types(c.compute_dtype, jnp.float32)

  def make_table(width, theta, scaling):
    frequencies = inverse_frequencies(c.rotary_width or width, theta, scaling, dtype)
    return rotary_tables(positions, frequencies, scaling)

  of_full = c.rope_theta, c.rope_scaling
  sliding = None
  if c.sliding_rope_theta is not None:
    sliding = make_table(c.head_dim, c.sliding_rope_theta, None)
  elif c.full_head_dim is not None:
    sliding = make_table(c.head_dim, *of_full)
  return RotaryTables(make_table(c.full_head_dim or c.head_dim, *of_full), sliding)


def _prompt_positions(prompts: Prompts) -> Array:
  """Positions i32[P, S] of prompts' tokens: 0 at the first real token, negative on left padding."""
  S = prompts.tokens.shape[1]
  return jnp.arange(S) - (S - prompts.lengths[:, None])
