"""Reading and running the notebooks of colabs/, for their tests."""

import ast
import os
import pathlib
import re

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parents[2] / "colabs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
  return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(notebook, tag):
  (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", []))
  return cell


def set_parameters(notebook, **values):
  """Writes other values into the cell of parameters, each of which has to be there."""
  cell = tagged(notebook, "parameters")
  for name, value in values.items():
    line = re.compile(rf"^{name} = .*$", re.MULTILINE)
    cell.source, changed = line.subn(f"{name} = {value!r}", cell.source)
    assert changed == 1, f"no parameter {name}"


def outputs(notebook):
  return [output for cell in code_cells(notebook) for output in cell.outputs]


def pictures(notebook):
  return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def printed(notebook):
  return "".join(output.text for output in outputs(notebook) if output.output_type == "stream")


def complaints(notebook):
  """Errors, and whatever was written to stderr."""
  return [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]


def parsed(cell):
  """The syntax tree of a cell, shell commands and all; of a captured cell that of its code."""
  source = cell.source.removeprefix("%%capture\n")
  return ast.parse(TransformerManager().transform_cell(source))


def imported(notebook):
  """The packages that the cells import: a of `import a.b` and of `from a.b import c`."""
  modules = set()
  for cell in code_cells(notebook):
    for node in ast.walk(parsed(cell)):
      if isinstance(node, ast.Import):
        modules |= {alias.name.split(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        assert node.level == 0
        modules.add(node.module.split(".")[0])
  return modules


def run(notebook, tmp_path, monkeypatch):
  """Runs a notebook in its folder, as a user would: on one device."""
  one_device = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
  monkeypatch.setenv("XLA_FLAGS", one_device)
  monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
  monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")  # no alarm where a busy machine compiles slowly
  # It says of Python 3.11 that it will end.
  library = "google.api_core._python_version_support"
  monkeypatch.setenv("PYTHONWARNINGS", f"ignore::FutureWarning:{library}")
  for folder in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
    monkeypatch.setenv(folder, str(tmp_path / folder))
  client = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(FOLDER)}})
  return client.execute()
