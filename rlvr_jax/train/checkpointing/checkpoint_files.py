"""The files of one checkpoint: writes a state, and reads it back with its checksums verified.

A checkpoint is one orbax step directory with two items: `arrays` (the state's leaves and the
extra host arrays, by name) and `manifest` (JSON: format marker; name, shape, dtype and checksum of
every leaf; the host's values).
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
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from rlvr_jax.storage.bucket import UnreachableError
from rlvr_jax.storage.files import json_crc32
from rlvr_jax.storage.places import in_bucket, make_absolute
from rlvr_jax.train.cluster.sharding import to_host
from rlvr_jax.types import Params

MARKER = "rlvr_jax checkpoint 2"
COMMITTED = "commit_success.txt"  # orbax writes it last
MANIFEST = "manifest/metadata"  # the file of the item of this name
# Parts of the errors of tensorstore and gcsfs for a bucket that does not respond, or refuses.
_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED")
_UNREACHABLE += ("Forbidden", "Cannot connect")


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or used."""


class TornCheckpointError(CheckpointError):
  """Files of a checkpoint are missing, truncated or changed."""


class ForeignCheckpointError(CheckpointError):
  """The checkpoint is of another program, or of a state with another structure."""


def saved_steps(directory: pathlib.Path) -> list[int]:
  """The steps with a checkpoint in `directory`, from `storage.places.parse_path`; ascending."""
  paths = [path for path in directory.glob("*") if path.name.isdigit()]
  if in_bucket(directory):  # where a killed save also leaves a directory
    paths = [path for path in paths if (path / COMMITTED).exists()]
  return sorted(int(path.name) for path in paths)


def items_to_save(
  step: int, state: Any, *, host: Mapping[str, Any], arrays: Any, metric: float | None
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The two items of a step directory; arguments as of `Checkpointer.save`.

  Returns:
    The arrays of jax and NumPy by name, and the manifest.
  """
  leaves = _named_leaves(state)
  skeleton, extra = _split_arrays(arrays)
  manifest = {
    "marker": MARKER,
    "step": step,
    "leaves": _describe(leaves, device_checksums(leaves)),
    "extra": _describe(extra, {name: host_checksum(value) for name, value in extra.items()}),
    "arrays": skeleton,
    "host": dict(host),
    "metric": metric,
  }
  return leaves | extra, _with_checksum(manifest)


def read_state(
  directory: pathlib.Path,
  abstract_state: Any,
  *,
  if_other: str,
  if_damaged: str = "",
  verifies: bool = True,
) -> tuple[Any, dict[str, Any], Any]:
  """Loads a step directory and verifies every leaf.

  Args:
    directory: directory of one step.
    abstract_state: see `Checkpointer.restore`.
    if_other: remedy for a ForeignCheckpointError, a sentence.
    if_damaged: remedy for a TornCheckpointError, a sentence.
    verifies: False: the state is left to `verify_state`. A thread of one of several processes must
      not dispatch the programs that do it.
  Returns:
    The state, the host's values and the arrays that were passed to `Checkpointer.save`.
  Raises:
    TornCheckpointError: files are truncated, changed or missing.
    ForeignCheckpointError: the checkpoint is of another program, or of a state with another
      structure.
  """
  expected = _named_leaves(abstract_state)
  with _report_damage(directory, if_damaged):
    manifest = read_manifest(directory)
    _check_same_leaves(directory, expected, manifest["leaves"], if_other)
    entries = manifest["leaves"] | manifest["extra"]
    stored = _read_arrays(directory, expected, entries, verifies=verifies)
  state = jax.tree.unflatten(jax.tree.structure(abstract_state), [stored[n] for n in expected])
  return state, manifest["host"], _join_arrays(manifest["arrays"], stored)


def verify_state(directory: pathlib.Path, state: Any) -> None:
  """Verifies every leaf of what `read_state` has loaded; all processes call it together.

  Raises:
    TornCheckpointError: files are truncated, changed or missing.
  """
  with _report_damage(directory, ""):
    _check_sums(device_checksums(_named_leaves(state)), read_manifest(directory)["leaves"])


def read_params(directory: pathlib.Path, abstract_params: Params) -> Params:
  """Loads the parameters from a checkpoint of any run; see `read_field`."""
  return read_field("params", directory, abstract_params)


def read_field(field: str, directory: pathlib.Path, abstract: Any) -> Any:
  """Loads one field of the `TrainState` in a checkpoint of any run; writes nothing.

  Args:
    field: such as "params"; a checkpoint may consist of parameters alone.
    directory: directory of one step.
    abstract: the field's structure, as that of the state in `Checkpointer.restore`.
  Returns:
    The field, with the shardings of `abstract`.
  Raises:
    TornCheckpointError: files are truncated, changed or missing.
    ForeignCheckpointError: the checkpoint is of another program, or its field has another
      structure.
  """
  silence_orbax()
  directory = make_absolute(directory)
  leaves = _named_leaves(abstract)
  with _report_damage(directory, "Choose another step or run."):
    saved = read_manifest(directory)["leaves"]
    prefix = f"{field}." if any(name.startswith("params.") for name in saved) else ""
    saved = {name: entry for name, entry in saved.items() if name.startswith(prefix)}
    expected = {prefix + name: leaf for name, leaf in leaves.items()}
    remedy = (
      "Choose a checkpoint with this run's network, adapters and optimizer, or change this run's."
    )
    _check_same_leaves(directory, expected, saved, remedy)
    stored = _read_arrays(directory, expected, saved)
  return jax.tree.unflatten(jax.tree.structure(abstract), [stored[n] for n in expected])


@contextlib.contextmanager
def _report_damage(directory: pathlib.Path, remedy: str) -> Iterator[None]:
  """Converts errors of reading into TornCheckpointError, unless the bucket does not respond."""
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
    suffix = f". {remedy}" if remedy else ""
    raise TornCheckpointError(
      f"the checkpoint {directory} is damaged: {shorten_error(error)}{suffix}"
    ) from error


# --- leaves ---------------------------------------------------------------------------------------


def _named_leaves(tree: Any) -> dict[str, Any]:
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


def _sharding_of_leaf(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
  return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _describe(leaves: Mapping[str, Any], sums: Mapping[str, int]) -> dict[str, dict[str, Any]]:
  return {
    name: {"shape": list(x.shape), "dtype": jnp.dtype(x.dtype).name, "checksum": sums[name]}
    for name, x in leaves.items()
  }


def _check_same_leaves(
  directory: pathlib.Path,
  expected: Mapping[str, Any],
  saved: Mapping[str, dict[str, Any]],
  remedy: str,
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
  directory: pathlib.Path,
  on_devices: Mapping[str, Any],
  entries: Mapping[str, dict[str, Any]],
  *,
  verifies: bool = True,
) -> dict[str, Any]:
  """The arrays of `entries` in a step directory: jax arrays for `on_devices`, else NumPy arrays.

  Raises errors of any type if files are missing, truncated or changed.
  """
  target = {}
  restore_args = {}
  for name, entry in entries.items():
    if 0 in entry["shape"]:
      continue
    target[name] = jax.ShapeDtypeStruct(entry["shape"], jnp.dtype(entry["dtype"]))
    if name in on_devices:
      restore_args[name] = ocp.ArrayRestoreArgs(sharding=_sharding_of_leaf(on_devices[name]))
    else:
      restore_args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
  args = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=True)
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    stored = dict(handler.restore(directory / "arrays", args=args))
  for name, entry in entries.items():
    if name not in stored:
      empty = np.zeros(entry["shape"], jnp.dtype(entry["dtype"]))
      on_device = name in on_devices
      stored[name] = (
        jax.device_put(empty, _sharding_of_leaf(on_devices[name])) if on_device else empty
      )
  if not verifies:
    return stored
  device = {name: stored[name] for name in on_devices}
  host = {name: host_checksum(stored[name]) for name in entries if name not in on_devices}
  _check_sums(device_checksums(device) | host, entries)
  return stored


def _check_sums(sums: Mapping[str, int], entries: Mapping[str, dict[str, Any]]) -> None:
  """Raises ValueError if a leaf's checksum differs from that in its entry of the manifest."""
  for name, entry in entries.items():
    if sums[name] != entry["checksum"]:
      raise ValueError(f"leaf {name!r} has checksum {sums[name]}, saved with {entry['checksum']}")


def _split_arrays(tree: Any) -> tuple[Any, dict[str, np.ndarray]]:
  """(JSON skeleton of `tree`, with {"array": name} in place of arrays; the arrays by name)."""
  arrays: dict[str, np.ndarray] = {}

  def visit(node: Any) -> Any:
    match node:
      case None:
        return None
      case dict() if all(isinstance(key, str) for key in node):
        return {"dict": {key: visit(child) for key, child in node.items()}}
      case list() | tuple():
        return {"list": [visit(child) for child in node]}
      case np.ndarray() | np.generic() if np.asarray(node).dtype.kind not in "OSUMm":
        name = f"extra-{len(arrays)}"
        arrays[name] = np.asarray(node)
        return {"array": name}
    raise TypeError(
      f"`arrays` contains {type(node).__name__}; it takes dicts with string keys, lists and numeric"
      " NumPy arrays (from jax.device_get and dataclasses.asdict); pass text as `host`."
    )

  return visit(tree), arrays


def _join_arrays(skeleton: Any, arrays: Mapping[str, np.ndarray]) -> Any:
  """The inverse of `_split_arrays`."""
  match skeleton:
    case None:
      return None
    case {"array": name}:
      return arrays[name]
    case {"dict": children}:
      return {key: _join_arrays(child, arrays) for key, child in children.items()}
    case {"list": children}:
      return [_join_arrays(child, arrays) for child in children]
  raise ValueError(f"unknown node {skeleton!r} in the manifest")


# --- checksums of arrays --------------------------------------------------------------------------

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
  """Σ bits·(2·index + 1) mod 2³² of each leaf, where index is the row-major position; u32[] each.

  Integer arithmetic is exact in any order, so the sums do not depend on the sharding. The weights
  are odd, so that any change of one element changes the sum, and differ, so that order matters.
  """

  def checksum(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
      x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    weight, stride = jnp.ones((), jnp.uint32), 2
    for axis in reversed(range(bits.ndim)):
      index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
      weight, stride = weight + index * jnp.uint32(stride % 2**32), stride * bits.shape[axis]
    return jnp.sum(bits * weight, dtype=jnp.uint32)

  return [checksum(x) for x in leaves]


def parameter_checksums(params: Any) -> jax.Array:
  """`_checksums` of all leaves, u32[leaves]; independent of the sharding."""
  return jnp.stack(_checksums(jax.tree.leaves(params)))


def device_checksums(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
  """Checksums of arrays on devices by name, see `_checksums`."""
  sums = to_host(_checksums(list(leaves.values())))
  return {name: int(s) for name, s in zip(leaves, sums, strict=True)}


def host_checksum(array: np.ndarray) -> int:
  """CRC-32 of an array's bytes."""
  return zlib.crc32(array.tobytes())


# --- manifest -------------------------------------------------------------------------------------


def _with_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
  return {"crc32": json_crc32(manifest), "manifest": json.loads(json.dumps(manifest))}


def read_manifest(directory: pathlib.Path) -> dict[str, Any]:
  """Reads the manifest of a step directory, and verifies its checksum and step.

  Raises:
    ForeignCheckpointError: the directory is of another program or version.
    ValueError: the manifest is damaged.
  """
  if not (directory / "manifest").exists():
    raise ForeignCheckpointError(
      f"{directory} is not a checkpoint of rlvr_jax (it has no manifest). Use another --workdir, or"
      " remove that directory if it is not needed."
    )
  saved = json.loads((directory / MANIFEST).read_bytes())
  if _with_checksum(saved["manifest"])["crc32"] != saved["crc32"]:
    raise ValueError("the manifest does not match its checksum")
  marker = saved["manifest"]["marker"]
  if marker != MARKER:
    raise ForeignCheckpointError(
      f"{directory} has the format {marker!r}, but this version reads {MARKER!r}. "
      "Use the version of rlvr_jax that wrote it, or another --workdir."
    )
  if (step := saved["manifest"]["step"]) != int(directory.name):
    raise ValueError(f"it is the checkpoint of step {step}, in a directory of another step")
  return saved["manifest"]


def with_metric(manifest: dict[str, Any], host: Mapping[str, Any], metric: float) -> bytes:
  """Content of the manifest file of a step whose metric was measured after it was saved."""
  return json.dumps(_with_checksum(manifest | {"host": dict(host), "metric": metric})).encode()


# --- orbax's messages -----------------------------------------------------------------------------


def shorten_error(error: BaseException) -> str:
  """The text of an error, without the long list of settings that tensorstore appends."""
  text = " ".join(f"{type(error).__name__}: {error}".split())
  return text if len(text) <= 200 else f"{text[:200]}…"


@functools.cache
def silence_orbax() -> None:
  """Drops orbax's log records; problems that matter to users are raised as our errors.

  When a read fails, orbax never awaits some other reads, and closes the event loop to which threads
  of tensorstore deliver the rest: Python would print a warning or a traceback for each.
  """
  for name in ("absl", "asyncio"):
    logging.getLogger(name).addFilter(_is_not_from_orbax)
  warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
  default_hook = sys.unraisablehook

  def show_unless_closed(raised: Any) -> None:
    if str(raised.exc_value) != "Event loop is closed":
      default_hook(raised)

  sys.unraisablehook = show_unless_closed


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
  of_orbax = f"{os.sep}orbax{os.sep}"
  if record.name == "asyncio":  # says which task's error nobody has asked for
    return of_orbax not in record.getMessage()
  return of_orbax not in record.pathname
