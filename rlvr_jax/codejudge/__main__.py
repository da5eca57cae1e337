"""Judges one program: python -m rlvr_jax.codejudge PROGRAM TESTS

PROGRAM is a file of Python source; TESTS is a JSON file, whose fields are listed in README.md.
Prints the verdict as one line of JSON.

Exit status: 0 if all tests pass, 1 if not, 2 if the arguments or the tests are invalid, 3 if the
sandbox gave no verdict. After status 3, nothing is known about the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys

from . import tasks
from .harness import messages
from .sandbox import SandboxError, open_sandbox


def main() -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog=f"{pathlib.Path(sys.executable).name} -m {__package__}",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("program", metavar="PROGRAM", type=pathlib.Path)
  parser.add_argument("tests", metavar="TESTS", type=pathlib.Path)
  args = parser.parse_args()
  try:
    source, text = (path.read_text(encoding="utf-8") for path in (args.program, args.tests))
  except (OSError, UnicodeDecodeError) as error:
    parser.error(f"PROGRAM or TESTS cannot be read: {error}")
  sys.set_int_max_str_digits(messages.MAX_DIGITS)
  try:
    tests = json.loads(text)
    if not isinstance(tests, dict):
      raise ValueError(
        f"the file contains a JSON {type(tests).__name__}, but tests are a JSON object with the"
        " field 'style'"
      )
    tasks.check(tests)
    with contextlib.closing(open_sandbox()) as sandbox:
      verdict = tasks.judge(sandbox, source, tests)
  except KeyError as error:
    parser.error(f"TESTS {args.tests}: the field {error} is missing")
  except (AttributeError, TypeError, ValueError) as error:  # also if fields have a wrong type
    parser.error(f"TESTS {args.tests}: {error}")
  except (OSError, SandboxError) as error:
    print(f"no verdict: {error}", file=sys.stderr)
    return 3
  print(json.dumps(verdict))
  return 0 if verdict.get("passed") == verdict.get("total", 0) else 1


if __name__ == "__main__":
  sys.exit(main())
