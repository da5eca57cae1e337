"""The records that pass between the package's folders, with a shape for every field.

Records of sampling are in `rollouts.group` and `rollouts.batches`.

Axis legend, used in comments and docstrings throughout the package:

  P  prompts in a batch                     G  rollouts per prompt (the group)
  B  rollouts, B = P·G                      S  prompt length after left-padding
  T  response length after right-padding    V  vocabulary
  D  model width                            N  attention heads
  K  key/value heads                        H  width of a head
  R  rows of a micro-batch                  L  positions in a row
  M  micro-batches of a batch               C  columns of a random projection
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax

from rlvr_jax.sampling import Sampling as Sampling

Array = jax.Array
Params = Any  # nested dict of arrays
Tree = TypeVar("Tree")  # a pytree of any structure, which the function keeps


# Fields of a `TrainBatch` that are None unless the advantage names them in its `needs`.
RECORDED = ("rewards_by_name", "turn_scores")  # recorded by graders and environments
# Measured by the update's first phase, with the parameters before the update.
MEASURED = ("policy_logprobs", "squared_probabilities", "squared_norms")


class BatchShape(NamedTuple):
  """The sizes of the largest batch of a run."""

  prompts: int  # P
  group_size: int  # G
  max_prompt_length: int  # S, tokens
  max_response_length: int  # T, tokens

  @property
  def responses(self) -> int:
    """The number of rollouts, P·G."""
    return self.prompts * self.group_size


class Head(NamedTuple):
  """The output head: logits = soft_cap(hidden @ kernel · scale)."""

  kernel: Array  # [D, V]
  scale: float | Array = 1.0  # [V] if the kernel is quantized to 8 bits
  soft_cap: float | None = None  # c·tanh(z/c)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
  tokens: Array  # i32[P, S], left-padded
  lengths: Array  # i32[P], number of real tokens, 1 ≤ length ≤ S


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
  """Graded rollouts, ready for an update."""

  prompts: Prompts
  tokens: Array  # i32[P, G, T], right-padded; the stop token is included
  # f32[P, G, T], 1 on response tokens that count in the loss (stop token included); 0 on tokens of
  # an environment
  mask: Array
  # f32[P, G, T], under the distribution that was sampled from; 0 where padded, or not sampled
  behavior_logprobs: Array
  rewards: Array  # f32[P, G], 0 where not valid
  correct: Array  # f32[P, G] in {0, 1}, 0 where not valid
  # bool[P, G], False for a rollout without a grade, for instance if the grader crashed; no result
  # depends on such a rollout. A rollout that the loss excludes for another reason, such as length,
  # is valid.
  valid: Array
  reference_logprobs: Array | None = None  # f32[P, G, T], None without a reference policy
  proximal_logprobs: Array | None = None  # f32[P, G, T], None unless the loss needs them
  # The next two are nats; None without a teacher, or if the update computes the teacher's values.
  teacher_logprobs: Array | None = None  # f32[P, G, T], the teacher's log-probability of each token
  teacher_entropy: Array | None = None  # f32[P, G, T], entropy of the teacher's distribution
  # f32[P, G, T], divergence of the policy from the teacher at each token, computed in the update;
  # gradients flow through the policy
  teacher_divergence: Array | None = None
  teachers: Array | None = None  # i32[P], index of a group's teacher; None if there is one teacher
  # f32[P], equal for all groups: `rollouts.grading.mean_solve_rate` before groups are filtered
  solve_rate: Array | None = None
  # i32[P, G, T], number of updates since the policy that sampled a token; −1: not of this run
  lags: Array | None = None
  # i32[P, G, T], in dialogues, the number of a token's turn: 0 is the policy's first turn, 1 the
  # environment's reply to it, 2 the policy's second turn, and so on; 0 where padded. None without
  # dialogues. Most updates only check whether `turns` is None: if it is not None, the head skips
  # positions that predict no token.
  turns: Array | None = None
  # f32[P, G, T], in dialogues, the environment's score of a turn of the policy, at the last token
  # of this turn; NaN elsewhere, and where the score is the score of the whole dialogue. In an
  # update, None unless the advantage needs it.
  turn_scores: Array | None = None
  # f32[P, G, K], the scores of K graders, the main one first, then those of config.grading.extra;
  # 0 where not valid
  rewards_by_name: Array | None = None
  # The next three are measured by the update's first phase with the parameters before the update,
  # and constant for differentiation; None unless the advantage needs them.
  policy_logprobs: Array | None = None  # f32[P, G, T], nats, at config.policy_temperature
  squared_probabilities: Array | None = None  # f32[P, G, T], Σ_v π(v)² where a token was sampled
  squared_norms: Array | None = None  # f32[P, G], ‖g_i‖², the diagonal of the Gram matrix
  sources: Array | None = None  # i32[P], index of the source that sampled the group
  packed: Packed | None = None  # the rollouts in rows; None: padded, [P, G, S + T]
  # f32[P, G, T], log-probabilities under the distribution that was sampled from, if
  # `behavior_logprobs` are under another (config.sources.temperature.recorded = "raw"). Only the
  # store has this array; no update reads it.
  sampled_logprobs: Array | None = None
  # The next two are the recorded routes of a mixture of experts, as unsigned integers: the k
  # experts that each layer's router chose at the position that predicts a token, in order of
  # decreasing probability; 0 where padded. None if routes are not recorded, or are already in
  # `packed`.
  routes: Array | None = None  # [P, G, T, layers, k]; at t = 0 those of the prompt's last token
  prompt_routes: Array | None = None  # [P, S, layers, k], left-padded; 0 at the last token
  # i32[P, G, T], if weights may change within a response: the version of the policy that sampled a
  # token; −1 where padded, or not sampled. Only the store has this array; updates read `lags`.
  token_versions: Array | None = None


class Rows(NamedTuple):
  """The layout of sequences in rows of L positions; every field is i32[..., R, L].

  A row holds one block for each of its prompts: the prompt, then its rollouts. A token attends to
  itself and to the earlier tokens of its sequence. A rollout's sequence is its prompt, then its own
  tokens.
  """

  prompts: Array  # index of the prompt that a token belongs to; −1 on padding
  positions: Array  # the token's position, counted from the start of its prompt; 0 on padding
  starts: Array  # index in the row where the token's rollout starts; `prompt_ends` in prompts
  prompt_ends: Array  # index in the row after the last token of the token's prompt


class Routes(NamedTuple):
  """The k experts that each layer's router chose for a token, in order of decreasing probability.

  A choice is at the position of the input token, not of the predicted token. The dtype is an
  integer that can hold the number of experts; entries at padding have no meaning.
  """

  prompts: Array  # [P, S, layers, k], left-padded
  responses: Array  # [P, G, T, layers, k], right-padded; a response's last token has no routes


class Packed(NamedTuple):
  """A batch's rollouts in M micro-batches of R rows each, see `rollouts.packing`."""

  tokens: Array  # i32[M, R, L], inputs
  targets: Array  # i32[M, R, L], response token that a position predicts; 0 if it predicts none
  rows: Rows  # [M, R, L]
  # i32[P, G, T], index in M·R·L of the position that predicts a token; −1 if no position does
  places: Array
  num_micro_batches: Array  # i32[], ≤ M; later micro-batches are empty
  # i32[], number of short micro-batches, which come last among the `num_micro_batches`. Their
  # tokens are in the first `ops.row_blocks.short_row(L)` positions of each row. None if the layout
  # has no short rows.
  num_short: Array | None = None
  routes: Array | None = None  # [M, R, L, layers, k], see `TrainBatch.routes`; 0 on padding


class Forward(NamedTuple):
  """Results of an update's forward pass that a Gram matrix of the head's gradients needs.

  The results stay in their rows, see `Packed`. In a batch that is not packed, rollouts are rows: M
  = 1, R = P·G and L = T.
  """

  hidden: Array  # [M, R, L, D], final hidden states, in the model's compute dtype
  log_normalizers: Array  # f32[M, R, L], log Σ_v exp(z_v/τ)
  projected: Array | None  # f32[M, R, L, C], Σ_v d_v·R_v, see `geometry.GramFn.projection`
  logprobs: Array | None = None  # f32[M, R, L], log π of the targets


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that an update reads and writes; checkpoints contain all of it."""

  params: Params
  opt_state: Any
  advantage_state: Any  # () for stateless estimators
  step: Array  # i32[], updates attempted
  skipped: Array  # i32[], updates skipped because a gradient was not finite
  skipped_in_a_row: Array  # i32[]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A metric that averages: Σ total / Σ weight."""

  total: Array
  weight: Array
  # [P, G, T], bool or in [0, 1]: each token's value in this mean; None if the metric has no values
  # per token. Diagnostics read them; an update drops them, see `ops.reductions.without_tokens`.
  tokens: Array | None = None


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
  """(Σ w)² / (n·Σ w²) of importance weights w, from Σ w, Σ w² and n."""

  total: Array
  total_squares: Array
  count: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertChoices:
  """A statistic of token counts of experts, averaged over the layers of a mixture of experts."""

  choices: Array  # f32[layers, E], number of tokens that chose each expert
  # "entropy": entropy of the experts' shares, ÷ log E; "largest": largest share, times E; "unused":
  # fraction of experts that no token chose
  statistic: str = dataclasses.field(metadata=dict(static=True))


Metric = Mean | Max | Min | Sum | EffectiveSampleSize | ExpertChoices
Metrics = dict[str, Metric]
