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


def test_the_message_is_the_last_word():
  """Threads are writing long complaints line by line when the process ends."""
  program = """
import sys, threading, time
from rlvr_jax.train import host

def complain():
  stream = sys.stderr
  while True:
    stream.write("a library complains\\\\n")

for _ in range(4):
  threading.Thread(target=complain, daemon=True).start()
time.sleep(0.2)
host.exit_immediately("error: what to do")
""".replace("\\\\", "\\")
  done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=60)
  assert done.returncode == 1
  assert done.stderr.endswith(b"error: what to do\n")
