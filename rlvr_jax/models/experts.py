"""Mixtures of experts: a layer's MLP is the weighted sum of the few MLPs that a router chooses.

    p = softmax(x·W_router),  S(x) = the k experts of largest p,  y = Σ_{e ∈ S(x)} w_e · MLP_e(x)

The weights w are p at the chosen experts, in some models divided by their sum. Experts have no
capacity limit, so every expert computes all tokens that chose it. Scores, softmax and choice of the
router are in float32 or better. Some models add σ(x·v) · MLP_shared(x), where all tokens share one
expert.

Parameters of the stacked layers, under "blocks/experts": router [layers, D, E], gate and up
[layers, E, D, F], down [layers, E, F, D], for E experts of width F. A shared expert has
shared_gate, shared_up and shared_down, and shared_weight (v), which is [layers, D, 1]. These
parameters replace the MLP's parameters.

Source: "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer"
(arXiv:1701.06538); the router as in "Mixtral of Experts" (arXiv:2401.04088), §2.1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from rlvr_jax.models.linear import PRODUCT, LowRank, Rounded, dense, init_kernel, value_of
from rlvr_jax.ops.grouped import Order, from_rows, grouped_product, order_by_group, to_rows
from rlvr_jax.types import Array

# Names the chosen experts for remat. They are always saved: recomputed in the backward pass,
# another rounding could choose others than the forward pass.
ROUTES = "routes"
NO_EXPERT = -1  # the choices of a place without a token

_TOKENS = ("data", "fsdp")  # axes of the mesh over which tokens are split


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSettings:
  """Settings of a mixture, made from the settings of its network."""

  number: int  # E
  per_token: int  # k
  width: int  # F, the hidden width of one expert
  shared_width: int = 0  # hidden width of the shared expert; 0: there is none
  normalized_weights: bool
  products: str  # one of `ops.grouped.KINDS`

  def find_mistakes(self) -> Iterator[str]:
    """Yields a message for each mistake in the settings, with its remedy."""
    for name, size in (
      ("experts_per_token", self.per_token),
      ("expert_width", self.width),
    ):
      if size < 1:
        yield f"{name}={size!r} must be at least 1 in a mixture (num_experts={self.number})"
    if self.per_token > self.number:
      yield (
        f"experts_per_token={self.per_token} exceeds num_experts={self.number}; a token cannot"
        " choose more experts than there are"
      )

  def check_mesh(self, mesh: Mesh | None) -> None:
    """Raises ValueError unless the mesh's axis `tensor` divides the width of an expert."""
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    if self.width % tensor:
      raise ValueError(
        f"config.mesh.tensor = {tensor} does not divide expert_width = {self.width}; choose a"
        f" divisor of {self.width}"
      )


class Routing(NamedTuple):
  """A router's choice for some tokens."""

  experts: Array  # i32[..., k], the most probable first; `NO_EXPERT` where there is no token
  weights: Array  # [..., k], at least float32; 0 where there is no token
  probabilities: Array  # [..., E], at least float32, of all experts
  # The router's own choice, in the form of `experts`; it differs from `experts` only if the caller
  # gave routes.
  own: Array


class Experts(nnx.Module):
  """A router and its experts, all with a gated MLP."""

  def __init__(
    self,
    settings: ExpertSettings,
    rngs: nnx.Rngs,
    *,
    width: int,
    dtype: str,
    residual_gain: float,
  ):
    self.settings = settings
    E, F = settings.number, settings.width
    self.router = init_kernel(rngs, (width, E), dtype)
    self.gate = init_kernel(rngs, (E, width, F), dtype)
    self.up = init_kernel(rngs, (E, width, F), dtype)
    self.down = init_kernel(rngs, (E, F, width), dtype, residual_gain)
    if shared := settings.shared_width:
      self.shared_gate = init_kernel(rngs, (width, shared), dtype)
      self.shared_up = init_kernel(rngs, (width, shared), dtype)
      self.shared_down = init_kernel(rngs, (shared, width), dtype, residual_gain)
      self.shared_weight = init_kernel(rngs, (width, 1), dtype)

  def __call__(
    self,
    x: Array,
    activation: Callable[[Array], Array],
    *,
    routes: Array | None = None,
    real: Array | None = None,
    mesh: Mesh | None = None,
  ) -> tuple[Array, Routing]:
    """Applies the mixture to every token.

    On a mesh the tokens are split over the axes (data, fsdp) if their number of devices divides R,
    and every device sorts its own tokens. Each expert's width is split over tensor.

    Args:
      x: [R, L, D].
      activation: the activation of the gate.
      routes: int[R, L, k], experts to use in place of the router's choice, with the router's
        weights.
      real: bool[R, L], False at padding, where no expert is chosen; None: there is no padding.
      mesh: None, or axes (data, fsdp, tensor).
    """
    with jax.named_scope("router"):
      routing = self.route(x, routes=routes, real=real)
    mix = functools.partial(_mix, activation=activation, kind=self.settings.products)
    kernels = [_kernels_of(parameter) for parameter in (self.gate, self.up, self.down)]
    with jax.named_scope("experts"):
      if mesh is None or mesh.size == 1:
        mixed = mix(x, routing.experts, routing.weights, *kernels)
        return self._add_shared(mixed, x, activation), routing
      devices = math.prod(mesh.shape[axis] for axis in _TOKENS)
      tokens = PartitionSpec(_TOKENS if x.shape[0] % devices == 0 else None)
      into, out_of = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor")
      specs = map(_kernel_specs, kernels, (into, into, out_of))
      mixed = jax.shard_map(
        functools.partial(mix, summed_over="tensor"),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, *specs),
        out_specs=tokens,
        check_vma=False,  # a loop that starts from zeros on every device counts as replicated
      )(x, routing.experts, routing.weights, *kernels)
    return self._add_shared(mixed, x, activation), routing

  def _add_shared(self, mixed: Array, x: Array, activation: Callable[[Array], Array]) -> Array:
    """Adds the shared expert's result, if there is one."""
    if not self.settings.shared_width:
      return mixed
    with jax.named_scope("shared_expert"):
      hidden = activation(dense(x, self.shared_gate)) * dense(x, self.shared_up)
      # A sum, since XLA on CPU adds up a matrix product with one column in another order in the
      # last rows.
      wide = jnp.promote_types(x.dtype, jnp.float32)
      terms = x.astype(wide) * self.shared_weight[..., 0].astype(wide)
      weight = jax.nn.sigmoid(jnp.sum(terms, axis=-1, keepdims=True)).astype(x.dtype)
      return mixed + weight * dense(hidden, self.shared_down)

  def route(self, x: Array, *, routes: Array | None, real: Array | None) -> Routing:
    """The experts chosen for tokens x[..., D]; see `__call__`."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    with jax.default_matmul_precision("highest"):  # rounded inputs could choose other experts
      logits = dense(wide, self.router)
    probabilities = jax.nn.softmax(logits, axis=-1)
    # Among experts of equal probability, top_k takes the first.
    _, own = jax.lax.top_k(jax.lax.stop_gradient(probabilities), self.settings.per_token)
    experts = own if routes is None else routes.astype(jnp.int32)
    if real is not None:
      own, experts = (jnp.where(real[..., None], x, NO_EXPERT) for x in (own, experts))
    experts = checkpoint_name(experts, ROUTES)
    chosen = functools.partial(jnp.take_along_axis, indices=jnp.maximum(experts, 0), axis=-1)
    # The softmax runs over the chosen logits: the probabilities of replayed experts may all
    # underflow to 0, and then could not be normalized.
    normalized = self.settings.normalized_weights
    weights = jax.nn.softmax(chosen(logits), axis=-1) if normalized else chosen(probabilities)
    weights = jnp.where(experts < 0, 0, weights)
    return Routing(experts, weights, probabilities, experts if routes is None else own)


def _mix(
  x: Array,
  experts: Array,
  weights: Array,
  gate: Array | Rounded,
  up: Array | Rounded,
  down: Array | Rounded,
  *,
  activation: Callable[[Array], Array],
  kind: str,
  summed_over: str | None = None,
) -> Array:
  """Σ_j w_j · MLP_{e_j}(x), [R, L, D], by one grouped product per projection.

  Args:
    x: [R, L, D].
    experts, weights: [R, L, k].
    gate, up, down: kernels of all experts.
    summed_over: axis of the mesh over which the experts' width is split; None: it is not split.
  """
  k = experts.shape[-1]
  number = jax.tree.leaves(gate)[0].shape[0]
  choices = jnp.where(experts < 0, number, experts).reshape(-1, k)
  order = order_by_group(choices, number, kind=kind)
  product = functools.partial(_product, choices=choices, order=order, kind=kind)
  rows = to_rows(x.reshape(-1, x.shape[-1]), order)
  hidden = activation(product(rows, gate)) * product(rows, up)
  results = from_rows(product(hidden, down), order)
  weighted = results * weights.reshape(-1, k, 1)  # in the weights' dtype
  weighted = jnp.where(order.chosen[..., None], weighted, 0)
  mixed = jnp.sum(weighted, axis=1).astype(x.dtype).reshape(x.shape)
  return mixed if summed_over is None else jax.lax.psum(mixed, summed_over)


def _product(
  rows: Array, kernels: Array | Rounded, *, choices: Array, order: Order, kind: str
) -> Array:
  """Multiplies each row by its expert's kernel, in the rows' dtype; kernels may have 8 bits."""
  values = kernels.values if isinstance(kernels, Rounded) else kernels
  out = checkpoint_name(grouped_product(rows, values, order.groups, kind), PRODUCT)
  if isinstance(kernels, Rounded):
    expert = choices.reshape(-1).at[order.choices].get(mode="fill", fill_value=0)
    out = (out * kernels.scale[expert, 0]).astype(rows.dtype)
  return out


def _kernels_of(parameter: nnx.Param) -> Array | Rounded:
  weights = value_of(parameter)
  assert not isinstance(weights, LowRank)  # `models.lora` refuses to adapt experts
  return weights


def _kernel_specs(kernel: Array | Rounded, spec: PartitionSpec) -> Any:
  """The partition of a kernel, and of the kernel's scale [E, 1, …] if the kernel is `Rounded`."""
  if not isinstance(kernel, Rounded):
    return spec
  specs: Any = spec, PartitionSpec(None, None, *spec[2:])
  return Rounded(*specs)
