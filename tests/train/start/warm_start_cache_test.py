"""Warm starts that runs share: the same to the bit, named by all they depend on, never damaged."""

import dataclasses
import fcntl
import json
import shutil
import threading

import jax
import numpy as np
import pytest
from train import tiny

from rlvr_jax.commands import train as runs
from rlvr_jax.storage.files import TEMPORARY
from rlvr_jax.train.checkpointing import checkpoint_files
from rlvr_jax.train.cluster import process
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start import parameters, warm_start_cache

FIELDS = dict(num_updates=2, evaluation__every=2, schedule="on_policy")


@pytest.fixture(scope="module")
def parts():
  return build(tiny.config(**FIELDS))


@pytest.fixture(scope="module")
def state(parts):
  """Before the warm start; no test gives it away."""
  return parameters.supervised_state(parts)


@pytest.fixture
def entry(parts, state, tmp_path):
  return warm_start_cache.Entry(sharing(parts, tmp_path / "cache"), state, {})


def sharing(parts, cache):
  config = parts.config.copy_and_resolve_references()
  config.warm_start.cache = str(cache)
  return dataclasses.replace(parts, config=config)


def result(state):
  return warm_start_cache.Trained(state[0], [(10, 0.1), (20, 1 / 3)])


@pytest.mark.slow
def test_a_run_that_takes_it_is_the_run_that_trains_it(parts, tmp_path, capsys):
  cache = tmp_path / "cache"
  runs.train(parts, tmp_path / "alone")
  runs.train(sharing(parts, cache), tmp_path / "first")
  assert "uses the cached warm start" not in capsys.readouterr().out
  runs.train(sharing(parts, cache), tmp_path / "second")
  (saved,) = [path for path in cache.iterdir() if path.is_dir()]
  assert f"uses the cached warm start {saved}" in capsys.readouterr().out
  alone = tiny.outcome(tmp_path / "alone")
  assert len([r for r in alone["metrics"] if r["phase"] == "warm_start"]) == 4
  assert tiny.outcome(tmp_path / "first") == tiny.outcome(tmp_path / "second") == alone
  # It lies in the workdir too, so that the cache may go.
  shutil.rmtree(cache)
  runs.train(sharing(parts, tmp_path / "elsewhere"), tmp_path / "second")
  assert tiny.outcome(tmp_path / "second") == alone


@pytest.mark.slow
def test_it_is_named_by_all_that_it_depends_on(parts, state, monkeypatch):
  def changed(**fields):
    other = build(tiny.config(**FIELDS, **fields))
    return warm_start_cache.describe_inputs(other, parameters.supervised_state(other), {})

  ours = warm_start_cache.describe_inputs(parts, state, {})
  differing = lambda other: {name for name in ours if ours[name] != other[name]}
  assert ours == json.loads(json.dumps(ours))
  # Another method, and other settings of what follows.
  assert not differing(
    changed(advantage="rloo", learning_rate="constant(peak=1e-5)", evaluation__seed=7)
  )
  assert differing(changed(seed=1)) == {"begins_with", "batches"}
  assert differing(changed(warm_start__learning_rate="constant(peak=2e-2)")) == {"program"}
  assert differing(changed(warm_start__num_steps=41)) == {"steps", "batches"}
  assert differing(changed(model__overrides__compute_dtype="bfloat16")) == {"program"}
  assert differing(changed(task__kwargs__warm_start_size=50)) == {"batches"}
  options = "xla_cpu_enable_fast_math=false"
  assert differing(changed(compiler_options__training=options)) == {"flags"}
  assert not differing(changed(compiler_options__generation=options))
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
  assert differing(warm_start_cache.describe_inputs(parts, state, {})) == {"flags"}


def test_saved_and_loaded_to_the_bit(entry, state):
  assert entry.load() is None
  with entry.lock():
    left = entry.path.with_name(entry.path.name + TEMPORARY) / "10.of_a_killed_run"
    left.mkdir(parents=True)
    entry.save(result(state))
  found = entry.load()
  assert found.losses == result(state).losses
  jax.tree.map(np.testing.assert_array_equal, found.params, state[0])
  assert not (entry.path / left.name).exists()
  assert sorted(path.suffix for path in entry.path.parent.iterdir()) == ["", ".lock"]


def test_damage_is_refused(entry, state):
  with entry.lock():
    entry.save(result(state))
  largest = max((p for p in entry.path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  tiny.cut(largest)
  with pytest.raises(checkpoint_files.TornCheckpointError, match=f"Remove {entry.path}; the next"):
    entry.load()
  shutil.rmtree(entry.path)
  entry.path.mkdir()
  with pytest.raises(checkpoint_files.ForeignCheckpointError, match="is not a checkpoint"):
    entry.load()


def test_a_second_run_waits_for_the_first(entry, state, capsys):
  found, began = [], threading.Event()

  def second():
    began.set()
    with entry.lock():
      found.append(entry.load())

  thread = threading.Thread(target=second)
  with entry.lock():
    thread.start()
    began.wait()
    entry.save(result(state))
  thread.join(60)
  assert found[0].losses == result(state).losses


def test_the_wait_has_an_end(entry, state, monkeypatch, capsys):
  monkeypatch.setattr(warm_start_cache, "WAIT_S", 0.0)
  with entry.lock():
    with pytest.raises(checkpoint_files.CheckpointError, match=r"by process \d+ in 0 hours"):
      with entry.lock():
        pass
    assert "is being trained by process" in capsys.readouterr().out
    with process.handle_shutdown_signals(lambda: None):
      process.request_shutdown()
      monkeypatch.setattr(warm_start_cache, "WAIT_S", 60.0)
      with pytest.raises(process.EndRequestedError), entry.lock():
        pass
  with open(entry.path.with_suffix(".lock")) as file:  # free again
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_cache_that_is_not_a_folder(parts, tmp_path):
  with pytest.raises(
    checkpoint_files.CheckpointError, match=r"config\.warm_start\.cache = 'gs://b/c' is a URL"
  ):
    runs.train(sharing(parts, "gs://b/c"), tmp_path / "run")
