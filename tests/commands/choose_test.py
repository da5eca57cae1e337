"""URLs that a run cannot use are refused before anything is built, compiled or written."""

import os
import pathlib

import pytest
from train import tiny

from rlvr_jax.commands import choose
from rlvr_jax.rollouts import staleness
from rlvr_jax.storage.places import parse_path
from rlvr_jax.train.setup.build import build

URL = "s3://bucket/run"


@pytest.mark.parametrize("path", [URL, "gs://b", pathlib.Path(URL)])
def test_urls_are_no_local_paths(path):
  with pytest.raises(ValueError, match=r"--workdir = '\w+:/.*' is a URL, .* that all hosts mount"):
    parse_path("--workdir", path, must_be_on_disk=True)


@pytest.mark.parametrize("path", ["runs/a", "/tmp/a:b/c", "a:b"])
def test_local_paths_stay_as_they_are(path):
  assert parse_path("--workdir", path, must_be_on_disk=True) == pathlib.Path(path)


@pytest.mark.parametrize(
  ("mode", "workdir", "checkpoint", "owner"),
  [
    ("train", URL, None, "--workdir"),
    ("eval", "runs/x", URL, "--checkpoint"),
    ("export", URL, URL, "--checkpoint"),  # its workdir may be remote
    ("train", "gs://bucket", None, "--workdir"),  # a bucket has many runs
  ],
)
def test_flags(mode, workdir, checkpoint, owner, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(
    ValueError, match=rf"{owner} = '\w+://bucket.*' must be .* gs://BUCKET/FOLDER"
  ):
    choose.prepare_command(mode, tiny.get_config(), workdir, checkpoint, None)
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
  "flags", [dict(beside="runs/b"), dict(batches="0"), dict(serve=True), dict(port=0)]
)
def test_flags_of_a_page_are_those_of_a_page(flags):
  (name,) = flags
  with pytest.raises(ValueError, match=f"--{name} goes with --mode=view, not with --mode=train"):
    choose.prepare_command("train", tiny.get_config(), "runs/a", None, None, **flags)


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (dict(port=8123), "--port=8123 has no effect"),
    (dict(serve=True, batches="0"), "--batches=0 has"),
  ],
)
def test_flags_of_a_page_that_have_no_effect_are_refused(flags, words):
  with pytest.raises(ValueError, match=words):
    choose.prepare_command("view", None, "runs/a", None, None, **flags)


@pytest.mark.parametrize("fields", [
  dict(sources__checkpoint=dict(fraction=0.5, workdir=URL)),
  dict(sources__recorded=dict(fraction=0.5, store=URL)),
])  # fmt: skip
def test_fields(fields):
  with pytest.raises(ValueError, match=rf"config\.sources\..* = '{URL}' must be a folder"):
    build(tiny.config(**fields))


def test_a_schedule_that_replays_another_run():
  with pytest.raises(ValueError, match=rf"recorded = '{URL}' must be a folder"):
    staleness.simulated_asynchronous(recorded=URL, num_updates=2, seed=0)
