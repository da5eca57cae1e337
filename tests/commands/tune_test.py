"""The command tune, on a tiny network compiled for one TPU chip."""

import json
import re
import subprocess
import sys

import jax
import pytest
from train import tiny

from rlvr_jax.commands import choose, tune

pytest.importorskip("libtpu", reason='needs TPUs\' compiler: pip install "rlvr_jax[tpu]"')

LENGTHS = "lognormal(mean=3)"


@pytest.fixture(autouse=True)
def without_flags_of_cpus(monkeypatch):
  """libtpu ends the process at a flag of XLA that it does not know; jax has read its own by now."""
  assert jax.devices()[0].platform == "cpu"
  monkeypatch.delenv("XLA_FLAGS")


@pytest.mark.slow
def test_a_search_that_was_stopped_continues_and_repeats_no_compilation(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(tune, "_MAX_ROWS", 1)
  run = lambda: tune.tune(tiny.config(), "v5e:1x1", tmp_path, lengths=LENGTHS)
  overrides = run()
  first = capsys.readouterr().out
  assert len(re.findall("update, compiled in", first)) == 4  # with other options, and other rows
  assert len(re.findall("generation, compiled in", first)) == 1
  compiled = sorted((tmp_path / "compiled").iterdir())
  compiled[0].unlink()  # as if it had been stopped before
  assert run() == overrides
  assert len(re.findall("compiled in", capsys.readouterr().out)) == 1
  assert sorted((tmp_path / "compiled").iterdir()) == compiled
  result = json.loads((tmp_path / "tune_v5e_1x1.json").read_text())
  assert result["overrides"] == overrides and result["lengths"] == LENGTHS
  assert 0 < result["step_seconds"]["overlapped"] < result["step_seconds"]["in_turn"]
  table = (tmp_path / "tune_v5e_1x1.md").read_text()
  assert f"--config.model.overrides.remat='{overrides['model.overrides.remat']}'" in table
  # They are a configuration that runs; a CPU has no options of TPUs.
  options = overrides.pop("compiler_options.training")
  assert options in tune.COMPILER_OPTIONS.values()
  config = tune.apply_overrides(tiny.config(), overrides)
  assert config.batch.tokens_per_row == overrides["batch.tokens_per_row"]


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (dict(topology=None), "--mode=tune needs --topology"),
    (dict(topology="v5e:1x1", lengths="logn(mean=3)"), "--lengths = 'logn.*did you mean"),
    (dict(topology="v5x:1x1"), "peak FLOP/s and bytes/s of chip 'v5x' are not known"),
    (dict(topology="v5e:2x2"), "config.mesh = .* is 1 devices, but --topology=v5e:2x2 has 4"),
  ],
)
def test_what_is_refused_before_anything_is_compiled(flags, message, tmp_path):
  arguments = dict(topology="v5e:1x1", lengths=None) | flags
  with pytest.raises(ValueError, match=message):
    choose.prepare_command("tune", tiny.config(), str(tmp_path), None, **arguments)


def test_a_network_that_no_setting_fits_ends_with_a_message(tmp_path):
  """The command itself: no traceback."""
  command = [sys.executable, "-m", "rlvr_jax.main", "--mode=tune", f"--workdir={tmp_path}"]
  command += ["--config=configs/full_size/fade_qwen25_7b.py", "--config.mesh.fsdp=1"]
  command += ["--topology=v5e:1x1"]
  ended = subprocess.run(command, check=False, capture_output=True, text=True)
  assert ended.returncode == 1 and "Traceback" not in ended.stderr
  assert "error: --topology=v5e:1x1: no setting of the update fits into 15.75 GiB" in ended.stderr


def test_lengths_are_of_costs_and_tune():
  with pytest.raises(ValueError, match="--lengths goes with --mode=costs or tune"):
    choose.prepare_command("train", tiny.config(), "runs/x", None, None, lengths="longest")


@pytest.mark.parametrize(
  "fields",
  [dict(schedule="asynchronous"), dict(generation_mesh__data=1, mesh__data=1)],
  ids=["real_time", "separate"],
)
def test_generation_beside_updates_is_not_tuned(fields, tmp_path):
  message = r"take turns on all chips, but .* updates, set --config\.schedule='on_policy"
  with pytest.raises(ValueError, match=message):
    choose.prepare_command("tune", tiny.config(**fields), str(tmp_path), None, "v5e:1x1")
