"""Folders are listed; new ones appear when they are complete, and are written by one process."""

import subprocess
import sys

import pytest

from rlvr_jax.storage.folders import list_files, locate, new_directory, write_bytes


@pytest.mark.parametrize("remote", [False, True])
def test_the_files_of_a_directory(tmp_path, remote):
  folder = f"memory://{tmp_path}" if remote else str(tmp_path)
  system, path = locate(folder)
  system.makedirs(f"{path}/sub", exist_ok=True)
  for name in ("b.json", "a.json", "sub/c.json"):
    system.write_text(f"{path}/{name}", "{}")
  assert list_files(folder) == ["a.json", "b.json"]
  for wrong in ("a.json", "absent"):
    with pytest.raises(FileNotFoundError, match=f"{wrong} is not a directory"):
      list_files(f"{folder}/{wrong}")


def test_what_cannot_be_reached_is_not_said_to_be_empty():
  with pytest.raises(OSError, match=r"127\.0\.0\.1:1/folder cannot be listed: .*refused") as caught:
    list_files("webhdfs://127.0.0.1:1/folder")
  assert not isinstance(caught.value, FileNotFoundError)


def test_a_directory_is_there_whole_or_not_at_all(tmp_path):
  target = tmp_path / "out"
  with pytest.raises(RuntimeError), new_directory(target) as (system, folder):
    write_bytes(system, f"{folder}/x", b"1")
    assert not target.exists()
    raise RuntimeError
  assert list(tmp_path.iterdir()) == []


def test_a_directory_is_written_by_one_process_at_a_time(tmp_path):
  target, code = tmp_path / "out", (
    "import sys; from rlvr_jax.storage.folders import new_directory\n"
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
