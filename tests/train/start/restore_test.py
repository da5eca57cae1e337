"""What a resumed run takes from the runs that it began with."""

import json

import pytest

from rlvr_jax.rollouts.sources import Source, Sources
from rlvr_jax.sampling import Sampling
from rlvr_jax.train.checkpointing.workdir import WorkdirError
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
    ("", "Expecting value"),
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
