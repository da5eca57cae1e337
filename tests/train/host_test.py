"""What hangs ends, and what is alive goes on."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
  ("body", "ends"),
  [
    # Native code that keeps the interpreter's lock, as a constructor of a library may.
    ("with host.deadline(): ctypes.PyDLL(None).sleep(60)", True),
    ("""
with host.deadline():
  for _ in range(4):
    time.sleep(0.5)
    host.alive()""", False),
    ("""
with host.deadline():
  with host.deadline():
    pass
  time.sleep(60)""", True),
    ("""
with host.deadline():
  pass
host.alive()
time.sleep(2.0)""", False),
  ],
)  # fmt: skip
def test_a_wait_without_a_sign_of_life_ends_the_process(body, ends):
  code = f"import ctypes, time\nfrom rlvr_jax.train import host\nhost.DEADLINE_S = 1.0\n{body}"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
  assert done.returncode == int(ends)
  assert ("Timeout (0:00:01)!" in done.stderr and "<module>" in done.stderr) == ends
