"""What a resumed run takes from the runs that it began with."""

import json
from types import SimpleNamespace

import pytest
from train import tiny

from rlvr_jax.rollouts import staleness
from rlvr_jax.rollouts.sources import Source, Sources
from rlvr_jax.rollouts.store import RolloutStore, StoreError
from rlvr_jax.sampling import Sampling
from rlvr_jax.train import begin
from rlvr_jax.train.checkpointing.workdir import WorkdirError
from rlvr_jax.train.setup import checks
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start.restore import SOURCES_FILE, restore_sources


@pytest.fixture(scope="module")
def sources():
  """Of a run of which another run's checkpoint, now of step 5, samples a part."""
  return Sources([Source("checkpoint", 4, Sampling(), pin=5)])


def restored(sources, workdir):
  """As `restore_sources`, in which the pins are those of now."""

  def make_sources(pins):
    raise AssertionError(f"they are others: {pins}")

  return restore_sources(sources, make_sources, workdir)


@pytest.fixture
def begun(sources, tmp_path):
  """The workdir of the run once it has begun."""
  assert restored(sources, tmp_path) is sources
  (tmp_path / "checkpoints").mkdir()
  return tmp_path


def test_sources_are_read_as_written(sources, begun):
  assert restored(sources, begun) is sources


@pytest.mark.parametrize(
  ("text", "why"),
  [
    (None, "No such file"),
    ("garbage", "Expecting value"),
    ("[]", "it must name exactly the sources checkpoint"),
    ("{}", "it must name exactly the sources checkpoint"),
    ("edited", "it does not match its checksum"),
    ('{"checkpoint": 5}', "it does not match its checksum"),
  ],
)
def test_a_run_whose_sources_are_not_known_is_not_resumed(sources, begun, text, why):
  path = begun / SOURCES_FILE
  written = json.loads(path.read_text())
  path.unlink()
  if text is not None:
    path.write_text(json.dumps(written | {"checkpoint": 4}) if text == "edited" else text)
  with pytest.raises(
    WorkdirError, match=rf"sources\.json, .* cannot be read: .*{why}.* Put back a"
  ):
    restored(sources, begun)
  assert path.exists() == (text is not None)


def test_a_start_that_was_killed_before_its_sources_were_written_starts(sources, tmp_path):
  (tmp_path / "config.json").write_text("{}")
  restored(sources, tmp_path)
  assert json.loads((tmp_path / SOURCES_FILE).read_text())["checkpoint"] == 5


def test_a_store_that_has_lost_the_batch_before_the_damaged_one_is_named(tmp_path):
  with RolloutStore(tmp_path / "rollouts", writable=True) as store:
    with pytest.raises(StoreError, match="has lost batch 9, which says where drawing goes on"):
      begin._info(store, 9)


def checkpoint_of(workdir, rank):
  """The settings of a source that is a run with adapters of this rank."""
  run = tiny.config(lora__rank=rank)
  (workdir / "checkpoints" / "3").mkdir(parents=True)
  (workdir / "checkpoints" / "3" / "commit_success.txt").touch()
  (workdir / "config.json").write_text(run.to_json_best_effort())
  return dict(fraction=0.5, workdir=str(workdir), step=-1)


def test_another_run_with_adapters_is_refused_before_compilation(tmp_path):
  with pytest.raises(ValueError, match=r"have only adapters \(config.lora.rank = 4\)"):
    build(tiny.config(sources__checkpoint=checkpoint_of(tmp_path / "run", 4)))


def test_raw_log_probabilities_of_a_run_with_several_policies_per_batch_are_refused():
  schedule = staleness.on_policy()._replace(recorded=SimpleNamespace(has_several=True))
  config = tiny.config(sources__temperature=dict(fraction=0.5, recorded="raw"))
  with pytest.raises(ValueError, match="'raw' needs one policy per batch, but several policies"):
    checks.check_schedule(config, schedule)
