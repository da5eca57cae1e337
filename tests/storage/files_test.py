import errno
import json
import os
import subprocess
import sys

import pytest

from rlvr_jax.storage import files


def test_a_replaced_file_is_the_old_or_the_whole_new_one(tmp_path):
  path = tmp_path / "a.json"
  with files.replace_file(path) as file:
    file.write(b"old")
  with files.replace_file(path) as file:
    file.write(b"new" * 10_000)
    assert path.read_bytes() == b"old"
  assert path.read_bytes() == b"new" * 10_000
  with pytest.raises(KeyboardInterrupt), files.replace_file(path) as file:
    file.write(b"torn")
    raise KeyboardInterrupt
  assert path.read_bytes() == b"new" * 10_000
  assert os.listdir(tmp_path) == ["a.json"]


def test_a_replaced_file_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
  path, synced = tmp_path / "a", []
  monkeypatch.setattr(
    os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, path.exists()))
  )
  with files.replace_file(path) as file:
    file.write(b"x")
  assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_link_in_a_folder_is_not_followed(tmp_path):
  theirs = tmp_path / "theirs"
  theirs.write_text("kept")
  for name in ("a.jsonl", "b.json.tmp", "c"):
    (tmp_path / name).symlink_to(theirs)
  with pytest.raises(OSError, match=r"a\.jsonl is a symbolic link.*remove the link"):
    files.JsonLines(tmp_path / "a.jsonl")
  with pytest.raises(OSError, match="c is a symbolic link"):
    files.open_own(tmp_path / "c", "wb")
  for made in ("b.json", "c"):  # the link goes, whose target is left
    with files.replace_file(tmp_path / made) as file:
      file.write(b"ours")
    assert not (tmp_path / made).is_symlink() and (tmp_path / made).read_text() == "ours"
  assert theirs.read_text() == "kept"


def test_lines_that_do_not_fit_leave_no_trace_and_others_still_do(tmp_path):
  """A file size limit stands in for a full disk."""
  code = """
import pathlib, resource, sys
from rlvr_jax.storage import files
lines = files.JsonLines(pathlib.Path(sys.argv[1]))
lines.append([{"x": 1}, {"x": 2}])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
  lines.append([{"x": 3}, {"x": "y" * 200}])
except files.DiskFullError as error:
  print(error)
lines.append([{"x": 4}])
lines.close()
"""
  path = tmp_path / "a.jsonl"
  command = [sys.executable, "-c", code, path]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
  assert f"no space left to write {path}. Free some space and rerun" in done.stdout
  assert path.read_text() == '{"x": 1}\n{"x": 2}\n{"x": 4}\n'


def test_a_torn_last_line_is_left_out_and_a_damaged_one_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"x": 1}\n{"x": 2}\n{"x"')
  assert [record["x"] for record in files.read_records(path)] == [1, 2]
  path.write_text('{"x": 1}\n{"x\n{"x": 3}\n')
  with pytest.raises(files.DamagedFileError, match=r"a\.jsonl, line 2 is not a JSON object; rem"):
    list(files.read_records(path))


def test_opening_removes_a_torn_last_line_alone(tmp_path):
  path = tmp_path / "a.jsonl"
  for whole in (b"", b'{"x": 1}\n', b"no record\n" * 20_000):
    for torn in (b"", b'{"x', b"y" * 200_000):
      path.write_bytes(whole + torn)
      lines = files.JsonLines(path)
      lines.append([{"x": 2}])
      lines.close()
      assert path.read_bytes() == whole + b'{"x": 2}\n'


@pytest.mark.parametrize(
  ("error", "full"),
  [
    (OSError(errno.ENOSPC, "…"), True),
    (OSError(errno.EDQUOT, "…"), True),
    (RuntimeError(f"write() failed: {os.strerror(errno.EFBIG)}; writing x"), True),
    (OSError(errno.EACCES, "…"), False),
    (RuntimeError("…"), False),
  ],
)
def test_a_full_disk_is_told_from_other_errors(tmp_path, error, full):
  wrapped = ValueError("…")
  wrapped.__cause__ = error
  assert files.is_disk_full(error) == files.is_disk_full(wrapped) == full
  with (
    pytest.raises(files.DiskFullError if full else type(error)) as seen,
    files.report_full_disk(tmp_path / "x"),
  ):
    raise error
  assert isinstance(seen.value, files.DiskFullError) == full


def test_shortage(tmp_path):
  assert files.shortage(tmp_path, 1) is None
  assert files.shortage(tmp_path, 2**70).endswith(" MiB free, 1125899906842624.0 MiB needed")


def test_a_new_folder_that_another_process_took_for_left_is_replaced(tmp_path, monkeypatch):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  make, others = files.tempfile.mkdtemp, []

  def slowly(prefix):
    folder = make(prefix=prefix)
    monkeypatch.setattr(files.tempfile, "mkdtemp", make)
    others.append(files.make_locked_folder(prefix)[0])  # it looks before this one is locked
    return folder

  monkeypatch.setattr(files.tempfile, "mkdtemp", slowly)
  found, _ = files.make_locked_folder("a_")
  assert {found, *others} == set(tmp_path.iterdir()) and found not in others


def test_checksums(tmp_path):
  value = {"b": [1, 0.1 + 0.2, None], "a": {"10": "ü", "9": True}}
  assert files.json_crc32(json.loads(json.dumps(value))) == files.json_crc32(value)
  assert files.json_crc32({"a": {10: 1, 9: 2}}) == files.json_crc32({"a": {"9": 2, "10": 1}})
  assert files.json_crc32(value) != files.json_crc32(value | {"b": [1, 0.3, None]})
