"""The package as installed: what it needs, what it holds, and that it runs without a checkout."""

import distutils.core
import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile

import jax
import pytest
import setuptools  # noqa: F401  (its setup, not that of distutils, is what setup.py calls)
from packaging.requirements import Requirement
from train import tiny

import rlvr_jax
from rlvr_jax.models import describe_import_error

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
LARGEST = 1.5e6  # bytes of the wheel
OWN_CONFIG = """
from rlvr_jax.configs import base, quickstart

def get_config():
  print("base of", base.__file__)
  c = quickstart.get_config()
  assert set(c) == set(base.get_config())
  c.num_updates = 2
  c.model.overrides = dict(num_layers=1, width=32, mlp_width=64, unroll_layers=1)
  c.batch.prompts, c.batch.group_size = 4, 4
  c.warm_start.num_steps = 0
  c.evaluation.batch_prompts = 8
  c.task = dict(name="mine:doubles", kwargs=dict(count=40))
  c.advantage, c.loss, c.optimizer = "mine:centered", "mine:plain", "mine:descent(momentum=0.5)"
  c.grading.grader = "mine_graded:short(limit=3)"
  return c
"""
OWN_MODULE = """
import jax.numpy as jnp
import optax
from rlvr_jax.advantages import stateless
from rlvr_jax.data import Problem, Task
from rlvr_jax.data.sources import Chosen
from rlvr_jax.losses import token_loss

def doubles(*, count):
  made = [Problem(f"2*{i}=", str(2 * i), "", {"dataset": "doubles"}) for i in range(count)]
  train, held_out = Chosen.of(made[8:]), Chosen.of(made[:8])
  return Task("doubles", train, Chosen.of(()), held_out, "mine_graded:short")

def centered():
  return stateless(lambda batch: batch.rewards - batch.rewards.mean(axis=1, keepdims=True))

def plain():
  return token_loss(lambda x: (-x.coefficients * x.policy_logprobs, jnp.zeros_like(x.mask)))

def descent(learning_rate, *, momentum):
  return optax.sgd(learning_rate, momentum)
"""
OWN_GRADER = "def short(completion, reference, *, limit=2): return len(completion) <= limit\n"


@functools.cache
def distribution():
  return distutils.core.run_setup(str(tiny.ROOT / "setup.py"), stop_after="init")


def requirements():
  plot = distribution().extras_require["plot"]
  return [Requirement(text) for text in [*distribution().install_requires, *plot]]


def test_an_install_replaces_nothing_that_colab_has():
  needed = {requirement.name: requirement.specifier for requirement in requirements()}
  assert set(COLAB) <= set(needed)
  assert {name: v for name, v in COLAB.items() if not needed[name].contains(v)} == {}


def setup(source, *command):
  subprocess.run([sys.executable, "setup.py", "--quiet", *command], cwd=source, check=True)


def built(source, folder):
  """What an installation puts in place, in a folder of its own."""
  setup(source, "build", f"--build-base={folder}", f"--build-lib={folder / 'lib'}")
  return folder / "lib"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  return built(tiny.ROOT, tmp_path_factory.mktemp("built"))


def test_the_version_is_that_of_the_package():
  assert distribution().get_version() == rlvr_jax.__version__


def test_the_description_has_no_link_that_an_index_cannot_follow():
  text = distribution().get_long_description()
  assert re.findall(r"\]\((?!https:|#)[^)]*\)", text) == []
  assert "[experiment]" not in text and "experiment)." in text


def test_messages_name_extras_and_pages_that_there_are():
  """An extra's command is the same for a wheel and a checkout, which -e "." is not."""
  code = [path.read_text(encoding="utf-8") for path in tiny.ROOT.glob("rlvr_jax/**/*.py")]
  named = {extra for text in code for extra in re.findall(r"rlvr_jax\[([\w,-]+)\]", text)}
  assert len(named) > 8 and not any("pip install -e" in text for text in code)
  assert {one for text in named for one in text.split(",")} <= set(distribution().extras_require)
  pages = {name for text in code for name in re.findall(r"rlvr_jax\.page\(.([\w.]+).\)", text)}
  assert len(pages) > 3 and all(os.path.isfile(rlvr_jax.page(name)) for name in pages)


def test_it_holds_every_module_and_recipe(installed):
  found = {str(path.relative_to(installed)) for path in installed.rglob("*.*")}
  modules = {str(path.relative_to(tiny.ROOT)) for path in (tiny.ROOT / "rlvr_jax").rglob("*.py")}
  recipes = {f"rlvr_jax/{path.relative_to(tiny.ROOT)}" for path in CONFIGS.rglob("*.py")}
  data = tiny.ROOT / "rlvr_jax" / "data"
  templates = [*(data / "chat_templates").iterdir(), *(data / "tools").iterdir()]
  pages = (tiny.ROOT / "rlvr_jax" / "view").glob("page.*")
  documents = (tiny.ROOT / "docs").rglob("*.md")
  others = {f"rlvr_jax/{path.relative_to(tiny.ROOT)}" for path in documents}
  others |= {"rlvr_jax/py.typed", "rlvr_jax/codejudge/README.md"}
  others |= {str(path.relative_to(tiny.ROOT)) for path in (*templates, *pages)}
  assert found == modules | recipes | others and len(recipes) > 20
  assert {"rlvr_jax/configs/full_size/base.py", "rlvr_jax/docs/methods/grpo.md"} <= found


def test_its_pages_lead_to_what_it_holds(installed):
  """Of other files of the repository only the names stay."""
  kept = {"modules": 0, "recipes": 0, "plain": 0}
  for page in (installed / "rlvr_jax" / "docs").rglob("*.md"):
    text = page.read_text(encoding="utf-8")
    source = tiny.ROOT / "docs" / page.relative_to(installed / "rlvr_jax" / "docs")
    lost = [to for to in links(source.read_text(encoding="utf-8")) if not to.endswith(".png")]
    for target in links(text):
      assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"
      kept["modules"] += target.endswith(".py") and "configs/" not in target
      kept["recipes"] += "configs/" in target
    kept["plain"] += len(lost) - len(links(text))
    assert all(name in text for name in re.findall(r"\[([^][`]+)\]\(\.\./experiments", text))
  assert kept["modules"] > 40 and kept["recipes"] > 8 and kept["plain"] > 60
  first = (installed / "rlvr_jax" / "docs" / "index.md").read_text(encoding="utf-8")
  assert "(install.md)" in first and "](../" not in first


def links(text):
  """Links of a page to files."""
  return re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", text)


def test_it_is_small(installed, tmp_path):
  wheel = shutil.make_archive(str(tmp_path / "wheel"), "zip", installed)
  assert os.path.getsize(wheel) < LARGEST


@pytest.mark.slow
def test_the_source_distribution_gives_the_same_package(installed, tmp_path):
  setup(tiny.ROOT, "egg_info", f"--egg-base={tmp_path}", "sdist", f"--dist-dir={tmp_path}")
  (archive,) = tmp_path.glob("*.tar.gz")
  with tarfile.open(archive) as file:
    file.extractall(tmp_path, filter="data")
  again = built(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "built")
  files = lambda folder: {
    path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
  }
  assert files(again) == files(installed)


def pip(*arguments, python=sys.executable):
  # With a checkout on PYTHONPATH, pip would find the package installed already.
  variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
  subprocess.run([python, "-m", "pip", "--quiet", *map(str, arguments)], check=True, env=variables)


@pytest.mark.slow
def test_the_command_runs_ones_own_components_from_any_folder(tmp_path):
  """Task, grader, advantage, loss and optimizer of modules in the folder where it is started."""
  pip("install", "--no-deps", "--no-build-isolation", f"--prefix={tmp_path / 'to'}", tiny.ROOT)
  (packages,) = (tmp_path / "to").glob("lib/python*/site-packages")
  (tmp_path / "work").mkdir()
  for name, text in {
    "config.py": OWN_CONFIG, "mine.py": OWN_MODULE, "mine_graded.py": OWN_GRADER
  }.items():  # fmt: skip
    (tmp_path / "work" / name).write_text(text)
  started = functools.partial(
    subprocess.run,
    env=tiny.environment(PYTHONPATH=str(packages)),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=tiny.TIMEOUT_S,
  )
  command = [tmp_path / "to" / "bin" / "rlvr_jax", f"--config={tmp_path}/work/config.py"]
  done = started([*command, "--workdir=run"], cwd=tmp_path / "work")
  assert done.returncode == 0, done.stdout
  assert f"base of {packages}" in done.stdout
  assert [record["step"] for record in tiny.records(tmp_path / "work/run", "train")] == [1, 2]
  elsewhere = started([*command, "--workdir=run"], cwd=tmp_path)
  assert elsewhere.returncode == 1 and not (tmp_path / "run").exists()
  assert (
    "No module named 'mine'; start the program in the folder of 'mine', set PYTHONPATH"
    in (elsewhere.stdout.splitlines()[-1])
  )
  shown = started([command[0], "--help"], cwd=tmp_path).stdout
  assert "Trains, evaluates or exports a policy" in shown and "--workdir:" in shown


@pytest.mark.soak
def test_the_wheel_in_an_empty_environment(tmp_path):
  """Needs a package index. The quickstart's command starts in a folder without a checkout."""
  pip("wheel", "--no-deps", f"--wheel-dir={tmp_path}", tiny.ROOT)
  subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
  python = tmp_path / "empty" / "bin" / "python"
  (wheel,) = tmp_path.glob("*.whl")
  pip("install", f"{wheel}[reasoning-gym]", python=python)
  pip("check", python=python)
  short = ["--config.num_updates=2", "--config.warm_start.num_steps=2"]
  subprocess.run(
    [python.with_name("rlvr_jax"), "--config=quickstart", "--workdir=run", *short],
    cwd=tmp_path,
    env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    check=True,
    timeout=tiny.TIMEOUT_S,
  )
  assert [record["step"] for record in tiny.records(tmp_path / "run", "train")] == [1, 2]


def test_a_flax_that_jax_has_left_behind_is_described():
  """As flax 0.12.8 with jax 0.11.1; the other pairs that fail raise ImportError instead."""
  text = describe_import_error("0.12.8", "0.11.1", AttributeError("no MutableHiType"))
  assert text.startswith("flax 0.12.8 cannot be imported with jax 0.11.1 (no MutableHiType): ")


@pytest.mark.slow
def test_a_flax_that_jax_has_left_behind(tmp_path):
  (tmp_path / "flax").mkdir()
  (tmp_path / "flax" / "__init__.py").write_text("import jax\njax.experimental.NoSuchType")
  recipe = str(CONFIGS / "base.py")
  path = f"{tmp_path}{os.pathsep}{tiny.environment()['PYTHONPATH']}"
  done = tiny.run(tmp_path / "run", config_file=recipe, expect=1, PYTHONPATH=path)
  last = done.strip().splitlines()[-1]
  assert last.startswith("error: flax ") and "has no attribute 'NoSuchType'" in last
  assert last.endswith(f"pip install --upgrade flax jax=={jax.__version__}")
