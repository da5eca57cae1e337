"""Runs commands, and captures or follows their output; a dry run only prints the commands."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence


class LaunchError(RuntimeError):
  """A launch cannot continue; the message says how to fix it."""


class CommandError(LaunchError):
  """A command failed; the message has its output."""


class Shell:
  """Runs commands and prints them; with `dry_run` it only prints them."""

  def __init__(self, *, dry_run: bool = False):
    self.dry_run = dry_run

  def run(self, command: Sequence[str]) -> None:
    """Runs a command, which prints to this process's stdout and stderr.

    Raises:
      CommandError: the command failed, or is not installed.
    """
    say(shlex.join(command))
    if not self.dry_run:
      _execute(command)

  def capture(self, command: Sequence[str]) -> str:
    """Runs a command and returns its output; "" in a dry run. Raises the errors of `run`."""
    if self.dry_run:
      say(shlex.join(command))
      return ""
    return _execute(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE).stdout

  def follow(self, command: Sequence[str]) -> subprocess.Popen | None:
    """Starts a command in the background, and returns its process; None in a dry run.

    The command prints to this process's stdout and stderr.
    """
    say(shlex.join(command))
    # The command has its own session: Ctrl-C ends only this program, which then ends the command.
    return None if self.dry_run else subprocess.Popen(command, start_new_session=True)


def _execute(
  command: Sequence[str], *, stdout: int | None = None, stderr: int | None = None
) -> subprocess.CompletedProcess[str]:
  try:
    process = subprocess.run(command, text=True, stdout=stdout, stderr=stderr)
  except FileNotFoundError as error:
    raise CommandError(f"{command[0]} is not installed, or not on PATH") from error
  if process.returncode:
    detail = (process.stderr or "").strip()
    raise CommandError(
      f"{shlex.join(command)[:300]} failed with status {process.returncode}{detail and ': '}"
      f"{detail}"
    )
  return process


def say(line: str) -> None:
  """Prints a line and flushes it."""
  print(line, flush=True)


def warn(line: str) -> None:
  """Prints a line to stderr."""
  print(line, file=sys.stderr, flush=True)
