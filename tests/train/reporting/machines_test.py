"""Memory, busy hosts, profiles and trackers: what a run tells beside its results."""

import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from train import tiny

from rlvr_jax.commands import choose
from rlvr_jax.train.cluster import multihost
from rlvr_jax.train.reporting import machines, trackers
from rlvr_jax.train.reporting.writer import MetricWriter

# --- memory and hosts -----------------------------------------------------------------------------


HELD = """
from rlvr_jax.train.reporting import machines
before = machines.memory("grade")["memory/grade_host_gib"]
held = bytearray(b"1") * 2**28
after = machines.memory("grade")
assert 0.24 < after["memory/grade_host_gib"] - before < 0.3, (before, after)
assert set(after) == {"memory/grade_host_gib"}  # a CPU's device tells nothing
"""


def test_memory_of_a_process():
  """In a program of its own: what other tests leave behind is given back at any time."""
  subprocess.run([sys.executable, "-c", HELD], check=True, timeout=120)


@pytest.fixture
def waited(monkeypatch):
  """Sets what each process has waited, as the last exchange would have."""
  monkeypatch.setattr(multihost, "_process_waits_s", [])
  return lambda *seconds: multihost._process_waits_s.__setitem__(slice(None), seconds)


def test_the_host_that_waits_least_is_the_busiest(waited):
  hosts = machines.Hosts()
  waited(1.0, 2.0, 3.0)
  assert hosts.metrics(10.0) == {}  # since when is unknown
  waited(4.0, 3.0, 12.0)
  busy = {"hosts/busy_seconds_0": 7.0, "hosts/busy_seconds_1": 9.0, "hosts/busy_seconds_2": 1.0}
  assert hosts.metrics(10.0) == busy


def test_one_process_has_no_hosts_to_compare(waited):
  hosts = machines.Hosts()
  assert hosts.metrics(1.0) == hosts.metrics(1.0) == {}


@pytest.mark.parametrize(
  ("slow", "named"),
  [
    ([1] * 5, 1),
    ([1] * 20, 1),  # once
    ([1] * 4 + [None] + [1] * 4, 0),
    ([1, 2] * 5, 0),
    ([1] * 5 + [2] * 5, 2),
  ],
)
def test_a_process_that_stays_behind_is_named(waited, capsys, slow, named):
  hosts, total = machines.Hosts(), [0.0, 0.0, 0.0]
  waited(*total)
  hosts.metrics(10.0)
  for process in slow:
    total = [t + (2.0 if i == process else 8.0) for i, t in enumerate(total)]
    waited(*total)
    hosts.metrics(10.0)
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == named
  if lines:
    assert lines[0].startswith("warning: process 1 is a straggler: it was busy for 8.0 s")


# --- profiles -------------------------------------------------------------------------------------


def test_a_profile_has_the_updates_that_were_asked_for(tmp_path, capsys):
  profile = machines.Profile("2:3", tmp_path)
  for update in range(1, 5):
    profile.before(update)
    assert profile._open == (update in (2, 3))
    jnp.dot(jnp.ones((8, 8)), float(update)).block_until_ready()
    profile.after(update)
  profile.close()
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))
  assert "the profile of updates 2 to 3 is in " in capsys.readouterr().out


def test_a_run_that_ends_early_writes_its_profile(tmp_path):
  profile = machines.Profile("1:9", tmp_path)
  profile.before(4)  # resumed within
  jax.jit(lambda x: x + 1)(1.0).block_until_ready()
  profile.close()
  assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize("updates", ["3", "3:", ":3", "a:b", "5:3", "0:3", "-1:3"])
def test_a_profile_of_no_updates_is_refused(updates, tmp_path):
  with pytest.raises(ValueError, match=f"--profile={updates}: write the first and the last"):
    choose.prepare_command("train", tiny.get_config(), str(tmp_path), None, None, profile=updates)


@pytest.mark.parametrize("flags", [dict(profile="1:2"), dict(tracked_by=["wandb"])])
def test_these_flags_belong_to_training(flags, tmp_path):
  with pytest.raises(ValueError, match=r"goes with --mode=train.*, not with --mode=eval"):
    choose.prepare_command("eval", tiny.get_config(), str(tmp_path), None, None, **flags)


# --- trackers -------------------------------------------------------------------------------------

FAKE = """
  import json

  class Run:
    def log(self, values):
      if values.get("train/fails"):
        raise OSError("the site is down")
      print("log", json.dumps(values))

    def finish(self):
      print("finish")

  def init(**given):
    print("init", json.dumps(given, sort_keys=True))
    return Run()
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
  """Modules in place of the trackers' own, which print what they are given."""
  folder = tmp_path / "modules"
  folder.mkdir()
  for name in trackers.TRACKERS:
    (folder / f"{name}.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.syspath_prepend(folder)
  yield
  for name in trackers.TRACKERS:
    sys.modules.pop(name, None)


CONFIG = {"seed": 1, "ks": [1, 4]}


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_tracker_gets_the_numbers_and_goes_on_after_a_resume(installed, name, tmp_path, capsys):
  workdir = tmp_path / "run"
  workdir.mkdir()
  given = []
  for step in (1, 2):
    with_tracker = [trackers.Tracker(name, workdir, CONFIG)]
    writer = MetricWriter(workdir, step - 1 or None, trackers=with_tracker)
    writer.write(step, "train", {"reward/mean": 0.5, "note": "text"})
    writer.write(step, "eval", {"eval/pass@1": 0.25})
    writer.close()
    lines = capsys.readouterr().out.splitlines()
    given.append(json.loads(lines[0].removeprefix("init ")))
    values = {"train/step": step, "train/reward/mean": 0.5}
    evaluated = {"eval/step": step, "eval/pass@1": 0.25}
    assert lines[1:] == [f"log {json.dumps(v)}" for v in (values, evaluated)] + ["finish"]
  assert given[0] == given[1]  # the same run
  assert given[0]["resume"] == "allow" and given[0]["config"] == {"seed": 1, "ks": [1, 4]}
  identity = json.loads((workdir / trackers.RUN_FILE).read_text())["id"]
  assert given[0].get("id", given[0]["name"]).endswith(identity)


def test_a_tracker_that_fails_does_not_end_the_run(installed, tmp_path, capsys):
  tracker = trackers.Tracker("wandb", tmp_path, CONFIG)
  tracker.log(1, "train", {"fails": 1})
  tracker.log(2, "train", {"x": 1})
  tracker.close()
  out = capsys.readouterr().out
  assert "\nlog " not in out
  assert out.count("warning: wandb gets no more metrics of this run: the site is down") == 1


def test_a_tracker_that_is_unknown_or_absent_is_refused(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match="--trackers=mlflow is unknown; allowed: trackio, wandb"):
    choose.prepare_command(
      "train", tiny.get_config(), str(tmp_path), None, None, tracked_by=["mlflow"]
    )
  monkeypatch.setattr(sys, "path", [str(pathlib.Path(tmp_path))])
  monkeypatch.setattr(sys, "path_importer_cache", {})
  with pytest.raises(ValueError, match=r'wandb is not installed: pip install -e "\.\[wandb\]"'):
    trackers.check("wandb")
