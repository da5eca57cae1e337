"""Objects in a folder and in a bucket: the first put counts, and each is complete or absent."""

import errno
import os
import threading
import time

import pytest
from gcs_emulator import BUCKET, emulated

from rlvr_jax.storage import objects as objects_module
from rlvr_jax.storage.bucket import UnreachableError
from rlvr_jax.storage.files import TEMPORARY, ForeignNameError
from rlvr_jax.storage.objects import open_objects
from rlvr_jax.storage.places import parse_path


@pytest.fixture
def emulator():
  with emulated() as emulator:
    emulator.objects.clear()
    yield emulator


@pytest.fixture(params=["folder", "bucket"])
def objects(request, tmp_path):
  if request.param == "folder":
    return open_objects(tmp_path / "fleet")
  request.getfixturevalue("emulator")
  return open_objects(parse_path("", f"gs://{BUCKET}/fleet"))


def test_what_is_put_comes_back(objects):
  assert objects.list() == {} and objects.get("a/x") is None and objects.find("a/x") is None
  assert objects.put("a/x", b"one") and objects.put("b/y", b"")
  assert not objects.put("a/x", b"two")
  assert objects.get("a/x") == b"one" and objects.get("b/y") == b""
  assert objects.get("a/x", 2) == b"on" and objects.get("a/x", 9) == b"one"
  listed = objects.list()
  assert objects.find("a/x") == listed["a/x"] and objects.find("a") is None
  assert {name: entry.size for name, entry in listed.items()} == {"a/x": 3, "b/y": 0}
  objects.replace("a/x", b"two")
  objects.replace("c", b"three")
  assert objects.get("a/x") == b"two" and objects.get("c") == b"three"
  after = objects.list()
  assert after["a/x"].change != listed["a/x"].change and after["b/y"] == listed["b/y"]
  assert [*objects.list("a/")] == ["a/x"] and objects.list("z/") == {} == objects.list("a/y")
  objects.remove("a/x")
  objects.remove("a/x")
  assert [*objects.list()] == ["b/y", "c"] and objects.put("a/x", b"three")


def test_of_many_puts_one_counts(objects):
  won = []

  def put(number):
    if objects.put("a/x", b"%d" % number * 10**5):
      won.append(number)

  threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(won) == 1 and objects.get("a/x") == b"%d" % won[0] * 10**5
  assert [*objects.list()] == ["a/x"]


def test_a_put_that_was_interrupted_is_not_seen(tmp_path):
  objects = open_objects(tmp_path)
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / f"0123{TEMPORARY}").write_bytes(b"half")
  assert objects.list() == {} and objects.put("a/x", b"1")


def test_what_killed_programs_left_is_removed(tmp_path):
  (tmp_path / "groups").mkdir()
  old, new = (tmp_path / "groups" / f"{name}{TEMPORARY}" for name in ("old", "new"))
  for path in (old, new):
    path.write_bytes(b"half")
  os.utime(old, (0, time.time() - 4000))
  open_objects(tmp_path)
  assert [path.name for path in (tmp_path / "groups").iterdir()] == [new.name]


@pytest.mark.parametrize("function", ["open", "scandir", "link", "fsync"])
def test_a_stale_file_is_looked_up_anew(tmp_path, monkeypatch, function):
  """A network disk says so of files that another client has removed or replaced."""
  objects, real, left = open_objects(tmp_path), getattr(os, function), 2

  def fail(*args, **options):
    nonlocal left
    left -= 1
    if left >= 0:
      raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return real(*args, **options)

  objects.put("a/x", b"1")
  monkeypatch.setattr(os, function, fail)
  assert objects.put("a/y", b"2") and objects.get("a/x") == b"1"
  assert [*objects.list()] == ["a/x", "a/y"] and left < 0
  left = 10**9
  with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
    _ = objects.put("a/z", b""), objects.get("a/z"), objects.list()


def test_a_link_whose_answer_is_lost_counts(tmp_path, monkeypatch):
  objects, link = open_objects(tmp_path), os.link

  def lose(*args):
    link(*args)
    return link(*args)

  monkeypatch.setattr(os, "link", lose)
  assert objects.put("a/x", b"1") and not objects.put("a/x", b"1")


@pytest.mark.parametrize("name", ["../x", "/x"])
def test_names_stay_in_the_folder(name, tmp_path):
  objects = open_objects(tmp_path / "fleet")
  for action in (objects.get, objects.remove, lambda name: objects.put(name, b"1")):
    with pytest.raises(ForeignNameError):
      action(name)
  assert os.listdir(tmp_path) == ["fleet"] and os.listdir(tmp_path / "fleet") == []


def test_a_bucket_that_does_not_answer_is_asked_again(emulator, monkeypatch):
  objects = open_objects(parse_path("", f"gs://{BUCKET}/fleet"))
  objects.put("a/x", b"1")
  monkeypatch.setattr(objects_module, "_AGAIN_S", 0.01)
  emulator.refuses = 403
  timer = threading.Timer(0.3, setattr, (emulator, "refuses", None))
  timer.start()
  assert objects.get("a/x") == b"1"
  emulator.refuses = 403
  objects = open_objects(parse_path("", f"gs://{BUCKET}/fleet"), unreachable_s=0.1)
  try:
    with pytest.raises(UnreachableError):
      objects.list()
  finally:
    emulator.refuses = None


def test_a_lost_answer_changes_nothing(emulator, monkeypatch):
  objects = open_objects(parse_path("", f"gs://{BUCKET}/fleet"))
  lost = []

  def lose(method, path):
    if not lost:
      lost.append(method)
      raise ConnectionError

  monkeypatch.setattr(emulator, "before_answer", lose)
  assert objects.put("a/x", b"1") and lost == ["POST"]
  assert not objects.put("a/x", b"2") and objects.get("a/x") == b"1"
