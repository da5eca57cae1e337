"""Distillation from sampled tokens: formulas in NumPy, and expected gradients by enumeration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import make_batch, random_case

from rlvr_jax import distillation, losses
from rlvr_jax.ops import kl
from rlvr_jax.update.teaching import Teaching

pytestmark = pytest.mark.usefixtures("x64")
V = 6


def teaching(made, *, weight=1.0, reward_weight=0.0):
  return Teaching(made, weight, reward_weight, 1.0, ("teacher",))


def masked(batch, x):
  return np.where(np.asarray(batch.mask) > 0, np.asarray(x), 0.0)


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("student", "discount"), [("policy", 0.0), ("behavior", 0.7), ("policy", 1.0)]
)
def test_opd_is_the_gap_and_its_discounted_sums(student, discount):
  policy, batch, _ = random_case(0)
  by = policy if student == "policy" else batch.behavior_logprobs
  gap = masked(batch, batch.teacher_logprobs) - masked(batch, by)
  T = gap.shape[-1]
  expected = np.zeros_like(gap)
  for t in range(T):
    for s in range(t, T):
      expected[..., t] += discount ** (s - t) * gap[..., s]
  found = distillation.opd(student=student, discount=discount).advantage(policy, batch)
  np.testing.assert_allclose(found, masked(batch, expected), rtol=1e-12, atol=1e-14)


def test_opd_score_truncates_the_ratio():
  policy, batch, _ = random_case(1)
  ratio = np.exp(masked(batch, policy) - masked(batch, batch.behavior_logprobs))
  assert np.any(ratio > 1.2)
  gap = masked(batch, batch.teacher_logprobs) - masked(batch, policy)
  expected = -np.minimum(ratio, 1.2) * gap * masked(batch, policy)
  found = distillation.opd_score(truncation=1.2).per_token(policy, batch)
  np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_opd_ratio_drops_tokens_that_have_lost_probability():
  policy, batch, _ = random_case(2, spread=1.5)
  policy = jnp.minimum(policy, 0.0)
  log_pi, log_beta = masked(batch, policy), masked(batch, batch.behavior_logprobs)
  kept = np.exp(log_pi) - np.exp(log_beta) >= -0.1
  assert 0 < np.sum(~kept) < kept.size
  gap, d = masked(batch, batch.teacher_logprobs) - log_pi, log_pi - log_beta
  expected = masked(batch, np.where(kept, -gap * np.exp(d), 0) + 0.3 * d**2)
  made = distillation.opd_ratio(max_drop=0.1, log_ratio_penalty=0.3)
  np.testing.assert_allclose(made.per_token(policy, batch), expected, rtol=1e-12)


def test_iw_opd_weighs_by_what_student_and_teacher_still_have_to_disagree_about():
  policy, batch, _ = random_case(3)
  gap = masked(batch, batch.teacher_logprobs) - masked(batch, batch.behavior_logprobs)
  s = np.concatenate([np.zeros_like(gap[..., :1]), np.cumsum(np.abs(gap), -1)], axis=-1)
  weights = 1 + 0.8 * (1 - s[..., :-1] / np.maximum(s[..., -1:], 1e-8))
  expected = -weights * gap * masked(batch, policy)
  found = distillation.iw_opd(gamma=0.8).per_token(policy, batch)
  np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_estimates_are_those_of_ops_kl():
  policy, batch, _ = random_case(4)
  args = policy, batch.teacher_logprobs, batch.mask
  run = lambda name: distillation.kl_estimate(estimator=name).per_token(policy, batch)
  np.testing.assert_allclose(run("k2"), kl.k2(*args), rtol=1e-12)
  np.testing.assert_allclose(run("k3"), kl.k3(*args), rtol=1e-12)
  np.testing.assert_allclose(run("k3+"), kl.k3(*args), rtol=1e-12)
  gradient = lambda name: jax.grad(
    lambda x: jnp.sum(distillation.kl_estimate(estimator=name).per_token(x, batch))
  )(policy)
  np.testing.assert_allclose(gradient("k3+"), gradient("k2"), rtol=1e-12)
  assert np.any(np.abs(gradient("k3") - gradient("k2")) > 0.01)


# --- expected gradients, by enumeration -----------------------------------------------------------


def distributions(seed, shape=(V,)):
  """Logits θ of π, and log-probabilities of β and τ; all differ."""
  rng = np.random.default_rng(seed)
  theta, beta, tau = (jnp.asarray(rng.normal(size=shape)) for _ in range(3))
  return theta, jax.nn.log_softmax(beta), jax.nn.log_softmax(tau)


def reverse_kl(theta, tau):
  log_pi = jax.nn.log_softmax(theta)
  return jnp.sum(jnp.exp(log_pi) * (log_pi - tau), axis=-1)


def forward_kl(theta, tau):
  return jnp.sum(jnp.exp(tau) * (tau - jax.nn.log_softmax(theta)), axis=-1)


def expected_gradient(teaching, loss, theta, beta, tau):
  """E_β[∇ of the token's loss], every token of the vocabulary once, weighted by β."""
  group = lambda x: x[:, None, None]
  plain = make_batch(np.ones((V, 1, 1)), group(beta), teacher_logprobs=group(tau))

  def total(theta):
    logprobs, made = group(jax.nn.log_softmax(theta)), teaching.distillation.divergence
    between = made and made(logprobs[:, 0, 0], tau) * jnp.ones((V, 1, 1))
    batch = dataclasses.replace(plain, teacher_divergence=between)
    coefficients = teaching.coefficients(logprobs, batch, jnp.ones((V, 1)))
    per_token, _ = loss.per_token(logprobs, batch, coefficients, None)
    return jnp.sum(jnp.exp(beta) * teaching.losses(logprobs, batch, per_token)[:, 0, 0])

  return jax.grad(total)(theta)


UNCLIPPED = losses.ppo_clip(epsilon_low=1.0, epsilon_high=1e9)
WEIGHTED = losses.reinforce(truncation=1e9)
opd_ratio = distillation.opd_ratio(max_drop=1.0, log_ratio_penalty=0.0)
ANY_STALENESS = {
  "ppo_clip": (distillation.opd(), UNCLIPPED),
  "reinforce": (distillation.opd(), WEIGHTED),
  "vopd": (distillation.vopd(), UNCLIPPED),
  "vopd_of_3": (distillation.vopd(top_k=3), WEIGHTED),
  "kl": (distillation.kl(), UNCLIPPED),
  "gspo": (distillation.opd(), losses.gspo(epsilon_low=1.0, epsilon_high=1e9)),
  "score": (distillation.opd_score(truncation=None), UNCLIPPED),
  "ratio": (opd_ratio, UNCLIPPED),
}


@pytest.mark.parametrize("made", ANY_STALENESS.values(), ids=ANY_STALENESS)
def test_the_expected_gradient_is_that_of_the_reverse_kl_at_any_staleness(made):
  theta, beta, tau = distributions(0)
  found = expected_gradient(teaching(made[0], weight=0.7), made[1], theta, beta, tau)
  expected = 0.7 * jax.grad(reverse_kl)(theta, tau)
  np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)


def test_the_baseline_of_vopd_lowers_the_variance():
  """Of the sampled token's gradient, summed over the components."""
  theta, _, tau = distributions(5)
  log_pi = jax.nn.log_softmax(theta)
  pi, group = jnp.exp(log_pi), lambda x: x[:, None, None]
  scores = jnp.eye(V) - pi  # of each token, its gradient
  batch = make_batch(
    np.ones((V, 1, 1)),
    teacher_logprobs=group(tau),
    teacher_divergence=reverse_kl(theta, tau) * jnp.ones((V, 1, 1)),
  )

  def variance(made):
    samples = made.advantage(group(log_pi), batch)[:, :, 0] * scores
    return jnp.sum(pi[:, None] * (samples - pi @ samples) ** 2)

  assert variance(distillation.vopd()) < 0.8 * variance(distillation.opd())


def test_with_the_sampler_in_the_difference_it_is_not():
  theta, beta, tau = distributions(0)
  stale = teaching(distillation.opd(student="behavior"))
  found = expected_gradient(stale, UNCLIPPED, theta, beta, tau)
  assert np.abs(found - jax.grad(reverse_kl)(theta, tau)).max() > 0.05
  on_policy = jax.nn.log_softmax(theta)
  found = expected_gradient(stale, UNCLIPPED, theta, on_policy, tau)
  np.testing.assert_allclose(found, jax.grad(reverse_kl)(theta, tau), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
  ("estimator", "divergence"), [("k2", reverse_kl), ("k3+", reverse_kl), ("k3", forward_kl)]
)
def test_the_expected_gradient_of_an_estimate_on_policy(estimator, divergence):
  theta, _, tau = distributions(1)
  made = teaching(distillation.kl_estimate(estimator=estimator))
  found = expected_gradient(made, UNCLIPPED, theta, jax.nn.log_softmax(theta), tau)
  np.testing.assert_allclose(found, jax.grad(divergence)(theta, tau), rtol=1e-10, atol=1e-14)


def test_k1_as_a_loss_has_no_teacher_in_its_expected_gradient():
  theta, _, tau = distributions(2)
  beta = jax.lax.stop_gradient(jax.nn.log_softmax(theta))
  one = jnp.ones(V)
  k1 = lambda x: jnp.sum(jnp.exp(beta) * kl.k1(jax.nn.log_softmax(x), tau, one))
  np.testing.assert_allclose(jax.grad(k1)(theta), 0, atol=1e-14)
  with pytest.raises(ValueError, match="expected gradient of 0, whatever the teacher; choose"):
    distillation.kl_estimate(estimator="k1")


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_a_discount_of_1_is_the_gradient_of_the_response_s_kl(discount):
  """Two tokens; the second's distribution depends on the first. 0 leaves that out."""
  (first, _, first_tau), (second, _, second_tau) = distributions(3, (3,)), distributions(4, (3, 3))
  taus = jnp.stack([jnp.repeat(first_tau, 3), second_tau.reshape(-1)], axis=-1)

  def pairs(theta):
    """log π of both tokens of each of the nine responses, [9, 2]."""
    of_first, of_second = map(jax.nn.log_softmax, theta)
    return jnp.stack([jnp.repeat(of_first, 3), of_second.reshape(-1)], axis=-1)

  theta = (first, second)
  beta = jax.lax.stop_gradient(pairs(theta))
  batch = make_batch(np.ones((9, 1, 2)), beta[:, None], teacher_logprobs=taus[:, None])
  made = teaching(distillation.opd(discount=discount))

  def total(theta):
    logprobs = pairs(theta)[:, None]
    coefficients = made.coefficients(logprobs, batch, jnp.zeros((9, 1)))
    per_token, _ = UNCLIPPED.per_token(logprobs, batch, coefficients, None)
    return jnp.sum(jnp.exp(beta.sum(-1)) * per_token.sum((-1, -2)))

  def divergence(theta):
    """KL of the response; of γ = 0 the prefix counts as given."""
    logprobs = pairs(theta)
    weights = jnp.exp(logprobs.sum(-1))
    whole = jnp.sum(weights * (logprobs - taus).sum(-1))
    at_places = reverse_kl(theta[0], first_tau) + jnp.sum(
      jnp.exp(jax.lax.stop_gradient(jax.nn.log_softmax(theta[0])))
      * reverse_kl(theta[1], second_tau)
    )
    return whole if discount else at_places

  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)
  jax.tree.map(near, jax.grad(total)(theta), jax.grad(divergence)(theta))


# --- beside the reward ----------------------------------------------------------------------------


def test_advantages_and_losses_add_up_with_their_weights():
  policy, batch, coefficients = random_case(5)
  made = teaching(distillation.opd(), weight=0.7, reward_weight=0.3)
  gap = made.distillation.advantage(policy, batch)
  expected = 0.3 * coefficients[..., None] + 0.7 * gap
  np.testing.assert_allclose(made.coefficients(policy, batch, coefficients), expected, rtol=1e-12)
  score = teaching(distillation.opd_score(), weight=0.7, reward_weight=0.3)
  assert score.coefficients(policy, batch, coefficients) is coefficients
  of_teacher = score.distillation.per_token(policy, batch)
  found = score.losses(policy, batch, jnp.ones_like(policy))
  np.testing.assert_allclose(found, 0.3 + 0.7 * of_teacher, rtol=1e-12)


def test_without_a_weight_the_reward_s_part_is_untouched():
  policy, batch, coefficients = random_case(6)
  for name in distillation.__all__:
    made = teaching(getattr(distillation, name)(), weight=0.0, reward_weight=1.0)
    assert made.coefficients(policy, batch, coefficients) is coefficients
    assert made.losses(policy, batch, policy) is policy


def test_alone_it_does_not_see_losses_that_are_not_finite():
  policy, batch, _ = random_case(7)
  made = teaching(distillation.opd_score())
  found = made.losses(policy, batch, jnp.full_like(policy, jnp.inf))
  assert np.all(np.isfinite(found))


def test_a_batch_without_the_teacher_s_log_probabilities_is_an_error():
  policy, batch, _ = random_case(8)
  batch = dataclasses.replace(batch, teacher_logprobs=None)
  with pytest.raises(ValueError, match=r"distillation needs batch\.teacher_logprobs"):
    distillation.opd().advantage(policy, batch)
