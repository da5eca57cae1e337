"""Commands of other programs: run, read, followed, or only printed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence


class LaunchError(RuntimeError):
  """A launch that cannot go on; the message says how to fix it."""


class CommandError(LaunchError):
  """A command that failed, with what it printed."""


class Shell:
  """Runs commands; with `dry_run` it prints them instead."""

  def __init__(self, *, dry_run: bool = False):
    self.dry_run = dry_run

  def run(self, command: Sequence[str], *, text: str | None = None) -> None:
    """Runs a command, whose output goes where ours goes.

    Args:
      command: program and arguments.
      text: standard input, if any.
    Raises:
      CommandError: it failed, or is not installed.
    """
    say(shlex.join(command) if text is None else f"{shlex.join(command)} <<'END'\n{text}END")
    if not self.dry_run:
      _completed(command, input=text)

  def output(self, command: Sequence[str]) -> str:
    """What a command prints, which is not shown; "" in a dry run. Raises as `run` does."""
    if self.dry_run:
      say(shlex.join(command))
      return ""
    return _completed(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE).stdout

  def follow(self, command: Sequence[str]) -> subprocess.Popen | None:
    """Starts a command in the background, whose output goes where ours goes; None in a dry run."""
    say(shlex.join(command))
    # In a session of its own: Ctrl-C ends this program, which then ends the command.
    return None if self.dry_run else subprocess.Popen(command, start_new_session=True)


def _completed(command: Sequence[str], **kwargs) -> subprocess.CompletedProcess:
  try:
    done = subprocess.run(command, text=True, **kwargs)
  except FileNotFoundError as error:
    raise CommandError(f"{command[0]} is not installed, or not on PATH") from error
  if done.returncode:
    detail = (done.stderr or "").strip()
    raise CommandError(
      f"{shlex.join(command)[:300]} failed with status {done.returncode}{detail and ': '}{detail}"
    )
  return done


def say(line: str) -> None:
  """Prints a line at once."""
  print(line, flush=True)


def ended(process: subprocess.Popen | None) -> bool:
  """Whether a followed command has ended, or was never started."""
  return process is None or process.poll() is not None


def end(process: subprocess.Popen | None) -> None:
  """Ends a followed command."""
  if process is not None and process.poll() is None:
    process.terminate()
    process.wait()


def warn(line: str) -> None:
  """Prints a line to stderr."""
  print(line, file=sys.stderr, flush=True)
