"""Writes docs/configuration.md from the values and comments of configs/base.py.

Run it in the root of the repository:

python -m docs.configuration
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from rlvr_jax.configs import base

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
COMMAND = "python -m docs.configuration"
_INTRODUCTION = """# Configuration

Every field of [`configs/base.py`](../configs/base.py), with its default. A recipe starts from these
values. Any field can be set on the command line, `--config.FIELD=VALUE`:

    --config.batch.group_size=16 --config.loss="ppo_clip(epsilon_high=0.28)"
"""


class Comments:
  """The comments of a source file, by line number."""

  def __init__(self, source: str):
    self._after: dict[int, str] = {}
    self._alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
      if token.type == tokenize.COMMENT:
        alone = not token.line[: token.start[1]].strip()
        (self._alone if alone else self._after)[token.start[0]] = token.string.lstrip("# ")

  def of(self, first: int, last: int) -> str:
    """Comments above line `first`, and at the ends of lines `first` to `last`, as sentences."""
    line, above = first - 1, []
    while line in self._alone:
      above.insert(0, self._alone[line])
      line -= 1
    behind = [self._after[n] for n in range(first, last + 1) if n in self._after]
    sentences = [" ".join(part) for part in (above, behind) if part]
    # A value, such as "none" in "none, salt" or "k2" in "k2: …", is spelled as it is set.
    values = re.compile(r"[a-z_0-9]+[,;:] ")
    # A symbol, such as "κ", stays in its case too.
    as_it_is = lambda text: values.match(text) or not text[:1].isascii()
    return " ".join(s if as_it_is(s) else s[:1].upper() + s[1:] for s in sentences)


class Field(NamedTuple):
  name: str  # path with dots, such as "batch.prompts"
  comment: str
  group: bool  # whether the field is a group of fields


def _fields(name: str, first: int, value: ast.expr, comments: Comments) -> Iterator[Field]:
  """Yields a field, and if it is a group, all fields in the group, in the order of the source."""
  is_group = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
  is_group = is_group and value.func.id == "dict"
  yield Field(name, comments.of(first, first if is_group else value.end_lineno), is_group)
  if is_group:
    none = Comments("")  # a comment on the group's first line explains the group
    for keyword in value.keywords:
      if keyword.arg:
        its = none if keyword.lineno == first else comments
        yield from _fields(f"{name}.{keyword.arg}", keyword.lineno, keyword.value, its)
      else:  # **dataclasses.asdict(Sampling())
        yield from (f._replace(name=f"{name}.{f.name}") for f in _sampling())


def _sampling() -> Iterator[Field]:
  """Yields the fields of `Sampling`, which `sampling` and `evaluation.sampling` have."""
  source = (ROOT / "rlvr_jax" / "sampling.py").read_text(encoding="utf-8")
  comments = Comments(source)
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.ClassDef) and node.name == "Sampling":
      for line in node.body:
        if isinstance(line, ast.AnnAssign):
          yield Field(line.target.id, comments.of(line.lineno, line.end_lineno), False)


def fields() -> list[Field]:
  """All fields of configs/base.py; a group comes before its fields."""
  source = pathlib.Path(base.__file__).read_text(encoding="utf-8")
  comments, found = Comments(source), []
  (function,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef))
  for node in function.body:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
      found += _fields(node.targets[0].attr, node.lineno, node.value, comments)
  # evaluation.sampling = dataclasses.asdict(Sampling())
  (index,) = (i for i, field in enumerate(found) if field.name == "evaluation.sampling")
  name = found[index].name
  found[index : index + 1] = [
    found[index]._replace(group=True),
    *(f._replace(name=f"{name}.{f.name}") for f in _sampling()),
  ]
  return found


class _Row(NamedTuple):
  """A row of the table: fields that one comment explains."""

  group: str  # the group that the comment belongs to; "": it belongs to the first field
  comment: str
  fields: list[str]  # texts such as "batch.prompts=8": name and default


def _default(name: str) -> object:
  """The default of a field; None for a placeholder."""
  value = base.get_config()
  for part in name.split("."):
    value = value[part] if part in value else None
  return value


def _rows(chosen: list[Field]) -> str:
  """A Markdown table of fields.

  A field without a comment shares a row with its group or with the preceding fields.
  """
  rows: list[_Row] = []
  for field in (f for f in chosen if f.comment or not f.group):
    if field.group:
      rows.append(_Row(field.name, field.comment, []))
      continue
    last = rows[-1] if rows else None
    joins = last and (field.name.startswith(f"{last.group}.") if last.group else not last.comment)
    if field.comment or not joins:
      rows.append(_Row("", field.comment, []))
    rows[-1].fields.append(f"`{field.name}={_default(field.name)!r}`")
  lines = ["| field and default | meaning |", "|---|---|"]
  for row in rows:
    comment = row.comment.replace("|", r"\|")
    lines.append(f"| {', '.join(row.fields) or f'`{row.group}`'} | {comment} |")
  return "\n".join(lines)


def page() -> str:
  """The Markdown of the page: first fields outside groups, then a section for each group."""
  found = fields()
  single = [f for f in found if "." not in f.name and not f.group]
  parts = [_INTRODUCTION.strip(), "## Single fields", _rows(single)]
  for group in (f for f in found if "." not in f.name and f.group):
    below = [f for f in found if f.name.startswith(f"{group.name}.")]
    # The section `sampling` explains the fields of `evaluation.sampling`, too.
    below = [f for f in below if not f.name.startswith("evaluation.sampling.")]
    parts += [f"## `{group.name}`", group.comment, _rows(below)]
  return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
  PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
  main()
