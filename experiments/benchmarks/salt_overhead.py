"""Cost of SALT in an update step: floating-point operations, seconds, memory.

  python experiments/benchmarks/salt_overhead.py
  python experiments/benchmarks/salt_overhead.py --sections=wall,extrapolated --rounds=15

The update is `train_step` in one micro-batch, so that the network runs once; generation is not
included. Routes to the Gram matrix: `streaming` (exact, the default of configs/base.py), `sketch`
(with its default sizes), and `materialized`, the authors' route: the gradients of the output head's
kernel of all rollouts side by side, f32[B, D·V], formed one rollout at a time. `plain` is the same
update without reweighting. Shapes: P prompts of 256 tokens with 8 responses of 1024 tokens each.
The prompt, computed once for its 8 responses, is 3 % of the trunk's work; longer prompts make all
ratios smaller.

Each section is a table in results/salt_overhead_BACKEND.md, with numbers in a .json file next to
it; a section that is not run keeps its last table:

  flops         FLOPs of matrix products, from the jaxpr on shapes, against the limits
  check         the counter against XLA's count of a small update without loops
  wall          the jitted update of the W1 model of grpo_step.py, routes in turn
  extrapolated  Qwen 2.5 1.5B and 7B as L·t_block + t_head + t_gram, each part timed on less work
  memory        peak memory of the compiled update
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
from rlvr_jax.train.setup.programs import make_row_layout
from rlvr_jax.types import Array, Forward, Head, Params, Prompts, TrainBatch, TrainState
from rlvr_jax.update.objective import Method, policy_forward
from rlvr_jax.update.step import initial_state, train_step

ROUTES = ("plain", "streaming", "sketch", "materialized")
PUBLISHED = ("qwen2.5_1.5b", "qwen2.5_7b")
_PROMPT_LENGTH, _RESPONSE_LENGTH, _GROUP_SIZE = 256, 1024, 8
_SLACK = 1.02  # on the number of head products
_MAX_SKETCH_PRODUCTS = 0.2
_MAX_RATIO = {"qwen2.5_1.5b": 1.08, "qwen2.5_7b": 1.045}  # 64 rollouts, full rematerialisation
_MAX_GROWTH = 0.05  # of the update's memory
_FEW = 128  # rows of an embedding of negligible cost

_SECTIONS = flags.DEFINE_list("sections", None, "Tables to make; all by default.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds of each route in `wall`.", lower_bound=1)
_LARGE_ROUNDS = flags.DEFINE_integer("large_rounds", 3, "Rounds in `extrapolated`.", lower_bound=1)
_TOKENS = flags.DEFINE_integer(
  "tokens", 128, "Tokens of block and head in `extrapolated`; a multiple of 64.", lower_bound=64
)
_COLUMNS = flags.DEFINE_integer(
  "columns",
  256,
  "Columns of the vocabulary whose Gram matrix `extrapolated` measures.",
  lower_bound=128,
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
  """An update as shapes, without numbers."""

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


def make_materialized_gram() -> GramFn:
  """Makes the authors' Gram matrix F Fᵀ from all gradients F of the head's kernel, f32[B, D·V].

  The implementation favors it: it reuses the hidden states of the update's own forward pass, and
  has the logits of only one rollout at a time.
  """

  def gram(
    trained: Params, frozen: Params, batch: TrainBatch, forward: Forward, setting: GramContext
  ) -> Array:
    head = setting.model.head(setting.model.combine(trained, frozen))

    def rollout_gradient(rollout):
      hidden, tokens, mask = rollout

      def loss(kernel):
        logits = head_logits(hidden, head._replace(kernel=kernel)) / setting.temperature
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(mask > 0, logprobs, 0.0))

      return jax.grad(loss)(head.kernel).reshape(-1)

    tokens, mask = (x.reshape(-1, *x.shape[2:]) for x in (batch.tokens, batch.mask))
    rollouts = forward.hidden[0], tokens, mask
    features = jax.lax.map(rollout_gradient, rollouts)
    return features @ features.T

  return GramFn(gram)


def make_method(
  config: ml_collections.ConfigDict, route: str, model: Model | None = None
) -> Method:
  """Makes the method of `config` with SALT by a route, or plain; None is the configured model."""
  config = ml_collections.ConfigDict(config)
  config.reweighting = "none" if route == "plain" else "salt"
  config.gram = "sketch(copies=4)" if route == "sketch" else "streaming"
  mesh = sharding.make_mesh(**config.mesh)
  if model is None:
    network = build.make_network(config.model, config.tokenizer, 1)
    model = build.make_model(network, None, build.batch_shape(config), mesh, tokens_per_row=0)
  method = build.make_method(config, model, mesh)
  return method._replace(gram=make_materialized_gram()) if route == "materialized" else method


def abstract_update(config: ml_collections.ConfigDict, route: str) -> Update:
  method = make_method(config, route)
  base = jax.eval_shape(method.model.init, jax.random.key(0))
  state = programs.abstract_state(method, base, sharding.make_mesh(**config.mesh))
  return Update(method, state, abstract_batch(config))


def abstract_batch(config: ml_collections.ConfigDict) -> TrainBatch:
  """Shapes of a batch of full-length responses, each in a separate row."""
  mesh = sharding.make_mesh(**config.mesh)
  shape = build.batch_shape(config)
  layout = make_row_layout(config.batch, shape, "reference", mesh)
  return dataclasses.replace(programs.abstract_batch(shape, layout, mesh), packed=None)


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
  """The dtype for timing: a CPU multiplies bfloat16 in float32, with an additional copy."""
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
  """Limits on a row of `flops`, and whether they are met."""
  limits = []
  if route == "streaming":
    limits.append((products, _SLACK * (2 + rollouts / _RESPONSE_LENGTH), " products"))
    if rollouts == 64 and remat == "full":
      limits.append((counts["ratio"], _MAX_RATIO[model], "×"))
  if route == "sketch":
    limits.append((products, _MAX_SKETCH_PRODUCTS, " products"))
  text = ", ".join(f"≤ {limit:.4g}{unit}" for _, limit, unit in limits)
  met = all(value <= limit for value, limit, _ in limits)
  return {"limit": text or "–", "met": ("yes" if met else "NO") if limits else "–"}


def check_section() -> list[Row]:
  """Checks counts with unrolled layers, one chunk and one block, so that loops run once."""
  c = base.get_config()
  shape = dict(vocab_size=2048, width=256, num_heads=4, head_dim=64, mlp_width=1024)
  c.model.overrides = dict(**shape, num_layers=2, unroll_layers=2, remat="full")
  c.batch.prompts, c.batch.group_size = 2, 4
  c.max_prompt_length, c.max_response_length = 16, 64
  rows = []
  first_counts = None
  for route in ROUTES[:-1]:  # the last route loops over rollouts
    update = abstract_update(c, route)
    lowered = jax.jit(update.step).lower(update.state, update.batch)
    compiled = lowered.compile()
    counts = [update.flops, *(x.cost_analysis()["flops"] for x in (lowered, compiled))]
    first_counts = first_counts or counts
    added = [(x - y) / update.head_product for x, y in zip(counts, first_counts, strict=True)]
    row = {"route": route, "counted": counts[0], "lowered": counts[1], "compiled": counts[2]}
    row |= {"compiled / counted": counts[2] / counts[0]}
    row |= {"head products added, counted": added[0], "added, compiled": added[2]}
    row |= {"removed by the compiler, head products": (counts[1] - counts[2]) / update.head_product}
    rows.append(row)
  return rows


def wall_section(rounds: int) -> list[Row]:
  config = grpo_step.make_config("w1")
  batch = random_batch(jax.random.key(0), abstract_batch(config), vocabulary=512)
  updates = {route: abstract_update(config, route) for route in ROUTES}
  calls = {route: make_step(update, batch) for route, update in updates.items()}
  times = time_interleaved(calls, rounds)
  rows = []
  for route in ROUTES:
    ratios = [x / y for x, y in zip(times[route], times["plain"], strict=True)]
    row = {"route": route, "median s": statistics.median(times[route])}
    row |= {"median ratio": statistics.median(ratios)}
    row |= {"lowest": min(ratios), "highest": max(ratios)}
    rows.append(row | {"ratio of FLOPs": updates[route].flops / updates["plain"].flops})
  return rows


def make_step(update: Update, batch: TrainBatch) -> Callable[[], Any]:
  """Makes a function that runs one jitted update per call, with a donated state as in training."""
  step = jax.jit(update.step, donate_argnums=0)

  def make_state(key: Array) -> TrainState:
    return initial_state(update.method, update.method.model.init(key), jnp.zeros(()))

  state = jax.jit(make_state)(jax.random.key(0))

  def call():
    nonlocal state
    state, metrics = step(state, batch)
    return metrics

  return call


def random_batch(key: Array, shapes: TrainBatch, vocabulary: int) -> TrainBatch:
  """Draws a full-length batch with rewards of 0 and 1 and a uniform behavior policy."""
  keys = jax.random.split(key, 3)

  def draw_tokens(key: Array, like: Any) -> Array:
    return jax.random.randint(key, like.shape, 0, vocabulary)

  rewards = jax.random.bernoulli(keys[2], 0.5, shapes.rewards.shape).astype(jnp.float32)
  P, S = shapes.prompts.tokens.shape
  return TrainBatch(
    prompts=Prompts(tokens=draw_tokens(keys[0], shapes.prompts.tokens), lengths=jnp.full(P, S)),
    tokens=draw_tokens(keys[1], shapes.tokens),
    mask=jnp.ones(shapes.mask.shape),
    behavior_logprobs=jnp.full(shapes.mask.shape, -math.log(vocabulary)),
    rewards=rewards,
    correct=rewards,
    valid=jnp.ones(rewards.shape, bool),
    solve_rate=rewards.mean(axis=1),
  )


def time_interleaved(
  calls: Mapping[str, Callable[[], Any]],
  rounds: int,
  clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
  """Times each call in every round, after one call that compiles; the order rotates."""
  for call in calls.values():
    jax.block_until_ready(call())
  names = list(calls)
  times = {name: [] for name in calls}
  for turn in range(rounds):
    shift = turn % len(names)
    for name in names[shift:] + names[:shift]:
      start = clock()
      jax.block_until_ready(calls[name]())
      times[name].append(clock() - start)
  return times


def extrapolated_section(
  names: Sequence[str], *, tokens: int, columns: int, rounds: int
) -> list[Row]:
  """Extrapolates seconds of an update, L·t_block + t_head + t_gram, each scaled by its FLOPs."""
  rows = []
  for name in names:
    full, block, head, gram = (published_config(name) for _ in range(4))
    block.batch.prompts, block.batch.group_size = 1, 4
    block.max_response_length, block.max_prompt_length = tokens // 4, tokens // 16
    head.max_response_length = tokens // (head.batch.prompts * head.batch.group_size)
    gram.model.overrides.vocab_size = columns
    full_parts = make_parts(full, full, full)
    parts = make_parts(block, head, gram)
    calls = {
      key: functools.partial(jax.jit(x.function), *make_arguments(x)) for key, x in parts.items()
    }
    times = {key: statistics.median(x) for key, x in time_interleaved(calls, rounds).items()}
    flops = {key: part.flops for key, part in full_parts.items()}
    scaled = {key: times[key] * flops[key] / parts[key].flops for key in parts}
    layers = preset(name).num_layers
    total_times = {x: sum(route_costs(scaled, x, layers)) for x in ROUTES}
    total_flops = {x: sum(route_costs(flops, x, layers)) for x in ROUTES}
    for route in ROUTES:
      row = {"model": name, "route": route}
      measured = route_costs(times, route, 1)
      row |= dict(zip(("t_block s", "t_head s", "t_gram s"), measured, strict=True))
      extrapolated = route_costs(scaled, route, layers)
      row |= dict(zip(("trunk s", "head s", "Gram s"), extrapolated, strict=True))
      row |= {"ratio": total_times[route] / total_times["plain"]}
      rows.append(row | {"ratio of FLOPs": total_flops[route] / total_flops["plain"]})
  return rows


class Part(NamedTuple):
  """A part of an update that can be timed alone."""

  function: Callable
  args: tuple[Any, ...]  # shapes; the second is the batch

  @property
  def flops(self) -> int:
    return product_flops(jax.make_jaxpr(self.function)(*self.args))


def make_parts(
  block: ml_collections.ConfigDict,
  head: ml_collections.ConfigDict,
  gram: ml_collections.ConfigDict,
) -> dict[str, Part]:
  """Makes all parts of an update, each from its own configuration."""
  parts = {"block": make_block_part(block)}
  parts |= {f"head, {route}": make_head_part(head, route) for route in ("plain", "sketch")}
  return parts | {f"Gram, {route}": make_gram_part(gram, route) for route in ROUTES[1:]}


def route_costs(
  by_part: Mapping[str, float], route: str, layers: int
) -> tuple[float, float, float]:
  """Costs of trunk, head and Gram matrix; only the forward pass of a sketch projects."""
  head = by_part["head, sketch" if route == "sketch" else "head, plain"]
  return layers * by_part["block"], head, by_part.get(f"Gram, {route}", 0.0)


def make_block_part(config: ml_collections.ConfigDict) -> Part:
  """One layer: forward, recomputation and backward, with an embedding of negligible cost."""
  settings = preset(config.model.preset, **config.model.overrides)
  model = transformer(dataclasses.replace(settings, num_layers=1, vocab_size=_FEW))

  def gradient(params, batch):
    def compute_hidden(params):
      return model.response_hidden(params, batch.prompts, batch.tokens)

    hidden, pullback = jax.vjp(compute_hidden, params)
    return pullback(hidden)

  params = jax.eval_shape(model.init, jax.random.key(0))
  return Part(gradient, (params, abstract_batch(config)))


def make_head_part(config: ml_collections.ConfigDict, route: str) -> Part:
  """Log-probabilities, the route's accumulation, and the backward pass."""
  method, params, batch = make_trunkless_inputs(config, route)

  def gradient(params, batch):
    score = functools.partial(policy_forward, frozen={}, batch=batch, method=method)
    logprobs, pullback, forward = jax.vjp(score, params, has_aux=True)
    return pullback(logprobs), forward

  return Part(gradient, (params, batch))


def make_gram_part(config: ml_collections.ConfigDict, route: str) -> Part:
  """The Gram matrix from the results of the forward pass."""
  method, params, batch = make_trunkless_inputs(config, route)

  def gram(params, *rest):
    return method.gram.gram(params, {}, *rest, method.gram_context)

  forward_pass = functools.partial(policy_forward, method=method)
  _, forward = jax.eval_shape(forward_pass, params, {}, batch)
  return Part(gram, (params, batch, forward))


def make_trunkless_inputs(
  config: ml_collections.ConfigDict, route: str
) -> tuple[Method, Params, TrainBatch]:
  """Makes a method whose network has final hidden states as parameters, and its input shapes."""
  settings = preset(config.model.preset, **config.model.overrides)

  def make_head(params: Params) -> Head:
    kernel = params["kernel"].T if settings.tied_head else params["kernel"]
    return Head(kernel, 1.0, settings.final_soft_cap)

  model = Model(
    config=settings,
    init=None,
    head=make_head,
    response_hidden=lambda params, prompts, tokens: params["hidden"],
    row_hidden=None,
    response_routed=None,
    row_routed=None,
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


def make_arguments(part: Part) -> tuple[Any, ...]:
  """Makes arrays of numbers that are cheap to generate; time does not depend on them."""
  params, batch, *rest = part.args

  def make_array(shape: Any) -> Array:
    values = 0.02 * jnp.sin(jnp.arange(shape.size, dtype=jnp.float32))
    return values.reshape(shape.shape).astype(shape.dtype)

  params, *rest = jax.jit(lambda: jax.tree.map(make_array, (params, *rest)))()
  return params, random_batch(jax.random.key(0), batch, _FEW), *rest


def memory_section(configs: Mapping[str, ml_collections.ConfigDict]) -> list[Row]:
  rows = []
  for name, config in configs.items():
    plain = None
    for route in ROUTES:
      update = abstract_update(config, route)
      step = jax.jit(update.step, donate_argnums=0)
      gib = memory_gib(step.lower(update.state, update.batch).compile())
      plain = plain or gib
      growth = {key: gib[key] / plain[key] - 1 for key in gib}
      row = {"model": name, "route": route, "GiB, temporary": gib["temporary"]}
      row |= {"growth": growth["temporary"], "GiB with arguments and results": gib["all"]}
      gram_gib = None
      if route != "plain":
        part = make_gram_part(config, route)
        gram_gib = memory_gib(jax.jit(part.function).lower(*part.args).compile())["temporary"]
      row |= {"growth of all": growth["all"], "GiB, temporary, Gram alone": gram_gib}
      if route in ("streaming", "sketch"):
        met = growth["temporary"] < _MAX_GROWTH
        row |= {"limit": f"growth < {_MAX_GROWTH:.0%}", "met": "yes" if met else "NO"}
      rows.append(row)
  return rows


def memory_gib(compiled: Any) -> dict[str, float]:
  """Memory of a compiled program in GiB: temporary buffers, and all buffers."""
  usage = compiled.memory_analysis()
  resident = usage.argument_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes
  temporary = usage.temp_size_in_bytes
  return {"temporary": temporary / 2**30, "all": (temporary + resident) / 2**30}


def format_report(results: Mapping[str, Any]) -> str:
  """Returns the available sections as Markdown."""
  conditions = "; ".join(f"{name}: {value}" for name, value in results["conditions"].items())
  parts = ["# What SALT adds to an update step", f"Conditions: {conditions}."]
  for name in _NOTES:
    if name in results["sections"]:
      parts += [f"## {name}", _NOTES[name], table(results["sections"][name])]
  return "\n\n".join(parts) + "\n"


def write_report(folder: pathlib.Path, sections: Mapping[str, list[Row]]) -> str:
  """Replaces sections by new versions; drops sections measured under other conditions."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"salt_overhead_{jax.default_backend()}"
  results = {"conditions": describe_conditions(), "sections": dict(sections)}
  data = path.with_suffix(".json")
  if data.exists():
    previous = json.loads(data.read_text())
    if previous["conditions"] == results["conditions"]:
      results["sections"] = previous["sections"] | results["sections"]
  data.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
  text = format_report(results)
  path.with_suffix(".md").write_text(text)
  return text


def describe_conditions() -> dict[str, str]:
  return {"hardware": hardware(), "jax": jax.__version__, "compute dtype": compute_dtype()}


def main(argv: list[str]) -> None:
  del argv
  memory_configs = {"w1": grpo_step.make_config("w1")}
  memory_configs |= {name: published_config(name) for name in PUBLISHED}
  section_makers = {
    "flops": flops_section,
    "check": check_section,
    "wall": lambda: wall_section(_ROUNDS.value),
    "extrapolated": lambda: extrapolated_section(
      PUBLISHED, tokens=_TOKENS.value, columns=_COLUMNS.value, rounds=_LARGE_ROUNDS.value
    ),
    "memory": lambda: memory_section(memory_configs),
  }
  names = _SECTIONS.value or list(section_makers)
  if unknown := set(names) - set(section_makers):
    raise app.UsageError(
      f"--sections: {sorted(unknown)} unknown; choose some of {list(section_makers)}"
    )
  for name in names:
    print(f"# {name}", file=sys.stderr, flush=True)
    text = write_report(pathlib.Path(_RESULTS.value), {name: section_makers[name]()})
  print(text)


if __name__ == "__main__":
  app.run(main)
