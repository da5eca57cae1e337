"""The code of a page of docs/: its files, its commands, and its other blocks, in order."""

import pathlib
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

from train import tiny

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


def in_folder(found, folder, monkeypatch):
  """Writes a page's files into a folder, and makes it the one where everything is started."""
  for name, text in found.files.items():
    (folder / name).write_text(text)
  monkeypatch.chdir(folder)
  monkeypatch.syspath_prepend(folder)
  modules = [name.removesuffix(".py") for name in found.files]
  for name in modules:
    sys.modules.pop(name, None)
  yield folder
  for name in modules:
    sys.modules.pop(name, None)


def run(command, *more):
  """A command of a page, with Python and the program in place of their installed names."""
  program, *arguments = shlex.split(command)
  programs = {"python": [], "rlvr_jax": ["-m", "rlvr_jax.main"]}
  subprocess.run(
    [sys.executable, *programs[program], *arguments, *more],
    env=tiny.environment(),
    check=True,
    timeout=tiny.TIMEOUT_S,
  )
