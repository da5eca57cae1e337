"""The walls around generated code, with every mechanism that this machine has."""

import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rewards.processes import descendants, running, wait_until

from rlvr_jax.rewards import sandbox as sandboxes
from rlvr_jax.rewards.sandbox import ACCEPTED, NONE, UNSANDBOXED, Sandbox, SandboxError

HAS_BUBBLEWRAP = shutil.which("bwrap") is not None
MECHANISMS = [
  pytest.param("namespaces"),
  pytest.param(
    "bubblewrap",
    marks=pytest.mark.skipif(not HAS_BUBBLEWRAP, reason="bwrap is not installed"),
  ),
]


@pytest.fixture(scope="module", params=MECHANISMS)
def sandbox(request):
  opened = Sandbox(request.param)
  yield opened
  opened.close()


def _run(sandbox, program, *args, expected, time_limit_s=10.0, memory_mib=512):
  case = {"input": list(args), "output": expected}
  task = {"style": "function", "entry_point": "f", "cases": [case], "total": 1}
  source = {"mode": "calls", "sources": [program]}
  return sandbox.run(source, task, time_limit_s=time_limit_s, memory_mib=memory_mib)


def _passes(*args, **kwargs):
  verdict = _run(*args, **kwargs)
  assert verdict.get("passed") == 1, verdict


def test_walls_hold(sandbox):
  sandboxes.probe(sandbox)


def test_a_missing_wall_is_seen():
  with pytest.raises(SandboxError, match=r"/etc/shadow is visible|can be written|can be reached"):
    sandboxes.probe(Sandbox(NONE))


def test_what_is_inside(sandbox, monkeypatch):
  monkeypatch.setenv("SECRET", "leaked")
  program = """
import os, sys
def f():
  processes = [name for name in os.listdir("/proc") if name.isdigit()]
  writable = [path for path in ("/", "/usr", "/etc", "/dev", "/proc/sys/kernel/hostname")
              if os.access(path, os.W_OK)]
  return [
    sorted(set(os.environ) - {"LC_CTYPE"}),
    os.listdir("/tmp"), os.getcwd(), os.path.expanduser("~"), writable,
    [name for name in ("jax", "numpy", "rlvr_jax") if name in sys.modules],
    len(processes) <= 2, os.getuid() != 0, len(os.listdir("/proc/self/fd")),
  ]
"""
  names = ["HOME", "LANG", "PATH", "PWD", "PYTHONHASHSEED"]
  if sandbox.mechanism == "namespaces":
    names.remove("PWD")
  _passes(sandbox, program, expected=[names, [], "/tmp", "/tmp", [], [], True, True, 5])


def test_the_harness_cannot_be_imported(sandbox):
  """Neither it nor what lies beside it, by any name; nor does any table or path lead there."""
  program = """
import importlib, sys
def f(names, places):
  found = [name for name in sys.modules if name.startswith(("harness", "rlvr_jax"))]
  found += [name for name in vars(sys.modules["__main__"]) if not name.startswith("__")]
  paths = [*sys.path, *sys.path_importer_cache]
  found += [path for path in paths if path.startswith(tuple(places)) or path in ("", "/")]
  for name in names:
    try:
      importlib.import_module(name)
      found.append(name)
    except ImportError:
      pass
  return found
"""
  inside, beside = pathlib.Path(sandboxes._FOLDER), pathlib.Path(sandboxes.__file__).parent
  modules = [file.stem for file in inside.glob("*.py")]
  assert {"judge", "launcher"} <= set(modules)
  names = {"harness", "rlvr_jax", "rlvr_jax.rewards", *modules, *(f"harness.{m}" for m in modules)}
  names |= {file.stem for file in beside.glob("*.py")} - {"__init__"} - sys.stdlib_module_names
  places = [str(beside), sandboxes._FOLDER_INSIDE]
  _passes(sandbox, program, sorted(names), places, expected=[])


@pytest.mark.parametrize(
  "attempt",
  [
    "os.mkdir('/x')",
    "open(os.__file__, 'a')",
    "open('/proc/1/mem', 'rb')",
    "os.listdir('/proc/1/fd')",
    "open('/proc/1/environ').read()",
    "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "os.setuid(0)",
    "os.chroot('/tmp')",
    "os.mknod('/tmp/x', 0o60600, os.makedev(254, 0))",
    "check(libc.unshare(0x10000000))",  # a user namespace
    "check(libc.unshare(0x00020000))",  # a mount namespace
    "check(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
    "check(libc.ptrace(16, 1, None, None))",  # attach
    "check(libc.process_vm_readv(1, iov, 1, iov, 1, 0))",
    "check(libc.umount2(b'/', 2))",
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))",
    "socket.create_connection(('127.0.0.1', 22), 1)",
    "socket.getaddrinfo('example.com', 80)",
    "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))",
    "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
    "bytearray(2**30)",
    "Path('/tmp/x').write_bytes(bytes(17 * 2**20))",
    "[Path(f'/tmp/{i}').write_bytes(bytes(2**23)) for i in range(5)]",
    "Path('/dev/shm/x').write_bytes(bytes(9 * 2**20))",
    "[open(f'/tmp/{i}', 'w').close() for i in range(5000)]",
    "[os.open('/dev/null', 0) for _ in range(1000)]",
    "os.kill(-1, 0) or os.kill(os.getppid(), 9) or os.kill(1, 9) or time.sleep(0.2) or 1 / 0",
  ],
)
def test_what_cannot_be_done(sandbox, attempt):
  program = f"""
import ctypes, os, resource, socket, time
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
space = ctypes.create_string_buffer(8)
iov = (ctypes.c_size_t * 2)(ctypes.addressof(space), 8)
def check(result):
  if result < 0:
    raise OSError(ctypes.get_errno())
def f():
  try:
    {attempt}
  except (OSError, ValueError, MemoryError, ZeroDivisionError):
    return "refused"
  return "done"
"""
  _passes(sandbox, program, expected="refused")


def test_items_leave_nothing_for_the_next(sandbox):
  leave = """
import os, time, random
def f():
  open("/tmp/x", "w").close(); open("/dev/shm/x", "w").close()
  random.left = True
  if not os.fork():
    os.setsid()
    if not os.fork():
      time.sleep(600)
    os._exit(0)
  return 0
"""
  look = """
import os, random
def f():
  return [os.path.exists("/tmp/x"), os.path.exists("/dev/shm/x"),
          hasattr(random, "left"), len([n for n in os.listdir("/proc") if n.isdigit()])]
"""
  before = descendants(sandbox._process.pid)
  _passes(sandbox, leave, expected=0)
  wait_until(lambda: descendants(sandbox._process.pid) <= before)
  _passes(sandbox, look, expected=[False, False, False, 2])


def test_memory_of_no_process_and_back_doors_are_refused(sandbox):
  """What the kernel answers, also to the numbers of its older interface."""
  program = """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
def f():
  calls = [libc.memfd_create(b"m", 0), libc.shmget(1, 4096, 0o1666), libc.msgget(1, 0o1666),
           libc.semget(1, 1, 0o1666), libc.ptrace(0, 0, 0, 0), libc.syscall(425, 8, 0)]
  if platform.machine() == "x86_64":
    calls.append(libc.syscall(ctypes.c_long(0x40000000 + 39)))  # getpid
  return [result == -1 for result in calls] + [ctypes.get_errno() == errno.EPERM]
"""
  machine = platform.machine()
  _passes(sandbox, program, expected=[True] * (8 if machine == "x86_64" else 7))


def test_deadline_and_memory_of_all_processes(sandbox):
  before = descendants(sandbox._process.pid)
  began = time.monotonic()
  sleep = "import time\ndef f(): time.sleep(60)"
  assert _run(sandbox, sleep, expected=0, time_limit_s=0.3) == {"timeout": True}
  many = """
import os, time
def f():
  for _ in range(20):
    if not os.fork():
      held = b"x" * 150_000_000
      time.sleep(60)
  time.sleep(60)
"""
  assert _run(sandbox, many, expected=0, memory_mib=300) == {"memory": True}
  assert time.monotonic() - began < 8
  wait_until(lambda: descendants(sandbox._process.pid) <= before)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_nothing_outlives_the_process_that_waits(mechanism):
  """SIGKILL to the process alone, not to its group, while generated code runs."""
  script = f"""
import sys
from rlvr_jax.rewards.sandbox import Sandbox
sandbox = Sandbox({mechanism!r})
print("ready", flush=True)
program = '''
import os, time
def f():
  for _ in range(3):
    if not os.fork():
      os.setsid()
  time.sleep(600)
'''
task = {{"style": "function", "entry_point": "f", "cases": [{{"input": [], "output": 0}}],
        "total": 1}}
sandbox.run({{"mode": "calls", "sources": [program]}}, task, time_limit_s=600, memory_mib=512)
"""
  process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
  try:
    assert process.stdout.readline() == b"ready\n"
    wait_until(lambda: len(descendants(process.pid)) >= 10)
    inside = descendants(process.pid)
  finally:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
  wait_until(lambda: not running(inside))


def test_a_launcher_that_has_died_is_an_error():
  sandbox = Sandbox("namespaces")
  sandbox._process.kill()
  sandbox._process.wait()
  with pytest.raises(SandboxError, match="no verdict came"):
    _run(sandbox, "def f(): return 1", expected=1)


# Within this no user namespace can be made, so that no sandbox works.
FORBIDDEN = (
  'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"',
  "from rlvr_jax.rewards import code\ncode.code_self_test()\n"
  "print(code._sandbox.mechanism, code.code('def f(): return 1', "
  "{'style': 'asserts', 'tests': ['assert f() == 1']}).outcome.value)",
)


@pytest.mark.parametrize("words", [None, "yes", ACCEPTED])
def test_no_sandbox_no_run_unless_in_words(words):
  environment = {name: value for name, value in os.environ.items() if name != UNSANDBOXED}
  environment |= {} if words is None else {UNSANDBOXED: words}
  command = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBIDDEN[0], sys.executable]
  result = subprocess.run(
    [*command, FORBIDDEN[1]], env=environment, capture_output=True, text=True
  )
  if words == ACCEPTED:
    assert (result.stdout, result.returncode) == ("none correct\n", 0), result.stderr
  else:
    assert result.returncode != 0 and result.stdout == ""
    assert "generated code is not run here" in result.stderr
    assert "namespaces: " in result.stderr and ACCEPTED in result.stderr


def test_without_walls_limits_and_deadline_hold():
  with_limits = Sandbox(NONE)
  try:
    _passes(with_limits, "def f(): return 1", expected=1)
    daemons = """
import os, time
def f():
  for _ in range(3):
    if not os.fork():
      os.setsid()
      time.sleep(600)
  bytearray(2**30)
"""
    before = descendants(with_limits._process.pid)
    assert "MemoryError" in _run(with_limits, daemons, expected=1)["failure"]
    wait_until(lambda: descendants(with_limits._process.pid) <= before)
    loop = "def f():\n  while True: pass"
    assert _run(with_limits, loop, expected=0, time_limit_s=0.3) == {"timeout": True}
    wait_until(lambda: descendants(with_limits._process.pid) <= before)
  finally:
    with_limits.close()
