"""The documents: links and paths lead to files that are there."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("docs", "experiments", "colabs", "rlvr_jax")
DOCUMENTS = [
  *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
  *sorted(
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".md", ".ipynb")
  ),
]
CARDS = sorted((ROOT / "docs" / "methods").glob("[a-z]*.md"))
each_document = pytest.mark.parametrize("document", DOCUMENTS)


def _text(path):
  """A document's Markdown; of a notebook, that of its Markdown cells."""
  text = path.read_text(encoding="utf-8")
  if path.suffix != ".ipynb":
    return text
  cells = json.loads(text)["cells"]
  return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@each_document
def test_links_and_paths_lead_somewhere(document):
  text, folder = _text(ROOT / document), (ROOT / document).parent
  links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if ":" not in link]
  assert not [link for link in links if not (folder / link).exists()]
  paths = re.findall(r"`((?:rlvr_jax|configs|experiments|tests|docs|colabs)/[\w/.]+)`", text)
  assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_the_code_that_a_card_names_is_in_the_files_that_it_links(card):
  paragraph = re.search(r"\*\*Code\.\*\*(.*?)\n\n", card.read_text(encoding="utf-8"), re.DOTALL)[1]
  linked = [card.parent / path for path in re.findall(r"\]\(([^)]+)\)", paragraph)]
  code = "\n".join(path.read_text(encoding="utf-8") for path in linked if path.is_file())
  plain = re.sub(r"\[[^]]*\]\([^)]+\)", "", paragraph)
  names = [name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", plain)]
  assert linked and not [name for name in names if not re.search(rf"\b{name}\b", code)]
