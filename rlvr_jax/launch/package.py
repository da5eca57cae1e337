"""Ships the current commit's files to other machines, so that exactly this commit runs there."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from rlvr_jax.launch.run import Run, parse_flags
from rlvr_jax.launch.shell import LaunchError
from rlvr_jax.launch.slices import Machines

EXTRAS = "tpu,hf,gcs,math,reasoning-gym"  # extras of setup.py that TPU machines install
SHARED = "/mnt/rlvr_jax"  # mount point of a file system that all hosts share


class Package(NamedTuple):
  """The files of a commit."""

  version: str  # 12 digits of the commit; with uncommitted changes, followed by -dirty-CHECKSUM
  root: pathlib.Path  # root of the checkout
  files: tuple[str, ...]  # relative to `root`

  def write(self, folder: pathlib.Path) -> pathlib.Path:
    """Writes the files to FOLDER/VERSION.tar.gz, and returns its path."""
    archive = folder / f"{self.version}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
      for name in self.files:
        tar.add(self.root / name, arcname=name, recursive=False)
    return archive

  def copy(self, folder: pathlib.Path) -> None:
    """Copies the files into a folder."""
    for name in self.files:
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(self.root / name, folder / name, follow_symlinks=False)


def ship(
  programs: Sequence[Run], machines: Machines, *, allow_dirty: bool, share: str
) -> tuple[list[Run], Package]:
  """Packs the commit of the current folder for other machines.

  Args:
    programs: the programs of the launch.
    machines: the machines of the first program.
    allow_dirty: see `make_package`.
    share: the file system that is mounted at `SHARED` on all hosts; "" for none.
  Returns:
    The programs, with the commit in their environment, and the package.
  Raises:
    LaunchError: the first program's flags cannot work on the hosts; or see `make_package`.
  """
  package = make_package(pathlib.Path.cwd(), allow_dirty=allow_dirty)
  run = programs[0]
  values = parse_flags(run.flags)
  for name in ("config", "sweep"):
    path = values.get(name, "").partition(":")[0]
    is_recipe = name == "config" and f"configs/{path}.py" in package.files  # a recipe's name
    if path and path not in package.files and not is_recipe:
      raise LaunchError(
        f"--{name}={path} is not in the commit: add it with git, and give its path from the root of"
        " the checkout"
      )
  workdir = values.get("workdir", SHARED)
  if "://" not in workdir and not pathlib.PurePath(workdir).is_absolute():
    raise LaunchError(
      f"--workdir={workdir} is relative: every host needs the same folder, such as"
      f" gs://BUCKET/runs/{pathlib.PurePath(workdir).name}"
    )
  if "workdir" in values and pathlib.PurePath(workdir).is_relative_to(SHARED) and not share:
    raise LaunchError(
      f"--workdir={workdir} is on a file system that is not mounted: mount it with --nfs for"
      " tpu_vm (docs/tpu.md) or --storage for xpk, or give a folder of a bucket, gs://BUCKET/FOLDER"
    )
  hosts = machines.num_slices * machines.slice.hosts
  if run.is_sweep and hosts > 1:
    raise LaunchError(
      f"--mode=sweep runs on one host, but these machines have {hosts} hosts: choose a --type with"
      " one host, such as v5litepod-8 or v5p-8, or launch each run by itself"
    )
  commit = {"RLVR_JAX_COMMIT": package.version}  # hosts get no .git that names it
  return [p._replace(environment={**commit, **p.environment}) for p in programs], package


def make_package(folder: pathlib.Path, *, allow_dirty: bool = False) -> Package:
  """The package of the checkout that contains `folder`.

  Args:
    folder: a folder in a git checkout of this repository.
    allow_dirty: whether files may differ from the commit; the version then ends with a checksum.
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
