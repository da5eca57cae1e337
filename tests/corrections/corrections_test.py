"""Corrections against plain Python from their formulas, and what they refuse."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import evaluate, make_batch, metric_value, random_case

from rlvr_jax import corrections, losses


def _divergence(kind, log_kappa):
  return {
    "k1": -log_kappa,
    "k2": log_kappa**2 / 2,
    "k3": math.exp(log_kappa) - 1 - log_kappa,
  }[kind]


def _passes(rule, log_kappas, t):
  over, kind = rule[0].split("_")
  values = [_divergence(kind, x) for x in log_kappas]
  value = {"token": values[t], "sum": sum(values), "mean": np.mean(values), "max": max(values)}[
    over
  ]
  if kind == "k1":
    return rule[1] <= math.exp(-value) <= rule[2]
  return value <= rule[1]


def _importance(log_kappas, level, bound, low, high, reject=(), veto=0.0):
  """(weight, kept) of each token of a response."""
  result = []
  for t, log_kappa in enumerate(log_kappas):
    u = {
      "token": log_kappa,
      "sequence": sum(log_kappas),
      "geometric": np.mean(log_kappas),
      "none": 0.0,
    }[level]
    kappa, kept = math.exp(u), True
    if level == "none":
      weight = 1.0
    elif bound == "mask":
      weight, kept = kappa, low <= kappa <= high
    else:
      weight = min(max(kappa, low if bound == "clip" else 0.0), high)
    kept = kept and all(_passes(rule, log_kappas, t) for rule in reject)
    kept = kept and not any(math.exp(x) < veto for x in log_kappas)
    result.append((weight, kept))
  return result


RULES = (("mean_k3", 0.1), ("token_k1", 0.3, 2.5), ("max_k2", 0.6), ("sum_k1", 0.2, 6.0))
# A bound applies to κ, whatever its level.
VARIANTS = [
  dict(level="token", bound="truncate", low=0.0, high=1.4),
  dict(level="sequence", bound="clip", low=0.7, high=1.4),
  dict(level="geometric", bound="mask", low=0.7, high=1.4),
  *(
    dict(level="none", bound="truncate", low=0.0, high=2.0, reject=(rule,), veto=0.2)
    for rule in RULES
  ),
  dict(level="token", bound="clip", low=0.8, high=1.2, reject=RULES[:2]),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_importance_equals_plain_python(variant):
  with jax.enable_x64(True):
    policy, batch, coefficients = random_case(3, (4, 4, 6), spread=0.9)
    corrected = corrections.corrected(losses.reinforce(), corrections.importance(**variant))
    per_token, metrics = jax.jit(corrected.per_token)(policy, batch, coefficients, None)
    policy, coefficients, per_token = map(np.asarray, (policy, coefficients, per_token))
    expected, dropped = np.zeros(batch.mask.shape), 0
    log_kappa, mask = policy - np.asarray(batch.behavior_logprobs), np.asarray(batch.mask) > 0
    for index in np.ndindex(mask.shape[:2]):
      places = np.flatnonzero(mask[index])
      pairs = _importance(log_kappa[index][places], **variant)
      for t, (weight, kept) in zip(places, pairs, strict=True):
        expected[(*index, t)] = kept * -weight * coefficients[index] * policy[(*index, t)]
        dropped += not kept
    np.testing.assert_allclose(per_token * mask, expected, rtol=1e-10, atol=1e-12)
    share = metric_value(metrics["correction/dropped"])
    assert share == pytest.approx(dropped / mask.sum())
    rejects = variant["bound"] == "mask" or "reject" in variant
    assert (0 < share < 1) == rejects


@pytest.mark.parametrize(("level", "mean"), [("token", np.mean), ("sequence", None)])
def test_normalized_weights_have_the_mean_1_over_the_batch(level, mean):
  """Over loss tokens, or over responses that have any."""
  with jax.enable_x64(True):
    policy, batch, coefficients = random_case(4, spread=0.4)
    made = corrections.importance(level=level, batch_normalize=True)
    corrected = corrections.corrected(losses.reinforce(), made)
    plain = corrections.corrected(losses.reinforce(), corrections.importance(level=level))

    @jax.jit
    def run(*case):
      ours, _ = corrected.per_token(*case, corrected.statistics(*case))
      theirs, _ = plain.per_token(*case, None)
      return ours, theirs

    ours, theirs = jax.device_get(run(policy, batch, coefficients))
    mask = np.asarray(batch.mask) > 0
    log_kappa = np.where(mask, np.asarray(policy) - np.asarray(batch.behavior_logprobs), 0.0)
    if level == "token":
      weights = np.minimum(np.exp(log_kappa), 2.0)[mask]
    else:
      weights = np.minimum(np.exp(log_kappa.sum(-1)), 2.0)[mask.any(-1)]
    np.testing.assert_allclose(ours * mask, theirs * mask / weights.mean(), rtol=1e-12)


def test_a_corrected_loss_takes_pi_prox_in_place_of_the_sampler():
  """The clip is about π/π_prox, the weight is π_prox/β."""
  mask = np.ones((1, 2, 1))
  behavior, proximal = np.log([[[0.2], [0.2]]]), np.log([[[0.4], [0.1]]])
  policy = jnp.log(jnp.array([[[0.6], [0.1]]]))  # π/π_prox = 1.5, 1; π_prox/β = 2, 0.5
  batch = make_batch(mask, behavior, proximal_logprobs=proximal)
  corrected = corrections.corrected(losses.ppo_clip(), corrections.tis(high=1.5))
  per_token, metrics = jax.jit(corrected.per_token)(policy, batch, np.ones((1, 2), "f4"), None)
  np.testing.assert_allclose(np.ravel(per_token), [-1.5 * 1.2, -0.5 * 1.0], rtol=1e-6)
  assert metric_value(metrics["loss/clip_fraction"]) == 0.5
  assert metric_value(metrics["correction/capped"]) == 0.5
  assert metric_value(metrics["correction/weight_mean"]) == pytest.approx(1.0)
  assert corrected.needs_proximal
  anchored = losses.ppo_clip()._replace(needs_proximal=True)
  assert corrections.corrected(anchored, corrections.opsm()).needs_proximal


def test_without_proximal_logprobs_it_says_what_to_do():
  policy, batch, coefficients = random_case(0)
  batch = dataclasses.replace(batch, proximal_logprobs=None)
  corrected = corrections.corrected(losses.ppo_clip(), corrections.icepop())
  with pytest.raises(ValueError, match="proximal_logprobs"):
    corrected.per_token(policy, batch, coefficients, None)


@pytest.mark.parametrize(
  "name", [n for n in losses.__all__ if getattr(losses, n)().ratio_to in ("old", "none")]
)
def test_an_infinite_ratio_that_is_dropped_has_no_gradient(name):
  policy, batch, coefficients = random_case(0, spread=0.1, dtype=np.float32)
  coefficients = coefficients.at[0, 1].set(-1.0)
  policy = policy.at[0, 1, 0].set(100.0)
  rejection = corrections.k3_rejection(high=1.0, policies=2)
  dropped = corrections.corrected(getattr(losses, name)(), rejection)
  (value, _), gradient = evaluate(dropped, policy, batch, coefficients)
  assert np.isfinite(value) and np.all(np.isfinite(gradient)) and gradient[0, 1, 0] == 0


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_log_weights_are_within_20_nats(level, sign):
  """Of a token and of a response, so that weights stay finite whatever the bound."""
  policy, batch, coefficients = random_case(0, spread=0.0, dtype=np.float32)
  row, tokens = np.unravel_index(np.argmax(batch.mask.sum(-1)), batch.mask.shape[:2]), 4
  policy = policy.at[(*row, slice(0, tokens))].add(sign * 60.0)
  unbounded = corrections.importance(level=level, high=1e30)
  per_token, _ = corrections.corrected(losses.reinforce(), unbounded).per_token(
    policy, batch, coefficients, None
  )
  weight = per_token[(*row, 0)] / (-coefficients[row] * policy[(*row, 0)])
  length = int(batch.mask[row].sum())
  assert length > tokens
  log_weight = sign * (20.0 * tokens / length if level == "geometric" else 20.0)
  np.testing.assert_allclose(weight, np.exp(log_weight), rtol=1e-5)


@pytest.mark.parametrize(
  ("name", "hyper", "message"),
  [
    ("importance", {"level": "tokens"}, "level = 'tokens'"),
    ("importance", {"low": 3.0}, "high = 2.0"),
    ("importance", {"level": "none", "batch_normalize": True}, "no effect"),
    (
      "importance",
      {"level": "none", "high": 3.0, "veto": 0.1},
      "high = 3.0 has no effect with",
    ),
    ("importance", {"level": "none"}, "changes nothing; set reject or veto"),
    ("importance", {"low": 0.5}, "low = 0.5 has no effect with bound = 'truncate'"),
    ("importance", {"reject": 3}, "reject = 3 is not a tuple of rules"),
    ("importance", {"reject": ("mean_k3", 0.1)}, "reject contains 'mean_k3', which is not a rule"),
    ("sequence_rejection", {"weight": "none", "truncation": 3.0}, "truncation = 3.0 has no effect"),
    ("k3_rejection", {"truncation": 3.0}, "k3_rejection: truncation = 3.0 has no effect"),
    ("geometric_rejection", {"truncation": -1.0}, "geometric_rejection: truncation = -1.0"),
    ("importance", {"reject": (("mean_k4", 1.0),)}, "mean_k4.*is not a rule"),
    ("importance", {"reject": (("mean_k1", 1.0),)}, "with bounds of κ"),
    ("importance", {"reject": (("mean_k3", 0.1, 0.2),)}, r"write \(statistic, high\)"),
    ("importance", {"reject": (("mean_k3", 0.0),)}, "high = 0.0"),
    ("importance", {"policies": 1}, "policies = 1"),
    ("geometric_rejection", {"weight": "geometric"}, "weight = 'geometric'"),
    ("tis", {"level": "none"}, "level = 'none'"),
    ("opsm", {"delta": 0.0}, "delta = 0.0"),
    ("tv_mask", {"ratio": "prox"}, "ratio = 'prox'"),
  ],
)
def test_a_bad_hyper_parameter_is_named_with_its_value(name, hyper, message):
  with pytest.raises(ValueError, match=message):
    getattr(corrections, name)(**hyper)
