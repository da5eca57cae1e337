"""Runs whose weights change within responses: versions, lags and checks are per token."""

import functools
import shutil

import numpy as np
import pytest
from train import dialogues_test, routes_test, tiny

from rlvr_jax.commands.train import train
from rlvr_jax.evaluate import run_files
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.train.setup.build import build

UPDATES, MAX_LAG = 6, 2
# A worker's batches are counted when they are taken, and agreement is where tokens are compared.
NOT_REPEATED = ("counter/", "data/passes", "agreement/", "hosts/", "fleet/")


def config(**fields):
  """Responses of several bursts, in few slots, so that updates come meanwhile."""
  settings = dict(
    num_updates=UPDATES,
    schedule=f"asynchronous(max_lag={MAX_LAG})",
    max_response_length=64,
    sampling__slots=2,
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
    arrays, info, samples = tiny.read_stored(store, number)
    of_tokens, lengths = arrays["token_versions"], (arrays["tokens"] != 0).sum(-1)
    sampled = of_tokens >= 0
    assert (sampled.sum(-1) >= arrays["mask"].sum(-1)).all() and (lengths >= 0).all()
    lags = number - of_tokens[sampled]
    assert lags.min() >= 0 and lags.max() <= MAX_LAG
    oldest = np.where(sampled, of_tokens, 999).min((1, 2))
    np.testing.assert_array_equal(arrays["versions"], oldest)
    assert [sample["version"] for sample in samples[:: of_tokens.shape[1]]] == oldest.tolist()
    assert {*map(int, info["versions"])} == {*np.unique(of_tokens[sampled])}
    counted = number - of_tokens[arrays["mask"] > 0]
    assert record["staleness/mean"] == pytest.approx(counted.mean(), rel=1e-5)
    assert record["staleness/max"] == counted.max()
    of_rollouts = of_tokens.reshape(-1, of_tokens.shape[-1])
    several += sum(len(np.unique(row[row >= 0])) > 1 for row in of_rollouts)
  return len(store.numbers()), several


def assert_repeats(workdir, run):
  """The store has the same rollouts, bit for bit, and updates the same numbers."""
  recorded, again = (RolloutStore(w / "rollouts", writable=False) for w in (run, workdir))
  assert again.numbers() == recorded.numbers()
  for number in recorded.numbers():
    (arrays, info, samples), (expected, before, expected_samples) = (
      tiny.read_stored(store, number) for store in (again, recorded)
    )
    for sample in expected_samples:
      sample.pop("sampler", None)  # of a fleet
    assert samples == expected_samples
    for name, array in expected.items():
      np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    assert info["versions"] == before["versions"]
  alike = lambda r: {k: v for k, v in r.items() if not k.startswith(NOT_REPEATED)}
  records = [tiny.records(w, "train") for w in (workdir, run)]
  assert [*map(alike, records[0])] == [*map(alike, records[1])]


def repeated(run, setting, **fields):
  schedule = f"simulated_asynchronous(max_lag={MAX_LAG}, recorded={str(run)!r})"
  return config(**dict(schedule=schedule, fleet__new_weights=setting) | fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """(setting) → the workdir of a finished run."""

  @functools.cache
  def of(setting):
    workdir = tmp_path_factory.mktemp("runs") / setting
    train(build(config(fleet__new_weights=setting)), workdir)
    return workdir

  return of


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["recompute", "switch"])
def test_weights_change_within_responses(setting, run):
  workdir = run(setting)
  batches, several = check_store(workdir)
  assert batches == UPDATES and several > 0
  measured = [r for r in run_files.read_metrics(workdir) if r["phase"] == "train"]
  gaps = [r["agreement/policy_mean"] for r in measured if "agreement/policy_mean" in r]
  assert len(gaps) >= 3 and max(gaps) < 1e-5
  mixed = [r["agreement/policy_mixed_mean"] for r in measured if "agreement/policy_mixed_mean" in r]
  assert (len(mixed) > 0 and min(mixed) > 1e-5) if setting == "switch" else not mixed


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["recompute", "switch"])
def test_a_run_that_repeats_it_samples_as_it_has(setting, run):
  with pytest.raises(ValueError, match=f"new_weights = 'finish', but '{setting}' in the run"):
    build(repeated(run(setting), "finish"))
  with pytest.raises(ValueError, match="slots = 8, but 2 in the run"):
    build(repeated(run(setting), setting, sampling__slots=8))
  with pytest.raises(ValueError, match="tokens of a burst = 8, but 16 in the run"):
    build(repeated(run(setting), setting, max_response_length=8))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["recompute", "switch"])
def test_a_run_is_repeated_without_the_clock(setting, run, tmp_path):
  train(build(repeated(run(setting), setting)), tmp_path / "again")
  assert_repeats(tmp_path / "again", run(setting))


def with_replayed_routes(**fields):
  mixture = routes_test.MIXTURE
  return config(model__overrides=mixture, model__routing="replayed", **fields)


def with_dialogues(**fields):
  of_run = dict(num_updates=UPDATES, sampling__slots=4, fleet__new_weights="switch")
  return dialogues_test.config(**of_run | fields)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("setting", "make"),
  [
    ("recompute", with_replayed_routes),
    ("switch", with_dialogues),
  ],
)
def test_other_kinds_of_runs_are_repeated(setting, make, tmp_path):
  real = make(fleet__new_weights=setting, schedule=f"asynchronous(max_lag={MAX_LAG})")
  train(build(real), tmp_path / "run")
  schedule = f"simulated_asynchronous(max_lag={MAX_LAG}, recorded={str(tmp_path / 'run')!r})"
  train(build(make(fleet__new_weights=setting, schedule=schedule)), tmp_path / "again")
  assert_repeats(tmp_path / "again", tmp_path / "run")
  with RolloutStore(tmp_path / "run" / "rollouts", writable=False) as store:
    infos = [store.info(number) for number in store.numbers()]
  assert any(len(info["versions"]) > 1 for info in infos)


def lose(workdir, *, checkpoints_after, batches_from):
  """What a kill may leave of a finished run."""
  for path in (workdir / "checkpoints").iterdir():
    if int(path.name) > checkpoints_after:
      shutil.rmtree(path)
  for number in range(batches_from, UPDATES):
    (workdir / "rollouts" / f"{number:08d}.safetensors").unlink()


@pytest.mark.slow
def test_after_a_kill_the_newest_policies_go_on(tmp_path):
  again = dict(fleet__new_weights="switch", checkpoint__every=1, checkpoint__keep=9)
  train(build(config(**again)), tmp_path / "run")
  kept = [tmp_path / "run" / "rollouts" / f"0000000{number}.safetensors" for number in range(4)]
  before = [path.read_bytes() for path in kept]
  lose(tmp_path / "run", checkpoints_after=2, batches_from=4)
  train(build(config(**again)), tmp_path / "run")
  assert [path.read_bytes() for path in kept] == before
  assert check_store(tmp_path / "run")[0] == UPDATES


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(fleet__new_weights="later"), "new_weights = 'later'"),
    (
      dict(schedule="fixed_lag(lag=2)"),
      r"'fixed_lag\(lag=2\)' never changes weights within a response",
    ),
    (
      dict(sources__temperature=dict(fraction=0.5, temperature=1.5, recorded="raw")),
      "recorded = 'raw' needs one policy per batch",
    ),
    (
      dict(model__overrides=routes_test.MIXTURE, model__routing="replayed"),
      "'replayed' replays the routes of one policy version, while several versions make the KV",
    ),
  ],
)
def test_what_cannot_change_within_responses_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    build(config(**dict(fleet__new_weights="switch") | fields))
