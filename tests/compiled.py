"""Programs that jax compiled in earlier sessions of the tests, for all later ones of this machine.

jax's own key of an entry has the program, the versions, the flags and the devices. A session works
in a folder of its own, into which it links what earlier ones kept. What it adds is kept when it
ends, if it is whole: a program that a test kills may leave half an entry behind.
"""

import os
import pathlib
import shutil
import tempfile
import time

UNUSED_DAYS = 7  # after which an entry goes


def kept_folder() -> pathlib.Path:
  """The folder of all sessions, in the user's cache."""
  cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(cache).expanduser() / "rlvr_jax" / "tests" / "compiled"


def open_session(kept: pathlib.Path) -> pathlib.Path:
  """A new folder of one session, with all entries that are kept."""
  kept.mkdir(parents=True, exist_ok=True)
  oldest = time.time() - UNUSED_DAYS * 24 * 3600
  for path in kept.parent.glob("session-*"):  # of sessions that were killed
    if path.stat().st_mtime < oldest:
      shutil.rmtree(path, ignore_errors=True)
  folder = pathlib.Path(tempfile.mkdtemp(prefix="session-", dir=kept.parent))
  for entry in os.scandir(kept):  # tens of thousands
    try:
      found = entry.stat()
      if max(found.st_atime, found.st_mtime) < oldest:
        os.unlink(entry.path)
      else:
        os.link(entry.path, f"{folder}/{entry.name}")
    except FileNotFoundError:  # another session removed it
      pass
  return folder


def is_whole(path: pathlib.Path) -> bool:
  """Whether jax can unpack an entry."""
  from jax._src.compilation_cache import decompress_executable  # not before flags of jax are set

  try:
    decompress_executable(path.read_bytes())
  except Exception:  # of zlib or of zstandard, whichever jax found
    return False
  return True


def close_session(folder: pathlib.Path, kept: pathlib.Path) -> None:
  """Keeps the whole entries that a session added, and removes its folder."""
  known = set(os.listdir(kept))
  for name in os.listdir(folder):
    if name.endswith("-cache") and name not in known and is_whole(folder / name):
      try:
        os.link(folder / name, kept / name)
      except FileExistsError:  # of another session, at the same time
        pass
  shutil.rmtree(folder, ignore_errors=True)
