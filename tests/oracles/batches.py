"""Random batches, metric values, and one way to run a loss, for all tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.ops import reductions
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.types import Prompts, TrainBatch


def make_batch(mask, behavior_logprobs=None, rewards=None, **fields):
  """A TrainBatch of this mask [P, G, T] whose unnamed fields are as plain as they can be."""
  prompts, group, _ = mask.shape
  rewards = np.zeros((prompts, group)) if rewards is None else rewards
  plain = dict(
    prompts=Prompts(tokens=np.ones((prompts, 2), np.int32), lengths=np.full(prompts, 2)),
    tokens=np.ones(mask.shape, np.int32),
    behavior_logprobs=np.zeros_like(mask) if behavior_logprobs is None else behavior_logprobs,
    rewards=rewards,
    correct=rewards,
    valid=np.ones((prompts, group), bool),
  )
  return jax.tree.map(jnp.asarray, TrainBatch(mask=mask, **plain | fields))


def with_needs(batch):
  """The batch with all that estimators may need, such that they are what their oracles say.

  There is one reward by name. The policy is the one that sampled, all tokens have the energy 0.5,
  and the squared norm of a rollout's gradient is its length.
  """
  return dataclasses.replace(
    batch,
    rewards_by_name=batch.rewards[..., None],
    policy_logprobs=batch.behavior_logprobs,
    squared_probabilities=2 * jnp.exp(batch.behavior_logprobs) - 0.5,
    squared_norms=jnp.sum(batch.mask, axis=-1),
  )


def make_host_batch(mask, **fields):
  """The same in NumPy, as batches are before they are placed on devices."""
  return jax.device_get(make_batch(mask, **fields))


def random_prompts(rng, prompts, length, vocabulary):
  """Prompts of random tokens and lengths."""
  return Prompts(
    tokens=rng.integers(0, vocabulary, (prompts, length)).astype(np.int32),
    lengths=rng.integers(1, length + 1, prompts).astype(np.int32),
  )


def random_case(seed, shape=(3, 4, 6), *, spread=0.5, dtype=np.float64, full=False):
  """(policy_logprobs, batch, coefficients); responses of random length, one of them empty."""
  rng = np.random.default_rng(seed)
  prompts, group, length = shape
  behavior = -rng.exponential(1.0, shape)
  policy = behavior + spread * rng.standard_normal(shape)
  proximal = behavior + spread / 2 * rng.standard_normal(shape)
  lengths = rng.integers(1, length + 1, (prompts, group))
  lengths[-1, -1] = 0
  mask = np.arange(length) < (np.full_like(lengths, length) if full else lengths)[..., None]
  rewards = rng.integers(0, 2, (prompts, group))
  coefficients = rng.standard_normal((prompts, group))
  coefficients[0, 0] = 0.0
  teacher = -rng.exponential(1.0, shape)
  batch = make_batch(
    mask.astype(dtype),
    behavior.astype(dtype),
    rewards.astype(dtype),
    proximal_logprobs=proximal.astype(dtype),
    teacher_logprobs=teacher.astype(dtype),
    teacher_entropy=np.full(shape, 0.7, dtype),
    teacher_divergence=rng.exponential(1.0, shape).astype(dtype),
  )
  return jnp.asarray(policy.astype(dtype)), batch, jnp.asarray(coefficients.astype(dtype))


def poison(policy_logprobs, batch, fill):
  """The same case with `fill` at every masked position of every log-probability array."""
  spoil = lambda x: None if x is None else jnp.where(batch.mask > 0, x, fill).astype(x.dtype)
  return spoil(policy_logprobs), dataclasses.replace(
    batch,
    behavior_logprobs=spoil(batch.behavior_logprobs),
    proximal_logprobs=spoil(batch.proximal_logprobs),
    teacher_logprobs=spoil(batch.teacher_logprobs),
    teacher_divergence=spoil(batch.teacher_divergence),
  )


def evaluate(loss, policy_logprobs, batch, coefficients, *, how="token_mean", veto=None):
  """One update's loss as the step computes it: ((value, metrics), gradient), in one program."""
  return _program(loss, how, veto)(policy_logprobs, batch, coefficients)


@functools.lru_cache(maxsize=64)
def _program(loss, how, veto):
  def value(policy_logprobs, batch, coefficients, statistics):
    losses, metrics = loss.per_token(policy_logprobs, batch, coefficients, statistics)
    mask = batch.mask
    if veto is not None:
      losses, mask, more = veto(losses, policy_logprobs, batch, coefficients)
      metrics = {**metrics, **more}
    pair = aggregate(losses, mask, how=how, max_response_length=mask.shape[-1])
    return pair.total / jnp.maximum(pair.weight, 1), metrics

  @jax.jit
  def run(*case):
    statistics = loss.statistics and loss.statistics(*case)
    return jax.value_and_grad(value, has_aux=True)(*case, statistics)

  return run


def metric_value(metric):
  """What a metric says once its sums are complete."""
  return float(reductions.value(metric))
