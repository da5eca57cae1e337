"""The records that pass between the package's folders, with a shape for every field.

Records of sampling are in `rollouts.group` and `rollouts.batches`.

Axis legend, used in comments and as suffixes throughout the package:

  P  prompts in a batch                     G  rollouts per prompt (the group)
  B  rollouts, B = P·G                      S  prompt length after left-padding
  T  response length after right-padding    V  vocabulary
  D  model width                            N  attention heads
  K  key/value heads                        H  width of a head
  R  rows of a micro-batch                  L  places in a row
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
RECORDED = ("rewards_by_name", "turn_scores")  # with the rollouts, by graders and environments
# Of the policy before the update, by the update's first phase.
MEASURED = ("policy_logprobs", "squared_probabilities", "squared_norms")


class BatchShape(NamedTuple):
  """The largest batch of a run."""

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
  scale: float | Array = 1.0  # or [V], of a kernel in 8 bits
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
  # f32[P, G, T], 1 on response tokens that count in the loss (stop token included); 0 on those of
  # an environment
  mask: Array
  # f32[P, G, T], under the distribution sampled from; 0 where padded, or not sampled
  behavior_logprobs: Array
  rewards: Array  # f32[P, G], 0 where not valid
  correct: Array  # f32[P, G] in {0, 1}, 0 where not valid
  # bool[P, G], False: without a grade, as where a grader crashed; no result depends on such a
  # rollout. One that the loss leaves out for another reason, such as its length, is valid.
  valid: Array
  reference_logprobs: Array | None = None  # f32[P, G, T], None without a reference policy
  proximal_logprobs: Array | None = None  # f32[P, G, T], None unless the loss is decoupled
  # Of the teacher's distribution, nats; None without one, or where the update computes them.
  teacher_logprobs: Array | None = None  # f32[P, G, T], of the tokens
  teacher_entropy: Array | None = None  # f32[P, G, T]
  # f32[P, G, T], of π from τ at the place, computed in the update; its gradient goes through π
  teacher_divergence: Array | None = None
  teachers: Array | None = None  # i32[P], number of a group's teacher; None: there is one
  # f32[P], all equal: see `rollouts.grading.mean_solve_rate`, before any filter of groups
  solve_rate: Array | None = None
  # i32[P, G, T], updates since the policy that sampled a token; −1: not of this run
  lags: Array | None = None
  # i32[P, G, T], of dialogues, the number of the turn that a token belongs to: 0 is the policy's
  # first, 1 the environment's reply to it, 2 the policy's second, and so on; 0 where padded. None:
  # one turn of the policy. Most updates ask only whether there are any: if so, the head leaves out
  # places that predict nothing.
  turns: Array | None = None
  # f32[P, G, T], of dialogues, the environment's score of a turn of the policy, as far as it is not
  # that of the dialogue, at the turn's last token; NaN elsewhere. In an update only where the
  # advantage reads them.
  turn_scores: Array | None = None
  # f32[P, G, K], the scores of K graders, the main one first, then those of config.grading.extra;
  # 0 where not valid
  rewards_by_name: Array | None = None
  # What an update's first phase measures of the policy before the update, constants; None unless
  # the advantage needs it
  policy_logprobs: Array | None = None  # f32[P, G, T], nats, at config.policy_temperature
  squared_probabilities: Array | None = None  # f32[P, G, T], Σ_v π(v)² where a token was sampled
  squared_norms: Array | None = None  # f32[P, G], ‖g_i‖², the diagonal of the Gram matrix
  sources: Array | None = None  # i32[P], index of the source that sampled the group
  packed: Packed | None = None  # the rollouts in rows; None: padded, [P, G, S + T]
  # f32[P, G, T], under the distribution sampled from, where `behavior_logprobs` deliberately are
  # others (config.sources.temperature.recorded); in the store only, no update reads them.
  sampled_logprobs: Array | None = None
  # Of a mixture whose routes are recorded, unsigned integers: the experts that its routers chose, k
  # in each layer, by falling probability, at the place that predicts a token; 0 where padded. None
  # once they are in `packed`.
  routes: Array | None = None  # [P, G, T, layers, k]; the first is that of the prompt's last token
  prompt_routes: Array | None = None  # [P, S, layers, k], left-padded, without the last token's: 0
  # i32[P, G, T], where weights may change within a response: the version of the policy that sampled
  # a token; −1 where padded, or not sampled. In the store only, updates read `lags`.
  token_versions: Array | None = None


class Rows(NamedTuple):
  """The layout of sequences in rows of L places; every field is i32[..., R, L].

  A row holds one block for each of its prompts: the prompt, then its rollouts. A token sees its own
  sequence up to itself: a rollout's token sees its prompt and its own rollout.
  """

  prompts: Array  # prompt that a token belongs to; −1 on padding
  positions: Array  # in the token's sequence, where a rollout's follow its prompt's; 0 on padding
  starts: Array  # index in the row where the token's rollout starts; of a prompt's token, its end
  prompt_ends: Array  # index in the row after the last token of the token's prompt


class Routes(NamedTuple):
  """The k experts that a mixture's routers chose in each of its layers, by falling probability.

  A choice is at the place of the input token, not of the predicted token. The dtype is an integer
  that can hold the number of experts; entries at padding have no meaning.
  """

  prompts: Array  # [P, S, layers, k], left-padded
  responses: Array  # [P, G, T, layers, k], right-padded; the last token of a response has none


class Packed(NamedTuple):
  """A batch's rollouts in M micro-batches of R rows each, see `rollouts.packing`."""

  tokens: Array  # i32[M, R, L], inputs
  targets: Array  # i32[M, R, L], the response token that a place predicts; 0 where none
  rows: Rows  # [M, R, L]
  places: Array  # i32[P, G, T], of M·R·L, where a response token is predicted; −1: nowhere
  num_micro_batches: Array  # i32[], ≤ M; those behind are empty
  # i32[], of the last micro-batches that are not empty: their rows' first places, of which
  # `ops.row_blocks.short_row` says how many, hold everything. None: there never are any.
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
  # [P, G, T], bool or in [0, 1]: what it averages, where that is a mark on each token. Diagnostics
  # read it; an update drops it, see `ops.reductions.without_tokens`.
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
  """(Σ w)² / (n·Σ w²) of importance weights w, from its three sums."""

  total: Array
  total_squares: Array
  count: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertChoices:
  """A statistic of the number of tokens per expert, averaged over the layers of a mixture."""

  choices: Array  # f32[layers, E]
  # entropy: of the shares, ÷ log E; largest: the largest share, times E; unused: share of experts
  # that no token chose
  statistic: str = dataclasses.field(metadata=dict(static=True))


Metric = Mean | Max | Min | Sum | EffectiveSampleSize | ExpertChoices
Metrics = dict[str, Metric]
