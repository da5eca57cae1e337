"""Parts on plain arrays give what the same parts give in an update."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.batches import evaluate, metric_value, random_case

from rlvr_jax import advantages, geometry, losses, parts, reweighting
from rlvr_jax.types import Head

P, G, T, D, V = 3, 4, 5, 8, 11


@pytest.mark.parametrize("name", ["p3o", "decoupled_ppo"])
def test_a_loss_is_that_of_an_update(name):
  policy, batch, coefficients = random_case(1, dtype=np.float32)
  loss, veto = getattr(losses, name)(), parts.negative_advantage_veto(threshold=0.9)

  @jax.jit
  def of_parts(policy):
    given = policy, batch.behavior_logprobs, coefficients, batch.mask
    proximal = batch.proximal_logprobs if loss.needs_proximal else None
    return parts.loss_of(loss, *given, proximal_logprobs=proximal, veto=veto)

  (value, metrics), gradient = jax.value_and_grad(of_parts, has_aux=True)(policy)
  (value0, of_update), gradient0 = evaluate(loss, policy, batch, coefficients, veto=veto)
  np.testing.assert_allclose(value, value0, rtol=1e-6)
  np.testing.assert_allclose(gradient, gradient0, rtol=1e-5, atol=1e-7)
  assert metrics.keys() == of_update.keys() and metrics["veto/token_fraction"] > 0
  for key, metric in of_update.items():
    np.testing.assert_allclose(metrics[key], metric_value(metric), rtol=1e-6)


def test_a_random_draw_goes_by_the_tokens():
  policy, batch, coefficients = random_case(1, dtype=np.float32)
  loss = losses.clip_cov(share=0.05, low=-100.0, high=100.0)
  given = policy, batch.behavior_logprobs, coefficients, batch.mask
  drawn = jax.jit(lambda tokens: parts.loss_of(loss, *given, tokens=tokens)[0])
  expected, _ = evaluate(loss, policy, batch, coefficients)[0]
  np.testing.assert_allclose(drawn(batch.tokens), expected, rtol=1e-6)
  assert len({float(drawn(batch.tokens + shift)) for shift in range(4)}) > 1


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_a_batch_without_loss_tokens_has_the_loss_0(aggregation):
  policy, batch, coefficients = random_case(1, dtype=np.float32)
  given = batch.behavior_logprobs, coefficients, np.zeros_like(batch.mask)
  loss = lambda policy: parts.loss_of(losses.ppo_clip(), policy, *given, aggregation=aggregation)[0]
  value, gradient = jax.value_and_grad(loss)(policy)
  assert value == 0 and not gradient.any()


def test_a_missing_proximal_policy_is_named():
  policy, batch, coefficients = random_case(1)
  with pytest.raises(ValueError, match="needs proximal_logprobs"):
    given = policy, batch.behavior_logprobs, coefficients, batch.mask
    parts.loss_of(losses.decoupled_ppo(), *given)


def test_advantages_of_rewards_lengths_and_a_state():
  rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
  np.testing.assert_allclose(
    parts.advantages_of(advantages.grpo_mean(), rewards), rewards - [[0.5], [0.0]]
  )
  mask = np.arange(6) < np.array([[1, 2, 3, 6], [1, 1, 1, 1]])[..., None]
  found = parts.advantages_of(advantages.opo(), rewards, mask=mask)
  np.testing.assert_allclose(found[0], rewards[0] - 7 / 12, rtol=1e-6)  # weighted by length
  fade = advantages.fade(alpha_max=2.0)
  state = fade.init(jnp.float32(1.0))
  assert parts.advantages_of(fade, rewards, state=state).shape == (2, 4)
  with pytest.raises(ValueError, match=r"rewards is .*\[1, 4\]; it must be \[P, G\] = \[2, 4\]"):
    parts.batch_of(mask, rewards=rewards[:1])


def head_case():
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((P, G, T, D)).astype(np.float32)
  kernel = rng.standard_normal((D, V)).astype(np.float32)
  mask = np.arange(T) < rng.integers(1, T + 1, (P, G))[..., None]
  return hidden, kernel, rng.integers(0, V, (P, G, T)), mask.astype(np.float32)


def test_the_gram_of_the_head_is_that_of_its_gradients():
  hidden, kernel, tokens, mask = head_case()

  def minus_log_likelihood(kernel, hidden, tokens, mask):
    logprobs = jax.nn.log_softmax(hidden @ kernel / 0.7)
    return -jnp.sum(mask * jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0])

  flat = [x.reshape(P * G, *x.shape[2:]) for x in (hidden, tokens, mask)]
  gram_of = lambda **how: jax.jit(functools.partial(parts.gram_of_head, temperature=0.7, **how))
  expected = jax.jit(functools.partial(parts.gram_of_gradients, minus_log_likelihood))(
    kernel, *flat
  )
  found = gram_of()(hidden, kernel, tokens, mask)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
  norms = lambda gram: np.sqrt(np.diagonal(gram))
  sketched = gram_of(route=geometry.sketch())(hidden, kernel, tokens, mask)
  np.testing.assert_allclose(norms(sketched), norms(expected), rtol=0.3)
  with pytest.raises(ValueError, match="use gram_of_gradients"):
    parts.gram_of_head(hidden, kernel, tokens, mask, route=geometry.per_rollout())


def test_salt_acts_on_the_blocks_of_its_scope():
  hidden, kernel, tokens, mask = head_case()
  gram = jax.jit(parts.gram_of_head)(hidden, kernel, tokens, mask)
  coefficients = parts.advantages_of(advantages.grpo(), (tokens[..., 0] % 2).astype(np.float32))
  by_salt = lambda **how: jax.jit(functools.partial(parts.reweighted, reweighting.salt(**how)))
  of_groups, metrics = by_salt(scope="group")(coefficients, gram)
  of_one = by_salt()
  assert metrics["reweighting/rank"] >= 1
  for p in range(P):
    own = slice(p * G, (p + 1) * G)
    alone, _ = of_one(coefficients[p : p + 1], gram[own, own])
    np.testing.assert_allclose(of_groups[p], alone[0], rtol=1e-4, atol=1e-6)
  same, none = parts.reweighted(reweighting.none(), coefficients)
  np.testing.assert_array_equal(same, coefficients)
  assert none == {}
  with pytest.raises(
    ValueError, match="scope = 5 rollouts does not divide the 12 rollouts of a batch"
  ):
    parts.reweighted(reweighting.salt(scope=5), coefficients, gram)


def test_log_probabilities_of_a_head_and_their_ratio():
  hidden, kernel, tokens, mask = head_case()
  logprobs, entropy = parts.token_logprobs(hidden, Head(kernel), tokens)
  plain = np.take_along_axis(jax.nn.log_softmax(hidden @ kernel), tokens[..., None], -1)[..., 0]
  np.testing.assert_allclose(logprobs, plain, rtol=1e-4, atol=1e-5)
  assert entropy.shape == mask.shape
  assert float(parts.normalized_ess(parts.log_ratios(logprobs, logprobs, mask), mask)) == 1.0


def of_loss(loss=None, **changed):
  """`loss_of` with one argument changed."""
  policy, batch, coefficients = random_case(1, (P, G, T), dtype=np.float32)
  given = dict(policy_logprobs=policy, behavior_logprobs=batch.behavior_logprobs)
  given |= dict(coefficients=coefficients, mask=batch.mask) | changed
  return parts.loss_of(losses.p3o() if loss is None else loss, **given)


def of_salt(gram, rule=None):
  return parts.reweighted(reweighting.salt() if rule is None else rule, np.ones((P, G)), gram)


flat = np.ones((P * G, T), np.float32)
MISTAKES = {
  "factory": (
    lambda: parts.advantages_of(advantages.grpo, np.ones((P, G))),
    "estimator is the factory grpo, not what it returns; call it: grpo()",
  ),
  "loss-factory": (lambda: of_loss(losses.p3o), "loss is the factory p3o, .*; call it: p3o()"),
  "rule-factory": (lambda: of_salt(None, reweighting.salt), "factory salt, .*; call it: salt()"),
  "route-factory": (
    lambda: parts.gram_of_head(*head_case(), route=geometry.sketch),
    "route is the factory sketch, .*; call it: sketch()",
  ),
  "veto-factory": (
    lambda: of_loss(veto=parts.negative_advantage_veto),
    "call it: negative_advantage_veto()",
  ),
  "string": (
    lambda: parts.advantages_of("grpo(epsilon=0.1)", np.ones((P, G))),
    "estimator = 'grpo(epsilon=0.1)' is a string; import the factory and call it: from"
    " rlvr_jax.advantages import grpo, and pass grpo(…)",
  ),
  "other-component": (
    lambda: of_loss(advantages.grpo()),
    "loss is .*; pass what a factory of rlvr_jax.losses returns, a Loss",
  ),
  "flat-rewards": (
    lambda: parts.advantages_of(advantages.grpo(), np.ones(P * G, np.float32)),
    "rewards is float32[12]; it must be [P, G], .*; reshape it: rewards.reshape(P, G)",
  ),
  "flat-mask": (
    lambda: of_loss(mask=flat),
    "mask is float32[12, 5]; it must be [P, G, T], .*; reshape it: mask.reshape(P, G, 5)",
  ),
  "flat-logprobs": (
    lambda: of_loss(policy_logprobs=flat),
    "policy_logprobs is float32[12, 5]; it must be [P, G, T] = [3, 4, 5], .*"
    " policy_logprobs.reshape(3, 4, 5)",
  ),
  "flat-valid": (
    lambda: parts.reweighted(reweighting.none(), np.ones((P, G)), valid=np.ones(P * G, bool)),
    "valid is bool[12]; it must be [P, G] = [3, 4], .*: valid.reshape(3, 4)",
  ),
  "flat-coefficients": (
    lambda: of_loss(coefficients=flat[:, 0]),
    "coefficients is float32[12]; it must be [P, G] = [3, 4], .*: coefficients.reshape(3, 4)",
  ),
  "flat-hidden": (
    lambda: parts.gram_of_head(np.ones((P * G, T, D), np.float32), *head_case()[1:]),
    "hidden is float32[12, 5, 8]; .* reshape it: hidden.reshape(3, 4, 5, 8)",
  ),
  "kernel": (
    lambda: parts.gram_of_head(head_case()[0], np.ones(D, np.float32), *head_case()[2:]),
    "kernel is float32[8]; it must be [D, V]",
  ),
  "gradients": (
    lambda: of_salt(np.ones((P * G, 40), np.float32)),
    "gram is float32[12, 40]; it must be [B, B] = [12, 12], .* gradients @ gradients.T, else use"
    " gram_of_head or gram_of_gradients",
  ),
  "gradient-tree": (lambda: of_salt({"kernel": np.ones((P * G, 40))}), "gram is dict; it must be"),
  "no-gram": (lambda: of_salt(None), "this rule needs gram, .* give gram_of_head(…) or"),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_has_one_line_that_says_what_to_do(call, message):
  pattern = re.escape(message).replace(r"\.\*", ".*")
  with pytest.raises(ValueError, match=pattern) as told:
    call()
  assert "\n" not in str(told.value)
