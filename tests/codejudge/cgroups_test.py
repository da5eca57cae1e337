"""Control groups around sandboxes, where cgroup v2 is delegated to whoever runs the tests."""

import os
import pathlib

import pytest
from codejudge.processes import wait_until
from codejudge.sandbox_test import _run

from rlvr_jax.codejudge import cgroups
from rlvr_jax.codejudge.sandbox import NAMESPACES, NONE, Sandbox

REASON = cgroups.unavailable_reason()
delegated = pytest.mark.skipif(REASON is not None, reason=f"no cgroup v2 is delegated: {REASON}")


@pytest.fixture(params=[NAMESPACES, NONE])
def sandbox(request):
  opened = Sandbox(request.param)
  yield opened
  opened.close()


def test_a_reason_is_given_where_there_is_none(monkeypatch):
  if REASON is None:
    monkeypatch.setattr(cgroups, "_groups_above", lambda: iter([pathlib.Path("/sys/fs/cgroup/x")]))
  with pytest.raises(cgroups.GroupError, match="cgroup"):
    cgroups.open_group()


@delegated
def test_memory_of_files_and_processes_together(sandbox):
  """Of what polling sees, this program stays below the limit."""
  program = """
import time
def f():
  for i, place in enumerate(("/tmp/a", "/tmp/b", "/dev/shm/a")):
    with open(place, "wb") as file: file.write(bytes(15 << 20 if i < 2 else 7 << 20))
  held = bytearray(36 << 20)
  for i in range(0, len(held), 4096): held[i] = 1
  time.sleep(1)
"""
  if sandbox.mechanism == NONE:
    pytest.skip("without walls these files are the machine's")
  assert _run(sandbox, program, expected=None, memory_mib=256).get("passed") == 1
  assert _run(sandbox, program, expected=None, memory_mib=64) == {"memory": True}
  assert _run(sandbox, "def f(): return 1", expected=1, memory_mib=64).get("passed") == 1


@delegated
def test_processes_and_cores_are_limited(sandbox):
  assert int((sandbox._group.path / "pids.max").read_text()) == 40
  controllers = (sandbox._group.path / "cgroup.controllers").read_text().split()
  if "cpu" not in controllers or len(os.sched_getaffinity(0)) < 2:
    pytest.skip("the controller of processor time is not delegated, or there is one core only")
  program = """
import os, time
def f():
  children = []
  for _ in range(4):
    if not (child := os.fork()):
      end = time.monotonic() + 1
      while time.monotonic() < end: pass
      os._exit(0)
    children.append(child)
  return sum(sum(os.wait4(child, 0)[2][:2]) for child in children) < 1.3
"""
  assert _run(sandbox, program, expected=True, time_limit_s=8.0).get("passed") == 1


@delegated
def test_closing_kills_all_and_leaves_no_group(sandbox):
  daemon = "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(600)\ndef f(): return 1"
  path = sandbox._group.path
  _run(sandbox, daemon, expected=1)
  assert (path / "cgroup.procs").read_text().split()
  sandbox.close()
  assert not path.exists()


@delegated
def test_groups_of_the_dead_are_removed(sandbox):
  """A worker that is killed cannot remove its own."""
  parent = sandbox._group.path.parent
  if not (child := os.fork()):
    os._exit(0)
  abandoned = parent / f"rlvr_jax-{child}-0"
  abandoned.mkdir()
  os.waitpid(child, 0)
  Sandbox(NAMESPACES).close()
  wait_until(lambda: not abandoned.exists())
  assert sandbox._group.path.exists()
