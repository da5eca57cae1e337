"""Reference for per-rollout gradients of any parameters: one rollout of each prompt at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from rlvr_jax.geometry.base import FEATURES, GramContext, GramFn
from rlvr_jax.ops.checks import check_choice
from rlvr_jax.ops.layers import Kind, rows_of, stack_of
from rlvr_jax.ops.logprobs import head_logits, token_logprobs
from rlvr_jax.ops.masked import upcast
from rlvr_jax.ops.precision import EXACT
from rlvr_jax.types import Array, Forward, Head, Params, Prompts, Sampling, TrainBatch

_PATTERNS = {"last_block": r"^blocks/", "all": ""}


def per_rollout(*, parameters: str = "head", feature: str = "score") -> GramFn:
  """The Gram matrix of the gradients of each rollout's −Σ_t m log π; m is the loss mask.

  This `GramFn` runs the model again and stores the features of all rollouts, [B, N] for N
  parameters. It suits small models, small subsets of the parameters, and tests.

  With tied embeddings, the embedding's gradient includes only its use as output head.

  Args:
    parameters: "head": the output head's kernel, hidden states fixed; "last_block": the last
      transformer block; "all": all trained parameters; any other value is a regular expression that
      is searched for in the parameters' paths, such as "blocks/(query|key)$".
    feature: "score": as above; "sampled": the gradients of −Σ_t m z/τ, which omits the softmax
      term. z is the logit of a response's token, and τ the temperature.
  Raises:
    ValueError: `parameters` is not a regular expression, or the feature is unknown; or, when `gram`
      is called, no path matches `parameters`.
  Source: "SALT: When More Rollouts Don't Help in Group-Based Policy Optimization and How to Make
    Them Matter" (arXiv:2606.05800), §3.
  """
  check_choice("per_rollout", "feature", feature, FEATURES)
  try:
    re.compile(parameters)
  except (re.error, TypeError) as error:
    raise ValueError(
      f"per_rollout: parameters={parameters!r} is neither 'head', 'last_block', 'all' nor a regular"
      f" expression: {error}"
    ) from error

  def gram(
    trained: Params,
    frozen: Params,
    batch: TrainBatch,
    forward: Forward | None,
    context: GramContext,
  ) -> Array:
    del forward
    total = 0.0
    for leaf in _gradients(trained, frozen, batch, context, parameters, feature):
      rows = leaf.reshape(*leaf.shape[:2], -1)
      total += jnp.einsum("gpn,hqn->pgqh", rows, rows, precision=EXACT)
    B = batch.tokens.shape[0] * batch.tokens.shape[1]
    return jnp.reshape(total, (B, B))

  return GramFn(gram, needs_forward=False, feature=feature)


def per_rollout_features(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  context: GramContext,
  *,
  parameters: str = "head",
  feature: str = "score",
) -> Array:
  """The gradient features f32[B, N] of all rollouts; for small models.

  Args:
    parameters, feature: as for `per_rollout`.
  Returns:
    Rollouts in the order of batch.tokens.reshape(B, T); N parameters, leaf after leaf in the order
    of the parameters' tree, each in row-major order.
  """
  leaves = _gradients(trained, frozen, batch, context, parameters, feature)
  rows = [leaf.swapaxes(0, 1).reshape(batch.mask[..., 0].size, -1) for leaf in leaves]
  return jnp.concatenate(rows, axis=1)


def _gradients(
  trained: Params,
  frozen: Params,
  batch: TrainBatch,
  context: GramContext,
  parameters: str,
  feature: str,
) -> list[Array]:
  """Per-rollout gradients of the selected leaves, each f32[G, P, *leaf]."""
  model = context.model
  selected, network = _select_subset(trained, frozen, context, parameters)

  def loss(selected, prompts, tokens, mask):
    trunk, head = network(selected)
    one = Prompts(tokens=prompts.tokens[None], lengths=prompts.lengths[None])
    hidden = model.response_hidden(trunk, one, tokens[None, None])[0, 0]
    # Masked before the product, since zero times NaN is NaN, also in the gradient.
    hidden = jnp.where(mask[:, None] > 0, hidden, jnp.zeros((), hidden.dtype))
    if feature == "sampled":
      logits = head_logits(hidden, head) / context.temperature
      values = jnp.take_along_axis(logits, tokens[:, None], axis=-1, mode="clip")[:, 0]
    else:
      sampling = Sampling(temperature=context.temperature)
      values, _ = token_logprobs(hidden, head, tokens, sampling)
    return -jnp.sum(jnp.where(mask > 0, values, 0.0))

  def differentiate_one_per_prompt(rollouts):
    gradient = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0, 0))
    return gradient(selected, batch.prompts, *rollouts)

  # Prompts are sharded, and computed in parallel. The rollouts of a group are computed one by one,
  # to save memory.
  rollouts = (batch.tokens.swapaxes(0, 1), batch.mask.swapaxes(0, 1))
  return jax.lax.map(differentiate_one_per_prompt, rollouts)


def num_selected(
  trained: Params, frozen: Params, context: GramContext, *, parameters: str = "head"
) -> int:
  """The number N of parameters with respect to which `per_rollout` differentiates."""
  selected, _ = _select_subset(trained, frozen, context, parameters)
  return sum(leaf.size for leaf in selected)


def _select_subset(
  trained: Params, frozen: Params, context: GramContext, parameters: str
) -> tuple[list[Array], Callable[[list[Array]], tuple[Params, Head]]]:
  """The selected leaves, and a function that maps them to the trunk's parameters and the head."""
  model = context.model
  if parameters == "head":
    params = model.combine(trained, frozen)
    fixed = model.head(params)
    return [upcast(fixed.kernel)], lambda selected: (params, fixed._replace(kernel=selected[0]))
  leaves, insert = _select_leaves(trained, parameters, model.config.kinds)

  def network(selected):
    params = model.combine(insert(selected), frozen)
    trunk = _stop_lookup_gradient(params) if model.config.tied_head else params
    return trunk, model.head(params)

  return leaves, network


def _select_leaves(
  params: Params, parameters: str, kinds: Sequence[Kind]
) -> tuple[list[Array], Callable[[list[Array]], Params]]:
  """The leaves that `parameters` names, in at least float32, and a function that inserts them.

  `kinds` are the kinds of the layers, see `ops.layers`.
  """
  pattern = _PATTERNS.get(parameters, parameters)
  leaves, tree = jax.tree_util.tree_flatten_with_path(params)
  paths = [_name(path) for path, _ in leaves]
  indices = [i for i, path in enumerate(paths) if re.search(pattern, path)]
  last_only = parameters == "last_block"  # layers are stacked on the first axis
  if last_only:
    stacks = rows_of(len(kinds) - 1, kinds)
    indices = [i for i in indices if stack_of(paths[i].split("/")[1]) in stacks]
  if not indices:
    raise ValueError(
      f"per_rollout: parameters={parameters!r} matches none of the parameters' paths:"
      f" {', '.join(paths)}"
    )

  def insert(selected):
    values = [leaf for _, leaf in leaves]
    for i, value in zip(indices, selected, strict=True):
      values[i] = upcast(values[i]).at[-1].set(value) if last_only else value
    return jax.tree.unflatten(tree, values)

  matches = [upcast(leaves[i][1]) for i in indices]
  return [leaf[-1] for leaf in matches] if last_only else matches, insert


def _stop_lookup_gradient(params: Params) -> Params:
  """The trunk's parameters; differentiation takes the embedding as a constant."""
  stop = lambda path, x: jax.lax.stop_gradient(x) if _name(path) == "embedding" else x
  return jax.tree_util.tree_map_with_path(stop, params)


def _name(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
