"""Hooks of mkdocs.yml: the API reference, links that leave docs/, formulas, ranks in the search."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
# Pages of the API reference, each of a package: what that exports, and what these modules have.
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
# Lists have every word: in the search a guide that explains the word comes before them.
LISTS = ("api/", "configuration.md", "metrics.md", "terms.md")
LISTS_BOOST = 0.2
_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


# --- the API reference ----------------------------------------------------------------------------


def public(name: str) -> Iterator[str]:
  """Dotted names of the functions and classes that a module exports, where they are defined."""
  module = importlib.import_module(name)
  own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name]
  for member in getattr(module, "__all__", own):
    value = vars(module).get(member)
    if value is None or inspect.ismodule(value):
      yield from public(f"{name}.{member}")
    elif not member.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
      yield f"{value.__module__}.{value.__name__}"


def api_pages() -> dict[str, str]:
  """Path of each page of the API reference → its Markdown, for mkdocstrings.

  What several packages export is on the page of the one that defines it.
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
  """A ```math block as MathML, which browsers typeset without a script.

  Args:
    source: LaTeX, one formula or the lines of an align* environment.
    args, kwargs: what superfences passes besides; not used.
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
  """What a link of a page becomes on the site.

  Args:
    page: path under docs/, such as "methods/salt.md".
    link: as in the page's Markdown, relative to the page's folder.
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
  """A navigation in which the name of a section stands for its pages; empty ones are left out."""
  entries = []
  for entry in nav:
    ((title, what),) = entry.items()
    what = sections.get(what, what) if isinstance(what, str) else _filled(what, sections)
    entries += [{title: what}] if what else []
  return entries


def _pages(nav: Any) -> list[str]:
  """All pages that a navigation names."""
  if isinstance(nav, str):
    return [nav]
  entries = nav.values() if isinstance(nav, dict) else nav
  return [page for entry in entries for page in _pages(entry)]


def on_config(config: Any) -> Any:
  """Lists in the navigation the method cards, the API, and guides that mkdocs.yml does not name."""
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
  """Adds the pages of the API."""
  from mkdocs.structure.files import File

  for path, text in api_pages().items():
    files.append(File.generated(config, path, content=text))
  return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
  """Turns links that leave docs/ into links to the files of the repository, and ranks the page."""
  del files
  if page.file.src_uri.startswith(LISTS):
    page.meta["search"] = {"boost": LISTS_BOOST}
  change = lambda m: m[1] + link_from(page.file.src_uri, m[2], config.repo_url or "") + m[3]
  return _LINK.sub(change, markdown)
