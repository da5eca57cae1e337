"""Hooks for mkdocs.yml: API reference, links to files outside docs/, formulas, ranks in search."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
# Package → modules whose functions and classes its API page lists, besides the package's exports.
API = {
  "parts": (),
  "advantages": ("base", "masses"),
  "losses": ("base",),
  "corrections": ("base",),
  "distillation": ("base",),
  "reweighting": ("base",),
  "geometry": ("base", "diagnostics", "agreement", "updates"),
  "ops": (),
  "types": (),
  "rollouts": (),
  "models": (),
  "data": ("tasks",),
  "rewards": ("by_name",),
  "train": (),
  "evaluate": ("curves", "run_files"),
}
# These pages contain almost every word. The search ranks guides, which explain a word, above them.
LISTS = ("api/", "configuration.md", "metrics.md", "terms.md")
LISTS_BOOST = 0.2
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


# --- the API reference ----------------------------------------------------------------------------


def public(name: str) -> Iterator[str]:
  """Yields MODULE.NAME of each function and class that a module exports; MODULE defines it."""
  module = importlib.import_module(name)
  own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name]
  for member in getattr(module, "__all__", own):
    value = vars(module).get(member)
    if value is None or inspect.ismodule(value):
      yield from public(f"{name}.{member}")
    elif not member.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
      yield f"{value.__module__}.{value.__name__}"


def api_pages() -> dict[str, str]:
  """Path of each page of the API reference → the page's Markdown, for mkdocstrings.

  A function that several packages export is listed on the page of the package that defines it.
  """
  pages = {}
  for title, more in API.items():
    package = f"rlvr_jax.{title}"
    summary = (importlib.import_module(package).__doc__ or "").strip()
    modules = [package, *(f"{package}.{name}" for name in more)]
    names = dict.fromkeys(name for module in modules for name in public(module))
    listed = "\n\n".join(f"::: {name}" for name in names if name.startswith(package))
    pages[f"api/{title}.md"] = f"# rlvr_jax.{title}\n\n{summary}\n\n{listed}\n"
  return pages


# --- formulas -------------------------------------------------------------------------------------


def formula(source: str, *args: Any, **kwargs: Any) -> str:
  """The MathML of a ```math block, which browsers typeset without a script.

  Args:
    source: LaTeX, one formula or the lines of an align* environment.
    args, kwargs: further arguments that superfences passes; not used.
  Raises:
    SuperFencesException: latex2mathml does not know a command.
  """
  del args, kwargs
  from latex2mathml import converter
  from pymdownx.superfences import SuperFencesException

  try:
    markup = converter.convert(source, display="block")
  except Exception as error:  # its exceptions have no common class, and superfences hides them
    raise SuperFencesException(f"not a formula, {error!r}: {source}") from error
  if "\\" in markup or "<mi>&</mi>" in markup:  # it copies commands that it does not know
    raise SuperFencesException(f"latex2mathml does not know a command of this formula: {source}")
  return f'<div class="math" style="overflow-x: auto">{markup}</div>'


# --- links ----------------------------------------------------------------------------------------


def link_from(page: str, link: str, repository: str) -> str:
  """The target of a page's link on the site.

  Args:
    page: path under docs/, such as "methods/salt.md".
    link: the target in the page's Markdown, relative to the page's folder.
    repository: address of the repository; "" for the files of this checkout.
  """
  if ":" in link or link.startswith("/"):
    return link
  target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
  if target.startswith("docs/") and not target.endswith(".py"):
    return posixpath.relpath(target, posixpath.join("docs", posixpath.dirname(page)))
  if repository:
    kind = "tree" if (ROOT / target).is_dir() else "blob"
    return f"{repository.rstrip('/')}/{kind}/main/{target}"
  return (ROOT / target).as_uri()


def _filled(nav: list[Any], sections: dict[str, list[Any]]) -> list[Any]:
  """The navigation with each section's name replaced by its pages, without empty sections."""
  entries = []
  for entry in nav:
    ((title, what),) = entry.items()
    what = sections.get(what, what) if isinstance(what, str) else _filled(what, sections)
    entries += [{title: what}] if what else []
  return entries


def _pages(nav: Any) -> list[str]:
  """The paths of all pages in a navigation."""
  if isinstance(nav, str):
    return [nav]
  entries = nav.values() if isinstance(nav, dict) else nav
  return [page for entry in entries for page in _pages(entry)]


def on_config(config: Any) -> Any:
  """Adds method cards, API pages, and all guides missing in mkdocs.yml to the site's navigation."""
  folder = ROOT / "docs"
  cards = sorted(path.name for path in (folder / "methods").glob("*.md"))
  named = _pages(config.nav)
  sections = {
    "methods": [f"methods/{name}" for name in cards],  # README.md sorts first
    "api": list(api_pages()),
    "others": sorted(path.name for path in folder.glob("*.md") if path.name not in named),
  }
  config.nav = _filled(config.nav, sections)
  return config


def on_files(files: Any, config: Any) -> Any:
  """Adds the pages of the API reference to the site's files."""
  from mkdocs.structure.files import File

  for path, text in api_pages().items():
    files.append(File.generated(config, path, content=text))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
  """Rewrites links to files outside docs/ as links to the repository; ranks lists below guides."""
  del files
  if page.file.src_uri.startswith(LISTS):
    page.meta["search"] = {"boost": LISTS_BOOST}
  change = lambda m: m[1] + link_from(page.file.src_uri, m[2], config.repo_url or "") + m[3]
  return _LINK.sub(change, markdown)
