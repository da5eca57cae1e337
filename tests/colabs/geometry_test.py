"""The notebook on gradient geometry, with a run of one's own."""

import re

import numpy as np
import pytest

from colabs import notebooks
from rlvr_jax.train.metrics import MetricWriter


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
  with MetricWriter(tmp_path, None) as writer:
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
