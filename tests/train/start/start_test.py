"""A run that begins with another run's policy: its parameters alone, or the optimizer's too."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from train import tiny

from rlvr_jax.commands import train as runs
from rlvr_jax.train.checkpointing import checkpoint_files
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start import parameters

UPDATES = 3


@pytest.fixture(scope="module")
def parts():
  return build(
    tiny.config(num_updates=UPDATES, evaluation__every=UPDATES, schedule="on_policy", seed=3)
  )


@pytest.fixture(scope="module")
def other(parts, tmp_path_factory):
  """The workdir of the run that others begin with."""
  workdir = tmp_path_factory.mktemp("runs") / "other"
  runs.train(parts, workdir)
  return workdir


def starting(parts, **start):
  """The same run with another start; the compiled programs do not depend on it."""
  config = parts.config.copy_and_resolve_references()
  config.start.update(start)
  return dataclasses.replace(parts, config=config)


def saved(parts, workdir, step):
  folder = workdir / "checkpoints" / str(step)
  read = lambda field: checkpoint_files.read_field(
    field, folder, getattr(parts.placement.state, field)
  )
  return jax.device_get((read("params"), read("opt_state")))


def is_schedule(node):
  return isinstance(node, optax.ScaleByScheduleState)


def split(opt_state):
  """(numbers of the learning rate's schedule, all other leaves)."""
  nodes = jax.tree.leaves(opt_state, is_leaf=is_schedule)
  return [int(x.count) for x in nodes if is_schedule(x)], [x for x in nodes if not is_schedule(x)]


def assert_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_begins_with_the_policy_and_does_not_need_the_other_run_again(
  parts, other, tmp_path, capsys
):
  there, workdir = tmp_path / "there", tmp_path / "branch"
  shutil.copytree(other, there)
  branch = starting(parts, checkpoint=str(there / "checkpoints" / "2"))
  runs.train(branch, workdir)
  assert f"starts with the policy of {there}/checkpoints/2, after 2" in capsys.readouterr().out
  params, opt_state = saved(parts, workdir, 0)
  assert_equal(params, saved(parts, other, 2)[0])
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(opt_state))
  records = tiny.records(workdir)
  assert not [r for r in records if r["phase"] == "warm_start"]
  rates = [r["update/learning_rate"] for r in tiny.records(workdir, "train")]
  assert rates == [r["update/learning_rate"] for r in tiny.records(other, "train")]
  # Again from its own first checkpoint, without the other run: the same records.
  shutil.rmtree(there)
  for step in (1, 2, 3):
    shutil.rmtree(workdir / "checkpoints" / str(step), ignore_errors=True)
  runs.train(branch, workdir)
  assert tiny.records(workdir) == records


@pytest.mark.slow
def test_the_optimizers_moments_go_on_and_the_learning_rate_begins_anew(parts, other, tmp_path):
  branch = starting(parts, checkpoint=str(other), optimizer=True)  # its last checkpoint
  workdir = tmp_path / "branch"
  runs.train(branch, workdir)
  params, opt_state = saved(parts, workdir, 0)
  expected, there = saved(parts, other, UPDATES)
  assert_equal(params, expected)
  (counts, leaves), (counts_there, leaves_there) = split(opt_state), split(there)
  assert set(counts) == {0} and set(counts_there) == {UPDATES}
  assert_equal(leaves, leaves_there)
  assert any(np.any(leaf) for leaf in leaves)


@pytest.mark.slow
def test_another_method_may_go_on(other, tmp_path):
  """Whose state is not in the checkpoint."""
  fade = build(tiny.config(advantage="fade", start__checkpoint=str(other), start__optimizer=True))
  folder = parameters.start_folder(fade.config.start.checkpoint)
  params, step = parameters.load_policy(fade.initial, folder)
  assert step == UPDATES
  state = parameters.first_state(fade.method, fade.placement.state, params, 0.5, moments_of=folder)
  assert jax.tree.leaves(state.advantage_state) and state.step == 0
  assert set(split(state.opt_state)[0]) == {0}


def test_moments_are_of_the_update_that_the_policy_is_of(tmp_path):
  """The other run goes on while this one is killed before its first checkpoint."""
  for step in (2, 4):
    (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "checkpoints" / str(step) / "commit_success.txt").touch()
  assert parameters.start_folder(str(tmp_path)).name == "4"
  assert parameters.start_folder(str(tmp_path), 2).name == "2"
  with pytest.raises(checkpoint_files.CheckpointError, match="its checkpoint 3, which is gone"):
    parameters.start_folder(str(tmp_path), 3)


@pytest.mark.parametrize(
  ("start", "message"),
  [
    (dict(checkpoint="nowhere"), r"config\.start\.checkpoint=nowhere has no checkpoint; give"),
    (dict(checkpoint="/nonexistent"), r"config\.start\.checkpoint=/nonexistent has no checkpoint"),
    (dict(optimizer=True), r"start\.optimizer = True has no effect without config\.start\.check"),
  ],
)
def test_mistakes_are_named_and_leave_no_workdir(parts, tmp_path, start, message):
  with pytest.raises(checkpoint_files.CheckpointError, match=message):
    runs.train(starting(parts, **start), tmp_path / "branch")
  assert not (tmp_path / "branch").exists()
  assert issubclass(checkpoint_files.CheckpointError, runs.FAILURES)  # main prints its message


@pytest.mark.slow
def test_a_start_that_does_not_fit(parts, other, tmp_path):
  folder = tmp_path / "other" / "checkpoints" / "3"
  shutil.copytree(other / "checkpoints" / "3", folder)
  config = json.loads((other / "config.json").read_text())
  config["model"]["overrides"]["width"] = 64
  (tmp_path / "other" / "config.json").write_text(json.dumps(config))
  with pytest.raises(checkpoint_files.CheckpointError, match=r"another network.*'width': 64"):
    runs.train(starting(parts, checkpoint=str(folder)), tmp_path / "branch")
  both = parts.config.copy_and_resolve_references()
  both.start.checkpoint, both.lora.adapters = str(other), "adapters"
  with pytest.raises(checkpoint_files.CheckpointError, match="both give the first parameters"):
    parameters.check_start(both.start, both.lora.adapters, tmp_path)
