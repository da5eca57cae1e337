"""Rates of the parts of an update, against that of a large product on the same machine.

  python experiments/benchmarks/update_parts.py --workload=w4 --rounds=5

Each part is jitted code of the update, timed alone at the shape of one micro-batch of a workload of
`grpo_step.py`, with all responses at full length:

  layers      all layers on a micro-batch's rows; with an embedding of negligible cost
  attention   that of all layers alone, which `layers` contains
  head        log-probabilities and entropies of the rows' targets
  embedding   its lookup and gradient
  sum         adding a micro-batch's gradient to the others'
  optimizer   the norm of the gradient, AdamW, and new parameters; once per update
  update      the whole update, all of its micro-batches

A part and the product of two f32[4096, 4096] take turns. Seconds are the least of all rounds, since
others may use the machine too; `--clock=processor` counts those of this process on all cores. A
backward pass is timed as both passes less the forward one.
Operations are those of matrix products as plain differentiation needs them, so that those computed
again in a backward pass count in its seconds only. `share` is the rate over that of the large
product. The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from experiments.benchmarks import grpo_step  # sets the environment, before jax is imported

# isort: split
import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from experiments.benchmarks.flops import product_flops
from experiments.benchmarks.salt_overhead import random_batch, time_interleaved
from experiments.benchmarks.tables import hardware
from rlvr_jax.models.functional import transformer
from rlvr_jax.ops.logprobs import token_statistics
from rlvr_jax.ops.precision import with_matmul_precision
from rlvr_jax.ops.row_attention import row_attention
from rlvr_jax.rollouts.packing import pack_batch
from rlvr_jax.train.setup.build import Parts, build
from rlvr_jax.train.setup.programs import abstract_batch
from rlvr_jax.types import Array, Head, Rows, TrainBatch
from rlvr_jax.update.step import initial_state

_FEW = 128  # rows of an embedding of negligible cost
_SIDE = 4096  # of the large product

_OVERRIDES = flags.DEFINE_string(
  "overrides", "{}", 'Fields of the network to replace, as JSON: \'{"remat": "dots"}\'.'
)
_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
_CLOCK = flags.DEFINE_enum("clock", "wall", list(_CLOCKS), "What seconds are.")
_PARTS = flags.DEFINE_list("parts", None, "Parts to time; all by default.")


class Call(NamedTuple):
  """A function that is timed, and the operations of its matrix products that an update needs."""

  function: Callable
  args: tuple[Any, ...]
  flops: int
  donates: bool = False  # whether the result replaces the first argument


def make_product() -> Call:
  square = jnp.ones((_SIDE, _SIDE), jnp.float32)
  return Call(jnp.matmul, (square, square), 2 * _SIDE**3)


def make_passes(function: Callable, params: Any, *data: Any) -> dict[str, Call]:
  """The forward pass (params, *data) → results, and both passes, for a gradient of 1 of all."""

  def both(params, *data):
    results, pullback = jax.vjp(lambda params: function(params, *data), params)
    return results, pullback(jax.tree.map(jnp.ones_like, results))

  flops = product_flops(jax.make_jaxpr(function)(params, *data))
  forward = Call(function, (params, *data), flops)
  return {"forward": forward, "both": Call(both, (params, *data), 3 * flops)}


def make_layers(parts: Parts, batch: TrainBatch) -> dict[str, Call]:
  model = transformer(dataclasses.replace(parts.model.config, vocab_size=_FEW))
  tokens, _, rows = first_rows(batch)
  params = jax.jit(model.init)(jax.random.key(0))
  return make_passes(model.row_hidden, params, tokens % _FEW, rows)


def make_attention(parts: Parts, batch: TrainBatch) -> dict[str, Call]:
  """Attention of all layers; the output of one is the queries of the next."""
  c, (tokens, _, rows) = parts.model.config, first_rows(batch)
  heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
  inputs = tuple(
    normal(seed, (*tokens.shape, n, c.head_dim), c.compute_dtype) for seed, n in enumerate(heads)
  )

  def attend(inputs, rows):
    queries, *of_keys = inputs
    layer = lambda x, _: (row_attention(x, *of_keys, rows, scale=c.head_dim**-0.5), None)
    return jax.lax.scan(layer, queries, None, length=c.num_layers)[0]

  return make_passes(attend, inputs, rows)


def make_head(parts: Parts, batch: TrainBatch) -> dict[str, Call]:
  c, (tokens, targets, _) = parts.model.config, first_rows(batch)
  hidden = normal(0, (*tokens.shape, c.width), c.compute_dtype)
  kernel = normal(1, (c.vocab_size, c.width), c.param_dtype)
  kernel = kernel if c.tied_head else kernel.T

  def statistics(inputs, targets):
    hidden, kernel = inputs
    head = Head(kernel.T if c.tied_head else kernel, 1.0, c.final_soft_cap)
    found = token_statistics(hidden, head, targets)
    return found.logprobs, found.entropy

  return make_passes(statistics, (hidden, kernel), targets)


def make_embedding(parts: Parts, batch: TrainBatch) -> dict[str, Call]:
  c, (tokens, _, _) = parts.model.config, first_rows(batch)
  embedding = normal(0, (c.vocab_size, c.width), c.param_dtype)
  return make_passes(lambda embedding, tokens: embedding[tokens], embedding, tokens)


def make_sum(parts: Parts, batch: TrainBatch) -> dict[str, Call]:
  del batch
  draw = lambda seed: jax.jit(parts.model.init)(jax.random.key(seed))
  add = lambda total, more: jax.tree.map(jnp.add, total, more)
  return {"forward": Call(add, (draw(0), draw(1)), 0, donates=True)}


def make_optimizer(parts: Parts, batch: TrainBatch) -> dict[str, Call]:
  del batch

  def optimize(now, gradient):
    params, state = now
    norm = optax.tree.norm(gradient)
    updates, new_state = parts.method.optimizer.update(gradient, state, params)
    proposed = optax.apply_updates(params, updates), new_state
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), proposed, now)

  draw = lambda seed: jax.jit(parts.model.init)(jax.random.key(seed))
  now = draw(0), jax.jit(parts.method.optimizer.init)(draw(0))
  return {"forward": Call(optimize, (now, draw(1)), 0, donates=True)}


def make_update(parts: Parts, batch: TrainBatch) -> dict[str, Call]:
  init = lambda key: initial_state(parts.method, parts.model.init(key), jnp.zeros(()))
  step = lambda state, batch: parts.programs.train_step(state, {}, batch)[0]
  state = jax.jit(init)(jax.random.key(0))
  return {"forward": Call(step, (state, batch), 0, donates=True)}


PARTS: dict[str, Callable[[Parts, TrainBatch], dict[str, Call]]] = {
  "layers": make_layers,
  "attention": make_attention,
  "head": make_head,
  "embedding": make_embedding,
  "sum": make_sum,
  "optimizer": make_optimizer,
  "update": make_update,
}


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def first_rows(batch: TrainBatch) -> tuple[Array, Array, Rows]:
  """Tokens, targets and rows of the first micro-batch, [R, L]."""
  assert batch.packed is not None
  packed = batch.packed
  return jax.tree.map(lambda x: x[0], (packed.tokens, packed.targets, packed.rows))


def full_batch(parts: Parts) -> TrainBatch:
  """A batch of full-length responses in the rows of a run."""
  placement = parts.placement
  shapes = abstract_batch(parts.shape, placement.row_layout, placement.mesh)
  batch = random_batch(jax.random.key(0), shapes, parts.model.config.vocab_size)
  return jax.tree.map(jnp.asarray, pack_batch(batch, placement.row_layout))


def jitted(call: Call, precision: str) -> Callable[[], Any]:
  """Makes a function without arguments of a call, compiled as a run compiles its programs."""
  function = with_matmul_precision(call.function, precision)
  function = jax.jit(function, donate_argnums=(0,) if call.donates else ())
  args = list(call.args)

  def run():
    result = function(*args)
    if call.donates:
      args[0] = result
    return result

  return run


def measure(parts: Parts, batch: TrainBatch, name: str, rounds: int) -> dict[str, Any]:
  """Seconds, operations per second and share of the large product's rate of a part's passes."""
  calls = PARTS[name](parts, batch) | {"product": make_product()}
  precision = parts.model.config.precision
  runs = {k: jitted(call, precision) for k, call in calls.items()}
  times = time_interleaved(runs, rounds, clock=_CLOCKS[_CLOCK.value])
  return rates({k: min(x) for k, x in times.items()}, {k: x.flops for k, x in calls.items()})


def rates(seconds: Mapping[str, float], flops: Mapping[str, int]) -> dict[str, dict[str, float]]:
  """Seconds of each pass, and its rate if it has products; `backward` is both passes less one."""
  costs = {name: (seconds[name], flops[name]) for name in seconds}
  if "both" in costs:
    costs["backward"] = tuple(x - y for x, y in zip(costs["both"], costs["forward"], strict=True))
  large = flops["product"] / seconds["product"]
  rows = {}
  for name, (s, operations) in costs.items():
    rows[name] = {"s": round(s, 4)}
    if operations:
      rate = operations / s
      rows[name] |= {"gflop_per_s": round(rate / 1e9, 1), "share": round(rate / large, 3)}
  return rows


def main(argv: list[str]) -> None:
  del argv
  workload, tokens = flags.FLAGS.workload, flags.FLAGS.tokens_per_micro_batch
  config = grpo_step.make_config(workload, tokens)
  config.model.overrides.update(json.loads(_OVERRIDES.value))
  parts = build(config, task=grpo_step.make_task(), tokenizer=grpo_step.make_tokenizer(workload))
  names = _PARTS.value or list(PARTS)
  if unknown := set(names) - set(PARTS):
    raise app.UsageError(f"--parts: {sorted(unknown)} unknown; choose some of {list(PARTS)}")
  batch = full_batch(parts)
  assert batch.packed is not None
  result = {
    "workload": workload,
    "overrides": json.loads(_OVERRIDES.value),
    "rows": batch.packed.tokens.shape[1:],
    "micro_batches": int(batch.packed.num_micro_batches),
    "rounds": flags.FLAGS.rounds,
    "clock": _CLOCK.value,
    "hardware": hardware(),
    "jax": jax.__version__,
  }
  for name in names:
    result[name] = measure(parts, batch, name, flags.FLAGS.rounds)
    print(name, result[name], file=sys.stderr, flush=True)
  result["peak_rss_mib"] = grpo_step.peak_rss_mib()
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
