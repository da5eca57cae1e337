"""The comparison on a tiny policy: what must hold by construction."""

import numpy as np
import program_flags
import pytest

from rlvr_jax.configs import base
from rlvr_jax.rollouts.batch import read_batch
from rlvr_jax.train import same_rollouts


@pytest.fixture(scope="module")
def module():
  with program_flags.experiment("compare") as module:
    yield module


def _config():
  c = base.get_config()
  c.model.overrides = dict(width=32, num_layers=1, mlp_width=64)
  c.task.kwargs.prompt = "{expression}="
  c.task.kwargs.settings = dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)
  c.task.kwargs.held_out_size = c.task.kwargs.warm_start_size = 16
  c.task.kwargs.solution = "{answer}"
  c.max_prompt_length, c.max_response_length = 8, 4
  c.warm_start.num_steps, c.warm_start.batch_size = 60, 16
  c.batch.prompts = 16
  c.learning_rate = "constant(peak=3e-3)"
  return c


@pytest.mark.parametrize(
  ("changed", "error", "message"),
  [
    (dict(recipes=["rloo", "opd"]), ValueError, "the recipe opd needs a teacher's log-prob"),
    (dict(recipes=["gdpo"]), ValueError, "the recipe gdpo needs the scores of several graders"),
    (dict(recipes=["rlo"]), ImportError, "rlo"),
    (dict(lags=[0, -3]), ValueError, r"lags = \[0, -3\]: a lag is a number of updates, 0 or more"),
  ],
)
def test_mistakes_are_found_before_the_training(module, tmp_path, changed, error, message):
  arguments = dict(base=_config(), recipes=[], before=2, lags=[0]) | changed
  with pytest.raises(error, match=message):
    module.compare(tmp_path, **arguments)
  assert not list(tmp_path.iterdir())


def test_all_recipes_of_the_program_can_be_compared(module):
  for name in module._RECIPES.default:
    same_rollouts._check_recipe(name, same_rollouts.load_recipe(name))


@pytest.mark.slow
def test_methods_agree_and_differ_where_they_must(module, tmp_path):
  recipes = ["dr_grpo", "rloo", "cispo", "decoupled_ppo", "fade"]
  numbers = module.compare(tmp_path, base=_config(), recipes=recipes, before=2, lags=[0, 3])
  now, stale = numbers[0], numbers[3]
  assert set(now) == {"grpo", *recipes}
  for rows in (now, stale):
    assert rows["grpo"]["cosine"] == pytest.approx(1.0)
    for row in rows.values():
      assert np.isfinite(list(row.values())).all() and -1 - 1e-9 <= row["cosine"] <= 1 + 1e-9
  # On the policy that sampled, nothing is clipped, all weights are 1.
  for row in now.values():
    assert row["loss/clip_fraction"] == 0 and row["behavior/ess"] == pytest.approx(1.0, abs=1e-5)
  assert stale["grpo"]["behavior/ess"] < 1 - 1e-6
  assert now["dr_grpo"]["advantage/mass_ratio"] == pytest.approx(1.0, rel=1e-4)
  for name in ("compare.md", "compare.json", "cosines_lag_0.png", "cosines_lag_3.png"):
    assert (tmp_path / name).stat().st_size > 0
  again = read_batch(tmp_path / "rollouts.safetensors")
  assert again.tokens.shape == (16, 8, 4)
  stored = same_rollouts.read_recorded_batch(
    f"{tmp_path}/training/rollouts:2"
  )  # two updates came before
  np.testing.assert_array_equal(stored.tokens, again.tokens)
  np.testing.assert_array_equal(stored.behavior_logprobs, again.behavior_logprobs)
