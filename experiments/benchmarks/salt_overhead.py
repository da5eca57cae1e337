"""Cost of SALT in an update step: floating-point operations, seconds, memory.

  python experiments/benchmarks/salt_overhead.py
  python experiments/benchmarks/salt_overhead.py --sections=wall,extrapolated --rounds=15

The update is `train_step` in one micro-batch, where the network runs once; generation is apart.
Routes to the Gram matrix: `streaming` (exact, the default of configs/base.py), `sketch` (its
default sizes), and `materialized`, the authors' way: the gradients of the output head's kernel of
all rollouts side by side, f32[B, D·V], formed one rollout at a time. `plain` is the same update
without reweighting. Shapes: P prompts of 256 tokens with 8 responses of 1024 tokens each. Of the
prompt, which is computed once for its 8 responses, comes 3 % of the trunk's work; a longer one
makes every ratio smaller.

Sections, each a table in results/salt_overhead_BACKEND.md, numbers in a .json next to it; one that
is not run keeps its last table:

  flops         of matrix products, from the jaxpr on shapes alone, against the limits
  check         the counter against XLA's count of a small update without loops
  wall          the W1 model of grpo_step.py, the jitted update itself, routes in turn
  extrapolated  Qwen 2.5 1.5B and 7B as L·t_block + t_head + t_gram, each timed on a part of it
  memory        of the compiled update: what it holds at its peak
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))  # the repository's root

from experiments.benchmarks import grpo_step  # sets the environment, before jax is imported
from experiments.benchmarks.flops import product_flops

# isort: split
import jax
import jax.numpy as jnp
import ml_collections
from absl import app, flags

from experiments.benchmarks.tables import Row, hardware, table
from rlvr_jax.configs import base
from rlvr_jax.geometry import GramContext, GramFn
from rlvr_jax.models.functional import Model, transformer
from rlvr_jax.models.presets import preset
from rlvr_jax.ops.logprobs import head_logits
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup import build, programs
from rlvr_jax.types import Array, Forward, Head, Params, Prompts, TrainBatch, TrainState
from rlvr_jax.update.objective import Method, policy_forward
from rlvr_jax.update.step import initial_state, train_step

ROUTES = ("plain", "streaming", "sketch", "materialized")
PUBLISHED = ("qwen2.5_1.5b", "qwen2.5_7b")
_PROMPT_LENGTH, _RESPONSE_LENGTH, _GROUP_SIZE = 256, 1024, 8
_SLACK = 1.02  # on the products of the size of the head's
_MOST_SKETCH_PRODUCTS = 0.2
_MOST_RATIO = {"qwen2.5_1.5b": 1.08, "qwen2.5_7b": 1.045}  # 64 rollouts, full rematerialisation
_MOST_GROWTH = 0.05  # of the update's memory
_FEW = 128  # rows of an embedding that is to cost nothing

_SECTIONS = flags.DEFINE_list("sections", None, "Which tables to make; all by default.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Of each route, `wall`.", lower_bound=1)
_LARGE_ROUNDS = flags.DEFINE_integer("large_rounds", 3, "Same, `extrapolated`.", lower_bound=1)
_TOKENS = flags.DEFINE_integer(
  "tokens", 128, "Of block and head in `extrapolated`; a multiple of 64.", lower_bound=64
)
_COLUMNS = flags.DEFINE_integer(
  "columns", 256, "Of the vocabulary, whose Gram `extrapolated` measures.", lower_bound=128
)
_RESULTS = flags.DEFINE_string(
  "results", str(pathlib.Path(__file__).parent / "results"), "Folder for the tables."
)


_NOTES = {
  "flops": """\
Operations of all matrix products of one update, the trunk with its attention and the optimizer
included, each times the lengths of the loops around it. What is not a matrix product is not
counted: elementwise work, and the eigenvectors of a B×B matrix. B = `rollouts`, T = 1024; one head
product is 2·B·T·D·V. `remat`: none; dots, which keeps most matrix products and is the presets'
default; full, which the limits on the ratio are for. The authors' way takes the same products as
streaming; what it costs is memory, below.""",
  "check": """\
A small update (8 rollouts of 64 tokens, 2 layers unrolled, D = 256, V = 2048) in which every loop
has one iteration, so that XLA counts all of it. `lowered` is XLA's count before optimization: the
same products, and 1 to 2 % of elementwise work. For the sketch that includes its random signs,
whose number does not grow with the batch. `compiled` is less by about one head product. With one
chunk, the head's backward pass computes the logits of its forward pass again, and the compiler
merges them. With many chunks, as at the real shapes, it cannot.""",
  "wall": """\
W1: 16 prompts × 8 rollouts of 64 tokens, 3.28 M parameters, V = 512, one micro-batch. A harsh case:
B/T is 2, so that streaming takes 4 head products. Routes in turn within every round; the ratio is
of the two times of one round.""",
  "extrapolated": """\
Seconds of a complete update of 64 rollouts of 1024 tokens, with full rematerialization, as
L·t_block + t_head + t_gram. Each part is measured in the model's full width on less of what it
loops over, and scaled by its counted operations. The block is one layer on few tokens; attention's
longer context is in the scale. The head is log-probabilities and their gradient on few positions,
chunk by chunk, with all 64 rollouts and the full vocabulary. The Gram matrix has all rollouts and
positions, block by block, on few columns of the vocabulary. Left out are the optimizer, the
embedding's lookup, the loss and SALT itself. The matrix of `materialized` would hold B·D·V numbers:
56 and 130 GiB of float32. Its seconds are those it would take where that fits.""",
  "memory": """\
Of the compiled update (its own analysis; nothing is allocated): buffers in addition to arguments
and results. 64 rollouts of 1024 tokens with full rematerialization, and W1 as above. The growth is
0 where the peak is elsewhere, in the trunk's backward pass, and what the route holds is freed by
then.""",
}


class Update(NamedTuple):
  """An update on shapes alone."""

  method: Method
  state: TrainState
  batch: TrainBatch

  @property
  def step(self) -> Callable:
    return lambda state, batch: train_step(state, {}, batch, method=self.method)

  @property
  def flops(self) -> int:
    return product_flops(jax.make_jaxpr(self.step)(self.state, self.batch))

  @property
  def head_product(self) -> int:
    """Operations of one product of all response tokens' hidden states with the head's kernel."""
    settings = self.method.model.config
    return 2 * self.batch.tokens.size * settings.width * settings.vocab_size


def materialized() -> GramFn:
  """The authors' Gram matrix: all gradients F of the head's kernel, f32[B, D·V], then F Fᵀ.

  As favorable to it as can be: hidden states are those of the update's own forward pass, and one
  rollout's logits exist at a time.
  """

  def gram(
    trained: Params, frozen: Params, batch: TrainBatch, forward: Forward, setting: GramContext
  ) -> Array:
    head = setting.model.head(setting.model.combine(trained, frozen))
    flat = lambda x: x.reshape(-1, *x.shape[2:])

    def feature(rollout):
      hidden, tokens, mask = rollout

      def loss(kernel):
        logits = head_logits(hidden, head._replace(kernel=kernel)) / setting.temperature
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(mask > 0, logprobs, 0.0))

      return jax.grad(loss)(head.kernel).reshape(-1)

    rollouts = forward.hidden[0], flat(batch.tokens), flat(batch.mask)
    features = jax.lax.map(feature, rollouts)
    return features @ features.T

  return GramFn(gram)


def make_method(
  config: ml_collections.ConfigDict, route: str, model: Model | None = None
) -> Method:
  """The method of `config` with SALT by a route, or plain; the model is the configured one."""
  config = ml_collections.ConfigDict(config)
  config.reweighting = "none" if route == "plain" else "salt"
  config.gram = "sketch" if route == "sketch" else "streaming"
  mesh = sharding.make_mesh(**config.mesh)
  method = build.make_method(config, model or build.make_model(config, mesh, 1), mesh)
  return method._replace(gram=materialized()) if route == "materialized" else method


def abstract_update(config: ml_collections.ConfigDict, route: str) -> Update:
  method = make_method(config, route)
  base = jax.eval_shape(method.model.init, jax.random.key(0))
  state = programs.abstract_state(config, method, base, sharding.make_mesh(**config.mesh))
  return Update(method, state, abstract_batch(config))


def abstract_batch(config: ml_collections.ConfigDict) -> TrainBatch:
  """A batch of full responses, each in a row of its own; operations depend on shapes alone."""
  mesh = sharding.make_mesh(**config.mesh)
  layout = programs.make_row_layout(config, "reference", mesh)
  return dataclasses.replace(programs.abstract_batch(config, layout, mesh), packed=None)


def published_config(
  name: str, *, rollouts: int = 64, remat: str = "full"
) -> ml_collections.ConfigDict:
  c = base.get_config()
  c.model.preset = name
  c.model.overrides = dict(remat=remat, compute_dtype=compute_dtype())
  c.batch.prompts, c.batch.group_size = rollouts // _GROUP_SIZE, _GROUP_SIZE
  c.max_prompt_length, c.max_response_length = _PROMPT_LENGTH, _RESPONSE_LENGTH
  return c


def compute_dtype() -> str:
  """The dtype to time in: a CPU multiplies bfloat16 in float32, with an additional copy."""
  return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def flops_section(
  *, sizes: Sequence[int] = (64, 512), remats: Sequence[str] = ("none", "dots", "full")
) -> list[Row]:
  rows = []
  for name in PUBLISHED:
    for rollouts in sizes:
      for remat in remats:
        config = published_config(name, rollouts=rollouts, remat=remat)
        plain = abstract_update(config, "plain").flops
        for route in ROUTES[1:]:
          update = abstract_update(config, route)
          flops = update.flops
          added = (flops - plain) / update.head_product
          row = dict(model=name, rollouts=rollouts, remat=remat, route=route)
          row |= {"FLOPs, plain": plain, "FLOPs": flops, "ratio": flops / plain}
          rows.append(row | {"head products added": added} | verdict(**row, products=added))
  return rows


def verdict(model: str, rollouts: int, remat: str, route: str, products: float, **counts) -> Row:
  """The limits on a row of `flops`, and whether they are met."""
  limits = []
  if route == "streaming":
    limits.append((products, _SLACK * (2 + rollouts / _RESPONSE_LENGTH), " products"))
    if rollouts == 64 and remat == "full":
      limits.append((counts["ratio"], _MOST_RATIO[model], "×"))
  if route == "sketch":
    limits.append((products, _MOST_SKETCH_PRODUCTS, " products"))
  text = ", ".join(f"≤ {most:.4g}{unit}" for _, most, unit in limits)
  met = all(value <= most for value, most, _ in limits)
  return {"limit": text or "–", "met": ("yes" if met else "NO") if limits else "–"}


def check_section() -> list[Row]:
  """Checks counts with unrolled layers, one chunk and one block: no loop runs twice."""
  c = base.get_config()
  shape = dict(vocab_size=2048, width=256, num_heads=4, head_dim=64, mlp_width=1024)
  c.model.overrides = dict(**shape, num_layers=2, unroll_layers=2, remat="full")
  c.batch.prompts, c.batch.group_size = 2, 4
  c.max_prompt_length, c.max_response_length = 16, 64
  rows, first = [], None
  for route in ROUTES[:-1]:  # the last one loops over rollouts
    update = abstract_update(c, route)
    lowered = jax.jit(update.step).lower(update.state, update.batch)
    compiled = lowered.compile()
    found = [update.flops, *(x.cost_analysis()["flops"] for x in (lowered, compiled))]
    first = first or found
    added = [(x - y) / update.head_product for x, y in zip(found, first, strict=True)]
    row = {"route": route, "counted": found[0], "lowered": found[1], "compiled": found[2]}
    row |= {"compiled / counted": found[2] / found[0]}
    row |= {"head products added, counted": added[0], "added, compiled": added[2]}
    row |= {"removed by the compiler, head products": (found[1] - found[2]) / update.head_product}
    rows.append(row)
  return rows


def wall_section(rounds: int) -> list[Row]:
  config = grpo_step.make_config("w1")
  batch = random_batch(jax.random.key(0), abstract_batch(config), vocabulary=512)
  updates = {route: abstract_update(config, route) for route in ROUTES}
  calls = {route: stepping(update, batch) for route, update in updates.items()}
  times = interleaved(calls, rounds)
  rows = []
  for route in ROUTES:
    ratios = [x / y for x, y in zip(times[route], times["plain"], strict=True)]
    row = {"route": route, "median s": statistics.median(times[route])}
    row |= {"median ratio": statistics.median(ratios)}
    row |= {"lowest": min(ratios), "highest": max(ratios)}
    rows.append(row | {"ratio of FLOPs": updates[route].flops / updates["plain"].flops})
  return rows


def stepping(update: Update, batch: TrainBatch) -> Callable[[], Any]:
  """A function that runs one update per call, jitted and with a donated state as in training."""
  step = jax.jit(update.step, donate_argnums=0)
  build = lambda key: initial_state(update.method, update.method.model.init(key), jnp.zeros(()))
  state = jax.jit(build)(jax.random.key(0))

  def call():
    nonlocal state
    state, metrics = step(state, batch)
    return metrics

  return call


def random_batch(key: Array, shapes: TrainBatch, vocabulary: int) -> TrainBatch:
  """Prompts and responses of full length, rewards of 0 and 1, and a uniform behavior policy."""
  keys = jax.random.split(key, 3)
  draw = lambda key, like: jax.random.randint(key, like.shape, 0, vocabulary)
  rewards = jax.random.bernoulli(keys[2], 0.5, shapes.rewards.shape).astype(jnp.float32)
  P, S = shapes.prompts.tokens.shape
  return TrainBatch(
    prompts=Prompts(tokens=draw(keys[0], shapes.prompts.tokens), lengths=jnp.full(P, S)),
    tokens=draw(keys[1], shapes.tokens),
    mask=jnp.ones(shapes.mask.shape),
    behavior_logprobs=jnp.full(shapes.mask.shape, -math.log(vocabulary)),
    rewards=rewards,
    correct=rewards,
    valid=jnp.ones(rewards.shape, bool),
    solve_rate=rewards.mean(axis=1),
  )


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
  """Seconds of each call in every round, after one call that compiles; the order rotates."""
  for call in calls.values():
    jax.block_until_ready(call())
  names, times = list(calls), {name: [] for name in calls}
  for turn in range(rounds):
    shift = turn % len(names)
    for name in names[shift:] + names[:shift]:
      began = time.perf_counter()
      jax.block_until_ready(calls[name]())
      times[name].append(time.perf_counter() - began)
  return times


def extrapolated_section(
  names: Sequence[str], *, tokens: int, columns: int, rounds: int
) -> list[Row]:
  """Seconds of a complete update, L·t_block + t_head + t_gram, each scaled by its operations."""
  rows = []
  for name in names:
    whole, block, head, gram = (published_config(name) for _ in range(4))
    block.batch.prompts, block.batch.group_size = 1, 4
    block.max_response_length, block.max_prompt_length = tokens // 4, tokens // 16
    head.max_response_length = tokens // (head.batch.prompts * head.batch.group_size)
    gram.model.overrides.vocab_size = columns
    wholes, parts = parts_of(whole, whole, whole), parts_of(block, head, gram)
    calls = {key: functools.partial(jax.jit(x.function), *concrete(x)) for key, x in parts.items()}
    times = {key: statistics.median(x) for key, x in interleaved(calls, rounds).items()}
    flops = {key: part.flops for key, part in wholes.items()}
    scaled = {key: times[key] * flops[key] / parts[key].flops for key in parts}
    layers = preset(name).num_layers
    totals = lambda by_part, layers=layers: {x: sum(of_route(by_part, x, layers)) for x in ROUTES}
    in_time, in_flops = totals(scaled), totals(flops)
    for route in ROUTES:
      row = {"model": name, "route": route}
      measured = of_route(times, route, 1)
      row |= dict(zip(("t_block s", "t_head s", "t_gram s"), measured, strict=True))
      extrapolated = of_route(scaled, route, layers)
      row |= dict(zip(("trunk s", "head s", "Gram s"), extrapolated, strict=True))
      row |= {"ratio": in_time[route] / in_time["plain"]}
      rows.append(row | {"ratio of FLOPs": in_flops[route] / in_flops["plain"]})
  return rows


class Part(NamedTuple):
  """A part of an update that can be timed alone."""

  function: Callable
  args: tuple[Any, ...]  # shapes; the second one is the batch

  @property
  def flops(self) -> int:
    return product_flops(jax.make_jaxpr(self.function)(*self.args))


def parts_of(
  block: ml_collections.ConfigDict,
  head: ml_collections.ConfigDict,
  gram: ml_collections.ConfigDict,
) -> dict[str, Part]:
  """All parts that updates consist of, each of a configuration of its own."""
  parts = {"block": block_part(block)}
  parts |= {f"head, {route}": head_part(head, route) for route in ("plain", "sketch")}
  return parts | {f"Gram, {route}": gram_part(gram, route) for route in ROUTES[1:]}


def of_route(by_part: Mapping[str, float], route: str, layers: int) -> tuple[float, float, float]:
  """Trunk, head and Gram matrix; the forward pass of a sketch projects, that of others does not."""
  head = by_part["head, sketch" if route == "sketch" else "head, plain"]
  return layers * by_part["block"], head, by_part.get(f"Gram, {route}", 0.0)


def block_part(config: ml_collections.ConfigDict) -> Part:
  """One layer forward, again, and backward; its embedding of a few rows costs nothing."""
  settings = preset(config.model.preset, **config.model.overrides)
  model = transformer(dataclasses.replace(settings, num_layers=1, vocab_size=_FEW))

  def gradient(params, batch):
    hidden_of = lambda params: model.response_hidden(params, batch.prompts, batch.tokens)
    hidden, pullback = jax.vjp(hidden_of, params)
    return pullback(hidden)

  params = jax.eval_shape(model.init, jax.random.key(0))
  return Part(gradient, (params, abstract_batch(config)))


def head_part(config: ml_collections.ConfigDict, route: str) -> Part:
  """Log-probabilities, what the route accumulates besides, and the backward pass."""
  method, params, batch = without_trunk(config, route)

  def gradient(params, batch):
    score = functools.partial(policy_forward, frozen={}, batch=batch, method=method)
    found, pullback, forward = jax.vjp(score, params, has_aux=True)
    return pullback(found), forward

  return Part(gradient, (params, batch))


def gram_part(config: ml_collections.ConfigDict, route: str) -> Part:
  """The Gram matrix from the results of the forward pass."""
  method, params, batch = without_trunk(config, route)
  gram = lambda params, *rest: method.gram.gram(params, {}, *rest, method.gram_context)
  forward_pass = functools.partial(policy_forward, method=method)
  _, forward = jax.eval_shape(forward_pass, params, {}, batch)
  return Part(gram, (params, batch, forward))


def without_trunk(
  config: ml_collections.ConfigDict, route: str
) -> tuple[Method, Params, TrainBatch]:
  """The method with a network whose final hidden states are parameters; shapes of its inputs."""
  settings = preset(config.model.preset, **config.model.overrides)
  transposed = lambda kernel: kernel.T if settings.tied_head else kernel
  model = Model(
    config=settings,
    init=None,
    head=lambda params: Head(transposed(params["kernel"]), 1.0, settings.final_soft_cap),
    response_hidden=lambda params, prompts, tokens: params["hidden"],
    row_hidden=None,
    decoding_params=None,
    prefill=None,
    rotary=None,
    decode=None,
  )
  batch = abstract_batch(config)
  D, V = settings.width, settings.vocab_size
  shape = (V, D) if settings.tied_head else (D, V)
  params = {
    "hidden": jax.ShapeDtypeStruct((*batch.tokens.shape, D), settings.compute_dtype),
    "kernel": jax.ShapeDtypeStruct(shape, settings.param_dtype),
  }
  method = make_method(config, route, model)
  return method._replace(gram_context=GramContext(model)), params, batch


def concrete(part: Part) -> tuple[Any, ...]:
  """Arrays with numbers that are cheap to generate: time does not depend on them."""
  params, batch, *rest = part.args
  wave = lambda x: 0.02 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
  fill = lambda: jax.tree.map(lambda x: wave(x).astype(x.dtype), (params, *rest))
  params, *rest = jax.jit(fill)()
  return params, random_batch(jax.random.key(0), batch, _FEW), *rest


def memory_section(configs: Mapping[str, ml_collections.ConfigDict]) -> list[Row]:
  rows = []
  for name, config in configs.items():
    plain = None
    for route in ROUTES:
      update = abstract_update(config, route)
      step = jax.jit(update.step, donate_argnums=0)
      held = gibibytes_of(step.lower(update.state, update.batch).compile())
      plain = plain or held
      growth = {key: held[key] / plain[key] - 1 for key in held}
      row = {"model": name, "route": route, "GiB, temporary": held["temporary"]}
      row |= {"growth": growth["temporary"], "GiB with arguments and results": held["all"]}
      alone = None
      if route != "plain":
        part = gram_part(config, route)
        alone = gibibytes_of(jax.jit(part.function).lower(*part.args).compile())["temporary"]
      row |= {"growth of all": growth["all"], "GiB, temporary, Gram alone": alone}
      if route in ("streaming", "sketch"):
        met = growth["temporary"] < _MOST_GROWTH
        row |= {"limit": f"growth < {_MOST_GROWTH:.0%}", "met": "yes" if met else "NO"}
      rows.append(row)
  return rows


def gibibytes_of(compiled: Any) -> dict[str, float]:
  m = compiled.memory_analysis()
  held = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
  temporary = m.temp_size_in_bytes
  return {"temporary": temporary / 2**30, "all": (temporary + held) / 2**30}


def report(results: Mapping[str, Any]) -> str:
  """Markdown of the available sections."""
  conditions = "; ".join(f"{name}: {value}" for name, value in results["conditions"].items())
  parts = ["# What SALT adds to an update step", f"Conditions: {conditions}."]
  for name in _NOTES:
    if name in results["sections"]:
      parts += [f"## {name}", _NOTES[name], table(results["sections"][name])]
  return "\n\n".join(parts) + "\n"


def write(folder: pathlib.Path, sections: Mapping[str, list[Row]]) -> str:
  """Replaces the sections by new versions; drops those measured under other conditions."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"salt_overhead_{jax.default_backend()}"
  results = {"conditions": conditions(), "sections": dict(sections)}
  data = path.with_suffix(".json")
  if data.exists():
    before = json.loads(data.read_text())
    if before["conditions"] == results["conditions"]:
      results["sections"] = before["sections"] | results["sections"]
  data.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
  text = report(results)
  path.with_suffix(".md").write_text(text)
  return text


def conditions() -> dict[str, str]:
  return {"hardware": hardware(), "jax": jax.__version__, "compute dtype": compute_dtype()}


def main(argv: list[str]) -> None:
  del argv
  memory_configs = {"w1": grpo_step.make_config("w1")}
  memory_configs |= {name: published_config(name) for name in PUBLISHED}
  makers = {
    "flops": flops_section,
    "check": check_section,
    "wall": lambda: wall_section(_ROUNDS.value),
    "extrapolated": lambda: extrapolated_section(
      PUBLISHED, tokens=_TOKENS.value, columns=_COLUMNS.value, rounds=_LARGE_ROUNDS.value
    ),
    "memory": lambda: memory_section(memory_configs),
  }
  chosen = _SECTIONS.value or list(makers)
  if unknown := set(chosen) - set(makers):
    raise app.UsageError(f"--sections: {sorted(unknown)} unknown; there are {list(makers)}")
  for name in chosen:
    print(f"# {name}", file=sys.stderr, flush=True)
    text = write(pathlib.Path(_RESULTS.value), {name: makers[name]()})
  print(text)


if __name__ == "__main__":
  app.run(main)
