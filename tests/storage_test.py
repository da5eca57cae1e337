"""Objects with conditions, and a workdir's files in a bucket."""

import contextlib

import gcs_emulator
import numpy as np
import pytest

from rlvr_jax import storage
from rlvr_jax.bucket import Bucket, ChangedError, UnreachableError
from rlvr_jax.evaluate.run_files import read_metrics
from rlvr_jax.files import JsonLines, replacing
from rlvr_jax.rollouts.store import INDEX, RolloutStore, TornShardError
from rlvr_jax.storage import Workdir


@pytest.fixture(scope="module")
def emulator():
  with gcs_emulator.emulated() as emulator:
    yield emulator


@pytest.fixture
def url(emulator, request):
  """A folder of a bucket that has nothing yet."""
  return f"gs://{gcs_emulator.BUCKET}/{request.node.name}"


@pytest.fixture
def names(emulator, request):
  """The names of the objects in it."""
  return lambda: emulator.names(request.node.name)


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
  assert Bucket(url).exists("0007") and not Bucket(url).exists("000")


def test_a_bucket_that_refuses_is_an_error_with_a_remedy(url, emulator, monkeypatch):
  monkeypatch.setattr(emulator, "refuses", 403)
  with pytest.raises(UnreachableError, match=r"cannot be reached: .*roles/storage.objectUser"):
    Bucket(url).put("a", b"")


def test_a_large_object_is_one_put(url, emulator):
  data = np.random.default_rng(0).bytes(60 * 2**20)  # gcsfs would write it in parts
  before = len(emulator.requests)
  Bucket(url).put("large", data, generation=0)
  assert len(emulator.requests) == before + 1
  assert Bucket(url).read("large") == data


# --- workdirs -------------------------------------------------------------------------------------


def test_a_local_workdir_is_used_as_it_is(tmp_path):
  with contextlib.closing(Workdir(tmp_path / "run")) as workdir:
    assert workdir.kept == workdir.local == tmp_path / "run"
    workdir.fetch()
    workdir.publish()
  assert list(tmp_path.iterdir()) == []


def test_lines_become_segments_and_are_one_file_again(url, names):
  with opened(url) as workdir:
    lines = JsonLines(workdir.local / "metrics.jsonl")
    for step in range(3):
      lines.append([{"step": step, "phase": "train"}, {"step": step, "phase": "eval"}])
      workdir.publish()
      workdir.publish()  # nothing new
    with open(workdir.local / "metrics.jsonl", "ab") as file:
      file.write(b'{"step": 3, "pha')  # another thread is writing
    staging = workdir.local.parent
  assert not staging.exists()
  assert names() == [f"metrics.jsonl/{k:08d}" for k in range(3)]
  assert [record["step"] for record in read_metrics(url)] == [0, 0, 1, 1, 2, 2]
  with opened(url) as workdir:
    assert len((workdir.local / "metrics.jsonl").read_bytes().splitlines()) == 6
  with pytest.raises(FileNotFoundError, match=r"rollouts\.jsonl does not exist"):
    with storage.opened_lines(storage.place("", url) / "rollouts.jsonl"):
      pass


def test_a_file_that_a_resumed_run_shortens_is_shortened_in_the_bucket(url, names):
  line = lambda step: b'{"step": %d, "phase": "train"}\n' % step
  with opened(url) as workdir:
    for step in range(4):
      with open(workdir.local / "metrics.jsonl", "ab") as file:
        file.write(line(2 * step) + line(2 * step + 1))
      workdir.publish()
  for kept, segments in ((5, 3), (4, 3), (0, 1)):
    with opened(url) as workdir:
      with replacing(workdir.local / "metrics.jsonl") as file:
        file.write(b"".join(map(line, range(kept))))
      workdir.publish()
      assert len(names()) == segments
      with open(workdir.local / "metrics.jsonl", "ab") as file:
        file.write(line(100))
    assert [record["step"] for record in read_metrics(url)] == [*range(kept), 100]


def test_other_files_are_put_when_they_change(url, names, emulator):
  with opened(url) as workdir:
    (workdir.local / "tensorboard").mkdir()
    (workdir.local / "rollouts" / "groups").mkdir(parents=True)
    (workdir.local / "rollouts" / "groups" / "00000000.jsonl").write_bytes(b"{}\n")
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
  monkeypatch.setattr(storage.tempfile, "tempdir", str(tmp_path))
  (tmp_path / "rlvr_jax_staging_left").mkdir()
  with opened(url) as first, opened(url) as second:
    assert first.local.parent.parent == second.local.parent.parent == tmp_path
    assert len(list(tmp_path.iterdir())) == 2
  assert list(tmp_path.iterdir()) == []


# --- rollouts -------------------------------------------------------------------------------------


def batch(number):
  rng = np.random.default_rng(number)
  return {"tokens": rng.integers(0, 9, (2, 3, 4)).astype(np.int32)}, {"version": number}


def assert_has(store, numbers):
  assert store.numbers() == numbers
  for number in numbers:
    arrays, info = store.read(number)
    assert np.array_equal(arrays["tokens"], batch(number)[0]["tokens"])
    assert info == batch(number)[1] and store.info(number)["version"] == number


def test_rollouts_in_a_bucket(url, names, emulator, request):
  folder = f"{url}/rollouts"
  with contextlib.closing(Workdir(url)) as other, opened(url) as workdir:
    with RolloutStore(folder, writable=True, workdir=workdir) as store:
      of_run = RolloutStore(folder, writable=False, workdir=other)  # another process of the run
      assert of_run.numbers() == []
      for number in range(3):
        store.append(number, *batch(number))
      with pytest.raises(ValueError, match="is not overwritten"):
        store.append(0, *batch(0))
      assert len(names()) == 3  # one object each, and no index yet
      assert_has(of_run, [0, 1, 2])
      assert_has(RolloutStore(folder, writable=False), [0, 1, 2])
      workdir.publish()
      assert_has(of_run, [0, 1, 2])
      store.append(3, *batch(3))
    killed = workdir.local  # what was not published is lost with the machine
    workdir.publish = lambda: None
  assert not killed.exists()
  with opened(url) as workdir, RolloutStore(folder, writable=True, workdir=workdir) as store:
    assert_has(store, [0, 1, 2, 3])
    store.remove(0, 1)
    emulator.damage(f"{request.node.name}/rollouts/00000002.array_record")
    with pytest.raises(TornShardError, match=rf"batch 2, {folder}/00000002.* put back a copy"):
      store.read(2)
    reader = RolloutStore(folder, writable=False)
    assert not reader.is_intact(2) and reader.is_intact(3)
    store.set_aside(2)
    workdir.publish = lambda: None
  assert names() == [
    *("rollouts/00000003.array_record", f"rollouts/{INDEX}/00000000"),
    *(f"rollouts/{INDEX}/00000001", f"rollouts/{INDEX}/00000002"),
    "rollouts/torn/00000002.array_record.0",
  ]
  with opened(url) as workdir, RolloutStore(folder, writable=True, workdir=workdir) as store:
    assert_has(store, [3])
    assert store.removed(0) and store.removed(1) and not store.removed(2)
    store.append(2, *batch(2))
    assert_has(RolloutStore(folder, writable=False), [2, 3])


def test_a_bucket_that_cannot_be_reached_is_no_damage(url, emulator, monkeypatch):
  with opened(url) as workdir, RolloutStore(f"{url}/rollouts", writable=True, workdir=workdir) as s:
    s.append(0, *batch(0))
    with monkeypatch.context() as patch:
      patch.setattr(emulator, "refuses", 403)
      with pytest.raises(UnreachableError):
        s.is_intact(0)
    assert s.is_intact(0)
