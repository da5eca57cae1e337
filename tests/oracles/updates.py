"""One maker of updates: a small transformer's method and batches, on one device or a mesh."""

import dataclasses
import functools

import jax
import numpy as np
import optax
from oracles import batches

from rlvr_jax import advantages, losses, reweighting
from rlvr_jax.advantages.masses import gradient_masses
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.transformer import TransformerConfig
from rlvr_jax.rollouts.packing import pack_batch, row_layout
from rlvr_jax.train.cluster import sharding
from rlvr_jax.update.accumulate import update_gradient
from rlvr_jax.update.objective import Estimate, Method, estimate_coefficients

P, G, S, T, V = 8, 4, 5, 6, 32
CONFIG = TransformerConfig(
  vocab_size=V, width=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=32
)


@functools.cache
def small_model(config, mesh=None):
  """The transformer of `config`, once; its parameters are drawn by one program."""
  model = transformer(config, sharding.make_layout(mesh))
  return model._replace(init=jax.jit(model.init))


@functools.cache
def make_method(dtype="float32", mesh=None, **changes):
  """The same object for the same arguments, so that what is compiled for it is found again."""
  config = dataclasses.replace(CONFIG, compute_dtype=dtype, param_dtype=dtype)
  fields = dict(
    model=small_model(config, mesh),
    optimizer=optax.adamw(1e-2),
    learning_rate=optax.constant_schedule(1e-2),
    advantage=advantages.grpo(),
    coefficient_metrics=gradient_masses,
    reweighting=reweighting.none(),
    loss=losses.ppo_clip(),
    aggregation="token_mean",
    max_response_length=T,
  )
  return Method(**{**fields, **changes})


def make_batch(dtype=np.float32, seed=0):
  """Rollouts of random tokens and lengths, on the host; half of the first tokens are right."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, T + 1, (P, G))
  tokens = rng.integers(0, V, (P, G, T)).astype(np.int32)
  # As real rewards do, they depend on the tokens: gradients of pure noise cancel in float32.
  correct = (tokens[..., 0] < V // 2).astype(dtype)
  correct[0] = 1  # a group without signal
  return batches.make_host_batch(
    (np.arange(T) < lengths[..., None]).astype(dtype),
    rewards=correct,
    prompts=batches.random_prompts(rng, P, S, V),
    tokens=tokens,
    behavior_logprobs=(rng.normal(size=(P, G, T)) * 0.3 - 3.4).astype(dtype),
    reference_logprobs=(rng.normal(size=(P, G, T)) * 0.3 - 3.4).astype(dtype),
  )


def in_rows(
  batch, *, rows=10**6, mesh=None, length=12, alignment=1, several=True, has_short_rows=False
):
  """The batch packed into rows, in micro-batches of `rows` rows on each device, or in one.

  Args:
    batch: as `make_batch` makes it.
    mesh: where the batch is placed; None leaves it on the host.
    alignment: see `RowLayout`.
    several: whether micro-batches of that size must be several, or one; None: any number.
    has_short_rows: see `RowLayout`.
  """
  devices = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
  P, G, T = batch.tokens.shape
  layout = row_layout(
    prompts=P,
    group_size=G,
    max_prompt_length=batch.prompts.tokens.shape[1],
    max_response_length=T,
    length=length,
    alignment=alignment,
    devices=devices,
    tokens_per_micro_batch=rows * length,
    has_short_rows=has_short_rows,
  )
  found = pack_batch(batch, layout)
  count = found.packed.num_micro_batches if several else found.packed.tokens.shape[0]
  assert several in (None, bool(count > 1)), layout
  return found if mesh is None else sharding.batch_to_devices(found, mesh)


@functools.partial(jax.jit, static_argnames="method")
def _update_gradient(params, batch, coefficients, teacher, key, *, method):
  estimate = functools.partial(estimate_coefficients, (), method=method)
  if coefficients is not None:
    estimate = lambda batch: Estimate(coefficients, coefficients, {})
  return update_gradient(params, {}, batch, estimate, key, method=method, teacher=teacher)


def gradient_of(method, batch, params, coefficients=None, teacher=None):
  """((loss, metrics), gradient) of an update, whose coefficients are the advantage's by default."""
  return _update_gradient(params, batch, coefficients, teacher, jax.random.key(0), method=method)


def relative_distance(a, b):
  """‖a − b‖ / ‖b‖ of two trees, in NumPy: in jax each shape of a leaf would be a program."""
  difference = jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), a, b)
  norm = lambda tree: np.sqrt(sum(np.sum(np.square(np.abs(x))) for x in jax.tree.leaves(tree)))
  return float(norm(difference) / norm(jax.device_get(b)))
