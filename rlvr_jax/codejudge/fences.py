"""Finds the fenced blocks of a text, as CommonMark has them: where a generated program is."""

from __future__ import annotations

import io
import re

from . import tasks

PYTHON = ("python", "python3", "py")  # info strings of Python

# Groups: indentation, with a list marker if the fence's line has one; fence; info string. `{3,}+
# takes all marks: tried with fewer, a line of n of them would cost n² steps.
_OPENING = re.compile(r"([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}+(?!.*`)|~{3,})[ \t]*(\S*)")


def find_blocks(text: str) -> list[tuple[str, str]]:
  """Finds (info string, text) of each fenced block; an unclosed block extends to the end."""
  blocks: list[tuple[str, list[str]]] = []
  fence: re.Match[str] | None = None
  for line in io.StringIO(text):
    if fence is None:
      if fence := _OPENING.match(line):
        blocks.append((fence[3].lower(), []))
    elif _is_closing_fence(line, fence):
      fence = None
    else:
      blocks[-1][1].append(line[min(len(fence[1]), tasks.indentation(line)) :])
  return [(info, "".join(lines)) for info, lines in blocks]


def _is_closing_fence(line: str, fence: re.Match[str]) -> bool:
  """Whether a line closes a fence, as in CommonMark.

  It must be at least as long as the opening fence, and neither have an info string nor be indented
  like code.
  """
  mark = line.strip()
  is_bare_fence = len(mark) >= len(fence[2]) and set(mark) == {fence[2][0]}
  return is_bare_fence and tasks.indentation(line) <= len(fence[1]) + 3
