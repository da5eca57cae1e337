import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from rlvr_jax.rollouts import shards
from rlvr_jax.rollouts.store import INDEX, RolloutStore, StoreError, TornShardError
from rlvr_jax.storage.files import DiskFullError, with_crc32


def make_batch(number, size=6):
  """Arrays and info of one batch, of the number alone."""
  rng = np.random.default_rng(number)
  arrays = {
    "tokens": rng.integers(0, 1000, (2, 3, size)).astype(np.int32),
    "mask": np.ones((2, 3, size), np.float32),
    "behavior_logprobs": -rng.exponential(size=(2, 3, size)).astype(np.float32),
  }
  return arrays, {"version": number, "after": {"key": [number, "α"]}, "flops": 0.1 * number}


def assert_same(read, written):
  assert tuple(read[1:]) == (written[1], list(*written[2:]))
  assert list(read[0]) == list(written[0])
  for name, array in written[0].items():
    found = read[0][name]
    assert (found.dtype, found.shape) == (array.dtype, array.shape), name
    assert found.tobytes() == array.tobytes(), name


@pytest.fixture
def store(tmp_path):
  with RolloutStore(tmp_path / "rollouts", writable=True) as store:
    yield store


@pytest.fixture
def filled(store):
  for number in range(4):
    store.append(number, *make_batch(number))
  return store


def shard(store, number):
  return store.directory / f"{number:08d}.array_record"


def index_lines(store):
  return (store.directory / INDEX).read_bytes().splitlines(keepends=True)


def damage(path, bit):
  data = bytearray(path.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  path.write_bytes(data)


def test_arrays_and_info_read_back_bit_for_bit(store):
  P, G, T, S = 3, 4, 6, 5
  rng = np.random.default_rng(0)
  raw = lambda dtype, *shape: np.frombuffer(rng.bytes(4 * int(np.prod(shape))), dtype).reshape(
    shape
  )  # NaNs of every kind among them
  arrays = {
    "prompts.tokens": raw("i4", P, S),
    "prompts.lengths": np.array([1, S, 3], np.int32),
    "tokens": raw("i4", T, P, G).transpose(1, 2, 0),
    "stopped": rng.random((P, G)) < 0.5,
    "behavior_logprobs": raw("f4", P, G, T),
    "mask": np.full((P, G, T), -0.0, np.float32),
    "rewards": raw("f4", P, G),
    "solve_rate": np.array([-0.0, np.nan, np.inf], np.float32),
  }
  info = {"loss": 0.1 + 0.2, "none": None, "nested": {"text": "ü\n", "list": [1, [True]]}}
  samples = [{"completion": "ü\n", "reward": 0.1 + 0.2 + k} for k in range(P * G)]
  store.append(7, arrays, info, samples)
  assert_same(store.read(7), (arrays, info, samples))
  assert_same(RolloutStore(store.directory, writable=False).read(7), (arrays, info, samples))
  assert store.info(7) == info | {"bytes": shard(store, 7).stat().st_size}
  store.read(7)[0]["rewards"][:] = 0  # the caller's own
  store.info(7)["nested"]["list"].clear()
  assert store.info(7)["nested"] == info["nested"]


def test_a_second_instance_reads_while_the_first_writes(store):
  reader = RolloutStore(store.directory, writable=False)
  assert reader.numbers() == []
  for count, number in enumerate((5, 1, 3), start=1):
    store.append(number, *make_batch(number))
    assert reader.numbers() == store.numbers() == sorted((5, 1, 3)[:count])
    assert_same(reader.read(number), make_batch(number))
  with open(store.directory / INDEX, "ab") as index:
    index.write(b'{"crc32": 12')  # a line being written
  assert reader.numbers() == [1, 3, 5]
  with pytest.raises(StoreError, match="writable=True"):
    reader.append(8, *make_batch(8))


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
    store.append(number, *make_batch(number))
  reader.join(timeout=300)
  assert not errors and sorted(seen) == list(range(20))


def test_a_number_that_is_there_is_not_overwritten(filled):
  before = shard(filled, 2).read_bytes()
  with pytest.raises(ValueError, match=r"batch 2 is in .* already and is not overwritten"):
    filled.append(2, *make_batch(9))
  assert shard(filled, 2).read_bytes() == before and len(index_lines(filled)) == 4


@pytest.mark.parametrize(
  ("number", "array", "info", "error", "message"),
  [
    (-1, np.zeros(1), {}, ValueError, "number = -1 .* 0 or more"),
    (1, np.zeros((1, 2), ml_dtypes.bfloat16), {}, TypeError, "is of type bfloat16.*float32"),
    (1, np.array([["a"]]), {}, TypeError, "batch 1: 'rewards' is of type <U1"),
    (1, np.zeros((1, 2), ">f4"), {}, TypeError, "'rewards' is of type >f4"),
    (1, np.zeros((1, 2)), {}, TypeError, "of type float64, must be a NumPy array of float32"),
    (1, np.float32(0), {}, ValueError, "one number of groups as first axis"),
    (1, np.zeros((1, 2), "f4"), {"a": float("nan")}, ValueError, "info must be finite JSON"),
    (1, np.zeros((1, 2), "f4"), {"a": np.float32(1)}, TypeError, "batch 1: info must be finite"),
    (1, np.zeros((1, 2), "f4"), {"bytes": 1}, ValueError, "info has .'bytes'.*rename"),
  ],
)
def test_bad_input_is_refused_before_anything_is_written(
  store, number, array, info, error, message
):
  with pytest.raises(error, match=message):
    store.append(number, {"rewards": array}, info)
  assert os.listdir(store.directory) == [INDEX] and store.numbers() == []


# --- damage ---------------------------------------------------------------------------------------


def cut(path):
  path.write_bytes(path.read_bytes()[:-1])


def cut_a_block(path):
  path.write_bytes(path.read_bytes()[: 2**16])  # what is left reads as a file without records


def clear(path):
  path.write_bytes(b"")


def swap(path):
  shutil.copy(path.with_name("00000003.array_record"), path)


def remove(path):
  path.unlink()


@pytest.mark.parametrize(
  ("harm", "what"),
  [
    (cut, "has 131071 bytes and was written with 131072"),
    (cut_a_block, "has 65536 bytes"),
    (clear, "has 0 bytes"),
    (swap, "bytes have checksum"),
    (remove, "No such file"),
  ],
)
def test_a_torn_shard_is_named_set_aside_and_written_again(filled, harm, what):
  harm(shard(filled, 2))
  left = shard(filled, 2).read_bytes() if harm is not remove else None
  for opened in (filled, RolloutStore(filled.directory, writable=False)):
    with pytest.raises(TornShardError, match=rf"batch 2, .*00000002\.array_record, .*{what}"):
      opened.read(2)
    assert [opened.is_intact(number) for number in range(4)] == [True, True, False, True]
  moved = filled.set_aside(2)
  assert (moved.read_bytes() if moved else None) == left
  assert filled.numbers() == [0, 1, 3]
  with pytest.raises(TornShardError, match="set aside"):
    filled.read(2)
  filled.append(2, *make_batch(2))
  assert_same(filled.read(2), make_batch(2))
  clear(shard(filled, 2))
  filled.set_aside(2)
  assert len(list((filled.directory / "torn").glob("*"))) == 1 + (left is not None)
  assert moved is None or moved.read_bytes() == left  # nothing is overwritten there either
  filled.close()
  again = RolloutStore(filled.directory, writable=True)
  assert again.numbers() == [0, 1, 3]


def test_a_flipped_bit_anywhere_in_a_shard_is_seen(filled):
  path = shard(filled, 1)
  whole = path.read_bytes()
  data = np.flatnonzero(np.frombuffer(whole, np.uint8))  # elsewhere blocks are padded with zeros
  rng = np.random.default_rng(0)
  positions = [0, 8 * len(whole) - 1, *rng.integers(0, 8 * len(whole), 10)]
  positions += [8 * position + 3 for position in rng.choice(data, 40, replace=False)]
  for bit in positions:
    damage(path, bit)
    assert not filled.is_intact(1), bit
    path.write_bytes(whole)
  assert filled.is_intact(1)


@pytest.mark.parametrize("kind", ["checksum", "number", "info", "newline", "first byte", "last"])
def test_a_damaged_line_of_the_index_loses_nothing(filled, kind):
  """The shards say what it said, to a reader at once, and a writer lists them again."""
  lines = index_lines(filled)
  start = len(lines[0]) if kind != "last" else sum(map(len, lines[:-1]))
  text = {"checksum": b'"crc32": ', "number": b'"number": ', "info": b'"info": {'}.get(kind)
  offset = lines[1].index(text) + len(text) if text else 0
  byte = start - 1 if kind == "newline" else start + offset
  filled.close()
  damage(filled.directory / INDEX, 8 * byte + 1)
  for writable in (False, True, False):
    opened = RolloutStore(filled.directory, writable=writable)
    assert opened.numbers() == [0, 1, 2, 3]
    for number in range(4):
      assert_same(opened.read(number), make_batch(number))
      assert opened.info(number)["version"] == number
    opened.close()
  lost = 2 if kind == "newline" else 1
  assert len(index_lines(filled)) == 4 + lost - (kind == "newline")


def test_seeded_damage_anywhere_in_the_index(filled):
  index = filled.directory / INDEX
  filled.close()
  whole = index.read_bytes()
  for bit in np.random.default_rng(0).integers(0, 8 * len(whole), 40):
    damage(index, int(bit))
    with RolloutStore(filled.directory, writable=True) as opened:
      assert opened.numbers() == [0, 1, 2, 3], bit
      assert all(opened.info(number)["version"] == number for number in range(4))
    index.write_bytes(whole)


@pytest.mark.parametrize("left", [0, 2])
def test_an_index_that_was_cut_loses_nothing_silently(filled, left, caplog):
  """Whoever opens the store says which lines are gone."""
  filled.close()
  index = filled.directory / INDEX
  index.write_bytes(b"".join(index_lines(filled)[:left]))
  lost = list(range(left, 4))
  opened = RolloutStore(filled.directory, writable=False)
  assert opened.numbers() == [0, 1, 2, 3]
  for number in range(4):
    assert_same(opened.read(number), make_batch(number))
  assert len(index_lines(filled)) == left  # a reader changes nothing
  assert f"index.jsonl does not list the batches {lost}: found by their shards" in caplog.text
  caplog.clear()
  RolloutStore(filled.directory, writable=True).close()
  assert f"index.jsonl does not list the batches {lost}: listed again" in caplog.text
  caplog.clear()
  RolloutStore(filled.directory, writable=False)
  assert not caplog.text and len(index_lines(filled)) == 4


def test_damaged_shards_behind_a_cut_are_named(filled, caplog):
  filled.close()
  index = filled.directory / INDEX
  index.write_bytes(b"".join(index_lines(filled)[:2]))
  clear(shard(filled, 3))
  assert RolloutStore(filled.directory, writable=False).numbers() == [0, 1, 2]
  assert "index.jsonl does not list the batches [3]: damaged, left out" in caplog.text
  with RolloutStore(filled.directory, writable=True) as opened:
    assert opened.numbers() == [0, 1, 2]
  assert "index.jsonl does not list the batches [3]: damaged, moved into torn" in caplog.text


def test_a_lost_index_is_made_again(filled):
  filled.close()
  (filled.directory / INDEX).unlink()
  with pytest.raises(StoreError, match=r"index\.jsonl is missing"):
    RolloutStore(filled.directory, writable=False)
  opened = RolloutStore(filled.directory, writable=True)
  assert opened.numbers() == [0, 1, 2, 3] and opened.info(3) == filled.info(3)


# --- kills ----------------------------------------------------------------------------------------


def forge(source, target):
  """A shard of its own name, sound as a file, with one field's bytes changed."""
  reader = ArrayRecordReader(str(source))
  header, *records = reader.read_all()
  number = int(target.name[:8])
  sealed = json.loads(header) | {"number": number}
  del sealed["crc32"]
  writer = ArrayRecordWriter(str(target), "group_size:1")
  writer.write(json.dumps(with_crc32(sealed)).encode())
  for record in [records[0][:-1] + b"?", *records[1:]]:
    writer.write(record)
  writer.close()
  reader.close()


def test_opening_repairs_what_a_kill_between_two_steps_leaves(filled):
  filled.append(4, *make_batch(4))
  filled.remove(4)
  filled.close()
  index = filled.directory / INDEX
  lines = index_lines(filled)
  index.write_bytes(b"".join(lines[:3] + lines[4:]) + lines[3][:40])  # before 3's line was whole
  shard(filled, 4).write_bytes(b"before it was deleted")
  shard(filled, 5).write_bytes(b"damaged, and in no index")
  forge(shard(filled, 0), shard(filled, 6))
  shutil.copy(shard(filled, 0), shard(filled, 7))
  (filled.directory / "00000008.array_record.tmp").write_bytes(b"half")
  opened = RolloutStore(filled.directory, writable=True)
  assert opened.numbers() == [0, 1, 2, 3]
  assert_same(opened.read(3), make_batch(3))
  assert opened.info(4)["removed"]
  left = {path.name for path in opened.directory.iterdir()}
  assert left == {"index.jsonl", "torn"} | {shard(opened, number).name for number in range(4)}
  torn = sorted((opened.directory / "torn").iterdir())
  assert [path.name[:8] for path in torn] == ["00000005", "00000006", "00000007"]
  assert torn[0].read_bytes() == b"damaged, and in no index"
  for number in range(4, 9):
    opened.append(number, *make_batch(number))
  assert RolloutStore(opened.directory, writable=False).numbers() == list(range(9))
  assert all(line.endswith(b"}\n") and json.loads(line) for line in index_lines(opened))


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from store_test import RolloutStore, make_batch
assert "jax" not in sys.modules
store = RolloutStore(sys.argv[1], writable=True)
number = max(store.numbers(), default=-1) + 1
print("open", flush=True)
while True:
  store.append(number, *make_batch(number, size=2000))
  print(number, flush=True)
  number += 1
"""


@pytest.mark.slow
def test_nothing_that_was_written_is_lost_or_doubled_by_kills(tmp_path):
  rng = np.random.default_rng(0)
  returned = []
  for _ in range(5):
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
  listed = [json.loads(line)["number"] for line in index_lines(store)]
  assert listed == found
  files = {path.name for path in store.directory.iterdir()}
  assert files == {INDEX} | {shard(store, number).name for number in found}


def test_one_process_writes_at_a_time(store, tmp_path):
  with pytest.raises(StoreError, match="another process writes to"):
    RolloutStore(store.directory, writable=True)
  store.append(0, *make_batch(0))  # nothing of the first was disturbed
  store.close()
  with RolloutStore(store.directory, writable=True) as second:
    assert second.numbers() == [0]


# --- full disks, foreign folders, retention -------------------------------------------------------


def test_a_disk_that_fills_while_writing(tmp_path):
  """A file size limit stands in for a full disk: first a shard hits it, then the index."""
  code = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from store_test import DiskFullError, RolloutStore, make_batch
store = RolloutStore(sys.argv[1], writable=True)
store.append(0, *make_batch(0))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, resource.RLIM_INFINITY))
try:
  store.append(1, *make_batch(1, size=20_000))
except DiskFullError as error:
  print(error)
for number in range(1, 9):
  arrays, info = make_batch(number)
  try:
    store.append(number, arrays, info | {"text": "x" * 70_000})
  except DiskFullError as error:
    print(error)
    break
print(store.numbers())
"""
  folder = tmp_path / "rollouts"
  command = [sys.executable, "-c", code, folder, os.path.dirname(__file__)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  shard_line, index_line, numbers = done.stdout.splitlines()
  assert f"no space left to write {folder / '00000001.array_record'}. Free some" in shard_line
  assert f"no space left to write {folder / 'index.jsonl'}. Free some space and rerun" in index_line
  assert json.loads(numbers) == [0, 1, 2, 3]
  assert not list(folder.glob("*.tmp")) and (folder / "index.jsonl").read_bytes().endswith(b"}\n")
  store = RolloutStore(folder, writable=True)
  assert store.numbers() == [0, 1, 2, 3, 4]  # the last was whole, its line did not fit
  for number in store.numbers():
    assert_same((store.read(number).arrays, None, []), (make_batch(number)[0], None))


def test_too_little_space_is_seen_before_writing(filled, monkeypatch):
  usage = shutil.disk_usage(filled.directory)
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
  with pytest.raises(DiskFullError, match=r"00000004.* \(1\.0 MiB free, 1\.5 MiB needed\)\. Free"):
    filled.append(4, {"behavior_logprobs": np.ones((1, 1, 2**17), np.float32)}, {})
  monkeypatch.undo()
  filled.append(4, *make_batch(4))
  assert filled.numbers() == [0, 1, 2, 3, 4]


def test_what_the_library_loses_in_silence_is_not_stored(filled, monkeypatch):
  class Forgetful(ArrayRecordWriter):
    def write(self, record):
      if b"lost" not in record:
        super().write(record)

  monkeypatch.setattr(shards, "ArrayRecordWriter", Forgetful)
  with pytest.raises(OSError, match=r"00000004\.array_record does not read back as written"):
    filled.append(4, {"rewards": np.zeros((2, 1), np.float32)}, {}, ["there", "lost"])
  assert filled.numbers() == [0, 1, 2, 3] and len(os.listdir(filled.directory)) == 5


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize(
  ("name", "text"),
  [("thesis.tex", "hours of work"), ("index.jsonl", '{"step": 1}\n'), ("index.jsonl", "text")],
)
def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path, writable, name, text):
  (tmp_path / name).write_text(text)
  (tmp_path / "draft.tmp").write_text("unsaved")
  with pytest.raises(StoreError, match=r"not a rollout store.*another folder"):
    RolloutStore(tmp_path, writable=writable)
  assert sorted(os.listdir(tmp_path)) == ["draft.tmp", name]
  assert (tmp_path / name).read_text() == text


def test_a_folder_that_is_not_there_is_not_made_for_reading(tmp_path):
  with pytest.raises(StoreError, match="does not exist"):
    RolloutStore(tmp_path / "a", writable=False)
  assert not (tmp_path / "a").exists()
  (tmp_path / "b").write_text("")
  with pytest.raises(StoreError, match="is a file"):
    RolloutStore(tmp_path / "b", writable=True)


def test_another_format_is_named(filled, monkeypatch):
  filled.close()
  monkeypatch.setattr(shards, "MARKER", "rlvr_jax rollouts 3")
  before = index_lines(filled)
  for writable in (False, True):
    with pytest.raises(StoreError, match=r"format 'rlvr_jax rollouts 2', this version reads .* 3'"):
      RolloutStore(filled.directory, writable=writable)
  assert index_lines(filled) == before


def test_a_removed_batch_stays_known(filled):
  size = filled.info(1)["bytes"]
  filled.remove(1)
  assert filled.numbers() == [0, 2, 3] and not shard(filled, 1).exists()
  for opened in (filled, RolloutStore(filled.directory, writable=False)):
    assert opened.info(1) == make_batch(1)[1] | {"bytes": size, "removed": True}
    with pytest.raises(TornShardError, match="the index says it is removed"):
      opened.read(1)
    with pytest.raises(KeyError, match="batch 9 was never written"):
      opened.info(9)
  with pytest.raises(KeyError, match="batch 1 is not in"):
    filled.remove(1)
  filled.append(1, *make_batch(1))
  assert filled.numbers() == [0, 1, 2, 3] and "removed" not in filled.info(1)


def test_threads_that_cannot_be_started_are_an_error_not_a_wait(tmp_path):
  """ArrayRecord waits for ever where its pool of threads does not come to be."""
  code = """
import pathlib, resource, sys
import numpy as np
from rlvr_jax.rollouts.store import RolloutStore, StoreError
store = RolloutStore(sys.argv[1], writable=True)
size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 300 * 2**20,) * 2)
try:
  store.append(0, {"rewards": np.zeros((1, 3), np.float32)}, {})
except StoreError as error:
  print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""
  command = [sys.executable, "-c", code, tmp_path / "store"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  expected = (
    r"only \d+ of 64 threads could be started \(.*\)\. Allow .* address space \(ulimit -v\)"
  )
  assert re.search(expected, done.stdout), done.stderr
