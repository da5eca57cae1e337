"""Files that survive kills and full disks: atomic replacement, appended lines, checksums."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeAlias

# A value that can be written as JSON.
JSON: TypeAlias = "Mapping[str, JSON] | Sequence[JSON] | str | int | float | bool | None"
# A JSON object whose fields are read by name: the reader knows or checks their types.
JsonObject: TypeAlias = dict[str, Any]

TEMPORARY = ".tmp"  # suffix of the name of a file that is being written
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITABLE = (
  *(errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EROFS, errno.EACCES, errno.EPERM),
)


class DamagedFileError(ValueError):
  """A file of records has a line that is not a record."""


class ForeignNameError(OSError):
  """A name from a bucket or a record points to a file outside of its folder."""


class DiskFullError(OSError):
  """No space is left for a file that a run has to write."""


# --- names ----------------------------------------------------------------------------------------


def path_within(folder: pathlib.Path, name: str) -> pathlib.Path:
  """The path of a file in a folder; checks the name, which may come from another person.

  Args:
    folder: a folder on this machine.
    name: the name of an object, or a name in a record, such as "rollouts/00000000.json".
  Raises:
    ForeignNameError: the name is absolute or has an empty part, "." or "..".
  """
  parts = name.split("/") if isinstance(name, str) else [""]
  if any(part in ("", ".", "..") or "\0" in part for part in parts):
    raise ForeignNameError(
      f"a file named {name!r:.200} would not be in its folder, {folder}; nothing was read or"
      " written. Remove the object or record with this name, or use no files from its author"
    )
  return folder.joinpath(*parts)


# --- full disks -----------------------------------------------------------------------------------


@contextlib.contextmanager
def report_full_disk(path: pathlib.Path) -> Iterator[None]:
  """Converts any library's error about a full disk into an error that says how to fix it."""
  try:
    yield
  except Exception as error:
    if isinstance(error, DiskFullError) or not is_disk_full(error):
      raise
    raise disk_full_error(path) from error


def disk_full_error(path: pathlib.Path, detail: str = "") -> DiskFullError:
  """The error of a run that cannot write `path` because the disk is full."""
  return DiskFullError(
    errno.ENOSPC,
    f"no space left to write {path}{detail and f' ({detail})'}. Free some space and rerun the same "
    "command: it resumes from the last checkpoint.",
  )


def is_disk_full(error: BaseException | None) -> bool:
  """Whether the cause of an error is a full disk."""
  return _has_errno(error, _FULL)


def is_out_of_descriptors(error: BaseException | None) -> bool:
  """Whether the cause of an error is the limit on open files."""
  return _has_errno(error, (errno.EMFILE, errno.ENFILE))


def _has_errno(error: BaseException | None, codes: Collection[int]) -> bool:
  """Whether an error or one of its causes has one of these errnos, or the text of such an errno."""
  while error is not None:
    text = str(error)
    if getattr(error, "errno", None) in codes or any(os.strerror(code) in text for code in codes):
      return True
    error = error.__cause__ or error.__context__
  return False


def shortage(folder: pathlib.Path, need: int) -> str | None:
  """A message if fewer than `need` bytes are free; None if there is enough space."""
  free = shutil.disk_usage(folder).free
  if free >= need:
    return None
  return f"{free / 2**20:.1f} MiB free, {need / 2**20:.1f} MiB needed"


@contextlib.contextmanager
def report_unwritable(name: str, error_type: type[Exception] = OSError) -> Iterator[None]:
  """Converts errors of creating or opening a folder on a disk into an error that says what to do.

  Args:
    name: the folder, for the message.
    error_type: class of the new error.
  """
  try:
    yield
  except OSError as error:
    if error.errno not in _UNWRITABLE:
      raise
    raise error_type(
      f"{name} cannot be written: {error.strerror}. Choose a folder that this user can write; each"
      " name in its path may have at most 255 bytes"
    ) from error


def open_own(path: pathlib.Path, mode: str, *, buffering: int = -1) -> IO[Any]:
  """Opens a file of a run for writing and creates it if needed; takes the arguments of `open`.

  Raises:
    OSError: the file is a symbolic link, through which a foreign workdir could reach this user's
      files.
  """
  try:
    return open(
      path, mode, buffering, opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o666)
    )
  except OSError as error:
    if error.errno != errno.ELOOP:
      raise
    raise OSError(
      f"{path} is a symbolic link, and this program writes no file through a link: remove the link,"
      " or choose another folder. A folder, such as `checkpoints`, may be a link"
    ) from error


# --- atomic replacement ---------------------------------------------------------------------------


@contextlib.contextmanager
def replace_file(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Context with a file to write; at the end of the context the file replaces `path` atomically."""
  with replace_path(path) as temporary, open_own(temporary, "wb") as file:
    yield file


@contextlib.contextmanager
def replace_path(path: pathlib.Path, *, durable: bool = True) -> Iterator[pathlib.Path]:
  """Like `replace_file`, for libraries that need a path; an error removes the temporary file.

  By default the new file is durable at the end of the context: it survives a crash of the machine.
  """
  temporary = path.with_name(path.name + TEMPORARY)
  if temporary.is_symlink():  # the library would follow the link
    temporary.unlink()
  try:
    with report_full_disk(path):
      yield temporary
      if durable:
        with open(temporary, "rb+") as file:
          os.fsync(file.fileno())
      temporary.replace(path)
      if durable:
        sync_folder(path.parent)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def sync_folder(folder: pathlib.Path) -> None:
  """Makes the names in a folder durable; syncing a renamed file does not sync its new name."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Context in which this process has locked a file; creates the file if it does not exist.

  If the process is killed, the lock ends, too.

  Raises:
    BlockingIOError: another process has locked or replaced the file.
  """
  with open_own(path, "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
      raise BlockingIOError(f"{path} was replaced meanwhile")
    yield file


# --- temporary folders ----------------------------------------------------------------------------


def make_locked_folder(prefix: str) -> tuple[pathlib.Path, int]:
  """Makes a temporary folder; returns the folder and a descriptor that locks it.

  The lock ends with this process. Killed processes may have left folders with the same prefix
  behind: these folders are removed.
  """
  for leftover in pathlib.Path(tempfile.gettempdir()).glob(f"{prefix}*"):
    with contextlib.suppress(OSError):  # the folder is locked, or another user's
      descriptor = _lock_folder(leftover)
      try:
        shutil.rmtree(leftover)
      finally:
        os.close(descriptor)
  while True:
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix))
    # Until the folder is locked, another process may take it for a leftover, and remove it.
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
      descriptor = _lock_folder(folder)
      if folder.exists():
        return folder, descriptor
      os.close(descriptor)


def _lock_folder(folder: pathlib.Path) -> int:
  """Locks a folder; returns the descriptor. Raises OSError if it is locked already."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    os.close(descriptor)
    raise
  return descriptor


# --- lines of JSON --------------------------------------------------------------------------------


class JsonLines:
  """Appends JSON lines to a file; when `append` returns, the operating system has all its lines.

  A process that is killed during `append` may leave an incomplete last line. Opening the file
  removes this line.
  """

  def __init__(self, path: pathlib.Path):
    """Opens a file, which is created if needed."""
    self._path = path
    # Unbuffered: a buffer would hold the bytes of a failed write, and write them again on close.
    self._file = open_own(path, "ab", buffering=0)
    try:
      self._file.truncate(_complete_size(path))
    except BaseException:
      self._file.close()
      raise

  def append(self, records: Iterable[Mapping[str, JSON]]) -> list[bytes]:
    """Appends one line per record.

    Returns:
      The lines, as bytes.
    Raises:
      DiskFullError: no space is left; none of the records is in the file.
    """
    lines = [(json.dumps(record, allow_nan=False) + "\n").encode() for record in records]
    rest = memoryview(b"".join(lines))
    size = os.fstat(self.fileno()).st_size
    try:
      with report_full_disk(self._path):
        while rest:
          rest = rest[self._file.write(rest) :]
    except OSError:
      with contextlib.suppress(OSError):
        self._file.truncate(size)
      raise
    return lines

  def fileno(self) -> int:
    """The descriptor of the file."""
    return self._file.fileno()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _complete_size(path: pathlib.Path) -> int:
  """Number of bytes up to the end of a file's last complete line."""
  with open(path, "rb") as file:
    size = file.seek(0, os.SEEK_END)
    while size:
      start = max(size - 2**16, 0)
      file.seek(start)
      if end := file.read(size - start).rfind(b"\n") + 1:
        return start + end
      size = start
  return 0


def read_lines(path: pathlib.Path) -> list[bytes]:
  """The lines of a file, the last of which may be incomplete; [] if the file does not exist."""
  return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def replace_lines(path: pathlib.Path, lines: Sequence[bytes]) -> None:
  """Replaces the lines of a file atomically; does not write if the lines are the same."""
  if not path.exists() or read_lines(path) != list(lines):
    with replace_file(path) as file:
      file.writelines(lines)


def parse_line(line: bytes) -> JsonObject | None:
  """Parses the record in a line; None if the line is not a JSON object."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return record if isinstance(record, dict) else None


def read_records(path: str | os.PathLike[str]) -> Iterator[JsonObject]:
  """Reads the records of a local file, see `parse_records`."""
  with open(path, encoding="utf-8", errors="replace") as lines:
    yield from parse_records(lines, path)


def parse_records(lines: Iterable[str], path: str | os.PathLike[str]) -> Iterator[JsonObject]:
  """Parses the records of a .jsonl file; an incomplete last line is skipped.

  Args:
    lines: the lines of the file.
    path: the path of the file, for messages.
  Raises:
    DamagedFileError: a complete line is not a JSON object.
  """
  for number, line in enumerate(lines, start=1):
    if not line.endswith("\n"):
      return
    record = parse_line(line.encode(errors="surrogateescape"))
    if record is None:
      raise DamagedFileError(f"{path}, line {number} is not a JSON object; remove that line.")
    yield record


# --- checksums ------------------------------------------------------------------------------------


def json_crc32(value: JSON) -> int:
  """Checksum of a JSON value; the value has the same checksum after it is written and read back."""
  return zlib.crc32(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode())


def with_crc32(record: Mapping[str, JSON]) -> dict[str, JSON]:
  """Adds a record's checksum as the field "crc32"; see `is_as_written`, `parse_checked_line`."""
  return {**record, "crc32": json_crc32(record)}


def is_as_written(record: Mapping[str, JSON]) -> bool:
  """Whether a record of `with_crc32` still matches its checksum; False without a checksum."""
  content = {name: value for name, value in record.items() if name != "crc32"}
  return record.get("crc32") == json_crc32(content)


def parse_checked_line(line: bytes) -> JsonObject | None:
  """Parses a record of `with_crc32`; drops the checksum; None if the line is damaged."""
  record = parse_line(line)
  if record is None or not is_as_written(record):
    return None
  return {name: value for name, value in record.items() if name != "crc32"}
