"""Checkpoints that survive kills, torn files and full disks; and the guard of a workdir.

A checkpoint is one orbax step directory with two items: `arrays` (the state's leaves and the
extra host arrays, by name) and `manifest` (JSON: format marker, name, shape, dtype and checksum of
every leaf, the host's values). Orbax writes into a temporary directory and renames it at the end,
so that a step directory is whole or absent; the checksums tell later damage from good data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import pathlib
import shutil
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from rlvr_jax.files import DiskFullError, is_disk_full, json_crc32, replacing, shortage
from rlvr_jax.train.sharding import to_host
from rlvr_jax.types import Params

MARKER = "rlvr_jax checkpoint 1"
_EARLIER = (
  "That run is of an earlier version, which gave components as name and kwargs; it cannot be"
  " resumed by this one. "
)
# What a run writes after its configuration. Another's warm_start may have been copied there.
_OF_A_RUN = ("checkpoints", "rollouts", "metrics.jsonl", "problems.jsonl")
_REMOVED = "removed"  # folder of the checkpoints that are no longer kept; no name of a step
_SPARE_BYTES = 4 * 2**20  # room for the manifest and orbax's own files
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class CheckpointError(RuntimeError):
  """A checkpoint cannot be written or used."""


class TornCheckpointError(CheckpointError):
  """Files of a checkpoint are missing, cut or changed."""


class ForeignCheckpointError(CheckpointError):
  """The checkpoint is of another program, or of a state of another structure."""


class WorkdirError(RuntimeError):
  """The workdir belongs to another configuration or to a running process."""


class Restored(NamedTuple):
  """What `Checkpointer.restore` returns."""

  step: int
  state: Any  # as saved, with the shardings asked for
  host: dict[str, Any]
  arrays: Any  # the tree given to `save`, tuples as lists; None where none was given


class Checkpointer:
  """Asynchronous, atomic checkpoints of a training run; keeps the last ones and the best."""

  def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2):
    """Opens (or creates) `directory`, and clears what a killed save left behind.

    Args:
      directory: holds one directory per saved step, and nothing else.
      keep: number of latest checkpoints kept, ≥ 1; the one with the highest `metric` is kept too,
        and the one that `save` is told to keep.
    """
    if keep < 1:
      raise ValueError(f"keep = {keep}: at least one checkpoint must be kept; set keep >= 1.")
    _silence_orbax()
    self.directory = pathlib.Path(directory).absolute()
    _remove_leftovers(self.directory)
    self._policy = _Preservation(keep, _read_scores(self.directory))
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self._policy,
        save_root_metadata=False,
        # A kill in the middle of removing would leave half a checkpoint that looks like a step:
        # they are renamed in one go, and removed before the next save.
        todelete_subdir=_REMOVED,
      ),
      item_handlers={
        "arrays": ocp.PyTreeCheckpointHandler(),
        "manifest": ocp.JsonCheckpointHandler(),
      },
    )

  def steps(self) -> list[int]:
    """The saved steps, ascending."""
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    """The last saved step, None without one."""
    return max(self.steps(), default=None)

  def best(self) -> int | None:
    """The kept step with the highest `metric`, None where none was saved with one."""
    return self._policy.best(self.steps())

  def save(
    self,
    step: int,
    state: Any,
    *,
    host: Mapping[str, Any],
    arrays: Any = None,
    metric: float | None = None,
    keep_at_or_before: int | None = None,
  ) -> bool:
    """Starts saving and returns when everything is copied; the files are written behind.

    The caller may donate `state` and change `arrays` as soon as this returns. Blocks while an
    earlier save is still being written; an error of that one is raised here.

    Args:
      step: number of updates done.
      state: pytree of jax arrays, of any sharding.
      host: JSON values (string keys, finite nesting) that restore exactly; data position, counters.
      arrays: nested dicts and lists of NumPy arrays, of a structure that may change from step to
        step (rollouts collected and not yet used); None for nothing.
      metric: what `best` ranks by, higher is better; None where it was not measured.
      keep_at_or_before: the greatest saved step ≤ this one is kept, too, until a save says
        otherwise; to go back to it later.
    Returns:
      False if the step is already saved (and nothing is done), else True.
    Raises:
      DiskFullError: too little space; earlier checkpoints are untouched.
      CheckpointError: the earlier save failed.
    """
    self.wait()
    if step in self._manager.all_steps():
      return False
    leaves = _named_leaves(state)
    skeleton, extra = _take_out_arrays(arrays)
    self._check_space(leaves, extra)
    manifest = {
      "marker": MARKER,
      "step": step,
      "leaves": _describe(leaves, _device_checksums(leaves)),
      "extra": _describe(extra, {name: _host_checksum(value) for name, value in extra.items()}),
      "arrays": skeleton,
      "host": dict(host),
      "metric": metric,
    }
    self._policy.scores[step] = metric
    self._policy.keep_at_or_before = keep_at_or_before
    # Orbax refuses arrays without elements; the manifest says all there is to know of them.
    stored = {name: value for name, value in (leaves | extra).items() if value.size}
    with self._reporting_failures():
      self._manager.save(
        step,
        args=ocp.args.Composite(
          arrays=ocp.args.PyTreeSave(stored), manifest=ocp.args.JsonSave(_sealed(manifest))
        ),
        force=True,
      )
    return True

  def restore(self, abstract_state: Any, *, step: int | None = None) -> Restored | None:
    """A checkpoint, checked leaf by leaf; None where there is none and no step is asked for.

    Args:
      abstract_state: the state's structure: a pytree of `jax.ShapeDtypeStruct` with shardings
        (or of arrays), which need not be the shardings that were saved.
      step: which of `steps()`; None for the latest.
    Raises:
      CheckpointError: the step asked for is not there.
      TornCheckpointError: files are cut, changed or missing.
      ForeignCheckpointError: not a checkpoint of ours, or of another state.
    """
    self.wait()
    steps = self.steps()
    if step is None and not steps:
      return None
    if step is not None and step not in steps:
      raise CheckpointError(f"{self.directory} holds no checkpoint of step {step}; it has {steps}.")
    step = steps[-1] if step is None else step
    directory = self.directory / str(step)
    wanted = _named_leaves(abstract_state)
    try:
      manifest = _read_manifest(directory)
      remedy = "Use the configuration it was made with, or another --workdir."
      _check_same_leaves(directory, wanted, manifest["leaves"], remedy)
      stored = _read_arrays(directory, wanted, manifest["leaves"] | manifest["extra"])
    except ForeignCheckpointError:
      raise
    except Exception as error:
      raise TornCheckpointError(self._torn_message(step, error)) from error
    leaves = [stored[name] for name in wanted]
    state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
    return Restored(step, state, manifest["host"], _put_back_arrays(manifest["arrays"], stored))

  def discard_after(self, step: int) -> None:
    """Removes the checkpoints later than `step`, the last one first."""
    with self._reporting_failures():
      for later in [s for s in reversed(self.steps()) if s > step]:
        self._manager.delete(later)
    _remove_leftovers(self.directory)

  def wait(self) -> None:
    """Blocks until the save under way is committed; raises its error."""
    with self._reporting_failures():
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    _remove_leftovers(self.directory)

  def close(self) -> None:
    """`wait`, then ends the background threads."""
    try:
      self.wait()
    finally:
      with self._reporting_failures():
        self._manager.close()

  def _check_space(self, leaves: dict[str, jax.Array], extra: dict[str, np.ndarray]) -> None:
    need = sum(x.nbytes for x in leaves.values()) + sum(x.nbytes for x in extra.values())
    need += _SPARE_BYTES
    if what := shortage(self.directory, need):
      raise DiskFullError(errno.ENOSPC, self._full_message(what))

  @contextlib.contextmanager
  def _reporting_failures(self) -> Iterator[None]:
    """Turns orbax's errors into ours, which say what to do."""
    try:
      yield
    except Exception as error:
      if is_disk_full(error):
        message = self._full_message("the disk became full while a checkpoint was written")
        raise DiskFullError(errno.ENOSPC, message) from error
      raise CheckpointError(f"saving to {self.directory} failed: {_short(error)}") from error

  def _full_message(self, what: str) -> str:
    whole = _step_directories(self.directory)
    then = f"goes on from step {max(whole)}" if whole else "starts afresh"
    return (
      f"no space for a checkpoint in {self.directory}: {what}. Earlier checkpoints are untouched. "
      f"Free some space or lower the number of checkpoints kept, then rerun: it {then}."
    )

  def _torn_message(self, step: int, error: Exception) -> str:
    earlier = [s for s in self.steps() if s < step]
    then = f"fall back to step {max(earlier)}" if earlier else "start afresh"
    return (
      f"the checkpoint {self.directory / str(step)} is damaged: {_short(error)}. "
      f"Remove that directory and rerun to {then}."
    )


class _Preservation(ocp.checkpoint_managers.PreservationPolicy):
  """Keeps the last `keep` steps, the one with the highest score (the earliest of equals), and the
  last one at or before a given step."""

  def __init__(self, keep: int, scores: dict[int, float | None]):
    self.keep, self.scores = keep, scores
    self.keep_at_or_before: int | None = None  # of the last save; nothing is removed without one

  def best(self, steps: Sequence[int]) -> int | None:
    scores = ((self.scores.get(step), step) for step in steps)
    scored = [(score, -step) for score, step in scores if score is not None and score == score]
    return -max(scored)[1] if scored else None

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    del context
    steps = [info.step for info in checkpoints]
    kept = {*sorted(steps)[-self.keep :], self.best(steps)}
    if self.keep_at_or_before is not None:
      kept.add(max((step for step in steps if step <= self.keep_at_or_before), default=None))
    return [step in kept for step in steps]


def read_params(directory: pathlib.Path, abstract_params: Params) -> Params:
  """The parameters out of a checkpoint of any run; changes nothing there.

  Args:
    directory: of one step, whether it holds a whole `TrainState` or parameters alone.
    abstract_params: their structure, as `Checkpointer.restore` takes a state's.
  Returns:
    The parameters, with the shardings asked for.
  Raises:
    TornCheckpointError: files are cut, changed or missing.
    ForeignCheckpointError: of another program, or parameters of another structure.
  """
  _silence_orbax()
  directory = directory.absolute()
  leaves = _named_leaves(abstract_params)
  try:
    saved = _read_manifest(directory)["leaves"]
    of_state = {name: entry for name, entry in saved.items() if name.startswith("params.")}
    saved = of_state or saved
    prefix = "params." if of_state else ""
    wanted = {prefix + name: leaf for name, leaf in leaves.items()}
    remedy = "Name a checkpoint of a policy of this run's shape, or give this run that shape."
    _check_same_leaves(directory, wanted, saved, remedy)
    stored = _read_arrays(directory, wanted, saved)
  except ForeignCheckpointError:
    raise
  except Exception as error:
    message = f"the checkpoint {directory} is damaged: {_short(error)}. Name another step or run."
    raise TornCheckpointError(message) from error
  return jax.tree.unflatten(jax.tree.structure(abstract_params), [stored[n] for n in wanted])


# --- leaves ---------------------------------------------------------------------------------------


def _named_leaves(tree: Any) -> dict[str, Any]:
  """Leaves by path, in flattening order."""
  named = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    if name in named or not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
      raise TypeError(
        f"state leaf {name!r} is {'a duplicate' if name in named else type(leaf).__name__}; "
        "every leaf must be a jax array with a path of its own (host values go into `host`)."
      )
    named[name] = leaf
  return named


def _sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
  return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _describe(leaves: Mapping[str, Any], sums: Mapping[str, int]) -> dict[str, dict[str, Any]]:
  return {
    name: {"shape": list(x.shape), "dtype": jnp.dtype(x.dtype).name, "checksum": sums[name]}
    for name, x in leaves.items()
  }


def _check_same_leaves(
  directory: pathlib.Path,
  wanted: Mapping[str, Any],
  saved: Mapping[str, dict[str, Any]],
  remedy: str,
) -> None:
  """Raises ForeignCheckpointError naming the first leaf that differs."""
  now = {n: f"{jnp.dtype(x.dtype).name}{list(x.shape)}" for n, x in wanted.items()}
  then = {n: f"{e['dtype']}{e['shape']}" for n, e in saved.items()}
  for name in [*now, *then]:
    if now.get(name) != then.get(name):
      raise ForeignCheckpointError(
        f"the checkpoint {directory} is of another state: leaf {name!r} is "
        f"{then.get(name, 'absent')} in it and {now.get(name, 'absent')} in this run. {remedy}"
      )


def _read_arrays(
  directory: pathlib.Path, wanted: Mapping[str, Any], entries: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
  """The arrays of `entries` in a step directory, those wanted as jax arrays, the rest as NumPy's.

  Raises an error of any kind if files are missing or cut, or values not those that were saved.
  """
  target, how = {}, {}
  for name, entry in entries.items():
    if 0 in entry["shape"]:
      continue
    target[name] = jax.ShapeDtypeStruct(entry["shape"], jnp.dtype(entry["dtype"]))
    if name in wanted:
      how[name] = ocp.ArrayRestoreArgs(sharding=_sharding(wanted[name]))
    else:
      how[name] = ocp.RestoreArgs(restore_type=np.ndarray)
  args = ocp.args.PyTreeRestore(item=target, restore_args=how, partial_restore=True)
  with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
    stored = dict(handler.restore(directory / "arrays", args=args))
  for name, entry in entries.items():
    if name not in stored:
      empty = np.zeros(entry["shape"], jnp.dtype(entry["dtype"]))
      stored[name] = jax.device_put(empty, _sharding(wanted[name])) if name in wanted else empty
  device = {name: stored[name] for name in wanted}
  host = {name: _host_checksum(stored[name]) for name in entries if name not in wanted}
  _check_sums(_device_checksums(device) | host, entries)
  return stored


@jax.jit
def _checksums(leaves: list[jax.Array]) -> list[jax.Array]:
  """Σ bits·(2·index + 1) mod 2³² of each leaf, index = row-major position; u32[] each.

  Integer arithmetic: exact in any order, so independent of the sharding. The odd weight makes any
  change of one element visible and tells an order of elements from another.
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
  """`_checksums` of all leaves, u32[leaves]: tells parameters apart, whatever their sharding."""
  return jnp.stack(_checksums(jax.tree.leaves(params)))


def _device_checksums(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
  sums = to_host(_checksums(list(leaves.values())))
  return {name: int(s) for name, s in zip(leaves, sums, strict=True)}


def _host_checksum(array: np.ndarray) -> int:
  return zlib.crc32(array.tobytes())


def _check_sums(found: Mapping[str, int], entries: Mapping[str, dict[str, Any]]) -> None:
  for name, entry in entries.items():
    if found[name] != entry["checksum"]:
      raise ValueError(f"leaf {name!r} has checksum {found[name]}, saved with {entry['checksum']}")


def _take_out_arrays(tree: Any) -> tuple[Any, dict[str, np.ndarray]]:
  """A JSON skeleton of `tree` with {"array": name} in place of arrays, and the arrays by name."""
  found: dict[str, np.ndarray] = {}

  def visit(node: Any) -> Any:
    match node:
      case None:
        return None
      case dict() if all(isinstance(key, str) for key in node):
        return {"dict": {key: visit(child) for key, child in node.items()}}
      case list() | tuple():
        return {"list": [visit(child) for child in node]}
      case np.ndarray() | np.generic() if np.asarray(node).dtype.kind not in "OSUMm":
        name = f"extra-{len(found)}"
        found[name] = np.asarray(node)
        return {"array": name}
    raise TypeError(
      f"`arrays` holds {type(node).__name__}; it takes dicts with string keys, lists and numeric "
      "NumPy arrays (jax.device_get and dataclasses.asdict give those), text goes into `host`."
    )

  return visit(tree), found


def _put_back_arrays(skeleton: Any, arrays: Mapping[str, np.ndarray]) -> Any:
  match skeleton:
    case None:
      return None
    case {"array": name}:
      return arrays[name]
    case {"dict": children}:
      return {key: _put_back_arrays(child, arrays) for key, child in children.items()}
    case {"list": children}:
      return [_put_back_arrays(child, arrays) for child in children]
  raise ValueError(f"unknown node {skeleton!r} in the manifest")


# --- manifest -------------------------------------------------------------------------------------


def _sealed(manifest: dict[str, Any]) -> dict[str, Any]:
  return {"crc32": json_crc32(manifest), "manifest": json.loads(json.dumps(manifest))}


def _read_manifest(directory: pathlib.Path) -> dict[str, Any]:
  """The manifest of a step directory, its own checksum verified."""
  if not (directory / "manifest").exists():
    raise ForeignCheckpointError(
      f"{directory} is no checkpoint of rlvr_jax (it has no manifest). Use another --workdir, or "
      "remove that directory if it is not needed."
    )
  sealed = ocp.JsonCheckpointHandler().restore(directory / "manifest", ocp.args.JsonRestore())
  if _sealed(sealed["manifest"])["crc32"] != sealed["crc32"]:
    raise ValueError("the manifest does not match its checksum")
  marker = sealed["manifest"]["marker"]
  if marker != MARKER:
    raise ForeignCheckpointError(
      f"{directory} has the format {marker!r}, this version reads {MARKER!r}. "
      "Use the version of rlvr_jax that wrote it, or another --workdir."
    )
  return sealed["manifest"]


def _step_directories(directory: pathlib.Path) -> list[int]:
  return [int(p.name) for p in directory.glob("*") if p.name.isdigit()]


def _remove_leftovers(directory: pathlib.Path) -> None:
  """Removes checkpoints no longer kept, and what killed saves left; while nothing is being saved.

  Orbax's own option for the latter does it in the background, unwaited for.
  """
  if jax.process_index() == 0:
    for path in [directory / _REMOVED, *directory.glob("*.orbax-checkpoint-tmp*")]:
      with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _read_scores(directory: pathlib.Path) -> dict[int, float | None]:
  """The metric of each saved step; None for a step that cannot be read (restore will say why)."""
  scores: dict[int, float | None] = {}
  for step in _step_directories(directory):
    with contextlib.suppress(Exception):
      scores[step] = _read_manifest(directory / str(step))["metric"]
  return scores


def _short(error: BaseException) -> str:
  """The error without the pages of settings that tensorstore adds; they stay in the cause."""
  text = " ".join(f"{type(error).__name__}: {error}".split())
  return text if len(text) <= 200 else f"{text[:200]}…"


def _silence_orbax() -> None:
  """Drops orbax's log records: what a user must know is raised as an error of ours."""
  logger = logging.getLogger("absl")
  if not any(isinstance(f, _NoOrbax) for f in logger.filters):
    logger.addFilter(_NoOrbax())


class _NoOrbax(logging.Filter):
  def filter(self, record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


# --- the workdir ----------------------------------------------------------------------------------


class WorkdirLock:
  """Holds a workdir for one process, as a context manager; the kernel frees it when we die.

  Create the lock in one process per run (on several hosts: the first) and keep it until the end.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    """Raises WorkdirError if another process holds it."""
    path = pathlib.Path(workdir) / ".lock"
    if path.parent.exists() and not path.parent.is_dir():
      raise WorkdirError(f"--workdir={path.parent} is a file; choose a folder.")
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = open(path, "a+")
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._file.seek(0)
      holder = self._file.read().strip() or "unknown"
      self._file.close()
      raise WorkdirError(
        f"{path.parent} is in use by process {holder}. Wait for it, stop it, or use another "
        "--workdir."
      ) from None
    self._file.truncate(0)
    self._file.write(f"{os.getpid()}\n")
    self._file.flush()

  def close(self) -> None:
    """Frees the workdir."""
    self._file.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def check_config(
  workdir: str | os.PathLike[str], config_json: str, *, may_differ: Collection[str] = ()
) -> None:
  """Writes `workdir`/config.json on the first run; later runs must have the same configuration.

  Args:
    workdir: created if needed.
    config_json: the whole configuration, a JSON object.
    may_differ: dotted names of fields (or of groups of fields) that a resumed run may change.
  Raises:
    WorkdirError: fields differ; the message lists each with both values. Or a run has written there
      whose configuration is gone.
  """
  path = pathlib.Path(workdir) / "config.json"
  new = json.loads(config_json)
  if not path.exists():
    if left := [name for name in _OF_A_RUN if (path.parent / name).exists()]:
      raise WorkdirError(
        f"{path} is gone, but {path.parent} has {', '.join(left)} of a run, whose configuration is"
        " not known without it. Put it back, or use another --workdir."
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
      file.write((json.dumps(new, indent=2, sort_keys=True) + "\n").encode())
    return
  try:
    old = json.loads(path.read_text())
  except ValueError as error:
    raise WorkdirError(f"{path} is not JSON ({error}). Use another --workdir.") from error
  then, now = dict(_flatten(old)), dict(_flatten(new))
  lines = [
    f"  {name}: {then.get(name, 'absent')} in the workdir, {now.get(name, 'absent')} now"
    for name in sorted(then.keys() | now.keys())
    if then.get(name) != now.get(name)
    and not any(name == field or name.startswith(f"{field}.") for field in may_differ)
  ]
  # Groups of fields that have become one string.
  earlier = any(isinstance(old.get(name), dict) for name, v in new.items() if isinstance(v, str))
  if lines:
    raise WorkdirError(
      f"{path.parent} belongs to a run of another configuration:\n" + "\n".join(lines) + "\n"
      f"{_EARLIER if earlier else ''}Use another --workdir, or the configuration of the run that is"
      " there."
    )


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
  """Dotted name and JSON text of every field; an empty group counts as a field."""
  if isinstance(node, dict) and node:
    for key, child in node.items():
      yield from _flatten(child, f"{prefix}.{key}" if prefix else key)
  else:
    yield prefix, json.dumps(node)
