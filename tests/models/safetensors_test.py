"""The file format: what is read and written, how much of it at a time, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlvr_jax.models.safetensors import (
  INDEX,
  SINGLE,
  open_checkpoint,
  open_file,
  tensor_names,
  write_checkpoint,
)
from rlvr_jax.storage.folders import locate, new_directory

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
  np.testing.assert_array_equal(tensor.rows(1, 3), value[1:3])


@pytest.mark.parametrize(
  ("dtype", "max_shard_bytes", "remote"),
  [
    (np.dtype(np.float32), 2**30, False),
    (np.dtype(np.float32), 100, False),
    (np.dtype(np.float16), 100, True),
    (BF16, 1, True),
  ],
)
def test_what_is_written_is_what_the_library_reads(tmp_path, dtype, max_shard_bytes, remote):
  tensors = {name: value.astype(dtype) for name, value in _TENSORS.items()}
  target = f"memory://{tmp_path}/out" if remote else tmp_path / "out"
  shapes = {name: value.shape for name, value in tensors.items()}
  values = iter(tensors.values())
  with new_directory(target) as (system, folder):
    write_checkpoint(system, folder, shapes, dtype, values, max_shard_bytes=max_shard_bytes)
  assert_same(whole(open_checkpoint(target)), tensors)
  assert sorted(tensor_names(target)) == sorted(tensors)
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


def test_a_transposed_tensor_is_written_as_it_is(tmp_path):
  """The library would write its buffer in the order of memory."""
  value = np.arange(6, dtype=np.float32).reshape(2, 3).T
  with new_directory(tmp_path / "out") as (system, folder):
    write_checkpoint(system, folder, {"x": (3, 2)}, value.dtype, [value])
  assert_same(load_file(tmp_path / "out" / SINGLE), {"x": value})


def test_others_may_read_it_if_the_umask_lets_them(tmp_path):
  before = os.umask(0o022)
  try:
    with new_directory(tmp_path / "out") as (system, folder):
      write_checkpoint(system, folder, {"x": (2,)}, np.dtype(np.float32), [np.zeros(2, np.float32)])
  finally:
    os.umask(before)
  assert (tmp_path / "out" / SINGLE).stat().st_mode & 0o777 == 0o644


def test_a_remote_file_leaves_no_copy(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
  (tmp_path / "temporary").mkdir()
  save_file(_TENSORS, tmp_path / SINGLE)
  system, _ = locate("memory://x")
  system.pipe_file(f"{tmp_path}/x/{SINGLE}", (tmp_path / SINGLE).read_bytes())
  found = open_checkpoint(f"memory://{tmp_path}/x")
  assert list((tmp_path / "temporary").iterdir()) == []
  np.testing.assert_array_equal(found["a.weight"].rows(2, 5), _TENSORS["a.weight"][2:5])
  assert_same(whole(found), _TENSORS)


_ENTRY = dict(dtype="F32", shape=[2, 2], data_offsets=[0, 16])


@pytest.mark.parametrize(
  ("header", "size", "length"),
  [
    ({"x": _ENTRY}, 15, None),
    ({"x": _ENTRY}, 17, None),
    ({"x": _ENTRY}, 16, 10**6),
    ({"x": _ENTRY}, 16, 2**63),
    (b"{not json", 16, None),
    (b"\xff\xfe", 16, None),
    (b"[" * 100_000, 0, None),
    (b'{"a":' * 100_000, 0, None),
    (b"[]", 0, None),
    (b'{"x": 1}', 0, None),
    (b'{"x": {"dtype": "F32"}}', 0, None),
    ({"x": _ENTRY | {"shape": [2, -2]}}, 16, None),
    ({"x": _ENTRY | {"shape": [2, 3]}}, 16, None),
    ({"x": _ENTRY | {"shape": [2**62, 4]}}, 16, None),
    ({"x": _ENTRY | {"data_offsets": [16, 0]}}, 16, None),
    ({"x": _ENTRY | {"data_offsets": [0, 8, 16]}}, 16, None),
    ({"x": _ENTRY, "y": _ENTRY | {"data_offsets": [8, 24]}}, 24, None),
    ({"x": _ENTRY, "y": _ENTRY | {"data_offsets": [20, 36]}}, 36, None),
  ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path, header, size, length):
  write_raw(tmp_path, header, bytes(size), length)
  with pytest.raises(ValueError, match=f"{SINGLE} is not a complete .*write it again") as error:
    open_checkpoint(tmp_path)
  assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_every_cut_of_a_file_is_refused(tmp_path):
  save_file(_TENSORS, tmp_path / "whole")
  content = (tmp_path / "whole").read_bytes()
  system, folder = locate(tmp_path)
  for size in itertools.chain(range(0, 16), range(16, len(content), 7)):
    (tmp_path / "cut").write_bytes(content[:size])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
      open_file(system, f"{folder}/cut")


def test_quantized_tensors_are_refused_when_they_are_wanted(tmp_path):
  write_raw(tmp_path, {"x": dict(dtype="F8_E4M3", shape=[4], data_offsets=[0, 4])}, bytes(4))
  tensor = open_checkpoint(tmp_path)["x"]
  with pytest.raises(ValueError, match="'x' has dtype F8_E4M3, but only F64, F32, F16, BF16"):
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
  with pytest.raises(ValueError, match=f"{name}.*runs code.*Convert the weights to safetensors"):
    open_checkpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor.*config\.json"):
    open_checkpoint(tmp_path)
  with pytest.raises(FileNotFoundError, match="not a directory"):
    open_checkpoint(tmp_path / "nowhere")
