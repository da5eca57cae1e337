"""The commit as an archive, which every target ships, so that exactly the commit runs."""

from __future__ import annotations

import pathlib
import subprocess
import tarfile
import zlib
from typing import NamedTuple

from rlvr_jax.launch.shell import LaunchError


class Package(NamedTuple):
  """The files of a commit."""

  version: str  # 12 digits of the commit; with uncommitted changes, followed by -dirty-CHECKSUM
  root: pathlib.Path  # of the checkout
  files: tuple[str, ...]  # relative to `root`

  def write(self, archive: pathlib.Path) -> pathlib.Path:
    """Writes the files to `archive`, a .tar.gz, and returns its path."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as tar:
      for name in self.files:
        tar.add(self.root / name, arcname=name, recursive=False)
    return archive


def make_package(folder: pathlib.Path, *, allow_dirty: bool = False) -> Package:
  """Makes the package of the checkout that contains `folder`.

  Args:
    folder: in a git checkout of this repository.
    allow_dirty: whether files may differ from the commit; the version then says so.
  Raises:
    LaunchError: `folder` is not in a checkout, or files differ from the commit.
  """
  root = pathlib.Path(_git(folder, "rev-parse", "--show-toplevel").strip())
  changes = _git(root, "status", "--porcelain").splitlines()
  if changes and not allow_dirty:
    names = [line[3:] for line in changes[:5]] + ["…"] * (len(changes) > 5)
    raise LaunchError(
      f"{root} differs from its commit in {len(changes)} files ({', '.join(names)}): commit them,"
      " or add --allow_dirty to ship them as they are"
    )
  names = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
  files = tuple(
    sorted({name for name in names if (root / name).is_symlink() or (root / name).is_file()})
  )
  version = _git(root, "rev-parse", "HEAD")[:12]
  if changes:
    version += f"-dirty-{_checksum(root, files):08x}"
  return Package(version, root, files)


def _checksum(root: pathlib.Path, files: tuple[str, ...]) -> int:
  checksum = 0
  for name in files:
    path = root / name
    data = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
    checksum = zlib.crc32(name.encode() + b"\0" + data, checksum)
  return checksum


def _git(folder: pathlib.Path, *arguments: str) -> str:
  command = ["git", "-C", str(folder), *arguments]
  try:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
  except (OSError, subprocess.CalledProcessError) as error:
    detail = getattr(error, "stderr", None) or error
    raise LaunchError(
      f"{folder} is not in a git checkout of this repository ({str(detail).strip()}): run launch in"
      " a checkout"
    ) from error
