"""Estimates, by arithmetic, of the memory that training and sampling take on one device.

The compiler's temporary buffers do not count. For the KV cache see `rollouts.decoder.slot_bytes`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.delta_rule import CHUNK
from rlvr_jax.ops.layers import DELTA, DENSE, layers_in
from rlvr_jax.ops.logprobs import default_chunk_rows
from rlvr_jax.ops.row_attention import DENSE_LENGTH


def shard_bytes(tree: Any) -> float:
  """Bytes of the shards of all leaves on one device.

  Args:
    tree: the tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
  """
  leaves = jax.tree.leaves(tree)
  return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves))


def decoding_copy_bytes(base: Any, compute_dtype: str) -> float:
  """Bytes of the parameters' copy for decoding; this copy is not sharded along fsdp.

  Args:
    base: all parameters, as for `shard_bytes`, on the mesh that generates rollouts.
    compute_dtype: the dtype of the copy.
  """

  def gather(x: Any) -> jax.ShapeDtypeStruct:
    spec = [None if axis == "fsdp" else axis for axis in x.sharding.spec]
    gathered = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec(*spec))
    dtype = x.dtype if x.dtype.itemsize == 1 else jnp.dtype(compute_dtype)  # 8 bits stay
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=gathered)

  return shard_bytes(jax.tree.map(gather, base))


def activation_bytes(config: TransformerConfig, tokens: float, tensor: int) -> float:
  """Bytes that the forward pass saves for the backward pass, plus twice one layer's activations.

  If the network has gated DeltaNets, `_delta_bytes` is added: with remat, for one gated DeltaNet;
  without remat, for each of them.

  Args:
    config: the network's settings.
    tokens: the tokens of a micro-batch on one device.
    tensor: number of devices that share a layer.
  """
  layers = [config.width + _product_widths(config, *kind) for kind in config.kinds]
  saved = {"full": lambda _: config.width, "dots": lambda x: x, "none": lambda x: 2 * x}
  numbers = sum(map(saved[config.remat], layers)) + 4 * max(layers)
  saved_bytes = tokens * numbers * jnp.dtype(config.compute_dtype).itemsize
  delta_layers = len(layers_in(DELTA, config.kinds)) if config.remat == "none" else 1
  return (saved_bytes + delta_layers * _delta_bytes(config, tokens)) / tensor


def forward_bytes(config: TransformerConfig, tokens: float, tensor: int) -> float:
  """Bytes of a forward pass without gradient: twice the largest layer's activations.

  Args:
    config, tokens, tensor: see `activation_bytes`.
  """
  largest = max(config.width + _product_widths(config, *kind) for kind in config.kinds)
  numbers = 2 * tokens * largest * jnp.dtype(config.compute_dtype).itemsize
  return (numbers + _delta_bytes(config, tokens)) / tensor


def unfused_bytes(config: TransformerConfig, tokens: float, row_length: int) -> float:
  """Bytes that the compiler for CPUs keeps in addition to `activation_bytes`; 0 with remat.

  The compiler keeps the operands of element-wise operations. These are about as many values as all
  matrix products return together. If rows are short, the compiler also keeps the attention scores
  of all pairs of tokens.

  Args:
    config, tokens: see `activation_bytes`.
    row_length: tokens per row.
  """
  if config.remat != "none":
    return 0.0
  products = sum(_product_widths(config, *kind) for kind in config.kinds)
  scores = len(config.heads) * config.num_heads * row_length if row_length < DENSE_LENGTH else 0
  return float(tokens * (products + scores) * jnp.dtype(config.compute_dtype).itemsize)


def _product_widths(config: TransformerConfig, mixer: str, mlp: str) -> int:
  """The number of elements per token in the results of a layer's matrix products."""
  c = config
  if mixer != DELTA:
    heads = c.heads_of(mixer)
    gate = heads.queries if c.attention_gate else 0
    # Values made from the key's product are normed, so they take as much memory as values of their
    # own.
    of_mixer = (heads.queries + 2 * heads.keys + gate) * heads.width + c.width
  else:
    assert c.delta is not None
    of_mixer = sum(c.delta.channels) + c.delta.channels[-1] + 2 * c.delta.value_heads + c.width
  if mlp == DENSE:
    return of_mixer + c.width + 2 * c.mlp_width  # down; gate, up
  # Results of gate, up and down of each chosen expert.
  chosen = c.experts_per_token * (c.width + 2 * c.expert_width)
  shared = c.width + 2 * c.shared_expert_width if c.shared_expert_width else 0
  return of_mixer + c.num_experts + chosen + shared


def _delta_bytes(config: TransformerConfig, tokens: float) -> float:
  """Bytes of float32 that one gated DeltaNet keeps for its backward pass.

  It keeps the states between chunks, the results of its convolutions, and for each head the inverse
  matrix of a chunk and the changes of the state.
  """
  sizes = config.delta
  if sizes is None:
    return 0.0
  states = 2 * sizes.value_heads * sizes.key_dim * sizes.value_dim  # a rollout's, its prompt's
  heads = sizes.value_heads * (CHUNK + sizes.value_dim)
  return tokens * 4 * (states / CHUNK + sum(sizes.channels) + heads)


def output_head_bytes(
  config: TransformerConfig, tokens: float, tensor: int, *, backward: bool = True
) -> float:
  """Bytes of the head's kernel and of a chunk's float32 logits; `backward` adds their gradients.

  Args:
    config, tokens, tensor: see `activation_bytes`.
    backward: whether gradients are computed, in float32.
  """
  rows = min(default_chunk_rows(config.vocab_size), tokens)
  kernel = config.width * (jnp.dtype(config.compute_dtype).itemsize + 4 * backward)
  return float((4 * rows * (1 + backward) + kernel) * config.vocab_size / tensor)


def sampling_bytes(config: TransformerConfig, slots: int) -> float:
  """Bytes of the float32 logits of one token per slot on a device, and of a copy of them."""
  return float(slots * config.vocab_size * 4 * 2)
