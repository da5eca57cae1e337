"""Each loss against its oracle, and what is each loss's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import evaluate, make_batch, metric_value, random_case
from oracles.loss_oracles import LOSSES

from rlvr_jax import losses
from rlvr_jax.losses.dppo import binary_divergence
from rlvr_jax.ops.veto import negative_advantage_veto

VARIANTS = [
  *((name, {}) for name in LOSSES),
  ("cispo", {"epsilon_low": 1.0, "epsilon_high": 0.6}),
  ("clip_cov", {"share": 0.3, "low": 0.1, "high": 2.0, "epsilon_high": 0.5}),
  ("clip_cov", {"share": 0.05, "low": 0.0, "high": 9.0, "seed": 3}),
  ("dppo", {"divergence": "kl", "truncation": 1.5}),
  ("dppo", {"delta_low": 0.05, "delta_high": 0.1, "form": "ratio", "anchor": "proximal"}),
  ("dppo", {"divergence": "kl", "delta_high": 0.1, "symmetric": True, "truncation": None}),
  ("dppo", {"log_ratio_penalty": 0.1, "form": "ratio"}),
  ("dro", {"penalty": 0.7}),
  ("kl_cov", {"share": 0.3, "coefficient": 0.4}),
  ("vespo", {"k_positive": 1.0, "lambda_negative": 0.5, "token_truncation": 1.2}),
  ("decoupled_ppo", {"behavior_weight_cap": 0.9, "epsilon_high": 0.05}),
  ("gmpo", {"epsilon_low": 0.1, "epsilon_high": 0.7}),
  ("gspo", {"epsilon_low": 0.1, "epsilon_high": 0.3}),
  ("m2po", {"budget": 0.3}),
  ("m2po", {"budget": 1e-9, "min_epsilon_low": 0.1, "min_epsilon_high": 0.2}),
  ("m2po", {"budget": 50.0}),
  ("p3o", {"ess": "sequence"}),
  ("p3o", {"ess_scope": 3}),
  ("p3o", {"ess_scope": 4, "cap": "none"}),
  ("p3o", {"ess": "one"}),
  ("p3o", {"cap": "inverse_ess"}),
  ("p3o", {"cap": "none"}),
  ("p3o", {"kl_term": False}),
  ("ppo_clip", {"epsilon_high": 0.28, "dual_clip": 1.2}),
  ("ppo_clip", {"epsilon_low": 1.0, "epsilon_high": 4.0}),
  ("reinforce", {"truncation": 1.1}),
  ("sapo", {"temperature_positive": 2.0, "temperature_negative": 0.5}),
]


def _named(variant):
  name, hyper = variant
  return "-".join([name, *(f"{key}={value}" for key, value in hyper.items())])


def test_every_loss_has_an_oracle():
  file = "tests/oracles/loss_oracles.py"
  unknown, missing = {*LOSSES} - {*losses.__all__}, {*losses.__all__} - {*LOSSES}
  assert not unknown, f"{file} has {unknown}, which losses/__init__.py lacks"
  assert not missing, f"write the formulas of {missing}, with gradients, under LOSSES of {file}"


@functools.cache
def _made(name, **hyper):
  """The same loss for the same arguments, so that one program is compiled for it."""
  return getattr(losses, name)(**hyper)


@pytest.mark.parametrize("variant", VARIANTS, ids=_named)
def test_loss_and_gradient_equal_the_oracle(variant):
  name, hyper = variant
  loss = getattr(losses, name)(**hyper)
  flat = lambda x: np.asarray(x).reshape(-1, x.shape[-1])

  @jax.jit
  def run(policy, batch, coefficients):
    statistics = loss.statistics and loss.statistics(policy, batch, coefficients)

    def total(policy):
      per_token, _ = loss.per_token(policy, batch, coefficients, statistics)
      return jnp.sum(per_token * batch.mask), per_token * batch.mask

    return jax.grad(total, has_aux=True)(policy)

  with jax.enable_x64(True):
    for seed, spread in enumerate((0.05, 0.6, 6.0)):
      policy, batch, coefficients = random_case(seed, spread=spread)
      expected, expected_gradients = LOSSES[name](
        *map(flat, (policy, batch.behavior_logprobs, batch.proximal_logprobs)),
        np.asarray(coefficients).reshape(-1),
        flat(batch.mask),
        **hyper,
      )
      gradients, per_token = run(policy, batch, coefficients)
      np.testing.assert_allclose(flat(per_token), expected, rtol=1e-9, atol=1e-12)
      np.testing.assert_allclose(flat(gradients), expected_gradients, rtol=1e-9, atol=1e-12)


def test_oracle_cases_reach_every_bound():
  """The random cases would not notice a missing bound unless they cross it."""
  policy, batch, coefficients = random_case(2, spread=6.0)
  log_ratio = np.abs(np.asarray(policy - batch.behavior_logprobs))[np.asarray(batch.mask) > 0]
  assert log_ratio.max() > 10  # k3's bound in p3o
  for name in ("cispo", "decoupled_ppo", "gmpo", "gspo", "m2po", "p3o", "ppo_clip", "topr"):
    (_, metrics), _ = evaluate(_made(name), policy, batch, coefficients)
    signs = [] if name == "topr" else ["_positive"]
    for sign in ["", *signs, "_negative"]:
      fraction = metric_value(metrics[f"loss/clip_fraction{sign}"])
      assert fraction > 0, (name, sign)


def test_clip_fractions_by_sign_of_hand_counted_tokens():
  # One prompt: A = 1 with ratios 1, 1.3, 0.5; A = −1 with ratios 0.7, 1.5, (masked);
  # A = 0 with a ratio of 1, which counts in the share of all alone.
  mask = np.array([[[1.0, 1, 1], [1, 1, 0], [1, 0, 0]]])
  ratios = np.array([[[1.0, 1.3, 0.5], [0.7, 1.5, np.nan], [1.0, np.nan, np.nan]]])
  batch, A = make_batch(mask, np.zeros(mask.shape)), jnp.array([[1.0, -1.0, 0.0]])
  _, metrics = losses.ppo_clip().per_token(jnp.log(ratios), batch, A, None)
  assert metric_value(metrics["loss/clip_fraction"]) == pytest.approx(2 / 6)
  assert metric_value(metrics["loss/clip_fraction_positive"]) == pytest.approx(1 / 3)
  assert metric_value(metrics["loss/clip_fraction_negative"]) == pytest.approx(1 / 2)


@pytest.mark.parametrize(
  ("name", "hyper", "coefficient"),
  [
    *(
      (name, {}, 1.0)
      for name in ("clip_cov", "decoupled_ppo", "dppo", "gmpo", "gspo", "m2po", "ppo_clip", "sapo")
    ),
    ("sapo", {}, -1.0),
    ("ppo_clip", {"dual_clip": 3.0}, -1.0),
    # A term that no coefficient multiplies grows with the ratio.
    *((name, {}, 0.0) for name in sorted({*losses.__all__} - {"p3o", "dro", "kl_cov"})),
    ("dppo", {"form": "ratio"}, 1.0),
    ("dppo", {"form": "ratio"}, 0.0),
  ],
)
def test_a_ratio_beyond_float32_has_the_gradient_of_one_that_is_clipped(name, hyper, coefficient):
  """exp(100) is infinite in float32; what a bound holds constant still has a gradient of 0."""
  policy, batch, coefficients = random_case(0, spread=0.1, dtype=np.float32)
  coefficients = coefficients.at[0, 1].set(coefficient)
  at = lambda log_ratio: policy.at[0, 1].set(batch.behavior_logprobs[0, 1] + log_ratio)
  batch = dataclasses.replace(batch, proximal_logprobs=batch.behavior_logprobs)
  loss = _made(name, **hyper)
  (value, _), gradient = evaluate(loss, at(100.0), batch, coefficients)
  assert np.isfinite(value) and np.all(np.isfinite(gradient))
  _, large = evaluate(loss, at(30.0), batch, coefficients)
  np.testing.assert_allclose(gradient, large, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
  ("name", "hyper"), [("ppo_clip", {}), ("gmpo", {}), ("dppo", {"form": "ratio"})]
)
def test_a_ratio_beyond_float32_without_a_bound_is_not_finite_unless_it_is_vetoed(name, hyper):
  policy, batch, coefficients = random_case(0, spread=0.1, dtype=np.float32)
  coefficients = coefficients.at[0, 1].set(-1.0)
  policy = policy.at[0, 1, 0].set(100.0)
  case = (_made(name, **hyper), policy, batch, coefficients)
  assert not np.isfinite(evaluate(*case)[0][0])  # so that the update is skipped and counted
  veto = negative_advantage_veto(trigger="above", threshold=5.0, scope="response")
  (value, _), gradient = evaluate(*case, veto=veto)
  assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_p3o_is_not_finite_when_a_ratio_overflows():
  policy, batch, coefficients = random_case(0, spread=0.1, dtype=np.float32)
  policy = policy.at[0, 0, 0].set(200.0)
  for ess in ("batch", "sequence", "one"):
    (value, _), gradient = evaluate(_made("p3o", ess=ess), policy, batch, coefficients)
    assert not np.isfinite(value)
    assert not np.all(np.isfinite(gradient))


def test_p3o_ess_neither_overflows_nor_vanishes():
  policy, batch, coefficients = random_case(0, spread=0.1, dtype=np.float32)
  loss = losses.p3o()
  plain = loss.statistics(policy, batch, coefficients)
  for shift in (-60.0, 60.0):  # ρ is finite in float32, ρ² is not
    shifted = loss.statistics(policy + shift, batch, coefficients)
    np.testing.assert_allclose(shifted, plain, rtol=1e-4)


def test_p3o_s_blocks_have_an_ess_of_their_own():
  """One block of heavy ratios lowers its own e alone; a block of one rollout is `sequence`."""
  policy, batch, coefficients = random_case(0, (4, 4, 6), spread=0.05, full=True)
  policy = policy.at[2, 1].add(jnp.arange(6.0))
  e = losses.p3o(ess_scope=4).statistics(policy, batch, coefficients)[..., 0]
  whole = losses.p3o().statistics(policy, batch, coefficients)
  assert np.all(np.delete(e, 2, axis=0) > 0.99) and whole < 0.1 and np.all(e[2] < whole * 4)
  alone = evaluate(losses.p3o(ess_scope=1), policy, batch, coefficients)
  sequence = evaluate(losses.p3o(ess="sequence"), policy, batch, coefficients)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), alone, sequence)


def test_p3o_s_blocks_divide_the_batch():
  case = random_case(0)
  with pytest.raises(ValueError, match=r"ess_scope = 5 .* does not divide the 12.* or 'batch'"):
    losses.p3o(ess_scope=5).statistics(*case)
  with pytest.raises(ValueError, match="ess_scope = 4 has no effect with ess = 'one'"):
    losses.p3o(ess="one", ess_scope=4)


def test_decoupled_ppo_without_proximal_logprobs_says_what_to_do():
  policy, batch, coefficients = random_case(0)
  batch = dataclasses.replace(batch, proximal_logprobs=None)
  with pytest.raises(ValueError, match="proximal_logprobs"):
    losses.decoupled_ppo().per_token(policy, batch, coefficients, None)


@pytest.mark.parametrize(
  "hyper", [{"delta_low": 0.1, "symmetric": True}, {"truncation": 3.0, "form": "ratio"}]
)
def test_a_hyper_parameter_of_dppo_that_would_be_ignored_is_refused(hyper):
  (field, value), *_ = hyper.items()
  with pytest.raises(ValueError, match=f"dppo: {field} = {value} has no effect with"):
    losses.dppo(**hyper)


def test_a_rounding_difference_is_no_divergence():
  """In float32, where the sampler's probability of a certain token is the next number below 1."""
  batch = make_batch(np.ones((1, 1, 3)), np.log([[[1 - 1e-7, 1 - 2e-4, 0.1]]]))
  batch = dataclasses.replace(batch, behavior_logprobs=batch.behavior_logprobs.astype(jnp.float32))
  policy = jnp.zeros((1, 1, 3), jnp.float32)
  distance = binary_divergence(policy, batch.behavior_logprobs, kind="kl")
  assert distance.dtype == jnp.float32 and np.all(np.isfinite(distance)) and np.all(distance >= 0)
  assert distance[0, 0, 0] < 1e-6 and distance[0, 0, 2] > 10
  loss = losses.dppo(divergence="kl")
  _, metrics = loss.per_token(policy, batch, jnp.ones((1, 1)), None)
  assert metric_value(metrics["loss/clip_fraction"]) == pytest.approx(1 / 3)
