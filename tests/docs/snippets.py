"""The code of a page of docs/: its files, its commands, and its other blocks, in order."""

import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"# file: (\S+)\n")


class Page(NamedTuple):
  files: dict[str, str]  # name → text, of blocks that begin with "# file: NAME"
  commands: list[str]  # lines of blocks of shell commands, continued ones joined
  code: str  # all other blocks of Python, one after another


def page(name):
  """The code of docs/NAME."""
  files, commands, code = {}, [], []
  for language, text in _BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8")):
    if language == "bash":
      commands += text.replace("\\\n", " ").strip().splitlines()
    elif named := _NAMED.match(text):
      files[named[1]] = text[named.end() :]
    else:
      code.append(text)
  return Page(files, commands, "\n".join(code))


def write_files(found, folder):
  """Writes a page's files into a folder."""
  for name, text in found.files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
