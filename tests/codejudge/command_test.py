"""The command that judges one program, from a copy of the folder that has nothing beside it."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

import rlvr_jax.codejudge
from rlvr_jax.codejudge.sandbox import UNSANDBOXED

PROGRAM = "def f(x):\n  return x + 1\n"
CASES = [{"input": [2], "output": 3}]
FUNCTION = {"style": "function", "entry_point": "f", "cases": CASES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  folder = tmp_path_factory.mktemp("alone")
  shutil.copytree(pathlib.Path(rlvr_jax.codejudge.__file__).parent, folder / "codejudge")
  return folder


def _judge(alone, tests, *wrapper):
  """Exit status, standard output and standard error; -S: no installed packages."""
  (alone / "program.py").write_text(PROGRAM)
  (alone / "tests.json").write_text(tests if isinstance(tests, str) else json.dumps(tests))
  command = [*wrapper, sys.executable, "-S", "-m", "codejudge", "program.py", "tests.json"]
  result = subprocess.run(command, cwd=alone, env={}, capture_output=True, text=True)
  return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
  ("tests", "status", "verdict"),
  [
    (FUNCTION, 0, {"passed": 1, "total": 1, "failure": ""}),
    ({"style": "asserts", "tests": ["assert f(2) == 3", "assert f(1) == 1"]}, 1, {
      "passed": 1, "total": 2, "failure": "test 2 of 2, assert f(1) == 1: AssertionError",
    }),
    ({"style": "asserts", "tests": ["while f(2): pass"], "time_limit_s": 0.3}, 1, {
      "timeout": True
    }),
  ],
)  # fmt: skip
def test_verdicts(alone, tests, status, verdict):
  got = _judge(alone, tests)
  assert (got[0], got[2]) == (status, "") and json.loads(got[1]) == verdict, got


@pytest.mark.parametrize(
  ("tests", "message"),
  [
    ("{", "TESTS tests.json: Expecting property name"),
    ([], "contains a JSON list, but tests are a JSON object with the field 'style'"),
    ({"style": "function", "cases": CASES}, "the field 'entry_point' is missing"),
  ],
)
def test_unusable_tests(alone, tests, message):
  status, printed, complained = _judge(alone, tests)
  assert (status, printed) == (2, "") and message in complained, complained


def test_a_missing_file(alone):
  command = [sys.executable, "-S", "-m", "codejudge", "nothing.py", "tests.json"]
  result = subprocess.run(command, cwd=alone, capture_output=True, text=True)
  assert result.returncode == 2 and "cannot be read" in result.stderr
  assert "'nothing.py'" in result.stderr


def test_no_sandbox_no_verdict(alone):
  forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
  wrapper = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"]
  status, printed, complained = _judge(alone, FUNCTION, *wrapper)
  assert (status, printed) == (3, "") and "no verdict: " in complained, complained
  assert UNSANDBOXED in complained
