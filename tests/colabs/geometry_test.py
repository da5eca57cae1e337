"""The notebook on gradient geometry, what it plots, and with a run of one's own."""

import re

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from colabs import notebooks, stored
from rlvr_jax.colab import geometry
from rlvr_jax.colab.display import COLORS
from rlvr_jax.evaluate.geometry_plots import Measurement, apply_salt
from rlvr_jax.train.reporting.writer import open_writer

REWARDS = np.array([[0, 1, 0], [1, 0, 1]], np.float32)


def measurement(update):
  features = np.random.default_rng(update).normal(size=(6, 4)).astype(np.float32)
  coefficients = REWARDS - REWARDS.mean(1, keepdims=True)
  lengths = np.ones((2, 3), np.float32)
  arrays = (features @ features.T, coefficients, coefficients, REWARDS, lengths)
  return Measurement(update, *arrays, np.ones((2, 3), bool))


@pytest.fixture
def run(tmp_path):
  """Measurements before updates 0 and 2, and the rollouts of the batches 0 to 2."""
  (tmp_path / "config.json").write_text(geometry.tiny_config().to_json_best_effort())
  batches = []
  for number in range(3):
    rewards = REWARDS if number < 2 else 1 - REWARDS
    samples = [
      dict(
        prompt=f"p{i // 3}",
        completion=f"{number}:{i}$\n" if i == 0 else f"{number}:{i}",
        reward=float(reward),
      )
      for i, reward in enumerate(rewards.flat)
    ]
    zeros = np.zeros((2, 3, 1), np.float32)
    arrays = dict(
      tokens=zeros.astype(np.int32),
      mask=zeros + 1,
      behavior_logprobs=zeros,
      rewards=rewards,
      correct=rewards,
      valid=np.ones((2, 3), bool),
    )
    batches.append((number, arrays, samples))
  stored.write(tmp_path / "rollouts", batches)
  return geometry.Run(str(tmp_path), [measurement(0), measurement(2)])


# --- what it plots --------------------------------------------------------------------------------


def test_a_measurement_is_found_by_its_update(run):
  assert run.updates == [0, 2] and list(run.prompts) == [1, 2]
  assert run.at(2).update == 2
  with pytest.raises(ValueError, match=r"no measurement at update 1; choose one of \[0, 2\]"):
    run.at(1)


def test_completions_are_those_of_the_measured_batch(run, tmp_path):
  assert [sample["completion"] for sample in geometry.load_completions(run, 0)] == [
    "0:0$\n", *(f"0:{i}" for i in range(1, 6))
  ]  # fmt: skip
  assert geometry.load_completions(run, 2) == []  # its rewards are others: not the batch measured
  assert geometry.load_completions(run._replace(workdir=str(tmp_path / "gone")), 0) == []


def test_a_block_has_the_best_rewards_first(run):
  found = geometry.cosine_block(run.at(0), 1, 2)
  assert found.rows.tolist() == [1, 0, 2] and found.columns.tolist() == [3, 5, 4]
  gram = run.at(0).gram
  expected = gram[1, 5] / np.sqrt(gram[1, 1] * gram[5, 5])
  np.testing.assert_allclose(found.cosines[0, 1], expected, rtol=1e-5)
  with pytest.raises(ValueError, match="prompt"):
    geometry.cosine_block(run.at(0), 3, 1)


def test_a_block_is_labeled_by_completions_and_colored_by_reward(run):
  geometry.draw_block(run, 0, 1, 2)
  labels = plt.gcf().axes[0].get_yticklabels()
  assert [label.get_text() for label in labels] == ["0:1", r"0:0\$\n", "0:2"]
  assert [label.get_color() for label in labels] == [
    COLORS["success"], COLORS["failure"], COLORS["failure"]
  ]  # fmt: skip
  geometry.draw_block(run, 2, 1, 2)
  assert plt.gcf().axes[0].get_yticklabels()[0].get_text() == "rollout 1"
  plt.close("all")


def test_alpha_and_rank_are_fixed_by_hand(run):
  own, fixed = geometry.fixed_salt(), geometry.fixed_salt(0.25, 2)
  result = apply_salt(run.at(0), fixed)
  assert result.rank == 2 and result.alpha == pytest.approx(0.25)
  assert apply_salt(run.at(0), own).participation_ratio == pytest.approx(result.participation_ratio)


def test_statistics_over_training_are_those_of_the_grams(run):
  found = geometry.measure_training(run.measurements)
  gram, A = run.at(2).gram.astype(float), run.at(2).coefficients.ravel().astype(float)
  assert found.updates.tolist() == [0, 2]
  np.testing.assert_allclose(
    found.participation_ratio[1], np.trace(gram) ** 2 / (gram**2).sum(), rtol=1e-4
  )
  np.testing.assert_allclose(
    found.effective_rollouts[1], A @ gram @ A / (A**2 * np.diag(gram)).sum(), rtol=1e-4
  )
  np.testing.assert_allclose(found.rewards, REWARDS.mean(), rtol=1e-6)


def test_components_are_named_by_strings():
  advantage, salt = geometry.make_components("grpo_mean", "salt(max_rank=1)")
  assert advantage.needs_binary is False and salt.needs_gram
  with pytest.raises(ValueError, match="ADVANTAGE"):
    geometry.make_components("gropo", "salt")
  with pytest.raises(ValueError, match="set WORKDIR too"):
    geometry.load_runs("", "other")


# --- the notebook ---------------------------------------------------------------------------------


@pytest.mark.soak
def test_it_runs_from_a_fresh_tiny_policy(tmp_path, monkeypatch):
  notebook = notebooks.run(notebooks.read("geometry"), tmp_path, monkeypatch)
  before, _, after = notebooks.printed(notebook).partition("mean reward")
  assert before == "8 measurements; prompts and rollouts per prompt: (8, 16)\n"
  rewards = [float(number) for number in re.findall(r"0\.\d+", after)]
  assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)  # successes and failures


@pytest.mark.slow
def test_it_runs_from_a_workdir(tmp_path, monkeypatch):
  rng = np.random.default_rng(0)
  with open_writer(tmp_path) as writer:
    for update in (0, 10, 20):
      features = rng.normal(size=(2, 12, 5)).astype(np.float32)
      grams = features @ features.mT
      rewards = rng.integers(0, 2, (3, 4)).astype(np.float32)
      coefficients = rewards - rewards.mean(1, keepdims=True)
      writer.write_geometry(
        update,
        dict(gram=grams[0], gram_compared=grams[1], lengths=np.ones((3, 4), np.float32))
        | dict(rewards=rewards, coefficients=coefficients, reweighted=coefficients),
      )
  notebook = notebooks.read("geometry")
  pictures = notebooks.pictures(notebook)
  notebooks.set_parameters(notebook, WORKDIR=str(tmp_path))
  notebook = notebooks.run(notebook, tmp_path, monkeypatch)
  assert notebooks.complaints(notebook) == []
  assert notebooks.pictures(notebook) == pictures
  assert notebooks.printed(notebook).startswith(
    "3 measurements; prompts and rollouts per prompt: (3, 4)\n"
  )
