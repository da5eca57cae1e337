"""The documents: sentences are short, and links and paths lead to files that are there."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LONGEST = 30  # words in a sentence; a span of code or a formula is one
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
_ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|Dr|approx)\.")


def _text(path):
  """A document's Markdown; of a notebook, that of its Markdown cells."""
  text = path.read_text(encoding="utf-8")
  if path.suffix != ".ipynb":
    return text
  cells = json.loads(text)["cells"]
  return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def paragraphs(markdown):
  """Paragraphs, headings, list items and table cells, each as one line; blocks of code are not."""
  markdown = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
  markdown = re.sub(r"\$\$.*?\$\$", "", markdown, flags=re.DOTALL)
  for block in re.split(r"\n\s*\n", markdown):
    if block.startswith("    ") or block.startswith("\n    "):
      continue
    paragraph = ""
    for line in block.splitlines():
      if line.startswith("|"):
        yield from line.strip().strip("|").split("|")
      elif re.match(r"\s*([*-]|\d+\.) |#+ ", line):
        yield paragraph
        paragraph = re.sub(r"^\s*([*-]|\d+\.|#+) ", "", line)
      else:
        paragraph += f" {line.strip()}"
    yield paragraph


def sentences(markdown):
  """Sentences as lists of words."""
  for paragraph in paragraphs(markdown):
    plain = re.sub(r"!?\[((?:[^][]|`[^`]*`)*)\]\([^)]*\)", r"\1", paragraph)  # a link is its text
    plain = re.sub(r"`[^`]*`|\$[^$]*\$", "CODE", plain)
    plain = _ABBREVIATIONS.sub(r"\1", plain).replace("**", "")
    for sentence in re.split(r"(?<=[.!?])[)\"”]?\s+", plain):
      yield [word for word in sentence.split() if re.search(r"\w", word)]


def long_sentences(markdown):
  return [" ".join(words) for words in sentences(markdown) if len(words) > LONGEST]


def test_a_long_sentence_is_seen():
  words = " ".join(["word"] * LONGEST)
  assert long_sentences(f"{words} and.\n") and not long_sentences(f"{words}. And.\n")
  assert long_sentences(f"* one\n* {words}\n  and\n") and long_sentences(f"| a | {words} b |\n")
  assert not long_sentences(f"    {words} as code\n\n```python\n{words} b\n```\n")
  assert not long_sentences(f"* {words}\n* {words}\n")


@each_document
def test_sentences_are_short(document):
  assert not long_sentences(_text(ROOT / document))


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
