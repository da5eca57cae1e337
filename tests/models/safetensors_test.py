"""The file format: what is read and written, how much of it at a time, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
import subprocess
import sys
import weakref

import fsspec
import ml_dtypes
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load_file, save_file

from rlvr_jax.models.safetensors import (
  INDEX,
  SINGLE,
  new_directory,
  open_checkpoint,
  read_header,
  write_checkpoint,
)
from rlvr_jax.storage.files import locate

BF16 = np.dtype(ml_dtypes.bfloat16)
_TENSORS = {
  "a.weight": np.arange(35, dtype=np.float32).reshape(7, 5),
  "b.bias": np.arange(6, dtype=np.float32) - 3,
  "c.weight": np.arange(24, dtype=np.float32).reshape(4, 6) / 8,
}


def whole(checkpoint):
  return {name: tensor.rows(0, tensor.shape[0]) for name, tensor in checkpoint.items()}


def assert_same(found, expected):
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name].dtype == value.dtype
    np.testing.assert_array_equal(found[name], value)


def write_raw(folder, header, data, length=None):
  """A file with any header, right or wrong."""
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  length = len(text) if length is None else length
  (folder / SINGLE).write_bytes(struct.pack("<Q", length) + text + data)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
def test_files_of_the_library_are_read(tmp_path, dtype):
  tensors = {name: value.astype(dtype) for name, value in _TENSORS.items()}
  save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
  assert_same(whole(open_checkpoint(tmp_path)), tensors)


def test_tensors_that_begin_at_odd_bytes_are_read(tmp_path):
  header = {"x": dict(dtype="F32", shape=[3, 2], data_offsets=[0, 24])}
  text = json.dumps(header).encode()
  value = np.arange(6, dtype=np.float32).reshape(3, 2)
  write_raw(tmp_path, text + b" " * ((-len(text)) % 8 + 3), value.tobytes())
  tensor = open_checkpoint(tmp_path)["x"]
  assert tensor.start % 4
  np.testing.assert_array_equal(tensor.rows(1, 3), value[1:3])


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float16), BF16])
@pytest.mark.parametrize("max_shard_bytes", [2**30, 100, 1])
@pytest.mark.parametrize("remote", [False, True])
def test_what_is_written_is_what_the_library_reads(tmp_path, dtype, max_shard_bytes, remote):
  tensors = {name: value.astype(dtype) for name, value in _TENSORS.items()}
  target = f"memory://{tmp_path}/out" if remote else tmp_path / "out"
  shapes = {name: value.shape for name, value in tensors.items()}
  blocks = (value[i : i + 3] for value in tensors.values() for i in range(0, len(value), 3))
  with new_directory(target) as (system, folder):
    write_checkpoint(system, folder, shapes, dtype, blocks, max_shard_bytes=max_shard_bytes)
  assert_same(whole(open_checkpoint(target)), tensors)
  system, folder = locate(target)
  local = tmp_path / "copy"
  system.get(folder, str(local), recursive=True)
  shards = [load_file(file) for file in sorted(local.glob("*.safetensors"))]
  assert_same({name: value for shard in shards for name, value in shard.items()}, tensors)
  for shard in shards:
    assert len(shard) == 1 or sum(x.nbytes for x in shard.values()) <= max_shard_bytes
  assert (local / INDEX).exists() == (len(shards) > 1)
  if len(shards) > 1:
    index = json.loads((local / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    assert {name: set(load_file(local / file)) for name, file in index["weight_map"].items()} == {
      name: set(shard) for shard in shards for name in shard
    }


def test_a_block_is_let_go_before_the_next_but_one(tmp_path):
  alive = []

  def blocks():
    for i in range(6):
      assert sum(reference() is not None for reference in alive) <= 1
      block = np.full((1, 4), i, np.float32)
      alive.append(weakref.ref(block))
      yield block
      del block

  with new_directory(tmp_path / "out") as (system, folder):
    write_checkpoint(system, folder, {"x": (6, 4)}, np.dtype(np.float32), blocks())
  assert len(alive) == 6


def test_of_a_remote_tensor_only_the_rows_that_are_asked_for_are_fetched(tmp_path):
  fetched = []

  class Recording(MemoryFileSystem):
    cachable = False

    def cat_file(self, path, start=None, end=None, **kwargs):
      fetched.append((start, end))
      return super().cat_file(path, start=start, end=end, **kwargs)

  save_file(_TENSORS, tmp_path / SINGLE)
  system = fsspec.filesystem("memory")
  system.pipe_file(f"{tmp_path}/x/{SINGLE}", (tmp_path / SINGLE).read_bytes())
  tensor = open_checkpoint(f"memory://{tmp_path}/x")["a.weight"]
  tensor = dataclasses.replace(tensor, system=Recording())
  np.testing.assert_array_equal(tensor.rows(2, 5), _TENSORS["a.weight"][2:5])
  assert fetched == [(tensor.start + 2 * 5 * 4, tensor.start + 5 * 5 * 4)]


_ENTRY = dict(dtype="F32", shape=[2, 2], data_offsets=[0, 16])


@pytest.mark.parametrize(
  ("header", "size", "length", "message"),
  [
    ({"x": _ENTRY}, 15, None, "take 16 bytes, the file has 15"),
    ({"x": _ENTRY}, 17, None, "take 16 bytes, the file has 17"),
    ({"x": _ENTRY}, 16, 10**6, "should have 1000000 bytes"),
    ({"x": _ENTRY}, 16, 2**63, "should have"),
    (b"{not json", 16, None, "cannot be read"),
    (b"\xff\xfe", 16, None, "cannot be read"),
    (b"[" * 100_000, 0, None, "cannot be read"),
    (b"[]", 0, None, "cannot be read"),
    (b'{"x": 1}', 0, None, "cannot be read"),
    (b'{"x": {"dtype": "F32"}}', 0, None, "cannot be read"),
    ({"x": _ENTRY | {"shape": [2, -2]}}, 16, None, "cannot be read"),
    ({"x": _ENTRY | {"shape": [2, 3]}}, 16, None, "takes 24 bytes, not 16"),
    ({"x": _ENTRY | {"data_offsets": [16, 0]}}, 16, None, "should be at 16:0"),
    ({"x": _ENTRY | {"data_offsets": [0, 8, 16]}}, 16, None, "cannot be read"),
    ({"x": _ENTRY, "y": _ENTRY | {"data_offsets": [8, 24]}}, 24, None, "'y' should be at 8"),
    ({"x": _ENTRY, "y": _ENTRY | {"data_offsets": [20, 36]}}, 36, None, "ends at 16"),
    (b'{"x": %s, "x": %s}' % ((json.dumps(_ENTRY).encode(),) * 2), 16, None, "is repeated"),
  ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(
  tmp_path, header, size, length, message
):
  write_raw(tmp_path, header, bytes(size), length)
  with pytest.raises(ValueError, match=message) as error:
    open_checkpoint(tmp_path)
  assert SINGLE in str(error.value) and "write it again" in str(error.value)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_shorter_than_its_headers_length_is_refused(tmp_path, size):
  (tmp_path / SINGLE).write_bytes(bytes(size))
  with pytest.raises(ValueError, match=f"it has {size} bytes"):
    open_checkpoint(tmp_path)


def test_every_cut_of_a_file_is_refused(tmp_path):
  save_file(_TENSORS, tmp_path / "whole")
  content = (tmp_path / "whole").read_bytes()
  system, folder = locate(tmp_path)
  for size in itertools.chain(range(0, 16), range(16, len(content), 7)):
    (tmp_path / "cut").write_bytes(content[:size])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
      read_header(system, f"{folder}/cut")


def test_quantized_tensors_are_refused_when_they_are_wanted(tmp_path):
  write_raw(tmp_path, {"x": dict(dtype="F8_E4M3", shape=[4], data_offsets=[0, 4])}, bytes(4))
  tensor = open_checkpoint(tmp_path)["x"]
  with pytest.raises(ValueError, match="'x' has dtype F8_E4M3, only F64, F32, F16, BF16"):
    tensor.rows(0, 4)


def write_shards(folder):
  names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
  first, *rest = _TENSORS
  save_file({first: _TENSORS[first]}, folder / names[0])
  save_file({name: _TENSORS[name] for name in rest}, folder / names[1])
  placed = {first: names[0]} | dict.fromkeys(rest, names[1])
  (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
  return names, placed


def test_shards_are_read_through_their_index(tmp_path):
  write_shards(tmp_path)
  assert_same(whole(open_checkpoint(tmp_path)), _TENSORS)


def test_a_folder_of_links_is_read(tmp_path):
  """As hubs' caches are: the files lie elsewhere, under other names."""
  for folder in ("blobs", "snapshot"):
    (tmp_path / folder).mkdir()
  write_shards(tmp_path / "blobs")
  for file in (tmp_path / "blobs").iterdir():
    renamed = file.rename(file.with_name(f"{hash(file.name)}"))
    (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{renamed.name}")
  (tmp_path / "snapshot" / SINGLE).symlink_to("../blobs/absent")
  assert_same(whole(open_checkpoint(tmp_path / "snapshot")), _TENSORS)


def test_a_missing_shard_is_named(tmp_path):
  names, _ = write_shards(tmp_path)
  (tmp_path / names[1]).unlink()
  with pytest.raises(FileNotFoundError, match=names[1]):
    open_checkpoint(tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda placed: placed | {"d.weight": placed["a.weight"]}, "lacks 'd.weight'"),
    (lambda placed: placed | {"a.weight": "../other.safetensors"}, "not a safetensors file in"),
    (lambda placed: placed | {"a.weight": "pytorch_model.bin"}, "not a safetensors file in"),
    (lambda placed: {}, "no weight_map"),
    (lambda placed: [1], "no weight_map"),
  ],
)
def test_an_index_that_is_not_of_its_shards_is_refused(tmp_path, change, message):
  _, placed = write_shards(tmp_path)
  (tmp_path / INDEX).write_text(json.dumps({"weight_map": change(placed)}))
  with pytest.raises(ValueError, match=message):
    open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_an_index_that_is_no_json_object_is_refused(tmp_path, text):
  (tmp_path / INDEX).write_text(text)
  with pytest.raises(ValueError, match=INDEX):
    open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(tmp_path, name):
  (tmp_path / name).write_bytes(b"\x80\x04.")
  with pytest.raises(ValueError, match=f"{name}.*runs code.*Convert them to safetensors"):
    open_checkpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor.*config\.json"):
    open_checkpoint(tmp_path)
  with pytest.raises(FileNotFoundError, match="not a directory"):
    open_checkpoint(tmp_path / "nowhere")


def test_a_directory_is_there_whole_or_not_at_all(tmp_path):
  target = tmp_path / "out"
  with pytest.raises(RuntimeError), new_directory(target) as (system, folder):
    write_checkpoint(
      system, folder, {"x": (2,)}, np.dtype(np.float32), iter([np.zeros(2, np.float32)])
    )
    assert not target.exists()
    raise RuntimeError
  assert list(tmp_path.iterdir()) == []


def test_a_directory_is_written_by_one_process_at_a_time(tmp_path):
  target, code = tmp_path / "out", (
    "import sys; from rlvr_jax.models.safetensors import new_directory\n"
    "with new_directory(sys.argv[1]) as (system, folder):\n"
    "  system.pipe_file(f'{folder}/first', b'1'); print('in', flush=True); sys.stdin.read()"
  )  # fmt: skip
  command = [sys.executable, "-c", code, str(target)]
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  for ended in ("killed", "finished"):
    first = subprocess.Popen(command, **pipes)
    assert first.stdout.readline() == "in\n"
    refused = r"out is being written by another process: wait for it, or choose another"
    with pytest.raises(FileExistsError, match=refused), new_directory(target):
      pass
    if ended == "killed":
      first.kill()
    first.communicate()
  # What the killed one left is gone, and the other's is whole.
  assert [path.name for path in tmp_path.iterdir()] == ["out"]
  assert [path.name for path in target.iterdir()] == ["first"]


@pytest.mark.parametrize("folder", ["/proc/x", "/tmp/" + 300 * "x"])
def test_a_directory_that_cannot_be_has_a_remedy(folder):
  with pytest.raises(OSError, match=r"cannot be written: .*Choose a folder"), new_directory(folder):
    pass


@pytest.mark.parametrize("remote", [False, True])
def test_a_directory_that_holds_something_is_not_written_into(tmp_path, remote):
  target = f"memory://{tmp_path}/out" if remote else str(tmp_path / "out")
  system, path = locate(target)
  system.makedirs(path)
  with new_directory(target) as (_, folder):  # empty: taken
    system.pipe_file(f"{folder}/kept", b"1")
  with pytest.raises(FileExistsError, match="not empty"), new_directory(target):
    pass
  assert system.cat_file(f"{path}/kept") == b"1"
