"""Finds the fenced blocks of a text by CommonMark's rules, to find a generated program."""

from __future__ import annotations

import io
import re
from typing import NamedTuple

from . import tasks

# Matches the start of info strings that name Python: `python3.11`, `py:main.py`, `{.python`.
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*(?:[:,{}].*)?")
_INDENTATION = re.compile(r"[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")  # with a list marker, if any
_BEFORE = (":", "<answer>")  # ends of a text that a fence without an info string may follow
_AFTER = "</answer>"  # may follow a closing fence


class Block(NamedTuple):
  """A fenced block."""

  info: str  # first word of the info string, in lower case
  text: str

  @property
  def is_python(self) -> bool:
    """Whether the info string names Python."""
    return _is_python(self.info)


class _Fence(NamedTuple):
  """An opening fence."""

  indentation: int  # the indentation of its line
  mark: str
  info: str


def _is_python(info: str) -> bool:
  return _PYTHON.fullmatch(info) is not None


def find_blocks(text: str) -> list[Block]:
  """Finds the fenced blocks; an unclosed block extends to the end.

  Unlike in CommonMark, an opening fence of backticks may follow other text on its line. Such a
  fence must name Python in its info string, or have no info string and follow a text that ends in a
  colon or "<answer>".
  """
  blocks: list[tuple[str, list[str]]] = []
  fence: _Fence | None = None
  for line in io.StringIO(text):
    if fence is None:
      if fence := _find_opening_fence(line):
        blocks.append((fence.info, []))
    elif _is_closing_fence(line, fence):
      fence = None
    else:
      blocks[-1][1].append(line[min(fence.indentation, tasks.indentation(line)) :])
  return [Block(info, "".join(lines)) for info, lines in blocks]


def _find_opening_fence(line: str) -> _Fence | None:
  """The fence that a line opens; None if the line opens no fence."""
  indentation = _INDENTATION.match(line).end()  # type: ignore[union-attr]
  tildes = line.startswith("~~~", indentation)
  start = indentation if tildes else line.find("```", indentation)
  if start < 0:
    return None
  rest = line[start:].lstrip(line[start])
  if not tildes and "`" in rest:  # code within a line
    return None
  info = "".join(rest.split()[:1]).lower()
  before = line[indentation:start].rstrip()
  if before and not (_is_python(info) or (not info and before.endswith(_BEFORE))):
    return None
  return _Fence(indentation, line[start : len(line) - len(rest)], info)


def _is_closing_fence(line: str, fence: _Fence) -> bool:
  """Whether a line closes a fence, as in CommonMark; an "</answer>" may follow.

  The closing fence must be at least as long as the opening fence, have no info string, and not be
  indented like code.
  """
  mark = line.strip().removesuffix(_AFTER)
  is_bare_fence = len(mark) >= len(fence.mark) and set(mark) == {fence.mark[0]}
  return is_bare_fence and tasks.indentation(line) <= fence.indentation + 3
