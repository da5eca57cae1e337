"""The optimizers to choose from in `config.optimizer`: optimizers of optax, with our defaults.

`learning_rate` is the schedule of `config.learning_rate`. Weight decay is decoupled and multiplied
by the learning rate. It does not apply to norms, biases, the decay rates of recurrent states, or
layer scales.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import optax

from rlvr_jax.ops.checks import check_between, check_choice, check_integer
from rlvr_jax.types import Params

__all__ = ["adamw", "lion", "muon", "sgd"]

# Kernels [L, D, E] of the blocks, or [L, experts, D, E], and the factors of their adapters.
_MATRIX = (
  r"blocks/(delta/|full/|experts/)?(query|key|value|output_gate|output|strength|decay"
  r"|(shared_)?(gate|up|down))(/[ab])?$"
)
# Norms, biases, the decay rates of recurrent states, and layer scales.
_NOT_DECAYED = r"norm|bias|delta/scale|log_rate|layer_scale"


def adamw(
  *,
  learning_rate: optax.Schedule,
  b1: float = 0.9,
  b2: float = 0.999,
  epsilon: float = 1e-8,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Adam with decoupled weight decay.

  Args:
    learning_rate: the learning rate of the run.
    b1: in [0, 1), decay of the mean of the gradient.
    b2: in [0, 1), decay of the mean of the squared gradient.
    epsilon: above 0, added to the square root of the mean of the squared gradient.
    weight_decay: ≥ 0.
  Source: "Decoupled Weight Decay Regularization" (arXiv:1711.05101).
  """
  _check("adamw", b1=b1, b2=b2, weight_decay=weight_decay)
  check_between("adamw", "epsilon", epsilon, low=0.0, open_low=True)
  return optax.adamw(
    learning_rate, b1=b1, b2=b2, eps=epsilon, weight_decay=weight_decay, mask=decay_mask
  )


def lion(
  *,
  learning_rate: optax.Schedule,
  b1: float = 0.9,
  b2: float = 0.99,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Lion: each step follows the sign of an interpolated momentum.

  Use 1/3 to 1/10 of AdamW's learning rate.

  Args:
    learning_rate: the learning rate of the run.
    b1: in [0, 1), weight of the momentum in the step.
    b2: in [0, 1), decay of the momentum.
    weight_decay: ≥ 0.
  Source: "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675).
  """
  _check("lion", b1=b1, b2=b2, weight_decay=weight_decay)
  return optax.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask)


def muon(
  *,
  learning_rate: optax.Schedule,
  momentum: float = 0.95,
  nesterov: bool = True,
  steps: int = 5,
  update_rms: float | None = 0.2,
  b1: float = 0.9,
  b2: float = 0.999,
  epsilon: float = 1e-8,
  weight_decay: float = 0.0,
) -> optax.GradientTransformation:
  """Orthogonalized momentum for the kernels of each layer; `adamw` for all other parameters.

  The momentum M of a layer's D×E kernel has the singular value decomposition UΣVᵀ. The quintic
  Newton–Schulz iteration replaces M by approximately UVᵀ. Each expert of a mixture has kernels of
  its own. Embedding, head, routers of experts, norms and biases use AdamW.

  Args:
    learning_rate: the learning rate of the run, for both optimizers.
    momentum: in [0, 1), decay of the mean of the gradient.
    nesterov: whether to use Nesterov momentum.
    steps: ≥ 1, Newton–Schulz iterations.
    update_rms: scales the update by update_rms·√max(D, E); 0.2 makes steps as long as AdamW's
      steps, so that both optimizers can use AdamW's learning rate. None: scales by √max(1, E/D) as
      in the original code, which uses a learning rate near 0.02.
    b1: the b1 of `adamw`.
    b2: the b2 of `adamw`.
    epsilon: the epsilon of `adamw`.
    weight_decay: ≥ 0, for both optimizers.
  Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; `update_rms`:
    "Muon is Scalable for LLM Training" (arXiv:2502.16982), §2.2.
  """
  _check("muon", momentum=momentum, b1=b1, b2=b2, weight_decay=weight_decay)
  check_choice("muon", "nesterov", nesterov, (True, False))
  check_integer("muon", "steps", steps, low=1)
  if update_rms is not None:
    check_between("muon", "update_rms", update_rms, low=0.0, open_low=True)
  last_two = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
  matrix_optimizer = optax.contrib.muon(
    learning_rate,
    ns_steps=steps,
    beta=momentum,
    nesterov=nesterov,
    consistent_rms=update_rms,
    weight_decay=weight_decay,
    muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: last_two, params),
  )
  other_optimizer = adamw(
    learning_rate=learning_rate, b1=b1, b2=b2, epsilon=epsilon, weight_decay=weight_decay
  )
  kinds = lambda params: jax.tree.map(
    lambda is_matrix: "matrix" if is_matrix else "other", _match_paths(_MATRIX, params)
  )
  return optax.partition({"matrix": matrix_optimizer, "other": other_optimizer}, kinds)


def sgd(
  *, learning_rate: optax.Schedule, momentum: float = 0.0, nesterov: bool = False
) -> optax.GradientTransformation:
  """Gradient descent; without momentum it keeps no state.

  Args:
    learning_rate: the learning rate of the run.
    momentum: in [0, 1), decay of the sum of the gradients; 0 turns it off.
    nesterov: whether to use Nesterov momentum.
  """
  _check("sgd", momentum=momentum)
  check_choice("sgd", "nesterov", nesterov, (True, False))
  if nesterov and not momentum:
    raise ValueError(
      "sgd: nesterov = True has no effect with momentum = 0; set momentum, or leave nesterov out"
    )
  return optax.sgd(learning_rate, momentum=momentum or None, nesterov=nesterov)


def _check(owner: str, *, weight_decay: float = 0.0, **decays: float) -> None:
  for name, value in decays.items():
    # With decay 1, an average stays at its first value, 0, and the bias correction divides by 0.
    check_between(owner, name, value, low=0.0, high=1.0, open_high=True)
  check_between(owner, "weight_decay", weight_decay, low=0.0)


def clip_gradients(
  transformation: optax.GradientTransformation, max_gradient_norm: float | None
) -> optax.GradientTransformation:
  """`transformation` of gradients that are clipped by their global norm; None: without clipping."""
  if max_gradient_norm is None:
    return transformation
  return optax.chain(optax.clip_by_global_norm(max_gradient_norm), transformation)


def decay_mask(params: Params) -> Any:
  """A pytree of bools: whether weight decay applies to each parameter; see `_NOT_DECAYED`."""
  return jax.tree.map(lambda excluded: not excluded, _match_paths(_NOT_DECAYED, params))


def _match_paths(pattern: str, params: Params) -> Any:
  """A pytree of bools: whether each parameter's path contains a match of the pattern."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return jax.tree_util.tree_map_with_path(
    lambda path, _: re.search(pattern, name(path)) is not None, params
  )
