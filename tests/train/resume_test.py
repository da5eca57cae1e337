"""Killed, stopped and damaged runs end as the uninterrupted one, to the bit.

What is stopped or killed is the program; what is resumed goes on in this process, with one build.
"""

import functools
import json
import pathlib
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from rewards.user_graders import SECONDS
from train import tiny
from train.kinds import KINDS

from rlvr_jax.commands.train import train
from rlvr_jax.rollouts.group import decode
from rlvr_jax.rollouts.store import GROUPS_FOLDER, RolloutStore
from rlvr_jax.train.setup.build import build


@pytest.fixture(scope="module")
def parts():
  return build(tiny.get_config())


@pytest.fixture
def resume(parts, capsys):
  """Workdir → what the run that goes on there prints."""

  def go_on(workdir):
    capsys.readouterr()
    train(parts, workdir)
    return "".join(capsys.readouterr())

  return go_on


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
  """(workdir, outcome) of the run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
  train(parts, workdir)
  found = tiny.outcome(workdir)
  assert found["checkpoint"][0] == 12 and len(found["metrics"]) == 4 + 4 + 12
  # Something is learned, so that equal bits mean something.
  norms = [r["update/gradient_norm"] for r in found["metrics"] if r["phase"] == "train"]
  assert max(norms) > 0.01
  return workdir, found


def assert_same(workdir, expected, get_config=tiny.get_config):
  found = tiny.outcome(workdir, get_config)
  assert found["metrics"] == expected["metrics"]
  assert found["rollouts"] == expected["rollouts"]
  (step, host, arrays), (step0, host0, arrays0) = found["checkpoint"], expected["checkpoint"]
  assert (step, host) == (step0, host0)
  assert [path for path, _ in arrays] == [path for path, _ in arrays0]
  assert [path for (path, a), (_, b) in zip(arrays, arrays0, strict=True) if a != b] == []


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_chosen_points(uninterrupted, tmp_path):
  workdir = tmp_path / "run"
  points = [
    (20, "warm_start"),  # in the warm start
    (0, "eval"),  # before the first checkpoint is whole
    (3, "train"),  # inside a refresh, with rollouts pending
    (10, "eval"),  # evaluated, not saved
  ]
  for point in points:
    with tiny.started(workdir, **{SECONDS: "0.03"}) as process:
      tiny.wait_for(tiny.has_record(workdir, *point), process)
  tiny.run(workdir)
  assert_same(workdir, uninterrupted[1])


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["", "mu_grpo", "simulated_asynchronous", *KINDS])
def test_killed_at_random_points(kind, tmp_path):
  """Twenty kills, spread over the whole run, between which files of the store are damaged.

  Each run ends as the undisturbed one, and every rollout is there, once.
  """
  # Few slots: a kill then falls between the groups of a batch.
  flags = (
    "--config.num_updates=48", "--config.checkpoint.every=4", "--config.sampling.slots=4"
  )  # fmt: skip
  program = dict(config_file=f"{tiny.__file__}:{kind}" if kind else tiny.__file__)
  get_config = functools.partial(tiny.get_config, kind)
  undisturbed = tmp_path / "undisturbed"
  tiny.run(tmp_path / "first", *flags, **program)  # compiles what the others find in their cache
  duration = duration_of(undisturbed, *flags, **program)
  expected, stored = tiny.outcome(undisturbed, get_config), shards(undisturbed)
  rng = np.random.default_rng(0)
  kills = 0
  while kills < 20:
    workdir, damaged = tmp_path / f"after{kills}", set()
    for after in rng.uniform(0, duration, 4):
      # What follows a damaged batch is sampled again with it, to the same bits.
      intact = {name: x for name, x in shards(workdir).items() if name < min(damaged, default="9")}
      if not killed(workdir, after, *flags, **program):
        break  # it was faster than the kill
      kills += 1
      assert intact.items() <= shards(workdir, without=damaged).items() <= stored.items()
      found = shards(workdir)
      print(
        f"kill {kills}: {after:.2f} s of {duration:.2f}, {where(workdir)}, {len(found)} sampled"
      )
      if found:
        victim = workdir / "rollouts" / rng.choice(sorted(found))
        damage = rng.choice(DAMAGES)
        print(f"  {damage.__name__} {victim.name}")
        damage(victim)
        damaged.add(victim.name)
    tiny.run(workdir, *flags, **program)
    assert_same(workdir, expected, get_config)
    # What was damaged after it was last needed stays so; the rest is there, once.
    store = RolloutStore(workdir / "rollouts", writable=False)
    whole = {f"{n:08d}.safetensors" for n in store.numbers() if store.is_intact(n)}
    assert whole | damaged == set(stored)
    kept = shards(workdir)
    assert {name: kept[name] for name in whole} == {name: stored[name] for name in whole}


IN_ORDER = [
  "on_policy",
  "updates_per_refresh(batches=2, epochs=2)",
  "stages(count=3)",
  "fixed_lag(lag=2)",
  "simulated_asynchronous(max_lag=2)",
]


@pytest.mark.soak
@pytest.mark.parametrize("schedule", [*IN_ORDER, "asynchronous(max_lag=2)"])
def test_killed_within_a_refresh(schedule, tmp_path):
  """Twenty kills while a batch is sampled: finished groups come back, the others to the same bits.

  An asynchronous run may sample a batch again from a newer policy; its groups are then other ones.
  """
  # One slot: groups are finished one by one.
  flags = (
    f"--config.schedule={schedule}", "--config.sampling.slots=1", "--config.checkpoint.every=3"
  )  # fmt: skip
  undisturbed, in_order = tmp_path / "undisturbed", schedule in IN_ORDER
  tiny.run(undisturbed, *flags)
  expected, stored = tiny.outcome(undisturbed), shards(undisturbed)
  rng, kills, written = np.random.default_rng(0), 0, []
  for attempt in range(10):
    workdir = tmp_path / f"run{attempt}"
    for draw in sorted(rng.choice(len(stored), min(10, len(stored) - 1), replace=False)):
      groups = int(rng.integers(1, 8))
      found = killed_while_sampling(workdir, draw, groups, *flags)
      print(f"batch {draw}, at {groups} of 8 groups: {len(found)} were written, {where(workdir)}")
      kills += bool(found)
      written += found
    tiny.run(workdir, *flags)
    if in_order:
      assert_same(workdir, expected)
      assert shards(workdir) == stored
    store = RolloutStore(workdir / "rollouts", writable=False)
    assert store.numbers() == list(range(len(stored)))
    kept = 0
    for group in written:
      groups, info = store.read(group.draw)
      if [*info["versions"].values()] == [*group.versions.values()]:
        for name in ("tokens", "behavior_logprobs"):
          np.testing.assert_array_equal(groups[group.index].arrays[name], group.arrays[name])
        kept += 1
    assert kept == len(written) or (kept and not in_order)
    if not in_order:
      lags = [number - min(map(int, store.info(number)["versions"])) for number in store.numbers()]
      assert 0 <= min(lags) <= max(lags) <= 2
      train = tiny.records(workdir, "train")
      assert [record["staleness/max"] for record in train] == lags
    if kills >= 20:
      return
    written = []
  raise AssertionError(f"only {kills} kills fell into the sampling of a batch")


def killed_while_sampling(workdir, draw, groups, *flags):
  """Kills the program when so many groups of a draw are written; those, if it was in time."""
  folder = workdir / "rollouts" / GROUPS_FOLDER
  written = lambda: [*folder.glob(f"{draw:08d}.*.safetensors")]
  enough = lambda: len(written()) >= groups
  with tiny.started(workdir, *flags) as process:
    deadline = time.monotonic() + tiny.TIMEOUT_S
    while process.poll() is None and not enough():
      assert time.monotonic() < deadline
      time.sleep(0.0005)
  if f"{draw:08d}.safetensors" in shards(workdir):
    return []
  found = [group for path in written() for group in decode(path.read_bytes())[0]]
  return found if len(found) < 8 else []


def duration_of(workdir, *flags, **program):
  """Seconds of an undisturbed run from when it holds its workdir."""
  with tiny.started(workdir, *flags, **program) as process:
    tiny.wait_for(tiny.holds(workdir, process), process)
    began = time.monotonic()
    assert process.wait(tiny.TIMEOUT_S) == 0
  return time.monotonic() - began


def killed(workdir, after, *flags, **program):
  """Starts the program and kills it so many seconds into the run; False if it ended before."""
  with tiny.started(workdir, *flags, **program) as process:
    tiny.wait_for(tiny.holds(workdir, process), process)
    try:
      assert process.wait(after) == 0
      return False
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      return True


def shards(workdir, without=()):
  """Name → bytes of the rollouts in the store."""
  paths = workdir.glob("rollouts/*.safetensors")
  return {path.name: path.read_bytes() for path in paths if path.name not in without}


DAMAGES = (tiny.cut, tiny.flip, pathlib.Path.unlink)


def where(workdir):
  """For a person to see how the kills are spread."""
  records = tiny.records(workdir) if (workdir / "metrics.jsonl").exists() else []
  return f"{records[-1]['phase']} {records[-1]['step']}" if records else "none"


# --- orderly ends ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """The workdir of a run that SIGTERM ended within a refresh."""
  workdir = tmp_path_factory.mktemp("stopped") / "run"
  # A refresh of two seconds lies ahead of the record that is waited for.
  with tiny.started(workdir, **{SECONDS: "0.03"}) as process:
    tiny.wait_for(tiny.has_record(workdir, 6, "train"), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(tiny.TIMEOUT_S) == 0
  return workdir


@pytest.mark.slow
def test_ctrl_c_in_the_warm_start_ends_in_order(tmp_path):
  workdir = tmp_path / "run"
  with tiny.started(workdir, "--config.warm_start.num_steps=100000") as process:
    tiny.wait_for(tiny.has_record(workdir, 10, "warm_start"), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(tiny.TIMEOUT_S) == 0
  assert "shutdown requested during the warm start" in workdir.with_name("run.log").read_text()


def copy_of(workdir, tmp_path):
  return shutil.copytree(workdir, tmp_path / "copy")


@pytest.mark.slow
def test_sigterm_saves_and_the_rerun_goes_on(stopped, uninterrupted, resume, tmp_path):
  workdir = copy_of(stopped, tmp_path)
  step, host, _ = tiny.last_checkpoint(workdir)
  assert 6 <= step < 12
  # Two batches are sampled every four updates, and the rollouts are in the store alone.
  assert host["position"]["number"] == -(step // -4) * 2
  log = stopped.with_name("run.log")
  assert f"shutdown requested: saved after update {step}; rerun the same command" in log.read_text()
  output = resume(workdir)
  assert f"resumed at update {step}: " in output
  assert f" {[0, 2, 2, 1][step % 4]} batches of rollouts pending" in output
  assert_same(workdir, uninterrupted[1])


@pytest.mark.slow
def test_what_lies_behind_the_checkpoint_is_checked(stopped, uninterrupted, resume, tmp_path):
  """Records that are lost are named; the run is the same without them."""
  workdir = copy_of(stopped, tmp_path)
  step, *_ = tiny.last_checkpoint(workdir)
  is_later = lambda record: record["phase"] != "warm_start" and record["step"] > step
  shutil.rmtree(workdir / "warm_start")  # done again, for the reference policy; not recorded again
  tiny.cut(workdir / "metrics.jsonl")
  (workdir / "rollouts.jsonl").write_bytes(b"")
  left = [record for record in tiny.records(workdir) if not is_later(record)]
  tiny.flip(workdir / "rollouts" / "00000001.safetensors")
  (workdir / "rollouts" / "00000000.safetensors").unlink()
  output = resume(workdir)
  assert re.search(r"metrics\.jsonl differs from what the checkpoint recorded: ", output)
  assert re.search(r"rollouts\.jsonl differs from .* the 0 records that are left", output)
  assert re.search(r"rollouts \[0, 1\] of .*, on which this run has trained, are damaged", output)
  expected = uninterrupted[1]
  lines = expected["rollouts"].splitlines(keepends=True)
  assert_same(workdir, expected | {
    "metrics": left + [record for record in expected["metrics"] if is_later(record)],
    "rollouts": "".join(line for line in lines if is_later(json.loads(line))),
  })  # fmt: skip


@pytest.mark.slow
def test_a_torn_checkpoint_is_named_and_the_run_falls_back(
  stopped, uninterrupted, resume, tmp_path
):
  workdir = copy_of(stopped, tmp_path)
  steps = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
  last = workdir / "checkpoints" / str(steps[-1])
  data = max(last.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
  data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
  output = resume(workdir)
  assert f"warning: the checkpoint {last} is damaged" in output
  assert f"resumed at update {steps[-2]}: " in output
  assert_same(workdir, uninterrupted[1])
