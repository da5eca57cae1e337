"""The stages for a GPU: their limits, and what they find on a CPU in tiny sizes."""

import gzip
import json
import pathlib

import pytest
from train import tiny

from experiments.gpu import __main__ as driver
from experiments.gpu import stages
from rlvr_jax.train.setup.build import make_schedule


def lines(folder):
  return [json.loads(line) for line in (folder / driver.RESULTS).read_text().splitlines()]


def test_stages_write_what_they_find(tmp_path):
  assert driver.main([f"--out={tmp_path}", "--tiny", "--stages=device,model"]) == 0
  device, model = lines(tmp_path)
  assert device["status"] == "ok" and device["kind"] == "cpu"
  assert device["float32, TFLOP/s"] > 0 and device["copy, TB/s"] > 0
  assert model["status"] == "skipped" and "--model" in model["why"]


def test_a_stage_that_hangs_is_killed_and_the_next_one_says_why_it_fails(tmp_path, monkeypatch):
  monkeypatch.setitem(driver.LIMITS, "numerics", 0.2)
  broken = tmp_path / "model"
  broken.mkdir()
  arguments = [f"--out={tmp_path}", f"--model={broken}", "--tiny", "--stages=numerics,model"]
  assert driver.main(arguments) == 1
  numerics, model = lines(tmp_path)
  assert numerics["status"] == "killed after 0.2 s" and numerics["seconds"] < 60
  assert model["status"] == "failed with status 1" and "tokenizer" in model["why"]


@pytest.mark.parametrize("argument", ["--stages=device,other", "--model=nowhere.gguf"])
def test_bad_arguments_are_refused(tmp_path, argument, capsys):
  with pytest.raises(SystemExit):
    driver.main([f"--out={tmp_path / 'new'}", argument])
  assert "allowed: ['device'" in (text := capsys.readouterr().err) or "does not exist" in text
  assert not (tmp_path / "new").exists()


def test_kernels_of_a_trace_are_summed(tmp_path):
  name = lambda kind, pid, tid, text: {
    **dict(ph="M", name=kind, pid=pid, tid=tid, args={"name": text})
  }
  event = lambda pid, tid, kernel, ts, dur: dict(
    ph="X", pid=pid, tid=tid, name=kernel, ts=ts, dur=dur
  )
  events = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
    name("thread_name", 1, 7, "Stream #7"),
    name("thread_name", 1, 8, "Steps"),
    *(event(1, 7, "gemm", ts, 40) for ts in (0, 50)),
    event(1, 7, "add", 90, 10),
    event(1, 8, "step", 0, 1000),
    event(2, 7, "python", 0, 1000),
  ]
  path = tmp_path / "plugins" / "host.trace.json.gz"
  path.parent.mkdir()
  with gzip.open(path, "wt") as file:
    json.dump({"traceEvents": events}, file)
  assert stages.sum_kernels(tmp_path) == {
    "launches": 3,
    "busy": 0.9,
    "ms": {"gemm": 0.08, "add": 0.01},
  }
  assert stages.sum_kernels(pathlib.Path(tmp_path / "empty")) == {}


@pytest.mark.slow
def test_numerics_are_compared_with_float64(tmp_path):
  assert driver.main([f"--out={tmp_path}", "--tiny", "--stages=numerics"]) == 0
  (found,) = lines(tmp_path)
  assert 0 < found["float32, attention auto"]["salt_streaming"] < 3e-5
  assert found["bfloat16, attention auto"]["grpo"] > 1e-3


@pytest.mark.parametrize("name", stages._SYSTEMS)
def test_the_systems_are_configurations(name):
  for num_updates in (2, 60):
    config = tiny.config(num_updates=num_updates)
    config.update_from_flattened_dict(stages._SYSTEMS[name])
    make_schedule(config.schedule, num_updates=num_updates, seed=0)
