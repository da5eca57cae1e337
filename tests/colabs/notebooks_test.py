"""Every notebook runs from top to bottom, on Colab too, and its committed outputs are clean."""

import json
import re

import nbformat
import pytest

from colabs import execute, notebooks

CHEAPEST = "first_run"  # with few updates
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/$\\])/\w[\w.-]*/|[A-Z]:\\\\")
each = pytest.mark.parametrize("name", notebooks.NAMES)


# --- execution ------------------------------------------------------------------------------------


def check_runs(name, tmp_path, monkeypatch, **parameters):
  committed, notebook = notebooks.read(name), notebooks.read(name)
  notebooks.set_parameters(notebook, **parameters)
  notebook = notebooks.run(notebook, tmp_path, monkeypatch)
  assert notebooks.complaints(notebook) == []
  assert notebooks.pictures(notebook) == notebooks.pictures(committed)


@pytest.mark.soak
@each
def test_it_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
  check_runs(name, tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_cheapest_runs_from_top_to_bottom(tmp_path, monkeypatch):
  check_runs(CHEAPEST, tmp_path, monkeypatch, UPDATES=12)


# --- what it holds --------------------------------------------------------------------------------


@each
def test_it_imports_what_the_package_needs_alone(name):
  found = notebooks.imported(notebooks.read(name))
  assert {"sys", "rlvr_jax", "matplotlib"} <= found
  assert found <= {"sys", "rlvr_jax", "matplotlib", "numpy", "jax", "functools", "tempfile"}


@each
def test_it_begins_with_badge_install_imports_parameters(name):
  cells = notebooks.read(name).cells
  assert cells[0].cell_type == "markdown"
  title, *text = cells[0].source.splitlines()
  assert title.startswith("# ") and execute.badge(f"{name}.ipynb") in text
  assert cells[1].source == execute.SETUP and cells[1].metadata.tags == ["setup"]
  assert {type(node).__name__ for node in notebooks.parsed(cells[2]).body} <= {
    "Import", "ImportFrom", "Expr"
  }  # fmt: skip
  assert "figures.set_style()" in cells[2].source
  code = [cell for cell in cells if cell.cell_type == "code"]
  assert code[2].metadata.tags == ["parameters"]
  for line in code[2].source.splitlines():
    assert re.fullmatch(r"[A-Z_]+ = .*  # ?@param.*|# .*", line), line


def test_the_setup_installs_on_colab_alone():
  kinds = [type(node).__name__ for node in notebooks.parsed(_code(execute.SETUP)).body]
  assert kinds == ["Import", "Assign", "If"]
  _, condition, *installing = execute.SETUP.partition("if ")[2].partition("\n")
  assert execute.SETUP.count('if "google.colab" in sys.modules:\n') == 1
  assert condition and all(line[:3] in ("  !", "  %") for line in installing[0].splitlines())


def _code(source):
  return nbformat.v4.new_code_cell(source)


# --- committed outputs ----------------------------------------------------------------------------


@each
def test_the_committed_outputs_are_those_of_one_clean_run(name):
  notebook = notebooks.read(name)
  counts = [cell.execution_count for cell in notebooks.code_cells(notebook)]
  assert counts == list(range(1, len(counts) + 1))
  assert notebooks.complaints(notebook) == []
  assert notebooks.pictures(notebook) >= 4
  assert (notebooks.FOLDER / f"{name}.ipynb").stat().st_size < 1_000_000


@each
def test_the_committed_file_names_no_place_or_machine(name):
  notebook = notebooks.read(name)
  assert set(notebook.metadata) == {"kernelspec", "language_info"}
  assert notebook.metadata.kernelspec.name == "python3"
  for output in notebooks.outputs(notebook):
    output.get("data", {}).pop("image/png", None)
  cells = json.dumps(notebooks.code_cells(notebook), ensure_ascii=False)
  assert ABSOLUTE_PATH.findall(cells) == []
