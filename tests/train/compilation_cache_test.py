"""A run keeps what it compiled in its workdir, and a rerun loads it, with the same numbers."""

import re

import pytest
from train import tiny

# Compiled while the configuration is checked, before the workdir is touched.
BEFORE = {"stage", "_threefry_seed"}
# A restored checkpoint's checksums, which the run that wrote it did not need in this form.
OF_RESTORING = {"_checksums"}


@pytest.fixture(autouse=True)
def no_cache_given(monkeypatch):
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.setenv("JAX_LOG_COMPILES", "1")


def run(workdir, num_updates, **variables):
  """Names of the programs that were compiled, not loaded."""
  rate = "--config.learning_rate=constant(peak=0.003, warmup=3)"  # that of a longer run, too
  flags = (rate, f"--config.num_updates={num_updates}")
  output = tiny.run(workdir, *flags, **variables)
  hits = re.findall(r"compilation cache hit for 'jit_(\w+)'", output)
  compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", output)
  for name in hits:
    compiled.remove(name)
  return set(compiled) - BEFORE


@pytest.mark.slow
@tiny.needs_compile_log
def test_a_rerun_compiles_nothing(tmp_path):
  assert {"burst", "train_step"} < run(tmp_path / "run", 2)
  assert run(tmp_path / "run", 4) <= OF_RESTORING
  assert tiny.records(tmp_path / "run")[-1]["step"] == 4


@pytest.mark.slow
def test_loaded_programs_give_the_same_bits_and_torn_ones_are_compiled_anew(tmp_path):
  off = dict(JAX_ENABLE_COMPILATION_CACHE="false")
  for num_updates in (4, 8):
    run(tmp_path / "run", num_updates)
    run(tmp_path / "uncached", num_updates, **off)
  assert not (tmp_path / "uncached" / "compilation_cache").exists()
  assert tiny.outcome(tmp_path / "run") == tiny.outcome(tmp_path / "uncached")
  for path in (tmp_path / "run" / "compilation_cache").iterdir():
    tiny.cut(path)  # as a kill in the middle of writing would
  assert "train_step" in run(tmp_path / "run", 12)
  run(tmp_path / "uncached", 12, **off)
  assert tiny.outcome(tmp_path / "run") == tiny.outcome(tmp_path / "uncached")
