"""The walls around generated code, as root and as an ordinary user."""

import contextlib
import functools
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time

import pytest
from codejudge.processes import descendants, running, wait_until

from rlvr_jax.codejudge import sandbox as sandboxes
from rlvr_jax.codejudge.sandbox import (
  ACCEPTED,
  NAMESPACES,
  NONE,
  UNSANDBOXED,
  Sandbox,
  SandboxError,
)

ORDINARY_USER = ("setpriv", "--reuid=65533", "--regid=65533", "--clear-groups")
SYSTEM_PYTHON = "/usr/bin/python3"  # root's own interpreter may lie where nobody else may look


def _as_ordinary_user(patch):
  """From here on a sandbox is an ordinary user's, whose interpreter is the system's."""
  script = f"import sys; open({sandboxes.messages.__file__!r}); assert sys.version_info >= (3, 11)"
  if os.geteuid():
    pytest.skip("only root can become another user")
  if subprocess.run([*ORDINARY_USER, SYSTEM_PYTHON, "-c", script], stderr=-3).returncode:
    pytest.skip(f"an ordinary user has no {SYSTEM_PYTHON} ≥ 3.11, or may not read the harness")
  patch.setattr(sys, "executable", SYSTEM_PYTHON)
  patch.setattr(sys, "base_prefix", "/usr")
  command = sandboxes._launcher_command
  patch.setattr(sandboxes, "_launcher_command", lambda *given: [*ORDINARY_USER, *command(*given)])


@pytest.fixture(scope="module", params=["as we are", "ordinary user"])
def sandbox(request):
  sandboxes.visible_paths.cache_clear()
  with pytest.MonkeyPatch.context() as patch:
    if request.param == "ordinary user":
      _as_ordinary_user(patch)
    opened = Sandbox(NAMESPACES)
  sandboxes.visible_paths.cache_clear()
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
  names = ["HOME", "LANG", "PATH", "PYTHONHASHSEED"]
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
  names = {"harness", "rlvr_jax", "rlvr_jax.codejudge", *modules}
  names |= {f"harness.{module}" for module in modules}
  beside_it = {file.stem for file in beside.glob("*.py")} - {"__init__", "__main__"}
  names |= beside_it - sys.stdlib_module_names
  _passes(sandbox, program, sorted(names), [str(beside)], expected=[])


REFUSED = [
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
  "socket.socket(40, socket.SOCK_STREAM)",  # AF_VSOCK, which no namespace keeps apart
  "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
  "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
  "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**25)",
  "fcntl.fcntl(os.pipe()[1], 1031, 2**20)",  # F_SETPIPE_SZ
  "mmap.mmap(-1, 4096)",  # shared: stays when all but a page of it is unmapped
  "mmap.mmap(os.open('/dev/zero', 2), 4096)",
  "check(libc.vmsplice(os.pipe()[1], iov, 1, 0))",
  "os.splice(os.open(os.__file__, 0), os.pipe()[1], 1)",
  "os.sendfile(os.pipe()[1], os.open(os.__file__, 0), 0, 1)",
  "check(libc.inotify_init())",
  "fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_SH)",
  "fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 1)",
  "os.preadv(os.open(os.__file__, 0), [space], 0, os.RWF_NOWAIT)",
  "os.posix_fadvise(os.open(os.__file__, 0), 0, 0, os.POSIX_FADV_DONTNEED)",
  "check(libc.mincore(None, 0, iov))",
  "os.utime('/dev/null')",
  "os.nice(1)",
  "open('/dev/x', 'w')",
  "open('/proc/self/oom_score_adj', 'w').write('0')",
  "subprocess.run(['/bin/sh', '-c', 'echo 0 > /proc/self/oom_score_adj'], check=True)",
  "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
  "resource.prlimit(1, resource.RLIMIT_AS, (0, 0))",
  "resource.setrlimit(resource.RLIMIT_SIGPENDING, (1000, 1000))",
  "os.kill(-1, 0) or os.kill(os.getppid(), 9) or os.kill(1, 9) or time.sleep(0.2) or 1 / 0",
]
# Of these something stays behind, so that each has a program of its own.
TOO_MUCH = [
  "bytearray(2**30)",
  "Path('/tmp/x').write_bytes(bytes(17 * 2**20))",
  "[Path(f'/tmp/{i}').write_bytes(bytes(2**23)) for i in range(5)]",
  "Path('/dev/shm/x').write_bytes(bytes(9 * 2**20))",
  "[open(f'/tmp/{i}', 'w').close() for i in range(5000)]",
  "[os.open('/dev/null', 0) for _ in range(1000)]",
]


@pytest.mark.parametrize("attempts", [REFUSED, *([attempt] for attempt in TOO_MUCH)])
def test_what_cannot_be_done(sandbox, attempts):
  """The program returns what it could do, one attempt after the other."""
  program = """
import ctypes, fcntl, mmap, os, resource, signal, socket, subprocess, time
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
space = ctypes.create_string_buffer(8)
iov = (ctypes.c_size_t * 2)(ctypes.addressof(space), 8)
def check(result):
  if result < 0:
    raise OSError(ctypes.get_errno())
def f(attempts):
  done = []
  for attempt in attempts:
    try:
      exec(attempt, globals())
      done.append(attempt)
    except (OSError, ValueError, MemoryError, ZeroDivisionError, subprocess.CalledProcessError):
      pass
  return done
"""
  _passes(sandbox, program, attempts, expected=[])


def test_no_place_is_shared(sandbox):
  """What can be written to is a file system of the item's own; no packages lie about."""
  program = """
import os
def f():
  mounts = [line.split() for line in open("/proc/self/mountinfo")]
  options = {mount[4]: mount[5].split(",") for mount in mounts}  # the last covers those before
  writable = [place for place, found in options.items() if "ro" not in found]
  packages = [os.path.join(path, name) for path in {os.path.dirname(os.path.dirname(os.__file__))}
              for folder in os.listdir(path) if folder.startswith("python3")
              for name in ("site-packages", "dist-packages", folder + "/site-packages")
              if os.path.isdir(os.path.join(path, name)) and os.listdir(os.path.join(path, name))]
  return sorted(writable), packages
"""
  _passes(sandbox, program, expected=[["/dev/shm", "/tmp"], []])


# Parts of the standard library that ask the kernel for more than files and memory.
ORDINARY = """
import asyncio, concurrent.futures, multiprocessing, os, select, signal, socket, sqlite3
import subprocess, sys, tempfile, threading, time, mmap, shutil, decimal, multiprocessing.pool
def square(x): return x * x
def in_threads():
  with concurrent.futures.ThreadPoolExecutor(4) as pool: return sum(pool.map(square, range(5)))
def in_processes():
  with multiprocessing.get_context("fork").Pool(2) as pool: return sum(pool.map(square, range(5)))
def in_a_manager():
  with multiprocessing.get_context("fork").Manager() as manager: return sum(manager.list([10, 20]))
def in_shared_memory():
  return sum(multiprocessing.Array("i", [10, 20]))
def in_a_shell():
  return int(subprocess.run("echo $(echo 30 | cat)", shell=True, capture_output=True).stdout)
def in_an_interpreter():
  return int(subprocess.check_output([sys.executable, "-c", "print(30)"]))
def in_a_database():
  with sqlite3.connect("/tmp/x.db") as base:
    base.execute("create table t (x)")
    base.executemany("insert into t values (?)", [(10,), (20,)])
  return sqlite3.connect("/tmp/x.db").execute("select sum(x) from t").fetchone()[0]
def in_a_loop():
  async def half():
    await asyncio.sleep(0.001)
    return 15
  async def both():
    process = await asyncio.create_subprocess_exec("true")
    return sum(await asyncio.gather(half(), half())) + await process.wait()
  return asyncio.run(both())
def in_a_server():
  async def answer(reader, writer):
    writer.write(b"30")
    writer.close()
  async def ask():
    server = await asyncio.start_unix_server(answer, "/tmp/socket")
    reader, writer = await asyncio.open_unix_connection("/tmp/socket")
    return int(await reader.read())
  return asyncio.run(ask())
def in_files():
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "x")
    with open(path, "wb") as file: file.write(bytes([30]))
    shutil.copy2(path, path + "y")
    with open(path + "y", "r+b") as file: return mmap.mmap(file.fileno(), 0)[0]
def by_signals():
  got = []
  signal.signal(signal.SIGALRM, lambda *_: got.append(30))
  signal.setitimer(signal.ITIMER_REAL, 0.001)
  while not got: time.sleep(0.001)
  return got[0]
def f():
  parts = [part for name, part in globals().items() if name.startswith(("in_", "by_"))]
  return {part.__name__: part() for part in parts if part() != 30}
"""


def test_the_standard_library_works(sandbox):
  _passes(sandbox, ORDINARY, expected={}, time_limit_s=30.0)


def test_sockets_without_a_process_count(sandbox):
  """Connections that wait to be accepted, full, and closed by the one that made them."""
  backlog = r"""
import contextlib, socket, time
def f():
  listening = socket.socket(socket.AF_UNIX)
  listening.bind("\0here")
  listening.listen(4096)
  for _ in range(4000):
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(BlockingIOError):
      client.setblocking(False)
      client.connect("\0here")
      while True: client.send(bytes(2**16))
  time.sleep(60)
"""
  assert _run(sandbox, backlog, expected=0, memory_mib=256) == {"memory": True}


def test_a_process_name_that_is_no_text_is_no_fault(sandbox):
  program = r"""
import ctypes, time
def f():
  ctypes.CDLL(None).prctl(15, b"\xff\xfe) R", 0, 0, 0)
  time.sleep(0.2)
"""
  _passes(sandbox, program, expected=None)


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
  assert time.monotonic() - began < 50  # nobody slept to the end
  wait_until(lambda: descendants(sandbox._process.pid) <= before)


@pytest.mark.parametrize("threads", ["stay", "are replaced"])
def test_memory_of_processes_whose_main_threads_have_exited(sandbox, threads):
  """What the kernel says of such a process has no memory; that of its threads has."""
  program = f"""
import ctypes, os, threading, time
def hold():
  while "Z" not in open(f"/proc/{{os.getpid()}}/stat").read().rpartition(")")[2].split()[0]:
    time.sleep(0.01)
  global held
  held = b"x" * (160 << 20)
  live()
def live():
  if {threads == "stay"}: time.sleep(60)
  threading.Thread(target=live).start()
def f():
  for _ in range(4):
    if not os.fork():
      threading.Thread(target=hold).start()
      ctypes.CDLL(None).syscall({60 if platform.machine() == "x86_64" else 93}, 0)
  time.sleep(3)
"""
  assert _run(sandbox, program, expected=None, memory_mib=256) == {"memory": True}


def test_a_program_that_sleeps_says_so_and_one_that_works_does_not():
  calls = []
  case = {"input": [], "output": None}
  task = {"cases": [case], "total": 1, "style": "function", "entry_point": "f"}
  naps = "import time\ndef f(): time.sleep(0.6)"
  works = "import time\ndef f():\n  while time.process_time() < 0.5: pass"
  sleeps = naps.replace("0.6", "60")
  with contextlib.closing(Sandbox(NAMESPACES)) as sandbox:
    for program, limit_s in ((naps, 1.0), (sleeps, 0.5), (works, 1.0)):
      verdict = sandbox.run(
        {"mode": "calls", "sources": [program]}, task, time_limit_s=limit_s, memory_mib=512,
        on_asleep=lambda program=program: calls.append(program),
      )  # fmt: skip
      assert verdict.get("passed", "timeout" in verdict) == 1, verdict
  assert calls == [naps, sleeps]


@contextlib.contextmanager
def _on_a_busy_core():
  """What is started within has one core, which four other programs use, too."""
  allowed = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {max(allowed)})
  try:  # each in a session of its own, as some kernels share a core among sessions
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(4)]
    yield
  finally:
    os.sched_setaffinity(0, allowed)
    for other in others:
      other.kill()
      other.wait()


ON_A_BUSY_CORE = {
  "import time\ndef f():\n  while time.process_time() < 0.85: pass\n  return 1": 1,
  "def f(): return 1": 1,
  "def f(): return 2": 0,
  "import time\ndef f():\n  time.sleep(0.3)\n  return 1": 1,
  "import os\ndef f():\n  for _ in range(9): os.system('true')\n  return 1": 1,
  "def f():\n  while True: pass": "timeout",
  "import time\ndef f(): time.sleep(60)": "timeout",
}


@pytest.mark.slow
def test_no_verdict_changes_where_four_programs_use_the_core():
  with _on_a_busy_core():
    busy = Sandbox(NAMESPACES)
    try:
      for program, expected in ON_A_BUSY_CORE.items():
        asleep = []
        case = {"input": [], "output": 1}
        verdict = busy.run(
          {"mode": "calls", "sources": [program]},
          {"style": "function", "entry_point": "f", "cases": [case], "total": 1},
          time_limit_s=1.0, memory_mib=512, on_asleep=functools.partial(asleep.append, True),
        )  # fmt: skip
        got = verdict.get("passed", "timeout" if "timeout" in verdict else None)
        assert got == expected, (program, verdict)
        assert bool(asleep) == ("sleep" in program), program
    finally:
      busy.close()


def test_nothing_outlives_the_process_that_waits():
  """SIGKILL to the process alone, not to its group, while generated code runs."""
  script = f"""
import sys
from rlvr_jax.codejudge.sandbox import Sandbox
sandbox = Sandbox({NAMESPACES!r})
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
  sandbox = Sandbox(NAMESPACES)
  sandbox._process.kill()
  sandbox._process.wait()
  with pytest.raises(SandboxError, match="no verdict came"):
    _run(sandbox, "def f(): return 1", expected=1)


# Within this no user namespace can be made, so that no sandbox works.
FORBIDDEN = (
  'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"',
  f"""
import os
from rlvr_jax.codejudge.sandbox import SandboxError
from rlvr_jax.rewards import code
os.environ[{UNSANDBOXED!r}] = "yes"
try:
  code.code_self_test()
except SandboxError as error:
  print(error)
os.environ[{UNSANDBOXED!r}] = {ACCEPTED!r}
code.code_self_test()
reference = {{"style": "asserts", "tests": ["assert f() == 1"]}}
grade = code.code("def f(): return 1", reference)
print(code._sandboxes._free[0].mechanism, grade.outcome.value)
""",
)


def test_no_sandbox_no_run_unless_in_words():
  command = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBIDDEN[0], sys.executable]
  result = subprocess.run([*command, FORBIDDEN[1]], capture_output=True, text=True)
  refused, accepted = result.stdout.splitlines()
  assert accepted == "none correct" and result.returncode == 0, result.stderr
  assert "generated code is not run here" in refused
  assert "namespaces: " in refused and ACCEPTED in refused


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
