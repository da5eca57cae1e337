"""What hangs ends, and what is alive goes on."""

import os
import platform
import subprocess
import sys
import time

import pytest
from train import tiny

from rlvr_jax.train.checkpointing.checkpoint_files import CheckpointError
from rlvr_jax.train.cluster import process


@pytest.mark.parametrize(
  ("body", "limit", "ends"),
  [
    # Native code that keeps the interpreter's lock, as a constructor of a library may.
    ("with process.deadline(): ctypes.PyDLL(None).sleep(60)", 1.0, True),
    pytest.param("""
with process.deadline():
  for _ in range(4):
    time.sleep(1.0)
    process.restart_deadline()""", 3.0, False, marks=pytest.mark.slow),
    ("""
with process.deadline():
  with process.deadline():
    pass
  time.sleep(60)""", 1.0, True),
    pytest.param("""
with process.deadline():
  pass
process.restart_deadline()
time.sleep(4.0)""", 3.0, False, marks=pytest.mark.slow),
  ],
)  # fmt: skip
def test_a_wait_without_a_sign_of_life_ends_the_process(body, limit, ends):
  begins = "import ctypes, time\nfrom rlvr_jax.train.cluster import process\n"
  code = f"{begins}process.DEADLINE_S = {limit}\n{body}"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
  assert done.returncode == int(ends)
  assert (f"Timeout (0:00:0{limit:.0f})!" in done.stderr and "<module>" in done.stderr) == ends


@pytest.mark.parametrize(("limit", "seconds", "ends"), [(0.5, 60.0, True), (2.0, 0.1, False)])
def test_a_wait_that_is_too_long_ends_with_a_message(limit, seconds, ends):
  """The shorter wait is far below its limit, so that a busy machine does not make it too long."""
  code = "import time\nfrom rlvr_jax.train.cluster import process\n"
  code += f"with process.exit_after({limit}, 'too long'):\n  time.sleep({seconds})\n"
  code += "time.sleep(2.5)"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
  assert (done.returncode, done.stderr) == ((1, "too long\n") if ends else (0, ""))


def test_the_message_is_the_last_word(tmp_path):
  """Threads are writing complaints when the process ends."""
  program = """
import os, threading, time
from rlvr_jax.train.cluster import process

def complain():
  while True:
    os.write(2, b"a library complains, ")

for _ in range(16):
  threading.Thread(target=complain, daemon=True).start()
time.sleep(0.2)
process.exit_immediately("error: what to do")
"""
  complaints = tmp_path / "stderr"  # unlike a pipe it is never full
  with complaints.open("wb") as stderr:
    done = subprocess.run([sys.executable, "-c", program], stderr=stderr, timeout=300)
  assert done.returncode == 1
  assert complaints.read_bytes().endswith(b"error: what to do\n")


ENDING = """
import hashlib, os, signal, sys, threading, time
from rlvr_jax.train.cluster import process

passed_on = []

def send(*numbers):
  for number in numbers:
    os.kill(os.getpid(), number)

def wait():
  while not process.shutdown_requested():
    time.sleep(0.01)

with process.handle_shutdown_signals(lambda: passed_on.append(1)):
"""


@pytest.mark.parametrize(
  ("body", "status", "printed"),
  [
    ("""
  noted = []
  def watch():
    send(signal.SIGTERM)
    began = time.monotonic()
    while not process.shutdown_requested():
      time.sleep(0.01)
    noted.append(time.monotonic() - began)
  threading.Thread(target=watch).start()
  began = time.monotonic()
  hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # no Python runs meanwhile
  took = time.monotonic() - began
  print(noted[0] < took / 2, len(passed_on))""", 0, "True 1"),
    ("""
  send(signal.SIGINT, signal.SIGTERM, signal.SIGTERM)
  wait()
  print(process.shutdown_requested())""", 0, "True"),
    ("""
  send(signal.SIGINT, signal.SIGINT)
  time.sleep(60)""", 130, ""),
    ("""
  send(signal.SIGHUP)
  wait()
  print(process.shutdown_requested())""", 0, "True"),
    ("""
  pass
print(process.handles_shutdown_signals(), process.shutdown_requested(), flush=True)
send(signal.SIGTERM)
time.sleep(60)""", -15, "False False"),
  ],
)  # fmt: skip
def test_signals_ask_for_an_end_at_once(body, status, printed):
  heard = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)"  # nohup may have changed it
  done = subprocess.run(
    [sys.executable, "-c", heard + ENDING + body], capture_output=True, text=True, timeout=300
  )
  assert (done.returncode, done.stdout.strip()) == (status, printed), done.stderr


def test_a_hangup_that_is_ignored_asks_for_nothing():
  body = "\n  send(signal.SIGHUP)\n  time.sleep(0.5)\n  print(process.shutdown_requested())"
  ignored = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
  done = subprocess.run(
    [sys.executable, "-c", ignored + ENDING + body], capture_output=True, text=True, timeout=300
  )
  assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_closed_streams_are_open_again_before_any_file(tmp_path):
  """Or what is printed would go into the first file that is opened."""
  code = """
import os, sys
from rlvr_jax.train.cluster import process
process.open_closed_streams()
with open(sys.argv[1], "w") as file:
  file.write(f"{file.fileno() > 2} {sys.stdin.read()!r} {os.get_inheritable(1)}")
  print("lost", flush=True)
  print("lost too", file=sys.stderr, flush=True)
"""
  path = tmp_path / "file"
  closing = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", code, str(path)]
  assert subprocess.run(closing, timeout=300).returncode == 0
  assert path.read_text() == "True '' True"


def test_the_program_runs_with_closed_streams():
  program = [sys.executable, "-m", "rlvr_jax.main", "--help"]
  closing = ["bash", "-c", 'exec "$@" >&-', "-", *program]
  done = subprocess.run(closing, stderr=subprocess.PIPE, text=True, timeout=300)
  assert (done.returncode, done.stderr) == (1, "")


def test_the_limit_on_open_files_is_named_whoever_met_it():
  try:
    try:  # as tensorstore says it, in a long text
      raise ValueError(f"RESOURCE_EXHAUSTED: {300 * 'x'} [OS error 24: EMFILE Too many open files]")
    except ValueError as error:
      raise CheckpointError("saving to checkpoints failed: ValueError: RESOURCE…") from error
  except CheckpointError as error:
    said = process.describe_error(error)
  assert said.startswith("too many open files: this process may have ") and "ulimit -n 4096" in said
  assert "saving to checkpoints failed" in said
  assert process.describe_error(OSError(24, os.strerror(24))).startswith("too many open files")
  assert process.describe_error(ValueError("another")) == "another"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets options of glibc")
def test_threads_reuse_freed_memory():
  """Also 3 GiB, which are more than an arena of a thread holds."""
  code = """
import ctypes, resource, threading
from rlvr_jax.train.cluster import process
process.keep_freed_memory()
libc, size, end = ctypes.CDLL("libc.so.6"), 3 * 2**30, 2**26
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
faults = []
def use():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  buffer = libc.malloc(ctypes.c_size_t(size))
  ctypes.memset(buffer + size - end, 1, end)
  libc.free(buffer)
  faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
for _ in range(2):
  thread = threading.Thread(target=use)
  thread.start()
  thread.join()
print(faults[1] < faults[0] / 10)
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
  assert done.stdout == "True\n", done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_much_freed_memory_is_returned_although_some_above_it_is_in_use():
  """Of a heap whose last piece is used nothing would be returned without being asked for."""
  code = """
import ctypes, pathlib
from rlvr_jax.train.cluster import process
process.keep_freed_memory()
libc, size = ctypes.CDLL("libc.so.6"), 2**25
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
resident = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
buffers = [libc.malloc(ctypes.c_size_t(size)) for _ in range(25)]
for buffer in buffers:
  ctypes.memset(buffer, 1, size)
for buffer in buffers[:-1]:
  libc.free(buffer)
before = resident()
process.return_freed_memory()
print(before - resident() > 12 * size)
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
  assert done.stdout == "True\n", done.stderr


def test_runs_on_accelerators_share_what_is_compiled(tmp_path, monkeypatch, caplog):
  home, of_run = tmp_path / "home", str(tmp_path / "run" / "compilation_cache")
  monkeypatch.setenv("HOME", str(home))
  cache = lambda backend, processes=1: process.compilation_cache(
    str(tmp_path / "run"), backend, processes
  )
  assert cache("cpu") == cache("gpu", processes=2) == of_run
  assert cache("gpu") == cache("tpu") == str(home / ".cache" / "rlvr_jax" / "compiled")
  assert not caplog.records
  home.rename(tmp_path / "moved")
  home.write_text("a file, in which no folder can be made")
  assert cache("gpu") == of_run
  assert "cannot be written" in caplog.text and "JAX_COMPILATION_CACHE_DIR" in caplog.text


@pytest.mark.parametrize(
  ("cpuinfo", "lacks"),
  [
    ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\nbugs\t: x\n", True),
    ("flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", False),
    ("flags\t\t: fpu amx_bf16\n", False),
    ("Features\t: fp asimd\n", True),
    ("Features\t: fp asimd i8mm bf16\n", False),
    ("processor\t: 0\n", False),  # not known
    ("", False),
  ],
)
def test_a_cpu_without_bfloat16(tmp_path, cpuinfo, lacks):
  (tmp_path / "cpuinfo").write_text(cpuinfo)
  assert process.lacks_bfloat16(tmp_path / "cpuinfo") == lacks
  assert not process.lacks_bfloat16(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_program_that_compiles_slowly_is_no_error_on_the_console():
  code = """
import logging, jax, jax.numpy as jnp
from rlvr_jax.train.cluster import process
process.quiet_compiler()
rows = lambda: jnp.broadcast_to(jnp.arange(200.0)[:, None], (200, 200))
largest = lambda: jax.lax.reduce_window(rows(), -jnp.inf, jax.lax.max, (8, 8), (1, 1), "SAME")
jax.jit(lambda x: x + largest())(1.0)  # XLA folds constants for some seconds, and says so
logging.getLogger("jax").warning("a warning of jax")
"""
  variables = {
    k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")
  }
  variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=variables
  )
  assert "slow_operation_alarm" not in done.stderr, done.stderr
  assert "a warning of jax" in done.stderr and not done.returncode


def test_a_run_ends_with_the_process_that_started_it():
  """It starts another, which watches it, prints its number and is killed with it."""
  watches = (
    "import os, time; from rlvr_jax.train.cluster import process;"
    " process.end_with_parent(os.getppid());"
  )
  watches += "print(os.getpid(), flush=True); time.sleep(60)"
  starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {watches!r}])"
  environment = tiny.environment()
  with subprocess.Popen(
    [sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True, env=environment
  ) as parent:
    child = int(parent.stdout.readline())
    parent.kill()
    last = time.monotonic() + 30
    while os.path.exists(f"/proc/{child}") and time.monotonic() < last:
      time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}")
