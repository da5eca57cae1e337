"""Updates of a small network, and tokens that it samples, in some dtype against float64.

  JAX_PLATFORMS=cpu JAX_ENABLE_X64=1 python -m experiments.gpu.numerics --out=OUT --dtype=float64
  python -m experiments.gpu.numerics --out=OUT --dtype=bfloat16

The first command writes reference.npz; the second prints relative errors, |x − y| / |y| in the
Euclidean norm, as the last line, a JSON object. Changes of the parameters are those of plain
gradient descent: of GRPO, of a mixture of experts, and of SALT by each route to its Gram matrix.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bursts
from rlvr_jax.configs import base
from rlvr_jax.data import ByteTokenizer, Task
from rlvr_jax.rollouts.engine import Rollout
from rlvr_jax.rollouts.packing import pack_batch
from rlvr_jax.rollouts.programs import EnginePrograms
from rlvr_jax.rollouts.sampler import row_keys
from rlvr_jax.train.setup.build import Parts, build
from rlvr_jax.types import Prompts, Sampling, TrainBatch
from rlvr_jax.update.step import initial_state

VOCABULARY = 384
METHODS: dict[str, dict[str, Any]] = {
  "grpo": {},
  "mixture": {"experts": dict(num_experts=4, experts_per_token=2, expert_width=96)},
  "salt_streaming": {"gram": "streaming"},
  "salt_sketch": {"gram": "sketch(copies=4)"},
  "salt_per_rollout": {"gram": "per_rollout"},
}


def make_parts(dtype: str, attention: str, gram: str = "", experts: dict | None = None) -> Parts:
  """A run whose shapes cuDNN takes: heads of 64."""
  c = base.get_config()
  c.model.preset = "tiny"
  c.model.overrides = dict(
    compute_dtype=dtype, attention=attention, head_dim=64, vocab_size=VOCABULARY, **(experts or {})
  )
  if dtype == "float64":
    c.model.overrides["param_dtype"] = dtype
  c.batch.prompts, c.batch.group_size = 4, 4
  c.batch.tokens_per_micro_batch = 1024
  c.max_prompt_length, c.max_response_length = 16, 48
  c.warm_start.num_steps = 0
  c.optimizer = "sgd"
  c.learning_rate = "constant(peak=1.0, warmup=0)"
  if gram:
    c.reweighting, c.gram = "salt", gram
  task = Task(name="none", train=(), warm_start=(), held_out=(), grader="none:none")
  return build(c, task=task, tokenizer=ByteTokenizer())


def make_params(parts: Parts) -> Any:
  """Random parameters, the same numbers for every dtype."""
  random = np.random.default_rng(0)

  def draw(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.tree_util.keystr(path[-1:], simple=True) == "scale":
      return jnp.ones(shape.shape, shape.dtype)
    fan_in = shape.shape[-2] if len(shape.shape) > 2 else shape.shape[-1]
    numbers = random.normal(size=shape.shape).astype(np.float32) * fan_in**-0.5
    return jnp.asarray(numbers, shape.dtype)

  shapes = jax.eval_shape(parts.model.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(draw, shapes)


def make_batch(parts: Parts) -> TrainBatch:
  """A batch of responses of different lengths, the same for every dtype."""
  random = np.random.default_rng(1)
  shape = parts.shape
  P, G, T = shape.prompts, shape.group_size, shape.max_response_length
  S = shape.max_prompt_length
  lengths = random.integers(T // 2, T + 1, (P, G))
  mask = (np.arange(T) < lengths[..., None]).astype(np.float32)
  rewards = (random.random((P, G)) < 0.5).astype(np.float32)
  batch = TrainBatch(
    prompts=Prompts(
      tokens=random.integers(0, VOCABULARY, (P, S)).astype(np.int32),
      lengths=np.full(P, S, np.int32),
    ),
    tokens=random.integers(0, VOCABULARY, (P, G, T)).astype(np.int32),
    mask=mask,
    behavior_logprobs=np.full((P, G, T), -np.log(VOCABULARY), np.float32) * mask,
    rewards=rewards,
    correct=rewards,
    valid=np.ones((P, G), bool),
    solve_rate=rewards.mean(axis=1),
  )
  return jax.tree.map(jnp.asarray, pack_batch(batch, parts.placement.row_layout))


def changes(parts: Parts) -> np.ndarray:
  """What one update adds to all parameters, in float64."""
  params = make_params(parts)
  before = flatten(params)
  state = initial_state(parts.method, params, jnp.zeros(()))
  state, _ = parts.programs.train_step(state, {}, make_batch(parts))
  return flatten(state.params) - before


def sampler_gap(parts: Parts) -> float:
  """The largest difference of log-probabilities, in nats, between the sampler and the trainer."""
  params, batch = make_params(parts), make_batch(parts)
  programs, shape = parts.programs.engine, parts.shape
  engine = bursts.begin(programs, programs.load(params, {}))
  prompts = jax.tree.map(np.asarray, batch.prompts)
  groups = bursts.groups(engine, prompts, jax.random.key(0), shape.group_size)
  rollouts = bursts.sample(engine, groups)
  of_group = lambda x: np.reshape(x, (shape.prompts, shape.group_size, -1))
  tokens, sampled = (
    of_group([rollout.arrays[name] for rollout in rollouts])
    for name in ("tokens", "behavior_logprobs")
  )
  lengths = of_group([rollout.length for rollout in rollouts]).astype(np.int32)
  arguments = (params, {}, batch.prompts, tokens, lengths[..., 0])
  trained = np.asarray(parts.programs.logprobs_at_temperature_1(*arguments))
  return float(np.abs(trained - sampled)[np.arange(tokens.shape[-1]) < lengths].max())


def differing_rollouts(parts: Parts) -> int:
  """Rollouts whose bits differ between programs that read a part of the caches, or all of them."""
  params, random = make_params(parts), np.random.default_rng(2)
  lengths = (5, 30, 17)
  keys = row_keys(jax.random.key(3), len(lengths) + 1, 4)
  prompts = [random.integers(0, VOCABULARY, n).astype(np.int32) for n in (*lengths, 129)]

  def sample(order: Sequence[int]) -> list[Rollout]:
    programs = EnginePrograms(
      parts.model, Sampling(), slots=4, prefill_rows=2, max_prompt_length=129, max_new_tokens=257,
      stop_tokens=(3,), pad_token=0, compiler_options=parts.compiler_options.generation,
    )  # fmt: skip
    engine = bursts.begin(programs, programs.load(params, {}))
    groups = [[engine.rollout((i, g), prompts[i], keys[i, g]) for g in range(4)] for i in order]
    return bursts.sample(engine, groups)

  # The long prompt comes first, so that the programs for it read everything.
  some, all_of_them = sample([0, 1, 2]), sample([3, 2, 1, 0])
  names = ("tokens", "behavior_logprobs")
  same = lambda a, b: all(np.array_equal(a.arrays[name], b.arrays[name]) for name in names)
  return sum(not same(a, b) for a, b in zip(some, all_of_them, strict=False))


def flatten(tree: Any) -> np.ndarray:
  return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", required=True, type=pathlib.Path)
  parser.add_argument("--dtype", required=True, choices=["float64", "float32", "bfloat16"])
  parser.add_argument("--attention", default="auto")
  parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas")
  args = parser.parse_args()
  attention = "reference" if args.dtype == "float64" else args.attention
  found = {
    name: changes(make_parts(args.dtype, attention, **METHODS[name]))
    for name in args.methods.split(",")
  }
  path = args.out / "reference.npz"
  if args.dtype == "float64":
    np.savez(path, **found)
    return
  with np.load(path) as expected:
    error = lambda x, y: float(np.linalg.norm(x - y) / np.linalg.norm(y))
    errors = {name: error(x, expected[name]) for name, x in found.items()}
  parts = make_parts(args.dtype, attention)
  errors["sampler against trainer, nats"] = sampler_gap(parts)
  # XLA on CPU orders the sums of some products in bfloat16 by the number of a cache's blocks.
  if args.dtype != "bfloat16" or jax.default_backend() != "cpu":
    errors["rollouts that differ between programs"] = differing_rollouts(parts)
  print(json.dumps(errors))


if __name__ == "__main__":
  main()
