"""Memory and profiles: what a run tells of its machines."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from train import tiny

from rlvr_jax.commands import choose
from rlvr_jax.train.reporting import machines

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


def test_a_run_that_ends_early_writes_its_profile(tmp_path, monkeypatch):
  called = []
  for name in ("start_trace", "stop_trace"):
    monkeypatch.setattr(jax.profiler, name, lambda *_, name=name: called.append(name))
  profile = machines.Profile("1:9", tmp_path)
  profile.before(4)  # resumed within
  profile.before(5)
  profile.close()
  assert called == ["start_trace", "stop_trace"]


@pytest.mark.parametrize("updates", ["3", "3:", ":3", "a:b", "5:3", "0:3", "-1:3"])
def test_a_profile_of_no_updates_is_refused(updates, tmp_path):
  with pytest.raises(ValueError, match=f"--profile={updates}: write the first and the last"):
    choose.prepare_command("train", tiny.get_config(), str(tmp_path), None, None, profile=updates)


@pytest.mark.parametrize("flags", [dict(profile="1:2"), dict(tracked_by=["wandb"])])
def test_these_flags_belong_to_training(flags, tmp_path):
  with pytest.raises(ValueError, match=r"goes with --mode=train.*, not with --mode=eval"):
    choose.prepare_command("eval", tiny.get_config(), str(tmp_path), None, None, **flags)
