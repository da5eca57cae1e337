"""Installs this checkout on Colab, and what Colab lacks for it; changes nothing that Colab has.

  python colabs/install.py

The cell `setup` of every notebook runs it. A preinstalled package that is too old for `setup.py` is
named and left as it is.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = pathlib.Path(__file__).parents[1]
PACKAGE = "rlvr_jax"
EXTRAS = ("plot", "reasoning-gym")


def installed() -> dict[str, str]:
  """Canonical name → version of every installed package."""
  found = ((each.metadata["Name"], each.version) for each in metadata.distributions())
  return {canonicalize_name(name): version for name, version in found if name}


def needed(texts: Iterable[str]) -> list[Requirement]:
  """The requirements that hold on this machine, with those of the extras."""
  requirements = [Requirement(text) for text in texts]
  holds = lambda marker: any(marker.evaluate({"extra": extra}) for extra in EXTRAS)
  return [r for r in requirements if r.marker is None or holds(r.marker)]


def lacking(requirements: Iterable[Requirement], present: Mapping[str, str]) -> list[str]:
  """Name and versions of each requirement that is not installed in any version."""
  absent = [r for r in requirements if canonicalize_name(r.name) not in present]
  return sorted({f"{r.name}{r.specifier}" for r in absent})


def too_old(requirements: Iterable[Requirement], present: Mapping[str, str]) -> list[str]:
  """A line for each requirement that is installed in a version that it does not allow."""
  versions = ((r, present.get(canonicalize_name(r.name))) for r in requirements)
  return [
    f"{r.name} {version} is installed, {PACKAGE} is tested with {r.specifier}"
    for r, version in versions
    if version is not None and not r.specifier.contains(version, prereleases=True)
  ]


def pip_install(*arguments: str) -> None:
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def install_lacking(names: Iterable[str], present: Mapping[str, str]) -> None:
  """Installs by pip under the constraint that what is present keeps its version."""
  with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
    file.write("".join(f"{name}=={version}\n" for name, version in present.items()))
    file.flush()
    pip_install(f"--constraint={file.name}", *names)


def main() -> None:
  before = installed()
  pip_install("--no-deps", str(CHECKOUT))
  before.pop(PACKAGE.replace("_", "-"), None)
  requirements = needed(metadata.requires(PACKAGE) or [])
  names = lacking(requirements, before)
  if names:
    install_lacking(names, before)
  for line in too_old(requirements, before):
    print(line)


if __name__ == "__main__":
  main()
