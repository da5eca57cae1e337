"""Runs whose workdir is in a bucket end as those on a disk, to the bit, however they are killed."""

import contextlib
import re
import signal
import subprocess
import time

import jax.numpy as jnp
import numpy as np
import pytest
from rewards.user_graders import SECONDS
from train import multiprocess_test, tiny

from rlvr_jax.commands.train import train
from rlvr_jax.evaluate import curves, run_files
from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.store import RolloutStore
from rlvr_jax.storage.bucket import Bucket
from rlvr_jax.storage.places import OWNER, Workdir, parse_path
from rlvr_jax.train.checkpointing import claim
from rlvr_jax.train.checkpointing.checkpoint import Checkpointer
from rlvr_jax.train.checkpointing.checkpoint_files import TornCheckpointError
from rlvr_jax.train.checkpointing.claim import WorkdirError
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start.parameters import checkpoint_folder

# Reading what is damaged leaves tensorstore's other reads unfinished, which complain.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def stored(workdir):
  """The contents of the rollouts that a run keeps, by number, without their timings."""
  store = RolloutStore(parse_path("", workdir) / "rollouts", writable=False)
  read = {number: tiny.read_stored(store, number)[0] for number in store.numbers()}
  return {
    number: {name: array.tobytes() for name, array in arrays.items()}
    for number, arrays in read.items()
  }


def outcome(workdir, get_config=tiny.get_config):
  """As `tiny.outcome`, and the rollouts of the store."""
  return tiny.outcome(workdir, get_config) | {"stored": stored(workdir)}


# --- checkpoints ----------------------------------------------------------------------------------


def state(step):
  return {"kernel": jnp.arange(64.0).reshape(8, 8) * step, "empty": jnp.zeros((0, 3))}


def saved(checkpointer, *steps, **options):
  for step in steps:
    assert checkpointer.save(step, state(step), host={"step": step}, **options)
    assert not checkpointer.save(step, state(step), host={})
  checkpointer.wait()


def assert_restores(checkpointer, step):
  restored = checkpointer.restore(state(0))
  assert restored.step == step and restored.host == {"step": step}
  assert np.array_equal(restored.state["kernel"], state(step)["kernel"])


def test_checkpoints_of_a_bucket(url, folder, emulator):
  with contextlib.closing(Checkpointer(f"{url}/checkpoints", keep=2)) as checkpointer:
    saved(checkpointer, 1, metric=0.5)
    saved(checkpointer, 2, 3, 4)
    assert checkpointer.steps() == [1, 3, 4]  # the best one and the last two
    assert_restores(checkpointer, 4)
  steps = lambda: sorted({name.split("/")[0] for name in emulator.names(f"{folder}/checkpoints")})
  assert steps() == ["1", "3", "4"]
  # A save that was killed, and a removal.
  for step in (4, 1):
    del emulator.objects[f"{folder}/checkpoints/{step}/commit_success.txt"]
  assert checkpoint_folder(url).name == "3"
  with contextlib.closing(Checkpointer(f"{url}/checkpoints", keep=2)) as checkpointer:
    assert checkpointer.steps() == [3] and steps() == ["3"]
    assert_restores(checkpointer, 3)
    saved(checkpointer, 4, 5)
    checkpointer.discard_after(4)
    assert checkpointer.steps() == [4] and steps() == ["4"]
    saved(checkpointer, 5, 6)
    assert_restores(checkpointer, 6)
  assert steps() == ["5", "6"]


def test_damaged_checkpoints_are_skipped(url, folder, emulator, capsys):
  with contextlib.closing(Checkpointer(f"{url}/checkpoints")) as checkpointer:
    saved(checkpointer, 1, 2)
    for name in emulator.names(f"{folder}/checkpoints/2/arrays/d"):
      emulator.damage(f"{folder}/checkpoints/2/arrays/d/{name}")
    assert_restores(checkpointer, 1)
    assert f"{url}/checkpoints/2 is damaged" in capsys.readouterr().out
    checkpointer.discard_after(1)
  del emulator.objects[f"{folder}/checkpoints/1/manifest/metadata"]
  with contextlib.closing(Checkpointer(f"{url}/checkpoints")) as checkpointer:
    assert checkpointer.steps() == [1]
    with pytest.raises(TornCheckpointError, match=rf"{url}/checkpoints/1 is damaged"):
      checkpointer.restore(state(0))


def test_without_its_claim_a_process_begins_no_checkpoint(url, folder, emulator):
  def guard():
    raise WorkdirError("no heartbeat")

  with contextlib.closing(Workdir(url)) as workdir:
    with contextlib.closing(Checkpointer(f"{url}/checkpoints", workdir=workdir)) as checkpointer:
      workdir.set_guard(guard)
      with pytest.raises(WorkdirError):
        checkpointer.save(1, state(1), host={})
      workdir.set_guard(lambda: 60.0)
  assert not emulator.names(folder)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts():
  return build(tiny.config(num_updates=4, warm_start__num_steps=4))


@pytest.mark.slow
def test_a_run_in_a_bucket_is_read_from_there(url, folder, emulator, parts, capsys, monkeypatch):
  monkeypatch.setattr(claim, "LIMIT_S", 3600.0)  # a busy machine may stand still for minutes
  train(parts, url)
  printed = capsys.readouterr().out
  assert f"{url}/metrics.jsonl" in printed
  found, names = outcome(url), emulator.names(folder)
  assert found["checkpoint"][0] == 4 and sorted(found["stored"]) == [0, 1]
  assert OWNER not in names and "learning_curves.png" in names
  assert not any(name.startswith("rollouts/groups") for name in names)
  assert curves.curve(run_files.read_metrics(url), "eval/pass@1")[0].tolist() == [0, 4]
  assert checkpoint_folder(url) == parse_path("", f"{url}/checkpoints/4")
  with pytest.raises(WorkdirError, match=f"^{url} belongs to a run with another configuration"):
    train(build(tiny.config(num_updates=4, warm_start__num_steps=4, seed=3)), url)
  train(parts, url)  # it has ended, and changes nothing
  assert outcome(url) == found
  # Other runs use it.
  config = tiny.config(sources__recorded=dict(fraction=0.5, store=f"{url}/rollouts"))
  assert tiny.recorded_by(config, parts.tokenizer).numbers == [0, 1]
  assert staleness.RecordedRun(url, 2).versions == [[0], [0]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """What the run on a disk ends with, that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("undisturbed") / "run"
  tiny.run(workdir)
  return outcome(workdir)


def published(url, step, phase):
  """Whether metrics.jsonl has the record in the bucket, as a condition to wait for."""
  start = f'{{"step": {step}, "phase": "{phase}"'

  def is_there():
    with contextlib.suppress(FileNotFoundError):
      return start in Bucket(url).read("metrics.jsonl").decode()
    return False

  return is_there


@pytest.mark.slow
def test_killed_and_damaged_it_ends_as_on_a_disk(url, folder, emulator, undisturbed, tmp_path):
  points = [(40, "warm_start", "0"), (3, "train", "0.4"), (10, "eval", "0.03")]
  for step, phase, seconds in points:
    with tiny.started(url, log=tmp_path / "log", **{SECONDS: seconds}) as process:
      tiny.wait_for(published(url, step, phase), process)
      if phase == "train":  # at a pace at which it is there when its next heartbeat comes
        refused = tiny.run(url, expect=1)
  assert re.search(rf"error: {url} is in use by process \d+ on", refused)
  emulator.damage(f"{folder}/metrics.jsonl")
  emulator.damage(f"{folder}/rollouts/00000004.safetensors")
  printed = tiny.run(url)
  assert f"{url}/metrics.jsonl differs" in printed and "rlvr_jax_staging" not in printed
  assert "resumed at update" in printed
  found, expected = outcome(url), dict(undisturbed)
  # Which of them a run still needs depends on where it was killed; it is there again, or set aside.
  found.pop("stored"), expected.pop("stored")
  # A damaged line, or two if it was their newline, is lost or reads as something else.
  metrics, all_metrics = found.pop("metrics"), expected.pop("metrics")
  assert 1 <= len([record for record in all_metrics if record not in metrics]) <= 2
  assert found == expected


@pytest.mark.soak
def test_a_process_that_was_stopped_is_replaced(url, undisturbed, tmp_path):
  with tiny.started(url, log=tmp_path / "log", **{SECONDS: "0.03"}) as process:
    tiny.wait_for(published(url, 3, "train"), process)
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    printed = tiny.run(url)
    assert "waiting for up to 60 s for a heartbeat" in printed and "resumed at update" in printed
    assert time.monotonic() - began > 60
    process.send_signal(signal.SIGCONT)
    assert process.wait(tiny.TIMEOUT_S) == 1
  assert "no heartbeat of this process" in (tmp_path / "log").read_text()
  assert outcome(url) == undisturbed


@pytest.mark.slow
def test_an_evaluation_in_a_bucket_of_a_run_in_a_bucket(url, emulator, tmp_path):
  flags = ("--config.num_updates=2", "--config.warm_start.num_steps=0")
  tiny.run(url, *flags)
  for workdir in (f"{url}_eval", tmp_path / "eval"):
    printed = tiny.run(workdir, *flags, "--mode=eval", f"--checkpoint={url}")
    assert f"{workdir}/evaluation.json" in printed
  assert (
    Bucket(f"{url}_eval").read("evaluation.json")
    == (tmp_path / "eval" / "evaluation.json").read_bytes()
  )
  checked = tiny.run(f"{url}_eval", *flags, "--mode=check")
  assert f"{url}_eval can be written and read" in checked


# --- several processes ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
  """What a pair of processes ends with on a disk."""
  workdir = tmp_path_factory.mktemp("pair") / "run"
  multiprocess_test.train_to_the_end(workdir)
  return outcome(workdir)


@pytest.fixture(scope="module")
def duration(emulator):
  """Seconds of an undisturbed pair's run in a bucket from when it holds its workdir."""
  with multiprocess_test.training("gs://bucket/first") as processes:
    tiny.wait_for(tiny.holds("gs://bucket/first", processes.processes[0]), processes.processes[0])
    began = time.monotonic()
    processes.ended()
  return time.monotonic() - began


def killed_pair(url, after):
  """Starts a pair, and kills both so many seconds after they hold the workdir."""
  with multiprocess_test.training(url) as processes:
    first = processes.processes[0]
    tiny.wait_for(tiny.holds(url, first), first)
    with contextlib.suppress(subprocess.TimeoutExpired):
      first.wait(after)
  for process in processes.processes:
    process.communicate()


@pytest.mark.slow
def test_a_pair_stopped_killed_and_damaged_ends_as_on_a_disk(url, folder, emulator, pair):
  """Two processes that share no disk."""
  with multiprocess_test.training(url) as processes:
    first, second = processes.processes
    tiny.wait_for(published(url, 1, "train"), first)
    second.send_signal(signal.SIGTERM)  # one of them is asked; both end, after the same update
    statuses, outputs = processes.ended()
  assert statuses == [0, 0], "\n".join(outputs)[-5000:]
  assert "shutdown requested: saved after update" in outputs[0]
  with multiprocess_test.training(url) as processes:
    tiny.wait_for(published(url, 4, "train"), processes.processes[0])
  for process in processes.processes:
    process.communicate()
  newest = checkpoint_folder(url).name
  for name in emulator.names(f"{folder}/checkpoints/{newest}/arrays/d"):
    emulator.damage(f"{folder}/checkpoints/{newest}/arrays/d/{name}")
  outputs = multiprocess_test.train_to_the_end(url)
  assert f"{url}/checkpoints/{newest} is damaged" in outputs[0]
  assert "resumed at update" in outputs[0]
  assert outcome(url) == pair


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_pairs_killed_at_random_points(url, pair, duration, seed):
  """Twenty kills in all, spread over the whole run."""
  rng = np.random.default_rng(seed)
  for after in rng.uniform(0, duration, 4):
    killed_pair(url, after)
    print(f"killed after {after:.2f} s of {duration:.2f}, {len(Bucket(url).names())} objects")
  multiprocess_test.train_to_the_end(url)
  assert outcome(url) == pair
