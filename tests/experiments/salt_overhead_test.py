"""The benchmark of SALT's cost: its limits, its parts, its tables."""

import json
import math

import jax
import numpy as np
import pytest
from oracles.gram_cases import make_case

from experiments.benchmarks import salt_overhead
from rlvr_jax.geometry import streaming


@pytest.fixture
def module():
  return salt_overhead


def tiny_config(module, *, layers=2):
  c = module.published_config("qwen2.5_1.5b", rollouts=16)
  c.model.overrides = dict(width=16, num_layers=layers, num_heads=2, num_kv_heads=1, head_dim=8)
  c.model.overrides.update(mlp_width=32, vocab_size=256, remat="full", compute_dtype="float32")
  c.max_prompt_length, c.max_response_length = 4, 8
  return c


@pytest.mark.slow
def test_limits_of_the_published_shapes_are_met(module):
  rows = module.flops_section(sizes=(64,), remats=("full",))
  assert [row for row in rows if row["met"] == "NO"] == []
  found = {(row["model"], row["route"]): row for row in rows}
  small, large = (found[name, "streaming"] for name in ("qwen2.5_1.5b", "qwen2.5_7b"))
  assert small["head products added"] == pytest.approx(2 + 64 / 1024, rel=1e-3)
  assert small["limit"] == "≤ 2.104 products, ≤ 1.08×" and small["met"] == "yes"
  assert "1.045" in large["limit"] and large["met"] == "yes"
  # Eight passes over 1.54e9 weights in products, by hand; the rest is attention and prompts.
  assert 1.0 < small["FLOPs, plain"] / (8 * 64 * 1024 * 1.5435e9) < 1.15


def test_verdict_says_no(module):
  row = dict(model="qwen2.5_7b", rollouts=64, remat="full", route="streaming")
  verdict = lambda products, ratio: module.verdict(**row, products=products, ratio=ratio)["met"]
  assert verdict(2.1, 1.044) == "yes"
  assert verdict(2.2, 1.044) == verdict(2.1, 1.046) == "NO"


@pytest.mark.parametrize(
  "route",
  [
    "streaming",
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("plain", "sketch", "materialized")),
  ],
)
def test_parts_add_up_to_the_update(module, route):
  config = tiny_config(module)
  flops = {k: part.flops for k, part in module.make_parts(config, config, config).items()}
  update = module.abstract_update(config, route)
  of_salt = 0
  if route != "plain":  # it projects coefficients, some B² operations
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, 16), (1, 16, 16))]
    valid = jax.ShapeDtypeStruct((1, 16), "bool")
    jaxpr = jax.make_jaxpr(update.method.reweighting.apply)(*shapes, valid, jax.random.key(0))
    of_salt = module.product_flops(jaxpr)
    assert 0 < of_salt < 20 * 16**2
  assert sum(module.route_costs(flops, route, 2)) + of_salt == update.flops


@pytest.mark.slow
def test_materialized_is_the_same_matrix(module, x64):
  params, batch, forward, setting = make_case(temperature=0.7)
  found = module.make_materialized_gram().gram(params, {}, batch, forward, setting)
  exact = streaming().gram(params, {}, batch, forward, setting)
  np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-10)


def test_routes_are_timed_in_turn(module):
  order = []
  calls = {name: lambda name=name: order.append(name) for name in "ab"}
  times = module.time_interleaved(calls, rounds=2)
  assert order == [*"ab", *"ab", *"ba"]  # compilation, then two rounds
  assert [len(x) for x in times.values()] == [2, 2]


@pytest.mark.slow
def test_parts_run_with_the_numbers_made_for_them(module):
  config = tiny_config(module, layers=1)
  parts = module.make_parts(config, config, config)
  for part in (parts["block"], parts["head, sketch"], parts["Gram, sketch"]):
    out = jax.jit(part.function)(*module.make_arguments(part))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))


@pytest.mark.slow
def test_update_runs_on_the_batch_made_for_it(module):
  update = module.abstract_update(tiny_config(module, layers=1), "streaming")
  batch = module.random_batch(jax.random.key(0), update.batch, vocabulary=256)
  metrics = module.make_step(update, batch)()
  assert math.isfinite(metrics["loss/surrogate"]) and metrics["update/skipped"] == 0
  assert metrics["gram/head_products"] == 2 + 16 / 8


def test_memory_counts_a_donated_argument_once(module):
  x = jax.ShapeDtypeStruct((2**20,), "float32")
  held = lambda **how: module.memory_gib(jax.jit(lambda x: x + 1, **how).lower(x).compile())
  assert held()["all"] * 2**30 == pytest.approx(2 * 2**22, rel=1e-3)
  assert held(donate_argnums=0)["all"] * 2**30 == pytest.approx(2**22, rel=1e-3)
  assert held()["temporary"] * 2**30 < 2**20


def test_sections_are_kept_until_conditions_change(module, tmp_path, monkeypatch):
  module.write_report(tmp_path, {"flops": [{"route": "plain", "ratio": 1.0}]})
  text = module.write_report(tmp_path, {"check": [{"route": "sketch", "FLOPs": 7.111e14}]})
  assert "| plain | 1.0000 |" in text and "| sketch | 7.111e+14 |" in text
  assert (tmp_path / "salt_overhead_cpu.md").read_text() == text
  monkeypatch.setattr(module, "describe_conditions", lambda: {"jax": "another"})
  module.write_report(tmp_path, {"check": [{"route": "sketch"}]})
  results = json.loads((tmp_path / "salt_overhead_cpu.json").read_text())
  assert list(results["sections"]) == ["check"]
