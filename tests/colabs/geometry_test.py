"""The notebook runs from top to bottom, holds no logic, and its committed outputs are clean."""

import ast
import itertools
import json
import os
import pathlib
import re

import nbformat
import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

from rlvr_jax.train.metrics import MetricWriter

FOLDER = pathlib.Path(__file__).parents[2] / "colabs"
NOTEBOOK = FOLDER / "geometry.ipynb"
PICTURES = 6
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/$\\])/\w[\w.-]*/|[A-Z]:\\\\")


def read():
  return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
  (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", []))
  return cell


def outputs(notebook):
  return [output for cell in code_cells(notebook) for output in cell.outputs]


def pictures(notebook):
  return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def printed(notebook):
  return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def complaints(notebook):
  """Errors, and whatever was written to stderr."""
  return [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]


@pytest.fixture
def execute(tmp_path, monkeypatch):
  """Runs a notebook in its folder, as a user would: on one device."""
  one_device = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
  monkeypatch.setenv("XLA_FLAGS", one_device)
  for folder in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
    monkeypatch.setenv(folder, str(tmp_path / folder))

  def run(notebook):
    client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(FOLDER)}})
    return client.execute()

  return run


# --- execution ------------------------------------------------------------------------------------


@pytest.mark.soak
def test_it_runs_from_a_fresh_tiny_policy(execute):
  notebook = execute(read())
  assert complaints(notebook) == []
  assert pictures(notebook) == PICTURES
  before, _, after = printed(notebook).partition("mean reward")
  assert before == "8 measurements; prompts and rollouts per prompt: (8, 16)\n"
  rewards = [float(number) for number in re.findall(r"0\.\d+", after)]
  assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)  # successes and failures


@pytest.mark.slow
def test_it_runs_from_a_workdir(execute, tmp_path):
  rng = np.random.default_rng(0)
  with MetricWriter(tmp_path, None) as writer:
    for update in (0, 10, 20):
      features = rng.normal(size=(2, 12, 5)).astype(np.float32)
      grams = features @ features.mT
      rewards = rng.integers(0, 2, (3, 4)).astype(np.float32)
      coefficients = rewards - rewards.mean(1, keepdims=True)
      writer.write_geometry(
        update,
        dict(gram=grams[0], gram_compared=grams[1], lengths=np.ones((3, 4), np.float32))
        | dict(rewards=rewards, coefficients=coefficients, reweighted=coefficients),
      )
  notebook = read()
  parameters = tagged(notebook, "parameters")
  parameters.source, changed = re.subn(
    r"WORKDIR = None.*", f"WORKDIR = {str(tmp_path)!r}", parameters.source
  )
  assert changed == 1
  notebook = execute(notebook)
  assert complaints(notebook) == []
  assert pictures(notebook) == PICTURES
  assert printed(notebook).startswith("3 measurements; prompts and rollouts per prompt: (3, 4)\n")


# --- what it holds --------------------------------------------------------------------------------


def logic(source):
  """What a cell holds beside imports, assignments and calls; `a if b else c` passes."""
  tree = ast.parse(TransformerManager().transform_cell(source))
  plain = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
  forbidden = (ast.Lambda, ast.comprehension, ast.NamedExpr, ast.BinOp, ast.BoolOp, ast.Compare)
  found = [node for node in tree.body if not isinstance(node, plain)]
  return found + [node for node in ast.walk(tree) if isinstance(node, forbidden)]


def test_it_holds_no_logic():
  notebook = read()
  setup = tagged(notebook, "setup")
  for cell in code_cells(notebook):
    if cell is not setup:
      assert logic(cell.source) == [], cell.source
  # The first cell has one condition: on Colab, and nowhere else, it installs.
  tree = ast.parse(TransformerManager().transform_cell(setup.source))
  (condition,) = (node for node in tree.body if isinstance(node, ast.If))
  assert ast.unparse(condition.test) == "'google.colab' in sys.modules" and not condition.orelse
  installing = [line for line in setup.source.splitlines() if re.match(r"\s*[!%]", line)]
  assert len(installing) == len(condition.body) == 3
  assert logic(re.sub(r"(?m)^(if|  [!%]).*$", "", setup.source)) == []


@pytest.mark.parametrize(
  "source",
  ["def f(): pass", "class A: pass", "for i in x: f(i)", "x = [f(i) for i in y]", "f = lambda: 0",
   "x = a @ b", "with f(): pass", "if a: f()", "x += 1"],
)  # fmt: skip
def test_the_checker_sees_logic(source):
  assert logic(source)


def test_it_imports_the_package_the_recipes_and_pyplot_alone():
  modules = set()
  for cell in code_cells(read()):
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
      if isinstance(node, ast.Import):
        modules |= {alias.name for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        assert node.level == 0
        modules.add(node.module.split(".")[0])
  assert modules == {"sys", "matplotlib.pyplot", "rlvr_jax"}


def test_a_text_comes_before_every_picture():
  for before, cell in itertools.pairwise(read().cells):
    if "plot_" in cell.source and cell.cell_type == "code":
      assert before.cell_type == "markdown" and "How to read it" in before.source


# --- committed outputs ----------------------------------------------------------------------------


def test_the_committed_outputs_are_those_of_one_clean_run():
  notebook = read()
  counts = [cell.execution_count for cell in code_cells(notebook)]
  assert counts == list(range(1, len(counts) + 1))
  assert complaints(notebook) == []
  assert pictures(notebook) == PICTURES
  assert NOTEBOOK.stat().st_size < 1_000_000


def test_the_committed_file_names_no_place_or_machine():
  notebook = read()
  assert set(notebook.metadata) == {"kernelspec", "language_info"}
  assert notebook.metadata.kernelspec.name == "python3"
  for output in outputs(notebook):
    output.get("data", {}).pop("image/png", None)
  assert ABSOLUTE_PATH.findall(json.dumps(code_cells(notebook), ensure_ascii=False)) == []
  assert ABSOLUTE_PATH.search("saved in '/home/me/run'") and ABSOLUTE_PATH.search("/usr/lib")
