"""The tiny policy of the notebooks: its probabilities, its runs, and the batches of its updates."""

import matplotlib

matplotlib.use("Agg")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from rlvr_jax.colab import toy as toys
from rlvr_jax.colab.toy import Recipe
from rlvr_jax.losses import ppo_clip, reinforce
from rlvr_jax.rollouts.staleness import asynchronous, fixed_lag

P, G, T, V, D = 2, 4, 3, 5, 6


@pytest.fixture(scope="module")
def toy():
  return toys.make_toy(prompts=P, length=T, vocabulary=V, width=D, allowed=(0.2, 0.8))


@pytest.fixture(scope="module")
def kernel():
  return jax.random.normal(jax.random.key(0), (D, V))


@pytest.fixture(scope="module")
def runs(toy):
  return toys.train(
    toy,
    Recipe(ppo_clip(), learning_rate=10.0),
    fixed_lag(lag=1, num_updates=4),
    num_updates=4,
    group_size=G,
    seeds=(0, 7),
  )


def probabilities(toy, kernel, prompt, place, last, temperature=1.0):
  """The policy at one place, by NumPy."""
  logits = (np.asarray(toy.features)[prompt, place] + np.asarray(toy.previous)[last]) @ kernel
  exponentials = np.exp(np.asarray(logits, np.float64) / temperature)
  return exponentials / exponentials.sum()


def test_places_allow_as_many_tokens_as_asked(toy):
  assert np.asarray(toy.allowed).sum(axis=-1).tolist() == [[1] * T, [4] * T]


def test_answers_are_those_of_the_inverse_distribution_function(toy, kernel):
  random = toys.uniform_numbers(toy, 0, 0, G)
  for temperature in (1.0, 2.0):
    tokens = np.asarray(toys.sample(toy, kernel, random, temperature=temperature))
    for p, g in np.ndindex(P, G):
      last = V
      for t in range(T):
        below = np.cumsum(probabilities(toy, kernel, p, t, last, temperature))
        last = min(np.searchsorted(below, random[p, g, t], side="right"), V - 1)
        assert tokens[p, g, t] == last


def test_log_probabilities_are_those_of_the_policy(toy, kernel):
  tokens = toys.sample(toy, kernel, toys.uniform_numbers(toy, 0, 0, G))
  found = toys.statistics(toy, kernel, tokens, temperature=1.5)
  p = probabilities(toy, kernel, 1, 1, int(tokens[1, 2, 0]), 1.5)
  np.testing.assert_allclose(found.logprobs[1, 2, 1], np.log(p[tokens[1, 2, 1]]), rtol=1e-5)
  np.testing.assert_allclose(found.entropy[1, 2, 1], -(p * np.log(p)).sum(), rtol=1e-5)


def test_an_answer_is_right_if_all_its_tokens_are_allowed(toy):
  right = jnp.argmax(toy.allowed, axis=-1)[:, None]
  wrong = jnp.argmin(toy.allowed, axis=-1)[:, None]
  one_wrong = right.at[:, :, -1].set(wrong[:, :, -1])
  answers = jnp.concatenate([right, wrong, one_wrong], axis=1)
  assert toys.rewards(toy, answers).tolist() == [[1.0, 0.0, 0.0]] * P


def test_a_run_follows_its_schedule_and_starts_uniform(runs):
  assert runs.batches == ((0, 0), (1, 0), (2, 1), (3, 2))
  assert runs.metrics["lag"].tolist() == [[0, 1, 1, 1]] * 2
  np.testing.assert_allclose(runs.metrics["behavior/ess"][:, 0], 1, rtol=1e-6)
  assert np.all(runs.metrics["behavior/ess"][:, 2] < 1)
  np.testing.assert_allclose(runs.metrics["policy/entropy"][:, 0], np.log(V), rtol=1e-5)
  assert runs.kernels.shape == (2, 5, D, V) and not runs.kernels[:, 0].any()


def test_a_batch_is_that_of_the_update(toy, runs):
  batch, logprobs = toys.batch_at(toy, runs, 2, run=1)
  np.testing.assert_allclose(batch.rewards.mean(), runs.metrics["reward/mean"][1, 2], rtol=1e-6)
  np.testing.assert_allclose(
    logprobs, toys.statistics(toy, runs.kernels[1, 2], batch.tokens).logprobs, rtol=1e-5
  )
  _, of_sampler = toys.batch_at(toy, runs, 2, run=1, policy=1)
  np.testing.assert_allclose(of_sampler, batch.behavior_logprobs, rtol=1e-5)
  with pytest.raises(ValueError, match="update = 4; choose one of 0 to 3"):
    toys.batch_at(toy, runs, 4)


def test_raw_log_probabilities_are_those_of_temperature_one(toy, kernel):
  random = jnp.asarray(toys.uniform_numbers(toy, 0, 0, G))
  for recorded, temperature in (("sampled", 2.0), ("raw", 1.0)):
    batch = toys.make_batch(toy, kernel, random, temperature=2.0, recorded=recorded)
    expected = toys.statistics(toy, kernel, batch.tokens, temperature=temperature).logprobs
    np.testing.assert_array_equal(batch.behavior_logprobs, expected)


def test_what_cannot_run_is_refused(toy):
  with pytest.raises(ValueError, match="recorded"):
    toys.train(toy, Recipe(ppo_clip(), recorded="cold"), asynchronous(), num_updates=1)
  with pytest.raises(ValueError, match="real-time"):
    toys.train(toy, Recipe(ppo_clip()), asynchronous(), num_updates=1)


def test_the_gradient_of_reinforce_is_that_of_finite_differences(toy, kernel):
  batch = toys.rollouts(toy, kernel, group_size=G)
  found = toys.gradient(toy, Recipe(reinforce()), kernel, batch)
  A = np.asarray(batch.rewards) - np.asarray(batch.rewards).mean(axis=1, keepdims=True)
  loss = lambda k: -(A[..., None] * toys.statistics(toy, k, batch.tokens).logprobs).mean()
  for place in ((0, 0), (D - 1, V - 1)):
    step = jnp.zeros((D, V)).at[place].set(1e-2)
    expected = (loss(kernel + step) - loss(kernel - step)) / 2e-2
    np.testing.assert_allclose(found[place], expected, rtol=2e-2, atol=1e-5)


def test_a_figure_has_a_named_panel_for_each_metric(runs):
  labels = {"reward/mean": "rewards", "solve_rate": "solved"}
  panels = toys.draw_runs({"both": runs}, labels)
  assert [axes.get_ylabel() for axes in panels] == ["rewards", "solved"]
  drawn = [axes.get_lines()[0].get_ydata() for axes in panels]
  for metric, values in zip(labels, drawn, strict=True):
    np.testing.assert_allclose(values, runs.metrics[metric].mean(axis=0))
  assert panels[-1].get_legend() is not None
  plt.close("all")
