"""The whole program on a run of seconds: what it writes, how often it compiles, on a mesh."""

import collections
import dataclasses
import json
import re

import numpy as np
import pytest
from oracles.batches import make_host_batch
from train import tiny

from docs import glossary
from rlvr_jax.commands.train import train
from rlvr_jax.rollouts.batch import permute_rewards
from rlvr_jax.train import loop
from rlvr_jax.train.setup.build import build

SEED = 2  # some rewards of the first batch differ, so that its update has a signal
MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
  return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(workdirs):
  """(workdir, output) of the tiny run, with every compilation logged."""
  workdir = workdirs / "run"
  return workdir, tiny.run(workdir, f"--config.seed={SEED}", JAX_LOG_COMPILES="1")


@pytest.fixture(scope="module")
def parts():
  """Those of the tiny run, compiled once for what runs in this process."""
  config = tiny.get_config()
  config.seed = SEED
  return build(config)


@pytest.fixture(scope="module")
def mesh_run(workdirs):
  workdir = workdirs / "mesh"
  return workdir, tiny.run(workdir, f"--config.seed={SEED}", *MESH, JAX_LOG_COMPILES="1")


# --- what a run leaves ----------------------------------------------------------------------------


def test_metrics_have_what_a_person_needs(run):
  train = tiny.records(run[0], "train")
  assert [record["step"] for record in train] == list(range(1, 13))
  for record in train:
    assert record.keys() >= {
      "reward/mean", "reward/pass_rate", "groups/effective", "policy/entropy", "behavior/kl_k3",
      "loss/clip_fraction", "update/gradient_norm", "update/learning_rate", "staleness/mean",
      "outcome/correct", "outcome/wrong", "outcome/unparseable", "outcome/timeout",
      "outcome/crashed", "response/truncated", "counter/tokens_generated",
    }  # fmt: skip
    shares = [value for name, value in record.items() if name.startswith("outcome/")]
    assert sum(shares) == pytest.approx(1)
    assert np.isfinite([value for value in record.values() if not isinstance(value, str)]).all()
  # Something is learned from, so that the other tests of this file compare more than zeros.
  assert max(record["update/gradient_norm"] for record in train) > 0.01
  assert max(record["groups/effective"] for record in train) > 0
  assert len({record["policy/entropy"] for record in train}) == 12


def test_timings_are_there(run):
  for line in (run[0] / "metrics.jsonl").read_text().splitlines():
    record = json.loads(line)
    if record["phase"] != "train":
      continue
    assert record["time/update_tokens_per_second"] > 0
    first_of_refresh = record["step"] % 4 == 1
    assert ("time/rollout_tokens_per_second" in record) == first_of_refresh
    assert ("time/slots_busy" in record) == ("time/drain_share" in record) == first_of_refresh
    assert 0.05 < record["memory/optimise_host_gib"] < 100
    assert ("memory/generate_host_gib" in record) == first_of_refresh


def test_staleness_counts_the_updates_behind(run):
  train = tiny.records(run[0], "train")
  assert [record["staleness/mean"] for record in train] == [0, 1, 2, 3] * 3
  # The first update on a fresh batch is on-policy; later ones have moved away from it.
  for record in train:
    if record["staleness/mean"] == 0:
      assert record["behavior/kl_k3"] < 1e-9
    else:
      assert record["behavior/kl_k3"] > 1e-7


def test_reference_kl_starts_at_zero_and_grows(run):
  values = [record["reference/kl"] for record in tiny.records(run[0], "train")]
  assert abs(values[0]) < 1e-9
  assert values[1] > 1e-7
  assert values[-1] > 100 * abs(values[0])


def test_evaluation_before_during_and_after(run):
  held_out = tiny.records(run[0], "eval")
  assert [record["step"] for record in held_out] == [0, 5, 10, 12]
  for record in held_out:
    for name in ("pass@1", "pass@2", "mean"):
      low, high = record[f"eval/{name}_low"], record[f"eval/{name}_high"]
      assert 0 <= low <= record[f"eval/{name}"] <= high <= 1


def test_every_metric_is_in_the_glossary(run):
  assert not glossary.missing(run[0])


def test_rollouts_are_recorded(run):
  found = [json.loads(line) for line in tiny.rollouts(run[0]).splitlines()]
  assert {(r["phase"], r["step"], r["version"]) for r in found} == {
    ("eval", 0, 0), ("eval", 5, 5), ("eval", 10, 10), ("eval", 12, 12),
    ("train", 1, 0), ("train", 5, 4), ("train", 9, 8),
  }  # fmt: skip
  for record in found:
    left, sign, right = record["prompt"].removesuffix("=").split()
    right = int(right) if sign == "+" else -int(right)
    assert int(record["answer"]) == int(left) + right
    assert record["reward"] == (record["outcome"] == "correct")
    assert (record["completion"].strip() == record["answer"]) <= (record["outcome"] == "correct")
    assert 1 <= record["tokens"] <= 4
    assert record["stopped"] or record["tokens"] == 4


def test_report_and_files(run):
  workdir, output = run
  assert "held-out pass@1" in output and "learning curves" in output
  for name in ("learning_curves.png", "metrics.jsonl", "rollouts.jsonl", "tensorboard"):
    assert str(workdir / name) in output
  assert (workdir / "learning_curves.png").read_bytes().startswith(b"\x89PNG")
  for phase in ("train", "eval", "warm_start"):
    assert next((workdir / "tensorboard" / phase).glob("events*")).stat().st_size > 200
  for step in range(1, 13):
    assert re.search(rf"^step +{step}/12  reward ", output, re.MULTILINE)
  assert "is illegal" not in output and "Traceback" not in output


# --- the same again -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_seed_decides_everything(run, parts, workdirs):
  """Also in another process."""
  train(parts, workdirs / "again")
  assert tiny.outcome(workdirs / "again") == tiny.outcome(run[0])


@pytest.mark.slow
def test_a_mesh_gives_the_metrics_of_one_device(run, mesh_run):
  ours, theirs = tiny.records(run[0]), tiny.records(mesh_run[0])
  assert [r["step"] for r in ours] == [r["step"] for r in theirs]
  early = lambda records: [r for r in records if r["phase"] == "warm_start" or r["step"] <= 4]
  for a, b in zip(early(ours), early(theirs), strict=True):
    assert a.pop("phase") == b.pop("phase")
    # Rows and the groups that are compared suit the number of devices.
    suited = ("rows/filled", "agreement/policy_draws")
    a, b = ({k: v for k, v in x.items() if not k.startswith(suited)} for x in (a, b))
    assert b == pytest.approx(a, rel=1e-3, abs=1e-5), a["step"]
  assert tiny.rollouts(run[0]).splitlines()[:18] == tiny.rollouts(mesh_run[0]).splitlines()[:18]


# --- compilation ----------------------------------------------------------------------------------


def compilations(output):
  """(position in the output, function, its shapes and placements) of every compilation."""
  pattern = r"Compiling jit\((.*?)\) with global shapes and types (.*)"
  return [(m.start(), m[1], m[2]) for m in re.finditer(pattern, output)]


def assert_compiled_once(output, expected):
  found = compilations(output)
  twice = [key for key, n in collections.Counter(key[1:] for key in found).items() if n > 1]
  assert not twice
  counts = collections.Counter(name for _, name, _ in found)
  assert {name: counts[name] for name in expected} == expected
  # Nothing on the host's path compiles later either: no stray operation at the seventh step.
  second = re.search(r"^step +2/12 ", output, re.MULTILINE).start()
  assert [key for key in found if key[0] > second] == []


ONCE = dict.fromkeys(
  ("supervised_step", "prefill", "insert", "burst", "train_step", "policy_logprobs"), 1
)


@tiny.needs_compile_log
def test_each_function_compiles_once(run):
  # The evaluation uses the engine of training; `_checksums`: of parameters, and of the state.
  assert_compiled_once(
    run[1],
    ONCE | dict(_checksums=2),
  )


@pytest.mark.slow
@tiny.needs_compile_log
def test_each_function_compiles_once_on_a_mesh(mesh_run):
  assert_compiled_once(
    mesh_run[1],
    ONCE | dict(_checksums=2),
  )


# --- geometry -------------------------------------------------------------------------------------


@pytest.mark.slow
@tiny.needs_compile_log
def test_salt_with_diagnostics_compiles_once_and_survives_a_kill(workdirs):
  flags = (
    "--config.reweighting=salt",
    "--config.diagnostics.every=5",
    "--config.diagnostics.compared=last_block",
  )
  whole, killed = workdirs / "salt", workdirs / "salt_killed"
  output = tiny.run(whole, *flags, JAX_LOG_COMPILES="1")
  assert_compiled_once(output, dict(train_step=1, measure=1, mean_entropy=1))
  train = tiny.records(whole, "train")
  # A batch whose groups are all constant has no coefficients to change.
  changed = [record.get("reweighting/coefficient_change", 0) > 0 for record in train]
  assert changed == [record["advantage/mass_success"] > 0 for record in train]
  assert sum(changed) > 4
  assert all(record["gram/forward_only_passes"] == 0 for record in train)
  measured = [record["step"] for record in train if "geometry/participation_ratio" in record]
  assert measured == [1, 6, 11]
  for record in (train[step - 1] for step in measured):
    with np.load(whole / "geometry" / f"{record['step'] - 1:06d}.npz") as file:
      arrays = dict(file)
    gram, reweighted = arrays["gram"], arrays["reweighted"].ravel()
    assert gram.shape == arrays["gram_compared"].shape == (32, 32)
    norm = np.sqrt(reweighted @ gram @ reweighted) / 32
    assert norm == pytest.approx(record["geometry/update_norm_reweighted"], rel=1e-3)
    assert abs(record["policy/entropy_change"]) > 0
    assert arrays["token_entropy"].size == arrays["lengths"].sum()
    for name, metric in (("entropy", "policy/entropy"), ("clipped", "loss/clip_fraction")):
      mean = arrays[f"token_{name}"].mean()
      assert mean == pytest.approx(record[metric], rel=1e-4), name
    largest = np.exp(arrays["token_log_ratio"].max())
    assert largest == pytest.approx(record["behavior/ratio_max"], rel=1e-4)
  assert train[0]["geometry/head_share"] == 0  # nothing has moved before the first update
  assert 0 < train[5]["geometry/head_share"] < 1

  with tiny.started(killed, *flags) as process:
    tiny.wait_for(tiny.has_record(killed, 6, "train"), process)
  tiny.run(killed, *flags)
  assert tiny.records(killed) == tiny.records(whole)
  for path in sorted((whole / "geometry").iterdir()):
    with np.load(path) as expected, np.load(killed / "geometry" / path.name) as found:
      assert all(np.array_equal(found[name], expected[name]) for name in expected.files)


@pytest.mark.parametrize(
  ("return_to", "oldest"), [(None, 80), (85, 80), (58, 50), (50, 50), (40, 80)]
)
def test_batches_of_the_checkpoint_to_go_back_to_are_kept(return_to, oldest):
  assert loop.oldest_resumed([50, 80, 90], 2, return_to) == oldest


# --- control --------------------------------------------------------------------------------------


def test_permuted_rewards_keep_their_multiset_and_their_correctness():
  rng = np.random.default_rng(0)
  rewards = (rng.integers(0, 2, (6, 4)) + rng.random((6, 4)) / 10).astype(np.float32)
  by_name = np.stack([rewards, 2 * rewards], -1)
  fields = dict(rewards=rewards, correct=np.floor(rewards), rewards_by_name=by_name)
  batch = make_host_batch(np.ones((6, 4, 1)), **fields)
  dealt = permute_rewards(batch, np.random.default_rng(1))
  np.testing.assert_array_equal(dealt.rewards_by_name[..., 0], dealt.rewards)
  np.testing.assert_array_equal(dealt.rewards_by_name[..., 1], 2 * dealt.rewards)
  assert not np.array_equal(dealt.rewards, rewards)
  np.testing.assert_array_equal(np.sort(dealt.rewards, axis=None), np.sort(rewards, axis=None))
  np.testing.assert_array_equal(dealt.correct, np.floor(dealt.rewards))
  repeated = permute_rewards(batch, np.random.default_rng(1))
  np.testing.assert_array_equal(dealt.rewards, repeated.rewards)
  turns = np.zeros((6, 4, 1), np.int32)
  dialogues = dataclasses.replace(batch, turns=turns, turn_scores=np.ones((6, 4, 1), np.float32))
  assert np.isnan(permute_rewards(dialogues, np.random.default_rng(1)).turn_scores).all()


def test_rewards_are_permuted_among_valid_rollouts():
  valid = np.arange(24).reshape(6, 4) % 3 > 0
  rewards = np.where(valid, np.arange(24.0).reshape(6, 4), -1.0)
  batch = make_host_batch(np.ones((6, 4, 1)), rewards=rewards, valid=valid)
  dealt = permute_rewards(batch, np.random.default_rng(1))
  assert (dealt.rewards[~valid] == -1).all() and not np.array_equal(dealt.rewards, rewards)
  np.testing.assert_array_equal(np.sort(dealt.rewards[valid]), np.sort(rewards[valid]))


@pytest.mark.slow
def test_a_control_run_has_the_same_rewards_on_other_rollouts(run, parts, workdirs):
  workdir = workdirs / "control"
  train(
    dataclasses.replace(parts, config=tiny.config(permute_rewards=True, num_updates=1, seed=SEED)),
    workdir,
  )
  ours, control = tiny.records(run[0], "train")[0], tiny.records(workdir, "train")[0]
  for name in ("reward/mean", "reward/pass_rate", "outcome/correct", "policy/entropy"):
    assert control[name] == ours[name]
  assert control["update/gradient_norm"] != ours["update/gradient_norm"]


@pytest.mark.slow
def test_another_seed_is_another_run(run, parts, workdirs):
  workdir = workdirs / "seed"
  train(dataclasses.replace(parts, config=tiny.config(seed=1, num_updates=4)), workdir)
  ours, other = tiny.records(run[0], "train"), tiny.records(workdir, "train")
  for a, b in zip(ours[:4], other, strict=True):
    assert a["policy/entropy"] != b["policy/entropy"]
  assert tiny.rollouts(workdir) != tiny.rollouts(run[0])
