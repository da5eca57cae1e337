"""The pages of docs/: their commands are ones that the program takes, their code runs."""

import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys
import types

import install_test
import program_flags
import pytest
from absl import flags
from ml_collections import ConfigDict
from train import tiny

from docs import configuration, snippets, website
from rlvr_jax import main
from rlvr_jax.configs import base
from rlvr_jax.train.setup import config_file

ROOT = pathlib.Path(__file__).parents[2]
CARDS = sorted(path for path in (ROOT / "docs" / "methods").glob("[a-z]*.md"))
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
PROGRAM = re.compile(r"(python -m rlvr_jax\.main|rlvr_jax) ")
COMMANDS = [
  (page, command)
  for page in PAGES
  for command in snippets.page(page).commands
  if not page.startswith(("your_", "parts"))  # their own tests run them, on files that they write
]
QUICK = [
  *("--config.num_updates=2", "--config.warm_start.num_steps=2", "--config.evaluation.every=2"),
  *("--config.batch.prompts=8", "--config.task.kwargs.held_out_size=16"),
]


# --- commands -------------------------------------------------------------------------------------


def of_another_program(name, module):
  return name != "config" and not module.startswith(("absl", "ml_collections", "rlvr_jax"))


@pytest.fixture(name="in_checkout")
def _in_checkout(monkeypatch):
  """In the root, with flags that nobody has parsed; so it is left."""
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sys, "argv", ["main"])  # ml_collections reads overrides from there
  with program_flags.set_aside(of_another_program):
    yield
  for name in list(flags.FLAGS):
    if name.startswith("config."):
      delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()


def parsed(command):
  """The configuration that the program makes of a command, for a test in the checkout."""
  sys.argv = ["main", *shlex.split(PROGRAM.sub("", command))]
  assert config_file.parse_flags(sys.argv) == ["main"]
  return main._CONFIG.value


@pytest.mark.parametrize("page, command", COMMANDS, ids=[f"{p}: {c[:60]}" for p, c in COMMANDS])
def test_the_program_takes_the_command(page, command, in_checkout):
  if PROGRAM.match(command):
    assert set(base.get_config()) <= set(parsed(command))
    assert flags.FLAGS["workdir"].value.startswith("runs/")
  elif "pip install" in command:
    extras = re.search(r"\[([\w,-]+)\]", command)[1].split(",")
    assert set(extras) <= set(install_test.distribution().extras_require)
  else:
    program, option, code = shlex.split(command)
    assert program == "python" and option in ("-c", "-m")
    if option == "-m":
      assert importlib.util.find_spec(code)
    else:
      exec(compile(code, page, "exec"), {})


# --- code -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_run_and_what_reads_it(tmp_path, monkeypatch, capsys):
  """The commands of the first run, shortened, and the code that reads their workdirs."""
  monkeypatch.chdir(tmp_path)
  commands = snippets.page("first_run.md").commands[:2]
  for command in commands:
    arguments = [*shlex.split(PROGRAM.sub("", command)), *QUICK]
    program = [sys.executable, "-m", "rlvr_jax.main", *arguments]
    subprocess.run(program, env=tiny.environment(), check=True, timeout=tiny.TIMEOUT_S)
  for page in ("first_run.md", "reading_a_run.md"):
    exec(compile(snippets.page(page).code, page, "exec"), {})
  assert (tmp_path / "curves.png").stat().st_size > 1000
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].startswith("0 0.") and printed[1].startswith("2 0.")
  assert len(printed) > 5 and any(word in printed[-1] for word in ("correct", "wrong"))


# --- generated pages and the site -----------------------------------------------------------------


def test_the_reference_of_the_configuration_is_up_to_date():
  assert configuration.PAGE.read_text(encoding="utf-8") == configuration.page(), (
    f"write it by: {configuration.COMMAND}"
  )


def test_the_reference_has_every_field():
  def leaves(config, prefix=""):
    for name, value in config.items():
      deeper = isinstance(value, ConfigDict)
      yield from leaves(value, f"{prefix}{name}.") if deeper else [f"{prefix}{name}"]

  found = {field.name: field for field in configuration.fields()}
  assert set(leaves(base.get_config())) == {name for name, f in found.items() if not f.group}
  assert found["batch.group_size"].comment == "G, rollouts per prompt"
  assert found["sampling.top_k"].comment == found["evaluation.sampling.top_k"].comment != ""


def test_the_api_lists_what_packages_export():
  pages = website.api_pages()
  assert "\n::: rlvr_jax.advantages.fade.fade\n" in pages["api/advantages.md"]
  assert "\n::: rlvr_jax.losses.base.token_loss\n" in pages["api/losses.md"]
  assert "\n::: rlvr_jax.parts.loss_of\n" in pages["api/parts.md"]
  assert "\n::: rlvr_jax.ops.spectral.participation_ratio\n" in pages["api/ops.md"]
  listed = [line for text in pages.values() for line in text.splitlines() if line[:3] == ":::"]
  assert len(listed) > 100 and len(set(listed)) == len(listed)


def test_the_navigation_has_every_page():
  nav = [{"Home": "index.md"}, {"Guides": [{"Models": "experts.md"}, {"More": "others"}]}]
  config = website.on_config(types.SimpleNamespace(nav=nav))
  assert config.nav[0] == {"Home": "index.md"}
  (models, more) = config.nav[1]["Guides"]
  assert models == {"Models": "experts.md"} and {"index.md", "experts.md"}.isdisjoint(more["More"])
  assert {"index.md", "experts.md", *more["More"]} == set(PAGES)


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_a_card_has_one_formula_that_mathml_can_show(card):
  pytest.importorskip("latex2mathml")  # the extra docs
  (source,) = re.findall(r"^```math\n(.*?)^```$", card.read_text(), re.DOTALL | re.MULTILINE)
  markup = website.formula(source)
  rows = source.count(r"\\") + 1 if "align*" in source else 1
  assert "<math" in markup and max(markup.count("<mtr>"), 1) >= rows


def test_a_command_that_mathml_does_not_have_fails_the_build():
  pytest.importorskip("latex2mathml")
  superfences = pytest.importorskip("pymdownx.superfences")
  for source in (r"\no_such_command{x}", r"\begin{aligned} A &= b \end{aligned}"):
    with pytest.raises(superfences.SuperFencesException, match="command of this formula"):
      website.formula(source)
