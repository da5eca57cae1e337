"""MT-GRPO: adds to the dialogue's advantage an advantage of each turn that has a score."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.advantages.base import Advantage, stateless
from rlvr_jax.advantages.grpo import grpo_advantages
from rlvr_jax.ops.checks import check_between
from rlvr_jax.ops.groups import varies
from rlvr_jax.ops.masked import mean_metric, upcast
from rlvr_jax.types import Array, Metrics, TrainBatch


def scores_by_turn(turn_scores: Array, turns: Array, valid: Array) -> tuple[Array, Array]:
  """The scores of the policy's turns, and which turns have a score.

  Args:
    turn_scores: f32[P, G, T], a turn's score at its last token; NaN elsewhere.
    turns: i32[P, G, T], see `types.TrainBatch`; the policy has at most N = T//2 + 1 turns.
    valid: bool[P, G].
  Returns:
    The scores f32[P, G, N], NaN for turns without a score; and bool[P, G, N], whether a turn of a
    valid rollout has a score.
  """
  chex.assert_rank([turn_scores, turns, valid], [3, 3, 2])
  N = turns.shape[-1] // 2 + 1
  places = jnp.where(jnp.isnan(turn_scores), N, turns // 2)
  scores = upcast(turn_scores)
  none = jnp.full(N, jnp.nan, scores.dtype)
  lay = lambda scores, places: none.at[places].set(scores, mode="drop")
  scores = jax.vmap(jax.vmap(lay))(scores, places)
  return scores, ~jnp.isnan(scores) & (valid > 0)[..., None]


def mt_grpo(*, turn_weight: float = 1.0, epsilon: float = 1e-6) -> Advantage:
  """A = A_dialogue + λ·A_turn, each (x − x̄)/(std + ε), where x is the reward or the turn's score.

  An environment may score any turn of the policy except the dialogue's last (`Turn.score`).
  A_turn compares this score with the scores of the same turn in the other dialogues of the group: a
  first turn is compared with first turns. A_turn applies to the tokens of this turn. A turn without
  a score gets A_dialogue alone. The last turn gets A_dialogue alone too, because its score is the
  reward. Without turn scores, `mt_grpo` equals `grpo`.

  The paper has two turns, of which the first has a score. **open**: here each turn that has a score
  is compared separately. λ is `turn_advantage_coef` in the authors' code. If a dialogue does not
  call the tool of the paper's environment, the authors' code adds the dialogue's two rewards and
  uses the advantage of the sum; here the dialogue gets A_dialogue.

  Args:
    turn_weight: λ ≥ 0.
    epsilon: ≥ 0, added to both deviations.
  Source: "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design"
    (arXiv:2505.11821) and the authors' code.
  """
  check_between("mt_grpo", "turn_weight", turn_weight, low=0.0)
  check_between("mt_grpo", "epsilon", epsilon, low=0.0)
  advantages = functools.partial(grpo_advantages, epsilon=epsilon, name="mt_grpo")

  def per_token(state: Any, batch: TrainBatch, coefficients: Array) -> Array:
    del state
    if batch.turn_scores is None or batch.turns is None:
      return coefficients
    scores, scored = scores_by_turn(batch.turn_scores, batch.turns, batch.valid)
    by_turn = jax.vmap(advantages, in_axes=-1, out_axes=-1)(scores, scored)
    # A reply, which is not in the loss, gets the coefficient of the turn before it.
    by_token = jnp.take_along_axis(by_turn, batch.turns // 2, axis=-1)
    return coefficients[..., None] + turn_weight * by_token

  def metrics(batch: TrainBatch) -> Metrics:
    if batch.turn_scores is None or batch.turns is None:
      return {}
    scores, scored = scores_by_turn(batch.turn_scores, batch.turns, batch.valid)
    return {"advantage/turns_compared": mean_metric(varies(scores, scored), scored)}

  of_dialogues = lambda batch: advantages(batch.rewards, batch.valid)
  return stateless(of_dialogues, metrics=metrics)._replace(
    needs=("turn_scores",), per_token=per_token
  )
