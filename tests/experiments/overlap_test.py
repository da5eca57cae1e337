"""The benchmark of overlap: what its ratios say, what it counts, what it leaves out."""

import importlib.util
import json
import pathlib
import time

import jax
import pytest

from rlvr_jax.rewards import Outcome

_FILE = pathlib.Path(__file__).parents[2] / "experiments" / "benchmarks" / "overlap.py"


@pytest.fixture(scope="session")  # its flags can be defined once in a process
def module():
  spec = importlib.util.spec_from_file_location("overlap", _FILE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def records(module, *, generate, grade, optimise, between):
  """As of a run whose first updates compile and whose last record comes at once."""
  made, elapsed = [], 100.0
  for step in range(1, 13):
    odd = step <= module._SKIPPED or step == 12
    elapsed += 50.0 if odd else between
    phases = dict(generate=generate, grade=grade, optimise=optimise)
    made.append(
      {f"time/{k}_seconds": v * (50 if odd else 1) for k, v in phases.items()}
      | {"step": step, "time/elapsed_seconds": elapsed, "staleness/mean": 1.0}
    )
  return made


def test_ratios_by_hand(module):
  phases = dict(generate=1.0, grade=3.0, optimise=1.0)
  sequential = module.mean_seconds(records(module, **phases, between=5.0))
  assert sequential == pytest.approx(
    {"s per update": 5.0, **phases, "sync_weights": 0.0, "idle": 0.0, "lag": 1.0}
  )
  other = module.mean_seconds(records(module, **phases, between=3.5))
  found = module.add_ratios(other, sequential)
  assert found["of sequential"] == pytest.approx(0.7)
  assert found["longest phase alone"] == pytest.approx(0.6)
  assert found["of the saving"] == pytest.approx(0.75)
  assert module.add_ratios(sequential, sequential)["of the saving"] is None


def test_compilations_are_counted(module):
  with module.record_compilations() as inside:
    double = jax.jit(lambda x: 2 * x)
    double(1.0), double(2.0)
    assert len(inside) == 1 and inside[0] > 0
    double(1)
    assert len(inside) == 2
  double(1j)
  assert len(inside) == 2


def test_rows_are_measured_in_turn_and_kept(module, tmp_path):
  order = []

  def measure(name):
    order.append(name)
    return {"ratio": float(len(order)), "none": None, "count": 8}

  found = module.measure_in_turn("ab", measure, repeats=2)
  assert order == [*"abba"]
  text = module.write_report(tmp_path, {"overlap": found}, "the command")
  assert "command: the command" in text
  assert "| a | 2.5000 | – | 8 |" in text and "| b | 2.5000 | – | 8 |" in text
  saved = json.loads((tmp_path / "overlap_cpu.json").read_text())["repeats"]["overlap"]
  assert [row["ratio"] for row in saved["a"]] == [1.0, 4.0]


def test_grading_sleeps(module, monkeypatch):
  monkeypatch.setenv(module.slow_grader.SECONDS, "0.05")
  began = time.monotonic()
  assert module.slow_grader.slow("", {}).outcome is Outcome.UNPARSEABLE
  assert time.monotonic() - began >= 0.05
