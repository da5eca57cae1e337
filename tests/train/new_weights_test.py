"""Runs whose weights change within responses: versions, lags and checks are per token."""

import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands.train import train
from rlvr_jax.evaluate import run_files
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.generation.async_generator import GeneratorStoppedError
from rlvr_jax.train.setup.build import build

UPDATES, MAX_LAG = 6, 2


def config(**fields):
  """Responses of several bursts, in few slots, so that updates come meanwhile."""
  settings = dict(
    num_updates=UPDATES,
    schedule=f"asynchronous(max_lag={MAX_LAG})",
    max_response_length=64,
    sampling__slots=4,
    warm_start__num_steps=0,  # responses are long
    reference__kl_coefficient=0.0,
    evaluation__every=UPDATES,
    checkpoint__every=UPDATES,
    batch__prompts=4,
  )
  return tiny.config(**settings | fields)


def check_store(workdir):
  """Every token has its version, within the bound; returns (batches, how many have several)."""
  store = RolloutStore(workdir / "rollouts", writable=False)
  several = 0
  for number, record in zip(store.numbers(), tiny.records(workdir, "train"), strict=True):
    arrays, info, samples = store.read(number)
    of_tokens, lengths = arrays["token_versions"], (arrays["tokens"] != 0).sum(-1)
    sampled = of_tokens >= 0
    assert (sampled.sum(-1) >= arrays["mask"].sum(-1)).all() and (lengths >= 0).all()
    lags = number - of_tokens[sampled]
    assert lags.min() >= 0 and lags.max() <= MAX_LAG
    oldest = np.where(sampled, of_tokens, 999).min((1, 2))
    np.testing.assert_array_equal(arrays["versions"], oldest)
    assert [sample["version"] for sample in samples[:: of_tokens.shape[1]]] == oldest.tolist()
    assert {info["version"], *map(int, info.get("others", {}))} == {*np.unique(of_tokens[sampled])}
    counted = number - of_tokens[arrays["mask"] > 0]
    assert record["staleness/mean"] == pytest.approx(counted.mean(), rel=1e-5)
    assert record["staleness/max"] == counted.max()
    of_rollouts = of_tokens.reshape(-1, of_tokens.shape[-1])
    several += sum(len(np.unique(row[row >= 0])) > 1 for row in of_rollouts)
  return len(store.numbers()), several


@pytest.mark.parametrize("setting", ["recompute", pytest.param("switch", marks=pytest.mark.slow)])
def test_weights_change_within_responses(setting, tmp_path):
  train(build(config(fleet__new_weights=setting)), tmp_path / "run")
  batches, several = check_store(tmp_path / "run")
  assert batches == UPDATES and several > 0
  measured = [r for r in run_files.read_metrics(tmp_path / "run") if r["phase"] == "train"]
  gaps = [r["agreement/policy_mean"] for r in measured if "agreement/policy_mean" in r]
  assert len(gaps) >= 3 and max(gaps) < 1e-5
  mixed = [r["agreement/policy_mixed_mean"] for r in measured if "agreement/policy_mixed_mean" in r]
  assert (len(mixed) > 0 and min(mixed) > 1e-5) if setting == "switch" else not mixed


@pytest.mark.slow
def test_a_gap_under_the_version_of_a_token_ends_the_run(tmp_path):
  parts = build(config(fleet__new_weights="recompute", max_behavior_gap=1e-12))
  with pytest.raises(GeneratorStoppedError, match="AgreementError: sampler and trainer disagree"):
    train(parts, tmp_path / "run")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(fleet__new_weights="later"), "new_weights = 'later'"),
    (
      dict(schedule="fixed_lag(lag=2)"),
      r"'fixed_lag\(lag=2\)' has no policies that come meanwhile",
    ),
    (
      dict(sources__temperature=dict(fraction=0.5, temperature=1.5, recorded="raw")),
      "recorded = 'raw' needs one policy per batch",
    ),
  ],
)
def test_what_cannot_change_within_responses_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    build(config(**dict(fleet__new_weights="switch") | fields))
