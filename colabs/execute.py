"""Runs notebooks from top to bottom and writes them with their outputs, as they are committed.

  python -m colabs.execute colabs/first_run.ipynb ...
  python -m colabs.execute --address

The second form runs nothing. It writes the badge and the cell `setup` of every notebook for
`REPOSITORY`, the one place that holds the repository's address.
"""

from __future__ import annotations

import base64
import io
import os
import pathlib
import re
import sys
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = pathlib.Path(__file__).parent
REPOSITORY = "OWNER/rlvr_jax"  # on GitHub; OWNER stands for whoever publishes it
SETUP = f"""import sys

# On Colab alone: installs the package and what Colab lacks, and changes nothing that Colab has.
REPOSITORY = "https://github.com/{REPOSITORY}"
if "google.colab" in sys.modules:
  !git clone --quiet {{REPOSITORY}} checkout
  !{{sys.executable}} checkout/colabs/install.py
  %cd checkout/colabs"""
_BADGE = re.compile(r"^\[!\[Open in Colab\].*$", re.MULTILINE)
_ONE_CORE = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def badge(name: str) -> str:
  """Markdown of the badge that opens colabs/`name` on Colab."""
  picture = "https://colab.research.google.com/assets/colab-badge.svg"
  link = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/colabs/{name}"
  return f"[![Open in Colab]({picture})]({link})"


def address(notebook: Any, name: str) -> None:
  """Writes the badge into the first cell, and the text of the second, which installs."""
  first, second = notebook.cells[:2]
  first.source, written = _BADGE.subn(lambda _: badge(name), first.source)
  if written != 1 or second.metadata.get("tags") != ["setup"]:
    raise ValueError(
      f"{name}: {written} badges in the first cell, or no tag 'setup' on the second;"
      " begin with Markdown that has one badge, then a code cell with the tag 'setup'"
    )
  second.source = SETUP


def execute(path: pathlib.Path) -> None:
  """Runs the notebook in its folder on one CPU core and one device, and writes it tidied."""
  notebook = nbformat.read(path, as_version=4)
  address(notebook, path.name)
  # Level 3: XLA's alarm about slow compilation is about the machine, not about the notebook.
  os.environ |= {"XLA_FLAGS": _ONE_CORE, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
  # The kernel finds the package of this checkout first.
  paths = (str(FOLDER.parent), os.environ.get("PYTHONPATH", ""))
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
  NotebookClient(
    notebook, timeout=3600, resources={"metadata": {"path": str(path.parent)}}
  ).execute()
  tidy(notebook)
  nbformat.write(notebook, path)


def tidy(notebook: Any) -> None:
  """Drops what differs between machines, and makes the pictures small."""
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
  for number, cell in enumerate(notebook.cells):
    cell.id = f"cell-{number:02}"
    cell.metadata = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
    if any("<iframe" in o.get("data", {}).get("text/html", "") for o in cell.get("outputs", [])):
      cell.outputs = []  # a whole page, which GitHub would not show
    for output in cell.get("outputs", []):
      if "image/png" in output.get("data", {}):
        output.data["image/png"] = _small(output.data["image/png"])


def _small(png: str) -> str:
  """The picture in base64, with at most 256 colors: a third of the bytes, and nothing to see."""
  with Image.open(io.BytesIO(base64.b64decode(png))) as image:
    palette = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
  stream = io.BytesIO()
  palette.save(stream, "PNG", optimize=True)
  return base64.b64encode(stream.getvalue()).decode()


def main(arguments: list[str]) -> None:
  if arguments != ["--address"]:
    for argument in arguments:
      execute(pathlib.Path(argument))
    return
  for path in sorted(FOLDER.glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    address(notebook, path.name)
    nbformat.write(notebook, path)


if __name__ == "__main__":
  main(sys.argv[1:])
