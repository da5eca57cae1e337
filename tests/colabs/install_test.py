"""What the notebooks install on Colab."""

import subprocess
import sys

import pytest

from colabs import execute, install

TEXTS = [
  "numpy>=2.1",
  'reasoning-gym>=0.1.25; extra == "reasoning-gym"',  # as metadata spell it
  "Orbax_Checkpoint>=0.12.4",
  'matplotlib>=3.10; extra == "plot"',
  'ruff>=0.17; extra == "dev"',
  'tomli>=2; python_version < "3"',
]


def test_only_what_is_absent_is_installed():
  requirements = install.needed(TEXTS)
  assert [r.name for r in requirements] == [
    "numpy", "reasoning-gym", "Orbax_Checkpoint", "matplotlib"
  ]  # fmt: skip
  present = {"numpy": "2.1.3", "orbax-checkpoint": "0.11.1", "torch": "2.6.0+cu124"}
  assert install.lacking(requirements, present) == ["matplotlib>=3.10", "reasoning-gym>=0.1.25"]
  assert install.too_old(requirements, present) == [
    "Orbax_Checkpoint 0.11.1 is installed, rlvr_jax is tested with >=0.12.4"
  ]


def test_it_sees_what_is_installed_here():
  present = install.installed()
  assert "absl-py" in present and present["pytest"] == pytest.__version__


@pytest.mark.soak
def test_nothing_that_is_installed_changes(tmp_path):
  """Needs a package index: the script in an environment that has an old tqdm and absl."""
  subprocess.run([sys.executable, "-m", "venv", tmp_path / "colab"], check=True)
  python = tmp_path / "colab" / "bin" / "python"
  pip = [python, "-m", "pip", "--disable-pip-version-check"]
  had = ["absl-py==1.4.0", "packaging==24.2", "setuptools==75.2.0", "tqdm==4.67.1", "numpy==2.1.3"]
  subprocess.run([*pip, "install", "--quiet", "jax==0.7.2", *had], check=True)
  listed = [*pip, "list", "--format=freeze"]
  before = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
  subprocess.run([python, execute.FOLDER / "install.py"], check=True, cwd=tmp_path)
  after = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
  assert set(before) < set(after) and set(had) <= set(before)
  subprocess.run([python, "-c", "import rlvr_jax.train.loop"], check=True, cwd=tmp_path)
