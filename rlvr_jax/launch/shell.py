"""Runs commands of other programs, captures or follows their output, or only prints them."""

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
  """Runs commands; with `dry_run` it prints them instead."""

  def __init__(self, *, dry_run: bool = False):
    self.dry_run = dry_run

  def run(self, command: Sequence[str], *, text: str | None = None) -> None:
    """Runs a command with this program's output streams.

    Args:
      command: program and arguments.
      text: standard input; None for this program's.
    Raises:
      CommandError: the command failed, or is not installed.
    """
    say(shlex.join(command) if text is None else f"{shlex.join(command)} <<'END'\n{text}END")
    if not self.dry_run:
      _execute(command, input=text)

  def capture(self, command: Sequence[str]) -> str:
    """Runs a command and returns its output; "" in a dry run. Raises as `run` does."""
    if self.dry_run:
      say(shlex.join(command))
      return ""
    return _execute(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE).stdout

  def follow(self, command: Sequence[str]) -> subprocess.Popen | None:
    """Starts a command in the background with this program's output; None in a dry run."""
    say(shlex.join(command))
    # In its own session: Ctrl-C ends only this program, which then terminates the command.
    return None if self.dry_run else subprocess.Popen(command, start_new_session=True)


def _execute(command: Sequence[str], **kwargs) -> subprocess.CompletedProcess:
  try:
    process = subprocess.run(command, text=True, **kwargs)
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


def has_ended(process: subprocess.Popen | None) -> bool:
  """Whether a followed command has ended or was never started."""
  return process is None or process.poll() is not None


def terminate(process: subprocess.Popen | None) -> None:
  """Terminates a followed command, if it still runs."""
  if process is not None and process.poll() is None:
    process.terminate()
    process.wait()


def warn(line: str) -> None:
  """Prints a line to stderr."""
  print(line, file=sys.stderr, flush=True)
