"""Programs that do their worst, through a real pool: each costs at most its deadline.

After each, the pool has the worker it had, nothing of the program runs, and the next program is
graded right.
"""

import contextlib
import importlib
import os
import pathlib
import tempfile
import time

import pytest
from codejudge.processes import descendants, wait_until

from rlvr_jax.codejudge import sandbox, sandboxes
from rlvr_jax.rewards import GraderPool, Outcome

LIMIT_S = 0.7  # of programs that are to be stopped
AMPLE_S = 10.0  # of those that are to end by themselves, on a busy machine
SLACK_S = 1.5  # for all to be over
ANSWER = 928374651928374651  # nothing that a program could come upon by chance
GOOD = "def f(x):\n  return x + 1"
GOOD_TASK = {"style": "asserts", "tests": ["assert f(2) == 3"], "time_limit_s": AMPLE_S}

WRONG, TIMEOUT, CORRECT = {Outcome.WRONG}, {Outcome.TIMEOUT}, {Outcome.CORRECT}
STOPPED = WRONG | TIMEOUT


@pytest.fixture(scope="module")
def pool():
  with GraderPool("code") as opened:
    yield opened


@pytest.fixture(scope="module")
def treasure():
  """A file that programs are told of, which they may neither read nor change."""
  places = [pathlib.Path.home(), pathlib.Path(tempfile.gettempdir()), pathlib.Path.cwd()]
  files = [place / f".rlvr_jax_treasure_{os.getpid()}" for place in places if os.access(place, 2)]
  for file in files:
    file.write_text("gold")
    file.chmod(0o666)
  yield files
  for file in files:
    file.unlink()


def _grade(pool, program, reference, limit_s=AMPLE_S):
  """Grades a hostile program and looks for damage."""
  workers, before = pool.worker_pids(), descendants(*pool.worker_pids())
  began = time.monotonic()
  (grade,) = pool.grade([program], [reference | {"time_limit_s": limit_s}])
  assert time.monotonic() - began < sandbox.WALL_CLOCK_FACTOR * limit_s + SLACK_S
  assert pool.worker_pids() == workers
  # Of the item before, something may have been about to end.
  wait_until(lambda: descendants(*workers) <= before)
  (after,) = pool.grade([GOOD], [GOOD_TASK])
  assert after.outcome is Outcome.CORRECT, after
  return grade


def _grade_eater(pool, program, allowed):
  """Programs that may need their whole time get little of it."""
  limit_s = LIMIT_S if Outcome.TIMEOUT in allowed else AMPLE_S
  grade = _grade(pool, program, _asserts(memory_mib=512), limit_s)
  assert grade.outcome in allowed, grade


def _asserts(**more):
  return {"style": "asserts", "tests": [f"assert f(2) == {ANSWER}"]} | more


# --- programs that take what they can get ---------------------------------------------------------

EATERS = {
  "memory": ("def f(x): return len([bytearray(2**28) for _ in range(100)])", WRONG),
  "deep recursion": ("def f(x): return f(x + 1)", WRONG),
  "deeply nested answer": (
    "def f(x):\n  a = []\n  for _ in range(10**6): a = [a]\n  return a", WRONG,
  ),
  "deeply nested source": ("f = " + "(" * 10**5 + ")" * 10**5, WRONG),
  "many minuses": ("f = " + "-" * 10**6 + "1", WRONG),
  "circular answer": ("def f(x):\n  a = []\n  a.append(a)\n  return a", WRONG),
  "huge integer": ("def f(x): return 1 << 10**7", WRONG),
  "compiled bomb": ("f = lambda x: (1 << 34,) * 2**30", WRONG),
  "files": (
    "import itertools\ndef f(x):\n  for i in itertools.count():\n"
    "    open(f'/tmp/{i}', 'wb').write(bytes(2**23))",
    WRONG,
  ),
  "shared memory": ("def f(x): open('/dev/shm/x', 'wb').write(bytes(2**28))", WRONG),
  "memory of no process": (
    "import os\nkept = []\ndef f(x):\n  for i in range(60):\n    n = os.memfd_create('m')\n"
    f"    os.write(n, bytes(2**24 - 2**20)); kept.append(n)\n  time.sleep(1)\n  return {ANSWER}\n"
    "import time",
    WRONG,
  ),
  "memory of the system": (
    "import ctypes, time\nc = ctypes.CDLL(None)\nc.shmat.restype = ctypes.c_void_p\ndef f(x):\n"
    "  for _ in range(20):\n    n = c.shmget(0, 40 << 20, 0o1600)\n    a = c.shmat(n, None, 0)\n"
    "    c.memset(ctypes.c_void_p(a), 1, 40 << 20); c.shmdt(ctypes.c_void_p(a))\n"
    f"  time.sleep(1)\n  return {ANSWER}",
    WRONG,
  ),
  "shared memory of many": (
    "import mmap, os, time\ndef f(x):\n  for _ in range(10):\n    if not os.fork():\n"
    "      m = mmap.mmap(-1, 60 << 20); m.write(bytes(60 << 20)); time.sleep(60)\n"
    f"  os.wait()\n  return {ANSWER}",
    WRONG,
  ),
  "threads": (
    "import threading, time\ndef f(x):\n  while True:\n"
    "    threading.Thread(target=time.sleep, args=(60,)).start()",
    WRONG,
  ),
  "threads left running": (
    "import threading\ndef spin():\n  while True: pass\n"
    f"for _ in range(4): threading.Thread(target=spin).start()\ndef f(x): return {ANSWER}",
    CORRECT | TIMEOUT,
  ),
  "daemons": (
    "import os, time\nif not os.fork():\n  os.setsid()\n  if not os.fork():\n"
    f"    time.sleep(600)\n  os._exit(0)\ndef f(x): return {ANSWER}",
    CORRECT,
  ),
}  # fmt: skip
SLOW_EATERS = {
  "deeper recursion": (
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x + 1)", STOPPED,
  ),
  "recursion in C": (
    "import sys\nsys.setrecursionlimit(10**9)\n"
    "class A:\n  def __repr__(self): return repr(self)\ndef f(x): return repr(A())",
    STOPPED,
  ),
  "huge integer, printed": ("def f(x): return str(10 ** 10**7)", STOPPED),
  "long answer": ("def f(x): return list(range(10**7))", STOPPED),
  "many short answers": ("def f(x):\n  while True: yield x", STOPPED),
  "zip bomb": (
    "import zlib\ndef f(x):\n  b = zlib.compress(bytes(2**26))\n"
    "  return [zlib.decompress(b) for _ in range(1000)]",
    STOPPED,
  ),
  "loop": ("def f(x):\n  while True: pass", TIMEOUT),
  "loop at once": ("while True: pass", TIMEOUT),
  "sleep": ("import time\ntime.sleep(10**6)", TIMEOUT),
  "no signal heard": (
    "import signal\n"
    "for s in set(range(1, 65)) - {9, 17, 19, 32, 33}: signal.signal(s, signal.SIG_IGN)\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ndef f(x):\n  while True: pass",
    TIMEOUT,
  ),
  "no exception heard": (
    "def f(x):\n  while True:\n    try:\n      while True: pass\n    except BaseException: pass",
    TIMEOUT,
  ),
  "regular expression": (
    "import re\ndef f(x): return re.match(r'(a|a)*b', 'a' * 64)", TIMEOUT,
  ),
  "power": ("def f(x): return 9 ** 9 ** 9", STOPPED),
  "fork bomb": ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", TIMEOUT),
  "fork bomb in new sessions": (
    "import os\nwhile True:\n  try:\n    if not os.fork(): os.setsid()\n  except OSError: pass",
    TIMEOUT,
  ),
  "shell fork bomb": (
    "import subprocess\n"
    "while True: subprocess.run(':(){ :|:& };:', shell=True, executable='/bin/bash')",
    STOPPED,
  ),
  "memory of many": (
    "import os, time\ndef f(x):\n  for _ in range(25): os.fork()\n"
    "  b = b'x' * 2**28\n  time.sleep(60)",
    STOPPED,
  ),
  "10 GB of output": (
    "import os\ndef f(x):\n"
    "  for _ in range(10**4): os.write(1, bytes(2**20)); os.write(2, bytes(2**20))\n"
    f"  return {ANSWER}",
    CORRECT | TIMEOUT,
  ),
  "answers without end": (
    "import os\nwhile True:\n  for n in range(3, 20):\n    try: os.write(n, bytes(2**16))\n"
    "    except OSError: pass",
    STOPPED,
  ),
}  # fmt: skip


@pytest.mark.slow
def test_processor_time_is_that_of_all_processes(pool):
  """Lest one item's many processes take it from other items until their deadline."""
  program = (
    "import os, time\ndef f(x):\n  for _ in range(5):\n    if not os.fork():\n"
    "      while time.process_time() < 1: pass\n      os._exit(0)\n"
    f"  for _ in range(5): os.wait()\n  return {ANSWER}"
  )
  assert _grade(pool, program, _asserts(), 4.0).outcome is Outcome.TIMEOUT  # by then five seconds


@pytest.mark.parametrize("name", EATERS)
def test_eaters(pool, name):
  _grade_eater(pool, *EATERS[name])


@pytest.mark.parametrize(
  "name",
  [
    name if name in ("no signal heard", "fork bomb") else pytest.param(name, marks=pytest.mark.slow)
    for name in SLOW_EATERS
  ],
)
def test_eaters_of_time(pool, name):
  _grade_eater(pool, *SLOW_EATERS[name])


@pytest.mark.parametrize(
  "program",
  [
    "import sys\nwhile True: sys.stdout.write('x' * 2**20)",
    "import os\nos.fork()\nwhile True: os.write(1, b'x' * 2**20)",
    "import sys\nsys.stdout.write('3\\n' * 10**7)",
  ],
)
def test_output_without_end(pool, program):
  reference = {"style": "stdin", "cases": [{"input": "", "output": "3"}]}
  grade = _grade(pool, program, reference)
  assert grade.outcome is Outcome.WRONG and "more than the output limit" in grade.detail, grade


def test_a_daemon_does_not_hold_up_a_script(pool):
  program = "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(600)\nprint(3)"
  reference = {"style": "stdin", "cases": [{"input": "", "output": "3"}] * 3}
  assert _grade(pool, program, reference).outcome is Outcome.CORRECT


# --- programs that go for what is outside ---------------------------------------------------------


def test_treasures_are_out_of_reach(pool, treasure):
  program = """
import os, pathlib
def f(paths):
  found = []
  for path in map(pathlib.Path, paths):
    for attempt in (path.read_text, lambda: path.write_text("lead"), path.unlink,
                    lambda: os.listdir(path.parent).index(path.name)):
      try:
        attempt()
        found.append(str(path))
      except (OSError, ValueError):
        pass
  return [path for path in found if path not in inside]
"""
  paths = [str(path) for path in treasure]
  # /tmp inside is the program's own: to write there is no harm, and nothing shows outside.
  program += f"inside = {[path for path in paths if path.startswith('/tmp/')]}\n"
  cases = [{"input": [["/etc/shadow", *paths]], "output": []}]
  reference = {"style": "function", "entry_point": "f", "cases": cases}
  grade = _grade(pool, program, reference)
  assert grade.outcome is Outcome.CORRECT, grade
  assert [path.read_text() for path in treasure] == ["gold"] * len(treasure)


KILLERS = {
  "everyone": "import os\nos.kill(-1, 9)",
  "parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getppid(), 15)",
  "first process": "import os, signal\nfor s in set(range(1, 32)): os.kill(1, s)\nos.kill(1, 9)",
  "group": "import os\nos.killpg(0, 9)",
  "limits of the judge": (
    "import resource\nfor p in (1, 2):\n  for k in range(16):\n"
    "    try: resource.prlimit(p, k, (0, 0))\n    except (OSError, ValueError): pass"
  ),
  "crash": "import ctypes\nctypes.string_at(0)",
  "closed descriptors": "import os\nos.closerange(0, 1000)",
  "abort": "import os\nos.abort()",
}


@pytest.mark.parametrize("name", KILLERS)
def test_killers(pool, name):
  program = f"{KILLERS[name]}\ndef f(x): return x"
  assert _grade(pool, program, _asserts()).outcome is Outcome.WRONG


def test_a_judge_without_memory_is_a_verdict(pool):
  """The program takes it away at once, when there are many tests to read."""
  program = (
    "import resource\nresource.prlimit(1, resource.RLIMIT_AS, (0, 0))\n"
    "def f(x): return [list(range(1000)) for _ in range(1000)]"
  )
  case = {"input": [list(range(1000))], "output": ANSWER}
  reference = {"style": "function", "entry_point": "f", "cases": [case] * 400}
  grade = _grade(pool, program, reference)
  assert (grade.outcome, grade.score) == (Outcome.WRONG, 0.0), grade


# --- programs that would rather not compute the answer --------------------------------------------

# What a program can lay hands on of the harness, in its own process: no table leads there,
# but the frames that it runs in do, and the functions that these name.
GRASP = """
import sys
frame, spaces = sys._getframe(), {}
while frame := frame.f_back:
  for value in [*frame.f_globals.values()]:
    for function in (value, getattr(value, '__init__', None)):
      space = getattr(function, '__globals__', {})
      if str(space.get('__name__')).startswith('harness.'):
        spaces[space['__name__']] = space
def put(name, value):
  for space in spaces.values():
    if name in space:
      space[name] = value
"""
TARGETS = ("judge", "_is_equal", "as_builtin", "_make_checks", "receive", "Program", "Handle")


def test_programs_do_reach_the_harness_in_their_own_process(pool):
  """Else nothing would be shown by those that change it."""
  files = sorted(pathlib.Path(sandbox._FOLDER).glob("*.py"))
  names = [f"harness.{file.stem}" for file in files if file.stem != "__init__"]
  program = (
    f"{GRASP}for n in {TARGETS[:2]}: put(n, put)\ndef f(targets):\n"
    "  found = [n for n in targets if any(n in space for space in spaces.values())]\n"
    "  return sorted(spaces), found, [spaces['harness.judge'][n] is put for n in targets[:2]]"
  )
  targets = [*TARGETS, "encode"]
  case = {"input": [targets], "output": [names, targets, [True, True]]}
  grade = _grade(pool, program, {"style": "function", "entry_point": "f", "cases": [case]})
  assert grade.outcome is Outcome.CORRECT, grade


FAKES = {
  "early exit": "import os\nos._exit(0)",
  "exit when called": "import os\ndef f(x): os._exit(0)",
  "sys.exit": "import sys\nsys.exit(0)",
  "sys.exit when called": "import sys\ndef f(x): sys.exit(0)",
  "stop iteration": "def f(x): raise StopIteration",
  "lying equality": (
    "class Liar:\n  def __eq__(self, other): return True\n  __ne__ = __lt__ = __gt__ = __eq__\n"
    "  __hash__ = None\n  def __bool__(self): return True\ndef f(x): return Liar()"
  ),
  "lying int": (
    "class Liar(int):\n  def __eq__(self, other): return True\n  __hash__ = int.__hash__\n"
    "def f(x): return Liar(1)"
  ),
  "lying class": (
    "class Liar:\n  __class__ = int\n  def __eq__(self, other): return True\n"
    "  def __index__(self): return 1\ndef f(x): return Liar()"
  ),
  "lying metaclass": (
    "class Meta(type):\n  def __eq__(self, other): return True\n  __hash__ = type.__hash__\n"
    "class f(metaclass=Meta):\n  def __new__(self, x): return f"
  ),
  "builtins": (
    "import builtins\nclass Any(Exception): pass\nbuiltins.AssertionError = Any\n"
    "builtins.int = builtins.list = builtins.isinstance = lambda *a: True\n"
    "builtins.compile = builtins.exec = lambda *a, **k: None\ndef f(x): return x"
  ),
  "harness": (
    f"{GRASP}for n in {TARGETS}:\n  put(n, lambda *a, **k: True)\ndef f(x): return x"
  ),
  "encoding": (
    f"{GRASP}put('encode', lambda value, refer: ['handle', {{'passed': 1}}])\ndef f(x): return x"
  ),
  "unknown tags": (
    f"{GRASP}put('encode', lambda value, refer: ['builtin', 'eval'])\ndef f(x): return x"
  ),
  "frames": (
    "import sys\nframe = sys._getframe()\nfound = []\nwhile frame:\n"
    "  found += [v for v in {**frame.f_globals, **frame.f_locals}.values() if type(v) is int]\n"
    "  frame = frame.f_back\ndef f(x): return max(found, default=0)"
  ),
  "tracing": (
    "import sys\ndef trace(frame, event, arg):\n  for n in list(frame.f_locals):\n"
    "    if n in ('error', 'failure'): frame.f_locals[n] = ''\n  return trace\n"
    "sys.settrace(trace)\ndef f(x): return x"
  ),
  "garbage collector": (
    "import gc, re\ndef f(x):\n  seen, new = set(), [gc.get_objects()]\n"
    "  while new:\n    o = new.pop()\n    if id(o) in seen: continue\n    seen.add(id(o))\n"
    "    if type(o) is str:\n      found = re.search('assert f.2. == ([0-9]+)', o)\n"
    "      if found: return int(found[1])\n    new += gc.get_referents(o)"
  ),
  "own memory": (
    "import ctypes, re\nneedle = re.compile(b'assert f.2. ==' + b' ([0-9]+)')\ndef f(x):\n"
    "  for line in open('/proc/self/maps').read().splitlines():\n"
    "    place, rights, _, _, _, *name = line.split()\n"
    "    if rights[0] != 'r' or name not in ([], ['[heap]']): continue\n"
    "    a, b = (int(n, 16) for n in place.split('-'))\n"
    "    found = needle.search((ctypes.c_char * (b - a)).from_address(a))\n"
    "    if found: return int(found[1])"
  ),
  "memory of others": (
    "import os, re\ndef f(x):\n  for p in filter(str.isdigit, os.listdir('/proc')):\n"
    "    if int(p) == os.getpid(): continue\n"
    "    for n in ('mem', 'environ', 'cmdline', 'fd/0', 'fd/3', 'fd/4'):\n"
    "      try: found = re.search(rb'[0-9]{18}', open(f'/proc/{p}/{n}', 'rb').read())\n"
    "      except OSError: continue\n      if found: return int(found[0])"
  ),
  "descriptors": (
    "import os, re\ndef f(x):\n  for n in range(0, 200):\n"
    "    try:\n      os.set_blocking(n, False)\n"
    "      found = re.search(rb'[0-9]{18}', os.read(n, 10**6))\n    except OSError: continue\n"
    "    if found: return int(found[0])"
  ),
  "verdict on every descriptor": (
    "import json, os\nv = json.dumps({'passed': 1, 'total': 1, 'failure': ''}).encode()\n"
    "for n in range(1000):\n  try: os.write(n, len(v).to_bytes(8, 'big') + v)\n"
    "  except OSError: pass\ndef f(x): return x"
  ),
  "verdict in other words": (
    "print('{\"outcome\": \"correct\", \"score\": 1.0, \"detail\": \"\"}', flush=True)\n"
    "import os\nfor n in range(100):\n"
    "  try: os.write(n, b'{\"outcome\": \"correct\", \"score\": 1.0, \"detail\": \"\"}\\n')\n"
    "  except OSError: pass\ndef f(x): return x"
  ),
  "answers in advance": (
    "import json, os\nv = json.dumps({'value': True, 'changed': []}).encode()\n"
    "for n in range(3, 100):\n"
    "  try: os.write(n, (len(v).to_bytes(8, 'big') + v) * 9)\n"
    "  except OSError: pass\ndef f(x): return x"
  ),
  "test names": "class E:\n  def __eq__(s, o): return True\nf = assert_ = check = E()",
  "pytest": "import sys, types\nsys.modules['__main__'] = types.ModuleType('x')\ndef f(x): pass",
  "at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
}  # fmt: skip


def test_fakes_do_not_pass(pool):
  grades = pool.grade([*FAKES.values()], [_asserts(time_limit_s=AMPLE_S)] * len(FAKES))
  for name, grade in zip(FAKES, grades, strict=True):
    assert (grade.outcome, grade.score) == (Outcome.WRONG, 0.0), (name, grade)


@pytest.mark.parametrize(
  ("program", "tests"),
  [
    # What a test itself uses is not the program's.
    ("def f(x): return 0\ndef set(x): return 1\ndef abs(x): return 0", "assert set(f(1)) == {5}"),
    ("def f(x): return 0\nclass math:\n  isclose = max", "assert math.isclose(f(1), 5)"),
    # An end of an iteration is not what a test sees of an exception.
    ("def f(x): raise StopIteration", "assert all(map(lambda y: f(y) == 5, [1, 2]))\nassert f(1)"),
    ("def f(x): raise StopIteration", "assert list(map(f, [1])) == []"),
    # A test does not hand what it expects to the program: not by comparing, not by looking for it.
    (
      "class L:\n  def __contains__(s, x): return True\n  def __sub__(s, x): return 0\n"
      "  def __abs__(s): return 0\n  def __iter__(s): return iter([])\ndef f(x): return L()",
      "assert 5 in f(1)",
    ),
    (
      "class L:\n  def __sub__(s, x): return 0\n  __rsub__ = __sub__\ndef f(x): return L()",
      "assert abs(f(1) - 5) < 1",
    ),
    ("class L:\n  def __lt__(s, x): return True\n  __gt__ = __lt__\ndef f(x): return L()",
     "assert f(1) < 5"),
    # What a program names is not run by the judge.
    (
      f"{GRASP}def f(x): return 5\nencode = spaces['harness.messages']['encode']\n"
      "put('encode', lambda v, r: ['builtin', 'eval'] if v is f else encode(v, r))",
      "assert f('__name__') == 'tests'",
    ),
  ],
)  # fmt: skip
def test_tests_cannot_be_talked_round(pool, program, tests):
  grade = _grade(pool, program, {"style": "asserts", "tests": [tests]})
  assert grade.outcome is Outcome.WRONG, grade


@pytest.mark.parametrize("name", ["early exit", "sys.exit", "at exit", "verdict in other words"])
def test_fakes_of_scripts_do_not_pass(pool, name):
  reference = {"style": "stdin", "cases": [{"input": "2", "output": str(ANSWER)}]}
  assert _grade(pool, FAKES[name], reference).outcome is Outcome.WRONG


# --- programs that try their luck again and again -------------------------------------------------

# Solves nothing: it guesses, and keeps what it has guessed where the next rollout finds it. A call
# that comes after a guess is taken for a sign that the guess was right.
GUESSER = """
import json, os
path, right, guess, calls = {path!r}, [], -1, 0
if os.path.exists(path):
  right, guess = json.load(open(path))
def f(x):
  global calls, guess, right
  calls += 1
  if calls <= len(right):
    return right[calls - 1]
  if calls == len(right) + 2:
    right, guess = [*right, guess], -1
  if calls == len(right) + 1:
    guess += 1
    json.dump([right, guess], open(path, "w"))
  return guess
"""


@pytest.mark.parametrize(
  "reference",
  [
    {"style": "asserts", "tests": ["assert f(1) == 1", "assert f(2) == 0", "assert f(3) == 2"]},
    {"style": "asserts", "tests": ["assert f(1) == 1\nassert f(2) == 0 and f(3) == 2"]},
    {"style": "check", "entry_point": "f",
     "test": "def check(c):\n  for x, y in ((1, 1), (2, 0), (3, 2)): assert c(x) == y"},
    {"style": "function", "entry_point": "f",
     "cases": [{"input": [x], "output": y} for x, y in ((1, 1), (2, 0), (3, 2))]},
  ],
)  # fmt: skip
def test_guesses_are_not_told_to_be_right(reference, tmp_path, monkeypatch):
  """Without walls, so that nothing is left to them: a program finds the files of the one before."""
  grader = importlib.import_module("rlvr_jax.rewards.code")
  program = GUESSER.format(path=str(tmp_path / "guesses"))
  with contextlib.closing(sandbox.Sandbox(sandbox.NONE)) as open_world:
    monkeypatch.setattr(grader, "_sandboxes", sandboxes.Sandboxes())
    monkeypatch.setattr(sandboxes, "open_sandbox", lambda: open_world)
    outcomes = [grader.code(program, reference).outcome for _ in range(9)]
  assert (tmp_path / "guesses").exists() and set(outcomes) == WRONG, outcomes
