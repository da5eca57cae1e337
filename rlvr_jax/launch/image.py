"""The container image of a commit, built by Cloud Build, not on the laptop."""

from __future__ import annotations

import argparse
import pathlib
import tempfile

from rlvr_jax.launch.run import Run
from rlvr_jax.launch.shell import CommandError, Shell, say


def add_flags(parser: argparse.ArgumentParser) -> None:
  text = "REGION-docker.pkg.dev/PROJECT/REPOSITORY/rlvr_jax, without a tag; for start"
  parser.add_argument("--image", default="", help=text)


def image_name(run: Run, args: argparse.Namespace) -> str:
  """The name of the image, tagged with the commit."""
  assert run.package is not None
  return f"{args.image}:{run.package.version}"


def build(run: Run, args: argparse.Namespace, shell: Shell) -> None:
  """Builds the image from the commit's Dockerfile, unless the registry already has it."""
  assert run.package is not None
  image = image_name(run, args)
  try:
    shell.capture(["gcloud", "artifacts", "docker", "images", "describe", image, "--quiet"])
    if not shell.dry_run:
      return say(f"{image} exists already")
  except CommandError:
    pass
  with tempfile.TemporaryDirectory() as folder:
    archive = pathlib.Path("" if shell.dry_run else folder) / f"{run.package.version}.tar.gz"
    if not shell.dry_run:
      run.package.write(archive)
    shell.run(["gcloud", "builds", "submit", str(archive), f"--tag={image}", "--quiet"])
  return None
