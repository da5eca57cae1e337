"""Values and gradients of the authors' own published code, float64."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from oracles.batches import make_batch
from oracles.golden import AGGREGATIONS, ATOL, RTOL, Golden

from rlvr_jax import advantages, geometry, losses
from rlvr_jax.models.functional import take_trained
from rlvr_jax.ops import spectral
from rlvr_jax.ops.aggregate import aggregate
from rlvr_jax.reweighting.salt import salt_coefficients
from rlvr_jax.train.cluster import sharding
from rlvr_jax.types import Forward, Head

GOLDEN = Golden("golden")


def _cases(*prefixes):
  return GOLDEN.params(lambda case: case["name"].startswith(prefixes))


def _clip_range(params):
  return {"epsilon_low": params["clip_low"], "epsilon_high": params["clip_high"]}


def _make_loss(case):
  """The loss and its keyword arguments, from the case's name and parameters."""
  name, params = case["name"], case["params"]
  if name.startswith("loss_p3o"):
    return losses.p3o, {}
  if name.startswith("loss_m2po"):
    return losses.m2po, {
      "budget": params["m2_budget"],
      "min_epsilon_low": params["min_clip_low"],
      "min_epsilon_high": params["min_clip_high"],
    }
  if name.startswith("loss_decoupled_ppo"):
    cap = {"behavior_weight_cap": params["behavior_weight_cap"]}
    return losses.decoupled_ppo, _clip_range(params) | cap
  if name.startswith("loss_dualclip"):
    return losses.ppo_clip, _clip_range(params) | {"dual_clip": params["dual_clip"]}
  for prefix, factory in (
    ("loss_ppo_clip", losses.ppo_clip),
    ("loss_cispo", losses.cispo),
    ("loss_gspo", losses.gspo),
    ("loss_geo_mean", losses.gmpo),
  ):
    if name.startswith(prefix):
      return factory, _clip_range(params)
  raise ValueError(f"golden case {name!r} has no loss here; add it to _make_loss")


def _run(case, loss):
  """A loss on a case's arrays: ((value, (weight, metrics)), gradient, statistics)."""
  arrays = GOLDEN.arrays(case)
  group = lambda name: arrays[name][:, None] if name in arrays else None  # every rollout a prompt
  batch = make_batch(
    group("mask"), group("behavior_logprobs"), proximal_logprobs=group("proximal_logprobs")
  )
  how = AGGREGATIONS[case["params"].get("aggregation", "token-mean")]

  @jax.jit
  def run(policy_logprobs, batch, coefficients):
    statistics = loss.statistics and loss.statistics(policy_logprobs, batch, coefficients)

    def value(policy_logprobs):
      per_token, metrics = loss.per_token(policy_logprobs, batch, coefficients, statistics)
      pair = aggregate(per_token, batch.mask, how=how, max_response_length=batch.mask.shape[-1])
      summed = "reduction" in case["params"]
      return (pair.total if summed else pair.total / pair.weight), (pair.weight, metrics)

    return *jax.value_and_grad(value, has_aux=True)(policy_logprobs), statistics

  return jax.device_get(run(group("logprobs"), batch, group("advantages")))


@pytest.mark.parametrize("case", _cases("loss_"))
def test_loss(case):
  with jax.enable_x64(True):
    factory, kwargs = _make_loss(case)
    (value, (weight, metrics)), gradient, statistics = _run(case, factory(**kwargs))
  arrays = GOLDEN.arrays(case)
  expected = arrays["loss_sum"] if "loss_sum" in arrays else arrays["loss"]
  np.testing.assert_allclose(value, expected, rtol=RTOL, atol=ATOL)
  np.testing.assert_allclose(gradient[:, 0], arrays["grad_logprobs"], rtol=RTOL, atol=ATOL)
  if "num_tokens" in arrays:
    assert weight == arrays["num_tokens"]
  if factory is losses.p3o:
    np.testing.assert_allclose(statistics, arrays["ess"], rtol=RTOL)
    if "kl_behavior_mean" in arrays:
      k3 = metrics["loss/k3_behavior"]
      np.testing.assert_allclose(k3.total / k3.weight, arrays["kl_behavior_mean"], rtol=RTOL)
  if factory is losses.m2po:
    np.testing.assert_allclose(1 - statistics.low, arrays["clip_low"], rtol=RTOL)
    if arrays["clip_high"] > 1e4:  # the authors' "no bound"
      assert np.isinf(statistics.high)
    else:
      np.testing.assert_allclose(statistics.high - 1, arrays["clip_high"], rtol=RTOL)


def test_every_case_of_the_manifest_has_a_test():
  names = [case["name"] for case in GOLDEN.cases]
  tested = ("loss_", "adv_", "salt_", "lm_head_gram_")
  assert [n for n in names if not n.startswith(tested)] == []


@pytest.mark.parametrize("case", _cases("adv_"))
def test_advantage(case):
  name, params = case["name"], case["params"]
  if name.startswith("adv_grpo_std"):
    estimator = advantages.grpo(epsilon=params["epsilon"])
  elif name.startswith("adv_grpo_mean_only"):
    estimator = advantages.grpo_mean()
  elif name.startswith("adv_rloo"):
    estimator = advantages.rloo()
  else:
    raise ValueError(f"golden case {name!r} has no estimator here; add it to test_advantage")
  with jax.enable_x64(True):
    arrays = GOLDEN.arrays(case)
    batch = make_batch(np.ones((*arrays["rewards"].shape, 1)), np.zeros((1, 1, 1)))
    batch = dataclasses.replace(batch, rewards=jax.numpy.asarray(arrays["rewards"]))
    result = jax.jit(estimator.apply)(estimator.init(0.0), batch)
    np.testing.assert_allclose(result, arrays["advantages"], rtol=RTOL, atol=ATOL)


def _salt(case):
  """(SaltResult, eigenvalues) of a case."""
  arrays, params = GOLDEN.arrays(case), case["params"]
  gram = jax.numpy.asarray(arrays["features"] @ arrays["features"].T)
  if params["gram"] != "G G^T / B":
    raise ValueError(f"golden case {case['name']!r} has a Gram unknown here; add it to _salt")
  gram /= gram.shape[0]
  hyper = {
    "rank_scale": params["rho"],
    "min_rank": params["k_min"],
    "max_rank": params["k_max"],
    "alpha_min": params["alpha_min"],
    "alpha_max": params["alpha_max"],
    "positive_part": params["positive_part"],
    "channels": "both",
    "random_subspace": False,
  }

  @jax.jit
  def run(a, gram):
    result = salt_coefficients(a, gram, np.ones(a.shape, bool), jax.random.key(0), **hyper)
    return result, spectral.spectrum(gram).eigenvalues

  return run(arrays["advantages"], gram)


@pytest.mark.parametrize("case", _cases("salt_"))
def test_salt(case):
  with jax.enable_x64(True):
    result, eigenvalues = _salt(case)
  arrays = GOLDEN.arrays(case)
  for name, value in (
    ("eigenvalues", eigenvalues[::-1]),  # the authors' are ascending
    ("participation_ratio", result.participation_ratio),
    ("k", result.rank),
    ("n_eff", result.effective_rollouts),
    ("alpha", result.alpha),
    ("main", result.shared),
    ("residual", result.residual),
    ("reweighted", result.coefficients),
  ):
    np.testing.assert_allclose(value, arrays[name], rtol=RTOL, atol=ATOL, err_msg=name)


@pytest.mark.parametrize("case", _cases("lm_head_gram_"))
def test_lm_head_gram(case):
  """Every exact way: the features themselves, differentiation, streaming, in blocks, on a mesh."""
  with jax.enable_x64(True):
    arrays = {name: jax.numpy.asarray(array) for name, array in GOLDEN.arrays(case).items()}
    hidden, kernel, mask = (arrays[name] for name in ("hidden", "kernel", "mask"))
    batch = make_batch(mask[:, None], mask[:, None])
    of_rollout = dataclasses.replace(
      batch.prompts, tokens=jax.numpy.arange(len(mask))[:, None].astype("int32")
    )
    batch = dataclasses.replace(batch, prompts=of_rollout, tokens=arrays["labels"][:, None])
    model = SimpleNamespace(
      combine=take_trained,
      head=lambda params: Head(params["kernel"]),
      response_hidden=lambda params, prompts, _: params["hidden"][prompts.tokens],
    )
    params, setting = {"hidden": hidden, "kernel": kernel}, geometry.GramContext(model)
    run = jax.jit(functools.partial(geometry.per_rollout_features, context=setting))
    features = run(params, {}, batch)
    np.testing.assert_allclose(features, arrays["features"], rtol=RTOL, atol=ATOL)

    log_normalizers = jax.nn.logsumexp(hidden @ kernel, axis=-1)
    forward = Forward(hidden[None], log_normalizers[None], None)
    mesh = sharding.make_mesh(fsdp=2, tensor=2)
    for route, where in (
      (geometry.per_rollout(), None),
      (geometry.streaming(), None),
      (geometry.streaming(block_elements=1), None),
      (geometry.streaming(), mesh),
    ):
      run = functools.partial(route.gram, context=setting._replace(mesh=where))
      gram = jax.jit(run)(params, {}, batch, forward)
      np.testing.assert_allclose(gram, arrays["gram"], rtol=RTOL, atol=ATOL)
