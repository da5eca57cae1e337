"""SALT's coefficients for batches and models of Tunix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from tunix.models.gemma.model import Gemma
from tunix.models.gemma3.model import Gemma3
from tunix.models.llama3.model import Llama3
from tunix.models.qwen2.model import Qwen2
from tunix.models.qwen3.model import Qwen3
from tunix.rl import common

from rlvr_jax.geometry import GramContext, GramFn, streaming
from rlvr_jax.integrations.tunix.policy import PolicyLoss, train_batch
from rlvr_jax.ops import reductions
from rlvr_jax.ops.logprobs import token_statistics
from rlvr_jax.reweighting import Reweighting, salt
from rlvr_jax.types import Array, Forward, Head, Metrics, Sampling, TrainBatch

# model → (model that returns final hidden states in place of logits, its output head)
SplitHead = Callable[[Any], tuple[Any, Head]]
_SUPPORTED = (Qwen2, Qwen3, Llama3, Gemma, Gemma3)


class _Model(NamedTuple):
  """The part of a model's interface that the head's Gram matrix needs."""

  output_head: Head

  def combine(self, trained: Any, frozen: Any) -> Any:
    return {}

  def head(self, params: Any) -> Head:
    return self.output_head


class _Identity(nnx.Module):
  """An output head that returns its input."""

  def __call__(self, x: Array) -> Array:
    return x


class _EncodeOnly(nnx.Module):
  """A tied embedding that embeds tokens but returns hidden states instead of logits."""

  def __init__(self, embedder: Any):
    self.embedder = embedder

  def encode(self, x: Array) -> Array:
    return self.embedder.encode(x)

  def decode(self, x: Array) -> Array:
    return x


def split_head(model: Any) -> tuple[Any, Head]:
  """Splits a model of Tunix into a copy that returns hidden states as logits, and the output head.

  The copy returns the final hidden states, and shares the model's parameters. Supports Qwen 2 and
  3, Llama 3 and Gemma 1 to 3, with tied or untied embeddings.

  Raises:
    ValueError: the model is not supported, or its head has adapters.
  """
  if not isinstance(model, _SUPPORTED):
    raise ValueError(
      f"split_head: {type(model).__name__} is not Qwen2, Qwen3, Llama3, Gemma or Gemma3; write a"
      " function from your model to (model that returns final hidden states, rlvr_jax.types.Head)"
      " and pass it as split_head"
    )
  trunk = nnx.merge(*nnx.split(model))
  soft_cap = getattr(trunk, "final_logits_softcap", None)
  tied = not hasattr(trunk, "lm_head")
  module = trunk.embedder if tied else trunk.lm_head
  if adapters := [name for name in vars(module) if "lora" in name]:
    raise ValueError(
      f"split_head: the output head has adapters ({', '.join(adapters)}), so that its kernel is not"
      " one parameter; leave the head out of the adapters' module_path"
    )
  if tied:
    kernel = module.input_embedding[...].T
    trunk.embedder = _EncodeOnly(module)
  else:
    kernel = module.w[...]
    trunk.lm_head = _Identity()
  if soft_cap is not None:
    trunk.final_logits_softcap = None
  return trunk, Head(kernel=kernel, soft_cap=soft_cap)


def salt_coefficients(
  model: Any,
  train_example: Any,
  *,
  num_generations: int,
  pad_id: int,
  eos_id: int,
  temperature: float = 1.0,
  method: Reweighting | None = None,
  gram: GramFn | None = None,
  split_head: SplitHead = split_head,
) -> tuple[Array, Metrics]:
  """SALT's coefficients, which replace the advantages of a batch of Tunix.

  Runs the model once without a gradient. The Gram matrix is computed from the head's per-rollout
  gradients at the parameters of `model`, over the rollouts of `train_example`.

  Args:
    model: a model of Tunix.
    train_example: Tunix's training example; its `advantages`, f32[B], are reweighted.
    num_generations: G, the number of rollouts per group.
    pad_id, eos_id: ids of the tokenizer.
    temperature: temperature of the policy, > 0.
    method: reweighting; `reweighting.salt()` by default. A method that draws a random subspace
      draws it with the same key in every batch.
    gram: `geometry.streaming()`, the default, or `geometry.sketch()`.
    split_head: function that splits a model as this module's `split_head` does.
  Returns:
    The coefficients, f32[B], and SALT's metrics.
  Raises:
    ValueError: `gram` runs the model itself; the scope of `method` does not divide the batch; see
      also `train_batch` and `split_head`.
  """
  method = salt() if method is None else method
  gram = streaming() if gram is None else gram
  if not gram.needs_forward:
    raise ValueError(
      "salt_coefficients: gram = per_rollout runs the model itself and can run only models of"
      " rlvr_jax; use geometry.streaming() or geometry.sketch()"
    )
  batch = train_batch(train_example, num_generations)
  inner_products = _gram(
    *split_head(model), train_example, batch, gram, temperature=temperature, ids=(pad_id, eos_id)
  )
  coefficients = train_example.advantages.reshape(-1, num_generations)
  reweighted, metrics = method.on_batch(
    coefficients, inner_products, batch.valid, jax.random.key(0)
  )
  return reweighted.reshape(-1), metrics


def _gram(
  trunk: Any,
  head: Head,
  train_example: Any,
  batch: TrainBatch,
  gram: GramFn,
  *,
  temperature: float,
  ids: tuple[int, int],
) -> Array:
  """Inner products of the head's per-rollout gradients, f32[B, B], by one forward pass."""
  _, hidden = common.compute_per_token_logps(  # logits of the trunk are hidden states [B, T, D]
    *nnx.split(trunk),
    prompt_tokens=train_example.prompt_ids,
    completion_tokens=train_example.completion_ids,
    pad_id=ids[0],
    eos_id=ids[1],
    return_logits=True,
  )
  hidden = jax.lax.stop_gradient(hidden.reshape(*batch.tokens.shape, -1))
  head = head._replace(kernel=jax.lax.stop_gradient(head.kernel))
  projection = None if gram.projection is None else gram.projection(head.kernel.shape[1])
  statistics = token_statistics(
    hidden, head, batch.tokens, Sampling(temperature=temperature), projection=projection
  )
  fields = (hidden, statistics.log_normalizers, statistics.projected, statistics.logprobs)
  rows = jax.tree.map(lambda x: x.reshape(1, batch.rewards.size, *x.shape[2:]), fields)
  forward = Forward(*rows)
  context = GramContext(model=_Model(head), temperature=temperature)
  return gram.gram({}, {}, batch, forward, context)


def salt_loss(
  loss_fn: PolicyLoss,
  *,
  method: Reweighting | None = None,
  gram: GramFn | None = None,
  split_head: SplitHead = split_head,
) -> PolicyLoss:
  """Makes a policy loss for Tunix that uses SALT's coefficients instead of the advantages.

  Each update computes the coefficients from the current parameters and the batch that Tunix passes
  to the loss.

  Args:
    loss_fn: loss of Tunix, such as `get_policy_loss_fn("grpo")`, or a result of `policy_loss`.
    method, gram, split_head: as for `salt_coefficients`.
  """

  def reweighted_loss(
    model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int
  ) -> tuple[Array, dict[str, Any]]:
    coefficients, metrics = salt_coefficients(
      model,
      train_example,
      num_generations=algo_config.num_generations,
      pad_id=pad_id,
      eos_id=eos_id,
      temperature=algo_config.temperature,
      method=method,
      gram=gram,
      split_head=split_head,
    )
    example = train_example.replace(advantages=coefficients)
    loss, aux = loss_fn(model, example, algo_config=algo_config, pad_id=pad_id, eos_id=eos_id)
    return loss, {**aux, **reductions.values(metrics)}

  return reweighted_loss
