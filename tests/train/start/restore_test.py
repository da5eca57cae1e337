"""What a resumed run takes from the runs that it began with."""

import dataclasses
import json

import pytest
from train import tiny

from rlvr_jax.sampling import Sampling
from rlvr_jax.train.checkpointing.workdir import WorkdirError
from rlvr_jax.train.setup.behavior_sources import Source
from rlvr_jax.train.setup.build import build
from rlvr_jax.train.start.restore import SOURCES_FILE, restore_sources


@pytest.fixture(scope="module")
def parts():
  """A run of which another run's checkpoint, now of step 5, samples a part."""
  source = Source("checkpoint", 4, Sampling(), pin=5)
  return dataclasses.replace(build(tiny.get_config()), sources=(source,))


@pytest.fixture
def begun(parts, tmp_path):
  """The workdir of the run once it has begun."""
  assert restore_sources(parts, tmp_path) is parts
  (tmp_path / "checkpoints").mkdir()
  return tmp_path


def test_sources_are_read_as_written(parts, begun):
  assert restore_sources(parts, begun) is parts


@pytest.mark.parametrize(
  ("text", "why"),
  [
    (None, "No such file"),
    ("", "Expecting value"),
    ("garbage", "Expecting value"),
    ("[]", "it does not name checkpoint"),
    ("{}", "it does not name checkpoint"),
    ("edited", "it does not match its checksum"),
    ('{"checkpoint": 5}', "it does not match its checksum"),
  ],
)
def test_a_run_whose_sources_are_not_known_is_not_resumed(parts, begun, text, why):
  path = begun / SOURCES_FILE
  written = json.loads(path.read_text())
  path.unlink()
  if text is not None:
    path.write_text(json.dumps(written | {"checkpoint": 4}) if text == "edited" else text)
  with pytest.raises(
    WorkdirError, match=rf"sources\.json, .* cannot be read: .*{why}.* Put back a"
  ):
    restore_sources(parts, begun)
  assert path.exists() == (text is not None)


def test_a_start_that_was_killed_before_its_sources_were_written_starts(parts, tmp_path):
  (tmp_path / "config.json").write_text("{}")
  restore_sources(parts, tmp_path)
  assert json.loads((tmp_path / SOURCES_FILE).read_text())["checkpoint"] == 5
