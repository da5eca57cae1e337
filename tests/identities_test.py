"""The methods pin one another: what must coincide where two of them meet."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import evaluate, make_batch, random_case, with_needs

from rlvr_jax import advantages, corrections, distillation, losses, reweighting
from rlvr_jax.ops import kl
from rlvr_jax.ops.veto import SCOPES, negative_advantage_veto

pytestmark = pytest.mark.usefixtures("x64")


def _assert_same(one, other, case, *, value=True):
  """Equal gradients of two losses on a case, and equal values unless told otherwise."""
  (value_one, _), gradient_one = evaluate(one, *case)
  (value_other, _), gradient_other = evaluate(other, *case)
  np.testing.assert_allclose(gradient_one, gradient_other, rtol=1e-10, atol=1e-14)
  if value:
    np.testing.assert_allclose(value_one, value_other, rtol=1e-10, atol=1e-14)


@functools.cache
def _default(name):
  """The loss with its defaults, made once, so that one program is traced for it."""
  return getattr(losses, name)()


def _on_policy(seed=0):
  policy, batch, coefficients = random_case(seed)
  batch = dataclasses.replace(batch, behavior_logprobs=policy, proximal_logprobs=policy)
  return policy, batch, coefficients


# `clip_cov` drops a token on-policy too.
@pytest.mark.parametrize("name", [n for n in losses.__all__ if n not in ("reinforce", "clip_cov")])
def test_every_loss_on_policy_has_the_gradient_of_reinforce(name):
  """P3O has its value, too."""
  _assert_same(_default(name), _default("reinforce"), _on_policy(), value=name == "p3o")


def test_gspo_of_single_tokens_is_ppo_clip():
  case = random_case(1, (6, 4, 1), spread=0.4, full=True)
  clip = {"epsilon_low": 0.2, "epsilon_high": 0.3}
  _assert_same(losses.gspo(**clip), losses.ppo_clip(**clip), case)


def test_gmpo_of_single_tokens_is_ppo_clip_with_bounds_of_the_log_ratio():
  case = random_case(1, (6, 4, 1), spread=0.8, full=True)
  gmpo = losses.gmpo(epsilon_low=-np.log(0.8).item(), epsilon_high=np.log(1.3).item())
  _assert_same(gmpo, losses.ppo_clip(epsilon_low=0.2, epsilon_high=0.3), case)


def test_cispo_without_a_lower_bound_is_truncated_reinforce():
  cispo = losses.cispo(epsilon_low=1.0, epsilon_high=0.5)
  _assert_same(cispo, losses.reinforce(truncation=1.5), random_case(2))


def test_decoupled_ppo_is_ppo_clip_where_the_proximal_policy_sampled():
  policy, batch, coefficients = random_case(3)
  batch = dataclasses.replace(batch, proximal_logprobs=batch.behavior_logprobs)
  _assert_same(_default("decoupled_ppo"), _default("ppo_clip"), (policy, batch, coefficients))


def _distilled(made, policy, batch, *, loss):
  """Value and gradient of a teacher's part alone, under a loss if it gives advantages."""

  def value(policy):
    if made.advantage is None:
      return jnp.sum(made.per_token(policy, batch))
    added = made.advantage(policy, batch)
    return jnp.sum(loss.per_token(policy, batch, added, None)[0] * batch.mask)

  return jax.value_and_grad(value)(policy)


@pytest.mark.parametrize("name", [n for n in distillation.__all__ if n != "none"])
def test_a_teacher_that_is_the_student_gives_zero(name):
  """Where it is also the sampler."""
  policy, batch, _ = _on_policy()
  same = dict(teacher_logprobs=policy, teacher_divergence=jnp.zeros_like(policy))
  batch = dataclasses.replace(batch, **same)
  value, gradient = _distilled(
    getattr(distillation, name)(), policy, batch, loss=_default("ppo_clip")
  )
  assert value == 0 and np.all(gradient == 0)


def test_forms_of_sampled_distillation_coincide():
  policy, batch, _ = random_case(30)
  _, score = _distilled(distillation.opd_score(truncation=1.1), policy, batch, loss=None)
  truncated = losses.reinforce(truncation=1.1)
  _, as_advantage = _distilled(distillation.opd(), policy, batch, loss=truncated)
  np.testing.assert_allclose(score, as_advantage, rtol=1e-10, atol=1e-14)
  plain = distillation.opd_ratio(max_drop=1.0, log_ratio_penalty=0.0)
  _, ratio = _distilled(plain, policy, batch, loss=None)
  unclipped = losses.ppo_clip(epsilon_low=1.0, epsilon_high=1e9)
  _, as_advantage = _distilled(distillation.opd(), policy, batch, loss=unclipped)
  np.testing.assert_allclose(ratio, as_advantage, rtol=1e-10, atol=1e-14)
  _, weighted = _distilled(distillation.iw_opd(gamma=0.0), policy, batch, loss=None)
  stale = distillation.opd(student="behavior")
  _, as_advantage = _distilled(stale, policy, batch, loss=_default("reinforce"))
  np.testing.assert_allclose(weighted, as_advantage, rtol=1e-10, atol=1e-14)


UNCLIPPED = {"epsilon_low": 1.0, "epsilon_high": 1e9}
WITH_OLD_RATIO = [n for n in losses.__all__ if getattr(losses, n)().ratio_to == "old"]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_that_drops_nothing_is_truncated_reinforce_or_unclipped(divergence):
  never = {"divergence": divergence, "delta_low": 1e9, "delta_high": 1e9}
  case = random_case(21)  # some tokens are certain
  score = losses.dppo(**never, truncation=1.2)
  _assert_same(score, losses.reinforce(truncation=1.2), case)
  _assert_same(losses.dppo(**never, form="ratio"), losses.ppo_clip(**UNCLIPPED), case)


def test_luspo_is_gspo_summed_over_each_response():
  """A response's GSPO loss times its length."""
  policy, batch, coefficients = random_case(22)
  lengths = jnp.sum(batch.mask, axis=-1, keepdims=True)
  gspo = losses.gspo(epsilon_low=0.1, epsilon_high=0.2)
  luspo = gspo._replace(
    per_token=lambda *args: (gspo.per_token(*args)[0] * lengths, gspo.per_token(*args)[1])
  )
  (value, _), gradient = evaluate(gspo, policy, batch, coefficients, how="sequence_sum")
  (expected, _), of_mean = evaluate(luspo, policy, batch, coefficients, how="sequence_mean")
  np.testing.assert_allclose(value, expected, rtol=1e-12)
  np.testing.assert_allclose(gradient, of_mean, rtol=1e-12)


def test_vespo_without_powers_is_reinforce():
  zero = dict.fromkeys(("k_positive", "lambda_positive", "k_negative", "lambda_negative"), 0.0)
  _assert_same(losses.vespo(**zero), _default("reinforce"), random_case(23))


def test_dro_is_reinforce_with_the_k2_penalty():
  policy, batch, coefficients = random_case(24)
  reinforce = losses.reinforce()

  def with_penalty(policy, batch, coefficients, statistics):
    plain, metrics = reinforce.per_token(policy, batch, coefficients, statistics)
    return plain + 0.3 * kl.k2(policy, batch.behavior_logprobs, batch.mask), metrics

  expected = reinforce._replace(per_token=with_penalty)
  _assert_same(losses.dro(penalty=0.3), expected, (policy, batch, coefficients))


def test_clip_cov_of_an_empty_interval_is_ppo_clip_and_kl_cov_without_penalty_is_unclipped():
  case = random_case(25)
  _assert_same(losses.clip_cov(low=1e8, high=1e9), _default("ppo_clip"), case)
  _assert_same(losses.kl_cov(coefficient=0.0), losses.ppo_clip(**UNCLIPPED), case)


def test_no_correction_is_the_loss_itself():
  for name in losses.__all__:
    loss = _default(name)
    assert corrections.corrected(loss, corrections.none()) is loss


def _pairs():
  """Every loss with one correction, in turn, and every correction of `ppo_clip`; slow: all."""
  names = [name for name in corrections.__all__ if name != "none"]
  for number, loss in enumerate(losses.__all__):
    for place, correction in enumerate(names):
      is_quick = loss == "ppo_clip" or place == number % len(names)
      marks = [] if is_quick else pytest.mark.slow
      yield pytest.param(loss, correction, marks=marks, id=f"{loss}-{correction}")


@pytest.mark.parametrize(("name", "correction"), [*_pairs()])
def test_a_correction_composes_with_a_loss_or_is_refused(name, correction):
  """With an exact sampler and one version every correction changes nothing."""
  loss, made = _default(name), getattr(corrections, correction)()
  if loss.ratio_to == "sampler":
    with pytest.raises(ValueError, match="would do so a second time"):
      corrections.corrected(loss, made)
    return
  case = _on_policy()
  _assert_same(corrections.corrected(loss, made), loss, case)


def test_weights_with_two_policies_are_refused_where_the_ratio_corrects():
  weights = corrections.importance(policies=2)
  only_rejects = corrections.geometric_rejection(policies=2)
  for name in WITH_OLD_RATIO:
    with pytest.raises(ValueError, match="policies = 2"):
      corrections.corrected(_default(name), weights)
    assert not corrections.corrected(_default(name), only_rejects).needs_proximal


@pytest.mark.parametrize("name", WITH_OLD_RATIO)
def test_a_correction_with_unbounded_weights_where_the_trainer_is_the_sampler_is_the_loss(name):
  """π_prox = β: κ is 1, and the ratio is the loss's own."""
  policy, batch, coefficients = random_case(26)
  batch = dataclasses.replace(batch, proximal_logprobs=batch.behavior_logprobs)
  corrected = corrections.corrected(_default(name), corrections.tis())
  _assert_same(corrected, _default(name), (policy, batch, coefficients))


def test_corrections_of_ppo_clip_are_decoupled_ppo():
  case = random_case(27)
  of = lambda correction: corrections.corrected(_default("ppo_clip"), correction)
  uncapped = losses.decoupled_ppo(behavior_weight_cap=1e9)
  _assert_same(of(corrections.icepop(low=0.0, high=1e9)), uncapped, case)
  _assert_same(of(corrections.tis(high=1.3)), losses.decoupled_ppo(behavior_weight_cap=1.3), case)
  never = corrections.tv_mask(delta=1e9)
  _assert_same(of(never), losses.decoupled_ppo(behavior_weight_cap=2.0), case)


def test_a_sequence_weight_of_at_most_1_of_failures_is_topr():
  policy, batch, coefficients = random_case(28)
  failed = -jnp.abs(coefficients)
  corrected = corrections.corrected(
    _default("reinforce"), corrections.tis(level="sequence", high=1.0)
  )
  _assert_same(corrected, _default("topr"), (policy, batch, failed))


def test_opsm_that_masks_nothing_is_the_loss():
  corrected = corrections.corrected(_default("ppo_clip"), corrections.opsm(delta=1e9))
  _assert_same(corrected, _default("ppo_clip"), random_case(29))


def test_estimators_of_the_kl_as_losses_have_these_gradients():
  """Over a vocabulary of 6, by enumeration: E_π[∇k] with the sampling held constant."""
  rng = np.random.default_rng(30)
  logits, reference = (jnp.asarray(x) for x in rng.normal(size=(2, 6)))
  log_tau, mask = jax.nn.log_softmax(reference), jnp.ones(6)
  policy = jnp.exp(jax.nn.log_softmax(logits))

  def gradient(value):
    return jax.grad(lambda z: value(jax.nn.log_softmax(z)))(logits)

  def expected(estimate):
    return gradient(lambda log_pi: jnp.sum(policy * estimate(log_pi, log_tau, mask)))

  near = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-14)
  near(expected(kl.k1), np.zeros(6))
  near(expected(kl.k2), gradient(lambda log_pi: jnp.sum(jnp.exp(log_pi) * (log_pi - log_tau))))
  near(expected(kl.k3), gradient(lambda log_pi: jnp.sum(jnp.exp(log_tau) * (log_tau - log_pi))))


def test_dual_clip_beyond_every_ratio_is_ppo_clip():
  _assert_same(losses.ppo_clip(dual_clip=1e9), _default("ppo_clip"), random_case(4))


def test_m2po_within_its_budget_is_unclipped_and_p3o_bare_is_its_gradient():
  unclipped = losses.ppo_clip(epsilon_low=1.0, epsilon_high=1e9)
  _assert_same(losses.m2po(budget=100.0), unclipped, random_case(5))
  _assert_same(losses.p3o(cap="none", kl_term=False), unclipped, random_case(5), value=False)


def test_m2po_of_a_tiny_budget_is_ppo_clip_with_the_smallest_interval():
  _assert_same(
    losses.m2po(budget=1e-12), losses.ppo_clip(epsilon_low=0.3, epsilon_high=0.5), random_case(6)
  )


def test_topr_of_positive_coefficients_is_reinforce():
  policy, batch, coefficients = random_case(7)
  _assert_same(_default("topr"), _default("reinforce"), (policy, batch, jnp.abs(coefficients)))


def test_p3o_frozen_at_one_is_reinforce_truncated_at_one():
  _assert_same(losses.p3o(ess="one"), losses.reinforce(truncation=1.0), random_case(8))


def test_p3o_per_sequence_is_per_batch_for_one_rollout():
  case = random_case(9, (1, 1, 6), full=True)
  case = (*case[:2], jnp.ones((1, 1)))  # the first rollout's coefficient is 0
  _assert_same(losses.p3o(ess="sequence"), _default("p3o"), case)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_veto_that_nothing_triggers_changes_nothing(scope):
  case = random_case(10)
  veto = negative_advantage_veto(scope=scope, threshold=1e-12)
  (value, _), gradient = evaluate(_default("ppo_clip"), *case, veto=veto)
  (plain_value, _), plain_gradient = evaluate(_default("ppo_clip"), *case)
  np.testing.assert_allclose(value, plain_value, rtol=1e-12)
  np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-12)


def _coefficients(name, rewards, lengths=None, **hyper):
  lengths = np.full(rewards.shape, 3) if lengths is None else lengths
  mask = (np.arange(lengths.max()) < lengths[..., None]).astype(float)
  estimator = getattr(advantages, name)(**hyper)
  batch = with_needs(make_batch(mask, rewards=rewards))
  return np.asarray(estimator.apply(estimator.init(jnp.asarray(1.0)), batch))


def _rewards(group=8, seed=0):
  rng = np.random.default_rng(seed)
  return (rng.random((16, group)) < rng.random((16, 1))).astype(float)


@pytest.mark.parametrize(
  "name, hyper",
  [
    ("fade", {"alpha_max": 1.0, "delta_min": 1.0}),
    ("power", {"alpha": 1.0}),
    ("asym", {"delta": 1.0}),
    ("power_asym", {"alpha": 1.0, "delta": 1.0}),
    ("pass_at_k", {"k": 1}),
    ("pass_at_k", {"k": 1, "form": "plug_in"}),
    ("opo", {}),  # all responses are of one length here
    ("opob", {}),  # W = 1, and of one norm
    ("otb", {}),  # all tokens have the same energy, and no response a tail
    ("log_mean_exp", {"eta": 1e-9}),
  ],
)
def test_these_are_grpo_mean(name, hyper):
  rewards = _rewards()
  expected = _coefficients("grpo_mean", rewards)
  np.testing.assert_allclose(_coefficients(name, rewards, **hyper), expected, atol=1e-6)


def test_group_estimators_are_multiples_of_grpo_mean():
  rewards = _rewards()
  centered = _coefficients("grpo_mean", rewards)
  mean = rewards.mean(axis=1, keepdims=True)
  std = rewards.std(axis=1, keepdims=True, ddof=1)
  mixed = std > 0
  np.testing.assert_allclose(_coefficients("rloo", rewards), 8 / 7 * centered, rtol=1e-12)
  np.testing.assert_allclose(
    _coefficients("maxrl", rewards), np.where(mixed, centered / np.where(mixed, mean, 1), 0)
  )
  np.testing.assert_allclose(
    _coefficients("grpo", rewards, epsilon=0.0),
    np.where(mixed, centered / np.where(mixed, std, 1), 0),
    rtol=1e-12,
  )


def test_reinforce_plus_plus_is_grpo_mean_by_the_batch_s_deviation():
  """With the group's baseline; without one it is the reward less the batch's mean."""
  rewards, lengths = _rewards(), np.random.default_rng(1).integers(1, 6, (16, 8))
  centered = _coefficients("grpo_mean", rewards)
  over = functools.partial(_coefficients, "reinforce_plus_plus", rewards, lengths)
  found = over(baseline=True)
  np.testing.assert_allclose(found, centered / np.std(centered, ddof=1), rtol=1e-6, atol=1e-12)
  of_tokens = np.repeat(rewards.ravel(), lengths.ravel())
  expected = (rewards - of_tokens.mean()) / np.std(of_tokens, ddof=1)
  np.testing.assert_allclose(over(over="tokens"), expected, rtol=1e-6)


def test_gdpo_of_one_reward_is_grpo_by_the_batch_s_deviation():
  rewards = _rewards()
  plain = _coefficients("grpo", rewards, epsilon=1e-4)
  found = _coefficients("gdpo", rewards, batch_epsilon=0.0)
  np.testing.assert_allclose(found, plain / np.std(plain, ddof=1), rtol=1e-10, atol=1e-14)


def test_opob_of_the_policy_s_own_rollouts_with_norms_as_lengths_is_opo():
  rewards, lengths = _rewards(), np.random.default_rng(2).integers(1, 9, (16, 8))
  found = _coefficients("opob", rewards, lengths)
  np.testing.assert_allclose(found, _coefficients("opo", rewards, lengths), rtol=1e-7, atol=1e-9)


def test_power_is_pass_at_k_up_to_k():
  rewards = _rewards()
  for k in (2, 3, 5):
    plug_in = _coefficients("pass_at_k", rewards, k=k, form="plug_in")
    np.testing.assert_allclose(plug_in, k * _coefficients("power", rewards, alpha=k), rtol=1e-12)


def test_unbiased_pass_at_k_approaches_the_plug_in_form_in_large_groups():
  rewards = _rewards(group=4096)[:4]
  unbiased = _coefficients("pass_at_k", rewards, k=4)
  plug_in = _coefficients("pass_at_k", rewards, k=4, form="plug_in")
  np.testing.assert_allclose(unbiased, plug_in, atol=0.01)


def test_power_asym_joins_power_and_asym():
  rewards = _rewards()
  np.testing.assert_allclose(
    _coefficients("power_asym", rewards, alpha=1.0, delta=0.3),
    _coefficients("asym", rewards, delta=0.3),
  )
  np.testing.assert_allclose(
    _coefficients("power_asym", rewards, alpha=3.0, delta=1.0),
    _coefficients("power", rewards, alpha=3.0),
  )


def test_no_reweighting_returns_what_it_gets():
  rule = reweighting.none()
  coefficients = jnp.arange(6.0).reshape(2, 3)
  result, metrics = rule.apply(coefficients, None, jnp.ones((2, 3), bool), jax.random.key(0))
  assert result is coefficients
  assert metrics == {}
  assert not rule.needs_gram


@functools.cache
def _salt_jit(**hyper):
  apply = reweighting.salt(**hyper).apply
  return jax.jit(lambda a, gram, key: apply(a, gram, jnp.ones(a.shape, bool), key))


def _salt(coefficients, features, **hyper):
  """A' of one block, from its rollouts' gradient features [b, D]."""
  gram = features @ features.T
  result, _ = _salt_jit(**hyper)(coefficients[None], gram[None], jax.random.key(0))
  return np.asarray(result[0])


def _block(seed, size=6, width=5):
  rng = np.random.default_rng(seed)
  return rng.normal(size=size), rng.normal(size=(size, width)) * rng.uniform(0.1, 3, (size, 1))


@pytest.mark.parametrize("random_subspace", [False, True])
def test_salt_with_all_of_the_whole_residual_returns_what_it_gets(random_subspace):
  whole = {"alpha_min": 1.0, "alpha_max": 1.0, "positive_part": False}
  for seed, width in enumerate((1, 2, 5, 20)):  # for any K
    coefficients, features = _block(seed, width=width)
    result = _salt(coefficients, features, **whole, random_subspace=random_subspace)
    np.testing.assert_allclose(result, coefficients, atol=1e-12)


def test_salt_without_a_residual_is_a_projection():
  coefficients, features = _block(0)
  once = _salt(coefficients, features, alpha_max=0.0)
  assert np.abs(once - coefficients).max() > 0.1
  np.testing.assert_allclose(_salt(once, features, alpha_max=0.0), once, atol=1e-12)
  np.testing.assert_allclose(_salt(coefficients, features, channels="shared"), once, atol=1e-14)


def test_salt_of_both_channels_is_their_sum():
  coefficients, features = _block(1)
  parts = [_salt(coefficients, features, channels=name) for name in ("shared", "residual")]
  np.testing.assert_allclose(_salt(coefficients, features), sum(parts), atol=1e-14)


def test_amplified_salt_keeps_all_of_a_and_adds_what_the_released_form_explores():
  coefficients, features = _block(2)
  amplified = functools.partial(_salt, channels="amplified")
  shared = _salt(coefficients, features, channels="shared")
  # It is the released form, and what that form takes out of A: (I − P) A.
  expected = _salt(coefficients, features) + coefficients - shared
  np.testing.assert_allclose(amplified(coefficients, features), expected, atol=1e-12)
  # With α = 0 it is A for any K; without the positive part the residual's weight is 1 + α.
  none = amplified(coefficients, features, alpha_max=0.0)
  np.testing.assert_allclose(none, coefficients, atol=1e-14)
  half = dict(alpha_min=0.5, alpha_max=0.5, positive_part=False)
  outside = coefficients - shared
  found = amplified(coefficients, features, **half)
  np.testing.assert_allclose(found, shared + 1.5 * outside, atol=1e-12)


def test_salt_of_gradients_along_one_direction_has_its_closed_form():
  """g_i = c_i·u: A' = ĉĉᵀA + α(A⁺ − ĉĉᵀA⁺), α = 1 − (c·A)²/Σ A²c²."""
  for seed in range(4):
    rng = np.random.default_rng(seed)
    a, c, u = rng.normal(size=6), rng.normal(size=6), rng.normal(size=9)
    alpha = np.clip(1 - (c @ a) ** 2 / np.sum(a**2 * c**2), 0, 1)
    unit, positive = c / np.linalg.norm(c), np.maximum(a, 0)
    expected = unit * (unit @ a) + alpha * (positive - unit * (unit @ positive))
    np.testing.assert_allclose(_salt(a, np.outer(c, u)), expected, atol=1e-12)
