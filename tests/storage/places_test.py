"""Objects with conditions, and a workdir's files in a bucket."""

import ast
import contextlib
import pathlib
import threading
import time

import numpy as np
import pytest

from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.rollouts.group import Group
from rlvr_jax.rollouts.store import RolloutStore, StoreError, TornShardError
from rlvr_jax.storage import places
from rlvr_jax.storage.bucket import Bucket, ChangedError, UnreachableError
from rlvr_jax.storage.files import ForeignNameError, JsonLines, path_within
from rlvr_jax.storage.places import Workdir


@pytest.fixture
def names(emulator, folder):
  """The names of the objects in the folder."""
  return lambda: emulator.names(folder)


@contextlib.contextmanager
def opened(url):
  """A workdir as a run has it: fetched, and closed in order."""
  with contextlib.closing(Workdir(url)) as workdir:
    workdir.fetch()
    yield workdir


# --- objects --------------------------------------------------------------------------------------


def test_an_object_is_written_on_conditions(url):
  bucket = Bucket(url)
  first = bucket.put("a", b"one", generation=0)
  assert bucket.read_generation("a") == (b"one", first)
  with pytest.raises(ChangedError, match=f"{url}/a was changed by another process"):
    bucket.put("a", b"two", generation=0)
  second = bucket.put("a", b"two", generation=first)
  with pytest.raises(ChangedError):
    bucket.put("a", b"three", generation=first)
  # The answer to a write may be lost, after which gcsfs repeats it.
  assert bucket.put("a", b"two", generation=first) == second
  bucket.delete("a", generation=first)
  assert bucket.read("a") == b"two"
  bucket.delete("a", generation=second)
  bucket.delete("a")
  with pytest.raises(FileNotFoundError):
    bucket.read("a")


def test_names_beyond_one_page_of_a_listing(url, emulator):
  expected = [f"{k:04d}" for k in range(1003)]
  for name in expected:
    emulator.put(f"{Bucket(url)._prefix}/{name}", b"")
  assert Bucket(url).names() == expected
  assert Bucket(url).names("100") == ["1000", "1001", "1002"]


def test_what_arrives_damaged_is_an_error(url, emulator, monkeypatch):
  monkeypatch.setattr(emulator, "damages", True)
  with pytest.raises(OSError, match=r"a\.txt arrived damaged in the bucket; check the network"):
    Bucket(url).put("a.txt", b"text")


def test_a_bucket_that_refuses_is_an_error_with_a_remedy(url, emulator, monkeypatch):
  monkeypatch.setattr(emulator, "refuses", 403)
  with pytest.raises(UnreachableError, match=r"cannot be reached: .*roles/storage.objectUser"):
    Bucket(url).put("a", b"")


def test_a_bucket_that_is_not_there_is_named(url, emulator, monkeypatch):
  monkeypatch.setattr(emulator, "refuses", 404)
  with pytest.raises(UnreachableError, match=f"{url}/a cannot be written: there is no bucket"):
    Bucket(url).put("a", b"")


@pytest.fixture
def hanging(emulator):
  """Within it, writes have their effect and are not answered."""

  @contextlib.contextmanager
  def hanging():
    over = threading.Event()
    emulator.before_answer = lambda method, path: method == "POST" and over.wait(60)
    yield
    over.set()
    emulator.before_answer = lambda method, path: None

  return hanging


def test_a_write_ends_with_the_time_that_its_claim_certainly_has(url, hanging):
  bucket = Bucket(url, lambda: 0.3)
  began = time.monotonic()
  with hanging(), pytest.raises(UnreachableError, match=f"{url}/a cannot .*no response in time"):
    bucket.put("a", b"one")
  assert time.monotonic() - began < 30


def test_a_large_object_is_one_put(url, emulator):
  data = np.random.default_rng(0).bytes(2**20) * 51  # gcsfs would write it in parts
  before = len(emulator.requests)
  Bucket(url).put("large", data, generation=0)
  assert len(emulator.requests) == before + 1
  assert Bucket(url).read("large") == data


# --- names ----------------------------------------------------------------------------------------

ROOT = pathlib.Path(places.__file__).parents[1]


def test_a_foreign_name_gives_a_path_within_its_folder_or_none(tmp_path):
  assert path_within(tmp_path, "a") == tmp_path / "a"
  assert path_within(tmp_path, "a/b.jsonl") == tmp_path / "a" / "b.jsonl"
  assert path_within(tmp_path, "..a/b..") == tmp_path / "..a" / "b.."
  for name in ["", ".", "..", "../a", "a/../../b", "a/..", "/etc/a", "//a", "a//b", "a/", "a\0b"]:
    with pytest.raises(ForeignNameError, match=r"would not be in .*Remove"):
      path_within(tmp_path, name)
  with pytest.raises(ForeignNameError, match="3 would not be in"):
    path_within(tmp_path, 3)


@pytest.mark.parametrize("name", ["../../out", "/out"])
def test_objects_of_a_bucket_do_not_leave_the_staging_folder(url, name, tmp_path, monkeypatch):
  (temporary := tmp_path / "temporary").mkdir()
  monkeypatch.setattr("tempfile.tempdir", str(temporary))
  Bucket(url).put(name, b'{"step": 0}\n')
  with contextlib.closing(Workdir(url)) as workdir, pytest.raises(ForeignNameError):
    workdir.fetch()
  assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


def test_names_in_a_foreign_store_reach_no_file_outside(url, names):
  for name in ("../../out", "x/../../../out", "../00000000.000000.safetensors"):
    Bucket(f"{url}/rollouts/groups").put(name, b"theirs")
  with RolloutStore(f"{url}/rollouts", writable=True) as store:
    assert store.read_groups(0) == {}


def test_there_is_one_way_from_a_name_to_a_path():
  """In the rooms that read foreign names, a path is joined with names of our own alone."""
  rooms = [*(ROOT / "storage").glob("*.py"), ROOT / "rollouts" / "store.py"]
  found = {}
  for file in rooms:
    tree = ast.parse(file.read_text())
    exempt = [n for n in ast.walk(tree) if getattr(n, "name", "") == "path_within"]
    inside = {id(node) for function in exempt for node in ast.walk(function)}
    for node in ast.walk(tree):
      if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and id(node) not in inside:
        if not is_own_name(node.right):
          found[f"{file.name}:{node.lineno}"] = ast.unparse(node)
  assert found == {}


def is_own_name(node):
  """Whether what a path is joined with is a literal, a constant, digits of a number or a number."""
  if isinstance(node, ast.JoinedStr):
    formats = [value for value in node.values if isinstance(value, ast.FormattedValue)]
    return all(value.format_spec and "d" in ast.unparse(value.format_spec) for value in formats)
  if isinstance(node, ast.Name):
    return node.id.isupper()
  return not any(isinstance(part, (ast.Name, ast.Attribute)) for part in ast.walk(node))


# --- workdirs -------------------------------------------------------------------------------------


def test_a_local_workdir_is_used_as_it_is(tmp_path):
  with contextlib.closing(Workdir(tmp_path / "run")) as workdir:
    assert workdir.path == workdir.local == tmp_path / "run"
    workdir.fetch()
    workdir.publish()
  assert list(tmp_path.iterdir()) == []


def test_lines_are_one_object_that_is_put_again(url, names):
  with opened(url) as workdir:
    lines = JsonLines(workdir.local / "metrics.jsonl")
    for step in range(3):
      lines.append([{"step": step, "phase": "train"}, {"step": step, "phase": "eval"}])
      workdir.publish()
    with open(workdir.local / "metrics.jsonl", "ab") as file:
      file.write(b'{"step": 3, "pha')  # another thread is writing
    staging = workdir.local.parent
  assert not staging.exists()
  assert names() == ["metrics.jsonl"]
  assert [record["step"] for record in read_metrics(url)] == [0, 0, 1, 1, 2, 2]
  with opened(url) as workdir:
    JsonLines(workdir.local / "metrics.jsonl").append([{"step": 3, "phase": "train"}])
  assert [record["step"] for record in read_metrics(url)] == [0, 0, 1, 1, 2, 2, 3]
  with pytest.raises(FileNotFoundError, match=r"rollouts\.jsonl does not exist"):
    with places.open_lines(places.parse_path("", url) / "rollouts.jsonl"):
      pass


def test_what_was_not_answered_is_put_again(url, hanging):
  with opened(url) as workdir:
    lines = JsonLines(workdir.local / "metrics.jsonl")
    lines.append([{"step": 0, "phase": "train"}])
    workdir.set_guard(lambda: 0.3)
    with hanging(), pytest.raises(UnreachableError):
      workdir.publish()
    workdir.set_guard(lambda: 60.0)
    lines.append([{"step": 1, "phase": "train"}])
  assert [record["step"] for record in read_metrics(url)] == [0, 1]


def test_a_process_without_its_claim_publishes_nothing(url, names):
  def guard():
    raise PermissionError("no heartbeat")

  with opened(url) as workdir:
    (workdir.local / "metrics.jsonl").write_text("{}\n")
    workdir.set_guard(guard)
    with pytest.raises(PermissionError):
      workdir.publish()
    assert names() == []
    workdir.set_guard(lambda: 60.0)


def test_a_workdir_of_the_former_format_is_refused(url):
  Bucket(url).put("metrics.jsonl/00000000", b"{}")
  with pytest.raises(ValueError, match=r"former version.*metrics\.jsonl/00000000.*--workdir"):
    with opened(url):
      pass


def test_other_files_are_put_when_they_change(url, names, emulator):
  with opened(url) as workdir:
    (workdir.local / "tensorboard").mkdir()
    (workdir.local / "config.json").write_bytes(b"{}")
    (workdir.local / "config.json.tmp").write_bytes(b"{")
    (workdir.local / "tensorboard" / "events").write_bytes(b"1")
    workdir.publish()
    before = len(emulator.requests)
    workdir.publish()
    assert len(emulator.requests) == before
    (workdir.local / "tensorboard" / "events").write_bytes(b"12")
  assert names() == ["config.json", "tensorboard/events"]
  assert Bucket(url).read("tensorboard/events") == b"12"
  with opened(url) as workdir:  # others find the run's folders, and what they read
    assert sorted(path.name for path in workdir.local.iterdir()) == ["config.json", "tensorboard"]


def test_staging_folders_of_killed_processes_are_removed(url, tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  (tmp_path / "rlvr_jax_staging_left").mkdir()
  with opened(url) as first, opened(url) as second:
    assert first.local.parent.parent == second.local.parent.parent == tmp_path
    assert len(list(tmp_path.iterdir())) == 2
  assert list(tmp_path.iterdir()) == []


# --- rollouts -------------------------------------------------------------------------------------


def make_group(draw, index=0):
  arrays = {"tokens": np.random.default_rng(draw).integers(0, 9, (3, 4)).astype(np.int32)}
  return Group(draw, index, 0, {0: "f"}, arrays, [], {})


def batch(number):
  return [make_group(number), make_group(number, 1)], {"version": number}


def assert_has(store, numbers):
  assert store.numbers() == numbers
  for number in numbers:
    groups, info = store.read(number)
    for group, expected in zip(groups, batch(number)[0], strict=True):
      assert group._replace(arrays={}) == expected._replace(arrays={})
      assert np.array_equal(group.arrays["tokens"], expected.arrays["tokens"])
    assert info == batch(number)[1] and store.info(number)["version"] == number


def test_rollouts_in_a_bucket(url, folder, names, emulator):
  place = f"{url}/rollouts"
  with contextlib.closing(Workdir(url)) as other, opened(url) as workdir:
    with RolloutStore(place, writable=True, workdir=workdir) as store:
      of_run = RolloutStore(place, writable=False, workdir=other)  # another process of the run
      assert of_run.numbers() == []
      for number in range(3):
        store.write(number, *batch(number))
      with pytest.raises(ValueError, match="is not overwritten"):
        store.write(0, *batch(0))
      assert names() == [f"rollouts/{number:08d}.safetensors" for number in range(3)]
      assert_has(of_run, [0, 1, 2])
      assert_has(RolloutStore(place, writable=False), [0, 1, 2])
      size = len(emulator.objects[f"{folder}/rollouts/00000001.safetensors"].data)
      assert store.info(1) == {"version": 1, "bytes": size}
      store.write(3, *batch(3))
    workdir.publish = lambda: None  # it is lost with the machine
  with opened(url) as workdir, RolloutStore(place, writable=True, workdir=workdir) as store:
    assert_has(store, [0, 1, 2, 3])
    before = len(emulator.requests)
    assert not [*store.find_damaged(range(4))] and len(emulator.requests) == before + 1
    store.remove(0, 1)
    assert not [*store.find_damaged(range(4))]
    lost = emulator.objects.pop(f"{folder}/rollouts/00000003.safetensors")
    assert [*store.find_damaged(range(5))] == [3, 4]
    emulator.objects[f"{folder}/rollouts/00000003.safetensors"] = lost
    emulator.damage(f"{folder}/rollouts/00000002.safetensors")
    with pytest.raises(TornShardError, match=rf"batch 2, {place}/00000002.* put back a copy"):
      store.read(2)
    reader = RolloutStore(place, writable=False)
    assert not reader.is_intact(2) and reader.is_intact(3)
    assert reader.info(0)["removed"] and reader.info(0)["version"] == 0
    store.set_aside(2)
  assert names() == [
    *("rollouts/00000000.json", "rollouts/00000001.json", "rollouts/00000003.safetensors"),
    "rollouts/torn/00000002.safetensors.0",
  ]
  with opened(url) as workdir, RolloutStore(place, writable=True, workdir=workdir) as store:
    assert_has(store, [3])
    assert store.is_removed(0) and store.is_removed(1) and not store.is_removed(2)
    for number in (0, 2):
      store.write(number, *batch(number))
    assert_has(RolloutStore(place, writable=False), [0, 2, 3])
    store.remove(0)
    assert store.is_removed(0)


def test_finished_groups_survive_their_machine(url, names):
  name = "rollouts/groups/{:08d}.{:06d}.safetensors".format
  store = RolloutStore(f"{url}/rollouts", writable=True)  # it never closes
  for draw in range(2):
    store.write_groups([make_group(draw, index) for index in range(2)])
  assert names() == [name(draw, index) for draw in range(2) for index in range(2)]
  with RolloutStore(f"{url}/rollouts", writable=True) as store:
    found = store.read_groups(1)
    assert list(found) == [0, 1]
    assert np.array_equal(found[1].arrays["tokens"], make_group(1).arrays["tokens"])
    store.write_groups([make_group(1, 2)])
    store.forget_groups(before=1)
    assert names() == [name(1, index) for index in range(3)]
    store.forget_groups(before=2)
  assert names() == []


def test_of_two_writers_of_a_batch_the_first_counts(url, monkeypatch):
  """The late one has looked before the other one wrote."""
  with RolloutStore(f"{url}/rollouts", writable=True) as store:
    monkeypatch.setattr(RolloutStore, "__contains__", lambda store, number: False)
    store.write(0, *batch(0))
    with pytest.raises(StoreError, match="lost its claim"):
      store.write(0, batch(0)[0][:1], {})
    monkeypatch.undo()
    assert_has(store, [0])


def test_a_bucket_of_the_former_format_is_refused(url):
  Bucket(f"{url}/rollouts").put("index.jsonl/00000000", b"{}")
  with pytest.raises(StoreError, match=r"former format of rollouts \(index\.jsonl\)"):
    RolloutStore(f"{url}/rollouts", writable=False)
  with pytest.raises(StoreError, match="does not exist"):
    RolloutStore(f"{url}/elsewhere", writable=False)


def test_a_bucket_that_cannot_be_reached_is_no_damage(url, emulator, monkeypatch):
  with opened(url) as workdir, RolloutStore(f"{url}/rollouts", writable=True, workdir=workdir) as s:
    s.write(0, *batch(0))
    with monkeypatch.context() as patch:
      patch.setattr(emulator, "refuses", 403)
      with pytest.raises(UnreachableError):
        s.is_intact(0)
    assert s.is_intact(0)
