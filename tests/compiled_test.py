"""Compiled programs that one session of the tests leaves to the next."""

import os
import time

import compiled
import jax
from jax._src.compilation_cache import compress_executable
from jax.experimental.compilation_cache import compilation_cache

WHOLE = compress_executable(b"a program" * 99)


def entries(folder):
  return {path.name: path.read_bytes() for path in folder.glob("*-cache")}


def test_the_next_session_has_what_this_one_added(tmp_path):
  kept = tmp_path / "compiled"
  first, beside = compiled.open_session(kept), compiled.open_session(kept)
  for folder in (first, beside):
    (folder / "a-cache").write_bytes(WHOLE)
  (beside / "b-cache").write_bytes(WHOLE)
  for folder in (first, beside):
    compiled.close_session(folder, kept)
  assert entries(compiled.open_session(kept)) == {"a-cache": WHOLE, "b-cache": WHOLE}
  assert not first.exists() and not beside.exists()


def test_a_program_has_the_same_entry_in_every_folder(tmp_path):
  before = jax.config.jax_compilation_cache_dir
  try:
    for name in ("one", "other"):
      compilation_cache.reset_cache()
      compilation_cache.set_cache_dir(str(tmp_path / name))
      jax.jit(lambda x: 3 * x + 1)(2.0)
  finally:
    compilation_cache.reset_cache()
    compilation_cache.set_cache_dir(before)
  one, other = (entries(tmp_path / name).keys() for name in ("one", "other"))
  assert one and one == other


def test_a_torn_entry_is_not_kept(tmp_path):
  kept = tmp_path / "compiled"
  session = compiled.open_session(kept)
  (session / "whole-cache").write_bytes(WHOLE)
  (session / "torn-cache").write_bytes(WHOLE[:-9])
  (session / "empty-cache").write_bytes(b"")
  compiled.close_session(session, kept)
  assert entries(kept) == {"whole-cache": WHOLE}


def test_what_was_long_not_read_goes_and_so_does_a_killed_session(tmp_path):
  kept = tmp_path / "compiled"
  killed = compiled.open_session(kept)
  for name in ("old-cache", "new-cache"):
    (kept / name).write_bytes(WHOLE)
  long_ago = time.time() - (compiled.UNUSED_DAYS + 1) * 24 * 3600
  for path in (kept / "old-cache", killed):
    os.utime(path, (long_ago, long_ago))
  assert entries(compiled.open_session(kept)) == entries(kept) == {"new-cache": WHOLE}
  assert not killed.exists()
