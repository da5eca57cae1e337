"""The package as installed: what it needs, what it holds, and that it runs without a checkout."""

import distutils.core
import functools
import os
import subprocess
import sys

import jax
import pytest
import setuptools  # noqa: F401  (its setup, not that of distutils, is what setup.py calls)
from packaging.requirements import Requirement
from train import tiny

from rlvr_jax.models import cannot_import

# What Google Colab had installed in November 2026, on Python 3.13.
COLAB = {
  "absl-py": "1.4.0",
  "chex": "0.1.90",
  "flax": "0.11.2",
  "fsspec": "2025.3.0",
  "jax": "0.7.2",
  "matplotlib": "3.10.0",
  "numpy": "2.1.3",
  "orbax-checkpoint": "0.12.4",
  "tqdm": "4.67.1",
}
CONFIGS = tiny.ROOT / "configs"
OWN_CONFIG = """
from rlvr_jax.configs import base, quickstart

def get_config():
  print("base of", base.__file__)
  c = quickstart.get_config()
  assert set(c) == set(base.get_config())
  c.num_updates = 2
  c.model.overrides = dict(num_layers=1, width=32, mlp_width=64, unroll_layers=1)
  c.batch.prompts, c.batch.group_size = 4, 4
  c.warm_start.num_steps = 2
  c.task.kwargs.held_out_size = c.evaluation.batch_prompts = 8
  return c
"""


@functools.cache
def requirements():
  distribution = distutils.core.run_setup(str(tiny.ROOT / "setup.py"), stop_after="init")
  plot = distribution.extras_require["plot"]
  return [Requirement(text) for text in [*distribution.install_requires, *plot]]


def test_an_install_replaces_nothing_that_colab_has():
  needed = {requirement.name: requirement.specifier for requirement in requirements()}
  assert set(COLAB) <= set(needed)
  assert {name: v for name, v in COLAB.items() if not needed[name].contains(v)} == {}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """What an installation puts in place, in a folder of its own."""
  folder = tmp_path_factory.mktemp("built")
  built = ["build", f"--build-base={folder}", f"--build-lib={folder / 'lib'}"]
  subprocess.run([sys.executable, "setup.py", "--quiet", *built], cwd=tiny.ROOT, check=True)
  return folder / "lib"


def test_it_holds_every_module_and_recipe(installed):
  found = {str(path.relative_to(installed)) for path in installed.rglob("*.*")}
  modules = {str(path.relative_to(tiny.ROOT)) for path in (tiny.ROOT / "rlvr_jax").rglob("*.py")}
  recipes = {f"rlvr_jax/{path.relative_to(tiny.ROOT)}" for path in CONFIGS.rglob("*.py")}
  assert found == modules | recipes | {"rlvr_jax/py.typed"} and len(recipes) > 20
  assert "rlvr_jax/configs/full_size/base.py" in found


@pytest.mark.slow
def test_it_runs_a_config_of_ones_own_on_a_recipe(installed, tmp_path):
  config_file = tmp_path / "mine.py"
  config_file.write_text(OWN_CONFIG)
  done = subprocess.run(
    tiny.command(tmp_path / "run", config_file=config_file),
    cwd=tmp_path,
    env=tiny.environment(PYTHONPATH=str(installed)),
    capture_output=True,
    text=True,
    timeout=tiny.TIMEOUT_S,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert f"base of {installed}" in done.stdout
  assert [record["step"] for record in tiny.records(tmp_path / "run", "train")] == [1, 2]


def test_a_flax_that_jax_has_left_behind(tmp_path):
  """As flax 0.12.8 with jax 0.11.1; the other pairs that fail raise ImportError instead."""
  (tmp_path / "flax").mkdir()
  (tmp_path / "flax" / "__init__.py").write_text("import jax\njax.experimental.NoSuchType")
  recipe = str(CONFIGS / "base.py")
  path = f"{tmp_path}{os.pathsep}{tiny.environment()['PYTHONPATH']}"
  done = tiny.run(tmp_path / "run", config_file=recipe, expect=1, PYTHONPATH=path)
  last = done.strip().splitlines()[-1]
  assert last.startswith("error: flax ") and "has no attribute 'NoSuchType'" in last
  assert last.endswith(f"pip install --upgrade flax jax=={jax.__version__}")
  text = cannot_import("0.12.8", "0.11.1", AttributeError("no MutableHiType"))
  assert text.startswith("flax 0.12.8 cannot be imported with jax 0.11.1 (no MutableHiType): ")
