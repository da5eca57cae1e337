"""Writes the table of methods into docs/methods/README.md, and their names into README.md:

  python -m docs.tables

Each method has a card in docs/methods/, which names the method's paper and recipes. The settings of
the recipe say which code the method uses. The first paragraph of the recipe's docstring says what
is new in the method. A card without a recipe has the name of an estimator or a loss; then the
docstring of that module says what is new.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import pathlib
import re
import types
from collections.abc import Iterator

from ml_collections import ConfigDict

from experiments.recipes.sweep import RECIPES
from rlvr_jax import advantages, corrections, distillation, losses, reweighting, specs
from rlvr_jax.configs import base

ROOT = pathlib.Path(__file__).parents[1]
CARDS = ROOT / "docs" / "methods"
COMMAND = "python -m docs.tables"
COLUMNS = ("method, arXiv number", "what is new in it", "code", "recipe")
OF_GRPO = ("`grpo`", "`ppo_clip`")  # the defaults, which only the row of GRPO names
DOCUMENTS = (ROOT / "README.md", CARDS / "README.md")
_ACROSS = re.DOTALL | re.MULTILINE

# Settings of a recipe besides its components: (path of the field, text in the table, file that
# reads the field). An empty text stands for the field's value.
FIELDS = (
  ("aggregation", "", "rlvr_jax/ops/aggregate.py"),
  ("veto.enabled", "veto", "rlvr_jax/ops/veto.py"),
  ("dynamic_sampling.enabled", "dynamic sampling", "rlvr_jax/rollouts/batches.py"),
  ("overlong.buffer", "overlong", "rlvr_jax/ops/overlong.py"),
  ("reference.kl_coefficient", "KL", "rlvr_jax/ops/kl.py"),
)


def recipe_module(name: str) -> types.ModuleType:
  return importlib.import_module(f"rlvr_jax.configs.{name}")


def recipes_of(card: pathlib.Path) -> list[str]:
  """Names of the recipes that a card links to under "Recipe"."""
  paragraph = re.search(r"^\*\*Recipes?\.\*\*.*?\n\n", card.read_text(encoding="utf-8"), _ACROSS)
  return re.findall(r"/configs/(\w+)\.py\)", paragraph[0]) if paragraph else []


def paper_of(card: pathlib.Path) -> str:
  """Title and arXiv number of a card's papers, or title, authors and year."""
  found = re.search(r"^Papers?: (.*?)\.\n\n", card.read_text(encoding="utf-8"), _ACROSS)
  if found is None:
    raise ValueError(f"{card}: no paragraph of the form 'Paper: *title*, arXiv number.'")
  return found[1].replace("\n", " ")


def short_paper_of(card: pathlib.Path) -> str:
  """The text after a method's name: arXiv numbers of its papers, or authors and year."""
  found = re.findall(r"(?<=arXiv )\d{4}\.\d{5}|(?<=, )\D+ \d{4}$", paper_of(card))
  return f", {', '.join(found)}" if found else ""


def component(package: types.ModuleType, name: str) -> tuple[str, str]:
  """(text of a component in the table, path of the file with the component's factory)."""
  path = pathlib.Path(inspect.getfile(getattr(package, name))).relative_to(ROOT)
  return f"`{name}`", str(path)


@functools.cache
def _default() -> ConfigDict:
  return base.get_config()


def used(config: ConfigDict) -> Iterator[tuple[str, str]]:
  """Yields (text, file) of each component and setting that a recipe uses."""
  default = _default()
  packages = {
    "advantage": advantages,
    "reweighting": reweighting,
    "loss": losses,
    "correction": corrections,
    "distillation": distillation,
  }
  for field, package in packages.items():
    name = specs.parse(field, config[field]).name
    if name != "none":
      yield component(package, name)
  for path, label, file in FIELDS:
    value, unset = (
      functools.reduce(operator.getitem, path.split("."), c) for c in (config, default)
    )
    if value != unset:
      yield label or f"`{value}`", file


def namesake(card: str) -> tuple[types.ModuleType, types.ModuleType]:
  """(package, module) of the estimator or loss with the same name as a card without a recipe."""
  package = next(package for package in (advantages, losses) if card in package.__all__)
  module = inspect.getmodule(getattr(package, card))
  assert module is not None, card
  return package, module


@functools.cache
def named_by_recipes(field: str) -> set[str]:
  return {specs.parse(field, recipe_module(r).get_config()[field]).name for r in RECIPES}


def without_recipe(card: str) -> list[str]:
  """The components in the module of a card's `namesake` that no recipe uses."""
  package, module = namesake(card)
  named = named_by_recipes({advantages: "advantage", losses: "loss"}[package])
  of_module = [n for n in package.__all__ if inspect.getmodule(getattr(package, n)) is module]
  return [name for name in of_module if name not in named]


def linked(card: pathlib.Path, to_root: str) -> str:
  """A Markdown link with the name of a method to the method's card."""
  title = re.match(r"# ([^:\n]+)", card.read_text(encoding="utf-8"))
  assert title is not None, card
  return f"[{title[1]}]({to_root}{card.relative_to(ROOT)})"


def cells(card: pathlib.Path, to_root: str) -> dict[str, str]:
  """Column → cell in the row of a method."""
  recipes = recipes_of(card)
  if recipes:
    described = recipe_module(recipes[0])
    parts = list(used(described.get_config()))
  else:
    package, described = namesake(card.stem)
    parts = [component(package, name) for name in without_recipe(card.stem)]
  new = described.__doc__.split("\n\n")[0].replace("\n", " ").split(": ", 1)[-1].rstrip(".")
  link = lambda name, path: f"[{name}]({to_root}{path})"
  particular = [part for part in parts if part[0] not in OF_GRPO or card.stem == "grpo"]
  return {
    COLUMNS[0]: linked(card, to_root) + short_paper_of(card),
    "what is new in it": new[0].upper() + new[1:],
    "code": ", ".join(link(*part) for part in particular),
    "recipe": ", ".join(link(name, f"configs/{name}.py") for name in recipes) or "–",
  }


def year_and_month(card: pathlib.Path) -> str:
  """The first arXiv number of a card's papers, which begins with the year; "" without a number."""
  number = re.search(r"arXiv (\d{4}\.\d{5})", paper_of(card))
  return number[1] if number else ""


def cards() -> list[pathlib.Path]:
  """The paths of all cards, by arXiv number; cards without a number come first."""
  return sorted((c for c in CARDS.glob("*.md") if c.stem != "README"), key=year_and_month)


def names() -> str:
  """A table of all methods' names in four columns, linked to the cards for a page in the root."""
  links = [linked(card, "") for card in cards()]
  rows = [links[i : i + 4] for i in range(0, len(links), 4)]
  return "| | | | |\n|---|---|---|---|\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table() -> str:
  """The Markdown table of all methods, with links for a page in docs/methods/."""
  header = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
  rows = [[cells(card, "../../")[column] for column in COLUMNS] for card in cards()]
  return header + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def between_marks(text: str, name: str, content: str) -> str:
  """`text` with `content` in place of the text between <!-- NAME: … --> and <!-- end -->."""
  marked = re.compile(rf"(<!-- {name}:.*?-->\n).*?(<!-- end -->)", re.DOTALL)
  return marked.sub(lambda found: found[1] + content + found[2], text)


def written(document: pathlib.Path) -> str:
  """The text of a document with an updated table of methods."""
  text = document.read_text(encoding="utf-8")
  return between_marks(text, "methods", names() if document.parent == ROOT else table())


def main() -> None:
  for document in DOCUMENTS:
    document.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
  main()
