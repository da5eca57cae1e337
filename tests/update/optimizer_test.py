"""Optimizers and learning rates by name: values, shardings, adapters, factories of one's own."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict
from train import tiny

from rlvr_jax import specs
from rlvr_jax.models import lora
from rlvr_jax.models.functional import transformer
from rlvr_jax.models.presets import preset
from rlvr_jax.train.cluster import sharding
from rlvr_jax.train.setup.build import build, make_optimizer
from rlvr_jax.update import learning_rate, optimizer

SHAPE = dict(num_layers=2, width=32, mlp_width=64, qkv_bias=True, tied_head=False)
MODEL = transformer(preset("tiny", **SHAPE))
ALL = [*optimizer.__all__, "sgd(momentum=0.9)", "optax:adafactor"]


def settings(**fields):
  rate = "constant(peak=1e-2, warmup=0)"
  base = dict(optimizer="adamw", learning_rate=rate, max_gradient_norm=1.0)
  return ConfigDict(base | fields)


def made(name, **fields):
  return make_optimizer("config", settings(optimizer=name, **fields), 100)[1]


def random_like(shapes, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 10, x.dtype), shapes)


@functools.cache
def case():
  """Parameters and a gradient of a small network with biases and a head of its own."""
  shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
  return random_like(shapes), random_like(shapes, seed=1)


def updated(transformation, params, *gradients):
  @jax.jit
  def step(gradient, state, params):
    updates, state = transformation.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(transformation.init)(params)
  for gradient in gradients:
    params, state = step(gradient, state, params)
  return params


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [optimizer, learning_rate])
def test_exports_are_documented_factories_with_keyword_only_arguments(package):
  for name in package.__all__:
    factory = getattr(package, name)
    kinds = {p.kind for p in inspect.signature(factory).parameters.values()}
    assert factory.__name__ == name and factory.__doc__
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_adamw_is_optax_s_behind_a_clip_and_spares_norms_and_biases():
  params, gradient = case()
  expected = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(lambda step: 1e-2, weight_decay=0.1, mask=optimizer.decay_mask),
  )
  found = updated(made("adamw(weight_decay=0.1)"), params, gradient, gradient)
  jax.tree.map(np.testing.assert_array_equal, found, updated(expected, params, gradient, gradient))
  plain = updated(made("adamw"), params, gradient, gradient)
  same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), found, plain)
  flat = jax.tree_util.tree_leaves_with_path(same)
  spared = {jax.tree_util.keystr(path, simple=True, separator="/") for path, equal in flat if equal}
  assert {"final_norm/scale", "blocks/query_bias", "blocks/attention_norm/scale"} <= spared
  assert all("norm" in name or "bias" in name for name in spared)


def orthogonalized(momentum):
  """NumPy, one matrix: five quintic Newton–Schulz steps from M/‖M‖_F."""
  x = momentum / np.linalg.norm(momentum)
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  return x


@pytest.mark.parametrize("update_rms", [0.2, None])
def test_muon_orthogonalises_layer_by_layer_and_leaves_the_rest_to_adamw(update_rms, x64):
  params, first = jax.tree.map(lambda x: x.astype(jnp.float64), case())
  second = jax.tree.map(lambda g: jnp.cos(3 * g), first)
  given = f"muon(weight_decay=0.1, update_rms={update_rms})"
  found = updated(made(given, max_gradient_norm=None), params, first, second)
  adamw = updated(made("adamw(weight_decay=0.1)", max_gradient_norm=None), params, first, second)
  kernels = {"query", "key", "value", "output", "gate", "up", "down"}
  for name in kernels:
    for layer in range(2):
      weight = np.asarray(params["blocks"][name][layer])
      mean = 0.0
      for t, gradient in enumerate((first, second), start=1):
        g = np.asarray(gradient["blocks"][name][layer])
        mean = 0.95 * mean + 0.05 * g
        ahead = 0.95 * mean / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        D, E = g.shape
        wide = orthogonalized(ahead if D <= E else ahead.T)
        length = np.sqrt(max(1, E / D)) if update_rms is None else update_rms * np.sqrt(max(D, E))
        weight = weight - 1e-2 * (length * (wide if D <= E else wide.T) + 0.1 * weight)
      np.testing.assert_allclose(found["blocks"][name][layer], weight, rtol=1e-6, atol=1e-9)
  for tree in (found, adamw):
    for name in kernels:
      del tree["blocks"][name]
  # Compiled within another program, which jax 0.7 rounds differently.
  rtol = 0 if jax.__version_info__ >= (0, 8) else 1e-12
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), found, adamw)


def test_muon_orthogonalises_each_expert_and_leaves_the_router_to_adamw():
  rng = np.random.default_rng(0)
  shapes = dict(gate=(2, 3, 8, 4), shared_down=(2, 4, 8), router=(2, 8, 3), shared_weight=(2, 8, 1))
  draw = lambda: {"experts": {n: jnp.asarray(rng.normal(size=x)) for n, x in shapes.items()}}
  params, gradient = {"blocks": draw()}, {"blocks": draw()}
  updated_by = lambda name, *given: updated(made(name, max_gradient_norm=None), *given)["blocks"]
  found, adamw = (updated_by(name, params, gradient)["experts"] for name in ("muon", "adamw"))
  # Six layers of one kernel each, which the test above compares with the formula.
  flat = lambda tree: {"blocks": {"gate": tree["blocks"]["experts"]["gate"].reshape(6, 8, 4)}}
  dense = updated_by("muon", flat(params), flat(gradient))["gate"]
  np.testing.assert_allclose(found["gate"].reshape(6, 8, 4), dense, atol=1e-6)
  for name in ("gate", "shared_down"):
    assert not np.allclose(found[name], adamw[name], atol=1e-4)
  for name in ("router", "shared_weight"):
    np.testing.assert_array_equal(found[name], adamw[name])


def test_lion_steps_by_the_sign_and_sgd_along_the_gradient():
  params, gradient = case()
  lion = updated(made("lion", max_gradient_norm=None), params, gradient)
  step = jax.tree.map(lambda new, old: new - old, lion, params)
  jax.tree.map(lambda s, g: np.testing.assert_allclose(s, -1e-2 * jnp.sign(g), atol=1e-7),
               step, gradient)  # fmt: skip
  sgd = updated(made("sgd", max_gradient_norm=None), params, gradient)
  jax.tree.map(lambda new, old, g: np.testing.assert_allclose(new, old - 1e-2 * g, atol=1e-7),
               sgd, params, gradient)  # fmt: skip
  assert not [x for x in jax.tree.leaves(made("sgd").init(params)) if x.ndim]


@pytest.mark.parametrize(
  ("text", "values"),
  [
    ("constant(peak=0.3, warmup=3)", {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.3, 99: 0.3}),
    ("constant(peak=0.3, warmup=0)", {0: 0.3, 50: 0.3}),
    ("linear(peak=1.0, warmup=20)", {0: 0.05, 19: 1.0, 20: 1.0, 60: 0.55, 100: 0.1}),
    ("linear(peak=1.0, warmup=0, final_fraction=0.0)", {0: 1.0, 50: 0.5, 100: 0.0}),
    ("linear(peak=1.0, warmup=0, final_fraction=0.0)", {99: 0.01, 100: 0.0}),  # 99: the last update
    ("cosine(peak=2.0, warmup=20)", {0: 0.1, 20: 2.0, 60: 1.1, 100: 0.2}),
  ],
)
def test_learning_rates(text, values):
  schedule = make_optimizer("config", settings(learning_rate=text), 100)[0]
  for update, value in values.items():
    assert float(schedule(update)) == pytest.approx(value, rel=1e-5, abs=1e-7), update


@pytest.mark.parametrize(
  ("package", "text", "message"),
  [
    (learning_rate, "cosine(peak=-1)", "cosine: peak = -1 is not a number"),
    (learning_rate, "linear(peak=1.0, warmup=1.5)", "linear: warmup = 1.5 is not an integer"),
    (learning_rate, "linear(peak=1.0, final_fraction=2)", "final_fraction = 2 is not a number"),
    (optimizer, "adamw(b1=2)", "adamw: b1 = 2 is not a number"),
    (optimizer, "adamw(b1=1.0)", r"adamw: b1 = 1.0 is not a number in \[0, 1\)"),
    (optimizer, "adamw(b2=1)", "adamw: b2 = 1 is not a number"),
    (optimizer, "lion(b2=1.0)", "lion: b2 = 1.0 is not a number"),
    (optimizer, "muon(momentum=1.0)", "muon: momentum = 1.0 is not a number"),
    (optimizer, "sgd(momentum=1.0)", "sgd: momentum = 1.0 is not a number"),
    (optimizer, "adamw(epsilon=0)", "adamw: epsilon = 0 is not a number"),
    (optimizer, "lion(weight_decay=-1)", "lion: weight_decay = -1 is not"),
    (optimizer, "muon(steps=0)", "muon: steps = 0 is not an integer"),
    (optimizer, "muon(update_rms=0)", "muon: update_rms = 0 is not a number"),
    (optimizer, "muon(nesterov=1.5)", "muon: nesterov = 1.5 is unknown"),
    (optimizer, "sgd(momentum=-0.1)", "sgd: momentum = -0.1 is not a number"),
    (optimizer, "sgd(nesterov=True)", "sgd: nesterov = True has no effect with momentum = 0"),
  ],
)
def test_bad_hyper_parameters_are_refused(package, text, message):
  of_run = dict(learning_rate=optax.constant_schedule(1.0), num_updates=10)
  with pytest.raises(ValueError, match=message):
    specs.make("config.field", package, text, object, **of_run)


# --- where the state lives, and what else is trained ----------------------------------------------


def test_the_state_is_sharded_as_its_parameters_and_a_sharded_update_is_the_same():
  """Of muon, of which the kernels have one moment, and the rest has AdamW's two."""
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  params, gradient = case()
  transformation = made("muon")
  shapes = jax.eval_shape(transformation.init, params)
  shardings = sharding.state_shardings(shapes, mesh)
  moments = {"blocks/down": PartitionSpec(None, "tensor", "fsdp"),
             "embedding": PartitionSpec("tensor", "fsdp")}  # fmt: skip
  count = dict.fromkeys(moments, 0)
  for (path, leaf), placed in zip(
    jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
  ):
    found = jax.tree_util.keystr(path, simple=True, separator="/")
    for end, spec in moments.items():
      if found.endswith(end) and leaf.size > 1:
        assert placed.spec == spec, found
        count[end] += 1
  assert count == {"blocks/down": 1, "embedding": 2}

  place = lambda tree: jax.device_put(tree, sharding.state_shardings(tree, mesh))
  alone, split = (updated(transformation, params, gradient),
                  updated(transformation, place(params), place(gradient)))  # fmt: skip
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), alone, split)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_adapters_can_be_trained(name):
  base, _ = case()
  settings = lora.LoraSettings(rank=2, alpha=4.0, targets="blocks/")
  adapters = lora.init(jax.random.key(0), base, settings)
  gradient = random_like(adapters, seed=2)
  found = updated(made(name), adapters, gradient)
  for old, new in zip(jax.tree.leaves(adapters), jax.tree.leaves(found), strict=True):
    assert np.isfinite(new).all() and not np.array_equal(old, new)


def test_a_run_is_built_with_another_optimizer():
  build(tiny.config(optimizer="muon", lora__rank=2, warm_start__optimizer="lion"))


def own_optimizer(*, learning_rate, num_updates, factor: float = 1.0):
  return optax.sgd(lambda step: factor * learning_rate(step) / num_updates)


def test_an_optimizer_of_one_s_own_gets_the_learning_rate():
  params, gradient = case()
  name = f"{__name__}:own_optimizer(factor=3.0)"
  found = updated(made(name, max_gradient_norm=None), params, gradient)
  jax.tree.map(lambda new, old, g: np.testing.assert_allclose(new, old - 3e-4 * g, atol=1e-7),
               found, params, gradient)  # fmt: skip
  with pytest.raises(ValueError, match="learning_rate of optax:adam comes from the run"):
    made("optax:adam(learning_rate=1.0)")
  with pytest.raises(ValueError, match="returned function, expected GradientTransformation"):
    made(f"{__name__}:no_optimizer")


def no_optimizer(*, learning_rate):
  return learning_rate
