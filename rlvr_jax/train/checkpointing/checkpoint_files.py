"""The content of one checkpoint: writes a state, and reads it back with its checksums verified.

A checkpoint is one directory of orbax with two items: `arrays` (the leaves of the state and the
host's arrays, by name) and `manifest` (JSON: format marker; shape, dtype and checksum of every
array; the host's values).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pathlib
import sys
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from rlvr_jax.ops.checksums import checksums
from rlvr_jax.storage.bucket import UnreachableError
from rlvr_jax.storage.files import (
  JSON,
  JsonObject,
  is_as_written,
  is_out_of_descriptors,
  with_crc32,
)
from rlvr_jax.storage.places import in_bucket, make_absolute
from rlvr_jax.train.cluster.sharding import to_host
from rlvr_jax.types import Array, Params, Tree

MARKER = "rlvr_jax checkpoint 2"
COMMITTED = "commit_success.txt"  # orbax writes this file last
MANIFEST = "manifest/metadata"  # the file of the item `manifest`
_HOST = "host-"  # prefix of the names of the host's arrays
# Words in errors of tensorstore and gcsfs if a bucket does not respond, or refuses access.
_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED")
_UNREACHABLE += ("Forbidden", "Cannot connect")

Entries: TypeAlias = dict[str, JsonObject]  # name → {"shape", "dtype", "checksum"}
Leaf: TypeAlias = Array | jax.ShapeDtypeStruct  # leaf of a state, or of an abstract state


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or used."""


class TornCheckpointError(CheckpointError):
  """Files of a checkpoint are missing, truncated or changed."""


class ForeignCheckpointError(CheckpointError):
  """The checkpoint is of another program, or of a state with another structure."""


class Restored(NamedTuple):
  """A checkpoint that was read."""

  step: int
  state: Any  # with the shardings of the abstract state
  host: JsonObject
  arrays: dict[str, np.ndarray]


def saved_steps(directory: pathlib.Path) -> list[int]:
  """The steps that have a checkpoint in `directory`, a path from `parse_path`; ascending."""
  paths = [path for path in directory.glob("*") if path.name.isdigit()]
  if in_bucket(directory):  # in a bucket, a killed save also leaves a directory
    paths = [path for path in paths if (path / COMMITTED).exists()]
  return sorted(int(path.name) for path in paths)


# --- writing --------------------------------------------------------------------------------------


def items_to_save(
  step: int,
  state: object,
  *,
  host: Mapping[str, JSON],
  arrays: Mapping[str, np.ndarray],
  metric: float | None,
) -> tuple[dict[str, Array | np.ndarray], dict[str, JSON]]:
  """The two items of a checkpoint: its arrays by name, and its manifest.

  For arguments see `Checkpointer.save`.
  """
  leaves, of_host = _named_leaves(state), {_HOST + name: x for name, x in arrays.items()}
  values = leaves | of_host
  sums = _device_sums(leaves) | _host_sums(of_host)
  entries: Entries = {
    name: {"shape": list(x.shape), "dtype": jnp.dtype(x.dtype).name, "checksum": sums[name]}
    for name, x in values.items()
  }
  content: dict[str, JSON] = {"step": step, "arrays": entries, "host": dict(host), "metric": metric}
  # Orbax does not accept empty arrays; the manifest has their shape and dtype.
  stored = {name: value for name, value in values.items() if value.size}
  return stored, _manifest(content)


def _manifest(content: Mapping[str, JSON]) -> dict[str, JSON]:
  return with_crc32({"marker": MARKER, **json.loads(json.dumps(content))})


def with_metric(manifest: JsonObject, host: Mapping[str, JSON], metric: float) -> bytes:
  """The bytes of a saved step's new manifest, with these host values and metric."""
  content = {name: manifest[name] for name in ("step", "arrays")}
  return json.dumps(_manifest(content | {"host": dict(host), "metric": metric})).encode()


# --- reading --------------------------------------------------------------------------------------


def read_manifest(directory: pathlib.Path) -> JsonObject:
  """Reads the manifest of a checkpoint, and verifies its checksum and step.

  Raises:
    ForeignCheckpointError: the directory is of another program or version.
    ValueError: the manifest is damaged.
  """
  if not (directory / "manifest").exists():
    raise ForeignCheckpointError(
      f"{directory} is not a checkpoint of rlvr_jax (it has no manifest). Use another --workdir, or"
      " remove that directory if it is not needed."
    )
  manifest: JsonObject = json.loads((directory / MANIFEST).read_bytes())
  is_whole = isinstance(manifest, dict) and is_as_written(manifest)
  former = isinstance(manifest, dict) and manifest.get("manifest")  # the content in format 1
  marker = (former or manifest)["marker"] if is_whole or former else MARKER
  if marker != MARKER:
    raise ForeignCheckpointError(
      f"{directory} has the format {marker!r}, but this version reads {MARKER!r}. "
      "Use the version of rlvr_jax that wrote it, or another --workdir."
    )
  if not is_whole:
    raise ValueError("the manifest does not match its checksum")
  if (step := manifest["step"]) != int(directory.name):
    raise ValueError(f"it is the checkpoint of step {step}, in a directory of another step")
  return manifest


def read_state(
  directory: pathlib.Path, abstract_state: object, *, if_other: str, verifies: bool = True
) -> Restored:
  """Loads a checkpoint and verifies every array.

  Args:
    directory: the directory of one step.
    abstract_state: see `Checkpointer.restore`.
    if_other: sentence at the end of a ForeignCheckpointError, which says what to do.
    verifies: whether to verify the state; if False, call `verify_state` later. With several
      processes, a background thread must not dispatch the compiled programs that verify the state.
  Raises:
    TornCheckpointError: files are truncated, changed or missing.
    ForeignCheckpointError: the checkpoint is of another program, or of a state with another
      structure.
  """
  expected = _named_leaves(abstract_state)
  with _report_damage(directory):
    manifest = read_manifest(directory)
    of_host = {n: e for n, e in manifest["arrays"].items() if n.startswith(_HOST)}
    saved = {n: e for n, e in manifest["arrays"].items() if n not in of_host}
    _check_same_leaves(directory, expected, saved, if_other)
    stored = _read_arrays(directory, expected, saved | of_host)
    arrays = {name: stored.pop(name) for name in of_host}
    _check_sums(_host_sums(arrays), of_host)
    if verifies:
      _check_sums(_device_sums(stored), saved)
  state = _unflatten(abstract_state, stored.values())
  arrays = {name.removeprefix(_HOST): array for name, array in arrays.items()}
  return Restored(manifest["step"], state, manifest["host"], arrays)


def verify_state(directory: pathlib.Path, state: object) -> None:
  """Verifies every leaf of a state from `read_state`; all processes call this together.

  Raises:
    TornCheckpointError: files are truncated, changed or missing.
  """
  leaves = _named_leaves(state)
  with _report_damage(directory):
    sums = _device_sums(leaves)  # first, because one process alone may fail to read the manifest
    entries = read_manifest(directory)["arrays"]
    _check_sums(sums, {name: entries[name] for name in leaves})


def read_params(directory: pathlib.Path, abstract_params: Params) -> Params:
  """Loads the parameters from a checkpoint of any run; see `read_field`."""
  return read_field("params", directory, abstract_params)


def read_field(field: str, directory: pathlib.Path, abstract: Tree) -> Tree:
  """Loads one field of the `TrainState` in a checkpoint of any run; writes nothing.

  Args:
    field: such as "params"; a checkpoint may consist of parameters alone.
    directory: the directory of one step.
    abstract: the field's structure, as for the state in `Checkpointer.restore`.
  Returns:
    The field, with the shardings of `abstract`.
  Raises:
    TornCheckpointError: files are truncated, changed or missing.
    ForeignCheckpointError: the checkpoint is of another program, or its field has another
      structure.
  """
  silence_orbax()
  directory = make_absolute(directory)
  with _report_damage(directory):
    saved = read_manifest(directory)["arrays"]
    prefix = f"{field}." if any(name.startswith("params.") for name in saved) else ""
    saved = {n: e for n, e in saved.items() if n.startswith(prefix) and not n.startswith(_HOST)}
    expected = {prefix + name: leaf for name, leaf in _named_leaves(abstract).items()}
    remedy = (
      "Choose a checkpoint with this run's network, adapters and optimizer, or change these fields."
    )
    _check_same_leaves(directory, expected, saved, remedy)
    stored = _read_arrays(directory, expected, saved)
    _check_sums(_device_sums(stored), saved)
  return _unflatten(abstract, stored.values())


@contextlib.contextmanager
def _report_damage(directory: pathlib.Path) -> Iterator[None]:
  """Converts errors of reading into TornCheckpointError, unless they show another cause."""
  try:
    yield
  except ForeignCheckpointError:
    raise
  except Exception as error:
    if in_bucket(directory) and any(status in str(error) for status in _UNREACHABLE):
      raise UnreachableError(
        f"the checkpoint {directory} cannot be read: {shorten_error(error)}. Check the network and"
        " the account's role (roles/storage.objectUser), then rerun the same command"
      ) from error
    if _is_out_of_memory(error) or is_out_of_descriptors(error):
      raise CheckpointError(
        f"the checkpoint {directory} cannot be read: {shorten_error(error)}"
      ) from error
    raise TornCheckpointError(
      f"the checkpoint {directory} is damaged: {shorten_error(error)}"
    ) from error


def _is_out_of_memory(error: BaseException | None) -> bool:
  """Whether the cause of an error is that the host or a device has too little memory."""
  while error is not None:
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
      return True
    error = error.__cause__ or error.__context__
  return False


def _named_leaves(tree: object) -> dict[str, Any]:
  """Leaves by path, in flattening order."""
  named = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if name in named or not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
      raise TypeError(
        f"state leaf {name!r} is {'a duplicate' if name in named else type(leaf).__name__}; "
        "every leaf must be a jax array with a unique path; pass host values as `host`."
      )
    named[name] = leaf
  return named


def _unflatten(like: Tree, leaves: Iterable[Array]) -> Tree:
  tree: Tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
  return tree


def _check_same_leaves(
  directory: pathlib.Path, expected: Mapping[str, Leaf], saved: Entries, remedy: str
) -> None:
  """Raises ForeignCheckpointError, which names the first leaf that differs."""
  in_run = {n: f"{jnp.dtype(x.dtype).name}{list(x.shape)}" for n, x in expected.items()}
  in_file = {n: f"{e['dtype']}{e['shape']}" for n, e in saved.items()}
  for name in [*in_run, *in_file]:
    if in_run.get(name) != in_file.get(name):
      raise ForeignCheckpointError(
        f"the checkpoint {directory} is of another state: leaf {name!r} is "
        f"{in_file.get(name, 'absent')} in it and {in_run.get(name, 'absent')} in this run. "
        f"{remedy}"
      )


def _read_arrays(
  directory: pathlib.Path, on_devices: Mapping[str, Leaf], entries: Entries
) -> dict[str, Any]:
  """The arrays of `entries` by name: first the arrays `on_devices`, then NumPy arrays.

  Raises errors of any type if files are missing, truncated or changed.
  """
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shardings = {name: leaf.sharding or one for name, leaf in on_devices.items()}
  names = [*on_devices, *(name for name in entries if name not in on_devices)]
  shapes = {n: (tuple(entries[n]["shape"]), jnp.dtype(entries[n]["dtype"])) for n in names}
  target, how = {}, {}
  for name, (shape, dtype) in shapes.items():
    if 0 not in shape:
      target[name] = jax.ShapeDtypeStruct(shape, dtype)
      how[name] = (
        ocp.ArrayRestoreArgs(sharding=shardings[name])
        if name in shardings
        else ocp.RestoreArgs(restore_type=np.ndarray)
      )
  args = ocp.args.PyTreeRestore(item=target, restore_args=how, partial_restore=True)
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    stored = dict(handler.restore(directory / "arrays", args=args))
  for name in shapes.keys() - stored.keys():
    empty = np.zeros(*shapes[name])
    stored[name] = jax.device_put(empty, shardings[name]) if name in shardings else empty
  return {name: stored[name] for name in names}


# --- checksums ------------------------------------------------------------------------------------


def _device_sums(leaves: Mapping[str, Array]) -> dict[str, int]:
  """Checksums of arrays on devices by name; all processes call it together."""
  return dict(zip(leaves, to_host(checksums(list(leaves.values()))).tolist(), strict=True))


def _host_sums(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
  """CRC-32 of the bytes of arrays by name."""
  return {name: zlib.crc32(np.ascontiguousarray(x).tobytes()) for name, x in arrays.items()}


def _check_sums(sums: Mapping[str, int], entries: Entries) -> None:
  """Raises ValueError if an array's checksum differs from the checksum in the manifest."""
  for name, entry in entries.items():
    if sums[name] != entry["checksum"]:
      raise ValueError(f"{name!r} has checksum {sums[name]}, saved with {entry['checksum']}")


# --- orbax's messages -----------------------------------------------------------------------------


def shorten_error(error: BaseException) -> str:
  """The text of an error, without the long list of settings that tensorstore appends."""
  text = " ".join(f"{type(error).__name__}: {error}".split())
  return text if len(text) <= 200 else f"{text[:200]}…"


@functools.cache
def silence_orbax() -> None:
  """Drops orbax's log records; our own errors report the problems that matter to users.

  When a read fails, orbax never awaits some other reads, and closes the event loop to which threads
  of tensorstore still send results. Without this function, Python would print a warning or a
  traceback for each read.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_not_from_orbax)
  warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
  default_hook = sys.unraisablehook

  def show_unless_closed(raised: sys.UnraisableHookArgs) -> None:
    if str(raised.exc_value) != "Event loop is closed":
      default_hook(raised)

  sys.unraisablehook = show_unless_closed


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
  of_orbax = f"{os.sep}orbax{os.sep}"
  if record.name == "asyncio":  # its messages name the task or read whose error was not retrieved
    return not any(mark in record.getMessage() for mark in (of_orbax, "tensorstore"))
  return of_orbax not in record.pathname
