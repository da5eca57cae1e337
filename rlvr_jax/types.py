"""One frozen record per stage of the pipeline, a shape on every field. No logic.

Axis legend, used in comments and as suffixes throughout the package:

  P  prompts in a batch                     G  rollouts per prompt (the group)
  B  rollouts, B = P·G                      S  prompt length after left-padding
  T  response length after right-padding    V  vocabulary
  D  model width                            N  attention heads
  K  key/value heads                        H  width of a head
  R  rows of packed sequences               L  tokens in a row, a multiple of 128
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax

Array = jax.Array
Params = Any  # nested dict of arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """The distribution tokens are drawn from; static under jit."""

  temperature: float = 1.0  # 0 is greedy decoding
  top_k: int = 0  # keep the k most probable tokens; 0 keeps all
  top_p: float = 1.0  # keep the smallest set of tokens with this much mass; 1 keeps all


class Head(NamedTuple):
  """Output head: logits = soft_cap(hidden @ kernel · scale)."""

  kernel: Array  # [D, V]
  scale: float = 1.0
  soft_cap: float | None = None  # c·tanh(z/c)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
  tokens: Array  # i32[P, S], left-padded
  lengths: Array  # i32[P], number of real tokens, 1 ≤ length ≤ S


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollouts:
  """What the sampler returns; token ids are the record, text is decoded for grading only."""

  tokens: Array  # i32[P, G, T], right-padded; the stop token is included
  lengths: Array  # i32[P, G], 1 ≤ length ≤ T
  stopped: Array  # bool[P, G], True: ended by a stop token, False: ended by the length limit
  behavior_logprobs: Array  # f32[P, G, T], under the distribution sampled from; 0 where padded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
  """Graded rollouts, ready for an update."""

  prompts: Prompts
  tokens: Array  # i32[P, G, T]
  mask: Array  # f32[P, G, T], 1 on response tokens that count in the loss (stop token included)
  behavior_logprobs: Array  # f32[P, G, T]
  rewards: Array  # f32[P, G]
  correct: Array  # f32[P, G] in {0, 1}
  reference_logprobs: Array | None = None  # f32[P, G, T], None without a reference policy
  proximal_logprobs: Array | None = None  # f32[P, G, T], None unless the loss is decoupled
  solve_rate: Array | None = None  # f32[P], all alike: mean correctness before any filter of groups
  lags: Array | None = None  # i32[P, G], updates since the behaviour policy; −1: not of this run
  sources: Array | None = None  # i32[P], number of the source that drew the group


class Rows(NamedTuple):
  """How sequences lie in rows of L tokens.

  A row holds one block for each of its prompts: the prompt, whose end is at a multiple of 128, then
  its rollouts, each starting at a multiple of 128. A token sees its own sequence up to itself: a
  rollout's token sees its prompt and its own rollout.
  """

  prompts: Array  # i32[R, L], prompt that a token belongs to, equal within a row; −1 on padding
  positions: Array  # i32[R, L], in the token's sequence (a rollout's follow its prompt's); 0 padded
  starts: Array  # i32[R, L], index where the token's rollout starts; of a prompt's token: its end
  prompt_ends: Array  # i32[R, L], index after the last token of the token's prompt


class Forward(NamedTuple):
  """What an update's own forward pass leaves behind for a Gram matrix of the head's gradients."""

  hidden: Array  # [P, G, T, D], final hidden states, in the model's compute dtype
  log_normalizers: Array  # f32[P, G, T], log Σ_v exp(z_v/τ)
  projected: Array | None  # f32[P, G, T, R], Σ_v d_v·R_v, see `geometry.GramFn.projection`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything an update reads and writes; checkpointed whole."""

  params: Params
  opt_state: Any
  advantage_state: Any  # () for stateless estimators
  step: Array  # i32[], updates tried
  skipped: Array  # i32[], updates skipped because a gradient was not finite
  skipped_in_a_row: Array  # i32[]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A metric that averages: Σ total / Σ weight."""

  total: Array
  weight: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
  value: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Min:
  value: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
  value: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EffectiveSampleSize:
  """(Σ w)² / (n·Σ w²) of importance weights w, from its three sums."""

  total: Array
  total_squares: Array
  count: Array


Metric = Mean | Max | Min | Sum | EffectiveSampleSize
Metrics = dict[str, Metric]
