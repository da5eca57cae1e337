"""FADE's advantages as a stateful advantage estimator for Tunix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import utils as generate_utils
from tunix.rl import algo_core, common, function_registry, reward_manager
from tunix.rl.rl_cluster import Mode

from rlvr_jax import advantages
from rlvr_jax.types import Prompts, TrainBatch


class _TrainingRewards(reward_manager.SequenceRewardManager):
  """Reward manager that raises for rewards other than 0 and 1, and for any evaluation.

  An evaluation would change FADE's state.
  """

  def __call__(self, prompts: list[str], completions: list[str], **kwargs: Any) -> dict[str, Any]:
    if kwargs["mode"] != str(Mode.TRAIN):
      raise ValueError(
        "FADE cannot be used in an evaluation: Tunix would pass the evaluation's rewards and"
        " entropies to the estimator as those of training. Call train() without eval_ds, and"
        " evaluate with another learner"
      )
    result = super().__call__(prompts, completions, **kwargs)
    invalid_rewards = set(np.asarray(result["rewards"]).tolist()) - {0.0, 1.0}
    if invalid_rewards:
      raise ValueError(
        f"FADE: each reward must be 0 or 1, but rewards {sorted(invalid_rewards)[:5]} were given; a"
        " rollout's reward is the sum over all reward_fns"
      )
    return result


class Fade:
  """FADE's advantages as a stateful advantage estimator for Tunix.

  `register` registers the estimator by name, and `attach` connects it to a learner. Tunix then
  calls the estimator once per batch. A call updates the state with the previous batch's solve rate
  and the latest entropy, and returns advantages from the new state. Tunix reports an update's
  entropy at the end of the next update, one update later than `rlvr_jax.train`. Save `state_dict`
  with each of Tunix's checkpoints.
  """

  def __init__(self, *, initial_entropy: float, **hyper_parameters: Any):
    """Initializes the estimator.

    Args:
      initial_entropy: entropy of the initial policy, nats per token; see `policy_entropy`.
      hyper_parameters: arguments of `advantages.fade`.
    """
    self._fade = advantages.fade(**hyper_parameters)
    self.state = self._fade.init(jnp.float32(initial_entropy))
    self._solve_rate: float | None = None
    self._entropies: list[float] = []
    self._attached = False

  def register(self, name: str) -> None:
    """Registers the estimator, and the reward manager that it needs, under `name`."""
    function_registry.register_advantage_estimator(name)(self)
    function_registry.register_reward_manager(name)(_TrainingRewards)

  def attach(self, learner: Any) -> None:
    """Makes the learner report entropies to this object.

    The learner then logs kl, pg_clipfrac and entropy.

    Raises:
      ValueError: the learner's configuration is not supported.
    """
    config = learner.algo_config
    training = learner.rl_cluster.cluster_config.training_config
    name = config.advantage_estimator
    if function_registry.get_advantage_estimator(name) is not self:
      raise ValueError(
        f"Fade.attach: advantage_estimator={name!r} is not the name of this Fade object; set"
        " advantage_estimator to the name that was given to `register`"
      )
    if not isinstance(learner.reward_manager, _TrainingRewards):
      raise ValueError(
        f"Fade.attach: reward_manager={config.reward_manager!r}; set reward_manager to {name!r},"
        " the name of the advantage_estimator"
      )
    if training.train_micro_batch_size not in (None, training.mini_batch_size):
      raise ValueError(
        f"Fade.attach: train_micro_batch_size={training.train_micro_batch_size} would change FADE's"
        " state several times per update; set train_micro_batch_size to"
        f" {training.mini_batch_size}, the mini_batch_size"
      )
    learner.rl_cluster.actor_trainer.with_rl_metrics_to_log(
      {"kl": np.mean, "pg_clipfrac": np.mean, "entropy": self._observe}
    )
    self._attached = True

  def _observe(self, entropies: Any) -> Any:
    self._entropies.append(float(np.mean(entropies)))
    return np.mean(entropies)

  def __call__(self, rewards: Any, num_generations: int) -> np.ndarray:
    """Computes advantages f32[B] from rewards [B], each 0 or 1."""
    if not self._attached:
      raise ValueError("Fade: call attach(learner) before learner.train(...)")
    grouped = jnp.asarray(rewards, jnp.float32).reshape(-1, num_generations)
    P, G = grouped.shape
    no_tokens = jnp.zeros((P, G, 0))
    batch = TrainBatch(
      prompts=Prompts(jnp.zeros((P, 0), jnp.int32), jnp.zeros(P, jnp.int32)),
      tokens=no_tokens.astype(jnp.int32),
      mask=no_tokens,
      behavior_logprobs=no_tokens,
      rewards=grouped,
      correct=grouped,
      valid=jnp.ones((P, G), bool),
    )
    if self._solve_rate is not None:
      entropy = np.mean(self._entropies) if self._entropies else self.state.entropy
      self._entropies = []
      solve_rate = jnp.float32(self._solve_rate)
      self.state = self._fade.update(self.state, batch, jnp.float32(entropy), solve_rate)
    self._solve_rate = float(jnp.mean(grouped))
    return np.asarray(self._fade.apply(self.state, batch)).reshape(-1)

  def state_dict(self) -> dict[str, Any]:
    """Returns the state as plain numbers, JSON-serializable."""
    state = {name: value.item() for name, value in self.state._asdict().items()}
    return {"state": state, "solve_rate": self._solve_rate, "entropies": list(self._entropies)}

  def load_state_dict(self, saved: dict[str, Any]) -> None:
    """Restores a state that `state_dict` returned."""
    dtypes = {name: value.dtype for name, value in self.state._asdict().items()}
    arrays = {name: jnp.asarray(saved["state"][name], dtype) for name, dtype in dtypes.items()}
    self.state = type(self.state)(**arrays)
    self._solve_rate = saved["solve_rate"]
    self._entropies = list(saved["entropies"])


def policy_entropy(cluster: Any, prompts: Sequence[str]) -> float:
  """Mean entropy of the actor over the tokens of one sampled response per prompt, nats per token.

  Args:
    cluster: Tunix's RLCluster, which samples as in training.
    prompts: prompts as in the training data.
  """
  config = cluster.get_rollout_config(mode=Mode.TRAIN)
  output = cluster.generate(prompts=list(prompts), mode=Mode.TRAIN)
  pad_id, eos_id = cluster.rollout.pad_id(), cluster.rollout.eos_id()
  pad = functools.partial(
    generate_utils.pad_to_length,
    target_length=config.max_tokens_to_generate,
    pad_value=pad_id,
    left=False,
  )
  completions = jnp.asarray(np.stack([pad(tokens) for tokens in output.tokens]))
  _, logits = common.compute_per_token_logps(
    *nnx.split(cluster.actor_trainer.model),
    prompt_tokens=jnp.asarray(output.left_padded_prompt_tokens),
    completion_tokens=completions,
    pad_id=pad_id,
    eos_id=eos_id,
    return_logits=True,
    temperature=config.temperature,
  )
  entropy = algo_core.compute_entropy_from_logits(logits)
  return float(algo_core.masked_mean(entropy, completions != pad_id))
