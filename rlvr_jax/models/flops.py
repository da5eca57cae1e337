"""Model FLOPs: the necessary arithmetic of a policy, independent of the implementation.

Each matrix product counts as 2·M·N·K, over real tokens and the keys that real tokens attend to. The
state of a gated DeltaNet counts as in its recurrence: for each token, two products of the state
with a vector. The chunks of `ops.delta_rule` compute other products, which do not count. The outer
product that changes the state counts as an elementwise operation. Padding, masked scores,
rematerialization and elementwise operations do not count.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.ops.layers import DELTA, DENSE, FULL, layers_in
from rlvr_jax.types import Params


class _Forward(NamedTuple):
  """FLOPs of a forward pass, grouped by their cost in the backward pass."""

  kernels: float  # products with weights
  attention: float  # products of two activations
  tokens: float  # number of tokens that the layers process


def forward_flops(
  config: TransformerConfig,
  prompt_lengths: npt.ArrayLike,
  response_lengths: npt.ArrayLike,
  *,
  predicted: npt.ArrayLike | None = None,
  shared_prompt: bool = True,
) -> float:
  """FLOPs of computing the logits of every response token, in generation or in scoring.

  With a prompt of s tokens and a response of t tokens, the layers process s + t − 1 tokens, since
  the last token predicts nothing, and the head is applied at t positions. Generation with a KV
  cache costs the same. A dialogue counts as one response with the tokens of all turns; the head is
  applied only to the policy's tokens. A sampler may recompute a KV cache after a reply, or for new
  weights; this recomputation does not count.

  Args:
    config: the network's settings.
    prompt_lengths: i32[P], tokens, at least 1.
    response_lengths: i32[P, G], tokens; an empty response costs nothing.
    predicted: i32[P, G], number of the policy's tokens in each response; None: all tokens.
    shared_prompt: whether a prompt is computed once for its G responses, as in this package, or
      once for each response.
  Returns:
    FLOPs of all P·G responses.
  Raises:
    ValueError: an array has another shape, a length is too small, or `predicted` exceeds a length.
  """
  lengths = (prompt_lengths, response_lengths, predicted)
  forward = _forward(config, *lengths, shared_prompt=shared_prompt)
  return forward.kernels + forward.attention


def update_flops(
  config: TransformerConfig,
  prompt_lengths: npt.ArrayLike,
  response_lengths: npt.ArrayLike,
  *,
  predicted: npt.ArrayLike | None = None,
  adapters: Params | None = None,
) -> float:
  """FLOPs of one gradient computation: the forward pass and the backward pass.

  A matrix product has two gradients, each as expensive as the product. For a frozen kernel only the
  gradient with respect to its input is computed.

  Args:
    config, prompt_lengths, response_lengths, predicted: as in `forward_flops`.
    adapters: low-rank adapters or their shapes, if the kernels are frozen.
  """
  forward = _forward(config, prompt_lengths, response_lengths, predicted, shared_prompt=True)
  if adapters is None:
    return 3 * (forward.kernels + forward.attention)
  low_rank = 2 * forward.tokens * sum(leaf.size for leaf in jax.tree.leaves(adapters))
  return 2 * forward.kernels + 3 * (forward.attention + low_rank)


def _forward(
  config: TransformerConfig,
  prompt_lengths: npt.ArrayLike,
  response_lengths: npt.ArrayLike,
  predicted: npt.ArrayLike | None,
  *,
  shared_prompt: bool,
) -> _Forward:
  s, t = np.asarray(prompt_lengths, np.int64), np.asarray(response_lengths, np.int64)
  if s.ndim != 1 or t.ndim != 2 or s.shape != t.shape[:1]:
    raise ValueError(
      f"forward_flops: prompt_lengths has shape {list(s.shape)} and response_lengths has shape"
      f" {list(t.shape)}; the shapes must be [P] and [P, G]"
    )
  of_policy = t if predicted is None else np.asarray(predicted, np.int64)
  if of_policy.shape != t.shape or np.any(of_policy > t):
    raise ValueError(
      f"forward_flops: predicted has shape {list(of_policy.shape)}; it must have the shape of"
      f" response_lengths, {list(t.shape)}, and no value above the length of its response"
    )
  shortest = np.min(s, initial=1), np.min(t, initial=0)
  if shortest[0] < 1 or shortest[1] < 0:
    raise ValueError(
      f"forward_flops: the shortest prompt has {shortest[0]} tokens and the shortest response"
      f" {shortest[1]}; a prompt must have at least 1 token, and a response at least 0"
    )
  copies = 1 if shared_prompt else t.shape[1]
  prompts = s[:, None]
  ends = prompts + np.maximum(t - 1, 0)
  tokens = copies * s.sum() + np.sum(ends - prompts)

  def attended_keys(window):
    by_responses = _attended_keys(ends, window) - _attended_keys(prompts, window)
    return copies * _attended_keys(s, window).sum() + by_responses.sum()

  c = config
  mixing = sum(  # q·k and the weighted sum of v
    4 * heads.queries * heads.width * float(attended_keys(window))
    for heads, window in zip(c.heads, _windows(c), strict=True)
  )
  mixing += len(layers_in(DELTA, c.kinds)) * _recurrence_flops_per_token(c) * float(tokens)
  head = 2.0 * c.width * c.vocab_size * float(of_policy.sum())
  layers = sum(_layer_flops_per_token(c, *kind) for kind in c.kinds)
  kernels = layers * float(tokens) + head
  return _Forward(kernels, mixing, float(tokens))


def _layer_flops_per_token(c: TransformerConfig, mixer: str, mlp: str) -> float:
  """FLOPs per token of one layer's projections; only the experts that a token chooses count."""
  if mixer != DELTA:
    heads = c.heads_of(mixer)
    queries, keys = heads.queries * heads.width, heads.keys * heads.width
    gate = queries if c.attention_gate else 0
    has_value = not (mixer == FULL and c.full_keys_as_values)
    # Kernels of query and output, of key and value, and of the gate.
    of_mixer = c.width * (2 * queries + (1 + has_value) * keys + gate)
  else:
    assert c.delta is not None
    values, gates = c.delta.channels[-1], 2 * c.delta.value_heads
    of_mixer = c.width * (sum(c.delta.channels) + 2 * values + gates)  # gate, output
  if mlp == DENSE:
    return 2.0 * (of_mixer + 3 * c.width * c.mlp_width)
  chosen = c.experts_per_token * 3 * c.width * c.expert_width
  shared = c.width * (3 * c.shared_expert_width + (c.shared_expert_width > 0))  # and its gate
  return 2.0 * (of_mixer + c.width * c.num_experts + chosen + shared)  # the router; experts


def _recurrence_flops_per_token(c: TransformerConfig) -> float:
  """FLOPs per token of reading a gated DeltaNet's state, once by the key and once by the query."""
  sizes = c.delta
  return 0.0 if sizes is None else 4.0 * sizes.value_heads * sizes.key_dim * sizes.value_dim


def _attended_keys(lengths: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
  """The sum, over the first n tokens, of the number of keys that a token attends to.

  A token attends to at most `window` keys.
  """
  near = lengths if window is None else np.minimum(lengths, window)
  return near * (near + 1) // 2 + (lengths - near) * near


def _windows(c: TransformerConfig) -> list[int | None]:
  """The window of each layer with attention, in tokens; None without a limit."""
  sliding = c.sliding_layers or [False] * c.num_layers
  mixers = [mixer for mixer, _ in c.kinds]
  of_layers = zip(mixers, sliding, strict=True)
  return [c.sliding_window if slides else None for mixer, slides in of_layers if mixer != DELTA]
