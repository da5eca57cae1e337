"""The geometry of SALT on a language model: its sums, on a tiny policy, against plain ones."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import program_flags
import pytest
from experiments.compare_test import _config

from rlvr_jax.geometry import per_rollout_features


@pytest.fixture(scope="module")
def module():
  with program_flags.experiment("language_model/geometry") as module:
    yield module


@pytest.fixture(scope="module")
def sampled(module, tmp_path_factory):
  config = _config()
  config.schedule = "on_policy"
  config.batch.prompts, config.batch.group_size = 6, 8
  config.policy_temperature = config.sampling.temperature = 0.5  # as the ground has it
  return module.sample(config, tmp_path_factory.mktemp("run"))


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["score", "sampled"])
def test_products_are_those_of_the_gradients(module, sampled, feature):
  rollouts, params, method, context = sampled
  rng = np.random.default_rng(0)
  A = rng.normal(size=(3, 6, 8))
  head = method.model.head(method.model.combine(params, {}))
  found = module.products(rollouts, head, jnp.asarray(A, jnp.float32), feature, 0.5, columns=5)
  batch, _ = module.part_of(rollouts, 6, 8)
  g = np.asarray(per_rollout_features(params, {}, batch, context, feature=feature), np.float64)
  g = g.reshape(6, 8, -1)
  u = np.einsum("mpg,pgn->mpn", A, g)
  np.testing.assert_allclose(found.within, np.einsum("pgn,phn->pgh", g, g), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(found.between, np.einsum("mpn,mqn->mpq", u, u), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_parts_have_the_gram_of_their_rollouts(module, sampled):
  rollouts, params, _, context = sampled
  rows, grams = module.batch_figures(rollouts, params, context, "score", (2, 4), 8)
  for size, row in zip((2, 4), rows, strict=True):
    batch, _ = module.part_of(rollouts, 8 // size, size)
    g = np.asarray(per_rollout_features(params, {}, batch, context), np.float64)
    K = g @ g.T
    np.testing.assert_allclose(grams[f"gram_score_{size}"], K, rtol=1e-4, atol=1e-5)
    assert row["participation_ratio"] == pytest.approx(np.trace(K) ** 2 / np.sum(K**2), rel=1e-4)


def test_effective_rollouts_of_batches_in_the_mean(module):
  """Equal to the mean over all batches of different prompts, of numerator and denominator each."""
  rng = np.random.default_rng(1)
  g, A = rng.normal(size=(5, 4, 7)), rng.normal(size=(5, 4))
  u = np.einsum("pg,pgn->pn", A, g)
  separate = np.einsum("pg,pgn->p", A**2, g**2)
  for size in (1, 2, 3, 5):
    batches = [*itertools.combinations(range(5), size)]
    together = np.mean([np.sum(u[[*b]].sum(axis=0) ** 2) for b in batches])
    alone = np.mean([separate[[*b]].sum() for b in batches])
    assert module.effective_rollouts(u @ u.T, separate, size) == pytest.approx(together / alone)


def test_resampled_prompts_are_no_pairs_of_one_prompt(module):
  between, separate = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([1.0, 4.0])
  # Drawn twice, a prompt has its own energy twice. Pairs are of different prompts: 2 · 1 · 0.5.
  value = module.effective_rollouts(between, separate, 3, counts=[2, 1])
  assert value == pytest.approx(((2 * 2 + 1) / 3 + 2 * 0.5) / ((2 * 1 + 4) / 3))


def test_nested_advantages_are_of_the_first_rollouts(module):
  rewards = np.array([[1.0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]])
  A = module.nested_advantages(rewards, 4)
  assert np.all(A[:, 4:] == 0)
  np.testing.assert_allclose(A[0, :4], (rewards[0, :4] - 0.25) / 0.5, rtol=1e-5)


def test_verdicts(module):
  assert [module.verdict(*x) for x in [(0.5, 0.89), (1.01, 3), (0.8, 0.95), (0.95, 1.2)]] == [
    "found",
    "reversed",
    "undecided",
    "undecided",
  ]


@pytest.mark.slow
def test_all_figures(module, tmp_path, monkeypatch):
  for name, value in dict(
    PROMPTS=8, ROLLOUTS=8, SIZES=(2, 8), BUDGET=16, RESAMPLES=50, COMPARED=(4, 4)
  ).items():
    monkeypatch.setattr(module, name, value)
  config = _config()
  config.schedule = "on_policy"
  config.batch.prompts, config.batch.group_size = 8, 8
  results = module.measure(config, tmp_path)
  assert json.loads((tmp_path / "geometry.json").read_text()) == json.loads(json.dumps(results))
  for feature in ("score", "sampled"):
    rows = results[feature]["groups"]
    assert [row["G"] for row in rows] == [2, 8]
    assert module.table(rows).count("\n") == 3
  with np.load(tmp_path / "geometry.npz") as file:
    assert file["gram_compared"].shape == (16, 16) and file["within_score"].shape == (8, 8, 8)
