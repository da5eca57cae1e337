"""Objects that several programs write on conditions: one of several writers succeeds."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

from rlvr_jax.storage import shared
from rlvr_jax.storage.bucket import ChangedError
from rlvr_jax.storage.places import parse_path
from rlvr_jax.storage.shared import DiskFiles, SharedError, open_shared


@pytest.fixture(params=["disk", "bucket"])
def files(request, tmp_path):
  bucket = request.param == "bucket"
  return open_shared(parse_path("", request.getfixturevalue("url")) if bucket else tmp_path)


def test_an_object_is_written_on_conditions(files):
  assert files.names() == files.names("a/") == []
  with pytest.raises(FileNotFoundError):
    files.read_generation("a/1")
  first = files.put("a/1", b"one", generation=0)
  assert files.read_generation("a/1") == (b"one", first)
  with pytest.raises(ChangedError):
    files.put("a/1", b"two", generation=0)
  second = files.put("a/1", b"two", generation=first)
  assert second > first
  with pytest.raises(ChangedError):
    files.put("a/1", b"three", generation=first)
  third = files.put("a/1", b"three")
  files.put("a/12", b"x", generation=0)
  files.put("b/1", b"y", generation=0)
  assert files.names("a/") == ["a/1", "a/12"] and files.names("a/12") == ["a/12"]
  assert files.generations("a/1") == {n: files.read_generation(n)[1] for n in ("a/1", "a/12")}
  files.delete("a/1", generation=second)  # which it does not have
  assert files.read_generation("a/1") == (b"three", third)


def test_a_removed_object_is_absent_and_its_writer_has_lost(files):
  first = files.put("a/1", b"one", generation=0)
  files.delete("a/1", generation=first)
  files.delete("a/1", generation=first)
  assert files.names("a/") == []
  with pytest.raises(FileNotFoundError):
    files.read_generation("a/1")
  with pytest.raises(ChangedError):
    files.put("a/1", b"two", generation=first)
  again = files.put("a/1", b"again", generation=0)
  assert files.read_generation("a/1") == (b"again", again)
  with pytest.raises(ChangedError):
    files.put("a/1", b"two", generation=first)
  files.delete("a/1")
  assert files.names("a/") == []
  files.delete("a/1")


def test_a_writer_of_a_generation_that_is_gone_has_lost(tmp_path):
  """It read the generation, slept, and meanwhile others have written several."""
  files = DiskFiles(tmp_path)
  generation = files.put("a/1", b"0")
  for value in (b"1", b"2", b"3"):
    files.put("a/1", value)
  with pytest.raises(ChangedError):
    files._link("a/1", b"late", generation + 1)
  assert files.read_generation("a/1")[0] == b"3"
  assert len([*(tmp_path / "a").iterdir()]) == 1


def test_a_file_that_a_crash_left_empty_is_absent(tmp_path):
  files = DiskFiles(tmp_path)
  (tmp_path / "leases").mkdir()
  (tmp_path / "leases" / "a.00000001").write_bytes(b"")
  assert files.names("leases/") == [] and files.generations() == {}
  with pytest.raises(FileNotFoundError):
    files.read_generation("leases/a")
  files.put("leases/a", b"1", generation=0)
  assert files.names("leases/") == ["leases/a"] and files.read_generation("leases/a")[0] == b"1"


def test_threads_and_processes_add_up(tmp_path):
  """Each adds 1 to an object on the condition that it is unchanged: no addition is lost."""
  code = (
    "import pathlib, sys, contextlib\n"
    "from rlvr_jax.storage.shared import DiskFiles\n"
    "from rlvr_jax.storage.bucket import ChangedError\n"
    "files, left = DiskFiles(pathlib.Path(sys.argv[1])), 40\n"
    "while left:\n"
    "  data, generation = files.read_generation('a/n')\n"
    "  with contextlib.suppress(ChangedError):\n"
    "    files.put('a/n', b'%d' % (int(data) + 1), generation=generation)\n"
    "    left -= 1\n"
  )
  files = DiskFiles(tmp_path)
  files.put("a/n", b"0", generation=0)
  program = [sys.executable, "-c", code, str(tmp_path)]
  root = pathlib.Path(shared.__file__).parents[2]
  environment = os.environ | {"PYTHONPATH": str(root)}
  started = [subprocess.Popen(program, env=environment) for _ in range(2)]
  assert [process.wait(60) for process in started] == [0, 0]
  threads = [
    threading.Thread(target=exec, args=(code.replace("sys.argv[1]", repr(str(tmp_path))), {}))
    for _ in range(3)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  # A writer that was replaced at once may take its addition for lost, and add again.
  assert int(files.read_generation("a/n")[0]) >= 5 * 40


def test_a_file_system_without_exclusive_links_is_refused(tmp_path, monkeypatch):
  def refuse(*_):
    raise OSError(1, "Operation not permitted")

  monkeypatch.setattr(os, "link", refuse)
  with pytest.raises(SharedError, match="NFS, or gs://"):
    DiskFiles(tmp_path)
  monkeypatch.setattr(os, "link", lambda *_: None)  # replaces what exists
  with pytest.raises(SharedError, match="replaced a file"):
    DiskFiles(tmp_path)
