import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rlvr_jax.rollouts import group as group_module
from rlvr_jax.rollouts.group import Group, encode
from rlvr_jax.rollouts.store import (
  GROUPS_FOLDER,
  LOCK,
  TORN_FOLDER,
  RolloutStore,
  StoreError,
  TornShardError,
)
from rlvr_jax.storage.files import DiskFullError


def make_group(seed, draw=0, index=0, size=6):
  rng = np.random.default_rng(seed)
  arrays = {
    "tokens": rng.integers(0, 1000, (3, size)).astype(np.int32),
    "behavior_logprobs": -rng.exponential(size=(3, size)).astype(np.float32),
    "rewards": rng.normal(size=3).astype(np.float32),
  }
  samples = [{"completion": f"α {seed}", "reward": 0.1 * seed} for _ in range(3)]
  return Group(draw, index, 0, {seed: "ab"}, arrays, samples, {"x": 0.1 * seed})


def make_batch(number, size=6):
  """Groups and info of one batch, of the number alone."""
  groups = [make_group(number + p, draw=number, index=p, size=size) for p in range(2)]
  return groups, {"version": number, "after": {"key": [number, "α"]}, "flops": 0.1 * number}


def assert_same_groups(found, expected):
  assert len(found) == len(expected)
  for one, other in zip(found, expected, strict=True):
    assert one._replace(arrays={}) == other._replace(arrays={})
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in other.arrays.items():
      assert one.arrays[name].dtype == array.dtype
      assert one.arrays[name].shape == array.shape
      assert one.arrays[name].tobytes() == array.tobytes(), name


def assert_same(read, written):
  assert_same_groups(read[0], written[0])
  assert read[1] == written[1]


@pytest.fixture
def store(tmp_path):
  with RolloutStore(tmp_path / "rollouts", writable=True) as store:
    yield store


@pytest.fixture
def filled(store):
  for number in range(4):
    store.write(number, *make_batch(number))
  return store


def file_of(store, number):
  return store.directory / f"{number:08d}.safetensors"


def files_of(store):
  return {path.name for path in store.directory.iterdir()}


def test_groups_and_info_read_back(store):
  reader = RolloutStore(store.directory, writable=False)
  assert reader.numbers() == [] and 5 not in reader
  for count, number in enumerate((5, 1, 3), start=1):
    store.write(number, *make_batch(number))
    assert reader.numbers() == store.numbers() == sorted((5, 1, 3)[:count])
    assert number in reader
    assert_same(reader.read(number), make_batch(number))
    size = file_of(store, number).stat().st_size
    assert reader.info(number) == make_batch(number)[1] | {"bytes": size}
  with pytest.raises(StoreError, match="writable=True"):
    reader.write(8, *make_batch(8))
  for act in (lambda: reader.remove(5), lambda: reader.write_groups([make_group(0)])):
    with pytest.raises(StoreError, match="writable=True"):
      act()


def test_info_is_read_without_the_arrays(filled):
  path = file_of(filled, 2)
  path.write_bytes(path.read_bytes()[:-1])
  assert filled.info(2)["version"] == 2 and not filled.is_intact(2)


def test_threads_share_a_store(store):
  seen, errors = [], []

  def read():
    try:
      while len(seen) < 20:
        for number in set(store.numbers()) - set(seen):
          assert_same(store.read(number), make_batch(number))
          seen.append(number)
    except Exception as error:
      errors.append(error)

  reader = threading.Thread(target=read)
  reader.start()
  for number in range(20):
    store.write(number, *make_batch(number))
  reader.join(timeout=300)
  assert not errors and sorted(seen) == list(range(20))


def test_a_number_that_is_there_is_not_overwritten(filled):
  before = file_of(filled, 2).read_bytes()
  with pytest.raises(ValueError, match=r"batch 2 is in .* already and is not overwritten"):
    filled.write(2, *make_batch(9))
  assert file_of(filled, 2).read_bytes() == before


@pytest.mark.parametrize(
  ("number", "arrays", "info", "error", "message"),
  [
    (-1, {}, {}, ValueError, "number = -1 .* 0 or more"),
    (1, {"rewards": np.zeros(2)}, {}, TypeError, "batch 1: 'rewards' is of type float64"),
    (1, {}, {"a": float("nan")}, ValueError, "batch 1: info must be finite JSON"),
    (1, {}, {"bytes": 1}, ValueError, "info has the fields .'bytes'.*rename"),
  ],
)
def test_bad_input_is_refused_before_anything_is_written(
  store, number, arrays, info, error, message
):
  with pytest.raises(error, match=message):
    store.write(number, [make_group(0)._replace(arrays=arrays)], info)
  assert files_of(store) == {LOCK} and store.numbers() == []


# --- groups in progress ---------------------------------------------------------------------------


def test_groups_in_progress_come_back_and_are_forgotten(store):
  assert store.read_groups(0) == {}
  store.forget_groups(before=7)  # without a folder
  for draw in range(3):
    for index in (2, 0):
      store.write_groups([make_group(10 * draw + index, draw, index)])
  store.write_groups([make_group(77, 1, 2)])  # of another policy, in place of the first
  again = RolloutStore(store.directory, writable=False)
  assert_same_groups([*again.read_groups(0).values()], [make_group(0, 0, 0), make_group(2, 0, 2)])
  found = again.read_groups(1)
  assert list(found) == [0, 2]
  assert_same_groups([found[2]], [make_group(77, 1, 2)])
  store.forget_groups(before=2)
  assert [list(again.read_groups(draw)) for draw in range(3)] == [[], [], [0, 2]]


def test_a_damaged_or_foreign_group_is_left_out(store, caplog):
  for index in range(5):
    store.write_groups([make_group(index, 0, index)])
  paths = sorted((store.directory / GROUPS_FOLDER).iterdir())
  data = bytearray(paths[0].read_bytes())
  data[-3] ^= 4
  paths[0].write_bytes(data)
  paths[1].write_bytes(paths[2].read_bytes())  # of another index
  paths[3].write_bytes(encode([make_group(0), make_group(1)], {}))
  (paths[0].parent / "00000000.txt.safetensors").write_bytes(b"not ours")
  assert list(store.read_groups(0)) == [2, 4]
  assert paths[0].name in caplog.text and "sampled again" in caplog.text


# --- damage ---------------------------------------------------------------------------------------


def cut(path):
  path.write_bytes(path.read_bytes()[:-1])


def clear(path):
  path.write_bytes(b"")


def swap(path):
  shutil.copy(path.with_name("00000003.safetensors"), path)


def remove(path):
  path.unlink()


@pytest.mark.parametrize(
  ("harm", "what"),
  [
    (cut, "bytes have the checksum"),
    (clear, "the 0 bytes are not"),
    (swap, "the number in its info is 3"),
    (remove, "no such file"),
  ],
)
def test_a_damaged_batch_is_named_set_aside_and_written_again(filled, harm, what):
  harm(file_of(filled, 2))
  left = file_of(filled, 2).read_bytes() if harm is not remove else None
  for opened in (filled, RolloutStore(filled.directory, writable=False)):
    with pytest.raises(TornShardError, match=rf"batch 2, .*00000002\.safetensors, .*{what}"):
      opened.read(2)
    assert [opened.is_intact(number) for number in range(4)] == [True, True, False, True]
    assert [*opened.find_damaged(range(5))] == [2, 4]
  moved = filled.set_aside(2)
  assert (moved.read_bytes() if moved else None) == left
  assert filled.numbers() == [0, 1, 3] and not filled.is_removed(2)
  filled.write(2, *make_batch(2))
  assert_same(filled.read(2), make_batch(2))
  clear(file_of(filled, 2))
  filled.set_aside(2)
  assert len(list((filled.directory / TORN_FOLDER).glob("*"))) == 1 + (left is not None)
  assert moved is None or moved.read_bytes() == left  # nothing is overwritten there either


def test_a_damaged_info_is_an_error(filled):
  filled.remove(1)
  for path in (filled.directory / "00000001.json", file_of(filled, 2)):
    path.write_bytes(path.read_bytes().replace(b"version", b"Version"))
  for number in (1, 2):
    with pytest.raises(TornShardError, match=f"batch {number}, "):
      filled.info(number)


# --- kills ----------------------------------------------------------------------------------------


def test_opening_removes_what_a_killed_writer_leaves(filled):
  filled.write_groups([make_group(0)])
  filled.close()
  (filled.directory / "00000008.safetensors.tmp").write_bytes(b"half")
  (filled.directory / "00000001.json.tmp").write_bytes(b"half")
  (filled.directory / GROUPS_FOLDER / "00000000.000001.safetensors.tmp").write_bytes(b"half")
  RolloutStore(filled.directory, writable=False)
  assert "00000008.safetensors.tmp" in files_of(filled)  # a reader changes nothing
  with RolloutStore(filled.directory, writable=True) as opened:
    assert opened.numbers() == [0, 1, 2, 3] and list(opened.read_groups(0)) == [0]
  assert files_of(filled) == {file_of(filled, n).name for n in range(4)} | {LOCK, GROUPS_FOLDER}
  assert len(list((filled.directory / GROUPS_FOLDER).iterdir())) == 1


@pytest.mark.parametrize(
  ("step", "code", "error", "message"),
  [
    ("fsync", errno.EIO, OSError, "Input/output"),
    ("replace", errno.ENOSPC, DiskFullError, r"no space left to write .*/{}\. Free some space"),
  ],
)
def test_an_error_at_any_step_of_writing_leaves_nothing(
  filled, monkeypatch, step, code, error, message
):
  def fail(*args, **kwargs):
    raise OSError(code, os.strerror(code))

  with monkeypatch.context() as patch:
    patch.setattr(*{"fsync": (os, "fsync"), "replace": (type(filled.directory), step)}[step], fail)
    with pytest.raises(error, match=message.format(r"00000004\.safetensors")):
      filled.write(4, *make_batch(4))
    if step == "replace":
      name = f"{GROUPS_FOLDER}/00000000.000000.safetensors"
      with pytest.raises(error, match=message.format(re.escape(name))):
        filled.write_groups([make_group(0)])
  assert filled.numbers() == [0, 1, 2, 3] and not [*filled.directory.rglob("*.tmp")]
  filled.write(4, *make_batch(4))
  assert_same(filled.read(4), make_batch(4))


def test_a_kill_between_the_two_steps_of_a_removal_loses_nothing(filled, monkeypatch):
  class Killed(BaseException):
    pass

  def kill(*args):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(filled._objects, "remove", kill)
    with pytest.raises(Killed):
      filled.remove(1)
  assert not filled.is_removed(1) and "removed" not in filled.info(1)
  assert_same(filled.read(1), make_batch(1))
  filled.remove(1)
  assert filled.is_removed(1)


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from store_test import RolloutStore, make_batch, make_group
assert "jax" not in sys.modules
store = RolloutStore(sys.argv[1], writable=True)
number = max(store.numbers(), default=-1) + 1
print("open", flush=True)
while True:
  store.write_groups([make_group(number, number, 0)])
  store.write(number, *make_batch(number, size=2000))
  store.forget_groups(number - 3)
  print(number, flush=True)
  number += 1
"""


def test_nothing_that_was_written_is_lost_or_doubled_by_kills(tmp_path):
  rng = np.random.default_rng(0)
  returned = []
  for _ in range(3):
    command = [sys.executable, "-c", WRITER, tmp_path / "rollouts", os.path.dirname(__file__)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    returned += [int(process.stdout.readline()) for _ in range(2)]
    time.sleep(rng.uniform(0, 0.05))
    process.send_signal(signal.SIGKILL)
    returned += map(int, process.communicate()[0].split())
  store = RolloutStore(tmp_path / "rollouts", writable=True)
  found = store.numbers()
  assert found == list(range(len(found)))
  assert len(returned) > 5 and set(returned) <= set(found) and len(found) <= len(returned) + 5
  for number in found:
    assert_same(store.read(number), make_batch(number, size=2000))
  assert len(store.read_groups(found[-1])) == 1
  assert files_of(store) == {file_of(store, n).name for n in found} | {LOCK, GROUPS_FOLDER}


def test_one_process_writes_at_a_time(store):
  with pytest.raises(StoreError, match="another process writes to"):
    RolloutStore(store.directory, writable=True)
  store.write(0, *make_batch(0))  # nothing of the first was disturbed
  store.close()
  with pytest.raises(StoreError, match="not open for writing"):
    store.write(1, *make_batch(1))
  with RolloutStore(store.directory, writable=True) as second:
    assert second.numbers() == [0]


# --- full disks, foreign folders, retention -------------------------------------------------------


def test_what_a_disk_loses_in_silence_is_not_stored(filled, monkeypatch):
  path_type = type(filled.directory)
  monkeypatch.setattr(
    path_type, "write_bytes", lambda path, data, write=path_type.write_bytes: write(path, data[:-1])
  )
  with pytest.raises(OSError, match=r"00000004\.safetensors differs from the written bytes when"):
    filled.write(4, *make_batch(4))
  assert filled.numbers() == [0, 1, 2, 3] and not list(filled.directory.glob("*.tmp"))


@pytest.mark.parametrize("writable", [False, True])
def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path, writable):
  (tmp_path / "thesis.tex").write_text("hours of work")
  (tmp_path / "draft.tmp").write_text("unsaved")
  message = r"not a rollout store: it contains 'thesis.tex', which no store .*another folder"
  with pytest.raises(StoreError, match=message):
    RolloutStore(tmp_path, writable=writable)
  assert sorted(os.listdir(tmp_path)) == ["draft.tmp", "thesis.tex"]


@pytest.mark.parametrize(
  ("writable", "name"), [(False, "index.jsonl"), (True, "00000003.array_record")]
)
def test_a_store_of_the_former_format_is_refused_by_name(tmp_path, writable, name):
  (tmp_path / name).write_text("{}")
  with pytest.raises(StoreError, match=rf"former format .*{name}.*version of rlvr_jax that wrote"):
    RolloutStore(tmp_path, writable=writable)
  assert os.listdir(tmp_path) == [name]


def test_a_folder_that_is_not_there_is_not_made_for_reading(tmp_path):
  with pytest.raises(StoreError, match="does not exist"):
    RolloutStore(tmp_path / "a", writable=False)
  assert not (tmp_path / "a").exists()
  (tmp_path / "b").write_text("")
  with pytest.raises(StoreError, match="is a file"):
    RolloutStore(tmp_path / "b", writable=True)


def test_another_format_is_named_and_is_no_damage(filled, monkeypatch):
  monkeypatch.setattr(group_module, "MARKER", "rlvr_jax groups 2")
  message = "the format is 'rlvr_jax groups 1', but this version reads only 'rlvr_jax groups 2'"
  for read in (filled.read, filled.info, filled.is_intact):
    with pytest.raises(StoreError, match=message):
      read(1)


def test_a_removed_batch_stays_known(filled):
  size = filled.info(1)["bytes"]
  filled.remove(1)
  assert filled.numbers() == [0, 2, 3] and not file_of(filled, 1).exists()
  for opened in (filled, RolloutStore(filled.directory, writable=False)):
    assert opened.info(1) == make_batch(1)[1] | {"bytes": size, "removed": True}
    assert opened.is_removed(1) and not [*opened.find_damaged(range(4))]
    with pytest.raises(TornShardError, match="batch 1, "):
      opened.read(1)
    with pytest.raises(KeyError, match="batch 9 is not in"):
      opened.info(9)
  with pytest.raises(KeyError, match="batch 1 is not in"):
    filled.remove(1)
  filled.write(1, *make_batch(1))
  assert filled.numbers() == [0, 1, 2, 3] and "removed" not in filled.info(1)
  filled.set_aside(1)
  assert not filled.is_removed(1)
